//! The keys of an opened header, and changes of its slots and keychain (§4). [`crate::attempt`] tries the slots.
//!
//! Guarantees: only the slots are used before the MAC is verified. A header is changed only after its MAC was verified
//! again, all or nothing, and gets a new MAC. Keys that are kept refuse a header older than the last one they have
//! seen: writing from it would lose later changes.

use crate::keychain::check_oblivious;
use crate::providers::server::ObliviousKey;
use crate::slot::refuse_parent;
use crate::source::Token;
use crate::{KeyError, Keychain, Material, NewSlot, Terms, Tier, admin};
use lamassu_crypto::{KeyRing, Secret, SecretBytes, sign, wrap};
use lamassu_format::Suite;
use lamassu_format::header::{
    Argon2Params, Header, HistoryMark, PublicKey, Role, SLOTS_MAX, Slot, TokenMechanism, TokenSealed, ZoneFile,
    check_label,
};

/// Binds a wrapping key to its use.
pub(crate) const INFO: &[u8] = b"lamassu v1 slot";

/// The keys of an unlocked header.
pub struct Unlocked {
    id: [u8; 16],
    file_key: Secret<32>,
    /// the key that signs the header: from an administrator's slot, if the header has an administrator
    seed: Option<Secret<32>>,
    /// public key of the administrator in the header when it was opened: later headers may name no other
    admin: Option<PublicKey>,
    keychain: Keychain,
    slot: u32,
    /// state of the last header that these keys have seen
    seen: Seen,
}

/// The state of a header. Neither number decreases, except when a history starts again.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    next_slot: u32,
    history: Option<HistoryMark>,
}

impl Seen {
    fn of<H: Header>(header: &H) -> Seen {
        let keys = header.keys();
        Seen { next_slot: keys.next_slot, history: keys.history }
    }

    fn entries(&self) -> u64 {
        self.history.map_or(0, |mark| mark.count)
    }
}

impl std::fmt::Debug for Unlocked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unlocked").field("id", &self.id).field("slot", &self.slot).finish_non_exhaustive()
    }
}

/// A removed slot. Users must be told: it is the only sign that removal is not revocation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "the user has to be told that old copies of the header still open"]
pub struct Removed {
    /// id of the slot
    pub id: u32,
    /// its label
    pub label: String,
}

impl std::fmt::Display for Removed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "slot {} ({:?}) is removed from this header. ", self.id, self.label)?;
        f.write_str("An older copy of the header (a backup, a snapshot) still opens with its key, and with it all data whose keys it holds")
    }
}

impl Unlocked {
    /// A new file key for a new header.
    pub(crate) fn fresh(id: [u8; 16], keychain: Keychain, slot: u32, signed: bool) -> Result<Self, KeyError> {
        let seed = if signed { Some(sign::seed()?) } else { None };
        let admin = seed.as_ref().map(|seed| PublicKey(sign::public(seed)));
        Ok(Unlocked { id, file_key: Secret::random()?, seed, admin, keychain, slot, seen: Seen::default() })
    }

    /// Whether the slot that opened may change a header that has an administrator.
    pub fn is_administrator(&self) -> bool {
        self.seed.is_some()
    }

    /// The keychain.
    pub fn keychain(&self) -> &Keychain {
        &self.keychain
    }

    /// Id of the slot that opened.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The key ring for `lamassu-crypto`, with every epoch. `suite` is the header's.
    ///
    /// # Errors
    /// [`KeyError::NoOuterKey`] for a zone that shares K_in alone.
    pub fn key_ring(&self, suite: Suite) -> Result<KeyRing, KeyError> {
        if self.keychain.outer().is_empty() {
            return Err(KeyError::NoOuterKey);
        }
        let (inner, outer) = (self.keychain.inner_newest_first(), self.keychain.outer_newest_first());
        Ok(KeyRing::of_epochs(suite, &inner, &outer))
    }

    /// Adds the epochs of these keys to a ring in use. Those of a zone that shares only K_in change nothing.
    pub fn update_ring(&self, ring: &KeyRing) {
        if !self.keychain.outer().is_empty() {
            ring.add(&self.keychain.inner_newest_first(), &self.keychain.outer_newest_first());
        }
    }

