//! Uploads in parts.

use super::super::access::Session;
use super::super::body::{self, Digests};
use super::super::given::{Conditions, Reads, etag, given, guard, timestamp};
use super::super::sums::{self, Summing, put_sums};
use super::super::upload::{
    Parted, STATUS_WAIT, answer_complete, completed_part, copied_range, list_uploads_of, listed_parts, number_of,
    upload_of, wrong_sum,
};
use super::super::write::{compare, length_of, named_source};
use super::Gateway;
use super::write::said_before;
use crate::objects::attrs::Attrs;
use crate::objects::{Guard, PIECE};
use crate::remote::multipart::Part as Uploaded;
use crate::remote::{Remote, RemoteError};
use s3s::dto::*;
use s3s::{S3Error, S3Request, S3Response, S3Result, s3_error};
use std::cell::RefCell;
use std::sync::Arc;

impl Gateway {
    pub(in crate::s3) async fn begin_upload(
        &self,
        mut req: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let session = Session::of(&mut req)?;
        let (headers, input) = (req.headers, req.input);
        let given = given(&headers, input.metadata.as_ref(), input.tagging.as_deref())?;
        let upload = upload_of(&input, given, &session)?;
        let (bucket, begun) = (input.bucket.clone(), upload.clone());
        let id = self.blocking(&session, move |remote| remote.begin_upload(&bucket, &begun)).await?;
        Ok(S3Response::new(super::super::upload::begun(input, upload, id)))
    }

    pub(in crate::s3) async fn part(
        &self,
        mut req: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let session = Session::of(&mut req)?;
        let (headers, trailers, input) = (req.headers, req.trailing_headers, req.input);
        let (number, length) = (number_of(input.part_number)?, length_of(&headers)?);
        let place = Arc::new((input.bucket, input.key, input.upload_id));
        let at = place.clone();
        let known = said_before(&headers, input.content_md5.as_deref())?;
        let begun = move |remote: &Arc<Remote>| remote.stage_part((&at.0, &at.1, &at.2), number, length, known);
        let (upload, staged) = self.blocking(&session, begun).await?;
        let said = input.checksum_algorithm.as_ref().map(ChecksumAlgorithm::as_str);
        let mut summing = Summing::asked(&headers, said)?;
        summing.add(upload.algorithm.as_deref())?;
        let staged = Arc::new(staged);
        let received = body::receive(&session, input.body, &staged, summing, length).await?;
        compare(&received, &headers, trailers, input.content_md5.as_deref())?;
        let (attrs, staged) =
            (Attrs { etag: received.md5, checksums: received.sums, ..Attrs::default() }, body::sole(staged)?);
        let placed =
            move |remote: &Arc<Remote>| remote.place_part((&place.0, &place.1, &place.2), number, &staged, &attrs);
        let attrs = self.blocking(&session, placed).await?;
        let mut output = UploadPartOutput { e_tag: Some(etag(&attrs)), ..Default::default() };
        put_sums!(output, &attrs.checksums);
        Ok(S3Response::new(output))
    }

    pub(in crate::s3) async fn part_copy(
        &self,
        mut req: S3Request<UploadPartCopyInput>,
    ) -> S3Result<S3Response<UploadPartCopyOutput>> {
        let session = Session::of(&mut req)?;
        let mut input = req.input;
        let number = number_of(input.part_number)?;
        let (from, from_key) = named_source(&session, &input.copy_source, "UploadPartCopy")?;
        let conditions = Conditions {
            matches: input.copy_source_if_match.take(),
            none_matches: input.copy_source_if_none_match.take(),
            modified_since: input.copy_source_if_modified_since.take(),
            unmodified_since: input.copy_source_if_unmodified_since.take(),
        };
        let (bucket, key, id, asked) = (input.bucket, input.key, input.upload_id, input.copy_source_range);
        let copied = move |remote: &Arc<Remote>| {
            let (shown, reading) = remote.read(&from, &from_key, None)?;
            conditions.check(&shown.attrs, shown.mtime, Reads::Source)?;
            let range = copied_range(asked.as_deref(), shown.size)?;
            let open = remote.open_for(reading, &range)?;
            let length = range.end - range.start;
            let (upload, staged) = remote.stage_part((&bucket, &key, &id), number, length, Attrs::default())?;
            let mut digests = Digests::new(Summing::of(upload.algorithm.as_deref())?);
            let mut at = range.start;
            while at < range.end {
                let piece = open.read(at, PIECE.min(usize::try_from(range.end - at).unwrap_or(PIECE)))?;
                if piece.is_empty() {
                    return Err(RemoteError::Damaged("an object ends too early".into()).into());
                }
                digests.update(&piece);
                staged.write(&piece)?;
                at += piece.len() as u64;
            }
            let received = digests.finish();
            let attrs = Attrs { etag: received.md5, checksums: received.sums, ..Attrs::default() };
            Ok(remote.place_part((&bucket, &key, &id), number, &staged, &attrs)?)
        };
        let attrs = self.blocking_s3(&session, copied).await?;
        let mut result = CopyPartResult {
            e_tag: Some(etag(&attrs)),
            last_modified: Some(timestamp(lamassu_vault::Time::now())),
            ..Default::default()
        };
        put_sums!(result, &attrs.checksums);
        Ok(S3Response::new(UploadPartCopyOutput { copy_part_result: Some(result), ..Default::default() }))
    }

