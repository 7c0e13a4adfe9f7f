//! `check --repair` takes nothing from an entry that it could not look at, or that the store withholds just now.
use crate::common;

use common::anchored::{LONG, Lab, link_to, mv};
use common::*;
use lamassu_anchor::table::MemoryTable;
use lamassu_format::name::{LINK_PREFIX, LONG_PREFIX, LOST};
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::*;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

/// A target with a rest.
fn far() -> String {
    "t".repeat(2_000)
}

/// Vaults with and without an anchor, over a store that can fail; `d/far` is a link with a long target, and a file with
/// a long name lies in the directory `d/LONG`.
fn filled() -> impl Iterator<Item = (Recipe, Arc<FaultBackend>, Arc<dyn Backend>)> {
    [Recipe::default(), Recipe::default().anchored()].into_iter().map(|recipe| {
        let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
        let backend: Arc<dyn Backend> = fault.clone();
        let v = recipe.make(&backend);
        v.dir("d");
        link_to(&v, "d/far", &far());
        v.dir(&format!("d/{LONG}"));
        v.put(&format!("d/{LONG}/{LONG}"), b"content");
        v.close().unwrap();
        (recipe, fault, backend)
    })
}

#[track_caller]
fn is_whole(v: &Vault, what: &str) {
    assert_eq!(v.readlink(v.ino("d/far")).unwrap(), far().as_bytes(), "{what}");
    assert_eq!(v.get(&format!("d/{LONG}/{LONG}")), b"content", "{what}");
    v.clean();
}

/// The store's directory and the stored name of a path.
fn stored(backend: &Arc<dyn Backend>, v: &Vault, path: &str) -> (Arc<dyn BackendDir>, OsString) {
    let stored = v.stored_path(n(path)).unwrap();
    let mut dir = backend.root();
    for part in stored.parent().unwrap() {
        dir = dir.open_dir(part).unwrap();
    }
    (dir, stored.file_name().unwrap().to_owned())
}

/// The names in `lamassu.lost` that begin so.
fn lost(backend: &Arc<dyn Backend>, prefix: &str) -> usize {
    let Ok(lost) = backend.root().open_dir(n(LOST)) else { return 0 };
    let names = lost.read_dir().unwrap().into_iter().map(|entry| entry.name);
    names.filter(|name| name.to_str().unwrap().starts_with(prefix)).count()
}

fn fail(fault: &FaultBackend, call: Call, name: &OsStr, is_meant: impl Fn(u64) -> bool + Send + Sync + 'static) {
    let name = name.to_owned();
    let met = std::sync::atomic::AtomicU64::new(0);
    fault.faults().rule(move |c| {
        let is_it = c.call == call && c.name == Some(&name);
        let nth = met.fetch_add(u64::from(is_it), std::sync::atomic::Ordering::Relaxed);
        (is_it && is_meant(nth)).then_some(Fault::Errno(libc::EIO))
    });
}

#[test]
fn a_link_that_cannot_be_looked_at_keeps_its_rest() {
    for call in [Call::DirStat, Call::ReadLink] {
        for at in [None, Some(0), Some(1), Some(2)] {
            for (recipe, fault, backend) in filled() {
                let what = format!("{call:?}, {at:?}, anchored: {}", recipe.table.is_some());
                let v = recipe.open(&backend).unwrap();
                let (_, name) = stored(&backend, &v, "d/far");
                fail(&fault, call, &name, move |nth| at.is_none_or(|at| nth == at));
                let report = v.check(&[], true, &Quiet).unwrap();
                fault.faults().clear_rules();
                assert!(at.is_some() || report.is_damaged(), "{what}");
                is_whole(&v, &what);
                v.close().unwrap();
            }
        }
    }
}

/// Its name is altered, which nothing of the format has then; it may be put right by hand.
#[test]
fn a_link_whose_name_was_altered_keeps_its_rest() {
    for (recipe, _, backend) in filled() {
        let v = recipe.open(&backend).unwrap();
        let (dir, name) = stored(&backend, &v, "d/far");
        dir.rename(&name, &*dir, n("!"), RenameMode::NoReplace).unwrap();
        v.check(&[], true, &Quiet).unwrap();
        dir.rename(n("!"), &*dir, &name, RenameMode::NoReplace).unwrap();
        is_whole(&v, "altered");
        v.close().unwrap();
    }
}

#[test]
fn what_the_store_withholds_keeps_its_companion_and_its_rest() {
    let (lab, v) = Lab::new(Recipe::default());
    v.dir("d");
    link_to(&v, "d/far", &far());
    v.dir(&format!("d/{LONG}"));
    v.put(&format!("d/{LONG}/{LONG}"), b"content");
    v.put("d/other", b"other");
    v.close().unwrap();
    let v = lab.open();
    let places: Vec<_> = ["d/far", &format!("d/{LONG}")].iter().map(|path| lab.stored(&v, path)).collect();
    let other = lab.stored(&v, "d/other").1;
    v.close().unwrap();
    let aside = lab.backend.root();
    for (dir, name) in &places {
        for is_replaced in [false, true] {
            dir.rename(name, &*aside, n("aside"), RenameMode::NoReplace).unwrap();
            if is_replaced {
                // Something of another kind lies there.
                dir.hold(&other).unwrap().link(&**dir, name).unwrap();
            }
            let v = lab.open();
            assert!(v.check(&[], true, &Quiet).unwrap().is_damaged());
            v.close().unwrap();
            if is_replaced {
                dir.unlink(name).unwrap();
            }
            aside.rename(n("aside"), &**dir, name, RenameMode::NoReplace).unwrap();
            let v = lab.open();
            is_whole(&v, &format!("{name:?}, {is_replaced}"));
            v.close().unwrap();
        }
    }
}

