//! Golden vectors of format v1 (`testdata/vectors/`). A program that shares no code with this one made them, and they
//! open for ever.

#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use data_encoding::{BASE64URL_NOPAD, HEXLOWER};
use lamassu_crypto::kernel::Kernel;
use lamassu_crypto::name::NameKey;
use lamassu_crypto::outer::RecordKind;
use lamassu_crypto::ring::OpenError;
use lamassu_crypto::{Engine, InnerKey, KeyRing, Keyed, OuterKey, Salts, Secret, Suite, Verify, wrap};
use lamassu_format::header::Argon2Params;
use lamassu_format::{BlockNo, Cipher, Domain, FileId, Hash, Method, PageAad};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn vectors(file: &str) -> Vec<Value> {
    let path = format!("{}/../../testdata/vectors/{file}.json", env!("CARGO_MANIFEST_DIR"));
    let rows: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert!(rows.len() >= 3);
    rows
}

fn text<'a>(row: &'a Value, member: &str) -> &'a str {
    row[member].as_str().unwrap()
}

fn hex(row: &Value, member: &str) -> Vec<u8> {
    HEXLOWER.decode(text(row, member).as_bytes()).unwrap()
}

fn array<const N: usize>(row: &Value, member: &str) -> [u8; N] {
    hex(row, member).try_into().unwrap()
}

fn secret<const N: usize>(row: &Value, member: &str) -> Secret<N> {
    Secret::new(&mut array(row, member))
}

fn suite(row: &Value) -> Suite {
    Suite::from_name(text(row, "suite")).unwrap()
}

/// The plaintext of a block vector: its bytes, a number of zeros, or a stream named by its label.
fn block(row: &Value) -> Vec<u8> {
    let len = row["block_size"].as_u64().unwrap() as usize;
    if row["block"].is_string() {
        hex(row, "block")
    } else if row["block_zeros"].is_number() {
        vec![0; len]
    } else {
        let label = text(row, "block_stream");
        (0..len / 32).flat_map(|i| Sha256::digest(format!("{label} {i}")).to_vec()).collect()
    }
}

/// The salts of a row's block `count` times over: every copy has the same number.
fn salts<'a>(row: &Value, numbers: &'a [BlockNo]) -> Salts<'a> {
    let salts = match row["domain"].as_str() {
        None => Salts::EMPTY,
        Some(domain) => Salts::of_blocks(Domain::from_name(domain).unwrap(), FileId(array(row, "file_id")), numbers),
    };
    salts.by(method(row))
}

/// The suite's own, unless the row says another.
fn method(row: &Value) -> Method {
    match row["cipher"].as_str() {
        None => Method::OF_SUITE,
        Some(cipher) => Method::OF_SUITE
            .with_cipher(suite(row), Cipher::from_name(cipher).unwrap())
            .and_then(|method| method.with_hash(suite(row), Hash::from_name(text(row, "hash")).unwrap()))
            .unwrap(),
    }
}

#[test]
fn blocks_seal_and_open_on_every_kernel() {
    let rows: Vec<Value> = ["blocks", "salted_blocks", "methods"].into_iter().flat_map(vectors).collect();
    let with = |member: &str| rows.iter().filter(|row| row[member].is_string()).count();
    assert_eq!((with("domain"), with("cipher")), (6 + 7, 3 * 7));
    for row in rows {
        let (suite, plain, k) = (suite(&row), block(&row), array::<32>(&row, "k"));
        let k_in = [secret(&row, "k_in")];
        for kernel in Kernel::available() {
            // Alone, and in a batch of 19 copies, which reaches every width of every kernel.
            for count in [1, 19] {
                let mut blocks = plain.repeat(count);
                let mut keys = vec![[0; 32]; count];
                let numbers = vec![BlockNo(row["number"].as_u64().unwrap_or(0)); count];
                let salts = salts(&row, &numbers);
                InnerKey::with_kernel(suite, &k_in[0], kernel).seal(salts, &mut blocks, plain.len(), &mut keys);
                assert_eq!(keys, vec![k; count], "{suite:?} {kernel}");
                for b in blocks.chunks(plain.len()) {
                    if row["ciphertext"].is_string() {
                        assert_eq!(b, hex(&row, "ciphertext"), "{suite:?} {kernel}");
                    } else {
                        assert_eq!(Sha256::digest(b)[..], hex(&row, "ciphertext_sha256"), "{suite:?} {kernel}");
                    }
                }
                let mut unverified = blocks.clone();
                let ring = KeyRing::with_kernel(suite, &k_in, &[Secret::new(&mut [0; 32])], kernel);
                let engine = Engine::with_kernel(2, kernel);
                let keyed = Keyed { keys: &keys, salts };
                assert!(engine.open(&ring, &mut unverified, plain.len(), keyed, Verify::No).is_empty());
                assert!(engine.open(&ring, &mut blocks, plain.len(), keyed, Verify::Full).is_empty());
                assert!(blocks == plain.repeat(count) && unverified == blocks);
            }
        }
    }
}

