//! What every SHA-256 kernel shares: constants, padding, output (FIPS 180-4 §4.2.2, §5.1.1, §5.3.3).

/// The initial hash value.
pub(super) const INITIAL: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// The round constants.
#[rustfmt::skip]
pub(super) const K: [u32; 64] = [
    0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5, 0x3956_c25b, 0x59f1_11f1, 0x923f_82a4, 0xab1c_5ed5,
    0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3, 0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174,
    0xe49b_69c1, 0xefbe_4786, 0x0fc1_9dc6, 0x240c_a1cc, 0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da,
    0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7, 0xc6e0_0bf3, 0xd5a7_9147, 0x06ca_6351, 0x1429_2967,
    0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13, 0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85,
    0xa2bf_e8a1, 0xa81a_664b, 0xc24b_8b70, 0xc76c_51a3, 0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070,
    0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5, 0x391c_0cb3, 0x4ed8_aa4a, 0x5b9c_ca4f, 0x682e_6ff3,
    0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208, 0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2,
];

/// The padded end of a message: what remains after whole blocks (`rest`, less than 64 bytes), 80, zeros, the length in
/// bits. Returns how many of the two blocks count.
pub(super) fn tail_blocks(rest: &[u8], message_len: usize) -> ([[u8; 64]; 2], usize) {
    let mut blocks = [[0u8; 64]; 2];
    blocks[0][..rest.len()].copy_from_slice(rest);
    blocks[0][rest.len()] = 0x80;
    let count = if rest.len() < 56 { 1 } else { 2 };
    blocks[count - 1][56..].copy_from_slice(&(message_len as u64 * 8).to_be_bytes());
    (blocks, count)
}

/// The digest of a final state.
pub(super) fn output(state: &[u32; 8]) -> [u8; 32] {
    let mut out = [0; 32];
    for (bytes, word) in out.as_chunks_mut::<4>().0.iter_mut().zip(state) {
        *bytes = word.to_be_bytes();
    }
    out
}
