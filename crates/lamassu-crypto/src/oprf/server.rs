//! A server's part: its key, evaluations, proofs.

use super::{Element, Evaluation, OprfError, TO_KEY, TO_NONCE, challenge, composite, factors, parse_all, with_len};
use crate::secret::without_trace;
use crate::{NoRandom, Secret};
use curve25519_dalek::RistrettoPoint;
use curve25519_dalek::constants::RISTRETTO_BASEPOINT_TABLE;
use curve25519_dalek::scalar::Scalar;
use zeroize::{Zeroize, Zeroizing};

/// The key of a server.
#[derive(Debug)]
pub struct ServerKey {
    /// the scalar; `half` is half of it
    key: Secret<32>,
    half: Secret<32>,
    public: Element,
}

/// Why a server does not evaluate.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    /// The request is malformed.
    #[error(transparent)]
    Oprf(#[from] OprfError),
    /// No randomness for the proof.
    #[error(transparent)]
    NoRandom(#[from] NoRandom),
}

impl ServerKey {
    /// DeriveKeyPair of the RFC: from 32 random bytes and what the key is for.
    pub fn derive(seed: &Secret<32>, info: &[u8]) -> ServerKey {
        without_trace(|| {
            let info = with_len(info);
            let tries = (0..=u8::MAX).map(|counter| TO_KEY.scalar(&[seed.expose(), &info, &[counter]]));
            // Zero has the probability 2^-252 in each try.
            let mut key = tries.into_iter().find(|key| *key != Scalar::ZERO).unwrap_or(Scalar::ONE);
            let mut half = key * Scalar::from(2u8).invert();
            let public = (&key * RISTRETTO_BASEPOINT_TABLE).compress().to_bytes();
            let kept = |scalar: &Scalar| Secret::filled_by(|bytes| bytes.copy_from_slice(scalar.as_bytes()));
            let server = ServerKey { key: kept(&key), half: kept(&half), public };
            key.zeroize();
            half.zeroize();
            server
        })
    }

    /// Its public key.
    pub fn public(&self) -> &Element {
        &self.public
    }

    /// BlindEvaluate.
    ///
    /// # Errors
    /// [`EvaluateError`].
    pub fn evaluate(&self, blinded: &[Element]) -> Result<Evaluation, EvaluateError> {
        let mut random = Zeroizing::new([0; 64]);
        crate::random(&mut *random)?;
        Ok(self.evaluate_drawing(blinded, &random)?)
    }

    /// The same with these random bytes.
    pub(super) fn evaluate_drawing(&self, blinded: &[Element], random: &[u8; 64]) -> Result<Evaluation, OprfError> {
        self.answer(blinded, |elements| self.proof_nonce(random, blinded, elements))
    }

    /// The same with this scalar for the proof.
    #[cfg(test)]
    pub(super) fn evaluate_with(&self, blinded: &[Element], r: Scalar) -> Result<Evaluation, OprfError> {
        self.answer(blinded, |_| r)
    }

    /// The random scalar of a proof. Two proofs of different batches with one scalar would give the key away, and a
    /// machine that is resumed twice from one image of its memory draws the same random bytes twice. So the scalar
    /// depends on the key, on random bytes and on the batch.
    pub(super) fn proof_nonce(&self, random: &[u8; 64], blinded: &[Element], evaluated: &[Element]) -> Scalar {
        let len = (blinded.len() as u64).to_be_bytes();
        let (blinded, evaluated) = (blinded.as_flattened(), evaluated.as_flattened());
        TO_NONCE.scalar(&[self.key.expose(), random, &self.public, &len, blinded, evaluated])
    }

    fn answer(&self, blinded: &[Element], r: impl FnOnce(&[Element]) -> Scalar) -> Result<Evaluation, OprfError> {
        let points = parse_all(blinded)?;
        without_trace(|| {
            let scalar = |secret: &Secret<32>| Zeroizing::new(Scalar::from_bytes_mod_order(*secret.expose()));
            let (key, half) = (scalar(&self.key), scalar(&self.half));
            // Multiplies by half the key and doubles the result: many points are doubled and encoded together, at a
            // fraction of the cost for each.
            let halves: Vec<RistrettoPoint> = points.iter().map(|point| point * *half).collect();
            let encoded = RistrettoPoint::double_and_compress_batch(&halves);
            let elements: Vec<Element> = encoded.into_iter().map(|element| element.to_bytes()).collect();
            let m = composite(&factors(&self.public, blinded, &elements), &points);
            let mut r = r(&elements);
            let (t2, t3) = (&r * RISTRETTO_BASEPOINT_TABLE, m * r);
            let c = challenge(&self.public, [&m, &(m * *key), &t2, &t3]);
            let s = r - c * *key;
            r.zeroize();
            let mut proof = [0; 64];
            proof[..32].copy_from_slice(c.as_bytes());
            proof[32..].copy_from_slice(s.as_bytes());
            Ok(Evaluation { elements, proof })
        })
    }
}
