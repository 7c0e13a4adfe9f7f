//! What every suite must hold. Each suite runs through all of it; `tests/vectors.rs` compares each with stored vectors.

use super::{Aead, CipherSuite};
use crate::kernel::Kernel;
use crate::{BlockKey, InnerKey, KeyRing, OuterKey, Salts, Secret, Suite, Unauthentic, derive};
use aes::cipher::BlockCipherEncrypt;
use aes::{Aes128, Aes256};
use cmac::{Cmac, KeyInit, Mac};
use data_encoding::HEXLOWER;
use lamassu_format::{BlockNo, Domain, FileId, Hash, Method, PageAad, is_compressed};
use sha2::{Digest, Sha256};
use std::collections::HashSet;

const SIZE: usize = 4096;
const FILE: FileId = FileId([7; 16]);
const FIRST: BlockNo = BlockNo(5);

fn all() -> [&'static CipherSuite; 4] {
    Suite::ALL.map(CipherSuite::of)
}

/// A suite by every method that it has.
fn methods() -> impl Iterator<Item = (Suite, Method)> {
    Suite::ALL.into_iter().flat_map(|s| Method::all(s).map(move |m| (s, m)))
}

/// The same in every domain that it can keep.
fn everywhere() -> impl Iterator<Item = (Suite, Method, Domain)> {
    methods().flat_map(|(s, m)| Domain::ALL.map(|d| (s, m, d))).filter(|(s, _, d)| d.is_for(*s))
}

fn k_in(byte: u8) -> Secret<32> {
    Secret::new(&mut [byte; 32])
}

fn block(seed: u8) -> Vec<u8> {
    let mut out = vec![0; SIZE];
    ::blake3::Hasher::new_keyed(&[seed; 32]).finalize_xof().fill(&mut out);
    out
}

fn seal(key: &InnerKey, salts: Salts<'_>, plain: &[u8]) -> (Vec<u8>, Vec<BlockKey>) {
    let (mut blocks, mut keys) = (plain.to_vec(), vec![[0; 32]; plain.len() / SIZE]);
    key.seal(salts, &mut blocks, SIZE, &mut keys);
    (blocks, keys)
}

/// The salt of block [`FIRST`] + n, from the words of the format page.
fn salt(domain: Domain, n: u64) -> Vec<u8> {
    match domain {
        Domain::Zone | Domain::Family => vec![],
        Domain::File => FILE.0.to_vec(),
        Domain::None => [&FILE.0[..], &(FIRST.0 + n).to_le_bytes()].concat(),
    }
}

/// H by the libraries' own calls, from the words of the format page.
fn expected_hash(suite: Suite, method: Method, k_in: &Secret<32>, plain: &[u8]) -> [u8; 32] {
    match method.hash(suite) {
        Hash::Sha256 => Sha256::digest(plain).into(),
        Hash::Blake3 => ::blake3::keyed_hash(derive(suite, k_in, "block hash").expose(), plain).into(),
    }
}

/// K, likewise.
fn expected_key(suite: Suite, method: Method, k_in: &Secret<32>, plain: &[u8], salt: &[u8]) -> BlockKey {
    let h = expected_hash(suite, method, k_in, plain);
    let purpose = match (suite, method.index()) {
        (_, 0) => "block key",
        (_, 1) => "block key aes-128",
        (Suite::Aes, 2) => "block key blake3",
        (_, 2) => "block key sha-256",
        (Suite::Aes, _) => "block key aes-128 blake3",
        (_, _) => "block key aes-128 sha-256",
    };
    let kdf = derive(suite, k_in, purpose);
    let mut key: BlockKey = match suite {
        Suite::Aes => {
            let half = |counter: u32| -> [u8; 16] {
                let mut mac = Cmac::<Aes256>::new(kdf.expose().into());
                mac.update(&[&counter.to_be_bytes()[..], b"lamassu\0", &h[..], salt, &[0, 0, 1, 0]].concat());
                mac.finalize().into_bytes().into()
            };
            [half(1), half(2)].as_flattened().try_into().unwrap()
        }
        Suite::Paper => {
            let mut key: BlockKey = h;
            let cipher = Aes256::new(k_in.expose().into());
            key.as_chunks_mut::<16>().0.iter_mut().for_each(|half| cipher.encrypt_block(half.into()));
            return key;
        }
        Suite::Blake3 | Suite::Chacha => ::blake3::keyed_hash(kdf.expose(), &[&h[..], salt].concat()).into(),
    };
    key[31] &= 0xfe;
    key
}

