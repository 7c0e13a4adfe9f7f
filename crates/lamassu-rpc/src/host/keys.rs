//! Keys that a server keeps, for a host that was granted them.

use super::{Connection, fault};
use crate::proto;
use crate::proto::keys_client::KeysClient;
use lamassu_anchor::{AnchorError, ServerFault};
use lamassu_crypto::Secret;
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
    /// As with any other call.
    #[error(transparent)]
    Server(#[from] AnchorError),
}

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

    fn keys(&self) -> KeysClient<Channel> {
        KeysClient::new(self.channel.clone()).max_decoding_message_size(4096)
    }

    fn keys_answer<T>(&self, call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, KeyRefused> {
        self.answer(call)?.map_err(|status| match status.code() {
            Code::NotFound => KeyRefused::Unknown,
            Code::AlreadyExists => KeyRefused::Exists,
            Code::FailedPrecondition => KeyRefused::Retired,
            Code::DataLoss => KeyRefused::Deleted,
            Code::Unimplemented => KeyRefused::KeepsNone,
            _ => match fault(&status) {
                // Of the codes above none is left that speaks of vaults.
                ServerFault::Ended => KeyRefused::Server(self.garbled("a session that there is none of")),
                fault => KeyRefused::Server(self.error(fault)),
            },
        })
    }
}
