//! The cryptography of Lamassu: suites, multi-lane kernels, the cipher engine, secret memory, self-test.
//!
//! Nothing here knows files or paths. Keys enter and leave as [`secret::Secret`] or as block keys.
//!
//! * [`inner`]: convergent encryption of data blocks under K_in. [`outer`], [`name`]: metadata under K_out. [`ring`]: all epochs of both.
//! * [`salt`]: what block keys depend on beside their content, by the deduplication domain.
//! * [`kernel`]: the block ciphers and hashes over many blocks at once, chosen by what the processor has.
//! * [`Provider`]: whether this code computes them, or a FIPS module (feature `fips`).
//! * [`engine`]: batches of blocks over worker threads.
//! * [`wrap`]: what the header needs.

mod argon;
pub mod engine;
pub mod inner;
pub mod kernel;
#[cfg(feature = "fips")]
mod module;
pub mod name;
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
pub use suite::unapproved;

/// An AEAD or MAC check failed. Says nothing more, on purpose.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
#[error("authentication failed")]
pub struct Unauthentic;

/// The kernel's random generator failed; nothing was written.
#[derive(Debug, thiserror::Error)]
#[error("no randomness from the kernel: {0}")]
pub struct NoRandom(#[from] getrandom::Error);

/// Fills `buf` from getrandom(2), or by the FIPS module where that is used.
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
pub(crate) fn derive(suite: Suite, key: &Secret<32>, purpose: &str) -> Secret<32> {
    derive_n(suite, key, purpose)
}

/// The same to N bytes.
pub(crate) fn derive_n<const N: usize>(suite: Suite, key: &Secret<32>, purpose: &str) -> Secret<N> {
    let info = format!("lamassu v1 {} {purpose}", suite.name());
    wrap::hkdf_n(key.expose(), b"", info.as_bytes())
}
