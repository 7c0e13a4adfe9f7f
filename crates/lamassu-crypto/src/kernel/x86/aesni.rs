//! AES by AES-NI: eight lanes of different keys for CBC encryption, eight blocks in flight for the rest.
//!
//! An AESENC takes several cycles and one can start every cycle or half cycle: a single CBC stream leaves most of the
//! unit idle.

use crate::kernel::aes::{RoundKeys, key_len};
use lamassu_format::BlockKey;
use std::arch::x86_64::*;
use zeroize::Zeroize;

/// Lanes, or blocks, in flight.
const WIDTH: usize = 8;

/// Round keys as the instructions take them; wiped when dropped.
pub(super) struct Schedule<const N: usize>(pub(super) [__m128i; N]);

impl<const N: usize> Schedule<N> {
    const fn zero() -> Schedule<N> {
        // SAFETY: a vector of integers may hold any bits.
        Schedule(unsafe { std::mem::zeroed() })
    }
}

impl<const N: usize> Drop for Schedule<N> {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

#[inline]
#[target_feature(enable = "sse2")]
pub(super) fn load(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: 16 readable bytes; the load asks for no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "sse2")]
pub(super) fn store(bytes: &mut [u8; 16], x: __m128i) {
    // SAFETY: 16 writable bytes; the store asks for no alignment.
    unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), x) }
}

/// The key schedule. AESENCLAST on a register of four equal columns is SubWord of each, since ShiftRows then moves
/// nothing. It is faster than AESKEYGENASSIST. The rotation and the broadcast are one shuffle.
#[inline]
#[target_feature(enable = "aes,sse2,ssse3")]
pub(super) fn expand<const N: usize>(key: &BlockKey) -> Schedule<N> {
    // A register holds four words: every round key of AES-128 begins with a rotated word, every other of AES-256.
    let stride = key_len(N) / 16;
    let rotated = _mm_set1_epi32(0x0c0f_0e0d);
    let plain = _mm_set1_epi32(0x0f0e_0d0c);
    let mut k = Schedule::zero();
    for (k, bytes) in k.0.iter_mut().zip(&key.as_chunks::<16>().0[..stride]) {
        *k = load(bytes);
    }
    let mut rcon = _mm_set1_epi32(1);
    for i in stride..N {
        let subbed = if i % stride == 0 {
            let word = _mm_aesenclast_si128(_mm_shuffle_epi8(k.0[i - 1], rotated), rcon);
            // Doubled in GF(2⁸); AES-256 does not come that far.
            rcon = if i == 8 * stride { _mm_set1_epi32(0x1b) } else { _mm_slli_epi32::<1>(rcon) };
            word
        } else {
            _mm_aesenclast_si128(_mm_shuffle_epi8(k.0[i - 1], plain), _mm_setzero_si128())
        };
        // w[4] = w[0] ^ t, w[5] = w[1] ^ w[4], …: the running XOR of the four words.
        let mut x = k.0[i - stride];
        x = _mm_xor_si128(x, _mm_slli_si128::<4>(x));
        x = _mm_xor_si128(x, _mm_slli_si128::<8>(x));
        k.0[i] = _mm_xor_si128(x, subbed);
    }
    k
}

/// The same keys for the equivalent inverse cipher (FIPS 197 §5.3.5), in order of use.
#[inline]
#[target_feature(enable = "aes,sse2,ssse3")]
pub(super) fn expand_inverse<const N: usize>(key: &BlockKey) -> Schedule<N> {
    let mut k = expand::<N>(key);
    k.0.reverse();
    for x in &mut k.0[1..N - 1] {
        *x = _mm_aesimc_si128(*x);
    }
    k
}

#[inline]
#[target_feature(enable = "aes,sse2")]
fn encrypt<const N: usize, const W: usize>(x: &mut [__m128i; W], k: &Schedule<N>) {
    for x in x.iter_mut() {
        *x = _mm_xor_si128(*x, k.0[0]);
    }
    for r in 1..N - 1 {
        for x in x.iter_mut() {
            *x = _mm_aesenc_si128(*x, k.0[r]);
        }
    }
    for x in x.iter_mut() {
        *x = _mm_aesenclast_si128(*x, k.0[N - 1]);
    }
}

#[inline]
#[target_feature(enable = "aes,sse2")]
fn decrypt<const N: usize, const W: usize>(x: &mut [__m128i; W], k: &Schedule<N>) {
    for x in x.iter_mut() {
        *x = _mm_xor_si128(*x, k.0[0]);
    }
    for r in 1..N - 1 {
        for x in x.iter_mut() {
            *x = _mm_aesdec_si128(*x, k.0[r]);
        }
    }
    for x in x.iter_mut() {
        *x = _mm_aesdeclast_si128(*x, k.0[N - 1]);
    }
}

#[inline]
#[target_feature(enable = "sse2")]
fn load_all<const N: usize>(blocks: &[[u8; 16]; N]) -> [__m128i; N] {
    let mut x = [_mm_setzero_si128(); N];
    for (x, b) in x.iter_mut().zip(blocks) {
        *x = load(b);
    }
    x
}

