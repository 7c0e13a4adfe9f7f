//! Nested vaults as one file system: each *dataset* is a [`Vault`] of its own, reached through a directory of the one
//! it lies in.
//!
//! Every vault in use is a *member* with a number: 0 is the mount's own, a dataset's comes from its id, so that inode
//! numbers stay the same over mounts and reloads. Bits 48 to 62 of inode numbers and handle ids are the member's
//! number; the rest belongs to the vault. Routing uses the number alone, takes one short lock and clones one reference.
//! A vault knows nothing of it.
//!
//! A member is *sighted* when its header was read, *loaded* when its vault is open, *locked* when no key for it was
//! found, and *unloaded* by request. It is opened at the first operation inside, not when it is merely listed.
//!
//! Several hosts may take turns with the mount's own vault, and with each dataset: then a new `Vault` is opened for
//! each turn (`turns`).
//!
//! Locks: `changing` is taken by loading, unloading and freezing alone, never by a request: a thread that holds it
//! waits for requests to end, and for the kernel, which waits for requests too. A freeze by turns that holds it may
//! wait for another host without limit, so loading and unloading do not wait for that.

mod calls;
mod frozen;
mod member;
mod names;
mod states;
mod turns;

pub use member::{Member, State};
pub use states::Destroying;

use crate::error::io;
use crate::event::IntegrityKind;
use crate::inode::{OWN_MAX, StoreId};
use crate::locks::Locks;
use crate::path::{components, descend};
use crate::turns::Turns;
use crate::walk::read_header_bytes;
use crate::{Attr, Entry, EntryRef, HandleId, Ino, Kind, Options, ROOT, Result, Upkeep, Vault, VaultError};
use lamassu_anchor::Row;
use lamassu_crypto::{Engine, KeyRing};
use lamassu_format::header::{Header, VaultHeader, VaultId};
use lamassu_store::{Backend, BackendDir};
use member::KnownMember;
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Number of a member.
pub type Number = u16;
/// The mount's own vault.
pub const ROOT_MEMBER: Number = 0;

/// Bits of inode numbers and handle ids below the member's.
const SHIFT: u32 = OWN_MAX.trailing_zeros();
/// The most members: the highest bit is that of a vault's own alternative numbers.
const NUMBER_MAX: Number = 0x7fff;
const MASK: u64 = (NUMBER_MAX as u64) << SHIFT;
/// What is reported as damaged if the header of a dataset does not open.
const DATASET_HEADER: &str = "dataset header";

/// The number within its vault.
pub fn local(number: u64) -> u64 {
    number & !MASK
}

/// The member of an inode number or a handle id.
pub fn member_of(number: u64) -> Number {
    ((number & MASK) >> SHIFT) as Number
}

/// The root of a member.
pub fn root_of(member: Number) -> Ino {
    global(member, ROOT)
}

/// A vault's number as a number of the whole.
pub fn global(member: Number, number: u64) -> u64 {
    number & !MASK | u64::from(member) << SHIFT
}

fn local_handle(handle: HandleId) -> HandleId {
    HandleId(local(handle.0))
}

fn global_handle(member: Number, handle: HandleId) -> HandleId {
    HandleId(global(member, handle.0))
}

/// What opens a dataset.
pub struct Opening {
    /// its header, authenticated
    pub header: VaultHeader,
    /// its keys
    pub ring: KeyRing,
    /// how
    pub options: Options,
    /// whether the kernel may keep contents of its files
    pub cached: bool,
}

