//! Kernels made of the RustCrypto crates, one block after another. The other kernels are tested against them, and they
//! run on processors for which there is no kernel of ours.

use super::aes::{AES_128, AES_256, RoundKeys, key_of};
use ::aes::cipher::{Array, BlockCipherEncrypt, BlockModeDecrypt, BlockModeEncrypt, KeyInit, KeyIvInit, StreamCipher};
use ::aes::{Aes128, Aes256};
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

pub(super) fn cbc_encrypt<const N: usize>(keys: &[BlockKey], lanes: &mut [&mut [u8]]) {
    for (key, lane) in keys.iter().zip(lanes) {
        let (blocks, rest) = Array::slice_as_chunks_mut(lane);
        assert!(rest.is_empty());
        match N {
            AES_128 => with_zero_iv::<cbc::Encryptor<Aes128>>(key_of::<N>(key)).encrypt_blocks(blocks),
            _ => with_zero_iv::<cbc::Encryptor<Aes256>>(key_of::<N>(key)).encrypt_blocks(blocks),
        }
    }
}

pub(super) fn cbc_decrypt<const N: usize>(key: &BlockKey, data: &mut [u8]) {
    let (blocks, rest) = Array::slice_as_chunks_mut(data);
    assert!(rest.is_empty());
    match N {
        AES_128 => with_zero_iv::<cbc::Decryptor<Aes128>>(key_of::<N>(key)).decrypt_blocks(blocks),
        _ => with_zero_iv::<cbc::Decryptor<Aes256>>(key_of::<N>(key)).decrypt_blocks(blocks),
    }
}

pub(super) fn ctr<const N: usize>(key: &BlockKey, data: &mut [u8]) {
    let iv = [0; 16];
    match N {
        AES_128 => {
            let key: &[u8; 16] = key.first_chunk().expect("32 bytes");
            ctr::Ctr128BE::<Aes128>::new(key.into(), &iv.into()).apply_keystream(data);
        }
        _ => ctr::Ctr128BE::<Aes256>::new(key.into(), &iv.into()).apply_keystream(data),
    }
}

fn with_zero_iv<M: KeyIvInit>(key: &[u8]) -> M {
    M::new_from_slices(key, &[0; 16]).expect("a key and an IV of the lengths that the cipher takes")
}

pub(super) fn ecb_encrypt(keys: &RoundKeys<AES_256>, blocks: &mut [[u8; 16]]) {
    Aes256::new(&keys.key().into()).encrypt_blocks(Array::cast_slice_from_core_mut(blocks));
}
