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

/// Carries a request to a server, and its answer back.
pub trait Transport {
    /// What hinders that.
    type Error;

    /// Waits for the answer. Neither is longer than [`super::protocol::MESSAGE_LEN_MAX`].
    ///
    /// # Errors
    /// Where there is no answer.
    fn call(&self, request: &[u8]) -> Result<Zeroizing<Vec<u8>>, Self::Error>;
}

/// A request was not carried out.
#[derive(Debug)]
pub enum AskError<E> {
    /// The server was not reached, or its answer did not get here.
    Transport(E),
    /// The server's: it says why.
    Told(Failed),
    /// The server's: its answer makes no sense here.
    Garbled,
    /// This side's: the request could not be made.
    Here(Error),
}

/// Asks, and waits for the answer.
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
    // Not the parser's error: it may quote what must not be shown.
    match serde_json::from_slice(answer).map_err(|_| AskError::Garbled)? {
        Answer::Done(value) => Ok(value),
        Answer::Failed(failed) => Err(AskError::Told(failed)),
    }
}

/// Packs what opens or shall open a slot for a server.
///
/// # Errors
/// See [`AskError`]; [`Error::Usage`] for a token's key, which cannot travel.
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
