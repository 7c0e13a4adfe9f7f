//! The numbers, names and properties of the cipher suites (§2). What a suite computes is in `lamassu-crypto`.

use crate::{Cipher, Hash};
use serde::{Deserialize, Serialize};

/// A cipher suite, fixed per isolation zone: files of different suites never deduplicate with one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Suite {
    /// SHA-256, SP 800-108 KDF over AES-CMAC, AES-256-CBC, XAES-256-GCM.
    Aes = 1,
    /// As the Lamassu paper published it: SHA-256, K = AES-ECB(K_in, h), AES-256-CBC.
    Paper = 2,
    /// Keyed BLAKE3, AES-256-CTR, XAES-256-GCM.
    Blake3 = 3,
    /// Keyed BLAKE3, ChaCha20, XChaCha20-Poly1305.
    Chacha = 4,
}

struct Properties {
    name: &'static str,
    cipher: Cipher,
    hash: Hash,
    is_malleable: bool,
    /// It stays as it was published: its KDF has no place for a salt or a label.
    is_as_published: bool,
}

impl Suite {
    /// Every suite, in order of id.
    pub const ALL: [Suite; 4] = [Suite::Aes, Suite::Paper, Suite::Blake3, Suite::Chacha];

    const fn properties(self) -> Properties {
        match self {
            Suite::Aes => Properties {
                name: "aes",
                cipher: Cipher::Aes256,
                hash: Hash::Sha256,
                is_malleable: false,
                is_as_published: false,
            },
            Suite::Paper => Properties {
                name: "paper",
                cipher: Cipher::Aes256,
                hash: Hash::Sha256,
                is_malleable: false,
                is_as_published: true,
            },
            Suite::Blake3 => Properties {
                name: "blake3",
                cipher: Cipher::Aes256,
                hash: Hash::Blake3,
                is_malleable: true,
                is_as_published: false,
            },
            Suite::Chacha => Properties {
                name: "chacha",
                cipher: Cipher::Chacha20,
                hash: Hash::Blake3,
                is_malleable: true,
                is_as_published: false,
            },
        }
    }

    /// The number that goes into AAD.
    pub const fn id(self) -> u8 {
        self as u8
    }

    /// The name used on the command line, in headers and in derivation labels.
    pub const fn name(self) -> &'static str {
        self.properties().name
    }

    /// The suite of a name, or `None`.
    pub fn from_name(name: &str) -> Option<Suite> {
        Suite::ALL.into_iter().find(|s| s.name() == name)
    }

    /// Whether flipping a ciphertext bit flips the same plaintext bit. Such a suite is never read without re-hashing.
    pub const fn is_malleable(self) -> bool {
        self.properties().is_malleable
    }

    /// Whether the last bit of a block's key marks a block that was compressed before it was encrypted (§10). If not,
    /// no block of the suite is compressed.
    pub const fn marks_compressed(self) -> bool {
        !self.properties().is_as_published
    }

    /// The cipher of blocks, unless a file has another one.
    pub const fn cipher(self) -> Cipher {
        self.properties().cipher
    }

    /// The hash of blocks, unless a file has another one.
    pub const fn hash(self) -> Hash {
        self.properties().hash
    }

    /// Whether its KDF takes a salt. That of `paper`, as published, does not.
    pub const fn takes_salt(self) -> bool {
        !self.properties().is_as_published
    }

    /// Whether files may have AES-128 in place of its cipher, which then is AES-256. In `paper` they may not: its KDF,
    /// as published, gives no other key for it.
    pub const fn takes_short_keys(self) -> bool {
        matches!(self.cipher(), Cipher::Aes256) && !self.properties().is_as_published
    }

    /// Whether files may have the other hash. In `paper` they may not, for the same reason.
    pub const fn takes_other_hash(self) -> bool {
        !self.properties().is_as_published
    }
}
