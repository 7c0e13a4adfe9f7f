//! A vault with datasets, over a directory of this host, with anchors or without, and who opens them.

use super::anchored::{Findings, new_anchor};
use super::{RO, RW, codec_of_mode, compression, local, me, n, options};
use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
use lamassu_anchor::{Anchor, AnchorError};
use lamassu_crypto::SecretBytes;
use lamassu_format::header::{Header, NameMode, VaultHeader, VaultId};
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_keys::{
    Argon2Params, Material, NewDataset, NewSlot, NewVault, SlotKind, Unlocked, Zone, create_dataset, create_vault,
    unlock_by_parent,
};
use lamassu_store::backend::LocalBackend;
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::event::Events;
use lamassu_vault::forest::{Number, Opener, Opening, ROOT_MEMBER, State, member_of};
use lamassu_vault::{FileSystem, Forest, HandleId, Ino, Options, Result, Vault, VaultError, scrub};
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};

pub fn slot(material: &Material) -> NewSlot<'_> {
    NewSlot { material, cost: Argon2Params::new(64, 1, 2).unwrap(), label: "", created: 0 }
}

/// Opens what inherits; keeps what keys there are, and what it was told.
#[derive(Default)]
pub struct Keys {
    pub kept: Mutex<HashMap<Number, (VaultHeader, Unlocked)>>,
    pub told: Mutex<Vec<String>>,
    pub read_only: AtomicBool,
    /// The anchors of those that have one.
    pub tables: Mutex<HashMap<VaultId, Arc<dyn Table>>>,
    /// While this is held, commits of the anchors wait.
    pub gate: Arc<Gate>,
    /// What happens while the next one is opened.
    pub meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Keys {
    fn options(&self, header: &VaultHeader, read_only: bool) -> Options {
        let table = self.tables.lock().unwrap().get(&header.id()).cloned();
        let anchor = table.map(|table| Arc::new(Anchor::open(table, &header.id()).unwrap()));
        Options { anchor, ..options(read_only) }
    }

    /// Makes the anchor of a vault that is empty.
    fn anchor(&self, header: &VaultHeader, backend: &dyn Backend) {
        let table: Arc<dyn Table> = Arc::new(Gated { table: MemoryTable::default(), gate: self.gate.clone() });
        drop(new_anchor(header, backend, &table));
        self.tables.lock().unwrap().insert(header.id(), table);
    }
}

/// Holds commits up.
#[derive(Default)]
pub struct Gate {
    pub shut: Mutex<()>,
    /// Commits that have come to it.
    pub come: AtomicUsize,
}

struct Gated {
    table: MemoryTable,
    gate: Arc<Gate>,
}

impl Table for Gated {
    fn get(&self, space: Space, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, AnchorError> {
        self.table.get(space, key)
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> std::result::Result<(), AnchorError> {
        self.table.scan(space, prefix, visit)
    }

    fn commit(&self, changes: &[Change]) -> std::result::Result<(), AnchorError> {
        self.gate.come.fetch_add(1, Relaxed);
        let _open = self.gate.shut.lock().unwrap();
        self.table.commit(changes)
    }
}

impl Opener for Keys {
    fn open(&self, member: Number, _: (Number, &Vault), header: VaultHeader) -> Result<Option<Opening>> {
        assert_ne!(member, ROOT_MEMBER, "the root is never opened by itself");
        if let Some(meanwhile) = self.meanwhile.lock().unwrap().take() {
            meanwhile();
        }
        let parent = self.kept.lock().unwrap();
        // Tests have keys of every parent here; which it is does not matter.
        let found = parent
            .values()
            .find_map(|(above, keys)| unlock_by_parent(&header, &keys.key_ring(above.suite()).unwrap()).ok());
        drop(parent);
        let Some(keys) = found else { return Ok(None) };
        let ring = keys.key_ring(header.suite()).unwrap();
        self.kept.lock().unwrap().insert(member, (header.clone(), keys));
        let options = self.options(&header, self.read_only.load(Relaxed));
        Ok(Some(Opening { header, ring, options, cached: true }))
    }

    fn opened(&self, member: Number, _: &Arc<Vault>) {
        self.told.lock().unwrap().push(format!("opened {}", member == ROOT_MEMBER));
    }

    fn unloading(&self, member: Number) {
        self.told.lock().unwrap().push(format!("unloading {}", member == ROOT_MEMBER));
    }
}

pub struct Wood {
    pub forest: Arc<Forest>,
    pub keys: Arc<Keys>,
    pub dir: tempfile::TempDir,
}

pub fn wood(names: NameMode) -> Wood {
    wood_over(names, |backend| backend)
}

/// One whose vaults have anchors, if `is_anchored` says so.
pub fn wood_with(names: NameMode, is_anchored: bool) -> Wood {
    make_wood(names, |backend| backend, is_anchored)
}

pub fn wood_over(names: NameMode, wrap: impl FnOnce(Arc<dyn Backend>) -> Arc<dyn Backend>) -> Wood {
    make_wood(names, wrap, false)
}

fn make_wood(names: NameMode, wrap: impl FnOnce(Arc<dyn Backend>) -> Arc<dyn Backend>, is_anchored: bool) -> Wood {
    let (dir, backend) = local();
    let backend = wrap(backend);
    let new = NewVault {
        suite: Suite::Aes,
        geometry: Geometry::new(4096, 8).unwrap(),
        names,
        name_max: 255,
        convergent_small_files: true,
        compression: compression(codec_of_mode(), Suite::Aes, 4096),
        domain: Domain::Zone,
        zone: Zone::Private,
        created: 1,
    };
    let material = Material::new(SlotKind::Raw, SecretBytes::new(vec![1; 32])).unwrap();
    let (header, keys) = create_vault(&new, &slot(&material)).unwrap();
    let ring = keys.key_ring(header.suite()).unwrap();
    Vault::make_tree(&*backend, &header, &ring).unwrap();
    std::fs::write(dir.path().join("lamassu.vault"), header.to_json().unwrap()).unwrap();
    let (id, opener) = (header.id(), Arc::new(Keys::default()));
    if is_anchored {
        opener.anchor(&header, &*backend);
    }
    let options = opener.options(&header, false);
    let vault = Arc::new(Vault::open(backend.clone(), &header, ring, options).unwrap());
    opener.kept.lock().unwrap().insert(ROOT_MEMBER, (header, keys));
    let forest = Forest::new(vault, backend, id, true, opener.clone()).unwrap();
    Wood { forest, keys: opener, dir }
}

impl Wood {
    pub fn is_anchored(&self) -> bool {
        !self.keys.tables.lock().unwrap().is_empty()
    }

    /// Makes a dataset; `inherit` or locked for ever.
    pub fn plant(&self, path: &str, inherit: bool) -> Ino {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        let dir = self.ino(parent);
        let above = member_of(dir);
        let vault = self.forest.at(dir).unwrap();
        vault.allow_datasets();
        let material = Material::new(SlotKind::Raw, SecretBytes::new(vec![7; 32])).unwrap();
        let (header, keys) = {
            let mut kept = self.keys.kept.lock().unwrap();
            let (parent, keys) = kept.get_mut(&above).unwrap();
            if keys.allow_datasets(parent).unwrap() {
                let stored = self.dir.path().join(self.forest.stored_dir(above).unwrap()).join("lamassu.vault");
                std::fs::write(stored, parent.to_json().unwrap()).unwrap();
            }
            let new = NewDataset {
                suite: parent.suite(),
                geometry: parent.geometry(),
                names: parent.names(),
                domain: Domain::Zone,
                compression: parent.compression(),
                integrity: None,
                cache: None,
                inherit,
                slot: (!inherit).then(|| slot(&material)),
                created: 2,
            };
            create_dataset(parent, keys, vault.ring(), &new).unwrap()
        };
        let made = self.forest.make_dataset(dir, n(name), 0o755, me(), |backend, _| -> Result<()> {
            let ring = keys.key_ring(header.suite()).unwrap();
            Vault::make_tree(backend, &header, &ring)?;
            write_header(&*backend.root(), &header.to_json().unwrap());
            if self.is_anchored() {
                self.keys.anchor(&header, backend);
            }
            Ok(())
        });
        let member = made.unwrap();
        assert_eq!(member_of(self.ino(path)), member);
        self.ino(path)
    }

    pub fn ino(&self, path: &str) -> Ino {
        self.forest.resolve(n(path)).unwrap_or_else(|e| panic!("{path}: {e}")).attr.ino
    }

    pub fn create(&self, path: &str) -> HandleId {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        self.forest.create(self.ino(parent), n(name), 0o644, RW, me()).unwrap().1
    }

    pub fn put(&self, path: &str, data: &[u8]) {
        let handle = self.create(path);
        self.forest.write(handle, 0, data).unwrap();
        self.forest.release(handle).unwrap();
    }

    pub fn get(&self, path: &str) -> Result<Vec<u8>> {
        let ino = self.forest.resolve(n(path))?.attr.ino;
        let handle = self.forest.open_file(ino, RO)?;
        let mut data = vec![0; 1 << 16];
        let len = self.forest.read(handle, 0, &mut data)?;
        self.forest.release(handle)?;
        data.truncate(len);
        Ok(data)
    }

    /// The same store in a mount that has met none of its datasets yet.
    pub fn again(&self, read_only: bool) -> Arc<Forest> {
        self.forest.close().unwrap();
        let backend: Arc<dyn Backend> = Arc::new(LocalBackend::open(self.dir.path()).unwrap());
        let (header, ring) = {
            let kept = self.keys.kept.lock().unwrap();
            let (header, keys) = &kept[&ROOT_MEMBER];
            (header.clone(), keys.key_ring(header.suite()).unwrap())
        };
        self.keys.read_only.store(read_only, Relaxed);
        let options = self.keys.options(&header, read_only);
        let vault = Arc::new(Vault::open(backend.clone(), &header, ring, options).unwrap());
        Forest::new(vault, backend, header.id(), true, self.keys.clone()).unwrap()
    }

    /// Directory of a member in the store.
    pub fn stored(&self, root: Ino) -> PathBuf {
        self.dir.path().join(self.forest.stored_dir(member_of(root)).unwrap())
    }

    /// The kinds of what a scrub of the outermost vault finds.
    pub fn scrubbed(&self) -> BTreeSet<String> {
        let header = self.keys.kept.lock().unwrap()[&ROOT_MEMBER].0.clone();
        let table = self.keys.tables.lock().unwrap()[&header.id()].clone();
        let (anchor, mut found) = (Anchor::open(table, &header.id()).unwrap(), Findings::default());
        let root = LocalBackend::open(self.dir.path()).unwrap().root();
        let done = scrub::scrub(root, &header, &anchor, &Events::default(), &mut found).unwrap();
        assert_eq!((done.unfinished, done.open_files), (0, 0));
        found.kinds()
    }

    pub fn state(&self, member: Number) -> State {
        self.forest.member(member).unwrap().state
    }

    /// As the store has it: nothing verifies it here.
    pub fn header(&self, member: Number) -> lamassu_vault::Result<VaultHeader> {
        self.forest.header(member)?.verified(|_| Ok(())).map(|(header, ())| header)
    }

    pub fn load_root(&self) {
        let (header, ring) = {
            let kept = self.keys.kept.lock().unwrap();
            let (header, keys) = &kept[&ROOT_MEMBER];
            (self.header(ROOT_MEMBER).unwrap(), keys.key_ring(header.suite()).unwrap())
        };
        let options = self.keys.options(&header, false);
        let opening = Opening { header, ring, options, cached: true };
        self.forest.load(ROOT_MEMBER, || Ok::<_, VaultError>(opening)).unwrap();
    }
}

pub fn write_header(dir: &dyn BackendDir, json: &[u8]) {
    let file = dir.create_file(n("lamassu.vault")).unwrap();
    file.write_at(0, json).unwrap();
}

pub fn key_not_loaded<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(VaultError::KeyNotLoaded)), "{result:?}");
}
