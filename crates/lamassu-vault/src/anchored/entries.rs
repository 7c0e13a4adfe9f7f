//! What a name leads to, and what users see of it, by the anchor (N1, N2).

use crate::digests::object_kind;
use crate::dirs::Dir;
use crate::error::{io, is_not_found, no_outcome};
use crate::event::{FoundBy, IntegrityEvent, IntegrityKind};
use crate::inode::Link;
use crate::target::{SET_ID, hold};
use crate::{Attr, Ino, Kind, ROOT, Result, Vault, VaultError};
use lamassu_anchor::judge::{self, EntryVerdict};
use lamassu_anchor::row::Content;
use lamassu_anchor::{ObjectId, Row};
use lamassu_store::BackendDir;
use lamassu_store::backend::{Listed, Stat};
use std::ffi::OsStr;
use std::path::Path;

/// How many reported entries are remembered, so that each is reported once.
const TOLD_MAX: usize = 65_536;

impl Vault {
    /// The store's entry under a name.
    pub(crate) fn shown(&self, dir: &Dir, stored: &OsStr) -> Result<Option<Stat>> {
        match dir.handle.stat_entry(stored) {
            Err(e) if is_not_found(&e) => Ok(None),
            shown => shown.map(Some).map_err(io("stat")),
        }
    }

    /// The object to which a name leads, if the store shows an entry of this kind there; 0 in a vault without an
    /// anchor. `None`: users see nothing there.
    ///
    /// # Errors
    /// [`VaultError::Outdated`], [`VaultError::Anchor`]; EIO: nobody knows whether a rename from or to there was made.
    pub(crate) fn judged(&self, dir: &Dir, stored: &OsStr, shown: Option<Kind>) -> Result<Option<ObjectId>> {
        let Some(anchored) = &self.anchored else { return Ok(shown.map(|_| ObjectId::default())) };
        let place = anchored.place(dir.object, stored);
        if anchored.is_unsettled(&place) {
            return Err(no_outcome());
        }
        let recorded = anchored.anchor.entry(&place)?;
        let path = || self.path_in(dir.ino, stored).display().to_string();
        match judge::entry(recorded.as_ref(), shown.map(object_kind)) {
            EntryVerdict::Current => Ok(recorded.map(|entry| entry.object)),
            EntryVerdict::Nothing => Ok(None),
            EntryVerdict::Missing => Err(self.outdated_as(IntegrityKind::Missing, "entry", path())),
            EntryVerdict::OtherKind => Err(self.outdated_as(IntegrityKind::OtherKind, "entry", path())),
            EntryVerdict::Unrecorded => {
                // A removed entry stays in the store for a moment.
                let is_new = anchored.anchor.may_make(&place) && anchored.tell(place);
                if is_new && !self.tell(self.unrecorded_event(path())) {
                    anchored.told.lock().remove(&place);
                }
                Ok(None)
            }
        }
    }

    /// The event for an unrecorded entry, which users do not see. After an interruption it is most likely what a writer
    /// was making, and then not damage.
    fn unrecorded_event(&self, path: String) -> IntegrityEvent {
        match self.is_after_crash() {
            false => {
                let text = "an entry that is not recorded is not shown: the store made it up, or put it back";
                IntegrityKind::Unrecorded.at(path, text)
            }
            true => {
                let text = "an entry that is not recorded is not shown: it was being made when an interruption came and \
                            nobody had synced it, or the store put it back";
                let event = IntegrityKind::Unrecorded.at(path, text).by(FoundBy::Recovery);
                IntegrityEvent { is_damage: false, ..event }
            }
        }
    }

    /// The store's entries of a directory, and the objects that only the anchor has there.
    ///
    /// # Errors
    /// [`VaultError::Anchor`]; those of the store; EIO: it is not known whether a rename from or to there was made, and
    /// what the store does not show may be under its other name.
    pub(crate) fn listed(&self, ino: Ino) -> Result<(Vec<Listed>, Vec<ObjectId>)> {
        let _tree = self.tree.read();
        // Entries are made and removed in the store and in the anchor under this lock.
        let _names = self.names_of(ino).read();
        let dir = self.dir(ino)?;
        let entries = dir.handle.read_dir().map_err(io("list a directory"))?;
        let Some(anchored) = &self.anchored else { return Ok((entries, Vec::new())) };
        let mut recorded = anchored.anchor.entries(dir.object)?;
        for entry in &entries {
            recorded.remove(&anchored.place(dir.object, &entry.name).name);
        }
        if !recorded.is_empty() && anchored.has_unsettled() && anchored.must_stay_in(dir.object) {
            return Err(no_outcome());
        }
        Ok((entries, recorded.into_values().map(|entry| entry.object).collect()))
    }

