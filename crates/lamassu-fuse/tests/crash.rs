//! Programs that save with care (write beside, fsync, rename over, fsync the directory), through real system calls on a
//! mounted vault whose store crashes after every change: what is found afterwards is the old or the new, and the new
//! once the program was told so. One of them is Lamassu itself, which replaces key slots so.
//!
//! The vault is anchored, and the crash comes between any two changes of the store and commits of the anchor.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
use lamassu_anchor::{Anchor, AnchorError};
use lamassu_crypto::{KeyRing, Secret, SecretBytes};
use lamassu_format::header::{Header, KeyArea, NameMode, SealedKeychain, VaultHeader, VaultParams, ZoneFile, ZoneId};
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_fuse::{CacheMode, MountOptions};
use lamassu_keys::header_file::Update;
use lamassu_keys::{Argon2Params, Material, NewSlot, NewZone, SlotKind, create_zone, unlock};
use lamassu_store::Backend;
use lamassu_store::backend::{CrashBackend, CrashSim, MemoryBackend};
use lamassu_vault::anchor::{NewTrees, RebuildProgress, rebuild};
use lamassu_vault::{Access, Durability, Freshness, Integrity, Options, Vault, VaultError};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::Path;
use std::sync::{Arc, Mutex};

fn header(block_size: u32) -> VaultHeader {
    let params = VaultParams {
        zone: ZoneId([1; 16]),
        suite: Suite::Aes,
        geometry: Geometry::new(block_size, 8).unwrap(),
        names: NameMode::Encrypted,
        name_max: 255,
        convergent_small_files: true,
        domain: Domain::Zone,
        created: 0,
    };
    let keychain = SealedKeychain { nonce: [0; 24], sealed: Vec::new(), oblivious: false };
    VaultHeader::new(
        params,
        KeyArea { id: [1; 16], next_slot: 2, slots: Vec::new(), keychain, history: None, admin: None, mac: [0; 32] },
    )
}

fn ring() -> KeyRing {
    KeyRing::new(Suite::Aes, &[Secret::new(&mut [1; 32])], &[Secret::new(&mut [2; 32])])
}

/// A table that remembers what it was at each position of the store.
struct Watched {
    table: MemoryTable,
    store: Arc<CrashBackend>,
    states: Mutex<Vec<(usize, MemoryTable)>>,
}

impl Table for Watched {
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
        self.table.get(space, key)
    }
    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), AnchorError> {
        self.table.scan(space, prefix, visit)
    }
    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError> {
        self.table.commit(changes)?;
        self.states.lock().unwrap().push((self.store.position(), self.table.clone()));
        Ok(())
    }
}

/// An anchor of a vault that is empty leaves nothing out.
struct Nobody;

impl RebuildProgress for Nobody {
    fn advance(&self, _: u64, _: u64) {}
    fn damaged(&self, stored: &Path, error: &VaultError) {
        panic!("{}: {error}", stored.display());
    }
}

fn open(backend: Arc<dyn Backend>, block_size: u32, table: Option<Arc<dyn Table>>) -> Vault {
    let options = Options {
        integrity: Integrity::Full,
        durability: Durability::Ordered,
        read_only: false,
        approved_only: false,
        threads: 1,
        device: None,
        anchor: table.map(|table| Arc::new(Anchor::open(table, &header(block_size).id()).unwrap())),
        freshness: Freshness::default(),
        events: Default::default(),
        upkeep: Default::default(),
        by_turns: false,
    };
    Vault::open(backend, &header(block_size), ring(), options).unwrap()
}

/// What a file of a crashed vault holds; `None` if there is none.
fn content(vault: &Vault, path: &str) -> Option<Vec<u8>> {
    let entry = match vault.resolve(OsStr::new(path)) {
        Err(VaultError::NotFound) => return None,
        found => found.unwrap(),
    };
    let handle = vault.open_file(entry.attr.ino, Access { read: true, write: false, truncate: false }).unwrap();
    let mut data = vec![0; entry.attr.size as usize];
    let read = vault.read(handle, 0, &mut data).unwrap();
    vault.release(handle).unwrap();
    data.truncate(read);
    Some(data)
}

/// Does `steps` in a mount over a store that records. After each step the position it was complete at; the states are
/// judged by `judge`, which gets the number of steps that were complete for certain, and the vault. Returns how many
/// states there were.
fn crash_everywhere(
    cache: CacheMode,
    block_size: u32,
    steps: &[&dyn Fn(&Path)],
    judge: &dyn Fn(usize, &Vault) -> Result<(), String>,
) -> u64 {
    let crash = Arc::new(CrashBackend::with_granularity(block_size.into()));
    let backend: Arc<dyn Backend> = crash.clone();
    Vault::make_tree(&*backend, &header(block_size), &ring()).unwrap();
    backend.sync().unwrap();
    let table = Arc::new(Watched { table: MemoryTable::default(), store: crash.clone(), states: Mutex::default() });
    let unanchored = open(backend.clone(), block_size, None);
    drop(rebuild(&unanchored, &header(block_size), table.clone(), NewTrees::default(), &Nobody).unwrap());
    unanchored.close().unwrap();
    let vault = Arc::new(open(backend, block_size, Some(table.clone())));
    let point = tempfile::tempdir().unwrap();
    let options = MountOptions { cache, ..MountOptions::default() };
    let mounted = lamassu_fuse::mount(vault, point.path(), &options).unwrap();
    let mut ends = Vec::new();
    for step in steps {
        step(point.path());
        ends.push(crash.position());
    }
    let log = crash.log();
    let tables = table.states.lock().unwrap().clone();
    mounted.unmounter().unmount(false).unwrap();
    mounted.wait().unwrap();

    let sim = CrashSim::new(log);
    let mut states = 0;
    for at in ends[0]..=ends[ends.len() - 1] {
        // As at the end of what the anchor committed at this position.
        let table = &tables.iter().rfind(|(position, _)| *position <= at).unwrap().1;
        let complete = ends.iter().filter(|end| **end <= at).count();
        let point = sim.at(at);
        let cuts = (0..8).map(|seed| point.random_state(seed));
        let all: Vec<MemoryBackend> = [sim.prefix(at), point.least_state()].into_iter().chain(cuts).collect();
        for (n, left) in all.into_iter().enumerate() {
            let vault = open(Arc::new(left), block_size, Some(Arc::new(table.clone())));
            judge(complete, &vault).unwrap_or_else(|e| {
                panic!(
                    "blocks of {block_size}, {cache:?}: after {at} changes, {complete} steps complete, state {n}: {e}"
                )
            });
            vault.close().unwrap();
            states += 1;
        }
    }
    states
}

