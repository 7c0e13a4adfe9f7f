//! Pins: the keys that must have signed a vault's header. This user has pinned them by a given key, by a given zone
//! file, or in `known-vaults`.
//!
//! `known-vaults` has a line for each vault: its id and the administrator's public key, both in hex, then free text. If
//! a vault has several lines, one of them must match. A file that cannot be read or parsed is an error: ignoring it
//! would disable the pins. So is one of more than 1 MiB, and what is no file.
//!
//! Programs that change the file do so one after the other, under a lock on a file beside it. Readers take no lock: the
//! file is replaced, or gets a line by one write.
//!
//! A pin is updated when the administrator's key is replaced by one that it has signed. A zone file is trusted as it
//! is, like known-vaults: no key is needed to read its pins.

use crate::places::sync_dir_of;
use crate::{Error, Result, hex};
use data_encoding::HEXLOWER_PERMISSIVE;
use lamassu_format::header::{Header, PublicKey, VaultId, ZoneFile};
use lamassu_keys::admin;
use lamassu_keys::header_file;
use lamassu_keys::header_file::regular::{self, Links};
use rustix::fs::OFlags;
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The file whose lock those hold who change known-vaults; it lies beside it.
const LOCK: &str = "known-vaults.lock";

/// How long to wait for another program that changes known-vaults, and how often to look.
const CHANGING: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(5);

/// The most bytes of known-vaults.
const KNOWN_MAX: u64 = 1 << 20;

/// What is written to is not reached through a link, nor waited for: the directory may be another user's, as where root
/// has the HOME of someone else.
const NO_LINK: i32 = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).bits() as i32;

/// A pin that takes precedence over known-vaults.
#[derive(Clone, Debug)]
pub enum Given {
    /// For every vault.
    Key(PublicKey),
    /// For the vaults that this zone file pins; a vault without a pin is an error.
    Zone(PathBuf),
}

/// What is pinned: see the module's head.
#[derive(Clone, Debug, Default)]
pub struct Pins {
    given: Option<Given>,
    known: Option<PathBuf>,
}

/// The pinned key of a vault's administrator has signed another key, which now signs the vault's header.
#[derive(Debug)]
#[must_use = "the user has to be told"]
pub struct Succession {
    /// the vault's id
    pub vault: VaultId,
    /// the key that is pinned
    pub old: PublicKey,
    /// the key that signs now
    pub new: PublicKey,
    /// what happened to the pin
    pub pin: Pin,
}

/// A pin whose key has a successor.
#[derive(Debug)]
pub enum Pin {
    /// This file now has the new key.
    Follows(PathBuf),
    /// This file still has the old key: it could not be written.
    Stays(PathBuf, Error),
    /// The pin was given on the command line, and must be given with the new key from now on.
    Given(Given),
}

/// An administrator's public key in hex.
///
/// # Errors
/// The reason that it is invalid.
pub fn parse_key(hex: &str) -> Result<PublicKey, &'static str> {
    bytes(hex).map(PublicKey).ok_or("an administrator's key is 64 hex digits")
}

impl Pins {
    /// `given`: a pin that takes precedence over the file `known`.
    pub fn new(given: Option<Given>, known: Option<PathBuf>) -> Pins {
        Pins { given, known }
    }

    /// What counts before `known-vaults`.
    pub fn given(&self) -> Option<&Given> {
        self.given.as_ref()
    }

    /// The keys that may have signed the header of a vault; empty: nothing is pinned.
    ///
    /// # Errors
    /// [`Error::Pins`], [`Error::NoZonePin`], [`Error::Local`], [`Error::File`].
    pub fn of(&self, id: &VaultId) -> Result<Vec<PublicKey>> {
        match &self.given {
            Some(Given::Key(key)) => Ok(vec![*key]),
            Some(Given::Zone(file)) => of_zone(file, id).map(|key| vec![key]),
            None => self.known(id),
        }
    }

