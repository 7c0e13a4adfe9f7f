//! Trying the slots of a header with key material (§4).
//!
//! A slot names its own Argon2id cost, and nothing vouches for that before the slot has opened. So an attempt has
//! limits: on the work of all its derivations, over all headers that belong to it (a dataset's, and those of the vaults
//! above that may open it), and on the memory of each one, as a part of the free memory. It also has an order: the slot
//! that opened last comes first, so that usually the other slots cost nothing.

use crate::unlock::{INFO, Opened, stretched, unwrap};
use crate::{KeyError, Material, Unlocked, admin};
use lamassu_crypto::{Secret, wrap};
use lamassu_format::header::{Argon2Params, Header, KeyArea, PublicKey, Role, SLOTS_MAX, Slot, SlotKind};

/// Which slots of a header are tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Slots {
    /// All slots that such a key can open: administrators' before use-only ones.
    #[default]
    All,
    /// The same, starting with the one that is known to have opened last.
    First(u32),
    /// This one.
    Only(u32),
}

/// One attempt to open headers with one key, and its remaining budget. A header is untrusted until it has opened.
#[derive(Debug)]
pub struct Attempt<'a> {
    material: &'a Material,
    /// memory limit of one derivation
    memory_kib: u32,
    /// remaining work, in KiB times passes
    work_left: u64,
    /// remaining operations of a token, each of which may take it a second
    token_left: usize,
}

/// Opens `header` with key material: the first slot of that kind that opens, administrators' before use-only ones; then
/// the MAC is verified, then the keychain opened.
///
/// A passphrase is tried on each passphrase slot at the cost that slot names, within the bounds of an [`Attempt`]; a
/// key on raw, hex and recovery slots alike; a token on the slots it sealed.
///
/// # Errors
/// Those of [`Attempt::open`].
pub fn unlock<H: Header>(header: &H, material: &Material) -> Result<Unlocked, KeyError> {
    Attempt::new(material).open(header, Slots::All)
}

impl<'a> Attempt<'a> {
    /// With the limits of §4: as much work, of Argon2id and of a token, as the slots of one header may ask for, and
    /// half of the free memory for each derivation.
    pub fn new(material: &'a Material) -> Self {
        let (memory_kib, work_left) = (wrap::memory_to_spare_kib(), Argon2Params::WORK_MAX);
        Attempt { material, memory_kib, work_left, token_left: SLOTS_MAX }
    }

    /// The same; with `any_memory` a derivation may use as much memory as the format allows, whatever is free.
    pub fn with_any_memory(self, any_memory: bool) -> Self {
        Attempt { memory_kib: if any_memory { Argon2Params::MEMORY_KIB_MAX } else { self.memory_kib }, ..self }
    }

