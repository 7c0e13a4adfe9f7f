//! Uploads in parts.

use super::Gateway;
use super::access::Session;
use super::body;
use super::fault::lost;
use super::given::{Conditions, etag, given, guard, timestamp};
use super::listing::Encoding;
use super::read::checksum_type;
use super::store::{Completing, PartCopying, PartOf, Store};
use super::sums::{self, Summing, put_sums};
use super::write::{compare, length_of, said_before, source_conditions, source_of};
use crate::objects::attrs::{Attrs, Given, Shown};
use crate::objects::list::folder_of;
use crate::objects::uploads::{Listed, UploadPage, UploadQuery};
use crate::objects::{Completed, PARTS_MAX, Upload};
use lamassu_access::Action;
use lamassu_vault::Time;
use s3s::dto::*;
use s3s::{S3Error, S3Request, S3Response, S3Result, s3_error};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::task::JoinError;

/// Most parts or uploads that one answer lists, as in S3.
const LISTED_MAX: usize = 1000;

fn number_of(number: i32) -> S3Result<u32> {
    let number = u32::try_from(number).ok().filter(|number| (1..=PARTS_MAX).contains(number));
    number.ok_or_else(|| s3_error!(InvalidArgument, "parts have numbers from 1 to {PARTS_MAX}"))
}

/// The number of entries to list.
pub(super) fn listed_max(asked: Option<i32>, name: &str) -> S3Result<usize> {
    let asked = asked.unwrap_or(LISTED_MAX as i32);
    let asked = usize::try_from(asked).map_err(|_| s3_error!(InvalidArgument, "{name} is negative"))?;
    Ok(asked.min(LISTED_MAX))
}

impl<S: Store> Gateway<S> {
    pub(super) async fn begin_upload(
        &self,
        mut req: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let session = Session::of(&mut req)?;
        let (headers, input) = (req.headers, req.input);
        let given = given(&headers, input.metadata.as_ref(), input.tagging.as_deref())?;
        let upload = upload_of(&input, given, &session)?;
        let (bucket, owner, begins) = (input.bucket.clone(), session.user.owner, upload.clone());
        let id = self.copying(&session, move |store| store.begin_upload(&bucket, &begins, owner)).await?;
        Ok(S3Response::new(begun(input, upload, id)))
    }

    pub(super) async fn part(&self, mut req: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
        let session = Session::of(&mut req)?;
        let (headers, trailers, input) = (req.headers, req.trailing_headers, req.input);
        let (number, length) = (number_of(input.part_number)?, length_of(&headers)?);
        let part = PartOf { bucket: input.bucket, key: input.key, upload: input.upload_id, number };
        let (part, known) = (Arc::new(part), said_before(&headers, input.content_md5.as_deref())?);
        let begun = part.clone();
        let staged = self.blocking(&session, move |store| store.stage_part(&begun, length, known)).await?;
        let (algorithm, staged) = (staged.0, Arc::new(staged.1));
        let said = input.checksum_algorithm.as_ref().map(ChecksumAlgorithm::as_str);
        let mut summing = Summing::asked(&headers, said)?;
        summing.add(algorithm.as_deref())?;
        let received = body::receive(&session, input.body, &staged, summing, length).await?;
        compare(&received, &headers, trailers, input.content_md5.as_deref())?;
        let attrs = Attrs { etag: received.md5, checksums: received.sums, ..Attrs::default() };
        let staged = body::sole(staged)?;
        let (attrs, _) = self.syncing(&session, length, move |store| store.place_part(&part, staged, attrs)).await?;
        let mut output = UploadPartOutput { e_tag: Some(etag(&attrs)), ..Default::default() };
        put_sums!(output, &attrs.checksums);
        Ok(S3Response::new(output))
    }

    pub(super) async fn part_copy(
        &self,
        mut req: S3Request<UploadPartCopyInput>,
    ) -> S3Result<S3Response<UploadPartCopyOutput>> {
        let session = Session::of(&mut req)?;
        let mut input = req.input;
        let number = number_of(input.part_number)?;
        let from = source_of(&session, &input.copy_source, "UploadPartCopy").await?;
        let (conditions, range) = (source_conditions!(input), input.copy_source_range);
        let part = PartOf { bucket: input.bucket, key: input.key, upload: input.upload_id, number };
        let copying = PartCopying { from, part, conditions, range };
        let (attrs, mtime) = self.copying(&session, move |store| store.copy_part(&copying)).await?;
        let mut result =
            CopyPartResult { e_tag: Some(etag(&attrs)), last_modified: Some(timestamp(mtime)), ..Default::default() };
        put_sums!(result, &attrs.checksums);
        Ok(S3Response::new(UploadPartCopyOutput { copy_part_result: Some(result), ..Default::default() }))
    }

