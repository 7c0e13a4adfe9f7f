//! The vault header.

use super::sealed::Members;
use super::wire::{
    self, WireAdmin, WireCompression, WireDestroyed, WireHistory, WireKeychain, WireKeys, WireSlot, WireVault,
};
use super::{Destroyed, Header, HeaderError, KeyArea, NAME_MAX, VaultId, ZoneId, json};
use crate::{Compression, Domain, Geometry, Suite, words};

/// How names are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameMode {
    /// sealed
    Encrypted,
    /// as they are
    Plain,
}

words! {
    /// Both modes.
    NameMode { Encrypted = "encrypted", Plain = "plain" }
}

/// What a read verifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verified {
    /// every block, by its hash
    Full,
    /// the metadata alone
    Metadata,
}

words! {
    /// Both values.
    Verified { Full = "full", Metadata = "metadata" }
}

/// Whether a mount may leave plaintext in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// as the mount does
    Mount,
    /// never
    None,
}

words! {
    /// Both values.
    Caching { Mount = "mount", None = "none" }
}

/// The properties of a vault. They are chosen when it is made, and only `zone` can change
/// ([`VaultHeader::leave_zone`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VaultParams {
    /// the id of the zone whose K_in the vault uses; the vault's own id if the zone is private
    pub zone: ZoneId,
    /// suite
    pub suite: Suite,
    /// block size and transient slots
    pub geometry: Geometry,
    /// how names are kept
    pub names: NameMode,
    /// the longest name, in bytes, the store below takes: 64 to 255
    pub name_max: u8,
    /// whether clean one-page files are convergent; never in a salted domain
    pub convergent_small_files: bool,
    /// the scope in which equal blocks are equal
    pub domain: Domain,
    /// seconds since 1970
    pub created: u64,
}

/// A parsed vault header. Not authenticated until `lamassu-keys` has verified its MAC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VaultHeader {
    params: VaultParams,
    read_only: bool,
    datasets: bool,
    anchored: bool,
    integrity: Option<Verified>,
    cache: Option<Caching>,
    compression: Option<Compression>,
    destroyed: Option<Destroyed>,
    keys: KeyArea,
}

impl VaultHeader {
    /// A header of its parts. Bounds are checked when it is written.
    pub fn new(params: VaultParams, keys: KeyArea) -> Self {
        let (read_only, datasets, anchored) = (false, false, false);
        let (integrity, cache, compression, destroyed) = (None, None, None, None);
        VaultHeader { params, read_only, datasets, anchored, integrity, cache, compression, destroyed, keys }
    }

    /// The header of a snapshot of this vault.
    #[must_use]
    pub fn into_snapshot(self) -> Self {
        VaultHeader { read_only: true, ..self }
    }

    /// The header of this vault after its keys were destroyed: without slots. The caller replaces the keychain and the
    /// MAC.
    #[must_use]
    pub fn into_destroyed(mut self, destroyed: Destroyed) -> Self {
        self.keys.slots.clear();
        VaultHeader { destroyed: Some(destroyed), ..self }
    }

    /// Everything but slots, keychain and MAC.
    pub fn params(&self) -> &VaultParams {
        &self.params
    }

    /// Whether it is a snapshot: a tree that is never written.
    pub fn is_snapshot(&self) -> bool {
        self.read_only
    }

    /// Whether directories of the tree may be vaults of their own.
    pub fn has_datasets(&self) -> bool {
        self.datasets
    }

    /// Whether an anchor outside the store remembers its newest state, so that nothing is current without it.
    pub fn is_anchored(&self) -> bool {
        self.anchored
    }

    /// Marks the vault as anchored. This is never undone: undoing it would allow older states to be restored.
    pub fn set_anchored(&mut self) {
        self.anchored = true;
    }

    /// This header with the settings of another: whether datasets are allowed, whether it is anchored, integrity,
    /// caching and compression.
    #[must_use]
    pub fn alike(self, other: &VaultHeader) -> Self {
        let VaultHeader { datasets, anchored, integrity, cache, compression, .. } = *other;
        VaultHeader { datasets, anchored, integrity, cache, compression, ..self }
    }

