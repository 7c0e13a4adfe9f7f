//! Publications of a tenant to the provider's proxy: the bundle with rules over tokens, and every few seconds the
//! status with revoked credentials. Both are signed and numbered; a proxy never accepts a lower number than before.

use crate::Result;
use crate::signed::{self, Purpose};
use lamassu_crypto::Secret;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use std::collections::BTreeSet;

/// File name of a bundle.
pub const BUNDLE_FILE: &str = "bundle.paseto";
/// File name of a status.
pub const STATUS_FILE: &str = "status.paseto";

/// Rules over tokens, as they are published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bundle {
    /// its number, higher than that of any earlier bundle
    pub seq: u64,
    /// the epoch of its tokens
    pub epoch: u64,
    /// digest of the vocabulary: [`crate::compile::Compiled::vocabulary_digest`]
    pub vocabulary: String,
    /// time of publication, seconds since 1970
    pub time: u64,
    /// statements in Cedar's JSON format
    pub policies: Vec<Json>,
}

/// Revocations. A status is valid for a short time, so a withheld status is noticed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// its number, higher than that of any earlier status
    pub seq: u64,
    /// the number of the newest bundle
    pub bundle: u64,
    /// time of publication, seconds since 1970
    pub time: u64,
    /// numbers of revoked credentials that have not expired
    pub revoked: BTreeSet<String>,
}

macro_rules! document {
    ($type:ty, $purpose:expr) => {
        impl $type {
            /// Signs the document.
            ///
            /// # Errors
            /// [`crate::AccessError::Document`]: it is too long.
            pub fn sign(&self, seed: &Secret<32>, bucket: &str) -> Result<String> {
                signed::seal(seed, $purpose, bucket, self)
            }

            /// Verifies a signed document.
            ///
            /// # Errors
            /// [`crate::AccessError::Document`].
            pub fn verify(public: &[u8; 32], bucket: &str, text: &str) -> Result<Self> {
                signed::open(public, $purpose, bucket, text)
            }

            /// Maximum length, in bytes.
            pub const fn most() -> usize {
                $purpose.most()
            }
        }
    };
}

document!(Bundle, Purpose::Bundle);
document!(Status, Purpose::Status);
