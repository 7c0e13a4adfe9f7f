//! Keys that a server keeps, for a host that was granted them.

use super::{Connection, fault};
use crate::proto::keys_client::KeysClient;
use crate::{AGAIN, KEYS_MESSAGE_MAX, proto, protocol};
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_crypto::Secret;
use lamassu_crypto::oblivious::KeyServerFault;
use lamassu_crypto::oprf::{Element, Evaluation};
use std::time::Duration;
use tonic::{Code, Response, Status};

/// The time until the next request, if the server does not say it.
const AGAIN_BY_DEFAULT: Duration = Duration::from_millis(50);

impl Connection {
    /// Gets the key with this name.
    ///
    /// # Errors
    /// [`KeyServerFault`].
    pub fn key(&self, name: &str) -> Result<Secret<32>, KeyServerFault> {
        let given = self.keys_answer(self.keys().give_key(proto::KeyName { name: name.into() }))?;
        Secret::from_slice(&given.key).ok_or_else(garbled)
    }

    /// Lets the server make a key with this name.
    ///
    /// # Errors
    /// [`KeyServerFault`].
    pub fn make_key(&self, name: &str) -> Result<(), KeyServerFault> {
        self.keys_answer(self.keys().make_key(proto::KeyName { name: name.into() })).map(drop)
    }

    /// The public key of an evaluating key, which is made if it does not exist.
    ///
    /// # Errors
    /// [`KeyServerFault`].
    pub fn open_oblivious(&self, name: &str) -> Result<Element, KeyServerFault> {
        let opened = self.keys_answer(self.keys().open_oblivious(proto::KeyName { name: name.into() }))?;
        opened.public.try_into().map_err(|_| garbled())
    }

    /// Lets a key evaluate up to [`lamassu_crypto::oprf::BATCH_MAX`] blinded elements.
    ///
    /// # Errors
    /// [`KeyServerFault`].
    pub fn evaluate(&self, name: &str, blinded: &[Element]) -> Result<Evaluation, KeyServerFault> {
        let request = proto::Blinded { name: name.into(), elements: blinded.as_flattened().to_vec() };
        let evaluated = self.answer(self.keys().evaluate(request)).map_err(unanswered)?;
        let evaluated = evaluated.map_err(|status| match status.code() {
            Code::ResourceExhausted => KeyServerFault::Limited { again: again(&status) },
            _ => refused(&status),
        })?;
        let (elements, rest) = evaluated.elements.as_chunks::<32>();
        let proof = <[u8; 64]>::try_from(&evaluated.proof[..]).map_err(|_| garbled())?;
        if !rest.is_empty() || elements.len() != blinded.len() {
            return Err(garbled());
        }
        Ok(Evaluation { elements: elements.to_vec(), proof })
    }

    fn keys(&self) -> KeysClient<super::Wire> {
        let client = KeysClient::new(self.channel.clone());
        client.max_decoding_message_size(KEYS_MESSAGE_MAX).max_encoding_message_size(KEYS_MESSAGE_MAX)
    }

    fn keys_answer<T>(&self, call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, KeyServerFault> {
        self.answer(call).map_err(unanswered)?.map_err(|status| refused(&status))
    }
}

fn refused(status: &Status) -> KeyServerFault {
    if protocol::of(status.metadata()).is_some() {
        return failed(fault(status));
    }
    match status.code() {
        Code::NotFound => KeyServerFault::Unknown,
        Code::AlreadyExists => KeyServerFault::Exists,
        Code::FailedPrecondition => KeyServerFault::Retired,
        Code::DataLoss => KeyServerFault::Deleted,
        Code::Unimplemented => KeyServerFault::KeepsNone,
        _ => failed(fault(status)),
    }
}

/// The fault for a server that was not reached, or that did not answer.
pub fn unanswered(error: AnchorError) -> KeyServerFault {
    match error {
        AnchorError::Server { server: _, fault } => failed(fault),
        error => KeyServerFault::Failing { detail: error.to_string() },
    }
}

fn failed(fault: ServerFault) -> KeyServerFault {
    match fault {
        ServerFault::Unreachable { detail } => KeyServerFault::Unreachable { detail },
        ServerFault::Untrusted { detail } => KeyServerFault::Untrusted { detail },
        ServerFault::NotJoined { .. } => KeyServerFault::NotJoined,
        ServerFault::Refused { detail } => KeyServerFault::Refused { detail },
        ServerFault::Failed { detail } => KeyServerFault::Failing { detail },
        ServerFault::Version { detail } => KeyServerFault::Version { detail },
        // Errors about vaults only.
        ServerFault::UnknownVault
        | ServerFault::Policy { .. }
        | ServerFault::InUse { .. }
        | ServerFault::Ended
        | ServerFault::Older { .. }
        | ServerFault::Restored { .. } => KeyServerFault::Failing { detail: fault.to_string() },
    }
}

fn garbled() -> KeyServerFault {
    KeyServerFault::Failing { detail: "its answer makes no sense".into() }
}

fn again(status: &Status) -> Duration {
    let said = status.metadata().get(AGAIN).and_then(|ms| ms.to_str().ok()?.parse().ok());
    said.map_or(AGAIN_BY_DEFAULT, Duration::from_millis)
}
