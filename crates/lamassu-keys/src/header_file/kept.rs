//! The header that is replaced: its second names, what a killed program has left under them, and its end.
//!
//! Invariant: the old header is not open by a name that it loses where the store would then rename it aside (libfuse,
//! NFS). For a moment no name would lead to a header, and at the last close it would be gone.

use super::error::writing;
use super::steps;
use super::{FileError, Update, dir_of, erase, is_one_file, is_same, lies_in_the_store, regular, shown, sync_dir_of};
use lamassu_format::header::{HEADER_MAX, Header, VaultId};
use lamassu_format::name;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::{DirEntry, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// The header that is replaced, as it is open until it can be overwritten.
#[derive(Debug)]
pub(super) enum Old {
    /// not at all: it stays as it is. With the reason, where it should be overwritten
    Left(Option<FileError>),
    /// by its second name
    Kept(Result<File, FileError>),
    /// by the name that it loses
    Held(File),
}

/// The name under which a header was kept that was replaced, once it has that.
pub type KeptAs = Arc<OnceLock<PathBuf>>;

/// Gives the header that is `kept` its name back, if nothing has that name. What cannot be looked at may be there.
fn put_back(path: &Path, kept: &Path) -> Result<(), FileError> {
    let is_gone = path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    if !is_gone || !is_there(kept)? {
        return Ok(());
    }
    match rename_to_new(kept, path) {
        // Another host was faster.
        Err(e) if matches!(e.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound) => Ok(()),
        done => done.map_err(writing("rename", kept)).and_then(|()| sync_dir_of(path)),
    }
}

fn is_there(path: &Path) -> Result<bool, FileError> {
    match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(writing("stat", path)(e)),
    }
}

/// Renames a file to a name that nothing has.
fn rename_to_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Not every store can check that itself.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match to.symlink_metadata() {
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => std::fs::rename(from, to),
            Err(e) => Err(e),
        },
        done => Ok(done?),
    }
}

/// Whether a store has no hard links, by the answer to the wish for one. Servers of SFTP and SMB have one code for
/// `EPERM` and `EACCES`, which arrives as the latter.
fn has_no_links(error: &io::Error, keeps_names: bool) -> bool {
    let none = [Errno::PERM, Errno::OPNOTSUPP, Errno::NOSYS, Errno::MLINK];
    let is = |errno: Errno| error.raw_os_error() == Some(errno.raw_os_error());
    none.into_iter().any(is) || (!keeps_names && is(Errno::ACCESS))
}

impl Update {
    /// Replaces the header, keeping its permissions and, if possible, its owner. The old one is overwritten in place,
    /// unless it has another name. A vault's old header keeps a name until then ([`Update::kept_path`]). So a program
    /// that is killed leaves no intact header in blocks without a name: the next change, or the next attempt to destroy
    /// the keys, removes it.
    ///
    /// # Errors
    /// [`FileError::Missing`], [`FileError::Header`] for values out of bounds, [`FileError::Write`]. Then the old
    /// header is intact, unless only the last step, the sync of the directory, failed.
    pub fn replace<H: Header>(self, header: &H) -> Result<(), FileError> {
        let done = self.put_over(header, Update::replace_by)?;
        // The change was made, so a failure here is not an error of it.
        if let Err(error) = done.end_old() {
            tracing::warn!(%error, "the header that was replaced could not be overwritten: the keys of its slots may still open it in the store");
        }
        Ok(())
    }

    fn replace_by(&mut self, json: &[u8]) -> Result<(), FileError> {
        self.keep_replaced()?;
        self.go_on()?;
        let kept = self.kept_path();
        let not_kept = match erase::keeps_names(&self.path) {
            Ok(true) if lies_in_the_store(&self.path) => match self.link_kept() {
                Ok(()) => {
                    self.old = Old::Kept(self.open_kept());
                    return steps::replace_keeping(self, json);
                }
                Err(error) => Some(writing("keep the old header as", &kept)(error)),
            },
            Ok(true) => None,
            Ok(false) => {
                self.remove_old_names();
                None
            }
            Err(error) => Some(writing("look at", &kept)(error)),
        };
        self.remove_second_name(name::HEADER_REPLACING)?;
        self.old = match erase::keeps_nameless(&self.path) {
            Ok(true) => match regular::open(&self.path) {
                Ok(old) => Old::Held(old),
                Err(error) => Old::Left(Some(writing("open", &self.path)(error))),
            },
            Ok(false) => Old::Left(not_kept),
            Err(error) => Old::Left(Some(writing("look at", &self.path)(error))),
        };
        steps::replace(self, json)
    }

