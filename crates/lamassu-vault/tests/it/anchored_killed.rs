//! An anchored vault whose process was killed (`docs/freshness.md`, sections 4 and 5): what check and scrub say of what
//! it left, what the store can still choose, and what the next writer puts right.
use crate::common;

use common::anchored::*;
use common::*;
use lamassu_anchor::table::MemoryTable;
use lamassu_store::Backend;
use lamassu_store::backend::MemoryBackend;
use lamassu_vault::event::{Events, FoundBy, IntegrityEvent, IntegritySink};
use lamassu_vault::*;
use parking_lot::Mutex;
use std::sync::Arc;

#[test]
fn a_removal_that_the_anchor_knows_is_carried_out_by_the_next_writer() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let store = Arc::new(MemoryBackend::new());
        let (lab, v) = Lab::over(recipe, store.clone(), Arc::new(MemoryTable::default()));
        v.new_file("f");
        v.dir("d");
        v.new_file("d/x");
        v.sync_all().unwrap();
        let before = store.root().read_dir().unwrap().len();
        for path in ["f", "d/x"] {
            rm(&v, path).unwrap();
        }
        rmdir(&v, "d").unwrap();
        let handle = v.open_dir(ROOT).unwrap();
        v.fsync_dir(handle).unwrap();
        std::mem::forget(v);
        let lab = Lab { backend: Arc::new(store.snapshot()), ..lab };
        let root = lab.backend.root();
        assert_eq!(root.read_dir().unwrap().len(), before, "the store has it all");
        let v = lab.open();
        assert_eq!(listed(&v, ""), (vec![], false));
        v.close().unwrap();
        assert_eq!(lab.intents(), 0);
        assert_eq!(root.read_dir().unwrap().len(), before - 2);
        assert!(root.open_dir(n("lamassu.lost")).is_err(), "what was removed is not kept");
    }
}

/// Of what was moved and then removed nothing is recorded. What was made in its old place since is not taken for it: it
/// is nobody's that the move is done for again.
#[test]
fn what_was_made_where_something_was_moved_from_is_not_taken_for_that() {
    for is_dir_gone in [true, false] {
        let store = Arc::new(MemoryBackend::new());
        let (lab, v) = Lab::over(Recipe::default(), store.clone(), Arc::new(MemoryTable::default()));
        v.dir("d");
        v.new_file("x");
        v.put("f", b"old");
        v.sync_all().unwrap();
        mv(&v, "f", "d/f", RenameMode::Replace).unwrap();
        rm(&v, "d/f").unwrap();
        if is_dir_gone {
            rmdir(&v, "d").unwrap();
        }
        v.fsync_dir(v.open_dir(ROOT).unwrap()).unwrap();
        if !is_dir_gone {
            v.fsync_dir(v.open_dir(v.ino("d")).unwrap()).unwrap();
        }
        // Has the store carry out what is removed.
        rm(&v, "x").unwrap();
        v.new_file("x");
        v.put("f", b"new");
        assert!(lab.intents() > 1, "the move is not settled yet");
        std::mem::forget(v);
        let lab = Lab { backend: Arc::new(store.snapshot()), ..lab };
        let v = lab.open();
        assert_eq!(lab.intents(), 0, "all is put right");
        let left = if is_dir_gone { vec![] } else { vec!["d".to_owned()] };
        assert_eq!(listed(&v, ""), (left, false));
        v.close().unwrap();
        let lost = lab.backend.root().open_dir(n("lamassu.lost")).unwrap().read_dir().unwrap();
        assert_eq!(lost.len(), 1, "what nobody synced is kept");
        assert_eq!(lab.checked(), [""; 0]);
    }
}

