//! Every kernel against published vectors and against the library.

use super::*;
use data_encoding::HEXLOWER;
use proptest::prelude::*;
use sha2::{Digest, Sha256};

fn bytes<const N: usize>(hex: &str) -> [u8; N] {
    HEXLOWER.decode(hex.as_bytes()).unwrap().try_into().unwrap()
}

/// FIPS 197 Appendix A.3 and C.3; SP 800-38A F.1.5.
#[test]
fn aes_vectors() {
    for kernel in Kernel::available() {
        let keys = kernel.expand(&bytes("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"));
        assert_eq!(keys.0[2], bytes("9ba354118e6925afa51a8b5f2067fcde"));
        assert_eq!(keys.0[14], bytes("fe4890d1e6188d0b046df344706c631e"));
        let mut blocks = [bytes("6bc1bee22e409f96e93d7e117393172a"), bytes("f69f2445df4f9b17ad2b417be66c3710")];
        kernel.ecb_encrypt(&keys, &mut blocks);
        assert_eq!(
            blocks,
            [bytes("f3eed1bdb5d2a03c064b5a7e3db181f8"), bytes("23304b7a39f9f3ff067d8d8f9e24ecc7")],
            "{kernel}"
        );
        let keys = kernel.expand(&bytes("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"));
        let mut block = [bytes("00112233445566778899aabbccddeeff")];
        kernel.ecb_encrypt(&keys, &mut block);
        assert_eq!(block, [bytes("8ea2b7ca516745bfeafc49904b496089")], "{kernel}");
    }
    // FIPS 197 Appendix A.1 and C.1.
    let keys =
        portable::aes::expand::<AES_128>(&bytes("2b7e151628aed2a6abf7158809cf4f3cffffffffffffffffffffffffffffffff"));
    assert_eq!(keys.0[1], bytes("a0fafe1788542cb123a339392a6c7605"));
    assert_eq!(keys.0[10], bytes("d014f9a8c9ee2589e13f0cc8b6630ca6"));
    let key = bytes("000102030405060708090a0b0c0d0e0fffffffffffffffffffffffffffffffff");
    for kernel in Kernel::available() {
        let mut block: [u8; 16] = bytes("00112233445566778899aabbccddeeff");
        kernel.cbc_encrypt::<AES_128>(&[key], &mut [&mut block]);
        assert_eq!(block, bytes("69c4e0d86a7b0430d8cdb78070b4c55a"), "{kernel}");
    }
}

/// SP 800-38A F.2.5 and F.2.1.
#[test]
fn cbc_vectors() {
    cbc_vector::<AES_256>(
        bytes("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"),
        "f58c4c04d6e5f1ba779eabfb5f7bfbd69cfc4e967edb808d679f777bc6702c7d39f23369a9d9bacfa530e26304231461b2eb05e2c39be9fcda6c19078c6a9d1b",
    );
    for behind in ["00000000000000000000000000000000", "ffffffffffffffffffffffffffffffff"] {
        cbc_vector::<AES_128>(
            bytes(&format!("2b7e151628aed2a6abf7158809cf4f3c{behind}")),
            "7649abac8119b246cee98e9b12e9197d5086cb9b507219ee95db113a917678b273bed6b8e3c1743b7116e69e222295163ff1caa1681fac09120eca307586e1a7",
        );
    }
}

