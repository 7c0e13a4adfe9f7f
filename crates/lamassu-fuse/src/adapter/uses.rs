//! The open files, and what the kernel may hold of their contents.
//!
//! A file that is being put into the page cache (`tuning::windows`) is not open for writing: otherwise old bytes could
//! replace new ones. So a request that opens a file for writing or sets its size first counts as a writer ([`Claim`]),
//! and then waits for the end of a fill under way.

use super::{Shared, TTL, TTL_WRITE_BACK};
use crate::options::CacheMode;
use lamassu_vault::turns::{KEPT_FOR, Turns};
use lamassu_vault::{FileSystem, Ino, ROOT};
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The open handles of an inode, and requests that change it or open it for writing.
#[derive(Default)]
pub(super) struct Uses {
    handles: u32,
    /// Handles for writing: only through one of these can the kernel hold data that the file system below has not seen.
    writers: u32,
    /// Since the first was opened, one of them could bring contents into the page cache.
    cached: bool,
}

/// Counts as a writer of the file for as long as it lives: no fill of its pages begins.
pub(super) struct Claim<F: FileSystem>(Arc<Shared<F>>, Ino);

impl<F: FileSystem> Claim<F> {
    fn new(shared: &Arc<Shared<F>>, ino: Ino) -> Self {
        shared.add_use(ino, true, false);
        Claim(shared.clone(), ino)
    }
}

impl<F: FileSystem> Drop for Claim<F> {
    fn drop(&mut self) {
        self.0.drop_use(self.1, true);
    }
}

impl<F: FileSystem> Shared<F> {
    /// How long the attributes of an inode may be cached.
    pub(super) fn ttl(&self, ino: Ino) -> Duration {
        if ino == ROOT && self.is_root_asked {
            return Duration::ZERO;
        }
        if self.fs.hosts_take_turns() {
            let Some(turns) = self.fs.turns_that_show(ino) else { return Duration::ZERO };
            let may_keep = self.keeps_in(&turns) && !self.is_written(ino) && self.fs.may_cache(ino);
            if may_keep && turns.may_keep(ino) { KEPT_FOR } else { Duration::ZERO }
        } else if !self.is_written(ino) {
            TTL
        } else if self.cache == CacheMode::WriteBack {
            TTL_WRITE_BACK
        } else {
            Duration::ZERO
        }
    }

    /// How long a name, or its absence, may be cached.
    pub(super) fn name_ttl(&self, dir: Ino, name: &OsStr) -> Duration {
        if !self.fs.hosts_take_turns() {
            return TTL;
        }
        match self.fs.join_turns(dir) {
            Some(turns) if self.keeps_in(&turns) && turns.may_keep_name(dir, name) => KEPT_FOR,
            Some(_) | None => Duration::ZERO,
        }
    }

    /// Whether the kernel may keep names and attributes in this turn.
    fn keeps_in(&self, turns: &Turns) -> bool {
        self.cache != CacheMode::None && self.may_keep.load(Ordering::Relaxed) && turns.is_keeping()
    }

    /// Whether it may keep anything of this inode, if a turn is needed for that.
    pub(super) fn keeps(&self, ino: Ino) -> bool {
        !self.fs.hosts_take_turns() || self.fs.join_turns(ino).is_some_and(|turns| self.keeps_in(&turns))
    }

    /// A name was moved: the kernel keeps its cached state under the new name.
    pub(super) fn moved(&self, names: [(Ino, &OsStr); 2]) {
        if let Some(turns) = self.fs.join_turns(names[0].0) {
            turns.is_moved(names);
        }
    }

    /// Whether the kernel may hold data of this file that has not come here yet.
    pub(super) fn is_written(&self, ino: Ino) -> bool {
        self.uses.lock().get(&ino).is_some_and(|uses| uses.writers > 0)
    }

    /// Whether the kernel may cache contents of this file that were read since it was opened.
    pub(super) fn is_cached(&self, ino: Ino) -> bool {
        self.uses.lock().get(&ino).is_some_and(|uses| uses.cached)
    }

    pub(super) fn add_use(&self, ino: Ino, writes: bool, cached: bool) {
        let mut all = self.uses.lock();
        let uses = all.entry(ino).or_default();
        uses.handles += 1;
        uses.writers += u32::from(writes);
        uses.cached |= cached;
    }

    /// Notes that a direct handle was read through the page cache after all: the file is mapped.
    pub(super) fn note_cached(&self, ino: Ino) {
        if let Some(uses) = self.uses.lock().get_mut(&ino) {
            uses.cached = true;
        }
    }

    /// Ends a use. The last one drops contents from the page cache that must not stay there, such as those of a file
    /// that was mapped.
    pub(super) fn drop_use(self: &Arc<Self>, ino: Ino, writes: bool) {
        let mut all = self.uses.lock();
        let Some(uses) = all.get_mut(&ino) else { return };
        // The counts follow the request, which need not match an open handle: so they stop at zero.
        uses.handles = uses.handles.saturating_sub(1);
        uses.writers = uses.writers.saturating_sub(u32::from(writes));
        if uses.handles > 0 {
            return;
        }
        let cached = uses.cached;
        all.remove(&ino);
        drop(all);
        if cached && !self.may_stay(ino) {
            self.aside("release", move |shared| shared.push_out(ino, 0, 0));
        }
    }

    /// Whether contents of a file may stay in the page cache.
    pub(super) fn may_stay(&self, ino: Ino) -> bool {
        self.cache != CacheMode::None && self.fs.may_cache(ino)
    }

    /// Runs `job` when no part of this file is being put into the page cache; no such fill begins until the claim is
    /// dropped.
    pub(super) fn claimed(
        self: &Arc<Self>,
        ino: Ino,
        op: &'static str,
        job: impl FnOnce(&Arc<Self>, Claim<F>) + Send + 'static,
    ) {
        // In this order: a beginning fill checks for claims after it has become visible here.
        let claim = Claim::new(self, ino);
        let shared = self.clone();
        self.after_fill(ino, op, move |_| job(&shared, claim));
    }

    /// Runs `job` when the fill of this file's pages that is under way, if there is one, has ended.
    pub(super) fn after_fill(self: &Arc<Self>, ino: Ino, op: &'static str, job: impl FnOnce(&Self) + Send + 'static) {
        if !self.tuning.is_filling(ino) {
            return job(self);
        }
        self.aside(op, move |shared| {
            shared.tuning.wait_filled(ino);
            job(shared);
        });
    }
}
