//! Locks of programs where several hosts use a vault: fcntl(2) and flock(2). (Otherwise the kernel keeps them.)
//!
//! A request that waits holds no thread. A signal ends its wait: the kernel then sends FUSE_INTERRUPT, which may arrive
//! before the request that it is about.

use super::{Shared, failed};
use fuser::{Errno, INodeNo, LockOwner, ReplyEmpty, ReplyLock, RequestId};
use lamassu_vault::locks::{Asked, Conflict, Lock, LockKey, LockKind, LockMode, Locks, Outcome, Range, Waiting};
use lamassu_vault::{FileSystem, HandleId, Ino, Result, VaultError};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;

/// Interrupts that are remembered until their request comes. Most are about requests of other kinds.
const EARLY_MAX: usize = 256;
/// Sessions that may end while one request for a lock is answered.
const SESSIONS_MAX: u32 = 3;

/// A request about a lock, as the kernel sends it.
#[derive(Clone, Copy)]
pub(super) struct LockRequest {
    pub(super) ino: INodeNo,
    pub(super) handle: HandleId,
    pub(super) owner: LockOwner,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) typ: i32,
    pub(super) pid: u32,
    pub(super) flock: bool,
}

/// Requests that wait for a lock, by the kernel's numbers.
#[derive(Default)]
pub(super) struct LockWaits(Mutex<Waits>);

#[derive(Default)]
struct Waits {
    of: HashMap<RequestId, Wait>,
    early: VecDeque<RequestId>,
}

enum Wait {
    /// It is being made in a session, counted from 1.
    Begun(u32),
    Made(Box<dyn Waiting>),
    Interrupted,
}

impl LockWaits {
    /// Begins a wait. False: it was interrupted already.
    fn begin(&self, unique: RequestId) -> bool {
        let waits = &mut *self.0.lock();
        let is_early = waits.early.iter().position(|early| *early == unique);
        if let Some(at) = is_early {
            waits.early.remove(at);
            return false;
        }
        waits.of.insert(unique, Wait::Begun(1));
        true
    }

    /// Notes a request that was made, unless it has ended meanwhile. One that was interrupted meanwhile is cancelled.
    fn made(&self, unique: RequestId, session: u32, made: Box<dyn Waiting>) {
        let waits = &mut *self.0.lock();
        match waits.of.get_mut(&unique) {
            Some(Wait::Interrupted) => made.cancel(),
            Some(wait) => {
                if matches!(wait, Wait::Begun(of) if *of == session) {
                    *wait = Wait::Made(made);
                }
            }
            None => {}
        }
    }

    /// The request has to be made again. False: it was interrupted.
    fn again(&self, unique: RequestId, session: u32) -> bool {
        let waits = &mut *self.0.lock();
        match waits.of.get_mut(&unique) {
            Some(Wait::Interrupted) | None => false,
            Some(wait) => {
                *wait = Wait::Begun(session);
                true
            }
        }
    }

    fn end(&self, unique: RequestId) {
        self.0.lock().of.remove(&unique);
    }

    fn interrupt(&self, unique: RequestId) {
        let waits = &mut *self.0.lock();
        match waits.of.get_mut(&unique) {
            Some(wait) => {
                if let Wait::Made(made) = std::mem::replace(wait, Wait::Interrupted) {
                    made.cancel();
                }
            }
            None => {
                if waits.early.len() == EARLY_MAX {
                    waits.early.pop_front();
                }
                waits.early.push_back(unique);
            }
        }
    }
}

/// One request that waits.
struct Set {
    ino: Ino,
    asked: Asked,
    unique: RequestId,
    /// Sessions that it was made in.
    sessions: u32,
    reply: ReplyEmpty,
}

impl<F: FileSystem> Shared<F> {
    fn shared_locks(&self, ino: Ino) -> Result<Arc<dyn Locks>> {
        self.fs.locks(ino).ok_or(VaultError::Invalid)
    }

    fn key(&self, request: &LockRequest) -> Result<(LockKey, Range)> {
        let kind = if request.flock { LockKind::Whole } else { LockKind::Range };
        let range = match kind {
            LockKind::Whole => Range::ALL,
            LockKind::Range => Range::new(request.start, request.end).ok_or(VaultError::Invalid)?,
        };
        Ok((LockKey { file: self.fs.locked_file(request.ino.0)?, kind, owner: request.owner.0 }, range))
    }

    fn lock(&self, request: &LockRequest) -> Result<Lock> {
        let (key, range) = self.key(request)?;
        let mode = match request.typ {
            libc::F_RDLCK => LockMode::Shared,
            libc::F_WRLCK => LockMode::Exclusive,
            _ => return Err(VaultError::Invalid),
        };
        Ok(Lock { key, range, mode, pid: request.pid })
    }

    /// F_GETLK.
    pub(super) fn test_lock(self: &Arc<Self>, request: LockRequest, reply: ReplyLock) {
        match self.lock(&request) {
            // Allowed for open file description locks: nothing is in the way of no lock.
            _ if request.typ == libc::F_UNLCK => reply.locked(request.start, request.end, libc::F_UNLCK, 0),
            Ok(lock) => self.test(request.ino.0, lock, 1, reply),
            Err(error) => reply.error(failed("getlk", &error)),
        }
    }