#[test]
fn what_a_writer_is_making_is_unfinished_until_a_repair_after_a_crash() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let store = Arc::new(MemoryBackend::new());
        let (lab, v) = Lab::over(recipe, store.clone(), Arc::new(MemoryTable::default()));
        v.dir("old");
        v.close().unwrap();
        assert_eq!(lab.scrubbed(), (vec![], 0));
        // No page is written, so that no session begins.
        let v = lab.open();
        v.dir("new");
        v.dir("old/deep");
        assert_eq!(lab.scrubbed(), (vec![], 2), "beside the writer");
        std::mem::forget(v);
        let lab = Lab { backend: Arc::new(store.snapshot()), ..lab };
        assert_eq!(lab.scrubbed(), (vec![], 2), "after the crash");
        let report = lab.read_only().check(&[], false, &Quiet).unwrap();
        assert!(report.problems.iter().all(|p| p.harmless), "{:?}", report.problems);
        // A mount that looks nowhere leaves them, and does not say that all is over.
        let v = lab.open();
        v.close().unwrap();
        assert_eq!(lab.scrubbed(), (vec![], 2), "after a mount");
        let v = lab.open();
        v.check(&[], true, &Quiet).unwrap();
        v.close().unwrap();
        assert_eq!(lab.scrubbed(), (vec![], 0), "after a repair");
        assert!(lab.read_only().check(&[], false, &Quiet).unwrap().problems.is_empty());
        if lab.recipe.names == lamassu_format::header::NameMode::Plain {
            lab.backend.root().make_dir(n("evil"), 0o700).unwrap();
            assert_eq!(lab.scrubbed(), (vec!["the anchor knows no such entry".to_owned()], 0));
        }
    }
}

#[test]
fn the_store_chooses_once_what_a_crash_has_left() {
    let store = Arc::new(MemoryBackend::new());
    let (lab, v) = Lab::over(Recipe::plain(), store.clone(), Arc::new(MemoryTable::default()));
    let (len, block) = (50_000, 9_000);
    let handle = v.new_file("f").1;
    v.write(handle, 0, &vec![b'A'; len]).unwrap();
    v.close().unwrap();
    let stored = |backend: &Arc<dyn Backend>| {
        let root = backend.root();
        let st = root.stat_entry(n("f")).unwrap();
        root.open_same(n("f"), &st, true).unwrap().unwrap()
    };
    let mut older = vec![0; 1 << 20];
    let older_len = stored(&lab.backend).read_at(0, &mut older).unwrap();
    older.truncate(older_len);
    let read = |v: &Vault| {
        let handle = v.open_file(v.ino("f"), RO)?;
        let mut bytes = vec![0; block];
        v.read(handle, 0, &mut bytes).map(|_| bytes[0])
    };
    let v = lab.open();
    let handle = v.open_file(v.ino("f"), RW).unwrap();
    v.write(handle, 0, &vec![b'B'; block]).unwrap();
    v.flush(handle).unwrap();
    std::mem::forget(v);
    let second = Arc::new(store.snapshot());
    let lab = Lab { backend: second.clone(), ..lab };
    let v = lab.open();
    assert_eq!(read(&v).unwrap(), b'B');
    std::mem::forget(v);
    let lab = Lab { backend: Arc::new(second.snapshot()), ..lab };
    stored(&lab.backend).write_at(0, &older).unwrap();
    let found = read(&lab.open()).expect_err("what was put back is refused");
    assert!(found.to_string().contains("stale"), "{found}");
}

/// A copy with the same keys and file ids, whose first session began in the same second.
#[test]
fn pages_of_a_copy_are_not_taken_after_a_crash() {
    let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(MemoryTable::default()));
    let (lab, v) = Lab::over(Recipe::plain(), store.clone(), table.clone());
    let (_, handle) = v.new_file("f");
    v.write(handle, 0, &vec![b'A'; 3 << 20]).unwrap();
    v.close().unwrap();
    let open = |root: Arc<dyn lamassu_store::BackendDir>| {
        let st = root.stat_entry(n("f")).unwrap();
        root.open_same(n("f"), &st, true).unwrap().unwrap()
    };
    let change = |v: &Vault, byte: u8| {
        let handle = v.open_file(v.ino("f"), RW).unwrap();
        v.write(handle, 0, &[byte; 5]).unwrap();
        v.fsync(handle, false).unwrap();
    };
    // A second may end in between.
    for _ in 0..5 {
        let (of_original, of_copy) = (Arc::new(store.snapshot()), Arc::new(store.snapshot()));
        let lab_of = |backend: &Arc<MemoryBackend>| Lab {
            recipe: lab.recipe,
            backend: backend.clone(),
            table: Arc::new((*table).clone()),
        };
        let (original, copy) = (lab_of(&of_original), lab_of(&of_copy));
        let (v, w) = (original.open(), copy.open());
        change(&v, b'O');
        (0..6).for_each(|_| change(&w, b'C'));
        let session = |lab: &Lab| common::anchored::anchor(&lab.recipe, &lab.table).vault().sessions;
        let is_same = session(&original) == session(&copy);
        std::mem::forget((v, w));
        if !is_same {
            continue;
        }
        let crashed = Arc::new(of_original.snapshot());
        let mut bytes = vec![0; 4 << 20];
        let len = open(of_copy.root()).read_at(0, &mut bytes).unwrap();
        open(crashed.root()).write_at(0, &bytes[..len]).unwrap();
        let v = Lab { backend: crashed, ..original }.open();
        let handle = v.open_file(v.ino("f"), RO).unwrap();
        let found = v.read(handle, 0, &mut [0; 5]);
        assert!(found.is_err(), "{found:?}");
        return;
    }
    panic!("two sessions never began in the same second");
}

