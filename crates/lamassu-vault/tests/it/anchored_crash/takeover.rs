//! A file that another host left open is taken over (rule R9 of `docs/sharing.md`), with a crash of host and store at
//! every step.

use super::*;
use lamassu_format::name::COMPANION_PREFIX;
use lamassu_store::BackendFile;
use lamassu_store::backend::FaultBackend;
use lamassu_store::backend::fault::{Call, Context, Fault, Faults};
use std::sync::atomic::{AtomicBool, Ordering};

const BLOCK: usize = 4096;
const NAMES: [&str; 2] = ["f", "d/g"];

fn write_block(v: &Vault, block: usize, fill: u8) -> HandleId {
    let handle = v.open_file(v.ino("f"), RW).unwrap();
    v.write(handle, (block * BLOCK) as u64, &[fill; BLOCK]).unwrap();
    handle
}

/// The first byte of each of three blocks, under both names, which lead to one file.
fn blocks(v: &Vault) -> Found<[u8; 3]> {
    let mut seen = Vec::new();
    for name in NAMES {
        let attr = v.find(name).map_err(|e| format!("{name}: {e}"))?.attr;
        let content = v.open_file(attr.ino, RO).and_then(|handle| {
            let mut bytes = vec![0; 4 * BLOCK];
            let read = v.read(handle, 0, &mut bytes)?;
            v.release(handle).map(|()| bytes[..read].to_vec())
        });
        let content = content.map_err(|e| format!("{name}: {e}"))?;
        is(content.len() == 3 * BLOCK, || format!("{name} has {} bytes", content.len()))?;
        let of = |block: usize| &content[block * BLOCK..][..BLOCK];
        is((0..3).all(|block| of(block).iter().all(|byte| *byte == of(block)[0])), || format!("{name} is torn"))?;
        seen.push((attr.ino, [0, 1, 2].map(|block| of(block)[0])));
    }
    is(seen[0] == seen[1], || format!("two names, two files: {seen:?}"))?;
    Ok(seen[0].1)
}

/// The file of the store that has so many names.
fn inode_of(root: &dyn BackendDir, links: u64) -> Arc<dyn BackendFile> {
    let names = root.read_dir().unwrap().into_iter().map(|entry| entry.name);
    let files = names.filter_map(|name| root.open_file(&name, true).ok());
    files.into_iter().find(|file| file.stat().unwrap().nlink == links).unwrap()
}

/// What a host leaves that is killed: a file with two names and `more`, with synced writes, and some that are not.
fn left_open_with(more: usize) -> (Recipe, MemoryBackend, MemoryTable) {
    left_open(|v| {
        v.dir("d");
        v.link(v.ino("f"), v.ino("d"), n("g")).unwrap();
        v.set_xattr(v.ino("f"), n("user.said"), b"of the file", SetXattr::Any).unwrap();
        for number in 0..more {
            v.link(v.ino("f"), v.ino("d"), n(&format!("more{number}"))).unwrap();
        }
    })
}

fn left_open(prepare: impl Fn(&Vault)) -> (Recipe, MemoryBackend, MemoryTable) {
    let recipe = Recipe::default();
    let crash = Arc::new(CrashBackend::with_granularity(recipe.block_size.into()));
    let watched = Watched::served(MemoryTable::default(), &crash);
    let (_, v) = Lab::over(recipe, crash.clone(), watched.clone());
    let handle = v.new_file("f").1;
    v.write(handle, 0, &[1; 3 * BLOCK]).unwrap();
    prepare(&v);
    v.sync_all().unwrap();
    v.fsync(write_block(&v, 0, 2), false).unwrap();
    v.flush(write_block(&v, 1, 3)).unwrap();
    std::mem::forget(v);
    let log = crash.log();
    let left = CrashSim::new(log.clone()).prefix(log.records().len());
    (recipe, left, watched.table.clone())
}

