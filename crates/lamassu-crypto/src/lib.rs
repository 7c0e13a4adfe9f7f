//! The cryptography of Lamassu: cipher suites, kernels over many blocks, the engine, secret memory, self-test.
//!
//! This crate knows no files and no paths. Keys enter and leave it as [`secret::Secret`] or as block keys.
//!
//! | module | what it holds |
//! |---|---|
//! | `aead` | the trait of AEADs |
//! | `suite/` | the suites, each a value: a block cipher, a KDF, an AEAD |
//! | [`inner`] | K_in of one epoch: convergent encryption of data blocks |
//! | [`salt`] | what a block's key depends on in addition to its content, by deduplication domain |
//! | [`compress`] | blocks compressed before they are encrypted: payloads |
//! | [`outer`], [`name`] | K_out of one epoch: pages, records, attribute names; names in directories |
//! | [`oblivious`], [`oprf`] | keys that depend on a server: tokens and their cache; RFC 9497 |
//! | [`ring`] | every loaded epoch of both keys of a vault |
//! | [`engine`] | batches of blocks over worker threads (`pool`), or over an accelerator (`device`) |
//! | [`kernel`] | block ciphers and hashes over many blocks at once, chosen by the processor's features |
//! | [`wrap`], [`sign`], `xaes`, `argon` | what headers need: HKDF and HMAC; Ed25519; XAES-256-GCM; Argon2id |
//! | [`secret`] | locked and wiped memory |
//! | `provider`, `module` | whether this code computes, or a FIPS module (feature `fips`) |
//! | [`selftest`], `hex` | known answers for every primitive; their notation |
//! | [`speed`], [`stages`] | measurements |
//!
//! Locks, in their order. No lock is held while blocks are hashed or encrypted.
//!
//! * The engine's queue of chunks (`Engine::each`), and what failed in a batch: held for one step.
//! * `oblivious::Oblivious`: which batch is next, and what failed; the cache of tokens. Neither is held during a
//!   request to the server.
//! * `engine::pool`: the queue of offers, then the state of one batch. Neither is held while the other is taken.
//! * `ring::KeyRing`: the epochs. A reader takes a reference and releases the lock.
//! * `secret::arena`: the free pieces. Innermost: secrets are made and dropped under any other lock.

mod aead;
mod argon;
pub mod compress;
pub mod engine;
mod hex;
pub mod inner;
pub mod kernel;
#[cfg(feature = "fips")]
mod module;
pub mod name;
pub mod oblivious;
pub mod oprf;
pub mod outer;
mod provider;
pub mod ring;
pub mod salt;
pub mod secret;
pub mod selftest;
pub mod sign;
pub mod speed;
pub mod stages;
mod suite;
pub mod wrap;
mod xaes;

pub use engine::{Engine, Verify};
pub use inner::InnerKey;
pub use lamassu_format::{BlockKey, Suite};
pub use outer::OuterKey;
pub use provider::{Provider, ProviderInUse};
pub use ring::KeyRing;
pub use salt::{Keyed, Salts};
pub use secret::{Secret, SecretBytes};
pub use suite::{unapproved, unapproved_hash};

/// An AEAD or MAC check failed. It gives no details, on purpose.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
#[error("authentication failed")]
pub struct Unauthentic;

/// The kernel's random generator failed; nothing was written.
#[derive(Debug, thiserror::Error)]
#[error("no randomness from the kernel: {0}")]
pub struct NoRandom(#[from] getrandom::Error);

/// Fills `buf` from getrandom(2), or by the FIPS module if that is used.
///
/// # Errors
/// [`NoRandom`]: `buf` is then unspecified and must not be used.
pub fn random(buf: &mut [u8]) -> Result<(), NoRandom> {
    random_by(Provider::current(), buf)
}

pub(crate) fn random_by(provider: Provider, buf: &mut [u8]) -> Result<(), NoRandom> {
    let filled = match provider {
        Provider::Own => getrandom::fill(buf),
        #[cfg(feature = "fips")]
        Provider::Module => module::random(buf),
    };
    Ok(filled?)
}

/// `derive(key, purpose)` of docs/format.md §2.
pub(crate) fn derive<const N: usize>(suite: Suite, key: &Secret<32>, purpose: &str) -> Secret<N> {
    let info = format!("lamassu v1 {} {purpose}", suite.name());
    wrap::hkdf(key.expose(), b"", info.as_bytes())
}
