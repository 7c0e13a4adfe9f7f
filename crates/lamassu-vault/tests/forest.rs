//! Vaults in one another, over directories of this host, with headers and parent slots as they are.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{RO, RW, local, me, n, options};
use lamassu_crypto::SecretBytes;
use lamassu_format::header::{Header, NameMode, VaultHeader};
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_keys::{
    Argon2Params, Material, NewDataset, NewSlot, NewVault, SlotKind, Unlocked, Zone, create_dataset, create_vault,
    unlock_by_parent,
};
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, LocalBackend};
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::forest::{Cache, Number, Opener, Opening, ROOT_VOLUME, State, local as own_number, volume_of};
use lamassu_vault::{Forest, HandleId, Ino, Kind, ROOT, RenameMode, Result, SetAttr, Vault, VaultError};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn slot(material: &Material) -> NewSlot<'_> {
    NewSlot { material, cost: Argon2Params::new(64, 1, 2).unwrap(), label: "", created: 0 }
}

/// Opens what inherits; keeps what keys there are, and what it was told.
#[derive(Default)]
struct Keys {
    kept: Mutex<HashMap<Number, (VaultHeader, Unlocked)>>,
    told: Mutex<Vec<String>>,
    read_only: AtomicBool,
}

impl Opener for Keys {
    fn open(&self, volume: Number, _: (Number, &Vault), header: VaultHeader) -> Result<Option<Opening>> {
        assert_ne!(volume, ROOT_VOLUME, "the root is never opened by itself");
        let parent = self.kept.lock().unwrap();
        // Tests have keys of every parent here; which it is does not matter.
        let found = parent
            .values()
            .find_map(|(above, keys)| unlock_by_parent(&header, &keys.key_ring(above.suite()).unwrap()).ok());
        drop(parent);
        let Some(keys) = found else { return Ok(None) };
        let ring = keys.key_ring(header.suite()).unwrap();
        self.kept.lock().unwrap().insert(volume, (header.clone(), keys));
        let options = options(self.read_only.load(Relaxed));
        Ok(Some(Opening { header, ring, options, cached: true }))
    }

    fn opened(&self, volume: Number, _: &Arc<Vault>) {
        self.told.lock().unwrap().push(format!("opened {}", volume == ROOT_VOLUME));
    }

    fn unloading(&self, volume: Number) {
        self.told.lock().unwrap().push(format!("unloading {}", volume == ROOT_VOLUME));
    }
}

struct Wood {
    forest: Arc<Forest>,
    keys: Arc<Keys>,
    dir: tempfile::TempDir,
}

fn wood(names: NameMode) -> Wood {
    wood_over(names, |backend| backend)
}

fn wood_over(names: NameMode, wrap: impl FnOnce(Arc<dyn Backend>) -> Arc<dyn Backend>) -> Wood {
    let (dir, backend) = local();
    let backend = wrap(backend);
    let new = NewVault {
        suite: Suite::Aes,
        geometry: Geometry::new(4096, 8).unwrap(),
        names,
        name_max: 255,
        convergent_small_files: true,
        domain: Domain::Zone,
        zone: Zone::Private,
        created: 1,
    };
    let material = Material::new(SlotKind::Raw, SecretBytes::new(vec![1; 32])).unwrap();
    let (header, keys) = create_vault(&new, &slot(&material)).unwrap();
    let ring = keys.key_ring(header.suite()).unwrap();
    Vault::make_tree(&*backend, &header, &ring).unwrap();
    std::fs::write(dir.path().join("lamassu.vault"), header.to_json().unwrap()).unwrap();
    let vault = Arc::new(Vault::open(backend.clone(), &header, ring, options(false)).unwrap());
    let (id, opener) = (header.id(), Arc::new(Keys::default()));
    opener.kept.lock().unwrap().insert(ROOT_VOLUME, (header, keys));
    let forest = Forest::new(vault, backend, id, true, opener.clone()).unwrap();
    Wood { forest, keys: opener, dir }
}