    /// Allows datasets from now on. This is never taken back: datasets that are skipped would look like damage.
    pub fn allow_datasets(&mut self) {
        self.datasets = true;
    }

    /// What reads verify. `None`: as for the parent vault, or the mount.
    pub fn integrity(&self) -> Option<Verified> {
        self.integrity
    }

    /// Sets what reads verify. `lamassu-vault` refuses `metadata` in a malleable suite.
    pub fn set_integrity(&mut self, integrity: Option<Verified>) {
        self.integrity = integrity;
    }

    /// Whether plaintext may stay in the page cache. `None`: as for the parent vault, or the mount.
    pub fn cache(&self) -> Option<Caching> {
        self.cache
    }

    /// Sets whether plaintext may stay in the page cache.
    pub fn set_cache(&mut self, cache: Option<Caching>) {
        self.cache = cache;
    }

    /// How new blocks are compressed. `None`: they are not. Stored blocks may be compressed in another way.
    pub fn compression(&self) -> Option<Compression> {
        self.compression
    }

    /// Sets how new blocks are compressed. If that does not fit suite and block size, writing the header fails.
    pub fn set_compression(&mut self, compression: Option<Compression>) {
        self.compression = compression;
    }

    /// Suite.
    pub fn suite(&self) -> Suite {
        self.params.suite
    }

    /// Geometry.
    pub fn geometry(&self) -> Geometry {
        self.params.geometry
    }

    /// Name mode.
    pub fn names(&self) -> NameMode {
        self.params.names
    }

    /// Longest stored name, in bytes.
    pub fn name_max(&self) -> usize {
        self.params.name_max.into()
    }

    /// Whether clean one-page files are convergent.
    pub fn convergent_small_files(&self) -> bool {
        self.params.convergent_small_files
    }

    /// Deduplication domain.
    pub fn domain(&self) -> Domain {
        self.params.domain
    }

    /// Vault id.
    pub fn id(&self) -> VaultId {
        VaultId(self.keys.id)
    }

    /// Zone id.
    pub fn zone(&self) -> ZoneId {
        self.params.zone
    }

    /// Whether the zone is private to the vault.
    pub fn has_private_zone(&self) -> bool {
        self.params.zone == self.id().private_zone()
    }

    /// Makes the zone private to the vault: no other vault has its newest K_in any more.
    pub fn leave_zone(&mut self) {
        self.params.zone = self.id().private_zone();
    }

    /// When it was made, in seconds since 1970.
    pub fn created(&self) -> u64 {
        self.params.created
    }
}

impl Members for VaultHeader {
    type Wire = WireVault;

    fn wire(&self) -> WireVault {
        let p = &self.params;
        WireVault {
            format: Self::FORMAT.into(),
            version: crate::VERSION.into(),
            features: wire::features(&self.keys.keychain),
            id: wire::hex(&self.keys.id),
            zone: p.zone.to_string(),
            suite: p.suite.name().into(),
            block_size: p.geometry.block_size(),
            reserved_slots: p.geometry.reserved() as u64,
            names: p.names.name().into(),
            name_max: p.name_max.into(),
            small_files: if p.convergent_small_files { "convergent" } else { "random" }.into(),
            domain: (p.domain != Domain::Zone).then(|| p.domain.name().into()),
            created: p.created,
            read_only: self.read_only.then_some(true),
            datasets: self.datasets.then_some(true),
            anchored: self.anchored.then_some(true),
            integrity: self.integrity.map(|v| v.name().into()),
            cache: self.cache.map(|c| c.name().into()),
            compression: self.compression.map(WireCompression::of),
            destroyed: self.destroyed.as_ref().map(WireDestroyed::of),
            next_slot: self.keys.next_slot.into(),
            slots: WireSlot::all(&self.keys.slots),
            keychain: WireKeychain::of(&self.keys.keychain),
            admin: self.keys.admin.as_ref().map(WireAdmin::of),
            history: self.keys.history.as_ref().map(WireHistory::of),
            mac: wire::hex(&self.keys.mac),
        }
    }
}

impl Header for VaultHeader {
    const FORMAT: &'static str = "lamassu-vault";
    const OUTER_REQUIRED: bool = true;
    const IS_VAULT: bool = true;

