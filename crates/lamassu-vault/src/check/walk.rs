//! Walking the tree: directories by their records, entries by their names.

use super::entry::{Links, looked_at, may_be_link};
use super::fresh::Left;
use super::{Checker, Found, Known, Located, kind, listing};
use crate::error::is_not_found;
use crate::event::IntegrityKind;
use crate::names::{DirFault, NameFault, Names};
use crate::record::RecordFault;
use crate::walk::{Ahead, Failed, Met, Visit, walk};
use crate::{Kind, Result};
use lamassu_anchor::ObjectId;
use lamassu_crypto::ring::OpenError;
use lamassu_format::name::{RESERVED_PREFIX, Stored, classify, companion_name};
use lamassu_store::BackendDir;
use lamassu_store::backend::Listed;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

/// What is known of a directory while its entries are walked.
pub(super) struct Here {
    at: Located,
    /// `None` where its record does not open.
    names: Option<Names>,
    beside: Beside,
    links: Links,
    /// The entries that are recorded in it and were not found yet.
    left: Left,
}

/// What one directory held besides entries.
#[derive(Default)]
struct Beside {
    longs: HashSet<[u8; 32]>,
    companions: Vec<([u8; 32], OsString)>,
    rests: Vec<([u8; 16], OsString)>,
}

const OPEN_TO_OTHERS: &str = "others may enter it (its mode is not 0700), or it belongs to another user than the vault: no writer opens \
                              the vault; look at what lies in it, then move it away (a new one is made), or give it to the \
                              vault's user with mode 0700";

