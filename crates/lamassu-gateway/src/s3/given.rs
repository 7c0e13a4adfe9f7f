//! Properties of an object in requests and answers: headers, user metadata, tags.

use crate::objects::attrs::{Attrs, Given};
use crate::objects::key::is_in_xml;
use http::HeaderMap;
use lamassu_vault::Time;
use percent_encoding::percent_decode_str;
use s3s::dto::{ETag, ETagCondition, Metadata, Tag, Timestamp};
use s3s::{S3Result, s3_error};
use std::collections::BTreeMap;
use time::OffsetDateTime;

/// Headers that an object keeps.
const HEADERS: [&str; 6] =
    ["content-type", "content-encoding", "content-language", "content-disposition", "cache-control", "expires"];
/// User metadata, names and values together, bytes, as in S3.
const METADATA_MAX: usize = 2048;
/// Tags of an object, and their lengths in characters, as in S3.
const TAGS_MAX: usize = 10;
const TAG_KEY_MAX: usize = 128;
const TAG_VALUE_MAX: usize = 256;
/// The type of an object for which none was given.
pub const CONTENT_TYPE: &str = "binary/octet-stream";
/// Describes how a body is sent, not the object.
const CHUNKED: &str = "aws-chunked";

/// The properties in a request.
///
/// # Errors
/// `MetadataTooLarge`, `InvalidTag`, `InvalidArgument`.
pub fn given(headers: &HeaderMap, metadata: Option<&Metadata>, tagging: Option<&str>) -> S3Result<Given> {
    let mut given = Given::default();
    for name in HEADERS {
        let Some(value) = headers.get(name) else { continue };
        let value = value.to_str().map_err(|_| s3_error!(InvalidArgument, "the header {name} is no ASCII text"))?;
        let value = if name == "content-encoding" { without_chunked(value) } else { value.into() };
        if !value.is_empty() {
            given.headers.insert(name.into(), value);
        }
    }
    let pairs = metadata.into_iter().flatten();
    given.metadata = pairs.map(|(name, value)| (name.clone(), value.clone())).collect();
    if given.metadata.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() > METADATA_MAX {
        return Err(s3_error!(MetadataTooLarge, "user metadata have {METADATA_MAX} bytes at most"));
    }
    given.tags = tagging.map_or(Ok(BTreeMap::new()), parse_tags)?;
    Ok(given)
}

fn without_chunked(value: &str) -> String {
    if !value.contains(CHUNKED) {
        return value.into();
    }
    let kept: Vec<&str> = value.split(',').map(str::trim).filter(|coding| *coding != CHUNKED).collect();
    kept.join(", ")
}

/// Tags in a header: `a=1&b=2`.
fn parse_tags(text: &str) -> S3Result<BTreeMap<String, String>> {
    let decoded = |part: &str| {
        let part = part.replace('+', " ");
        let text = percent_decode_str(&part).decode_utf8().map(String::from);
        text.map_err(|_| s3_error!(InvalidTag, "a tag is no text"))
    };
    let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        Ok((decoded(key)?, decoded(value)?))
    });
    check_tags(pairs.collect::<S3Result<Vec<_>>>()?)
}

/// Tags in a document.
///
/// # Errors
/// `InvalidTag`.
pub fn tags_of(set: Vec<Tag>) -> S3Result<BTreeMap<String, String>> {
    check_tags(set.into_iter().map(|tag| (tag.key.unwrap_or_default(), tag.value.unwrap_or_default())).collect())
}

fn check_tags(pairs: Vec<(String, String)>) -> S3Result<BTreeMap<String, String>> {
    let count = pairs.len();
    if count > TAGS_MAX {
        return Err(s3_error!(InvalidTag, "an object has {TAGS_MAX} tags at most"));
    }
    for (key, value) in &pairs {
        if key.is_empty() || key.chars().count() > TAG_KEY_MAX || value.chars().count() > TAG_VALUE_MAX {
            return Err(s3_error!(
                InvalidTag,
                "a tag has a key of 1 to {TAG_KEY_MAX} characters, and a value of {TAG_VALUE_MAX} at most"
            ));
        }
    }
    if !pairs.iter().all(|(key, value)| is_in_xml(key) && is_in_xml(value)) {
        return Err(s3_error!(InvalidTag, "a tag has no character that XML cannot have, as most control characters"));
    }
    let tags: BTreeMap<_, _> = pairs.into_iter().collect();
    if tags.len() < count { Err(s3_error!(InvalidTag, "two tags have the same key")) } else { Ok(tags) }
}

/// Tags for an answer.
pub fn tag_set(attrs: &Attrs) -> Vec<Tag> {
    let tag = |(key, value): (&String, &String)| Tag { key: Some(key.clone()), value: Some(value.clone()) };
    attrs.given.tags.iter().map(tag).collect()
}

/// The time of the last change. A file may have any time: one before 1970, or after the year 9999, which no answer can
/// have, is shown as 1970.
pub fn timestamp(time: Time) -> Timestamp {
    let shown = OffsetDateTime::from_unix_timestamp(time.seconds.max(0)).ok();
    let shown = shown.and_then(|shown| shown.replace_nanosecond(time.nanos).ok());
    shown.unwrap_or(OffsetDateTime::UNIX_EPOCH).into()
}

/// The entity tag.
pub fn etag(attrs: &Attrs) -> ETag {
    ETag::Strong(attrs.etag.clone())
}

/// Conditions of a read request.
pub struct Conditions {
    /// `If-Match`
    pub matches: Option<ETagCondition>,
    /// `If-None-Match`
    pub none_matches: Option<ETagCondition>,
    /// `If-Modified-Since`
    pub modified_since: Option<Timestamp>,
    /// `If-Unmodified-Since`
    pub unmodified_since: Option<Timestamp>,
}

