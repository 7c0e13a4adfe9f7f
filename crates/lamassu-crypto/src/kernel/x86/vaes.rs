//! AES by VAES over 256-bit registers: two blocks per instruction. CBC encryption takes eight or four lanes of
//! different keys; the rest has sixteen blocks in flight. What remains goes to AES-NI.

use super::aesni::{self, Schedule, expand, expand_inverse};
use lamassu_format::BlockKey;
use std::arch::x86_64::*;
use zeroize::Zeroize;

/// Registers in flight.
const WIDTH: usize = 8;
/// Bytes in flight.
const SPAN: usize = WIDTH * 32;

/// The round keys of two lanes; wiped when dropped.
struct Pair<const N: usize>([__m256i; N]);

impl<const N: usize> Drop for Pair<N> {
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

impl<const N: usize> Pair<N> {
    const fn zero() -> Pair<N> {
        // SAFETY: a vector of integers may hold any bits.
        Pair(unsafe { std::mem::zeroed() })
    }

    #[inline]
    #[target_feature(enable = "avx2,aes,ssse3")]
    fn set(&mut self, a: &BlockKey, b: &BlockKey) {
        let (a, b) = (expand::<N>(a), expand::<N>(b));
        for r in 0..N {
            self.0[r] = _mm256_set_m128i(b.0[r], a.0[r]);
        }
    }

    /// One key in both halves.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn broadcast(k: &Schedule<N>) -> Pair<N> {
        let mut pair = Pair::zero();
        for r in 0..N {
            pair.0[r] = _mm256_broadcastsi128_si256(k.0[r]);
        }
        pair
    }
}

#[target_feature(enable = "avx2,vaes,aes,ssse3")]
pub(in crate::kernel) fn cbc_encrypt<const N: usize>(mut keys: &[BlockKey], mut lanes: &mut [&mut [u8]]) {
    // Eight lanes fill the unit; sixteen, 4096 bytes apart, would fall out of a 12-way cache (measured: half as fast).
    while lanes.len() >= 8 {
        let width = cbc_encrypt_pairs::<N, 4>(keys, lanes);
        keys = &keys[width..];
        lanes = &mut lanes[width..];
    }
    if lanes.len() >= 4 {
        let width = cbc_encrypt_pairs::<N, 2>(keys, lanes);
        keys = &keys[width..];
        lanes = &mut lanes[width..];
    }
    aesni::cbc_encrypt::<N>(keys, lanes);
}

/// Encrypts the first 2·P lanes, of one length; returns how many they are.
#[target_feature(enable = "avx2,vaes,aes,ssse3")]
fn cbc_encrypt_pairs<const N: usize, const P: usize>(keys: &[BlockKey], lanes: &mut [&mut [u8]]) -> usize {
    let mut k = [const { Pair::<N>::zero() }; P];
    for (k, keys) in k.iter_mut().zip(keys.as_chunks::<2>().0) {
        k.set(&keys[0], &keys[1]);
    }
    let pairs = lanes.as_chunks_mut::<2>().0.first_chunk_mut::<P>().expect("the caller has 2P lanes");
    let len = pairs[0][0].len() / 16 * 16;
    assert!(pairs.as_flattened().iter().all(|l| l.len() >= len));
    let starts = pairs.each_mut().map(|[a, b]| [a.as_mut_ptr(), b.as_mut_ptr()]);
    let mut x = [_mm256_setzero_si256(); P];
    for at in (0..len).step_by(16) {
        for p in 0..P {
            // SAFETY: at + 16 <= len, and every lane is at least len bytes long.
            let plain = unsafe { load_two(starts[p], at) };
            x[p] = _mm256_xor_si256(_mm256_xor_si256(plain, k[p].0[0]), x[p]);
        }
        for r in 1..N - 1 {
            for p in 0..P {
                x[p] = _mm256_aesenc_epi128(x[p], k[p].0[r]);
            }
        }
        for p in 0..P {
            x[p] = _mm256_aesenclast_epi128(x[p], k[p].0[N - 1]);
            // SAFETY: as above; the lanes are distinct and borrowed mutably.
            unsafe { store_two(starts[p], at, x[p]) };
        }
    }
    2 * P
}

