//! Names that the kernel is to drop. It drops a name under its lock of the directory, which a program may hold for as
//! long as it likes: it reads the directory into memory that another file system has to supply. So each directory has a
//! thread of its own, which nothing else waits for without limit.

use super::Cache;
use crate::Ino;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long it is waited for that names are dropped. Much more than it takes where nobody holds the directory.
const WAIT_MAX: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Names {
    /// Directories that have a thread, and the names that it has still to drop.
    busy: Mutex<BTreeMap<Ino, BTreeSet<OsString>>>,
    ended: Condvar,
}

/// Drops names, those of a directory one after the other.
#[derive(Default)]
pub(super) struct Dropping(Arc<Names>);

impl Dropping {
    /// Makes the kernel drop names. Returns when all are dropped, or a program has kept one from being dropped for a
    /// while; it is dropped when that program goes on.
    pub fn drop_names(&self, cache: &Arc<dyn Cache>, names: impl IntoIterator<Item = (Ino, OsString)>) {
        let (mut busy, mut asked) = (self.0.busy.lock(), HashSet::new());
        let mut new = HashSet::new();
        for (dir, name) in names {
            asked.insert(dir);
            busy.entry(dir)
                .or_insert_with(|| {
                    new.insert(dir);
                    BTreeSet::new()
                })
                .insert(name);
        }
        drop(busy);
        for dir in new {
            let (of_thread, cache_of_thread) = (self.0.clone(), cache.clone());
            let run = move || of_thread.run(dir, &*cache_of_thread);
            // Keys may be dropped next. What they protect must not be shown from a cache, so without a thread it is
            // done here.
            if std::thread::Builder::new().name("lamassu-names".into()).spawn(run).is_err() {
                self.0.run(dir, &**cache);
            }
        }
        let until = Instant::now() + WAIT_MAX;
        let mut busy = self.0.busy.lock();
        while asked.iter().any(|dir| busy.contains_key(dir)) {
            if self.0.ended.wait_until(&mut busy, until).timed_out() {
                tracing::warn!("a program holds a directory: the kernel keeps names there until it lets go");
                return;
            }
        }
    }
}

impl Names {
    fn run(&self, dir: Ino, cache: &dyn Cache) {
        loop {
            let name = {
                let mut busy = self.busy.lock();
                let Some(name) = busy.get_mut(&dir).and_then(BTreeSet::pop_first) else {
                    busy.remove(&dir);
                    self.ended.notify_all();
                    return;
                };
                name
            };
            cache.drop_entry(dir, &name);
        }
    }
}
