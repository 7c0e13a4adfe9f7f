//! SHA-256 of sixteen messages at once by AVX-512: word t of every message in one register. No state waits for another instruction's latency, and a
//! rotation and a three-input function are one instruction each.

use crate::kernel::sha256::K;
use std::arch::x86_64::*;

/// Messages at once.
pub(in crate::kernel) const LANES: usize = 16;

sha256_of_lanes!("avx512f,avx512bw", _mm512_setzero_si512, _mm512_set1_epi32, _mm512_storeu_si512);

/// One round. The caller renames the words instead of moving them.
macro_rules! round {
    ($a:ident $b:ident $c:ident $d:ident $e:ident $f:ident $g:ident $h:ident, $w:expr, $k:expr) => {
        let s1 = xor3(_mm512_ror_epi32::<6>($e), _mm512_ror_epi32::<11>($e), _mm512_ror_epi32::<25>($e));
        // Truth tables of ternary logic: choose is e ? f : g; majority of a, b, c.
        let choose = _mm512_ternarylogic_epi32::<0xca>($e, $f, $g);
        let wk = add($w, _mm512_set1_epi32($k.cast_signed()));
        let t1 = add(add($h, wk), add(s1, choose));
        let s0 = xor3(_mm512_ror_epi32::<2>($a), _mm512_ror_epi32::<13>($a), _mm512_ror_epi32::<22>($a));
        let majority = _mm512_ternarylogic_epi32::<0xe8>($a, $b, $c);
        $d = add($d, t1);
        $h = add(t1, add(s0, majority));
    };
}

/// Sixteen rounds, spelt out: with the words in an array that a loop indexes, the compiler keeps them in memory. `$each` is done to `$w` and t after round t.
macro_rules! sixteen_rounds {
    ($a:ident $b:ident $c:ident $d:ident $e:ident $f:ident $g:ident $h:ident, $w:ident, $k:expr, $each:ident) => {
        sixteen_rounds!(@eight $a $b $c $d $e $f $g $h, $w, $k, $each, 0 1 2 3 4 5 6 7);
        sixteen_rounds!(@eight $a $b $c $d $e $f $g $h, $w, $k, $each, 8 9 10 11 12 13 14 15);
    };
    (@eight $a:ident $b:ident $c:ident $d:ident $e:ident $f:ident $g:ident $h:ident, $w:ident, $k:expr, $each:ident,
     $t0:literal $t1:literal $t2:literal $t3:literal $t4:literal $t5:literal $t6:literal $t7:literal) => {
        round!($a $b $c $d $e $f $g $h, $w[$t0], $k[$t0]);
        $each!($w, $t0);
        round!($h $a $b $c $d $e $f $g, $w[$t1], $k[$t1]);
        $each!($w, $t1);
        round!($g $h $a $b $c $d $e $f, $w[$t2], $k[$t2]);
        $each!($w, $t2);
        round!($f $g $h $a $b $c $d $e, $w[$t3], $k[$t3]);
        $each!($w, $t3);
        round!($e $f $g $h $a $b $c $d, $w[$t4], $k[$t4]);
        $each!($w, $t4);
        round!($d $e $f $g $h $a $b $c, $w[$t5], $k[$t5]);
        $each!($w, $t5);
        round!($c $d $e $f $g $h $a $b, $w[$t6], $k[$t6]);
        $each!($w, $t6);
        round!($b $c $d $e $f $g $h $a, $w[$t7], $k[$t7]);
        $each!($w, $t7);
    };
}

/// Word t + 16 of the message schedule in the place of word t. Between the rounds, because it is mostly rotations, which one of the two ports takes:
/// alone it would leave the other idle.
macro_rules! extend {
    ($w:ident, $t:literal) => {
        let (x, y) = ($w[($t + 1) % 16], $w[($t + 14) % 16]);
        let s0 = xor3(_mm512_ror_epi32::<7>(x), _mm512_ror_epi32::<18>(x), _mm512_srli_epi32::<3>(x));
        let s1 = xor3(_mm512_ror_epi32::<17>(y), _mm512_ror_epi32::<19>(y), _mm512_srli_epi32::<10>(y));
        $w[$t] = add(add($w[$t], s0), add($w[($t + 9) % 16], s1));
    };
}

/// After the last rounds no words are needed.
macro_rules! nothing {
    ($w:ident, $t:literal) => {};
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn compress(state: &mut [__m512i; 8], mut w: [__m512i; LANES]) {
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    let (k, _) = K.as_chunks::<16>();
    for k in &k[..3] {
        sixteen_rounds!(a b c d e f g h, w, k, extend);
    }
    sixteen_rounds!(a b c d e f g h, w, k[3], nothing);
    let [sa, sb, sc, sd, se, sf, sg, sh] = *state;
    *state = [add(sa, a), add(sb, b), add(sc, c), add(sd, d), add(se, e), add(sf, f), add(sg, g), add(sh, h)];
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
