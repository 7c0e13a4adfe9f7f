//! SHA-256 of sixteen messages at once by AVX-512: word t of every message in one register.

use std::arch::x86_64::*;

/// Messages at once.
pub(in crate::kernel) const LANES: usize = 16;

sha256_of_lanes!("avx512f,avx512bw", _mm512_setzero_si512, _mm512_set1_epi32, _mm512_storeu_si512);
compress_of_lanes!(
    "avx512f,avx512bw",
    __m512i,
    _mm512_set1_epi32,
    _mm512_add_epi32,
    _mm512_ror_epi32,
    _mm512_srli_epi32,
    _mm512_ternarylogic_epi32
);

/// Word t of each message's block at byte `at`, in register t: a 16 × 16 transposition, by 32, 64, 128 and 256 bits.
///
/// # Safety
/// From each start on, at least `at + 64` bytes are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn words_of(starts: &[*const u8; LANES], at: usize) -> [__m512i; LANES] {
    let turn = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203));
    let mut rows = [_mm512_setzero_si512(); LANES];
    for l in 0..LANES {
        // SAFETY: the caller's promise; the load asks for no alignment.
        let row = unsafe { _mm512_loadu_si512(starts[l].add(at).cast()) };
        rows[l] = _mm512_shuffle_epi8(row, turn);
    }
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
