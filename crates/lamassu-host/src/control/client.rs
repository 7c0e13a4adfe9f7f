//! The client's side of the control protocol.

use super::parcel;
use super::protocol::{Answer, Channel, Failed, Parcel, Request};
use crate::Error;
use data_encoding::HEXLOWER;
use lamassu_crypto::Secret;
use lamassu_keys::{Argon2Params, Material};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

/// Carries a request to a server, and returns its answer.
pub trait Transport {
    /// An error of the transport.
    type Error;

    /// Sends a request, and waits for the answer. Neither is longer than [`super::protocol::MESSAGE_LEN_MAX`].
    ///
    /// # Errors
    /// If there is no answer.
    fn call(&self, request: &[u8]) -> Result<Zeroizing<Vec<u8>>, Self::Error>;
}

/// Why a request was not carried out.
#[derive(Debug)]
pub enum AskError<E> {
    /// The server was not reached, or its answer did not arrive.
    Transport(E),
    /// The server refused or failed, with its reason.
    Told(Failed),
    /// The server's answer is invalid.
    Garbled,
    /// The request could not be made.
    Here(Error),
}

/// Sends a request, and waits for the answer.
///
/// # Errors
/// See [`AskError`].
pub fn ask<T: DeserializeOwned, C: Transport>(server: &C, request: &Request) -> Result<T, AskError<C::Error>> {
    read(&call(server, request)?)
}

fn call<C: Transport>(server: &C, request: &Request) -> Result<Zeroizing<Vec<u8>>, AskError<C::Error>> {
    let request = serde_json::to_vec(request).map_err(|source| AskError::Here(Error::Unanswerable { source }))?;
    server.call(&request).map_err(AskError::Transport)
}

fn read<'a, T: Deserialize<'a>, E>(answer: &'a [u8]) -> Result<T, AskError<E>> {
    // Not the parser's error, which may quote secret content.
    match serde_json::from_slice(answer).map_err(|_| AskError::Garbled)? {
        Answer::Done(value) => Ok(value),
        Answer::Failed(failed) => Err(AskError::Told(failed)),
    }
}

/// Packs key material for a slot, for a server.
///
/// # Errors
/// See [`AskError`]; [`Error::Usage`] for a token's key, which cannot be sent.
pub fn pack<C: Transport>(server: &C, material: &Material, cost: Argon2Params) -> Result<Parcel, AskError<C::Error>> {
    let answer = call(server, &Request::Channel {})?;
    let Channel { number, key } = read(&answer)?;
    let mut bytes = Zeroizing::new([0; 32]);
    match HEXLOWER.decode_mut(key.as_bytes(), &mut *bytes) {
        Ok(32) if key.len() == 64 => {
            parcel::pack(number, &Secret::new(&mut bytes), material, cost).map_err(AskError::Here)
        }
        Ok(_) | Err(_) => Err(AskError::Garbled),
    }
}