#[target_feature(enable = "aes,sse2,ssse3")]
pub(in crate::kernel) fn ecb_encrypt<const N: usize>(keys: &RoundKeys<N>, blocks: &mut [[u8; 16]]) {
    let k = Schedule(load_all(&keys.0));
    let (wide, rest) = blocks.as_chunks_mut::<WIDTH>();
    for group in wide {
        let mut x = load_all(group);
        encrypt(&mut x, &k);
        for (b, x) in group.iter_mut().zip(x) {
            store(b, x);
        }
    }
    for b in rest {
        let mut x = [load(b)];
        encrypt(&mut x, &k);
        store(b, x[0]);
    }
}

#[target_feature(enable = "aes,sse2,ssse3")]
pub(in crate::kernel) fn cbc_encrypt<const N: usize>(mut keys: &[BlockKey], mut lanes: &mut [&mut [u8]]) {
    while !lanes.is_empty() {
        let width = match lanes.len() {
            WIDTH.. => cbc_encrypt_lanes::<N, WIDTH>(keys, lanes),
            4.. => cbc_encrypt_lanes::<N, 4>(keys, lanes),
            2.. => cbc_encrypt_lanes::<N, 2>(keys, lanes),
            _ => cbc_encrypt_lanes::<N, 1>(keys, lanes),
        };
        keys = &keys[width..];
        lanes = &mut lanes[width..];
    }
}

/// Encrypts the first W lanes, of one length; returns W.
#[target_feature(enable = "aes,sse2,ssse3")]
fn cbc_encrypt_lanes<const N: usize, const W: usize>(keys: &[BlockKey], lanes: &mut [&mut [u8]]) -> usize {
    let mut k = [const { Schedule::<N>::zero() }; W];
    for (k, key) in k.iter_mut().zip(keys) {
        *k = expand(key);
    }
    let lanes = lanes.first_chunk_mut::<W>().expect("the caller has W lanes");
    let len = lanes[0].len() / 16 * 16;
    assert!(lanes.iter().all(|l| l.len() >= len));
    let starts = lanes.each_mut().map(|l| l.as_mut_ptr());
    let mut x = [_mm_setzero_si128(); W];
    for at in (0..len).step_by(16) {
        for l in 0..W {
            // SAFETY: at + 16 <= len, and every lane is at least len bytes long; the load asks for no alignment.
            let plain = unsafe { _mm_loadu_si128(starts[l].add(at).cast()) };
            x[l] = _mm_xor_si128(_mm_xor_si128(plain, k[l].0[0]), x[l]);
        }
        for r in 1..N - 1 {
            for l in 0..W {
                x[l] = _mm_aesenc_si128(x[l], k[l].0[r]);
            }
        }
        for l in 0..W {
            x[l] = _mm_aesenclast_si128(x[l], k[l].0[N - 1]);
            // SAFETY: as above; the lanes are distinct and borrowed mutably.
            unsafe { _mm_storeu_si128(starts[l].add(at).cast(), x[l]) };
        }
    }
    W
}

#[target_feature(enable = "aes,sse2,ssse3")]
pub(in crate::kernel) fn cbc_decrypt<const N: usize>(key: &BlockKey, data: &mut [u8]) {
    cbc_decrypt_from::<N>(key, _mm_setzero_si128(), data);
}

/// The same with a ciphertext block before.
#[inline]
#[target_feature(enable = "aes,sse2,ssse3")]
pub(super) fn cbc_decrypt_from<const N: usize>(key: &BlockKey, mut previous: __m128i, data: &mut [u8]) {
    if data.is_empty() {
        return;
    }
    let k = expand_inverse::<N>(key);
    let (wide, rest) = data.as_chunks_mut::<16>().0.as_chunks_mut::<WIDTH>();
    for group in wide {
        let cipher = load_all(group);
        let mut x = cipher;
        decrypt(&mut x, &k);
        for ((b, x), c) in group.iter_mut().zip(x).zip(cipher) {
            store(b, _mm_xor_si128(x, previous));
            previous = c;
        }
    }
    for b in rest {
        let cipher = load(b);
        let mut x = [cipher];
        decrypt(&mut x, &k);
        store(b, _mm_xor_si128(x[0], previous));
        previous = cipher;
    }
}

/// `data` is less than 2³² cipher blocks.
#[target_feature(enable = "aes,sse2,ssse3")]
pub(in crate::kernel) fn ctr<const N: usize>(key: &BlockKey, data: &mut [u8]) {
    let k = expand::<N>(key);
    // The counter is kept little-endian in the last word and turned for use.
    let turn = _mm_set_epi8(12, 13, 14, 15, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    let one = _mm_set_epi32(1, 0, 0, 0);
    let mut counter = _mm_setzero_si128();
    for group in data.chunks_mut(16 * WIDTH) {
        let mut x = [_mm_setzero_si128(); WIDTH];
        for x in &mut x {
            *x = _mm_shuffle_epi8(counter, turn);
            counter = _mm_add_epi32(counter, one);
        }
        encrypt(&mut x, &k);
        xor_stream(group, &x);
    }
}

/// XORs a keystream into data that may end inside it.
#[inline]
#[target_feature(enable = "sse2")]
fn xor_stream<const N: usize>(data: &mut [u8], stream: &[__m128i; N]) {
    let (blocks, rest) = data.as_chunks_mut::<16>();
    let whole = blocks.len();
    for (b, s) in blocks.iter_mut().zip(stream) {
        store(b, _mm_xor_si128(load(b), *s));
    }
    if !rest.is_empty() {
        let mut last = [0; 16];
        store(&mut last, stream[whole]);
        rest.iter_mut().zip(last).for_each(|(d, s)| *d ^= s);
    }
}
