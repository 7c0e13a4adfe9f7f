//! Removal of entries: users no longer see them at once; the store removes them once the removal is durable in the
//! anchor.

use super::Anchored;
use super::commit::STILL_AFTER;
use super::make::TRIES_MAX;
use crate::dirs::Dir;
use crate::error::{errno, io, is_not_found};
use crate::handles::OpenFile;
use crate::inode::StoreId;
use crate::names::StoredName;
use crate::record::remove_companion;
use crate::stored::lending;
use crate::{Ino, Kind, Result, Vault, VaultError, symlink};
use lamassu_anchor::{ObjectId, Removal};
use lamassu_format::header::NameMode;
use lamassu_store::backend::Stat;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::ops::ControlFlow;
use std::sync::Arc;

/// An entry that is removed for users, but not yet in the store.
pub(crate) struct Departing {
    pub dir: Arc<Dir>,
    pub stored: StoredName,
    /// its stat when it was removed: nothing else is removed
    pub st: Stat,
    /// the second part of a long link target
    pub rest: Option<OsString>,
    /// the object that it is
    pub object: ObjectId,
    /// whether that has no other name
    pub is_last: bool,
    /// of the root of a dataset, which is removed with its content: its name in the staging directory
    pub dataset: Option<OsString>,
}

/// All pending removals, by the number of their intent.
#[derive(Default)]
pub(crate) struct Departures {
    state: Mutex<State>,
}

/// Number of new ones after which the maintenance thread is woken.
const BATCH: usize = 256;
/// Most pending ones; beyond that, a removal helps to carry them out.
const WAITING_MAX: usize = 8192;

/// Most entries that nobody recorded and that the removal of a directory moves away at a time: others wait for it.
const UNRECORDED_MAX: usize = 1000;

/// What a change of names waits for before it is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocked {
    /// A removed entry must leave the store.
    Going,
    /// A barrier of the whole store.
    Barrier,
}

/// Whether removals should be carried out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pressure {
    None,
    /// In the background.
    Some,
    /// At once: memory and descriptors are limited.
    Full,
}

#[derive(Default)]
struct State {
    waiting: BTreeMap<u64, Arc<Departing>>,
    /// The same by their objects, and by those of their directories.
    by_object: BTreeSet<(ObjectId, u64)>,
    by_dir: BTreeSet<(ObjectId, u64)>,
    /// Closed files with unsettled content, kept until they have no name: dropped earlier, they would count as left
    /// unsettled.
    kept: HashMap<Ino, Vec<Arc<OpenFile>>>,
    /// By the nodes that lost their last name.
    nodes: HashMap<Ino, u64>,
    /// Intents that the anchor has handed out.
    due: BTreeSet<u64>,
    /// The number that a pass has left.
    left: usize,
}

impl Departures {
    pub fn len(&self) -> usize {
        self.state.lock().waiting.len()
    }

    /// `kept_max`: how many files may be kept.
    fn pressure(&self, kept_max: usize) -> Pressure {
        let state = self.state.lock();
        match state.waiting.len() {
            len if len >= WAITING_MAX || state.kept.len() >= kept_max => Pressure::Full,
            len if len >= state.left + BATCH.min(kept_max / 2) => Pressure::Some,
            _ => Pressure::None,
        }
    }

    /// Notes the end of a pass.
    fn note_pass(&self) {
        let state = &mut *self.state.lock();
        state.left = state.waiting.len();
    }

    fn add(&self, number: u64, departing: Departing, node: Option<Ino>) {
        let state = &mut *self.state.lock();
        state.by_object.insert((departing.object, number));
        state.by_dir.insert((departing.dir.object, number));
        state.waiting.insert(number, Arc::new(departing));
        state.nodes.extend(node.map(|node| (node, number)));
    }

    /// A node lost its last name at once: its pending removals are other names of it.
    fn lost_last(&self, node: Ino, object: ObjectId) {
        let state = &mut *self.state.lock();
        if let Some(number) = last_of(&state.by_object, object) {
            state.nodes.insert(node, number);
        }
    }

    /// Keeps a file if its node is among them.
    pub fn keep(&self, open: Arc<OpenFile>) {
        let state = &mut *self.state.lock();
        if state.nodes.contains_key(&open.ino) {
            state.kept.entry(open.ino).or_default().push(open);
        }
    }

