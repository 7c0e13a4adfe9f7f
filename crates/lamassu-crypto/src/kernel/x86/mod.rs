//! Kernels for x86-64. Every function here needs processor features; [`super::Kernel`] calls it only where they were
//! detected.

/// `sha256` of a module for one register width: `LANES` messages, word t of every message in one register. The module
/// has `LANES`, `words_of` and `compress`.
macro_rules! sha256_of_lanes {
    ($features:literal, $zero:ident, $each:ident, $store:ident) => {
        /// Messages of any lengths. It takes as long as if all were as long as the longest.
        #[target_feature(enable = $features)]
        pub(in crate::kernel) fn sha256(messages: &[&[u8]; LANES]) -> [[u8; 32]; LANES] {
            use crate::kernel::sha256::{INITIAL, output, tail_blocks};
            let mut state = [$zero(); 8];
            for (s, h) in state.iter_mut().zip(INITIAL) {
                *s = $each(h.cast_signed());
            }
            let whole = messages.map(|m| m.len() / 64 * 64);
            let (mut at, mut ended, mut digests) = (0, [false; LANES], [[0; 32]; LANES]);
            while let Some(next) = (0..LANES).filter(|l| !ended[*l]).min_by_key(|l| whole[*l]) {
                // Lanes that have ended idle in the bytes of one that has not.
                let starts: [*const u8; LANES] =
                    std::array::from_fn(|l| messages[if ended[l] { next } else { l }].as_ptr());
                while at < whole[next] {
                    // SAFETY: every start is that of at least whole[next] bytes, and at + 64 <= whole[next].
                    let w = unsafe { words_of(&starts, at) };
                    compress(&mut state, w);
                    at += 64;
                }
                let (mut tails, mut counts) = ([[[0; 64]; 2]; LANES], [0; LANES]);
                for l in (0..LANES).filter(|l| !ended[*l] && whole[*l] == at) {
                    (tails[l], counts[l]) = tail_blocks(&messages[l][at..], messages[l].len());
                }
                let starts = tails.each_ref().map(|t| t.as_flattened().as_ptr());
                let mut last = state;
                for count in 1..=counts.iter().copied().max().unwrap_or(0) {
                    // SAFETY: every tail is two blocks long, and count is at most 2.
                    let w = unsafe { words_of(&starts, (count - 1) * 64) };
                    compress(&mut last, w);
                    let mut words = [[0u32; LANES]; 8];
                    for (words, s) in words.iter_mut().zip(last) {
                        // SAFETY: a register's width of writable bytes; the store asks for no alignment.
                        unsafe { $store(words.as_mut_ptr().cast(), s) };
                    }
                    for l in (0..LANES).filter(|l| counts[*l] == count) {
                        digests[l] = output(&words.map(|w| w[l]));
                        ended[l] = true;
                    }
                }
            }
            digests
        }
    };
}

#[macro_use]
mod rounds;

pub(super) mod aesni;
pub(super) mod sha_avx2;
pub(super) mod sha_avx512;
pub(super) mod sha_avx512vl;
pub(super) mod sha_ni;
pub(super) mod vaes;
pub(super) mod vaes512;
