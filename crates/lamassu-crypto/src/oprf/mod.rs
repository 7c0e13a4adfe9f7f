//! VOPRF(ristretto255, SHA-512) of RFC 9497: a server with a key evaluates a pseudorandom function for a client, learns
//! neither input nor output, and proves that it used the key that belongs to its public key.
//!
//! | module | whose part |
//! |---|---|
//! | this one | what both compute: hashes to the group and to scalars, composites of a batch, the challenge |
//! | `client` | blinds inputs, verifies the proof, unblinds |
//! | `server` | derives its key, evaluates, proves |
//!
//! The group is `curve25519-dalek`'s. Only the protocol is implemented here, for reasons that
//! `docs/adr/0016-oblivious-zone-keys.md` gives. Messages and outputs are those of the RFC, whose vectors `tests` has;
//! the client blinds by addition, where the RFC multiplies: see [`PublicKey::blind`].

mod client;
mod server;
#[cfg(test)]
mod tests;

pub use client::{Blinded, PublicKey};
pub use server::{EvaluateError, ServerKey};

use curve25519_dalek::RistrettoPoint;
use curve25519_dalek::ristretto::CompressedRistretto;
use curve25519_dalek::scalar::Scalar;
use curve25519_dalek::traits::{IsIdentity, VartimeMultiscalarMul};
use sha2::{Digest, Sha512};
use std::sync::LazyLock;

/// Most elements of a batch: its proof numbers them in 16 bits, and a server limits the cost of one call.
pub const BATCH_MAX: usize = 1024;

/// The encoding of a group element.
pub type Element = [u8; 32];

/// `contextString`: version, mode 1 (VOPRF), the suite.
const CONTEXT: &[u8] = b"OPRFV1-\x01-ristretto255-SHA512";

/// A server's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evaluation {
    /// For each blinded element, in their order.
    pub elements: Vec<Element>,
    /// The proof that all were multiplied by the server's key: two scalars.
    pub proof: [u8; 64],
}

/// The answer is not an evaluation of the request under the expected key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OprfError {
    /// Not an encoding of an element of the group, or that of its identity.
    #[error("no element of the group")]
    Element,
    /// No elements, or more than [`BATCH_MAX`], or not as many as were sent.
    #[error("not as many elements as there must be")]
    Count,
    /// The proof does not verify: another key was used, or none.
    #[error("the proof does not verify")]
    Proof,
}

/// expand_message_xmd (RFC 9380, 5.3.1) with SHA-512, for 64 bytes, which is one round: b_1.
struct Expand {
    /// SHA-512 after Z_pad, the block of zeros that each message begins with
    begun: Sha512,
    /// DST ‖ its length
    dst_prime: Vec<u8>,
}

impl Expand {
    fn new(prefix: &[u8]) -> Expand {
        let mut dst_prime = [prefix, CONTEXT].concat();
        let len = u8::try_from(dst_prime.len()).expect("the labels of the RFC are short");
        dst_prime.push(len);
        Expand { begun: Sha512::new_with_prefix([0; 128]), dst_prime }
    }

    fn of(&self, message: &[&[u8]]) -> [u8; 64] {
        let mut b_0 = self.begun.clone();
        message.iter().for_each(|part| b_0.update(part));
        b_0.update([0, 64, 0]);
        b_0.update(&self.dst_prime);
        let b_1 = Sha512::new().chain_update(b_0.finalize()).chain_update([1]).chain_update(&self.dst_prime);
        b_1.finalize().into()
    }

    fn scalar(&self, message: &[&[u8]]) -> Scalar {
        Scalar::from_bytes_mod_order_wide(&self.of(message))
    }
}

static TO_GROUP: LazyLock<Expand> = LazyLock::new(|| Expand::new(b"HashToGroup-"));
static TO_SCALAR: LazyLock<Expand> = LazyLock::new(|| Expand::new(b"HashToScalar-"));
static TO_KEY: LazyLock<Expand> = LazyLock::new(|| Expand::new(b"DeriveKeyPair"));
/// Not of the RFC, which draws that scalar: [`ServerKey::evaluate`].
static TO_NONCE: LazyLock<Expand> = LazyLock::new(|| Expand::new(b"LamassuProofNonce-"));

fn hash_to_group(input: &[u8]) -> RistrettoPoint {
    RistrettoPoint::from_uniform_bytes(&TO_GROUP.of(&[input]))
}

/// Bytes with their length in front, in 16 bits.
fn with_len(bytes: &[u8]) -> Vec<u8> {
    let len = u16::try_from(bytes.len()).expect("what the protocol hashes is short");
    [&len.to_be_bytes(), bytes].concat()
}

/// DeserializeElement: never the identity.
fn parse(element: &Element) -> Result<RistrettoPoint, OprfError> {
    let point = CompressedRistretto(*element).decompress().filter(|point| !point.is_identity());
    point.ok_or(OprfError::Element)
}

fn parse_all(elements: &[Element]) -> Result<Vec<RistrettoPoint>, OprfError> {
    match elements.len() {
        1..=BATCH_MAX => elements.iter().map(parse).collect(),
        _ => Err(OprfError::Count),
    }
}

/// The factors d_i of ComputeComposites.
fn factors(public: &Element, blinded: &[Element], evaluated: &[Element]) -> Vec<Scalar> {
    let seed_dst = [b"Seed-", CONTEXT].concat();
    let seed = Sha512::new().chain_update(with_len(public)).chain_update(with_len(&seed_dst)).finalize();
    let seed = with_len(&seed);
    let len = 32u16.to_be_bytes();
    let factor = |(i, (c, d)): (usize, (&Element, &Element))| {
        let i = u16::try_from(i).expect("a batch has no more than BATCH_MAX").to_be_bytes();
        TO_SCALAR.scalar(&[&seed, &i, &len, c, &len, d, b"Composite"])
    };
    blinded.iter().zip(evaluated).enumerate().map(factor).collect()
}

/// The sum of points, each times its factor. Both are public.
fn composite(factors: &[Scalar], points: &[RistrettoPoint]) -> RistrettoPoint {
    RistrettoPoint::vartime_multiscalar_mul(factors, points)
}

/// The challenge of a proof: `points` are M, Z, t2 and t3.
fn challenge(public: &Element, points: [&RistrettoPoint; 4]) -> Scalar {
    let mut transcript = with_len(public);
    points.iter().for_each(|point| transcript.extend(with_len(point.compress().as_bytes())));
    TO_SCALAR.scalar(&[&transcript, b"Challenge"])
}
