//! PutObject, CopyObject, deletions, tags.

use super::Gateway;
use super::access::{NULL_VERSION, Session};
use super::body::{self, Received};
use super::given::{Conditions, etag, given, guard, tag_set, tags_of, timestamp};
use super::store::{Copying, Putting, Store};
use super::sums::{self, Summing, Sums, put_sums};
use crate::objects::Guard;
use crate::objects::attrs::Attrs;
use crate::objects::key::{KEY_MAX, is_in_xml};
use crate::work::{self, NoLonger};
use data_encoding::HEXLOWER;
use http::HeaderMap;
use lamassu_access::Action;
use s3s::dto::*;
use s3s::{S3Error, S3Request, S3Response, S3Result, TrailingHeaders, s3_error};
use std::sync::Arc;

/// Most objects of one deletion, as in S3.
const DELETE_MAX: usize = 1000;
/// Keys that are deleted in one turn, if that takes no longer than a turn.
const DELETED_AT_ONCE: usize = 32;

/// The length of a body, without the overhead of chunks.
///
/// # Errors
/// `MissingContentLength`: a body that ends with its connection may have been cut off.
pub(super) fn length_of(headers: &HeaderMap) -> S3Result<u64> {
    let length = headers.get("x-amz-decoded-content-length").or_else(|| headers.get(http::header::CONTENT_LENGTH));
    let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
    length.ok_or_else(|| s3_error!(MissingContentLength, "a body has a length"))
}

/// Compares what was received with the request's length, MD5 and checksums, including those after the body.
pub(super) fn compare(
    received: &Received,
    headers: &HeaderMap,
    trailers: Option<TrailingHeaders>,
    md5: Option<&str>,
) -> S3Result<()> {
    if let Some(md5) = md5 {
        sums::compare_md5(HEXLOWER.encode(&sums::parse_md5(md5)?).as_bytes(), received.md5.as_bytes())?;
    }
    if length_of(headers)? != received.size {
        return Err(s3_error!(IncompleteBody, "the body has another length than was said"));
    }
    sums::compare(&sums::said(headers)?, &received.sums)?;
    let behind = trailers.and_then(|trailers| trailers.read(sums::said)).transpose()?.unwrap_or_default();
    sums::require_announced(headers, &behind)?;
    sums::compare(&behind, &received.sums)
}

/// What the request says about its content before it is received; `compare` verifies it afterwards.
pub(super) fn said_before(headers: &HeaderMap, md5: Option<&str>) -> S3Result<Attrs> {
    let md5 = md5.and_then(|md5| sums::parse_md5(md5).ok());
    Ok(Attrs {
        etag: md5.map(|md5| HEXLOWER.encode(&md5)).unwrap_or_default(),
        checksums: sums::said(headers)?,
        ..Attrs::default()
    })
}

/// The conditions of a copy on its source.
macro_rules! source_conditions {
    ($input:expr) => {
        Conditions {
            matches: $input.copy_source_if_match.take(),
            none_matches: $input.copy_source_if_none_match.take(),
            modified_since: $input.copy_source_if_modified_since.take(),
            unmodified_since: $input.copy_source_if_unmodified_since.take(),
        }
    };
}
pub(super) use source_conditions;

impl<S: Store> Gateway<S> {
    pub(super) async fn put(&self, mut req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let session = Session::of(&mut req)?;
        let (headers, trailers, input) = (req.headers, req.trailing_headers, req.input);
        if input.write_offset_bytes.is_some() {
            return Err(s3_error!(NotImplemented, "objects are written whole"));
        }
        let guard = guard(input.if_match, input.if_none_match)?;
        let given = given(&headers, input.metadata.as_ref(), input.tagging.as_deref())?;
        let algorithm = input.checksum_algorithm.as_ref().map(ChecksumAlgorithm::as_str);
        let summing = Summing::asked(&headers, algorithm)?;
        let (length, owner) = (length_of(&headers)?, session.user.owner);
        let known = Attrs { given, ..said_before(&headers, input.content_md5.as_deref())? };
        let mut attrs = known.clone();
        let putting = Arc::new(Putting { bucket: input.bucket, key: input.key, length, owner, guard });
        let begun = putting.clone();
        let staged = Arc::new(self.blocking(&session, move |store| store.stage(&begun, known)).await?);
        let received = body::receive(&session, input.body, &staged, summing, length).await?;
        compare(&received, &headers, trailers, input.content_md5.as_deref())?;
        (attrs.etag, attrs.checksums) = (received.md5, received.sums);
        let mut staged = body::sole(staged)?;
        if S::lacks_parents(&putting, &staged) {
            let placed = putting.clone();
            let making = move |store: &Arc<S>| store.make_parents(&placed, &staged).map(|()| staged);
            staged = self.copying(&session, making).await?;
        }
        let attrs = self.syncing(&session, length, move |store| store.place(&putting, staged, attrs)).await?;
        Ok(S3Response::new(put_output(&attrs)))
    }

