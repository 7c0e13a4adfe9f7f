//! Payloads: what is packed is unpacked, equal blocks make equal bytes for ever, and what is no payload is refused.

use super::*;
use lamassu_format::Suite;
use proptest::prelude::*;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Every codec, and Zstandard at a few of its levels.
const CODECS: [Codec; 5] = [Codec::Lz4, Codec::Zstd(1), Codec::Zstd(3), Codec::Zstd(9), Codec::Zstd(19)];

fn compression(codec: Codec, block_size: usize) -> Compression {
    let size = block_size as u32;
    Compression::new(codec, version_of(codec), Compression::default_round(size), (Suite::Aes, size)).unwrap()
}

fn codecs() -> impl Strategy<Value = Codec> {
    proptest::sample::select(&CODECS[..])
}

/// Bytes that no codec makes smaller.
fn random(len: usize, seed: u64) -> Vec<u8> {
    let mut out = vec![0; len];
    let seed = Sha256::digest(seed.to_le_bytes());
    ::blake3::Hasher::new_keyed(&seed.into()).finalize_xof().fill(&mut out);
    out
}

/// The corpus of the golden payloads: what is in it is made here, so that it is the same for ever.
fn corpus(kind: &str, len: usize) -> Vec<u8> {
    const WORDS: [&str; 16] = [
        "the ", "block ", "key ", "of ", "a ", "store ", "page\n", "is ", "hash, ", "and ", "segment ", "epoch. ",
        "to ", "in ", "cipher ", "zone ",
    ];
    let noise = random(len, 7);
    let text = || noise.iter().flat_map(|byte| WORDS[usize::from(byte & 15)].bytes()).take(len).collect::<Vec<u8>>();
    match kind {
        "zeros" => vec![0; len],
        "text" => text(),
        // Rows of a table: a counter, a small number, a flag, padding.
        "rows" => (0..len as u32 / 16)
            .flat_map(|n| {
                let mut row = [0; 16];
                row[..4].copy_from_slice(&n.to_le_bytes());
                row[4] = noise[n as usize] & 7;
                row[8..10].copy_from_slice(&(n * 3).to_be_bytes()[2..]);
                row
            })
            .collect(),
        // A third of it does not compress.
        "mixed" => {
            let mut bytes = text();
            bytes[..len / 3].copy_from_slice(&noise[..len / 3]);
            bytes
        }
        "random" => noise,
        // One byte in ten is not zero.
        "sparse" => noise.iter().map(|byte| if *byte < 26 { *byte } else { 0 }).collect(),
        _ => unreachable!("no such kind"),
    }
}

/// The golden payloads as this program makes them.
fn payloads() -> Vec<Value> {
    let mut rows = Vec::new();
    for codec in CODECS {
        for block_size in [4096, 65536, 1 << 20] {
            for kind in ["zeros", "text", "rows", "mixed", "random", "sparse"] {
                let mut block = corpus(kind, block_size);
                let len = pack(compression(codec, block_size), &mut block);
                rows.push(json!({
                    "codec": codec.name(), "level": codec.level(), "version": version_of(codec).to_string(),
                    "corpus": kind, "block_size": block_size, "payload_len": len,
                    "payload_sha256": data_encoding::HEXLOWER.encode(&Sha256::digest(&block[..len])),
                }));
            }
        }
    }
    rows
}

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/vectors/payloads.json");

/// A library that makes other bytes of the same block ends the deduplication of all vaults that have it: their headers
/// would have to name another version.
#[test]
fn equal_blocks_make_equal_payloads_for_ever() {
    let golden: Vec<Value> = serde_json::from_slice(&std::fs::read(GOLDEN).unwrap()).unwrap();
    let made = payloads();
    assert_eq!(golden.len(), made.len());
    for (golden, made) in golden.iter().zip(&made) {
        assert_eq!(golden, made);
    }
    let is_whole = |row: &&Value| row["payload_len"] == row["block_size"];
    assert_eq!(golden.iter().filter(is_whole).count(), CODECS.len() * 3, "random blocks, and no others");
}

/// Writes them anew: for another version of a library alone.
#[test]
#[ignore = "it changes testdata"]
fn write_golden_payloads() {
    let rows: Vec<String> = payloads().iter().map(Value::to_string).collect();
    std::fs::write(GOLDEN, format!("[\n{}\n]\n", rows.join(",\n"))).unwrap();
}

#[test]
fn versions() {
    assert_eq!(version_of(Codec::Zstd(3)).to_string(), "1.5.7");
    assert_eq!(version_of(Codec::Zstd(3)).to_string(), zstd_safe::version_string(), "the one that is linked");
    let manifest = include_str!("../../../../Cargo.toml");
    let pinned = format!("lz4_flex = {{ version = \"={}\"", version_of(Codec::Lz4));
    assert!(manifest.contains(&pinned), "{pinned}");
}

