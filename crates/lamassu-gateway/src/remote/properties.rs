//! What is sealed beside an object, in the provider's user metadata: its size, which file it is, and the client's
//! properties. Sealed for its place, so that a provider cannot show it under another key.

use super::Remote;
use super::client::Found;
use super::error::{RemoteError, Result};
use crate::objects::attrs::Attrs;
use data_encoding::BASE64URL_NOPAD;
use lamassu_vault::detached::Identity;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Most bytes of user metadata that providers keep with an object, name and value.
const METADATA_MAX: usize = 2048;
/// The metadata's name, which counts.
const NAME_LEN: usize = "lamassu".len();

/// See the module's head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Properties {
    /// bytes of plaintext
    #[serde(rename = "s")]
    pub size: u64,
    /// the file
    #[serde(rename = "f", with = "identity")]
    pub identity: Identity,
    /// when the content was stored, seconds since 1970, if the provider's time is that of a later change of tags
    #[serde(rename = "m", default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<i64>,
    /// what the client gave, and what is known of its content; the entity tag is empty if it was not known when the
    /// object was begun: it follows from the provider's then
    #[serde(flatten)]
    attrs: Attrs,
}

/// As text: a letter for the kind, then the bytes.
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
    /// Those that an upload begins with.
    pub fn new(attrs: &Attrs, size: u64, identity: Identity) -> Properties {
        Properties { size, identity, stored: None, attrs: attrs.clone() }
    }

    /// In the form that answers are made of. `etag`: the provider's.
    pub fn attrs(&self, etag: &str) -> Attrs {
        let etag = match (self.attrs.etag.is_empty(), etag.contains('-')) {
            (false, _) => return self.attrs.clone(),
            // Clients do not take a tag with a hyphen for an MD5 of the content.
            (true, true) => etag.into(),
            (true, false) => format!("{etag}-1"),
        };
        Attrs { etag, ..self.attrs.clone() }
    }

    /// Whether they are of the same file: each that is stored is a new one, and a copy at the provider is not.
    pub fn are_of_file(&self, other: &Properties) -> bool {
        (self.identity, self.size) == (other.identity, other.size)
    }

    /// The file, as it may be in a name.
    pub(super) fn file(&self) -> String {
        identity::text(&self.identity)
    }

    /// Whether an entity tag, and a checksum by this algorithm, if one is asked for, were known when it was begun.
    pub(super) fn are_whole(&self, algorithm: Option<&str>) -> bool {
        let has_sum = algorithm.is_none_or(|algorithm| self.attrs.checksums.contains_key(algorithm));
        !self.attrs.etag.is_empty() && has_sum
    }

    /// The same with what is known by now.
    pub(super) fn with(&self, attrs: &Attrs) -> Properties {
        Properties { attrs: attrs.clone(), ..self.clone() }
    }
}

impl Remote {
    /// The sealed text.
    ///
    /// # Errors
    /// [`RemoteError::MuchMetadata`].
    pub(super) fn seal(&self, place: &str, properties: &Properties) -> Result<String> {
        // Maps of text can always be encoded as JSON.
        let content = serde_json::to_vec(properties).unwrap_or_default();
        let sealed = self.files.seal_properties(place, &content)?;
        if sealed.len() + NAME_LEN > METADATA_MAX { Err(RemoteError::MuchMetadata) } else { Ok(sealed) }
    }

    /// The properties of what was found at a place.
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
