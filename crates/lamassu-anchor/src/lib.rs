//! The anchor of a vault: what a store cannot fake, because something outside the store remembers it
//! (`docs/freshness.md`).
//!
//! | module | what it does |
//! |---|---|
//! | `types` | digests, object numbers, windows |
//! | `row`, `codec` | what the anchor knows of an object, an entry, a vault; its bytes |
//! | `token` | names of the store as the anchor keeps them |
//! | `judge` | the rules: whether what a store shows is current. Pure |
//! | `anchor/`, `queue` | one vault's rows: what is durable, what is queued, commits |
//! | `export` | all of it as one stream, to be kept elsewhere |
//! | `build` | the anchor of a vault that is there already |
//! | `table/` | where rows lie: memory, memory that crashes, a redb file |
//! | `head` | how far a table has come: what a server and the copies of its tables compare |
//!
//! Guarantee: a commit is durable and whole, or it did not happen; what is read is what was queued last. Nothing here
//! reads or writes the store, holds a key of the vault, or knows a plaintext name.
//!
//! The order of locks is in `anchor`.
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
pub use queue::Mark;
pub use row::{Entry, EntryPlace, Intent, Row, VaultRow};
pub use token::{Token, TokenKey};
pub use touched::Touched;
pub use types::{Digests, ObjectId, ObjectKind, Revision, WINDOWS_MAX, Window, Windows};

pub use lamassu_format::{Digest, RecordNo};
