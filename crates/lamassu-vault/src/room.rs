//! Calls that a full store refuses, and that are repeated when room comes back.
//!
//! For a user, a removal or a close gives its room back before the call returns. In the store it comes back later: an
//! anchored vault removes an entry after the anchor's next commit, and a file takes its room until its last descriptor
//! is closed. The kernel tells of a close after close(2) has returned, and of an inode that it forgets after rename(2)
//! has. A thread of maintenance may hold a file for as long as its pass takes. So a refused call first does what gives
//! room back, then waits for files that are about to be closed, and is repeated whenever room came back.
//!
//! It is known from counts, not from the time: [`Room::gains`] grows each time after the store has given room back. A
//! call that fails while the count stays the same has met a store that is full. Every wait is bounded: a program may
//! keep a removed file open for as long as it likes, and a mount whose request threads all wait reads no message of the
//! kernel. (Mostly one has it already: the kernel sends the end of a file before the next request of the same program.)

use crate::errno::errno_of;
use crate::{Ino, Result, Vault, VaultError};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long after its removal, or after a close(2), a file without a name counts as one that is about to be closed. On
/// a busy machine the kernel's message may take long.
const CLOSES_WITHIN: Duration = Duration::from_secs(1);
/// A call waits no longer than this for all files together.
const WAIT_MAX: Duration = Duration::from_secs(2);
/// Other calls may give back room again and again that this call does not get.
const REPEATS_MAX: usize = 16;

/// What may give room back, in the order in which it is tried: what costs least is first.
const STEPS: [Step; 3] = [Step::Removals, Step::Barrier, Step::Settle];

#[derive(Clone, Copy)]
enum Step {
    /// Removals that the anchor can commit without a barrier.
    Removals,
    /// All others.
    Barrier,
    /// Files that give space back when they are settled.
    Settle,
}

/// A file that is out of the table, or has no name, and is still open.
#[derive(Clone, Copy)]
enum Held {
    /// It has its name. Some thread still refers to it.
    Named,
    /// Its last name is gone. Until then it counts as about to be closed.
    Nameless { until: Instant },
}

#[derive(Default)]
struct State {
    gains: u64,
    /// The count at which refusals were forgotten last.
    forgotten: u64,
    held: BTreeMap<(Ino, u64), Held>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    ids: AtomicU64,
}

/// Counts how often the store has given room back, and knows the files whose close will.
#[derive(Clone, Default)]
pub(crate) struct Room(Arc<Shared>);

/// Notes when a file is closed. To be dropped after everything that holds its descriptor.
pub(crate) struct Closing {
    room: Arc<Shared>,
    key: (Ino, u64),
    is_held: AtomicBool,
}

impl Closing {
    fn hold(&self, held: Held) {
        self.is_held.store(true, Ordering::Release);
        self.room.state.lock().held.insert(self.key, held);
    }

    /// The file has no name any more, and was not closed.
    pub fn is_nameless(&self) {
        self.hold(Held::Nameless { until: Instant::now() + CLOSES_WITHIN });
    }

    /// The file has lost its name in an earlier turn, and nobody knows when it will be closed.
    pub fn has_no_name(&self) {
        self.hold(Held::Nameless { until: Instant::now() });
    }

    /// A close(2) has begun. If it is the last, the kernel tells so soon.
    pub fn is_being_closed(&self) {
        let state = &mut *self.room.state.lock();
        if let Some(Held::Nameless { until }) = state.held.get_mut(&self.key) {
            *until = Instant::now() + CLOSES_WITHIN;
        }
    }

    /// The file is out of the table; others may still refer to it. To be called under the lock of the nodes, so that
    /// no name is lost in between.
    pub fn is_let_go(&self, has_name: bool) {
        match (self.is_held.load(Ordering::Acquire), has_name) {
            (true, _) => {}
            (false, true) => self.hold(Held::Named),
            (false, false) => self.is_nameless(),
        }
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        if !*self.is_held.get_mut() {
            return;
        }
        let state = &mut *self.room.state.lock();
        if let Some(Held::Nameless { .. }) = state.held.remove(&self.key) {
            state.gains += 1;
            self.room.changed.notify_all();
        }
    }
}

impl Room {
    pub fn closing(&self, ino: Ino) -> Closing {
        let id = self.0.ids.fetch_add(1, Ordering::Relaxed);
        Closing { room: self.0.clone(), key: (ino, id), is_held: AtomicBool::new(false) }
    }

    /// To be called after the store has given room back, or may have. Never by a call that [`Vault::with_room`] makes
    /// and that may fail afterwards: it would take its own gain for room.
    pub fn gained(&self) {
        self.0.state.lock().gains += 1;
        self.0.changed.notify_all();
    }

    /// An inode has lost its last name: who still refers to a file of it keeps its room.
    pub fn lost_name(&self, ino: Ino) {
        let until = Instant::now() + CLOSES_WITHIN;
        let state = &mut *self.0.state.lock();
        state.held.range_mut((ino, 0)..=(ino, u64::MAX)).for_each(|(_, held)| *held = Held::Nameless { until });
    }