#[test]
fn each_suite_has_a_number_and_a_name_of_its_own() {
    for (suite, id) in all().into_iter().zip(Suite::ALL) {
        assert_eq!(suite.id, id);
        assert_eq!(Suite::from_name(id.name()), Some(id));
        assert!(suite.unapproved.is_none_or(|why| why.starts_with(&format!("suite {} ", id.name()))));
    }
    let (ids, names) = (Suite::ALL.map(Suite::id), Suite::ALL.map(Suite::name));
    assert_eq!((HashSet::from(ids).len(), HashSet::from(names).len()), (4, 4));
}

#[test]
fn keys_are_those_of_the_libraries_on_every_kernel() {
    let plain: Vec<u8> = (0..21).flat_map(block).collect();
    for (suite, method, domain) in everywhere() {
        for kernel in Kernel::available() {
            let key = InnerKey::with_kernel(suite, &k_in(0x42), kernel);
            let (_, keys) = seal(&key, Salts::from_block(domain, FILE, FIRST).by(method), &plain);
            for ((n, plain), key) in (0..).zip(plain.chunks(SIZE)).zip(keys) {
                let expected = expected_key(suite, method, &k_in(0x42), plain, &salt(domain, n));
                assert_eq!(key, expected, "{suite:?} {method:?} {domain:?} {kernel}");
            }
            let (stored, keys) = seal(&key, Salts::PLAIN.by(method), &plain);
            assert!(stored == plain);
            for (plain, key) in plain.chunks(SIZE).zip(keys) {
                let mut expected = expected_hash(suite, method, &k_in(0x42), plain);
                CipherSuite::of(suite).finish(&mut expected);
                assert_eq!(key, expected, "{suite:?} {method:?} {kernel}");
            }
        }
    }
}

/// A key by one method tells nothing of a key by another: not even a half of it is equal.
#[test]
fn methods_share_no_keys_and_no_ciphertext() {
    for suite in Suite::ALL {
        let (key, mut halves, mut sealed) = (InnerKey::new(suite, &k_in(1)), HashSet::new(), HashSet::new());
        let count = Method::all(suite).inspect(|method| {
            let (blocks, keys) = seal(&key, Salts::EMPTY.by(*method), &block(1));
            halves.extend(keys[0].as_chunks::<16>().0.to_vec());
            sealed.extend(blocks.chunks(16).map(<[u8]>::to_vec));
        });
        let count = count.count();
        assert_eq!((halves.len(), sealed.len()), (2 * count, count * SIZE / 16), "{suite:?}");
    }
}

/// AES-128 takes the first half of what is derived, by the library's own calls.
#[test]
fn a_short_key_is_the_first_half() {
    for (suite, method) in methods().filter(|(_, method)| method.has_short_key()) {
        let (sealed, keys) = seal(&InnerKey::new(suite, &k_in(1)), Salts::EMPTY.by(method), &block(1));
        let cipher = Aes128::new(keys[0][..16].try_into().unwrap());
        let mut first: [u8; 16] = if suite.is_malleable() { [0; 16] } else { block(1)[..16].try_into().unwrap() };
        cipher.encrypt_block((&mut first).into());
        if suite.is_malleable() {
            first.iter_mut().zip(block(1)).for_each(|(stream, plain)| *stream ^= plain);
        }
        assert_eq!(sealed[..16], first, "{suite:?} {method:?}");
    }
}

#[test]
#[should_panic(expected = "checked against its suite")]
fn a_method_that_the_suite_lacks_is_a_fault_of_the_program() {
    seal(&InnerKey::new(Suite::Chacha, &k_in(1)), Salts::EMPTY.by(Method::new(true, false)), &block(1));
}

#[test]
#[should_panic(expected = "suite paper")]
fn paper_takes_no_salt() {
    seal(&InnerKey::new(Suite::Paper, &k_in(1)), Salts::from_block(Domain::File, FILE, FIRST), &block(1));
}

