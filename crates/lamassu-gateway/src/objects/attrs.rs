//! The properties of an object besides its content, in one sealed attribute of its file: entity tag, headers, user
//! metadata, tags, checksums. In a vault it is in the namespace `trusted.`, which only root sees in a mount: a user who
//! copies a file with its attributes does not copy properties of the other content.

use super::much_metadata;
use super::node::Node;
use lamassu_vault::{Attr, Result, Time, VaultError};
use s3s::crypto::{Checksum as _, Md5};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The attribute's name.
pub const NAME: &str = "lamassu.object";

/// The content to which the entity tag and the checksums belong. A program that writes to the file in a mount changes
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    size: u64,
    seconds: i64,
    nanos: u32,
}

impl Version {
    /// The version of a file.
    pub fn of(attr: &Attr) -> Version {
        let Time { seconds, nanos } = attr.mtime;
        Version { size: attr.size, seconds, nanos }
    }
}

/// A number of consecutive parts of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parts {
    /// how many
    pub count: u32,
    /// bytes of each
    pub size: u64,
}

/// Properties that a client gives when an object is made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Given {
    /// `content-type` and others, by their names
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// `x-amz-meta-…`, without the prefix
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// tags
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
}

/// The properties of an object besides its content. Those of an object at a provider are the same.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attrs {
    /// the entity tag, without quotes; empty: it is not known yet
    #[serde(rename = "e", default, skip_serializing_if = "String::is_empty")]
    pub etag: String,
    /// what was given
    #[serde(flatten)]
    pub given: Given,
    /// checksums, base64, by the name of the algorithm (`CRC32C`)
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub checksums: BTreeMap<String, String>,
    /// whether the checksums are checksums of the parts' checksums
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_composite: bool,
    /// the parts of an object made of parts; empty also if the list is too long to be kept
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Parts>,
}

/// An object, as clients see it.
#[derive(Clone, Debug)]
pub struct Shown {
    /// entity tag, headers, metadata, tags, checksums
    pub attrs: Attrs,
    /// bytes
    pub size: u64,
    /// when it was stored
    pub mtime: Time,
}

/// The content of a file's attribute.
#[derive(Serialize, Deserialize)]
struct Stored {
    /// the content that the properties belong to
    version: Version,
    #[serde(flatten)]
    attrs: Attrs,
}

impl Attrs {
    /// The properties of an object as it is now. If its file was written by other means, the tag only distinguishes
    /// contents, and is not a digest.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn of(node: &Node) -> Result<Attrs> {
        let stored = node.xattr(NAME)?.and_then(|value| serde_json::from_slice::<Stored>(&value).ok());
        let version = Version::of(node.attr());
        Ok(match stored {
            Some(stored) if node.is_dir() || stored.version == version => stored.attrs,
            Some(stored) => Attrs { etag: foreign(node.attr()), given: stored.attrs.given, ..Attrs::default() },
            None => Attrs { etag: foreign(node.attr()), ..Attrs::default() },
        })
    }

    /// The properties for a listing. If they are damaged or outdated, the object is listed with what its file tells.
    /// Reading the object reports the damage.
    ///
    /// # Errors
    /// As [`Attrs::of`], otherwise.
    pub fn listed(node: &Node) -> Result<Attrs> {
        match Attrs::of(node) {
            Err(error) if is_of_one_object(&error) => {
                tracing::warn!(%error, "the properties of an object cannot be read; it is listed without them");
                Ok(Attrs { etag: foreign(node.attr()), ..Attrs::default() })
            }
            attrs => attrs,
        }
    }

    /// Whether a directory was made as an object.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn are_of(node: &Node) -> Result<bool> {
        Ok(node.xattr(NAME)?.is_some())
    }

    /// Stores the properties for the content that a file has according to `attr`.
    ///
    /// # Errors
    /// [`ObjectError::MuchMetadata`]; those of the vault.
    pub fn store(&self, node: &Node, attr: &Attr) -> super::Result<()> {
        let stored = Stored { version: Version::of(attr), attrs: self.clone() };
        // Maps of text can always be encoded as JSON.
        let stored = serde_json::to_vec(&stored).unwrap_or_default();
        node.set_xattr(NAME, &stored).map_err(|error| much_metadata(node, error))
    }

    /// Whether the entity tag was computed from the content. A generated tag ends with `-1`, and only such a tag is
    /// not.
    pub fn has_own_tag(&self) -> bool {
        !self.parts.is_empty() || !self.etag.ends_with("-1")
    }

    /// The range of part `number`, and the number of parts.
    pub fn part(&self, number: u32) -> Option<(std::ops::Range<u64>, u32)> {
        let count = self.parts.iter().try_fold(0_u32, |count, parts| count.checked_add(parts.count))?;
        let (mut first, mut at) = (1, 0_u64);
        for Parts { count: of_size, size } in &self.parts {
            let within = number.checked_sub(first)?;
            if within < *of_size {
                let start = at.checked_add(u64::from(within).checked_mul(*size)?)?;
                return Some((start..start.checked_add(*size)?, count));
            }
            (first, at) = (first.checked_add(*of_size)?, at.checked_add(u64::from(*of_size).checked_mul(*size)?)?);
        }
        None
    }

    /// Adds a part at the end.
    pub fn add_part(&mut self, size: u64) {
        match self.parts.last_mut() {
            Some(last) if last.size == size => last.count += 1,
            _ => self.parts.push(Parts { count: 1, size }),
        }
    }
}

/// Whether only one object of the store is damaged or outdated. Others can be read.
pub fn is_of_one_object(error: &VaultError) -> bool {
    matches!(error, VaultError::Damaged { .. } | VaultError::Outdated { .. })
}

/// The tag of a file that was not made as an object. Clients do not take a tag with a hyphen for an MD5 of the content.
fn foreign(attr: &Attr) -> String {
    let mut hash = Md5::new();
    for number in [attr.ino, attr.size, attr.mtime.seconds as u64, attr.mtime.nanos.into()] {
        hash.update(&number.to_le_bytes());
    }
    format!("{}-1", data_encoding::HEXLOWER.encode(hash.finalize().as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_one_behind_the_other() {
        let mut attrs = Attrs::default();
        [5, 5, 5, 2].into_iter().for_each(|size| attrs.add_part(size));
        assert_eq!(attrs.parts.len(), 2);
        assert_eq!(attrs.part(1), Some((0..5, 4)));
        assert_eq!(attrs.part(3), Some((10..15, 4)));
        assert_eq!(attrs.part(4), Some((15..17, 4)));
        assert_eq!((attrs.part(0), attrs.part(5)), (None, None));
    }

    #[test]
    fn tags_of_objects_are_told_from_those_of_files() {
        let tag = |etag: &str| Attrs { etag: etag.into(), ..Attrs::default() };
        assert!(tag("ab").has_own_tag() && tag("ab-2").has_own_tag() && !tag("ab-1").has_own_tag());
        let mut of_one = tag("ab-1");
        of_one.add_part(5);
        assert!(of_one.has_own_tag());
    }

    #[test]
    fn they_are_stored_as_they_are() {
        let given = Given { headers: [("content-type".into(), "text/plain".into())].into(), ..Given::default() };
        let attrs = Attrs { etag: "ab".into(), given, is_composite: true, ..Attrs::default() };
        let version = Version { size: 5, seconds: 7, nanos: 9 };
        let stored = serde_json::to_vec(&Stored { version, attrs: attrs.clone() }).expect("JSON");
        let stored = serde_json::from_slice::<Stored>(&stored).expect("parses");
        assert_eq!((stored.version, stored.attrs), (version, attrs));
    }
}
