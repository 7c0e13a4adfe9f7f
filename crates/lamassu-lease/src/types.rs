//! Objects, sessions, modes, moments, and what clients and the server say to one another.

use std::ops::Add;

/// An object of a vault: its number in the anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Object(pub u64);

/// One mount of a host. Never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// One grant of a lease. Never given twice: what is said of an earlier grant of the same object is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantNo(pub u64);

/// A client's own number of something that it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestNo(pub u64);

/// A moment of one machine's clock, or a span; milliseconds. Moments of two machines are never compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Millis(pub u64);

impl Add for Millis {
    type Output = Millis;

    fn add(self, span: Millis) -> Millis {
        Millis(self.0.saturating_add(span.0))
    }
}

/// How an object may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mode {
    /// What is known of it may be believed. Others may believe it, too.
    Shared,
    /// It may be changed. Nobody else believes anything of it.
    Exclusive,
}

/// A lease that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Grant {
    /// of what
    pub object: Object,
    /// how it may be used
    pub mode: Mode,
    /// which grant of it
    pub number: GrantNo,
}

/// What a client says. Calls of one session arrive in the order in which they were made, or not at all.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// It lives. `beat` comes back.
    Heartbeat {
        /// the client's number of it, ascending
        beat: u64,
    },
    /// It speaks by a new connection, and holds this and nothing else.
    Resume {
        /// what it holds
        held: Vec<Grant>,
    },
    /// It wants a lease.
    Acquire {
        /// the client's number
        request: RequestNo,
        /// of what
        object: Object,
        /// how it is to be used
        mode: Mode,
    },
    /// It holds a lease no longer, or only shared. All that it changed under it is committed.
    Release {
        /// which grant, as it was
        grant: Grant,
        /// what it keeps: nothing, or a shared lease
        keeps: Option<Mode>,
    },
    /// What an earlier holder left is put right, and committed.
    TakenOver {
        /// under this grant
        grant: Grant,
    },
    /// It ends. All that it changed is committed.
    Leave,
}

/// What the server says to one session. Replies arrive in the order in which they were given, or not at all.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Reply {
    /// The heartbeat has arrived.
    Alive {
        /// which
        beat: u64,
    },
    /// A lease.
    Granted {
        /// what was asked for; exclusive where it has to be taken over
        grant: Grant,
        /// which request
        request: RequestNo,
        /// An earlier holder ended without releasing it: what it left is to be put right before anything else is done.
        takes_over: bool,
    },
    /// Somebody else wants what conflicts with a lease.
    Recall {
        /// which grant
        grant: Grant,
        /// what it may keep
        keeps: Option<Mode>,
    },
    /// The session has expired, or was never there: nothing that it holds is good.
    Ended,
}
