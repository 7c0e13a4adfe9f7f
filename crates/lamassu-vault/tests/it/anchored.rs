//! Names, types, modes and owners of an anchored vault (`docs/freshness.md`, sections 2 and 5): whatever the store does
//! with them, what is served is the newest state, or an error that says so, and the rest stays readable.
use crate::common;

use common::anchored::*;
use common::*;
use lamassu_anchor::AnchorError;
use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
use lamassu_store::Backend;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{ByName, FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

pub fn both(test: impl Fn(Lab, Vault)) {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let (lab, vault) = Lab::new(recipe);
        test(lab, vault);
    }
}

/// A commit leaves out a file with a name that no barrier covers, and with it the removal of its other name: so it
/// leaves out the removal of the directory that had that one, and of those above. Else what is left in them is not
/// recorded.
#[test]
fn a_directory_is_not_removed_before_what_was_in_it() {
    for depth in [1, 2] {
        both(|lab, v| {
            v.new_file("f");
            let dirs = ["d", "d/e"];
            dirs[..depth].iter().for_each(|dir| _ = v.dir(dir));
            let dir = dirs[depth - 1];
            v.link(v.ino("f"), v.ino(dir), n("g")).unwrap();
            v.sync_all().unwrap();
            v.link(v.ino("f"), ROOT, n("new")).unwrap();
            rm(&v, &format!("{dir}/g")).unwrap();
            dirs[..depth].iter().rev().for_each(|dir| rmdir(&v, dir).unwrap());
            // Commits what it may, and makes the name anew.
            v.dir("d");
            assert!(lab.backend.root().open_dir(n("lamassu.lost")).is_err(), "something is not recorded");
            ["f", "new"].iter().for_each(|name| rm(&v, name).unwrap());
            v.close().unwrap();
            assert_eq!(lab.intents(), 0);
            assert!(lab.backend.root().open_dir(n("lamassu.lost")).is_err(), "something is not recorded");
        });
    }
}

#[test]
fn what_was_done_is_there_after_the_vault_was_closed() {
    both(|lab, v| {
        let name = if lab.recipe.names == lamassu_format::header::NameMode::Plain { "long" } else { LONG };
        v.dir("d");
        v.dir("d/e");
        v.dir("gone");
        v.new_file("d/f");
        v.new_file(&format!("d/{name}"));
        link_to(&v, "link", "target");
        link_to(&v, "far", &"t".repeat(2000));
        v.mknod(ROOT, n("fifo"), Kind::Fifo, 0o640, 0, me()).unwrap();
        v.link(v.ino("d/f"), ROOT, n("also")).unwrap();
        v.sync_all().unwrap();
        mv(&v, "d/e", "moved", RenameMode::Replace).unwrap();
        mv(&v, "far", "d/far", RenameMode::NoReplace).unwrap();
        mv(&v, "link", "fifo", RenameMode::Exchange).unwrap();
        rmdir(&v, "gone").unwrap();
        rm(&v, "d/f").unwrap();
        v.new_file("d/f");
        let set = SetAttr { mode: Some(0o4711), ..SetAttr::default() };
        v.setattr(v.ino("also"), None, &set).unwrap();
        let before = seen(&v);
        v.close().unwrap();
        assert_eq!(lab.intents(), 0);
        for v in [lab.read_only(), lab.open()] {
            assert_eq!(seen(&v), before);
            assert_eq!(v.find("also").unwrap().attr.mode, 0o4711);
            assert_eq!(v.find("also").unwrap().attr.nlink, 1);
            assert_eq!(v.readlink(v.ino("d/far")).unwrap(), "t".repeat(2000).as_bytes());
        }
    });
}

/// What lies in a directory may be durable before the directory is, which was renamed since a barrier. Emptied, it goes
/// all the same.
#[test]
fn a_directory_goes_although_what_was_in_it_had_become_durable_without_it() {
    both(|lab, v| {
        v.new_file("x");
        v.new_file("y");
        v.sync_all().unwrap();
        v.dir("d");
        v.new_file("d/f");
        v.dir("z");
        mv(&v, "x", "z/x", RenameMode::NoReplace).unwrap(); // has a barrier, and commits what it concerns
        mv(&v, "d", "e", RenameMode::NoReplace).unwrap(); // no barrier covers this
        rm(&v, "y").unwrap();
        v.new_file("y"); // commits all that the barrier has covered
        rm(&v, "e/f").unwrap();
        rmdir(&v, "e").unwrap();
        v.close().unwrap();
        assert_eq!(lab.intents(), 0);
    });
}

