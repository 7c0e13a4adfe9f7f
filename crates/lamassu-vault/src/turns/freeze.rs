//! A turn that does not end, and in which nothing is changed: while the vault is frozen. Other hosts wait until the
//! thaw. Requests that change something wait here, and are carried out after it, in this turn or the next one.

use super::{Mode, Need, Phase, State, Turns};
use parking_lot::MutexGuard;

/// Whether the vault is frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freezing {
    No,
    /// From the next exclusive turn on.
    Wanted,
    /// The turn does not end, and no further change begins.
    Yes,
}

impl State {
    pub fn is_frozen(&self) -> bool {
        self.freezing == Freezing::Yes
    }

    /// Whether a request waits for the thaw.
    pub fn holds_back(&self, need: Need) -> bool {
        self.is_frozen() && need.changes()
    }
}

impl Turns {
    /// Takes an exclusive turn and keeps it until [`Turns::thaw`]. Waits for changes under way. Returns whether it is
    /// kept: not if there is no further turn, none can be taken now, the thaw came first, or it is frozen already.
    /// `is_wanted` is asked once, when a thaw would end the wait: a caller that is told to give up before it waits has
    /// no thaw to expect.
    pub fn freeze(&self, is_wanted: impl FnOnce() -> bool) -> bool {
        let mut state = self.state.lock();
        if state.is_last() || state.phase == Phase::Over || state.freezing != Freezing::No {
            return false;
        }
        state.freezing = Freezing::Wanted;
        if !is_wanted() {
            state.freezing = Freezing::No;
            return false;
        }
        self.freeze_now(&mut state);
        self.driver.notify_all();
        self.runnable.notify_all();
        self.quiet.wait_while(&mut state, |state| match state.freezing {
            Freezing::Wanted => true,
            Freezing::Yes => state.changers > 0,
            Freezing::No => false,
        });
        state.is_frozen()
    }

    /// Begins what [`Turns::freeze`] waits for, if the present turn is enough and does not end.
    pub(super) fn freeze_now(&self, state: &mut MutexGuard<'_, State>) {
        if state.freezing == Freezing::Wanted && state.phase == Phase::Here(Mode::Change) && !state.is_ending {
            state.freezing = Freezing::Yes;
            self.quiet.notify_all();
        }
    }

    /// Ends the freeze, or the wait for it. What was held back is carried out; the turn ends if another host wants it.
    pub fn thaw(&self) {
        let mut state = self.state.lock();
        state.freezing = Freezing::No;
        self.quiet.notify_all();
        self.runnable.notify_all();
        self.driver.notify_all();
    }

    /// Caches are being dropped in doubt, from now on or no longer. Meanwhile no freeze begins: a page that is dropped
    /// may have to be written first.
    pub fn drops_caches(&self, drops: bool) {
        let mut state = self.state.lock();
        state.is_ending = drops;
        self.freeze_now(&mut state);
    }

    /// Whether the turn is kept.
    pub fn is_frozen(&self) -> bool {
        self.state.lock().is_frozen()
    }
}
