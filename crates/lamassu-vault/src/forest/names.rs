//! Names that the kernel is to drop. It drops a name under its lock of the directory, which a program may hold for as
//! long as it likes: it reads the directory into memory that another file system has to supply. So a thread of its own
//! drops them, which nothing else waits for without limit.

use super::Cache;
use crate::Ino;
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long it is waited for that names are dropped. Much more than it takes where nobody holds the directory.
const WAIT_MAX: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Names {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    left: BTreeSet<(Ino, OsString)>,
    is_running: bool,
}

/// Drops names, one after the other, on one thread.
#[derive(Default)]
pub(super) struct Dropping(Arc<Names>);

impl Dropping {
    /// Makes the kernel drop names. Returns when all are dropped, or a program has kept one from being dropped for a
    /// while; it is dropped when that program goes on.
    pub fn drop_names(&self, cache: &Arc<dyn Cache>, names: impl IntoIterator<Item = (Ino, OsString)>) {
        let mut state = self.0.state.lock();
        state.left.extend(names);
        if state.left.is_empty() && !state.is_running {
            return;
        }
        if !state.is_running {
            let (of_thread, cache_of_thread) = (self.0.clone(), cache.clone());
            let run = move || of_thread.run(&*cache_of_thread);
            match std::thread::Builder::new().name("lamassu-names".into()).spawn(run) {
                Ok(_) => state.is_running = true,
                // Keys may be dropped next: what they protect must not be shown from a cache.
                Err(_) => {
                    drop(state);
                    return self.0.run(&**cache);
                }
            }
        }
        let until = Instant::now() + WAIT_MAX;
        while state.is_running {
            if self.0.ended.wait_until(&mut state, until).timed_out() {
                tracing::warn!("a program holds a directory: the kernel keeps names there until it lets go");
                return;
            }
        }
    }
}

impl Names {
    fn run(&self, cache: &dyn Cache) {
        loop {
            let (dir, name) = {
                let mut state = self.state.lock();
                let Some(next) = state.left.pop_first() else {
                    state.is_running = false;
                    self.ended.notify_all();
                    return;
                };
                next
            };
            cache.drop_entry(dir, &name);
        }
    }
}