impl Wood {
    /// Makes a dataset; `inherit` or locked for ever.
    fn plant(&self, path: &str, inherit: bool) -> Ino {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        let dir = self.ino(parent);
        let above = volume_of(dir);
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
            Ok(())
        });
        let volume = made.unwrap();
        assert_eq!(volume_of(self.ino(path)), volume);
        self.ino(path)
    }

    fn ino(&self, path: &str) -> Ino {
        self.forest.resolve(n(path)).unwrap_or_else(|e| panic!("{path}: {e}")).attr.ino
    }

    fn create(&self, path: &str) -> HandleId {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        self.forest.create(self.ino(parent), n(name), 0o644, RW, me()).unwrap().1
    }

    fn put(&self, path: &str, data: &[u8]) {
        let handle = self.create(path);
        self.forest.write(handle, 0, data).unwrap();
        self.forest.release(handle).unwrap();
    }

    fn get(&self, path: &str) -> Result<Vec<u8>> {
        let ino = self.forest.resolve(n(path))?.attr.ino;
        let handle = self.forest.open_file(ino, RO)?;
        let mut data = vec![0; 1 << 16];
        let len = self.forest.read(handle, 0, &mut data)?;
        self.forest.release(handle)?;
        data.truncate(len);
        Ok(data)
    }

    /// The same store in a mount that has met none of its datasets yet.
    fn again(&self, read_only: bool) -> Arc<Forest> {
        self.forest.close().unwrap();
        let backend: Arc<dyn Backend> = Arc::new(LocalBackend::open(self.dir.path()).unwrap());
        let (header, ring) = {
            let kept = self.keys.kept.lock().unwrap();
            let (header, keys) = &kept[&ROOT_VOLUME];
            (header.clone(), keys.key_ring(header.suite()).unwrap())
        };
        self.keys.read_only.store(read_only, Relaxed);
        let vault = Arc::new(Vault::open(backend.clone(), &header, ring, options(read_only)).unwrap());
        Forest::new(vault, backend, header.id(), true, self.keys.clone()).unwrap()
    }

    /// Directory of a volume in the store.
    fn stored(&self, root: Ino) -> PathBuf {
        self.dir.path().join(self.forest.stored_dir(volume_of(root)).unwrap())
    }

    fn state(&self, volume: Number) -> State {
        self.forest.volume(volume).unwrap().state
    }

    fn load_root(&self) {
        let (header, ring) = {
            let kept = self.keys.kept.lock().unwrap();
            let (header, keys) = &kept[&ROOT_VOLUME];
            (self.forest.header(ROOT_VOLUME).unwrap(), keys.key_ring(header.suite()).unwrap())
        };
        let opening = Opening { header, ring, options: options(false), cached: true };
        self.forest.load(ROOT_VOLUME, || Ok::<_, VaultError>(opening)).unwrap();
    }
}

fn write_header(dir: &dyn BackendDir, json: &[u8]) {
    let file = dir.create_file(n("lamassu.vault"), 0o600).unwrap();
    file.write_at(0, json).unwrap();
}

fn key_not_loaded<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(VaultError::KeyNotLoaded)), "{result:?}");
}