#[test]
fn equal_blocks_have_equal_keys_and_ciphertext_wherever_they_stand() {
    for (suite, method) in methods() {
        let key = InnerKey::new(suite, &k_in(1));
        let (alone, alone_key) = seal(&key, Salts::EMPTY.by(method), &block(7));
        let plain: Vec<u8> = (0..37).flat_map(|i| block(i % 3 + 6)).collect();
        let (blocks, keys) = seal(&key, Salts::EMPTY.by(method), &plain);
        for i in (1..37).step_by(3) {
            assert_eq!(keys[i], alone_key[0]);
            assert!(blocks[i * SIZE..][..SIZE] == alone[..]);
        }
    }
}

#[test]
fn a_group_is_encrypted_as_its_blocks_are_and_decrypts() {
    let plain: Vec<u8> = (0..16).flat_map(block).collect();
    let keys: Vec<BlockKey> = (1..=16).map(|i| [i; 32]).collect();
    for ((suite, method), kernel) in methods().flat_map(|m| Kernel::available().into_iter().map(move |k| (m, k))) {
        let (cipher, mut group) = (CipherSuite::of(suite).cipher(method), plain.clone());
        cipher.encrypt(kernel, &keys, &mut group, &[SIZE; 16]);
        for ((sealed, plain), key) in group.chunks_mut(SIZE).zip(plain.chunks(SIZE)).zip(&keys) {
            let mut alone = plain.to_vec();
            cipher.encrypt(kernel, std::slice::from_ref(key), &mut alone, &[SIZE]);
            assert!(alone == sealed && alone != plain, "{suite:?} {method:?} {kernel}");
            cipher.decrypt(kernel, key, sealed);
            assert!(sealed == plain, "{suite:?} {method:?} {kernel}");
        }
    }
}

/// In a malleable suite, and in no other, flipping a bit of ciphertext flips that bit of the plaintext alone.
#[test]
fn malleable_suites_are_named_so() {
    for (suite, method) in methods() {
        let (cipher, mut data) = (CipherSuite::of(suite).cipher(method), block(1));
        cipher.encrypt(Kernel::best(), &[[3; 32]], &mut data, &[SIZE]);
        data[100] ^= 1;
        cipher.decrypt(Kernel::best(), &[3; 32], &mut data);
        let changed = data.iter().zip(block(1)).filter(|(a, b)| **a != *b).count();
        assert_eq!((changed, data[100] ^ block(1)[100]) == (1, 1), suite.is_malleable(), "{suite:?} {method:?}");
    }
}

#[test]
fn zones_and_suites_share_nothing() {
    let mut seen = HashSet::new();
    for (suite, zone) in Suite::ALL.into_iter().flat_map(|s| [(s, 1), (s, 2)]) {
        let (blocks, keys) = seal(&InnerKey::new(suite, &k_in(zone)), Salts::EMPTY, &block(1));
        assert!(seen.insert(keys[0]) && seen.insert(blocks[..32].try_into().unwrap()));
    }
}

#[test]
fn h_depends_on_k_in_where_it_is_blake3() {
    for (suite, method) in methods() {
        let hash = |byte| {
            let mut hashes = [[0; 32]];
            InnerKey::new(suite, &k_in(byte)).hash_group(method, &[&block(1)], &mut hashes);
            hashes
        };
        assert_eq!(hash(1) != hash(2), method.hash(suite) == Hash::Blake3, "{suite:?} {method:?}");
    }
}

#[test]
fn fixed_bits_of_a_key() {
    for suite in all() {
        let finished = |mut key: BlockKey| {
            suite.finish(&mut key);
            assert!(!is_compressed(suite.id, &key));
            key
        };
        let is_paper = suite.id == Suite::Paper;
        assert_eq!(finished([0xff; 32])[31], if is_paper { 0xff } else { 0xfe });
        let mut last_bit = [0; 32];
        last_bit[31] = 1;
        assert_eq!(is_compressed(suite.id, &last_bit), !is_paper);
        let last_bit = finished(last_bit);
        assert_eq!((last_bit[0], last_bit[31]), if is_paper { (0, 1) } else { (0x80, 0) });
        assert_eq!(finished([0; 32])[0], 0x80, "a hole is not a key");
    }
}

