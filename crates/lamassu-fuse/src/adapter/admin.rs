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
                    LAMASSU_IOC_THAW_TO_UNMOUNT if shared.freezer.lock().is_some() => Err(libc::EBUSY),
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

    /// Waits for changes under way, then freezes below. EBUSY as FIFREEZE answers, EAGAIN
    /// if it cannot be frozen at this moment. The end of the open directory
    /// `freezer` is that of the freeze. The kernel releases it after this request is answered.
    fn freeze(&self, freezer: Option<HandleId>) -> Result<(), i32> {
        let admin = self.admin.lock();
        if admin.is_over {
            return Err(libc::ENODEV);
        }
        // Changes that the gate holds back are carried out when it opens: not in a turn. So with turns they wait there.
        let by_turns = self.fs.hosts_take_turns();
        if self.status().frozen || (!by_turns && !self.gate.close()) {
            return Err(libc::EBUSY);
        }
        self.fs.freeze().map_err(|error| {
            tracing::error!(%error, "freeze failed");
            self.gate.open();
            errno_of(&error)
        })?;
        self.has_frozen_turns.store(by_turns, Ordering::SeqCst);
        *self.freezer.lock() = freezer;
        tracing::info!("frozen");
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
        self.thaw_and(|_| {})
    }

    /// `then` is called before another freeze can begin.
    fn thaw_and(&self, then: impl FnOnce(&mut Admin)) -> Result<(), i32> {
        let mut has_stopped = false;
        let mut admin = loop {
            if let Some(admin) = self.admin.try_lock_for(STOP_AGAIN) {
                break admin;
            }
            has_stopped |= self.fs.stop_freezing();
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
        if !self.status().frozen {
            return Err(libc::EINVAL);
        }
        self.has_frozen_turns.store(false, Ordering::SeqCst);
        *self.freezer.lock() = None;
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
            if self.thaw_and(|admin| admin.is_over = true).is_ok() {
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
