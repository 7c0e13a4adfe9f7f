//! Second names of a vault's header: the one that it has while it is replaced, and what a killed program has left.

use super::error::writing;
use super::{FileError, Update, erase, is_one_file, lies_in_the_store, sync_dir_of};
use lamassu_format::name;
use std::io;
use std::path::{Path, PathBuf};

/// Gives the header that is `kept` its name back, if nothing has that name. What cannot be looked at may be there.
pub(super) fn put_back(path: &Path, kept: &Path) -> Result<(), FileError> {
    let is_gone = path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    if !is_gone || kept.symlink_metadata().is_err() {
        return Ok(());
    }
    std::fs::rename(kept, path).map_err(writing("rename", kept))?;
    sync_dir_of(path)
}

impl Update {
    /// The name of the old header while it is being replaced.
    pub(crate) fn kept_path(&self) -> PathBuf {
        self.path.with_file_name(name::HEADER_REPLACING)
    }

    /// Gives the old header its second name, and removes one that an earlier attempt has left there. False: it has that
    /// name already, perhaps from another host.
    pub(super) fn link_kept(&self) -> io::Result<bool> {
        let kept = self.kept_path();
        if is_one_file(&kept, &self.path) {
            return Ok(false);
        }
        erase::replaced(&kept).map_err(io::Error::other)?;
        std::fs::hard_link(&self.path, &kept)?;
        Ok(true)
    }

    /// Undoes a [`Update::replace_keeping`] that left no header.
    pub(crate) fn put_back(&self) -> Result<(), FileError> {
        put_back(&self.path, &self.kept_path())
    }

    /// Removes another name of the present header, `lamassu.vault.replaced`, which a restore that was killed has left.
    /// When the header is replaced, it would pass for a copy that a person made, which is not overwritten. Called
    /// before the caller gives the header that name; otherwise as a part of the replacement.
    ///
    /// # Errors
    /// [`FileError::Busy`], [`FileError::Witness`], [`FileError::Write`].
    pub fn clear_second_names(&mut self) -> Result<(), FileError> {
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
