//! What the kernel was given to cache in a turn, and when.

use super::KEPT_FOR;
use std::collections::HashMap;
use std::time::Instant;

/// Most names, and most inodes, that the kernel may cache in a turn.
pub(super) const KEPT_MAX: usize = 1 << 17;

/// Times at which entries were given to the kernel.
pub(super) struct Told<T> {
    told: HashMap<T, Instant>,
    /// The number of entries at which expired ones are next removed.
    look_at: usize,
}

impl<T: Eq + std::hash::Hash> Told<T> {
    const FEW: usize = 4096;

    pub fn new() -> Told<T> {
        Told { told: HashMap::new(), look_at: Self::FEW }
    }

    /// False: there are too many.
    pub fn add(&mut self, what: T, now: Instant) -> bool {
        if self.told.len() >= self.look_at {
            // The kernel starts its timeout a little later than this process.
            self.told.retain(|_, at| now.duration_since(*at) < 2 * KEPT_FOR);
            self.look_at = Self::FEW.max(2 * self.told.len());
        }
        if self.told.len() >= KEPT_MAX && !self.told.contains_key(&what) {
            return false;
        }
        self.told.insert(what, now);
        true
    }

    /// Notes what the kernel has got otherwise.
    pub fn note(&mut self, what: T, now: Instant) {
        self.told.insert(what, now);
    }

    pub fn take(&mut self) -> Vec<T> {
        self.look_at = Self::FEW;
        std::mem::take(&mut self.told).into_keys().collect()
    }
}
