//! Accepting: a person decides that the store's state at a path is the newest (`docs/freshness.md`, section 6).
//!
//! Directories on the way are verified, not accepted. Nothing is accepted that does not open. A new state keeps the
//! mode and the owner in its row; an unrecorded entry gets those that the store shows.

use super::Anchored;
use super::take::{Taken, Taker};
use crate::error::{io, is_not_found};
use crate::inode::StoreId;
use crate::names::NameFault;
use crate::path::components;
use crate::walk::is_entry;
use crate::{Kind, ROOT, Result, Vault, VaultError};
use lamassu_anchor::row::Content;
use lamassu_anchor::{AnchorError, Decided, EntryPlace, EntryRow, ObjectId, ObjectKind, Row, SealedPart, Token};
use lamassu_store::BackendDir;
use lamassu_store::backend::Stat;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Keys in one commit.
const BATCH_LEN: usize = 10_000;

/// The result of accepting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accepted {
    /// Objects whose content, record or attributes were outdated.
    pub changed: u64,
    /// Entries that were not recorded, or had another kind.
    pub added: u64,
    /// Entries missing in the store, with everything below them.
    pub removed: u64,
    /// Entries that were the newest already.
    pub kept: u64,
    /// Entries that do not open, and stay as they were.
    pub damaged: u64,
}

impl Vault {
    /// Durably accepts what the store shows at a plain path as the newest; `recursive`: also everything below a
    /// directory. A vault without an anchor has nothing to accept.
    ///
    /// # Errors
    /// [`VaultError::NotFound`] if neither the store nor the anchor has something there; [`VaultError::Outdated`] for a
    /// directory on the way; [`VaultError::Damaged`] for what does not open; [`VaultError::Refused`] if some of it is
    /// in use, or the vault is not anchored; [`VaultError::Anchor`], those of the store.
    pub fn accept(&self, path: &OsStr, recursive: bool) -> Result<Accepted> {
        let _pass = self.change()?;
        let anchored = self.anchored.as_ref().ok_or(VaultError::Refused("the vault is not anchored"))?;
        self.settle_all()?;
        let _tree = self.tree.write();
        self.sync_store()?;
        anchored.anchor.commit(anchored.covered())?;
        let taker = Taker::new(self, anchored.anchor.degree());
        let mut run = Run {
            vault: self,
            anchored,
            taker,
            decided: Decided::default(),
            seen: HashMap::new(),
            done: Accepted::default(),
        };
        match self.way_to(anchored, path)? {
            Some((dir, object, name, stored)) => {
                let item = Item { dir, object, name, stored };
                run.below(vec![item], recursive, true)?;
            }
            None => run.root(recursive)?,
        }
        // Completed writes of files must be durable before the anchor says so.
        self.sync_store()?;
        run.flush()?;
        let (is_all, done) = (recursive && components(path)?.is_empty(), run.done);
        if let Some(last) = self.book.last().filter(|_| is_all) {
            anchored.anchor.sessions_go_to(last)?;
        }
        Ok(done)
    }

    /// Checks that there is something to accept at a plain path, in the store or in the anchor. Changes nothing.
    ///
    /// # Errors
    /// As [`Vault::accept`].
    pub fn may_accept(&self, path: &OsStr) -> Result<()> {
        let anchored = self.anchored.as_ref().ok_or(VaultError::Refused("the vault is not anchored"))?;
        let _tree = self.tree.read();
        let Some((dir, object, name, _)) = self.way_to(anchored, path)? else { return Ok(()) };
        if anchored.anchor.entry(&anchored.place(object, &name))?.is_some() {
            return Ok(());
        }
        dir.stat_entry(&name).map(drop).map_err(io("stat"))
    }

