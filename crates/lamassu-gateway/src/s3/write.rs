//! PutObject, CopyObject, deletions, tags.

use super::Gateway;
use super::access::{NULL_VERSION, Session};
use super::body::{self, Received};
use super::given::{Conditions, Reads, etag, given, guard, key_of, tag_set, tags_of, timestamp};
use super::sums::{self, Summing, Sums, put_sums};
use crate::objects::Guard;
use crate::objects::attrs::Attrs;
use data_encoding::{BASE64, HEXLOWER};
use http::HeaderMap;
use lamassu_access::Action;
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, TrailingHeaders, s3_error};
use std::sync::Arc;

/// Most objects of one deletion, as in S3.
pub(super) const DELETE_MAX: usize = 1000;

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
        let said = BASE64.decode(md5.as_bytes()).ok().filter(|md5| md5.len() == 16);
        let said = said.ok_or_else(|| s3_error!(InvalidDigest, "Content-MD5 is no MD5 in base64"))?;
        if HEXLOWER.encode(&said) != received.md5 {
            return Err(s3_error!(BadDigest, "the content has another MD5"));
        }
    }
    if length_of(headers)? != received.size {
        return Err(s3_error!(IncompleteBody, "the body has another length than was said"));
    }
    sums::compare(&sums::said(headers)?, &received.sums)?;
    let behind = trailers.and_then(|trailers| trailers.read(sums::said)).transpose()?.unwrap_or_default();
    sums::require_announced(headers, &behind)?;
    sums::compare(&behind, &received.sums)
}

impl Gateway {
    pub(super) async fn put(&self, mut req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let session = Session::of(&mut req)?;
        let (headers, trailers, input) = (req.headers, req.trailing_headers, req.input);
        if input.write_offset_bytes.is_some() {
            return Err(s3_error!(NotImplemented, "objects are written whole"));
        }
        let (key, bucket, owner) = (key_of(&input.key)?, input.bucket, session.user.owner);
        let guard = guard(input.if_match, input.if_none_match)?;
        let given = given(&headers, input.metadata.as_ref(), input.tagging.as_deref())?;
        let algorithm = input.checksum_algorithm.as_ref().map(ChecksumAlgorithm::as_str);
        let summing = Summing::asked(&headers, algorithm)?;
        let mut attrs = Attrs { given, ..Attrs::default() };
        if key.is_dir() {
            let received = body::nothing(input.body, summing).await?;
            compare(&received, &headers, trailers, input.content_md5.as_deref())?;
            (attrs.etag, attrs.checksums) = (received.md5, received.sums);
            let stored = attrs.clone();
            let make = move |objects: &Arc<_>| {
                let objects: &Arc<crate::objects::Objects> = objects;
                objects.make_directory(&bucket, &key, owner, &guard, &stored)
            };
            self.blocking(&session, make).await?;
            return Ok(S3Response::new(put_output(&attrs)));
        }
        let length = length_of(&headers)?;
        let (place, guarded) = ((bucket, key), guard.clone());
        let staged = self
            .blocking(&session, move |objects| {
                // Checked before the body is received: most requests that fail do so here.
                if guarded != Guard::None && guarded != Guard::Absent {
                    guarded.check(Some(&objects.find(&place.0, &place.1)?))?;
                }
                objects.stage(&place.0, &place.1, owner)
            })
            .await?;
        let staged = Arc::new(staged);
        let received = body::receive(&session, input.body, &staged, summing, length).await?;
        compare(&received, &headers, trailers, input.content_md5.as_deref())?;
        (attrs.etag, attrs.checksums) = (received.md5, received.sums);
        let attrs = self.place(&session, staged, guard, attrs).await?;
        Ok(S3Response::new(put_output(&attrs)))
    }

    async fn place(
        &self,
        session: &Session,
        staged: Arc<crate::objects::Staged>,
        guard: Guard,
        mut attrs: Attrs,
    ) -> S3Result<Attrs> {
        let staged = body::sole(staged)?;
        self.blocking(session, move |_| {
            staged.place(&guard, &mut attrs)?;
            Ok(attrs)
        })
        .await
    }