/// Directories are removed, moved and made anew under the names of others while a scrub goes on, at every point of it:
/// a writer gives no finding and no failure.
#[test]
fn a_scrub_beside_a_writer_of_directories_finds_nothing() {
    let all: [fn(&Vault); 4] = [
        |v| {
            mv(v, "a", "moved", RenameMode::NoReplace).unwrap();
            v.dir("a");
            v.new_file("a/other");
        },
        |v| mv(v, "a", "b", RenameMode::Exchange).unwrap(),
        |v| {
            for path in ["a/f", "a/g"] {
                rm(v, path).unwrap();
            }
            rmdir(v, "a/in").unwrap();
            rmdir(v, "a").unwrap();
            v.new_file("a");
        },
        |v| {
            mv(v, "a", "b/a", RenameMode::NoReplace).unwrap();
            mv(v, "b/a", "a", RenameMode::NoReplace).unwrap();
        },
    ];
    for recipe in [Recipe::default(), Recipe::plain()] {
        for meanwhile in all {
            for at in 1.. {
                let (lab, v) = Lab::new(recipe);
                for dir in ["a", "b"] {
                    v.dir(dir);
                    v.dir(&format!("{dir}/in"));
                    v.new_file(&format!("{dir}/f"));
                    v.new_file(&format!("{dir}/g"));
                }
                v.sync_all().unwrap();
                let work = || {
                    meanwhile(&v);
                    v.sync_all().unwrap();
                };
                let Some(found) = lab.scrubbed_while(at, work) else { break };
                assert_eq!(found, (Vec::new(), 0), "after {at} directories and files");
                v.close().unwrap();
            }
        }
    }
}

/// Upkeep is wanted before a call has to do the work; without it one does, at a bound.
#[test]
fn removals_are_carried_out_in_the_background() {
    for has_upkeep in [true, false] {
        let (lab, v) = Lab::new(Recipe::plain());
        v.close().unwrap();
        drop(v);
        let upkeep = Upkeep::default();
        let anchor = anchor(&lab.recipe, &lab.table);
        let options = Options { anchor: Some(anchor), upkeep: upkeep.clone(), ..options(false) };
        let v = Vault::open(lab.backend.clone(), &lab.recipe.header(), lab.recipe.ring(), options).unwrap();
        let count = 9000;
        (0..count).for_each(|number| link_to(&v, &number.to_string(), "target"));
        v.sync_all().unwrap();
        let there = || lab.backend.root().read_dir().unwrap().len();
        let mut least = there();
        for number in 0..count {
            rm(&v, &number.to_string()).unwrap();
            if has_upkeep && upkeep.wait_until(std::time::Instant::now()) {
                let before = there();
                v.work_off().unwrap();
                assert!(there() < before);
            }
            if number == 1000 {
                least = there();
            }
        }
        assert_eq!(least > count, !has_upkeep, "of {count} there were {least} after a thousand");
        assert!(there() < 8300, "{}", there());
        v.close().unwrap();
        assert!(there() < 20, "{}", there());
    }
}

/// Closed files that are not settled: half way to the bound upkeep is wanted, and does it.
#[test]
fn closed_files_are_settled_in_the_background() {
    let (recipe, backend) = (Recipe::default(), memory());
    recipe.make(&backend).close().unwrap();
    let upkeep = Upkeep::default();
    let options = Options { upkeep: upkeep.clone(), ..options(false) };
    let v = Vault::open(backend, &recipe.header(), recipe.ring(), options).unwrap();
    let mut passes = 0;
    for number in 0..1200 {
        v.put(&number.to_string(), &[7; 9000]);
        if upkeep.wait_until(std::time::Instant::now()) {
            v.work_off().unwrap();
            passes += 1;
        }
    }
    // A pass for every 256 files. Where a pass settles nothing, calls do it at 512, and there are half as many wishes.
    assert!(passes >= 4, "{passes} passes");
    v.close().unwrap();
}

