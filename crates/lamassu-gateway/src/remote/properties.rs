//! The sealed properties of an object, in the provider's user metadata: its size, its file identity, and the client's
//! properties. They are sealed for the object's place, so a provider cannot show them under another key.

use super::Remote;
use super::client::Found;
use super::error::{RemoteError, Result};
use crate::objects::attrs::Attrs;
use data_encoding::BASE64URL_NOPAD;
use lamassu_vault::detached::Identity;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Most bytes of user metadata that providers keep with an object, name and value together.
const METADATA_MAX: usize = 2048;
/// Length of the metadata's name, which counts towards the limit.
const NAME_LEN: usize = "lamassu".len();

/// The properties of an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Properties {
    /// bytes of plaintext
    #[serde(rename = "s")]
    pub size: u64,
    /// identity of the stored file
    #[serde(rename = "f", with = "identity")]
    pub identity: Identity,
    /// when the content was stored, seconds since 1970, if the provider's time is that of a later change of tags
    #[serde(rename = "m", default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<i64>,
    /// the client's properties and those of the content; an empty entity tag was unknown when the object was begun, and
    /// is derived from the provider's
    #[serde(flatten)]
    attrs: Attrs,
}

/// A file identity as text: a letter for the kind, then the bytes.
mod identity {
    use super::{BASE64URL_NOPAD, Identity};
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn text(identity: &Identity) -> String {
        match identity {
            Identity::Head(bytes) => format!("h{}", BASE64URL_NOPAD.encode(bytes)),
            Identity::Id(bytes) => format!("i{}", BASE64URL_NOPAD.encode(bytes)),
        }
    }

    pub fn serialize<S: Serializer>(identity: &Identity, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&text(identity))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Identity, D::Error> {
        let text = String::deserialize(from)?;
        let bytes = |text: &str| BASE64URL_NOPAD.decode(text.as_bytes()).map_err(D::Error::custom);
        let wrong = |_| D::Error::custom("an identity of another length");
        match (text.strip_prefix('h'), text.strip_prefix('i')) {
            (Some(head), _) => bytes(head)?.try_into().map(Identity::Head).map_err(wrong),
            (_, Some(id)) => bytes(id)?.try_into().map(Identity::Id).map_err(wrong),
            (None, None) => Err(D::Error::custom("an unknown identity")),
        }
    }
}

impl Properties {
    /// Properties at the begin of an upload.
    pub fn new(attrs: &Attrs, size: u64, identity: Identity) -> Properties {
        Properties { size, identity, stored: None, attrs: attrs.clone() }
    }

    /// The attributes for answers. `etag`: the provider's entity tag.
    pub fn attrs(&self, etag: &str) -> Attrs {
        let etag = match (self.attrs.etag.is_empty(), etag.contains('-')) {
            (false, _) => return self.attrs.clone(),
            // Clients do not take a tag with a hyphen for an MD5 of the content.
            (true, true) => etag.into(),
            (true, false) => format!("{etag}-1"),
        };
        Attrs { etag, ..self.attrs.clone() }
    }

    /// Whether both belong to the same stored file: each stored object is a new file, a copy at the provider is not.
    pub fn are_of_file(&self, other: &Properties) -> bool {
        (self.identity, self.size) == (other.identity, other.size)
    }

    /// The file identity, in a form that a name can contain.
    pub(super) fn file(&self) -> String {
        identity::text(&self.identity)
    }

    /// Whether the entity tag was known when the object was begun, and also the checksum by `algorithm`, if one is
    /// given.
    pub(super) fn are_whole(&self, algorithm: Option<&str>) -> bool {
        let has_sum = algorithm.is_none_or(|algorithm| self.attrs.checksums.contains_key(algorithm));
        !self.attrs.etag.is_empty() && has_sum
    }

    /// The same properties with complete attributes.
    pub(super) fn with(&self, attrs: &Attrs) -> Properties {
        Properties { attrs: attrs.clone(), ..self.clone() }
    }
}

impl Remote {
    /// Seals the properties.
    ///
    /// # Errors
    /// [`RemoteError::MuchMetadata`].
    pub(super) fn seal(&self, place: &str, properties: &Properties) -> Result<String> {
        // Maps of text can always be encoded as JSON.
        let content = serde_json::to_vec(properties).unwrap_or_default();
        let sealed = self.files.seal_properties(place, &content)?;
        if sealed.len() + NAME_LEN > METADATA_MAX { Err(RemoteError::MuchMetadata) } else { Ok(sealed) }
    }

    /// Opens the properties of an object found at a place.
    ///
    /// # Errors
    /// [`RemoteError::Damaged`].
    pub(super) fn opened(&self, place: &str, found: &Found) -> Result<Arc<Properties>> {
        let damaged = |what: String| RemoteError::Damaged(format!("{}: {what}", self.name(place)));
        let content = self.files.open_properties(place, &found.properties);
        let content = content.map_err(|error| damaged(error.to_string()))?;
        let parsed: Properties = serde_json::from_slice(&content).map_err(|error| damaged(error.to_string()))?;
        let parsed = Arc::new(parsed);
        self.known.lock().put(place.into(), (found.etag.clone(), parsed.clone()));
        Ok(parsed)
    }

    /// The properties of the state with this tag, if they are in memory.
    pub(super) fn known(&self, place: &str, etag: &str) -> Option<Arc<Properties>> {
        let mut known = self.known.lock();
        let (of, properties) = known.get(place)?;
        (of == etag).then(|| properties.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::attrs::Given;

    #[test]
    fn they_are_text_and_come_back() {
        let given = Given { metadata: [("a".into(), "b".into())].into(), ..Given::default() };
        let attrs = Attrs { etag: "e".into(), given, is_composite: true, ..Attrs::default() };
        for identity in [Identity::Head([7; 40]), Identity::Id([9; 16])] {
            let properties = Properties::new(&attrs, 5, identity);
            let text = serde_json::to_string(&properties).expect("JSON");
            assert_eq!(serde_json::from_str::<Properties>(&text).expect("parses"), properties);
            assert_eq!(properties.attrs("x"), attrs);
        }
        assert!(serde_json::from_str::<Properties>(r#"{"s":1,"f":"iAAAA"}"#).is_err());
    }

    #[test]
    fn a_tag_that_follows_from_the_providers_is_no_md5() {
        let properties = Properties::new(&Attrs::default(), 5, Identity::Id([9; 16]));
        assert_eq!((properties.attrs("ab").etag, properties.attrs("ab-3").etag), ("ab-1".into(), "ab-3".into()));
    }
}