    pub(super) async fn copy(&self, mut req: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
        let session = Session::of(&mut req)?;
        let (headers, mut input) = (req.headers, req.input);
        let (from, from_key) = source_of(&session, &input.copy_source, "CopyObject")?;
        let (key, bucket, owner) = (key_of(&input.key)?, input.bucket, session.user.owner);
        let guard =
            guard(condition(&headers, http::header::IF_MATCH)?, condition(&headers, http::header::IF_NONE_MATCH)?)?;
        let new = given(&headers, input.metadata.as_ref(), input.tagging.as_deref())?;
        let is_new = replaces(input.metadata_directive.as_ref().map(MetadataDirective::as_str))?;
        let has_new_tags = replaces(input.tagging_directive.as_ref().map(TaggingDirective::as_str))?;
        if (&from, from_key.as_str()) == (&bucket, key.as_str()) && !is_new && !has_new_tags {
            return Err(s3_error!(
                InvalidRequest,
                "an object is copied to itself to replace its metadata or its tags alone"
            ));
        }
        let conditions = Conditions {
            matches: input.copy_source_if_match.take(),
            none_matches: input.copy_source_if_none_match.take(),
            modified_since: input.copy_source_if_modified_since.take(),
            unmodified_since: input.copy_source_if_unmodified_since.take(),
        };
        let source = self.blocking(&session, move |objects| objects.source(&from, &from_key)).await?;
        conditions.check(&source.attrs, source.attr.mtime, Reads::Source)?;
        let mut attrs = source.attrs.clone();
        if is_new {
            (attrs.given.headers, attrs.given.metadata) = (new.headers, new.metadata);
        }
        if has_new_tags {
            attrs.given.tags = new.tags;
        }
        let asked = input.checksum_algorithm.as_ref().map(|algorithm| algorithm.as_str().to_owned());
        let mut summing = Some(Summing::of(asked.as_deref())?);
        let copied = move |objects: &Arc<crate::objects::Objects>| {
            let attr =
                objects.copy(&source, (&bucket, &key), owner, &guard, &mut attrs, &mut |is_same, read, attrs| {
                    let is_known = asked.as_ref().is_none_or(|algorithm| attrs.checksums.contains_key(algorithm));
                    let is_good = is_same && is_known && is_own_tag(attrs);
                    // For content that was changed elsewhere, the digests are computed now.
                    let Some(summing) = summing.take().filter(|_| !is_good) else { return Ok(()) };
                    let mut digests = body::Digests::new(summing);
                    read(&mut |data| digests.update(data))?;
                    let received = digests.finish();
                    (attrs.etag, attrs.checksums) = (received.md5, received.sums);
                    (attrs.parts, attrs.is_composite) = (Vec::new(), false);
                    Ok(())
                })?;
            Ok((attrs, attr))
        };
        let (attrs, attr) = self.blocking(&session, copied).await?;
        let mut result = CopyObjectResult {
            e_tag: Some(etag(&attrs)),
            last_modified: Some(timestamp(attr.mtime)),
            ..Default::default()
        };
        put_sums!(result, &attrs.checksums);
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
        let (key, guard) = (key_of(&key)?, guard(if_match, None)?);
        self.blocking(&session, move |objects| objects.remove(&bucket, &key, &guard)).await?;
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
        let (is_quiet, user) = (delete.quiet == Some(true), session.user.clone());
        let removed = move |objects: &Arc<crate::objects::Objects>| {
            objects.bucket(&bucket)?;
            let (mut deleted, mut errors) = (Vec::new(), Vec::new());
            for object in delete.objects {
                let done = match user.may_use(Action::Delete, &bucket, &object.key) {
                    true => delete_one(objects, &bucket, &object),
                    false => Err(super::access::refused()),
                };
                match done {
                    Ok(()) if is_quiet => {}
                    Ok(()) => deleted.push(DeletedObject { key: Some(object.key), ..Default::default() }),
                    Err(error) => errors.push(Error {
                        code: Some(error.code().as_str().into()),
                        message: error.message().map(String::from),
                        key: Some(object.key),
                        version_id: object.version_id,
                    }),
                }
            }
            Ok((deleted, errors))
        };
        let (deleted, errors) = self.blocking(&session, removed).await?;
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
        let key = key_of(&key)?;
        let found = self.blocking(&session, move |objects| objects.find(&bucket, &key)).await?;
        Ok(S3Response::new(GetObjectTaggingOutput { tag_set: tag_set(&found.attrs), version_id: None }))
    }

