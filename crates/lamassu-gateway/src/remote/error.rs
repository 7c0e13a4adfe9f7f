//! Errors of operations at a provider.
//!
//! A provider's answer concerns the gateway's request, not the name that the client gave. So 404 is
//! [`RemoteError::Missing`] until an operation knows that the client's key is missing, and returns [`Refusal::NoKey`].
//! The same holds for conditions and uploads.

use crate::objects::Refusal;
use crate::work::NoLonger;
use lamassu_vault::VaultError;
use std::error::Error;
use std::io;

/// The reason why an operation at a provider failed.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The client's fault.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The client's fault: the sealed form of the key is longer than providers accept, or than this one does.
    #[error("the sealed form of the key, or of a part of it, is longer than the provider takes")]
    LongKey,
    /// The client's fault: a listing could not name the object.
    #[error("a key must not contain a character that XML does not allow, such as most control characters")]
    KeyNotInXml,
    /// The client's fault: the object's properties are more than a provider keeps with an object.
    #[error("headers, metadata, tags and checksums together are more than a provider keeps with an object")]
    MuchMetadata,
    /// The client's fault: the body has another length than announced.
    #[error("the length of the body is not the one that the request announced")]
    Length,
    /// The client's fault: a provider copies no object that large at once.
    #[error("objects of more than 5 GiB are not copied at the provider: upload it again, in parts")]
    LargeCopy,
    /// The client is gone.
    #[error("the client is gone")]
    GivenUp,
    /// The client's fault: its credential was revoked or has expired meanwhile.
    #[error("the credential is no longer in force")]
    NoLonger,
    /// The gateway is read-only.
    #[error("the gateway serves this read-only")]
    ReadOnly,
    /// The provider has no such object.
    #[error("the provider has nothing there: {0}")]
    Missing(String),
    /// The object at the provider is not the expected state.
    #[error("the provider has something else there by now: {0}")]
    Changed(String),
    /// The provider no longer knows an upload of the gateway.
    #[error("the provider has lost an upload: {0}")]
    Lost(String),
    /// The provider's fault, for a while: it is busy or fails.
    #[error("the provider is busy or fails: {0}")]
    Busy(String),
    /// The network's fault: there was no answer.
    #[error("the provider does not answer: {0}")]
    Unreachable(String),
    /// The operator's fault: the provider's certificate is not verified, or the provider does not speak TLS.
    #[error("no TLS with the provider: {0}")]
    Tls(String),
    /// The operator's fault: the provider refuses the gateway's credentials, or the operation.
    #[error("the provider refuses the gateway: {0}")]
    Denied(String),
    /// The operator's fault: the gateway's credential at the provider has expired.
    #[error(
        "the gateway's credential at the provider has expired; write a new one to provider.credentials and send SIGHUP: {0}"
    )]
    Expired(String),
    /// The provider's limit: objects are files of a directory there, and the key of one would be another's directory.
    #[error("the provider keeps objects as files, and cannot have both a key and keys below it: {0}")]
    NoPlace(String),
    /// The operator's fault: the bucket of `backend` does not exist.
    #[error("the provider has no such bucket: {0}")]
    NoBackend(String),
    /// The operator's fault: the bucket is at another endpoint or in another region.
    #[error("the bucket is at another endpoint or in another region: {0}")]
    Elsewhere(String),
    /// The provider's fault: an answer that this program does not understand.
    #[error("an answer that is not understood: {0}")]
    Answer(String),
    /// The provider's fault: it does not support the operation.
    #[error("the provider does not support it: {0}")]
    Unsupported(String),
    /// The fault of the provider, or of an attacker there: the object is not what was stored.
    #[error("the object at the provider is not what was stored there: {0}")]
    Damaged(String),
    /// The vault's error.
    #[error(transparent)]
    Vault(VaultError),
}

/// The result of a call.
pub type Result<T, E = RemoteError> = std::result::Result<T, E>;

/// Most of a provider's text in an error or in a line of the log, in bytes.
const TEXT_MAX: usize = 300;

/// The beginning of a text that the provider has chosen: it may be long, and many errors may be kept at once.
pub(super) fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_MAX)]
}

impl From<NoLonger> for RemoteError {
    fn from(_: NoLonger) -> RemoteError {
        RemoteError::NoLonger
    }
}

impl From<VaultError> for RemoteError {
    /// An error of a byte source returns as the error that it was made from.
    fn from(error: VaultError) -> RemoteError {
        let mut cause: Option<&(dyn Error + 'static)> = Some(&error);
        while let Some(now) = cause {
            if let Some(told) = now.downcast_ref::<io::Error>().and_then(io::Error::get_ref)
                && let Some(told) = told.downcast_ref::<RemoteError>()
            {
                return told.again();
            }
            cause = now.source();
        }
        match error {
            VaultError::ReadOnly => RemoteError::ReadOnly,
            error @ (VaultError::Damaged { .. } | VaultError::Store(_)) => RemoteError::Damaged(error.to_string()),
            error => RemoteError::Vault(error),
        }
    }
}

impl RemoteError {
    /// Whether the same operation may succeed later.
    pub fn may_pass(&self) -> bool {
        matches!(self, RemoteError::Busy(_) | RemoteError::Unreachable(_))
    }

    /// A copy of an error from a byte source.
    fn again(&self) -> RemoteError {
        match self {
            RemoteError::Busy(text) => RemoteError::Busy(text.clone()),
            RemoteError::Unreachable(text) => RemoteError::Unreachable(text.clone()),
            RemoteError::Tls(text) => RemoteError::Tls(text.clone()),
            RemoteError::Denied(text) => RemoteError::Denied(text.clone()),
            RemoteError::Expired(text) => RemoteError::Expired(text.clone()),
            RemoteError::Damaged(text) => RemoteError::Damaged(text.clone()),
            RemoteError::GivenUp => RemoteError::GivenUp,
            RemoteError::Missing(text) | RemoteError::Changed(text) => {
                RemoteError::Busy(format!("an object was replaced while it was read: {text}"))
            }
            other => RemoteError::Answer(other.to_string()),
        }
    }
}