#[test]
fn an_entry_that_the_store_lost_is_an_error_and_the_rest_is_readable() {
    both(|lab, v| {
        v.new_file("a");
        v.new_file("b");
        v.close().unwrap();
        let v = lab.open();
        let (dir, a) = lab.stored(&v, "a");
        let ino = v.ino("a");
        dir.unlink(&a).unwrap();
        assert_outdated(v.find("a"));
        assert_outdated(v.getattr(ino, None));
        assert_outdated(v.open_file(ino, RO));
        assert_eq!(listed(&v, ""), (vec!["b".to_owned()], true));
        assert_outdated(v.create(ROOT, n("a"), 0o600, RW, me()));
        assert_outdated(rm(&v, "a"));
        assert_outdated(mv(&v, "a", "c", RenameMode::Replace));
        assert_outdated(mv(&v, "b", "a", RenameMode::Replace));
        v.find("b").unwrap();
        assert_outdated(lab.read_only().find("a"));
    });
}

#[test]
fn what_was_removed_does_not_come_back() {
    both(|lab, v| {
        v.new_file("a");
        v.dir("d");
        v.new_file("d/x");
        v.close().unwrap();
        let v = lab.open();
        let (root, a) = lab.stored(&v, "a");
        let (_, d) = lab.stored(&v, "d");
        let keep = |name: &OsStr, to: &str| root.rename(name, &*root, n(to), RenameMode::NoReplace).unwrap();
        let back = |name: &OsStr, from: &str| root.rename(n(from), &*root, name, RenameMode::NoReplace).unwrap();
        root.link(&a, &*root, n("kept.a")).unwrap();
        rm(&v, "a").unwrap();
        rm(&v, "d/x").unwrap();
        v.sync_all().unwrap();
        keep(&d, "kept.d");
        assert_outdated(v.find("d"));
        back(&d, "kept.d");
        rmdir(&v, "d").unwrap();
        v.close().unwrap();
        back(&a, "kept.a");
        root.make_dir(&d, 0o700).unwrap();
        for v in [lab.read_only(), lab.open()] {
            assert!(matches!(v.find("a"), Err(VaultError::NotFound)));
            assert!(matches!(v.find("d"), Err(VaultError::NotFound)));
            assert_eq!(listed(&v, ""), (vec![], false));
        }
        // What is made there goes over nothing that the store made up.
        let v = lab.open();
        v.new_file("a");
        v.dir("d");
        assert_eq!(v.list(""), ["a", "d"]);
        assert_eq!(root.open_dir(n("lamassu.lost")).unwrap().read_dir().unwrap().len(), 2);
    });
}

#[test]
fn entries_that_were_exchanged_are_found() {
    both(|lab, v| {
        v.new_file("a");
        v.new_file("b");
        v.dir("d");
        v.dir("e");
        v.dir("d/in");
        v.new_file("d/in/f");
        v.close().unwrap();
        let v = lab.open();
        let held: Vec<_> = ["a", "b", "d", "e", "d/in", "d/in/f"].map(|path| (path, v.ino(path))).to_vec();
        let (root, a) = lab.stored(&v, "a");
        let exchange = |one: &OsStr, other: &OsStr| root.rename(one, &*root, other, RenameMode::Exchange).unwrap();
        let (b, d, e) = (lab.stored(&v, "b").1, lab.stored(&v, "d").1, lab.stored(&v, "e").1);
        exchange(&a, &b);
        exchange(&d, &e);
        for path in ["a", "b", "d", "e"] {
            assert_outdated(v.find(path));
        }
        for (path, ino) in &held[..2] {
            assert_outdated(v.getattr(*ino, None).map(|_| path));
        }
        exchange(&a, &b);
        exchange(&d, &e);
        for (path, ino) in held {
            assert_eq!(v.ino(path), ino);
        }
        // Another kind.
        exchange(&a, &d);
        assert_outdated(v.find("a"));
        assert_outdated(v.find("d"));
        assert_outdated(lab.read_only().find("d/in/f"));
        v.find("e").unwrap();
    });
}