/// Gets the keys of datasets, and learns when their vaults are opened and closed: the composition root.
pub trait Opener: Send + Sync {
    /// The keys of a dataset that lies in `parent`. Its header was read, but is not authenticated. `None`: there is no
    /// key for it here; it is locked.
    ///
    /// # Errors
    /// Anything but a missing key; it is asked again at the next operation inside.
    fn open(&self, member: Number, parent: (Number, &Vault), header: VaultHeader) -> Result<Option<Opening>>;
    /// The vault of a member is open.
    fn opened(&self, member: Number, vault: &Arc<Vault>);
    /// The vault of a member is closed, or could not be opened: its keys must be dropped.
    fn unloading(&self, member: Number);
    /// The datasets that lie in the mount's own vault and in those in it, as the store shows them: the vault that each
    /// lies in, and its own. Each comes after the one that it lies in.
    ///
    /// # Errors
    /// Those of the store.
    fn stored_datasets(&self) -> Result<Vec<(VaultId, VaultId)>> {
        Ok(Vec::new())
    }
    /// Keeps other hosts from changing a dataset that takes no turns here. It lies in `around`. `None`: hosts do not
    /// use it by turns. Waits for those that have it, as long as it `is_wanted`.
    ///
    /// # Errors
    /// Those of the server; [`VaultError::FreezeLost`] if it is not wanted.
    fn hold(
        &self,
        (dataset, around): (&VaultId, &VaultId),
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Option<Box<dyn HeldDataset>>> {
        let _ = (dataset, around, is_wanted);
        Ok(None)
    }
    /// Starts taking turns with a dataset. Returns where requests wait for them, and the locks of programs.
    ///
    /// # Errors
    /// Those of threads; hosts take no turns here.
    fn take_turns(&self, member: Number) -> Result<(Arc<Turns>, Arc<dyn Locks>)> {
        let _ = member;
        Err(VaultError::Invalid)
    }
}

/// A dataset that no other host changes until this is dropped.
pub trait HeldDataset: Send {
    /// Whether that is certain until now.
    fn is_good(&self) -> bool;
    /// Whether another dataset lies in it.
    ///
    /// # Errors
    /// Those of the anchor.
    fn has(&self, dataset: &VaultId) -> Result<bool>;
}

/// A cache of file contents, attributes and names outside the vault: the kernel's. Its calls may wait for requests.
pub trait Cache: Send + Sync {
    /// Writes back dirty contents, and drops contents and attributes.
    fn drop_inode(&self, ino: Ino);
    /// The same for contents in a part of the file.
    fn drop_part(&self, ino: Ino, part: Range<u64>);
    /// Drops a name, and everything below it. Waits while a program holds the directory.
    fn drop_entry(&self, parent: Ino, name: &OsStr);
    /// The names in the root of the mount whose absence may be cached, to be dropped; they are no longer remembered.
    fn take_absent(&self) -> Vec<OsString>;
    /// Makes the cache ask for attributes before it uses them again.
    fn expire_attributes(&self, ino: Ino);
    /// Makes the cache look a name up before it uses it again.
    fn expire_entry(&self, parent: Ino, name: &OsStr);
}

/// A vault and its datasets, as one file system.
pub struct Forest {
    root: Arc<KnownMember>,
    table: RwLock<HashMap<Number, Arc<KnownMember>>>,
    /// Directories, by number, that are known to be roots of datasets.
    crossings: RwLock<HashMap<Ino, Number>>,
    opener: Arc<dyn Opener>,
    cache: OnceLock<Arc<dyn Cache>>,
    dropping: names::Dropping,
    keeps_acls: bool,
    upkeep: Upkeep,
    /// Cipher threads, of all vaults together.
    engine: Arc<Engine>,
    changing: Mutex<()>,
    /// Held shared while a vault is opened, or its header changed: a freeze waits for these.
    opens: RwLock<()>,
    frozen: AtomicBool,
    /// What is kept from other hosts meanwhile.
    kept: Mutex<frozen::Kept>,
    /// Whether a request came since the last check for idleness.
    used: AtomicBool,
    idle: Mutex<Idle>,
    /// Whether other hosts take turns with the mount's own vault.
    hosts_take_turns: AtomicBool,
}

/// When everything is unloaded because it is idle.
struct Idle {
    after: Option<std::time::Duration>,
    since: Instant,
}

impl Forest {
    /// The file system of `vault` and of the datasets in it. `backend` is that of `vault`; `cached`: whether the kernel
    /// may keep contents of its files.
    ///
    /// # Errors
    /// Those of the store.
    pub fn new(
        vault: Arc<Vault>,
        backend: Arc<dyn Backend>,
        id: VaultId,
        cached: bool,
        opener: Arc<dyn Opener>,
    ) -> Result<Arc<Forest>> {
        let st = backend.root().stat().map_err(io("stat the root"))?;
        let (keeps_acls, engine, upkeep) = (vault.keeps_acls(), vault.engine(), vault.options.upkeep.clone());
        opener.opened(ROOT_MEMBER, &vault);
        let root = KnownMember::new(ROOT_MEMBER, id, StoreId::from(&st), backend, Some(vault));
        root.set_cached(cached);
        Ok(Arc::new(Forest {
            root,
            table: RwLock::default(),
            crossings: RwLock::default(),
            opener,
            cache: OnceLock::new(),
            dropping: names::Dropping::default(),
            keeps_acls,
            upkeep,
            engine,
            changing: Mutex::new(()),
            opens: RwLock::new(()),
            frozen: AtomicBool::new(false),
            kept: Mutex::default(),
            used: AtomicBool::new(true),
            idle: Mutex::new(Idle { after: None, since: Instant::now() }),
            hosts_take_turns: AtomicBool::new(false),
        }))
    }

