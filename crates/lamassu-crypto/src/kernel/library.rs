//! Kernels made of the RustCrypto crates, one block after another. The other kernels are tested against them, and they
//! run on processors for which there is no kernel of ours.

use super::aes::RoundKeys;
use ::aes::Aes256;
use ::aes::cipher::{Array, BlockCipherEncrypt, BlockModeDecrypt, BlockModeEncrypt, KeyInit, KeyIvInit, StreamCipher};
use lamassu_format::BlockKey;
use sha2::{Digest, Sha256};

pub(super) fn sha256(messages: &[&[u8]], out: &mut [[u8; 32]]) {
    for (m, o) in messages.iter().zip(out) {
        *o = Sha256::digest(m).into();
    }
}

pub(super) fn keyed_blake3(key: &[u8; 32], messages: &[&[u8]], out: &mut [[u8; 32]]) {
    for (m, o) in messages.iter().zip(out) {
        *o = ::blake3::keyed_hash(key, m).into();
    }
}

pub(super) fn cbc_encrypt(keys: &[BlockKey], lanes: &mut [&mut [u8]]) {
    for (key, lane) in keys.iter().zip(lanes) {
        let (blocks, rest) = Array::slice_as_chunks_mut(lane);
        assert!(rest.is_empty());
        cbc::Encryptor::<Aes256>::new(key.into(), &[0; 16].into()).encrypt_blocks(blocks);
    }
}

pub(super) fn cbc_decrypt(key: &BlockKey, data: &mut [u8]) {
    let (blocks, rest) = Array::slice_as_chunks_mut(data);
    assert!(rest.is_empty());
    cbc::Decryptor::<Aes256>::new(key.into(), &[0; 16].into()).decrypt_blocks(blocks);
}

pub(super) fn ctr(key: &BlockKey, data: &mut [u8]) {
    ctr::Ctr128BE::<Aes256>::new(key.into(), &[0; 16].into()).apply_keystream(data);
}

pub(super) fn ecb_encrypt(keys: &RoundKeys, blocks: &mut [[u8; 16]]) {
    Aes256::new(&keys.key().into()).encrypt_blocks(Array::cast_slice_from_core_mut(blocks));
}