#[test]
fn an_entry_brought_from_elsewhere_leads_to_nothing() {
    both(|lab, v| {
        v.dir("d");
        v.dir("e");
        v.new_file("d/x");
        v.new_file("y");
        v.close().unwrap();
        let v = lab.open();
        let (d, x) = lab.stored(&v, "d/x");
        let (root, e) = lab.stored(&v, "e");
        let e = root.open_dir(&e).unwrap();
        d.link(&x, &*e, &x).unwrap();
        assert_eq!(listed(&v, "e"), (vec![], false));
        assert!(matches!(v.find("e/x"), Err(VaultError::NotFound)));
        rmdir(&v, "e").unwrap();
        v.sync_all().unwrap();
        v.find("d/x").unwrap();
    });
}

#[test]
fn a_hard_link_stays_with_its_file() {
    both(|lab, v| {
        v.new_file("a");
        v.link(v.ino("a"), ROOT, n("b")).unwrap();
        v.new_file("c");
        v.close().unwrap();
        let v = lab.open();
        let (root, b) = lab.stored(&v, "b");
        let c = lab.stored(&v, "c").1;
        let a = v.find("a").unwrap();
        let handle = v.open_file(a.attr.ino, RW).unwrap();
        root.rename(&b, &*root, &c, RenameMode::Exchange).unwrap();
        assert_outdated(v.find("b"));
        assert_outdated(v.find("c"));
        assert_eq!(v.find("a").unwrap().attr.nlink, 2);
        v.release(handle).unwrap();
    });
}

#[test]
fn a_file_that_is_removed_stays_usable_and_leaves_the_store_after_the_anchor_knows() {
    both(|lab, v| {
        let (_, handle) = v.new_file("f");
        v.write(handle, 0, b"content").unwrap();
        v.sync_all().unwrap();
        let (root, f) = lab.stored(&v, "f");
        rm(&v, "f").unwrap();
        assert!(matches!(v.find("f"), Err(VaultError::NotFound)));
        assert_eq!(v.list(""), [""; 0]);
        root.stat_entry(&f).expect("the store has it until the anchor knows");
        let mut data = [0; 7];
        v.read(handle, 0, &mut data).unwrap();
        assert_eq!(&data, b"content");
        assert_eq!(v.getattr(2, Some(handle)).unwrap().nlink, 0);
        // The name may be used at once.
        let (_, again) = v.new_file("f");
        v.write(again, 0, b"new").unwrap();
        v.release(again).unwrap();
        assert_eq!(v.get("f"), b"new");
        v.release(handle).unwrap();
        v.close().unwrap();
        assert_eq!(lab.intents(), 0);
    });
}

/// Its last writes are settled never, and nobody misses them.
#[test]
fn a_file_that_is_removed_while_it_is_written_leaves_no_session_open() {
    both(|lab, v| {
        let (_, handle) = v.new_file("f");
        v.write(handle, 0, &[1; 500_000]).unwrap();
        v.sync_all().unwrap();
        v.write(handle, 0, &[2; 300_000]).unwrap();
        v.flush(handle).unwrap();
        rm(&v, "f").unwrap();
        v.release(handle).unwrap();
        // One whose last name leaves the store at once, and the one before later.
        let (entry, handle) = v.new_file("g");
        v.write(handle, 0, &[1; 500_000]).unwrap();
        v.sync_all().unwrap();
        v.write(handle, 0, &[2; 300_000]).unwrap();
        v.flush(handle).unwrap();
        v.release(handle).unwrap();
        v.link(entry.attr.ino, ROOT, n("h")).unwrap();
        rm(&v, "g").unwrap();
        rm(&v, "h").unwrap();
        v.close().unwrap();
        let report = lab.read_only().check(&[], false, &Quiet).unwrap();
        assert!(report.open_sessions.is_empty(), "{:?}", report.open_sessions);
    });
}

/// Of a file with two names, one waits to be removed when a rename takes the other. The store keeps the file until the
/// anchor has let go of the first.
#[test]
fn a_file_that_loses_its_last_name_by_a_rename_leaves_no_session_open() {
    both(|lab, v| {
        let (entry, handle) = v.new_file("f");
        v.link(entry.attr.ino, ROOT, n("also")).unwrap();
        v.new_file("other");
        v.write(handle, 0, &[1; 500_000]).unwrap();
        v.sync_all().unwrap();
        v.write(handle, 0, &[2; 300_000]).unwrap();
        v.flush(handle).unwrap();
        rm(&v, "f").unwrap();
        mv(&v, "other", "also", RenameMode::Replace).unwrap();
        v.release(handle).unwrap();
        v.close().unwrap();
        let report = lab.read_only().check(&[], false, &Quiet).unwrap();
        assert!(report.open_sessions.is_empty(), "{:?}", report.open_sessions);
        assert_eq!(listed(&lab.open(), ""), (vec!["also".to_owned()], false));
    });
}