    /// These keys have seen `header`, which they opened, changed or made: older ones are refused from now on.
    pub fn saw<H: Header>(&mut self, header: &H) {
        self.seen = Seen::of(header);
    }

    /// Checks that a header with this keychain is not older than the last one seen. If slots were added since, the
    /// history may have started again.
    fn is_not_before<H: Header>(&self, header: &H, keychain: &Keychain) -> Result<(), KeyError> {
        let now = Seen::of(header);
        let lacks = if !keychain.has_all_of(&self.keychain) {
            "epochs of its keys"
        } else if now.next_slot < self.seen.next_slot {
            "slots that were made since"
        } else if now.next_slot == self.seen.next_slot && now.entries() < self.seen.entries() {
            "changes that its history tells of"
        } else {
            return Ok(());
        };
        Err(KeyError::OlderHeader { lacks })
    }

    /// The same keys for the present header: another process may have changed it since it was opened.
    ///
    /// # Errors
    /// [`KeyError::OlderHeader`]; [`KeyError::OtherHeader`], [`KeyError::HeaderAltered`],
    /// [`KeyError::KeychainInvalid`]; [`KeyError::SignatureInvalid`], [`KeyError::OtherAdministrator`].
    pub fn reopen<H: Header>(&self, header: &H) -> Result<Unlocked, KeyError> {
        self.owns(header)?;
        let keychain = Keychain::open(&self.file_key, &self.id, &header.keys().keychain, H::OUTER_REQUIRED)?;
        self.is_not_before(header, &keychain)?;
        let (file_key, seed) = (self.file_key.duplicate(), self.seed_for(header).map(Secret::duplicate));
        let (id, admin, slot, seen) = (self.id, self.admin, self.slot, Seen::of(header));
        Ok(Unlocked { id, file_key, seed, admin, keychain, slot, seen })
    }

    /// Adds a slot; returns its id.
    ///
    /// # Errors
    /// [`KeyError::NotAdministrator`], [`KeyError::HeaderAltered`], [`KeyError::OtherHeader`], [`KeyError::SlotsFull`],
    /// [`KeyError::SlotIdsUsedUp`], [`KeyError::Header`] for a bad label, [`KeyError::Argon2`], [`KeyError::NoRandom`].
    /// `header` is then unchanged.
    pub fn add_slot<H: Header + Clone>(&self, header: &mut H, new: &NewSlot<'_>) -> Result<u32, KeyError> {
        self.add_slot_on(header, new, Terms::default())
    }

    /// The same, on terms.
    ///
    /// # Errors
    /// As [`Unlocked::add_slot`]; [`KeyError::NoAdministrator`] for a use-only slot in a header without an
    /// administrator.
    pub fn add_slot_on<H: Header + Clone>(
        &self,
        header: &mut H,
        new: &NewSlot<'_>,
        terms: Terms,
    ) -> Result<u32, KeyError> {
        self.edit(header, |next| self.push_slot(next, new, terms))
    }

    /// Removes a slot. Old copies of the header still open with it: see [`Removed`].
    ///
    /// # Errors
    /// [`KeyError::NoSlot`], [`KeyError::ParentSlot`], [`KeyError::LastSlot`], [`KeyError::LastAdministrator`],
    /// [`KeyError::NotAdministrator`], [`KeyError::HeaderAltered`], [`KeyError::OtherHeader`]. `header` is then
    /// unchanged.
    pub fn remove_slot<H: Header + Clone>(&self, header: &mut H, id: u32) -> Result<Removed, KeyError> {
        refuse_parent(header, id)?;
        self.take_slot(header, id)
    }

    /// The same for any slot, including the parent's.
    pub(crate) fn take_slot<H: Header + Clone>(&self, header: &mut H, id: u32) -> Result<Removed, KeyError> {
        self.edit(header, |next| {
            let slots = &mut next.keys_mut().slots;
            let at = slots.iter().position(|s| s.id == id).ok_or(KeyError::NoSlot { id })?;
            if slots.len() == 1 {
                return Err(KeyError::LastSlot { id });
            }
            let slot = slots.remove(at);
            admin::is_left(next, id)?;
            Ok(Removed { id, label: slot.label })
        })
    }

