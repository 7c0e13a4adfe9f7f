//! PutObject, CopyObject, deletions, tags.

use super::super::access::{NULL_VERSION, Session, refused};
use super::super::body::{self, Digests};
use super::super::given::{Conditions, Reads, etag, given, guard, tag_set, tags_of, timestamp};
use super::super::sums::{self, Summing, put_sums};
use super::super::write::{DELETE_MAX, compare, condition, is_own_tag, length_of, named_source, put_output, replaces};
use super::Gateway;
use crate::objects::attrs::Attrs;
use crate::objects::{Guard, PIECE};
use crate::remote::objects::Shown;
use crate::remote::{Remote, RemoteError};
use data_encoding::{BASE64, HEXLOWER};
use http::HeaderMap;
use lamassu_access::Action;
use s3s::dto::*;
use s3s::{S3Error, S3Request, S3Response, S3Result, s3_error};
use std::sync::Arc;

/// What is known of a content before it is received: `compare` verifies it afterwards.
pub(super) fn said_before(headers: &HeaderMap, md5: Option<&str>) -> S3Result<Attrs> {
    let md5 = md5.and_then(|md5| BASE64.decode(md5.as_bytes()).ok()).filter(|md5| md5.len() == 16);
    Ok(Attrs {
        etag: md5.map(|md5| HEXLOWER.encode(&md5)).unwrap_or_default(),
        checksums: sums::said(headers)?,
        ..Attrs::default()
    })
}

/// The content of an object, piece by piece.
fn read_through(remote: &Remote, bucket: &str, key: &str, each: &mut dyn FnMut(&[u8])) -> Result<(), RemoteError> {
    let (shown, reading) = remote.read(bucket, key, None)?;
    let open = remote.open_for(reading, &(0..shown.size))?;
    let mut at = 0;
    while at < shown.size {
        let piece = open.read(at, PIECE)?;
        if piece.is_empty() {
            return Err(RemoteError::Damaged("an object ends too early".into()));
        }
        each(&piece);
        at += piece.len() as u64;
    }
    Ok(())
}

impl Gateway {
    pub(in crate::s3) async fn put(&self, mut req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let session = Session::of(&mut req)?;
        let (headers, trailers, input) = (req.headers, req.trailing_headers, req.input);
        if input.write_offset_bytes.is_some() {
            return Err(s3_error!(NotImplemented, "objects are written whole"));
        }
        let place = Arc::new((input.bucket, input.key));
        let guard = guard(input.if_match, input.if_none_match)?;
        let given = given(&headers, input.metadata.as_ref(), input.tagging.as_deref())?;
        let algorithm = input.checksum_algorithm.as_ref().map(ChecksumAlgorithm::as_str);
        let summing = Summing::asked(&headers, algorithm)?;
        let length = length_of(&headers)?;
        let mut attrs = Attrs { given, ..said_before(&headers, input.content_md5.as_deref())? };
        let (to, guarded, known) = (place.clone(), guard.clone(), attrs.clone());
        let staged = self.blocking(&session, move |remote| remote.stage(&to.0, &to.1, length, &guarded, known)).await?;
        let staged = Arc::new(staged);
        let received = body::receive(&session, input.body, &staged, summing, length).await?;
        compare(&received, &headers, trailers, input.content_md5.as_deref())?;
        (attrs.etag, attrs.checksums) = (received.md5, received.sums);
        let staged = body::sole(staged)?;
        let placed = move |remote: &Arc<Remote>| {
            let attrs = staged.place(&guard, &attrs)?;
            remote.changed(&place.0, &place.1, true);
            Ok(attrs)
        };
        let attrs = self.blocking(&session, placed).await?;
        Ok(S3Response::new(put_output(&attrs)))
    }