    /// The due removals: those just handed out, and earlier ones.
    fn due(&self, new: impl IntoIterator<Item = u64>) -> Vec<(u64, Arc<Departing>)> {
        let state = &mut *self.state.lock();
        state.due.extend(new);
        let found = |number: &u64| state.waiting.get(number).map(|departing| (*number, departing.clone()));
        state.due.iter().filter_map(found).collect()
    }

    fn has_left(&self, number: u64) {
        let kept = {
            let state = &mut *self.state.lock();
            state.due.remove(&number);
            if let Some(departed) = state.waiting.remove(&number) {
                state.by_object.remove(&(departed.object, number));
                state.by_dir.remove(&(departed.dir.object, number));
            }
            let gone: Vec<Ino> = state.nodes.iter().filter(|(_, of)| **of == number).map(|(ino, _)| *ino).collect();
            gone.iter().for_each(|ino| _ = state.nodes.remove(ino));
            gone.iter().filter_map(|ino| state.kept.remove(ino)).collect::<Vec<_>>()
        };
        drop(kept);
    }

    /// By object: a directory that is itself removed has no node any more.
    pub fn is_waiting_in(&self, dir: ObjectId) -> bool {
        last_of(&self.state.lock().by_dir, dir).is_some()
    }
}

/// The last removal of an object.
fn last_of(removals: &BTreeSet<(ObjectId, u64)>, object: ObjectId) -> Option<u64> {
    removals.range((object, 0)..=(object, u64::MAX)).next_back().map(|(_, number)| *number)
}

impl Vault {
    /// Removes an entry: from the store at once, or after the anchor's commit. `departing.object` and `is_last` are set
    /// here. Returns whether its object has no other name.
    ///
    /// # Errors
    /// [`VaultError::Anchor`]; those of the store, if its step is made at once. Then the entry still exists.
    pub(crate) fn depart(&self, departing: Departing) -> Result<bool> {
        let Some(anchored) = &self.anchored else {
            let is_last = departing.st.kind == Kind::Dir || departing.st.nlink <= 1;
            let departing = Departing { is_last, ..departing };
            self.remove_from_store(&departing)?;
            self.remove_rest(&departing);
            return Ok(is_last);
        };
        let place = anchored.place(departing.dir.object, &departing.stored.name);
        let object = anchored.anchor.entry(&place)?.map(|entry| entry.object).ok_or(VaultError::NotFound)?;
        let removal = anchored.anchor.remove(place)?;
        anchored.touched(self.now());
        let is_last = anchored.anchor.row(object)?.links == 0;
        let departing = Departing { object, is_last, ..departing };
        match removal {
            Removal::NoEntry => return Err(VaultError::NotFound),
            Removal::WhenDue(number) => {
                let node = self.nodes.lock().node_of(object, StoreId::from(&departing.st)).filter(|_| is_last);
                anchored.departures.add(number, departing, node);
            }
            Removal::Now => {
                if let Err(error) = self.remove_from_store(&departing) {
                    // Nothing of the entry is durable. If the store may not have it, it must not become so.
                    let Departing { dir, stored, st, .. } = &departing;
                    if self.shown(dir, &stored.name).is_ok_and(|shown| shown.is_some_and(|shown| shown.is_same(st))) {
                        anchored.anchor.link_again(place, object)?;
                    }
                    return Err(error);
                }
                self.remove_rest(&departing);
                if is_last {
                    self.lost_last_name(object, &departing.st);
                }
            }
        }
        Ok(is_last)
    }

    /// An object has lost its last name in the store too, unless other names still have pending removals.
    pub(crate) fn lost_last_name(&self, object: ObjectId, st: &Stat) {
        let Some(anchored) = &self.anchored else { return };
        if let Some(node) = self.nodes.lock().node_of(object, StoreId::from(st)) {
            anchored.departures.lost_last(node, object);
        }
    }

