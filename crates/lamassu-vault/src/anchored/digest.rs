//! Digests of what is kept as one sealed text: directory records, link targets (`docs/freshness.md`, section 2).

use lamassu_anchor::Digest;
use lamassu_crypto::wrap;

/// Before a text, so that its digest is never that of a page or of a tree record.
const TEXT: u8 = 2;

/// The digest of a text as it lies in the store: SHA-256(0x02 ‖ text). Of a long link target: its head, then its rest.
pub(crate) fn digest_of_text(text: &[u8]) -> Digest {
    let mut bytes = Vec::with_capacity(1 + text.len());
    bytes.push(TEXT);
    bytes.extend(text);
    Digest(wrap::sha256(&bytes))
}
