//! Ways into decoders that are private otherwise, for fuzzers.

use crate::{KeyError, history, shares};
use lamassu_crypto::Secret;

pub use shares::text_of_payload as share_of_payload;

/// Takes any bytes as a KMIP server's answer to each request. Returns the identifier, whether there was a state, and
/// the key.
#[cfg(feature = "kmip")]
pub fn take_kmip_answers(bytes: &[u8]) -> (Option<String>, bool, Option<Secret<32>>) {
    crate::providers::take_kmip_answers(bytes)
}

/// A chain of history entries with any contents, sealed as entries are.
///
/// # Errors
/// [`KeyError::NoRandom`].
pub fn history_of(key: &Secret<32>, id: &[u8; 16], contents: &[&[u8]]) -> Result<Vec<u8>, KeyError> {
    history::chain_of(key, id, contents)
}

/// Reads a chain. Returns the number of entries that verify, and their length in bytes.
pub fn read_history(key: &Secret<32>, id: &[u8; 16], chain: &[u8]) -> (usize, usize) {
    history::read_chain(key, id, chain)
}