/// The IV of the standard is not zero, so it is XORed into the first plaintext block, as CBC does. In every number of
/// lanes, and in lanes that are long enough for the widest kernel.
fn cbc_vector<const N: usize>(key: BlockKey, cipher: &str) {
    let iv: [u8; 16] = bytes("000102030405060708090a0b0c0d0e0f");
    let mut plain: [u8; 64] = bytes(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e5130c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710",
    );
    plain.iter_mut().zip(iv).for_each(|(p, i)| *p ^= i);
    let cipher: [u8; 64] = bytes(cipher);
    for kernel in Kernel::available() {
        for (lanes, len) in LANES.flat_map(|lanes| [(lanes, 64), (lanes, 4096)]) {
            let mut long = vec![0; len];
            long[..64].copy_from_slice(&plain);
            let mut data = vec![long.clone(); lanes];
            kernel.cbc_encrypt::<N>(&vec![key; lanes], &mut data.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
            for lane in &mut data {
                assert_eq!(lane[..64], cipher, "{kernel}, {lanes} lanes of {len}");
                kernel.cbc_decrypt::<N>(&key, lane);
                assert!(*lane == long, "{kernel}, {lanes} lanes of {len}");
            }
        }
    }
}

/// SP 800-38A F.5.1: AES-128 of its counter blocks. Kernels count from zero, so each is encrypted as a first CBC block.
#[test]
fn ctr_blocks_of_aes_128() {
    let key = bytes("2b7e151628aed2a6abf7158809cf4f3c00000000000000000000000000000000");
    for kernel in Kernel::available() {
        for (counter, stream) in [
            ("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", "ec8cdf7398607cb0f2d21675ea9ea1e4"),
            ("f0f1f2f3f4f5f6f7f8f9fafbfcfdff00", "362b7c3c6773516318a077d7fc5073ae"),
        ] {
            let mut block: [u8; 16] = bytes(counter);
            kernel.cbc_encrypt::<AES_128>(&[key], &mut [&mut block]);
            assert_eq!(block, bytes(stream), "{kernel}");
        }
        // From zero: the first test case of the GCM specification, H and the mask of its tag.
        let mut data = [0; 32];
        kernel.ctr::<AES_128>(&[0; 32], &mut data);
        assert_eq!(data, bytes("66e94bd4ef8a2c3b884cfa59ca342b2e58e2fccefa7e3061367f1d57a4e7455a"), "{kernel}");
    }
}

/// FIPS 180-2 Appendix B and the empty message.
#[test]
fn sha256_vectors() {
    let million = vec![b'a'; 1_000_000];
    for kernel in Kernel::available() {
        for copies in [1, 2, 3, 9, 16, 17] {
            for (message, digest) in [
                (&b""[..], "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
                (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
                (
                    b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                    "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
                ),
                (&million, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
            ] {
                let mut out = vec![[0; 32]; copies];
                kernel.sha256(&vec![message; copies], &mut out);
                assert_eq!(out, vec![bytes(digest); copies], "{kernel}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Of lengths that end anywhere in a block of SHA-256, in one or two blocks of padding, and far from one another.
    #[test]
    fn sha256_of_messages_of_various_lengths(
        lens in proptest::collection::vec(prop_oneof![0usize..200, 0usize..5000, (1usize..17).prop_map(|n| n * 512)], 0..40),
        seed: u8,
    ) {
        let messages: Vec<Vec<u8>> = lens.iter().map(|len| data(*len, seed.wrapping_add(*len as u8))).collect();
        let messages: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
        let expected: Vec<[u8; 32]> = messages.iter().map(|m| Sha256::digest(m).into()).collect();
        for kernel in Kernel::available() {
            let mut out = vec![[0; 32]; messages.len()];
            kernel.sha256(&messages, &mut out);
            prop_assert!(out == expected, "{}", kernel);
        }
    }

    #[test]
    fn keyed_blake3_is_the_crates(key: [u8; 32], count in 0usize..40, len in prop_oneof![Just(1024usize), Just(2048), Just(4096), Just(8192), 0usize..70, 0usize..20_000], seed: u8) {
        let data = data(count * len, seed);
        let messages: Vec<&[u8]> = (0..count).map(|i| &data[i * len..][..len]).collect();
        let expected: Vec<[u8; 32]> = messages.iter().map(|m| ::blake3::keyed_hash(&key, m).into()).collect();
        for kernel in Kernel::available() {
            let mut out = vec![[0; 32]; count];
            kernel.keyed_blake3(&key, &messages, &mut out);
            prop_assert!(out == expected, "{}", kernel);
        }
    }

    #[test]
    fn kernels_agree_on_cbc(keys in proptest::collection::vec(any::<BlockKey>(), 0..40), blocks in 0usize..70, seed: u8) {
        agree_on_cbc::<AES_256>(&keys, blocks, seed)?;
        agree_on_cbc::<AES_128>(&keys, blocks, seed)?;
    }

    #[test]
    fn kernels_agree_on_ctr(key: BlockKey, len in 0usize..9000, seed: u8) {
        agree_on_ctr::<AES_256>(&key, len, seed)?;
        agree_on_ctr::<AES_128>(&key, len, seed)?;
    }

    #[test]
    fn kernels_agree_on_sha256(lens in proptest::collection::vec(0usize..5000, 0..3), count in 0usize..40, seed: u8) {
        // Messages of one length, then some of others.
        let len = lens.first().copied().unwrap_or(4096);
        let messages: Vec<Vec<u8>> = (0..count).map(|_| len).chain(lens).enumerate().map(|(i, len)| data(len, seed ^ i as u8)).collect();
        let messages: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
        let hash = |kernel: Kernel| {
            let mut out = vec![[0; 32]; messages.len()];
            kernel.sha256(&messages, &mut out);
            out
        };
        let expected = hash(Kernel::library());
        for kernel in Kernel::available() {
            prop_assert!(hash(kernel) == expected, "{}", kernel);
        }
    }

    #[test]
    fn kernels_agree_on_ecb(key: BlockKey, mut blocks in proptest::collection::vec(any::<[u8; 16]>(), 0..40)) {
        let plain = blocks.clone();
        Kernel::library().ecb_encrypt(&Kernel::library().expand(&key), &mut blocks);
        for kernel in Kernel::available() {
            let mut found = plain.clone();
            kernel.ecb_encrypt(&kernel.expand(&key), &mut found);
            prop_assert_eq!(&found, &blocks);
        }
    }
}

fn agree_on_cbc<const N: usize>(keys: &[BlockKey], blocks: usize, seed: u8) -> Result<(), TestCaseError> {
    let plain: Vec<Vec<u8>> = (0..keys.len()).map(|l| data(blocks * 16, seed ^ l as u8)).collect();
    let encrypt = |kernel: Kernel| {
        let mut lanes = plain.clone();
        kernel.cbc_encrypt::<N>(keys, &mut lanes.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
        lanes
    };
    let expected = encrypt(Kernel::library());
    for kernel in Kernel::available() {
        prop_assert!(encrypt(kernel) == expected, "{} {}", kernel, N);
        for ((key, cipher), plain) in keys.iter().zip(&expected).zip(&plain) {
            let mut lane = cipher.clone();
            kernel.cbc_decrypt::<N>(key, &mut lane);
            prop_assert!(lane == *plain, "{} {}", kernel, N);
        }
    }
    Ok(())
}

fn agree_on_ctr<const N: usize>(key: &BlockKey, len: usize, seed: u8) -> Result<(), TestCaseError> {
    let plain = data(len, seed);
    let mut expected = plain.clone();
    Kernel::library().ctr::<N>(key, &mut expected);
    for kernel in Kernel::available() {
        let mut found = plain.clone();
        kernel.ctr::<N>(key, &mut found);
        prop_assert!(found == expected, "{} {}", kernel, N);
    }
    Ok(())
}

/// Blocks as vaults have them, in every number of lanes: fewer than the narrowest kernel takes, as many as the widest
/// takes, and more.
const LANES: std::ops::RangeInclusive<usize> = 1..=17;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2))]

    #[test]
    fn kernels_agree_on_whole_blocks(keys: [BlockKey; 17], len in prop_oneof![Just(4096usize), Just(65_536)], seed: u8) {
        for len in [len, 4096 + 16 * usize::from(seed)] {
            let plain: Vec<Vec<u8>> = keys.iter().map(|key| data(len, seed ^ key[0])).collect();
            whole_blocks_agree::<AES_256>(&keys, &plain)?;
            whole_blocks_agree::<AES_128>(&keys, &plain)?;
        }
    }
}

fn whole_blocks_agree<const N: usize>(keys: &[BlockKey], plain: &[Vec<u8>]) -> Result<(), TestCaseError> {
    let sealed = each_block::<N>(Kernel::library(), keys, plain);
    for kernel in Kernel::available() {
        for lanes in LANES {
            let found = each_block::<N>(kernel, &keys[..lanes], &plain[..lanes]);
            prop_assert!(found[..] == sealed[..lanes], "{} {} {} lanes of {}", kernel, N, lanes, plain[0].len());
        }
        for (key, block) in keys.iter().zip(&sealed) {
            let mut opened = block.cbc.clone();
            kernel.cbc_decrypt::<N>(key, &mut opened);
            prop_assert!(opened == block.plain, "{} {} {}", kernel, N, block.plain.len());
        }
    }
    Ok(())
}

/// What becomes of a block.
#[derive(PartialEq)]
struct Block {
    plain: Vec<u8>,
    hash: [u8; 32],
    cbc: Vec<u8>,
    ctr: Vec<u8>,
}

fn each_block<const N: usize>(kernel: Kernel, keys: &[BlockKey], plain: &[Vec<u8>]) -> Vec<Block> {
    let mut hashes = vec![[0; 32]; plain.len()];
    kernel.sha256(&plain.iter().map(Vec::as_slice).collect::<Vec<_>>(), &mut hashes);
    let mut cbc = plain.to_vec();
    kernel.cbc_encrypt::<N>(keys, &mut cbc.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
    let mut ctr = plain.to_vec();
    ctr.iter_mut().zip(keys).for_each(|(block, key)| kernel.ctr::<N>(key, block));
    let ciphertexts = hashes.into_iter().zip(cbc.into_iter().zip(ctr));
    plain
        .iter()
        .zip(ciphertexts)
        .map(|(plain, (hash, (cbc, ctr)))| Block { plain: plain.clone(), hash, cbc, ctr })
        .collect()
}

#[test]
fn counters_carry_past_one_and_two_bytes() {
    counters_carry::<AES_256>();
    counters_carry::<AES_128>();
}

fn counters_carry<const N: usize>() {
    let mut expected = vec![0; 16 * 70_000 + 5];
    Kernel::library().ctr::<N>(&[7; 32], &mut expected);
    for kernel in Kernel::available() {
        let mut found = vec![0; expected.len()];
        kernel.ctr::<N>(&[7; 32], &mut found);
        assert!(found == expected, "{kernel} {N}");
    }
}

#[test]
fn kernels_are_named_and_distinct() {
    let names: Vec<String> = Kernel::available().iter().map(Kernel::to_string).collect();
    assert_eq!(names[..2], ["portable", "library"]);
    for (i, n) in names.iter().enumerate() {
        assert!(!names[..i].contains(n), "{names:?}");
    }
}

fn data(len: usize, seed: u8) -> Vec<u8> {
    let mut out = vec![0; len];
    ::blake3::Hasher::new_keyed(&[seed; 32]).finalize_xof().fill(&mut out);
    out
}
