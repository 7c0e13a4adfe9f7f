//! How much a call does of what other calls have left.

/// What was done at once so far.
#[derive(Debug, Default)]
pub(crate) struct Work {
    steps: usize,
}

impl Work {
    /// Steps at once, each a look at a lock or at a request that waits. All other users of the vault wait for these
    /// milliseconds, and for the last piece of work.
    pub const AT_ONCE: usize = 1 << 15;

    /// So many steps were taken.
    pub fn did(&mut self, steps: usize) {
        self.steps += steps;
    }

    /// Whether there is time for more.
    pub fn goes_on(&self) -> bool {
        self.steps < Work::AT_ONCE
    }
}
