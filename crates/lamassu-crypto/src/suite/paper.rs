//! Suite `paper`, as the Lamassu paper published it: K is AES-ECB of SHA-256 under K_in, with no salt and no fixed bit.

use super::{BlockKdf, CipherSuite, KnownAnswer, aes};
use crate::BlockKey;
use crate::hex::hex;
use crate::kernel::{AES_256, Kernel, RoundKeys};
use crate::salt::Salts;
use crate::secret::{Locked, Secret};
use crate::xaes::Xaes;
use lamassu_format::{Method, Suite};

pub(super) static SUITE: CipherSuite = CipherSuite {
    id: Suite::Paper,
    cipher: &aes::Cbc::<AES_256>,
    short_cipher: None,
    expand: |kernel, k_in, _| Box::new(Ecb(Locked::new(kernel.expand(k_in.expose())))),
    aead: |key: &Secret<32>| Box::new(Xaes::new(key)),
    unapproved: Some("suite paper derives keys by AES-256-ECB, which is no derivation of SP 800-108; use aes"),
    known_k_in: hex("ce03a9e1ce5ae7895d702e280630bcf1b0e1e627fb93f039fc86ae7670d7c032"),
    known_answers: &[KnownAnswer {
        name: "suite paper",
        method: Method::OF_SUITE,
        key: hex("b1f52dd98764be90fac3fc38a4fc2b23f07bdbdce2c64170527003a669ca9711"),
        ciphertext: hex("91b395b7e5497913e1e81ffebb71686e8adbeb9cf22efab0e396c670e80ec048"),
    }],
};

struct Ecb(Locked<RoundKeys<AES_256>>);

impl BlockKdf for Ecb {
    fn keys(&self, kernel: Kernel, hashes: &[[u8; 32]], salts: Salts<'_>, keys: &mut [BlockKey]) {
        assert_eq!(salts.len(), 0, "a header with suite paper names no domain that has a salt");
        keys.copy_from_slice(hashes);
        let (halves, _) = keys.as_flattened_mut().as_chunks_mut::<16>();
        kernel.ecb_encrypt(&self.0, halves);
    }
}
