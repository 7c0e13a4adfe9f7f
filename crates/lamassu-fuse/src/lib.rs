//! FUSE front-end: translates kernel requests into calls of a [`FileSystem`], normally a [`lamassu_vault::Vault`].
//!
//! Guarantees: every request gets exactly one reply, also when the file system below panics (`EIO`) or is frozen (the reply comes after the
//! thaw, while reads go on); every error has one errno, from one exhaustive table ([`errno_of`]).
//!
//! Never: decides what an operation means (that is the vault's), keeps file data, waits on its own mount from a request handler.
//!
//! `docs/semantics.md` says what differs from a local file system.

mod adapter;
pub mod control;
mod errno;
mod fs;
mod mount;
mod options;
pub mod plain;

pub use errno::errno_of;
pub use fs::FileSystem;
pub use mount::{MountError, Mounted, Unmounter, mount, mount_answering};
#[cfg(feature = "testing")]
pub use mount::{Served, serve};
pub use options::{CacheMode, KeepAwake, MountOptions, OptionError};
