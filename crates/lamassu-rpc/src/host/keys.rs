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
    /// There is none of this name, or this host was not granted it: a server does not tell which.
    #[error("there is no such key, or this host was not granted it")]
    Unknown,
    /// It was made already.
    #[error("the key was made already")]
    Exists,
    /// An administrator has it given to nobody.
    #[error("the key was retired")]
    Retired,
    /// It is gone.
    #[error("the key was deleted")]
    Deleted,
    /// The server has no master key, or is an earlier one.
    #[error("the server keeps no keys")]
    KeepsNone,
    /// What came is none.
    #[error("what the server gives has {found} bytes, and is no key")]
    Length {
        /// its bytes
        found: usize,
    },
    /// What comes is no answer to what was asked.
    #[error("the server's answer makes no sense")]
    Garbled,
    /// This host has asked for as much as it may.
    #[error("this host asks for more than it may")]
    Limited {
        /// when it may again
        again: Duration,
    },
    /// As with any other call.
    #[error(transparent)]
    Server(#[from] AnchorError),
}

/// When who is told nothing of it may ask again.
const AGAIN_BY_DEFAULT: Duration = Duration::from_millis(50);

impl Connection {
    /// The key of a name.
    ///
    /// # Errors
    /// [`KeyRefused`].
    pub fn key(&self, name: &str) -> Result<Secret<32>, KeyRefused> {
        let given = self.keys_answer(self.keys().give_key(proto::KeyName { name: name.into() }))?;
        Secret::from_slice(&given.key).ok_or(KeyRefused::Length { found: given.key.len() })
    }

    /// Has a key of a name made.
    ///
    /// # Errors
    /// [`KeyRefused`].
    pub fn make_key(&self, name: &str) -> Result<(), KeyRefused> {
        self.keys_answer(self.keys().make_key(proto::KeyName { name: name.into() })).map(drop)
    }

    /// The public key of a key that evaluates; it is made if it is not there.
    ///
    /// # Errors
    /// [`KeyRefused`].
    pub fn open_oblivious(&self, name: &str) -> Result<Element, KeyRefused> {
        let opened = self.keys_answer(self.keys().open_oblivious(proto::KeyName { name: name.into() }))?;
        opened.public.try_into().map_err(|_| KeyRefused::Garbled)
    }

    /// Has a key evaluate up to [`lamassu_crypto::oprf::BATCH_MAX`] blinded elements.
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
                // Of the codes above none is left that speaks of vaults.
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