    /// The key.
    pub fn material(&self) -> &'a Material {
        self.material
    }

    /// Opens a header.
    ///
    /// # Errors
    /// [`KeyError::WrongKey`], [`KeyError::NoSlotOfKind`], [`KeyError::NoSlot`]; [`KeyError::Argon2Memory`],
    /// [`KeyError::Argon2Work`], [`KeyError::TokenWork`] if no slot opens and one was not tried;
    /// [`KeyError::HeaderAltered`] if a slot opens and the MAC does not verify; [`KeyError::SignatureInvalid`] if the
    /// administrator's signature does not; [`KeyError::KeychainInvalid`]; [`KeyError::Argon2`];
    /// [`KeyError::Destroyed`].
    pub fn open<H: Header>(&mut self, header: &H, slots: Slots) -> Result<Unlocked, KeyError> {
        self.open_signed(header, slots, &[])
    }

    /// The same. A slot that the key does not prove (a token's RSA key that may not sign) counts if one of the
    /// administrators in `pinned` has signed the header; without one it counts nowhere.
    ///
    /// # Errors
    /// As [`Attempt::open`]; [`KeyError::TokenUnproven`], [`KeyError::OtherAdministrator`].
    pub fn open_signed<H: Header>(
        &mut self,
        header: &H,
        slots: Slots,
        pinned: &[PublicKey],
    ) -> Result<Unlocked, KeyError> {
        if let Some(destroyed) = header.destroyed() {
            // Anyone who can write to the store can claim this; the administrator's signature shows whether it is true.
            admin::verify_signature(header)?;
            return Err(KeyError::Destroyed(destroyed));
        }
        let keys = header.keys();
        let (mut tried, mut failed) = (0, None);
        for slot in self.in_order(keys, slots)? {
            tried += 1;
            let opened = match self.open_slot(&keys.id, slot) {
                Ok(Some(opened)) => opened,
                Ok(None) => continue,
                // A token that fails on one slot, for example another token's, may open the next. So may a passphrase
                // whose cost is too high in one slot.
                Err(error) => {
                    failed.get_or_insert(error);
                    continue;
                }
            };
            match opened.is_proven(&keys.id, slot, self.material) {
                Ok(true) => return opened.verified(header, slot.id),
                Ok(false) if pinned.is_empty() => {
                    failed.get_or_insert(KeyError::TokenUnproven { slot: slot.id });
                }
                Ok(false) => {
                    let unlocked = opened.verified(header, slot.id)?;
                    admin::check_pinned(header, pinned)?;
                    return Ok(unlocked);
                }
                Err(error) => {
                    failed.get_or_insert(error);
                }
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let kind = self.material.kind();
        if tried > 0 {
            return Err(KeyError::WrongKey { kind, tried });
        }
        let have = SlotKind::ALL.into_iter().filter(|k| keys.slots.iter().any(|s| s.kind == *k)).collect();
        Err(KeyError::NoSlotOfKind { kind, have })
    }

    /// The slots that this key may open, in the order of trying.
    fn in_order<'k>(&self, keys: &'k KeyArea, which: Slots) -> Result<Vec<&'k Slot>, KeyError> {
        if let Slots::Only(id) = which {
            let slot = keys.slot(id).ok_or(KeyError::NoSlot { id })?;
            return match opens(slot.kind, self.material) {
                true => Ok(vec![slot]),
                false => Err(KeyError::NoSlotOfKind { kind: self.material.kind(), have: vec![slot.kind] }),
            };
        }
        let mut slots: Vec<&Slot> = keys.slots.iter().filter(|s| opens(s.kind, self.material)).collect();
        // One key may open several slots: a use-only one must not hide the rights of an administrator's. A changed role
        // is detected by the MAC.
        slots.sort_by_key(|s| s.role == Role::Use);
        if let Slots::First(id) = which
            && let Some(at) = slots.iter().position(|s| s.id == id)
            // Ids ascend: an administrator's slot that is newer than this one was never tried when this one opened.
            && (slots[at].role != Role::Use || slots.iter().all(|s| s.role == Role::Use || s.id < id))
        {
            slots[..=at].rotate_right(1);
        }
        Ok(slots)
    }

    /// The slot's content, or `None` if this material does not open it.
    fn open_slot(&mut self, id: &[u8; 16], slot: &Slot) -> Result<Option<Opened>, KeyError> {
        let Some(key) = self.wrapping_key(slot)? else { return Ok(None) };
        Ok(unwrap(id, slot, &key))
    }

    /// Steps 1 and 2 of opening a slot; `None` if the material is of another kind, or of another token.
    fn wrapping_key(&mut self, slot: &Slot) -> Result<Option<Secret<32>>, KeyError> {
        match (self.material, slot.argon2, &slot.token) {
            (Material::Key { key, .. }, None, None) => Ok(Some(wrap::hkdf(key.expose(), &slot.salt, INFO))),
            (Material::Passphrase(passphrase), Some(cost), None) => {
                self.pay(slot.id, cost)?;
                stretched(passphrase, &slot.salt, cost).map(Some)
            }
            (Material::Token(token), None, Some(sealed)) => {
                self.token_left = self.token_left.checked_sub(1).ok_or(KeyError::TokenWork { slot: slot.id })?;
                Ok(token.unseal(sealed)?.map(|secret| wrap::hkdf(secret.expose(), &slot.salt, INFO)))
            }
            (Material::Key { .. } | Material::Passphrase(_) | Material::Token(_), _, _) => Ok(None),
        }
    }

    /// Checks whether a derivation may run, before it uses any memory.
    fn pay(&mut self, slot: u32, cost: Argon2Params) -> Result<(), KeyError> {
        let (memory_kib, spare_kib) = (cost.memory_kib(), self.memory_kib);
        if memory_kib > spare_kib {
            return Err(KeyError::Argon2Memory { slot, memory_kib, spare_kib });
        }
        self.work_left = self.work_left.checked_sub(cost.work()).ok_or(KeyError::Argon2Work { slot })?;
        Ok(())
    }
}

