//! Keys that a server keeps, for a host that was granted them.

use super::{Connection, fault};
use crate::proto::keys_client::KeysClient;
use crate::{AGAIN, KEYS_MESSAGE_MAX, proto};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_crypto::Secret;
use lamassu_crypto::oprf::{Element, Evaluation};
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

/// Why a server gave no key, or made none.
#[derive(Debug, thiserror::Error)]
pub enum KeyRefused {
    /// No key has this name, or this host was not granted it: the server does not say which.
    #[error("there is no such key, or this host was not granted it")]
    Unknown,
    /// The key exists already.
    #[error("the key was made already")]
    Exists,
    /// An administrator has retired the key.
    #[error("the key was retired")]
    Retired,
    /// The key was deleted.
    #[error("the key was deleted")]
    Deleted,
    /// The server has no master key, or has an earlier version.
    #[error("the server keeps no keys")]
    KeepsNone,
    /// The server's answer has the wrong length for a key.
    #[error("what the server gives has {found} bytes, and is no key")]
    Length {
        /// its bytes
        found: usize,
    },
    /// The server's answer does not fit the request.
    #[error("the server's answer makes no sense")]
    Garbled,
    /// This host has exceeded its limit.
    #[error("this host asks for more than it may")]
    Limited {
        /// the time until it may ask again
        again: Duration,
    },
    /// An error that any call can have.
    #[error(transparent)]
    Server(#[from] AnchorError),
}

/// The time until the next request, if the server does not say it.
const AGAIN_BY_DEFAULT: Duration = Duration::from_millis(50);

impl Connection {
    /// Gets the key with this name.
    ///
    /// # Errors
    /// [`KeyRefused`].
    pub fn key(&self, name: &str) -> Result<Secret<32>, KeyRefused> {
        let given = self.keys_answer(self.keys().give_key(proto::KeyName { name: name.into() }))?;
        Secret::from_slice(&given.key).ok_or(KeyRefused::Length { found: given.key.len() })
    }

    /// Lets the server make a key with this name.
    ///
    /// # Errors
    /// [`KeyRefused`].
    pub fn make_key(&self, name: &str) -> Result<(), KeyRefused> {
        self.keys_answer(self.keys().make_key(proto::KeyName { name: name.into() })).map(drop)
    }

    /// The public key of an evaluating key, which is made if it does not exist.
    ///
    /// # Errors
    /// [`KeyRefused`].
    pub fn open_oblivious(&self, name: &str) -> Result<Element, KeyRefused> {
        let opened = self.keys_answer(self.keys().open_oblivious(proto::KeyName { name: name.into() }))?;
        opened.public.try_into().map_err(|_| KeyRefused::Garbled)
    }

    /// Lets a key evaluate up to [`lamassu_crypto::oprf::BATCH_MAX`] blinded elements.
    ///
    /// # Errors
    /// [`KeyRefused`].
    pub fn evaluate(&self, name: &str, blinded: &[Element]) -> Result<Evaluation, KeyRefused> {
        let request = proto::Blinded { name: name.into(), elements: blinded.as_flattened().to_vec() };
        let evaluated = self.answer(self.keys().evaluate(request))?.map_err(|status| match status.code() {
            Code::ResourceExhausted => KeyRefused::Limited { again: again(&status) },
            _ => self.refused(&status),
        })?;
        let (elements, rest) = evaluated.elements.as_chunks::<32>();
        let proof = <[u8; 64]>::try_from(&evaluated.proof[..]).map_err(|_| KeyRefused::Garbled)?;
        if !rest.is_empty() || elements.len() != blinded.len() {
            return Err(KeyRefused::Garbled);
        }
        Ok(Evaluation { elements: elements.to_vec(), proof })
    }

    fn keys(&self) -> KeysClient<Channel> {
        let client = KeysClient::new(self.channel.clone());
        client.max_decoding_message_size(KEYS_MESSAGE_MAX).max_encoding_message_size(KEYS_MESSAGE_MAX)
    }

    fn keys_answer<T>(&self, call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, KeyRefused> {
        self.answer(call)?.map_err(|status| self.refused(&status))
    }

    fn refused(&self, status: &Status) -> KeyRefused {
        match status.code() {
            Code::NotFound => KeyRefused::Unknown,
            Code::AlreadyExists => KeyRefused::Exists,
            Code::FailedPrecondition => KeyRefused::Retired,
            Code::DataLoss => KeyRefused::Deleted,
            Code::Unimplemented => KeyRefused::KeepsNone,
            _ => match fault(status) {
                // The remaining codes are about vaults, and do not apply to keys.
                ServerFault::Ended => KeyRefused::Server(self.garbled("a session that there is none of")),
                fault => KeyRefused::Server(self.error(fault)),
            },
        }
    }
}

fn again(status: &Status) -> Duration {
    let said = status.metadata().get(AGAIN).and_then(|ms| ms.to_str().ok()?.parse().ok());
    said.map_or(AGAIN_BY_DEFAULT, Duration::from_millis)
}
