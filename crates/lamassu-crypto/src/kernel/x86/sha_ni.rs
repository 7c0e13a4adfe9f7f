//! SHA-256 by the SHA extensions. Each SHA256RNDS2 waits for the one before it, so two messages are hashed at once if
//! there are two.

use crate::kernel::sha256::{INITIAL, K, output, tail_blocks};
use std::arch::x86_64::*;

#[target_feature(enable = "sha,sse4.1,ssse3")]
pub(in crate::kernel) fn sha256(messages: &[&[u8]], out: &mut [[u8; 32]]) {
    let (pairs, rest) = messages.as_chunks::<2>();
    let (out_pairs, out_rest) = out.as_chunks_mut::<2>();
    for (m, o) in pairs.iter().zip(out_pairs) {
        if m[0].len() == m[1].len() {
            *o = hash(m);
        } else {
            *o = [hash(&[m[0]])[0], hash(&[m[1]])[0]];
        }
    }
    for (m, o) in rest.iter().zip(out_rest) {
        [*o] = hash(&[m]);
    }
}

/// N messages of equal length, one instruction of each after another.
#[inline]
#[target_feature(enable = "sha,sse4.1,ssse3")]
fn hash<const N: usize>(messages: &[&[u8]; N]) -> [[u8; 32]; N] {
    let len = messages[0].len();
    assert!(messages.iter().all(|m| m.len() == len));
    let mut states = [State::initial(); N];
    let starts = messages.map(<[u8]>::as_ptr);
    for at in (0..len / 64 * 64).step_by(64) {
        // SAFETY: every message is len bytes long, and at + 64 <= len.
        unsafe { compress(&mut states, &starts, at) };
    }
    let mut tails = [[[0; 64]; 2]; N];
    let mut count = 0;
    for (tail, message) in tails.iter_mut().zip(messages) {
        (*tail, count) = tail_blocks(&message[len / 64 * 64..], len);
    }
    let starts = tails.each_ref().map(|t| t.as_flattened().as_ptr());
    for at in (0..count * 64).step_by(64) {
        // SAFETY: every tail is two blocks long, and count is at most 2.
        unsafe { compress(&mut states, &starts, at) };
    }
    let mut out = [[0; 32]; N];
    for (out, state) in out.iter_mut().zip(states) {
        *out = output(&state.words());
    }
    out
}

/// The state as SHA256RNDS2 takes it: words A B E F and C D G H, highest first.
#[derive(Clone, Copy)]
struct State {
    abef: __m128i,
    cdgh: __m128i,
}

impl State {
    #[inline]
    #[target_feature(enable = "sse2")]
    fn initial() -> State {
        let [a, b, c, d, e, f, g, h] = INITIAL.map(u32::cast_signed);
        State { abef: _mm_set_epi32(a, b, e, f), cdgh: _mm_set_epi32(c, d, g, h) }
    }

    #[inline]
    #[target_feature(enable = "sse2,sse4.1")]
    fn words(self) -> [u32; 8] {
        let (x, y) = (self.abef, self.cdgh);
        [
            _mm_extract_epi32::<3>(x),
            _mm_extract_epi32::<2>(x),
            _mm_extract_epi32::<3>(y),
            _mm_extract_epi32::<2>(y),
            _mm_extract_epi32::<1>(x),
            _mm_extract_epi32::<0>(x),
            _mm_extract_epi32::<1>(y),
            _mm_extract_epi32::<0>(y),
        ]
        .map(i32::cast_unsigned)
    }
}

/// # Safety
/// From each start on, at least `at + 64` bytes are readable.
#[inline]
#[target_feature(enable = "sha,sse4.1,ssse3")]
unsafe fn compress<const N: usize>(states: &mut [State; N], starts: &[*const u8; N], at: usize) {
    let turn = _mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203);
    let before = *states;
    let mut w: [[__m128i; 4]; N] = [[_mm_setzero_si128(); 4]; N];
    for n in 0..N {
        for (i, w) in w[n].iter_mut().enumerate() {
            // SAFETY: the caller's promise; the load asks for no alignment.
            let words = unsafe { _mm_loadu_si128(starts[n].add(at + 16 * i).cast()) };
            *w = _mm_shuffle_epi8(words, turn);
        }
    }
    for i in 0..16 {
        // SAFETY: K has 64 words and i < 16; the load asks for no alignment.
        let k = unsafe { _mm_loadu_si128(K[4 * i..].as_ptr().cast()) };
        for n in 0..N {
            if i >= 4 {
                // w[i % 4] held the words of 16 rounds ago.
                let [w0, w1, w2, w3] = [w[n][i % 4], w[n][(i + 1) % 4], w[n][(i + 2) % 4], w[n][(i + 3) % 4]];
                let x = _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8::<4>(w3, w2));
                w[n][i % 4] = _mm_sha256msg2_epu32(x, w3);
            }
            let wk = _mm_add_epi32(w[n][i % 4], k);
            let State { abef, cdgh } = states[n];
            let first = _mm_sha256rnds2_epu32(cdgh, abef, wk);
            let second = _mm_sha256rnds2_epu32(abef, first, _mm_shuffle_epi32::<0x0e>(wk));
            states[n] = State { abef: second, cdgh: first };
        }
    }
    for (s, b) in states.iter_mut().zip(before) {
        *s = State { abef: _mm_add_epi32(s.abef, b.abef), cdgh: _mm_add_epi32(s.cdgh, b.cdgh) };
    }
}