    fn parse(bytes: &[u8]) -> Result<Self, HeaderError> {
        let w: WireVault = json::from_slice(Self::FORMAT, bytes)?;
        let (id, next_slot, slots, mac) = (&w.id, w.next_slot, &w.slots, &w.mac);
        let (admin, history) = (w.admin.as_ref().map(|a| &a.0), w.history.as_ref().map(|h| &h.0));
        let destroyed = w.destroyed.as_ref().map(|d| d.0.parse()).transpose()?;
        let (keychain, features, suite) = (&w.keychain.0, &w.features[..], wire::suite(&w.suite)?);
        let destroyed_keys = destroyed.is_some();
        let keys = WireKeys {
            id,
            next_slot,
            slots,
            destroyed: destroyed_keys,
            keychain,
            features,
            suite,
            admin,
            history,
            mac,
        };
        let member = |member, rule| HeaderError::Member { member, rule };
        let size =
            geometry(w.block_size, 1).ok_or(member("block_size", "a power of two from 4096 to 1048576"))?.block_size();
        let convergent = match w.small_files.as_str() {
            "convergent" => true,
            "random" => false,
            _ => return Err(member("small_files", "\"convergent\" or \"random\"")),
        };
        let params = VaultParams {
            zone: ZoneId(wire::bytes(&w.zone, "zone")?),
            suite,
            geometry: geometry(size, w.reserved_slots).ok_or(member("reserved_slots", "1 to 62"))?,
            names: NameMode::from_name(&w.names).ok_or(member("names", "\"encrypted\" or \"plain\""))?,
            name_max: match u8::try_from(w.name_max) {
                Ok(n) if NAME_MAX.contains(&w.name_max) => n,
                Ok(_) | Err(_) => return Err(member("name_max", "64 to 255")),
            },
            convergent_small_files: convergent,
            domain: domain(w.domain.as_deref(), suite, convergent)?,
            created: w.created,
        };
        let flag = |value, name| match value {
            None => Ok(false),
            Some(true) => Ok(true),
            Some(false) => Err(member(name, "true, or left out")),
        };
        let (read_only, datasets) = (flag(w.read_only, "read_only")?, flag(w.datasets, "datasets")?);
        let anchored = flag(w.anchored, "anchored")?;
        let integrity = match w.integrity.as_deref().map(Verified::from_name) {
            Some(None) => return Err(member("integrity", "\"full\" or \"metadata\"")),
            known => known.flatten(),
        };
        let cache = match w.cache.as_deref().map(Caching::from_name) {
            Some(None) => return Err(member("cache", "\"mount\" or \"none\"")),
            known => known.flatten(),
        };
        let compression = w.compression.as_ref().map(|c| c.0.parse(suite, size as u32)).transpose()?;
        let keys = keys.parse()?;
        Ok(VaultHeader { params, read_only, datasets, anchored, integrity, cache, compression, destroyed, keys })
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

    fn destroyed(&self) -> Option<Destroyed> {
        self.destroyed
    }

    fn is_anchored(&self) -> bool {
        self.anchored
    }
}

/// The domain that a header names, if it fits the rest. The widest domain is the one without a member.
fn domain(name: Option<&str>, suite: Suite, convergent_small_files: bool) -> Result<Domain, HeaderError> {
    let fail = |rule| Err(HeaderError::Member { member: "domain", rule });
    let domain = match name.map(Domain::from_name) {
        None => Domain::Zone,
        Some(Some(domain)) if domain != Domain::Zone => domain,
        Some(_) => return fail("\"family\", \"file\" or \"none\", or left out"),
    };
    if !domain.is_for(suite) {
        return fail("\"family\", or left out, in suite \"paper\", whose keys take no salt");
    }
    if domain.is_salted() && convergent_small_files {
        return fail("\"family\", or left out, where small_files is \"convergent\"");
    }
    Ok(domain)
}

/// A geometry from unbounded integers.
pub(super) fn geometry(block_size: u64, reserved: u64) -> Option<Geometry> {
    Geometry::new(u32::try_from(block_size).ok()?, u16::try_from(reserved).ok()?)
}