    pub(super) async fn complete(
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
        let size = input.mpu_object_size.map(u64::try_from).transpose();
        let completing = Completing {
            bucket: input.bucket.clone(),
            key: input.key.clone(),
            upload: input.upload_id,
            parts: parts.into_iter().map(completed_part).collect::<S3Result<_>>()?,
            owner: session.user.owner,
            guard,
            said: sums::said(&headers)?,
            size: size.map_err(|_| s3_error!(InvalidRequest, "a size is not negative"))?,
        };
        let store = self.store.clone();
        let work = async move { session.copying(move || store.complete(&completing)).await.await };
        answer_complete(work, input.bucket, input.key, STATUS_WAIT).await
    }

    pub(super) async fn abort(
        &self,
        mut req: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let session = Session::of(&mut req)?;
        let AbortMultipartUploadInput { bucket, key, upload_id, .. } = req.input;
        self.blocking(&session, move |store| store.abort(&bucket, &key, &upload_id)).await?;
        let done = AbortMultipartUploadOutput::default();
        Ok(S3Response::with_status(done, http::StatusCode::NO_CONTENT))
    }

    pub(super) async fn list_parts(&self, mut req: S3Request<ListPartsInput>) -> S3Result<S3Response<ListPartsOutput>> {
        let session = Session::of(&mut req)?;
        let input = req.input;
        let (key, bucket, id) = (input.key.clone(), input.bucket.clone(), input.upload_id.clone());
        let (upload, parts) = self.in_turns(&session, move |store| store.parts(&bucket, &key, &id)).await?;
        Ok(S3Response::new(listed_parts(input, upload, parts, &session)?))
    }

    pub(super) async fn list_uploads(
        &self,
        mut req: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let session = Session::of(&mut req)?;
        let input = req.input;
        let encoding = Encoding::of(input.encoding_type.as_ref());
        encoding.require([&input.prefix, &input.delimiter, &input.key_marker])?;
        Encoding::default().require([&input.upload_id_marker])?;
        let (bucket, prefix) = (input.bucket.clone(), input.prefix.clone().unwrap_or_default());
        session.require(Action::List, "ListMultipartUploads", &bucket, folder_of(&prefix)).await?;
        let some = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let (after, after_id) = (some(&input.key_marker), some(&input.upload_id_marker));
        let (delimiter, max) = (some(&input.delimiter), listed_max(input.max_uploads, "max-uploads")?);
        let (query, user) = (UploadQuery { prefix, delimiter, after, after_id, max }, session.user.clone());
        let listed = move |store: &Arc<S>| {
            let page = store.uploads(&bucket, &query, &|folder| user.may_use(Action::List, &bucket, folder))?;
            user.was_judged().map(|()| page)
        };
        let page = self.in_turns(&session, listed).await?;
        Ok(S3Response::new(list_uploads_of(input, page, max)))
    }
}

/// The description of an upload that is asked for.
fn upload_of(input: &CreateMultipartUploadInput, given: Given, session: &Session) -> S3Result<Upload> {
    let algorithm = input.checksum_algorithm.as_ref().map(|algorithm| algorithm.as_str().to_owned());
    Summing::of(algorithm.as_deref())?;
    let kind = input.checksum_type.as_ref().map(ChecksumType::as_str);
    let is_full = match (algorithm.as_deref(), kind) {
        (Some("CRC64NVME"), None) | (Some(_), Some(ChecksumType::FULL_OBJECT)) => true,
        (_, Some(_)) if algorithm.is_none() => {
            return Err(s3_error!(InvalidRequest, "x-amz-checksum-type goes with x-amz-checksum-algorithm"));
        }
        _ => false,
    };
    let begun = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    Ok(Upload { key: input.key.clone(), given, begun, user: session.user.name.clone(), algorithm, is_full })
}