    /// Where each name of a file may show a number of its own: second names that a destruction which failed has given
    /// the header. They would pass for the one in place later. They are only removed, as one of them may be that one;
    /// it has its own name.
    fn remove_old_names(&self) {
        if !lies_in_the_store(&self.path) || self.path.symlink_metadata().is_err() {
            return;
        }
        let is_second = |name: &OsStr| name == name::HEADER_REPLACING || name::is_set_aside(name.as_bytes());
        let remove = |entry: io::Result<DirEntry>| {
            let entry = entry?;
            if is_second(&entry.file_name()) { std::fs::remove_file(entry.path()) } else { Ok(()) }
        };
        let listed = std::fs::read_dir(dir_of(&self.path));
        if let Err(error) = listed.and_then(|mut entries| entries.try_for_each(remove)) {
            tracing::warn!(%error, "an old header may keep its name in the store: the keys of its slots may still open it there");
        }
    }

    /// The same, but the old header stays intact under the name of [`Update::kept_path`], for [`erase::file`]. Where
    /// locks do not reach other hosts, one of them may remove that name: then the old header is overwritten here.
    ///
    /// # Errors
    /// As [`Update::replace`]. If the store has no hard links, the header may be missing after a crash;
    /// [`Update::put_back`] restores the kept one. Or the new header is in place, and the old one, which has no name,
    /// could not be overwritten.
    pub(crate) fn replace_keeping<H: Header>(self, header: &H) -> Result<Option<erase::Erased>, FileError> {
        let id = VaultId(header.keys().id);
        let done = self.put_over(header, steps::replace_keeping)?;
        match &done.old {
            Old::Kept(Ok(old)) => erase::nameless(old, &done.kept_path(), &id),
            Old::Kept(Err(_)) | Old::Left(_) | Old::Held(_) => Ok(None),
        }
    }

    fn put_over<H: Header>(
        self,
        header: &H,
        steps: impl FnOnce(&mut Self, &[u8]) -> Result<(), FileError>,
    ) -> Result<Self, FileError> {
        let mode = self.take_over_owner()?;
        self.put(header, mode, |update, json| steps(update, json).inspect_err(|_| update.undo()))
    }

    /// After a failure: the header in place has its name, and none that this update has given it.
    fn undo(&self) {
        if lies_in_the_store(&self.path)
            && let Err(error) = self.put_back()
        {
            tracing::error!(%error, "the header may have lost its name: `lamassu key destroy` and `key restore` give it back");
        }
        if self.has_tried {
            // What looks like the header in place may be the one that was replaced, if the store shows it from a cache.
            return;
        }
        for second in &self.given {
            // Another host may have the right to the store by now, and need it.
            if is_one_file(second, &self.path) && self.go_on().is_ok() {
                let _ = std::fs::remove_file(second);
            }
        }
    }

    /// Overwrites the header that was replaced, if no name leads to it but the one that this update has given it.
    fn end_old(mut self) -> Result<(), FileError> {
        match std::mem::replace(&mut self.old, Old::Left(None)) {
            Old::Left(None) => Ok(()),
            Old::Left(Some(error)) => Err(error),
            Old::Held(old) => erase::unnamed(&old, &self.path),
            Old::Kept(Ok(old)) => {
                warn_of_copies(&old, &self.path);
                erase::replaced_header(&old, &self.kept_path())
            }
            Old::Kept(Err(error)) => Err(error),
        }
    }

    /// The name of the old header while it is being replaced.
    pub(crate) fn kept_path(&self) -> PathBuf {
        self.path.with_file_name(name::HEADER_REPLACING)
    }

    /// Gives the old header its second name, which it may have already, and removes what an earlier attempt has left
    /// there.
    fn link_kept(&mut self) -> io::Result<()> {
        let kept = self.kept_path();
        if !is_one_file(&kept, &self.path) {
            erase::replaced(&kept).map_err(io::Error::other)?;
            std::fs::hard_link(&self.path, &kept)?;
            self.given.push(kept);
        }
        Ok(())
    }

