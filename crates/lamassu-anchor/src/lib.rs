//! The anchor of a vault: what a store cannot fake, because it is stored elsewhere (`docs/freshness.md`).
//!
//! | module | what it does |
//! |---|---|
//! | `types` | digests, object numbers, windows |
//! | `row`, `codec` | what the anchor records of an object, an entry, a vault; the encodings |
//! | `token` | tokens, which stand for names of the store |
//! | `judge` | the rules: whether what a store shows is current. Pure |
//! | `anchor/`, `queue` | one vault's rows: what is durable, what is queued, commits |
//! | `touched` | the objects that other writers' commits have changed |
//! | `export` | all rows as one stream, to be kept elsewhere |
//! | `build` | makes the anchor of an existing vault |
//! | `table/` | tables of rows: memory, memory that crashes, a redb file |
//! | `head` | the digest by which a server's table and its copies are compared |
//! | `error` | the errors |
//!
//! Guarantee: a commit is durable and atomic, or it did not happen; reads see what was queued last. Nothing here reads
//! or writes the store, holds a key of the vault, or knows a plaintext name.
//!
//! Locks: those of an open anchor in the order that `anchor` gives, then those of its table (`table/on_disk`).
#![forbid(unsafe_code)]

mod anchor;
mod build;
mod codec;
mod error;
pub mod export;
pub mod head;
pub mod judge;
mod queue;
pub mod row;
pub mod table;
mod token;
mod touched;
mod types;

pub use anchor::{
    Anchor, Decided, FileCommit, HeaderBasis, Made, Opening, Removal, Renamed, Replacing, SealedPart, Seen,
};
pub use build::Builder;
pub use error::{AnchorError, Part, ServerFault};
pub use queue::EntryMark;
pub use row::{EntryPlace, EntryRow, Intent, Row, VaultRow};
pub use token::{Token, TokenKey};
pub use touched::Touched;
pub use types::{Digests, ObjectId, ObjectKind, Revision, WINDOWS_MAX, Window, Windows};

pub use lamassu_format::{Digest, RecordNo};