/// A table that fails now and then.
struct Failing {
    table: MemoryTable,
}

impl Table for Failing {
    fn get(&self, space: Space, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, AnchorError> {
        self.table.get(space, key)
    }
    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> std::result::Result<(), AnchorError> {
        self.table.scan(space, prefix, visit)
    }
    fn commit(&self, changes: &[Change]) -> std::result::Result<(), AnchorError> {
        self.table.commit(changes)
    }
}

#[test]
fn an_anchor_that_fails_for_a_while_loses_nothing() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let table = Arc::new(Failing { table: MemoryTable::default() });
        let (lab, v) = Lab::over(recipe, memory(), table.clone());
        v.new_file("old");
        v.new_file("other");
        v.dir("d");
        v.sync_all().unwrap();
        table.table.refuse(Some(libc::ENOSPC));
        let (entry, handle) = v.new_file("new");
        assert!(matches!(v.fsync(handle, false), Err(VaultError::Anchor(_))));
        assert!(matches!(mv(&v, "other", "moved", RenameMode::Replace), Err(VaultError::Anchor(_))));
        rm(&v, "old").unwrap();
        v.find("other").unwrap();
        assert!(v.sync_all().is_err());
        assert!(v.create(ROOT, n("old"), 0o600, RW, me()).is_err(), "what is going is in the way");
        let (_, old) = ("", v.list(""));
        assert_eq!(old, ["d", "new", "other"]);
        table.table.refuse(None);
        v.fsync(handle, false).unwrap();
        mv(&v, "other", "moved", RenameMode::Replace).unwrap();
        assert_eq!(v.find("new").unwrap().attr.ino, entry.attr.ino);
        v.release(handle).unwrap();
        let before = seen(&v);
        v.close().unwrap();
        assert_eq!(seen(&lab.open()), before);
    }
}

#[test]
fn an_older_record_of_sessions_begins_nothing() {
    both(|lab, v| {
        let sessions = lab.backend.root().open_dir(n("lamassu.sessions")).unwrap();
        let record = sessions.read_link(n("record")).unwrap();
        v.put("f", b"content");
        v.close().unwrap();
        sessions.unlink(n("record")).unwrap();
        sessions.make_symlink(n("record"), &record).unwrap();
        let v = lab.open();
        assert_outdated(v.verify_root());
        let handle = v.open_file(v.ino("f"), RW).unwrap();
        let written = v.write(handle, 0, b"x").map(drop).and_then(|()| v.flush(handle));
        assert!(written.is_err());
        let _ = v.release(handle);
    });
}

#[test]
fn what_the_store_refuses_is_taken_back() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let store = Arc::new(FaultBackend::new(memory()));
        let faults = store.faults().clone();
        let (lab, v) = Lab::over(recipe, store, Arc::new(MemoryTable::default()));
        for path in ["a", "b", "c"] {
            v.new_file(path);
        }
        v.dir("d");
        v.dir("e");
        v.dir("e/in");
        v.sync_all().unwrap();
        v.new_file("new");
        let before = seen(&v);
        faults.fail_always(Call::Rename, libc::EACCES);
        for (from, to, mode) in [
            ("a", "b", RenameMode::Replace),
            ("a", "free", RenameMode::NoReplace),
            ("a", "e", RenameMode::Exchange),
            ("e", "d", RenameMode::Replace),
            ("new", "other", RenameMode::Replace),
        ] {
            assert!(mv(&v, from, to, mode).is_err(), "{from} {to}");
            assert_eq!(seen(&v), before, "{from} {to}");
        }
        faults.clear_rules();
        faults.fail_always(Call::Unlink, libc::EACCES);
        // What the anchor never had is removed at once, and anything else later.
        assert!(rm(&v, "new").is_err());
        assert_eq!(seen(&v), before);
        rm(&v, "c").unwrap();
        assert!(v.sync_all().is_err());
        assert!(matches!(v.find("c"), Err(VaultError::NotFound)));
        faults.clear_rules();
        v.sync_all().unwrap();
        let before = seen(&v);
        v.close().unwrap();
        assert_eq!(lab.intents(), 0);
        assert_eq!(seen(&lab.open()), before);
    }
}