    fn test(self: &Arc<Self>, ino: Ino, lock: Lock, sessions: u32, reply: ReplyLock) {
        let Ok(locks) = self.shared_locks(ino) else { return reply.error(Errno::EIO) };
        let shared = self.clone();
        let done = move |outcome| match outcome {
            Outcome::Ended if sessions < SESSIONS_MAX => {
                shared.in_next_session(ino, move |s, good| match good {
                    Ok(()) => s.test(ino, lock, sessions + 1, reply),
                    Err(error) => reply.error(failed("getlk", &error)),
                });
            }
            Outcome::Conflict(Conflict { range, mode, pid }) => {
                let typ = if mode == LockMode::Exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
                // The kernel's offsets are signed.
                reply.locked(range.first(), range.last().min(i64::MAX as u64), typ, pid);
            }
            Outcome::Done => reply.locked(lock.range.first(), lock.range.last(), libc::F_UNLCK, 0),
            outcome => reply.error(errno(outcome)),
        };
        // Nobody is kept waiting by it for long.
        drop(locks.ask(Asked::Test { lock }, Box::new(done)));
    }

    /// F_SETLK, F_SETLKW, flock(2).
    pub(super) fn set_lock(self: &Arc<Self>, request: LockRequest, waits: bool, unique: RequestId, reply: ReplyEmpty) {
        let asked = match request.typ {
            libc::F_UNLCK => self.key(&request).map(|(key, range)| Asked::Unlock { key, range }),
            _ => self.lock(&request).map(|lock| Asked::Lock { lock, handle: request.handle.0, waits }),
        };
        match asked {
            Err(error) => reply.error(failed("setlk", &error)),
            // Only waits can be interrupted. No program expects that of an unlock, or where it does not wait.
            Ok(Asked::Lock { waits: true, .. }) if !self.lock_waits.begin(unique) => reply.error(Errno::EINTR),
            Ok(asked) => self.set(Set { ino: request.ino.0, asked, unique, sessions: 1, reply }),
        }
    }

    fn set(self: &Arc<Self>, Set { ino, asked, unique, sessions, reply }: Set) {
        let Ok(locks) = self.shared_locks(ino) else { return self.answer_lock(unique, Err(Errno::EIO), reply) };
        let shared = self.clone();
        let done = move |outcome| match (outcome, asked) {
            // The locks of a session go with it.
            (Outcome::Ended, Asked::Unlock { .. }) => shared.answer_lock(unique, Ok(()), reply),
            (Outcome::Ended, Asked::Lock { waits, .. }) if sessions < SESSIONS_MAX => {
                let again = Set { ino, asked, unique, sessions: sessions + 1, reply };
                if waits && !shared.lock_waits.again(unique, sessions + 1) {
                    return shared.answer_lock(unique, Err(Errno::EINTR), again.reply);
                }
                shared.in_next_session(ino, move |s, good| match good {
                    Ok(()) => s.set(again),
                    Err(error) => s.answer_lock(unique, Err(failed("setlk", &error)), again.reply),
                });
            }
            (Outcome::Done, _) => shared.answer_lock(unique, Ok(()), reply),
            (outcome, _) => shared.answer_lock(unique, Err(errno(outcome)), reply),
        };
        if let Some(made) = locks.ask(asked, Box::new(done)) {
            self.lock_waits.made(unique, sessions, made);
        }
    }

    fn answer_lock(&self, unique: RequestId, answer: std::result::Result<(), Errno>, reply: ReplyEmpty) {
        self.lock_waits.end(unique);
        match answer {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    /// Waits for a turn, with which the next session begins.
    fn in_next_session(self: &Arc<Self>, ino: Ino, then: impl FnOnce(&Arc<Self>, Result<()>) + Send + 'static) {
        self.look(ino, "setlk", move |s| then(s, s.fs.is_open(ino)));
    }

    /// One close(2): releases the ranges that its owner has locked, then calls `then`.
    pub(super) fn close_locks(&self, ino: Ino, owner: LockOwner, then: impl FnOnce() + Send + 'static) {
        let locks = self.fs.locks(ino);
        let closes = locks.as_ref().and_then(|locks| locks.closes(self.fs.locked_file(ino).ok()?, owner.0));
        match locks.zip(closes) {
            Some((locks, asked)) => drop(locks.ask(asked, Box::new(move |_| then()))),
            None => then(),
        }
    }

    /// The last close: releases the locks that belong to the open file.
    pub(super) fn release_locks(&self, handle: HandleId) {
        let Some(locks) = self.fs.locks(handle.0) else { return };
        for asked in locks.closed(handle.0) {
            drop(locks.ask(asked, Box::new(|_| ())));
        }
    }

    /// Fails if a lock was lost that was taken through this open file: others may have used the file since.
    pub(super) fn check_locks(&self, handle: HandleId) -> Result<()> {
        match self.fs.locks(handle.0) {
            Some(locks) if locks.is_lost(handle.0) => Err(VaultError::Io {
                op: "use a file whose lock was lost with this host's session",
                source: io::Error::from_raw_os_error(libc::EIO),
            }),
            Some(_) | None => Ok(()),
        }
    }

    /// A caller was interrupted.
    pub(super) fn interrupt(&self, unique: RequestId) -> std::result::Result<(), Errno> {
        // Only waits for locks can be interrupted.
        if !self.fs.hosts_take_turns() {
            return Err(Errno::ENOSYS);
        }
        self.lock_waits.interrupt(unique);
        Ok(())
    }
}

fn errno(outcome: Outcome) -> Errno {
    match outcome {
        Outcome::Done | Outcome::Conflict(_) => Errno::EAGAIN,
        Outcome::Deadlock => Errno::EDEADLK,
        Outcome::TooMany => Errno::ENOLCK,
        Outcome::Cancelled => Errno::EINTR,
        Outcome::Lost | Outcome::Unanswered | Outcome::Ended => Errno::EIO,
    }
}