    pub(in crate::s3) async fn complete(
        &self,
        mut req: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let session = Session::of(&mut req)?;
        let (headers, input) = (req.headers, req.input);
        let guard = guard(input.if_match, input.if_none_match)?;
        let parts = input.multipart_upload.and_then(|upload| upload.parts).unwrap_or_default();
        if parts.is_empty() {
            return Err(s3_error!(MalformedXML, "an object is made of one part or more"));
        }
        let said = sums::said(&headers)?;
        let (bucket, key, id) = (input.bucket.clone(), input.key.clone(), input.upload_id);
        let remote = self.remote.clone();
        let size = input.mpu_object_size.map(u64::try_from).transpose();
        let size = size.map_err(|_| s3_error!(InvalidRequest, "a size is not negative"))?;
        let work = session.spawn(move || complete(&remote, (&bucket, &key, &id), parts, &guard, &said, size));
        answer_complete(work, input.bucket, input.key, STATUS_WAIT).await
    }

    pub(in crate::s3) async fn abort(
        &self,
        mut req: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let session = Session::of(&mut req)?;
        let AbortMultipartUploadInput { bucket, key, upload_id, .. } = req.input;
        self.blocking(&session, move |remote| remote.abort_upload(&bucket, &key, &upload_id)).await?;
        let done = AbortMultipartUploadOutput::default();
        Ok(S3Response::with_status(done, http::StatusCode::NO_CONTENT))
    }

    pub(in crate::s3) async fn list_parts(
        &self,
        mut req: S3Request<ListPartsInput>,
    ) -> S3Result<S3Response<ListPartsOutput>> {
        let session = Session::of(&mut req)?;
        let input = req.input;
        let (key, bucket, id) = (input.key.clone(), input.bucket.clone(), input.upload_id.clone());
        let (upload, parts) = self.blocking(&session, move |remote| remote.parts(&bucket, &key, &id)).await?;
        let told = parts.into_iter().map(|part| Parted {
            number: part.number,
            size: part.shown.size,
            mtime: part.shown.mtime,
            attrs: part.shown.attrs,
        });
        Ok(S3Response::new(listed_parts(input, upload, told.collect(), &session)?))
    }

    pub(in crate::s3) async fn list_uploads(
        &self,
        mut req: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let session = Session::of(&mut req)?;
        let input = req.input;
        let (bucket, prefix) = (input.bucket.clone(), input.prefix.clone().unwrap_or_default());
        let uploads = self.blocking(&session, move |remote| remote.uploads(&bucket, &prefix)).await?;
        Ok(S3Response::new(list_uploads_of(input, uploads, &session)?))
    }
}

/// Makes the object. A checksum of the whole object is computed while its parts are sealed again, and kept if the
/// client has said it: what is sealed beside an object is sealed before its content.
fn complete(
    remote: &Arc<Remote>,
    place: (&str, &str, &str),
    parts: Vec<CompletedPart>,
    guard: &Guard,
    said: &sums::Sums,
    size: Option<u64>,
) -> S3Result<Attrs> {
    let found = remote.find_upload(place.0, place.1, place.2);
    let algorithm = found.as_ref().ok().and_then(|upload| upload.algorithm.clone());
    let parts = parts.into_iter().map(|part| completed_part(part, algorithm.as_deref()));
    let parts = parts.collect::<S3Result<Vec<_>>>()?;
    let upload = match found {
        Err(RemoteError::NoUpload) => return Ok(remote.completed_before(place.0, place.1, &parts)?),
        found => found?,
    };
    let said = algorithm.as_ref().and_then(|algorithm| said.get(algorithm)).cloned();
    let whole = algorithm.as_ref().filter(|_| upload.is_full).map(String::as_str);
    let summed = RefCell::new(Some(Summing::of(whole)?));
    let attrs = |upload: &crate::objects::Upload, parts: &[Uploaded]| {
        let bytes: u64 = parts.iter().map(|part| part.shown.size).sum();
        if size.is_some_and(|size| size != bytes) {
            return Err(s3_error!(InvalidRequest, "the object has another size"));
        }
        let mut attrs = Attrs { is_composite: !upload.is_full && upload.algorithm.is_some(), ..Attrs::default() };
        match (&upload.algorithm, upload.is_full, &said) {
            (Some(algorithm), true, Some(sum)) => drop(attrs.checksums.insert(algorithm.clone(), sum.clone())),
            (Some(algorithm), false, said) => {
                let sums = parts.iter().map(|part| part.shown.attrs.checksums.get(algorithm));
                let sum = sums::composite(algorithm, sums)?;
                // Some clients omit the number of parts.
                if said.as_ref().is_some_and(|said| *said != sum && sum.split('-').next() != Some(said)) {
                    return Err(wrong_sum());
                }
                attrs.checksums.insert(algorithm.clone(), sum);
            }
            (Some(_), true, None) | (None, _, _) => {}
        }
        Ok::<_, S3Error>(attrs)
    };
    let mut each = |data: &[u8]| {
        if let Some(summing) = &mut *summed.borrow_mut() {
            summing.update(data);
        }
    };
    let check = || {
        let sums = summed.borrow_mut().take().map(Summing::finish).unwrap_or_default();
        let sum = whole.and_then(|algorithm| sums.get(algorithm));
        match (&said, sum) {
            (Some(said), Some(sum)) if said != sum => Err(wrong_sum()),
            _ => Ok(()),
        }
    };
    remote.complete_upload(place, &parts, guard, attrs, &mut each, check)
}
