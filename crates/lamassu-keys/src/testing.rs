//! Ways into decoders that are private otherwise, for fuzzers.

use crate::{KeyError, history, shares};
use lamassu_crypto::Secret;

pub use shares::text_of_payload as share_of_payload;

/// Takes any bytes as a KMIP server's answer to each question: the identifier found, whether a state was told, the key.
#[cfg(feature = "kmip")]
pub fn take_kmip_answers(bytes: &[u8]) -> (Option<String>, bool, Option<Secret<32>>) {
    crate::providers::take_kmip_answers(bytes)
}

/// A chain of history entries with these contents, whatever they are, sealed as entries are.
///
/// # Errors
/// [`KeyError::NoRandom`].
pub fn history_of(key: &Secret<32>, id: &[u8; 16], contents: &[&[u8]]) -> Result<Vec<u8>, KeyError> {
    history::chain_of(key, id, contents)
}

/// Reads a chain: how many entries verify, and how many bytes they are.
pub fn read_history(key: &Secret<32>, id: &[u8; 16], chain: &[u8]) -> (usize, usize) {
    history::read_chain(key, id, chain)
}