/// The answer to a request that has begun an upload.
fn begun(input: CreateMultipartUploadInput, upload: Upload, id: String) -> CreateMultipartUploadOutput {
    let kind = if upload.is_full { ChecksumType::FULL_OBJECT } else { ChecksumType::COMPOSITE };
    CreateMultipartUploadOutput {
        bucket: Some(input.bucket),
        key: Some(input.key),
        upload_id: Some(id),
        checksum_type: upload.algorithm.as_ref().map(|_| ChecksumType::from_static(kind)),
        checksum_algorithm: upload.algorithm.map(ChecksumAlgorithm::from),
        ..Default::default()
    }
}

/// A page of the parts of an upload.
fn listed_parts(
    input: ListPartsInput,
    upload: Upload,
    mut parts: Vec<(u32, Shown)>,
    session: &Session,
) -> S3Result<ListPartsOutput> {
    let max = listed_max(input.max_parts, "max-parts")?;
    let after = u32::try_from(input.part_number_marker.unwrap_or(0)).unwrap_or(0);
    parts.retain(|(number, _)| *number > after);
    let is_truncated = parts.len() > max;
    parts.truncate(max);
    let told = |(number, Shown { attrs, size, mtime }): &(u32, Shown)| {
        let mut told = Part {
            part_number: (*number).try_into().ok(),
            e_tag: Some(etag(attrs)),
            size: (*size).try_into().ok(),
            last_modified: Some(timestamp(*mtime)),
            ..Default::default()
        };
        put_sums!(told, &attrs.checksums);
        told
    };
    let kind = if upload.is_full { ChecksumType::FULL_OBJECT } else { ChecksumType::COMPOSITE };
    let owner = super::bucket::owner(session);
    Ok(ListPartsOutput {
        bucket: Some(input.bucket),
        key: Some(input.key),
        upload_id: Some(input.upload_id),
        max_parts: max.try_into().ok(),
        part_number_marker: Some(after.try_into().unwrap_or(0)),
        next_part_number_marker: parts
            .last()
            .filter(|_| is_truncated)
            .and_then(|(number, _)| (*number).try_into().ok()),
        is_truncated: Some(is_truncated),
        parts: Some(parts.iter().map(told).collect()),
        checksum_type: upload.algorithm.as_ref().map(|_| ChecksumType::from_static(kind)),
        checksum_algorithm: upload.algorithm.map(ChecksumAlgorithm::from),
        initiator: Some(Initiator { id: Some(upload.user.clone()), display_name: Some(upload.user) }),
        owner: Some(owner),
        storage_class: Some(StorageClass::from_static(StorageClass::STANDARD)),
        ..Default::default()
    })
}

/// How long a client waits for the status of an answer to the end of an upload.
const STATUS_WAIT: Duration = Duration::from_secs(5);

/// The answer to CompleteMultipartUpload, which `work` carries out. If that takes longer than `wait`, the status 200 is
/// sent before the outcome is known, then blanks until the end, as S3 does: so no client times out. The document of
/// that answer then reports a failure.
async fn answer_complete(
    work: impl Future<Output = Result<S3Result<Attrs>, JoinError>> + Send + 'static,
    bucket: String,
    key: String,
    wait: Duration,
) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
    let mut made = Box::pin(async move {
        let attrs = work.await.map_err(lost)??;
        let mut output = CompleteMultipartUploadOutput {
            location: Some(format!("/{bucket}/{key}")),
            bucket: Some(bucket),
            key: Some(key),
            e_tag: Some(etag(&attrs)),
            ..Default::default()
        };
        put_sums!(output, &attrs.checksums);
        output.checksum_type = (!attrs.checksums.is_empty()).then(|| checksum_type(&attrs));
        Ok::<_, S3Error>(output)
    });
    match tokio::time::timeout(wait, &mut made).await {
        Ok(output) => Ok(S3Response::new(output?)),
        Err(_) => {
            let later = async move {
                made.await.inspect_err(|error| tracing::warn!(%error, "an upload that took long was not completed"))
            };
            Ok(S3Response::new(CompleteMultipartUploadOutput { future: Some(Box::pin(later)), ..Default::default() }))
        }
    }
}