    /// The directory of a path, and the stored name in it; `None`: the root. The directories on the way are verified.
    #[allow(clippy::type_complexity)]
    fn way_to(
        &self,
        anchored: &Anchored,
        path: &OsStr,
    ) -> Result<Option<(Arc<dyn BackendDir>, ObjectId, OsString, PathBuf)>> {
        let names = components(path)?;
        let Some((last, way)) = names.split_last() else { return Ok(None) };
        let (mut dir, mut object, mut stored) = (self.dirs.root().handle.clone(), ObjectId::ROOT, PathBuf::new());
        for name in way {
            let kept = self.sealed_in(&*dir, object, name, &stored)?;
            stored.push(&kept);
            let entry = anchored.anchor.entry(&anchored.place(object, &kept))?;
            let entry = entry.ok_or(VaultError::NotFound)?;
            if entry.kind != ObjectKind::Dir {
                return Err(VaultError::NotDirectory);
            }
            dir = dir.open_dir(&kept).map_err(io("open a directory"))?;
            object = entry.object;
        }
        let kept = self.sealed_in(&*dir, object, last, &stored)?;
        stored.push(&kept);
        Ok(Some((dir, object, kept, stored)))
    }

    /// The stored name of an entry of a directory whose record is the newest.
    fn sealed_in(&self, dir: &dyn BackendDir, object: ObjectId, name: &OsStr, stored: &Path) -> Result<OsString> {
        let damaged = |_| super::take::damaged("directory record", stored);
        let text = self.record_text(dir).map_err(damaged)?;
        if let Some(text) = &text {
            self.verify_record(object, Some(text), &|| stored.display().to_string())?;
        }
        Ok(self.names_of_text(text).map_err(damaged)?.seal(name)?.name)
    }
}

/// Something to accept.
struct Item {
    dir: Arc<dyn BackendDir>,
    /// the object of that directory
    object: ObjectId,
    name: OsString,
    stored: PathBuf,
}

struct Run<'a> {
    vault: &'a Vault,
    anchored: &'a Anchored,
    taker: Taker<'a>,
    decided: Decided,
    /// Inodes with several names that were found so far.
    seen: HashMap<StoreId, ObjectId>,
    done: Accepted,
}

