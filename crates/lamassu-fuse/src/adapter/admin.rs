//! Freeze, thaw, status and calls; and seeking for data and holes, which first needs the kernel's dirty pages.
//!
//! All of these may wait for other requests of the same mount, so they run on threads of their own and never on a
//! request thread.

use super::{Shared, errno_of, failed, guarded};
use crate::control::{
    self, Caller, LAMASSU_IOC_CALL, LAMASSU_IOC_FREEZE, LAMASSU_IOC_FREEZE_LASTS, LAMASSU_IOC_FREEZE_WHILE_OPEN,
    LAMASSU_IOC_STATUS, LAMASSU_IOC_THAW, LAMASSU_IOC_THAW_OWN, LAMASSU_IOC_THAW_TO_UNMOUNT, Status,
};
use fuser::{Errno, INodeNo, ReplyIoctl, ReplyLseek, Request};
use lamassu_vault::{FileSystem, HandleId, Ino, ROOT, Sought, Whence};
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use zeroize::Zeroizing;

/// How often a freeze that is under way is told to fail.
const STOP_AGAIN: Duration = Duration::from_millis(50);
/// Bytes of a file that are looked through for data or a hole before it is asked whether the turn is to end.
const SOUGHT_AT_ONCE: u64 = 64 << 20;

/// What freezing and thawing share.
#[derive(Default)]
pub(super) struct Admin {
    /// No freeze begins any more: the mount ends.
    is_over: bool,
}

/// What an ioctl carries.
pub(super) struct IoctlRequest<'a> {
    /// The open directory that is asked.
    pub handle: HandleId,
    pub command: u32,
    pub input: &'a [u8],
    /// The most bytes that the answer may have.
    pub out_size: u32,
}

impl<F: FileSystem> Shared<F> {
    pub(super) fn ioctl(self: &Arc<Self>, ino: Ino, caller: Caller, request: IoctlRequest<'_>, reply: ReplyIoctl) {
        let IoctlRequest { handle, command, input, out_size } = request;
        let known = match command {
            LAMASSU_IOC_FREEZE | LAMASSU_IOC_FREEZE_WHILE_OPEN | LAMASSU_IOC_FREEZE_LASTS | LAMASSU_IOC_STATUS => true,
            LAMASSU_IOC_THAW | LAMASSU_IOC_THAW_OWN | LAMASSU_IOC_THAW_TO_UNMOUNT => true,
            LAMASSU_IOC_CALL => self.calls.is_some(),
            _ => false,
        };
        if !known || (ino != ROOT && command != LAMASSU_IOC_CALL) {
            return reply.error(Errno::ENOTTY);
        }
        let may_call = command == LAMASSU_IOC_CALL && self.delegates.contains(&caller.uid);
        if !caller.is_owner && !may_call {
            return reply.error(Errno::EPERM);
        }
        match command {
            LAMASSU_IOC_STATUS => {
                let bytes = self.status().to_bytes();
                reply.ioctl(0, &bytes[..bytes.len().min(out_size as usize)]);
            }
            LAMASSU_IOC_CALL => self.call(caller, ino, input, out_size, reply),
            _ => self.aside("freeze", move |shared| {
                let result = match command {
                    LAMASSU_IOC_FREEZE => shared.freeze(None),
                    LAMASSU_IOC_FREEZE_WHILE_OPEN => shared.freeze(Some(handle)),
                    LAMASSU_IOC_FREEZE_LASTS => shared.own(handle).map(|_admin| *shared.freezer.lock() = None),
                    LAMASSU_IOC_THAW_OWN => shared.own(handle).and_then(|admin| shared.thaw_locked(&admin)),
                    LAMASSU_IOC_THAW_TO_UNMOUNT => shared.thaw_unless_owned(),
                    _ => shared.thaw(),
                };
                match result {
                    Ok(()) => reply.ioctl(0, &[]),
                    Err(errno) => reply.error(Errno::from_i32(errno)),
                }
            }),
        }
    }

