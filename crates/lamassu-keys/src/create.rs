//! Makes vault headers and zone files, each with its first slot.

use crate::keychain::check_oblivious;
use crate::providers::server::ObliviousKey;
use crate::{KeyError, Keychain, NewSlot, Terms, Tier, Unlocked, ZoneKeys};
use lamassu_format::Suite;
use lamassu_format::header::{
    Admin, Header, KeyArea, NameMode, PublicKey, Slot, VaultHeader, VaultId, VaultParams, ZoneFile, ZoneId, ZoneParams,
};
use lamassu_format::{Compression, Domain, Geometry};

/// Id of a header's first slot.
pub(crate) const FIRST_SLOT: u32 = 1;

/// A vault to make.
#[derive(Clone, Copy, Debug)]
pub struct NewVault<'a> {
    /// suite; that of the zone
    pub suite: Suite,
    /// block size and transient slots
    pub geometry: Geometry,
    /// how names are kept
    pub names: NameMode,
    /// the longest name that the store accepts, in bytes: 64 to 255
    pub name_max: u8,
    /// whether clean one-page files are convergent; not in a salted domain
    pub convergent_small_files: bool,
    /// compression of its blocks
    pub compression: Option<Compression>,
    /// the bounds within which equal blocks deduplicate; only a vault with keys of its own may differ from the zone
    pub domain: Domain,
    /// the source of the keys
    pub zone: Zone<'a>,
    /// seconds since 1970
    pub created: u64,
}

/// The keys of a new vault.
#[derive(Clone, Copy, Debug)]
pub enum Zone<'a> {
    /// New keys: it deduplicates only with itself.
    Private,
    /// The keys of a zone.
    Member {
        /// its file
        file: &'a ZoneFile,
        /// its keys
        keys: &'a Unlocked,
        /// the kind of K_out
        outer: Outer,
    },
    /// The keys of a zone at a key server.
    Server {
        /// its keys
        keys: &'a ZoneKeys,
        /// the kind of K_out
        outer: Outer,
    },
}

/// The K_out of a vault in a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outer {
    /// Its own: it shares deduplication, and other vaults' keys cannot read it.
    Own,
    /// The zone's: every vault that shares it can read it.
    Shared,
}

/// A zone to make.
#[derive(Clone, Copy, Debug)]
pub struct NewZone {
    /// suite of every vault of the zone
    pub suite: Suite,
    /// default block size of its vaults, in bytes
    pub block_size: u32,
    /// default compression of its vaults
    pub compression: Option<Compression>,
    /// whether it has a K_out to share
    pub outer: bool,
    /// seconds since 1970
    pub created: u64,
}

/// Makes a vault header with one slot. Nothing is written.
///
/// # Errors
/// [`KeyError::ZoneSuite`], [`KeyError::NoOuterKey`], [`KeyError::HeaderAltered`] or [`KeyError::OtherHeader`] for the
/// zone, [`KeyError::DomainNotZone`], [`KeyError::Header`] for values out of bounds or that contradict each other,
/// [`KeyError::Argon2`], [`KeyError::NoRandom`].
pub fn create_vault(new: &NewVault<'_>, slot: &NewSlot<'_>) -> Result<(VaultHeader, Unlocked), KeyError> {
    if new.domain != Domain::Zone && !matches!(new.zone, Zone::Private) {
        return Err(KeyError::DomainNotZone { domain: new.domain });
    }
    let id = random_id()?;
    let (zone, keychain) = match new.zone {
        Zone::Private => (VaultId(id).private_zone(), Keychain::generate(true, new.created)?),
        Zone::Server { keys, outer } => (keys.id(), server_keychain(new, keys, outer)?),
        Zone::Member { file, keys, outer } => (file.id(), member_keychain(new, file, keys, outer)?),
    };
    let params = VaultParams {
        zone,
        suite: new.suite,
        geometry: new.geometry,
        names: new.names,
        name_max: new.name_max,
        convergent_small_files: new.convergent_small_files,
        domain: new.domain,
        created: new.created,
    };
    assemble(id, keychain, slot, |keys| {
        let mut header = VaultHeader::new(params, keys);
        header.set_compression(new.compression);
        header
    })
}

fn server_keychain(new: &NewVault<'_>, keys: &ZoneKeys, outer: Outer) -> Result<Keychain, KeyError> {
    let shared = Keychain::of(keys.inner(), Some(keys.outer()), new.created);
    match outer {
        Outer::Own => Ok(shared.with_outer_of(Keychain::generate(true, new.created)?)),
        Outer::Shared => Ok(shared),
    }
}

fn member_keychain(new: &NewVault<'_>, file: &ZoneFile, keys: &Unlocked, outer: Outer) -> Result<Keychain, KeyError> {
    keys.owns(file)?;
    if file.suite() != new.suite {
        return Err(KeyError::ZoneSuite { zone: file.suite(), wanted: new.suite });
    }
    let shared = keys.keychain().for_member();
    match outer {
        Outer::Own => Ok(shared.with_outer_of(Keychain::generate(true, new.created)?)),
        Outer::Shared if shared.outer().is_empty() => Err(KeyError::NoOuterKey),
        Outer::Shared => Ok(shared),
    }
}

