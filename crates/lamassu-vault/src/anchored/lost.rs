//! Unrecorded entries (N2) are moved to `lamassu.lost`, under their stored names, with their companions.

use crate::dirs::Dir;
use crate::error::{errno, io, is_not_found};
use crate::stored::{PRIVATE, place_in_lost, rename_no_replace};
use crate::{Ino, Kind, Result, Vault, VaultError, symlink};
use lamassu_format::header::NameMode;
use lamassu_format::name::{LOST, Stored, classify, companion_name};
use lamassu_store::BackendDir;
use lamassu_store::backend::Stat;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;

impl Vault {
    /// Whether an earlier writer was interrupted: entries that it was making may exist without being recorded.
    pub(crate) fn is_after_crash(&self) -> bool {
        let is_noted = |anchored: &super::Anchored| anchored.after_crash.load(Ordering::Relaxed);
        // A writer itself uses the vault, and has noted the state at opening.
        let is_left = |anchored: &super::Anchored| self.options.read_only && anchored.anchor.vault().is_in_use;
        self.anchored.as_ref().is_some_and(|anchored| is_noted(anchored) || is_left(anchored))
            || !self.left_open().is_empty()
    }

    /// Moves an unrecorded entry of a directory to `lamassu.lost`. The caller holds the directory's lock.
    ///
    /// # Errors
    /// Those of the store. [`VaultError::Exists`]: names are plain, and it is not the directory's owner's. Another user
    /// may have put it there, who has no right to it. EBUSY: it may be recorded elsewhere, since nobody knows whether a
    /// rename was made.
    pub(crate) fn move_to_lost(&self, dir: &Dir, stored: &OsStr) -> Result<()> {
        if self.anchored.as_ref().is_some_and(|anchored| anchored.must_stay(&anchored.place(dir.object, stored))) {
            return Err(errno("move to lamassu.lost", libc::EBUSY));
        }
        let st = dir.handle.stat_entry(stored).map_err(io("stat"))?;
        if self.name_mode == NameMode::Plain
            && rustix::process::geteuid().is_root()
            && st.uid != dir.handle.stat().map_err(io("stat"))?.uid
            && self.staging()?.keeps_owners()
        {
            return Err(VaultError::Exists);
        }
        let entry = self.path_in(dir.ino, stored).display().to_string();
        self.move_handle_to_lost(&*dir.handle, stored, &st, &entry)
    }

    /// Reports unrecorded entries of a directory, and moves them away if an earlier writer may have made them. The
    /// caller must hold no lock of the tree.
    pub(crate) fn meet_unrecorded(&self, dir: &Dir, names: &[OsString]) {
        let Some(anchored) = self.anchored.as_ref().filter(|_| !names.is_empty()) else { return };
        let may_move = !self.options.read_only && anchored.after_crash.load(Ordering::Relaxed);
        let pass = if may_move { self.gate.try_enter() } else { None };
        let _tree = self.tree.read();
        let _names = self.names_of(dir.ino).write();
        for name in names {
            // By now it may be recorded, gone or about to go. This also reports it.
            let is_left = self.shown(dir, name).and_then(|shown| {
                let is_judged = self.judged(dir, name, shown.map(|st| st.kind))?.is_none();
                Ok(shown.is_some() && is_judged && !self.is_going(dir, name))
            });
            if !is_left.unwrap_or(false) || pass.is_none() {
                continue;
            }
            if let Err(error) = self.move_to_lost(dir, name) {
                tracing::warn!(entry = %self.path_in(dir.ino, name).display(), %error, "it stays, and is not shown");
            }
        }
    }

    /// The same for a name that led to nothing.
    pub(crate) fn meet_unrecorded_name(&self, parent: Ino, name: &OsStr) {
        if !self.anchored.as_ref().is_some_and(|anchored| anchored.after_crash.load(Ordering::Relaxed)) {
            return;
        }
        let opened = {
            let _tree = self.tree.read();
            self.dir(parent)
        };
        let met = opened.and_then(|dir| Ok((self.stored(&dir, name)?.name, dir)));
        if let Ok((name, dir)) = met {
            self.meet_unrecorded(&dir, &[name]);
        }
    }

    /// The same for an entry of a directory without a node. `entry`: its name in the log.
    ///
    /// # Errors
    /// Those of the store. [`VaultError::Stale`]: the name led to another entry than that of this stat, and leads there
    /// again.
    pub(crate) fn move_handle_to_lost(
        &self,
        dir: &dyn BackendDir,
        stored: &OsStr,
        st: &Stat,
        entry: &str,
    ) -> Result<()> {
        let lost = self.lost_dir()?;
        let name = self.move_alone(&*lost, dir, stored, st)?;
        if let Stored::Long(hash) = classify(self.name_mode, stored.as_bytes()) {
            let companion = OsString::from(companion_name(&hash));
            if let Err(error) = place_in_lost(&*lost, dir, &companion)
                && !is_not_found(&error)
            {
                tracing::warn!(%error, "the companion of what was moved to {LOST} stays behind");
            }
        }
        tracing::warn!(entry, lost = %name.to_string_lossy(), "an entry that is not recorded was moved to {LOST}");
        Ok(())
    }

    /// The same without the companion of a long name.
    ///
    /// # Errors
    /// As [`Vault::move_handle_to_lost`].
    pub(super) fn move_alone_to_lost(&self, dir: &dyn BackendDir, stored: &OsStr, st: &Stat) -> Result<()> {
        let name = self.move_alone(&*self.lost_dir()?, dir, stored, st)?;
        let entry = stored.to_string_lossy();
        tracing::warn!(%entry, lost = %name.to_string_lossy(), "an entry that is not recorded was moved to {LOST}");
        Ok(())
    }

    /// Returns its name there. The rest of a long link target is copied: another name of the link may need the
    /// original, which otherwise is a leftover then.
    fn move_alone(&self, lost: &dyn BackendDir, dir: &dyn BackendDir, stored: &OsStr, st: &Stat) -> Result<OsString> {
        if let Some(rest) = symlink::rest_of(&self.ctx.ring, dir, stored, st)
            && let Err(error) = symlink::copy_rest(&rest, dir, lost)
        {
            tracing::warn!(%error, "the rest of a link target is not copied to {LOST}");
        }
        let place = || place_in_lost(lost, dir, stored);
        let name = match place() {
            Err(e) if e.raw_os_error() == Some(libc::EACCES) => make_movable(dir, stored).and_then(|()| place()),
            placed => placed,
        };
        let name = name.map_err(io("move to lamassu.lost"))?;
        let moved = lost.stat_entry(&name).map_err(io("stat what was moved to lamassu.lost"))?;
        if !moved.is_same(st) {
            rename_no_replace(lost, &name, dir, stored).map_err(io("put back from lamassu.lost"))?;
            return Err(VaultError::Stale);
        }
        Ok(name)
    }
}

/// Moving a directory needs write permission on it.
fn make_movable(dir: &dyn BackendDir, stored: &OsStr) -> stdio::Result<()> {
    let held = dir.hold(stored)?;
    let st = held.stat()?;
    if st.kind == Kind::Dir && st.mode & PRIVATE != PRIVATE { held.set_mode(PRIVATE) } else { Ok(()) }
}
