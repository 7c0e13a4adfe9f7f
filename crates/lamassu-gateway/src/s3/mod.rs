//! The protocol S3: `s3s` parses requests, verifies signatures and writes answers. This module turns requests into
//! calls of a [`Store`], on threads that may block.
//!
//! What S3 has besides objects (policies, life cycles, versions, locks) is refused by name, or reported as absent.

mod access;
mod body;
mod bucket;
mod fault;
mod files;
mod given;
mod host;
mod listing;
mod read;
mod remote;
mod store;
mod sums;
#[cfg(test)]
mod turns;
mod upload;
mod write;

pub use access::{ADMITTED, Current, NULL_VERSION, Users};

use crate::document::DOCUMENT_MAX;
use crate::front::Front;
use crate::queue::{Queue, Queues};
use crate::work;
use access::{Doorkeeper, Session};
use fault::lost;
use s3s::config::{S3Config, StaticConfigProvider};
use s3s::dto::*;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use std::sync::Arc;
pub use store::Store;

/// The gateway's implementation of S3 over a store.
pub struct Gateway<S> {
    store: Arc<S>,
    region: String,
}

/// The service that answers requests.
pub fn service<S: Store>(front: &Front, store: Arc<S>, users: Users) -> S3Service {
    let gateway = Gateway { store, region: front.region.clone() };
    let mut builder = S3ServiceBuilder::new(gateway);
    let queues = S::IS_HERE.then(|| Arc::new(Queues::default()));
    let documents = queues.as_ref().map_or_else(Queue::of_processors, |queues| queues.pieces.clone());
    let keeper = Doorkeeper { users, queues, documents };
    builder.set_auth(keeper.clone());
    builder.set_access(keeper);
    if !front.domains.is_empty() {
        builder.set_host(host::Hosts(front.domains.clone()));
    }
    let mut limits = S3Config::default();
    limits.xml_max_body_size = DOCUMENT_MAX;
    // Forms are refused earlier (`door/guard.rs`).
    limits.post_object_max_file_size = 0;
    builder.set_config(Arc::new(StaticConfigProvider::new(Arc::new(limits))));
    builder.build()
}

impl<S: Store> Gateway<S> {
    async fn blocking<T: Send + 'static>(
        &self,
        session: &Session,
        call: impl FnOnce(&Arc<S>) -> S3Result<T> + Send + 'static,
    ) -> S3Result<T> {
        let store = self.store.clone();
        session.spawn(move || call(&store)).await.map_err(lost)?
    }

    /// A call that takes a processor, nobody knows how long: a page of a listing. It pauses ([`work::pause`]).
    async fn in_turns<T: Send + 'static>(
        &self,
        session: &Session,
        call: impl FnOnce(&Arc<S>) -> S3Result<T> + Send + 'static,
    ) -> S3Result<T> {
        self.copying(session, move |store| work::in_turn(|| call(store))).await
    }

    /// A call without a known end, which takes its turns itself: a copy within the store, a deletion of many keys.
    async fn copying<T: Send + 'static>(
        &self,
        session: &Session,
        call: impl FnOnce(&Arc<S>) -> S3Result<T> + Send + 'static,
    ) -> S3Result<T> {
        let store = self.store.clone();
        session.copying(move || call(&store)).await.await.map_err(lost)?
    }

    /// A call that ends with a sync of so many bytes.
    async fn syncing<T: Send + 'static>(
        &self,
        session: &Session,
        bytes: u64,
        call: impl FnOnce(&Arc<S>) -> S3Result<T> + Send + 'static,
    ) -> S3Result<T> {
        let store = self.store.clone();
        session.in_turn_to_sync(bytes, move || call(&store)).await.await.map_err(lost)?
    }
}

/// Dispatches each operation to its module.
macro_rules! implement {
    (
        done { $($name:ident($input:ident) -> $output:ident = $method:ident;)* }
        absent { $($a_name:ident($a_input:ident) -> $a_output:ident = $code:ident;)* }
    ) => {
        #[async_trait::async_trait]
        impl<S: Store> S3 for Gateway<S> {
            $(async fn $name(&self, req: S3Request<$input>) -> S3Result<S3Response<$output>> {
                self.$method(req).await
            })*

            $(async fn $a_name(&self, mut req: S3Request<$a_input>) -> S3Result<S3Response<$a_output>> {
                let bucket = req.input.bucket.clone();
                self.bucket_of(&mut req, bucket).await?;
                Err(s3_error!($code))
            })*

            async fn get_bucket_versioning(
                &self,
                mut req: S3Request<GetBucketVersioningInput>,
            ) -> S3Result<S3Response<GetBucketVersioningOutput>> {
                let bucket = req.input.bucket.clone();
                self.bucket_of(&mut req, bucket).await?;
                Ok(S3Response::new(GetBucketVersioningOutput::default()))
            }

            async fn put_bucket_versioning(
                &self,
                _: S3Request<PutBucketVersioningInput>,
            ) -> S3Result<S3Response<PutBucketVersioningOutput>> {
                Err(s3_error!(NotImplemented, "there are no versions of objects here; snapshots of the vault keep old states"))
            }
        }
    };
}

