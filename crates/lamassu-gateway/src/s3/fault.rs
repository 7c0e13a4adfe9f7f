//! Errors as clients see them: tables, exhaustive on purpose.

use crate::objects::key::KeyFault;
use crate::objects::{ObjectError, Refusal};
use crate::remote::RemoteError;
use crate::work::NoLonger;
use http::StatusCode;
use lamassu_vault::VaultError;
use s3s::{S3Error, S3ErrorCode, s3_error};

/// Replaces details that only an operator may see.
const INTERNAL: &str = "the gateway could not do it; its log says why";

impl From<Refusal> for S3Error {
    fn from(refusal: Refusal) -> S3Error {
        let code = match refusal {
            Refusal::NoBucket => S3ErrorCode::NoSuchBucket,
            Refusal::BucketExists => S3ErrorCode::BucketAlreadyOwnedByYou,
            Refusal::BucketNotEmpty => S3ErrorCode::BucketNotEmpty,
            Refusal::NoKey => S3ErrorCode::NoSuchKey,
            Refusal::NoUpload => S3ErrorCode::NoSuchUpload,
            Refusal::Precondition => S3ErrorCode::PreconditionFailed,
            Refusal::NoPart(_) => S3ErrorCode::InvalidPart,
            Refusal::PartOrder => S3ErrorCode::InvalidPartOrder,
            Refusal::SmallPart(_) => S3ErrorCode::EntityTooSmall,
        };
        S3Error::with_message(code, refusal.to_string())
    }
}

impl From<NoLonger> for S3Error {
    fn from(_: NoLonger) -> S3Error {
        s3_error!(AccessDenied, "the credential is no longer in force: it was revoked, or has expired")
    }
}

impl From<ObjectError> for S3Error {
    fn from(error: ObjectError) -> S3Error {
        let text = error.to_string();
        let told = |code| S3Error::with_message(code, text.clone());
        match error {
            ObjectError::Refused(refusal) => refusal.into(),
            ObjectError::Key(fault) => match fault {
                KeyFault::Length | KeyFault::NameTooLong => told(S3ErrorCode::KeyTooLongError),
                KeyFault::EmptyName | KeyFault::Dots | KeyFault::NotInXml | KeyFault::Reserved => {
                    told(S3ErrorCode::InvalidArgument)
                }
            },
            ObjectError::BelowObject => conflict("ParentIsObject", text),
            ObjectError::AboveObjects => conflict("KeyIsDirectory", text),
            ObjectError::DirectoryContent => told(S3ErrorCode::InvalidArgument),
            ObjectError::MuchMetadata => told(S3ErrorCode::MetadataTooLarge),
            ObjectError::NoLonger => NoLonger.into(),
            ObjectError::NoRoot(_) => {
                tracing::error!(%error, "a request failed");
                S3Error::with_message(S3ErrorCode::InternalError, INTERNAL)
            }
            ObjectError::Vault(error) => of_vault(&error),
        }
    }
}

