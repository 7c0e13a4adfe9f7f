//! The document of a listing, which a provider may make as it likes: names, with what is told of them.

use serde::Deserialize;

/// What a listing's document has.
const LISTING: &[u8] = b"<ListBucketResult";

/// An entry of a listing.
pub struct Listed {
    /// the whole name
    pub name: String,
    /// the provider's entity tag, without quotes, and when it was stored, RFC 3339; some leave a tag out
    pub stored: Option<(String, String)>,
}

/// The document of a listing, of which not every provider sends all. (What `rusty_s3` has for it requires more.)
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    #[serde(default)]
    contents: Vec<Contents>,
    #[serde(default)]
    common_prefixes: Vec<Common>,
    next_continuation_token: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Contents {
    key: String,
    #[serde(rename = "ETag")]
    etag: Option<String>,
    last_modified: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Common {
    prefix: String,
}

/// A page of a listing.
#[derive(Default)]
pub struct Page {
    /// objects
    pub objects: Vec<Listed>,
    /// what objects have in common up to the next slash
    pub prefixes: Vec<String>,
    /// where the next page begins
    pub next: Option<String>,
}

impl Page {
    /// A page of a document.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(document: &[u8]) -> Result<Page, String> {
        if !document.windows(LISTING.len()).any(|window| window == LISTING) {
            return Err("the document is no listing".into());
        }
        let parsed: Document = quick_xml::de::from_reader(document).map_err(|error| error.to_string())?;
        let tag = |etag: String| etag.trim_matches('"').to_owned();
        let objects = parsed.contents.into_iter().map(|object| Listed {
            name: object.key,
            stored: object.etag.map(tag).filter(|etag| !etag.is_empty()).zip(object.last_modified),
        });
        Ok(Page {
            objects: objects.collect(),
            prefixes: parsed.common_prefixes.into_iter().map(|common| common.prefix).collect(),
            next: parsed.next_continuation_token.filter(|next| !next.is_empty()),
        })
    }
}
