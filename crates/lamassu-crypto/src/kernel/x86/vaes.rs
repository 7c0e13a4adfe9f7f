//! AES-256 by VAES over 256-bit registers: two blocks an instruction. Sixteen or eight lanes of different keys for CBC encryption, sixteen blocks in
//! flight for the rest; what is left over goes to AES-NI.

use super::aesni::{self, Schedule, expand, expand_inverse};
use crate::kernel::aes::ROUNDS;
use lamassu_format::BlockKey;
use std::arch::x86_64::*;
use zeroize::Zeroize;

/// Registers in flight.
const WIDTH: usize = 8;
/// Bytes in flight.
const SPAN: usize = WIDTH * 32;

/// The round keys of two lanes; wiped when dropped.
struct Pair([__m256i; ROUNDS + 1]);

impl Drop for Pair {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: 32 readable bytes; the load asks for no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(bytes: &mut [u8; 32], x: __m256i) {
    // SAFETY: 32 writable bytes; the store asks for no alignment.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), x) }
}

#[inline]
#[target_feature(enable = "avx2,aes,ssse3")]
fn pair(a: &BlockKey, b: &BlockKey) -> Pair {
    let (a, b) = (expand(a), expand(b));
    Pair(std::array::from_fn(|r| _mm256_set_m128i(b.0[r], a.0[r])))
}

/// One key in both halves.
#[inline]
#[target_feature(enable = "avx2")]
fn broadcast(k: &Schedule) -> Pair {
    Pair(k.0.map(|k| _mm256_broadcastsi128_si256(k)))
}

#[target_feature(enable = "avx2,vaes,aes,ssse3")]
pub(in crate::kernel) fn cbc_encrypt(mut keys: &[BlockKey], mut lanes: &mut [&mut [u8]]) {
    while lanes.len() >= 8 {
        let width = match lanes.len() {
            16.. => cbc_encrypt_pairs::<8>(keys, lanes),
            _ => cbc_encrypt_pairs::<4>(keys, lanes),
        };
        keys = &keys[width..];
        lanes = &mut lanes[width..];
    }
    aesni::cbc_encrypt(keys, lanes);
}

/// Encrypts the first 2·P lanes; returns how many they are.
#[target_feature(enable = "avx2,vaes,aes,ssse3")]
fn cbc_encrypt_pairs<const P: usize>(keys: &[BlockKey], lanes: &mut [&mut [u8]]) -> usize {
    let k: [Pair; P] = std::array::from_fn(|p| pair(&keys[2 * p], &keys[2 * p + 1]));
    let lanes = lanes.as_chunks_mut::<2>().0.first_chunk_mut::<P>().expect("the caller has 2P lanes");
    let lanes = lanes.each_mut().map(|pair| pair.each_mut().map(|lane| lane.as_chunks_mut::<16>().0));
    let blocks = lanes.iter().flatten().map(|l| l.len()).min().unwrap_or(0);
    let mut x = [_mm256_setzero_si256(); P];
    for i in 0..blocks {
        for p in 0..P {
            let plain = _mm256_set_m128i(aesni::load(&lanes[p][1][i]), aesni::load(&lanes[p][0][i]));
            x[p] = _mm256_xor_si256(_mm256_xor_si256(x[p], k[p].0[0]), plain);
        }
        for r in 1..ROUNDS {
            for p in 0..P {
                x[p] = _mm256_aesenc_epi128(x[p], k[p].0[r]);
            }
        }
        for p in 0..P {
            x[p] = _mm256_aesenclast_epi128(x[p], k[p].0[ROUNDS]);
            aesni::store(&mut lanes[p][0][i], _mm256_castsi256_si128(x[p]));
            aesni::store(&mut lanes[p][1][i], _mm256_extracti128_si256::<1>(x[p]));
        }
    }
    2 * P
}

#[target_feature(enable = "avx2,vaes,aes,ssse3")]
pub(in crate::kernel) fn cbc_decrypt(key: &BlockKey, data: &mut [u8]) {
    let k = broadcast(&expand_inverse(key));
    let mut previous = _mm_setzero_si128();
    let (wide, rest) = data.as_chunks_mut::<SPAN>();
    for span in wide {
        let pairs = span.as_chunks_mut::<32>().0.first_chunk_mut::<WIDTH>().expect("a span is WIDTH registers");
        let cipher = pairs.each_ref().map(|b| load(b));
        let mut x = cipher.map(|c| _mm256_xor_si256(c, k.0[0]));
        for r in 1..ROUNDS {
            x = x.map(|x| _mm256_aesdec_epi128(x, k.0[r]));
        }
        x = x.map(|x| _mm256_aesdeclast_epi128(x, k.0[ROUNDS]));
        for ((b, x), c) in pairs.iter_mut().zip(x).zip(cipher) {
            let before = _mm256_set_m128i(_mm256_castsi256_si128(c), previous);
            store(b, _mm256_xor_si256(x, before));
            previous = _mm256_extracti128_si256::<1>(c);
        }
    }
    aesni::cbc_decrypt_from(key, previous, rest);
}

/// `data` is less than 2³² cipher blocks.
#[target_feature(enable = "avx2,vaes,aes,ssse3")]
pub(in crate::kernel) fn ctr(key: &BlockKey, data: &mut [u8]) {
    let k = broadcast(&expand(key));
    // Counters are kept little-endian in the last word of each block and turned for use.
    let turn = _mm256_broadcastsi128_si256(_mm_set_epi8(12, 13, 14, 15, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    let two = _mm256_set_epi32(2, 0, 0, 0, 2, 0, 0, 0);
    let mut counter = _mm256_set_epi32(1, 0, 0, 0, 0, 0, 0, 0);
    for span in data.chunks_mut(SPAN) {
        let mut x = [_mm256_setzero_si256(); WIDTH];
        for x in &mut x {
            *x = _mm256_xor_si256(_mm256_shuffle_epi8(counter, turn), k.0[0]);
            counter = _mm256_add_epi32(counter, two);
        }
        for r in 1..ROUNDS {
            x = x.map(|x| _mm256_aesenc_epi128(x, k.0[r]));
        }
        x = x.map(|x| _mm256_aesenclast_epi128(x, k.0[ROUNDS]));
        let (pairs, rest) = span.as_chunks_mut::<32>();
        let whole = pairs.len();
        pairs.iter_mut().zip(x).for_each(|(b, x)| store(b, _mm256_xor_si256(load(b), x)));
        if !rest.is_empty() {
            let mut last = [0; 32];
            store(&mut last, x[whole]);
            rest.iter_mut().zip(last).for_each(|(d, s)| *d ^= s);
        }
    }
}
