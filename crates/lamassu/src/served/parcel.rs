//! Secrets on their way to a daemon.

use super::protocol::{Cost, Parcel};
use crate::fault::Fault;
use crate::fips;
use anyhow::Result;
use data_encoding::HEXLOWER;
use lamassu_crypto::{Secret, wrap};
use lamassu_keys::{Argon2Params, Material, SlotKind};
use std::collections::VecDeque;
use std::sync::Mutex;

/// Channels that wait for their parcel; the oldest go.
const CHANNELS_MAX: usize = 8;

fn aad(channel: u64) -> Vec<u8> {
    [&b"lamassu v1 call"[..], &channel.to_le_bytes()].concat()
}

/// Packs what opens a slot.
///
/// # Errors
/// [`Fault::Usage`] for a token: its key cannot travel.
pub fn pack(channel: u64, key: &Secret<32>, material: &Material, cost: Argon2Params) -> Result<Parcel> {
    let content = match material {
        Material::Passphrase(passphrase) => passphrase.expose(),
        Material::Key { kind: _, key } => &key.expose()[..],
        Material::Token(_) => {
            return Err(Fault::Usage("a token's key stays where it is: give the vault's directory, and --key").into());
        }
    };
    let (nonce, sealed) = wrap::seal(key, &aad(channel), content)?;
    Ok(Parcel {
        channel,
        kind: material.kind().name().into(),
        nonce: HEXLOWER.encode(&nonce),
        sealed: HEXLOWER.encode(&sealed),
        cost: Cost { memory_kib: cost.memory_kib(), passes: cost.passes(), lanes: cost.lanes() },
    })
}

/// The daemon's end: keys of channels, each for one parcel.
#[derive(Default)]
pub struct Channels {
    open: Mutex<(u64, VecDeque<(u64, Secret<32>)>)>,
}

impl Channels {
    /// A new channel.
    pub fn add(&self) -> Result<(u64, Secret<32>)> {
        let key = Secret::random()?;
        let mut open = self.open.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        open.0 += 1;
        let number = open.0;
        if open.1.len() >= CHANNELS_MAX {
            open.1.pop_front();
        }
        open.1.push_back((number, key.duplicate()));
        Ok((number, key))
    }

    fn take(&self, number: u64) -> Option<Secret<32>> {
        let mut open = self.open.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let at = open.1.iter().position(|(n, _)| *n == number)?;
        open.1.remove(at).map(|(_, key)| key)
    }

    /// Opens a parcel; its channel is closed then.
    ///
    /// # Errors
    /// [`Fault::GarbledRequest`]; [`Fault::NotApproved`], whatever the one that asks was started with.
    pub fn unpack(&self, parcel: &Parcel) -> Result<(Material, Argon2Params)> {
        let opened = self.opened(parcel).ok_or(Fault::GarbledRequest)?;
        fips::check_kind(opened.0.kind())?;
        Ok(opened)
    }

    fn opened(&self, parcel: &Parcel) -> Option<(Material, Argon2Params)> {
        let key = self.take(parcel.channel)?;
        let nonce: [u8; 24] = HEXLOWER.decode(parcel.nonce.as_bytes()).ok()?.try_into().ok()?;
        let sealed = HEXLOWER.decode(parcel.sealed.as_bytes()).ok()?;
        let content = wrap::open(&key, &nonce, &aad(parcel.channel), &sealed).ok()?;
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
        let channels = Channels::default();
        let material = Material::new(SlotKind::Passphrase, SecretBytes::new(b"correct horse".to_vec())).unwrap();
        let cost = Argon2Params::new(64, 1, 2).unwrap();
        let (number, key) = channels.add().unwrap();
        let parcel = pack(number, &key, &material, cost).unwrap();
        let shown = serde_json::to_string(&parcel).unwrap();
        assert!(!shown.contains("correct") && !shown.contains(&HEXLOWER.encode(b"correct")), "{shown}");
        let other = Parcel { channel: channels.add().unwrap().0, ..pack(number, &key, &material, cost).unwrap() };
        assert!(channels.unpack(&other).is_err());
        match channels.unpack(&parcel).unwrap() {
            (Material::Passphrase(p), c) => assert_eq!((p.expose(), c), (&b"correct horse"[..], cost)),
            _ => panic!(),
        }
        assert!(channels.unpack(&parcel).is_err(), "only once");
        // Many that nobody uses do not fill the memory.
        let first = channels.add().unwrap();
        (0..CHANNELS_MAX).for_each(|_| drop(channels.add().unwrap()));
        assert!(channels.unpack(&pack(first.0, &first.1, &material, cost).unwrap()).is_err());
    }
}