    /// Replaces a slot by a new one, with a new id and salt, in one step; returns the new id.
    ///
    /// # Errors
    /// As [`Unlocked::add_slot`] and [`Unlocked::remove_slot`], but the last slot can be changed, and so can one of a
    /// full header.
    pub fn change_slot<H: Header + Clone>(
        &self,
        header: &mut H,
        id: u32,
        new: &NewSlot<'_>,
    ) -> Result<(u32, Removed), KeyError> {
        let kept = header.keys().slot(id).map(|s| Terms { role: s.role, expires: None });
        self.change_slot_on(header, id, new, kept.unwrap_or_default())
    }

    /// The same, with terms; [`Unlocked::change_slot`] keeps the role and sets no expiry.
    ///
    /// # Errors
    /// As [`Unlocked::change_slot`]; [`KeyError::LastAdministrator`].
    pub fn change_slot_on<H: Header + Clone>(
        &self,
        header: &mut H,
        id: u32,
        new: &NewSlot<'_>,
        terms: Terms,
    ) -> Result<(u32, Removed), KeyError> {
        refuse_parent(header, id)?;
        self.edit(header, |next| {
            let slots = &mut next.keys_mut().slots;
            let at = slots.iter().position(|s| s.id == id).ok_or(KeyError::NoSlot { id })?;
            let old = slots.remove(at);
            let new_id = self.push_slot(next, new, terms)?;
            admin::is_left(next, id)?;
            Ok((new_id, Removed { id, label: old.label }))
        })
    }

    /// Adds a slot to a header; `make` gets its id and returns it.
    pub(crate) fn push_made<H: Header>(
        header: &mut H,
        make: impl FnOnce(u32) -> Result<Slot, KeyError>,
    ) -> Result<u32, KeyError> {
        let keys = header.keys_mut();
        if keys.slots.len() >= SLOTS_MAX {
            return Err(KeyError::SlotsFull { max: SLOTS_MAX });
        }
        let id = keys.next_slot;
        let next_slot = id.checked_add(1).ok_or(KeyError::SlotIdsUsedUp)?;
        keys.slots.push(make(id)?);
        keys.next_slot = next_slot;
        Ok(id)
    }

    /// Gives the header a new file key and a single slot, for `new`. Returns its id. A holder of the old file key, such
    /// as anyone with an old slot and a copy of the header, cannot open later headers. Other slots cannot be kept,
    /// since their secrets are unknown. Nor can the history, which is sealed under the file key: it is set aside, and
    /// the next entry starts a new one. What it has on record of copies has to be read before
    /// ([`crate::History::copies`]), and to be given to [`crate::Update::record_renewed`].
    ///
    /// # Errors
    /// As [`Unlocked::add_slot`]. Both are then unchanged.
    pub fn renew<H: Header + Clone>(&mut self, header: &mut H, new: &NewSlot<'_>) -> Result<u32, KeyError> {
        self.may_change(header)?;
        let mut fresh = self.reopen(header)?;
        fresh.file_key = Secret::random()?;
        let mut next = header.clone();
        next.keys_mut().slots.clear();
        fresh.slot = fresh.push_slot(&mut next, new, Terms::default())?;
        next.keys_mut().keychain = fresh.seal_keychain()?;
        next.keys_mut().history = None;
        fresh.sign(&mut next);
        next.to_json()?;
        fresh.saw(&next);
        *header = next;
        *self = fresh;
        Ok(self.slot)
    }

    /// Starts an epoch of K_in or K_out: new writes use it, old data stays readable. An epoch of K_in is oblivious if
    /// the previous one is. Returns its number.
    ///
    /// # Errors
    /// [`KeyError::HeaderAltered`], [`KeyError::OtherHeader`], [`KeyError::NoRandom`], [`KeyError::EpochsUsedUp`]. Both
    /// are then unchanged.
    pub fn rotate<H: Header + Clone>(&mut self, header: &mut H, tier: Tier, created: u64) -> Result<u32, KeyError> {
        let alike = self.keychain.oblivious().cloned();
        self.edit_keychain(header, |keychain, _| keychain.append_epoch(tier, created, alike))
    }

