//! Reading and replacing the files headers live in: the vault header and zone files.
//!
//! A file is replaced whole (§4): written to `PATH.new`, synced, renamed over, directory synced. `PATH.new` is also the
//! lock of those who change the header: it is held by flock(2) from before the header is read until it is replaced, so
//! no change is lost; the kernel drops the lock of a program that dies.
//!
//! No header of a vault is put in place without its [`Witness`]: where something outside the store remembers which one
//! is the newest, it knows durably of the change before the store does, and a change that was made to an older header
//! is refused.
//!
//! What is replaced is overwritten where it lies ([`erase`]): a removed slot, or a destroyed key, must not be left in
//! blocks that the file system has merely forgotten.
//!
//! A vault's header lies in the store, which is not trusted: a symbolic link in its place is not followed, and a hard
//! link in the place of `PATH.new` is not written through. A zone file is the user's, and may be a link.

pub mod erase;
mod error;
mod steps;

pub use error::FileError;

use crate::witness::{self, Basis, Replacement, Replacing, Witness};
use error::{reading, writing};
use lamassu_format::header::{HEADER_MAX, Header, HistoryMark};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use steps::Steps;

/// Permissions of a new header: it holds no key in the clear, yet lets its readers guess at passphrases.
const MODE_NEW: u32 = 0o600;

/// Where the descriptors of this process are, by number.
const DESCRIPTORS: &str = "/proc/self/fd";

/// A path as a person knows it. One that leads through a directory that this process holds open is named by where that
/// directory is: the number of a descriptor says nothing, and may be another file's by the time it is used.
pub(crate) fn shown(path: &Path) -> PathBuf {
    let Ok(rest) = path.strip_prefix(DESCRIPTORS) else { return path.into() };
    let mut rest = rest.iter();
    let Some(number) = rest.next() else { return path.into() };
    match std::fs::read_link(Path::new(DESCRIPTORS).join(number)) {
        // A pipe or a socket has no place.
        Ok(place) if place.is_absolute() => rest.fold(place, |place, name| place.join(name)),
        Ok(_) | Err(_) => path.into(),
    }
}

/// Reads and parses a vault header or a zone file. Not authenticated.
///
/// # Errors
/// [`FileError`].
pub fn read<H: Header>(path: &Path) -> Result<H, FileError> {
    let bytes = read_bytes(path)?;
    H::parse(&bytes).map_err(|source| FileError::Header { path: shown(path), source })
}

/// The bytes of a header file, at most one more than a header may have; not parsed.
///
/// # Errors
/// [`FileError`].
pub fn read_bytes(path: &Path) -> Result<Vec<u8>, FileError> {
    const ATTEMPTS_MAX: usize = 16;
    for _ in 0..ATTEMPTS_MAX {
        let (file, bytes) = read_once(path)?;
        // What was replaced meanwhile is overwritten, so what was read of it may be noise.
        if is_same(&file, path).map_err(reading("stat", path))? {
            return Ok(bytes);
        }
    }
    Err(FileError::Busy { path: shown(path) })
}

fn read_once(path: &Path) -> Result<(File, Vec<u8>), FileError> {
    // Without NONBLOCK a fifo put there by the store would hang the open.
    let mut flags = OFlags::NONBLOCK;
    flags.set(OFlags::NOFOLLOW, lies_in_the_store(path));
    let file = match OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path) {
        Ok(file) => file,
        Err(e) if e.raw_os_error() == Some(Errno::LOOP.raw_os_error()) && lies_in_the_store(path) => {
            return Err(FileError::NotAFile { path: shown(path) });
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(FileError::Missing { path: shown(path) }),
        Err(e) => return Err(reading("open", path)(e)),
    };
    if !file.metadata().map_err(reading("stat", path))?.is_file() {
        return Err(FileError::NotAFile { path: shown(path) });
    }
    let mut bytes = Vec::new();
    // One byte more than a header may have, so that the parser sees it is too large.
    (&file).take(HEADER_MAX as u64 + 1).read_to_end(&mut bytes).map_err(reading("read", path))?;
    Ok((file, bytes))
}

/// An exclusive right to replace one header file. Dropped without a commit, it changes nothing.
#[derive(Debug)]
pub struct Update {
    path: PathBuf,
    new_path: PathBuf,
    new_file: File,
    committed: bool,
    /// of the header that is put in place
    id: [u8; 16],
    witness: Arc<dyn Witness>,
    /// the header that was read, which the new one is made of
    basis: OnceLock<[u8; 32]>,
    /// a person has decided which header it shall be
    is_decided: bool,
    /// how far the history goes with the entries of this change
    recorded: OnceLock<HistoryMark>,
}

