//! Parsers of a provider's data, for fuzz targets.

use super::document::Page;
use super::place::{self, Opener};
use super::properties::Properties;
use lamassu_vault::detached::Detached;

/// The names in a listing, each with its key if it belongs to the bucket; `None`: it is no listing.
pub fn listing(files: &Detached, bucket: &str, document: &[u8]) -> Option<Vec<(String, Option<String>)>> {
    let page = Page::parse(document).ok()?;
    let mut opener = Opener::new(files, "", bucket);
    let names = page.objects.into_iter().map(|object| object.name).chain(page.prefixes);
    let keys = names.map(|name| {
        let key = opener.key(&name);
        (name, key)
    });
    Some(keys.collect())
}

/// The sealed name of a key.
pub fn name_of(files: &Detached, bucket: &str, key: &str) -> String {
    place::sealed(files, bucket, key)
}

/// The properties in an opened record, encoded again, after all operations that answers need; `None`: they cannot be
/// parsed.
pub fn properties(content: &[u8], etag: &str, parts: &[u32]) -> Option<Vec<u8>> {
    let properties: Properties = serde_json::from_slice(content).ok()?;
    let attrs = properties.attrs(etag);
    for part in parts {
        let _ = attrs.part(*part);
    }
    // Maps of text can always be encoded as JSON.
    Some(serde_json::to_vec(&properties).unwrap_or_default())
}
