//! What `--repair` does to the tree: it clears leftovers, and moves entries that no longer have a name out of it.

use super::{Checker, Found, Located, Result, kind};
use crate::Kind;
use crate::error::{io, is_not_found};
use crate::record::read_text;
use crate::stored::place_in_lost;
use crate::symlink;
use lamassu_format::header::NameMode;
use lamassu_format::name::{LOST, ROOT_RECORD, SESSIONS, Stored, classify, companion_name};
use lamassu_store::BackendDir;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// For a walk without progress.
struct Unwatched;

impl super::Progress for Unwatched {
    fn total(&self, _: u64, _: u64) {}
    fn advance(&self, _: u64, _: u64) {}
    fn problem(&self, _: &super::Problem) {}
}

impl Checker<'_> {
    /// Repairs the record of sessions. A new record begins after the highest number in any page, which another walk
    /// over the whole tree finds first. It has no open session: an attacker must gain nothing by removing the record.
    pub(super) fn sessions(&mut self) -> Result<()> {
        let root = self.root();
        let at = Located { name: SESSIONS.into(), stored: SESSIONS.into(), plain: None, object: None, ..root };
        if !self.vault.book.is_newest()? {
            self.stale(&at, "the record of sessions is not the newest");
        }
        let Some((fault, may_go)) = self.vault.book.fault() else { return Ok(()) };
        let text = format!("the record of sessions does not open: {fault}");
        let mut found = Found::Damage;
        if self.repair && may_go {
            let (vault, progress) = (self.vault, &Unwatched);
            let mut survey = Checker::new(vault, false, progress)?;
            survey.whole()?;
            // Otherwise it may be the keys that are wrong.
            let has_names = vault.name_mode == NameMode::Encrypted;
            if survey.report.pages > 0 || (has_names && vault.read_names(&*self.root().dir).is_ok()) {
                vault.book.renew(survey.report.last_session)?;
                found = Found::Mended;
            }
        }
        self.note(&at, kind::SESSIONS, found, text);
        Ok(())
    }

    /// Repairs the record of the root's permissions. A new one has the permissions of the vault directory, which are
    /// the strictest: its owner's alone.
    pub(super) fn root_permissions(&mut self) -> Result<()> {
        let permissions = &self.vault.root_permissions;
        let root = self.root();
        let at = Located { name: ROOT_RECORD.into(), stored: ROOT_RECORD.into(), plain: None, object: None, ..root };
        if permissions.is_stale() {
            self.stale(&at, "the record of the root's permissions is not the newest");
        }
        let Some(fault) = permissions.fault() else { return Ok(()) };
        let mut found = Found::Damage;
        if self.repair {
            permissions.renew()?;
            found = Found::Mended;
        }
        let text = format!("the record of the root's permissions does not open: {fault}");
        self.note(&at, kind::ROOT, found, text);
        Ok(())
    }

    /// A harmless leftover: removed when repairing.
    pub(super) fn clear(&mut self, at: &Located, kind: &str, text: &str) {
        let removed = self.repair && at.dir.unlink(&at.name).is_ok();
        let found = if removed { Found::Mended } else { Found::Harmless };
        self.note(at, kind, found, text.to_owned());
    }

    /// Moves an entry to `lamassu.lost`, with the companion of its name or the rest of its target, and notes that.
    /// False: it stays, which is noted too.
    pub(super) fn move_to_lost(&mut self, at: &Located, kind: &str, text: String) -> bool {
        let moved = self.vault.lost_dir().and_then(|lost| {
            self.copy_link_rest(at, &*lost)?;
            let name = place_in_lost(&*lost, &*at.dir, &at.name).map_err(io("move to lamassu.lost"))?;
            self.move_companion(at, &*lost);
            Ok(name)
        });
        match moved {
            Ok(name) => {
                let text = format!("{text}; moved to {LOST}/{}", name.to_string_lossy());
                self.note(at, kind, Found::Mended, text);
                true
            }
            Err(e) => {
                self.note(at, kind, Found::Damage, format!("{text}; it could not be moved to {LOST}: {e}"));
                false
            }
        }
    }

    /// Copies the rest of a long link target: another name of the link may need the original. Otherwise the original is
    /// a leftover now.
    pub(super) fn copy_link_rest(&self, at: &Located, lost: &dyn BackendDir) -> Result<()> {
        let ring = &self.vault.ctx.ring;
        let rest = at.dir.stat_entry(&at.name).ok().and_then(|st| symlink::rest_of(ring, &*at.dir, &at.name, &st));
        let Some(rest) = rest else { return Ok(()) };
        let text = read_text(&*at.dir, &at.name).map_err(io("read a link"))?;
        match symlink::open(ring, &*at.dir, &text) {
            // If the store cannot read the rest now, the link stays too, so that the rest does not become a leftover.
            Ok(_) | Err(symlink::LinkFault::Rest) => symlink::copy_rest(&rest, &*at.dir, lost),
            Err(_) => Ok(()),
        }
    }

    /// Moves the companion of a long name after its entry, whatever its content.
    fn move_companion(&self, at: &Located, lost: &dyn BackendDir) {
        if let Stored::Long(hash) = classify(self.vault.name_mode, at.name.as_bytes()) {
            let name = OsString::from(companion_name(&hash));
            match place_in_lost(lost, &*at.dir, &name) {
                Err(error) if !is_not_found(&error) => {
                    tracing::warn!(%error, "the companion of what was moved to {LOST} stays behind");
                }
                _ => {}
            }
        }
    }
}

/// Whether something else lies where `lamassu.lost` belongs.
pub(super) fn is_lost_taken(root: &dyn BackendDir) -> Result<bool> {
    match root.stat_entry(OsStr::new(LOST)) {
        Err(e) if is_not_found(&e) => Ok(false),
        st => Ok(st.map_err(io("stat lamassu.lost"))?.kind != Kind::Dir),
    }
}