impl Update {
    /// Takes the right to change or make the header at `path`. Read the header after this, not before. Waits for
    /// nobody. `witness`: what remembers the newest header of a vault; [`witness::nobody`] of a zone file.
    ///
    /// # Errors
    /// [`FileError::Busy`], [`FileError::Write`].
    pub fn begin(path: &Path, witness: &Arc<dyn Witness>) -> Result<Self, FileError> {
        const ATTEMPTS_MAX: usize = 16;
        // A zone file may be a symbolic link: what it points to is replaced, not the link.
        let path = match lies_in_the_store(path) {
            true => path.to_path_buf(),
            false => std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf()),
        };
        let mut new_name = OsString::from(path.as_os_str());
        new_name.push(".new");
        let new_path = PathBuf::from(new_name);
        for _ in 0..ATTEMPTS_MAX {
            let new_file = open_new(&new_path)?;
            match new_file.try_lock() {
                Ok(()) => {}
                Err(std::fs::TryLockError::WouldBlock) => return Err(FileError::Busy { path: shown(&path) }),
                Err(std::fs::TryLockError::Error(e)) => return Err(writing("lock", &new_path)(e)),
            }
            match names_of(&new_file, &new_path).map_err(writing("stat", &new_path))? {
                // Between open and lock, the holder of the lock may have renamed or removed the file: then this lock is
                // on a file that is no longer there.
                None => {}
                // Not every file system counts names.
                Some(0 | 1) => {
                    let (witness, basis) = (witness.clone(), OnceLock::new());
                    let (committed, id, is_decided, recorded) = (false, [0; 16], false, OnceLock::new());
                    return Ok(Update {
                        path,
                        new_path,
                        new_file,
                        committed,
                        id,
                        witness,
                        basis,
                        is_decided,
                        recorded,
                    });
                }
                // No update gives its file a second name, so this one is somebody else's, linked here by whoever can
                // write to the store, and must not be overwritten. With the lock on it, nobody else puts a file of
                // theirs into this place meanwhile.
                Some(2..) => {
                    let path = shown(&new_path);
                    tracing::warn!(path = %path.display(), "a hard link to another file was in the way, and is removed");
                    std::fs::remove_file(&new_path).map_err(writing("remove", &new_path))?;
                }
            }
        }
        Err(FileError::Busy { path: shown(&path) })
    }

    /// The header's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The header as it is now.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn read<H: Header>(&self) -> Result<H, FileError> {
        let header: H = read(&self.path)?;
        let digest =
            witness::digest(&header).map_err(|source| FileError::Header { path: shown(&self.path), source })?;
        // What was read first is what the change is made to.
        self.basis.get_or_init(|| digest);
        Ok(header)
    }

    /// The header that is put in place is a person's decision, whatever is there now.
    #[must_use]
    pub fn decided(mut self) -> Update {
        self.is_decided = true;
        self
    }

    /// The history goes so far now, durably.
    pub(crate) fn history_goes_to(&self, mark: HistoryMark) {
        // One change is recorded once.
        self.recorded.get_or_init(|| mark);
    }

    /// What remembers the newest header.
    pub(crate) fn witness(&self) -> &Arc<dyn Witness> {
        &self.witness
    }

    /// Tells the witness, durably, what is about to be put in place. `None`: a zone file has none.
    fn announce<H: Header>(&self, header: &H) -> Result<Option<Box<dyn Replacing>>, FileError> {
        if !H::IS_VAULT {
            return Ok(None);
        }
        let new = witness::digest(header).map_err(|source| FileError::Header { path: shown(&self.path), source })?;
        let basis = match self.basis.get() {
            Some(read) if !self.is_decided => Basis::Read(*read),
            Some(_) | None => Basis::Decided,
        };
        let (id, is_anchored, history) = (header.keys().id, header.is_anchored(), self.recorded.get().copied());
        let replacement = Replacement { dir: dir_of(&self.path), id, is_anchored, basis, new, history };
        let noted = self.witness.replacing(&replacement);
        noted.map(Some).map_err(|source| FileError::Witness { path: shown(&self.path), source })
    }

    /// Writes a header where there is none.
    ///
    /// # Errors
    /// [`FileError::Exists`], [`FileError::Header`] for values out of bounds, [`FileError::Write`].
    pub fn create<H: Header>(self, header: &H) -> Result<(), FileError> {
        match self.path.symlink_metadata() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.put(header, MODE_NEW, steps::replace),
            Err(e) => Err(writing("stat", &self.path)(e)),
            Ok(_) => Err(FileError::Exists { path: shown(&self.path) }),
        }
    }

    /// Replaces the header, keeping its permissions and, where that is allowed, its owner. The old one is overwritten
    /// where it lies, if it has no other name. That of a vault has a name until then ([`Update::kept_path`]), so that a
    /// program that is killed leaves none whole in blocks that no name leads to: the next change, or the next attempt
    /// to destroy the keys, takes it away.
    ///
    /// # Errors
    /// [`FileError::Missing`], [`FileError::Header`] for values out of bounds, [`FileError::Write`]. The old header is
    /// then intact, unless only the last step, the sync of the directory, failed.
    pub fn replace<H: Header>(self, header: &H) -> Result<(), FileError> {
        let mode = self.take_over_owner()?;
        let (path, kept) = (self.path.clone(), self.kept_path());
        let old = erase::open(&path);
        let erased = if lies_in_the_store(&path) && erase::keeps_names(&path) && self.link_kept().is_ok() {
            let done = self.put(header, mode, steps::replace_keeping);
            if done.is_err() && id_of(&kept) == id_of(&path) {
                let _ = std::fs::remove_file(&kept);
            }
            done?;
            old.map_err(writing("open", &path)).and_then(|old| erase::replaced_header(&old, &kept))
        } else {
            self.put(header, mode, steps::replace)?;
            old.map_or(Ok(()), |old| erase::unnamed(&old, &path))
        };
        // The change was made, and a failure here is none of it.
        if let Err(error) = erased {
            tracing::warn!(%error, "the header that was replaced could not be overwritten: the keys of its slots may still open it in the store");
        }
        Ok(())
    }

    /// The same, but the old header, whole, is left under the name of [`Update::kept_path`], for [`erase::file`].
    ///
    /// # Errors
    /// As [`Update::replace`]. Where the store has no hard links, the header may be missing after a crash, and
    /// [`Update::put_back`] puts the kept one back.
    pub(crate) fn replace_keeping<H: Header>(self, header: &H) -> Result<(), FileError> {
        let mode = self.take_over_owner()?;
        self.put(header, mode, steps::replace_keeping)
    }

    /// Where the old header is kept while it is replaced for good.
    pub(crate) fn kept_path(&self) -> PathBuf {
        self.path.with_file_name(lamassu_format::name::HEADER_REPLACING)
    }

    /// Gives the old header its second name. One that an earlier attempt has left there is taken away.
    fn link_kept(&self) -> io::Result<()> {
        let kept = self.kept_path();
        if id_of(&kept).is_some() && id_of(&kept) == id_of(&self.path) {
            return Ok(());
        }
        erase::replaced(&kept).map_err(io::Error::other)?;
        std::fs::hard_link(&self.path, &kept)
    }

    /// Undoes a [`Update::replace_keeping`] that left no header.
    pub(crate) fn put_back(&self) -> Result<(), FileError> {
        let kept = self.kept_path();
        if self.path.symlink_metadata().is_ok() || kept.symlink_metadata().is_err() {
            return Ok(());
        }
        std::fs::rename(&kept, &self.path).map_err(writing("rename", &kept))?;
        sync_dir_of(&self.path)
    }

    /// Gives the new file the owner of the old; tells the old one's mode.
    fn take_over_owner(&self) -> Result<u32, FileError> {
        let old = match self.path.symlink_metadata() {
            Ok(old) => old,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(FileError::Missing { path: shown(&self.path) });
            }
            Err(e) => return Err(writing("stat", &self.path)(e)),
        };
        // Only root can give files away; for others the file becomes theirs, as with any editor.
        let _ = std::os::unix::fs::fchown(&self.new_file, Some(old.uid()), Some(old.gid()));
        Ok(old.mode() & 0o777)
    }

    fn put<H: Header>(
        mut self,
        header: &H,
        mode: u32,
        steps: impl FnOnce(&mut Self, &[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let json = header.to_json().map_err(|source| FileError::Header { path: shown(&self.path), source })?;
        self.id = header.keys().id;
        let new = &self.new_path;
        self.new_file
            .set_permissions(std::fs::Permissions::from_mode(mode))
            .map_err(writing("set permissions of", new))?;
        let replacing = self.announce(header)?;
        steps(&mut self, &json)?;
        // The change was made. A witness that still takes both headers for the newest finds out when it is asked next.
        if let Some(Err(error)) = replacing.map(Replacing::replaced) {
            tracing::warn!(%error, "the anchor does not yet know that the header was replaced");
        }
        Ok(())
    }
}

impl Steps for Update {
    type Error = FileError;

    fn truncate(&mut self) -> Result<(), FileError> {
        // A program that died may have left keys there; usually it is empty.
        erase::overwrite(&self.new_file)
            .and_then(|()| self.new_file.set_len(0))
            .map_err(writing("truncate", &self.new_path))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        (&self.new_file).write_all(bytes).map_err(writing("write", &self.new_path))
    }

    fn sync(&mut self) -> Result<(), FileError> {
        self.new_file.sync_all().map_err(writing("sync", &self.new_path))
    }

    fn keep(&mut self) -> Result<(), FileError> {
        let kept = self.kept_path();
        // What an earlier attempt left there is overwritten, whatever the store makes of names: the old header gets
        // that name durably before it loses its own.
        if id_of(&kept) != id_of(&self.path) && erase::file(&kept, &self.id)? == erase::Outcome::Left {
            std::fs::remove_file(&kept).map_err(writing("remove", &kept))?;
        }
        // Not every store has hard links.
        self.link_kept()
            .or_else(|_| std::fs::rename(&self.path, &kept))
            .map_err(writing("keep the old header as", &kept))
    }

    fn rename(&mut self) -> Result<(), FileError> {
        std::fs::rename(&self.new_path, &self.path).map_err(writing("rename", &self.new_path))?;
        self.committed = true;
        Ok(())
    }

    fn sync_dir(&mut self) -> Result<(), FileError> {
        sync_dir_of(&self.path)
    }
}

fn dir_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn sync_dir_of(path: &Path) -> Result<(), FileError> {
    let dir = dir_of(path);
    File::open(dir).and_then(|d| d.sync_all()).map_err(writing("sync directory", dir))
}

/// Writes a file whole, in the place of what is there, durably: under a name of its own first, beside it, as the
/// directory is the user's. For its owner alone (mode 0600).
///
/// # Errors
/// [`FileError::Write`]; what was there is intact then, unless only the last step, the sync of the directory, failed.
pub fn write_over(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let mut unique = [0; 8];
    lamassu_crypto::random(&mut unique).map_err(io::Error::other).map_err(writing("write", path))?;
    let mut new = path.as_os_str().to_owned();
    new.push(format!(".{}.new", data_encoding::HEXLOWER.encode(&unique)));
    let new = PathBuf::from(new);
    write_new(&new, bytes)?;
    std::fs::rename(&new, path).map_err(writing("rename", &new)).inspect_err(|_| {
        let _ = std::fs::remove_file(&new);
    })?;
    sync_dir_of(path)
}

/// Makes a file that holds a key or a header, for its owner alone (mode 0600), durable. Never overwrites: a key that is
/// gone may have been the last.
///
/// # Errors
/// [`FileError::Exists`], [`FileError::Write`]; nothing is then left behind.
pub fn write_new(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let mut file = match OpenOptions::new().write(true).create_new(true).mode(MODE_NEW).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(FileError::Exists { path: shown(path) }),
        Err(e) => return Err(writing("create", path)(e)),
    };
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).map_err(writing("write", path));
    written.and_then(|()| sync_dir_of(path)).inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })
}