fn fuse_is_there() -> bool {
    let there = Path::new("/dev/fuse").exists();
    if !there {
        eprintln!("SKIPPED: there is no /dev/fuse on this machine");
    }
    there
}

fn raw(byte: u8) -> Material {
    Material::new(SlotKind::Raw, SecretBytes::new(vec![byte; 32])).unwrap()
}

fn slot(material: &Material) -> NewSlot<'_> {
    NewSlot { material, cost: Argon2Params::new(64, 1, 2).unwrap(), label: "", created: 0 }
}

/// The header's own code, on a file system that crashes: some key always opens it, the new one once the change was
/// reported done.
#[test]
fn a_key_slot_change_is_old_or_new() {
    if !fuse_is_there() {
        return;
    }
    let new = NewZone { suite: Suite::Aes, block_size: 4096, compression: None, outer: true, created: 0 };
    let (first, keys) = create_zone(&new, &slot(&raw(1))).unwrap();
    let create =
        |point: &Path| Update::begin(&point.join("zone"), &lamassu_keys::nobody()).unwrap().create(&first).unwrap();
    let add = |point: &Path| {
        let update = Update::begin(&point.join("zone"), &lamassu_keys::nobody()).unwrap();
        let mut header: ZoneFile = update.read().unwrap();
        keys.add_slot(&mut header, &slot(&raw(2))).unwrap();
        update.replace(&header).unwrap();
    };
    let remove = |point: &Path| {
        let update = Update::begin(&point.join("zone"), &lamassu_keys::nobody()).unwrap();
        let mut header: ZoneFile = update.read().unwrap();
        let id = header.keys().slots[0].id;
        let _removed = unlock(&header, &raw(2)).unwrap().remove_slot(&mut header, id).unwrap();
        update.replace(&header).unwrap();
    };
    let judge = |complete: usize, vault: &Vault| {
        let bytes = content(vault, "zone").ok_or("the header is gone")?;
        let header = ZoneFile::parse(&bytes).map_err(|e| format!("{e}"))?;
        let opens = |byte| unlock(&header, &raw(byte)).is_ok();
        match (complete, opens(1), opens(2)) {
            (1, true, _) | (2, _, true) | (3, false, true) => Ok(()),
            (_, old, new) => Err(format!("the first key opens: {old}, the second: {new}")),
        }
    };
    let states = crash_everywhere(CacheMode::WriteBack, 4096, &[&create, &add, &remove], &judge);
    println!("a_key_slot_change_is_old_or_new: {states} crash states");
    assert!(states > 200);
}

/// As editors save.
fn save(dir: &Path, name: &str, data: &[u8]) {
    let beside = dir.join(format!("{name}.tmp"));
    fs::write(&beside, data).unwrap();
    File::open(&beside).unwrap().sync_all().unwrap();
    fs::rename(&beside, dir.join(name)).unwrap();
    File::open(dir).unwrap().sync_all().unwrap();
}

#[test]
fn a_careful_save_is_old_or_new() {
    if !fuse_is_there() {
        return;
    }
    for (cache, block_size) in [(CacheMode::WriteBack, 4096), (CacheMode::None, 4096), (CacheMode::WriteBack, 65536)] {
        let (old, new) = (vec![1; 10_000], vec![2; 150_000]);
        let first = |point: &Path| {
            fs::create_dir(point.join("d")).unwrap();
            save(&point.join("d"), "f", &old);
            fs::hard_link(point.join("d/f"), point.join("kept")).unwrap();
            File::open(point).unwrap().sync_all().unwrap();
        };
        let second = |point: &Path| save(&point.join("d"), "f", &new);
        let judge = |complete: usize, vault: &Vault| {
            let (found, kept) =
                (content(vault, "d/f").ok_or("d/f is gone")?, content(vault, "kept").ok_or("kept is gone")?);
            match (complete, found == old, found == new, kept == old) {
                (1, true, _, true) | (1 | 2, _, true, true) => Ok(()),
                (_, _, _, kept) => {
                    Err(format!("{} bytes, of {:?}; the other name is whole: {kept}", found.len(), found.first()))
                }
            }
        };
        let states = crash_everywhere(cache, block_size, &[&first, &second], &judge);
        println!("a_careful_save_is_old_or_new, {cache:?}, blocks of {block_size}: {states} crash states");
    }
}