    /// The entry under a name of a directory that may have no node.
    ///
    /// # Errors
    /// [`VaultError::NotFound`]; those of [`Vault::judged`] and of the store.
    pub(crate) fn recorded_in(
        &self,
        handle: &dyn BackendDir,
        dir: ObjectId,
        name: &OsStr,
        path: &Path,
    ) -> Result<ObjectId> {
        let shown = match handle.stat_entry(name) {
            Err(e) if is_not_found(&e) => None,
            shown => Some(shown.map_err(io("stat"))?.kind),
        };
        let Some(anchored) = &self.anchored else { return shown.map(|_| dir).ok_or(VaultError::NotFound) };
        let recorded = anchored.anchor.entry(&anchored.place(dir, name))?;
        match judge::entry(recorded.as_ref(), shown.map(object_kind)) {
            EntryVerdict::Current => Ok(recorded.map(|entry| entry.object).unwrap_or_default()),
            EntryVerdict::Nothing | EntryVerdict::Unrecorded => Err(VaultError::NotFound),
            EntryVerdict::Missing => Err(self.outdated_as(IntegrityKind::Missing, "entry", path.display().to_string())),
            EntryVerdict::OtherKind => {
                Err(self.outdated_as(IntegrityKind::OtherKind, "entry", path.display().to_string()))
            }
        }
    }

    /// The entry under a stored name: its stat and its object.
    ///
    /// # Errors
    /// [`VaultError::NotFound`]; those of [`Vault::judged`] and of the store.
    pub(crate) fn found(&self, dir: &Dir, stored: &OsStr) -> Result<(Stat, ObjectId)> {
        let shown = self.shown(dir, stored)?;
        self.found_as(dir, stored, shown)?.ok_or(VaultError::NotFound)
    }

    /// The same for an entry that the store has just shown. `None`: users see nothing there.
    ///
    /// # Errors
    /// Those of [`Vault::judged`].
    pub(crate) fn found_as(&self, dir: &Dir, stored: &OsStr, shown: Option<Stat>) -> Result<Option<(Stat, ObjectId)>> {
        let object = self.judged(dir, stored, shown.map(|st| st.kind))?;
        let Some((st, object)) = shown.zip(object) else { return Ok(None) };
        self.refuse_other_object(dir, stored, &st, object)?;
        Ok(Some((st, object)))
    }

    /// Refuses a second object for a known inode of the store, if its numbers say which entry is which.
    fn refuse_other_object(&self, dir: &Dir, stored: &OsStr, st: &Stat, object: ObjectId) -> Result<()> {
        if self.anchored.is_none() {
            return Ok(());
        }
        let identified = self.told_apart(object, st, |nodes, go| nodes.identify(st, object, go))?;
        match identified {
            Ok((Some(ino), true)) => self.note_followed(ino, st),
            Ok(_) => {}
            Err(_) => return Err(self.outdated("entry", dir.ino, stored)),
        }
        Ok(())
    }

    /// The error for a node that is not under its name: if the anchor has it there, it is missing.
    pub(crate) fn gone(&self, link: &Link, object: ObjectId) -> VaultError {
        let Some(anchored) = &self.anchored else { return VaultError::Stale };
        let dir = self.nodes.lock().object(link.parent);
        match anchored.anchor.entry(&anchored.place(dir, &link.name)) {
            Ok(Some(entry)) if entry.object == object => self.outdated("entry", link.parent, &link.name),
            Ok(_) => VaultError::Stale,
            Err(error) => error.into(),
        }
    }