/// A vault whose process was killed after the anchor had learnt of a rename, before the store did it. The store may
/// have changed something since.
fn killed_before_a_rename(recipe: Recipe, to_is_taken: bool, attack: impl FnOnce(&Lab, &Vault)) -> Lab {
    let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(MemoryTable::default()));
    let (lab, v) = Lab::over(recipe, store.clone(), table);
    v.dir("d");
    v.put("from", &vec![b'A'; 200_000]);
    if to_is_taken {
        v.put("d/to", b"replaced");
    }
    v.close().unwrap();
    let v = lab.open();
    let before = Lab { backend: Arc::new(store.snapshot()), recipe: lab.recipe, table: lab.table.clone() };
    attack(&before, &v);
    mv(&v, "from", "d/to", RenameMode::Replace).unwrap();
    std::mem::forget(v);
    before
}

#[test]
fn a_check_verifies_what_an_interrupted_rename_has_yet_to_move() {
    for (recipe, to_is_taken) in
        [Recipe::default(), Recipe::plain()].into_iter().flat_map(|recipe| [(recipe, false), (recipe, true)])
    {
        let lab = killed_before_a_rename(recipe, to_is_taken, |_, _| {});
        let harmless = vec!["(missing)"; 2];
        assert_eq!(lab.checked(), harmless, "nothing but the rename is open");
        assert_eq!(lab.open().get("d/to"), vec![b'A'; 200_000]);

        let is_told = |lab: &Lab| lab.checked().iter().any(|kind| !kind.starts_with('('));
        for page in [0, 1] {
            let lab = killed_before_a_rename(recipe, to_is_taken, |lab, v| {
                let (dir, name) = lab.stored(v, "from");
                let st = dir.stat_entry(&name).unwrap();
                let stored = dir.open_same(&name, &st, true).unwrap().unwrap();
                stored.write_at(page * 4096, &[7; 4096]).unwrap();
            });
            assert!(is_told(&lab), "page {page}: {:?}", lab.checked());
        }

        let lab = killed_before_a_rename(recipe, to_is_taken, |lab, v| {
            let (dir, name) = lab.stored(v, "from");
            dir.unlink(&name).unwrap();
        });
        assert!(is_told(&lab), "{:?}", lab.checked());
    }
}

#[test]
fn a_shrink_that_was_synced_is_not_told_as_undone() {
    for (size, is_synced) in [(100, true), (600_000, true), (700_001, true), (600_000, false)] {
        let store = Arc::new(MemoryBackend::new());
        let (lab, v) = Lab::over(Recipe::default(), store.clone(), Arc::new(MemoryTable::default()));
        let (entry, handle) = v.new_file("sparse");
        v.write(handle, 0, &[1; 5000]).unwrap();
        v.write(handle, 2_000_000, &[2; 5000]).unwrap();
        v.fsync(handle, false).unwrap();
        v.setattr(entry.attr.ino, Some(handle), &SetAttr { size: Some(size), ..SetAttr::default() }).unwrap();
        if is_synced {
            v.fsync(handle, false).unwrap();
        }
        std::mem::forget(v);
        let lab = Lab { backend: Arc::new(store.snapshot()), ..lab };
        let told = if is_synced { vec![] } else { vec!["shortened"] };
        assert_eq!(lab.checked(), told, "{size}");
        assert_eq!(lab.open().get("sparse").len() as u64, size);
    }
}

