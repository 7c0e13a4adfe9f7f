//! `lamassu check`: verifies every record, name, target, attribute, page and block of a tree, names what is wrong, and
//! repairs what can be repaired.
//!
//! Repair completes interrupted commits, clears leftovers, and moves entries that no longer have a name to
//! `lamassu.lost`. It never deletes or changes content: damaged files stay where they are, readable except for the
//! damage.

mod entry;
mod fresh;
mod locked;
mod repair;
mod report;
mod runs;
mod walk;

pub use locked::check_locked;
pub use report::{Problem, Progress, Report, Tally};

use crate::anchored::MovesLeft;
use crate::event::{FoundBy, IntegrityEvent, IntegrityKind};
use crate::walk::Met;
use crate::{Result, Vault, VaultError};
use lamassu_anchor::ObjectId;
use lamassu_store::BackendDir;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Stable words for problems of the tree: those of [`IntegrityKind`], and two for problems that are no events.
pub mod kind {
    use crate::event::IntegrityKind;

    /// A directory's record is missing or does not open: the names in it cannot be read.
    pub const RECORD: &str = IntegrityKind::DirectoryRecord.word();
    /// An entry's name does not open.
    pub const NAME: &str = IntegrityKind::Name.word();
    /// A companion without an entry.
    pub const ORPHAN: &str = IntegrityKind::OrphanCompanion.word();
    /// Something in the store that Lamassu did not write.
    pub const FOREIGN: &str = IntegrityKind::Foreign.word();
    /// The target of a symbolic link does not open.
    pub const SYMLINK: &str = IntegrityKind::LinkTarget.word();
    /// An extended attribute's name or value does not open.
    pub const XATTR: &str = IntegrityKind::Attribute.word();
    /// Something in the staging directory.
    pub const STAGING: &str = IntegrityKind::Staging.word();
    /// A dataset does not open, or its header does not parse.
    pub const DATASET: &str = IntegrityKind::Dataset.word();
    /// A file whose length no file of a vault has; found without keys.
    pub const LENGTH: &str = IntegrityKind::Length.word();
    /// The record of sessions is missing or does not open.
    pub const SESSIONS: &str = IntegrityKind::Sessions.word();
    /// The record of the root's permissions does not open.
    pub const ROOT: &str = IntegrityKind::RootPermissions.word();
    /// In an anchored vault: content, a record, a target or attributes are of an older state or of another object.
    pub const STALE: &str = IntegrityKind::Stale.word();
    /// In an anchored vault: an entry of another kind than the recorded one.
    pub const OTHER_KIND: &str = IntegrityKind::OtherKind.word();
    /// In an anchored vault: an entry is recorded in this directory, and absent in the store.
    pub const MISSING: &str = IntegrityKind::Missing.word();
    /// In an anchored vault: an entry is in the store, and not recorded. It is not shown.
    pub const UNRECORDED: &str = IntegrityKind::Unrecorded.word();
    /// In a vault whose anchor a server keeps: the policy forbids to complete an interrupted commit.
    pub const FORBIDDEN: &str = "forbidden";
    /// The store failed.
    pub const IO: &str = "io";
}

/// Where something lies: an entry of an open backing directory, and its paths.
#[derive(Clone)]
struct Located {
    /// Directory it lies in.
    dir: Arc<dyn BackendDir>,
    name: OsString,
    stored: PathBuf,
    /// `None` if a name on the way does not open.
    plain: Option<PathBuf>,
    /// Its object in the anchor; `None` in an unanchored vault, or if it is not recorded.
    object: Option<ObjectId>,
}

/// What is known of a directory before it is walked.
#[derive(Clone, Default)]
struct Known {
    plain: Option<PathBuf>,
    object: Option<ObjectId>,
}

/// A check under way.
struct Checker<'a> {
    vault: &'a Vault,
    repair: bool,
    progress: &'a dyn Progress,
    report: Report,
    /// Inodes with several names that were seen, and the object that each is by that name.
    seen: HashMap<crate::inode::StoreId, Option<ObjectId>>,
    moving: MovesLeft,
}

