//! What a tenant publishes to the provider's proxy: rules over tokens, and, every few seconds, which credentials are
//! revoked. Both are signed and numbered; a proxy never goes back to a lower number.

use crate::Result;
use crate::signed::{self, Purpose};
use lamassu_crypto::Secret;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use std::collections::BTreeSet;

/// The file of a bundle.
pub const BUNDLE_FILE: &str = "bundle.paseto";
/// The file of a status.
pub const STATUS_FILE: &str = "status.paseto";

/// Rules over tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bundle {
    /// its number, higher than that of any before
    pub seq: u64,
    /// of the tokens
    pub epoch: u64,
    /// [`crate::compile::Compiled::vocabulary_digest`]
    pub vocabulary: String,
    /// s since 1970
    pub time: u64,
    /// Cedar's JSON format
    pub policies: Vec<Json>,
}

/// Revocations. It is good for a short time, so that one who keeps it back is noticed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// its number, higher than that of any before
    pub seq: u64,
    /// the number of the newest bundle
    pub bundle: u64,
    /// s since 1970
    pub time: u64,
    /// numbers of credentials whose time is not over
    pub revoked: BTreeSet<String>,
}

macro_rules! document {
    ($type:ty, $purpose:expr) => {
        impl $type {
            /// Signs it.
            ///
            /// # Errors
            /// [`crate::AccessError::Document`]: it is too long.
            pub fn sign(&self, seed: &Secret<32>, bucket: &str) -> Result<String> {
                signed::seal(seed, $purpose, bucket, self)
            }

            /// Verifies one.
            ///
            /// # Errors
            /// [`crate::AccessError::Document`].
            pub fn verify(public: &[u8; 32], bucket: &str, text: &str) -> Result<Self> {
                signed::open(public, $purpose, bucket, text)
            }

            /// Longest one, bytes.
            pub const fn most() -> usize {
                $purpose.most()
            }
        }
    };
}

document!(Bundle, Purpose::Bundle);
document!(Status, Purpose::Status);
