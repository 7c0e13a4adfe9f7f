//! Whether a store that copies on write is nearly full. There a write over several pages may end in the middle, after
//! which a replaced block would hold neither the old content nor the new.
//!
//! Invariant: what is remembered is at most [`BELIEVED`] old.

use crate::backend::BackendFile;
use std::time::{Duration, Instant};

/// Bytes free below which a store is nearly full. Large, because it is not asked before each write.
const NEARLY_FULL: u64 = 256 << 20;
/// How long an answer is believed.
const BELIEVED: Duration = Duration::from_millis(50);
/// Bytes that must be left for other writers, and for what the store writes of its own, when a block is replaced.
const LEFT: u64 = 4 << 20;

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
                let is_so = backing.room_to_replace().is_ok_and(|room| room < NEARLY_FULL);
                self.seen = Some((Instant::now(), is_so));
                is_so
            }
        }
    }
}

/// Whether a nearly full store has room to replace `len` bytes.
pub(in crate::file) fn has_room(backing: &dyn BackendFile, len: usize) -> bool {
    backing.room_to_replace().is_ok_and(|room| room >= LEFT + 2 * len as u64)
}