    /// The same for a dataset, which has an administrator of its own: a given pin is about the vault that contains it.
    ///
    /// # Errors
    /// As [`Pins::of`].
    pub fn known(&self, id: &VaultId) -> Result<Vec<PublicKey>> {
        match &self.known {
            None => Ok(Vec::new()),
            Some(path) => listed(path, &lines_of(path)?, id),
        }
    }

    /// Refuses a vault's header unless the pinned administrator has signed it. A pin is updated to a new key that the
    /// pinned one has signed. Zones have no administrator.
    ///
    /// # Errors
    /// As [`Pins::of`]; [`lamassu_keys::KeyError::OtherAdministrator`].
    pub fn check<H: Header>(&self, header: &H) -> Result<Option<Succession>> {
        if !H::IS_VAULT {
            return Ok(None);
        }
        let id = header.keys().id;
        let followed = admin::check_pinned(header, &self.of(&VaultId(id))?)?;
        let keys = followed.zip(header.keys().admin.as_ref());
        Ok(keys.and_then(|(old, admin)| self.follow(&VaultId(id), old, admin.public)))
    }

    fn follow(&self, id: &VaultId, old: PublicKey, new: PublicKey) -> Option<Succession> {
        let pin = match (&self.given, &self.known) {
            (Some(given), _) => Pin::Given(given.clone()),
            // Nothing is pinned, so there is no pin to update.
            (None, None) => return None,
            (None, Some(path)) => match alone(path, CHANGING, || replace(path, id, &old, &new)) {
                Ok(()) => Pin::Follows(path.clone()),
                Err(error) => Pin::Stays(path.clone(), error),
            },
        };
        Some(Succession { vault: *id, old, new, pin })
    }

    /// Adds a line to known-vaults, unless there is one already. Returns the file; `None`: this user has no such file.
    /// `comment` is one line.
    ///
    /// # Errors
    /// [`Error::Pins`], [`Error::Local`].
    pub fn add(&self, id: &VaultId, key: &PublicKey, comment: &str) -> Result<Option<&Path>> {
        let Some(path) = &self.known else { return Ok(None) };
        if !self.known(id)?.contains(key) {
            alone(path, CHANGING, || append(path, id, key, comment))?;
        }
        Ok(Some(path))
    }
}

/// The lines of the file; none if it is not there.
fn lines_of(path: &Path) -> Result<String> {
    match read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        lines => lines.map_err(|source| Error::Local { op: "read", path: path.into(), source }),
    }
}

/// The file may be another user's, as the directory: neither a fifo nor one that does not end is waited for. A link is
/// the user's, and followed.
fn read(path: &Path) -> io::Result<String> {
    let file = regular::find(path, Links::Followed, File::options().read(true))?;
    let file = file.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))?;
    let mut bytes = Vec::new();
    file.take(KNOWN_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > KNOWN_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Runs `change` while no other program changes the file. Waits for those, but not longer than `patience`: anyone who
/// may open the file can lock it.
fn alone(path: &Path, patience: Duration, change: impl FnOnce() -> Result<()>) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let until = Instant::now() + patience;
    let locked = || {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let mut options = File::options();
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(NO_LINK);
        let file = options.open(dir.join(LOCK))?;
        loop {
            match file.try_lock() {
                Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(POLL),
                locked => return locked.map(|()| file).map_err(io::Error::from),
            }
        }
    };
    let _one = locked().map_err(|source| Error::Local { op: "lock", path: dir.join(LOCK), source })?;
    change()
}

/// Adds a line, unless there is one by now.
fn append(path: &Path, id: &VaultId, key: &PublicKey, comment: &str) -> Result<()> {
    let lines = lines_of(path)?;
    if listed(path, &lines, id)?.contains(key) {
        return Ok(());
    }
    let start = if lines.is_empty() || lines.ends_with('\n') { "" } else { "\n" };
    let line = format!("{start}{id} {} {comment}\n", hex(&key.0));
    let written = || {
        let mut file = File::options().append(true).create(true).mode(0o600).custom_flags(NO_LINK).open(path)?;
        file.write_all(line.as_bytes())?;
        file.sync_all()?;
        sync_dir_of(path)
    };
    written().map_err(|source| Error::Local { op: "write", path: path.into(), source })
}

