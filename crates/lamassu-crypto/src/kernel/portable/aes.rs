//! AES bitsliced over four blocks at a time: no table, no branch on a secret. The four blocks may have four keys.
//!
//! The representation (eight 64-bit words, one for each bit of a byte) and the linear layers follow BearSSL's
//! `aes_ct64` by Thomas Pornin (MIT licence). The S-box is the circuit of Boyar and Peralta ("A depth-16 circuit for
//! the AES S-box", 2011).

use lamassu_format::BlockKey;
use zeroize::Zeroizing;

use crate::kernel::aes::{RoundKeys, key_len, key_of};

/// Four blocks, bitsliced.
type Sliced = [u64; 8];
/// The round keys of four lanes, bitsliced.
type SlicedKeys<const N: usize> = Zeroizing<[Sliced; N]>;
const LANES: usize = 4;

/// The key schedule of FIPS 197 §5.2.
pub(in crate::kernel) fn expand<const N: usize>(key: &BlockKey) -> RoundKeys<N> {
    let nk = key_len(N) / 4;
    let mut words = Zeroizing::new([[0u32; 4]; N]);
    let w = words.as_flattened_mut();
    for (w, bytes) in w.iter_mut().zip(key_of::<N>(key).as_chunks::<4>().0) {
        *w = u32::from_le_bytes(*bytes);
    }
    let mut rcon = 1;
    for i in nk..w.len() {
        let mut x = w[i - 1];
        if i % nk == 0 {
            x = sub_word(x.rotate_right(8)) ^ rcon;
            // Doubled in GF(2⁸).
            rcon = if rcon == 0x80 { 0x1b } else { rcon << 1 };
        } else if nk > 6 && i % nk == 4 {
            x = sub_word(x);
        }
        w[i] = w[i - nk] ^ x;
    }
    let mut keys = RoundKeys([[0; 16]; N]);
    for (bytes, w) in keys.0.as_flattened_mut().as_chunks_mut::<4>().0.iter_mut().zip(w.iter()) {
        *bytes = w.to_le_bytes();
    }
    keys
}

pub(in crate::kernel) fn ecb_encrypt<const N: usize>(keys: &RoundKeys<N>, blocks: &mut [[u8; 16]]) {
    let sliced = slice_keys(&[keys; LANES]);
    for group in blocks.chunks_mut(LANES) {
        let mut four = [[0; 16]; LANES];
        four[..group.len()].copy_from_slice(group);
        encrypt(&sliced, &mut four);
        group.copy_from_slice(&four[..group.len()]);
    }
}

pub(in crate::kernel) fn cbc_encrypt<const N: usize>(keys: &[BlockKey], lanes: &mut [&mut [u8]]) {
    for (keys, lanes) in keys.chunks(LANES).zip(lanes.chunks_mut(LANES)) {
        let expanded: [RoundKeys<N>; LANES] = std::array::from_fn(|l| expand(&keys[l.min(keys.len() - 1)]));
        let sliced = slice_keys(&expanded.each_ref());
        let len = lanes[0].len();
        let mut chain = [[0u8; 16]; LANES];
        for at in (0..len).step_by(16) {
            for (c, lane) in chain.iter_mut().zip(lanes.iter()) {
                c.iter_mut().zip(&lane[at..at + 16]).for_each(|(c, p)| *c ^= p);
            }
            encrypt(&sliced, &mut chain);
            for (c, lane) in chain.iter().zip(lanes.iter_mut()) {
                lane[at..at + 16].copy_from_slice(c);
            }
        }
    }
}

pub(in crate::kernel) fn cbc_decrypt<const N: usize>(key: &BlockKey, data: &mut [u8]) {
    let keys = expand::<N>(key);
    let sliced = slice_keys(&[&keys; LANES]);
    let mut previous = [0u8; 16];
    for group in data.as_chunks_mut::<16>().0.chunks_mut(LANES) {
        let mut four = [[0; 16]; LANES];
        four[..group.len()].copy_from_slice(group);
        decrypt(&sliced, &mut four);
        for (block, plain) in group.iter_mut().zip(&four) {
            let cipher = *block;
            *block = std::array::from_fn(|i| plain[i] ^ previous[i]);
            previous = cipher;
        }
    }
}

