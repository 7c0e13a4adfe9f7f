//! Wakes the thread that posts alerts.

use parking_lot::{Condvar, Mutex};

/// Wakes the posting thread when there are new alerts.
#[derive(Default)]
pub struct Bell {
    is_rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    /// Signals that there are new alerts.
    pub fn ring(&self) {
        *self.is_rung.lock() = true;
        self.changed.notify_all();
    }

    /// Waits for that.
    pub fn wait(&self) {
        let mut is_rung = self.is_rung.lock();
        while !*is_rung {
            self.changed.wait(&mut is_rung);
        }
        *is_rung = false;
    }
}
