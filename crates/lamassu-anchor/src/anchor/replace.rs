//! Replacement of sealed parts of an object by one step of the store: its attributes, a link's target, a directory's
//! record (`docs/freshness.md`, section 5).
//!
//! * Before the step the row durably says {old, new}. An object that is not recorded yet needs no wait: its entry is
//!   held back until a barrier has covered the step (N4).
//! * The row says {new} only after a barrier has covered the step: until then an honest crash may leave either. A
//!   second step within that time needs a barrier first, since a row holds only two states.

use super::state::State;
use super::{Anchor, Result};
use crate::queue::EntryMark;
use crate::row::{Content, Row, Sealed};
use crate::{AnchorError, Digest, ObjectId};
use std::collections::HashSet;

/// A part of an object that is replaced as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SealedPart {
    /// All its attributes, access lists among them.
    Attributes,
    /// A directory's record, a link's target.
    Content,
}

/// Whether a barrier of the store has begun and succeeded after the caller saw what it replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Unknown.
    AtSomeTime,
    /// Yes: what the caller saw is durable.
    BeforeBarrier,
}

/// What must happen before a replacement's step in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacing {
    /// The step may be made; then call [`Anchor::replaced`].
    Noted,
    /// No barrier covers the step before this one. Nothing was changed: make a barrier, commit, and try again.
    NeedsBarrier,
    /// What the store shows is not the newest. Nothing was changed.
    Stale,
}

/// Replacements whose row does not say {new} yet.
#[derive(Default)]
pub(super) struct Replaced {
    /// Replacements that this process has begun. The number was given after the step of the store; `None`: it may not
    /// have been made.
    parts: std::collections::HashMap<(ObjectId, SealedPart), Option<u64>>,
}

impl Replaced {
    pub fn len(&self) -> usize {
        self.parts.values().filter(|number| number.is_some()).count()
    }
}

/// A digest as current state; [`Digest::NONE`]: nothing.
fn is(digest: Digest) -> Sealed {
    if digest.is_none() { Sealed::Nothing } else { Sealed::Is(digest) }
}

impl Row {
    /// The sealed state of a part. Files, devices and pipes have no sealed content.
    pub fn sealed(&self, part: SealedPart) -> Sealed {
        match (part, &self.content) {
            (SealedPart::Attributes, _) => self.attributes,
            (SealedPart::Content, Content::Dir { record: sealed, .. } | Content::Link(sealed)) => *sealed,
            (SealedPart::Content, Content::File(_) | Content::Char(_) | Content::Block(_)) => Sealed::Nothing,
            (SealedPart::Content, Content::Fifo | Content::Socket) => Sealed::Nothing,
        }
    }

    fn set_sealed(&mut self, part: SealedPart, to: Sealed) {
        match (part, &mut self.content) {
            (SealedPart::Attributes, _) => self.attributes = to,
            (SealedPart::Content, Content::Dir { record: sealed, .. } | Content::Link(sealed)) => *sealed = to,
            (SealedPart::Content, Content::File(_) | Content::Char(_) | Content::Block(_)) => {}
            (SealedPart::Content, Content::Fifo | Content::Socket) => {}
        }
    }
}