pub(in crate::kernel) fn ctr<const N: usize>(key: &BlockKey, data: &mut [u8]) {
    let keys = expand::<N>(key);
    let sliced = slice_keys(&[&keys; LANES]);
    for (n, group) in data.chunks_mut(16 * LANES).enumerate() {
        let mut stream: [[u8; 16]; LANES] = std::array::from_fn(|l| ((n * LANES + l) as u128).to_be_bytes());
        encrypt(&sliced, &mut stream);
        group.iter_mut().zip(stream.as_flattened()).for_each(|(d, s)| *d ^= s);
    }
}

fn encrypt<const N: usize>(keys: &SlicedKeys<N>, blocks: &mut [[u8; 16]; LANES]) {
    let mut q = slice(blocks);
    add(&mut q, &keys[0]);
    for key in &keys[1..N - 1] {
        sub_bytes(&mut q);
        q = q.map(shift_rows);
        mix_columns(&mut q);
        add(&mut q, key);
    }
    sub_bytes(&mut q);
    q = q.map(shift_rows);
    add(&mut q, &keys[N - 1]);
    unslice(q, blocks);
}

fn decrypt<const N: usize>(keys: &SlicedKeys<N>, blocks: &mut [[u8; 16]; LANES]) {
    let mut q = slice(blocks);
    add(&mut q, &keys[N - 1]);
    for key in keys[1..N - 1].iter().rev() {
        q = q.map(inverse_shift_rows);
        inverse_sub_bytes(&mut q);
        add(&mut q, key);
        // MixColumns has order four: its cube is its inverse.
        mix_columns(&mut q);
        mix_columns(&mut q);
        mix_columns(&mut q);
    }
    q = q.map(inverse_shift_rows);
    inverse_sub_bytes(&mut q);
    add(&mut q, &keys[0]);
    unslice(q, blocks);
}

fn slice_keys<const N: usize>(lanes: &[&RoundKeys<N>; LANES]) -> SlicedKeys<N> {
    let mut sliced = Zeroizing::new([[0; 8]; N]);
    for (round, out) in sliced.iter_mut().enumerate() {
        *out = slice(&lanes.map(|l| l.0[round]));
    }
    sliced
}

fn add(q: &mut Sliced, key: &Sliced) {
    q.iter_mut().zip(key).for_each(|(q, k)| *q ^= k);
}

fn slice(blocks: &[[u8; 16]; LANES]) -> Sliced {
    let mut q = [0; 8];
    for (i, block) in blocks.iter().enumerate() {
        let spread = |at: usize| {
            let mut x = u64::from(u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]));
            x = (x | (x << 16)) & 0x0000_ffff_0000_ffff;
            (x | (x << 8)) & 0x00ff_00ff_00ff_00ff
        };
        q[i] = spread(0) | (spread(8) << 8);
        q[i + 4] = spread(4) | (spread(12) << 8);
    }
    orthogonalise(&mut q);
    q
}

fn unslice(mut q: Sliced, blocks: &mut [[u8; 16]; LANES]) {
    orthogonalise(&mut q);
    for (i, block) in blocks.iter_mut().enumerate() {
        let gather = |x: u64| {
            let mut x = x & 0x00ff_00ff_00ff_00ff;
            x = (x | (x >> 8)) & 0x0000_ffff_0000_ffff;
            ((x | (x >> 16)) as u32).to_le_bytes()
        };
        let words = [gather(q[i]), gather(q[i + 4]), gather(q[i] >> 8), gather(q[i + 4] >> 8)];
        block.copy_from_slice(words.as_flattened());
    }
}

