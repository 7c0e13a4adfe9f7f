//! Kernels for x86-64. Every function here needs processor features; [`super::Kernel`] calls it only where they were
//! detected.

/// `sha256` of a module for one register width: `LANES` messages of equal length, word t of every message in one
/// register. The module has `LANES`, `words_of` and `compress`.
macro_rules! sha256_of_lanes {
    ($features:literal, $zero:ident, $each:ident, $store:ident) => {
        /// Messages of equal length.
        #[target_feature(enable = $features)]
        pub(in crate::kernel) fn sha256(messages: &[&[u8]; LANES]) -> [[u8; 32]; LANES] {
            use crate::kernel::sha256::{INITIAL, output, tail_blocks};
            let len = messages[0].len();
            assert!(messages.iter().all(|m| m.len() == len));
            let mut state = [$zero(); 8];
            for (s, h) in state.iter_mut().zip(INITIAL) {
                *s = $each(h.cast_signed());
            }
            let starts = messages.map(<[u8]>::as_ptr);
            for at in (0..len / 64 * 64).step_by(64) {
                // SAFETY: every message is len bytes long, and at + 64 <= len.
                let w = unsafe { words_of(&starts, at) };
                compress(&mut state, w);
            }
            let mut tails = [[[0; 64]; 2]; LANES];
            let mut count = 0;
            for (tail, message) in tails.iter_mut().zip(messages) {
                (*tail, count) = tail_blocks(&message[len / 64 * 64..], len);
            }
            let starts = tails.each_ref().map(|t| t.as_flattened().as_ptr());
            for at in (0..count * 64).step_by(64) {
                // SAFETY: every tail is two blocks long, and count is at most 2.
                let w = unsafe { words_of(&starts, at) };
                compress(&mut state, w);
            }
            let mut words = [[0u32; LANES]; 8];
            for (words, s) in words.iter_mut().zip(state) {
                // SAFETY: a register's width of writable bytes; the store asks for no alignment.
                unsafe { $store(words.as_mut_ptr().cast(), s) };
            }
            std::array::from_fn(|l| output(&words.map(|w| w[l])))
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