    pub(super) async fn put_tags(
        &self,
        mut req: S3Request<PutObjectTaggingInput>,
    ) -> S3Result<S3Response<PutObjectTaggingOutput>> {
        let session = Session::of(&mut req)?;
        let PutObjectTaggingInput { bucket, key, tagging, .. } = req.input;
        let (key, tags) = (key_of(&key)?, tags_of(tagging.tag_set)?);
        self.blocking(&session, move |objects| objects.set_tags(&bucket, &key, tags)).await?;
        Ok(S3Response::new(PutObjectTaggingOutput::default()))
    }

    pub(super) async fn delete_tags(
        &self,
        mut req: S3Request<DeleteObjectTaggingInput>,
    ) -> S3Result<S3Response<DeleteObjectTaggingOutput>> {
        let session = Session::of(&mut req)?;
        let DeleteObjectTaggingInput { bucket, key, .. } = req.input;
        let key = key_of(&key)?;
        self.blocking(&session, move |objects| objects.set_tags(&bucket, &key, Default::default())).await?;
        let done = DeleteObjectTaggingOutput::default();
        Ok(S3Response::with_status(done, http::StatusCode::NO_CONTENT))
    }
}

/// Whether a copy gets new properties in place of those of its source.
pub(super) fn replaces(directive: Option<&str>) -> S3Result<bool> {
    match directive {
        None | Some("COPY") => Ok(false),
        Some("REPLACE") => Ok(true),
        Some(_) => Err(s3_error!(InvalidArgument, "a directive is COPY or REPLACE")),
    }
}

/// A condition that the library's input of a copy lacks.
pub(super) fn condition(headers: &HeaderMap, name: http::HeaderName) -> S3Result<Option<ETagCondition>> {
    let parsed = headers.get(&name).map(|value| ETagCondition::parse_http_header(value.as_bytes()));
    parsed.transpose().map_err(|_| s3_error!(InvalidArgument, "{name} is an entity tag or *"))
}

fn delete_one(objects: &Arc<crate::objects::Objects>, bucket: &str, object: &ObjectIdentifier) -> S3Result<()> {
    if object.version_id.as_ref().is_some_and(|version| version != NULL_VERSION) {
        return Err(s3_error!(NoSuchVersion, "objects have no versions here but \"null\""));
    }
    if object.size.is_some() || object.last_modified_time.is_some() {
        return Err(s3_error!(NotImplemented, "of the conditions of a deletion If-Match alone"));
    }
    let guard = guard(object.e_tag.clone().map(ETagCondition::ETag), None)?;
    Ok(objects.remove(bucket, &key_of(&object.key)?, &guard)?)
}

/// The bucket and the key of a copy's source, which the user must be allowed to read.
pub(super) fn source_of(
    session: &Session,
    source: &CopySource,
    operation: &str,
) -> S3Result<(String, crate::objects::key::Key)> {
    let (bucket, key) = named_source(session, source, operation)?;
    Ok((bucket, key_of(&key)?))
}

/// The same, with the key as it was sent.
pub(super) fn named_source(session: &Session, source: &CopySource, operation: &str) -> S3Result<(String, String)> {
    let CopySource::Bucket { bucket, key, version_id } = source else {
        return Err(s3_error!(NotImplemented, "objects are copied from buckets of this gateway alone"));
    };
    session.require(Action::Read, operation, bucket, key)?;
    if version_id.as_ref().is_some_and(|version| &**version != NULL_VERSION) {
        return Err(s3_error!(NoSuchVersion, "objects have no versions here but \"null\""));
    }
    Ok((bucket.to_string(), key.to_string()))
}

/// Whether the entity tag was made with the object.
pub(super) fn is_own_tag(attrs: &Attrs) -> bool {
    !attrs.etag.contains('-') || !attrs.parts.is_empty()
}

pub(super) fn put_output(attrs: &Attrs) -> PutObjectOutput {
    let mut output = PutObjectOutput { e_tag: Some(etag(attrs)), ..Default::default() };
    let sums: &Sums = &attrs.checksums;
    put_sums!(output, sums);
    if !sums.is_empty() {
        output.checksum_type = Some(super::read::checksum_type(attrs));
    }
    output
}
