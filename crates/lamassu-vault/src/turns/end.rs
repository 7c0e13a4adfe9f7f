//! Threads that carry out waiting requests, and the end of all turns.

use super::freeze::Freezing;
use super::{Need, Pages, Phase, State, Turns, Waiting};
use parking_lot::MutexGuard;
use std::io;
use std::sync::Arc;
use std::thread::Builder;

/// Counts a thread as long as it lives.
struct Running(Arc<Turns>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.state.lock().runners -= 1;
        self.0.driver.notify_all();
    }
}

impl Turns {
    /// Starts threads that carry out waiting requests until the end ([`Turns::stop`] waits for them).
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start_runners(self: &Arc<Self>, count: usize) -> io::Result<()> {
        for _ in 0..count {
            self.state.lock().runners += 1;
            let running = Running(self.clone());
            Builder::new().name("lamassu-turns".into()).spawn(move || running.0.run_waiting())?;
        }
        Ok(())
    }

    /// Lets no further turn begin: the mount ends. Returns when the driver has ended the present one; after that,
    /// requests fail.
    pub fn stop(&self) {
        self.will_stop();
        self.wait_until_over(self.state.lock());
    }

    /// The same, without waiting.
    pub fn will_stop(&self) {
        // First: no freeze begins after the thaw.
        self.state.lock().is_stopping = true;
        self.thaw();
    }

    /// The same, and the mount goes on: the present turn ends as if the vault were recalled. Waits for the kernel, so
    /// it must not be called by a thread that answers requests.
    pub fn retire(&self) {
        self.state.lock().is_retired = true;
        self.thaw();
        self.wait_until_over(self.state.lock());
    }

    /// There is no turn, and will be none soon: waiting requests are carried out without one, and fail.
    pub fn fail_waiting(self: &Arc<Self>) {
        if self.state.lock().freezing == Freezing::Wanted {
            self.thaw();
        }
        let failing = std::mem::take(&mut self.state.lock().waiting);
        for Waiting { need, job, .. } in failing {
            let turn = self.begin_request(&mut self.state.lock(), Need { pages: Pages::No, ..need });
            job(Some(turn));
        }
    }

    fn wait_until_over(&self, mut state: MutexGuard<'_, State>) {
        self.driver.notify_all();
        self.driver.wait_while(&mut state, |state| state.phase != Phase::Over || state.runners > 0);
    }

    /// The number of the turn; 0: there was none.
    pub fn number(&self) -> u64 {
        self.state.lock().number
    }

    /// Whether no further turn begins.
    pub fn is_last(&self) -> bool {
        self.state.lock().is_last()
    }

    /// The driver reports that there will be no further turn. Waiting requests are carried out, and fail.
    pub fn over(&self) {
        let mut state = self.state.lock();
        (state.phase, state.freezing) = (Phase::Over, Freezing::No);
        self.quiet.notify_all();
        self.runnable.notify_all();
        self.driver.notify_all();
    }
}
