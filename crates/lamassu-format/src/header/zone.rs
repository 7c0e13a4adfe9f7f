//! The zone file.

use super::sealed::Members;
use super::slot::AdminPin;
use super::vault::geometry;
use super::wire::{self, WireCompression, WireKeychain, WireKeys, WirePin, WireSlot, WireZone};
use super::{Header, HeaderError, KeyArea, ZoneId, json};
use crate::{Compression, Suite};

/// The properties of a zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneParams {
    /// suite of every vault of the zone
    pub suite: Suite,
    /// default block size of its vaults, in bytes
    pub block_size: u32,
    /// how its vaults compress blocks unless told otherwise
    pub compression: Option<Compression>,
    /// seconds since 1970
    pub created: u64,
}

/// A parsed zone file. Not authenticated until `lamassu-keys` has verified its MAC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneFile {
    params: ZoneParams,
    pins: Vec<AdminPin>,
    keys: KeyArea,
}

impl ZoneFile {
    /// A zone file of its parts. Bounds are checked when it is written.
    pub fn new(params: ZoneParams, keys: KeyArea) -> Self {
        ZoneFile { params, pins: Vec::new(), keys }
    }

    /// The administrators of vaults whom the zone's members should trust.
    pub fn pins(&self) -> &[AdminPin] {
        &self.pins
    }

    /// Pins a vault's administrator, in place of another.
    pub fn set_pin(&mut self, pin: AdminPin) {
        self.pins.retain(|old| old.vault != pin.vault);
        self.pins.push(pin);
    }

    /// Everything but slots, keychain and MAC.
    pub fn params(&self) -> &ZoneParams {
        &self.params
    }

    /// Suite.
    pub fn suite(&self) -> Suite {
        self.params.suite
    }

    /// Default block size of its vaults, in bytes.
    pub fn block_size(&self) -> u32 {
        self.params.block_size
    }

    /// How its vaults compress blocks unless told otherwise. Only vaults with the same compression deduplicate with one
    /// another.
    pub fn compression(&self) -> Option<Compression> {
        self.params.compression
    }

    /// Zone id.
    pub fn id(&self) -> ZoneId {
        ZoneId(self.keys.id)
    }

    /// When it was made, in seconds since 1970.
    pub fn created(&self) -> u64 {
        self.params.created
    }
}

impl Members for ZoneFile {
    type Wire = WireZone;

    fn wire(&self) -> WireZone {
        WireZone {
            format: Self::FORMAT.into(),
            version: crate::VERSION.into(),
            features: wire::features(&self.keys.keychain),
            id: wire::hex(&self.keys.id),
            suite: self.params.suite.name().into(),
            block_size: self.params.block_size.into(),
            compression: self.params.compression.map(WireCompression::of),
            created: self.params.created,
            next_slot: self.keys.next_slot.into(),
            slots: WireSlot::all(&self.keys.slots),
            keychain: WireKeychain::of(&self.keys.keychain),
            pins: WirePin::of_all(&self.pins),
            mac: wire::hex(&self.keys.mac),
        }
    }
}

impl Header for ZoneFile {
    const FORMAT: &'static str = "lamassu-zone";
    const OUTER_REQUIRED: bool = false;
    const IS_VAULT: bool = false;

    fn parse(bytes: &[u8]) -> Result<Self, HeaderError> {
        let w: WireZone = json::from_slice(Self::FORMAT, bytes)?;
        let (id, next_slot, slots, mac) = (&w.id, w.next_slot, &w.slots, &w.mac);
        let (keychain, features, suite) = (&w.keychain.0, &w.features[..], wire::suite(&w.suite)?);
        let (admin, history, destroyed) = (None, None, false);
        let keys = WireKeys { id, next_slot, slots, destroyed, keychain, features, suite, admin, history, mac };
        let rule = "a power of two from 4096 to 1048576";
        let size = geometry(w.block_size, 1).ok_or(HeaderError::Member { member: "block_size", rule })?.block_size();
        let block_size = u32::try_from(size).expect("a block size is at most 2^20");
        let compression = w.compression.as_ref().map(|c| c.0.parse(suite, block_size)).transpose()?;
        let params = ZoneParams { suite, block_size, compression, created: w.created };
        Ok(ZoneFile { params, pins: WirePin::parse_all(w.pins.as_ref())?, keys: keys.parse()? })
    }

    fn keys(&self) -> &KeyArea {
        &self.keys
    }

    fn keys_mut(&mut self) -> &mut KeyArea {
        &mut self.keys
    }

    fn suite(&self) -> Suite {
        self.params.suite
    }
}
