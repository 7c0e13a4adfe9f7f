//! Keyed BLAKE3 of several messages at once.
//!
//! A block of 4 KiB is four chunks of BLAKE3's tree, so the crate fills four of the sixteen lanes of an AVX-512 vector
//! with it. Here the chunks of many blocks go through the vectors together. The compression function is the crate's
//! own, through its `platform` module. The crate exports that module without a promise to keep it, so its version is
//! pinned, and the tests compare with `keyed_hash`.

use ::blake3::platform::{Platform, words_from_le_bytes_32};
use ::blake3::{CHUNK_LEN, IncrementCounter, KEY_LEN, OUT_LEN};

/// Messages at once.
const LANES: usize = 16;
/// A message of more chunks fills the lanes by itself.
const CHUNKS_MAX: usize = 8;

/// Domain flags of the compression function (BLAKE3 §2.1, table 3).
mod flag {
    pub(super) const CHUNK_START: u8 = 1 << 0;
    pub(super) const CHUNK_END: u8 = 1 << 1;
    pub(super) const PARENT: u8 = 1 << 2;
    pub(super) const ROOT: u8 = 1 << 3;
    pub(super) const KEYED_HASH: u8 = 1 << 4;
}

/// Keyed BLAKE3 of each message. As many outputs as messages.
pub(super) fn keyed_hashes(key: &[u8; KEY_LEN], messages: &[&[u8]], out: &mut [[u8; OUT_LEN]]) {
    let platform = Platform::detect();
    for (messages, out) in messages.chunks(LANES).zip(out.chunks_mut(LANES)) {
        let len = messages[0].len();
        let chunks = len / CHUNK_LEN;
        let is_full_tree = len.is_multiple_of(CHUNK_LEN) && chunks.is_power_of_two() && chunks <= CHUNKS_MAX;
        if is_full_tree && messages.len() > 1 && messages.iter().all(|m| m.len() == len) {
            full_trees(platform, key, messages, chunks, out);
        } else {
            for (message, out) in messages.iter().zip(out) {
                *out = ::blake3::keyed_hash(key, message).into();
            }
        }
    }
}

/// Messages of `chunks` whole chunks, a power of two.
fn full_trees(platform: Platform, key: &[u8; KEY_LEN], messages: &[&[u8]], chunks: usize, out: &mut [[u8; OUT_LEN]]) {
    let key = words_from_le_bytes_32(key);
    let mut row = [0; LANES * OUT_LEN];
    // Node i of message m's current level at m * CHUNKS_MAX + i, so that the children of a parent are adjacent.
    let mut nodes = [[0u8; OUT_LEN]; LANES * CHUNKS_MAX];
    for chunk in 0..chunks {
        let inputs: [&[u8; CHUNK_LEN]; LANES] = std::array::from_fn(|m| {
            let chunk = messages[m.min(messages.len() - 1)][chunk * CHUNK_LEN..].first_chunk();
            chunk.expect("messages are as long as the first, which is whole chunks")
        });
        let end = flag::CHUNK_END | if chunks == 1 { flag::ROOT } else { 0 };
        platform.hash_many(
            &inputs[..messages.len()],
            &key,
            chunk as u64,
            IncrementCounter::No,
            flag::KEYED_HASH,
            flag::CHUNK_START,
            end,
            &mut row,
        );
        for (m, node) in row.as_chunks().0.iter().take(messages.len()).enumerate() {
            nodes[m * CHUNKS_MAX + chunk] = *node;
        }
    }
    let mut width = chunks;
    while width > 1 {
        width /= 2;
        let root = if width == 1 { flag::ROOT } else { 0 };
        for i in 0..width {
            let pairs = nodes.as_flattened();
            let inputs: [&[u8; 2 * OUT_LEN]; LANES] = std::array::from_fn(|m| {
                let pair = pairs[(m * CHUNKS_MAX + 2 * i) * OUT_LEN..].first_chunk();
                pair.expect("the last message's last pair ends with the array")
            });
            let flags = flag::KEYED_HASH | flag::PARENT | root;
            platform.hash_many(&inputs[..messages.len()], &key, 0, IncrementCounter::No, flags, 0, 0, &mut row);
            for (m, node) in row.as_chunks().0.iter().take(messages.len()).enumerate() {
                nodes[m * CHUNKS_MAX + i] = *node;
            }
        }
    }
    for (m, out) in out.iter_mut().enumerate() {
        *out = nodes[m * CHUNKS_MAX];
    }
}