impl Anchor {
    /// Notes that a step of the store is about to replace a part of an object; durably, if the object is recorded.
    /// `covered` is a mark that a barrier of the whole store has covered. The caller must make the steps for one part
    /// one after the other.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`]; those of the table: the step may not be made.
    pub fn replacing(
        &self,
        object: ObjectId,
        part: SealedPart,
        (old, new): (Digest, Digest),
        seen: Seen,
        covered: EntryMark,
    ) -> Result<Replacing> {
        {
            let state = &mut *self.state.lock();
            state.settle_replaced(self, covered)?;
            let mut row = self.known(state, object)?;
            let sealed = row.sealed(part);
            if !sealed.is_current(old) {
                return Ok(Replacing::Stale);
            }
            let is_waited_for = self.is_recorded(state, object)?;
            let is_open = matches!(sealed, Sealed::Becomes { .. }) && seen == Seen::AtSomeTime;
            // A commit would leave out the row of a directory. The row of another object would be committed without its
            // names.
            let is_late = state.queued.is_any_late(&HashSet::from([object]), covered);
            if is_waited_for && (is_open || is_late) {
                return Ok(Replacing::NeedsBarrier);
            }
            row.set_sealed(part, if old == new { is(new) } else { Sealed::Becomes { old, new } });
            state.queue_row(object, row);
            state.replaced.parts.insert((object, part), None);
            // Until its removal is durable, a crash could leave an object that has lost its last name.
            let is_going = state.nameless.contains_key(&object) && self.recorded_row(state, object)?.is_some();
            if !is_waited_for && !is_going {
                return Ok(Replacing::Noted);
            }
        }
        self.commit_objects(&HashSet::from([object]), covered)?;
        Ok(Replacing::Noted)
    }

    /// The step of the store was made.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`]; those of the table. The row then still says {old, new}.
    pub fn replaced(&self, object: ObjectId, part: SealedPart, new: Digest) -> Result<()> {
        let state = &mut *self.state.lock();
        let mut row = self.known(state, object)?;
        state.made += 1;
        let number = state.made;
        if self.is_recorded(state, object)? {
            state.replaced.parts.insert((object, part), Some(number));
            return Ok(());
        }
        state.replaced.parts.remove(&(object, part));
        row.set_sealed(part, is(new));
        state.queue_row(object, row);
        state.queued.hold_back(object, number);
        Ok(())
    }

    /// Whether a part of an object was replaced without a known barrier of the whole store after it. A barrier for the
    /// object and its names alone may not cover the replacement.
    pub fn is_replacing(&self, object: ObjectId) -> bool {
        let state = self.state.lock();
        let is_replaced = |part| state.replaced.parts.get(&(object, part)).is_some_and(|number| number.is_some());
        let mut parts = [SealedPart::Attributes, SealedPart::Content].into_iter();
        state.queued.is_changed(object) || parts.any(is_replaced)
    }

    /// Queues {new} for replacements that a barrier of the whole store has covered, as [`Anchor::commit`] does.
    ///
    /// # Errors
    /// Those of the table.
    pub fn settle(&self, covered: EntryMark) -> Result<()> {
        self.state.lock().settle_replaced(self, covered)
    }

    /// Notes what the store shows of a part when it is first read. If another process left two states, and a barrier
    /// has covered this one since, it becomes the only one. Returns whether it is current.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`]; those of the table.
    pub fn seen(&self, object: ObjectId, part: SealedPart, seen: Digest, may_note: bool) -> Result<bool> {
        let state = &mut *self.state.lock();
        let mut row = self.known(state, object)?;
        let sealed = row.sealed(part);
        let own = state.replaced.parts.get(&(object, part));
        let is_current = match (sealed, own) {
            // This process knows that the store has made the step: only a crash may still bring back the old state.
            (Sealed::Becomes { new, .. }, Some(Some(_))) => seen == new,
            _ => sealed.is_current(seen),
        };
        let is_left_open = matches!(sealed, Sealed::Becomes { .. }) && own.is_none();
        if is_current && is_left_open && may_note {
            row.set_sealed(part, is(seen));
            state.queue_row(object, row);
        }
        Ok(is_current)
    }

    /// Notes durably that the record of the root's permissions is about to be replaced. False: `old` is not current.
    ///
    /// # Errors
    /// Those of the table: the record may not be replaced then.
    pub fn replacing_root_permissions(&self, old: Digest, new: Digest) -> Result<bool> {
        if !self.vault().root_permissions.is_current(old) {
            return Ok(false);
        }
        let to = if old == new { is(new) } else { Sealed::Becomes { old, new } };
        self.change_vault(|vault| vault.root_permissions = to);
        self.commit_objects(&HashSet::new(), EntryMark::NOTHING).map(|()| true)
    }

