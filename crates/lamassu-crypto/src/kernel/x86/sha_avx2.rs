//! SHA-256 of eight messages at once by AVX2: word t of every message in one register. It is for processors with
//! neither SHA-NI nor AVX-512 (Intel's from 2013 to 2019 outside servers), which otherwise hash one message at a time.

use crate::kernel::sha256::K;
use std::arch::x86_64::*;

/// Messages at once.
pub(in crate::kernel) const LANES: usize = 8;

sha256_of_lanes!("avx2", _mm256_setzero_si256, _mm256_set1_epi32, _mm256_storeu_si256);

/// The XOR of three terms: each is `x` rotated right by a count (`>>>`), or the last one shifted right (`>>`). AVX2 has
/// no rotations.
macro_rules! sigma {
    ($x:expr, >>> $r0:literal, >>> $r1:literal, >>> $r2:literal) => {
        xor(xor(rotate!($x, $r0), rotate!($x, $r1)), rotate!($x, $r2))
    };
    ($x:expr, >>> $r0:literal, >>> $r1:literal, >> $s:literal) => {
        xor(xor(rotate!($x, $r0), rotate!($x, $r1)), _mm256_srli_epi32::<$s>($x))
    };
}

macro_rules! rotate {
    ($x:expr, $r:literal) => {
        xor(_mm256_srli_epi32::<$r>($x), _mm256_slli_epi32::<{ 32 - $r }>($x))
    };
}

#[inline]
#[target_feature(enable = "avx2")]
fn compress(state: &mut [__m256i; 8], mut w: [__m256i; 16]) {
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    let (k, _) = K.as_chunks::<16>();
    for (n, k) in k.iter().enumerate() {
        for t in 0..16 {
            let choose = xor(g, and(e, xor(f, g)));
            let wk = add(w[t], _mm256_set1_epi32(k[t].cast_signed()));
            let t1 = add(add(h, wk), add(sigma!(e, >>> 6, >>> 11, >>> 25), choose));
            let majority = xor(and(a, b), and(c, xor(a, b)));
            let t2 = add(sigma!(a, >>> 2, >>> 13, >>> 22), majority);
            (h, g, f, e) = (g, f, e, add(d, t1));
            (d, c, b, a) = (c, b, a, add(t1, t2));
            if n < 3 {
                // Word t + 16 of the message schedule in the place of word t.
                let (x, y) = (w[(t + 1) % 16], w[(t + 14) % 16]);
                let (s0, s1) = (sigma!(x, >>> 7, >>> 18, >> 3), sigma!(y, >>> 17, >>> 19, >> 10));
                w[t] = add(add(w[t], s0), add(w[(t + 9) % 16], s1));
            }
        }
    }
    for (s, v) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *s = add(*s, v);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn add(a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi32(a, b)
}

#[inline]
#[target_feature(enable = "avx2")]
fn xor(a: __m256i, b: __m256i) -> __m256i {
    _mm256_xor_si256(a, b)
}

#[inline]
#[target_feature(enable = "avx2")]
fn and(a: __m256i, b: __m256i) -> __m256i {
    _mm256_and_si256(a, b)
}

/// Word t of each message's block at byte `at`, in register t: two 8 × 8 transpositions.
///
/// # Safety
/// From each start on, at least `at + 64` bytes are readable.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn words_of(starts: &[*const u8; LANES], at: usize) -> [__m256i; 16] {
    let turn = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203));
    let mut w = [_mm256_setzero_si256(); 16];
    for half in [0, 1] {
        let rows: [__m256i; LANES] = std::array::from_fn(|l| {
            // SAFETY: the caller's promise; the load asks for no alignment.
            let row = unsafe { _mm256_loadu_si256(starts[l].add(at + 32 * half).cast()) };
            _mm256_shuffle_epi8(row, turn)
        });
        w[8 * half..][..8].copy_from_slice(&transposed(&rows));
    }
    w
}

/// An 8 × 8 transposition, by 32, 64 and 128 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn transposed(rows: &[__m256i; 8]) -> [__m256i; 8] {
    // x[2i], x[2i + 1]: words 0, 1 (4, 5) and 2, 3 (6, 7) of rows 2i and 2i + 1, alternating.
    let x: [__m256i; 8] = std::array::from_fn(|i| match i % 2 {
        0 => _mm256_unpacklo_epi32(rows[i], rows[i + 1]),
        _ => _mm256_unpackhi_epi32(rows[i - 1], rows[i]),
    });
    // y[4q + j]: words j and 4 + j of rows 4q to 4q + 3, one 128-bit lane for each word.
    let y: [__m256i; 8] = std::array::from_fn(|i| {
        let (low, high) = (x[i / 4 * 4 + i % 4 / 2], x[i / 4 * 4 + i % 4 / 2 + 2]);
        if i % 2 == 0 { _mm256_unpacklo_epi64(low, high) } else { _mm256_unpackhi_epi64(low, high) }
    });
    std::array::from_fn(|t| match t / 4 {
        0 => _mm256_permute2x128_si256::<0x20>(y[t], y[t + 4]),
        _ => _mm256_permute2x128_si256::<0x31>(y[t - 4], y[t]),
    })
}
