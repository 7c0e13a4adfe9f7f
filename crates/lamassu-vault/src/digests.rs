//! What an anchor compares: digests of sealed parts that are replaced as a whole (directory records, link targets,
//! attributes; `docs/freshness.md`, section 2), and kinds of objects.

use crate::Kind;
use lamassu_anchor::{Digest, ObjectKind};
use lamassu_crypto::wrap;
use lamassu_format::header::VaultId;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Prefix of a text, so that its digest differs from that of any page or tree record.
const TEXT: u8 = 2;
/// Prefix of attributes.
const ATTRIBUTES: u8 = 3;
/// Prefix of a dataset's id. 4 is the prefix of a block.
const DATASET: u8 = 5;

/// Sealed attributes of one object: names and values as stored.
pub(crate) type StoredAttrs = BTreeMap<OsString, Vec<u8>>;

/// The digest of a text as stored: SHA-256(0x02 ‖ text). A long link target's text is its first part, then the rest.
pub(crate) fn digest_of_text(text: &[u8]) -> Digest {
    let mut bytes = Vec::with_capacity(1 + text.len());
    bytes.push(TEXT);
    bytes.extend(text);
    Digest(wrap::sha256(&bytes))
}

/// The digest of a stored link target: its text, and the rest of a long one.
pub(crate) fn digest_of_link(text: &[u8], rest: Option<&[u8]>) -> Digest {
    digest_of_text(&[text, rest.unwrap_or_default()].concat())
}

/// The digest of all sealed attributes of an object: SHA-256 over 0x03 and, for each one, ascending by stored name,
/// name and value, each after its length as u32. Without attributes: [`Digest::NONE`].
pub(crate) fn digest_of_attributes(attrs: &StoredAttrs) -> Digest {
    if attrs.is_empty() {
        return Digest::NONE;
    }
    let mut bytes = vec![ATTRIBUTES];
    for part in attrs.iter().flat_map(|(name, value)| [name.as_bytes(), value]) {
        // No store accepts a name or value that long.
        bytes.extend((part.len() as u32).to_le_bytes());
        bytes.extend(part);
    }
    Digest(wrap::sha256(&bytes))
}

/// The digest for the content of a directory that is a dataset: SHA-256(0x05 ‖ its id). Its record, header and entries
/// are in its own anchor; the outer vault's anchor records which dataset is in which place.
pub(crate) fn digest_of_dataset(id: &VaultId) -> Digest {
    Digest(wrap::sha256(&[&[DATASET][..], &id.0].concat()))
}

/// A stored link target.
pub(crate) struct ShownLink {
    pub text: Vec<u8>,
    /// the rest of a long one, if it exists
    pub rest: Option<Vec<u8>>,
}

impl ShownLink {
    pub fn digest(&self) -> Digest {
        digest_of_link(&self.text, self.rest.as_deref())
    }
}

/// The anchor's kind for a kind of the vault.
pub(crate) fn object_kind(kind: Kind) -> ObjectKind {
    match kind {
        Kind::File => ObjectKind::File,
        Kind::Dir => ObjectKind::Dir,
        Kind::Symlink => ObjectKind::Link,
        Kind::Fifo => ObjectKind::Fifo,
        Kind::Socket => ObjectKind::Socket,
        Kind::CharDevice => ObjectKind::Char,
        Kind::BlockDevice => ObjectKind::Block,
    }
}

/// The vault's kind for a kind of the anchor.
pub(crate) fn kind(kind: ObjectKind) -> Kind {
    match kind {
        ObjectKind::File => Kind::File,
        ObjectKind::Dir => Kind::Dir,
        ObjectKind::Link => Kind::Symlink,
        ObjectKind::Fifo => Kind::Fifo,
        ObjectKind::Socket => Kind::Socket,
        ObjectKind::Char => Kind::CharDevice,
        ObjectKind::Block => Kind::BlockDevice,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attrs(all: &[(&str, &str)]) -> Digest {
        digest_of_attributes(&all.iter().map(|(name, value)| (name.into(), value.as_bytes().to_vec())).collect())
    }

    #[test]
    fn attributes_of_two_objects_are_told_apart() {
        assert!(attrs(&[]).is_none());
        assert_eq!(attrs(&[("a", "1"), ("b", "2")]), attrs(&[("b", "2"), ("a", "1")]));
        let all =
            [attrs(&[("a", "1b2")]), attrs(&[("a", "1"), ("b", "2")]), attrs(&[("a1", "b2")]), attrs(&[("a", "")])];
        all.iter().enumerate().for_each(|(at, one)| assert!(!all[at + 1..].contains(one)));
        assert_eq!(attrs(&[("a", "1")]).0[..4], wrap::sha256(b"\x03\x01\0\0\0a\x01\0\0\x001")[..4]);
    }
}
