//! What `--repair` does to the tree: clears leftovers, and takes what has no name any more out of it.

use super::{Checker, Found, Place, Result};
use crate::error::io;
use crate::staging::rename_no_replace;
use lamassu_format::name::LOST;
use lamassu_store::BackendDir;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::sync::Arc;

/// Names tried for one thing in `lamassu.lost`.
const TRIES_MAX: u32 = 10_000;

impl Checker<'_> {
    /// A harmless leftover: removed when repairing.
    pub(super) fn clear(&mut self, at: &Place, kind: &str, text: &str) {
        let removed = self.repair && at.dir.unlink(&at.name).is_ok();
        let found = if removed { Found::Mended } else { Found::Harmless };
        self.note(at, kind, found, text.to_owned());
    }

    /// Moves an entry to `lamassu.lost` and notes that. False: it stays, which is noted too.
    pub(super) fn move_to_lost(&mut self, at: &Place, kind: &str, text: String) -> bool {
        match self.lost().and_then(|lost| place_in(&*lost, at).map_err(io("move to lamassu.lost"))) {
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

    fn lost(&self) -> Result<Arc<dyn BackendDir>> {
        let root = &self.vault.dirs.root().handle;
        match root.make_dir(OsStr::new(LOST), 0o700) {
            Err(e) if e.kind() != stdio::ErrorKind::AlreadyExists => return Err(io("create lamassu.lost")(e)),
            _ => {}
        }
        root.open_dir(OsStr::new(LOST)).map_err(io("open lamassu.lost"))
    }
}

fn place_in(lost: &dyn BackendDir, at: &Place) -> stdio::Result<OsString> {
    let mut name = at.name.clone();
    for i in 1..TRIES_MAX {
        match rename_no_replace(&*at.dir, &at.name, lost, &name) {
            Err(e) if e.kind() == stdio::ErrorKind::AlreadyExists => {
                name = at.name.clone();
                // Short enough for every store: the end of a long name is of no use here.
                let base = name.to_string_lossy().chars().take(200).collect::<String>();
                name = format!("{base}.{i}").into();
            }
            other => return other.map(|()| name),
        }
    }
    Err(stdio::ErrorKind::AlreadyExists.into())
}
