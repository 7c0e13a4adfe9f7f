//! Parts of rows.

use lamassu_format::SessionTag;
use smallvec::SmallVec;
use std::fmt;

/// The child digests of one tree record.
pub type Digests = lamassu_format::tree::Children;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// An object of the vault: a file, directory, link or node. The anchor gives the numbers, each once.
    ObjectId
}

number! {
    /// The number of commits of the vault's anchor, this one included.
    Revision
}

impl ObjectId {
    /// The root of the tree.
    pub const ROOT: ObjectId = ObjectId(1);
}

/// What an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ObjectKind {
    /// Regular file.
    File,
    /// Directory.
    Dir,
    /// Symbolic link.
    Link,
    /// Character device.
    Char,
    /// Block device.
    Block,
    /// Named pipe.
    Fifo,
    /// Socket.
    Socket,
}

impl ObjectKind {
    const ALL: [ObjectKind; 7] = [
        ObjectKind::File,
        ObjectKind::Dir,
        ObjectKind::Link,
        ObjectKind::Char,
        ObjectKind::Block,
        ObjectKind::Fifo,
        ObjectKind::Socket,
    ];

    /// The number in a row, below 8.
    pub(crate) fn number(self) -> u8 {
        ObjectKind::ALL.iter().position(|kind| *kind == self).map_or(0, |at| at as u8)
    }

    pub(crate) fn of_number(number: u8) -> Option<ObjectKind> {
        ObjectKind::ALL.get(usize::from(number)).copied()
    }
}

/// A session that may have changed a file since its root was committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Window {
    /// The session, from 1.
    pub session: u32,
    /// The highest sequence of its pages that the root covers.
    pub covered: u32,
    /// Random bits of the session. They tell it from a session with the same number in a copy of the vault.
    pub tag: SessionTag,
}

/// The windows of a file, ascending by session.
pub type Windows = SmallVec<[Window; 1]>;

/// Most windows of a file. Before another one is added, the file is recovered and committed.
pub const WINDOWS_MAX: usize = 32;