fn list_uploads_of(input: ListMultipartUploadsInput, page: UploadPage, max: usize) -> ListMultipartUploadsOutput {
    let encoding = Encoding::of(input.encoding_type.as_ref());
    let told = |Listed { key, id, begun, user }: Listed| MultipartUpload {
        upload_id: Some(id),
        key: Some(encoding.text(&key)),
        initiated: Some(timestamp(Time { seconds: begun.try_into().unwrap_or(0), nanos: 0 })),
        initiator: Some(Initiator { id: Some(user.clone()), display_name: Some(user.clone()) }),
        owner: Some(Owner { id: Some(user.clone()), display_name: Some(user) }),
        storage_class: Some(StorageClass::from_static(StorageClass::STANDARD)),
        ..Default::default()
    };
    let groups = page.groups.iter().map(|group| CommonPrefix { prefix: Some(encoding.text(group)) });
    let is_truncated = page.next.is_some();
    let (next_key, next_id) = page.next.unzip();
    ListMultipartUploadsOutput {
        bucket: Some(input.bucket),
        prefix: input.prefix.map(|prefix| encoding.text(&prefix)),
        delimiter: input.delimiter.map(|delimiter| encoding.text(&delimiter)),
        key_marker: input.key_marker.map(|marker| encoding.text(&marker)),
        upload_id_marker: input.upload_id_marker,
        encoding_type: input.encoding_type,
        max_uploads: max.try_into().ok(),
        is_truncated: Some(is_truncated),
        next_key_marker: next_key.map(|key| encoding.text(&key)),
        next_upload_id_marker: next_id.flatten(),
        common_prefixes: (!page.groups.is_empty()).then(|| groups.collect()),
        uploads: Some(page.uploads.into_iter().map(told).collect()),
        ..Default::default()
    }
}

/// The range of a source that becomes a part.
pub(super) fn copied_range(text: Option<&str>, size: u64) -> S3Result<std::ops::Range<u64>> {
    let Some(text) = text else { return Ok(0..size) };
    let wrong = || s3_error!(InvalidArgument, "x-amz-copy-source-range is bytes=FIRST-LAST");
    match Range::parse(text).map_err(|_| wrong())? {
        Range::Int { first, last: Some(last) } if first <= last && last < size => Ok(first..last + 1),
        Range::Int { first: _, last: Some(_) } => Err(s3_error!(InvalidRange, "the source has {size} bytes")),
        Range::Int { first: _, last: None } | Range::Suffix { length: _ } => Err(wrong()),
    }
}

fn completed_part(part: CompletedPart) -> S3Result<Completed> {
    let number = part.part_number.ok_or_else(|| s3_error!(MalformedXML, "a part has no number"))?;
    let etag = part.e_tag.clone().ok_or_else(|| s3_error!(MalformedXML, "a part has no entity tag"))?.into_value();
    let number = u32::try_from(number).map_err(|_| s3_error!(InvalidPart, "parts have numbers from 1"))?;
    Ok(Completed { number, etag, checksums: sums::of_part(&part) })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn answered(made: S3Result<Attrs>, wait: Duration) -> S3Result<CompleteMultipartUploadOutput> {
        let (go, gone) = tokio::sync::oneshot::channel();
        let work = tokio::spawn(async move {
            gone.await.expect("it goes on");
            made
        });
        if !wait.is_zero() {
            go.send(()).expect("it waits");
            return Ok(answer_complete(work, "b".into(), "k".into(), wait).await?.output);
        }
        let output = answer_complete(work, "b".into(), "k".into(), wait).await?.output;
        assert!(output.e_tag.is_none(), "nothing is said before it is known");
        go.send(()).expect("it waits");
        output.future.expect("the end comes later").await
    }

    #[tokio::test]
    async fn the_end_of_an_upload_is_told_at_once_or_later() {
        let attrs = Attrs { etag: "00ff".into(), ..Attrs::default() };
        for wait in [Duration::ZERO, Duration::from_secs(600)] {
            let output = answered(Ok(attrs.clone()), wait).await.expect("made");
            assert_eq!(output.e_tag.map(ETag::into_value).as_deref(), Some("00ff"), "{wait:?}");
            assert_eq!(output.location.as_deref(), Some("/b/k"));
            let error = answered(Err(s3_error!(InvalidPart)), wait).await.expect_err("not made");
            assert_eq!(error.code().as_str(), "InvalidPart", "{wait:?}");
        }
    }
}
