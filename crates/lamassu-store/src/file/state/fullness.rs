//! Whether the store is nearly full. Then a write over several pages may end in the middle, and blocks are written with
//! more care ([`crate::file::round`]).
//!
//! Invariant: what is remembered is at most [`BELIEVED`] old.

use crate::backend::BackendFile;
use std::time::{Duration, Instant};

/// Bytes free below which a store is nearly full. Large, because it is not asked before each write.
const NEARLY_FULL: u64 = 256 << 20;
/// How long an answer is believed.
const BELIEVED: Duration = Duration::from_millis(50);

/// See the module.
#[derive(Default)]
pub(in crate::file) struct Fullness {
    seen: Option<(Instant, bool)>,
}

impl Fullness {
    /// Whether the store of a file is nearly full. One that does not say is not.
    pub fn is_nearly_full(&mut self, backing: &dyn BackendFile) -> bool {
        match self.seen {
            Some((at, is_so)) if at.elapsed() < BELIEVED => is_so,
            _ => {
                let is_so = backing.free_space().is_ok_and(|free| free < NEARLY_FULL);
                self.seen = Some((Instant::now(), is_so));
                is_so
            }
        }
    }
}