#[test]
fn a_takeover_survives_a_crash_at_every_step() {
    let (recipe, left, table) = left_open_with(0);
    let crash = Arc::new(CrashBackend::over(&left, recipe.block_size.into()));
    let watched = Watched::served(table, &crash);
    watched.states.lock().push((0, watched.table.clone()));
    let (backend, table): (Arc<dyn Backend>, Arc<dyn Table>) = (crash.clone(), watched.clone());
    let v = open_anchored(&recipe, &backend, &table, false).unwrap();
    let begun = crash.position();
    let old = inode_of(&*backend.root(), 2);
    v.maintain().unwrap();
    let taken_over = crash.position();
    // What the killed host had sent comes late: to an inode that has durably lost its names.
    old.write_at(0, &vec![0xaa; old.stat().unwrap().len as usize]).unwrap();
    assert_eq!(blocks(&v).unwrap(), [2, 3, 1]);
    let inode = v.ino("f");
    v.fsync(write_block(&v, 2, 4), false).unwrap();
    let synced = crash.position();
    v.sync_all().unwrap();
    assert_eq!(v.ino("f"), inode);
    std::mem::forget(v);
    assert!(taken_over > begun + 5, "the file was copied");
    let run = Run {
        crash,
        watched,
        lab: Lab { recipe, backend, table },
        states: Vec::new(),
        synced: Vec::new(),
        always: Vec::new(),
    };
    let sim = CrashSim::new(run.crash.log());
    let mut count = 0;
    for (at, left) in all_of(&sim, begun) {
        for table in run.anchors(at) {
            let mut stores = vec![left.snapshot(), sim.at(at).least_state()];
            stores.extend((0..8).map(|seed| sim.at(at).random_state(seed)));
            for store in stores {
                let _told = Told(format!("record {at}, taken over at {taken_over}, synced at {synced}"));
                survives(&run, store, table.clone(), at >= synced);
                count += 1;
            }
        }
    }
    assert!(count > 300, "{count}");
}

/// The next host sees what was synced, and takes over what is still left open.
fn survives(run: &Run, store: MemoryBackend, table: MemoryTable, is_synced: bool) {
    let crash = Arc::new(CrashBackend::over(&store, run.lab.recipe.block_size.into()));
    let (backend, table): (Arc<dyn Backend>, Arc<dyn Table>) = (crash.clone(), Watched::served(table, &crash));
    run.look(&backend, &table).unwrap();
    let v = open_anchored(&run.lab.recipe, &backend, &table, false).unwrap();
    let now = blocks(&v).unwrap();
    assert!(now[0] == 2 && matches!(now[1], 1 | 3) && matches!(now[2], 1 | 4), "{now:?}");
    assert!(now[2] == 4 || !is_synced, "{now:?}, and the last block was acknowledged");
    v.maintain().unwrap();
    assert_eq!(blocks(&v).unwrap(), now);
    let said = v.get_xattr(v.ino("d/g"), n("user.said")).unwrap();
    assert_eq!(said, b"of the file");
    v.close().unwrap();
    let v = open_anchored(&run.lab.recipe, &backend, &table, false).unwrap();
    assert_eq!((blocks(&v).unwrap(), v.find("f").unwrap().attr.nlink), (now, 2));
    v.clean();
    v.close().unwrap();
    let root = backend.root();
    let staging = root.open_dir(n("lamassu.staging")).unwrap();
    assert!(staging.read_dir().unwrap().is_empty(), "nothing is left of the copy");
}

/// A vault over a store and an anchor, as the next host opens it.
fn next_host(recipe: &Recipe, left: &MemoryBackend, table: &MemoryTable) -> (Vault, Arc<dyn Backend>) {
    let crash = Arc::new(CrashBackend::over(left, recipe.block_size.into()));
    let (backend, table): (Arc<dyn Backend>, Arc<dyn Table>) = (crash.clone(), Watched::served(table.clone(), &crash));
    (open_anchored(recipe, &backend, &table, false).unwrap(), backend)
}

/// The inode of a path of a vault in the store.
fn stored_number(v: &Vault, backend: &dyn Backend, path: &str) -> u64 {
    let stored = v.stored_path(n(path)).unwrap();
    let mut dir = backend.root();
    for name in stored.parent().unwrap().components() {
        dir = dir.open_dir(name.as_os_str()).unwrap();
    }
    dir.stat_entry(stored.file_name().unwrap()).unwrap().ino
}

/// Names of one directory are found by one listing. A file with very many keeps its inode: hosts would wait too long.
#[test]
fn all_names_are_taken_over_or_none() {
    for (more, is_copied) in [(100, true), (300, false)] {
        let (recipe, left, table) = left_open_with(more);
        let (v, backend) = next_host(&recipe, &left, &table);
        let before = inode_of(&*backend.root(), 2 + more as u64).stat().unwrap().ino;
        v.maintain().unwrap();
        assert_eq!(blocks(&v).unwrap(), [2, 3, 1]);
        let number = stored_number(&v, &*backend, "f");
        assert_eq!(number != before, is_copied, "{more}");
        for name in (0..more).map(|number| format!("d/more{number}")) {
            assert_eq!(stored_number(&v, &*backend, &name), number);
        }
        v.sync_all().unwrap();
        v.clean();
        v.close().unwrap();
    }
}