    /// The sender of a request, as the answering program sees it.
    pub(super) fn caller(&self, req: &Request) -> Caller {
        let uid = req.uid();
        Caller { uid, gid: req.gid(), pid: req.pid(), is_owner: uid == 0 || uid == self.owner }
    }

    /// Passes a call on, and its answer back.
    fn call(self: &Arc<Self>, caller: Caller, dir: Ino, input: &[u8], out_size: u32, reply: ReplyIoctl) {
        let Some(calls) = self.calls.clone() else { return reply.error(Errno::ENOTTY) };
        let Some(request) = control::framed(input) else { return reply.error(Errno::EINVAL) };
        let request = Zeroizing::new(request.to_vec());
        self.aside("call", move |_| {
            match control::frame(&calls(&caller, dir, &request)).filter(|frame| frame.len() <= out_size as usize) {
                Some(frame) => reply.ioctl(0, &frame),
                None => reply.error(Errno::EMSGSIZE),
            }
        });
    }

    fn status(&self) -> Status {
        let (is_closed, waiting) = self.gate.status();
        Status {
            frozen: is_closed || self.has_frozen_turns.load(Ordering::SeqCst),
            waiting: waiting as u64,
            cache_writes: self.cache_writes.load(Ordering::SeqCst),
            cache_writes_in_flight: self.cache_writes_in_flight.load(Ordering::SeqCst),
        }
    }

    /// Waits for changes under way, then freezes below. EBUSY as FIFREEZE answers, EAGAIN if it cannot be frozen now.
    /// The end of the open directory `freezer` is that of the freeze. The kernel releases it after this request is
    /// answered.
    fn freeze(&self, freezer: Option<HandleId>) -> Result<(), i32> {
        let admin = self.admin.lock();
        if admin.is_over {
            return Err(libc::ENODEV);
        }
        if self.status().frozen {
            return Err(libc::EBUSY);
        }
        // Now: whose freeze it is counts from its beginning.
        *self.freezer.lock() = freezer;
        let frozen = self.freeze_locked(&admin);
        match frozen {
            Ok(()) => tracing::info!("frozen"),
            Err(_) => *self.freezer.lock() = None,
        }
        frozen
    }

    fn freeze_locked(&self, _admin: &MutexGuard<'_, Admin>) -> Result<(), i32> {
        // Changes that the gate holds back are carried out when it opens: not in a turn. So with turns they wait there.
        let by_turns = self.fs.hosts_take_turns();
        if !by_turns && !self.gate.close() {
            return Err(libc::EBUSY);
        }
        self.fs.freeze().map_err(|error| {
            tracing::error!(%error, "freeze failed");
            self.gate.open();
            errno_of(&error)
        })?;
        self.has_frozen_turns.store(by_turns, Ordering::SeqCst);
        Ok(())
    }

