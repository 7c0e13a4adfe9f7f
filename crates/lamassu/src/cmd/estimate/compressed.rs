//! What compression saves besides deduplication.

use super::{PAGE, Stored};
use crate::cmd::info::DescribedCompression;
use crate::distinct::{Counted, Distinct};
use crate::fault::Result;
use lamassu_crypto::compress::packed_len;
use lamassu_format::{Compression, Suite};
use lamassu_host::compression::{self, Chosen};
use serde::Serialize;

/// A vault whose blocks are compressed.
#[derive(Serialize)]
pub(super) struct OfCodec {
    pub compression: DescribedCompression,
    /// in pages of 4096 bytes: on a store that does not compress, if it keeps no zeros
    pub vault: Stored,
    /// of its deduplicated bytes, those that are not zeros: what a store that compresses keeps at the most
    pub without_zeros_bytes: u64,
}

/// Blocks as a codec makes them.
pub(super) struct Compressed {
    compression: Compression,
    allocated: Distinct,
    without_zeros: Distinct,
}

impl Compressed {
    /// What each codec makes of blocks of this size, of encrypted blocks alone.
    pub fn all(codecs: &[Chosen], block_size: u32, distinct: &dyn Fn() -> Distinct) -> Result<Vec<Compressed>> {
        let of = |chosen: &Chosen| compression::of_new(Some(*chosen), None, None, (Suite::Aes, block_size));
        let found = codecs.iter().map(of).collect::<std::result::Result<Vec<_>, _>>()?;
        let of = |compression| Compressed { compression, allocated: distinct(), without_zeros: distinct() };
        Ok(found.into_iter().flatten().map(of).collect())
    }

    pub fn add(&mut self, digest: u128, block: &[u8]) -> Result<()> {
        let len = packed_len(self.compression, block);
        self.allocated.add(digest, len.next_multiple_of(PAGE as usize) as u32)?;
        self.without_zeros.add(digest, len as u32)
    }

    /// `vault`: without compression; `pages`: the metadata, deduplicated.
    pub fn finish(self, vault: &Stored, pages: u64) -> Result<OfCodec> {
        let (blocks, rest) = (self.allocated.count()?, self.without_zeros.count()?);
        let counted = Counted { bytes: vault.bytes, distinct_bytes: blocks.distinct_bytes + pages, ..blocks };
        Ok(OfCodec {
            compression: DescribedCompression::of(self.compression),
            vault: Stored::of(&counted, vault.page_bytes),
            without_zeros_bytes: rest.distinct_bytes + pages,
        })
    }
}