/// Whether material can open slots of this kind: raw, hex, recovery and recovery-shares are different notations of the
/// same key.
fn opens(kind: SlotKind, material: &Material) -> bool {
    match material {
        Material::Passphrase(_) => kind == SlotKind::Passphrase,
        Material::Key { .. } => {
            matches!(kind, SlotKind::Raw | SlotKind::Hex | SlotKind::Recovery | SlotKind::RecoveryShares)
        }
        Material::Token(_) => kind == SlotKind::Pkcs11,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // helpers outside of #[test] functions; a panic is a failed test
mod tests {
    use super::*;
    use crate::{NewSlot, NewZone, Terms, create_zone};
    use lamassu_crypto::SecretBytes;
    use lamassu_format::Suite;
    use lamassu_format::header::{TokenMechanism, TokenSealed, ZoneFile};

    fn passphrase(text: &str) -> Material {
        Material::new(SlotKind::Passphrase, SecretBytes::new(text.into())).unwrap()
    }

    fn slot(material: &Material, memory_kib: u32) -> NewSlot<'_> {
        NewSlot { material, cost: Argon2Params::new(memory_kib, 1, 1).unwrap(), label: "", created: 1 }
    }

    /// A zone file with slots for `a`, `b` and `c`, 1 to 3, of 1, 2 and 4 MiB.
    fn zone() -> (ZoneFile, Unlocked) {
        let new = NewZone { suite: Suite::Aes, block_size: 4096, compression: None, outer: true, created: 1 };
        let (mut file, keys) = create_zone(&new, &slot(&passphrase("a"), 1 << 10)).unwrap();
        for (text, kib) in [("b", 2 << 10), ("c", 4 << 10)] {
            keys.add_slot_on(&mut file, &slot(&passphrase(text), kib), Terms::default()).unwrap();
        }
        (file, keys)
    }

    /// What an attempt took, in MiB.
    fn spent(text: &str, slots: Slots) -> (Option<u32>, u64) {
        let (file, _) = zone();
        let material = passphrase(text);
        let mut attempt = Attempt::new(&material);
        let opened = attempt.open(&file, slots).ok().map(|keys| keys.slot());
        (opened, (Argon2Params::WORK_MAX - attempt.work_left) >> 10)
    }

    #[test]
    fn what_opened_last_costs_what_it_costs_alone() {
        assert_eq!(spent("c", Slots::All), (Some(3), 7));
        assert_eq!(spent("c", Slots::First(3)), (Some(3), 4));
        assert_eq!(spent("b", Slots::First(3)), (Some(2), 7));
        assert_eq!(spent("a", Slots::First(9)), (Some(1), 1), "one that is gone");
        assert_eq!(spent("c", Slots::Only(3)), (Some(3), 4));
        assert_eq!(spent("c", Slots::Only(1)), (None, 1));
        assert_eq!(spent("x", Slots::First(2)), (None, 7));
    }

    #[test]
    fn an_attempt_ends_with_its_budget_over_all_headers_it_opens() {
        let (file, _) = zone();
        let material = passphrase("x");
        let mut attempt = Attempt { work_left: 10 << 10, ..Attempt::new(&material) };
        assert!(matches!(attempt.open(&file, Slots::All), Err(KeyError::WrongKey { tried: 3, .. })));
        assert!(matches!(attempt.open(&file, Slots::All), Err(KeyError::Argon2Work { slot: 3 })));
        assert!(attempt.work_left <= 2 << 10);
    }

    /// A token that opens nothing, and counts how often it was asked.
    #[derive(Debug)]
    struct Counting(std::sync::Arc<std::sync::atomic::AtomicUsize>);

    impl crate::source::Token for Counting {
        fn seal(&self, _: &Secret<32>) -> Result<TokenSealed, crate::SourceError> {
            Ok(TokenSealed { mechanism: TokenMechanism::AesGcm, sealed: vec![1; 60], signature: None })
        }

        fn unseal(&self, _: &TokenSealed) -> Result<Option<Secret<32>>, crate::SourceError> {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Ok(None)
        }
    }

    #[test]
    fn a_token_is_asked_as_often_as_one_header_may_have_it_asked() {
        let asked = std::sync::Arc::default();
        let material = Material::Token(Box::new(Counting(std::sync::Arc::clone(&asked))));
        let (mut file, _) = zone();
        let mut slot = file.keys().slots[0].clone();
        (slot.kind, slot.argon2) = (SlotKind::Pkcs11, None);
        slot.token = Some(TokenSealed { mechanism: TokenMechanism::AesGcm, sealed: vec![1; 60], signature: None });
        file.keys_mut().slots = (0..SLOTS_MAX as u32).map(|id| Slot { id, ..slot.clone() }).collect();
        let mut attempt = Attempt::new(&material);
        assert!(matches!(attempt.open(&file, Slots::All), Err(KeyError::WrongKey { tried: SLOTS_MAX, .. })));
        assert!(matches!(attempt.open(&file, Slots::All), Err(KeyError::TokenWork { slot: 0 })));
        assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), SLOTS_MAX);
    }

    /// The memory is not even asked for: with it this test would take 4 GiB.
    #[test]
    fn more_than_half_of_the_free_memory_is_refused_and_the_others_are_tried() {
        let (mut file, _) = zone();
        file.keys_mut().slots[0].argon2 = Argon2Params::new(Argon2Params::MEMORY_KIB_MAX, 1, 1);
        let on_a_small_host = |text: &str| {
            let material = passphrase(text);
            Attempt { memory_kib: 64 << 10, ..Attempt::new(&material) }.open(&file, Slots::All)
        };
        let refused = on_a_small_host("a");
        assert!(matches!(refused, Err(KeyError::Argon2Memory { slot: 1, spare_kib: 65536, .. })));
        // It opens, and the MAC shows that the cost was edited.
        let opened = on_a_small_host("b");
        assert!(matches!(opened, Err(KeyError::HeaderAltered)));
    }

    #[test]
    fn no_slot_is_made_that_readers_would_refuse() {
        let (mut file, keys) = zone();
        let material = passphrase("d");
        let dear = NewSlot { cost: Argon2Params::new(4 << 20, 64, 1).unwrap(), ..slot(&material, 64) };
        let refused = keys.add_slot(&mut file, &dear);
        assert!(matches!(refused, Err(KeyError::SlotsTooDear { .. })));
        assert_eq!(file.keys().slots.len(), 3);
    }
}
