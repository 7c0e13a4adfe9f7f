//! The on-disk format of a Lamassu vault, version 1 (`docs/format.md`): bytes in, bytes out.
//!
//! This crate parses and builds structures and computes offsets. It never does I/O, knows no cipher and has no
//! `unsafe`. It has no locks and no state.
//!
//! | module | section | what it holds |
//! |---|---|---|
//! | [`algorithm`], [`suite`], [`domain`] | 2, 10 | names, numbers and properties of ciphers, hashes, cipher suites and deduplication domains |
//! | [`header`] | 4 | vault header and zone file: JSON, its bounds, the canonical form under the MAC |
//! | [`name`] | 6, 7 | names in the store, and names that a file may have |
//! | [`record`] | 6 | the record of a directory |
//! | [`sessions`] | 6a | the record of sessions |
//! | [`root`] | 6b | the record of the root's permissions |
//! | [`geometry`] | 8 | where pages and blocks are in a backing file |
//! | [`compression`] | 4, 10 | how a vault compresses blocks before it encrypts them |
//! | [`page`], [`keys`] | 9, 10 | the metadata page, and the block keys in it |
//! | [`tree`] | | the Merkle tree over a file's pages: numbers of its records |
//! | [`profile`], [`method`] | 9, 6, 10 | how the blocks of a file are protected; by which cipher and hash |
//! | [`number`], `words` | | numbers of pages and blocks, offsets, ids of files; the words of a header |
#![forbid(unsafe_code)]

pub mod algorithm;
pub mod compression;
pub mod domain;
pub mod geometry;
pub mod header;
pub mod keys;
pub mod method;
pub mod name;
pub mod number;
pub mod page;
pub mod profile;
pub mod record;
pub mod root;
pub mod sessions;
pub mod suite;
pub mod tree;
mod words;

pub use algorithm::{Cipher, Hash};
pub use compression::{Codec, CodecVersion, Compression, CompressionError};
pub use domain::Domain;
pub use geometry::{Geometry, PageAad};
pub use header::{Header, NameMode, VaultHeader, ZoneFile};
pub use keys::{Keys, SlotKey, is_compressed, is_hole};
pub use method::Method;
pub use number::{BlockNo, ByteOffset, FileId, PageNo, SessionTag};
pub use page::{Page, PageError};
pub use profile::Profile;
pub use record::DirRecord;
pub use root::RootRecord;
pub use sessions::SessionRecord;
pub use suite::Suite;
pub use tree::{Digest, RecordNo};
pub(crate) use words::words;

/// Bytes of a metadata page, the smallest unit of a sealed file, whatever the block size (§9).
pub const PAGE_LEN: usize = 4096;
/// Bytes of a block key (§10).
pub const KEY_LEN: usize = 32;
/// A block's key as the ciphers take it. A key slot holds a [`SlotKey`].
pub type BlockKey = [u8; KEY_LEN];
/// Format version written to AAD and headers.
pub const VERSION: u16 = 1;
