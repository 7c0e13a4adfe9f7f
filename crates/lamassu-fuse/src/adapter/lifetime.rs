//! The start of a mount and its end: the threads that live as long as the mount, periodic commits, the close of the
//! file system.

use super::{Shared, guarded};
use crate::tuning;
use fuser::INodeNo;
use lamassu_vault::turns::Need;
use lamassu_vault::{Access, FileSystem, HandleId, Ino, VaultError};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

#[derive(Default)]
struct State {
    /// The threads run and the file system is in use, so it must be closed at the end.
    live: bool,
    /// Carries out changes that waited for a thaw.
    deferred: Option<JoinHandle<()>>,
}

#[derive(Default)]
pub(super) struct Lifetime(Mutex<State>);

impl<F: FileSystem> Shared<F> {
    /// Starts the threads; to be called once the kernel has accepted the mount. From here on the end of the session
    /// closes the file system.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut state = self.lifetime.0.lock();
        let shared = self.clone();
        let deferred = Builder::new().name("lamassu-thawed".into()).spawn(move || shared.gate.run_deferred())?;
        state.deferred = Some(deferred);
        let mount: Arc<dyn tuning::Mount> = self.clone();
        self.tuning.start(&mount)?;
        state.live = true;
        Ok(())
    }

    /// Commits in the background. Does nothing while frozen or while changes wait: the next round will.
    fn commit_some(&self) {
        let Some(_pass) = self.gate.enter() else { return };
        guarded("maintain", || {
            if let Err(error) = self.fs.maintain() {
                tracing::error!(%error, "background commit failed; it is tried again, and fsync reports it");
            }
        });
    }

    /// Unloads what is idle. Takes no pass of the gate: unloading waits for changes, which a freeze would hold back
    /// while it waits for the pass.
    fn unload_idle(&self) {
        guarded("unload", || {
            if let Err(error) = self.fs.unload_idle() {
                tracing::error!(%error, "not everything could be committed when it was unloaded");
            }
        });
    }

    /// After the last request: thaws, carries out what waited (those changes were accepted), ends the threads, closes
    /// the file system.
    pub(super) fn finish(&self) {
        self.thaw_for_ever();
        self.fs.stop_turns();
        self.gate.stop();
        self.syncs.stop();
        self.tuning.stop();
        let State { live, deferred } = std::mem::take(&mut *self.lifetime.0.lock());
        if let Some(thread) = deferred {
            // A thread that was lost to a panic must not keep the file system from being closed.
            let _ = thread.join();
        }
        if !live {
            return;
        }
        let closed = guarded("close", || self.fs.close()).unwrap_or_else(|| {
            Err(VaultError::Io { op: "close", source: io::Error::other("a bug: panic while closing, see the log") })
        });
        if let Err(error) = closed {
            tracing::error!(%error, "closing failed");
            *self.closed.lock() = Some(error);
        }
    }
}

impl<F: FileSystem> tuning::Mount for Shared<F> {
    fn maintain(&self) {
        self.commit_some();
        self.unload_idle();
    }

    fn work_off(&self) {
        let Some(_pass) = self.gate.enter() else { return };
        guarded("work off", || {
            if let Err(error) = self.fs.work_off() {
                tracing::error!(%error, "work in the background failed; it is tried again");
            }
        });
    }

    fn with_handle(&self, ino: Ino, body: &mut dyn FnMut(HandleId)) {
        guarded("read ahead", || {
            // Held until the window is in the page cache: so the turn ends after that, and its end drops the window.
            let turn = match self.fs.hosts_take_turns() {
                true => {
                    let turns = self.fs.join_turns(ino).filter(|_| self.keeps(ino));
                    let Some(turn) = turns.and_then(|turns| turns.enter(Need::put_pages(ino))) else { return };
                    Some(turn)
                }
                false => None,
            };
            let Ok(handle) = self.fs.open_file(ino, Access { read: true, ..Access::default() }) else { return };
            body(handle);
            if let Err(error) = self.fs.release(handle) {
                tracing::debug!(%error, ino, "close after reading ahead");
            }
            drop(turn);
        });
    }

    fn may_fill(&self, ino: Ino) -> bool {
        self.notifier.get().is_some() && !self.is_written(ino) && self.may_stay(ino)
    }

    fn read(&self, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Option<usize> {
        self.read_full(handle, offset, buffer, false).ok()
    }

    fn fill(&self, ino: Ino, offset: u64, bytes: &[u8]) {
        if let Some(notifier) = self.notifier.get()
            && let Err(error) = notifier.store(INodeNo(ino), offset, bytes)
        {
            tracing::debug!(%error, ino, "a window could not be put into the page cache");
        }
    }
}
