//! Walking the tree: directories by their records, entries by their names.

use super::entry::{Links, looked_at};
use super::{Checker, Found, Place, kind, listing};
use crate::dataset::has_header;
use crate::error::is_not_found;
use crate::names::{DirFault, NameFault, Names};
use crate::record::RecordFault;
use crate::{Kind, Result};
use lamassu_crypto::ring::OpenError;
use lamassu_format::name::{RESERVED_PREFIX, Stored, classify, companion_name};
use lamassu_store::BackendDir;
use lamassu_store::backend::Listed;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

/// A directory to be visited, opened when its turn comes.
struct Visit {
    at: Place,
    /// The root has no entry of its own.
    is_root: bool,
}

/// What one directory held besides entries.
#[derive(Default)]
struct Beside {
    longs: HashSet<[u8; 32]>,
    companions: Vec<([u8; 32], OsString)>,
    rests: Vec<([u8; 16], OsString)>,
}

impl Checker<'_> {
    pub(super) fn root(&self) -> Place {
        let dir = self.vault.dirs.root().handle.clone();
        Place { dir, name: OsString::new(), stored: PathBuf::new(), plain: Some(PathBuf::new()) }
    }

    pub(super) fn whole(&mut self) -> Result<()> {
        let root = self.root();
        self.count(&[(root.dir.clone(), None)])?;
        self.visit_all(Visit { at: root, is_root: true });
        self.staging()
    }

    pub(super) fn parts(&mut self, places: Vec<Option<Place>>) -> Result<()> {
        let root = self.root();
        let starts: Vec<_> = places
            .iter()
            .map(|p| p.as_ref().map_or((root.dir.clone(), None), |p| (p.dir.clone(), Some(p.name.clone()))))
            .collect();
        self.count(&starts)?;
        for place in places {
            match place {
                None => self.visit_all(Visit { at: root.clone(), is_root: true }),
                Some(at) => {
                    let mut links = Links::default();
                    if let Some(Kind::Dir) = self.entry(&at, None, &mut links) {
                        self.visit_all(Visit { at, is_root: false });
                    }
                }
            }
        }
        Ok(())
    }

    /// How much lies ahead: entries but directories, and their backing bytes.
    fn count(&self, starts: &[(Arc<dyn BackendDir>, Option<OsString>)]) -> Result<()> {
        // Saturating: what a store says of its files need not be so.
        let (mut files, mut bytes) = (0, 0_u64);
        let mut dirs = Vec::new();
        for (dir, name) in starts {
            match name {
                None => dirs.push((dir.clone(), None)),
                Some(name) => match dir.stat_entry(name) {
                    Ok(st) if st.kind == Kind::Dir => dirs.push((dir.clone(), Some(name.clone()))),
                    Ok(st) => (files, bytes) = (files + 1, bytes.saturating_add(st.len)),
                    Err(_) => {}
                },
            }
        }
        while let Some((dir, name)) = dirs.pop() {
            let opened = match name {
                None => dir,
                Some(name) => match dir.open_dir(&name) {
                    Ok(dir) if self.vault.has_datasets() && has_header(&*dir).unwrap_or(false) => continue,
                    Ok(dir) => dir,
                    Err(_) => continue,
                },
            };
            // Noted when the directory is visited.
            let Ok(entries) = opened.read_dir() else { continue };
            for e in entries {
                if !self.is_entry(&e.name) {
                    continue;
                }
                let st = opened.stat_entry(&e.name).ok();
                match st {
                    Some(st) if st.kind == Kind::Dir => dirs.push((opened.clone(), Some(e.name))),
                    Some(st) => (files, bytes) = (files + 1, bytes.saturating_add(st.len)),
                    None => {}
                }
            }
        }
        self.progress.total(files, bytes);
        Ok(())
    }

    fn is_entry(&self, name: &OsStr) -> bool {
        matches!(classify(self.vault.name_mode, name.as_bytes()), Stored::Sealed(_) | Stored::Long(_) | Stored::Plain)
    }

    /// Visits a directory and all below it. Children are opened through their parent, which stays open until the last of them was.
    fn visit_all(&mut self, start: Visit) {
        let mut stack = vec![start];
        while let Some(visit) = stack.pop() {
            let opened = match visit.is_root {
                true => Ok(visit.at.dir.clone()),
                false => looked_at(|| visit.at.dir.open_dir(&visit.at.name)),
            };
            match opened {
                Ok(dir) => {
                    let below = self.directory(&visit, &dir);
                    stack.extend(below.into_iter().map(|at| Visit { at, is_root: false }));
                }
                Err(e) if is_not_found(&e) => self.note_moving(&visit.at),
                Err(e) => self.note_io(&visit.at, "the directory does not open", &e),
            }
        }
    }

    /// Checks one directory and its entries; returns the directories in it.
    fn directory(&mut self, visit: &Visit, dir: &Arc<dyn BackendDir>) -> Vec<Place> {
        self.report.directories += 1;
        let at = &visit.at;
        if visit.is_root {
            self.xattrs_of(at, dir, None, Kind::Dir);
        }
        let names = match self.vault.read_names(&**dir) {
            Ok(names) => Some(names),
            Err(fault) => {
                if self.bad_record(visit, &fault) {
                    return Vec::new();
                }
                None
            }
        };
        let entries = match dir.read_dir() {
            Ok(entries) => entries,
            Err(e) => {
                self.note_io(at, "the directory cannot be listed", &e);
                return Vec::new();
            }
        };
        let mut beside = Beside::default();
        let mut links = Links::default();
        let mut below = Vec::new();
        for e in &entries {
            let Some(place) = self.name(visit, dir, names.as_ref(), e, &mut beside) else { continue };
            if let Some(Kind::Dir) = self.entry(&place, e.kind, &mut links) {
                below.push(place);
            }
        }
        self.leftovers(at, dir, beside, &links);
        below
    }

    /// A record that does not open. True: the directory was moved away.
    fn bad_record(&mut self, visit: &Visit, fault: &DirFault) -> bool {
        let gone = match fault {
            RecordFault::Missing | RecordFault::Text => true,
            RecordFault::NotARecord | RecordFault::Unreadable(_) => false,
            // If the root's record opens, the keys are those of the vault.
            RecordFault::Seal(OpenError::NoKey) => self.vault.read_names(&*self.root().dir).is_ok(),
            // A newer program may have written it.
            RecordFault::Content(_) => false,
            RecordFault::Seal(OpenError::Unauthentic | OpenError::Truncated) => true,
        };
        let at = &visit.at;
        let text = format!("its directory record does not open, so the names in it are lost: {fault}");
        if gone && self.repair && !visit.is_root {
            return self.move_to_lost(at, kind::RECORD, text);
        }
        self.note(at, kind::RECORD, Found::Damage, text);
        false
    }

    /// Opens the name of what the listing shows; `None` for what is no entry, or was moved away.
    fn name(
        &mut self,
        visit: &Visit,
        dir: &Arc<dyn BackendDir>,
        names: Option<&Names>,
        e: &Listed,
        beside: &mut Beside,
    ) -> Option<Place> {
        let at = &visit.at;
        let unnamed = at.below(dir, &e.name, None);
        match classify(self.vault.name_mode, e.name.as_bytes()) {
            Stored::Root if visit.is_root => return None,
            Stored::DirRecord => return None,
            Stored::Root | Stored::Foreign => {
                // What begins as our own names do is of no concern to the tree; anything else may have been an entry, its name altered.
                let ours = e.name.as_bytes().starts_with(RESERVED_PREFIX.as_bytes());
                let found = if ours { Found::Harmless } else { Found::Damage };
                let text = "something that this version of Lamassu did not write; move it out of the vault's directory";
                self.note(&unnamed, kind::FOREIGN, found, text.to_owned());
                return None;
            }
            Stored::Companion(hash) => {
                beside.companions.push((hash, e.name.clone()));
                return None;
            }
            Stored::LinkRest(id) => {
                beside.rests.push((id, e.name.clone()));
                return None;
            }
            Stored::Long(hash) => drop(beside.longs.insert(hash)),
            Stored::Sealed(_) | Stored::Plain => {}
        }
        let Some(names) = names else { return Some(unnamed) };
        match names.open(&**dir, &e.name) {
            Ok(Some(plain)) => Some(at.below(dir, &e.name, Some(&plain))),
            Ok(None) => None,
            Err(fault) => self.bad_name(unnamed, fault),
        }
    }

    fn bad_name(&mut self, at: Place, fault: NameFault) -> Option<Place> {
        let what = match fault {
            NameFault::NoCompanion | NameFault::WrongCompanion => kind::COMPANION,
            NameFault::Foreign | NameFault::Unauthentic | NameFault::Impossible | NameFault::WrongForm => kind::NAME,
        };
        let text = format!("its name does not open: {fault}; it can be read by its path in the store");
        if self.repair && self.move_to_lost(&at, what, text.clone()) {
            return None;
        }
        if !self.repair {
            self.note(&at, what, Found::Damage, text);
        }
        Some(at)
    }

    /// Companions whose entries are not there.
    fn leftovers(&mut self, at: &Place, dir: &Arc<dyn BackendDir>, beside: Beside, links: &Links) {
        let orphans = beside.companions.into_iter().filter(|(hash, name)| {
            debug_assert_eq!(name, OsStr::new(&companion_name(hash)));
            !beside.longs.contains(hash)
        });
        let mut orphans: Vec<OsString> = orphans.map(|(_, name)| name).collect();
        // With a link whose head does not open nobody knows whose the rests are.
        if links.unknown == 0 {
            orphans.extend(beside.rests.into_iter().filter(|(id, _)| !links.rests.contains(id)).map(|(_, name)| name));
        }
        for name in orphans {
            let place = at.below(dir, &name, None);
            self.clear(&place, kind::ORPHAN, "left by an interrupted change; nothing needs it");
        }
    }

    fn staging(&mut self) -> Result<()> {
        let root = self.root();
        let staging = match root.dir.open_dir(OsStr::new(lamassu_format::name::STAGING)) {
            Err(e) if is_not_found(&e) => return Ok(()),
            other => other.map_err(crate::error::io("open lamassu.staging"))?,
        };
        let at = root.below(&root.dir, OsStr::new(lamassu_format::name::STAGING), None);
        for e in staging.read_dir().map_err(listing)? {
            let place = at.below(&staging, &e.name, None);
            // A writer has cleared what was its own when it opened the vault: this is something else, or we are read-only.
            let text = "left by an interrupted mkdir or rmdir; the next writer clears it away".to_owned();
            let strange = !self.vault.options.read_only;
            match strange {
                true => self.note(
                    &place,
                    kind::STAGING,
                    Found::Damage,
                    "something that Lamassu did not put there".to_owned(),
                ),
                false => self.note(&place, kind::STAGING, Found::Harmless, text),
            }
        }
        Ok(())
    }
}
