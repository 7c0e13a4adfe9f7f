//! A request that is under way.

use super::{Phase, Turns};
use std::sync::Arc;
use std::time::Instant;

/// Alive while a request is carried out.
pub struct Use {
    pub(super) turns: Arc<Turns>,
    /// Whether it is none of [`super::State::users`].
    pub(super) is_beside: bool,
    /// Whether it is one of [`super::State::changers`].
    pub(super) changes: bool,
    /// Whether it is one of [`super::State::callers`].
    pub(super) is_caller: bool,
    /// [`super::State::dropping`] at its beginning.
    pub(super) dropping: u64,
}

impl Drop for Use {
    fn drop(&mut self) {
        if self.is_beside {
            return;
        }
        let mut state = self.turns.state.lock();
        state.users -= 1;
        state.changers -= usize::from(self.changes);
        state.callers -= usize::from(self.is_caller);
        state.last_used = Instant::now();
        let is_older = self.dropping != state.dropping;
        state.older_users -= usize::from(is_older);
        let is_still = state.changers == 0 && state.is_frozen();
        let is_last_caller = self.is_caller && state.callers == 0 && matches!(state.phase, Phase::Ending(_));
        if state.users == 0 || is_last_caller || is_still || (is_older && state.older_users == 0) {
            self.turns.quiet.notify_all();
        }
    }
}
