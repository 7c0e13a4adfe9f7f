//! The token with which a host joins: one line, for one use.
//!
//! It has the server's address, the digest of its authority's certificate, and 128 random bits. A key pair is derived
//! from the random bits; the server stores only its public key. A joining host proves in the TLS handshake that it has
//! the token, so the server never serves an unknown peer.

use data_encoding::BASE32_NOPAD;
use lamassu_crypto::wrap::sha256;
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::str::FromStr;
use zeroize::Zeroizing;

const PREFIX: &str = "lamassu-join:";
const SECRET_LEN: usize = 16;
const DIGEST_LEN: usize = 32;

/// A token.
#[derive(Clone)]
pub struct Token {
    /// the server's address: host and port
    pub address: String,
    /// SHA-256 of the certificate of its authority
    pub authority: [u8; DIGEST_LEN],
    secret: Zeroizing<[u8; SECRET_LEN]>,
}

/// Shows only the server's address.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The error for a line that is not a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is no token of `lamassu-server enrol`: it was cut off, or changed")]
pub struct TokenError;

impl Token {
    /// Makes a new token.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn new(address: &str, authority: [u8; DIGEST_LEN]) -> Result<Token, ring::error::Unspecified> {
        let mut secret = Zeroizing::new([0; SECRET_LEN]);
        SystemRandom::new().fill(&mut *secret)?;
        Ok(Token { address: address.into(), authority, secret })
    }

    /// The token as a line.
    pub fn line(&self) -> Zeroizing<String> {
        let mut bytes = Zeroizing::new([&self.authority[..], &self.secret[..]].concat());
        let check = sha256(&[self.address.as_bytes(), &bytes].concat());
        bytes.extend(&check[..2]);
        Zeroizing::new(format!("{PREFIX}{}/{}", self.address, BASE32_NOPAD.encode(&bytes)))
    }

    /// The private key of the token, as PKCS #8.
    pub fn key(&self) -> Zeroizing<Vec<u8>> {
        let seed = Zeroizing::new(sha256(&[b"lamassu join", &self.secret[..]].concat()));
        // RFC 8410: the seed of an Ed25519 key in a private key info.
        const HEAD: [u8; 16] =
            [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
        Zeroizing::new([&HEAD[..], &seed[..]].concat())
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(line: &str) -> Result<Token, TokenError> {
        let (address, code) =
            line.trim().strip_prefix(PREFIX).and_then(|rest| rest.rsplit_once('/')).ok_or(TokenError)?;
        let bytes = Zeroizing::new(BASE32_NOPAD.decode(code.as_bytes()).map_err(|_| TokenError)?);
        let (rest, check) = bytes.split_at_checked(DIGEST_LEN + SECRET_LEN).ok_or(TokenError)?;
        if check != &sha256(&[address.as_bytes(), rest].concat())[..2] {
            return Err(TokenError);
        }
        let (authority, secret) = rest.split_at(DIGEST_LEN);
        Ok(Token {
            address: address.into(),
            authority: authority.try_into().map_err(|_| TokenError)?,
            secret: Zeroizing::new(secret.try_into().map_err(|_| TokenError)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_back_and_a_changed_one_does_not() -> Result<(), Box<dyn std::error::Error>> {
        let token = Token::new("server.example:7433", [5; 32]).map_err(|_| "no random numbers")?;
        let line = token.line();
        let back: Token = line.parse()?;
        assert_eq!((back.address.as_str(), back.authority), ("server.example:7433", [5; 32]));
        assert_eq!(*back.key(), *token.key());
        assert!(!format!("{token:?}").contains(line.rsplit('/').next().unwrap_or_default()));
        for changed in [line.replace("7433", "7434"), line[..line.len() - 1].into(), String::new(), "x".repeat(900)] {
            assert!(changed.parse::<Token>().is_err(), "{changed}");
        }
        Ok(())
    }
}
