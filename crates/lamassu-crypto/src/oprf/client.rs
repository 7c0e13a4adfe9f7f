//! A client's part: blinding, the proof, unblinding.

use super::{
    BATCH_MAX, Element, Evaluation, OprfError, challenge, composite, factors, hash_to_group, parse, parse_all,
};
use crate::NoRandom;
use crate::secret::without_trace;
use curve25519_dalek::RistrettoPoint;
use curve25519_dalek::constants::RISTRETTO_BASEPOINT_TABLE;
use curve25519_dalek::ristretto::RistrettoBasepointTable;
use curve25519_dalek::scalar::Scalar;
use sha2::{Digest, Sha512};
use zeroize::Zeroizing;

/// The public key of a server.
pub struct PublicKey {
    encoded: Element,
    /// its multiples, by which unblinding takes half as long
    table: Box<RistrettoBasepointTable>,
}

impl std::fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PublicKey")
    }
}

/// Blinded inputs, which reveal nothing to the server.
pub struct Blinded {
    points: Vec<RistrettoPoint>,
    elements: Vec<Element>,
    factors: Zeroizing<Vec<Scalar>>,
}

impl Blinded {
    /// The elements to send.
    pub fn elements(&self) -> &[Element] {
        &self.elements
    }
}

impl PublicKey {
    /// From its encoding.
    ///
    /// # Errors
    /// [`OprfError::Element`].
    pub fn parse(encoded: &Element) -> Result<PublicKey, OprfError> {
        let point = parse(encoded)?;
        Ok(PublicKey { encoded: *encoded, table: Box::new(RistrettoBasepointTable::create(&point)) })
    }

    /// Blinds inputs: adds a random multiple of the generator to the hash of each. So every input gives each element
    /// with equal probability.
    ///
    /// The RFC multiplies the hash by a random scalar instead, which hides as much, and unblinds by the inverse. That
    /// takes two multiplications of arbitrary points; this takes two of fixed points. Unblinding here needs the
    /// server's public key, so it is as secure only if that key is known beforehand, as it is here.
    ///
    /// # Errors
    /// [`NoRandom`].
    ///
    /// # Panics
    /// If there are more than [`BATCH_MAX`] inputs.
    pub fn blind<T: AsRef<[u8]>>(&self, inputs: &[T]) -> Result<Blinded, NoRandom> {
        assert!(inputs.len() <= BATCH_MAX, "the caller cuts its batches");
        let mut random = Zeroizing::new(vec![0; 64 * inputs.len()]);
        crate::random(&mut random)?;
        let wide = random.as_chunks::<64>().0;
        let factors = Zeroizing::new(wide.iter().map(Scalar::from_bytes_mod_order_wide).collect::<Vec<_>>());
        let point = |(input, r): (&T, &Scalar)| hash_to_group(input.as_ref()) + r * RISTRETTO_BASEPOINT_TABLE;
        let points: Vec<_> = without_trace(|| inputs.iter().zip(factors.iter()).map(point).collect());
        let elements = points.iter().map(|point| point.compress().to_bytes()).collect();
        Ok(Blinded { points, elements, factors })
    }

    /// The outputs for these inputs, from `blinded`, once the proof has verified.
    ///
    /// # Errors
    /// [`OprfError`].
    pub fn finalize<T: AsRef<[u8]>>(
        &self,
        inputs: &[T],
        blinded: &Blinded,
        evaluation: &Evaluation,
    ) -> Result<Zeroizing<Vec<[u8; 64]>>, OprfError> {
        let evaluated = self.verified((&blinded.points, &blinded.elements), evaluation)?;
        if inputs.len() != evaluated.len() {
            return Err(OprfError::Count);
        }
        let output = |((input, evaluated), r): ((&T, &RistrettoPoint), &Scalar)| {
            finish(input.as_ref(), &(evaluated - r * &*self.table))
        };
        let outputs = inputs.iter().zip(&evaluated).zip(blinded.factors.iter()).map(output);
        Ok(without_trace(|| Zeroizing::new(outputs.collect())))
    }

    /// VerifyProof, for the elements that were sent, as points and as encoded. Returns the evaluated elements.
    pub(super) fn verified(
        &self,
        (sent, blinded): (&[RistrettoPoint], &[Element]),
        evaluation: &Evaluation,
    ) -> Result<Vec<RistrettoPoint>, OprfError> {
        if evaluation.elements.len() != blinded.len() {
            return Err(OprfError::Count);
        }
        let evaluated = parse_all(&evaluation.elements)?;
        let (c, s) = evaluation.proof.split_at(32);
        let scalar = |bytes: &[u8]| {
            let bytes = bytes.try_into().ok()?;
            Option::<Scalar>::from(Scalar::from_canonical_bytes(bytes))
        };
        let (c, s) = scalar(c).zip(scalar(s)).ok_or(OprfError::Proof)?;
        let factors = factors(&self.encoded, blinded, &evaluation.elements);
        let (m, z) = (composite(&factors, sent), composite(&factors, &evaluated));
        let t2 = &s * RISTRETTO_BASEPOINT_TABLE + &c * &*self.table;
        let t3 = composite(&[s, c], &[m, z]);
        match challenge(&self.encoded, [&m, &z, &t2, &t3]) == c {
            true => Ok(evaluated),
            false => Err(OprfError::Proof),
        }
    }

    /// The encoding.
    pub fn encoded(&self) -> &Element {
        &self.encoded
    }

    #[cfg(test)]
    pub(super) fn point(&self) -> RistrettoPoint {
        self.table.basepoint()
    }
}

/// The end of Finalize: a hash over the input and the unblinded element.
pub(super) fn finish(input: &[u8], unblinded: &RistrettoPoint) -> [u8; 64] {
    let element = unblinded.compress();
    let len = |bytes: &[u8]| u16::try_from(bytes.len()).expect("inputs are short").to_be_bytes();
    let hash = Sha512::new().chain_update(len(input)).chain_update(input);
    hash.chain_update(len(element.as_bytes()))
        .chain_update(element.as_bytes())
        .chain_update(b"Finalize")
        .finalize()
        .into()
}