/// Blocks of which less is encrypted: as if each were as long as that, with zeros behind.
#[test]
fn lanes_of_unequal_lengths() {
    let keys: Vec<BlockKey> = (1..=16).map(|i| [i; 32]).collect();
    let lens: Vec<usize> = (0..16).map(|i| SIZE - i * 11 % 16 * 256).collect();
    let short: Vec<u8> = (0..16)
        .zip(&lens)
        .flat_map(|(i, len)| {
            let mut block = block(i);
            block[*len..].fill(0);
            block
        })
        .collect();
    for ((suite, method), kernel) in methods().flat_map(|m| Kernel::available().into_iter().map(move |k| (m, k))) {
        let cipher = CipherSuite::of(suite).cipher(method);
        for count in [1, 2, 3, 7, 16] {
            let mut group = short[..count * SIZE].to_vec();
            cipher.encrypt(kernel, &keys[..count], &mut group, &lens[..count]);
            for (n, (sealed, plain)) in group.chunks(SIZE).zip(short.chunks(SIZE)).enumerate() {
                let mut alone = plain[..lens[n]].to_vec();
                cipher.encrypt(kernel, &keys[n..=n], &mut alone, &lens[n..=n]);
                alone.resize(SIZE, 0);
                assert!(alone == sealed, "{suite:?} {method:?} {kernel}: block {n} of {count}");
            }
        }
    }
}

#[test]
fn the_aead_opens_what_it_sealed_and_nothing_else() {
    let (nonce, aad) = ([9; 24], b"associated");
    for suite in all() {
        let [aead, other] = [1, 2].map(|byte| (suite.aead)(&k_in(byte)));
        let mut sealed = block(3);
        let tag = aead.seal(&nonce, aad, &mut sealed);
        let open = |aead: &dyn Aead, nonce: &[u8; 24], aad: &[u8], tag: [u8; 16]| {
            let mut opened = sealed.clone();
            aead.open(nonce, aad, &mut opened, &tag).map(|()| opened)
        };
        assert!(open(&*aead, &nonce, aad, tag) == Ok(block(3)), "{:?}", suite.id);
        assert_eq!(open(&*other, &nonce, aad, tag), Err(Unauthentic));
        assert_eq!(open(&*aead, &[8; 24], aad, tag), Err(Unauthentic));
        assert_eq!(open(&*aead, &nonce, b"Associated", tag), Err(Unauthentic));
        let mut wrong_tag = tag;
        wrong_tag[15] ^= 1;
        assert_eq!(open(&*aead, &nonce, aad, wrong_tag), Err(Unauthentic));
    }
}

#[test]
fn pages_of_one_suite_open_in_no_other() {
    for (a, b) in Suite::ALL.into_iter().flat_map(|a| Suite::ALL.map(|b| (a, b))) {
        let (ours, theirs) = (OuterKey::new(a, &k_in(1)), KeyRing::new(b, &[k_in(2)], &[k_in(1)]));
        let mut page = [4; lamassu_format::PAGE_LEN];
        ours.seal_page(&PageAad([0; 16]), &mut page).unwrap();
        assert_eq!(theirs.open_page(&PageAad([0; 16]), &mut page).is_ok(), a == b, "{a:?} {b:?}");
    }
}

/// draft-irtf-cfrg-xchacha-03, A.3.1.
#[test]
fn xchacha_draft_vector() {
    let aead = super::chacha::XChaCha::new(&Secret::new(&mut std::array::from_fn(|i| 0x80 + i as u8)));
    let nonce = std::array::from_fn(|i| 0x40 + i as u8);
    let aad = HEXLOWER.decode(b"50515253c0c1c2c3c4c5c6c7").unwrap();
    let text =
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen \
        would be it.";
    let mut content = *text;
    let tag = aead.seal(&nonce, &aad, &mut content);
    assert_eq!(HEXLOWER.encode(&tag), "c0875924c1c7987947deafd8780acf49");
    assert_eq!(HEXLOWER.encode(&content[..16]), "bd6d179d3e83d43b9576579493c0e939");
    aead.open(&nonce, &aad, &mut content, &tag).unwrap();
    assert_eq!(&content, text);
}
