//! SHA-256's rounds over lanes by AVX-512, for one register width: the module that uses the macro names the
//! instructions of that width. No state waits for the latency of another instruction; a rotation and a three-input
//! function are one instruction each.

/// Truth tables of ternary logic: the XOR of all three; a ? b : c; what two or three agree on.
pub(super) const XOR: i32 = 0x96;
pub(super) const CHOOSE: i32 = 0xca;
pub(super) const MAJORITY: i32 = 0xe8;

/// One round. The caller renames the words instead of moving them.
macro_rules! round {
    ($a:ident $b:ident $c:ident $d:ident $e:ident $f:ident $g:ident $h:ident, $w:expr, $k:expr) => {
        let s1 = logic::<XOR>(ror::<6>($e), ror::<11>($e), ror::<25>($e));
        let wk = add($w, each($k.cast_signed()));
        let t1 = add(add($h, wk), add(s1, logic::<CHOOSE>($e, $f, $g)));
        let s0 = logic::<XOR>(ror::<2>($a), ror::<13>($a), ror::<22>($a));
        let majority = logic::<MAJORITY>($a, $b, $c);
        $d = add($d, t1);
        $h = add(t1, add(s0, majority));
    };
}

/// Sixteen rounds, unrolled: the compiler keeps an array that a loop indexes in memory. `$each` is done to `$w` and t
/// after round t.
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

/// Word t + 16 of the message schedule, in place of word t. It is computed between the rounds, because it is mostly
/// rotations, which only some ports take: by itself it would leave the other ports idle.
macro_rules! extend {
    ($w:ident, $t:literal) => {
        let (x, y) = ($w[($t + 1) % 16], $w[($t + 14) % 16]);
        let s0 = logic::<XOR>(ror::<7>(x), ror::<18>(x), shr_3(x));
        let s1 = logic::<XOR>(ror::<17>(y), ror::<19>(y), shr_10(y));
        $w[$t] = add(add($w[$t], s0), add($w[($t + 9) % 16], s1));
    };
}

/// After the last rounds no words are needed.
macro_rules! nothing {
    ($w:ident, $t:literal) => {};
}

/// `compress` of a module for one width of register.
macro_rules! compress_of_lanes {
    ($features:literal, $register:ty, $each:ident, $add:ident, $ror:ident, $shr:ident, $logic:ident) => {
        use crate::kernel::sha256::K;
        use crate::kernel::x86::rounds::{CHOOSE, MAJORITY, XOR};

        #[inline]
        #[target_feature(enable = $features)]
        fn compress(state: &mut [$register; 8], mut w: [$register; 16]) {
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
        #[target_feature(enable = $features)]
        fn each(word: i32) -> $register {
            $each(word)
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn add(a: $register, b: $register) -> $register {
            $add(a, b)
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn ror<const N: i32>(x: $register) -> $register {
            $ror::<N>(x)
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn shr_3(x: $register) -> $register {
            $shr::<3>(x)
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn shr_10(x: $register) -> $register {
            $shr::<10>(x)
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn logic<const TABLE: i32>(a: $register, b: $register, c: $register) -> $register {
            $logic::<TABLE>(a, b, c)
        }
    };
}
