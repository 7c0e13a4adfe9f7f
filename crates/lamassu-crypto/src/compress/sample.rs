//! Whether a block is worth a try. It is a function of the block alone: the same block is always compressed, or never.

/// Bytes that are looked at, by the length of the block.
fn sample_len(block_len: usize) -> usize {
    (block_len / 16).clamp(256, 1024)
}

/// Bytes looked at in one place.
const WORD: usize = 8;

/// The χ² that random bytes, whose mean is 255 and whose standard deviation is 23, pass once in a million blocks.
const CHI_SQUARED_MAX: usize = 370;

/// Whether its bytes are spread as those of ciphertext or of compressed data are: such a block is left alone. Of a
/// block that is one fifth text they are not. (What repeats and looks random otherwise is left alone, too.)
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