    fn open_kept(&self) -> Result<File, FileError> {
        let kept = self.kept_path();
        let old = regular::open(&kept).map_err(writing("open", &kept))?;
        let is_other = || is_same(&old, &self.path).map(|is_same| !is_same).map_err(writing("stat", &self.path));
        // It was renamed there where there are no hard links.
        match erase::keeps_names(&kept).map_err(writing("look at", &kept))? && is_there(&self.path)? && is_other()? {
            true => Err(FileError::Busy { path: shown(&self.path) }),
            false => Ok(old),
        }
    }

    /// The old header durably gets its second name before it loses its own, or that alone: not every store has hard
    /// links. What an earlier attempt left there is overwritten.
    pub(super) fn keep_old(&mut self) -> Result<(), FileError> {
        let kept = self.kept_path();
        if !is_one_file(&kept, &self.path) {
            match erase::keeps_names(&kept).map_err(writing("look at", &kept))? {
                true if erase::file(&kept, &self.path, &VaultId(self.id))? == erase::Outcome::Left => {
                    std::fs::remove_file(&kept).map_err(writing("remove", &kept))?;
                }
                true => {}
                // Each name of a file may show a number of its own there: this may be the header in place. It is
                // overwritten when another one is in place.
                false if is_there(&self.path)? => self.set_aside(&kept)?,
                // It may be the header's only name.
                false => return Err(FileError::Missing { path: shown(&self.path) }),
            }
        }
        match self.link_kept() {
            Err(e) if has_no_links(&e, erase::keeps_names(&kept).unwrap_or(true)) => std::fs::rename(&self.path, &kept),
            done => done,
        }
        .map_err(writing("keep the old header as", &kept))?;
        if matches!(self.old, Old::Left(_)) {
            self.old = Old::Kept(Ok(self.open_kept()?));
        }
        Ok(())
    }

    fn set_aside(&self, kept: &Path) -> Result<(), FileError> {
        for name in name::set_aside() {
            match rename_to_new(kept, &self.path.with_file_name(name)) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                done => return done.map_err(writing("rename", kept)),
            }
        }
        Err(writing("rename", kept)(io::ErrorKind::AlreadyExists.into()))
    }

    /// Gives a vault's header its name back, which it can have lost where there are no hard links: a replacement was
    /// cut off when it had its second name alone.
    ///
    /// # Errors
    /// [`FileError::Write`].
    pub fn put_back(&self) -> Result<(), FileError> {
        if lies_in_the_store(&self.path) { put_back(&self.path, &self.kept_path()) } else { Ok(()) }
    }

    /// The header that is replaced, damaged or not, is kept as `PATH.replaced`, over one that was kept before. The
    /// result has that name when it is.
    pub fn keeping_replaced(&mut self) -> KeptAs {
        self.keeps_as.get_or_insert_default().clone()
    }

    /// No link is followed: the store may put one there.
    fn keep_replaced(&mut self) -> Result<(), FileError> {
        let Some(keeps_as) = self.keeps_as.clone() else { return Ok(()) };
        let [making, kept] = [".replacing", ".replaced"].map(|suffix| {
            let mut name = self.path.as_os_str().to_owned();
            name.push(suffix);
            PathBuf::from(name)
        });
        let failed = |source| FileError::Write { op: "copy", path: shown(&self.path), source };
        self.go_on()?;
        // An interrupted run may have left it: another name of the present header, or a header that was replaced or
        // destroyed.
        erase::replaced(&making)?;
        // Copied if the store has no links: the damaged header may be the last place of some slot. Unreadable parts are
        // not copied.
        match std::fs::hard_link(&self.path, &making).or_else(|_| copy_anew(&self.path, &making)) {
            Err(e) if e.raw_os_error() == Some(Errno::IO.raw_os_error()) => return Ok(()),
            done => done.map_err(failed)?,
        }
        self.given.extend([making.clone(), kept.clone()]);
        self.go_on()?;
        erase::replaced(&kept)?;
        std::fs::rename(&making, &kept).map_err(failed)?;
        let _ = keeps_as.set(kept);
        Ok(())
    }

    /// Removes another name of the present header, `lamassu.vault.replaced`, which a restore that was killed has left.
    /// When the header is replaced, it would pass for a copy that a person made, which is not overwritten.
    pub(crate) fn clear_second_names(&mut self) -> Result<(), FileError> {
        match std::mem::replace(&mut self.has_cleared, true) {
            true => Ok(()),
            false => self.remove_second_name(name::HEADER_REPLACED),
        }
    }

    /// Removes another name of the present header. Only for who may change the store: where locks do not reach other
    /// hosts, one of them may have given its header that name a moment ago, to find it again.
    pub(crate) fn remove_second_name(&self, name: &str) -> Result<(), FileError> {
        let second = self.path.with_file_name(name);
        if !lies_in_the_store(&self.path) || !is_one_file(&second, &self.path) {
            return Ok(());
        }
        self.go_on()?;
        std::fs::remove_file(&second).map_err(writing("remove", &second))
    }
}