    /// Starts an epoch of a zone's K_in whose keys depend on this key at a server; `None`: on none. Returns its number.
    ///
    /// # Errors
    /// As [`Unlocked::rotate`]; [`KeyError::SuiteNotOblivious`].
    pub fn rotate_zone(
        &mut self,
        zone: &mut ZoneFile,
        oblivious: Option<ObliviousKey>,
        created: u64,
    ) -> Result<u32, KeyError> {
        if oblivious.is_some() {
            check_oblivious(zone.suite())?;
        }
        self.edit_keychain(zone, |keychain, _| keychain.append_epoch(Tier::Inner, created, oblivious))
    }

    /// Changes the keychain, and the parts of the header that depend on it: all or nothing.
    pub(crate) fn edit_keychain<H: Header + Clone, T>(
        &mut self,
        header: &mut H,
        change: impl FnOnce(&mut Keychain, &mut H) -> Result<T, KeyError>,
    ) -> Result<T, KeyError> {
        let mut keychain = self.keychain.duplicate();
        let done = self.edit(header, |next| {
            let done = change(&mut keychain, next)?;
            next.keys_mut().keychain = keychain.seal(&self.file_key, &self.id)?;
            Ok(done)
        })?;
        self.keychain = keychain;
        Ok(done)
    }

    /// Id of the header.
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// The lower bound of the history's length, by a verified header and by what these keys have seen.
    pub(crate) fn mark<H: Header>(&self, header: &H) -> Option<HistoryMark> {
        let said = header.keys().history;
        if Seen::of(header).entries() < self.seen.entries() { self.seen.history } else { said }
    }

    /// The key that seals the history.
    pub(crate) fn history_key(&self) -> Secret<32> {
        wrap::hkdf(self.file_key.expose(), b"", b"lamassu v1 history")
    }

    /// The key that verifies exports of the vault's anchor.
    pub fn anchor_export_key(&self) -> Secret<32> {
        wrap::hkdf(self.file_key.expose(), b"", b"lamassu v1 anchor export")
    }

    /// Whether these keys may change `header`.
    ///
    /// # Errors
    /// [`KeyError::NotAdministrator`], [`KeyError::HeaderAltered`], [`KeyError::OtherHeader`].
    pub fn may_change<H: Header>(&self, header: &H) -> Result<(), KeyError> {
        self.owns(header)?;
        match (&header.keys().admin, self.seed_for(header)) {
            (Some(_), None) => Err(KeyError::NotAdministrator { slot: self.slot }),
            (Some(_), Some(_)) | (None, _) => Ok(()),
        }
    }

    /// Stores the end of the history in the header.
    pub(crate) fn set_mark<H: Header + Clone>(&self, header: &mut H, mark: HistoryMark) -> Result<(), KeyError> {
        self.edit(header, |next| {
            next.keys_mut().history = Some(mark);
            Ok(())
        })
    }

    /// Changes a copy of an authentic header and gives it a new MAC; `header` is replaced by it only on success.
    pub(crate) fn edit<H: Header + Clone, T>(
        &self,
        header: &mut H,
        change: impl FnOnce(&mut H) -> Result<T, KeyError>,
    ) -> Result<T, KeyError> {
        self.may_change(header)?;
        let mut next = header.clone();
        let done = change(&mut next)?;
        self.sign(&mut next);
        next.to_json()?;
        *header = next;
        Ok(done)
    }

    /// Checks that `header` is the one these keys opened, authentic, and with the same administrator: the holder of a
    /// use-only slot can make a header without one, or with another.
    pub(crate) fn owns<H: Header>(&self, header: &H) -> Result<(), KeyError> {
        if header.keys().id != self.id {
            return Err(KeyError::OtherHeader);
        }
        verify(header, &self.file_key)?;
        if let Some(admin) = &self.admin {
            // A successor of the administrator counts too; then the seed at hand is the old one.
            admin::check_pinned(header, std::slice::from_ref(admin))?;
        }
        admin::verify(header, self.seed_for(header))
    }

