//! Commits of the anchor: changes that a barrier of the store has covered become durable there (N4, N5, A4).

use super::Anchored;
use crate::error::errno;
use crate::handles::{Millis, OpenFile};
use crate::{Freshness, Ino, Result, Vault};
use lamassu_anchor::{EntryMark, ObjectId};
use lamassu_store::StoreError;
use lamassu_store::file::{self, ClosedFiles};
use parking_lot::RwLockWriteGuard;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Queued changes are committed at the latest this long after the first of them.
pub(crate) const ANCHOR_AFTER: Millis = 5_000;
/// Changes that may be queued when a call adds more: beyond that it commits first. So if commits fail (the disk of the
/// anchor is full), calls fail before memory is.
const QUEUED_MAX: usize = 100_000;
/// Passes until nothing is queued or due: a removal needs a commit, a barrier after its step in the store, and another
/// commit for the end of its intent.
const PASSES_MAX: usize = 6;
/// Objects whose tree records are removed in one pass: the end of a turn waits for it.
const RECORDS_AT_ONCE: usize = 64;
/// Barriers beside other calls that keep making names, before one with the tree locked.
pub(super) const STILL_AFTER: usize = 4;

/// A file, and its mark that a pass's barrier covers.
type Marked = (file::Mark, Arc<OpenFile>);
/// A file that is not covered, and the reason.
type Failed = (Arc<OpenFile>, StoreError);

fn not_covered() -> StoreError {
    let source = std::io::Error::other("the anchor does not know yet what the store has");
    StoreError::Io { op: "settle", offset: 0, source }
}

/// What a barrier of the whole store will cover.
pub(crate) struct Begun {
    mark: EntryMark,
    closed: ClosedFiles,
}

impl Anchored {
    /// The mark of the last barrier of the whole store for names.
    pub fn covered(&self) -> EntryMark {
        *self.covered.lock()
    }

    /// Called when a change was queued.
    pub fn touched(&self, now: Millis) {
        // Only the first change counts; if two race, either will do.
        if self.queued_since.load(Ordering::Relaxed) == 0 {
            self.queued_since.store(now, Ordering::Relaxed);
        }
    }

    /// Called before a barrier of the whole store.
    pub fn before_barrier(&self) -> Begun {
        Begun { mark: self.anchor.mark(), closed: self.files.closed() }
    }

    /// Called after the barrier has succeeded.
    ///
    /// # Errors
    /// Those of the anchor.
    pub fn after_barrier(&self, begun: Begun) -> Result<()> {
        {
            let mut covered = self.covered.lock();
            *covered = begun.mark.max(*covered);
        }
        Ok(self.files.covered(begun.closed)?)
    }

    /// Commits what barriers of the whole store have covered.
    ///
    /// # Errors
    /// Those of the anchor: then everything stays queued.
    pub fn commit(&self) -> Result<()> {
        // Cleared first: a change that is queued meanwhile sets it again.
        let since = self.queued_since.swap(0, Ordering::Relaxed);
        let done = self.anchor.commit(self.covered());
        if done.is_err() || self.anchor.queued() > 0 {
            self.touched(since.max(1));
        }
        Ok(done?)
    }

    fn is_late(&self, now: Millis) -> bool {
        if self.anchor.queued() == 0 && self.departures.len() == 0 {
            return false;
        }
        self.touched(now);
        now.saturating_sub(self.queued_since.load(Ordering::Relaxed)) >= ANCHOR_AFTER
    }
}

impl Vault {
    /// Makes a barrier of the whole store, commits what it has covered, and carries out what is due. The caller must
    /// hold no lock of the tree. Does nothing in a vault without an anchor.
    ///
    /// # Errors
    /// [`crate::VaultError::Anchor`]; those of the store. Nothing is lost: it is tried again.
    pub(crate) fn commit_anchor(&self) -> Result<()> {
        let Some(anchored) = &self.anchored else { return Ok(()) };
        self.settle_moves();
        {
            let _one_at_a_time = self.settling.lock();
            self.sync_store()?;
            anchored.commit()?;
        }
        self.carry_out().map(drop)
    }

