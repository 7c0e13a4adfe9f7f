//! Agreement of two parties on a key by one message: DHKEM(X25519, HKDF-SHA256) of RFC 9180, section 4.1. The curve's
//! arithmetic is that of `curve25519-dalek`.

use curve25519_dalek::MontgomeryPoint;
use lamassu_crypto::secret::without_trace;
use lamassu_crypto::{NoRandom, Secret, Unauthentic, wrap};

/// `suite_id` of the KEM.
const SUITE: &[u8; 5] = b"KEM\x00\x20";
const VERSION: &[u8; 7] = b"HPKE-v1";
const EXTRACT: &[u8; 7] = b"eae_prk";
const EXPAND: &[u8] = b"shared_secret";
const IKM_LEN: usize = VERSION.len() + SUITE.len() + EXTRACT.len() + 32;

/// The public key of a private key, which is any 32 random bytes.
pub fn public(private: &Secret<32>) -> [u8; 32] {
    without_trace(|| MontgomeryPoint::mul_base_clamped(*private.expose()).to_bytes())
}

/// Makes a shared key for the owner of a public key. Returns its encapsulation, which goes to that owner, and the key.
///
/// # Errors
/// [`KemError`].
pub fn encapsulate(to: &[u8; 32]) -> Result<([u8; 32], Secret<32>), KemError> {
    encapsulate_by(&Secret::random()?, to)
}

fn encapsulate_by(ephemeral: &Secret<32>, to: &[u8; 32]) -> Result<([u8; 32], Secret<32>), KemError> {
    let encapsulated = public(ephemeral);
    Ok((encapsulated, shared(ephemeral, to, &encapsulated, to)?))
}

/// Recovers the shared key from its encapsulation.
///
/// # Errors
/// [`Unauthentic`]: the encapsulation is a point of small order, with which everybody would know the shared key.
pub fn decapsulate(private: &Secret<32>, encapsulated: &[u8; 32]) -> Result<Secret<32>, Unauthentic> {
    shared(private, encapsulated, encapsulated, &public(private))
}

/// The reason why no key was made.
#[derive(Debug, thiserror::Error)]
pub enum KemError {
    /// The recipient's public key is of small order.
    #[error("it is not a public key")]
    Key(#[from] Unauthentic),
    /// The system gave no randomness.
    #[error(transparent)]
    NoRandom(#[from] NoRandom),
}

/// `ExtractAndExpand` of the RFC: its two labelled steps are one HKDF without salt.
fn shared(
    own: &Secret<32>,
    other: &[u8; 32],
    encapsulated: &[u8; 32],
    to: &[u8; 32],
) -> Result<Secret<32>, Unauthentic> {
    let mut is_zero = false;
    let ikm = Secret::<IKM_LEN>::filled_by(|ikm| {
        without_trace(|| {
            let point = MontgomeryPoint(*other).mul_clamped(*own.expose()).to_bytes();
            is_zero = wrap::equal(&point, &[0; 32]);
            let parts: [&[u8]; 4] = [VERSION, SUITE, EXTRACT, &point];
            let mut at = 0;
            for part in parts {
                ikm[at..at + part.len()].copy_from_slice(part);
                at += part.len();
            }
        });
    });
    if is_zero {
        return Err(Unauthentic);
    }
    let info = [&32_u16.to_be_bytes()[..], VERSION, SUITE, EXPAND, encapsulated, to].concat();
    Ok(wrap::hkdf(ikm.expose(), b"", &info))
}

#[cfg(test)]
mod tests {
    use super::*;
    use data_encoding::HEXLOWER;

    fn hex(text: &str) -> [u8; 32] {
        HEXLOWER.decode(text.as_bytes()).expect("digits").try_into().expect("32 bytes")
    }

    /// RFC 9180, A.1.1.
    #[test]
    fn rfc9180() {
        let ephemeral = Secret::new(&mut hex("52c4a758a802cd8b936eceea314432798d5baf2d7e9235dc084ab1b9cfa2f736"));
        let private = Secret::new(&mut hex("4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8"));
        let to = hex("3948cfe0ad1ddb695d780e59077195da6c56506b027329794ab02bca80815c4d");
        assert_eq!(public(&private), to);
        let (encapsulated, shared) = encapsulate_by(&ephemeral, &to).expect("a key");
        assert_eq!(encapsulated, hex("37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431"));
        assert_eq!(*shared.expose(), hex("fe0e18c9f024ce43799ae393c7e8fe8fce9d218875e8227b0187c04e7d2ea1fc"));
        assert_eq!(decapsulate(&private, &encapsulated).expect("a key").expose(), shared.expose());
    }

    #[test]
    fn keys_of_small_order_are_refused() {
        let private = Secret::new(&mut [7; 32]);
        for weak in [[0; 32], {
            let mut one = [0; 32];
            one[0] = 1;
            one
        }] {
            assert!(decapsulate(&private, &weak).is_err());
            assert!(encapsulate(&weak).is_err());
        }
    }
}