    pub(super) async fn copy(&self, mut req: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
        let session = Session::of(&mut req)?;
        let (headers, mut input) = (req.headers, req.input);
        let from = source_of(&session, &input.copy_source, "CopyObject").await?;
        let conditions = source_conditions!(input);
        let guard =
            guard(condition(&headers, http::header::IF_MATCH)?, condition(&headers, http::header::IF_NONE_MATCH)?)?;
        let new = given(&headers, input.metadata.as_ref(), input.tagging.as_deref())?;
        let is_new = replaces(input.metadata_directive.as_ref().map(MetadataDirective::as_str))?;
        let has_new_tags = replaces(input.tagging_directive.as_ref().map(TaggingDirective::as_str))?;
        let (bucket, key, owner) = (input.bucket, input.key, session.user.owner);
        if (&from.0, &from.1) == (&bucket, &key) && !is_new && !has_new_tags {
            return Err(s3_error!(
                InvalidRequest,
                "an object is copied to itself to replace its metadata or its tags alone"
            ));
        }
        let asked = input.checksum_algorithm.as_ref().map(|algorithm| algorithm.as_str().to_owned());
        Summing::of(asked.as_deref())?;
        let copying = Copying { from, bucket, key, owner, guard, conditions, new, is_new, has_new_tags, asked };
        let shown = self.copying(&session, move |store| store.copy(&copying)).await?;
        let mut result = CopyObjectResult {
            e_tag: Some(etag(&shown.attrs)),
            last_modified: Some(timestamp(shown.mtime)),
            ..Default::default()
        };
        put_sums!(result, &shown.attrs.checksums);
        Ok(S3Response::new(CopyObjectOutput { copy_object_result: Some(result), ..Default::default() }))
    }

    pub(super) async fn delete(
        &self,
        mut req: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let session = Session::of(&mut req)?;
        let DeleteObjectInput { bucket, key, if_match, if_match_size, if_match_last_modified_time, .. } = req.input;
        if if_match_size.is_some() || if_match_last_modified_time.is_some() {
            return Err(s3_error!(NotImplemented, "of the conditions of a deletion If-Match alone"));
        }
        let guard = guard(if_match, None)?;
        self.blocking(&session, move |store| store.remove(&bucket, &key, &guard)).await?;
        Ok(S3Response::with_status(DeleteObjectOutput::default(), http::StatusCode::NO_CONTENT))
    }

    pub(super) async fn delete_many(
        &self,
        mut req: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let session = Session::of(&mut req)?;
        let DeleteObjectsInput { bucket, delete, .. } = req.input;
        if delete.objects.is_empty() || delete.objects.len() > DELETE_MAX {
            return Err(s3_error!(MalformedXML, "1 to {DELETE_MAX} objects are deleted at once"));
        }
        // No object has such a key. The answer would repeat all of them, longer than they came.
        if delete.objects.iter().any(|object| object.key.len() > KEY_MAX) {
            return Err(s3_error!(KeyTooLongError, "a key has 1 to {KEY_MAX} bytes"));
        }
        if !delete.objects.iter().all(|object| is_in_xml(&object.key)) {
            return Err(s3_error!(MalformedXML, "a key has a character that XML does not allow"));
        }
        let (is_quiet, user) = (delete.quiet == Some(true), session.user.clone());
        let removed = move |store: &Arc<S>| {
            store.has_bucket(&bucket)?;
            let (mut keys, mut errors) = (Vec::new(), Vec::new());
            for object in delete.objects {
                let asked = match user.may_use(Action::Delete, &bucket, &object.key) {
                    true => deletion(&object),
                    false => user.was_judged().and_then(|()| Err(super::access::refused())),
                };
                match asked {
                    Ok(guard) => keys.push((object.key, guard)),
                    Err(error) => errors.push(failed(object.key, object.version_id, &error)),
                }
            }
            let mut deleted = Vec::new();
            for (done, (key, _)) in remove_in_turns(&**store, &bucket, &keys).into_iter().zip(keys) {
                match done {
                    Ok(()) if is_quiet => {}
                    Ok(()) => deleted.push(DeletedObject { key: Some(key), ..Default::default() }),
                    Err(error) => errors.push(failed(key, None, &error)),
                }
            }
            Ok((deleted, errors))
        };
        let (deleted, errors) = self.copying(&session, removed).await?;
        let some = |list: bool| list.then_some(());
        Ok(S3Response::new(DeleteObjectsOutput {
            deleted: some(!deleted.is_empty()).map(|()| deleted),
            errors: some(!errors.is_empty()).map(|()| errors),
            ..Default::default()
        }))
    }

