//! Encrypted files over a backing store: the backend trait, segments and pages, the commit protocol, recovery.
//!
//! Nothing here knows names (it sees stored names as opaque strings) or FUSE.

pub mod backend;
pub mod file;
pub mod integrity;

pub use backend::{Backend, BackendDir, BackendEntry, BackendFile};
pub use file::{File, FileContext, StoreError};
