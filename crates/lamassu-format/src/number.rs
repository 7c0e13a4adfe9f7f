//! Numbers of pages and blocks, offsets in backing files, and ids of files, as types of their own, so that they cannot
//! be mixed up.

use std::ops::{Add, Sub};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);

        impl $name {
            /// The first.
            pub const ZERO: $name = $name(0);

            /// The next.
            pub const fn next(self) -> $name {
                $name(self.0 + 1)
            }

            /// The numbers from this one up to `end`, exclusive.
            pub fn until(self, end: $name) -> impl DoubleEndedIterator<Item = $name> + Clone {
                (self.0..end.0).map($name)
            }
        }

        impl Add<u64> for $name {
            type Output = $name;

            fn add(self, n: u64) -> $name {
                $name(self.0 + n)
            }
        }

        /// The distance between two.
        impl Sub for $name {
            type Output = u64;

            fn sub(self, from: $name) -> u64 {
                self.0 - from.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// The number of a metadata page in its file, from 0.
    PageNo
}

number! {
    /// The number of a data block in its file, from 0, in units of the block size.
    BlockNo
}

number! {
    /// An offset in a backing file, in bytes: where a page or the ciphertext of a block lies. Offsets in the plaintext
    /// of a file, and lengths, are plain `u64`.
    ByteOffset
}

impl From<ByteOffset> for u64 {
    fn from(offset: ByteOffset) -> u64 {
        offset.0
    }
}

/// Random bits of a session. Its number alone does not distinguish it from a session of a copy of the vault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionTag(pub [u8; 6]);

impl SessionTag {
    /// The tag of a page without a session.
    pub const NONE: SessionTag = SessionTag([0; 6]);
}

/// The random id of a file, equal in all its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FileId(pub [u8; 16]);

impl FileId {
    /// No id: in a convergent page, and for a file that has needed none yet.
    pub const NONE: FileId = FileId([0; 16]);

    /// Whether there is no id.
    pub fn is_none(self) -> bool {
        self == FileId::NONE
    }
}
