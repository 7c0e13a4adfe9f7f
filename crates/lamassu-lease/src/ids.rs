//! Objects, sessions, leases, modes, times.

use std::ops::Add;

/// The number of an object of a vault in the anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Object(pub u64);

/// The number of a host's session. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// The number of a grant. Never used twice, so that messages about an earlier grant of the same object are recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantNo(pub u64);

/// The number that a client gives to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestNo(pub u64);

/// A time of one machine's clock, or a span, in milliseconds. Times of two machines are never compared.
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
    /// Cached data of it is valid. Other sessions may read it too.
    Shared,
    /// It may be changed. No other session may use it.
    Exclusive,
}

/// A lease that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Grant {
    /// the object
    pub object: Object,
    /// the mode
    pub mode: Mode,
    /// the number of the grant
    pub number: GrantNo,
}