impl Run<'_> {
    fn flush(&mut self) -> Result<()> {
        match self.decided.is_empty() {
            true => Ok(()),
            false => Ok(self.anchored.anchor.decide(std::mem::take(&mut self.decided))?),
        }
    }

    fn row(&self, object: ObjectId) -> Result<Row> {
        match self.decided.rows.get(&object) {
            Some(Some(row)) => Ok(row.clone()),
            Some(None) | None => Ok(self.anchored.anchor.row(object)?),
        }
    }

    /// The row of an entry's object; `None`: the entry leads nowhere, as rows were lost.
    fn row_if_known(&self, object: ObjectId) -> Result<Option<Row>> {
        match self.row(object) {
            Err(VaultError::Anchor(AnchorError::Unknown { .. })) => Ok(None),
            row => row.map(Some),
        }
    }

    fn root(&mut self, recursive: bool) -> Result<()> {
        self.done.changed += u64::from(self.vault.root_permissions.accept()?);
        let shown = self.taker.root()?;
        self.replace(ObjectId::ROOT, shown)?;
        if recursive {
            let items = self.items(&self.vault.dirs.root().handle.clone(), ObjectId::ROOT, Path::new(""))?;
            self.below(items, true, false)?;
        }
        Ok(())
    }

    /// Accepts entries and, if `recursive`, everything below them.
    fn below(&mut self, mut items: Vec<Item>, recursive: bool, is_named: bool) -> Result<()> {
        let mut is_named = is_named;
        while let Some(item) = items.pop() {
            let stored = item.stored.clone();
            match self.entry(item) {
                Ok(Some((dir, object))) if recursive => items.extend(self.items(&dir, object, &stored)?),
                Ok(_) => {}
                Err(error @ (VaultError::Anchor(_) | VaultError::Refused(_))) => return Err(error),
                Err(error) if is_named => return Err(error),
                Err(error) => {
                    tracing::warn!(entry = %stored.display(), %error, "it is not accepted");
                    self.done.damaged += 1;
                }
            }
            is_named = false;
            if self.decided.len() >= BATCH_LEN {
                self.vault.sync_store()?;
                self.flush()?;
            }
        }
        Ok(())
    }

    /// The entries of a directory. Those that only the anchor has are removed.
    fn items(&mut self, dir: &Arc<dyn BackendDir>, object: ObjectId, stored: &Path) -> Result<Vec<Item>> {
        let listed = dir.read_dir().map_err(io("list a directory"))?.into_iter();
        let names = listed.map(|entry| entry.name).filter(|name| is_entry(self.vault.name_mode, name));
        let mut names: BTreeMap<Token, OsString> =
            names.map(|name| (self.anchored.place(object, &name).name, name)).collect();
        let mut recorded = Vec::new();
        for (name, entry) in self.anchored.anchor.entries(object)? {
            match names.remove(&name) {
                Some(stored) => recorded.push(stored),
                None => {
                    self.remove(EntryPlace { dir: object, name }, entry)?;
                    self.done.removed += 1;
                }
            }
        }
        let item = |name: OsString| Item { dir: dir.clone(), object, stored: stored.join(&name), name };
        // Recorded ones are returned last, so that they are taken first: another entry may be another name of the same
        // object.
        Ok(names.into_values().chain(recorded).map(item).collect())
    }

    /// Accepts an entry. Returns the directory to enter, with its object.
    fn entry(&mut self, item: Item) -> Result<Option<(Arc<dyn BackendDir>, ObjectId)>> {
        let place = self.anchored.place(item.object, &item.name);
        let recorded = self.anchored.anchor.entry(&place)?;
        match (recorded, item.dir.stat_entry(&item.name)) {
            (None, Err(e)) if is_not_found(&e) => Err(VaultError::NotFound),
            (Some(entry), Err(e)) if is_not_found(&e) => {
                self.remove(place, entry)?;
                self.done.removed += 1;
                Ok(None)
            }
            (_, Err(e)) => Err(io("stat")(e)),
            (recorded, Ok(st)) => self.shown(item, place, recorded, &st),
        }
    }

    fn shown(
        &mut self,
        item: Item,
        place: EntryPlace,
        recorded: Option<EntryRow>,
        st: &Stat,
    ) -> Result<Option<(Arc<dyn BackendDir>, ObjectId)>> {
        self.let_go(st)?;
        let same = recorded.filter(|entry| entry.kind == crate::digests::object_kind(st.kind));
        let known = self.seen.get(&StoreId::from(st)).copied();
        if same.is_some_and(|entry| known == Some(entry.object)) {
            self.done.kept += 1;
            return Ok(None);
        }
        let names =
            self.vault.read_names(&*item.dir).map_err(|_| super::take::damaged("directory record", &item.stored))?;
        match names.open(&*item.dir, &item.name) {
            Ok(Some(_)) => {}
            Err(NameFault::Unreadable(error)) => return Err(io("read a companion")(error)),
            Ok(None) | Err(_) => return Err(super::take::damaged("name", &item.stored)),
        }
        let Taken { st, row, dir } = self.taker.entry(&item.dir, &item.name, &item.stored)?;
        let has_row = same.map(|entry| self.row_if_known(entry.object)).transpose()?.flatten().is_some();
        let object = match same.filter(|_| has_row) {
            Some(entry) => {
                match self.replace(entry.object, row)? {
                    true => self.done.changed += 1,
                    false => self.done.kept += 1,
                }
                entry.object
            }
            None => {
                if let Some(entry) = recorded {
                    self.remove(place, entry)?;
                }
                self.done.added += 1;
                self.add(place, row, known)?
            }
        };
        if st.kind != Kind::Dir && st.nlink > 1 {
            self.seen.insert(StoreId::from(&st), object);
        }
        Ok(dir.map(|dir| (dir, object)))
    }

    /// Forgets what was known of an inode, which belongs to another state.
    fn let_go(&self, st: &Stat) -> Result<()> {
        let Some(ino) = self.vault.nodes.lock().find(StoreId::from(st)).filter(|ino| *ino != ROOT) else {
            return Ok(());
        };
        self.vault.let_go(ino, true);
        if self.vault.files.get(ino).is_some() {
            return Err(VaultError::Refused("it is in use: close it first"));
        }
        self.vault.dirs.drop_dir(ino);
        Ok(())
    }

    /// Adds an unrecorded entry: another name of an object found before, or a new object.
    fn add(&mut self, place: EntryPlace, mut row: Row, known: Option<ObjectId>) -> Result<ObjectId> {
        let object = match known {
            Some(object) => {
                row = self.row(object)?;
                row.links += 1;
                object
            }
            None => self.anchored.anchor.new_object(),
        };
        if let Content::Dir { parent, name, .. } = &mut row.content {
            (*parent, *name) = (place.dir, place.name);
        }
        self.decided.entries.insert(place, (object, Some(EntryRow { kind: row.kind(), object })));
        self.decided.rows.insert(object, Some(row));
        Ok(object)
    }

    /// Sets the content and the attributes of an object. Returns whether they have changed.
    fn replace(&mut self, object: ObjectId, shown: Row) -> Result<bool> {
        let before = self.row(object)?;
        let is_newest = |part| before.sealed(part).is_current(shown_digest(&shown, part));
        let content = match (&before.content, shown.content.clone()) {
            (Content::Dir { parent, name, .. }, Content::Dir { record, .. }) => {
                Content::Dir { record, parent: *parent, name: *name }
            }
            (_, content) => content,
        };
        let is_same_file = match (before.file(), shown.file()) {
            (Some(before), Some(shown)) => {
                let is_twin = before.twin.is_some() && before.twin == Some(shown.root);
                before.open.is_none() && before.size == shown.size && (before.root == shown.root || is_twin)
            }
            _ => true,
        };
        let is_device_same = match (&before.content, &content) {
            (Content::Char(before), Content::Char(now)) | (Content::Block(before), Content::Block(now)) => {
                before == now
            }
            _ => true,
        };
        if is_newest(SealedPart::Attributes) && is_newest(SealedPart::Content) && is_same_file && is_device_same {
            return Ok(false);
        }
        self.anchored.files.forget(object);
        // Content of another owner is not that of the row, whose owner and mode would give it away.
        let of = if shown.uid == before.uid { &before } else { &shown };
        let (uid, gid, mode) = (of.uid, of.gid, of.mode);
        self.decided.rows.insert(object, Some(Row { content, attributes: shown.attributes, uid, gid, mode, ..before }));
        Ok(true)
    }

    /// Removes an entry, with everything recorded below it.
    fn remove(&mut self, place: EntryPlace, entry: EntryRow) -> Result<()> {
        let mut left = vec![(place, entry)];
        while let Some((place, entry)) = left.pop() {
            let object = entry.object;
            if entry.kind == ObjectKind::Dir {
                let below = self.anchored.anchor.entries(object)?.into_iter();
                left.extend(below.map(|(name, entry)| (EntryPlace { dir: object, name }, entry)));
            }
            self.decided.entries.insert(place, (object, None));
            if let Some(mut row) = self.row_if_known(object)? {
                row.links = row.links.saturating_sub(1);
                self.decided.rows.insert(object, (row.links > 0).then_some(row));
            }
        }
        Ok(())
    }
}

fn shown_digest(row: &Row, part: SealedPart) -> lamassu_anchor::Digest {
    use lamassu_anchor::row::Sealed;
    match row.sealed(part) {
        Sealed::Is(digest) | Sealed::Becomes { new: digest, .. } => digest,
        Sealed::Nothing => lamassu_anchor::Digest::NONE,
    }
}
