//! ListObjects, of both versions, and ListObjectVersions, where each object has one.

use super::Gateway;
use super::access::{NULL_VERSION, Session};
use super::given::{etag, timestamp};
use super::store::{Rows, Store};
use super::upload::listed_max;
use crate::objects::attrs::Shown;
use crate::objects::key::is_in_xml;
use crate::objects::list::{Query, folder_of};
use data_encoding::BASE64URL_NOPAD;
use lamassu_access::Action;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};
use std::sync::Arc;

/// The characters to encode in a key: all but these, and slashes stay.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'*').remove(b'/');

/// The encoding of keys in an answer.
#[derive(Clone, Copy, Default)]
pub(super) struct Encoding(bool);

impl Encoding {
    pub fn of(asked: Option<&EncodingType>) -> Encoding {
        Encoding(asked.is_some_and(|kind| kind.as_str() == EncodingType::URL))
    }

    /// Refuses a request whose answer would repeat a text that no XML document can have.
    pub fn require<'a>(self, texts: impl IntoIterator<Item = &'a Option<String>>) -> S3Result<()> {
        if self.0 || texts.into_iter().flatten().all(|text| is_in_xml(text)) {
            return Ok(());
        }
        Err(s3_error!(
            InvalidArgument,
            "a prefix, delimiter or marker has a character that XML does not allow: ask for encoding-type=url"
        ))
    }

    pub fn text(self, text: &str) -> String {
        if self.0 { utf8_percent_encode(text, ENCODED).to_string() } else { text.into() }
    }
}

fn delimiter_of(delimiter: Option<&String>) -> Option<String> {
    delimiter.filter(|delimiter| !delimiter.is_empty()).cloned()
}

/// The token for the start of the next page.
fn token_of((text, is_group): &(String, bool)) -> String {
    let kind = if *is_group { 'g' } else { 'k' };
    BASE64URL_NOPAD.encode(format!("{kind}{text}").as_bytes())
}