/// Payloads that another program wrote: they need not be those that this one makes.
#[test]
fn compressed_blocks_open_on_every_kernel() {
    let rows = vectors("compressed_blocks");
    assert_eq!(rows.len(), 3 * 2 * 2 * 2);
    for row in rows {
        let (suite, size) = (suite(&row), row["block_size"].as_u64().unwrap() as usize);
        let plain = text(&row, "block_word").repeat(size / text(&row, "block_word").len()).into_bytes();
        let (k, numbers) = (array::<32>(&row, "k"), [BlockNo(row["number"].as_u64().unwrap_or(0)); 19]);
        for kernel in Kernel::available() {
            let ring = KeyRing::with_kernel(suite, &[secret(&row, "k_in")], &[Secret::new(&mut [0; 32])], kernel);
            for (count, verify) in [(1, Verify::Full), (19, Verify::Full), (19, Verify::No)] {
                let mut stored = hex(&row, "ciphertext");
                assert_eq!(stored.len() as u64, row["payload_len"].as_u64().unwrap());
                stored.resize(size, 0);
                let mut blocks = stored.repeat(count);
                let keyed = Keyed { keys: &vec![k; count], salts: salts(&row, &numbers) };
                let failed = Engine::with_kernel(2, kernel).open(&ring, &mut blocks, size, keyed, verify);
                assert!(failed.is_empty() && blocks == plain.repeat(count), "{suite:?} {kernel}");
            }
        }
    }
}

/// What a block that is stored plain has in the place of its key.
#[test]
fn plain_blocks_have_their_hash_for_a_key() {
    for row in vectors("methods") {
        let (suite, mut plain, mut keys) = (suite(&row), block(&row), [[0; 32]]);
        let inner = InnerKey::new(suite, &secret(&row, "k_in"));
        inner.seal(Salts::PLAIN.by(method(&row)), &mut plain, 4096, &mut keys);
        assert_eq!((keys, plain), ([array(&row, "plain_k")], block(&row)), "{suite:?}");
    }
}

#[test]
fn pages_seal_and_open() {
    for row in vectors("pages") {
        let key = OuterKey::new(suite(&row), &secret(&row, "k_out"));
        let (aad, golden) = (PageAad(array(&row, "aad")), array::<4096>(&row, "page"));
        let mut page = [0; 4096];
        page[56..].copy_from_slice(&hex(&row, "content"));
        if text(&row, "kind") == "convergent" {
            key.seal_page_convergent(&aad, &mut page);
        } else {
            key.seal_page_with(&array(&row, "nonce"), &aad, &mut page);
        }
        assert!(page == golden, "{} {}", text(&row, "suite"), text(&row, "kind"));
        assert!(key.matches_page(&aad, &page));
        key.open_page(&aad, &mut page).unwrap();
        assert_eq!(page[56..], hex(&row, "content"));
    }
}

#[test]
fn records_seal_and_open() {
    let kinds = [
        RecordKind::Directory,
        RecordKind::Symlink,
        RecordKind::SymlinkHead,
        RecordKind::SymlinkRest,
        RecordKind::Xattr,
    ];
    for row in vectors("records") {
        let key = OuterKey::new(suite(&row), &secret(&row, "k_out"));
        let kind = kinds[row["kind"].as_u64().unwrap() as usize - 1];
        let (context, content) = (hex(&row, "context"), hex(&row, "content"));
        let record = key.seal_record_with(&array(&row, "nonce"), kind, &context, &content);
        assert_eq!(record, hex(&row, "record"));
        assert!(key.matches_record(kind, &context, &record));
        assert_eq!(key.open_record(kind, &context, &record).unwrap(), content);
    }
}

#[test]
fn attribute_names_seal_and_open() {
    for row in vectors("xattrs") {
        let key = OuterKey::new(suite(&row), &secret(&row, "k_out"));
        let sealed = key.seal_xattr_name(text(&row, "name").as_bytes());
        assert_eq!(sealed, hex(&row, "sealed"));
        assert_eq!(format!("user.lamassu.{}", BASE64URL_NOPAD.encode(&sealed)), text(&row, "stored"));
        assert_eq!(key.open_xattr_name(&sealed).unwrap(), text(&row, "name").as_bytes());
    }
}

#[test]
fn names_seal_and_open() {
    for row in vectors("names") {
        let key = NameKey::new(&secret(&row, "secret"), array(&row, "id"));
        let sealed = key.seal(text(&row, "name").as_bytes());
        assert_eq!(sealed, hex(&row, "sealed"));
        assert_eq!(BASE64URL_NOPAD.encode(&sealed), text(&row, "entry"));
        let long = format!("lamassu.long.{}", BASE64URL_NOPAD.encode(&NameKey::hash(&sealed)));
        assert_eq!(long, text(&row, "long"));
        assert_eq!(key.open(&sealed).unwrap(), text(&row, "name").as_bytes());
    }
}

