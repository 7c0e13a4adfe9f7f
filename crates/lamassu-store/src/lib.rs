//! Encrypted files over a backing store: the backend trait, segments and pages, the commit protocol, recovery.
//!
//! | module | what it does |
//! |---|---|
//! | [`backend/`](backend) | the store: the trait, a directory of this host, and stores for tests |
//! | [`file/`](file) | an encrypted file; its head has a map of its own |
//! | [`integrity/`](integrity) | the Merkle tree over the pages of a file |
//! | [`mount_table`] | the kernel's mount table, which tells the file system of a store |
//!
//! Locks, in this order: the state of a file and the others that `file/concurrent` lists; under the state's, one of
//! `Fresh::known`, `AnchoredFiles::closed` and `Sessions::current`. A session that begins holds `current` while the
//! vault and its anchor take their locks. Innermost are those of a backend, and of memory that is kept for reuse.
//!
//! Nothing here knows names (stored names are opaque strings) or FUSE.

pub mod backend;
pub mod file;
pub mod integrity;
pub mod mount_table;

pub use backend::{Backend, BackendDir, BackendEntry, BackendFile, BackendNode};
pub use file::{File, FileContext, FirstPage, Hole, StoreError};
