//! Errors as clients see them: one table, exhaustive on purpose.

use crate::objects::ObjectError;
use crate::objects::key::KeyFault;
use http::StatusCode;
use lamassu_vault::VaultError;
use s3s::{S3Error, S3ErrorCode};

/// Replaces details that only an operator may see.
const INTERNAL: &str = "the gateway could not do it; its log says why";

impl From<ObjectError> for S3Error {
    fn from(error: ObjectError) -> S3Error {
        let text = error.to_string();
        let told = |code| S3Error::with_message(code, text.clone());
        match error {
            ObjectError::NoBucket => told(S3ErrorCode::NoSuchBucket),
            ObjectError::BucketExists => told(S3ErrorCode::BucketAlreadyOwnedByYou),
            ObjectError::BucketNotEmpty => told(S3ErrorCode::BucketNotEmpty),
            ObjectError::NoKey => told(S3ErrorCode::NoSuchKey),
            ObjectError::NoUpload => told(S3ErrorCode::NoSuchUpload),
            ObjectError::Key(fault) => match fault {
                KeyFault::Length | KeyFault::NameTooLong => told(S3ErrorCode::KeyTooLongError),
                KeyFault::EmptyName | KeyFault::Dots | KeyFault::Zero | KeyFault::Reserved => {
                    told(S3ErrorCode::InvalidArgument)
                }
            },
            ObjectError::BelowObject => conflict("ParentIsObject", text),
            ObjectError::AboveObjects => conflict("KeyIsDirectory", text),
            ObjectError::Precondition => told(S3ErrorCode::PreconditionFailed),
            ObjectError::NoPart(_) => told(S3ErrorCode::InvalidPart),
            ObjectError::PartOrder => told(S3ErrorCode::InvalidPartOrder),
            ObjectError::SmallPart(_) => told(S3ErrorCode::EntityTooSmall),
            ObjectError::DirectoryContent => told(S3ErrorCode::InvalidArgument),
            ObjectError::MuchMetadata => told(S3ErrorCode::MetadataTooLarge),
            ObjectError::Vault(error) => of_vault(&error),
        }
    }
}

/// S3 has no code for a key that blocks another one.
fn conflict(code: &'static str, text: String) -> S3Error {
    let mut error = S3Error::with_message(S3ErrorCode::Custom(code.into()), text);
    error.set_status_code(StatusCode::CONFLICT);
    error
}

fn of_vault(error: &VaultError) -> S3Error {
    let told = |code| S3Error::with_message(code, error.to_string());
    match error {
        VaultError::NotFound | VaultError::NotDirectory | VaultError::IsDirectory => told(S3ErrorCode::NoSuchKey),
        VaultError::NameTooLong => told(S3ErrorCode::KeyTooLongError),
        VaultError::InvalidName => told(S3ErrorCode::InvalidArgument),
        VaultError::ReadOnly => S3Error::with_message(S3ErrorCode::AccessDenied, "the gateway serves this read-only"),
        VaultError::KeyNotLoaded => {
            S3Error::with_message(S3ErrorCode::ServiceUnavailable, "the key of this dataset is not loaded")
        }
        VaultError::OtherDataset => {
            S3Error::with_message(S3ErrorCode::NotImplemented, "the key lies in another dataset than its bucket")
        }
        VaultError::DatasetRoot => S3Error::with_message(
            S3ErrorCode::AccessDenied,
            "a dataset lies there, which its administrator alone removes",
        ),
        VaultError::Frozen | VaultError::Stale => told(S3ErrorCode::ServiceUnavailable),
        VaultError::Io { op: _, source } if is_full(source) => {
            S3Error::with_message(S3ErrorCode::Custom("StorageFull".into()), "the store below is full").insufficient()
        }
        VaultError::Exists
        | VaultError::NotEmpty
        | VaultError::Invalid
        | VaultError::BadHandle
        | VaultError::NoAttribute
        | VaultError::NoData
        | VaultError::Unsupported
        | VaultError::Locked
        | VaultError::Damaged { .. }
        | VaultError::Outdated { .. }
        | VaultError::Anchor(_)
        | VaultError::Refused(_)
        | VaultError::Io { .. }
        | VaultError::NoRandom(_)
        | VaultError::Store(_) => {
            tracing::error!(%error, "a request failed");
            S3Error::with_message(S3ErrorCode::InternalError, INTERNAL)
        }
    }
}

fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}

trait Insufficient {
    fn insufficient(self) -> Self;
}

impl Insufficient for S3Error {
    fn insufficient(mut self) -> Self {
        self.set_status_code(StatusCode::INSUFFICIENT_STORAGE);
        self
    }
}

/// A thread with blocking work has panicked; the panic hook has logged it.
pub fn lost(_: tokio::task::JoinError) -> S3Error {
    S3Error::with_message(S3ErrorCode::InternalError, INTERNAL)
}