/// What lies in the old place of a rename is not taken for what was renamed, although nobody has synced either.
#[test]
fn a_name_that_was_made_again_after_a_rename_is_not_what_was_renamed() {
    type Again = fn(&Vault);
    let again: [Again; 5] = [
        |v| _ = v.new_file("b"),
        |v| v.put("b", &[9; 5000]),
        |v| v.put("b", &[9; 300_000]),
        |v| link_to(v, "b", "elsewhere"),
        |v| {
            v.put("c", &[9; 100]);
            mv(v, "c", "b", RenameMode::Replace).unwrap();
        },
    ];
    for (recipe, len, target) in
        [(Recipe::default(), 5000, "old"), (Recipe::plain(), 5000, ""), (Recipe::default(), 400_000, "old")]
    {
        for (which, again) in again.into_iter().enumerate() {
            let store = Arc::new(MemoryBackend::new());
            let (lab, v) = Lab::over(recipe, store.clone(), Arc::new(MemoryTable::default()));
            v.put("a", target.as_bytes());
            v.sync_all().unwrap();
            v.put("b", &vec![b'X'; len]);
            mv(&v, "b", "a", RenameMode::Replace).unwrap();
            again(&v);
            std::mem::forget(v);
            let lab = Lab { backend: Arc::new(store.snapshot()), ..lab };
            assert!(lab.checked().iter().all(|kind| kind.starts_with('(')), "{which}, {len}: {:?}", lab.checked());
            assert_eq!(lab.scrubbed().0, Vec::<String>::new());
            let v = lab.open();
            assert!(v.get("a") == vec![b'X'; len], "{which}, {len}");
            v.put("a", b"newer");
            v.close().unwrap();
            assert_eq!(lab.open().get("a"), b"newer");
        }
    }
}

/// Nobody has synced what was being made: that is no alarm, whether it lies there or was put back.
#[test]
fn what_a_kill_leaves_unrecorded_is_no_damage() {
    #[derive(Default)]
    struct Kept(Mutex<Vec<IntegrityEvent>>);
    impl IntegritySink for Kept {
        fn deliver(&self, events: &[IntegrityEvent], _lost: u64) {
            self.0.lock().extend_from_slice(events);
        }
    }
    let store = Arc::new(MemoryBackend::new());
    let (lab, v) = Lab::over(Recipe::default(), store.clone(), Arc::new(MemoryTable::default()));
    v.put("synced", b"s");
    v.sync_all().unwrap();
    (0..5).for_each(|n| v.put(&format!("{n}"), b"new"));
    std::mem::forget(v);
    let lab = Lab { backend: Arc::new(store.snapshot()), ..lab };
    let kept = Arc::new(Kept::default());
    let events = Events::with_sink(kept.clone()).unwrap();
    let anchor = common::anchored::anchor(&lab.recipe, &lab.table);
    let options = Options { anchor: Some(anchor), events: events.clone(), ..options(false) };
    let v = Vault::open(lab.backend.clone(), &lab.recipe.header(), lab.recipe.ring(), options).unwrap();
    assert_eq!(listed(&v, ""), (vec!["synced".to_owned()], false));
    events.end(std::time::Duration::from_secs(60));
    let kept = kept.0.lock();
    assert_eq!(kept.len(), 5);
    let is_calm = |event: &IntegrityEvent| !event.is_damage && event.found_by == FoundBy::Recovery;
    assert!(kept.iter().all(is_calm), "{kept:?}");
}