    fn remove_from_store(&self, departing: &Departing) -> Result<()> {
        let Departing { dir, stored, st, .. } = departing;
        if let Some(dataset) = &departing.dataset {
            self.unstage_dataset(&*dir.handle, &stored.name, st, dataset)?;
        } else if st.kind == Kind::Dir {
            self.clear_unrecorded(departing)?;
            self.unstage_dir(&*dir.handle, &stored.name, st)?;
        } else {
            let done = dir.handle.unlink(&stored.name);
            // It may be done although the store reports a failure: another attempt would not find it.
            let is_gone = || matches!(dir.handle.stat_entry(&stored.name), Err(e) if is_not_found(&e));
            done.or_else(|error| if is_gone() { Ok(()) } else { Err(io("unlink")(error)) })?;
        }
        if let Some(companion) = &stored.companion {
            remove_companion(&*dir.handle, &companion.name);
        }
        Ok(())
    }

    fn remove_rest(&self, departing: &Departing) {
        let Departing { dir, rest, st, is_last, .. } = departing;
        if let Some(rest) = rest
            && (*is_last || !symlink::is_named_in(&*dir.handle, st))
        {
            remove_companion(&*dir.handle, rest);
        }
    }

    /// Moves away what is left in a directory that is empty for users: it is not recorded. Whether the directory is
    /// that of its row was verified when it was removed. With plain names only the owner shows
    /// this, so entries stay that belong to root, or to another user than the directory's owner.
    ///
    /// # Errors
    /// [`VaultError::NotEmpty`]: something stays, or there is more than is moved at a time.
    fn clear_unrecorded(&self, departing: &Departing) -> Result<()> {
        let Departing { dir, stored, st, object, .. } = departing;
        let Some(anchored) = &self.anchored else { return Ok(()) };
        let handle = lending(&dir.handle.open_dir(&stored.name).map_err(io("open a directory"))?);
        if !handle.stat().map_err(io("stat"))?.is_same(st) {
            return Ok(());
        }
        let go_by_owners = self.name_mode == NameMode::Plain && rustix::process::geteuid().is_root();
        // Their removal failed when it was due, and is tried again, and so is this one.
        if anchored.departures.is_waiting_in(*object) {
            return Err(errno("remove a directory", libc::EBUSY));
        }
        let mut moved = 0;
        for entry in handle.read_dir().map_err(io("list a directory"))? {
            if crate::stored::goes_along(&entry.name) {
                continue;
            }
            if moved == UNRECORDED_MAX {
                return Err(VaultError::NotEmpty);
            }
            let inside = handle.stat_entry(&entry.name).map_err(io("stat"))?;
            if go_by_owners && (inside.uid == 0 || inside.uid != st.uid) {
                return Err(VaultError::NotEmpty);
            }
            moved += 1;
            let path = self.path_in(dir.ino, &stored.name).join(&entry.name).display().to_string();
            self.move_handle_to_lost(&*handle, &entry.name, &inside, &path)?;
        }
        Ok(())
    }

    /// Makes removals durable, with everything else that a barrier has covered, and carries them out. The caller must
    /// hold no lock of the tree.
    ///
    /// # Errors
    /// [`VaultError::Anchor`]; those of the store.
    pub(crate) fn commit_removals(&self) -> Result<()> {
        let Some(anchored) = &self.anchored else { return Ok(()) };
        anchored.anchor.commit(anchored.covered())?;
        self.carry_out().map(drop)
    }

    /// Tries a change of names until nothing is in its way. `attempt` gets the number of attempts before it.
    ///
    /// # Errors
    /// Those of `attempt`. Where it is blocked still, that of the step which was to end this: an error of another entry
    /// does not matter once it is not. `EBUSY`.
    pub(crate) fn until_not_blocked<T>(
        &self,
        op: &'static str,
        attempt: impl Fn(usize) -> Result<ControlFlow<T, Blocked>>,
    ) -> Result<T> {
        let mut unblocked = Ok(());
        for tried in 0..TRIES_MAX {
            let blocked = match attempt(tried)? {
                ControlFlow::Break(done) => return Ok(done),
                ControlFlow::Continue(blocked) => blocked,
            };
            unblocked?;
            unblocked = match blocked {
                Blocked::Going => self.let_go_of_names(tried),
                Blocked::Barrier => self.sync_store(),
            };
        }
        Err(errno(op, libc::EBUSY))
    }