    /// To be called after work in the background has failed that began when the count was `seen`: refusals that it
    /// noted may be older than the room.
    pub fn doubt_refusals(&self, seen: u64) {
        let state = &mut *self.0.state.lock();
        if state.gains != seen {
            state.gains += 1;
        }
    }

    pub fn gains(&self) -> u64 {
        self.0.state.lock().gains
    }

    /// Whether room came back since the count was `seen`, or since refusals were forgotten last.
    fn has_gained(&self, seen: u64) -> bool {
        let state = self.0.state.lock();
        state.gains != seen || state.gains != state.forgotten
    }

    fn note_forgotten(&self) {
        let state = &mut *self.0.state.lock();
        state.forgotten = state.gains;
    }

    /// Waits until room comes back, for as long as a file is about to be closed. Returns whether it came back.
    fn wait(&self, seen: u64, until: Instant) -> bool {
        let mut state = self.0.state.lock();
        loop {
            let now = Instant::now();
            let due = |held: &Held| match held {
                Held::Nameless { until } if *until > now => Some(*until),
                Held::Nameless { .. } | Held::Named => None,
            };
            let last = state.held.values().filter_map(due).max().filter(|_| now < until);
            match last {
                _ if state.gains != seen => return true,
                Some(last) => _ = self.0.changed.wait_until(&mut state, last.min(until)),
                None => return false,
            }
        }
    }
}

impl Vault {
    /// Makes a call, and repeats it if the store was full and has room again. The caller must hold no lock of the tree,
    /// and be in no pass.
    pub(crate) fn with_room<T>(&self, call: impl Fn() -> Result<T>) -> Result<T> {
        self.repeat_while_full(&STEPS, call)
    }

    /// The same for a call that makes removals and settles files itself. The caller may be in a pass.
    pub(crate) fn with_room_of_closes<T>(&self, call: impl Fn() -> Result<T>) -> Result<T> {
        self.repeat_while_full(&[], call)
    }

    fn repeat_while_full<T>(&self, steps: &[Step], call: impl Fn() -> Result<T>) -> Result<T> {
        let mut steps = steps.iter();
        let mut deadline = None;
        for _ in 0..REPEATS_MAX {
            let seen = self.room.gains();
            match call() {
                Err(error) if is_full(&error) && !self.options.read_only => {
                    let until = *deadline.get_or_insert_with(|| Instant::now() + WAIT_MAX);
                    let mut by_step = || steps.any(|step| self.take_step(*step) && self.room.has_gained(seen));
                    if !(self.room.has_gained(seen) || by_step() || self.room.wait(seen, until)) {
                        return Err(error);
                    }
                    self.forget_refusals();
                }
                done => return done,
            }
        }
        call()
    }

    /// Writes that were refused for lack of space may be tried at once.
    fn forget_refusals(&self) {
        // First: room that comes back meanwhile counts for the next time.
        self.room.note_forgotten();
        *self.overfull.lock() = None;
        for open in self.files.all() {
            open.file().space_came_back();
        }
    }

    /// Returns whether there was something to do. A failure is not the caller's: what failed is tried again in the
    /// background, and the rest was done.
    fn take_step(&self, step: Step) -> bool {
        let owing = || self.files.all().into_iter().filter(|open| open.is_writable() && open.file().owes_space());
        let has_work = match step {
            Step::Removals | Step::Barrier => self.has_removals(),
            Step::Settle => owing().next().is_some(),
        };
        if !has_work || self.closed.load(Ordering::Acquire) {
            return false;
        }
        // A freeze under way does all of it.
        let Some(_pass) = self.gate.enter_unless_still() else { return true };
        let done = match step {
            Step::Removals => self.let_go_of_names(0),
            Step::Barrier => self.let_go_of_names(1),
            Step::Settle => self.settle(owing().collect()),
        };
        if matches!(step, Step::Settle) {
            self.room.gained();
        }
        if let Err(error) = done {
            tracing::warn!(%error, "the store is full, and what would give room back failed; it will be tried again");
        }
        true
    }

    /// To be called when the node of an inode has lost its last name.
    pub(crate) fn note_nameless(&self, ino: Ino) {
        self.room.lost_name(ino);
        self.nameless.note_nameless(ino);
        if let Some(open) = self.files.get(ino) {
            open.closing.is_nameless();
        }
    }
}

/// Whether the store, or a quota of it, is full.
fn is_full(error: &VaultError) -> bool {
    // A full disk of the anchor gets no room from the store's removals.
    let is_of_store = matches!(error, VaultError::Io { .. } | VaultError::Store(lamassu_store::StoreError::Io { .. }));
    is_of_store && matches!(errno_of(error), libc::ENOSPC | libc::EDQUOT)
}