implement! {
    done {
        list_buckets(ListBucketsInput) -> ListBucketsOutput = buckets;
        create_bucket(CreateBucketInput) -> CreateBucketOutput = make_bucket;
        delete_bucket(DeleteBucketInput) -> DeleteBucketOutput = remove_bucket;
        head_bucket(HeadBucketInput) -> HeadBucketOutput = head_bucket;
        get_bucket_location(GetBucketLocationInput) -> GetBucketLocationOutput = location;
        get_bucket_acl(GetBucketAclInput) -> GetBucketAclOutput = bucket_acl;
        get_object_acl(GetObjectAclInput) -> GetObjectAclOutput = object_acl;
        list_objects(ListObjectsInput) -> ListObjectsOutput = list_v1;
        list_objects_v2(ListObjectsV2Input) -> ListObjectsV2Output = list_v2;
        list_object_versions(ListObjectVersionsInput) -> ListObjectVersionsOutput = list_versions;
        get_object(GetObjectInput) -> GetObjectOutput = get;
        head_object(HeadObjectInput) -> HeadObjectOutput = head;
        get_object_attributes(GetObjectAttributesInput) -> GetObjectAttributesOutput = attributes;
        put_object(PutObjectInput) -> PutObjectOutput = put;
        copy_object(CopyObjectInput) -> CopyObjectOutput = copy;
        delete_object(DeleteObjectInput) -> DeleteObjectOutput = delete;
        delete_objects(DeleteObjectsInput) -> DeleteObjectsOutput = delete_many;
        get_object_tagging(GetObjectTaggingInput) -> GetObjectTaggingOutput = tags;
        put_object_tagging(PutObjectTaggingInput) -> PutObjectTaggingOutput = put_tags;
        delete_object_tagging(DeleteObjectTaggingInput) -> DeleteObjectTaggingOutput = delete_tags;
        create_multipart_upload(CreateMultipartUploadInput) -> CreateMultipartUploadOutput = begin_upload;
        upload_part(UploadPartInput) -> UploadPartOutput = part;
        upload_part_copy(UploadPartCopyInput) -> UploadPartCopyOutput = part_copy;
        complete_multipart_upload(CompleteMultipartUploadInput) -> CompleteMultipartUploadOutput = complete;
        abort_multipart_upload(AbortMultipartUploadInput) -> AbortMultipartUploadOutput = abort;
        list_parts(ListPartsInput) -> ListPartsOutput = list_parts;
        list_multipart_uploads(ListMultipartUploadsInput) -> ListMultipartUploadsOutput = list_uploads;
    }
    // Properties that no bucket has.
    absent {
        get_bucket_policy(GetBucketPolicyInput) -> GetBucketPolicyOutput = NoSuchBucketPolicy;
        get_bucket_cors(GetBucketCorsInput) -> GetBucketCorsOutput = NoSuchCORSConfiguration;
        get_bucket_lifecycle_configuration(GetBucketLifecycleConfigurationInput)
            -> GetBucketLifecycleConfigurationOutput = NoSuchLifecycleConfiguration;
        get_bucket_tagging(GetBucketTaggingInput) -> GetBucketTaggingOutput = NoSuchTagSet;
        get_bucket_website(GetBucketWebsiteInput) -> GetBucketWebsiteOutput = NoSuchWebsiteConfiguration;
        get_bucket_replication(GetBucketReplicationInput)
            -> GetBucketReplicationOutput = ReplicationConfigurationNotFoundError;
        get_object_lock_configuration(GetObjectLockConfigurationInput)
            -> GetObjectLockConfigurationOutput = ObjectLockConfigurationNotFoundError;
        get_bucket_encryption(GetBucketEncryptionInput)
            -> GetBucketEncryptionOutput = ServerSideEncryptionConfigurationNotFoundError;
    }
}
