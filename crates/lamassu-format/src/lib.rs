//! The on-disk format of a Lamassu vault, version 1 (`docs/format.md`): bytes in, bytes out.
//!
//! This crate parses and builds structures and computes offsets. It never does I/O, never knows a cipher and contains no `unsafe`.
#![forbid(unsafe_code)]

pub mod domain;
pub mod geometry;
pub mod header;
pub mod keys;
pub mod name;
pub mod number;
pub mod page;
pub mod record;
pub mod root;
pub mod sessions;
pub mod suite;

pub use domain::Domain;
pub use geometry::Geometry;
pub use header::{Header, NameMode, VaultHeader, ZoneFile};
pub use keys::{Keys, SlotKey};
pub use number::{BlockNo, FileId, PageNo};
pub use page::{Page, PageError};
pub use record::DirRecord;
pub use root::RootRecord;
pub use sessions::SessionRecord;
pub use suite::Suite;

/// Bytes of a metadata page, of a sealed file's smallest unit, whatever the block size (§9).
pub const PAGE_LEN: usize = 4096;
/// Bytes of a block key (§10).
pub const KEY_LEN: usize = 32;
/// A block's key as the ciphers take it. What a key slot holds is a [`SlotKey`].
pub type BlockKey = [u8; KEY_LEN];
/// Format version written to AAD and headers.
pub const VERSION: u16 = 1;
