//! Whether compressing a block is worth a try. This depends on the block alone, so the same block is always compressed,
//! or never.

/// Bytes of the sample, by the length of the block.
fn sample_len(block_len: usize) -> usize {
    (block_len / 16).clamp(256, 1024)
}

/// Bytes of the sample in one place.
const WORD: usize = 8;

/// The limit of χ² that blocks of random bytes (mean 255, standard deviation 23) exceed once in a million blocks.
const CHI_SQUARED_MAX: usize = 370;

/// Whether the bytes of a block are distributed like those of ciphertext or of compressed data: such a block is not
/// compressed. In a block that is one fifth text they are not. (Repeated random data are not compressed either.)
pub(super) fn looks_random(block: &[u8]) -> bool {
    let len = sample_len(block.len());
    if block.len() < len {
        return false;
    }
    let mut counts = [0u16; 256];
    let mut squares = 0usize;
    for word in block.chunks_exact(block.len() / (len / WORD)) {
        for byte in &word[..WORD] {
            let count = &mut counts[usize::from(*byte)];
            squares += 2 * usize::from(*count) + 1;
            *count += 1;
        }
    }
    // χ² = Σ n² · 256 / len − len
    squares * 256 < (CHI_SQUARED_MAX + len) * len
}
