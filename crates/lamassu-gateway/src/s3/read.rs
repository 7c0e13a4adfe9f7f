//! GetObject, HeadObject, and other questions about one object.

use super::Gateway;
use super::access::Session;
use super::body;
use super::given::{CONTENT_TYPE, Conditions, Reads, etag, timestamp};
use super::store::Store;
use super::sums::put_sums;
use crate::objects::attrs::{Attrs, Shown};
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};
use std::ops::Range as Bytes;
use std::sync::Arc;

/// A range of an object.
pub struct Piece {
    pub range: Bytes<u64>,
    /// set if it is not the whole object
    pub content_range: Option<String>,
    pub parts: Option<u32>,
}

impl Piece {
    pub fn of(shown: &Shown, range: Option<&Range>, part: Option<i32>) -> S3Result<Piece> {
        let (attrs, size) = (&shown.attrs, shown.size);
        let (range, parts) = match (range, part) {
            (Some(_), Some(_)) => return Err(s3_error!(InvalidRequest, "a range and the number of a part at once")),
            (Some(range), None) => (Some(range.check(size)?), None),
            (None, Some(number)) => {
                let number = u32::try_from(number).ok().filter(|number| *number > 0);
                let number = number.ok_or_else(|| s3_error!(InvalidArgument, "parts have numbers from 1"))?;
                match (attrs.part(number), number) {
                    (Some((range, count)), _) => (Some(range), Some(count)),
                    (None, 1) if attrs.parts.is_empty() => (None, None),
                    (None, _) => {
                        let mut error = s3_error!(InvalidRange, "the object has no such part");
                        error.set_code(s3s::S3ErrorCode::Custom("InvalidPartNumber".into()));
                        error.set_status_code(http::StatusCode::RANGE_NOT_SATISFIABLE);
                        return Err(error);
                    }
                }
            }
            (None, None) => (None, None),
        };
        let content_range = range.as_ref().map(|range| match range.end {
            0 => format!("bytes */{size}"),
            end => format!("bytes {}-{}/{size}", range.start, end - 1),
        });
        Ok(Piece { range: range.unwrap_or(0..size), content_range, parts })
    }
}

/// Sets the fields that answers about an object share.
macro_rules! tell {
    ($output:expr, $shown:expr, $piece:expr, $mode:expr, $asked:expr) => {{
        let (shown, asked): (&Shown, Asked) = ($shown, $asked);
        let attrs = &shown.attrs;
        let header = |name: &str| attrs.given.headers.get(name).cloned();
        $output.accept_ranges = Some("bytes".into());
        $output.content_length = i64::try_from($piece.range.end - $piece.range.start).ok();
        $output.content_range = $piece.content_range.clone();
        $output.parts_count = $piece.parts.and_then(|parts| parts.try_into().ok());
        $output.e_tag = Some(etag(attrs));
        $output.last_modified = Some(timestamp(shown.mtime));
        $output.content_type = Some(asked.content_type.or(header("content-type")).unwrap_or(CONTENT_TYPE.into()));
        $output.content_encoding = asked.content_encoding.or(header("content-encoding"));
        $output.content_language = asked.content_language.or(header("content-language"));
        $output.content_disposition = asked.content_disposition.or(header("content-disposition"));
        $output.cache_control = asked.cache_control.or(header("cache-control"));
        let expires = || Timestamp::parse(TimestampFormat::HttpDate, header("expires")?.as_str()).ok();
        $output.expires = asked.expires.or_else(expires);
        let metadata = attrs.given.metadata.iter().map(|(name, value)| (name.clone(), value.clone()));
        $output.metadata = (!attrs.given.metadata.is_empty()).then(|| metadata.collect());
        let is_asked = $mode.as_ref().is_some_and(|mode: &ChecksumMode| mode.as_str() == ChecksumMode::ENABLED);
        if is_asked && $piece.content_range.is_none() && !attrs.checksums.is_empty() {
            put_sums!($output, &attrs.checksums);
            $output.checksum_type = Some(checksum_type(attrs));
        }
    }};
}

/// Headers that a request asks for in the answer.
#[derive(Default)]
struct Asked {
    pub content_type: Option<String>,
    pub content_encoding: Option<String>,
    pub content_language: Option<String>,
    pub content_disposition: Option<String>,
    pub cache_control: Option<String>,
    pub expires: Option<Timestamp>,
}

macro_rules! asked {
    ($input:expr) => {
        Asked {
            content_type: $input.response_content_type.take(),
            content_encoding: $input.response_content_encoding.take(),
            content_language: $input.response_content_language.take(),
            content_disposition: $input.response_content_disposition.take(),
            cache_control: $input.response_cache_control.take(),
            expires: $input.response_expires.take(),
        }
    };
}