    /// Admission of a change that the queue records: waits if the queue is long. The caller holds no lock of the tree.
    ///
    /// # Errors
    /// As [`Vault::commit_anchor`]; those of admission.
    pub(crate) fn change_recorded(&self) -> Result<crate::gate::Pass<'_>> {
        let pass = self.change()?;
        self.bound_queue()?;
        Ok(pass)
    }

    /// What a policy forbids is no reason to refuse other changes.
    fn bound_queue(&self) -> Result<()> {
        let Some(anchored) = &self.anchored else { return Ok(()) };
        let is_long = || anchored.anchor.queued() >= QUEUED_MAX;
        if !is_long() {
            return Ok(());
        }
        {
            let _one_at_a_time = self.settling.lock();
            if !is_long() {
                return Ok(());
            }
            self.sync_store()?;
            match anchored.commit() {
                Err(crate::VaultError::Anchor(error)) if error.is_of_policy() => {}
                done => done?,
            }
        }
        self.carry_out().map(drop)
    }

    pub(crate) fn has_removals(&self) -> bool {
        self.anchored.as_ref().is_some_and(|anchored| anchored.anchor.has_removals())
    }

    /// The same if a change has been queued for long enough.
    pub(crate) fn commit_anchor_at(&self, now: Millis) -> Result<()> {
        match &self.anchored {
            Some(anchored) if anchored.is_late(now) => self.commit_anchor(),
            _ => Ok(()),
        }
    }

    /// Repeats until the anchor has recorded everything, and the store has carried out all removals. The caller has
    /// settled all files that can be settled. Changes made meanwhile may be left.
    ///
    /// # Errors
    /// As [`Vault::commit_anchor`]; if the error is about one file, everything else is recorded.
    pub(crate) fn anchor_all(&self) -> Result<()> {
        let Some(anchored) = &self.anchored else { return Ok(()) };
        let mut of_file = Ok(());
        for _ in 0..PASSES_MAX {
            self.settle_moves();
            {
                let _one_at_a_time = self.settling.lock();
                let open = self.files.all().into_iter().filter(|open| open.is_writable());
                let marked: Vec<_> = open.map(|open| (open.file().covered_mark(), open)).collect();
                self.sync_store()?;
                for (mark, open) in marked {
                    if let Err(error) = open.file().covered(mark) {
                        of_file = Err(error.into());
                    }
                }
                match anchored.commit() {
                    Err(crate::VaultError::Anchor(error)) if error.is_of_policy() => of_file = Err(error.into()),
                    done => done?,
                }
            }
            let has_more = self.carry_out()?;
            if !has_more && anchored.anchor.queued() == 0 {
                break;
            }
        }
        of_file
    }

    /// Part of a settling pass: commits what the pass's barrier has covered of these files. The files in the first
    /// result may be settled; the others only after they are covered.
    pub(crate) fn commit_covered(&self, marked: Vec<Marked>, is_synced: bool) -> (Vec<Marked>, Vec<Failed>) {
        let Some(anchored) = &self.anchored else { return (marked, Vec::new()) };
        let not_now = |(_, open): Marked| (open, not_covered());
        if !is_synced {
            return (Vec::new(), marked.into_iter().map(not_now).collect());
        }
        let (mut good, mut bad) = (Vec::with_capacity(marked.len()), Vec::new());
        for (mark, open) in marked {
            match open.file().covered(mark) {
                Ok(()) => good.push((mark, open)),
                Err(error) => bad.push((open, error)),
            }
        }
        if let Err(error) = anchored.commit() {
            tracing::error!(%error, "the anchor could not be written; it will be tried again");
            let first = bad.len();
            let is_done = |(_, open): &Marked| {
                let object = self.nodes.lock().object(open.ino);
                matches!(&error, crate::VaultError::Anchor(error) if error.is_of_policy())
                    && !anchored.anchor.has_queued(object)
            };
            bad.extend(good.extract_if(.., |marked| !is_done(marked)).map(not_now));
            // One of them carries the error.
            if let (Some((_, failed)), crate::VaultError::Anchor(error)) = (bad.get_mut(first), error) {
                *failed = StoreError::Anchor(error);
            }
        }
        (good, bad)
    }

    /// What an fsync needs besides the store: the object and the directories on the way to it are durable in the
    /// anchor. `sync_way` syncs these in the store, and returns the one in which the object has the name that it went
    /// by; `None`: not all were synced. Called after the object itself was synced.
    ///
    /// # Errors
    /// [`crate::VaultError::Anchor`]; those of the store.
    pub(crate) fn anchor_object(&self, ino: Ino, sync_way: impl Fn() -> Result<Option<ObjectId>>) -> Result<()> {
        let object = self.nodes.lock().object(ino);
        self.anchor_objects(&|_| HashSet::from([object]), &sync_way)
    }

    /// The same for a directory: all changes in it.
    ///
    /// # Errors
    /// As [`Vault::anchor_object`].
    pub(crate) fn anchor_dir(&self, ino: Ino, sync_way: impl Fn() -> Result<bool>) -> Result<()> {
        let dir = self.nodes.lock().object(ino);
        let in_it = |anchored: &Anchored| {
            let mut objects = anchored.anchor.queued_in(dir);
            objects.insert(dir);
            objects
        };
        self.anchor_objects(&in_it, &|| Ok(sync_way()?.then_some(dir)))
    }

    fn anchor_objects(
        &self,
        objects: &dyn Fn(&Anchored) -> HashSet<ObjectId>,
        sync_way: &dyn Fn() -> Result<Option<ObjectId>>,
    ) -> Result<()> {
        let waits = self.options.freshness == Freshness::Fsync;
        let Some(anchored) = self.anchored.as_ref().filter(|_| waits) else { return sync_way().map(drop) };
        let mark = anchored.anchor.mark();
        // The barriers so far may not have covered attributes.
        let is_replaced = objects(anchored).into_iter().any(|object| anchored.anchor.is_replacing(object));
        let way = sync_way()?;
        // Asked about once, and then committed: what is removed in between may have a name in a directory that is not
        // synced.
        let asked = objects(anchored);
        let is_synced = !is_replaced && way.is_some_and(|dir| !anchored.anchor.are_named_beside(&asked, dir));
        if is_synced && anchored.anchor.commit_unless_late(&asked, mark)? {
            return Ok(());
        }
        for _ in 0..STILL_AFTER {
            self.settle_moves();
            self.sync_store()?;
            anchored.anchor.settle(anchored.covered())?;
            if anchored.anchor.commit_unless_late(&objects(anchored), anchored.covered())? {
                return Ok(());
            }
        }
        let _still = self.commit_still(anchored)?;
        // No rename is under way, and none will be: the store has not shown what became of it.
        match anchored.anchor.awaits_any_of(&objects(anchored)) {
            true => Err(errno("commit a name that the store may not have", libc::EIO)),
            false => Ok(()),
        }
    }

    /// Commits everything with the tree locked: where names are made faster than the store syncs, no other barrier
    /// covers all. The caller holds no lock of the tree, and lets go of this one.
    ///
    /// # Errors
    /// [`crate::VaultError::Anchor`]; those of the store.
    pub(super) fn commit_still(&self, anchored: &Anchored) -> Result<RwLockWriteGuard<'_, ()>> {
        let still = self.tree.write();
        self.sync_store()?;
        anchored.commit()?;
        Ok(still)
    }

    /// Tells the anchor which objects are no longer in use.
    pub(crate) fn forget_objects(&self) {
        let Some(anchored) = &self.anchored else { return };
        let unused = self.nodes.lock().take_unused();
        let is_gone = |object: &ObjectId| *object != ObjectId::ROOT && anchored.forget(*object);
        self.remove_records(anchored, unused.into_iter().filter(is_gone).collect());
    }

    /// The same for an object without a node that has lost its last name.
    pub(crate) fn forget_object(&self, object: ObjectId) {
        if let Some(anchored) = &self.anchored
            && anchored.forget(object)
        {
            self.remove_records(anchored, vec![object]);
        }
    }
}