/// Transposes eight rows of eight bits, in each byte lane. Its own inverse.
fn orthogonalise(q: &mut Sliced) {
    for (distance, low) in [(1, 0x5555_5555_5555_5555), (2, 0x3333_3333_3333_3333), (4, 0x0f0f_0f0f_0f0f_0f0f)] {
        for i in (0..8).filter(|i| i & distance == 0) {
            let (a, b) = (q[i], q[i + distance]);
            q[i] = (a & low) | ((b & low) << distance);
            q[i + distance] = ((a & !low) >> distance) | (b & !low);
        }
    }
}

fn sub_word(word: u32) -> u32 {
    let mut q = [u64::from(word), 0, 0, 0, 0, 0, 0, 0];
    orthogonalise(&mut q);
    sub_bytes(&mut q);
    orthogonalise(&mut q);
    q[0] as u32
}

fn shift_rows(x: u64) -> u64 {
    (x & 0x0000_0000_0000_ffff)
        | ((x & 0x0000_0000_fff0_0000) >> 4)
        | ((x & 0x0000_0000_000f_0000) << 12)
        | ((x & 0x0000_ff00_0000_0000) >> 8)
        | ((x & 0x0000_00ff_0000_0000) << 8)
        | ((x & 0xf000_0000_0000_0000) >> 12)
        | ((x & 0x0fff_0000_0000_0000) << 4)
}

fn inverse_shift_rows(x: u64) -> u64 {
    (x & 0x0000_0000_0000_ffff)
        | ((x & 0x0000_0000_0fff_0000) << 4)
        | ((x & 0x0000_0000_f000_0000) >> 12)
        | ((x & 0x0000_00ff_0000_0000) << 8)
        | ((x & 0x0000_ff00_0000_0000) >> 8)
        | ((x & 0x000f_0000_0000_0000) << 12)
        | ((x & 0xfff0_0000_0000_0000) >> 4)
}

fn mix_columns(q: &mut Sliced) {
    let [q0, q1, q2, q3, q4, q5, q6, q7] = *q;
    let [r0, r1, r2, r3, r4, r5, r6, r7] = q.map(|x| x.rotate_right(16));
    *q = [
        q7 ^ r7 ^ r0 ^ (q0 ^ r0).rotate_right(32),
        q0 ^ r0 ^ q7 ^ r7 ^ r1 ^ (q1 ^ r1).rotate_right(32),
        q1 ^ r1 ^ r2 ^ (q2 ^ r2).rotate_right(32),
        q2 ^ r2 ^ q7 ^ r7 ^ r3 ^ (q3 ^ r3).rotate_right(32),
        q3 ^ r3 ^ q7 ^ r7 ^ r4 ^ (q4 ^ r4).rotate_right(32),
        q4 ^ r4 ^ r5 ^ (q5 ^ r5).rotate_right(32),
        q5 ^ r5 ^ r6 ^ (q6 ^ r6).rotate_right(32),
        q6 ^ r6 ^ r7 ^ (q7 ^ r7).rotate_right(32),
    ];
}

/// The inverse S-box is the S-box between two copies of the inverse of its affine map.
fn inverse_sub_bytes(q: &mut Sliced) {
    let affine = |q: &mut Sliced| {
        let [q0, q1, q2, q3, q4, q5, q6, q7] = [!q[0], !q[1], q[2], q[3], q[4], !q[5], !q[6], q[7]];
        *q = [
            q2 ^ q5 ^ q7,
            q3 ^ q6 ^ q0,
            q4 ^ q7 ^ q1,
            q5 ^ q0 ^ q2,
            q6 ^ q1 ^ q3,
            q7 ^ q2 ^ q4,
            q0 ^ q3 ^ q5,
            q1 ^ q4 ^ q6,
        ];
    };
    affine(q);
    sub_bytes(q);
    affine(q);
}

