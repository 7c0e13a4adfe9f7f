//! What the kernel caches of vaults that are unloaded while mounted: taken from it, before and after the keys go.
//!
//! Names that are not there are cached too. Those below the root of a dataset go with its own name; those in the root of the mount have to be known one by one.
//!
//! Never on a request thread: dropping waits for requests, and for locks of the kernel that requests hold.

use super::{Shared, TTL};
use crate::fs::FileSystem;
use fuser::INodeNo;
use lamassu_vault::forest::Cache;
use lamassu_vault::{Ino, ROOT};
use std::ffi::OsStr;
use std::sync::Weak;
use std::time::Duration;

/// Absent names that are remembered; the kernel caches no more of them than that.
const ABSENT_MAX: usize = 4096;

/// See the module's head. Does nothing after the end of the mount.
pub(crate) struct KernelCache<F>(pub(crate) Weak<Shared<F>>);

impl<F: FileSystem> Cache for KernelCache<F> {
    fn drop_inode(&self, ino: Ino) {
        let Some(shared) = self.0.upgrade() else { return };
        // A window that is being stored came from the vault that goes.
        shared.hot.wait(ino);
        shared.push_out(ino, 0, 0);
        if ino == ROOT {
            let absent = std::mem::take(&mut *shared.absent.lock());
            absent.iter().for_each(|name| shared.drop_entry(ROOT, name));
        }
    }

    fn drop_entry(&self, parent: Ino, name: &OsStr) {
        if let Some(shared) = self.0.upgrade() {
            shared.drop_entry(parent, name);
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

    /// How long the kernel may believe that a name is not there.
    pub(super) fn absent(&self, parent: Ino, name: &OsStr) -> Duration {
        if parent != ROOT {
            return TTL;
        }
        let mut absent = self.absent.lock();
        if absent.len() >= ABSENT_MAX && !absent.contains(name) {
            return Duration::ZERO;
        }
        absent.insert(name.to_owned());
        TTL
    }
}