/// A file is changed while the anchor has its new name, or the removal of its only one, in the queue alone.
#[test]
fn a_file_that_is_changed_behind_a_link_or_an_unlink_is_no_false_alarm() {
    type Change = fn(&Vault, Ino, HandleId);
    let queued: [fn(&Vault); 3] = [
        |v| assert!(v.link(v.ino("f"), ROOT, n("g")).is_ok()),
        |v| rm(v, "f").unwrap(),
        |v| {
            v.link(v.ino("f"), ROOT, n("g")).unwrap();
            rm(v, "f").unwrap();
        },
    ];
    let changes: [Change; 3] = [
        |v, ino, _| v.set_xattr(ino, n("user.note"), b"newer", SetXattr::Any).unwrap(),
        |v, _, handle| assert_eq!(v.write(handle, 0, b"b").unwrap(), 1),
        |v, _, handle| assert_eq!(v.write(handle, 900_000, &[7; 9000]).unwrap(), 9000),
    ];
    for (recipe, len) in [(Recipe::default(), 100), (Recipe::plain(), 100), (Recipe::default(), 1_000_000)] {
        for (which, (queue, change)) in
            queued.into_iter().flat_map(|queue| changes.map(|change| (queue, change))).enumerate()
        {
            let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(MemoryTable::default()));
            let (lab, v) = Lab::over(recipe, store.clone(), table);
            v.put("f", &vec![b'a'; len]);
            v.set_xattr(v.ino("f"), n("user.note"), b"older", SetXattr::Any).unwrap();
            v.close().unwrap();
            let v = lab.open();
            let ino = v.ino("f");
            let handle = v.open_file(ino, RW).unwrap();
            queue(&v);
            change(&v, ino, handle);
            v.flush(handle).unwrap();
            v.release(handle).unwrap();
            std::mem::forget(v);
            let lab = Lab { backend: Arc::new(store.snapshot()), ..lab };
            let told = lab.checked();
            assert!(told.iter().all(|kind| kind.starts_with('(')), "{which}, {len} bytes: {told:?}");
            let v = lab.open();
            for name in listed(&v, "").0 {
                v.get(&name);
            }
            v.close().unwrap();
        }
    }
}

/// Whether the first page of a new file is there is the store's choice after a crash: once, by what the next writer has
/// seen.
#[test]
fn the_store_chooses_once_whether_a_new_file_has_its_first_page() {
    for (len, is_there, is_killed) in [700, 50_000]
        .into_iter()
        .flat_map(|len| [(len, true, true), (len, true, false), (len, false, true), (len, false, false)])
    {
        let store = Arc::new(MemoryBackend::new());
        let (lab, v) = Lab::over(Recipe::plain(), store.clone(), Arc::new(MemoryTable::default()));
        let handle = v.new_file("f").1;
        v.write(handle, 0, &vec![b'A'; len]).unwrap();
        v.flush(handle).unwrap();
        v.fsync_dir(v.open_dir(ROOT).unwrap()).unwrap();
        std::mem::forget(v);
        let left = Arc::new(store.snapshot());
        let stored = |backend: &Arc<MemoryBackend>| backend.root().open_file(n("f"), true).unwrap();
        let mut written = vec![0; 1 << 20];
        let written_len = stored(&left).read_at(0, &mut written).unwrap();
        let put = |backend: &Arc<MemoryBackend>, is_there: bool| match is_there {
            true => stored(backend).write_at(0, &written[..written_len]).unwrap(),
            // No barrier has covered what was written.
            false => stored(backend).set_len(0).unwrap(),
        };
        put(&left, is_there);
        let lab = Lab { backend: left.clone(), ..lab };
        let v = lab.open();
        assert_eq!(v.get("f").len(), if is_there { len } else { 0 });
        let killed = Arc::new(left.snapshot());
        if is_killed {
            std::mem::forget(v);
        } else {
            v.close().unwrap();
        }
        let left = if is_killed { killed } else { left };
        put(&left, !is_there);
        let lab = Lab { backend: left, ..lab };
        for v in [lab.read_only(), lab.open()] {
            let seen = v.find("f").and_then(|entry| {
                let handle = v.open_file(entry.attr.ino, RO)?;
                v.read(handle, 0, &mut vec![0; len])
            });
            let is_same = if is_there { seen.is_err() } else { seen.as_ref().map_or(true, |read| *read == 0) };
            assert!(is_same, "{len} bytes, there {is_there}, killed {is_killed}: {seen:?}");
            v.close().unwrap();
        }
    }
}
