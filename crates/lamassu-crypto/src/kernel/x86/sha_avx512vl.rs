//! SHA-256 of eight messages at once by AVX-512 over 256-bit registers, for groups that do not fill sixteen lanes. The
//! narrower instructions have one more port, so eight messages take two thirds of the time of sixteen.

use super::sha_avx2::words_of;
use std::arch::x86_64::*;

/// Messages at once.
pub(in crate::kernel) const LANES: usize = 8;

sha256_of_lanes!("avx2,avx512f,avx512vl", _mm256_setzero_si256, _mm256_set1_epi32, _mm256_storeu_si256);
compress_of_lanes!(
    "avx2,avx512f,avx512vl",
    __m256i,
    _mm256_set1_epi32,
    _mm256_add_epi32,
    _mm256_ror_epi32,
    _mm256_srli_epi32,
    _mm256_ternarylogic_epi32
);
