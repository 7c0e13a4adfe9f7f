//! Buckets, and their properties that are the same for all.

use super::super::access::Session;
use super::super::bucket::{FIRST_REGION, grants, is_bucket_name, owner};
use super::super::given::timestamp;
use super::Gateway;
use crate::credentials::Right;
use crate::remote::objects::time_of;
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};

impl Gateway {
    pub(in crate::s3) async fn buckets(
        &self,
        mut req: S3Request<ListBucketsInput>,
    ) -> S3Result<S3Response<ListBucketsOutput>> {
        let session = Session::of(&mut req)?;
        let found = self.blocking(&session, |remote| remote.buckets()).await?;
        let prefix = req.input.prefix.clone().unwrap_or_default();
        let shown = found.into_iter().filter(|(name, _)| {
            name.starts_with(&prefix) && is_bucket_name(name) && session.user.may(Right::Read, name)
        });
        let told = shown.map(|(name, made)| Bucket {
            name: Some(name),
            creation_date: Some(timestamp(time_of(&made))),
            ..Default::default()
        });
        Ok(S3Response::new(ListBucketsOutput {
            buckets: Some(told.collect()),
            owner: Some(owner(&session)),
            prefix: req.input.prefix,
            ..Default::default()
        }))
    }

    pub(in crate::s3) async fn make_bucket(
        &self,
        mut req: S3Request<CreateBucketInput>,
    ) -> S3Result<S3Response<CreateBucketOutput>> {
        let session = Session::of(&mut req)?;
        let bucket = req.input.bucket;
        let configured = req.input.create_bucket_configuration.as_ref();
        let region = configured.and_then(|configuration| configuration.location_constraint.as_ref());
        if region.is_some_and(|region| region.as_str() != self.region && !region.as_str().is_empty()) {
            return Err(s3_error!(IllegalLocationConstraintException, "the region here is {}", self.region));
        }
        let location = Some(format!("/{bucket}"));
        self.blocking(&session, move |remote| remote.make_bucket(&bucket)).await?;
        Ok(S3Response::new(CreateBucketOutput { location }))
    }

    pub(in crate::s3) async fn remove_bucket(
        &self,
        mut req: S3Request<DeleteBucketInput>,
    ) -> S3Result<S3Response<DeleteBucketOutput>> {
        let session = Session::of(&mut req)?;
        let bucket = req.input.bucket;
        self.blocking(&session, move |remote| remote.remove_bucket(&bucket)).await?;
        Ok(S3Response::with_status(DeleteBucketOutput::default(), http::StatusCode::NO_CONTENT))
    }

    /// Checks that a bucket exists, for a property that is the same for all.
    pub(in crate::s3) async fn bucket_of<T>(&self, req: &mut S3Request<T>, bucket: String) -> S3Result<Session> {
        let session = Session::of(req)?;
        self.blocking(&session, move |remote| remote.bucket(&bucket)).await?;
        Ok(session)
    }

    pub(in crate::s3) async fn head_bucket(
        &self,
        mut req: S3Request<HeadBucketInput>,
    ) -> S3Result<S3Response<HeadBucketOutput>> {
        let bucket = req.input.bucket.clone();
        self.bucket_of(&mut req, bucket).await?;
        Ok(S3Response::new(HeadBucketOutput { bucket_region: Some(self.region.clone()), ..Default::default() }))
    }

    pub(in crate::s3) async fn location(
        &self,
        mut req: S3Request<GetBucketLocationInput>,
    ) -> S3Result<S3Response<GetBucketLocationOutput>> {
        let bucket = req.input.bucket.clone();
        self.bucket_of(&mut req, bucket).await?;
        let region = (self.region != FIRST_REGION).then(|| BucketLocationConstraint::from(self.region.clone()));
        Ok(S3Response::new(GetBucketLocationOutput { location_constraint: region }))
    }

    pub(in crate::s3) async fn bucket_acl(
        &self,
        mut req: S3Request<GetBucketAclInput>,
    ) -> S3Result<S3Response<GetBucketAclOutput>> {
        let bucket = req.input.bucket.clone();
        let owner = owner(&self.bucket_of(&mut req, bucket).await?);
        Ok(S3Response::new(GetBucketAclOutput { grants: Some(grants(&owner)), owner: Some(owner) }))
    }

    pub(in crate::s3) async fn object_acl(
        &self,
        mut req: S3Request<GetObjectAclInput>,
    ) -> S3Result<S3Response<GetObjectAclOutput>> {
        let session = Session::of(&mut req)?;
        let GetObjectAclInput { bucket, key, .. } = req.input;
        self.blocking(&session, move |remote| remote.find(&bucket, &key)).await?;
        let owner = owner(&session);
        Ok(S3Response::new(GetObjectAclOutput {
            grants: Some(grants(&owner)),
            owner: Some(owner),
            ..Default::default()
        }))
    }
}
