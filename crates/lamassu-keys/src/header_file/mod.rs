//! Reading and replacing header files: vault headers and zone files.
//!
//! A file is replaced as a whole (§4): written to `PATH.new`, synced, renamed over the old one, and the directory
//! synced. `PATH.new` is also the lock for changes: it is held by flock(2) from before the header is read until it is
//! replaced, so no change is lost. The kernel releases the lock of a program that dies.
//!
//! A vault's header is never replaced without its [`Witness`]. If something outside the store remembers which one is
//! the newest, it durably knows of the change before the store does, and a change based on an older header is refused.
//!
//! A replaced file is overwritten in place ([`erase`]): a removed slot, or a destroyed key, must not remain in blocks
//! that the file system has only freed.
//!
//! A vault's header is in the store, which is not trusted: a symbolic link in its place is not followed, and a hard
//! link in the place of `PATH.new` is not written through. A zone file is the user's, and may be a link.

pub mod erase;
mod error;
mod kept;
mod new_file;
pub mod regular;
mod steps;

pub use error::FileError;

use crate::witness::{self, Basis, Replacement, Replacing, Taken, ToReplace, Witness};
use error::{reading, writing};
use kept::{KeptAs, Old};
use lamassu_crypto::wrap;
use lamassu_format::header::{HEADER_MAX, Header, HistoryMark, VaultId};
use lamassu_format::name;
use regular::Links;
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use steps::Steps;

/// Permissions of a new header: it holds no key in the clear, but lets its readers guess at passphrases.
const MODE_NEW: u32 = 0o600;

/// The descriptors of this process, by number.
const DESCRIPTORS: &str = "/proc/self/fd";

/// A path for messages. A path through a descriptor of this process is shown by the directory's present path: the
/// number of a descriptor means nothing to a person, and may refer to another file later.
pub(crate) fn shown(path: &Path) -> PathBuf {
    let Ok(rest) = path.strip_prefix(DESCRIPTORS) else { return path.into() };
    let mut rest = rest.iter();
    let Some(number) = rest.next() else { return path.into() };
    match std::fs::read_link(Path::new(DESCRIPTORS).join(number)) {
        // A pipe or a socket has no path.
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
        // A file that was replaced meanwhile is overwritten, so its bytes may be noise.
        if regular::is_at(path, links_of(path), &file).map_err(reading("stat", path))? {
            return Ok(bytes);
        }
    }
    Err(FileError::Busy { path: shown(path) })
}

