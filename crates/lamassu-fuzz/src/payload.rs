//! Payloads of compressed blocks (`docs/format.md` §10), as a holder of the keys may have sealed any: what they are
//! made whole from is bounded by the block, and what a writer makes is read back.

use crate::bytes::Bytes;
use crate::ring;
use lamassu_crypto::compress::{pack, unpack, version_of};
use lamassu_crypto::{Engine, Keyed, Salts, Verify};
use lamassu_format::{Codec, Compression, Suite, is_compressed};

/// A payload: refused, or a block of the length that it is to have. The same bytes as content of a block: read back.
pub fn payload(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    let suite = bytes.one_of(&[Suite::Aes, Suite::Blake3, Suite::Chacha]);
    let size = 4096usize << (bytes.u8() % 6);
    let codec = bytes.one_of(&[Codec::Lz4, Codec::Zstd(1), Codec::Zstd(3)]);
    let content = bytes.rest();
    let len = content.len().min(size);
    let mut block = vec![0; size];
    block[..len].copy_from_slice(&content[..len]);
    let _ = unpack(&mut block.clone(), len);

    let round = Compression::default_round(size as u32);
    let compression = Compression::new(codec, version_of(codec), round, (suite, size as u32)).expect("a compression");
    let mut packed = block.clone();
    let packed_len = pack(compression, &mut packed);
    if packed_len < size {
        assert!(unpack(&mut packed, packed_len).is_ok() && packed == block, "a writer's payload is not read back");
    }
    let (engine, ring, mut keys) = (Engine::new(1), ring(suite), [[0; 32]]);
    let mut sealed = block.clone();
    let salts = Salts::EMPTY.compressed(Some(compression));
    engine.seal(&ring.inner(), salts, &mut sealed, size, &mut keys).expect("no server is asked");
    assert_eq!(is_compressed(suite, &keys[0]), packed_len < size);
    let failed = engine.open(&ring, &mut sealed, size, Keyed::unsalted(&keys), Verify::No);
    assert!(failed.is_empty() && sealed == block, "a block is not read back");
}