    pub(super) async fn tags(
        &self,
        mut req: S3Request<GetObjectTaggingInput>,
    ) -> S3Result<S3Response<GetObjectTaggingOutput>> {
        let session = Session::of(&mut req)?;
        let GetObjectTaggingInput { bucket, key, .. } = req.input;
        let shown = self.blocking(&session, move |store| store.shown(&bucket, &key)).await?;
        Ok(S3Response::new(GetObjectTaggingOutput { tag_set: tag_set(&shown.attrs), version_id: None }))
    }

    pub(super) async fn put_tags(
        &self,
        mut req: S3Request<PutObjectTaggingInput>,
    ) -> S3Result<S3Response<PutObjectTaggingOutput>> {
        let session = Session::of(&mut req)?;
        let PutObjectTaggingInput { bucket, key, tagging, .. } = req.input;
        let tags = tags_of(tagging.tag_set)?;
        self.blocking(&session, move |store| store.set_tags(&bucket, &key, tags)).await?;
        Ok(S3Response::new(PutObjectTaggingOutput::default()))
    }

    pub(super) async fn delete_tags(
        &self,
        mut req: S3Request<DeleteObjectTaggingInput>,
    ) -> S3Result<S3Response<DeleteObjectTaggingOutput>> {
        let session = Session::of(&mut req)?;
        let DeleteObjectTaggingInput { bucket, key, .. } = req.input;
        self.blocking(&session, move |store| store.set_tags(&bucket, &key, Default::default())).await?;
        let done = DeleteObjectTaggingOutput::default();
        Ok(S3Response::with_status(done, http::StatusCode::NO_CONTENT))
    }
}

/// Removes in pieces, as contents are written: others' turns come between.
pub(super) fn remove_in_turns<S: Store>(store: &S, bucket: &str, keys: &[(String, Guard)]) -> Vec<S3Result<()>> {
    let removed = |keys: &[(String, Guard)]| match work::in_turn(|| Ok(store.remove_all(bucket, keys))) {
        Ok(done) => done,
        Err(gone @ NoLonger) => keys.iter().map(|_| Err(gone.into())).collect(),
    };
    keys.chunks(DELETED_AT_ONCE).flat_map(removed).collect()
}

/// Whether a copy gets new properties in place of those of its source.
fn replaces(directive: Option<&str>) -> S3Result<bool> {
    match directive {
        None | Some("COPY") => Ok(false),
        Some("REPLACE") => Ok(true),
        Some(_) => Err(s3_error!(InvalidArgument, "a directive is COPY or REPLACE")),
    }
}

/// A condition that the library's input of a copy lacks.
fn condition(headers: &HeaderMap, name: http::HeaderName) -> S3Result<Option<ETagCondition>> {
    let parsed = headers.get(&name).map(|value| ETagCondition::parse_http_header(value.as_bytes()));
    parsed.transpose().map_err(|_| s3_error!(InvalidArgument, "{name} is an entity tag or *"))
}

/// The condition of a deletion in a document.
fn deletion(object: &ObjectIdentifier) -> S3Result<Guard> {
    if object.version_id.as_ref().is_some_and(|version| version != NULL_VERSION) {
        return Err(s3_error!(NoSuchVersion, "objects have no versions here but \"null\""));
    }
    if object.size.is_some() || object.last_modified_time.is_some() {
        return Err(s3_error!(NotImplemented, "of the conditions of a deletion If-Match alone"));
    }
    guard(object.e_tag.clone().map(ETagCondition::ETag), None)
}

fn failed(key: String, version_id: Option<String>, error: &S3Error) -> Error {
    Error {
        code: Some(error.code().as_str().into()),
        message: error.message().map(String::from),
        key: Some(key),
        version_id,
    }
}

/// The bucket and the key of a copy's source, which the user must be allowed to read.
pub(super) async fn source_of(session: &Session, source: &CopySource, operation: &str) -> S3Result<(String, String)> {
    let CopySource::Bucket { bucket, key, version_id } = source else {
        return Err(s3_error!(NotImplemented, "objects are copied from buckets of this gateway alone"));
    };
    session.require(Action::Read, operation, bucket, key).await?;
    if version_id.as_ref().is_some_and(|version| &**version != NULL_VERSION) {
        return Err(s3_error!(NoSuchVersion, "objects have no versions here but \"null\""));
    }
    Ok((bucket.to_string(), key.to_string()))
}

fn put_output(attrs: &Attrs) -> PutObjectOutput {
    let mut output = PutObjectOutput { e_tag: Some(etag(attrs)), ..Default::default() };
    let sums: &Sums = &attrs.checksums;
    put_sums!(output, sums);
    if !sums.is_empty() {
        output.checksum_type = Some(super::read::checksum_type(attrs));
    }
    output
}