/// The S-box as a circuit; names as in the paper. `q[0]` is bit 0, the paper's x7.
fn sub_bytes(q: &mut Sliced) {
    let [x7, x6, x5, x4, x3, x2, x1, x0] = *q;
    // Top linear transformation.
    let (y14, y13, y9, y8) = (x3 ^ x5, x0 ^ x6, x0 ^ x3, x0 ^ x5);
    let t0 = x1 ^ x2;
    let y1 = t0 ^ x7;
    let (y4, y12, y2, y5) = (y1 ^ x3, y13 ^ y14, y1 ^ x0, y1 ^ x6);
    let y3 = y5 ^ y8;
    let t1 = x4 ^ y12;
    let (y15, y20) = (t1 ^ x5, t1 ^ x1);
    let (y6, y10, y11) = (y15 ^ x7, y15 ^ t0, y20 ^ y9);
    let (y7, y17, y19, y16) = (x7 ^ y11, y10 ^ y11, y10 ^ y8, t0 ^ y11);
    let (y21, y18) = (y13 ^ y16, x0 ^ y16);
    // Inversion in GF(2⁸) by way of GF(2⁴).
    let (t2, t7, t12) = (y12 & y15, y13 & y16, y9 & y11);
    let (t4, t6) = ((y3 & y6) ^ t2, (y4 & x7) ^ t2);
    let (t9, t11) = ((y5 & y1) ^ t7, (y2 & y7) ^ t7);
    let (t14, t16) = ((y14 & y17) ^ t12, (y8 & y10) ^ t12);
    let (t21, t22) = (t4 ^ t14 ^ y20, t6 ^ t16 ^ y19);
    let (t23, t24) = (t9 ^ t14 ^ y21, t11 ^ t16 ^ y18);
    let (t25, t26) = (t21 ^ t22, t21 & t23);
    let t27 = t24 ^ t26;
    let t29 = (t25 & t27) ^ t22;
    let (t30, t31) = (t23 ^ t24, t22 ^ t26);
    let t33 = (t31 & t30) ^ t24;
    let (t34, t35) = (t23 ^ t33, t27 ^ t33);
    let t36 = t24 & t35;
    let (t37, t38) = (t36 ^ t34, t27 ^ t36);
    let t40 = t25 ^ (t29 & t38);
    let (t41, t42, t43, t44) = (t40 ^ t37, t29 ^ t33, t29 ^ t40, t33 ^ t37);
    let t45 = t42 ^ t41;
    let (z0, z1, z2) = (t44 & y15, t37 & y6, t33 & x7);
    let (z3, z4, z5) = (t43 & y16, t40 & y1, t29 & y7);
    let (z6, z7, z8) = (t42 & y11, t45 & y17, t41 & y10);
    let (z9, z10, z11) = (t44 & y12, t37 & y3, t33 & y4);
    let (z12, z13, z14) = (t43 & y13, t40 & y5, t29 & y2);
    let (z15, z16, z17) = (t42 & y9, t45 & y14, t41 & y8);
    // Bottom linear transformation.
    let (t46, t47, t48, t49) = (z15 ^ z16, z10 ^ z11, z5 ^ z13, z9 ^ z10);
    let (t50, t51, t52, t53) = (z2 ^ z12, z2 ^ z5, z7 ^ z8, z0 ^ z3);
    let (t54, t55, t56, t57) = (z6 ^ z7, z16 ^ z17, z12 ^ t48, t50 ^ t53);
    let (t58, t59, t60, t61) = (z4 ^ t46, z3 ^ t54, t46 ^ t57, z14 ^ t57);
    let (t62, t63, t64) = (t52 ^ t58, t49 ^ t58, z4 ^ t59);
    let (t65, t66) = (t61 ^ t62, z1 ^ t63);
    let (s0, s6, s7) = (t59 ^ t63, t56 ^ !t62, t48 ^ !t60);
    let t67 = t64 ^ t65;
    let (s3, s4, s5) = (t53 ^ t66, t51 ^ t66, t47 ^ t65);
    let (s1, s2) = (t64 ^ !s3, t55 ^ !t67);
    *q = [s7, s6, s5, s4, s3, s2, s1, s0];
}
