//! Encrypted files over a backing store: the backend trait, segments and pages, the commit protocol, recovery.
//!
//! `mount_table` is the kernel's table of mounts, which tells what a store lies on.
//!
//! Nothing here knows names (it sees stored names as opaque strings) or FUSE.

pub mod backend;
pub mod file;
pub mod integrity;
pub mod mount_table;

pub use backend::{Backend, BackendDir, BackendEntry, BackendFile, BackendNode};
pub use file::{File, FileContext, StoreError};