    /// The cache to notify when vaults are unloaded; set once.
    pub fn set_cache(&self, cache: Arc<dyn Cache>) {
        // A second one would belong to the same mount.
        let _ = self.cache.set(cache);
    }

    /// Makes the kernel forget a name and the directory it is in, after another front-end of the same process has
    /// changed them. Must not be called by a thread that answers the kernel.
    pub fn changed_beside_kernel(&self, parent: Ino, name: &OsStr) {
        if let Some(cache) = self.cache.get() {
            cache.drop_inode(parent);
            self.drop_names([(parent, name.to_owned())]);
        }
    }

    /// [`Vault::take_profile`], of files of one member.
    ///
    /// # Errors
    /// As that; [`VaultError::OtherDataset`].
    pub fn take_profile(&self, from: HandleId, to: HandleId) -> Result<()> {
        let member = member_of(to.0);
        if member_of(from.0) != member {
            return Err(VaultError::OtherDataset);
        }
        let vault = self.vault(member).ok_or(VaultError::KeyNotLoaded)?;
        vault.take_profile(local_handle(from), local_handle(to))
    }

    fn slot(&self, member: Number) -> Result<Arc<KnownMember>> {
        match member {
            ROOT_MEMBER => Ok(self.root.clone()),
            _ => self.table.read().get(&member).cloned().ok_or(VaultError::Stale),
        }
    }

    fn slots(&self) -> Vec<Arc<KnownMember>> {
        let table = self.table.read();
        std::iter::once(&self.root).chain(table.values()).cloned().collect()
    }

    /// The open vault of a number, opened now if it was only sighted.
    ///
    /// # Errors
    /// [`VaultError::KeyNotLoaded`], [`VaultError::Stale`]; what the opening fails with.
    pub fn at(&self, ino: Ino) -> Result<Arc<Vault>> {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        let member = member_of(ino);
        if member == ROOT_MEMBER {
            return self.root.loaded().ok_or_else(|| self.not_open(ROOT_MEMBER));
        }
        let known = self.table.read().get(&member).map(|slot| slot.loaded().ok_or_else(|| slot.clone()));
        match known {
            Some(Ok(vault)) => Ok(vault),
            Some(Err(_)) if self.hosts_take_turns() => Err(self.not_open(member)),
            Some(Err(slot)) => self.open_slot(&slot),
            None => Err(VaultError::Stale),
        }
    }

    /// The vault of a member, if it is open.
    pub fn vault(&self, member: Number) -> Option<Arc<Vault>> {
        self.slot(member).ok()?.loaded()
    }