/// A block with runs, repetitions and noise.
fn blocks() -> impl Strategy<Value = Vec<u8>> {
    let piece = (any::<u64>(), 1usize..3000, 0u8..4).prop_map(|(seed, len, kind)| match kind {
        0 => vec![seed as u8; len],
        1 => random(len, seed),
        2 => random(len.div_ceil(9), seed).repeat(9),
        _ => (0..len).map(|at| (at as u64 ^ seed) as u8 & 63).collect(),
    });
    (proptest::collection::vec(piece, 1..60), 12u32..18).prop_map(|(pieces, log2)| {
        let mut block: Vec<u8> = pieces.concat();
        block.resize(1 << log2, 0);
        block
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Also where the thread has compressed other blocks before, of other lengths and at other levels.
    #[test]
    fn what_is_packed_is_unpacked(block in blocks(), codec in codecs(), before in blocks(), before_by in codecs()) {
        let packed = |by: Codec, block: &[u8]| {
            let mut packed = block.to_vec();
            let len = pack(compression(by, block.len()), &mut packed);
            (len, packed)
        };
        let (len, mut made) = packed(codec, &block);
        packed(before_by, &before);
        prop_assert!(packed(codec, &block) == (len, made.clone()), "equal blocks make equal payloads");
        let compression = compression(codec, block.len());
        prop_assert_eq!(packed_len(compression, &block), len);
        if len == block.len() {
            prop_assert!(made == block);
            return Ok(());
        }
        prop_assert!(len <= Compression::payload_max(block.len()) && len.is_multiple_of(compression.round() as usize));
        prop_assert!(made[len..].iter().all(|byte| *byte == 0) && made[0] == codec.id());
        prop_assert!(unpack(&mut made, len).is_ok() && made == block);
    }

    /// Whatever a holder of the keys has sealed: an error, or a block.
    #[test]
    fn what_is_no_payload_is_refused(block in blocks(), codec in codecs(), at in 0usize..64, bits: u8, cut in 0usize..5000) {
        let mut packed = block.clone();
        let len = pack(compression(codec, block.len()), &mut packed);
        packed[at] ^= bits;
        let _ = unpack(&mut packed.clone(), len);
        let _ = unpack(&mut packed, len.saturating_sub(cut));
    }

    #[test]
    fn noise_is_no_payload(seed: u64, codec in 0u8..4, made in 0u32..5000, len in 0usize..4097) {
        let mut block = random(4096, seed);
        block[..4].copy_from_slice(&(u32::from(codec) | made << 8).to_le_bytes());
        let _ = unpack(&mut block, len);
    }
}

#[test]
fn a_payload_of_another_block_size_is_refused() {
    for codec in CODECS {
        let mut large = corpus("text", 65536);
        let len = pack(compression(codec, 65536), &mut large);
        for size in [len.next_multiple_of(4096), 32768, 65536 + 4096] {
            let mut block = large.clone();
            block.resize(size.max(len), 0);
            assert_eq!(unpack(&mut block, len), Err(NoPayload), "{codec} in {size}");
        }
        assert_eq!(unpack(&mut large.clone(), len - 4096), Err(NoPayload), "cut off");
        let mut unknown = large.clone();
        unknown[0] = 3;
        assert_eq!(unpack(&mut unknown, len), Err(NoPayload));
    }
    for len in [0, 1, 3, 4] {
        assert_eq!(unpack(&mut [0; 4096], len), Err(NoPayload));
    }
}

#[test]
fn stored_lengths() {
    for (nonzero, len) in
        [(None, 0), (Some(0), 16), (Some(15), 16), (Some(16), 32), (Some(4095), 4096), (Some(1024), 1040)]
    {
        let mut block = [0; 4096];
        nonzero.into_iter().for_each(|at: usize| block[at] = 1);
        assert_eq!(stored_len(&block), len);
    }
}

/// Ciphertext and compressed data are not tried; what has a fifth of text in it is.
#[test]
fn what_is_worth_a_try() {
    for len in [4096, 8192, 65536, 1 << 20] {
        let random_blocks = (0..2000u64).filter(|seed| sample::looks_random(&random(len.min(65536), *seed))).count();
        assert!(random_blocks >= 1998, "{random_blocks} of 2000 random blocks of {len}");
        let mut mixed = random(len, 5);
        mixed[..len / 4].copy_from_slice(&corpus("text", len)[..len / 4]);
        assert!(!sample::looks_random(&mixed));
        for kind in ["zeros", "text", "rows", "mixed", "sparse"] {
            assert!(!sample::looks_random(&corpus(kind, len)), "{kind} of {len}");
        }
    }
}

/// Also where it saves nothing, and so is not used.
#[test]
fn nothing_of_a_block_stays_in_the_output() {
    let is_wiped = || super::CODECS.with_borrow(|codecs| codecs.scratch().iter().all(|byte| *byte == 0));
    let base64 = |len: usize| data_encoding::BASE64.encode(&random(len, 3)).into_bytes()[..len].to_vec();
    for codec in CODECS {
        let is_slow = matches!(codec, Codec::Zstd(9..));
        for len in [4096, 65536, 1 << 20].into_iter().filter(|len| *len < 1 << 20 || !is_slow) {
            let blocks = ["zeros", "text", "rows", "mixed", "sparse"].map(|kind| corpus(kind, len));
            for mut block in blocks.into_iter().chain([base64(len), random(len, 4)]) {
                packed_len(compression(codec, len), &block);
                assert!(is_wiped(), "{codec}, {len}: looked at");
                let packed = pack(compression(codec, len), &mut block);
                assert!(is_wiped(), "{codec}, {len}: packed");
                if packed < len {
                    unpack(&mut block, packed).expect("a payload");
                    assert!(is_wiped(), "{codec}, {len}: unpacked");
                }
            }
        }
    }
}
