//! AES-CBC encryption by VAES over 512-bit registers: sixteen lanes of different keys, four per instruction. Fewer
//! lanes go to [`super::vaes`]: each block of a lane waits for the one before it, so the number of lanes in flight
//! decides.

use super::aesni::expand;
use lamassu_format::BlockKey;
use std::arch::x86_64::*;
use zeroize::Zeroize;

/// Lanes in flight.
pub(in crate::kernel) const LANES: usize = 16;
/// Registers in flight, of four lanes each.
const WIDTH: usize = LANES / 4;
/// How far the second half of the lanes is behind the first, in bytes: one cache line. Lanes often are 4096 bytes
/// apart. Sixteen lanes at the same offset in their pages would need sixteen lines of one cache set of twelve ways.
const LAG: usize = 64;
/// Shorter lanes are not worth what it costs to begin and end apart.
pub(in crate::kernel) const LEN_MIN: usize = 16 * LAG;

/// The round keys of four lanes; wiped when dropped.
struct Quad<const N: usize>([__m512i; N]);

impl<const N: usize> Drop for Quad<N> {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl<const N: usize> Quad<N> {
    const fn zero() -> Quad<N> {
        // SAFETY: a vector of integers may hold any bits.
        Quad(unsafe { std::mem::zeroed() })
    }

    #[inline]
    #[target_feature(enable = "avx512f,aes,ssse3")]
    fn set(&mut self, keys: &[BlockKey; 4]) {
        let keys = keys.each_ref().map(|key| expand::<N>(key));
        for (r, k) in self.0.iter_mut().enumerate() {
            *k = four(keys.each_ref().map(|key| key.0[r]));
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn four([a, b, c, d]: [__m128i; 4]) -> __m512i {
    let x = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(a), b);
    _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(x, c), d)
}

type Starts = [[*mut u8; 4]; WIDTH];

/// Encrypts the first [`LANES`] lanes, of one length, at least [`LEN_MIN`] and whole blocks.
#[target_feature(enable = "avx512f,vaes,aes,ssse3")]
pub(in crate::kernel) fn cbc_encrypt<const N: usize>(keys: &[BlockKey], lanes: &mut [&mut [u8]]) {
    let mut k = [const { Quad::<N>::zero() }; WIDTH];
    for (k, keys) in k.iter_mut().zip(keys.as_chunks::<4>().0) {
        k.set(keys);
    }
    let quads = lanes.as_chunks_mut::<4>().0.first_chunk_mut::<WIDTH>().expect("the caller has sixteen lanes");
    let len = quads[0][0].len();
    assert!(len >= LEN_MIN && len.is_multiple_of(16) && quads.as_flattened().iter().all(|l| l.len() == len));
    let starts: Starts = quads.each_mut().map(|quad| quad.each_mut().map(|lane| lane.as_mut_ptr()));
    let mut x = [_mm512_setzero_si512(); WIDTH];
    let mut at = 0;
    // SAFETY: the first half runs from 0 to len; so does the second, LAG behind.
    unsafe {
        while at < LAG {
            x = step::<N, 0, { WIDTH / 2 }>(&k, &starts, x, at);
            at += 16;
        }
        while at < len {
            x = step::<N, 0, WIDTH>(&k, &starts, x, at);
            at += 16;
        }
        while at < len + LAG {
            x = step::<N, { WIDTH / 2 }, WIDTH>(&k, &starts, x, at);
            at += 16;
        }
    }
}

/// Encrypts a block of each lane of the registers `FROM..UNTIL`, after `x`: the block `at` bytes from the start, in the
/// second half [`LAG`] bytes earlier.
///
/// # Safety
/// There are 16 bytes there in every lane concerned, and no other reference to them.
#[inline]
#[target_feature(enable = "avx512f,vaes")]
unsafe fn step<const N: usize, const FROM: usize, const UNTIL: usize>(
    k: &[Quad<N>; WIDTH],
    starts: &Starts,
    mut x: [__m512i; WIDTH],
    at: usize,
) -> [__m512i; WIDTH] {
    let place = |p: usize| if p < WIDTH / 2 { at } else { at - LAG };
    for p in FROM..UNTIL {
        // SAFETY: the caller's promise; the loads ask for no alignment.
        let plain = four(starts[p].map(|start| unsafe { _mm_loadu_si128(start.add(place(p)).cast()) }));
        x[p] = _mm512_ternarylogic_epi32::<0x96>(plain, k[p].0[0], x[p]);
    }
    for r in 1..N - 1 {
        for p in FROM..UNTIL {
            x[p] = _mm512_aesenc_epi128(x[p], k[p].0[r]);
        }
    }
    for p in FROM..UNTIL {
        x[p] = _mm512_aesenclast_epi128(x[p], k[p].0[N - 1]);
        // SAFETY: the caller's promise; the stores ask for no alignment.
        unsafe {
            _mm_storeu_si128(starts[p][0].add(place(p)).cast(), _mm512_castsi512_si128(x[p]));
            _mm_storeu_si128(starts[p][1].add(place(p)).cast(), _mm512_extracti32x4_epi32::<1>(x[p]));
            _mm_storeu_si128(starts[p][2].add(place(p)).cast(), _mm512_extracti32x4_epi32::<2>(x[p]));
            _mm_storeu_si128(starts[p][3].add(place(p)).cast(), _mm512_extracti32x4_epi32::<3>(x[p]));
        }
    }
    x
}