fn read_once(path: &Path) -> Result<(File, Vec<u8>), FileError> {
    let file = match regular::find(path, links_of(path), OpenOptions::new().read(true)) {
        Ok(Some(file)) => file,
        Ok(None) => return Err(FileError::NotAFile { path: shown(path) }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(FileError::Missing { path: shown(path) }),
        Err(e) => return Err(reading("open", path)(e)),
    };
    let mut bytes = Vec::new();
    // One byte more than a header may have, so that the parser sees it is too large.
    (&file).take(HEADER_MAX as u64 + 1).read_to_end(&mut bytes).map_err(reading("read", path))?;
    Ok((file, bytes))
}

/// A history that begins with a header, and takes its place when the header is in place.
pub(crate) trait Begun: Send + Sync + std::fmt::Debug {
    /// Puts it there, durably.
    fn put_in_place(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// An exclusive right to replace one header file: its update lock. Dropped without a commit, it changes nothing.
#[derive(Debug)]
pub struct Update {
    path: PathBuf,
    new_path: PathBuf,
    new_file: File,
    /// this update made the new file, or has begun to fill it: no other process uses it
    is_ours: bool,
    /// digest of what was written to it
    written: Option<[u8; 32]>,
    /// what an earlier program has left in it is erased: see [`Update::erase_new`]
    erases_left: bool,
    /// second names of the present header that were left behind are removed, or are this update's
    has_cleared: bool,
    committed: bool,
    /// it was tried to put the new header in place, which may have succeeded although the store said no
    has_tried: bool,
    /// of the new header
    id: [u8; 16],
    witness: Arc<dyn Witness>,
    /// digest of the header that was read, on which the new one is based
    basis: OnceLock<[u8; 32]>,
    /// a person has decided which header it shall be
    is_decided: bool,
    /// the end of the history with the entries of this change
    recorded: Option<HistoryMark>,
    /// a history that begins with the new header
    begun: Option<Box<dyn Begun>>,
    /// what the witness needs, from before the history is changed
    taken: Option<Box<dyn Taken>>,
    /// the witness's record of the replacement under way
    replacing: Option<Box<dyn Replacing>>,
    /// the header that is replaced
    old: Old,
    /// second names that this update has given it
    given: Vec<PathBuf>,
    /// it keeps a name for good: see [`Update::keeping_replaced`]
    keeps_as: Option<KeptAs>,
}

impl Update {
    /// The same as [`Update::begin`], once another process gives the right back, within `patience`.
    ///
    /// # Errors
    /// As [`Update::begin`].
    pub fn begin_within(patience: Duration, path: &Path, witness: &Arc<dyn Witness>) -> Result<Self, FileError> {
        const POLL: Duration = Duration::from_millis(5);
        let deadline = Instant::now() + patience;
        loop {
            match Self::begin(path, witness) {
                Err(FileError::Busy { .. }) if Instant::now() < deadline => std::thread::sleep(POLL),
                begun => return begun,
            }
        }
    }

    /// Takes the right to change or create the header at `path`, without waiting. The header must be read after this,
    /// not before. `witness`: remembers the newest header of a vault; [`witness::nobody`] for a zone file.
    ///
    /// # Errors
    /// [`FileError::Busy`], [`FileError::Write`].
    pub fn begin(path: &Path, witness: &Arc<dyn Witness>) -> Result<Self, FileError> {
        const ATTEMPTS_MAX: usize = 16;
        // A zone file may be a symbolic link: its target is replaced, not the link.
        let path = match lies_in_the_store(path) {
            true => path.to_path_buf(),
            false => std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf()),
        };
        let mut new_name = OsString::from(path.as_os_str());
        new_name.push(".new");
        let new_path = PathBuf::from(new_name);
        for _ in 0..ATTEMPTS_MAX {
            let (new_file, is_ours) = new_file::open(&new_path)?;
            match new_file.try_lock() {
                Ok(()) => {}
                Err(std::fs::TryLockError::WouldBlock) => return Err(FileError::Busy { path: shown(&path) }),
                Err(std::fs::TryLockError::Error(e)) => return Err(writing("lock", &new_path)(e)),
            }
            match names_of(&new_file, &new_path).map_err(writing("stat", &new_path))? {
                // Between open and lock, the previous holder may have renamed or removed the file: then this lock is on
                // a file that is no longer there.
                None => {}
                // Not every file system counts names.
                Some(0 | 1) => {
                    let (witness, basis) = (witness.clone(), OnceLock::new());
                    let (committed, id, is_decided, recorded) = (false, [0; 16], false, None);
                    return Ok(Update {
                        path,
                        new_path,
                        new_file,
                        is_ours,
                        written: None,
                        erases_left: false,
                        has_cleared: false,
                        committed,
                        has_tried: false,
                        id,
                        witness,
                        basis,
                        is_decided,
                        recorded,
                        begun: None,
                        taken: None,
                        replacing: None,
                        old: Old::Left(None),
                        given: Vec::new(),
                        keeps_as: None,
                    });
                }
                // An update never gives its file a second name. So this file is someone else's, linked here by someone
                // who can write to the store, and must not be overwritten. While its lock is held, no one else puts
                // another file into this place.
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

    /// The present header.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn read<H: Header>(&self) -> Result<H, FileError> {
        let header: H = read(&self.path)?;
        let digest =
            witness::digest(&header).map_err(|source| FileError::Header { path: shown(&self.path), source })?;
        // The first header that is read is the basis of the change.
        self.basis.get_or_init(|| digest);
        Ok(header)
    }

    /// The new header is a person's decision, whatever is there now.
    #[must_use]
    pub fn decided(mut self) -> Update {
        self.is_decided = true;
        self
    }

    /// Notes the new durable end of the history. `begun`: it begins with the new header.
    pub(crate) fn history_goes_to(&mut self, mark: HistoryMark, begun: Option<Box<dyn Begun>>) {
        (self.recorded, self.begun) = (Some(mark), begun);
    }

    /// Takes what the witness needs, before anything is changed: a refusal later would leave traces of a change that
    /// was not made.
    ///
    /// # Errors
    /// [`FileError::Witness`]: it refuses the change.
    pub fn take_witness<H: Header>(&mut self, header: &H) -> Result<(), FileError> {
        if self.taken.is_some() {
            return Ok(());
        }
        let to_replace =
            ToReplace { id: VaultId(header.keys().id), is_anchored: header.is_anchored(), basis: self.basis() };
        let taken = self.witness.take(&to_replace);
        self.taken = Some(taken.map_err(|source| FileError::Witness { path: shown(&self.path), source })?);
        Ok(())
    }

    fn basis(&self) -> Basis {
        match self.basis.get() {
            Some(read) if !self.is_decided => Basis::Read(*read),
            in_place => Basis::Decided(in_place.copied()),
        }
    }

    /// The witness of the newest header.
    pub(crate) fn witness(&self) -> &Arc<dyn Witness> {
        &self.witness
    }

    /// Tells the witness, durably, what is about to replace the header. `None`: a zone file has no witness.
    fn announce<H: Header>(&self, header: &H) -> Result<Option<Box<dyn Replacing>>, FileError> {
        if !H::IS_VAULT {
            return Ok(None);
        }
        let new = witness::digest(header).map_err(|source| FileError::Header { path: shown(&self.path), source })?;
        let (id, is_anchored, basis) = (header.keys().id, header.is_anchored(), self.basis());
        let (history, begins_history) = (self.recorded, self.begun.is_some());
        let replacement =
            Replacement { dir: dir_of(&self.path), id: VaultId(id), is_anchored, basis, new, history, begins_history };
        let noted = self.witness.replacing(&replacement);
        noted.map(Some).map_err(|source| FileError::Witness { path: shown(&self.path), source })
    }

    /// Writes a header where there is none.
    ///
    /// # Errors
    /// [`FileError::Exists`], [`FileError::Header`] for values out of bounds, [`FileError::Write`].
    pub fn create<H: Header>(self, header: &H) -> Result<(), FileError> {
        match self.path.symlink_metadata() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.put(header, MODE_NEW, steps::replace).map(drop),
            Err(e) => Err(writing("stat", &self.path)(e)),
            Ok(_) => Err(FileError::Exists { path: shown(&self.path) }),
        }
    }

    /// Gives the new file the owner of the old one. Returns the old one's mode.
    fn take_over_owner(&self) -> Result<u32, FileError> {
        let old = match self.path.symlink_metadata() {
            Ok(old) => old,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(FileError::Missing { path: shown(&self.path) });
            }
            Err(e) => return Err(writing("stat", &self.path)(e)),
        };
        // Only root can change the owner of a file; for others the file becomes theirs, as with any editor.
        let _ = std::os::unix::fs::fchown(&self.new_file, Some(old.uid()), Some(old.gid()));
        Ok(old.mode() & 0o777)
    }

    /// Checks that the store may still be changed, and that the new file is still this update's.
    fn go_on(&self) -> Result<(), FileError> {
        if let Some(replacing) = &self.replacing {
            let refused = |source| FileError::Witness { path: shown(&self.path), source };
            replacing.may_go_on().map_err(refused)?;
        }
        match is_same(&self.new_file, &self.new_path).map_err(writing("stat", &self.new_path))? {
            true => Ok(()),
            false => Err(FileError::Busy { path: shown(&self.path) }),
        }
    }

    /// Digest of what the new file's name leads to.
    fn found_new(&self) -> io::Result<[u8; 32]> {
        let mut bytes = Vec::new();
        regular::open(&self.new_path)?.take(HEADER_MAX as u64 + 1).read_to_end(&mut bytes)?;
        Ok(wrap::sha256(&bytes))
    }

    /// Whether an earlier program has left something in the new file's place.
    pub(crate) fn has_left(&self) -> Result<bool, FileError> {
        let found = self.new_file.metadata().map_err(reading("stat", &self.new_path))?;
        Ok(found.len() > 0)
    }

    /// Erases that; the file is removed when the update is dropped. Only for whoever has the right to write to the
    /// vault: another host's lock on that file may not reach this one.
    pub(crate) fn erase_new(&mut self) -> Result<Option<erase::Erased>, FileError> {
        self.go_on()?;
        self.erases_left = true;
        erase::emptied(&self.new_file, &self.new_path)
    }

    /// Whether what is in the new file may be erased: this update made it, and still has the right to write to the
    /// store. Where locks do not reach other hosts, one of them may use the same file.
    fn may_erase(&self) -> bool {
        let is_content_ours = || match self.written {
            Some(written) => self.found_new().is_ok_and(|found| found == written),
            None => self.new_file.metadata().is_ok_and(|there| there.len() == 0),
        };
        !self.committed && self.go_on().is_ok() && (self.erases_left || (self.is_ours && is_content_ours()))
    }

    fn put<H: Header>(
        mut self,
        header: &H,
        mode: u32,
        steps: impl FnOnce(&mut Self, &[u8]) -> Result<(), FileError>,
    ) -> Result<Self, FileError> {
        let json = header.to_json().map_err(|source| FileError::Header { path: shown(&self.path), source })?;
        self.id = header.keys().id;
        let new = &self.new_path;
        self.new_file
            .set_permissions(std::fs::Permissions::from_mode(mode))
            .map_err(writing("set permissions of", new))?;
        self.replacing = self.announce(header)?;
        self.clear_second_names()?;
        steps(&mut self, &json)?;
        // The change was made, and whoever opens the history next would put it in its place.
        if let Some(Err(error)) = self.begun.take().map(|history| history.put_in_place()) {
            tracing::warn!(%error, "the history that begins with this header is not yet in its place");
        }
        // A witness for which both headers still are the newest settles that at its next use.
        if let Some(Err(error)) = self.replacing.take().map(Replacing::replaced) {
            tracing::warn!(%error, "the anchor does not yet know that the header was replaced");
        }
        Ok(self)
    }
}

impl Steps for Update {
    type Error = FileError;

    fn truncate(&mut self) -> Result<(), FileError> {
        self.go_on()?;
        self.is_ours = true;
        // A program that died may have left keys there; usually it is empty.
        erase::overwrite(&self.new_file)
            .and_then(|()| self.new_file.set_len(0))
            .map_err(writing("truncate", &self.new_path))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        if let Err(error) = (&self.new_file).write_all(bytes) {
            // A part of it.
            self.erases_left = true;
            return Err(writing("write", &self.new_path)(error));
        }
        self.written = Some(wrap::sha256(bytes));
        Ok(())
    }

    fn sync(&mut self) -> Result<(), FileError> {
        self.new_file.sync_all().map_err(writing("sync", &self.new_path))
    }

    fn keep(&mut self) -> Result<(), FileError> {
        self.go_on()?;
        self.keep_old()
    }

    fn rename(&mut self) -> Result<(), FileError> {
        self.go_on()?;
        // Where locks do not reach other hosts, one of them may have written to this file.
        if Some(self.found_new().map_err(reading("read", &self.new_path))?) != self.written {
            return Err(FileError::Busy { path: shown(&self.path) });
        }
        self.has_tried = true;
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

pub(crate) fn sync_dir_of(path: &Path) -> Result<(), FileError> {
    let dir = dir_of(path);
    File::open(dir).and_then(|d| d.sync_all()).map_err(writing("sync directory", dir))
}

/// Replaces a file durably, as a whole: it is written under another name in the same directory, which is the user's.
/// Only its owner may read it (mode 0600).
///
/// # Errors
/// [`FileError::Write`]; then the old file is intact, unless only the last step, the sync of the directory, failed.
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

/// Makes a durable file for a key or a header, which only its owner may read (mode 0600). Never overwrites: a lost key
/// may have been the last one.
///
/// # Errors
/// [`FileError::Exists`], [`FileError::Write`]; then nothing is left behind.
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
        if self.may_erase() {
            // After a failure here, the next update handles what is left.
            let _ = erase::overwrite(&self.new_file);
            let _ = std::fs::remove_file(&self.new_path);
        }
    }
}

/// Whether this is a vault's header, by its name.
fn lies_in_the_store(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == name::HEADER)
}

/// Links in the place of a vault's header, or of one beside it, are the store's.
fn links_of(path: &Path) -> Links {
    let of_header = [name::HEADER, name::HEADER_NEW, name::HEADER_REPLACED, name::HEADER_REPLACING];
    let is_header = |file: &OsStr| of_header.iter().any(|name| file == *name) || name::is_set_aside(file.as_bytes());
    let is_one = path.file_name().is_some_and(is_header);
    if is_one { Links::Refused } else { Links::Followed }
}

/// The file to which a name leads.
fn id_of(path: &Path) -> Option<(u64, u64)> {
    path.symlink_metadata().map(|m| (m.dev(), m.ino())).ok()
}

/// Whether two names lead to one file.
fn is_one_file(a: &Path, b: &Path) -> bool {
    id_of(a).is_some() && id_of(a) == id_of(b)
}

fn is_same(file: &File, path: &Path) -> io::Result<bool> {
    Ok(names_of(file, path)?.is_some())
}

/// The number of names of the file, if `path` is one of them.
fn names_of(file: &File, path: &Path) -> io::Result<Option<u64>> {
    let ours = file.metadata()?;
    match path.symlink_metadata() {
        Ok(there) if there.dev() == ours.dev() && there.ino() == ours.ino() => Ok(Some(there.nlink())),
        Ok(_) => Ok(None),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}