fn of_zone(file: &Path, id: &VaultId) -> Result<PublicKey> {
    let zone: ZoneFile = header_file::read(file)?;
    let pin = zone.pins().iter().find(|pin| pin.vault == *id);
    pin.map(|pin| pin.admin).ok_or_else(|| Error::NoZonePin { file: file.into(), vault: *id })
}

/// Replaces the file atomically, with `new` in place of `old`. The caller is alone.
fn replace(path: &Path, id: &VaultId, old: &PublicKey, new: &PublicKey) -> Result<()> {
    let failed = |op| move |source| Error::Local { op, path: path.to_path_buf(), source };
    let lines = read(path).map_err(failed("read"))?;
    let mut kept = String::with_capacity(lines.len());
    for line in lines.lines() {
        let mut words = line.split_whitespace();
        let names_old =
            words.next().and_then(bytes::<16>) == Some(id.0) && words.next().and_then(bytes::<32>) == Some(old.0);
        match names_old {
            true => {
                kept += &format!("{id} {}", hex(&new.0));
                words.for_each(|word| kept += &format!(" {word}"));
            }
            false => kept += line,
        }
        kept.push('\n');
    }
    let new = path.with_file_name(format!("known-vaults.{}", std::process::id()));
    let written = || {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(kept.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, path)?;
        sync_dir_of(path)
    };
    written().map_err(|source| {
        let _ = std::fs::remove_file(&new);
        failed("write")(source)
    })
}

fn listed(path: &Path, lines: &str, id: &VaultId) -> Result<Vec<PublicKey>> {
    let mut keys = Vec::new();
    for (i, line) in lines.lines().enumerate() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next().filter(|word| !word.starts_with('#')) else { continue };
        let parsed = bytes::<16>(first).zip(words.next().and_then(bytes::<32>));
        let (of, key) = parsed.ok_or_else(|| Error::Pins { path: path.into(), line: i + 1 })?;
        if VaultId(of) == *id {
            keys.push(PublicKey(key));
        }
    }
    Ok(keys)
}