/// What cannot be copied leaves nothing. At most the length of a header is copied: another file could be endless.
fn copy_anew(from: &Path, to: &Path) -> io::Result<()> {
    let from = regular::open(from)?;
    let mut copy = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    let copied = io::copy(&mut from.take(HEADER_MAX as u64 + 1), &mut copy).and_then(|_| copy.sync_all());
    copied.inspect_err(|_| {
        let _ = erase::overwrite(&copy);
        let _ = std::fs::remove_file(to);
    })
}

/// Warns if another name leads to the header that was replaced at `path`: then it is not overwritten. A restore gives
/// it one on purpose.
fn warn_of_copies(old: &File, path: &Path) {
    let is_here = |name: &&str| is_same(old, &path.with_file_name(name)).unwrap_or(false);
    let ours = [name::HEADER_REPLACED, name::HEADER_REPLACING].iter().filter(|name| is_here(name)).count() as u64;
    if old.metadata().is_ok_and(|meta| meta.nlink() > ours) {
        tracing::warn!(
            "another name (a hard link) leads to the header that was replaced, so it was not overwritten: the keys of its slots still open it there"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn at_most_a_header_is_copied_and_nothing_but_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let [large, fifo, copy] = ["large", "fifo", "copy"].map(|name| dir.path().join(name));
        fs::write(&large, vec![b'x'; 3 * HEADER_MAX]).unwrap();
        copy_anew(&large, &copy).unwrap();
        assert_eq!(fs::metadata(&copy).unwrap().len(), HEADER_MAX as u64 + 1);
        fs::remove_file(&copy).unwrap();
        rustix::fs::mkfifoat(CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
        assert!(copy_anew(&fifo, &copy).is_err());
        assert!(!copy.exists());
    }

    /// Also where the store cannot check that itself.
    #[test]
    fn a_name_that_is_taken_is_left_to_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
        fs::write(&from, "from").unwrap();
        fs::write(&to, "to").unwrap();
        assert_eq!(rename_to_new(&from, &to).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        fs::remove_file(&to).unwrap();
        rename_to_new(&from, &to).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"from");
    }

    #[test]
    fn only_a_store_without_hard_links_renames_the_header() {
        let says = |errno: Errno, keeps_names| has_no_links(&io::Error::from(errno), keeps_names);
        for keeps_names in [true, false] {
            let none = [Errno::PERM, Errno::OPNOTSUPP, Errno::NOSYS, Errno::MLINK];
            assert!(none.into_iter().all(|errno| says(errno, keeps_names)));
            let others = [Errno::IO, Errno::NOSPC, Errno::STALE, Errno::EXIST];
            assert!(!others.into_iter().any(|errno| says(errno, keeps_names)));
        }
        assert!(!says(Errno::ACCESS, true) && says(Errno::ACCESS, false));
    }

    /// The answer to the rename was lost: the second name may be the last one of the header that was replaced.
    #[test]
    fn no_name_is_removed_after_the_new_header_may_be_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let [header, kept] = [name::HEADER, name::HEADER_REPLACING].map(|name| dir.path().join(name));
        fs::write(&header, "header").unwrap();
        fs::hard_link(&header, &kept).unwrap();
        let mut update = Update::begin(&header, &crate::nobody()).unwrap();
        update.given.push(kept.clone());
        assert!(steps::Steps::rename(&mut update).is_err());
        update.undo();
        assert!(!kept.exists(), "nothing was tried");
        fs::hard_link(&header, &kept).unwrap();
        update.written = Some(lamassu_crypto::wrap::sha256(b""));
        fs::remove_file(&header).unwrap();
        fs::create_dir(&header).unwrap();
        assert!(steps::Steps::rename(&mut update).is_err(), "it is tried, over a directory");
        fs::remove_dir(&header).unwrap();
        fs::hard_link(&kept, &header).unwrap();
        update.undo();
        assert!(kept.exists());
    }
}