/// The store has put an earlier state under one name. That is not what all names get.
#[test]
fn a_name_that_the_store_has_exchanged_spoils_no_other() {
    for first in NAMES {
        let (recipe, left, table) = left_open_with(0);
        let (v, backend) = next_host(&recipe, &left, &table);
        let stored = v.stored_path(n("d/g")).unwrap();
        let (dir, name) = (stored.parent().unwrap().as_os_str(), stored.file_name().unwrap());
        let dir = backend.root().open_dir(dir).unwrap();
        let (good, old) = (dir.open_file(name, false).unwrap(), dir.create_file(n("old")).unwrap());
        let len = good.stat().unwrap().len;
        old.copy_from(&*good, 0, 0, len).unwrap();
        // A page of it is another one than before.
        old.write_at(len - 100, &[0xaa; 100]).unwrap();
        dir.rename(n("old"), &*dir, name, RenameMode::Replace).unwrap();
        let open = |name: &str| v.open_file(v.ino(name), RO).and_then(|handle| v.release(handle));
        assert_eq!(open(first).is_ok(), first == "f");
        v.maintain().unwrap();
        let handle = v.open_file(v.ino("f"), RO).unwrap();
        let mut bytes = [0; 3 * BLOCK];
        assert_eq!(v.read(handle, 0, &mut bytes).unwrap(), bytes.len(), "{first}");
        assert_eq!([bytes[0], bytes[BLOCK], bytes[2 * BLOCK]], [2, 3, 1]);
    }
}

/// The next host, over a store that can be made to fail.
struct Faulty {
    recipe: Recipe,
    store: Arc<MemoryBackend>,
    fault: Arc<FaultBackend>,
    table: Arc<dyn Table>,
}

impl Faulty {
    fn over(recipe: Recipe, left: &MemoryBackend, table: &MemoryTable) -> Faulty {
        let store = Arc::new(left.snapshot());
        let crash = Arc::new(CrashBackend::over(left, recipe.block_size.into()));
        let fault = Arc::new(FaultBackend::new(store.clone()));
        Faulty { recipe, store, fault, table: Watched::served(table.clone(), &crash) }
    }

    fn open(&self) -> Vault {
        let backend: Arc<dyn Backend> = self.fault.clone();
        open_anchored(&self.recipe, &backend, &self.table, false).unwrap()
    }

    fn faults(&self) -> &Faults {
        self.fault.faults()
    }

    /// The host is killed: its store, for the next one.
    fn killed(self, v: Vault) -> Faulty {
        std::mem::forget(v);
        let store = Arc::new(self.store.snapshot());
        Faulty { fault: Arc::new(FaultBackend::new(store.clone())), store, ..self }
    }
}

/// The copy's name that is moved to the name of so high a number.
fn is_of_copy(call: &Context<'_>, number: usize) -> bool {
    call.name.is_some_and(|name| *name == *format!("{COMPANION_PREFIX}{number}"))
}

/// Each change of the takeover fails once. Some fail after the copy has got the name of the file: what is written
/// afterwards must not go to the old inode, which has none.
#[test]
fn a_takeover_that_fails_half_way_loses_no_later_write() {
    for call in [Call::SetTimes, Call::Rename, Call::SyncStore, Call::DirStat] {
        for nth in 1..=6 {
            let (recipe, left, table) = left_open(|_| {});
            let lab = Faulty::over(recipe, &left, &table);
            let v = lab.open();
            lab.faults().fail_nth(call, nth, libc::EIO);
            let _ = v.maintain();
            lab.faults().clear_rules();
            let handle = write_block(&v, 2, 7);
            v.fsync(handle, false).unwrap();
            v.release(handle).unwrap();
            v.close().unwrap();
            drop(v);
            let v = lab.open();
            assert_eq!(v.get("f")[2 * BLOCK..], [7; BLOCK], "{call:?} {nth}");
            v.clean();
        }
    }
}

/// A takeover that was cut off between two names is not given up because the store is full for the next host.
#[test]
fn a_takeover_that_was_cut_off_is_not_given_up() {
    let (recipe, left, table) = left_open_with(0);
    let lab = Faulty::over(recipe, &left, &table);
    let v = lab.open();
    lab.faults().rule(|call| (call.call == Call::Rename && is_of_copy(call, 2)).then_some(Fault::Errno(libc::EIO)));
    v.maintain().unwrap();
    let lab = lab.killed(v);
    let v = lab.open();
    let is_full = |call: &Context<'_>| call.call == Call::CreateFile && is_of_copy(call, 1);
    lab.faults().rule(move |call| is_full(call).then_some(Fault::Errno(libc::ENOSPC)));
    v.maintain().unwrap();
    v.sync_all().unwrap();
    let lab = lab.killed(v);
    let v = lab.open();
    assert_eq!(blocks(&v).unwrap(), [2, 3, 1]);
    v.sync_all().unwrap();
    v.clean();
    v.close().unwrap();
}

