//! Rotation of a vault's keys, which a zone may share, and the retirement of old epochs.
//!
//! The keychain records for every epoch whether it came from a zone (§4).

use crate::{Epoch, KeyError, Tier, Unlocked};
use lamassu_crypto::KeyRing;
use lamassu_format::header::{Header, VaultHeader, ZoneFile};

/// Whether a zone shares an epoch of a vault's key. For K_in this is so as long as the header names a zone, whatever
/// the keychain says.
pub(crate) fn is_shared(header: &VaultHeader, tier: Tier, epoch: &Epoch) -> bool {
    epoch.is_zones() || (tier == Tier::Inner && !header.has_private_zone())
}

impl Unlocked {
    /// Whether a zone shares the newest key of a tier.
    pub fn is_shared(&self, header: &VaultHeader, tier: Tier) -> bool {
        self.keychain().epochs(tier).last().is_some_and(|epoch| is_shared(header, tier, epoch))
    }

    /// Starts an epoch of a vault's K_in or K_out. With `leave_zone`, a shared key is followed by one of the vault's
    /// own; for K_in the header then names no other zone.
    ///
    /// # Errors
    /// [`KeyError::SharedKey`] without `leave_zone`; as [`Unlocked::rotate`]. Both are then unchanged.
    pub fn rotate_vault(
        &mut self,
        header: &mut VaultHeader,
        tier: Tier,
        leave_zone: bool,
        created: u64,
    ) -> Result<u32, KeyError> {
        if self.is_shared(header, tier) && !leave_zone {
            return Err(KeyError::SharedKey { tier });
        }
        self.edit_keychain(header, |keychain, next| {
            if tier == Tier::Inner {
                next.leave_zone();
            }
            keychain.append(tier, created)
        })
    }

    /// Takes over the epochs by which the zone is ahead of the vault. Returns their numbers; there may be none.
    ///
    /// # Errors
    /// [`KeyError::OtherZone`], [`KeyError::ZoneSuite`], [`KeyError::OtherEpochs`]; [`KeyError::NoOuterKey`];
    /// [`KeyError::HeaderAltered`] and [`KeyError::OtherHeader`] of either header. Both are then unchanged.
    pub fn adopt_zone(
        &mut self,
        header: &mut VaultHeader,
        tier: Tier,
        zone: &ZoneFile,
        zone_keys: &Unlocked,
    ) -> Result<Vec<u32>, KeyError> {
        zone_keys.owns(zone)?;
        if zone.id() != header.zone() {
            return Err(KeyError::OtherZone);
        }
        if zone.suite() != header.suite() {
            return Err(KeyError::ZoneSuite { zone: zone.suite(), wanted: header.suite() });
        }
        if zone_keys.keychain().epochs(tier).is_empty() {
            return Err(KeyError::NoOuterKey);
        }
        let theirs = zone_keys.keychain();
        self.edit_keychain(header, |keychain, _| keychain.adopt(tier, theirs))
    }

    /// Removes an epoch from the keychain. The caller has proven that nothing needs it ([`Unlocked::ring_without`]).
    ///
    /// # Errors
    /// [`KeyError::NoEpoch`], [`KeyError::NewestEpoch`], [`KeyError::HeaderAltered`], [`KeyError::OtherHeader`]. Both
    /// are then unchanged.
    pub fn retire<H: Header + Clone>(&mut self, header: &mut H, tier: Tier, number: u32) -> Result<(), KeyError> {
        self.edit_keychain(header, |keychain, _| keychain.remove(tier, number))
    }

    /// The key ring without an epoch: what this ring opens does not need that epoch.
    ///
    /// # Errors
    /// [`KeyError::NoEpoch`], [`KeyError::NewestEpoch`].
    pub fn ring_without<H: Header>(&self, header: &H, tier: Tier, number: u32) -> Result<KeyRing, KeyError> {
        let mut keychain = self.keychain().duplicate();
        keychain.remove(tier, number)?;
        if keychain.outer().is_empty() {
            return Err(KeyError::NoOuterKey);
        }
        let (inner, outer) = (keychain.inner_newest_first(), keychain.outer_newest_first());
        Ok(KeyRing::of_epochs(header.suite(), &inner, &outer))
    }
}
