//! Requests that need turns of two vaults, and those that wait for a limited time.

use super::{Need, State, Turns, Use, Waiting};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long one turn is kept while another one is waited for: a small part of the shortest term, within which a turn
/// that others want must end.
pub const TOGETHER: Duration = Duration::from_millis(500);

impl State {
    /// Takes a waiting request from its position.
    pub fn take(&mut self, at: usize) -> Option<Waiting> {
        self.due -= usize::from(at < self.due);
        self.waiting.remove(at)
    }

    /// When a waiting request may be carried out, or gives up, although nothing happens.
    pub fn next_time(&self) -> Option<Instant> {
        let limits = self.waiting.iter().filter_map(|waiting| waiting.until);
        let stuck = self.ending.stuck_from().filter(|stuck| *stuck > Instant::now() && !self.waiting.is_empty());
        limits.chain(stuck).min()
    }

    /// The position of a request that has waited for as long as it may.
    pub fn overdue(&self, now: Instant) -> Option<usize> {
        self.waiting.iter().position(|waiting| waiting.until.is_some_and(|until| until <= now))
    }
}

/// Calls `job` with turns of a vault and of a dataset in it. The outer turn is taken first, on all hosts, so that hosts
/// do not wait for each other in a circle. It is not kept for long while the inner one is waited for, which another
/// host may have frozen: then the outer one is given up, and both are taken when there is the inner one.
pub fn run_in_both(outer: Arc<Turns>, inner: Arc<Turns>, need: Need, job: Box<dyn FnOnce([Use; 2]) + Send>) {
    outer.clone().run(need, move |held| {
        let waits = inner.clone();
        waits.run_until(Some(Instant::now() + TOGETHER), need, move |turn| match turn {
            Some(turn) => job([held, turn]),
            None => {
                drop(held);
                inner.clone().run(need, move |turn| {
                    drop(turn);
                    run_in_both(outer, inner, need, job);
                });
            }
        });
    });
}