/// It is completed by whoever makes the file shorter, as by an open.
#[test]
fn a_takeover_that_was_cut_off_is_completed_by_a_truncation() {
    let (recipe, left, table) = left_open_with(0);
    let lab = Faulty::over(recipe, &left, &table);
    let v = lab.open();
    lab.faults().rule(|call| (call.call == Call::Rename && is_of_copy(call, 2)).then_some(Fault::Errno(libc::EIO)));
    v.maintain().unwrap();
    let lab = lab.killed(v);
    let v = lab.open();
    assert_eq!(v.ino("f"), v.ino("d/g"));
    assert_ne!(stored_number(&v, &*lab.store, "f"), stored_number(&v, &*lab.store, "d/g"));
    let size = Some(BLOCK as u64);
    let set = SetAttr { size, mode: Some(0o600), mtime: Some(SetTime::At(LONG_AGO)), ..SetAttr::default() };
    v.setattr(v.ino("f"), None, &set).unwrap();
    for name in NAMES {
        let attr = v.find(name).unwrap().attr;
        assert_eq!((attr.size, attr.mode & 0o7777, attr.mtime), (BLOCK as u64, 0o600, LONG_AGO), "{name}");
    }
    assert_eq!(stored_number(&v, &*lab.store, "f"), stored_number(&v, &*lab.store, "d/g"));
    v.close().unwrap();
}

/// A freeze begins while the file is being opened for a change. It waits for that, and the file is taken over.
#[test]
fn a_takeover_is_made_although_a_freeze_waits() {
    let (recipe, left, table) = left_open_with(0);
    let lab = Faulty::over(recipe, &left, &table);
    let v = Arc::new(lab.open());
    let before = stored_number(&v, &*lab.store, "f");
    let ino = v.ino("f");
    let (frozen, freezes) = (v.clone(), AtomicBool::new(false));
    lab.faults().rule(move |call| {
        if call.call == Call::OpenFile && !freezes.swap(true, Ordering::Relaxed) {
            let v = frozen.clone();
            std::thread::spawn(move || v.freeze());
            while !frozen.is_frozen() {
                std::thread::yield_now();
            }
        }
        None
    });
    let handle = v.open_file(ino, RW).unwrap();
    lab.faults().clear_rules();
    v.freeze().unwrap(); // waits for the other
    assert_ne!(stored_number(&v, &*lab.store, "f"), before);
    v.thaw().unwrap();
    v.write(handle, 0, &[9; BLOCK]).unwrap();
    v.fsync(handle, false).unwrap();
    assert_eq!(blocks(&v).unwrap(), [9, 3, 1]);
}

/// What is set of the file while it is copied, and before the copy is in use, is set of the copy: by who has it open
/// for reading, and by who has not.
#[test]
fn what_is_set_of_a_file_while_it_is_taken_over_is_kept() {
    for (is_open, is_placed) in [(false, false), (false, true), (true, false), (true, true)] {
        let (recipe, left, table) = left_open(|v| {
            v.link(v.ino("f"), v.dir("d"), n("g")).unwrap();
            set_of(v, "user.stays", b"as it is");
            set_of(v, "user.changes", b"before");
            set_of(v, "user.goes", b"before");
        });
        let lab = Faulty::over(recipe, &left, &table);
        let v = Arc::new(lab.open());
        let before = stored_number(&v, &*lab.store, "f");
        let ino = v.ino("f");
        // Whoever opens it for reading takes it over, too, unless the vault is frozen.
        v.freeze().unwrap();
        let reading = is_open.then(|| v.open_file(ino, RO).unwrap());
        v.thaw().unwrap();
        let (setting, has_set, is_given) = (v.clone(), AtomicBool::new(false), AtomicBool::new(false));
        lab.faults().rule(move |call| {
            let is_now = match is_placed {
                false => call.call == Call::SyncAll,
                true => call.call == Call::Read && is_given.load(Ordering::Relaxed),
            };
            if call.call == Call::Rename && is_of_copy(call, 2) {
                is_given.store(true, Ordering::Relaxed);
            }
            if is_now && !has_set.swap(true, Ordering::Relaxed) {
                let v = setting.clone();
                std::thread::spawn(move || set_all(&v)).join().unwrap();
            }
            None
        });
        let handle = v.open_file(ino, RW).unwrap();
        lab.faults().clear_rules();
        let what = format!("open: {is_open}, has its names: {is_placed}");
        assert_ne!(stored_number(&v, &*lab.store, "f"), before, "{what}");
        is_set(&v, &what);
        v.release(handle).unwrap();
        is_set(&v, &what);
        reading.into_iter().for_each(|reading| v.release(reading).unwrap());
        v.close().unwrap();
        drop(v);
        let v = lab.open();
        is_set(&v, &what);
        v.release(v.open_file(v.ino("f"), RW).unwrap()).unwrap();
        v.clean();
        v.close().unwrap();
    }
}

