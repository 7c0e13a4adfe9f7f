//! Another database on the same file, in place of one that its disk has failed.

use super::role::Role;
use super::{DiskTable, fenced};
use crate::AnchorError;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a failed database waits for its readers before it is replaced.
const READERS_WAITED_FOR: Duration = Duration::from_millis(500);

impl DiskTable {
    /// Replaces the failed database with this number by a new one, unless another thread has done so. The transaction
    /// of the failed one is rolled back. While someone reads the failed one for long, this fails, and is left to a
    /// later call: a reader may be as slow as whoever is sent what it reads.
    pub(super) fn open_anew(&self, op: &'static str, number: u64) -> Result<(), AnchorError> {
        #[cfg(test)]
        self.backend.hooks.run(super::tests::OPENS_ANEW);
        let busy = || AnchorError::io(op, &self.path)(io::ErrorKind::ResourceBusy.into());
        let current = &mut *self.database.try_write_for(READERS_WAITED_FOR).ok_or_else(busy)?;
        if self.is_broken.load(Ordering::Acquire) {
            return Err(AnchorError::Broken);
        }
        if current.handle.is_some() && current.number != number {
            return Ok(());
        }
        let broken = || {
            self.is_broken.store(true, Ordering::Release);
            AnchorError::Broken
        };
        self.backend.keep_locks();
        current.kept.forget();
        let old = current.handle.take();
        current.number += 1;
        fenced(|| drop(old)).ok_or_else(broken)?;
        if self.role == Role::Writer {
            self.backend.roll_back().map_err(AnchorError::io(op, &self.path))?;
        }
        let opened = fenced(|| self.role.open(&self.backend)).ok_or_else(broken)?;
        current.handle = Some(opened.map_err(|error| self.failed(op, error.into()))?);
        self.backend.leave_locks();
        Ok(())
    }

    /// Makes the record void of a commit that has failed, if that could not be done at once.
    pub(super) fn void_failed_record(&self, op: &'static str) -> Result<(), AnchorError> {
        #[cfg(test)]
        self.backend.hooks.run(super::tests::BEFORE_VOIDING);
        self.backend.void_failed_record().map_err(AnchorError::io(op, &self.path))
    }
}
