//! Where recovery finds what is recorded: directories by their objects, entries by their tokens, and whether what lies
//! there is what is recorded.

use super::{Anchored, digest_of_text, object_kind};
use crate::error::is_not_found;
use crate::record::read_text;
use crate::{Kind, Vault, symlink};
use lamassu_anchor::row::{Content, Intent, Sealed};
use lamassu_anchor::{Digest, Entry, EntryPlace, ObjectId, Token};
use lamassu_format::name::DIR_RECORD;
use lamassu_store::backend::Stat;
use lamassu_store::{BackendDir, File};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;

/// A directory deeper than this is not looked for: its names stay as they are.
const DEPTH_MAX: usize = 1_000;

/// What lies in one of the places.
pub(super) struct Item {
    pub place: EntryPlace,
    pub dir: Arc<dyn BackendDir>,
    pub name: OsString,
    pub st: Stat,
}

impl Item {
    pub fn is_dir(&self) -> bool {
        self.st.kind == Kind::Dir
    }
}

/// The places that intents name.
pub(super) struct Places<'a> {
    vault: &'a Vault,
    anchored: &'a Anchored,
    all: BTreeSet<EntryPlace>,
    /// Stored names of places that moves lead to.
    names: HashMap<EntryPlace, OsString>,
    /// Objects that removals took away: they may lie there still.
    removed: HashMap<ObjectId, EntryPlace>,
    /// Where what lies in a place may be instead: from where a move leads there.
    sources: HashMap<EntryPlace, EntryPlace>,
    dirs: HashMap<ObjectId, Arc<dyn BackendDir>>,
    looked_for: HashSet<ObjectId>,
    listed: HashMap<ObjectId, HashMap<Token, OsString>>,
}

