//! Sessions (§12): who wrote a page, and whose interrupted state is believed.
//!
//! A page on its way to disk names keys of data that may not be there yet. It is written so by a session, and says by which. What an interruption may leave
//! in such a page (a block that is old or new or a hole, pages that are absent above the floor, a shrink half done) is believed while that session is open:
//! it began and nobody has closed it. Of any other session only what it had written in the end counts. So an older page that the store puts back offers it no
//! choice of contents.
//!
//! * A session's number is durable in the vault's record before the first page that carries it is written.
//! * A session is closed only when every page it wrote is durable and settled.
//! * The session under way is believed only after a file of it was let go that was not settled: nobody else has left anything in between.

use parking_lot::{RwLock, RwLockReadGuard};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// Those of the store; the session then stays open.
    fn close(&self, session: u32) -> io::Result<()>;
    /// What the record says of a session.
    fn standing(&self, session: u32) -> Standing;
}

/// What is known of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It began and was not closed.
    Open,
    /// It was closed.
    Closed,
    /// The record knows of no such session.
    Unknown,
}

/// The sessions of a vault, and the one under way.
pub struct Sessions {
    keeper: Arc<dyn SessionKeeper>,
    /// The session under way; 0: none. Held while a page that carries it is written.
    current: RwLock<u32>,
    /// A file of the session under way was let go that was not settled.
    left_behind: AtomicBool,
}

/// The number of the session under way, which is not closed while this lives.
pub struct Stamp<'a>(RwLockReadGuard<'a, u32>);

impl Stamp<'_> {
    /// The number.
    pub fn session(&self) -> u32 {
        *self.0
    }
}

impl Sessions {
    /// None is under way.
    pub fn new(keeper: Arc<dyn SessionKeeper>) -> Sessions {
        Sessions { keeper, current: RwLock::new(0), left_behind: AtomicBool::new(false) }
    }

    /// For a single file without its vault: whatever its pages say is believed, and nothing is written.
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
            if *current != 0 {
                return Ok(Stamp(current));
            }
            drop(current);
            let mut current = self.current.write();
            if *current == 0 {
                *current = self.keeper.begin()?;
            }
        }
    }

    /// For tests of files alone: every session but the one under way was interrupted.
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

    /// The session under way.
    pub fn under_way(&self) -> Option<u32> {
        Some(*self.current.read()).filter(|session| *session != 0)
    }

    /// Whether one is.
    pub fn is_under_way(&self) -> bool {
        self.under_way().is_some()
    }

    /// Ends the session under way, if there is one and everything it wrote is settled: the caller has seen to that, and nobody writes meanwhile. A session that
    /// left something behind stays open for ever, or until a check of the whole vault has completed what it left.
    ///
    /// # Errors
    /// Those of the store; the session then goes on.
    pub fn end(&self) -> io::Result<()> {
        let mut current = self.current.write();
        if *current != 0 && !self.left_behind.load(Ordering::Acquire) {
            self.keeper.close(*current)?;
            *current = 0;
        }
        Ok(())
    }

    /// Tells that a file was let go whose pages on disk are not settled.
    pub fn note_left_behind(&self) {
        self.left_behind.store(true, Ordering::Release);
    }

    /// What is known of the session of a page that was read; 0 is none, which nothing interrupts. The caller holds no [`Stamp`].
    pub fn standing(&self, session: u32) -> Standing {
        if session == 0 {
            return Standing::Closed;
        }
        if session == *self.current.read() {
            let left = self.left_behind.load(Ordering::Acquire);
            return if left { Standing::Open } else { Standing::Closed };
        }
        self.keeper.standing(session)
    }

    /// Whether what an interruption leaves is believed of a page of this session.
    pub fn may_be_interrupted(&self, session: u32) -> bool {
        self.standing(session) == Standing::Open
    }
}