/// Whether the checksum of an object is of its content or of its parts' checksums.
pub(super) fn checksum_type(attrs: &Attrs) -> ChecksumType {
    ChecksumType::from_static(if attrs.is_composite { ChecksumType::COMPOSITE } else { ChecksumType::FULL_OBJECT })
}

macro_rules! conditions {
    ($input:expr) => {
        Conditions {
            matches: $input.if_match.take(),
            none_matches: $input.if_none_match.take(),
            modified_since: $input.if_modified_since.take(),
            unmodified_since: $input.if_unmodified_since.take(),
        }
    };
}

/// The start of a range, if it is counted from the beginning.
fn beginning(range: Option<&Range>) -> Option<u64> {
    match range? {
        Range::Int { first, .. } => Some(*first),
        Range::Suffix { .. } => None,
    }
}

impl<S: Store> Gateway<S> {
    pub(super) async fn get(&self, mut req: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let session = Session::of(&mut req)?;
        let mut input = req.input;
        let (key, bucket, conditions) = (input.key.clone(), input.bucket.clone(), conditions!(input));
        let (range, part) = (input.range, input.part_number);
        let opened = move |store: &Arc<S>| {
            store.open(&bucket, &key, beginning(range.as_ref()), |shown| {
                conditions.check(&shown.attrs, shown.mtime, Reads::Object)?;
                Piece::of(shown, range.as_ref(), part)
            })
        };
        let (shown, piece, content) = self.blocking(&session, opened).await?;
        let mut output = GetObjectOutput::default();
        tell!(output, &shown, piece, input.checksum_mode, asked!(input));
        output.tag_count = i32::try_from(shown.attrs.given.tags.len()).ok().filter(|count| *count > 0);
        output.body = Some(body::send(session, content, piece.range));
        Ok(S3Response::new(output))
    }

    pub(super) async fn head(&self, mut req: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let session = Session::of(&mut req)?;
        let mut input = req.input;
        let (key, bucket) = (input.key.clone(), input.bucket.clone());
        let shown = self.blocking(&session, move |store| store.shown(&bucket, &key)).await?;
        conditions!(input).check(&shown.attrs, shown.mtime, Reads::Object)?;
        let piece = Piece::of(&shown, input.range.as_ref(), input.part_number)?;
        let mut output = HeadObjectOutput::default();
        tell!(output, &shown, piece, input.checksum_mode, asked!(input));
        let mut response = S3Response::new(output);
        let count = shown.attrs.given.tags.len();
        if count > 0 {
            // The library's output has no field for it.
            response.headers.insert("x-amz-tagging-count", count.into());
        }
        Ok(response)
    }

    pub(super) async fn attributes(
        &self,
        mut req: S3Request<GetObjectAttributesInput>,
    ) -> S3Result<S3Response<GetObjectAttributesOutput>> {
        let session = Session::of(&mut req)?;
        let GetObjectAttributesInput { bucket, key, object_attributes, .. } = req.input;
        let shown = self.blocking(&session, move |store| store.shown(&bucket, &key)).await?;
        Ok(S3Response::new(attributes_of(&shown, &object_attributes)))
    }
}

/// The answer about the attributes that are wanted.
fn attributes_of(shown: &Shown, wanted: &[ObjectAttributes]) -> GetObjectAttributesOutput {
    let Shown { attrs, size, mtime } = shown;
    // Some clients send all names in one header, which the library does not split.
    let all = || wanted.iter().flat_map(|wanted| wanted.as_str().split(',')).map(str::trim);
    let wants = |name: &str| all().any(|wanted| wanted == name);
    let mut output = GetObjectAttributesOutput { last_modified: Some(timestamp(*mtime)), ..Default::default() };
    if wants(ObjectAttributes::ETAG) {
        output.e_tag = Some(etag(attrs));
    }
    if wants(ObjectAttributes::OBJECT_SIZE) {
        output.object_size = i64::try_from(*size).ok();
    }
    if wants(ObjectAttributes::STORAGE_CLASS) {
        output.storage_class = Some(StorageClass::from_static(StorageClass::STANDARD));
    }
    if wants(ObjectAttributes::CHECKSUM) && !attrs.checksums.is_empty() {
        let mut sums = Checksum { checksum_type: Some(checksum_type(attrs)), ..Checksum::default() };
        put_sums!(sums, &attrs.checksums);
        output.checksum = Some(sums);
    }
    let count: u32 = attrs.parts.iter().map(|parts| parts.count).sum();
    if wants(ObjectAttributes::OBJECT_PARTS) && count > 0 {
        let total_parts_count = count.try_into().ok();
        output.object_parts = Some(GetObjectAttributesParts { total_parts_count, ..Default::default() });
    }
    output
}
