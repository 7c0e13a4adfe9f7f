//! What is sealed and replaced whole in an anchored vault, through crashes and while others look (`docs/freshness.md`,
//! section 5, S1 to S5): an honest crash at any moment is no alarm.
use crate::common;

use common::anchored::{Watched, assert_outdated};
use common::keyed::*;
use common::*;
use lamassu_anchor::table::MemoryTable;
use lamassu_store::backend::{CrashBackend, CrashSim, MemoryBackend};
use lamassu_vault::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What is seen of everything: an error is an alarm.
fn seen(v: &Vault) -> BTreeMap<String, String> {
    v.verify_root_permissions().unwrap();
    let mut all = BTreeMap::new();
    for path in ["", "f", "d", "new", "l", "long", "d/f"] {
        let Ok(entry) = v.find(path).inspect_err(|e| assert!(matches!(e, VaultError::NotFound), "{path}: {e}")) else {
            continue;
        };
        let ino = entry.attr.ino;
        if entry.attr.kind == Kind::Symlink {
            all.insert(format!("{path} ->"), format!("{:?}", v.readlink(ino).unwrap().len()));
            continue;
        }
        for name in v.list_xattr(ino).unwrap() {
            let name = String::from_utf8(name).unwrap();
            let mut value = v.get_xattr(ino, n(&name)).unwrap();
            if name == ACCESS {
                // The rest of it follows the mode.
                value = value[12..20].to_vec();
            }
            all.insert(format!("{path} {name}"), format!("{value:02x?}"));
        }
        all.insert(path.to_owned(), if path.is_empty() { format!("{:o}", entry.attr.mode) } else { String::new() });
    }
    all
}

/// Takes steps on a store that crashes, and opens what a crash would leave at each moment: each thing is as it was at
/// some moment before, and nothing is called stale. Returns in how many states.
fn crash_everywhere(recipe: Recipe, prepare: &dyn Fn(&Vault), steps: &[&dyn Fn(&Vault)]) -> usize {
    let crash = Arc::new(CrashBackend::new());
    let watched = Watched::over(&crash);
    let mut lab = Lab::over(recipe, crash.clone(), watched.clone());
    let v = lab.open();
    prepare(&v);
    v.close().unwrap();
    lab.outer.insert(0, 2);
    let v = lab.open();
    v.sync_all().unwrap();
    let begin = crash.position();
    let mut allowed: BTreeMap<String, BTreeSet<Option<String>>> = BTreeMap::new();
    let mut note = |v: &Vault| {
        let now = seen(v);
        for (what, of) in &mut allowed {
            of.insert(now.get(what).cloned());
        }
        for (what, of) in now {
            allowed.entry(what).or_insert_with(|| BTreeSet::from([None])).insert(Some(of));
        }
    };
    note(&v);
    for step in steps {
        step(&v);
        note(&v);
    }
    v.sync_all().unwrap();
    std::mem::forget(v);
    let sim = CrashSim::new(crash.log());
    let states = watched.states.lock();
    let mut count = 0;
    for (at, left) in sim.prefixes().filter(|(at, _)| *at >= begin) {
        let before = states.iter().rfind(|(position, _)| *position < at);
        let tables = before.into_iter().chain(states.iter().filter(|(position, _)| *position == at));
        for (_, table) in tables {
            let mut stores: Vec<MemoryBackend> = vec![left.snapshot(), sim.at(at).least_state()];
            stores.extend((0..6).map(|seed| sim.at(at).random_state(seed)));
            for store in stores {
                let lab =
                    Lab { recipe, backend: Arc::new(store), table: Arc::new(table.clone()), outer: lab.outer.clone() };
                let v = lab.open();
                let now = seen(&v);
                for (what, of) in &allowed {
                    assert!(of.contains(&now.get(what).cloned()), "record {at}: {what} is {:?}", now.get(what));
                }
                v.close().unwrap();
                let v = lab.open();
                assert_eq!(seen(&v), now, "record {at}: opened again");
                v.close().unwrap();
                count += 1;
            }
        }
    }
    count
}

#[test]
fn a_crash_at_any_moment_of_a_change_is_no_alarm() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let prepare = |v: &Vault| {
            v.put("f", b"1");
            v.dir("d");
            set(v, "f", "user.a", b"0");
            set(v, "d", DEFAULT, &acl(1, 7));
        };
        let steps: [&dyn Fn(&Vault); 13] = [
            &|v| set(v, "f", "user.a", b"1"),
            &|v| set(v, "f", "user.a", b"2"),
            &|v| set(v, "f", ACCESS, &acl(1000, 6)),
            &|v| v.remove_xattr(v.ino("f"), n("user.a")).unwrap(),
            &|v| set(v, "d", DEFAULT, &acl(1, 5)),
            &|v| v.put("d/f", b"inherits"),
            &|v| v.put("new", b""),
            &|v| set(v, "new", "user.a", b"1"),
            &|v| set(v, "new", "user.a", b"2"),
            &|v| v.sync_all().unwrap(),
            &|v| set(v, "new", "user.a", b"3"),
            &|v| {
                let _ = v.setattr(ROOT, None, &SetAttr { mode: Some(0o711), ..SetAttr::default() }).unwrap();
            },
            &|v| set(v, "", "user.a", b"root"),
        ];
        let count = crash_everywhere(recipe, &prepare, &steps);
        assert!(count > 200, "{count}");
    }
}