/// An owner that only root can give.
fn other_owner() -> u32 {
    if me().uid == 0 { 7 } else { me().uid }
}

const LONG_AGO: Time = Time { seconds: 1_000_000, nanos: 5 };

fn set_of(v: &Vault, name: &str, value: &[u8]) {
    v.set_xattr(v.ino("f"), n(name), value, SetXattr::Any).unwrap();
}

fn set_all(v: &Vault) {
    let f = v.ino("f");
    set_of(v, "user.changes", b"since");
    set_of(v, "user.comes", b"since");
    v.remove_xattr(f, n("user.goes")).unwrap();
    let uid = Some(other_owner());
    let mode = Some(0o440);
    v.setattr(f, None, &SetAttr { uid, mode, mtime: Some(SetTime::At(LONG_AGO)), ..SetAttr::default() }).unwrap();
}

#[track_caller]
fn is_set(v: &Vault, what: &str) {
    let f = v.ino("f");
    let values = ["user.stays", "user.changes", "user.comes"].map(|name| v.get_xattr(f, n(name)).unwrap());
    assert_eq!(values, [b"as it is".to_vec(), b"since".to_vec(), b"since".to_vec()], "{what}");
    let gone = v.get_xattr(f, n("user.goes"));
    assert!(matches!(gone, Err(VaultError::NoAttribute)), "{what}: {gone:?}");
    let attr = v.getattr(f, None).unwrap();
    assert_eq!((attr.uid, attr.mode & 0o7777, attr.mtime), (other_owner(), 0o440, LONG_AGO), "{what}");
    assert_eq!(blocks(v).unwrap(), [2, 3, 1], "{what}");
}

/// While the file is copied it gets another name. The copy has one too few, and another is made.
#[test]
fn a_file_that_gets_another_name_meanwhile_is_taken_over_all_the_same() {
    let (recipe, left, table) = left_open(|_| {});
    let lab = Faulty::over(recipe, &left, &table);
    let v = Arc::new(lab.open());
    let before = stored_number(&v, &*lab.store, "f");
    let ino = v.ino("f");
    let (linking, has_linked) = (v.clone(), AtomicBool::new(false));
    lab.faults().rule(move |call| {
        if call.call == Call::SyncAll && !has_linked.swap(true, Ordering::Relaxed) {
            let v = linking.clone();
            std::thread::spawn(move || v.link(ino, ROOT, n("second")).unwrap()).join().unwrap();
        }
        None
    });
    let handle = v.open_file(ino, RW).unwrap();
    lab.faults().clear_rules();
    let after = stored_number(&v, &*lab.store, "f");
    assert_ne!(after, before);
    assert_eq!(stored_number(&v, &*lab.store, "second"), after);
    v.write(handle, 0, &[9; BLOCK]).unwrap();
    v.fsync(handle, false).unwrap();
    for name in ["f", "second"] {
        assert_eq!(v.get(name)[..BLOCK], [9; BLOCK]);
    }
    v.release(handle).unwrap();
    v.close().unwrap();
}

/// The next host gives the file another name, and forgets it, before it takes the file over: no commit has that name.
#[test]
fn a_name_that_was_just_made_and_forgotten_is_taken_over_too() {
    let (recipe, left, table) = left_open(|_| {});
    let (v, backend) = next_host(&recipe, &left, &table);
    let (ino, before) = (v.ino("f"), stored_number(&v, &*backend, "f"));
    v.link(ino, v.dir("d"), n("g")).unwrap();
    v.forget(ino, u64::MAX);
    let handle = v.open_file(v.ino("f"), RW).unwrap();
    let after = stored_number(&v, &*backend, "f");
    assert_ne!(after, before);
    assert_eq!(stored_number(&v, &*backend, "d/g"), after);
    assert_eq!(blocks(&v).unwrap(), [2, 3, 1]);
    v.release(handle).unwrap();
    v.clean();
    v.close().unwrap();
}