    /// The right to end a freeze that lasts as long as this open directory. EINVAL if there is none: somebody has ended
    /// it.
    fn own(&self, freezer: HandleId) -> Result<MutexGuard<'_, Admin>, i32> {
        loop {
            // Somebody else may freeze by now, and wait for another host's thaw.
            let admin = self.admin.try_lock_for(STOP_AGAIN);
            match admin {
                _ if *self.freezer.lock() != Some(freezer) => return Err(libc::EINVAL),
                Some(admin) => return Ok(admin),
                None => {}
            }
        }
    }

    /// EINVAL as FITHAW answers. The gate opens even if the file system below reports an error: waiting callers must go
    /// on. A freeze that is under way may wait for another host's thaw: it is told to fail.
    fn thaw(&self) -> Result<(), i32> {
        self.thaw_and(|| false, |_| {})
    }

    /// The same, but EBUSY if the freeze lasts as long as a directory is open, also while it is only beginning: a
    /// command takes a snapshot.
    fn thaw_unless_owned(&self) -> Result<(), i32> {
        self.thaw_and(|| self.freezer.lock().is_some(), |_| {})
    }

    /// `is_spared`: whether the freeze that there is, or that is under way, is left alone. `then` is called before
    /// another freeze can begin.
    fn thaw_and(&self, is_spared: impl Fn() -> bool, then: impl FnOnce(&mut Admin)) -> Result<(), i32> {
        let mut has_stopped = false;
        let mut admin = loop {
            let admin = self.admin.try_lock_for(STOP_AGAIN);
            match admin {
                _ if is_spared() => return Err(libc::EBUSY),
                Some(admin) => break admin,
                None => has_stopped |= self.fs.stop_freezing(),
            }
        };
        then(&mut admin);
        match self.thaw_locked(&admin) {
            Err(libc::EINVAL) if has_stopped => Ok(()),
            done => done,
        }
    }

    /// An open directory is closed: ends the freeze that lasts as long as it.
    pub(super) fn thaw_with(self: &Arc<Self>, closed: HandleId) {
        if *self.freezer.lock() == Some(closed) {
            // A thaw may wait for other requests.
            self.aside("thaw", move |shared| {
                if shared.own(closed).and_then(|admin| shared.thaw_locked(&admin)).is_ok() {
                    tracing::warn!("thawed: the process that had frozen the mount has ended, or closed it");
                }
            });
        }
    }

    fn thaw_locked(&self, _admin: &MutexGuard<'_, Admin>) -> Result<(), i32> {
        // First: a freeze that panicked has left its owner.
        *self.freezer.lock() = None;
        if !self.status().frozen {
            return Err(libc::EINVAL);
        }
        self.has_frozen_turns.store(false, Ordering::SeqCst);
        let result = self.fs.thaw();
        self.gate.open();
        tracing::info!("thawed");
        result.map_err(|error| errno_of(&error))
    }

    /// Unmounting flushes the page cache, which a frozen file system would keep waiting for ever.
    pub(crate) fn thaw_for_unmount(&self) {
        guarded("thaw", || {
            if self.thaw().is_ok() {
                tracing::warn!("thawed, in order to unmount");
            }
        });
    }

    /// The same at the end of the mount: a request to freeze may still wait for its thread.
    pub(super) fn thaw_for_ever(&self) {
        guarded("thaw", || {
            if self.thaw_and(|| false, |admin| admin.is_over = true).is_ok() {
                tracing::warn!("thawed: the mount has ended");
            }
        });
    }

    /// SEEK_DATA and SEEK_HOLE. The kernel does not write dirty pages back before it asks, so a file that is open for
    /// writing somewhere has them pushed to us first, by invalidating the range: otherwise data that only the page
    /// cache holds would look like a hole.
    pub(super) fn seek(self: &Arc<Self>, ino: Ino, handle: HandleId, offset: u64, whence: Whence, reply: ReplyLseek) {
        let answer = move |shared: &Arc<Self>| shared.seek_in_pieces(ino, handle, offset, whence, reply);
        if !self.is_written(ino) {
            return self.look(ino, "lseek", answer);
        }
        let shared = self.clone();
        self.aside("lseek", move |_| {
            shared.push_out(ino, offset, 0);
            shared.look(ino, "lseek", answer);
        });
    }

    /// A file without holes is looked through to its end. The turn of this host does not wait for that.
    fn seek_in_pieces(
        self: &Arc<Self>,
        ino: Ino,
        handle: HandleId,
        mut offset: u64,
        whence: Whence,
        reply: ReplyLseek,
    ) {
        loop {
            offset = match self.fs.seek(handle, offset, whence, SOUGHT_AT_ONCE) {
                Ok(Sought::Found(found)) => return reply.offset(found as i64),
                Ok(Sought::NotBefore(next)) => next,
                Err(error) => return reply.error(failed("lseek", &error)),
            };
            if self.fs.join_turns(ino).is_some_and(|turns| turns.is_to_end()) {
                // On another thread: from here the next turn would be waited for in this one.
                let shared = self.clone();
                return self.aside("lseek", move |_| {
                    shared.look(ino, "lseek", move |s| s.seek_in_pieces(ino, handle, offset, whence, reply));
                });
            }
        }
    }

    /// Makes the kernel ask for the attributes before it uses them again. The kernel takes no lock on the inode or on
    /// pages for it, so any thread may call this.
    pub(super) fn forget_attributes(&self, ino: Ino) {
        if let Some(notifier) = self.notifier.get()
            && let Err(error) = notifier.inval_inode(INodeNo(ino), -1, 0)
        {
            tracing::debug!(%error, ino, "attributes could not be invalidated");
        }
    }

    /// Makes the kernel write back and drop `len` bytes of its pages from `offset` on, 0: all of them. Waits for
    /// requests of this mount: never to be called on a request thread.
    pub(super) fn push_out(&self, ino: Ino, offset: u64, len: u64) {
        if let Some(notifier) = self.notifier.get()
            && let Err(error) = notifier.inval_inode(INodeNo(ino), offset as i64, len as i64)
        {
            tracing::debug!(%error, ino, "pages could not be pushed out");
        }
    }

    /// Runs a job on a thread of its own. If none can be started, the dropped reply answers EIO.
    pub(super) fn aside(self: &Arc<Self>, op: &'static str, job: impl FnOnce(&Self) + Send + 'static) {
        let shared = self.clone();
        let body = move || _ = guarded(op, || job(&shared));
        if let Err(error) = std::thread::Builder::new().name(format!("lamassu-{op}")).spawn(body) {
            tracing::error!(%error, op, "no thread");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::MountOptions;
    use lamassu_plain::PlainFs;
    use lamassu_vault::Overheard;
    use parking_lot::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    /// What is shared, the beginning of a freeze, the word that it may go on, and the directory.
    type SlowToFreeze = (Arc<Shared<Overheard<PlainFs>>>, Receiver<()>, Sender<()>, tempfile::TempDir);

    /// A file system that tells when a freeze begins, and lets it go on when it is told to.
    fn slow_to_freeze() -> SlowToFreeze {
        let dir = tempfile::tempdir().unwrap();
        let ((begins, begun), (go_on, goes_on)) = (channel(), channel());
        let goes_on = Mutex::new(goes_on);
        let told = move |method| {
            if method == "freeze" {
                begins.send(()).unwrap();
                goes_on.lock().recv().unwrap();
            }
        };
        let fs = Overheard { inner: PlainFs::open(dir.path()).unwrap(), told: Box::new(told) };
        (Shared::new(Arc::new(fs), &MountOptions::default(), 0, None).unwrap(), begun, go_on, dir)
    }

    /// An unmount meets a snapshot that has just asked for its freeze.
    #[test]
    fn a_freeze_that_is_beginning_is_its_owners() {
        let (shared, begun, go_on, _dir) = slow_to_freeze();
        let snapshot = HandleId(7);
        std::thread::scope(|scope| {
            let freezing = scope.spawn(|| shared.freeze(Some(snapshot)));
            begun.recv().unwrap();
            let unmounting = scope.spawn(|| shared.thaw_unless_owned());
            // It does not wait for the freeze, which would make one that waits for other hosts fail.
            let until = Instant::now() + Duration::from_secs(60);
            while !unmounting.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
            let is_answered = unmounting.is_finished();
            go_on.send(()).unwrap();
            assert_eq!(unmounting.join().unwrap(), Err(libc::EBUSY));
            assert_eq!(freezing.join().unwrap(), Ok(()));
            assert!(is_answered);
        });
        assert_eq!(shared.thaw_unless_owned(), Err(libc::EBUSY));
        assert!(shared.status().frozen);
        let owned = shared.own(snapshot).unwrap();
        assert_eq!(shared.thaw_locked(&owned), Ok(()));
    }

    /// One that lasts until a thaw is nobody's, also when somebody else would have one.
    #[test]
    fn what_nobody_owns_is_ended_to_unmount() {
        let (shared, begun, go_on, dir) = slow_to_freeze();
        go_on.send(()).unwrap();
        assert_eq!(shared.freeze(None), Ok(()));
        begun.recv().unwrap();
        assert_eq!(shared.freeze(Some(HandleId(7))), Err(libc::EBUSY));
        assert_eq!(shared.thaw_unless_owned(), Ok(()));
        assert_eq!(shared.thaw_unless_owned(), Err(libc::EINVAL), "it is not frozen");
        drop(dir);
    }
}