/// # Safety
/// 16 bytes at `at` of both lanes are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_two(lanes: [*mut u8; 2], at: usize) -> __m256i {
    // SAFETY: the caller's promise; the loads ask for no alignment.
    let (a, b) = unsafe { (_mm_loadu_si128(lanes[0].add(at).cast()), _mm_loadu_si128(lanes[1].add(at).cast())) };
    _mm256_set_m128i(b, a)
}

/// # Safety
/// 16 bytes at `at` of both lanes are writable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store_two(lanes: [*mut u8; 2], at: usize, x: __m256i) {
    // SAFETY: the caller's promise; the stores ask for no alignment.
    unsafe {
        _mm_storeu_si128(lanes[0].add(at).cast(), _mm256_castsi256_si128(x));
        _mm_storeu_si128(lanes[1].add(at).cast(), _mm256_extracti128_si256::<1>(x));
    }
}

#[target_feature(enable = "avx2,vaes,aes,ssse3")]
pub(in crate::kernel) fn cbc_decrypt<const N: usize>(key: &BlockKey, data: &mut [u8]) {
    let k = Pair::broadcast(&expand_inverse::<N>(key));
    let mut previous = _mm_setzero_si128();
    let (wide, rest) = data.as_chunks_mut::<SPAN>();
    for span in wide {
        let pairs = span.as_chunks::<32>().0;
        let mut x = [_mm256_setzero_si256(); WIDTH];
        for (x, b) in x.iter_mut().zip(pairs.iter()) {
            *x = _mm256_xor_si256(load(b), k.0[0]);
        }
        for r in 1..N - 1 {
            for x in &mut x {
                *x = _mm256_aesdec_epi128(*x, k.0[r]);
            }
        }
        let last = _mm256_extracti128_si256::<1>(load(&pairs[WIDTH - 1]));
        // From the end, so that the ciphertext before each register is still there.
        for p in (1..WIDTH).rev() {
            let before = load(span[32 * p - 16..].first_chunk().expect("a span goes on past its second half"));
            let plain = _mm256_xor_si256(_mm256_aesdeclast_epi128(x[p], k.0[N - 1]), before);
            store(span[32 * p..].first_chunk_mut().expect("a span is WIDTH registers"), plain);
        }
        let first = span.first_chunk_mut().expect("a span is WIDTH registers");
        let before = _mm256_set_m128i(_mm256_castsi256_si128(load(first)), previous);
        store(first, _mm256_xor_si256(_mm256_aesdeclast_epi128(x[0], k.0[N - 1]), before));
        previous = last;
    }
    aesni::cbc_decrypt_from::<N>(key, previous, rest);
}

/// `data` is less than 2³² cipher blocks.
#[target_feature(enable = "avx2,vaes,aes,ssse3")]
pub(in crate::kernel) fn ctr<const N: usize>(key: &BlockKey, data: &mut [u8]) {
    let k = Pair::broadcast(&expand::<N>(key));
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
        for r in 1..N - 1 {
            for x in &mut x {
                *x = _mm256_aesenc_epi128(*x, k.0[r]);
            }
        }
        for x in &mut x {
            *x = _mm256_aesenclast_epi128(*x, k.0[N - 1]);
        }
        let (pairs, rest) = span.as_chunks_mut::<32>();
        let whole = pairs.len();
        for (b, x) in pairs.iter_mut().zip(x) {
            store(b, _mm256_xor_si256(load(b), x));
        }
        if !rest.is_empty() {
            let mut last = [0; 32];
            store(&mut last, x[whole]);
            rest.iter_mut().zip(last).for_each(|(d, s)| *d ^= s);
        }
    }
}
