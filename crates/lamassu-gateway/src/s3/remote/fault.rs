//! Errors at a provider as clients see them: one table, exhaustive on purpose. What the operator has to mend is in the
//! log, and clients are told no more than that it is not theirs.

use crate::remote::RemoteError;
use s3s::{S3Error, S3ErrorCode};

const INTERNAL: &str = "the gateway could not do it; its log says why";

impl From<RemoteError> for S3Error {
    fn from(error: RemoteError) -> S3Error {
        let told = |code| S3Error::with_message(code, error.to_string());
        match &error {
            RemoteError::NoBucket => told(S3ErrorCode::NoSuchBucket),
            RemoteError::BucketExists => told(S3ErrorCode::BucketAlreadyOwnedByYou),
            RemoteError::BucketNotEmpty => told(S3ErrorCode::BucketNotEmpty),
            RemoteError::NoKey => told(S3ErrorCode::NoSuchKey),
            RemoteError::NoUpload => told(S3ErrorCode::NoSuchUpload),
            RemoteError::Key(what) if what.contains("1024") => told(S3ErrorCode::KeyTooLongError),
            RemoteError::Key(_) => told(S3ErrorCode::InvalidArgument),
            RemoteError::Precondition => told(S3ErrorCode::PreconditionFailed),
            RemoteError::NoPart(_) => told(S3ErrorCode::InvalidPart),
            RemoteError::PartOrder => told(S3ErrorCode::InvalidPartOrder),
            RemoteError::SmallPart(_) => told(S3ErrorCode::EntityTooSmall),
            RemoteError::MuchMetadata => told(S3ErrorCode::MetadataTooLarge),
            RemoteError::Length => told(S3ErrorCode::IncompleteBody),
            RemoteError::LargeCopy => told(S3ErrorCode::InvalidRequest),
            RemoteError::ReadOnly => told(S3ErrorCode::AccessDenied),
            RemoteError::Busy(_) => passing(&error, S3ErrorCode::SlowDown),
            // Nobody gets it.
            RemoteError::GivenUp => told(S3ErrorCode::RequestTimeout),
            RemoteError::Unreachable(_) => passing(&error, S3ErrorCode::ServiceUnavailable),
            RemoteError::Tls(_)
            | RemoteError::Denied(_)
            | RemoteError::NoBackend(_)
            | RemoteError::Elsewhere(_)
            | RemoteError::Answer(_)
            | RemoteError::Unsupported(_)
            | RemoteError::Damaged(_)
            | RemoteError::Vault(_) => {
                tracing::error!(%error, "a request failed");
                S3Error::with_message(S3ErrorCode::InternalError, INTERNAL)
            }
        }
    }
}

fn passing(error: &RemoteError, code: S3ErrorCode) -> S3Error {
    tracing::warn!(%error, "a request failed");
    S3Error::with_message(code, "the provider does not answer now: try again")
}