#[test]
fn numbers_tell_the_volume_and_listings_show_them() {
    for names in [NameMode::Encrypted, NameMode::Plain] {
        let w = wood(names);
        let a = w.plant("a", true);
        let deep = w.plant("a/deep", true);
        w.put("f", b"root");
        w.put("a/f", b"a");
        w.put("a/deep/f", b"deep");
        assert_eq!((own_number(a), own_number(deep)), (ROOT, ROOT));
        assert!(volume_of(a) != volume_of(deep) && volume_of(a) != ROOT_VOLUME);
        for (path, content) in [("f", &b"root"[..]), ("a/f", b"a"), ("a/deep/f", b"deep")] {
            assert_eq!(w.get(path).unwrap(), content);
            assert_eq!(w.forest.getattr(w.ino(path), None).unwrap().ino, w.ino(path));
        }
        let shown = |path: &str| {
            let handle = w.forest.open_dir(w.ino(path)).unwrap();
            let mut shown = HashMap::new();
            w.forest
                .read_dir(handle, 0, &mut |e, _| {
                    shown.insert(e.name.to_str().unwrap().to_owned(), e.ino);
                    true
                })
                .unwrap();
            w.forest.release_dir(handle).unwrap();
            shown
        };
        let (root, of_a, of_deep) = (shown(""), shown("a"), shown("a/deep"));
        assert_eq!((root["a"], root["f"], root[".."]), (a, w.ino("f"), ROOT));
        assert_eq!((of_a["."], of_a[".."], of_a["deep"], of_a["f"]), (a, ROOT, deep, w.ino("a/f")));
        assert_eq!((of_deep["."], of_deep[".."], of_deep.len()), (deep, a, 3));
        // No application can make the name that makes a dataset, nor see it.
        let made = w.forest.create(a, n("lamassu.vault"), 0o644, RW, me());
        match names {
            NameMode::Plain => assert!(matches!(made, Err(VaultError::InvalidName))),
            NameMode::Encrypted => {
                w.forest.release(made.unwrap().1).unwrap();
                assert_eq!(w.ino("a/lamassu.vault") >> 48, a >> 48);
                w.forest.unlink(a, n("lamassu.vault")).unwrap();
            }
        }
        w.forest.close().unwrap();
        let stored = w.dir.path().join(w.forest.stored_dir(volume_of(deep)).unwrap_or_default());
        assert!(stored.join("lamassu.vault").exists());
    }
}

#[test]
fn borders_are_kept() {
    let w = wood(NameMode::Encrypted);
    let a = w.plant("a", true);
    w.put("a/f", b"a");
    w.put("f", b"root");
    let (f, in_a) = (w.ino("f"), w.ino("a/f"));
    let other = |result: Result<()>| assert!(matches!(result, Err(VaultError::OtherDataset)), "{result:?}");
    other(w.forest.rename(ROOT, n("f"), a, n("g"), RenameMode::Replace));
    other(w.forest.rename(a, n("f"), ROOT, n("g"), RenameMode::NoReplace));
    other(w.forest.link(f, a, n("g")).map(drop));
    other(w.forest.link(in_a, ROOT, n("g")).map(drop));
    let (from, to) = (w.forest.open_file(f, RO).unwrap(), w.forest.open_file(in_a, RW).unwrap());
    assert_eq!(w.forest.copy_range((from, 0), (to, 0), 4).unwrap(), None, "its keys are others");
    [from, to].into_iter().for_each(|handle| w.forest.release(handle).unwrap());
    let root = |result: Result<()>| assert!(matches!(result, Err(VaultError::DatasetRoot)), "{result:?}");
    root(w.forest.rmdir(ROOT, n("a")));
    w.forest.mkdir(ROOT, n("empty"), 0o755, me()).unwrap();
    root(w.forest.rename(ROOT, n("empty"), ROOT, n("a"), RenameMode::Replace));
    assert!(matches!(w.forest.unlink(ROOT, n("a")), Err(VaultError::IsDirectory)));
    assert!(matches!(w.forest.destroy(ROOT_VOLUME, true), Err(VaultError::Refused(_))));
    // Within its vault a dataset goes where its directory goes, and keeps its number.
    w.forest.rename(ROOT, n("a"), w.ino("empty"), n("b"), RenameMode::NoReplace).unwrap();
    assert_eq!((w.ino("empty/b"), w.get("empty/b/f").unwrap()), (a, b"a".to_vec()));
    assert_eq!(w.forest.plain_place(volume_of(a)).unwrap(), (w.ino("empty"), OsString::from("b")));
    w.forest.rename(w.ino("empty"), n("b"), ROOT, n("f"), RenameMode::Exchange).unwrap();
    assert_eq!((w.ino("f"), w.get("f/f").unwrap(), w.get("empty/b").unwrap()), (a, b"a".to_vec(), b"root".to_vec()));
}