    /// Directory of a member, relative to that of the mount's vault in the store; `None` where a vault on the way is
    /// not open.
    pub fn stored_dir(&self, member: Number) -> Option<PathBuf> {
        if member == ROOT_MEMBER {
            return Some(PathBuf::new());
        }
        let (parent, ino) = self.slot(member).ok()?.place()?;
        let here = self.vault(parent)?.stored_path_of(ino)?;
        Some(self.stored_dir(parent)?.join(here))
    }

    /// The member it lies in, the number there of the directory it lies in, and its name there.
    pub fn plain_place(&self, member: Number) -> Option<(Ino, OsString)> {
        let (parent, ino) = self.slot(member).ok()?.place()?;
        let (dir, name) = self.vault(parent)?.plain_place(ino)?;
        Some((global(parent, dir), name))
    }

    /// Whether an inode is the root of its member.
    pub fn is_root(&self, ino: Ino) -> bool {
        local(ino) == ROOT
    }

    /// The member that this one lies in; `None` for the mount's own, and if that member is not open.
    pub fn parent(&self, member: Number) -> Option<Number> {
        self.slot(member).ok()?.place().map(|(parent, _)| parent)
    }

    /// Whether a member is `above`, or lies in it.
    pub fn is_below(&self, member: Number, above: Number) -> bool {
        let mut at = Some(member);
        while let Some(here) = at {
            if here == above {
                return true;
            }
            at = self.parent(here);
        }
        false
    }

    /// The entry at a plain path, through datasets, one reference counted.
    ///
    /// # Errors
    /// As [`Vault::resolve`], and those of [`Forest::at`].
    pub fn resolve(&self, path: &OsStr) -> Result<Entry> {
        self.resolve_from(ROOT_MEMBER, path)
    }

    /// The same of a path within a member.
    ///
    /// # Errors
    /// As [`Forest::resolve`].
    pub fn resolve_from(&self, member: Number, path: &OsStr) -> Result<Entry> {
        let names = components(path)?;
        // The root of a member needs no reference, and giving one back changes nothing there.
        // Its attributes are not of interest, and would need the vault around it.
        let slot = self.slot(member)?;
        let attr = if member == ROOT_MEMBER { self.root_attr(&slot)? } else { slot.backing_attr()? };
        let root = Entry { attr: Attr { ino: root_of(member), ..attr }, generation: 0 };
        descend(EntryRef::new(self, root), &names).map(EntryRef::into_entry)
    }

    /// Path in the store of the entry at a plain path, through datasets. For the root of a dataset its key is not
    /// needed.
    ///
    /// # Errors
    /// As [`Forest::resolve`].
    pub fn stored_path(&self, path: &OsStr) -> Result<PathBuf> {
        let (mut member, mut stored, mut rest) = (ROOT_MEMBER, PathBuf::new(), PathBuf::from(path));
        loop {
            let vault = self.at(global(member, ROOT))?;
            let Some((dataset, below)) = vault.dataset_on(rest.as_os_str())? else {
                return Ok(stored.join(vault.stored_path(rest.as_os_str())?));
            };
            stored.push(dataset.stored);
            if below.as_os_str().is_empty() {
                return Ok(stored);
            }
            let plain = dataset.plain.unwrap_or_default();
            member = member_of(self.resolve_from(member, plain.as_os_str())?.attr.ino);
            rest = below;
        }
    }

    /// Plain path of the entry at a path in the store, relative to the vault's directory, through datasets.
    ///
    /// # Errors
    /// As [`Vault::plain_path`], and those of [`Forest::at`].
    pub fn plain_path(&self, stored: &Path) -> Result<PathBuf> {
        let (mut member, mut plain, mut rest) = (ROOT_MEMBER, PathBuf::new(), stored.to_path_buf());
        loop {
            let vault = self.at(global(member, ROOT))?;
            let Some(dataset) = vault.dataset_above(&rest)? else { return Ok(plain.join(vault.plain_path(&rest)?)) };
            let here = vault.plain_path(&dataset)?;
            member = member_of(self.resolve_from(member, here.as_os_str())?.attr.ino);
            plain.push(here);
            rest = rest.strip_prefix(&dataset).map_err(|_| VaultError::Invalid)?.to_path_buf();
            if rest.as_os_str().is_empty() {
                return Ok(plain);
            }
        }
    }