/// A crash leaves two states that are current. The one that is seen after it is the newest from then on.
#[test]
fn what_a_crash_left_open_is_decided_once() {
    let recipe = Recipe::default();
    let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(MemoryTable::default()));
    let lab = Lab::over(recipe, store.clone(), table.clone());
    let v = lab.open();
    v.put("f", b"1");
    set(&v, "f", "user.a", b"1");
    v.close().unwrap();
    let (_, name) = lab.stored("f");
    let older = attrs_of(&lab.backend.root(), &name);
    let v = lab.open();
    set(&v, "f", "user.a", b"2");
    let (left, known) = (store.snapshot(), Arc::new(MemoryTable::clone(&table)));
    let lab = Lab { backend: Arc::new(left), table: known, recipe, outer: vec![1] };
    drop(v);
    let v = lab.open();
    assert_eq!(get(&v, "f", "user.a").unwrap(), b"2");
    v.close().unwrap();
    put_attrs(&lab.backend.root(), &name, &older);
    let v = lab.open();
    assert_outdated(get(&v, "f", "user.a"));
    v.close().unwrap();
}

/// An fsync acknowledges attributes, too.
#[test]
fn after_an_fsync_an_older_attribute_is_stale() {
    for path in ["f", "d"] {
        let recipe = Recipe::default();
        let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(MemoryTable::default()));
        let lab = Lab::over(recipe, store.clone(), table.clone());
        let v = lab.open();
        v.put("f", b"1");
        v.dir("d");
        set(&v, path, "user.a", b"1");
        v.close().unwrap();
        let (_, name) = lab.stored(path);
        let older = attrs_of(&lab.backend.root(), &name);
        let v = lab.open();
        set(&v, path, "user.a", b"2");
        if path == "f" {
            let handle = v.open_file(v.ino(path), RW).unwrap();
            v.fsync(handle, false).unwrap();
            v.release(handle).unwrap();
        } else {
            let handle = v.open_dir(v.ino(path)).unwrap();
            v.fsync_dir(handle).unwrap();
            v.release_dir(handle).unwrap();
        }
        let (left, known) = (store.snapshot(), Arc::new(MemoryTable::clone(&table)));
        drop(v);
        let lab = Lab { backend: Arc::new(left), table: known, recipe, outer: vec![1] };
        put_attrs(&lab.backend.root(), &name, &older);
        let v = lab.open();
        assert_outdated(get(&v, path, "user.a"));
        v.close().unwrap();
    }
}

#[test]
fn a_crash_at_any_moment_of_a_re_keying_is_no_alarm() {
    let prepare = |v: &Vault| {
        v.put("f", b"1");
        v.dir("d");
        v.put("d/f", b"2");
        set(v, "f", "user.a", b"0");
        set(v, "d", DEFAULT, &acl(1, 7));
        link_to(v, "l", b"short");
        link_to(v, "long", &[b't'; 3000]);
        v.link(v.ino("l"), v.ino("d"), n("l")).unwrap();
    };
    let rekey: &dyn Fn(&Vault) = &|v| {
        let done = v.rekey(Rekey::Outer, None, &Quiet).unwrap();
        assert!(done.complete && done.failed == 0 && done.links == 2 && done.records == 2, "{done:?}");
        assert!(done.attributes > 0);
    };
    let count = crash_everywhere(Recipe::default(), &prepare, &[rekey]);
    assert!(count > 200, "{count}");
}

#[test]
fn whoever_looks_while_others_change_sees_no_stale_state() {
    let lab = Lab::new(Recipe::default());
    let v = lab.open();
    for path in ["f", "g"] {
        v.put(path, b"1");
        set(&v, path, "user.a", b"0");
    }
    v.dir("d");
    v.sync_all().unwrap();
    std::thread::scope(|scope| {
        for path in ["f", "g", "d"] {
            scope.spawn(|| {
                for round in 0..60_u8 {
                    set(&v, path, "user.a", &[round]);
                    set(&v, path, ACCESS, &acl(round.into(), 6));
                    if round % 7 == 0 {
                        v.remove_xattr(v.ino(path), n("user.a")).unwrap();
                    }
                }
            });
            scope.spawn(|| {
                for _ in 0..200 {
                    let ino = v.ino(path);
                    v.list_xattr(ino).unwrap();
                    let seen = v.get_xattr(ino, n("user.a"));
                    assert!(matches!(seen, Ok(_) | Err(VaultError::NoAttribute)), "{seen:?}");
                }
            });
        }
        scope.spawn(|| (0..20).for_each(|_| v.sync_all().unwrap()));
    });
    v.clean();
    v.close().unwrap();
    let v = lab.open();
    assert_eq!(get(&v, "f", "user.a").unwrap(), [59]);
    v.clean();
    v.close().unwrap();
}
