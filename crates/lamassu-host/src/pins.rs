//! Whose signature a vault's header must carry: what this user has pinned, by a key that was given, in a zone file that
//! was given, or in `known-vaults`.
//!
//! `known-vaults` has a line for each vault: its id and the administrator's public key, in hex, and anything behind
//! them for people. Where a vault has several lines, one of them has to fit. A file that cannot be read or understood
//! fails: a pin that is not looked at pins nothing.
//!
//! A line follows where the administrator's key is exchanged for another that it has signed. A zone file is believed as
//! it lies there, like known-vaults: reading its pins takes no key, and its key verifies them.

use crate::{Error, Result, hex};
use data_encoding::HEXLOWER_PERMISSIVE;
use lamassu_format::header::{Header, ZoneFile};
use lamassu_keys::admin::{self, Public};
use lamassu_keys::header_file;
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A pin that counts before known-vaults.
#[derive(Clone, Debug)]
pub enum Given {
    /// For every vault.
    Key(Public),
    /// For the vaults that this zone file pins; there must be a pin.
    Zone(PathBuf),
}

/// What is pinned: see the module's head.
#[derive(Clone, Debug, Default)]
pub struct Pins {
    given: Option<Given>,
    known: Option<PathBuf>,
}

/// The pinned key of a vault's administrator has signed another, which signs the vault's header now.
#[derive(Debug)]
#[must_use = "the user has to be told"]
pub struct Succession {
    /// the vault's id
    pub vault: [u8; 16],
    /// the key that is pinned
    pub old: Public,
    /// the key that signs now
    pub new: Public,
    /// what became of the pin
    pub pin: Pin,
}

/// A pin whose key has a successor.
#[derive(Debug)]
pub enum Pin {
    /// Names the new key from now on, in this file.
    Follows(PathBuf),
    /// Stays in this file, which could not be written.
    Stays(PathBuf, Error),
    /// Was given, and is to be given anew.
    Given(Given),
}

/// An administrator's public key in hex.
///
/// # Errors
/// What is wrong with it.
pub fn parse_key(hex: &str) -> Result<Public, &'static str> {
    bytes(hex).ok_or("an administrator's key is 64 hex digits")
}

impl Pins {
    /// `given`: what counts before the file `known`.
    pub fn new(given: Option<Given>, known: Option<PathBuf>) -> Pins {
        Pins { given, known }
    }

    /// The keys that may have signed the header of a vault; none: nothing is pinned.
    ///
    /// # Errors
    /// [`Error::Pins`], [`Error::NoZonePin`], [`Error::Local`], [`Error::File`].
    pub fn of(&self, id: &[u8; 16]) -> Result<Vec<Public>> {
        match &self.given {
            Some(Given::Key(key)) => Ok(vec![*key]),
            Some(Given::Zone(file)) => of_zone(file, id).map(|key| vec![key]),
            None => self.known(id),
        }
    }

    /// The same of a dataset, which has an administrator of its own: what was given speaks of the vault it lies in.
    ///
    /// # Errors
    /// As [`Pins::of`].
    pub fn known(&self, id: &[u8; 16]) -> Result<Vec<Public>> {
        match &self.known {
            None => Ok(Vec::new()),
            Some(path) => match std::fs::read_to_string(path) {
                Ok(lines) => listed(path, &lines, id),
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
                Err(source) => Err(Error::Local { op: "read", path: path.clone(), source }),
            },
        }
    }

    /// Refuses a vault's header that another than the pinned administrator has signed; a pin follows a key that the
    /// pinned one has signed. Zones have no administrator.
    ///
    /// # Errors
    /// As [`Pins::of`]; [`lamassu_keys::KeyError::OtherAdministrator`].
    pub fn check<H: Header>(&self, header: &H) -> Result<Option<Succession>> {
        if !H::IS_VAULT {
            return Ok(None);
        }
        let id = header.keys().id;
        let followed = admin::check_pinned(header, &self.of(&id)?)?;
        let keys = followed.zip(header.keys().admin.as_ref());
        Ok(keys.and_then(|(old, admin)| self.follow(&id, old, admin.public)))
    }