/// Details that the operator has to fix go to the log. Clients are only told that it is not their fault.
impl From<RemoteError> for S3Error {
    fn from(error: RemoteError) -> S3Error {
        let told = |code| S3Error::with_message(code, error.to_string());
        match &error {
            RemoteError::Refused(refusal) => (*refusal).into(),
            RemoteError::LongKey => told(S3ErrorCode::KeyTooLongError),
            RemoteError::KeyNotInXml => told(S3ErrorCode::InvalidArgument),
            RemoteError::MuchMetadata => told(S3ErrorCode::MetadataTooLarge),
            RemoteError::Length => told(S3ErrorCode::IncompleteBody),
            RemoteError::LargeCopy => told(S3ErrorCode::InvalidRequest),
            RemoteError::ReadOnly => told(S3ErrorCode::AccessDenied),
            RemoteError::NoLonger => NoLonger.into(),
            // No client receives it.
            RemoteError::GivenUp => told(S3ErrorCode::RequestTimeout),
            RemoteError::Busy(_) => passing(&error, S3ErrorCode::SlowDown),
            // A repeated request works on the present state.
            RemoteError::Unreachable(_) | RemoteError::Changed(_) | RemoteError::Lost(_) => {
                passing(&error, S3ErrorCode::ServiceUnavailable)
            }
            RemoteError::NoPlace(_) => conflict(
                "KeyIsDirectory",
                "the provider keeps objects as files: it cannot have an object whose key is the beginning of another's, \
                 up to a slash"
                    .into(),
            ),
            // Clients repeat it, until the operator has renewed the credential.
            RemoteError::Expired(_) => {
                tracing::error!(%error, "a request failed");
                S3Error::with_message(S3ErrorCode::ServiceUnavailable, "the provider is not available now: try again")
            }
            RemoteError::Tls(_)
            | RemoteError::Denied(_)
            | RemoteError::NoBackend(_)
            | RemoteError::Elsewhere(_)
            | RemoteError::Answer(_)
            | RemoteError::Unsupported(_)
            | RemoteError::Missing(_)
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
        VaultError::Frozen | VaultError::FreezeLost | VaultError::Stale => told(S3ErrorCode::ServiceUnavailable),
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
        | VaultError::Store(_) => by_cause(error),
    }
}

/// What is behind an error: the store, the anchor, or its server.
fn by_cause(error: &VaultError) -> S3Error {
    let told = |code, text: &'static str| {
        tracing::warn!(%error, "a request failed");
        S3Error::with_message(code, text)
    };
    match lamassu_vault::errno_of(error) {
        _ if error.is_of_policy() => {
            told(S3ErrorCode::AccessDenied, "a rule of the server that keeps the vault's anchor forbids it")
        }
        _ if error.is_of_session() => told(
            S3ErrorCode::ServiceUnavailable,
            "the server that keeps the vault's anchor is not reached now: try again",
        ),
        libc::ENOSPC | libc::EDQUOT => {
            told(S3ErrorCode::Custom("StorageFull".into()), "the store below is full").insufficient()
        }
        libc::EROFS => told(S3ErrorCode::AccessDenied, "the store below is read-only"),
        libc::EFBIG => told(S3ErrorCode::EntityTooLarge, "the store below does not take files that large"),
        _ => {
            tracing::error!(%error, "a request failed");
            S3Error::with_message(S3ErrorCode::InternalError, INTERNAL)
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_anchor::{AnchorError, ServerFault};
    use lamassu_store::StoreError;
    use std::io;

    #[test]
    fn an_error_of_the_store_or_the_anchor_says_what_to_do() {
        let errno = io::Error::from_raw_os_error;
        let by_server = |fault| AnchorError::Server { server: "s".into(), fault };
        let ended = || by_server(ServerFault::Ended);
        let policy = by_server(ServerFault::Policy { rule: "r".into(), what: "it".into() });
        let of_anchor = AnchorError::Io { op: "write", path: "a".into(), source: errno(libc::ENOSPC) };
        for (error, status, code) in [
            (VaultError::Io { op: "write", source: errno(libc::ENOSPC) }, 507, "StorageFull"),
            (VaultError::Io { op: "write", source: errno(libc::EDQUOT) }, 507, "StorageFull"),
            (VaultError::Io { op: "write", source: io::Error::other(of_anchor) }, 507, "StorageFull"),
            (StoreError::Io { op: "write", offset: 0, source: errno(libc::ENOSPC) }.into(), 507, "StorageFull"),
            (StoreError::ReadOnly.into(), 403, "AccessDenied"),
            (StoreError::TooLarge.into(), 400, "EntityTooLarge"),
            (VaultError::Anchor(policy), 403, "AccessDenied"),
            (VaultError::Anchor(ended()), 503, "ServiceUnavailable"),
            (VaultError::Io { op: "write", source: io::Error::other(ended()) }, 503, "ServiceUnavailable"),
            (VaultError::Io { op: "write", source: errno(libc::EIO) }, 500, "InternalError"),
        ] {
            let said = S3Error::from(ObjectError::Vault(error));
            let found = said.status_code().map(|status| status.as_u16());
            assert_eq!((found, said.code().as_str()), (Some(status), code), "{said}");
        }
    }
}