/// What was being made when an interruption came is moved to `lamassu.lost` whole.
#[test]
fn an_unrecorded_link_takes_its_rest_along() {
    let store = Arc::new(MemoryBackend::new());
    let (mut lab, v) = Lab::over(Recipe::default(), store.clone(), Arc::new(MemoryTable::default()));
    v.dir("d");
    v.sync_all().unwrap();
    link_to(&v, "d/far", &far());
    std::mem::forget(v);
    lab.backend = Arc::new(store.snapshot());
    let v = lab.open();
    let (dir, name) = lab.stored(&v, "d");
    let dir = dir.open_dir(&name).unwrap();
    let report = v.check(&[], true, &Quiet).unwrap();
    let kinds: Vec<_> = report.problems.iter().map(|p| (&*p.kind, p.repaired)).collect();
    assert!(kinds.contains(&(check::kind::UNRECORDED, true)), "{kinds:?}");
    assert_eq!(lost(&lab.backend, LINK_PREFIX), 1, "the rest of its target");
    assert_eq!(lost(&lab.backend, ""), 2, "and the link");
    // The original of the rest is a leftover then.
    let left = dir.read_dir().unwrap().into_iter().filter(|e| e.name.to_str().unwrap().starts_with(LINK_PREFIX));
    assert_eq!(left.count(), 0);
    v.clean();
}

#[test]
fn a_companion_that_cannot_be_read_moves_nothing_away() {
    for (recipe, fault, backend) in filled() {
        let v = recipe.open(&backend).unwrap();
        let (_, name) = stored(&backend, &v, &format!("d/{LONG}"));
        let companion = name.to_str().unwrap().replace("lamassu.long.", "lamassu.name.");
        fail(&fault, Call::ReadLink, n(&companion), |_| true);
        let report = v.check(&[], true, &Quiet).unwrap();
        fault.faults().clear_rules();
        let kinds: Vec<_> = report.problems.iter().map(|p| (&*p.kind, p.repaired, p.harmless)).collect();
        assert_eq!(kinds, [(check::kind::IO, false, false)]);
        assert_eq!(lost(&backend, ""), 0);
        is_whole(&v, "read again");
        v.close().unwrap();
    }
}

/// In an anchored vault what is recorded stays in its place, whatever its companion says.
#[test]
fn a_recorded_entry_stays_where_its_name_does_not_open() {
    for is_gone in [false, true] {
        for (recipe, _, backend) in filled() {
            let is_anchored = recipe.table.is_some();
            let v = recipe.open(&backend).unwrap();
            let (dir, name) = stored(&backend, &v, &format!("d/{LONG}"));
            let companion = name.to_str().unwrap().replace("lamassu.long.", "lamassu.name.");
            let text = dir.read_link(n(&companion)).unwrap();
            dir.unlink(n(&companion)).unwrap();
            if !is_gone {
                dir.make_symlink(n(&companion), n("!")).unwrap();
            }
            let report = v.check(&[], true, &Quiet).unwrap();
            let kinds: Vec<_> = report.problems.iter().map(|p| (&*p.kind, p.repaired)).collect();
            assert_eq!(kinds, [("companion", !is_anchored)]);
            assert_eq!(lost(&backend, LONG_PREFIX), usize::from(!is_anchored));
            if is_anchored {
                if !is_gone {
                    dir.unlink(n(&companion)).unwrap();
                }
                dir.make_symlink(n(&companion), &text).unwrap();
                is_whole(&v, "the companion is put back");
            }
            v.close().unwrap();
        }
    }
}

/// Under its stored name, which no name of that directory is, an entry is not recorded there: it is moved away.
#[test]
fn an_entry_of_another_directory_is_moved_away() {
    let (lab, v) = Lab::new(Recipe::default());
    ["d", "e"].iter().for_each(|dir| _ = v.dir(dir));
    v.put("d/f", b"content");
    v.put("e/g", b"content");
    v.close().unwrap();
    let v = lab.open();
    let (d, f) = lab.stored(&v, "d/f");
    let (e, _) = lab.stored(&v, "e/g");
    d.hold(&f).unwrap().link(&*e, &f).unwrap();
    let report = v.check(&[], true, &Quiet).unwrap();
    let kinds: Vec<_> = report.problems.iter().map(|p| (&*p.kind, p.repaired)).collect();
    assert_eq!(kinds, [("name", true)]);
    assert_eq!(lost(&lab.backend, f.to_str().unwrap()), 1);
    assert_eq!((v.get("d/f"), v.get("e/g")), (b"content".to_vec(), b"content".to_vec()));
    mv(&v, "d/f", "e/f", RenameMode::NoReplace).unwrap();
    v.close().unwrap();
}
