//! Ed25519 (RFC 8032), for the administrator's signature over a header (§4).

use crate::secret::{Secret, without_trace};
use crate::{NoRandom, Unauthentic};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};

/// A fresh signing seed.
///
/// # Errors
/// [`NoRandom`] when getrandom(2) fails.
pub fn seed() -> Result<Secret<32>, NoRandom> {
    Secret::random()
}

/// The public key of a seed.
pub fn public(seed: &Secret<32>) -> [u8; 32] {
    without_trace(|| SigningKey::from_bytes(seed.expose()).verifying_key().to_bytes())
}

/// Signs. The expanded key is wiped afterwards.
pub fn sign(seed: &Secret<32>, message: &[u8]) -> [u8; 64] {
    without_trace(|| SigningKey::from_bytes(seed.expose()).sign(message).to_bytes())
}

/// Verifies as RFC 8032 §5.1.7 does, and refuses public keys of small order.
///
/// # Errors
/// [`Unauthentic`], also for bytes that are no key.
pub fn verify(public: &[u8; 32], message: &[u8], signature: &[u8; 64]) -> Result<(), Unauthentic> {
    let key = VerifyingKey::from_bytes(public).map_err(|_| Unauthentic)?;
    key.verify_strict(message, &Signature::from_bytes(signature)).map_err(|_| Unauthentic)
}

#[cfg(test)]
mod tests {
    use super::*;
    use data_encoding::HEXLOWER;

    fn hex<const N: usize>(text: &str) -> [u8; N] {
        HEXLOWER.decode(text.as_bytes()).unwrap().try_into().unwrap()
    }

    /// RFC 8032 §7.1, tests 1 and 3.
    #[test]
    fn rfc8032() {
        for (seed, public_key, message, signature) in [
            (
                "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
                "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
                "",
                "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
            ),
            (
                "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
                "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
                "af82",
                "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
            ),
        ] {
            let seed = Secret::new(&mut hex(seed));
            let message = HEXLOWER.decode(message.as_bytes()).unwrap();
            assert_eq!(public(&seed), hex(public_key));
            assert_eq!(sign(&seed, &message), hex(signature));
            verify(&hex(public_key), &message, &hex(signature)).unwrap();
        }
    }

    #[test]
    fn every_change_is_seen() {
        let seed = Secret::new(&mut [7; 32]);
        let (public, signature) = (public(&seed), sign(&seed, b"header"));
        verify(&public, b"header", &signature).unwrap();
        assert!(verify(&public, b"hebder", &signature).is_err());
        assert!(verify(&super::public(&Secret::new(&mut [8; 32])), b"header", &signature).is_err());
        for i in 0..64 {
            let mut bad = signature;
            bad[i] ^= 1;
            assert!(verify(&public, b"header", &bad).is_err(), "byte {i}");
        }
        // The neutral element is a key of small order, under which anything could be made to verify.
        let mut neutral = [0; 32];
        neutral[0] = 1;
        let mut forged = [0; 64];
        forged[0] = 1;
        assert!(verify(&neutral, b"header", &forged).is_err());
    }
}