impl Drop for Update {
    fn drop(&mut self) {
        if !self.committed {
            // What stays behind after a failure here is taken over by the next update.
            let _ = erase::overwrite(&self.new_file);
            let _ = std::fs::remove_file(&self.new_path);
        }
    }
}

/// Whether this is a vault's header, by its name.
fn lies_in_the_store(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == lamassu_format::name::HEADER)
}

fn open_new(path: &Path) -> Result<File, FileError> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(MODE_NEW)
        .custom_flags(flags)
        .open(path)
        // A program that died may have left one of a header without write permission.
        .or_else(|e| match e.kind() {
            io::ErrorKind::PermissionDenied => erase::open(path).and_then(|file| {
                let meta = file.metadata()?;
                // One with another name may be anybody's, whose mode is not ours to change; it is not written to.
                if meta.is_file() && meta.nlink() <= 1 { erase::writable(&file) } else { Ok(file) }
            }),
            _ => Err(e),
        })
        .map_err(writing("create", path))?;
    let meta = file.metadata().map_err(writing("stat", path))?;
    if meta.is_file() { Ok(file) } else { Err(FileError::NotAFile { path: shown(path) }) }
}

/// Which file a name leads to.
fn id_of(path: &Path) -> Option<(u64, u64)> {
    path.symlink_metadata().map(|m| (m.dev(), m.ino())).ok()
}

fn is_same(file: &File, path: &Path) -> io::Result<bool> {
    Ok(names_of(file, path)?.is_some())
}

/// How many names the file has, where `path` is one of them.
fn names_of(file: &File, path: &Path) -> io::Result<Option<u64>> {
    let ours = file.metadata()?;
    match path.symlink_metadata() {
        Ok(there) if there.dev() == ours.dev() && there.ino() == ours.ino() => Ok(Some(there.nlink())),
        Ok(_) => Ok(None),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}