#[test]
fn a_name_that_the_store_makes_lead_to_another_file_is_found() {
    both(|lab, v| {
        v.dir("d");
        // Equal content: each would pass for the other, if it were only read.
        v.new_file("log");
        v.new_file("d/victim");
        v.close().unwrap();
        let v = lab.open();
        let (root, log) = lab.stored(&v, "log");
        let (dir, victim) = lab.stored(&v, "d/victim");
        dir.unlink(&victim).unwrap();
        root.link(&log, &*dir, &victim).unwrap();
        // The healthy name first, so that the inode is known when the other is listed.
        v.find("log").unwrap();
        let handle = v.open_dir(v.ino("d")).unwrap();
        let mut seen = Vec::new();
        v.read_dir_plus(handle, 0, &mut |listed, entry, _| {
            seen.push((listed.name.clone(), entry.is_some()));
            true
        })
        .unwrap();
        assert!(seen.contains(&("victim".into(), false)), "{seen:?}");
        assert_outdated(v.find("d/victim"));
        v.release_dir(handle).unwrap();
        drop(v);
        assert_eq!(lab.checked(), ["stale"]);
    });
}

#[test]
fn a_long_name_without_its_companion_ends_the_listing_with_an_error() {
    let (lab, v) = Lab::new(Recipe::default());
    v.new_file(LONG);
    v.new_file("short");
    v.close().unwrap();
    assert_eq!(lab.scrubbed(), (vec![], 0));
    let v = lab.open();
    assert_eq!(listed(&v, ""), (vec![LONG.to_owned(), "short".to_owned()], false));
    let (root, stored) = lab.stored(&v, LONG);
    let companion = stored.to_str().unwrap().replace("lamassu.long.", "lamassu.name.");
    root.unlink(n(&companion)).unwrap();
    assert_eq!(listed(&v, ""), (vec!["short".to_owned()], true));
    drop(v);
    assert_eq!(lab.checked(), ["companion"]);
    let (findings, _) = lab.scrubbed();
    assert!(matches!(&findings[..], [one] if one.contains("companion")), "{findings:?}");
}

#[test]
fn the_records_of_trees_change_no_time_that_users_see() {
    let (lab, v) = Lab::new(Recipe::default());
    v.put("f", &vec![7; 3 << 20]);
    let then = Time { seconds: 1_000_000_000, nanos: 5 };
    v.setattr(ROOT, None, &SetAttr { mtime: Some(SetTime::At(then)), ..SetAttr::default() }).unwrap();
    v.sync_all().unwrap();
    v.close().unwrap();
    assert!(lab.backend.root().open_dir(n("lamassu.tree")).is_ok());
    assert_eq!(lab.backend.root().stat().unwrap().mtime, then);
}

/// That the store cannot read a name now says nothing about the entry: no alarm, and no end of the listing that a
/// program could take for the whole.
#[test]
fn a_companion_that_the_store_cannot_read_is_the_store_s_error() {
    for recipe in [Recipe::default(), Recipe::default().anchored()] {
        let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
        let backend: Arc<dyn Backend> = fault.clone();
        let v = recipe.make(&backend);
        v.new_file(LONG);
        v.new_file("short");
        let is_companion = |name: &OsStr| name.to_string_lossy().starts_with("lamassu.name.");
        fault.faults().rule(move |c| {
            let fails = c.call == Call::ReadLink && c.name.is_some_and(is_companion);
            fails.then_some(Fault::Errno(libc::EMFILE))
        });
        let handle = v.open_dir(ROOT).unwrap();
        let mut names = Vec::new();
        let done = v.read_dir(handle, 0, &mut |e, _| {
            names.push(e.name.clone());
            true
        });
        assert!(matches!(&done, Err(VaultError::Io { source, .. }) if source.raw_os_error() == Some(libc::EMFILE)));
        assert!(names.contains(&OsString::from("short")), "the others are listed: {names:?}");
        v.release_dir(handle).unwrap();
        fault.faults().clear_rules();
        assert_eq!(v.list(""), [LONG, "short"]);
    }
}
