//! The cipher and the hash of a file's blocks (§10): those of its vault's suite, or others that the suite allows.
//!
//! A [`Method`] states the difference from the suite, so that 0 stands for the suite's own, and each pair of cipher and
//! hash has one value.

use crate::{Cipher, Hash, Suite};

/// What a suite does not have.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
pub enum MethodError {
    /// The suite has another cipher, or is kept as it was published.
    #[error("suite {} has no files under {}: {}", .0.name(), .1.name(), why_no_cipher(*.0))]
    NoCipher(Suite, Cipher),
    /// The suite is kept as it was published.
    #[error("suite {} is kept as the paper has it, so it does not hash with {}", .0.name(), .1.name())]
    NoHash(Suite, Hash),
}

/// Why a suite has no other ciphers.
const fn why_no_cipher(suite: Suite) -> &'static str {
    match (suite.cipher(), suite.takes_short_keys()) {
        (Cipher::Chacha20, _) => "its cipher is chacha20",
        (_, true) => "its ciphers are aes-256 and aes-128",
        (_, false) => "it is kept as the paper has it, with aes-256",
    }
}

/// The difference of a file's cipher and hash from the suite's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Method {
    has_short_key: bool,
    has_other_hash: bool,
}

impl Method {
    /// The suite's own cipher and hash.
    pub const OF_SUITE: Method = Method { has_short_key: false, has_other_hash: false };
    /// Every method, that of the suite first, each at its [`Method::index`].
    pub const ALL: [Method; 4] =
        [Method::from_index(0), Method::from_index(1), Method::from_index(2), Method::from_index(3)];

    const fn from_index(index: usize) -> Method {
        Method { has_short_key: index & 1 != 0, has_other_hash: index & 2 != 0 }
    }

    /// From its parts: keys of 128 bits in place of 256; the hash that the suite does not have.
    pub const fn new(has_short_key: bool, has_other_hash: bool) -> Method {
        Method { has_short_key, has_other_hash }
    }

    /// The same with a cipher, by name.
    ///
    /// # Errors
    /// [`MethodError::NoCipher`].
    pub fn with_cipher(self, suite: Suite, cipher: Cipher) -> Result<Method, MethodError> {
        let method = Method { has_short_key: cipher != suite.cipher(), ..self };
        if method.cipher(suite) == cipher && (!method.has_short_key || suite.takes_short_keys()) {
            return Ok(method);
        }
        Err(MethodError::NoCipher(suite, cipher))
    }

    /// The same with a hash.
    ///
    /// # Errors
    /// [`MethodError::NoHash`].
    pub fn with_hash(self, suite: Suite, hash: Hash) -> Result<Method, MethodError> {
        let method = Method { has_other_hash: hash != suite.hash(), ..self };
        if method.has_other_hash && !suite.takes_other_hash() {
            return Err(MethodError::NoHash(suite, hash));
        }
        Ok(method)
    }

    /// Whether a vault of this suite can have files of this method.
    ///
    /// # Errors
    /// What the suite does not have.
    pub const fn check(self, suite: Suite) -> Result<(), MethodError> {
        if self.has_short_key && !suite.takes_short_keys() {
            return Err(MethodError::NoCipher(suite, Cipher::Aes128));
        }
        if self.has_other_hash && !suite.takes_other_hash() {
            return Err(MethodError::NoHash(suite, self.hash(suite)));
        }
        Ok(())
    }

    /// All methods of a suite, its own first.
    pub fn all(suite: Suite) -> impl Iterator<Item = Method> {
        Method::ALL.into_iter().filter(move |method| method.check(suite).is_ok())
    }

    /// Its place in [`Method::ALL`].
    pub const fn index(self) -> usize {
        self.has_short_key as usize | (self.has_other_hash as usize) << 1
    }

    /// Whether blocks are encrypted by AES-128 in a suite of AES-256.
    pub const fn has_short_key(self) -> bool {
        self.has_short_key
    }

    /// Whether the hash is the one that the suite does not have.
    pub const fn has_other_hash(self) -> bool {
        self.has_other_hash
    }

    /// The same with the suite's cipher: the method of plain blocks.
    pub const fn without_cipher(self) -> Method {
        Method { has_short_key: false, ..self }
    }

    /// Which cipher that is in a suite.
    pub const fn cipher(self, suite: Suite) -> Cipher {
        if self.has_short_key { Cipher::Aes128 } else { suite.cipher() }
    }

    /// Which hash that is in a suite.
    pub const fn hash(self, suite: Suite) -> Hash {
        match (suite.hash(), self.has_other_hash) {
            (Hash::Sha256, false) | (Hash::Blake3, true) => Hash::Sha256,
            (Hash::Blake3, false) | (Hash::Sha256, true) => Hash::Blake3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_of_cipher_and_hash_is_one_method() {
        for suite in Suite::ALL {
            let mut seen = std::collections::HashSet::new();
            for (cipher, hash) in Cipher::ALL.into_iter().flat_map(|cipher| Hash::ALL.map(|hash| (cipher, hash))) {
                let made = Method::OF_SUITE.with_cipher(suite, cipher).and_then(|method| method.with_hash(suite, hash));
                let Ok(method) = made else { continue };
                assert!(seen.insert(method) && method.check(suite).is_ok());
                assert_eq!((method.cipher(suite), method.hash(suite)), (cipher, hash), "{suite:?}");
                assert_eq!(method == Method::OF_SUITE, (cipher, hash) == (suite.cipher(), suite.hash()), "{suite:?}");
            }
            assert_eq!(seen, Method::all(suite).collect(), "{suite:?}");
            assert_eq!(seen.len(), [4, 1, 4, 2][usize::from(suite.id()) - 1], "{suite:?}");
        }
        assert!(Method::ALL.iter().enumerate().all(|(index, method)| method.index() == index));
    }

    #[test]
    fn what_a_suite_lacks_is_refused_by_name() {
        let cipher = |suite, cipher| Method::OF_SUITE.with_cipher(suite, cipher);
        for (suite, lacks) in [
            (Suite::Aes, Cipher::Chacha20),
            (Suite::Blake3, Cipher::Chacha20),
            (Suite::Paper, Cipher::Aes128),
            (Suite::Chacha, Cipher::Aes128),
            (Suite::Chacha, Cipher::Aes256),
        ] {
            assert_eq!(cipher(suite, lacks), Err(MethodError::NoCipher(suite, lacks)));
        }
        let hash = Method::OF_SUITE.with_hash(Suite::Paper, Hash::Blake3);
        assert_eq!(hash, Err(MethodError::NoHash(Suite::Paper, Hash::Blake3)));
        assert!(MethodError::NoHash(Suite::Paper, Hash::Blake3).to_string().contains("paper"));
    }
}
