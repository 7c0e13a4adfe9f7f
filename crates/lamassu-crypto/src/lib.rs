//! The cryptography of Lamassu: suites, multi-lane kernels, the cipher engine, secret memory, self-test.
//!
//! Nothing here knows files or paths. Keys enter and leave as [`secret::Secret`] or as block keys.

pub mod engine;
pub mod inner;
pub mod name;
pub mod outer;
pub mod ring;
pub mod secret;
pub mod wrap;

pub use engine::{Engine, Verify};
pub use inner::InnerKey;
pub use lamassu_format::{BlockKey, Suite};
pub use outer::OuterKey;
pub use ring::KeyRing;
pub use secret::{Secret, SecretBytes};

/// An AEAD or MAC check failed. Says nothing more, on purpose.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
#[error("authentication failed")]
pub struct Unauthentic;

/// The kernel's random generator failed; nothing was written.
#[derive(Debug, thiserror::Error)]
#[error("no randomness from the kernel: {0}")]
pub struct NoRandom(#[from] getrandom::Error);

/// Fills `buf` from getrandom(2).
pub fn random(buf: &mut [u8]) -> Result<(), NoRandom> {
    Ok(getrandom::fill(buf)?)
}