    pub(in crate::s3) async fn copy(
        &self,
        mut req: S3Request<CopyObjectInput>,
    ) -> S3Result<S3Response<CopyObjectOutput>> {
        let session = Session::of(&mut req)?;
        let (headers, mut input) = (req.headers, req.input);
        let (from, from_key) = named_source(&session, &input.copy_source, "CopyObject")?;
        let (key, bucket) = (input.key, input.bucket);
        let guard =
            guard(condition(&headers, http::header::IF_MATCH)?, condition(&headers, http::header::IF_NONE_MATCH)?)?;
        let new = given(&headers, input.metadata.as_ref(), input.tagging.as_deref())?;
        let is_new = replaces(input.metadata_directive.as_ref().map(MetadataDirective::as_str))?;
        let has_new_tags = replaces(input.tagging_directive.as_ref().map(TaggingDirective::as_str))?;
        if (&from, &from_key) == (&bucket, &key) && !is_new && !has_new_tags {
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
        let asked = input.checksum_algorithm.as_ref().map(|algorithm| algorithm.as_str().to_owned());
        Summing::of(asked.as_deref())?;
        let copied = move |remote: &Arc<Remote>| {
            let source = (from.as_str(), from_key.as_str());
            remote.copy::<S3Error>(source, (&bucket, &key), &guard, false, |shown: &Shown| {
                conditions.check(&shown.attrs, shown.mtime, Reads::Source)?;
                let mut attrs = shown.attrs.clone();
                if is_new {
                    (attrs.given.headers, attrs.given.metadata) = (new.headers.clone(), new.metadata.clone());
                }
                if has_new_tags {
                    attrs.given.tags.clone_from(&new.tags);
                }
                let is_known = asked.as_ref().is_none_or(|algorithm| attrs.checksums.contains_key(algorithm));
                if !is_known {
                    let mut digests = Digests::new(Summing::of(asked.as_deref())?);
                    read_through(remote, source.0, source.1, &mut |data| digests.update(data))?;
                    let received = digests.finish();
                    (attrs.etag, attrs.checksums) = (received.md5, received.sums);
                    (attrs.parts, attrs.is_composite) = (Vec::new(), false);
                } else if !is_own_tag(&attrs) {
                    attrs.etag.clear();
                }
                Ok(attrs)
            })
        };
        let shown = self.blocking_s3(&session, copied).await?;
        let mut result = CopyObjectResult {
            e_tag: Some(etag(&shown.attrs)),
            last_modified: Some(timestamp(shown.mtime)),
            ..Default::default()
        };
        put_sums!(result, &shown.attrs.checksums);
        Ok(S3Response::new(CopyObjectOutput { copy_object_result: Some(result), ..Default::default() }))
    }

    pub(in crate::s3) async fn delete(
        &self,
        mut req: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let session = Session::of(&mut req)?;
        let DeleteObjectInput { bucket, key, if_match, if_match_size, if_match_last_modified_time, .. } = req.input;
        if if_match_size.is_some() || if_match_last_modified_time.is_some() {
            return Err(s3_error!(NotImplemented, "of the conditions of a deletion If-Match alone"));
        }
        let guard = guard(if_match, None)?;
        self.blocking(&session, move |remote| remote.remove(&bucket, &key, &guard)).await?;
        Ok(S3Response::with_status(DeleteObjectOutput::default(), http::StatusCode::NO_CONTENT))
    }

    pub(in crate::s3) async fn delete_many(
        &self,
        mut req: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let session = Session::of(&mut req)?;
        let DeleteObjectsInput { bucket, delete, .. } = req.input;
        if delete.objects.is_empty() || delete.objects.len() > DELETE_MAX {
            return Err(s3_error!(MalformedXML, "1 to {DELETE_MAX} objects are deleted at once"));
        }
        let (is_quiet, user) = (delete.quiet == Some(true), session.user.clone());
        let removed = move |remote: &Arc<Remote>| {
            remote.bucket(&bucket)?;
            let (mut keys, mut errors) = (Vec::new(), Vec::new());
            for object in delete.objects {
                let asked = match user.may_use(Action::Delete, &bucket, &object.key) {
                    true => deletion(&object),
                    false => Err(refused()),
                };
                match asked {
                    Ok(guard) => keys.push((object.key, guard)),
                    Err(error) => errors.push(failed(object.key, object.version_id, &error)),
                }
            }
            let mut deleted = Vec::new();
            for (done, (key, _)) in remote.remove_all(&bucket, &keys).into_iter().zip(keys) {
                match done {
                    Ok(()) if is_quiet => {}
                    Ok(()) => deleted.push(DeletedObject { key: Some(key), ..Default::default() }),
                    Err(error) => errors.push(failed(key, None, &error.into())),
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

    pub(in crate::s3) async fn tags(
        &self,
        mut req: S3Request<GetObjectTaggingInput>,
    ) -> S3Result<S3Response<GetObjectTaggingOutput>> {
        let session = Session::of(&mut req)?;
        let GetObjectTaggingInput { bucket, key, .. } = req.input;
        let shown = self.blocking(&session, move |remote| remote.find(&bucket, &key)).await?;
        Ok(S3Response::new(GetObjectTaggingOutput { tag_set: tag_set(&shown.attrs), version_id: None }))
    }

    pub(in crate::s3) async fn put_tags(
        &self,
        mut req: S3Request<PutObjectTaggingInput>,
    ) -> S3Result<S3Response<PutObjectTaggingOutput>> {
        let session = Session::of(&mut req)?;
        let PutObjectTaggingInput { bucket, key, tagging, .. } = req.input;
        let tags = tags_of(tagging.tag_set)?;
        self.blocking(&session, move |remote| remote.set_tags(&bucket, &key, tags)).await?;
        Ok(S3Response::new(PutObjectTaggingOutput::default()))
    }

    pub(in crate::s3) async fn delete_tags(
        &self,
        mut req: S3Request<DeleteObjectTaggingInput>,
    ) -> S3Result<S3Response<DeleteObjectTaggingOutput>> {
        let session = Session::of(&mut req)?;
        let DeleteObjectTaggingInput { bucket, key, .. } = req.input;
        self.blocking(&session, move |remote| remote.set_tags(&bucket, &key, Default::default())).await?;
        let done = DeleteObjectTaggingOutput::default();
        Ok(S3Response::with_status(done, http::StatusCode::NO_CONTENT))
    }
}

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