impl<'a> Checker<'a> {
    fn new(vault: &'a Vault, repair: bool, progress: &'a dyn Progress) -> Result<Checker<'a>> {
        let moving = vault.moves_left()?;
        Ok(Checker { vault, repair, progress, report: Report::default(), seen: HashMap::new(), moving })
    }

    fn problem(&mut self, event: Option<IntegrityEvent>, problem: Problem) {
        self.progress.problem(&problem);
        event.into_iter().for_each(|event| _ = self.vault.tell(event.by(FoundBy::Check)));
        self.report.add(problem);
    }

    /// Notes a problem of the tree.
    fn note(&mut self, at: &Located, kind: &str, found: Found, text: String) {
        let event = IntegrityKind::of_word(kind).map(|what| IntegrityEvent {
            is_damage: found != Found::Harmless,
            ..what.at(at.stored.display().to_string(), &*text)
        });
        self.problem(
            event,
            Problem {
                path: at.plain.as_ref().map(|p| p.display().to_string()),
                stored: at.stored.display().to_string(),
                kind: kind.to_owned(),
                repaired: found == Found::Mended,
                harmless: found == Found::Harmless,
                text,
                ..Problem::default()
            },
        );
    }

    /// An entry of a listing that was gone or replaced at each attempt to open it. It is not verified.
    fn note_moving(&mut self, at: &Located) {
        self.report.unsettled = true;
        let text = "was removed or exchanged each time it was looked at, so it is not verified: keep other users and \
                    programs from changing the store, and check again";
        self.note(at, kind::IO, Found::Damage, text.to_owned());
    }

    fn note_io(&mut self, at: &Located, op: &str, e: &dyn std::fmt::Display) {
        self.note(at, kind::IO, Found::Damage, format!("{op}: {e}"));
    }
}

/// How bad it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Damage,
    Harmless,
    Mended,
}

impl Vault {
    /// Verifies the whole tree, or what lies at and below the given plain paths. Everything buffered is committed
    /// first.
    ///
    /// # Errors
    /// [`VaultError::ReadOnly`] for a repair of a read-only vault; those of [`Vault::resolve`] for the paths given.
    /// Problems are not errors: they are in the [`Report`].
    pub fn check(&self, paths: &[&OsStr], repair: bool, progress: &dyn Progress) -> Result<Report> {
        let pass = if repair { Some(self.change()?) } else { None };
        if !self.options.read_only && !self.is_frozen() {
            self.settle_all()?;
            self.close_workshop();
        }
        let mut checker = Checker::new(self, repair, progress)?;
        if paths.is_empty() {
            checker.sessions()?;
            checker.root_permissions()?;
            checker.whole()?;
        } else {
            let mut places = paths.iter().map(|path| self.check_place(path)).collect::<Result<Vec<_>>>()?;
            for place in places.iter_mut().flatten() {
                place.object = checker.object_of(&place.stored)?;
            }
            checker.parts(places)?;
        }
        let mut report = checker.report;
        if repair {
            match self.settle_all() {
                // Reported by the walk, for each file.
                Err(error) if error.is_of_policy() => report.unsettled = true,
                done => done?,
            }
        }
        if repair && paths.is_empty() && report.is_all_at_rest() {
            self.complete_sessions()?;
            self.note_gone_over();
        }
        report.open_sessions = self.left_open();
        drop(pass);
        Ok(report)
    }

    /// The place of a plain path; `None` for the root.
    fn check_place(&self, path: &OsStr) -> Result<Option<Located>> {
        let stored = self.stored_path(path)?;
        let Some(name) = stored.file_name() else { return Ok(None) };
        let mut dir = self.dirs.root().handle.clone();
        for part in stored.parent().unwrap_or(Path::new("")) {
            dir = dir.open_dir(part).map_err(crate::error::io("open a directory"))?;
        }
        let plain = Path::new(path).components().filter(|c| matches!(c, std::path::Component::Normal(_))).collect();
        Ok(Some(Located { dir, name: name.to_owned(), stored, plain: Some(plain), object: None }))
    }
}

impl Located {
    fn of(met: &Met<Known>) -> Located {
        let (dir, name) = (met.above.clone(), met.name.clone());
        Located { dir, name, stored: met.stored.clone(), plain: met.passed.plain.clone(), object: met.passed.object }
    }

    fn met<P>(&self, passed: P) -> Met<P> {
        Met { above: self.dir.clone(), name: self.name.clone(), stored: self.stored.clone(), passed }
    }

    fn known(&self) -> Known {
        Known { plain: self.plain.clone(), object: self.object }
    }

    fn is_root(&self) -> bool {
        self.stored.as_os_str().is_empty()
    }

    /// The entry `name` of directory `dir`, which lies at `self`.
    fn below(&self, dir: &Arc<dyn BackendDir>, name: &OsStr, plain: Option<&OsStr>) -> Located {
        Located {
            dir: dir.clone(),
            name: name.to_owned(),
            stored: self.stored.join(name),
            plain: self.plain.as_ref().zip(plain).map(|(base, name)| base.join(name)),
            object: None,
        }
    }
}

/// For the error of a walk that cannot even begin.
fn listing(e: std::io::Error) -> VaultError {
    crate::error::io("list a directory")(e)
}
