//! SHA-256 (FIPS 180-4) in plain Rust.

use crate::kernel::sha256::{INITIAL, K, output, tail_blocks};

pub(in crate::kernel) fn sha256(messages: &[&[u8]], out: &mut [[u8; 32]]) {
    for (message, out) in messages.iter().zip(out) {
        *out = one(message);
    }
}

fn one(message: &[u8]) -> [u8; 32] {
    let mut state = INITIAL;
    let (blocks, rest) = message.as_chunks::<64>();
    blocks.iter().for_each(|b| compress(&mut state, b));
    let (tail, count) = tail_blocks(rest, message.len());
    tail[..count].iter().for_each(|b| compress(&mut state, b));
    output(&state)
}

fn compress(state: &mut [u32; 8], block: &[u8; 64]) {
    let mut w = [0u32; 64];
    for (w, bytes) in w.iter_mut().zip(block.as_chunks::<4>().0) {
        *w = u32::from_be_bytes(*bytes);
    }
    for t in 16..64 {
        let (a, b) = (w[t - 15], w[t - 2]);
        let s0 = a.rotate_right(7) ^ a.rotate_right(18) ^ (a >> 3);
        let s1 = b.rotate_right(17) ^ b.rotate_right(19) ^ (b >> 10);
        w[t] = w[t - 16].wrapping_add(s0).wrapping_add(w[t - 7]).wrapping_add(s1);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (k, w) in K.iter().zip(w) {
        let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let ch = (e & f) ^ (!e & g);
        let t1 = h.wrapping_add(s1).wrapping_add(ch).wrapping_add(*k).wrapping_add(w);
        let s0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let maj = (a & b) ^ (a & c) ^ (b & c);
        (h, g, f, e) = (g, f, e, d.wrapping_add(t1));
        (d, c, b, a) = (c, b, a, t1.wrapping_add(s0).wrapping_add(maj));
    }
    for (s, v) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *s = s.wrapping_add(v);
    }
}
