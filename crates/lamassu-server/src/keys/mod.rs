//! Keys that this server makes and keeps for hosts: `server://HOST/ID` as a key source.
//!
//! | module | what it does |
//! |---|---|
//! | this one | the master key, under which keys are wrapped, and its source |
//! | `evaluate` | limits on evaluations by keys that never leave the server |
//!
//! All keys are wrapped under one key, which is stored in the state in the form of a zone file (`docs/format.md`,
//! section 4). The zone opens with the master key, whatever its source, as a vault opens with the key of a slot. A
//! wrapped key is bound to its name.
//!
//! Never: a key on disk that is not wrapped; a key in a log, an error or an answer to an administrator; a key sent to a
//! host before the audit log records it.

pub mod evaluate;

use crate::config::Config;
use crate::state::State;
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_crypto::{Secret, wrap};
use lamassu_format::Suite;
use lamassu_format::header::{Header, ZoneFile};
use lamassu_keys::{
    Ask, KeyError, KeySource, Material, NewSlot, NewZone, Purpose, SlotKind, Unlocked, cost, create_zone, unix_now,
    unlock,
};

const NONCE_LEN: usize = 24;
/// The purpose of a master key, in a prompt.
const SUBJECT: &str = "the keys of lamassu-server";

/// The key that wraps all others.
#[derive(Debug)]
pub struct Master {
    key: Secret<32>,
}

impl Master {
    /// The master of a server, by its configuration. A server without keys makes a zone for them. `None`: it keeps no
    /// keys.
    ///
    /// # Errors
    /// [`ServerError::Source`], [`ServerError::MasterKey`], [`ServerError::NoMasterKey`]; those of the state.
    pub fn of(config: &Config, state: &State) -> Result<Option<Master>> {
        let zone = state.zone()?;
        let Some(source) = source_in(config)? else {
            return match has_keys(state)? {
                true => Err(ServerError::NoMasterKey),
                false => Ok(None),
            };
        };
        let Some(zone) = zone else {
            let (zone, master) = Master::make(&load(&source, Purpose::Create)?)?;
            state.put_zone(&zone)?;
            return Ok(Some(master));
        };
        Master::open(&zone, &load(&source, Purpose::Unlock)?).map(Some)
    }

    /// A new one, and the zone that holds it.
    ///
    /// # Errors
    /// [`ServerError::MasterKey`].
    pub fn make(material: &Material) -> Result<(String, Master)> {
        let cost = match material.kind() {
            SlotKind::Passphrase => cost::measure(cost::TARGET),
            _ => cost::FALLBACK,
        };
        let slot = NewSlot { material, cost, label: "master key", created: unix_now() };
        // Only K_in of the zone is used.
        let new = NewZone { suite: Suite::Aes, block_size: 4096, compression: None, outer: false, created: unix_now() };
        let made = create_zone(&new, &slot).and_then(|(file, keys)| Ok((file.to_json()?, keys)));
        let (zone, keys) = made.map_err(ServerError::MasterKey)?;
        let zone = String::from_utf8(zone).map_err(|_| garbled("a zone file"))?;
        Ok((zone, Master::within(&keys)?))
    }

    /// The one in `zone`.
    ///
    /// # Errors
    /// [`ServerError::MasterKey`].
    pub fn open(zone: &str, material: &Material) -> Result<Master> {
        let file = ZoneFile::parse(zone.as_bytes()).map_err(|error| ServerError::MasterKey(error.into()))?;
        let keys = unlock(&file, material).map_err(ServerError::MasterKey)?;
        Master::within(&keys)
    }

    fn within(keys: &Unlocked) -> Result<Master> {
        let newest = keys.keychain().inner().last().ok_or(ServerError::MasterKey(KeyError::KeychainInvalid))?;
        Ok(Master { key: wrap::hkdf(newest.key().expose(), b"", b"lamassu v1 served keys") })
    }

    /// Wraps a key, bound to its name.
    ///
    /// # Errors
    /// [`ServerError::NoRandom`].
    pub fn wrap(&self, name: &str, key: &Secret<32>) -> Result<String> {
        let sealed = wrap::seal(&self.key, &bound_to(name), key.expose()).map_err(|_| ServerError::NoRandom)?;
        Ok(HEXLOWER.encode(&[&sealed.0[..], &sealed.1].concat()))
    }

    /// Unwraps a key; `None`: it belongs to another name, or was changed.
    pub fn unwrap(&self, name: &str, wrapped: &str) -> Option<Secret<32>> {
        let bytes = HEXLOWER.decode(wrapped.as_bytes()).ok()?;
        let (nonce, sealed) = bytes.split_first_chunk::<NONCE_LEN>()?;
        Secret::from_slice(wrap::open(&self.key, nonce, &bound_to(name), sealed).ok()?.expose())
    }
}

fn bound_to(name: &str) -> Vec<u8> {
    [b"lamassu v1 served key ", name.as_bytes()].concat()
}

fn garbled(what: &'static str) -> ServerError {
    ServerError::Garbled { detail: what.into() }
}

fn has_keys(state: &State) -> Result<bool> {
    Ok(state.keys()?.values().any(|key| key.kept().is_some()))
}

/// Where the master key is, if keys are kept.
///
/// # Errors
/// [`ServerError::Source`].
pub fn source_in(config: &Config) -> Result<Option<KeySource>> {
    config.master_source().map_err(|source| ServerError::Source { role: "master_key", source })
}

/// Asks a source for a master key.
///
/// # Errors
/// [`ServerError::Source`].
pub fn load(source: &KeySource, purpose: Purpose) -> Result<Material> {
    let loaded = source.load(&Ask { subject: SUBJECT, purpose, stdin: true });
    let loaded = loaded.map_err(|source| ServerError::Source { role: "the master key", source })?;
    loaded.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    Ok(loaded.material)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_crypto::SecretBytes;

    fn material(byte: u8) -> Material {
        Material::new(SlotKind::Raw, SecretBytes::new(vec![byte; 32])).expect("a key")
    }

    #[test]
    fn a_key_opens_under_its_name_and_its_master_alone() {
        let (zone, master) = Master::make(&material(1)).expect("makes");
        let key = Secret::new(&mut [7; 32]);
        let wrapped = master.wrap("a", &key).expect("wraps");
        assert!(!wrapped.contains(&HEXLOWER.encode(&[7; 8])));
        let again = Master::open(&zone, &material(1)).expect("opens");
        assert_eq!(again.unwrap("a", &wrapped).expect("opens").expose(), key.expose());
        assert!(again.unwrap("b", &wrapped).is_none());
        for at in 0..wrapped.len() {
            let mut changed = wrapped.clone().into_bytes();
            changed[at] = if changed[at] == b'0' { b'1' } else { b'0' };
            assert!(master.unwrap("a", std::str::from_utf8(&changed).expect("digits")).is_none(), "at {at}");
        }
        for garbled in ["", "00", "x", &wrapped[2..], &wrapped.to_uppercase()] {
            assert!(master.unwrap("a", garbled).is_none());
        }
        assert_eq!(Master::open(&zone, &material(2)).expect_err("another key").code(), 12);
        assert_eq!(Master::open("{}", &material(1)).expect_err("none").code(), 26);
        assert_eq!(format!("{master:?}"), "Master { key: Secret<32> }");
        let (_, other) = Master::make(&material(1)).expect("makes");
        assert!(other.unwrap("a", &wrapped).is_none());
    }
}