    /// As [`Vault::commit_removals`], for a name that is to be used again; `tried`: the number of attempts. A removed
    /// object may have another name that no barrier covers: later attempts make a barrier first. Names may be made
    /// faster than the store syncs, so the last ones lock the tree meanwhile.
    pub(crate) fn let_go_of_names(&self, tried: usize) -> Result<()> {
        match (tried, &self.anchored) {
            (0, _) => self.commit_removals(),
            (1..STILL_AFTER, _) | (_, None) => self.commit_anchor(),
            (_, Some(anchored)) => {
                self.settle_moves();
                drop(self.commit_still(anchored)?);
                self.carry_out().map(drop)
            }
        }
    }

    /// The same if many removals are pending: in the background, or here if there are too many. A failure is logged,
    /// and tried again.
    pub(crate) fn bound_departures(&self) {
        let Some(anchored) = &self.anchored else { return };
        let pressure = || anchored.departures.pressure(self.idle_max);
        let bound = || {
            self.commit_removals()?;
            if pressure() == Pressure::Full { self.commit_anchor() } else { Ok(()) }
        };
        match pressure() {
            Pressure::None => {}
            Pressure::Some => self.options.upkeep.want(),
            Pressure::Full => {
                if let Err(error) = bound() {
                    tracing::error!(%error, "removals could not be carried out; they will be tried again");
                }
            }
        }
    }

    /// The same in the maintenance thread.
    ///
    /// # Errors
    /// [`VaultError::Anchor`]; those of the store. It is tried again.
    pub(crate) fn work_off_departures(&self) -> Result<()> {
        let pressure = |anchored: &Anchored| anchored.departures.pressure(self.idle_max);
        match self.anchored.as_ref().map_or(Pressure::None, pressure) {
            Pressure::None => Ok(()),
            Pressure::Some | Pressure::Full => self.commit_removals(),
        }
    }

    /// Lets the store carry out the removals that are durable in the anchor. Returns whether there were any. The caller
    /// must hold no lock of the tree.
    ///
    /// # Errors
    /// The first error of the store: what failed is tried again.
    pub(crate) fn carry_out(&self) -> Result<bool> {
        let Some(anchored) = &self.anchored else { return Ok(false) };
        let _one_at_a_time = anchored.carrying.lock();
        let due = anchored.departures.due(anchored.anchor.due().into_keys());
        let mut first = Ok(());
        let mut is_any = false;
        for (number, departing) in due {
            match self.carry_out_one(&departing) {
                Ok(()) => {
                    // In this order: a rename over its directory meets it as waiting here, or as a step that no barrier
                    // covers yet.
                    anchored.anchor.carried_out([number]);
                    anchored.departures.has_left(number);
                    self.room.gained();
                    is_any = true;
                }
                Err(error) => {
                    let entry = self.path_in(departing.dir.ino, &departing.stored.name).display().to_string();
                    tracing::error!(entry, %error, "an entry is removed, but still in the store: it will be tried again");
                    first = first.and(Err(error));
                }
            }
        }
        anchored.departures.note_pass();
        if is_any {
            anchored.touched(self.now());
        }
        first.map(|()| is_any)
    }

    fn carry_out_one(&self, departing: &Departing) -> Result<()> {
        let _tree = self.tree.read();
        let Departing { dir, stored, st, .. } = departing;
        let _names = self.names_of(dir.ino).write();
        match self.shown(dir, &stored.name)? {
            Some(now) if now.is_same(st) => {}
            Some(_) => {
                let entry = self.path_in(dir.ino, &stored.name).display().to_string();
                tracing::warn!(entry, "another entry has the name of one that was removed: it stays, and is not shown");
                return Ok(());
            }
            None => return Ok(()),
        }
        let Err(error) = self.remove_from_store(departing) else {
            self.remove_rest(departing);
            return Ok(());
        };
        // It is gone for users. What they have put into it in the store, or something else, keeps it there.
        if st.kind == Kind::Dir && matches!(error, VaultError::NotEmpty) {
            let entry = self.path_in(dir.ino, &stored.name).display().to_string();
            tracing::warn!(
                entry,
                "a directory that was removed is not empty in the store: it stays there, and is not shown"
            );
            return Ok(());
        }
        // The directory may have lost its write permission since the removal: it is set for a moment.
        let lent = dir.handle.lending().filter(|_| st.kind != Kind::Dir).map(|lent| lent.unlink(&stored.name));
        match lent {
            Some(Ok(())) => Ok(()),
            Some(Err(again)) if is_not_found(&again) => Ok(()),
            Some(Err(_)) | None => Err(error),
        }
    }
}
