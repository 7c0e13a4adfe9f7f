//! The XML document of a listing. Its contents are untrusted: the provider chooses them.

use serde::Deserialize;

/// The element that marks a listing.
const LISTING: &[u8] = b"<ListBucketResult";
/// Longest entity tag accepted from a provider, in bytes: tags are kept in memory by the thousands.
pub const TAG_MAX: usize = 256;

/// An entry of a listing.
pub struct Listed {
    /// the whole name
    pub name: String,
    /// the provider's entity tag, without quotes, and the time of storing, RFC 3339; some providers omit a tag
    pub stored: Option<(String, String)>,
}

/// The document of a listing. Some providers omit elements (the type in `rusty_s3` requires more of them).
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    #[serde(default)]
    contents: Vec<Contents>,
    #[serde(default)]
    common_prefixes: Vec<Common>,
    is_truncated: Option<String>,
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
    /// common beginnings of names, up to the next slash
    pub prefixes: Vec<String>,
    /// token of the next page
    pub next: Option<String>,
}

impl Page {
    /// Parses a page. A document that announces more entries without a token is refused: providers that know only the
    /// first version of this request send it, and unlisted objects would be taken for removed ones.
    ///
    /// # Errors
    /// What is wrong with the document.
    pub fn parse(document: &[u8]) -> Result<Page, String> {
        if !document.windows(LISTING.len()).any(|window| window == LISTING) {
            return Err("the document is no listing".into());
        }
        let parsed: Document = quick_xml::de::from_reader(document).map_err(|error| error.to_string())?;
        let next = parsed.next_continuation_token.filter(|next| !next.is_empty());
        if next.is_none() && parsed.is_truncated.is_some_and(|said| said.trim().eq_ignore_ascii_case("true")) {
            return Err("more follows, and the document does not say where".into());
        }
        let tag = |etag: String| etag.trim_matches('"').to_owned();
        let objects = parsed.contents.into_iter().map(|object| Listed {
            name: object.key,
            stored: object.etag.map(tag).filter(|etag| (1..=TAG_MAX).contains(&etag.len())).zip(object.last_modified),
        });
        Ok(Page {
            objects: objects.collect(),
            prefixes: parsed.common_prefixes.into_iter().map(|common| common.prefix).collect(),
            next,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(said: &str) -> Result<Option<String>, String> {
        Page::parse(format!("<ListBucketResult>{said}</ListBucketResult>").as_bytes()).map(|page| page.next)
    }

    #[test]
    fn a_page_says_where_the_next_one_begins() {
        let token = "<NextContinuationToken>t</NextContinuationToken>";
        assert_eq!(next(&format!("<IsTruncated>true</IsTruncated>{token}")), Ok(Some("t".into())));
        assert_eq!((next("<IsTruncated>false</IsTruncated>"), next("")), (Ok(None), Ok(None)));
        let first_version = "<IsTruncated>true</IsTruncated><NextMarker>n</NextMarker>";
        assert!(next(first_version).is_err() && next("<IsTruncated> TRUE </IsTruncated>").is_err());
    }

    #[test]
    fn tags_that_no_provider_has_are_left_out() {
        for (len, is_taken) in [(0, false), (1, true), (TAG_MAX, true), (TAG_MAX + 1, false)] {
            let tag = "t".repeat(len);
            let entry = format!("<Key>k</Key><ETag>\"{tag}\"</ETag><LastModified>d</LastModified>");
            let document = format!("<ListBucketResult><Contents>{entry}</Contents></ListBucketResult>");
            let page = Page::parse(document.as_bytes()).expect("a page");
            assert_eq!(page.objects[0].stored.is_some(), is_taken, "{len}");
        }
    }
}