    /// A stat in which the row of the node's object replaces the store's values. The root's permissions are in a
    /// record.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn over_row(&self, ino: Ino, st: Stat) -> Result<Stat> {
        if ino == ROOT {
            return Ok(st);
        }
        Ok(self.row_of(ino)?.map_or(st, |row| as_recorded(&row, st)))
    }

    /// Takes from an entry of the store the permissions that its row does not have.
    ///
    /// Nothing is ever granted. A user who can write to a directory of the store can put another entry there, one of
    /// root's, say: with the owner and the mode of the row it would be theirs. Through the vault all attributes are
    /// those of the row, whatever the store has. Nor is such an entry changed at the request of its owner by the row
    /// ([`Vault::target_to_change`]).
    pub(crate) fn mend(&self, ino: Ino, dir: &Dir, stored: &OsStr, st: &Stat) -> Result<()> {
        let Some(anchored) = self.anchored.as_ref().filter(|_| !self.options.read_only && ino != ROOT) else {
            return Ok(());
        };
        let Some(row) = self.row_of(ino)? else { return Ok(()) };
        if is_as_recorded(&row, st) || anchored.is_unmendable(ino) {
            return Ok(());
        }
        let Some(_pass) = self.gate.try_enter().filter(|_| !self.closed.load(std::sync::atomic::Ordering::Acquire))
        else {
            return Ok(());
        };
        // Another call may have changed the store, and not the row yet.
        let _changes = self.hold_mode(ino);
        let Some(row) = self.row_of(ino)? else { return Ok(()) };
        let held = hold(dir, stored, st).and_then(|held| Ok((held.stat()?, held)));
        if held.as_ref().is_ok_and(|(st, _)| is_as_recorded(&row, st)) {
            return Ok(());
        }
        let entry = self.path_in(dir.ino, stored).display().to_string();
        let text = "the store shows another mode or owner than the newest, which is shown";
        match self.is_after_crash() {
            true => tracing::info!(entry, "{text}"), // most likely a change that nobody had synced
            false => tracing::warn!(entry, "{text}"),
        }
        let narrowed = held.and_then(|(st, held)| match takes_only(&row, &st) {
            true => held.set_mode(mode_for(&row, &st)).and_then(|()| held.stat()),
            false => Ok(st),
        });
        if !narrowed.is_ok_and(|st| is_as_recorded(&row, &st)) {
            anchored.note_unmendable(ino);
        }
        Ok(())
    }

    /// Changes the mode or the owner of a node in the store, and then in its row.
    ///
    /// # Errors
    /// Those of the step; [`VaultError::Anchor`].
    pub(crate) fn change_mode(
        &self,
        ino: Ino,
        step: impl FnOnce() -> Result<()>,
        change: impl FnOnce(&mut Row),
    ) -> Result<()> {
        let _changes = self.hold_mode(ino);
        step()?;
        self.record_change(ino, change)
    }

    /// Until this is dropped, the mode and the owner of a node are the same in the store and in its row. No lock of a
    /// file or a directory is taken meanwhile.
    pub(crate) fn hold_mode(&self, ino: Ino) -> Option<parking_lot::MutexGuard<'_, ()>> {
        self.anchored.as_ref().map(|anchored| anchored.mode_locks[(ino % crate::STRIPES as u64) as usize].lock())
    }

    /// Records a new mode or owner of a node, which the store has already.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn record_change(&self, ino: Ino, change: impl FnOnce(&mut Row)) -> Result<()> {
        let Some(anchored) = self.anchored.as_ref().filter(|_| ino != ROOT) else { return Ok(()) };
        let object = self.nodes.lock().object(ino);
        anchored.anchor.change(object, change)?;
        anchored.touched(self.now());
        Ok(())
    }

    /// The size of a file that this process has closed and the anchor has not recorded yet.
    pub(crate) fn remembered_size(&self, ino: Ino) -> Option<u64> {
        let anchored = self.anchored.as_ref()?;
        anchored.files.remembered_size(self.nodes.lock().object(ino))
    }
}

/// Attributes as in the row; not for the root, whose row does not have them.
pub(crate) fn over_row(attr: Attr, row: Option<Row>) -> Attr {
    let Some(row) = row.filter(|_| attr.ino != ROOT) else { return attr };
    Attr { mode: row.mode, uid: row.uid, gid: row.gid, nlink: row.links, rdev: device(&row), ..attr }
}

impl super::Anchored {
    /// Whether an unrecorded entry is reported for the first time.
    fn tell(&self, place: lamassu_anchor::EntryPlace) -> bool {
        let mut told = self.told.lock();
        told.len() < TOLD_MAX && told.insert(place)
    }

    fn is_unmendable(&self, ino: Ino) -> bool {
        self.unmendable.lock().contains(&ino)
    }

    fn note_unmendable(&self, ino: Ino) {
        let mut unmendable = self.unmendable.lock();
        if unmendable.len() >= TOLD_MAX {
            unmendable.clear();
        }
        unmendable.insert(ino);
    }
}

/// The mode that the store should show. It need not have the set-id bits of a file: see [`Vault::mode_in_store`].
fn mode_for(row: &Row, st: &Stat) -> u32 {
    if st.kind == Kind::Dir { row.mode } else { row.mode & (st.mode | !SET_ID) }
}

/// Whether the store has the mode and the owner of a row.
fn is_as_recorded(row: &Row, st: &Stat) -> bool {
    (st.kind == Kind::Symlink || st.mode == mode_for(row, st)) && (st.uid, st.gid) == (row.uid, row.gid)
}

/// Whether the mode of a row gives nobody anything that the store's entry does not.
fn takes_only(row: &Row, st: &Stat) -> bool {
    st.kind != Kind::Symlink && (st.uid, st.gid) == (row.uid, row.gid) && mode_for(row, st) & !st.mode == 0
}

fn as_recorded(row: &Row, st: Stat) -> Stat {
    Stat { mode: row.mode, uid: row.uid, gid: row.gid, nlink: row.links, rdev: device(row), ..st }
}

fn device(row: &Row) -> u64 {
    match row.content {
        Content::Char(device) | Content::Block(device) => device,
        Content::File(_) | Content::Dir { .. } | Content::Link(_) | Content::Fifo | Content::Socket => 0,
    }
}
