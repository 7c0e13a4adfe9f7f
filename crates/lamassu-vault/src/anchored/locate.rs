//! Where recovery finds recorded objects if the store has kept a given number of moves: directories by their objects,
//! entries by their tokens; and whether what is there matches the record.

use super::Anchored;
use super::history::History;
use crate::digests::{digest_of_dataset, digest_of_text, object_kind};
use crate::error::is_not_found;
use crate::record::read_text;
use crate::walk::header_id;
use crate::{Kind, Vault, symlink};
use lamassu_anchor::row::{Content, Sealed};
use lamassu_anchor::{Digest, EntryPlace, EntryRow, ObjectId, Token};
use lamassu_format::name::DIR_RECORD;
use lamassu_store::backend::Stat;
use lamassu_store::{BackendDir, File};
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;

/// A directory deeper than this is not looked for: its names stay as they are.
const DEPTH_MAX: usize = 1_000;

/// An entry in one of the places.
#[derive(Clone)]
pub(super) struct Item {
    pub dir: Arc<dyn BackendDir>,
    pub name: OsString,
    pub st: Stat,
}

impl Item {
    pub fn is_dir(&self) -> bool {
        self.st.kind == Kind::Dir
    }
}

/// The store as it would be if it had kept `kept` moves.
pub(super) struct Located<'a> {
    vault: &'a Vault,
    anchored: &'a Anchored,
    history: &'a History,
    kept: usize,
    dirs: HashMap<ObjectId, Arc<dyn BackendDir>>,
    looked_for: HashSet<ObjectId>,
    listed: HashMap<ObjectId, HashMap<Token, OsString>>,
}

impl<'a> Located<'a> {
    pub fn new(vault: &'a Vault, anchored: &'a Anchored, history: &'a History, kept: usize) -> Located<'a> {
        let dirs = HashMap::from([(ObjectId::ROOT, vault.dirs.root().handle.clone())]);
        Located { vault, anchored, history, kept, dirs, looked_for: HashSet::new(), listed: HashMap::new() }
    }

    /// The entry at a place.
    pub fn item(&mut self, place: EntryPlace) -> Option<Item> {
        let dir = self.dir(place.dir)?;
        let name = self.name_in(place, &dir)?;
        match dir.stat_entry(&name) {
            Ok(st) => Some(Item { dir, name, st }),
            Err(error) => {
                if !is_not_found(&error) {
                    tracing::error!(entry = %name.to_string_lossy(), %error, "it cannot be looked at");
                }
                None
            }
        }
    }

    fn name_in(&mut self, place: EntryPlace, dir: &Arc<dyn BackendDir>) -> Option<OsString> {
        let anchored = self.anchored;
        let listed = self.listed.entry(place.dir).or_insert_with(|| {
            let listed = dir.read_dir().unwrap_or_default().into_iter();
            listed.map(|entry| (anchored.place(place.dir, &entry.name).name, entry.name)).collect()
        });
        listed.get(&place.name).cloned()
    }

    /// A directory at its place then.
    pub fn dir(&mut self, object: ObjectId) -> Option<Arc<dyn BackendDir>> {
        if let Some(dir) = self.dirs.get(&object) {
            return Some(dir.clone());
        }
        // A directory cannot contain itself.
        if self.looked_for.len() >= DEPTH_MAX || !self.looked_for.insert(object) {
            return None;
        }
        let place = match self.anchored.anchor.row(object).map(|row| row.content) {
            Ok(Content::Dir { parent, name, .. }) => {
                self.history.recorded_at(EntryPlace { dir: parent, name }, self.kept)
            }
            Ok(_) => None,
            Err(_) => self.history.removed_at(object, self.kept),
        };
        let dir = place.and_then(|place| self.item(place)).and_then(|item| opened(&item));
        self.looked_for.remove(&object);
        self.dirs.extend(dir.clone().map(|dir| (object, dir)));
        dir
    }

    /// Whether an item is the object of an entry, by its row.
    pub fn fits(&self, entry: &EntryRow, item: &Item) -> bool {
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

    /// A file matches its row if its first page does.
    fn is_file(&self, object: ObjectId, item: &Item) -> bool {
        let Ok(Some(backing)) = item.dir.open_same(&item.name, &item.st, false) else { return false };
        let tag = item.name.to_string_lossy();
        // A mismatch here is no damage.
        let file = File::open_object(self.vault.ctx_silent.clone(), backing, item.st.len, &tag, object);
        file.is_ok_and(|file| file.read_at(0, &mut [0]).is_ok())
    }

    /// A directory matches by its record; if it has none, by the entries recorded in it.
    fn is_dir(&self, object: ObjectId, record: Sealed, item: &Item) -> bool {
        let Some(dir) = opened(item) else { return false };
        if record != Sealed::Nothing {
            let seen = read_text(&*dir, OsStr::new(DIR_RECORD)).map_or(Digest::NONE, |text| digest_of_text(&text));
            let dataset = || header_id(&*dir).ok().flatten().map(|id| digest_of_dataset(&id));
            return record.is_current(seen) || dataset().is_some_and(|seen| record.is_current(seen));
        }
        let Ok(recorded) = self.anchored.anchor.entries(object) else { return false };
        let listed = dir.read_dir().unwrap_or_default();
        let shown: HashSet<Token> = listed.iter().map(|entry| self.anchored.place(object, &entry.name).name).collect();
        let is_moved = |name: &Token| self.history.places.contains(&EntryPlace { dir: object, name: *name });
        recorded.keys().all(|name| shown.contains(name) || is_moved(name))
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
