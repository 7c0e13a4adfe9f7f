//! The numbers, names and properties of the cipher suites (§2). What a suite computes is in `lamassu-crypto`.

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
    is_malleable: bool,
    takes_salt: bool,
}

impl Suite {
    /// Every suite, in order of id.
    pub const ALL: [Suite; 4] = [Suite::Aes, Suite::Paper, Suite::Blake3, Suite::Chacha];

    const fn properties(self) -> Properties {
        match self {
            Suite::Aes => Properties { name: "aes", is_malleable: false, takes_salt: true },
            Suite::Paper => Properties { name: "paper", is_malleable: false, takes_salt: false },
            Suite::Blake3 => Properties { name: "blake3", is_malleable: true, takes_salt: true },
            Suite::Chacha => Properties { name: "chacha", is_malleable: true, takes_salt: true },
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

    /// Whether its KDF takes a salt. That of `paper`, as published, does not.
    pub const fn takes_salt(self) -> bool {
        self.properties().takes_salt
    }
}