impl Anchored {
    /// Returns whether it was in use until now.
    fn forget(&self, object: ObjectId) -> bool {
        // By now another node may be the object, under the same name.
        let is_gone = self.anchor.row(object).is_ok_and(|row| row.links == 0) && !self.may_come_back(object);
        if is_gone {
            self.anchor.forget(object);
        }
        is_gone
    }

    /// Objects that are gone, whose tree records are left to the next turn.
    pub fn take_records_left(&self) -> Vec<ObjectId> {
        std::mem::take(&mut *self.gone.lock())
    }
}

/// Tree records of objects that are gone.
impl Vault {
    /// Where hosts take turns that is left to the background: the kernel may forget thousands of files between two
    /// turns, other hosts wait while a turn begins, and in one that only looks the store is not changed.
    pub(crate) fn remove_records(&self, anchored: &Anchored, objects: Vec<ObjectId>) {
        if !self.options.by_turns {
            return objects.into_iter().for_each(|object| anchored.trees.remove(object));
        }
        let len = {
            let mut gone = anchored.gone.lock();
            gone.extend(objects);
            gone.len()
        };
        if len >= RECORDS_AT_ONCE && !self.options.read_only {
            self.options.upkeep.want();
        }
    }

    /// Removes some of those that were left, and asks for upkeep if there are many more.
    pub(crate) fn remove_more_records(&self) {
        let Some(anchored) = &self.anchored else { return };
        let (some, is_more) = {
            let mut gone = anchored.gone.lock();
            let rest = gone.len().saturating_sub(RECORDS_AT_ONCE);
            (gone.split_off(rest), rest >= RECORDS_AT_ONCE)
        };
        some.into_iter().for_each(|object| anchored.trees.remove(object));
        if is_more {
            self.options.upkeep.want();
        }
    }
}
