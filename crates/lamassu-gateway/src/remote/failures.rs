//! What a provider can cause any number of. The log gets one line for all of a kind.

/// Failures of one kind: they are counted, and the first one is kept.
pub struct Failures<T> {
    count: u64,
    first: Option<T>,
}

impl<T> Default for Failures<T> {
    fn default() -> Failures<T> {
        Failures { count: 0, first: None }
    }
}

impl<T> Failures<T> {
    pub fn add(&mut self, failure: impl Into<T>) {
        self.count += 1;
        self.first.get_or_insert_with(|| failure.into());
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    /// Calls `log` with their number and the first one, if there are any.
    pub fn tell(&self, log: impl FnOnce(u64, &T)) {
        if let Some(first) = &self.first {
            log(self.count, first);
        }
    }
}