    /// The seed, unless the administrator of `header` has a new key, signed by the one these keys know.
    fn seed_for<H: Header>(&self, header: &H) -> Option<&Secret<32>> {
        let is_exchanged = header.keys().admin.as_ref().is_some_and(|admin| Some(admin.public) != self.admin);
        self.seed.as_ref().filter(|_| self.admin.is_none() || !is_exchanged)
    }

    pub(crate) fn seed(&self) -> Option<&Secret<32>> {
        self.seed.as_ref()
    }

    /// The same keys with another administrator's seed.
    pub(crate) fn with_seed(&self, seed: Secret<32>) -> Unlocked {
        Unlocked {
            id: self.id,
            file_key: self.file_key.duplicate(),
            admin: Some(PublicKey(sign::public(&seed))),
            seed: Some(seed),
            keychain: self.keychain.duplicate(),
            slot: self.slot,
            seen: self.seen,
        }
    }

    /// Makes the administrator's signature, if there is one, then the MAC, which covers it.
    pub(crate) fn sign<H: Header>(&self, header: &mut H) {
        if let Some(seed) = &self.seed {
            admin::sign(header, seed);
        }
        let mac = mac(header, &self.file_key);
        header.keys_mut().mac = mac;
    }

    pub(crate) fn seal_keychain(&self) -> Result<lamassu_format::header::SealedKeychain, KeyError> {
        self.keychain.seal(&self.file_key, &self.id)
    }

    fn push_slot<H: Header>(&self, header: &mut H, new: &NewSlot<'_>, terms: Terms) -> Result<u32, KeyError> {
        if terms.role == Role::Use && header.keys().admin.is_none() {
            return Err(KeyError::NoAdministrator);
        }
        // Checked before Argon2 runs: readers would refuse the resulting header.
        if matches!(new.material, Material::Passphrase(_))
            && header.keys().argon2_work() + new.cost.work() > Argon2Params::WORK_MAX
        {
            return Err(KeyError::SlotsTooDear { asked: new.cost.work(), taken: header.keys().argon2_work() });
        }
        Self::push_made(header, |id| self.make_slot(id, new, terms))
    }

    /// A slot that holds the file key and, if it is an administrator's, the signing seed.
    pub(crate) fn make_slot(&self, id: u32, new: &NewSlot<'_>, terms: Terms) -> Result<Slot, KeyError> {
        check_label(new.label)?;
        let mut salt = [0u8; 32];
        lamassu_crypto::random(&mut salt)?;
        let kind = new.material.kind();
        let (mut argon2, mut token) = (None, None);
        let key = match new.material {
            Material::Passphrase(passphrase) => {
                argon2 = Some(new.cost);
                stretched(passphrase, &salt, new.cost)?
            }
            Material::Key { key, .. } => wrap::hkdf(key.expose(), &salt, INFO),
            Material::Token(inside) => {
                let secret = Secret::random()?;
                token = Some(self.proven(inside.as_ref(), id, inside.seal(&secret)?)?);
                wrap::hkdf(secret.expose(), &salt, INFO)
            }
        };
        let (nonce, wrapped) = self.wrap(&key, id, terms.role)?;
        let (label, created) = (new.label.into(), new.created);
        let Terms { role, expires } = terms;
        Ok(Slot { id, kind, label, created, salt, argon2, token, parent: None, role, expires, nonce, wrapped })
    }

    /// What a token sealed for slot `id`, with its signature if it was sealed to a public key.
    fn proven(&self, token: &dyn Token, id: u32, sealed: TokenSealed) -> Result<TokenSealed, KeyError> {
        if !is_sealed_to_public_key(&sealed) {
            return Ok(sealed);
        }
        let signature = token.sign(&token_message(&self.id, id, &self.file_key))?;
        // Such a slot counts only in a header that a pinned administrator has signed.
        match signature.is_none() && self.seed.is_none() {
            true => Err(KeyError::TokenCannotSign),
            false => Ok(TokenSealed { signature, ..sealed }),
        }
    }

    /// What slot `id` holds, sealed under its wrapping key.
    pub(crate) fn wrap(&self, key: &Secret<32>, id: u32, role: Role) -> Result<([u8; 24], Vec<u8>), KeyError> {
        let seed = self.seed.as_ref().filter(|_| role == Role::Administrator);
        let content = SecretBytes::filled_by(if seed.is_some() { 64 } else { 32 }, |content| {
            content[..32].copy_from_slice(self.file_key.expose());
            if let Some(seed) = seed {
                content[32..].copy_from_slice(seed.expose());
            }
        });
        Ok(wrap::seal(key, &slot_aad(&self.id, id), content.expose())?)
    }
}

