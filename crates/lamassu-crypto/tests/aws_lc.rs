//! Every kernel against AWS-LC, which shares no code with them, nor with the library that other tests compare with.
#![allow(clippy::unwrap_used)]

use aws_lc_rs::cipher::{
    AES_128 as LC_128, AES_256 as LC_256, DecryptingKey, DecryptionContext, EncryptingKey, EncryptionContext,
    UnboundCipherKey,
};
use aws_lc_rs::digest;
use aws_lc_rs::iv::FixedLength;
use lamassu_crypto::kernel::{AES_128, AES_256, Kernel};
use lamassu_format::BlockKey;
use proptest::prelude::*;

fn key_of<const N: usize>(key: &BlockKey) -> UnboundCipherKey {
    match N {
        AES_128 => UnboundCipherKey::new(&LC_128, &key[..16]).unwrap(),
        _ => UnboundCipherKey::new(&LC_256, key).unwrap(),
    }
}

fn sha256(message: &[u8]) -> [u8; 32] {
    digest::digest(&digest::SHA256, message).as_ref().try_into().unwrap()
}

fn cbc_encrypt<const N: usize>(key: &BlockKey, data: &mut [u8]) {
    let zero = EncryptionContext::Iv128(FixedLength::from([0; 16]));
    EncryptingKey::cbc(key_of::<N>(key)).unwrap().less_safe_encrypt(data, zero).unwrap();
}

fn cbc_decrypt<const N: usize>(key: &BlockKey, data: &mut [u8]) {
    let zero = DecryptionContext::Iv128(FixedLength::from([0; 16]));
    DecryptingKey::cbc(key_of::<N>(key)).unwrap().decrypt(data, zero).unwrap();
}

fn ctr<const N: usize>(key: &BlockKey, data: &mut [u8]) {
    let zero = EncryptionContext::Iv128(FixedLength::from([0; 16]));
    EncryptingKey::ctr(key_of::<N>(key)).unwrap().less_safe_encrypt(data, zero).unwrap();
}

fn data(len: usize, seed: u64) -> Vec<u8> {
    let mut out = vec![0; len];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut out);
    out
}

/// Bytes: few, any, and those of a vault's blocks.
fn lens() -> impl Strategy<Value = usize> {
    prop_oneof![2 => 0usize..200, 4 => 0usize..10_000, 2 => Just(4096), 1 => Just(65_536)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sha256_is_that_of_aws_lc(len in lens(), count in 0usize..35, odd in lens(), seed: u64) {
        // Messages of one length, then one of another.
        let messages: Vec<Vec<u8>> = (0..count).map(|_| len).chain([odd]).zip(0..).map(|(len, i)| data(len, seed ^ i)).collect();
        let expected: Vec<[u8; 32]> = messages.iter().map(|m| sha256(m)).collect();
        let messages: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
        for kernel in Kernel::available() {
            let mut out = vec![[0; 32]; messages.len()];
            kernel.sha256(&messages, &mut out);
            prop_assert!(out == expected, "{} {} of {}", kernel, count, len);
        }
    }

    #[test]
    fn cbc_is_that_of_aws_lc(keys in proptest::collection::vec(any::<BlockKey>(), 0..35), len in lens(), seed: u64) {
        cbc_agrees::<AES_256>(&keys, len / 16 * 16, seed)?;
        cbc_agrees::<AES_128>(&keys, len / 16 * 16, seed)?;
    }

    #[test]
    fn ctr_is_that_of_aws_lc(key: BlockKey, len in lens(), seed: u64) {
        ctr_agrees::<AES_256>(&key, len, seed)?;
        ctr_agrees::<AES_128>(&key, len, seed)?;
    }
}

fn cbc_agrees<const N: usize>(keys: &[BlockKey], len: usize, seed: u64) -> Result<(), TestCaseError> {
    let plain: Vec<Vec<u8>> = (0..keys.len() as u64).map(|i| data(len, seed ^ i)).collect();
    let mut sealed = plain.clone();
    keys.iter().zip(&mut sealed).for_each(|(key, block)| cbc_encrypt::<N>(key, block));
    for kernel in Kernel::available() {
        let mut found = plain.clone();
        kernel.cbc_encrypt::<N>(keys, &mut found.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
        prop_assert!(found == sealed, "{} {} {} lanes of {}", kernel, N, keys.len(), len);
    }
    // What is decrypted need not be anything that was encrypted.
    if let Some(key) = keys.first() {
        let mut expected = data(len, !seed);
        cbc_decrypt::<N>(key, &mut expected);
        for kernel in Kernel::available() {
            let mut found = data(len, !seed);
            kernel.cbc_decrypt::<N>(key, &mut found);
            prop_assert!(found == expected, "{} {} {}", kernel, N, len);
        }
    }
    Ok(())
}

fn ctr_agrees<const N: usize>(key: &BlockKey, len: usize, seed: u64) -> Result<(), TestCaseError> {
    let mut expected = data(len, seed);
    ctr::<N>(key, &mut expected);
    for kernel in Kernel::available() {
        let mut found = data(len, seed);
        kernel.ctr::<N>(key, &mut found);
        prop_assert!(found == expected, "{} {} {}", kernel, N, len);
    }
    Ok(())
}