impl<'a> Places<'a> {
    pub fn of(vault: &'a Vault, anchored: &'a Anchored, intents: &BTreeMap<u64, Intent>) -> Places<'a> {
        let mut places = Places {
            vault,
            anchored,
            all: BTreeSet::new(),
            names: HashMap::new(),
            removed: HashMap::new(),
            sources: HashMap::new(),
            dirs: HashMap::from([(ObjectId::ROOT, vault.dirs.root().handle.clone())]),
            looked_for: HashSet::new(),
            listed: HashMap::new(),
        };
        for intent in intents.values() {
            match intent {
                Intent::Remove { at, was } => {
                    places.all.insert(*at);
                    places.removed.insert(was.object, *at);
                }
                Intent::Move { from, to, to_name } => {
                    places.all.extend([*from, *to]);
                    places.names.insert(*to, OsString::from_vec(to_name.to_vec()));
                    places.sources.insert(*to, *from);
                }
            }
        }
        places
    }

    pub fn all(&self) -> Vec<EntryPlace> {
        self.all.iter().copied().collect()
    }

    /// The stored name of a place that a move led to.
    pub fn name(&self, place: &EntryPlace) -> Option<OsString> {
        self.names.get(place).cloned()
    }

    /// What lies in a place.
    pub fn item(&mut self, place: EntryPlace) -> Option<Item> {
        let dir = self.dir(place.dir)?;
        let name = self.listed_in(place.dir, &dir).get(&place.name)?.clone();
        match dir.stat_entry(&name) {
            Ok(st) => Some(Item { place, dir, name, st }),
            Err(error) => {
                if !is_not_found(&error) {
                    tracing::error!(entry = %name.to_string_lossy(), %error, "it cannot be looked at");
                }
                None
            }
        }
    }

    fn listed_in(&mut self, object: ObjectId, dir: &Arc<dyn BackendDir>) -> &HashMap<Token, OsString> {
        let anchored = self.anchored;
        self.listed.entry(object).or_insert_with(|| {
            let listed = dir.read_dir().unwrap_or_default().into_iter();
            listed.map(|entry| (anchored.place(object, &entry.name).name, entry.name)).collect()
        })
    }

    /// A directory, wherever it lies now.
    pub fn dir(&mut self, object: ObjectId) -> Option<Arc<dyn BackendDir>> {
        if let Some(dir) = self.dirs.get(&object) {
            return Some(dir.clone());
        }
        // A directory is not looked for in itself.
        if self.looked_for.len() >= DEPTH_MAX || !self.looked_for.insert(object) {
            return None;
        }
        let dir = self.find_dir(object);
        self.looked_for.remove(&object);
        self.dirs.extend(dir.clone().map(|dir| (object, dir)));
        dir
    }

    fn find_dir(&mut self, object: ObjectId) -> Option<Arc<dyn BackendDir>> {
        let Ok(row) = self.anchored.anchor.row(object) else { return self.find_removed_dir(object) };
        let Content::Dir { parent, name, .. } = row.content else { return None };
        let home = EntryPlace { dir: parent, name };
        let others: Vec<_> = match self.all.contains(&home) {
            true => self.all.iter().copied().filter(|place| *place != home).collect(),
            // Nothing moved it away.
            false => return self.item(home).and_then(|item| opened(&item)),
        };
        let entry = Entry { kind: row.kind(), object };
        for place in [home].into_iter().chain(others) {
            let Some(item) = self.item(place).filter(|item| item.is_dir()) else { continue };
            if self.fits(&entry, &item) {
                return opened(&item);
            }
        }
        None
    }

    /// Nothing is left of a directory that was removed but where it was, or from where it had been moved there.
    fn find_removed_dir(&mut self, object: ObjectId) -> Option<Arc<dyn BackendDir>> {
        let mut at = self.removed.get(&object).copied();
        let mut seen = HashSet::new();
        while let Some(place) = at.filter(|place| seen.insert(*place)) {
            if let Some(item) = self.item(place).filter(|item| item.is_dir()) {
                return opened(&item);
            }
            at = self.sources.get(&place).copied();
        }
        None
    }

    /// Whether what lies somewhere is what an entry names, by its row.
    pub fn fits(&self, entry: &Entry, item: &Item) -> bool {
        let Ok(row) = self.anchored.anchor.row(entry.object) else { return false };
        if object_kind(item.st.kind) != entry.kind || row.kind() != entry.kind {
            return false;
        }
        match &row.content {
            Content::File(_) => self.is_file(entry.object, item),
            Content::Dir { record, .. } => self.is_dir(entry.object, *record, item),
            Content::Link(target) => self.link_digest(item).is_some_and(|seen| target.is_current(seen)),
            Content::Char(device) | Content::Block(device) => item.st.rdev == *device,
            Content::Fifo | Content::Socket => true,
        }
    }

    /// A file is what its row says if its first page is.
    fn is_file(&self, object: ObjectId, item: &Item) -> bool {
        let Ok(Some(backing)) = item.dir.open_same(&item.name, &item.st, false) else { return false };
        let tag = item.name.to_string_lossy();
        let file = File::open_object(self.vault.ctx_read.clone(), backing, item.st.len, &tag, object);
        file.is_ok_and(|file| file.read_at(0, &mut [0]).is_ok())
    }

    /// A directory by its record; where it has none, by what is recorded in it.
    fn is_dir(&self, object: ObjectId, record: Sealed, item: &Item) -> bool {
        let Some(dir) = opened(item) else { return false };
        if record != Sealed::Nothing {
            let seen = read_text(&*dir, OsStr::new(DIR_RECORD)).map_or(Digest::NONE, |text| digest_of_text(&text));
            return record.is_current(seen);
        }
        let Ok(recorded) = self.anchored.anchor.entries(object) else { return false };
        let listed = dir.read_dir().unwrap_or_default();
        let shown: HashSet<Token> = listed.iter().map(|entry| self.anchored.place(object, &entry.name).name).collect();
        let is_there =
            |name: &Token| shown.contains(name) || self.all.contains(&EntryPlace { dir: object, name: *name });
        recorded.keys().all(is_there)
    }

    fn link_digest(&self, item: &Item) -> Option<Digest> {
        let mut text = item.dir.read_link(&item.name).ok()?.into_vec();
        if let Some(rest) = symlink::rest_of(&self.vault.ctx.ring, &*item.dir, &item.name, &item.st) {
            text.extend(read_text(&*item.dir, &rest).ok()?);
        }
        Some(digest_of_text(&text))
    }
}

fn opened(item: &Item) -> Option<Arc<dyn BackendDir>> {
    item.dir.open_dir(&item.name).ok()
}