impl Checker<'_> {
    pub(super) fn root(&self) -> Located {
        let dir = self.vault.dirs.root().handle.clone();
        let object = self.vault.anchored.as_ref().map(|_| ObjectId::ROOT);
        Located { dir, name: OsString::new(), stored: PathBuf::new(), plain: Some(PathBuf::new()), object }
    }

    pub(super) fn whole(&mut self) -> Result<()> {
        self.parts(vec![None])?;
        self.staging()
    }

    /// `None`: the root.
    pub(super) fn parts(&mut self, places: Vec<Option<Located>>) -> Result<()> {
        let root = self.root();
        self.count(places.iter().map(|place| place.as_ref().unwrap_or(&root)))?;
        for place in places {
            let at = match place {
                None => root.clone(),
                Some(at) => match self.check_entry(&at, None, &mut Links::default()) {
                    Some(Kind::Dir) => at,
                    Some(_) | None => continue,
                },
            };
            walk(at.met(at.known()), self)?;
        }
        Ok(())
    }

    /// Counts the total: entries except directories, and their backing bytes.
    fn count<'p>(&self, places: impl Iterator<Item = &'p Located>) -> Result<()> {
        let mut ahead = Ahead {
            mode: self.vault.name_mode,
            skips_datasets: self.vault.has_datasets(),
            measure: |st| st.len,
            is_stopped: &|| false,
            entries: 0,
            bytes: 0,
        };
        for at in places {
            let st = if at.is_root() { at.dir.stat() } else { at.dir.stat_entry(&at.name) };
            match st {
                Ok(st) if st.kind == Kind::Dir => {
                    walk(at.met(()), &mut ahead)?;
                }
                Ok(st) => ahead.add(&st),
                Err(_) => {}
            }
        }
        self.progress.total(ahead.entries, ahead.bytes);
        Ok(())
    }

    /// A record that does not open. True: the directory was moved away.
    fn bad_record(&mut self, at: &Located, fault: &DirFault) -> bool {
        let gone = match fault {
            RecordFault::Missing | RecordFault::Text => true,
            RecordFault::NotARecord | RecordFault::Unreadable(_) => false,
            // If the root's record opens, the keys are those of the vault.
            RecordFault::Seal(OpenError::NoKey) => self.vault.read_names(&*self.root().dir).is_ok(),
            // A newer program may have written it.
            RecordFault::Content(_) => false,
            RecordFault::Seal(OpenError::Unauthentic | OpenError::Truncated) => true,
        };
        let text = format!("its directory record does not open, so the names in it are lost: {fault}");
        // In an anchored vault nothing that is recorded leaves its place.
        if gone && self.repair && !at.is_root() && at.object.is_none() {
            return self.move_to_lost(at, kind::RECORD, text);
        }
        self.note(at, kind::RECORD, Found::Damage, text);
        false
    }

    /// Opens the name of a listed entry; `None` if it is not an entry of the tree, or was moved away.
    fn name(&mut self, here: &mut Here, dir: &Arc<dyn BackendDir>, e: &Listed) -> Option<Located> {
        let Here { at, names, beside, links, left } = here;
        let unnamed = at.below(dir, &e.name, None);
        match classify(self.vault.name_mode, e.name.as_bytes()) {
            Stored::Root if at.is_root() => return None,
            Stored::DirRecord => return None,
            Stored::Root | Stored::Foreign => {
                // Names with the reserved prefix do not concern the tree. Any other may be an entry whose name was
                // altered.
                let ours = e.name.as_bytes().starts_with(RESERVED_PREFIX.as_bytes());
                links.unknown += u64::from(!ours && may_be_link(e.kind));
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
            Err(fault) => {
                let is_recorded = self.is_recorded(at, left, &unnamed);
                self.bad_name(unnamed, fault, is_recorded)
            }
        }
    }

    /// A name that does not open. `None`: the entry was moved away, which what is recorded never is.
    fn bad_name(&mut self, at: Located, fault: NameFault, is_recorded: bool) -> Option<Located> {
        if let NameFault::Unreadable(error) = fault {
            self.note_io(&at, "the companion of its name cannot be read", &error);
            return Some(at);
        }
        let what = IntegrityKind::from(&fault).word();
        let text = format!("its name does not open: {fault}; it can be read by its path in the store");
        let may_move = self.repair && !is_recorded;
        if may_move && self.move_to_lost(&at, what, text.clone()) {
            return None;
        }
        if !may_move {
            self.note(&at, what, Found::Damage, text);
        }
        Some(at)
    }

    /// Companions without an entry, in a directory whose entries were all met.
    fn leftovers(&mut self, at: &Located, dir: &Arc<dyn BackendDir>, beside: Beside, links: &Links) {
        // A move that could not be completed may need them.
        if let (Some(anchored), Some(object)) = (&self.vault.anchored, at.object)
            && anchored.must_stay_in(object)
        {
            return;
        }
        let orphans = beside.companions.into_iter().filter(|(hash, name)| {
            debug_assert_eq!(name, OsStr::new(&companion_name(hash)));
            !beside.longs.contains(hash)
        });
        let mut orphans: Vec<OsString> = orphans.map(|(_, name)| name).collect();
        // If the head of a link does not open, or was not looked at, it is unknown whose rest this is.
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
        if super::repair::is_lost_taken(&*root.dir)? {
            let at = root.below(&root.dir, OsStr::new(lamassu_format::name::LOST), None);
            let text = "it is no directory, so nothing can be moved there that is in the way: look at what it is, and move \
                        it away";
            self.note(&at, kind::FOREIGN, Found::Damage, text.to_owned());
        }
        let staging = match root.dir.open_dir(OsStr::new(lamassu_format::name::STAGING)) {
            Err(e) if is_not_found(&e) => return Ok(()),
            other => other.map_err(crate::error::io("open lamassu.staging"))?,
        };
        let at = root.below(&root.dir, OsStr::new(lamassu_format::name::STAGING), None);
        // A writer would have refused to open the vault. This reports it to a read-only check.
        if self.vault.options.read_only && crate::staging::is_open_to_others(&*root.dir, &*staging)? {
            self.note(&at, kind::STAGING, Found::Damage, OPEN_TO_OTHERS.to_owned());
        }
        for e in staging.read_dir().map_err(listing)? {
            let place = at.below(&staging, &e.name, None);
            // A writer clears its own leftovers when it opens the vault: this is something else.
            let text = "left by an interrupted mkdir or rmdir; the next writer clears it away".to_owned();
            let strange = !self.vault.options.read_only || !crate::staging::is_put_here(&e.name);
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

impl Visit for Checker<'_> {
    type Passed = Known;
    type Here = Here;
    type Error = crate::VaultError;

    fn open(&self, above: &dyn BackendDir, name: &OsStr) -> io::Result<Arc<dyn BackendDir>> {
        looked_at(|| above.open_dir(name))
    }

    fn enter(&mut self, met: &Met<Known>, dir: &Arc<dyn BackendDir>) -> Result<Option<Here>> {
        self.report.directories += 1;
        let at = Located::of(met);
        if at.is_root() {
            self.xattrs_of(&at, dir, None, Kind::Dir);
        }
        if !self.is_record_newest(&at, &**dir)? {
            return Ok(None);
        }
        let left = self.recorded_in(&at)?;
        let names = match self.vault.read_names(&**dir) {
            Ok(names) => Some(names),
            Err(fault) if self.bad_record(&at, &fault) => return Ok(None),
            Err(_) => None,
        };
        Ok(Some(Here { at, names, beside: Beside::default(), links: Links::default(), left }))
    }

    fn entry(
        &mut self,
        _met: &Met<Known>,
        dir: &Arc<dyn BackendDir>,
        here: &mut Here,
        entry: &Listed,
    ) -> Result<Option<Known>> {
        let Some(mut place) = self.name(here, dir, entry) else { return Ok(None) };
        match self.judge(&here.at, &mut here.left, &place, entry.kind)? {
            Some(object) => place.object = object,
            None => {
                // What was moved away has taken its rest along. What is left may be in the place of a link.
                let is_gone = matches!(dir.stat_entry(&entry.name), Err(e) if is_not_found(&e));
                here.links.unknown += u64::from(!is_gone);
                return Ok(None);
            }
        }
        let kind = self.check_entry(&place, entry.kind, &mut here.links);
        Ok((kind == Some(Kind::Dir)).then_some(place.known()))
    }

    fn leave(&mut self, _met: &Met<Known>, dir: &Arc<dyn BackendDir>, here: Here) {
        self.missing(&here.at, &here.left);
        // An entry that the store withholds may need what seems to be left over.
        if here.left.is_empty() {
            self.leftovers(&here.at, dir, here.beside, &here.links);
        }
    }

    fn failed(&mut self, met: &Met<Known>, what: Failed, e: io::Error) -> Result<()> {
        let at = Located::of(met);
        match what {
            Failed::Open if is_not_found(&e) => self.note_moving(&at),
            Failed::Open => self.note_io(&at, "the directory does not open", &e),
            Failed::List => self.note_io(&at, "the directory cannot be listed", &e),
        }
        Ok(())
    }
}
