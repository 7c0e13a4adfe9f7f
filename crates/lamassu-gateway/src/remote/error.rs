//! Why something at a provider failed.
//!
//! What a provider answers to a request of the gateway's is not about what its client has named: 404 is
//! [`RemoteError::Missing`] until an operation knows that it is the client's key that is missing, and says
//! [`Refusal::NoKey`]. The same holds for conditions and uploads.

use crate::objects::Refusal;
use lamassu_vault::VaultError;
use std::error::Error;
use std::io;

/// See the module's head.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The client's.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The client's: the key's sealed form is longer than a provider takes.
    #[error("the sealed form of the key has more than 1024 bytes, which no provider takes")]
    LongKey,
    /// The client's: a listing could not name the object.
    #[error("a key has no character that XML cannot have, as most control characters")]
    KeyNotInXml,
    /// The client's: what it gives with the object is more than a provider keeps beside one.
    #[error("headers, metadata, tags and checksums together are more than a provider keeps with an object")]
    MuchMetadata,
    /// The client's: the body has another length than was said.
    #[error("the body has another length than was said")]
    Length,
    /// The client's: a provider copies no object that large at once.
    #[error("objects of more than 5 GiB are not copied at the provider: upload it again, in parts")]
    LargeCopy,
    /// The client is gone.
    #[error("the client is gone")]
    GivenUp,
    /// The gateway changes nothing.
    #[error("the gateway serves this read-only")]
    ReadOnly,
    /// The provider has nothing where the gateway has looked.
    #[error("the provider has nothing there: {0}")]
    Missing(String),
    /// The provider has something else by now than the gateway has meant.
    #[error("the provider has something else there by now: {0}")]
    Changed(String),
    /// The provider knows no more of an upload of the gateway's.
    #[error("the provider has lost an upload: {0}")]
    Lost(String),
    /// The provider's, for a while: it is busy, or fails.
    #[error("the provider is busy or fails: {0}")]
    Busy(String),
    /// The network's: no answer came.
    #[error("the provider does not answer: {0}")]
    Unreachable(String),
    /// The operator's: the certificate of the provider is not verified, or it speaks no TLS.
    #[error("no TLS with the provider: {0}")]
    Tls(String),
    /// The operator's: the provider refuses the gateway's credentials, or what it asks for.
    #[error("the provider refuses the gateway: {0}")]
    Denied(String),
    /// The operator's: the bucket of `backend` does not exist.
    #[error("the provider has no such bucket: {0}")]
    NoBackend(String),
    /// The operator's: the bucket is elsewhere.
    #[error("the bucket is at another endpoint or in another region: {0}")]
    Elsewhere(String),
    /// The provider's: an answer that this program does not understand.
    #[error("an answer that is not understood: {0}")]
    Answer(String),
    /// The provider's: it does not do what it was asked for.
    #[error("the provider does not support it: {0}")]
    Unsupported(String),
    /// The provider's, or somebody's at it: an object is not what was stored.
    #[error("the object at the provider is not what was stored there: {0}")]
    Damaged(String),
    /// The vault's.
    #[error(transparent)]
    Vault(VaultError),
}

/// The result of a call.
pub type Result<T, E = RemoteError> = std::result::Result<T, E>;

impl From<VaultError> for RemoteError {
    /// What a source of bytes has told comes back as it was told.
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
    /// Whether the same may work later.
    pub fn may_pass(&self) -> bool {
        matches!(self, RemoteError::Busy(_) | RemoteError::Unreachable(_))
    }

    /// The same once more, of what a source tells.
    fn again(&self) -> RemoteError {
        match self {
            RemoteError::Busy(text) => RemoteError::Busy(text.clone()),
            RemoteError::Unreachable(text) => RemoteError::Unreachable(text.clone()),
            RemoteError::Tls(text) => RemoteError::Tls(text.clone()),
            RemoteError::Denied(text) => RemoteError::Denied(text.clone()),
            RemoteError::Damaged(text) => RemoteError::Damaged(text.clone()),
            RemoteError::GivenUp => RemoteError::GivenUp,
            RemoteError::Missing(text) | RemoteError::Changed(text) => {
                RemoteError::Busy(format!("an object was replaced while it was read: {text}"))
            }
            other => RemoteError::Answer(other.to_string()),
        }
    }
}