    /// The directory of a member in the store, held open.
    ///
    /// # Errors
    /// [`VaultError::Stale`].
    pub fn backing_dir(&self, member: Number) -> Result<Arc<dyn BackendDir>> {
        Ok(self.slot(member)?.backend.root())
    }

    /// Plain path of a directory within its member.
    ///
    /// # Errors
    /// [`VaultError::Stale`], and as [`Vault::plain_path`].
    pub fn plain_path_in(&self, dir: Ino) -> Result<PathBuf> {
        let vault = self.at(dir)?;
        vault.plain_path(&vault.stored_path_of(local(dir)).ok_or(VaultError::Stale)?)
    }

    /// Gives an entry of `vault` its numbers in the whole. The entry of a dataset becomes the dataset's root.
    fn entered(&self, vault: &Vault, member: Number, mut entry: Entry) -> Result<Entry> {
        if entry.attr.kind == Kind::Dir && vault.has_datasets() {
            match self.crossed(vault, member, entry.attr.ino) {
                Ok(None) => {}
                Ok(Some(slot)) => return Ok(Entry { attr: self.root_attr(&slot)?, generation: 0 }),
                Err(error) => {
                    vault.forget(entry.attr.ino, 1);
                    return Err(error);
                }
            }
        }
        entry.attr.ino = global(member, entry.attr.ino);
        Ok(entry)
    }

    /// The dataset whose root is the directory `ino` of `vault`. Takes over the reference to that directory: one
    /// reference is kept while the member is known, so that its place stays known; others are given back.
    fn crossed(&self, vault: &Vault, member: Number, ino: Ino) -> Result<Option<Arc<KnownMember>>> {
        let Some(dir) = vault.dataset_at(ino)? else { return Ok(None) };
        let store = StoreId::from(&dir.stat().map_err(io("stat a directory"))?);
        let known = self.crossings.read().get(&global(member, ino)).copied();
        if let Some(slot) = known.and_then(|n| self.slot(n).ok()).filter(|s| s.store == store) {
            vault.forget(ino, 1);
            return Ok(Some(slot));
        }
        let header = read_header(Some(vault), &dir).inspect_err(|error| tell_damage(vault, ino, error))?;
        vault.verify_dataset(ino, &header.id())?;
        if self.is_elsewhere(&header.id(), store) {
            let stored = vault.stored_path_of(ino).unwrap_or_default().display().to_string();
            let error = VaultError::Damaged { what: "dataset (another directory is in its place)", stored };
            tell_damage(vault, ino, &error);
            return Err(error);
        }
        let slot = self.sight(vault, header.id(), store, &dir)?;
        // One at a time: the code below asks for the places of other members.
        let mut crossings = self.crossings.write();
        if self.is_below(member, slot.number) {
            let stored = vault.stored_path_of(ino).unwrap_or_default().display().to_string();
            let error = VaultError::Damaged { what: "dataset (it lies within itself)", stored };
            tell_damage(vault, ino, &error);
            return Err(error);
        }
        vault.seen_again(ino);
        crossings.insert(global(member, ino), slot.number);
        if !slot.set_place(member, ino) {
            vault.forget(ino, 1);
        }
        Ok(Some(slot))
    }

    /// Whether hosts take turns with a dataset of this id in another directory. A second member would end the turns of
    /// the first one. Once that directory is gone from the store, the member is too ([`Forest::let_go_of_gone`]).
    fn is_elsewhere(&self, id: &VaultId, store: StoreId) -> bool {
        self.hosts_take_turns() && self.table.read().values().any(|slot| slot.id == *id && slot.store != store)
    }