    /// The record was replaced, and a barrier has covered that. Durable with the next commit.
    pub fn root_permissions_replaced(&self, new: Digest) {
        self.change_vault(|vault| vault.root_permissions = is(new));
    }

    /// Whether the row of an object is durable or in flight, so that a crash could leave it.
    fn is_recorded(&self, state: &State, object: ObjectId) -> Result<bool> {
        Ok(!state.nameless.contains_key(&object) && self.recorded_row(state, object)?.is_some())
    }
}

impl State {
    /// Queues {new} for replacements that a barrier has covered.
    pub(super) fn settle_replaced(&mut self, anchor: &Anchor, covered: EntryMark) -> Result<()> {
        let is_covered = |number: &Option<u64>| number.is_some_and(|number| number <= covered.0);
        let done = self.replaced.parts.iter().filter(|(_, number)| is_covered(number));
        let done: Vec<(ObjectId, SealedPart)> = done.map(|(of, _)| *of).collect();
        for (object, part) in done {
            match anchor.known(self, object) {
                Ok(mut row) => {
                    if let Sealed::Becomes { new, .. } = row.sealed(part) {
                        row.set_sealed(part, is(new));
                        self.queue_row(object, row);
                    }
                }
                // The object was removed.
                Err(AnchorError::Unknown { .. }) => {}
                Err(error) => return Err(error),
            }
            self.replaced.parts.remove(&(object, part));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::FileRow;
    use crate::table::MemoryTable;
    use crate::{EntryPlace, Made, Token, TokenKey, VaultRow};
    use lamassu_format::header::VaultId;
    use std::sync::Arc;

    const A: Digest = Digest([1; 32]);
    const B: Digest = Digest([2; 32]);
    const C: Digest = Digest([3; 32]);
    const PART: SealedPart = SealedPart::Attributes;
    const VAULT: VaultId = VaultId([7; 16]);

    fn row(content: Content, attributes: Sealed) -> Row {
        Row { mode: 0o600, uid: 0, gid: 0, links: 1, content, attributes }
    }

    fn anchor() -> (Arc<MemoryTable>, Anchor) {
        let table = Arc::new(MemoryTable::default());
        let vault = VaultRow::new(VAULT, TokenKey::new([1; 32]));
        let root = Content::Dir { record: Sealed::Is(A), parent: ObjectId::ROOT, name: Token([0; 16]) };
        let anchor = Anchor::create(table.clone(), vault, row(root, Sealed::Is(A))).unwrap();
        (table, anchor)
    }

    /// What a crash now would leave.
    fn durable(table: &MemoryTable, object: ObjectId) -> Option<Sealed> {
        let anchor = Anchor::open(Arc::new(table.clone()), &VAULT).unwrap();
        anchor.row(object).ok().map(|row| row.sealed(PART))
    }

    fn replacing(anchor: &Anchor, object: ObjectId, old: Digest, new: Digest, seen: Seen) -> Replacing {
        anchor.replacing(object, PART, (old, new), seen, EntryMark::NOTHING).unwrap()
    }

    #[test]
    fn both_are_durable_before_the_step_and_the_new_one_alone_after_a_barrier() {
        let (table, anchor) = anchor();
        let root = ObjectId::ROOT;
        assert_eq!(replacing(&anchor, root, A, B, Seen::AtSomeTime), Replacing::Noted);
        assert_eq!(durable(&table, root), Some(Sealed::Becomes { old: A, new: B }));
        let before = anchor.mark();
        anchor.replaced(root, PART, B).unwrap();
        let seen = |digest| anchor.seen(root, PART, digest, true).unwrap();
        assert!(seen(B) && !seen(A), "this process knows that the step was done");
        anchor.commit(before).unwrap();
        assert_eq!(
            durable(&table, root),
            Some(Sealed::Becomes { old: A, new: B }),
            "the barrier began before the step"
        );
        assert_eq!(replacing(&anchor, root, B, C, Seen::AtSomeTime), Replacing::NeedsBarrier);
        assert!(anchor.queued() > 0);
        anchor.commit(anchor.mark()).unwrap();
        assert_eq!(durable(&table, root), Some(Sealed::Is(B)));
        assert_eq!(replacing(&anchor, root, A, C, Seen::AtSomeTime), Replacing::Stale);
        assert_eq!(replacing(&anchor, root, B, Digest::NONE, Seen::AtSomeTime), Replacing::Noted);
        anchor.replaced(root, PART, Digest::NONE).unwrap();
        anchor.commit(anchor.mark()).unwrap();
        assert_eq!(durable(&table, root), Some(Sealed::Nothing));
        assert_eq!(anchor.queued(), 0);
    }

    #[test]
    fn of_a_new_object_nothing_is_waited_for_and_its_entry_waits_for_the_step() {
        let (table, anchor) = anchor();
        let place = EntryPlace { dir: ObjectId::ROOT, name: Token([5; 16]) };
        let made = anchor.make(place, row(Content::File(FileRow::default()), Sealed::Nothing)).unwrap();
        let Made::Queued(object) = made else { panic!("{made:?}") };
        let before = anchor.mark();
        let commits = table.commits();
        for (old, new) in [(Digest::NONE, A), (A, B), (B, C)] {
            assert_eq!(replacing(&anchor, object, old, new, Seen::AtSomeTime), Replacing::Noted);
            anchor.replaced(object, PART, new).unwrap();
        }
        assert_eq!(table.commits(), commits);
        anchor.commit(before).unwrap();
        assert_eq!(durable(&table, object), None, "a crash may have kept the file without its attributes");
        anchor.commit(anchor.mark()).unwrap();
        assert_eq!(durable(&table, object), Some(Sealed::Is(C)));
        // Committed between the note and the step.
        assert_eq!(replacing(&anchor, object, C, A, Seen::AtSomeTime), Replacing::Noted);
        assert_eq!(durable(&table, object), Some(Sealed::Becomes { old: C, new: A }));
    }

    #[test]
    fn what_another_process_left_open_is_what_is_seen_first() {
        let (table, anchor) = anchor();
        let root = ObjectId::ROOT;
        replacing(&anchor, root, A, B, Seen::AtSomeTime);
        assert!(
            anchor.seen(root, PART, A, true).unwrap() && anchor.seen(root, PART, B, true).unwrap(),
            "of this one both"
        );
        let next = Anchor::open(table.clone(), &VAULT).unwrap();
        assert!(!next.seen(root, PART, C, true).unwrap());
        assert!(next.seen(root, PART, A, false).unwrap() && next.seen(root, PART, B, false).unwrap());
        assert!(next.seen(root, PART, A, true).unwrap() && !next.seen(root, PART, B, true).unwrap());
        next.commit(next.mark()).unwrap();
        assert_eq!(durable(&table, root), Some(Sealed::Is(A)));
    }

    #[test]
    fn a_step_whose_outcome_is_not_known_leaves_both() {
        let (table, anchor) = anchor();
        let root = ObjectId::ROOT;
        replacing(&anchor, root, A, B, Seen::AtSomeTime);
        anchor.commit(anchor.mark()).unwrap();
        assert_eq!(durable(&table, root), Some(Sealed::Becomes { old: A, new: B }));
        assert_eq!(replacing(&anchor, root, A, C, Seen::AtSomeTime), Replacing::NeedsBarrier);
        assert_eq!(replacing(&anchor, root, A, C, Seen::BeforeBarrier), Replacing::Noted);
        assert_eq!(durable(&table, root), Some(Sealed::Becomes { old: A, new: C }));
    }
}
