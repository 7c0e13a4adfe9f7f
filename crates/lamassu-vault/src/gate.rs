//! The gate that every change passes: `freeze` closes it and waits until those inside have left.

use parking_lot::{Condvar, Mutex};

#[derive(Default)]
struct GateState {
    frozen: bool,
    /// Frozen, and everything is durable.
    still: bool,
    inside: usize,
}

/// A gate that every change passes, and that `freeze` closes.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

/// Held while a change is under way.
pub(crate) struct Pass<'a>(&'a Gate);

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut s = self.0.state.lock();
        s.inside -= 1;
        if s.inside == 0 && s.frozen {
            self.0.changed.notify_all();
        }
    }
}

impl Gate {
    /// Waits while frozen.
    pub fn enter(&self) -> Pass<'_> {
        let mut s = self.state.lock();
        self.changed.wait_while(&mut s, |s| s.frozen);
        s.inside += 1;
        Pass(self)
    }

    /// For a caller that may be inside already. It waits only while frozen with nobody inside, and so never for its own
    /// pass: until the last one has left, a freeze waits.
    pub fn enter_again(&self) -> Pass<'_> {
        let mut s = self.state.lock();
        self.changed.wait_while(&mut s, |s| s.frozen && s.inside == 0);
        s.inside += 1;
        Pass(self)
    }

    /// For background work: `None` while frozen.
    pub fn try_enter(&self) -> Option<Pass<'_>> {
        let mut s = self.state.lock();
        (!s.frozen).then(|| {
            s.inside += 1;
            Pass(self)
        })
    }

    /// For syncs: `None` once everything is durable and stays so. Waits while a freeze makes it durable.
    pub fn enter_unless_still(&self) -> Option<Pass<'_>> {
        let mut s = self.state.lock();
        self.changed.wait_while(&mut s, |s| s.frozen && !s.still);
        (!s.still).then(|| {
            s.inside += 1;
            Pass(self)
        })
    }

    /// Notes that everything is durable behind the closed gate.
    pub fn now_still(&self) {
        let mut s = self.state.lock();
        s.still = s.frozen;
        self.changed.notify_all();
    }

    /// Closes the gate and waits until all changes under way have left. False: it was closed already.
    pub fn close(&self) -> bool {
        let mut s = self.state.lock();
        if s.frozen {
            return false;
        }
        s.frozen = true;
        self.changed.wait_while(&mut s, |s| s.inside > 0);
        true
    }

    pub fn open(&self) {
        let mut s = self.state.lock();
        (s.frozen, s.still) = (false, false);
        self.changed.notify_all();
    }

    pub fn is_closed(&self) -> bool {
        self.state.lock().frozen
    }
}
