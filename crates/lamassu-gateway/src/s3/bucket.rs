//! Buckets, and their properties that are the same for all.

use super::Gateway;
use super::access::Session;
use super::given::timestamp;
use super::store::Store;
use crate::credentials::Right;
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};

/// The region that S3 represents by an empty value.
const FIRST_REGION: &str = "us-east-1";

/// The most buckets in an answer, as Amazon has it.
const BUCKETS_MAX: i32 = 10_000;

/// A user in the form of S3's owners.
pub(super) fn owner(session: &Session) -> Owner {
    let name = &session.user.name;
    Owner { id: Some(name.clone()), display_name: Some(name.clone()) }
}

/// The grants of every user who may use a bucket: the actual rights are in the gateway's credentials.
fn grants(owner: &Owner) -> Vec<Grant> {
    let grantee = Grantee {
        id: owner.id.clone(),
        display_name: owner.display_name.clone(),
        type_: Type::from_static(Type::CANONICAL_USER),
        email_address: None,
        uri: None,
    };
    let permission = Some(Permission::from_static(Permission::FULL_CONTROL));
    vec![Grant { grantee: Some(grantee), permission }]
}

impl<S: Store> Gateway<S> {
    pub(super) async fn buckets(
        &self,
        mut req: S3Request<ListBucketsInput>,
    ) -> S3Result<S3Response<ListBucketsOutput>> {
        let session = Session::of(&mut req)?;
        let most = req.input.max_buckets.unwrap_or(BUCKETS_MAX);
        let most = usize::try_from(most).ok().filter(|most| (1..=BUCKETS_MAX as usize).contains(most));
        let most = most.ok_or_else(|| s3_error!(InvalidArgument, "max-buckets is from 1 to {BUCKETS_MAX}"))?;
        let (user, prefix) = (session.user.clone(), req.input.prefix.clone().unwrap_or_default());
        // The token is the last name of the page before.
        let after = req.input.continuation_token.unwrap_or_default();
        let is_shown = move |name: &str| {
            name > after.as_str() && name.starts_with(&prefix) && is_bucket_name(name) && user.may(Right::Read, name)
        };
        // One more than is shown tells whether there are more.
        let mut found = self.in_turns(&session, move |store| store.buckets(&is_shown, most + 1)).await?;
        let has_more = found.len() > most;
        found.truncate(most);
        let continuation_token = found.last().filter(|_| has_more).map(|(name, _)| name.clone());
        let told = found.into_iter().map(|(name, made)| Bucket {
            name: Some(name),
            creation_date: Some(timestamp(made)),
            ..Default::default()
        });
        Ok(S3Response::new(ListBucketsOutput {
            buckets: Some(told.collect()),
            continuation_token,
            owner: Some(owner(&session)),
            prefix: req.input.prefix,
        }))
    }

    pub(super) async fn make_bucket(
        &self,
        mut req: S3Request<CreateBucketInput>,
    ) -> S3Result<S3Response<CreateBucketOutput>> {
        let session = Session::of(&mut req)?;
        let (bucket, owner) = (req.input.bucket, session.user.owner);
        let configured = req.input.create_bucket_configuration.as_ref();
        let region = configured.and_then(|configuration| configuration.location_constraint.as_ref());
        if region.is_some_and(|region| region.as_str() != self.region && !region.as_str().is_empty()) {
            return Err(s3_error!(IllegalLocationConstraintException, "the region here is {}", self.region));
        }
        let location = Some(format!("/{bucket}"));
        self.blocking(&session, move |store| store.make_bucket(&bucket, owner)).await?;
        Ok(S3Response::new(CreateBucketOutput { location }))
    }

    pub(super) async fn remove_bucket(
        &self,
        mut req: S3Request<DeleteBucketInput>,
    ) -> S3Result<S3Response<DeleteBucketOutput>> {
        let session = Session::of(&mut req)?;
        let bucket = req.input.bucket;
        self.copying(&session, move |store| store.remove_bucket(&bucket)).await?;
        Ok(S3Response::with_status(DeleteBucketOutput::default(), http::StatusCode::NO_CONTENT))
    }

    /// Checks that a bucket exists, for a property that is the same for all.
    pub(super) async fn bucket_of<T>(&self, req: &mut S3Request<T>, bucket: String) -> S3Result<Session> {
        let session = Session::of(req)?;
        self.blocking(&session, move |store| store.has_bucket(&bucket)).await?;
        Ok(session)
    }

    pub(super) async fn head_bucket(
        &self,
        mut req: S3Request<HeadBucketInput>,
    ) -> S3Result<S3Response<HeadBucketOutput>> {
        let bucket = req.input.bucket.clone();
        self.bucket_of(&mut req, bucket).await?;
        Ok(S3Response::new(HeadBucketOutput { bucket_region: Some(self.region.clone()), ..Default::default() }))
    }

    pub(super) async fn location(
        &self,
        mut req: S3Request<GetBucketLocationInput>,
    ) -> S3Result<S3Response<GetBucketLocationOutput>> {
        let bucket = req.input.bucket.clone();
        self.bucket_of(&mut req, bucket).await?;
        let region = (self.region != FIRST_REGION).then(|| BucketLocationConstraint::from(self.region.clone()));
        Ok(S3Response::new(GetBucketLocationOutput { location_constraint: region }))
    }

    pub(super) async fn bucket_acl(
        &self,
        mut req: S3Request<GetBucketAclInput>,
    ) -> S3Result<S3Response<GetBucketAclOutput>> {
        let bucket = req.input.bucket.clone();
        let owner = owner(&self.bucket_of(&mut req, bucket).await?);
        Ok(S3Response::new(GetBucketAclOutput { grants: Some(grants(&owner)), owner: Some(owner) }))
    }

    pub(super) async fn object_acl(
        &self,
        mut req: S3Request<GetObjectAclInput>,
    ) -> S3Result<S3Response<GetObjectAclOutput>> {
        let session = Session::of(&mut req)?;
        let GetObjectAclInput { bucket, key, .. } = req.input;
        self.blocking(&session, move |store| store.shown(&bucket, &key)).await?;
        let owner = owner(&session);
        Ok(S3Response::new(GetObjectAclOutput {
            grants: Some(grants(&owner)),
            owner: Some(owner),
            ..Default::default()
        }))
    }
}

/// Whether the name of a directory can be a bucket in a request.
fn is_bucket_name(name: &str) -> bool {
    use s3s::validation::{AwsNameValidation, NameValidation};
    AwsNameValidation::new().validate_bucket_name(name)
}
