//! GetObject, HeadObject, and other questions about one object.

use super::super::access::Session;
use super::super::body;
use super::super::given::{CONTENT_TYPE, Conditions, Reads, etag, timestamp};
use super::super::read::{Asked, Piece, asked, checksum_type, conditions, tell};
use super::super::sums::put_sums;
use super::Gateway;
use crate::objects::attrs::Attrs;
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result};

/// Where a range begins, if it is counted from the beginning.
fn beginning(range: Option<&Range>) -> Option<u64> {
    match range? {
        Range::Int { first, .. } => Some(*first),
        Range::Suffix { .. } => None,
    }
}

impl Gateway {
    pub(in crate::s3) async fn get(&self, mut req: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let session = Session::of(&mut req)?;
        let mut input = req.input;
        let (key, bucket, likely) = (input.key.clone(), input.bucket.clone(), beginning(input.range.as_ref()));
        let (shown, reading) = self.blocking(&session, move |remote| remote.read(&bucket, &key, likely)).await?;
        conditions!(input).check(&shown.attrs, shown.mtime, Reads::Object)?;
        let piece = Piece::of(&shown.attrs, shown.size, input.range.as_ref(), input.part_number)?;
        let range = piece.range.clone();
        // Opened also where nothing is read: what the provider has is not what was stored, or is.
        let open = self.blocking(&session, move |remote| remote.open_for(reading, &range)).await?;
        let mut output = GetObjectOutput::default();
        tell!(output, &shown.attrs, shown, piece, input.checksum_mode, asked!(input));
        output.tag_count = i32::try_from(shown.attrs.given.tags.len()).ok().filter(|count| *count > 0);
        output.body = Some(body::send(session, open, piece.range));
        Ok(S3Response::new(output))
    }

    pub(in crate::s3) async fn head(
        &self,
        mut req: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let session = Session::of(&mut req)?;
        let mut input = req.input;
        let (key, bucket) = (input.key.clone(), input.bucket.clone());
        let shown = self.blocking(&session, move |remote| remote.find(&bucket, &key)).await?;
        conditions!(input).check(&shown.attrs, shown.mtime, Reads::Object)?;
        let piece = Piece::of(&shown.attrs, shown.size, input.range.as_ref(), input.part_number)?;
        let mut output = HeadObjectOutput::default();
        tell!(output, &shown.attrs, shown, piece, input.checksum_mode, asked!(input));
        let mut response = S3Response::new(output);
        let count = shown.attrs.given.tags.len();
        if count > 0 {
            // The library's output has no field for it.
            response.headers.insert("x-amz-tagging-count", count.into());
        }
        Ok(response)
    }

    pub(in crate::s3) async fn attributes(
        &self,
        mut req: S3Request<GetObjectAttributesInput>,
    ) -> S3Result<S3Response<GetObjectAttributesOutput>> {
        let session = Session::of(&mut req)?;
        let GetObjectAttributesInput { bucket, key, object_attributes, .. } = req.input;
        let shown = self.blocking(&session, move |remote| remote.find(&bucket, &key)).await?;
        Ok(S3Response::new(super::super::read::attributes_of(
            &shown.attrs,
            shown.size,
            timestamp(shown.mtime),
            &object_attributes,
        )))
    }
}