#[test]
fn it_is_opened_when_it_is_entered_and_not_when_it_is_listed() {
    let w = wood(NameMode::Encrypted);
    let a = w.plant("a", true);
    let locked = w.plant("locked", false);
    assert_eq!((w.state(volume_of(a)), w.state(volume_of(locked))), (State::Sighted, State::Sighted));
    let attr = w.forest.getattr(a, None).unwrap();
    assert_eq!((attr.kind, attr.mode, w.state(volume_of(a))), (Kind::Dir, 0o755, State::Sighted));
    w.put("a/f", b"a");
    assert_eq!(w.state(volume_of(a)), State::Loaded);
    // Without a key: a directory that is there, and nothing else.
    key_not_loaded(w.forest.lookup(locked, n("f")));
    assert_eq!(w.state(volume_of(locked)), State::Locked);
    assert_eq!(w.forest.getattr(locked, None).unwrap().kind, Kind::Dir);
    let handle = w.forest.open_dir(locked).unwrap();
    key_not_loaded(w.forest.read_dir(handle, 0, &mut |_, _| true));
    w.forest.release_dir(handle).unwrap();
    key_not_loaded(w.forest.create(locked, n("f"), 0o644, RW, me()));
    key_not_loaded(w.forest.setattr(locked, None, &SetAttr { mode: Some(0o700), ..SetAttr::default() }));
    assert!(matches!(w.forest.get_xattr(locked, OsStr::new("user.x")), Err(VaultError::NoAttribute)));
    assert_eq!(w.forest.list_xattr(locked).unwrap(), Vec::<Vec<u8>>::new());
    key_not_loaded(w.forest.load_again(volume_of(locked)).map(drop));
    root_is_whole(&w);
}

fn root_is_whole(w: &Wood) {
    let report = w.forest.vault(ROOT_VOLUME).unwrap().check(&[], false, &common::Quiet).unwrap();
    assert!(report.problems.is_empty(), "{:#?}", report.problems);
    assert_eq!(report.datasets.len(), 2);
}

/// What a kernel would be told.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Heard>>);

/// Inodes, and names in directories.
type Heard = (Vec<Ino>, Vec<(Ino, OsString)>);

impl Cache for Told {
    fn drop_inode(&self, ino: Ino) {
        self.0.lock().unwrap().0.push(ino);
    }
    fn drop_entry(&self, parent: Ino, name: &OsStr) {
        self.0.lock().unwrap().1.push((parent, name.to_owned()));
    }
}

#[test]
fn unloaded_vaults_let_everything_go_and_references_are_settled() {
    let w = wood(NameMode::Encrypted);
    let told = Told::default();
    w.forest.set_cache(Box::new(told.clone()));
    let a = w.plant("a", true);
    let deep = w.plant("a/deep", true);
    w.put("a/f", b"a");
    w.put("a/deep/f", b"deep");
    let handle = w.forest.open_file(w.ino("a/f"), RW).unwrap();
    w.forest.write(handle, 0, b"A").unwrap();
    let (f, references) = (w.ino("a/f"), 5);
    (1..references).for_each(|_| assert_eq!(w.ino("a/f"), f));
    assert!(w.forest.unload(volume_of(a)).unwrap());
    assert_eq!((w.state(volume_of(a)), w.state(volume_of(deep))), (State::Unloaded, State::Sighted));
    key_not_loaded(w.forest.read(handle, 0, &mut [0; 4]));
    key_not_loaded(w.forest.write(handle, 0, b"x").map(drop));
    key_not_loaded(w.get("a/deep/f"));
    w.forest.flush(handle).unwrap();
    let (inodes, entries) = told.0.lock().unwrap().clone();
    assert!([a, f, deep].iter().all(|ino| inodes.iter().filter(|i| *i == ino).count() >= 2), "before and after");
    assert!(entries.contains(&(ROOT, "a".into())) && entries.contains(&(a, "deep".into())));
    assert_eq!(
        *w.keys.told.lock().unwrap(),
        ["opened true", "opened false", "opened false", "unloading false", "unloading false"]
    );

    // Not opened again by itself; then everything is as it was, and what was given out before is not taken for the new.
    key_not_loaded(w.get("a/f"));
    w.forest.load_again(volume_of(a)).unwrap();
    assert!(matches!(w.forest.load_again(volume_of(a)), Err(VaultError::Refused(_))));
    assert!(matches!(w.forest.read(handle, 0, &mut [0; 4]), Err(VaultError::BadHandle)));
    assert_eq!((w.get("a/f").unwrap(), w.get("a/deep/f").unwrap()), (b"A".to_vec(), b"deep".to_vec()));
    assert_eq!(w.ino("a/f"), f);
    w.forest.forget(f, 100.min(references));
    assert_eq!(w.forest.getattr(f, None).unwrap().ino, f, "the new references are not the old ones");
}