#[test]
fn slots_unwrap() {
    for row in vectors("slots") {
        let salt = array(&row, "salt");
        let unlocked = match &row["argon2"] {
            Value::Null => secret(&row, "source"),
            cost => {
                let number = |m: &str| cost[m].as_u64().unwrap() as u32;
                let cost = Argon2Params::new(number("memory_kib"), number("passes"), number("lanes"));
                wrap::argon2id(&hex(&row, "source"), &salt, cost.unwrap()).unwrap()
            }
        };
        assert_eq!(unlocked.expose()[..], hex(&row, "secret"));
        let wrapping = wrap::hkdf(unlocked.expose(), &salt, b"lamassu v1 slot");
        assert_eq!(wrapping.expose()[..], hex(&row, "wrapping_key"));
        let sealed = wrap::seal_with(&wrapping, &array(&row, "nonce"), &hex(&row, "aad"), &hex(&row, "file_key"));
        assert_eq!(sealed, hex(&row, "wrapped"));
        let opened = wrap::open(&wrapping, &array(&row, "nonce"), &hex(&row, "aad"), &sealed).unwrap();
        assert_eq!(opened.expose(), hex(&row, "file_key"));
    }
}

/// Every byte and the AAD are under the seal; the epoch tag only finds the key.
#[test]
fn damaged_pages_and_records_do_not_open() {
    for row in vectors("pages").iter().filter(|r| text(r, "kind") == "random") {
        let suite = suite(row);
        let others = [Secret::new(&mut [1; 32]), secret(row, "k_out"), Secret::new(&mut [2; 32])];
        let ring = KeyRing::new(suite, &[Secret::new(&mut [0; 32])], &others);
        let (aad, golden) = (PageAad(array(row, "aad")), array::<4096>(row, "page"));
        assert_eq!(ring.open_page(&aad, &mut golden.clone()), Ok(2), "found by its epoch tag, second of three");
        for at in (0..4096).step_by(13).chain(24..56) {
            let mut page = golden;
            page[at] ^= 0x40;
            // The nonce and the epoch tag decide which key; tag and content whether it opens.
            let expected = if (24..40).contains(&at) || at >= 56 { OpenError::Unauthentic } else { OpenError::NoKey };
            assert_eq!(ring.open_page(&aad, &mut page), Err(expected), "byte {at}");
        }
        for at in 0..16 {
            let mut aad = aad;
            aad.0[at] ^= 1;
            assert_eq!(ring.open_page(&aad, &mut golden.clone()), Err(OpenError::NoKey));
        }
    }
}

#[test]
fn records_open_under_their_kind_context_and_epoch_alone() {
    for suite in Suite::ALL {
        let keys = [Secret::new(&mut [1; 32]), Secret::new(&mut [2; 32])];
        let inner = [Secret::new(&mut [0; 32])];
        let (both, newer) = (KeyRing::new(suite, &inner, &keys), KeyRing::new(suite, &inner, &keys[..1]));
        let record = OuterKey::new(suite, &keys[1]).seal_record(RecordKind::Xattr, b"context", b"content").unwrap();
        assert_eq!(both.open_record(RecordKind::Xattr, b"context", &record).unwrap(), b"content");
        assert_eq!(newer.open_record(RecordKind::Xattr, b"context", &record), Err(OpenError::NoKey));
        assert_eq!(both.open_record(RecordKind::Symlink, b"context", &record), Err(OpenError::NoKey));
        assert_eq!(both.open_record(RecordKind::Xattr, b"contexT", &record), Err(OpenError::NoKey));
        for len in 0..record.len() {
            let expected = if len < 56 { OpenError::Truncated } else { OpenError::Unauthentic };
            assert_eq!(both.open_record(RecordKind::Xattr, b"context", &record[..len]), Err(expected));
        }
        let name = both.seal_xattr_names(b"user.x");
        assert_eq!(name.len(), 2);
        assert_ne!(name[0], name[1]);
        assert_eq!(both.open_xattr_name(&name[1]).unwrap(), b"user.x");
        assert_eq!(newer.open_xattr_name(&name[1]), Err(OpenError::NoKey));
        assert_eq!(newer.open_xattr_name(&name[1][..15]), Err(OpenError::Truncated));
    }
}

#[test]
fn convergent_pages_are_equal_exactly_where_content_aad_and_key_are() {
    for suite in Suite::ALL {
        let (a, b) =
            (OuterKey::new(suite, &Secret::new(&mut [1; 32])), OuterKey::new(suite, &Secret::new(&mut [2; 32])));
        let seal = |key: &OuterKey, aad: [u8; 16], fill: u8| {
            let mut page = [fill; 4096];
            key.seal_page_convergent(&PageAad(aad), &mut page);
            page.to_vec()
        };
        let first = seal(&a, [0; 16], 1);
        assert!(first == seal(&a, [0; 16], 1));
        for other in [seal(&a, [0; 16], 2), seal(&a, [1; 16], 1), seal(&b, [0; 16], 1)] {
            assert!(first[..24] != other[..24] && first[56..] != other[56..]);
        }
        let (mut x, mut y) = ([1; 4096], [1; 4096]);
        a.seal_page(&PageAad([0; 16]), &mut x).unwrap();
        a.seal_page(&PageAad([0; 16]), &mut y).unwrap();
        assert!(x[..24] != y[..24] && x[56..] != y[56..], "nonces are random otherwise");
    }
}