/// The start that a token stands for. A token is not signed, so a client can make one up. All keys of its group are
/// left out, so the group must be one of this listing.
fn parse_token(token: &str, delimiter: Option<&str>, prefix: &str) -> S3Result<(String, bool)> {
    let decoded = BASE64URL_NOPAD.decode(token.as_bytes()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let text = decoded.unwrap_or_default();
    match (text.strip_prefix('k'), text.strip_prefix('g')) {
        (Some(key), _) => Ok((key.into(), false)),
        (_, Some(group)) if is_group(Some(group), delimiter, prefix) => Ok((group.into(), true)),
        (None, _) => Err(s3_error!(InvalidArgument, "the continuation token is none of this listing")),
    }
}

/// The content of a page, in the form of an answer.
struct Told {
    objects: Vec<Object>,
    groups: Vec<CommonPrefix>,
    next: Option<(String, bool)>,
}

impl Told {
    fn of(rows: Rows, encoding: Encoding, owner: Option<&Owner>) -> Told {
        let groups = rows.groups.iter().map(|group| CommonPrefix { prefix: Some(encoding.text(group)) });
        let object = |(key, Shown { attrs, size, mtime }): (String, Shown)| {
            let sums = attrs.checksums.keys().map(|name| ChecksumAlgorithm::from(name.clone()));
            Object {
                key: Some(encoding.text(&key)),
                size: size.try_into().ok(),
                e_tag: Some(etag(&attrs)),
                last_modified: Some(timestamp(mtime)),
                storage_class: Some(ObjectStorageClass::from_static(ObjectStorageClass::STANDARD)),
                checksum_algorithm: (!attrs.checksums.is_empty()).then(|| sums.collect()),
                owner: owner.cloned(),
                ..Default::default()
            }
        };
        Told { groups: groups.collect(), objects: rows.keys.into_iter().map(object).collect(), next: rows.next }
    }

    fn count(&self) -> Option<i32> {
        (self.objects.len() + self.groups.len()).try_into().ok()
    }

    fn groups(&mut self) -> Option<Vec<CommonPrefix>> {
        let groups = std::mem::take(&mut self.groups);
        (!groups.is_empty()).then_some(groups)
    }
}

impl<S: Store> Gateway<S> {
    /// A page, if the user may list the folder that is asked for.
    pub(super) async fn page(&self, session: &Session, bucket: &str, query: Query) -> S3Result<Rows> {
        session.require(Action::List, "List", bucket, folder_of(&query.prefix)).await?;
        let (bucket, user) = (bucket.to_owned(), session.user.clone());
        let listed = move |store: &Arc<S>| {
            let rows = store.list(&bucket, &query, &|folder| user.may_use(Action::List, &bucket, folder))?;
            // Without its rules the listing would omit folders, as if they did not exist.
            user.was_judged().map(|()| rows)
        };
        self.in_turns(session, listed).await
    }

    pub(super) async fn list_v2(
        &self,
        mut req: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let session = Session::of(&mut req)?;
        let input = req.input;
        let encoding = Encoding::of(input.encoding_type.as_ref());
        encoding.require([&input.prefix, &input.delimiter, &input.start_after])?;
        let max = listed_max(input.max_keys, "max-keys")?;
        let token = input.continuation_token.as_ref().filter(|token| !token.is_empty());
        let prefix = input.prefix.clone().unwrap_or_default();
        let delimiter = delimiter_of(input.delimiter.as_ref());
        let (after, is_group) = match (token, &input.start_after) {
            (Some(token), _) => {
                let (after, is_group) = parse_token(token, delimiter.as_deref(), &prefix)?;
                (Some(after), is_group)
            }
            (None, after) => (after.clone().filter(|after| !after.is_empty()), false),
        };
        let page = self.page(&session, &input.bucket, Query { prefix, delimiter, after, is_group, max }).await?;
        let owner = super::bucket::owner(&session);
        let mut told = Told::of(page, encoding, (input.fetch_owner == Some(true)).then_some(&owner));
        Ok(S3Response::new(ListObjectsV2Output {
            name: Some(input.bucket),
            prefix: Some(encoding.text(input.prefix.as_deref().unwrap_or_default())),
            max_keys: max.try_into().ok(),
            key_count: told.count(),
            continuation_token: input.continuation_token,
            is_truncated: Some(told.next.is_some()),
            next_continuation_token: told.next.as_ref().map(token_of),
            common_prefixes: told.groups(),
            contents: Some(told.objects),
            delimiter: delimiter_of(input.delimiter.as_ref()).map(|delimiter| encoding.text(&delimiter)),
            encoding_type: input.encoding_type,
            start_after: input.start_after.map(|after| encoding.text(&after)),
            ..Default::default()
        }))
    }

    pub(super) async fn list_v1(
        &self,
        mut req: S3Request<ListObjectsInput>,
    ) -> S3Result<S3Response<ListObjectsOutput>> {
        let session = Session::of(&mut req)?;
        let input = req.input;
        let encoding = Encoding::of(input.encoding_type.as_ref());
        encoding.require([&input.prefix, &input.delimiter, &input.marker])?;
        let max = listed_max(input.max_keys, "max-keys")?;
        let delimiter = delimiter_of(input.delimiter.as_ref());
        let after = input.marker.clone().filter(|marker| !marker.is_empty());
        let prefix = input.prefix.clone().unwrap_or_default();
        let is_group = is_group(after.as_deref(), delimiter.as_deref(), &prefix);
        let page = self.page(&session, &input.bucket, Query { prefix, delimiter, after, is_group, max }).await?;
        let owner = super::bucket::owner(&session);
        let mut told = Told::of(page, encoding, Some(&owner));
        let next_marker = told.next.as_ref().map(|(next, _)| encoding.text(next));
        Ok(S3Response::new(ListObjectsOutput {
            name: Some(input.bucket),
            prefix: Some(encoding.text(input.prefix.as_deref().unwrap_or_default())),
            marker: Some(encoding.text(input.marker.as_deref().unwrap_or_default())),
            max_keys: max.try_into().ok(),
            is_truncated: Some(told.next.is_some()),
            // S3 sends it only if there is a delimiter; otherwise it is the last key.
            next_marker: next_marker.filter(|_| input.delimiter.is_some()),
            common_prefixes: told.groups(),
            contents: Some(told.objects),
            delimiter: delimiter_of(input.delimiter.as_ref()).map(|delimiter| encoding.text(&delimiter)),
            encoding_type: input.encoding_type,
            ..Default::default()
        }))
    }

    pub(super) async fn list_versions(
        &self,
        mut req: S3Request<ListObjectVersionsInput>,
    ) -> S3Result<S3Response<ListObjectVersionsOutput>> {
        let session = Session::of(&mut req)?;
        let input = req.input;
        let encoding = Encoding::of(input.encoding_type.as_ref());
        encoding.require([&input.prefix, &input.delimiter, &input.key_marker])?;
        Encoding::default().require([&input.version_id_marker])?;
        let max = listed_max(input.max_keys, "max-keys")?;
        let delimiter = delimiter_of(input.delimiter.as_ref());
        let after = input.key_marker.clone().filter(|marker| !marker.is_empty());
        let prefix = input.prefix.clone().unwrap_or_default();
        let is_group = is_group(after.as_deref(), delimiter.as_deref(), &prefix);
        let page = self.page(&session, &input.bucket, Query { prefix, delimiter, after, is_group, max }).await?;
        let owner = super::bucket::owner(&session);
        let mut told = Told::of(page, encoding, Some(&owner));
        let version = |object: Object| ObjectVersion {
            key: object.key,
            size: object.size,
            e_tag: object.e_tag,
            last_modified: object.last_modified,
            owner: object.owner,
            is_latest: Some(true),
            version_id: Some(NULL_VERSION.into()),
            storage_class: Some(ObjectVersionStorageClass::from_static(ObjectVersionStorageClass::STANDARD)),
            ..Default::default()
        };
        Ok(S3Response::new(ListObjectVersionsOutput {
            name: Some(input.bucket),
            prefix: Some(encoding.text(input.prefix.as_deref().unwrap_or_default())),
            key_marker: input.key_marker.map(|marker| encoding.text(&marker)),
            version_id_marker: input.version_id_marker,
            max_keys: max.try_into().ok(),
            is_truncated: Some(told.next.is_some()),
            next_key_marker: told.next.as_ref().map(|(next, _)| encoding.text(next)),
            next_version_id_marker: told.next.as_ref().map(|_| NULL_VERSION.into()),
            common_prefixes: told.groups(),
            versions: Some(std::mem::take(&mut told.objects).into_iter().map(version).collect()),
            delimiter: delimiter_of(input.delimiter.as_ref()).map(|delimiter| encoding.text(&delimiter)),
            encoding_type: input.encoding_type,
            ..Default::default()
        }))
    }
}

/// Whether a marker is a group from an earlier page: the page continues after the group. Groups end with the first
/// delimiter after the prefix; other markers are keys.
fn is_group(marker: Option<&str>, delimiter: Option<&str>, prefix: &str) -> bool {
    let rest = marker.and_then(|marker| marker.strip_prefix(prefix));
    rest.zip(delimiter).and_then(|(rest, delimiter)| rest.split_once(delimiter)).is_some_and(|(_, end)| end.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back() {
        for next in [("a/ü".to_owned(), false), ("g/".to_owned(), true)] {
            assert_eq!(parse_token(&token_of(&next), Some("/"), "").expect("own"), next);
        }
        assert!(["", "!", "eA"].iter().all(|token| parse_token(token, Some("/"), "").is_err()));
    }

    /// The keys of a group are left out, and those of an empty one are all.
    #[test]
    fn a_token_of_a_group_is_one_of_its_listing() {
        for (group, delimiter, prefix) in [
            ("", None, ""),
            ("", Some("/"), ""),
            ("photos/", None, ""),
            ("photos/", Some("/"), "photos/"),
            ("photos", Some("/"), ""),
            ("photos/sub/", Some("/"), ""),
            ("other/", Some("/"), "photos/"),
        ] {
            let token = token_of(&(group.to_owned(), true));
            let refused = parse_token(&token, delimiter, prefix).expect_err(group);
            assert_eq!(refused.code().as_str(), "InvalidArgument", "{group} {delimiter:?} {prefix}");
        }
    }

    #[test]
    fn a_marker_is_a_group_by_what_is_behind_the_prefix() {
        for (marker, prefix, is_one) in [
            ("photos/", "", true),
            ("photos/", "photos/", false),
            ("photos/sub/", "photos/", true),
            ("photos/sub/", "ph", false),
            ("photos/1", "photos/", false),
            ("other/", "photos/", false),
        ] {
            assert_eq!(is_group(Some(marker), Some("/"), prefix), is_one, "{marker} {prefix}");
        }
        assert!(!is_group(None, Some("/"), "") && !is_group(Some("a/"), None, ""));
    }

    #[test]
    fn keys_are_encoded_on_request() {
        assert_eq!(Encoding(true).text("a b/ü+%"), "a%20b/%C3%BC%2B%25");
        assert_eq!(Encoding(false).text("a b"), "a b");
        for (text, is_told) in [("a\u{e4}\t", true), ("\0", false), ("a\u{1f}", false)] {
            let texts = [&None, &Some(text.to_owned())];
            assert!(Encoding(false).require(texts).is_ok() == is_told && Encoding(true).require(texts).is_ok());
        }
    }
}