#[test]
fn the_whole_mount_is_unloaded_when_nobody_uses_it() {
    let w = wood(NameMode::Encrypted);
    let a = w.plant("a", true);
    w.put("a/f", b"a");
    w.forest.unload_after(Duration::from_millis(300));
    let handle = w.forest.open_file(w.ino("a/f"), RO).unwrap();
    let rounds = |count: u32| {
        for _ in 0..count {
            std::thread::sleep(Duration::from_millis(100));
            w.forest.maintain().unwrap();
            w.forest.unload_idle().unwrap();
        }
    };
    rounds(8);
    assert_eq!(w.state(ROOT_VOLUME), State::Loaded, "a file is open");
    w.forest.release(handle).unwrap();
    for _ in 0..8 {
        w.forest.getattr(w.ino("a/f"), None).unwrap();
        rounds(1);
    }
    assert_eq!(w.state(ROOT_VOLUME), State::Loaded, "requests come");
    rounds(8);
    assert_eq!(w.state(ROOT_VOLUME), State::Unloaded);
    key_not_loaded(w.get("a/f"));
    assert_eq!(w.forest.getattr(ROOT, None).unwrap().kind, Kind::Dir);
    assert!(w.forest.statfs().unwrap().blocks > 0);
    key_not_loaded(w.forest.load_again(ROOT_VOLUME).map(drop));
    w.load_root();
    assert_eq!(w.get("a/f").unwrap(), b"a", "datasets that inherit open with it");
    assert_eq!(w.ino("a"), a);
}

/// A re-keying that ends when it is told to.
#[derive(Default)]
struct Held {
    begun: AtomicBool,
    may_end: AtomicBool,
}

