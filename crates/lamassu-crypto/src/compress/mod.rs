//! Blocks compressed before they are encrypted (§10): payloads.
//!
//! Guarantees:
//!
//! * Equal blocks make equal payloads, on every machine and whatever the thread has compressed before: the codecs'
//!   releases are pinned, and `testdata/vectors/payloads.json` has their output. Deduplication depends on it, security
//!   does not: a key comes from the hash of what is encrypted.
//! * [`unpack`] gets only payloads that were verified against their keys. It writes one block at most, whatever the
//!   payload says.
//! * The output of a codec is wiped. Its own working memory is not: it keeps parts of blocks until they are
//!   overwritten.

mod codecs;
mod sample;
#[cfg(test)]
mod tests;

use codecs::Codecs;
use lamassu_format::compression::PAYLOAD_HEAD_LEN;
use lamassu_format::{Codec, Compression};
use std::cell::RefCell;

pub use codecs::version_of;

thread_local! {
    /// The codecs' working memory, for all blocks of a thread.
    static CODECS: RefCell<Codecs> = RefCell::default();
}

/// Whether another release of the codec is linked than `compression` names. Its blocks can be read; new ones may differ
/// from equal old ones.
pub fn is_of_other_version(compression: Compression) -> bool {
    version_of(compression.codec()) != compression.version()
}

/// A payload that was not made by a writer of this format, although its key is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no payload of a compressed block")]
pub struct NoPayload;

/// How many bytes would be encrypted for a block: those of its payload, or all.
pub fn packed_len(compression: Compression, block: &[u8]) -> usize {
    CODECS.with_borrow_mut(|codecs| {
        let made = made_of(codecs, compression, block);
        let len = made.and_then(|made| compression.payload_len(made, block.len()));
        codecs.wipe();
        len.unwrap_or(block.len())
    })
}

/// If that saves enough, replaces a block by its payload, followed by zeros. Returns how many bytes must be encrypted:
/// those of the payload, or all.
pub fn pack(compression: Compression, block: &mut [u8]) -> usize {
    CODECS.with_borrow_mut(|codecs| {
        let made = made_of(codecs, compression, block);
        let len = made.and_then(|made| compression.payload_len(made, block.len()));
        if let (Some(made), Some(_)) = (made, len) {
            let (head, rest) = block.split_at_mut(PAYLOAD_HEAD_LEN);
            head.copy_from_slice(&(made as u32).to_le_bytes());
            head.rotate_right(1);
            head[0] = compression.codec().id();
            rest[..made].copy_from_slice(codecs.made(made));
            rest[made..].fill(0);
        }
        codecs.wipe();
        len.unwrap_or(block.len())
    })
}

/// The length of the codec's output for a block, if compression is worth a try and the output is shorter than the
/// block. Whatever this returns, the caller wipes the output.
fn made_of(codecs: &mut Codecs, compression: Compression, block: &[u8]) -> Option<usize> {
    if sample::looks_random(block) {
        return None;
    }
    match compression.codec() {
        Codec::Lz4 => codecs.lz4(block),
        Codec::Zstd(level) => codecs.zstd(level, block),
    }
    .filter(|made| *made < block.len())
}

/// Replaces a payload, the first `len` bytes, by its block.
///
/// # Errors
/// [`NoPayload`]; the block is unspecified then.
pub fn unpack(block: &mut [u8], len: usize) -> Result<(), NoPayload> {
    let payload = block.get(..len).ok_or(NoPayload)?;
    let [codec, a, b, c] = *payload.first_chunk::<PAYLOAD_HEAD_LEN>().ok_or(NoPayload)?;
    let made = u32::from_le_bytes([a, b, c, 0]) as usize;
    let place = PAYLOAD_HEAD_LEN..PAYLOAD_HEAD_LEN + made;
    if place.end > len {
        return Err(NoPayload);
    }
    CODECS.with_borrow_mut(|codecs| {
        codecs.hold(&block[place]);
        let done = match codec {
            1 => codecs.un_lz4(made, block),
            2 => codecs.un_zstd(made, block),
            _ => None,
        };
        codecs.wipe();
        // The whole block is written, so nothing of the payload is left in its place.
        done.filter(|done| *done == block.len()).map(drop).ok_or(NoPayload)
    })
}

/// Bytes of a stored block up to the last one that is not zero, in whole cipher blocks: the ciphertext of a compressed
/// block. (Its last cipher block is all zero with a probability of 2⁻¹²⁸.)
pub fn stored_len(block: &[u8]) -> usize {
    let is_zero = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte) == 0;
    let mut len = block.len();
    for step in [1024, 16] {
        while len >= step && is_zero(&block[len - step..len]) {
            len -= step;
        }
    }
    len
}
