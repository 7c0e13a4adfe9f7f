//! Secrets in requests to a server.

use super::protocol::{Cost, Parcel};
use crate::{Error, Policy, Result};
use data_encoding::HEXLOWER;
use lamassu_crypto::{Secret, wrap};
use lamassu_keys::{Argon2Params, Material, SlotKind};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Channels that wait for their parcel; beyond that the oldest are dropped.
const CHANNELS_MAX: usize = 8;

/// Bytes of a channel's number, too many to guess.
const NUMBER_LEN: usize = 16;

fn aad(channel: &str) -> Vec<u8> {
    [&b"lamassu v1 call"[..], channel.as_bytes()].concat()
}

/// Packs key material for a slot.
///
/// # Errors
/// [`Error::Usage`] for a token: its key cannot be sent.
pub fn pack(channel: &str, key: &Secret<32>, material: &Material, cost: Argon2Params) -> Result<Parcel> {
    let content = match material {
        Material::Passphrase(passphrase) => passphrase.expose(),
        Material::Key { kind: _, key } => &key.expose()[..],
        Material::Token(_) => {
            return Err(Error::Usage("a token's key stays where it is: give the vault's directory, and --key"));
        }
    };
    let (nonce, sealed) = wrap::seal(key, &aad(channel), content)?;
    Ok(Parcel {
        channel: channel.into(),
        kind: material.kind().name().into(),
        nonce: HEXLOWER.encode(&nonce),
        sealed: HEXLOWER.encode(&sealed),
        cost: Cost { memory_kib: cost.memory_kib(), passes: cost.passes(), lanes: cost.lanes() },
    })
}

/// The server's side: keys of channels, each for one parcel of the user for whom it was made.
#[derive(Default)]
pub struct Channels {
    open: Mutex<VecDeque<Channel>>,
}

struct Channel {
    uid: u32,
    number: String,
    key: Secret<32>,
}

impl Channels {
    fn open(&self) -> MutexGuard<'_, VecDeque<Channel>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a channel for a user.
    pub fn add(&self, uid: u32) -> Result<(String, Secret<32>)> {
        let key = Secret::random()?;
        let mut number = [0; NUMBER_LEN];
        lamassu_crypto::random(&mut number)?;
        let number = HEXLOWER.encode(&number);
        let mut open = self.open();
        if open.len() >= CHANNELS_MAX {
            open.pop_front();
        }
        open.push_back(Channel { uid, number: number.clone(), key: key.duplicate() });
        Ok((number, key))
    }

    /// Opens a parcel of a user, and closes its channel. A parcel that does not open, or belongs to another user,
    /// closes none.
    ///
    /// # Errors
    /// [`Error::GarbledRequest`]; [`Error::NotApproved`] by this server's policy, whatever the client's is.
    pub fn unpack(&self, policy: &Policy, uid: u32, parcel: &Parcel) -> Result<(Material, Argon2Params)> {
        let opened = self.opened(uid, parcel).ok_or(Error::GarbledRequest)?;
        policy.check_kind(opened.0.kind())?;
        Ok(opened)
    }

    fn opened(&self, uid: u32, parcel: &Parcel) -> Option<(Material, Argon2Params)> {
        let mut open = self.open();
        let at = open.iter().position(|channel| channel.uid == uid && channel.number == parcel.channel)?;
        let nonce: [u8; 24] = HEXLOWER.decode(parcel.nonce.as_bytes()).ok()?.try_into().ok()?;
        let sealed = HEXLOWER.decode(parcel.sealed.as_bytes()).ok()?;
        let content = wrap::open(&open[at].key, &nonce, &aad(&parcel.channel), &sealed).ok()?;
        drop(open.remove(at));
        let kind = SlotKind::ALL.into_iter().find(|k| k.name() == parcel.kind)?;
        let material = match kind {
            SlotKind::Passphrase => Material::new(kind, content).ok()?,
            SlotKind::Raw | SlotKind::Hex | SlotKind::Recovery | SlotKind::RecoveryShares => {
                Material::Key { kind, key: Secret::from_slice(content.expose())? }
            }
            SlotKind::Pkcs11 | SlotKind::Parent => return None,
        };
        let Cost { memory_kib, passes, lanes } = parcel.cost;
        Some((material, Argon2Params::new(memory_kib, passes, lanes)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_crypto::SecretBytes;

    #[test]
    fn a_parcel_is_opened_once_by_its_channel_alone() {
        let (channels, policy) = (Channels::default(), Policy::default());
        let material = Material::new(SlotKind::Passphrase, SecretBytes::new(b"correct horse".to_vec())).unwrap();
        let cost = Argon2Params::new(64, 1, 2).unwrap();
        let (number, key) = channels.add(7).unwrap();
        let parcel = pack(&number, &key, &material, cost).unwrap();
        let shown = serde_json::to_string(&parcel).unwrap();
        assert!(!shown.contains("correct") && !shown.contains(&HEXLOWER.encode(b"correct")), "{shown}");
        let again = || pack(&number, &key, &material, cost).unwrap();
        // None of these closes the channel.
        let other = Parcel { channel: channels.add(7).unwrap().0, ..again() };
        let rubbish = Parcel { sealed: String::new(), ..again() };
        assert!(channels.unpack(&policy, 7, &other).is_err() && channels.unpack(&policy, 7, &rubbish).is_err());
        assert!(channels.unpack(&policy, 8, &again()).is_err(), "another user's");
        match channels.unpack(&policy, 7, &parcel).unwrap() {
            (Material::Passphrase(p), c) => assert_eq!((p.expose(), c), (&b"correct horse"[..], cost)),
            _ => panic!(),
        }
        assert!(channels.unpack(&policy, 7, &parcel).is_err(), "only once");
        // Channels that are never used do not fill the memory.
        let first = channels.add(7).unwrap();
        (0..CHANNELS_MAX).for_each(|_| drop(channels.add(7).unwrap()));
        assert!(channels.unpack(&policy, 7, &pack(&first.0, &first.1, &material, cost).unwrap()).is_err());
    }
}
