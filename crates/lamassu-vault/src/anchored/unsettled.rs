//! A move without an outcome: the store does not show whether it has made it, or the anchor could not take it back.
//!
//! Until it is settled, its places are neither used nor cleared: what lies there may be all that there is of a file.
//! And no other move is recorded, since recovery relies on the store having made all moves up to one of them (N3).

use super::{Anchored, Moving};
use crate::dirs::Dir;
use crate::inode::StoreId;
use crate::names::StoredName;
use crate::{Ino, Kind, symlink};
use lamassu_anchor::{EntryPlace, ObjectId};
use lamassu_store::backend::Stat;
use parking_lot::Mutex;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Calls that only pass by look again after so many times as long as the last look took: a store that is half dead
/// answers none of them soon.
const PAUSE: u32 = 10;

/// One end of a move.
pub(crate) struct End {
    pub dir: Arc<Dir>,
    pub stored: StoredName,
    pub st: Option<Stat>,
    /// The object that the anchor has there; 0: none, or an unanchored vault.
    pub object: ObjectId,
    /// An unrecorded entry lies there.
    pub is_in_the_way: bool,
    /// Name of the rest of a long link target.
    pub rest: Option<OsString>,
}

impl End {
    pub fn id(&self) -> Option<StoreId> {
        self.st.as_ref().map(StoreId::from)
    }

    pub fn is_recorded(&self) -> bool {
        self.object != ObjectId::default()
    }

    pub fn is_dir(&self) -> bool {
        self.st.is_some_and(|st| st.kind == Kind::Dir)
    }

    pub fn place(&self) -> (Ino, &OsStr) {
        (self.dir.ino, &self.stored.name)
    }

    pub fn name(&self) -> (&Dir, &OsStr) {
        (&self.dir, &self.stored.name)
    }

    /// Whether the link that was there has another name in this directory; asked after this name is gone.
    pub fn is_left_behind(&self) -> bool {
        self.st.is_some_and(|st| st.nlink > 1 && symlink::is_named_in(&*self.dir.handle, &st))
    }
}

/// A move without an outcome.
pub(crate) struct Unsettled {
    pub from: End,
    pub to: End,
    pub is_exchange: bool,
    pub moving: Moving,
    /// The move that takes it back, once that is durable.
    pub back: Option<Moving>,
    /// The replaced file, if it is kept for the kernel.
    pub kept: Option<Ino>,
}

/// Places that must stay as they are.
#[derive(Default)]
pub(super) struct Unsettleds {
    /// Whether there are any: mostly not.
    is_any: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The move of this process.
    own: Option<Unsettled>,
    /// When calls that pass by look at it again.
    again_at: Option<Instant>,
    /// The places of moves that recovery could not put right.
    left: HashSet<EntryPlace>,
}

impl Anchored {
    /// Whether a move of this process has no outcome.
    pub fn has_unsettled(&self) -> bool {
        self.unsettled.is_any() && self.unsettled.state.lock().own.is_some()
    }

    /// Whether a move has no outcome, of this process or of an earlier writer.
    pub fn has_any_unsettled(&self) -> bool {
        self.unsettled.is_any()
    }

    /// The caller holds the tree's lock exclusively.
    pub fn note_unsettled(&self, unsettled: Unsettled) {
        self.unsettled.change(|state| (state.own, state.again_at) = (Some(unsettled), None));
    }

    /// The caller settles it, or gives it back, and holds the tree's lock exclusively meanwhile.
    pub fn take_unsettled(&self) -> Option<Unsettled> {
        let mut taken = None;
        self.unsettled.change(|state| taken = state.own.take());
        taken
    }

    /// Notes that a look at it found no outcome, and took so long.
    pub fn looked_in_vain(&self, took: Duration) {
        self.unsettled.change(|state| state.again_at = Instant::now().checked_add(took.saturating_mul(PAUSE)));
    }

    /// Whether calls that pass by are to look at it now.
    pub fn is_to_be_looked_at(&self) -> bool {
        self.has_unsettled() && self.unsettled.state.lock().again_at.is_none_or(|at| at <= Instant::now())
    }

    /// Recovery could not put these places right.
    pub fn leave_places(&self, places: impl IntoIterator<Item = EntryPlace>) {
        self.unsettled.change(|state| state.left.extend(places));
    }

    /// Whether a place is one of a move of this process without an outcome.
    pub fn is_unsettled(&self, place: &EntryPlace) -> bool {
        self.unsettled.is_any() && self.unsettled.state.lock().own.as_ref().is_some_and(|own| own.is_of(self, place))
    }

    /// Whether what lies at a place must stay there: it may be the object of a move without an outcome.
    pub fn must_stay(&self, place: &EntryPlace) -> bool {
        self.is_unsettled(place) || self.unsettled.is_any() && self.unsettled.state.lock().left.contains(place)
    }

    /// Whether there is such a place in a directory.
    pub fn must_stay_in(&self, dir: ObjectId) -> bool {
        if !self.unsettled.is_any() {
            return false;
        }
        let state = self.unsettled.state.lock();
        let is_end = |own: &Unsettled| [&own.from, &own.to].into_iter().any(|end| end.dir.object == dir);
        state.own.as_ref().is_some_and(is_end) || state.left.iter().any(|place| place.dir == dir)
    }

    /// Whether the anchor may have to record this object again, which the move has replaced.
    pub(crate) fn may_come_back(&self, object: ObjectId) -> bool {
        self.unsettled.is_any() && self.unsettled.state.lock().own.as_ref().is_some_and(|own| own.to.object == object)
    }
}

impl Unsettled {
    fn is_of(&self, anchored: &Anchored, place: &EntryPlace) -> bool {
        let of = |end: &End| anchored.place(end.dir.object, &end.stored.name) == *place;
        of(&self.from) || of(&self.to)
    }
}

impl Unsettleds {
    fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Acquire)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let state = &mut *self.state.lock();
        change(state);
        self.is_any.store(state.own.is_some() || !state.left.is_empty(), Ordering::Release);
    }
}