    fn follow(&self, id: &[u8; 16], old: Public, new: Public) -> Option<Succession> {
        let pin = match (&self.given, &self.known) {
            (Some(given), _) => Pin::Given(given.clone()),
            // Nothing is pinned, so nothing follows.
            (None, None) => return None,
            (None, Some(path)) => match replace(path, id, &old, &new) {
                Ok(()) => Pin::Follows(path.clone()),
                Err(error) => Pin::Stays(path.clone(), error),
            },
        };
        Some(Succession { vault: *id, old, new, pin })
    }

    /// Adds a line to known-vaults, unless there is one already; where, or `None` where this user has no place for it.
    /// `comment` is one line.
    ///
    /// # Errors
    /// [`Error::Pins`], [`Error::Local`].
    pub fn add(&self, id: &[u8; 16], key: &Public, comment: &str) -> Result<Option<&Path>> {
        let Some(path) = &self.known else { return Ok(None) };
        let lines = match std::fs::read_to_string(path) {
            Ok(lines) => lines,
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(source) => return Err(Error::Local { op: "read", path: path.clone(), source }),
        };
        if listed(path, &lines, id)?.contains(key) {
            return Ok(Some(path));
        }
        // One write, at the end: two programs that add at once both get in.
        let start = if lines.is_empty() || lines.ends_with('\n') { "" } else { "\n" };
        let line = format!("{start}{} {} {comment}\n", hex(id), hex(key));
        let written = || {
            let dir = path.parent().unwrap_or(Path::new("."));
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            let mut file = File::options().append(true).create(true).mode(0o600).open(path)?;
            file.write_all(line.as_bytes())?;
            file.sync_all()
        };
        match written() {
            Ok(()) => Ok(Some(path)),
            Err(source) => Err(Error::Local { op: "write", path: path.clone(), source }),
        }
    }
}

fn of_zone(file: &Path, id: &[u8; 16]) -> Result<Public> {
    let zone: ZoneFile = header_file::read(file)?;
    let pin = zone.pins().iter().find(|pin| pin.vault == *id);
    pin.map(|pin| pin.admin).ok_or_else(|| Error::NoZonePin { file: file.into(), vault: *id })
}

/// Writes the file anew, whole or not at all, with `new` in the place of `old`.
fn replace(path: &Path, id: &[u8; 16], old: &Public, new: &Public) -> Result<()> {
    let failed = |op| move |source| Error::Local { op, path: path.to_path_buf(), source };
    let lines = std::fs::read_to_string(path).map_err(failed("read"))?;
    let mut kept = String::with_capacity(lines.len());
    for line in lines.lines() {
        let mut words = line.split_whitespace();
        let names_old =
            words.next().and_then(bytes::<16>) == Some(*id) && words.next().and_then(bytes::<32>) == Some(*old);
        match names_old {
            true => {
                kept += &format!("{} {}", hex(id), hex(new));
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
        std::fs::rename(&new, path)
    };
    written().map_err(|source| {
        let _ = std::fs::remove_file(&new);
        failed("write")(source)
    })
}

fn listed(path: &Path, lines: &str, id: &[u8; 16]) -> Result<Vec<Public>> {
    let mut keys = Vec::new();
    for (i, line) in lines.lines().enumerate() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next().filter(|word| !word.starts_with('#')) else { continue };
        let parsed = bytes::<16>(first).zip(words.next().and_then(bytes::<32>));
        let (of, key) = parsed.ok_or_else(|| Error::Pins { path: path.into(), line: i + 1 })?;
        if of == *id {
            keys.push(key);
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
        let of = |lines: &str| listed(Path::new("x"), lines, &[10; 16]);
        assert_eq!(of(&format!("# comment\n\n{id} {key} the office\n")).unwrap(), [[11; 32]]);
        assert_eq!(of(&format!("{} {key}", "0c".repeat(16))).unwrap(), Vec::<Public>::new());
        assert_eq!(of(&format!("{id} {key}\n{id} {}", "0d".repeat(32))).unwrap(), [[11; 32], [13; 32]]);
        for bad in [format!("{id} {key}\n{id}"), format!("{id} 0b"), "no hex at all".into(), format!("{key} {id}")] {
            assert!(of(&bad).is_err(), "{bad}");
        }
    }
}