impl lamassu_vault::RekeyProgress for Held {
    fn total(&self, _: u64) {
        self.begun.store(true, Release);
        while !self.may_end.load(Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    fn advance(&self, _: u64) {}
    fn failed(&self, stored: &str, error: &VaultError) {
        panic!("{stored}: {error}");
    }
    fn dataset(&self, _: &Path) -> Result<()> {
        Ok(())
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}

#[test]
fn a_rekeying_under_way_is_use() {
    let w = wood(NameMode::Encrypted);
    let a = volume_of(w.plant("a", true));
    w.put("a/f", b"a");
    w.forest.unload_after(Duration::from_millis(100));
    let held = Held::default();
    let idle = || {
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(100));
            w.forest.unload_idle().unwrap();
        }
        w.state(ROOT_VOLUME)
    };
    std::thread::scope(|scope| {
        let vault = w.forest.vault(a).unwrap();
        let held = &held;
        scope.spawn(move || vault.rekey(lamassu_vault::Rekey::Outer, None, held).unwrap());
        while !held.begun.load(Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let state = idle();
        held.may_end.store(true, Release);
        assert_eq!(state, State::Loaded);
    });
    assert_eq!(idle(), State::Unloaded);
}

#[test]
fn a_copy_of_a_dataset_is_another_volume() {
    let w = wood(NameMode::Plain);
    let a = w.plant("a", true);
    w.put("a/f", b"a");
    w.forest.sync_all().unwrap();
    let copy = std::process::Command::new("cp").arg("-a").args(["a", "b"]).current_dir(w.dir.path()).status();
    assert!(copy.unwrap().success());
    let b = w.ino("b");
    assert!(volume_of(b) != volume_of(a) && volume_of(b) != ROOT_VOLUME);
    assert_eq!(w.get("b/f").unwrap(), b"a");
    let handle = w.forest.open_file(w.ino("b/f"), RW).unwrap();
    w.forest.write(handle, 0, b"b").unwrap();
    w.forest.release(handle).unwrap();
    assert_eq!((w.get("a/f").unwrap(), w.get("b/f").unwrap()), (b"a".to_vec(), b"b".to_vec()));
    // One that is damaged is an error of its own directory alone.
    std::fs::File::create(w.dir.path().join("b/lamassu.vault")).unwrap().write_all(b"{").unwrap();
    assert!(w.forest.unload(volume_of(b)).unwrap());
    assert!(matches!(w.forest.load_again(volume_of(b)), Err(VaultError::Damaged { .. })));
    assert_eq!(w.get("a/f").unwrap(), b"a");
}

#[test]
fn destroyed_is_gone_and_frozen_is_still() {
    let w = wood(NameMode::Encrypted);
    let a = w.plant("a", true);
    w.plant("a/deep", true);
    w.put("a/deep/f", b"deep");
    let other = w.plant("other", true);
    let handle = w.forest.open_file(w.ino("a/deep/f"), RO).unwrap();
    assert!(matches!(w.forest.destroy(volume_of(a), false), Err(VaultError::Refused(_))));
    w.forest.release(handle).unwrap();
    w.forest.freeze().unwrap();
    assert!(w.forest.is_frozen());
    assert_eq!(w.get("a/deep/f").unwrap(), b"deep", "reads go on");
    let opened = w.forest.lookup(other, n("f"));
    assert!(matches!(opened, Err(VaultError::Io { .. })), "{opened:?}");
    assert!(matches!(w.forest.unload(volume_of(a)), Err(VaultError::Refused(_))));
    w.forest.thaw().unwrap();
    assert!(matches!(w.forest.lookup(other, n("f")), Err(VaultError::NotFound)));
    w.forest.destroy(volume_of(a), false).unwrap();
    assert!(matches!(w.forest.resolve(n("a")), Err(VaultError::NotFound)));
    assert!(matches!(w.forest.lookup(a, n("deep")), Err(VaultError::Stale)), "its number is nobody's");
    assert_eq!(std::fs::read_dir(w.dir.path().join("lamassu.staging")).unwrap().count(), 0);
    w.forest.close().unwrap();
    assert!(!Path::new(&w.dir.path().join("lamassu.staging/x")).exists());
}

#[test]
fn a_dataset_that_cannot_be_made_leaves_nothing() {
    let w = wood(NameMode::Encrypted);
    let make = |allowed: bool, name: &str| {
        if allowed {
            w.forest.vault(ROOT_VOLUME).unwrap().allow_datasets();
        }
        w.forest.make_dataset(ROOT, n(name), 0o755, me(), |backend, _| {
            write_header(&*backend.root(), b"half");
            Err(VaultError::NoData)
        })
    };
    assert!(matches!(make(false, "a"), Err(VaultError::Refused(_))));
    assert!(matches!(make(true, "a"), Err(VaultError::NoData)));
    assert!(matches!(w.forest.resolve(n("a")), Err(VaultError::NotFound)));
    assert_eq!(std::fs::read_dir(w.dir.path().join("lamassu.staging")).unwrap().count(), 0);
    w.put("f", b"");
    assert!(matches!(make(true, "f"), Err(VaultError::Exists)));
}

#[test]
fn a_dataset_whose_place_is_not_durable_is_taken_back() {
    let mut faults = None;
    let w = wood_over(NameMode::Encrypted, |backend| {
        let fault = Arc::new(FaultBackend::new(backend));
        faults = Some(fault.faults().clone());
        fault
    });
    let faults = faults.unwrap();
    let long = "l".repeat(250);
    w.plant("first", true);
    let before = || std::fs::read_dir(w.dir.path()).unwrap().count();
    let entries = before();
    // Of what comes after the dataset was moved to its place: that directory's barrier, and that its mode is set.
    for fails in [Call::SyncDir, Call::SetMode] {
        let stage = AtomicUsize::new(0);
        faults.rule(move |c| {
            let moved = c.call == Call::Rename && stage.compare_exchange(0, 1, Relaxed, Relaxed).is_ok();
            let hit = !moved && c.call == fails && stage.compare_exchange(1, 2, Relaxed, Relaxed).is_ok();
            hit.then_some(Fault::Errno(libc::EIO))
        });
        let made = w.forest.make_dataset(ROOT, n(&long), 0o755, me(), |backend, _| -> Result<()> {
            write_header(&*backend.root(), b"header");
            Ok(())
        });
        assert!(matches!(made, Err(VaultError::Io { .. })), "{made:?}");
        faults.clear_rules();
        assert!(matches!(w.forest.resolve(n(&long)), Err(VaultError::NotFound)));
        assert_eq!(before(), entries, "nothing is left, nor a companion");
        assert_eq!(std::fs::read_dir(w.dir.path().join("lamassu.staging")).unwrap().count(), 0);
    }
    w.plant(&long, true);
    w.put(&format!("{long}/f"), b"content");
    root_is_whole(&w);
}

/// Backends that have no such thing refuse, and say so.
#[test]
fn a_store_without_directories_of_its_own_has_no_datasets() {
    let backend: Arc<dyn Backend> = common::memory();
    assert!(backend.root().as_backend(true).is_err_and(|e| e.raw_os_error() == Some(libc::EOPNOTSUPP)));
}

#[test]
fn no_key_opens_what_is_open_or_lies_in_a_vault_that_is_not() {
    let w = wood(NameMode::Encrypted);
    let locked = volume_of(w.plant("locked", false));
    let material = Material::new(SlotKind::Raw, SecretBytes::new(vec![7; 32])).unwrap();
    let opening = || -> Result<Opening> {
        let header = w.forest.header(locked)?;
        let keys = lamassu_keys::unlock(&header, &material).unwrap();
        let ring = keys.key_ring(header.suite()).unwrap();
        Ok(Opening { header, ring, options: options(false), cached: true })
    };
    w.forest.unload(ROOT_VOLUME).unwrap();
    key_not_loaded(w.forest.load(locked, opening).map(drop));
    w.load_root();
    w.ino("locked");
    w.forest.load(locked, opening).unwrap();
    let asked = || -> Result<Opening> { panic!("its keys would be kept in the place of those that are in use") };
    assert!(matches!(w.forest.load(locked, asked).map(drop), Err(VaultError::Refused(_))));
    w.put("locked/f", b"content");
}

#[test]
fn what_gets_the_name_of_a_destroyed_one_stays() {
    let w = wood(NameMode::Encrypted);
    let kept = w.plant("a", true);
    w.put("a/f", b"kept");
    for _ in 0..40 {
        let free = if w.forest.resolve(n("a")).is_ok() { "b" } else { "a" };
        let gone = volume_of(w.plant(free, true));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    let _ = w.forest.rename(ROOT, n("a"), ROOT, n("b"), RenameMode::Exchange);
                }
            });
            // Under another name by then: asked again.
            while let Err(error) = w.forest.destroy(gone, true) {
                assert!(matches!(error, VaultError::NotFound), "{error:?}");
            }
            done.store(true, Relaxed);
        });
        let left = ["a", "b"].into_iter().find(|name| w.forest.resolve(n(name)).is_ok()).unwrap();
        assert_eq!((w.ino(left), w.get(&format!("{left}/f")).unwrap()), (kept, b"kept".to_vec()));
    }
}