/// What a failed condition means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// For an object: it is not modified.
    Object,
    /// For the source of a copy: the copy fails.
    Source,
}

impl Conditions {
    /// Checks the conditions (RFC 9110, 13.2.2). Times are compared by the second, as headers have them.
    ///
    /// # Errors
    /// `PreconditionFailed`, `NotModified`.
    pub fn check(&self, attrs: &Attrs, mtime: Time, reads: Reads) -> S3Result<()> {
        let tag = etag(attrs);
        let is_tag = |condition: &ETagCondition| match condition {
            ETagCondition::Any => true,
            ETagCondition::ETag(other) => tag.weak_cmp(other),
        };
        let changed = timestamp(Time { nanos: 0, ..mtime });
        let failed = || s3_error!(PreconditionFailed, "a condition of the request does not hold");
        match (&self.matches, &self.unmodified_since) {
            (Some(condition), _) if !is_tag(condition) => return Err(failed()),
            (None, Some(since)) if changed > *since => return Err(failed()),
            _ => {}
        }
        let is_same = match (&self.none_matches, &self.modified_since) {
            (Some(condition), _) => is_tag(condition),
            (None, Some(since)) => changed <= *since,
            (None, None) => false,
        };
        match (is_same, reads) {
            (false, _) => Ok(()),
            (true, Reads::Source) => Err(failed()),
            (true, Reads::Object) => {
                let mut error = s3_error!(NotModified, "it is not modified");
                let mut headers = HeaderMap::new();
                headers.extend(tag.to_http_header().ok().map(|value| (http::header::ETAG, value)));
                error.set_headers(headers);
                Err(error)
            }
        }
    }
}

/// The condition on the object that is replaced.
///
/// # Errors
/// `NotImplemented` for both conditions at once.
pub fn guard(matches: Option<ETagCondition>, none: Option<ETagCondition>) -> S3Result<crate::objects::Guard> {
    use crate::objects::Guard;
    Ok(match (matches, none) {
        (None, None) => Guard::None,
        (Some(ETagCondition::Any), None) => Guard::Present,
        (Some(ETagCondition::ETag(tag)), None) => Guard::Tag(tag.into_value()),
        (None, Some(ETagCondition::Any)) => Guard::Absent,
        (None, Some(ETagCondition::ETag(tag))) => Guard::OtherTag(tag.into_value()),
        (Some(_), Some(_)) => return Err(s3_error!(NotImplemented, "If-Match and If-None-Match at once")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_time_of_a_file_can_be_shown() {
        let shown = |seconds, nanos| OffsetDateTime::from(timestamp(Time { seconds, nanos })).unix_timestamp_nanos();
        assert_eq!(shown(1_700_000_000, 5), 1_700_000_000_000_000_005);
        assert_eq!(shown(253_402_300_799, 999_999_999), 253_402_300_799_999_999_999);
        for seconds in [-1, i64::MIN, 253_402_300_800, i64::MAX] {
            assert_eq!(shown(seconds, 0), 0, "{seconds}");
        }
    }

    #[test]
    fn what_is_given_is_kept_and_bounded() {
        let mut headers = HeaderMap::new();
        headers.insert("content-type", "text/plain".parse().expect("a value"));
        headers.insert("content-encoding", "aws-chunked,gzip".parse().expect("a value"));
        headers.insert("content-length", "5".parse().expect("a value"));
        let given_one = given(&headers, None, Some("a=1&b%20c=d+e&f")).expect("good");
        assert_eq!(given_one.headers["content-encoding"], "gzip");
        assert_eq!(given_one.headers.len(), 2);
        assert_eq!(given_one.tags["b c"], "d e");
        assert_eq!(given_one.tags["f"], "");
        let much: Metadata = [("a".to_owned(), "x".repeat(2048))].into_iter().collect();
        assert!(given(&HeaderMap::new(), Some(&much), None).is_err());
        assert!(given(&HeaderMap::new(), None, Some("a=1&a=2")).is_err());
        let many: Vec<String> = (0..11).map(|n| format!("k{n}=v")).collect();
        assert!(given(&HeaderMap::new(), None, Some(&many.join("&"))).is_err());
    }

    #[test]
    fn conditions_hold_or_not() {
        let attrs = Attrs { etag: "a".into(), ..Attrs::default() };
        let mtime = Time { seconds: 100, nanos: 5 };
        let at = |seconds| Some(timestamp(Time { seconds, nanos: 0 }));
        let tag = |tag: &str| Some(ETagCondition::ETag(ETag::Strong(tag.into())));
        let none = || Conditions { matches: None, none_matches: None, modified_since: None, unmodified_since: None };
        let holds = |conditions: Conditions| conditions.check(&attrs, mtime, Reads::Object).is_ok();
        assert!(holds(none()));
        assert!(holds(Conditions { matches: tag("a"), unmodified_since: at(1), ..none() }));
        assert!(!holds(Conditions { matches: tag("b"), ..none() }));
        assert!(!holds(Conditions { none_matches: tag("a"), ..none() }));
        assert!(holds(Conditions { none_matches: tag("b"), modified_since: at(200), ..none() }));
        assert!(!holds(Conditions { modified_since: at(100), ..none() }));
        assert!(holds(Conditions { modified_since: at(99), ..none() }));
        assert!(holds(Conditions { unmodified_since: at(100), ..none() }));
        assert!(!holds(Conditions { unmodified_since: at(99), ..none() }));
    }
}
