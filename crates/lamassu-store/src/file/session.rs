//! Sessions (`docs/format.md` §12): which session wrote a page, and whether its interrupted state is accepted.
//!
//! A page may name keys of data that has not arrived yet. It carries the number of the session that wrote it. What an
//! interruption may leave in such a page (a block that is old or new or a hole, pages that are absent above the floor,
//! a half-done shrink) is accepted while that session is open: it began and was not closed. Any other session counts
//! only by its final state. So a store that puts an older page back gets no choice of contents.
//!
//! * A session's number is durable in the vault's record before the first page that carries it is written (I12).
//! * A session is closed only when every page it wrote is durable and settled (I12). No page carries its number after
//!   the record may say that it is closed.
//! * The current session counts as interrupted only after one of its files was closed unsettled: nothing else can have
//!   left an incomplete state.

use lamassu_format::SessionTag;
use parking_lot::{RwLock, RwLockReadGuard};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Where the vault keeps its record of sessions.
pub trait SessionKeeper: Send + Sync {
    /// Begins a session, durably, and returns its number.
    ///
    /// # Errors
    /// Those of the store; the vault has no record; there are no numbers left.
    fn begin(&self) -> io::Result<u32>;
    /// Notes durably that a session is closed.
    ///
    /// # Errors
    /// Those of the store; the session may be closed nevertheless.
    fn close(&self, session: u32) -> io::Result<()>;
    /// The state of a session, by the record.
    fn standing(&self, session: u32) -> Standing;
}

/// The state of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It began and was not closed.
    Open,
    /// It was closed.
    Closed,
    /// The record knows of no such session.
    Unknown,
}

/// How [`Sessions::end`] has left the current session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// No session is open any more.
    Closed,
    /// It left something behind, and stays open.
    LeftOpen,
}

/// The sessions of a vault, and the current one.
pub struct Sessions {
    keeper: Arc<dyn SessionKeeper>,
    /// The current session; 0: none. Held while a page that carries it is written.
    current: RwLock<Current>,
    /// Pages that it has written.
    written: AtomicU32,
    /// A file of the current session was closed unsettled.
    left_behind: AtomicBool,
}

/// The current session: its number (0: none), and its random bits.
#[derive(Default)]
struct Current {
    session: u32,
    tag: SessionTag,
    /// Sessions that have ended, and may be open in the record, since to close them there has failed.
    ended: Vec<u32>,
}

/// The current session, which is not closed while this lives.
pub struct Stamp<'a> {
    current: RwLockReadGuard<'a, Current>,
    written: &'a AtomicU32,
}

impl Stamp<'_> {
    /// The number.
    pub fn session(&self) -> u32 {
        self.current.session
    }

    /// Random bits that no other session has, not even a session with the same number in a copy of the vault.
    pub fn tag(&self) -> SessionTag {
        self.current.tag
    }

    /// The highest sequence given so far.
    pub fn last_sequence(&self) -> u32 {
        self.written.load(Ordering::Acquire)
    }

    /// The sequence number for the next page: the count of pages that the session has written. It orders two pages of a
    /// file. After the highest number, all further pages get that number.
    pub fn next_sequence(&self) -> u32 {
        let next = |written: u32| Some(written.saturating_add(1));
        self.written.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).unwrap_or(u32::MAX).saturating_add(1)
    }
}

impl Sessions {
    /// No session is under way.
    pub fn new(keeper: Arc<dyn SessionKeeper>) -> Sessions {
        Sessions { keeper, current: RwLock::default(), written: AtomicU32::new(0), left_behind: AtomicBool::new(false) }
    }

    /// For a single file without its vault: pending state of all sessions counts, and nothing is written.
    pub fn of_stray_file() -> Sessions {
        struct Believing;
        impl SessionKeeper for Believing {
            fn begin(&self) -> io::Result<u32> {
                Err(io::ErrorKind::ReadOnlyFilesystem.into())
            }
            fn close(&self, _: u32) -> io::Result<()> {
                Ok(())
            }
            fn standing(&self, _: u32) -> Standing {
                Standing::Open
            }
        }
        Sessions::new(Arc::new(Believing))
    }

