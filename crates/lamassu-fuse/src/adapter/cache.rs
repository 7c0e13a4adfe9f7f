//! Makes the kernel drop what it caches of vaults that are unloaded while mounted, before and after their keys are
//! dropped.
//!
//! The kernel caches the absence of names too. Absent names below the root of a dataset are dropped with the name of
//! that root. Those in the root of the mount are dropped one by one, so they are remembered here.
//!
//! Never on a request thread: dropping waits for requests, and for locks of the kernel that requests hold.

use super::{Shared, TTL};
use fuser::INodeNo;
use lamassu_vault::forest::Cache;
use lamassu_vault::{FileSystem, Ino, ROOT};
use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::sync::Weak;
use std::time::Duration;

/// Most absent names that are remembered. The kernel is allowed to cache no others.
const ABSENT_MAX: usize = 4096;

/// Drops kernel caches of unloaded vaults. Does nothing after the end of the mount.
pub(crate) struct KernelCache<F>(pub(crate) Weak<Shared<F>>);

impl<F: FileSystem> Cache for KernelCache<F> {
    fn drop_inode(&self, ino: Ino) {
        let Some(shared) = self.0.upgrade() else { return };
        // A window that is being put into the page cache comes from the vault that is unloaded.
        shared.tuning.wait_filled(ino);
        shared.push_out(ino, 0, 0);
    }

    fn drop_part(&self, ino: Ino, part: Range<u64>) {
        let Some(shared) = self.0.upgrade() else { return };
        shared.tuning.wait_filled(ino);
        match part.end {
            u64::MAX => shared.push_out(ino, part.start, 0),
            end if end > part.start => shared.push_out(ino, part.start, end - part.start),
            _ => {}
        }
    }

    fn drop_entry(&self, parent: Ino, name: &OsStr) {
        if let Some(shared) = self.0.upgrade() {
            shared.drop_entry(parent, name);
        }
    }

    fn take_absent(&self) -> Vec<OsString> {
        let Some(shared) = self.0.upgrade() else { return Vec::new() };
        let absent = std::mem::take(&mut *shared.absent.lock());
        absent.into_iter().collect()
    }

    fn expire_attributes(&self, ino: Ino) {
        if let Some(shared) = self.0.upgrade() {
            shared.forget_attributes(ino);
        }
    }

    fn expire_entry(&self, parent: Ino, name: &OsStr) {
        if let Some(shared) = self.0.upgrade()
            && let Some(notifier) = shared.notifier.get()
            && let Err(error) = notifier.expire_entry(INodeNo(parent), name)
        {
            tracing::debug!(%error, parent, "a name could not be expired");
        }
    }
}

impl<F: FileSystem> Shared<F> {
    fn drop_entry(&self, parent: Ino, name: &OsStr) {
        if let Some(notifier) = self.notifier.get()
            && let Err(error) = notifier.inval_entry(INodeNo(parent), name)
        {
            tracing::debug!(%error, parent, "a name could not be dropped");
        }
    }

    /// How long the kernel may cache that a name does not exist.
    pub(super) fn absent(&self, parent: Ino, name: &OsStr) -> Duration {
        if parent != ROOT || self.fs.hosts_take_turns() {
            return self.name_ttl(parent, name);
        }
        let mut absent = self.absent.lock();
        if absent.len() >= ABSENT_MAX && !absent.contains(name) {
            return Duration::ZERO;
        }
        absent.insert(name.to_owned());
        TTL
    }
}