/// The content of a slot.
pub(crate) struct Opened {
    file_key: Secret<32>,
    seed: Option<Secret<32>>,
}

impl Opened {
    /// Whether the key that opened a slot shows that the slot was made by someone who had that key. Anyone can seal to
    /// a token's public key: then its signature shows that, over the file key, the header's id and the slot's.
    pub(crate) fn is_proven(&self, id: &[u8; 16], slot: &Slot, material: &Material) -> Result<bool, KeyError> {
        match (material, &slot.token) {
            (Material::Token(token), Some(sealed)) if is_sealed_to_public_key(sealed) => match &sealed.signature {
                Some(signature) => Ok(token.has_signed(&token_message(id, slot.id, &self.file_key), signature)?),
                None => Ok(false),
            },
            (Material::Token(_) | Material::Key { .. } | Material::Passphrase(_), _) => Ok(true),
        }
    }

    /// The keys of a header, after verifying everything that can be verified.
    pub(crate) fn verified<H: Header>(self, header: &H, slot: u32) -> Result<Unlocked, KeyError> {
        let Opened { file_key, seed } = self;
        let keys = header.keys();
        verify(header, &file_key)?;
        admin::verify(header, seed.as_ref())?;
        let keychain = Keychain::open(&file_key, &keys.id, &keys.keychain, H::OUTER_REQUIRED)?;
        let admin = keys.admin.as_ref().map(|a| a.public);
        Ok(Unlocked { id: keys.id, file_key, seed, admin, keychain, slot, seen: Seen::of(header) })
    }
}

fn is_sealed_to_public_key(sealed: &TokenSealed) -> bool {
    match sealed.mechanism {
        TokenMechanism::RsaOaepSha256 | TokenMechanism::RsaOaepSha1 => true,
        TokenMechanism::AesGcm => false,
    }
}

/// What a token's RSA key signs about its slot.
fn token_message(id: &[u8; 16], slot: u32, file_key: &Secret<32>) -> Vec<u8> {
    let digest = wrap::hkdf::<32>(file_key.expose(), b"", b"lamassu v1 token slot");
    [&b"lamassu v1 token slot"[..], id, &slot.to_le_bytes(), digest.expose()].concat()
}

/// The slot's content; `None`: this is not its wrapping key.
pub(crate) fn unwrap(id: &[u8; 16], slot: &Slot, key: &Secret<32>) -> Option<Opened> {
    let opened = wrap::open(key, &slot.nonce, &slot_aad(id, slot.id), &slot.wrapped).ok()?;
    let (file_key, seed) = opened.expose().split_at_checked(32)?;
    Some(Opened { file_key: Secret::from_slice(file_key)?, seed: Secret::from_slice(seed) })
}

/// The wrapping key from a passphrase.
pub(crate) fn stretched(passphrase: &SecretBytes, salt: &[u8; 32], cost: Argon2Params) -> Result<Secret<32>, KeyError> {
    let memory_kib = cost.memory_kib();
    let secret = wrap::argon2id(passphrase.expose(), salt, cost).ok_or(KeyError::Argon2 { memory_kib })?;
    Ok(wrap::hkdf(secret.expose(), salt, INFO))
}

fn slot_aad(id: &[u8; 16], slot: u32) -> Vec<u8> {
    [&b"lamassu v1 slot"[..], id, &slot.to_le_bytes()].concat()
}

fn mac<H: Header>(header: &H, file_key: &Secret<32>) -> [u8; 32] {
    wrap::hmac(&wrap::hkdf(file_key.expose(), b"", b"lamassu v1 header"), &header.mac_input())
}

fn verify<H: Header>(header: &H, file_key: &Secret<32>) -> Result<(), KeyError> {
    if wrap::equal(&mac(header, file_key), &header.keys().mac) { Ok(()) } else { Err(KeyError::HeaderAltered) }
}