fn bytes<const N: usize>(hex: &str) -> Option<[u8; N]> {
    HEXLOWER_PERMISSIVE.decode(hex.as_bytes()).ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_a_vault_and_a_key() {
        let (id, key) = ("0a".repeat(16), "0B".repeat(32));
        let of = |lines: &str| listed(Path::new("x"), lines, &VaultId([10; 16]));
        assert_eq!(of(&format!("# comment\n\n{id} {key} the office\n")).unwrap(), [PublicKey([11; 32])]);
        assert_eq!(of(&format!("{} {key}", "0c".repeat(16))).unwrap(), Vec::<PublicKey>::new());
        assert_eq!(
            of(&format!("{id} {key}\n{id} {}", "0d".repeat(32))).unwrap(),
            [PublicKey([11; 32]), PublicKey([13; 32])]
        );
        for bad in [format!("{id} {key}\n{id}"), format!("{id} 0b"), "no hex at all".into(), format!("{key} {id}")] {
            assert!(of(&bad).is_err(), "{bad}");
        }
    }

    /// Root may have the HOME of another user, who makes links there.
    #[test]
    fn no_pin_is_written_through_a_link() {
        for linked in ["known-vaults", LOCK] {
            let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let file = outside.path().join("file");
            std::os::unix::fs::symlink(&file, dir.path().join(linked)).unwrap();
            let pins = Pins::new(None, Some(dir.path().join("known-vaults")));
            let refused = pins.add(&VaultId([1; 16]), &PublicKey([2; 32]), "").unwrap_err();
            assert!(matches!(refused, Error::Local { .. }), "{refused}");
            assert!(!file.exists(), "{linked}");
        }
    }

    /// A user whose HOME root has makes fifos there, files without end, and locks that are never given back.
    #[test]
    fn nothing_that_another_user_makes_is_waited_for() {
        let (tell, told) = std::sync::mpsc::channel();
        // On a thread of its own, so that what waits is a failure.
        std::thread::spawn(move || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("known-vaults");
            let pins = Pins::new(None, Some(path.clone()));
            let (vault, key) = (VaultId([1; 16]), PublicKey([2; 32]));
            let mkfifo =
                |at: &Path| rustix::fs::mkfifoat(rustix::fs::CWD, at, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
            let endless = |at: &Path| std::os::unix::fs::symlink("/dev/zero", at).unwrap();
            let large = |at: &Path| File::create(at).unwrap().set_len(KNOWN_MAX + 1).unwrap();
            for plant in [&mkfifo as &dyn Fn(&Path), &endless, &large] {
                plant(&path);
                for refused in [
                    pins.known(&vault).map(drop),
                    pins.add(&vault, &key, "").map(drop),
                    append(&path, &vault, &key, ""),
                    replace(&path, &vault, &key, &key),
                ] {
                    assert!(matches!(refused, Err(Error::Local { op: "read", .. })), "{refused:?}");
                }
                std::fs::remove_file(&path).unwrap();
            }
            let held = File::create(dir.path().join(LOCK)).unwrap();
            held.lock().unwrap();
            let refused = alone(&path, Duration::ZERO, || panic!("another one has the lock")).unwrap_err();
            assert!(refused.to_string().contains(LOCK), "{refused}");
            drop(held);
            alone(&path, Duration::ZERO, || append(&path, &vault, &key, "")).unwrap();
            assert_eq!(pins.known(&vault).unwrap(), [key]);
            let notes = crate::notes::Notes::within(Some(dir.path().into()));
            notes.opened(&[7; 16], 3);
            let file = dir.path().join(format!("used-{}.json", hex(&[7; 16])));
            std::fs::remove_file(&file).unwrap();
            mkfifo(&file);
            assert_eq!(notes.of(&[7; 16]).last, None);
            tell.send(()).unwrap();
        });
        told.recv_timeout(Duration::from_secs(60)).expect("it waits, or it failed");
    }

    /// Programs that add pins, and programs that follow successions, all at once.
    #[test]
    fn no_pin_is_lost_and_no_old_key_comes_back() {
        const VAULTS: u8 = 16;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new").join("known-vaults");
        let pins = Pins::new(None, Some(path.clone()));
        let (old, new) = (|n: u8| PublicKey([n; 32]), |n: u8| PublicKey([n + VAULTS; 32]));
        (0..VAULTS).for_each(|n| _ = pins.add(&VaultId([n; 16]), &old(n), "followed").unwrap());
        std::thread::scope(|scope| {
            for n in 0..VAULTS {
                let pins = &pins;
                scope.spawn(move || {
                    let followed = pins.follow(&VaultId([n; 16]), old(n), new(n)).unwrap();
                    assert!(matches!(followed.pin, Pin::Follows(_)), "{:?}", followed.pin);
                });
                scope.spawn(move || pins.add(&VaultId([n + VAULTS; 16]), &old(n), "added").unwrap());
            }
        });
        for n in 0..VAULTS {
            assert_eq!(pins.known(&VaultId([n; 16])).unwrap(), [new(n)], "{n}");
            assert_eq!(pins.known(&VaultId([n + VAULTS; 16])).unwrap(), [old(n)], "{n}");
        }
        let mut files: Vec<_> =
            std::fs::read_dir(dir.path().join("new")).unwrap().map(|f| f.unwrap().file_name()).collect();
        files.sort_unstable();
        assert_eq!(files, ["known-vaults", LOCK]);
    }
}