    /// For a page about to be written; begins a session if none is under way.
    ///
    /// # Errors
    /// Those of [`SessionKeeper::begin`].
    pub fn stamp(&self) -> io::Result<Stamp<'_>> {
        loop {
            let current = self.current.read();
            if current.session != 0 {
                return Ok(Stamp { current, written: &self.written });
            }
            drop(current);
            let mut current = self.current.write();
            if current.session == 0 {
                let mut tag = SessionTag::NONE;
                lamassu_crypto::random(&mut tag.0).map_err(io::Error::other)?;
                (current.session, current.tag) = (self.keeper.begin()?, tag);
                self.written.store(0, Ordering::Release);
            }
        }
    }

    /// For tests of files alone: every session but the current one was interrupted.
    #[cfg(any(test, feature = "testing"))]
    pub fn all_interrupted() -> Sessions {
        static LAST: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        struct Interrupted;
        impl SessionKeeper for Interrupted {
            fn begin(&self) -> io::Result<u32> {
                Ok(LAST.fetch_add(1, Ordering::Relaxed) + 1)
            }
            fn close(&self, _: u32) -> io::Result<()> {
                Ok(())
            }
            fn standing(&self, _: u32) -> Standing {
                Standing::Open
            }
        }
        Sessions::new(Arc::new(Interrupted))
    }

    /// The current session.
    pub fn under_way(&self) -> Option<u32> {
        Some(self.current.read().session).filter(|session| *session != 0)
    }

    /// Whether there is one.
    pub fn is_under_way(&self) -> bool {
        self.under_way().is_some()
    }

    /// Ends the current session, if there is one and everything it wrote is settled. The caller has made sure of that,
    /// and that no thread writes meanwhile. A session that left a file unsettled stays open for ever, or until a check
    /// of the whole vault has completed what it left.
    ///
    /// # Errors
    /// Those of the store. The session has ended all the same: the record may say so. If it does not, the next call
    /// closes it there.
    pub fn end(&self) -> io::Result<Ended> {
        let current = &mut *self.current.write();
        if current.session != 0 {
            if self.left_behind.load(Ordering::Acquire) {
                return Ok(Ended::LeftOpen);
            }
            current.ended.push(std::mem::take(&mut current.session));
        }
        while let Some(session) = current.ended.last() {
            self.keeper.close(*session)?;
            current.ended.pop();
        }
        Ok(Ended::Closed)
    }

    /// Whether no session of this process can be open in the record.
    pub fn are_closed(&self) -> bool {
        let current = self.current.read();
        current.session == 0 && current.ended.is_empty()
    }

    /// The sessions of this process that can be open in the record although they are not interrupted.
    pub fn own(&self) -> Vec<u32> {
        let current = self.current.read();
        current.ended.iter().copied().chain(Some(current.session).filter(|session| *session != 0)).collect()
    }

    /// Notes that a file was closed whose pages on disk are not settled.
    pub fn note_left_behind(&self) {
        self.left_behind.store(true, Ordering::Release);
    }

    /// Whether one was.
    pub fn has_left_behind(&self) -> bool {
        self.left_behind.load(Ordering::Acquire)
    }

    /// The state of the session of a page that was read; 0 is no session, and counts as closed. The caller holds no
    /// [`Stamp`].
    pub fn standing(&self, session: u32) -> Standing {
        if session == 0 {
            return Standing::Closed;
        }
        {
            let current = self.current.read();
            if session == current.session {
                let left = self.left_behind.load(Ordering::Acquire);
                return if left { Standing::Open } else { Standing::Closed };
            }
            if current.ended.contains(&session) {
                return Standing::Closed;
            }
        }
        self.keeper.standing(session)
    }

    /// Whether pending state counts in pages of this session.
    pub fn may_be_interrupted(&self, session: u32) -> bool {
        self.standing(session) == Standing::Open
    }
}
