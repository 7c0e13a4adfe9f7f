//! Types of the vault API.

use std::ffi::OsString;

pub use lamassu_store::backend::{Kind, RenameMode, SetTime, StatFs, Time};
pub use lamassu_store::file::{Durability, Integrity};

/// Inode number. Stable while referenced; normally the backing inode's own number.
pub type Ino = u64;
/// The root directory.
pub const ROOT: Ino = 1;
/// An open file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HandleId(pub u64);

/// Owner of a new entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// user
    pub uid: u32,
    /// group
    pub gid: u32,
    /// The umask, which applies unless a default access control list decides; 0 if it has been applied already.
    pub umask: u32,
}

/// Who may do what with a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// permission bits, 07777
    pub mode: u32,
    /// owner
    pub uid: u32,
    /// group
    pub gid: u32,
}

/// stat of an entry, with the plain size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// inode
    pub ino: Ino,
    /// kind
    pub kind: Kind,
    /// permission bits, 07777
    pub mode: u32,
    /// links
    pub nlink: u64,
    /// owner
    pub uid: u32,
    /// group
    pub gid: u32,
    /// device
    pub rdev: u64,
    /// plain bytes
    pub size: u64,
    /// 512-byte units the backing entry takes
    pub blocks: u64,
    /// best I/O size, bytes
    pub block_size: u32,
    /// access
    pub atime: Time,
    /// modification
    pub mtime: Time,
    /// change
    pub ctime: Time,
}

/// A looked-up entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// attributes
    pub attr: Attr,
    /// distinguishes users of the same inode number
    pub generation: u64,
}

/// Changes of attributes; `None` leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// permission bits
    pub mode: Option<u32>,
    /// owner
    pub uid: Option<u32>,
    /// group
    pub gid: Option<u32>,
    /// truncate or grow
    pub size: Option<u64>,
    /// access time
    pub atime: Option<SetTime>,
    /// modification time
    pub mtime: Option<SetTime>,
    /// the user who asks; `None`: an unprivileged user
    pub by: Option<u32>,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Access {
    /// reading
    pub read: bool,
    /// writing
    pub write: bool,
    /// empty it
    pub truncate: bool,
}

/// fallocate(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallocate {
    /// reserve, growing the file
    Reserve,
    /// reserve, not growing
    KeepSize,
    /// hole (keeps the size)
    Punch,
    /// zeros (growing the file unless `keep_size`)
    Zero {
        /// keep the size
        keep_size: bool,
    },
}

/// lseek(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whence {
    /// SEEK_DATA
    Data,
    /// SEEK_HOLE
    Hole,
}

/// The result of a search that looks at a part of a file at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sought {
    /// What was looked for.
    Found(u64),
    /// Nothing before this offset.
    NotBefore(u64),
}

/// setxattr(2) flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetXattr {
    /// create or replace
    Any,
    /// EEXIST if there
    Create,
    /// ENODATA if not there
    Replace,
}

/// An entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// inode
    pub ino: Ino,
    /// kind
    pub kind: Kind,
    /// plain name
    pub name: OsString,
}

/// Errors of the vault; each front-end has one exhaustive table from these to its own.
#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    /// No such entry.
    #[error("no such file or directory")]
    NotFound,
    /// Something is there already.
    #[error("file exists")]
    Exists,
    /// A component is no directory.
    #[error("not a directory")]
    NotDirectory,
    /// Is a directory.
    #[error("is a directory")]
    IsDirectory,
    /// Directory with entries.
    #[error("directory not empty")]
    NotEmpty,
    /// Longer than 255 bytes (names) or 4095 (targets).
    #[error("name too long")]
    NameTooLong,
    /// A name the format reserves or that no file can have.
    #[error("invalid name")]
    InvalidName,
    /// Nonsense argument.
    #[error("invalid argument")]
    Invalid,
    /// Vault or handle is read-only.
    #[error("read-only")]
    ReadOnly,
    /// Handle not open that way, or not at all.
    #[error("bad handle")]
    BadHandle,
    /// Inode not known (forgotten or removed).
    #[error("stale inode")]
    Stale,
    /// No such attribute.
    #[error("no such attribute")]
    NoAttribute,
    /// seek past the end.
    #[error("no data past offset")]
    NoData,
    /// The store cannot do this.
    #[error("not supported by the backing store")]
    Unsupported,
    /// Another writer holds the vault.
    #[error("another writer has this vault mounted or open; do not delete lamassu.lock, that frees nothing")]
    Locked,
    /// The key of the dataset is not loaded.
    #[error("the key of this dataset is not loaded; `lamassu key load PATH` loads it")]
    KeyNotLoaded,
    /// From one dataset to another.
    #[error("in another dataset")]
    OtherDataset,
    /// The entry is the root of a dataset.
    #[error("a dataset lies there; `lamassu dataset destroy PATH` removes one")]
    DatasetRoot,
    /// Nothing is opened, loaded or unloaded until the thaw.
    #[error("frozen: `lamassu thaw` it first")]
    Frozen,
    /// Another host may have changed the vault since it was frozen.
    #[error(
        "the freeze has ended too early: somebody thawed the vault, its mount ended, or this host was out of touch with the server; others may have changed the vault, so do not use a copy that was made meanwhile"
    )]
    FreezeLost,
    /// A name, record, link target or attribute does not open.
    #[error("damaged {what}: {stored}")]
    Damaged {
        /// directory record, name, companion, link target, attribute
        what: &'static str,
        /// path or name in the store
        stored: String,
    },
    /// What the store shows there is not the newest, by the anchor.
    #[error("stale {what}: {stored}: the store shows another state than the newest")]
    Outdated {
        /// entry, directory record, link target, attributes, permissions
        what: &'static str,
        /// path in the store
        stored: String,
    },
    /// The anchor failed.
    #[error(transparent)]
    Anchor(#[from] lamassu_anchor::AnchorError),
    /// Mode, suite or feature cannot be combined.
    #[error("{0}")]
    Refused(&'static str),
    /// An encrypted file failed.
    #[error(transparent)]
    Store(#[from] lamassu_store::StoreError),
    /// The store failed.
    #[error("{op}: {source}")]
    Io {
        /// The operation that failed.
        op: &'static str,
        /// The store's error, with its errno.
        source: std::io::Error,
    },
    /// No randomness.
    #[error(transparent)]
    NoRandom(#[from] lamassu_crypto::NoRandom),
}

/// Result of a vault call.
pub type Result<T, E = VaultError> = std::result::Result<T, E>;