#[test]
fn a_header_is_read_whole_while_it_is_replaced() {
    let w = wood(NameMode::Encrypted);
    let a = volume_of(w.plant("a", true));
    let path = w.dir.path().join(w.forest.stored_dir(a).unwrap()).join("lamassu.vault");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..500 {
                let update = lamassu_keys::Update::begin(&path).unwrap();
                let header: VaultHeader = update.read().unwrap();
                update.replace(&header).unwrap();
            }
            done.store(true, Relaxed);
        });
        while !done.load(Relaxed) {
            w.forest.header(a).unwrap();
        }
    });
}

/// Runs `f` as a user without privileges. Only its thread, and those made in it, change their user.
fn unprivileged(f: impl FnOnce() + Send) {
    const NOBODY: i64 = 65_534;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if rustix::process::geteuid().is_root() {
                // SAFETY: the system call, unlike the function of libc, concerns the calling thread alone, and no memory.
                let rc = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
                assert_eq!(rc, 0);
            }
            f();
        });
    });
}

fn shut(dir: &Path, mode: u32) {
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Mode and change time, which moves at the latest in a tick of the store's clock.
fn state_of(dir: &Path) -> (u32, i64, i64) {
    std::thread::sleep(Duration::from_millis(20));
    let st = dir.metadata().unwrap();
    (st.mode() & 0o7777, st.ctime(), st.ctime_nsec())
}

#[test]
fn a_shut_root_is_looked_into_once() {
    unprivileged(|| {
        let w = wood(NameMode::Encrypted);
        let path = w.stored(w.plant("a", true));
        shut(&path, 0);
        let forest = w.again(false);
        let known_by_now = || {
            let root = forest.lookup(ROOT, n("a")).unwrap().attr;
            assert_eq!((own_number(root.ino), root.mode), (ROOT, 0));
            let before = state_of(&path);
            assert_eq!(before.0, 0);
            forest.lookup(ROOT, n("a")).unwrap();
            assert_eq!(state_of(&path), before, "it is known");
            root.ino
        };
        let root = known_by_now();
        assert!(forest.at(root).unwrap().lookup(ROOT, n("f")).is_err(), "open, and shut");
        known_by_now();
        forest.setattr(root, None, &SetAttr { mode: Some(0o700), ..SetAttr::default() }).unwrap();
        assert!(matches!(forest.lookup(root, n("f")), Err(VaultError::NotFound)));
        forest.close().unwrap();
    });
}

#[test]
fn nothing_is_lent_where_nothing_may_be_written() {
    unprivileged(|| {
        let w = wood(NameMode::Encrypted);
        let (a, b) = (w.stored(w.plant("a", true)), w.stored(w.plant("b", true)));
        w.put("b/f", b"unlisted");
        shut(&a, 0);
        shut(&b, 0o300);
        let before = [state_of(&a), state_of(&b)];
        let forest = w.again(true);
        let found = forest.lookup(ROOT, n("a")).unwrap().attr;
        assert_eq!((volume_of(found.ino), found.mode), (ROOT_VOLUME, 0), "a directory that nobody enters");
        assert!(forest.lookup(found.ino, n("f")).is_err());
        let searched = forest.lookup(ROOT, n("b")).unwrap().attr.ino;
        assert_eq!(own_number(searched), ROOT);
        assert_eq!(forest.lookup(searched, n("f")).unwrap().attr.size, 8);
        forest.header(volume_of(searched)).unwrap();
        assert_eq!([state_of(&a), state_of(&b)], before);
        forest.close().unwrap();
        let forest = w.again(false);
        forest.freeze().unwrap();
        for name in ["a", "b"] {
            let refused = forest.lookup(ROOT, n(name)).map(drop);
            let busy =
                matches!(&refused, Err(VaultError::Io { source, .. }) if source.raw_os_error() == Some(libc::EBUSY));
            assert!(busy, "{refused:?}");
        }
        assert_eq!([state_of(&a), state_of(&b)], before);
        forest.thaw().unwrap();
        for name in ["a", "b"] {
            assert_eq!(own_number(forest.lookup(ROOT, n(name)).unwrap().attr.ino), ROOT);
        }
        forest.close().unwrap();
    });
}

#[test]
fn a_lent_mode_of_a_root_never_shows_and_undoes_no_chmod() {
    unprivileged(|| {
        let w = wood(NameMode::Encrypted);
        let a = w.plant("a", true);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Relaxed) {
                        assert_eq!(w.forest.lookup(ROOT, n("a")).unwrap().attr.ino, a);
                        w.forest.header(volume_of(a)).unwrap();
                    }
                });
            }
            let modes = [0, 0o040, 0o300, 0o500].into_iter().cycle().take(400);
            let shown = modes.map(|mode| {
                let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
                let shown = w.forest.setattr(a, None, &set).unwrap().mode;
                let seen = (0..10).all(|_| w.forest.getattr(a, None).unwrap().mode == mode);
                shown == mode && seen
            });
            let steady = shown.filter(|right| !right).count();
            done.store(true, Relaxed);
            assert_eq!(steady, 0, "times that another mode was seen than the one that was set");
        });
        w.forest.close().unwrap();
    });
}