/// A copy of a vault to make.
#[derive(Clone, Copy, Debug)]
pub struct NewClone {
    /// start new epochs of K_in and K_out, which the original never has
    pub new_keys: bool,
    /// it is never written
    pub snapshot: bool,
    /// seconds since 1970
    pub created: u64,
}

/// Makes the header of a copy of the vault of `header`, which `keys` opened: a new id and file key, one slot (those of
/// the original are bound to its id), the same epochs. With new keys it leaves its zone. Nothing is written.
///
/// # Errors
/// [`KeyError::HeaderAltered`] or [`KeyError::OtherHeader`] for the original, [`KeyError::EpochsUsedUp`],
/// [`KeyError::Argon2`], [`KeyError::NoRandom`].
pub fn clone_vault(
    header: &VaultHeader,
    keys: &Unlocked,
    new: NewClone,
    slot: &NewSlot<'_>,
) -> Result<(VaultHeader, Unlocked), KeyError> {
    keys.owns(header)?;
    let id = random_id()?;
    let mut keychain = keys.keychain().duplicate();
    let mut params = VaultParams { created: new.created, ..header.params().clone() };
    if new.new_keys {
        keychain.append(Tier::Inner, new.created)?;
        keychain.append(Tier::Outer, new.created)?;
        params.zone = VaultId(id).private_zone();
    }
    assemble(id, keychain, slot, |keys| {
        let clone = VaultHeader::new(params, keys).alike(header);
        if new.snapshot { clone.into_snapshot() } else { clone }
    })
}

/// Makes a zone file with one slot. Nothing is written.
///
/// # Errors
/// [`KeyError::Header`] for values out of bounds, [`KeyError::Argon2`], [`KeyError::NoRandom`].
pub fn create_zone(new: &NewZone, slot: &NewSlot<'_>) -> Result<(ZoneFile, Unlocked), KeyError> {
    zone_of(new, ZoneId(random_id()?), Keychain::generate(new.outer, new.created)?, slot)
}

/// Makes a zone whose block keys depend on this key at a server.
///
/// # Errors
/// As [`create_zone`]; [`KeyError::SuiteNotOblivious`].
pub fn create_oblivious_zone(
    new: &NewZone,
    key: ObliviousKey,
    slot: &NewSlot<'_>,
) -> Result<(ZoneFile, Unlocked), KeyError> {
    check_oblivious(new.suite)?;
    zone_of(new, ZoneId(random_id()?), Keychain::generate(new.outer, new.created)?.with_oblivious(key), slot)
}

/// Makes a zone file with the keys of a zone at a key server.
///
/// # Errors
/// As [`create_zone`].
pub fn copy_zone(new: &NewZone, keys: &ZoneKeys, slot: &NewSlot<'_>) -> Result<(ZoneFile, Unlocked), KeyError> {
    let outer = new.outer.then_some(keys.outer());
    zone_of(new, keys.id(), Keychain::of(keys.inner(), outer, new.created), slot)
}

fn zone_of(
    new: &NewZone,
    id: ZoneId,
    keychain: Keychain,
    slot: &NewSlot<'_>,
) -> Result<(ZoneFile, Unlocked), KeyError> {
    let NewZone { suite, block_size, compression, created, .. } = *new;
    let params = ZoneParams { suite, block_size, compression, created };
    assemble(id.0, keychain, slot, |keys| ZoneFile::new(params, keys))
}

fn assemble<H: Header>(
    id: [u8; 16],
    keychain: Keychain,
    slot: &NewSlot<'_>,
    build: impl FnOnce(KeyArea) -> H,
) -> Result<(H, Unlocked), KeyError> {
    assemble_with(id, keychain, |keys| keys.make_slot(FIRST_SLOT, slot, Terms::default()), build)
}

/// Makes a header whose first slot is the result of `make`.
pub(crate) fn assemble_with<H: Header>(
    id: [u8; 16],
    keychain: Keychain,
    make: impl FnOnce(&Unlocked) -> Result<Slot, KeyError>,
    build: impl FnOnce(KeyArea) -> H,
) -> Result<(H, Unlocked), KeyError> {
    let unlocked = Unlocked::fresh(id, keychain, FIRST_SLOT, H::IS_VAULT)?;
    let slots = vec![make(&unlocked)?];
    // Signing fills in the public key.
    let admin = H::IS_VAULT.then_some(Admin { public: PublicKey([0; 32]), signature: [0; 64], before: Vec::new() });
    let keychain = unlocked.seal_keychain()?;
    let mut header =
        build(KeyArea { id, next_slot: FIRST_SLOT + 1, slots, keychain, admin, history: None, mac: [0; 32] });
    unlocked.sign(&mut header);
    header.to_json()?;
    Ok((header, unlocked))
}

pub(crate) fn random_id() -> Result<[u8; 16], KeyError> {
    let mut id = [0u8; 16];
    lamassu_crypto::random(&mut id)?;
    Ok(id)
}
