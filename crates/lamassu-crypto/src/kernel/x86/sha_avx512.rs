//! SHA-256 of sixteen messages at once by AVX-512: word t of every message in one register. No state waits for another instruction's latency, and a
//! rotation and a three-input function are one instruction each.

use crate::kernel::sha256::{INITIAL, K, output, tail_blocks};
use std::arch::x86_64::*;

/// Messages at once.
pub(in crate::kernel) const LANES: usize = 16;

/// Sixteen messages of equal length.
#[target_feature(enable = "avx512f,avx512bw")]
pub(in crate::kernel) fn sha256(messages: &[&[u8]; LANES]) -> [[u8; 32]; LANES] {
    let len = messages[0].len();
    let split = messages.map(|m| m.as_chunks::<64>());
    let mut state = INITIAL.map(|h| _mm512_set1_epi32(h.cast_signed()));
    for i in 0..len / 64 {
        compress(&mut state, std::array::from_fn(|l| &split[l].0[i]));
    }
    let tails = split.map(|(_, rest)| tail_blocks(rest, len));
    for i in 0..tails[0].1 {
        compress(&mut state, std::array::from_fn(|l| &tails[l].0[i]));
    }
    let mut words = [[0u32; LANES]; 8];
    for (words, s) in words.iter_mut().zip(state) {
        // SAFETY: 64 writable bytes; the store asks for no alignment.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), s) };
    }
    std::array::from_fn(|l| output(&words.map(|w| w[l])))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn compress(state: &mut [__m512i; 8], blocks: [&[u8; 64]; LANES]) {
    let mut w = words_of(blocks);
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for t in 0..64 {
        if t >= 16 {
            let (x, y) = (w[(t + 1) % 16], w[(t + 14) % 16]);
            let s0 = xor3(_mm512_ror_epi32::<7>(x), _mm512_ror_epi32::<18>(x), _mm512_srli_epi32::<3>(x));
            let s1 = xor3(_mm512_ror_epi32::<17>(y), _mm512_ror_epi32::<19>(y), _mm512_srli_epi32::<10>(y));
            w[t % 16] = add(add(w[t % 16], s0), add(w[(t + 9) % 16], s1));
        }
        let s1 = xor3(_mm512_ror_epi32::<6>(e), _mm512_ror_epi32::<11>(e), _mm512_ror_epi32::<25>(e));
        // Truth tables of ternary logic: choose is e ? f : g, majority of a, b, c.
        let choose = _mm512_ternarylogic_epi32::<0xca>(e, f, g);
        let wk = add(w[t % 16], _mm512_set1_epi32(K[t].cast_signed()));
        let t1 = add(add(h, wk), add(s1, choose));
        let s0 = xor3(_mm512_ror_epi32::<2>(a), _mm512_ror_epi32::<13>(a), _mm512_ror_epi32::<22>(a));
        let majority = _mm512_ternarylogic_epi32::<0xe8>(a, b, c);
        (h, g, f, e) = (g, f, e, add(d, t1));
        (d, c, b, a) = (c, b, a, add(t1, add(s0, majority)));
    }
    for (s, v) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *s = add(*s, v);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(a, b)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn xor3(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0x96>(a, b, c)
}

/// Word t of each block, in register t: a 16 × 16 transposition, by 32, 64, 128 and 256 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn words_of(blocks: [&[u8; 64]; LANES]) -> [__m512i; LANES] {
    let turn = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203));
    // SAFETY: 64 readable bytes; the load asks for no alignment.
    let rows = blocks.map(|b| unsafe { _mm512_loadu_si512(b.as_ptr().cast()) });
    let rows = rows.map(|r| _mm512_shuffle_epi8(r, turn));
    let mut x = rows;
    for i in (0..LANES).step_by(2) {
        x[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        x[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // y[4q + j]: words j, 4 + j, 8 + j, 12 + j of rows 4q to 4q + 3, one 128-bit lane for each word.
    let mut y = x;
    for q in (0..LANES).step_by(4) {
        y[q] = _mm512_unpacklo_epi64(x[q], x[q + 2]);
        y[q + 1] = _mm512_unpackhi_epi64(x[q], x[q + 2]);
        y[q + 2] = _mm512_unpacklo_epi64(x[q + 1], x[q + 3]);
        y[q + 3] = _mm512_unpackhi_epi64(x[q + 1], x[q + 3]);
    }
    let mut w = y;
    for j in 0..4 {
        // Lanes 0 and 2, then 1 and 3, of rows 0 to 7 and of rows 8 to 15.
        let low02 = _mm512_shuffle_i32x4::<0x88>(y[j], y[4 + j]);
        let low13 = _mm512_shuffle_i32x4::<0xdd>(y[j], y[4 + j]);
        let high02 = _mm512_shuffle_i32x4::<0x88>(y[8 + j], y[12 + j]);
        let high13 = _mm512_shuffle_i32x4::<0xdd>(y[8 + j], y[12 + j]);
        w[j] = _mm512_shuffle_i32x4::<0x88>(low02, high02);
        w[8 + j] = _mm512_shuffle_i32x4::<0xdd>(low02, high02);
        w[4 + j] = _mm512_shuffle_i32x4::<0x88>(low13, high13);
        w[12 + j] = _mm512_shuffle_i32x4::<0xdd>(low13, high13);
    }
    w
}
