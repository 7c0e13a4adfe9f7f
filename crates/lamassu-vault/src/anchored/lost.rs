//! What nobody recorded (N2) goes to `lamassu.lost`, by its stored name, with its companion.

use crate::check::{lost_dir, place_in_lost};
use crate::dirs::Dir;
use crate::error::{io, is_not_found};
use crate::staging::PRIVATE;
use crate::{Kind, Result, Vault};
use lamassu_format::name::{LOST, Stored, classify, companion_name};
use lamassu_store::BackendDir;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::os::unix::ffi::OsStrExt;

impl Vault {
    /// Moves an unrecorded entry of a directory to `lamassu.lost`. The caller holds the directory's lock.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) fn move_to_lost(&self, dir: &Dir, stored: &OsStr) -> Result<()> {
        let entry = self.path_in(dir.ino, stored).display().to_string();
        self.move_handle_to_lost(&*dir.handle, stored, &entry)
    }

    /// The same of an entry of a directory that is no node. `entry` names it in the log.
    pub(crate) fn move_handle_to_lost(&self, dir: &dyn BackendDir, stored: &OsStr, entry: &str) -> Result<()> {
        let lost = lost_dir(&*self.dirs.root().handle)?;
        let place = || place_in_lost(&*lost, dir, stored);
        let name = match place() {
            Err(e) if e.raw_os_error() == Some(libc::EACCES) => make_movable(dir, stored).and_then(|()| place()),
            placed => placed,
        };
        let name = name.map_err(io("move to lamassu.lost"))?;
        if let Stored::Long(hash) = classify(self.name_mode, stored.as_bytes()) {
            let companion = OsString::from(companion_name(&hash));
            if let Err(error) = place_in_lost(&*lost, dir, &companion)
                && !is_not_found(&error)
            {
                tracing::warn!(%error, "the companion of what was moved to {LOST} stays behind");
            }
        }
        tracing::warn!(entry, lost = %name.to_string_lossy(), "an entry that nobody recorded was moved to {LOST}");
        Ok(())
    }
}

/// Moving a directory takes write permission on it.
fn make_movable(dir: &dyn BackendDir, stored: &OsStr) -> stdio::Result<()> {
    let held = dir.hold(stored)?;
    let st = held.stat()?;
    if st.kind == Kind::Dir && st.mode & PRIVATE != PRIVATE { held.set_mode(PRIVATE) } else { Ok(()) }
}