    /// The member of a dataset: the one it has, or a new one. Its number comes from its id. If that is taken, for
    /// example by a copy of the dataset, it is the next free one.
    fn sight(&self, above: &Vault, id: VaultId, store: StoreId, dir: &Arc<dyn BackendDir>) -> Result<Arc<KnownMember>> {
        let write = !above.is_read_only();
        let backend = above.look_into(dir, "open a dataset", |dir| dir.as_backend(write))?;
        let mut table = self.table.write();
        let first = (u16::from_le_bytes([id.0[0], id.0[1]]) & NUMBER_MAX).max(1);
        let mut number = first;
        loop {
            match table.get(&number) {
                Some(slot) if slot.id == id && slot.store == store => return Ok(slot.clone()),
                Some(_) => {}
                None => break,
            }
            number = number % NUMBER_MAX + 1;
            if number == first {
                return Err(VaultError::Refused("more datasets than one mount can hold"));
            }
        }
        let slot = KnownMember::new(number, id, store, backend, None);
        table.insert(number, slot.clone());
        Ok(slot)
    }

    /// The row that the parent vault's anchor has of a dataset's root.
    fn entry_row(&self, slot: &KnownMember) -> Result<Option<Row>> {
        let above = slot.place().and_then(|(parent, ino)| Some((self.vault(parent)?, ino)));
        above.map_or(Ok(None), |(above, ino)| above.row_of(ino))
    }

    /// stat of a member's root, which also a locked one has.
    fn root_attr(&self, slot: &KnownMember) -> Result<Attr> {
        let attr = match slot.loaded() {
            _ if slot.number != ROOT_MEMBER && self.hosts_take_turns() => self.dataset_root_attr(slot)?,
            _ if self.hosts_take_turns() => self.mounts_root_attr()?,
            Some(vault) => vault.getattr(ROOT, None)?,
            None => {
                let attr = slot.backing_attr()?;
                let row = self.entry_row(slot)?;
                row.map_or(attr, |row| Attr { mode: row.mode, uid: row.uid, gid: row.gid, ..attr })
            }
        };
        Ok(Attr { ino: global(slot.number, ROOT), ..attr })
    }

    /// Whether an entry of a vault is the root of a dataset.
    fn leads_to_dataset(&self, vault: &Vault, parent: Ino, name: &OsStr) -> Result<bool> {
        if !vault.has_datasets() {
            return Ok(false);
        }
        match EntryRef::find(vault, parent, name) {
            Err(VaultError::NotFound) => Ok(false),
            Ok(entry) if entry.is_dir() => Ok(vault.dataset_at(entry.ino())?.is_some()),
            found => found.map(|_| false),
        }
    }
}

/// Data of the store that is not verified: no decision may depend on it.
pub struct Unverified<H>(H);

impl<H> Unverified<H> {
    /// The value, to be shown to people.
    pub fn described(&self) -> &H {
        &self.0
    }

    /// The value once `by` has verified it, with the result of `by`.
    ///
    /// # Errors
    /// Those of `by`.
    pub fn verified<T, E>(self, by: impl FnOnce(&H) -> std::result::Result<T, E>) -> std::result::Result<(H, T), E> {
        let given = by(&self.0)?;
        Ok((self.0, given))
    }
}

/// The event of a dataset in `vault` that does not open.
fn tell_damage(vault: &Vault, ino: Ino, error: &VaultError) {
    if let VaultError::Damaged { what, stored } = error {
        let kind = if *what == DATASET_HEADER { IntegrityKind::Header } else { IntegrityKind::Dataset };
        vault.tell_at(ino, kind, format!("{what}: {stored}"));
    }
}

/// Reads the header in a directory, with a permission that `lender` may grant for the time. The header is not
/// authenticated.
fn read_header(lender: Option<&Vault>, dir: &Arc<dyn BackendDir>) -> Result<VaultHeader> {
    const READ: &str = "read a dataset's header";
    let damaged = |what: String| VaultError::Damaged { what: DATASET_HEADER, stored: what };
    let bytes = match lender {
        Some(vault) => vault.look_into(dir, READ, read_header_bytes)?,
        None => read_header_bytes(&**dir).map_err(io(READ))?,
    };
    VaultHeader::parse(&bytes).map_err(|e| damaged(e.to_string()))
}
