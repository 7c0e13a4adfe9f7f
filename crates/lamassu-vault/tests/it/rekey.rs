//! Re-keying whole vaults: nothing changes that anybody sees, the old keys are not needed afterwards, others may use
//! the vault meanwhile, and it may be broken off anywhere.
use crate::common;

use common::steps::tree;
use common::*;
use lamassu_format::{Codec, Suite};
use lamassu_store::Backend;
use lamassu_store::backend::{CrashBackend, CrashSim, MemoryBackend};
use lamassu_vault::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Watches; ends after so many bytes.
struct Watch {
    left: AtomicU64,
    total: AtomicU64,
    done: AtomicU64,
}

impl Watch {
    fn new(bytes: u64) -> Watch {
        Watch { left: AtomicU64::new(bytes), total: AtomicU64::new(0), done: AtomicU64::new(0) }
    }
}

impl RekeyProgress for Watch {
    fn dataset(&self, stored: &std::path::Path) -> lamassu_vault::Result<()> {
        panic!("{stored:?}: these vaults have none")
    }

    fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
    fn total(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
    }
    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(bytes), Ordering::Relaxed);
    }
    fn failed(&self, stored: &str, error: &VaultError) {
        panic!("{stored}: {error}");
    }
    fn is_cancelled(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }
}

fn rekey(v: &Vault, work: Rekey) -> Rekeyed {
    let watch = Watch::new(u64::MAX);
    let done = v.rekey(work, None, &watch).unwrap();
    assert!(done.complete && done.failed == 0, "{done:?}");
    assert_eq!(watch.total.load(Ordering::Relaxed), watch.done.load(Ordering::Relaxed));
    done
}

fn rotate(v: &Vault, recipe: &Recipe, inner: &[u8], outer: &[u8]) {
    let _ = recipe;
    v.ring().replace(&epochs(inner, 1), &epochs(outer, 2));
}

/// Bytes of which every other 5,000 compress.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    (0..len).map(|at| if at / 5000 % 2 == 0 { next() } else { next() & 3 }).collect()
}

/// Something of everything. `attributes`: where the store has them.
fn furnish(v: &Vault, attributes: bool) {
    let long = "n".repeat(250);
    for dir in ["a", "a/b", "c", &long] {
        v.dir(dir);
    }
    for (path, len) in [("empty", 0), ("tiny", 5), ("a/small", 9_000), ("a/b/big", 1_500_000), ("c/one", 4096)] {
        v.put(path, &noise(len, len as u64));
    }
    v.put(&format!("{long}/{long}"), b"long names");
    let h = v.new_file("a/sparse").1;
    v.write(h, 3_000_000, b"end").unwrap();
    v.release(h).unwrap();
    v.link(v.ino("a/small"), v.ino("c"), n("again")).unwrap();
    let target = "t".repeat(3000);
    for (dir, name, target) in [("", "short", "a/b/big"), ("a", "far", &target), ("c", "twice", &target)] {
        v.symlink(v.ino(dir), n(name), target.as_bytes(), me()).unwrap();
    }
    v.link(v.ino("c/twice"), v.ino("a"), n("twice too")).unwrap();
    v.link(v.ino("c/twice"), v.ino("c"), n("and here")).unwrap();
    if attributes {
        for path in ["", "a", "tiny", "a/b/big"] {
            v.set_xattr(v.ino(path), n("user.note"), path.as_bytes(), SetXattr::Any).unwrap();
            v.set_xattr(v.ino(path), n("user.more"), &[7; 300], SetXattr::Any).unwrap();
        }
        v.setattr(v.ino("a/b/big"), None, &SetAttr { mode: Some(0o444), ..SetAttr::default() }).unwrap();
    }
    v.sync_all().unwrap();
}

/// Everything stat and the attributes say.
fn seen(v: &Vault) -> BTreeMap<String, (Vec<u8>, String)> {
    let told = |path: &str| {
        let e = v.find(path).unwrap().attr;
        let mut attrs = v.list_xattr(e.ino).unwrap();
        attrs.sort();
        let values: Vec<_> =
            attrs.iter().map(|a| v.get_xattr(e.ino, n(std::str::from_utf8(a).unwrap())).unwrap()).collect();
        format!("{:?} {:o} {} {} {:?} {attrs:?} {values:?}", e.kind, e.mode, e.nlink, e.size, e.mtime)
    };
    let of = |(path, content): (String, Vec<u8>)| {
        let about = told(path.trim_end_matches('/'));
        (path, (content, about))
    };
    tree(v).into_iter().map(of).collect()
}

/// Says what differs, and not all the rest.
#[track_caller]
fn same(now: &BTreeMap<String, (Vec<u8>, String)>, before: &BTreeMap<String, (Vec<u8>, String)>) {
    assert!(now.keys().eq(before.keys()), "{:?} {:?}", now.keys(), before.keys());
    for (path, (content, about)) in before {
        assert_eq!(now[path].1, *about, "{path}");
        assert!(now[path].0 == *content, "{path}: other content");
    }
}

#[test]
fn nothing_is_seen_to_change_and_the_newest_keys_are_enough() {
    let recipes = [
        Recipe::default(),
        Recipe::plain(),
        Recipe { suite: Suite::Blake3, block_size: 65536, name_max: 143, ..Recipe::default() },
        Recipe { suite: Suite::Chacha, block_size: 16384, codec: Some(Codec::Lz4), ..Recipe::default() },
    ];
    for recipe in recipes.map(Recipe::anchored) {
        let (_dir, backend) = local();
        let v = recipe.make(&backend);
        furnish(&v, true);
        let before = seen(&v);
        let numbers = |v: &Vault| ["short", "c/twice", "a/twice too", "c/and here"].map(|p| v.ino(p));
        let links = numbers(&v);
        rotate(&v, &recipe, &[1], &[2, 1]);
        let done = rekey(&v, Rekey::Outer);
        assert_eq!((done.links, done.attributes, done.blocks), (3, 8, 0), "{done:?}");
        assert_eq!(done.records, if recipe.names == lamassu_format::header::NameMode::Plain { 0 } else { 5 });
        same(&seen(&v), &before);
        assert_eq!(numbers(&v), links, "numbers in use stay");
        v.clean();
        let again = rekey(&v, Rekey::Outer);
        assert_eq!((again.records, again.links, again.attributes, again.pages), (0, 0, 0, 0));
        v.close().unwrap();
        let v = recipe.open_with(&backend, &[1], &[2]);
        v.clean();
        same(&seen(&v), &before);

        rotate(&v, &recipe, &[2, 1], &[3, 2]);
        let done = rekey(&v, Rekey::Full);
        assert!(done.blocks > 0 && done.links == 3);
        assert_eq!(rekey(&v, Rekey::Full).blocks, 0);
        v.close().unwrap();
        let v = recipe.open_with(&backend, &[2], &[3]);
        same(&seen(&v), &before);
        assert!(v.clean().problems.is_empty());
        v.close().unwrap();
    }
}

#[test]
fn it_can_be_broken_off_and_goes_on_with_what_is_left() {
    let recipe = Recipe::default().anchored();
    let (_dir, backend) = local_fast();
    let v = recipe.make(&backend);
    furnish(&v, false);
    let before = seen(&v);
    rotate(&v, &recipe, &[2, 1], &[2, 1]);
    let (mut runs, mut blocks) = (0, 0);
    loop {
        let done = v.rekey(Rekey::Full, None, &Watch::new(200_000 * (runs + 1))).unwrap();
        blocks += done.blocks;
        runs += 1;
        if done.complete {
            break;
        }
        assert!(runs < 100);
    }
    assert!(runs > 2);
    let again = rekey(&v, Rekey::Full);
    assert_eq!((again.blocks, again.pages), (0, 0));
    assert!(blocks > 300);
    v.close().unwrap();
    let v = recipe.open_with(&backend, &[2], &[2]);
    v.clean();
    same(&seen(&v), &before);
}

/// Threads that each work in a directory of their own, and move things between two others, while the keys are rotated
/// and everything is re-keyed.
#[test]
fn others_use_the_vault_meanwhile() {
    let recipe = Recipe::default().anchored();
    let (_dir, backend) = local_fast();
    let v = recipe.make(&backend);
    furnish(&v, false);
    v.dir("left");
    v.dir("right");
    let stop = AtomicBool::new(false);
    let work = |who: usize| {
        let (v, mut round) = (&v, 0u64);
        let dir = format!("w{who}");
        v.dir(&dir);
        let mut content = noise(300_000, who as u64);
        while !stop.load(Ordering::Relaxed) || round < 3 {
            let path = format!("{dir}/f");
            v.put(&path, &content);
            let h = v.open_file(v.ino(&path), RW).unwrap();
            let at = (round * 7919 % 290_000) as usize;
            v.write(h, at as u64, &[round as u8; 5000]).unwrap();
            content[at..at + 5000].fill(round as u8);
            if round % 3 == 0 {
                v.fsync(h, false).unwrap();
            }
            v.release(h).unwrap();
            assert!(v.get(&path) == content);
            let (link, moved) = (format!("l{who}"), format!("m{who}"));
            let (from, to) = if round % 2 == 0 { ("left", "right") } else { ("right", "left") };
            if round == 0 {
                v.symlink(v.ino("left"), n(&link), path.as_bytes(), me()).unwrap();
                v.put(&format!("left/{moved}"), path.as_bytes());
            }
            for name in [&link, &moved] {
                v.rename(v.ino(from), n(name), v.ino(to), n(name), RenameMode::NoReplace).unwrap();
            }
            assert_eq!(v.readlink(v.ino(&format!("{to}/{link}"))).unwrap(), path.as_bytes());
            assert_eq!(v.get(&format!("{to}/{moved}")), path.as_bytes());
            round += 1;
        }
        content
    };
    let contents = std::thread::scope(|s| {
        let workers: Vec<_> = (0..3).map(|who| s.spawn(move || work(who))).collect();
        for newest in 2..6u8 {
            let all: Vec<u8> = (1..=newest).rev().collect();
            rotate(&v, &recipe, &all, &all);
            let work = if newest % 2 == 0 { Rekey::Full } else { Rekey::Outer };
            let done = v.rekey(work, None, &Watch::new(u64::MAX)).unwrap();
            assert_eq!(done.failed, 0);
        }
        stop.store(true, Ordering::Relaxed);
        workers.into_iter().map(|w| w.join().unwrap()).collect::<Vec<_>>()
    });
    rekey(&v, Rekey::Full);
    v.clean();
    let before = seen(&v);
    v.close().unwrap();
    let v = recipe.open_with(&backend, &[5], &[5]);
    v.clean();
    same(&seen(&v), &before);
    for (who, content) in contents.iter().enumerate() {
        assert!(v.get(&format!("w{who}/f")) == *content);
    }
}

/// Fails where it must.
#[derive(Default)]
struct Failures(parking_lot::Mutex<Vec<String>>);

impl RekeyProgress for Failures {
    fn dataset(&self, stored: &std::path::Path) -> lamassu_vault::Result<()> {
        panic!("{stored:?}: these vaults have none")
    }
    fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {}
    fn failed(&self, stored: &str, error: &VaultError) {
        assert!(matches!(error, VaultError::Outdated { .. }), "{error}");
        self.0.lock().push(format!("{stored}: {error}"));
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Shown again when the old keys are gone, it would be lost.
#[test]
fn what_the_store_withholds_is_named_and_the_rest_goes_on() {
    for what in ["d/file", "d"] {
        let recipe = Recipe::default().anchored();
        let (dir, backend) = local_fast();
        let v = recipe.make(&backend);
        v.dir("d");
        for path in ["d/file", "d/other", "top"] {
            v.put(path, &noise(30_000, 7));
        }
        let [stored, above] = [what, "d"].map(|path| dir.path().join(v.stored_path(n(path)).unwrap()));
        v.close().unwrap();
        let away = dir.path().with_extension("away");
        std::fs::rename(&stored, &away).unwrap();
        let v = recipe.open(&backend).unwrap();
        rotate(&v, &recipe, &[1], &[2, 1]);
        for resealed in [if what == "d" { 1 } else { 2 }, 0] {
            let failures = Failures::default();
            let done = v.rekey(Rekey::Outer, None, &failures).unwrap();
            assert_eq!((done.failed, done.complete, done.pages), (1, true, resealed), "{what}");
            let said = failures.0.into_inner();
            assert!(said.len() == 1 && said[0].contains("object "), "{said:?}");
            let dir = above.file_name().unwrap().to_str().unwrap();
            assert!(what == "d" || said[0].starts_with(dir), "{said:?} does not name {dir}");
        }
        v.close().unwrap();
        std::fs::rename(&away, &stored).unwrap();
        let v = recipe.open_with(&backend, &[1], &[2, 1]);
        assert!(rekey(&v, Rekey::Outer).pages > 0);
        v.close().unwrap();
        let v = recipe.open_with(&backend, &[1], &[2]);
        v.clean();
        assert_eq!(v.get("d/file"), noise(30_000, 7));
        v.close().unwrap();
    }
}

/// When the first directory is gone into, puts copies in the place of all, and has the vault meet these.
struct Exchange<'a> {
    vault: &'a Vault,
    /// In the store, by name.
    dirs: Vec<(&'static str, std::path::PathBuf)>,
    is_done: AtomicBool,
    failures: Failures,
}

impl RekeyProgress for Exchange<'_> {
    fn dataset(&self, stored: &std::path::Path) -> lamassu_vault::Result<()> {
        self.failures.dataset(stored)
    }
    fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {
        if self.is_done.swap(true, Ordering::Relaxed) {
            return;
        }
        for (name, dir) in &self.dirs {
            let away = dir.with_extension("away");
            std::fs::rename(dir, &away).unwrap();
            let copied = std::process::Command::new("cp").arg("-a").arg(&away).arg(dir).status();
            assert!(copied.unwrap().success());
            if let Ok(entry) = self.vault.lookup(ROOT, n(name)) {
                self.vault.forget(entry.attr.ino, 1);
            }
        }
    }
    fn failed(&self, stored: &str, error: &VaultError) {
        self.failures.failed(stored, error);
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// A directory that is exchanged before it is gone into is not one that a program has removed: the anchor has it.
#[test]
fn directories_that_the_store_exchanges_meanwhile_are_named() {
    let recipe = Recipe::default().anchored();
    let (store, backend) = local_fast();
    let v = recipe.make(&backend);
    let dirs = ["a", "b", "c"];
    for dir in dirs {
        v.dir(dir);
        v.put(&format!("{dir}/file"), &noise(30_000, 7));
    }
    let dirs = dirs.map(|dir| (dir, store.path().join(v.stored_path(n(dir)).unwrap()))).into();
    v.close().unwrap();
    let v = recipe.open(&backend).unwrap();
    rotate(&v, &recipe, &[1], &[2, 1]);
    let progress = Exchange { vault: &v, dirs, is_done: AtomicBool::new(false), failures: Failures::default() };
    let done = v.rekey(Rekey::Outer, None, &progress).unwrap();
    assert!(done.failed >= 2 && progress.failures.0.into_inner().len() >= 2, "{done:?}");
}

/// Stops after changes of the store, and power cuts: the tree is as it was under the keys there are, and a second run
/// completes the first. Without an anchor, whose own crashes `anchored_attrs_crash` plays.
#[test]
fn a_crash_at_any_change_leaves_the_same_tree() {
    crashes_at_any_change(Recipe { reserved: 62, ..Recipe::default() });
}

#[test]
fn a_crash_at_any_change_leaves_the_same_tree_compressed() {
    crashes_at_any_change(Recipe { reserved: 62, block_size: 8192, codec: Some(Codec::Lz4), ..Recipe::default() });
}

fn crashes_at_any_change(recipe: Recipe) {
    let crash = Arc::new(CrashBackend::with_granularity(recipe.block_size.into()));
    let backend: Arc<dyn Backend> = crash.clone();
    let v = recipe.make(&backend);
    for dir in ["a", "a/b"] {
        v.dir(dir);
    }
    v.put("a/f", &noise(30_000, 1));
    v.put("tiny", b"tiny");
    v.set_xattr(v.ino("tiny"), n("user.note"), b"noted", SetXattr::Any).unwrap();
    let target = "t".repeat(2000);
    for (name, target) in [("short", "tiny"), ("far", &target), ("twice", &target)] {
        v.symlink(v.ino("a"), n(name), target.as_bytes(), me()).unwrap();
    }
    v.link(v.ino("a/twice"), v.ino("a/b"), n("twice")).unwrap();
    v.sync_all().unwrap();
    let before = tree(&v);
    let start = crash.position();
    rotate(&v, &recipe, &[2, 1], &[2, 1]);
    rekey(&v, Rekey::Full);
    let end = crash.position();
    std::mem::forget(v);
    let sim = CrashSim::new(crash.log());
    let mut states = 0;
    for at in start..=end {
        let point = sim.at(at);
        let cuts = std::iter::once(point.least_state()).chain((0..3).map(|seed| point.random_state(seed)));
        for (cut, left) in std::iter::once(sim.prefix(at)).chain(cuts).enumerate() {
            survive(&recipe, left, &before, &format!("change {at} of {start}..{end}, cut {cut}"));
            states += 1;
        }
    }
    println!("a_crash_at_any_change_leaves_the_same_tree, blocks of {}: {states} crash states", recipe.block_size);
    assert!(states > 300, "{states}");
}

fn survive(recipe: &Recipe, left: MemoryBackend, before: &BTreeMap<String, Vec<u8>>, what: &str) {
    let backend: Arc<dyn Backend> = Arc::new(left);
    let v = recipe.open_with(&backend, &[2, 1], &[2, 1]);
    assert_eq!(&tree(&v), before, "{what}");
    assert_eq!(v.get_xattr(v.ino("tiny"), n("user.note")).unwrap(), b"noted", "{what}");
    let report = v.check(&[], true, &Quiet).unwrap();
    let expected = |p: &check::Problem| p.repaired && p.kind == check::kind::ORPHAN;
    assert!(report.problems.iter().all(expected), "{what}: {:#?}", report.problems);
    rekey(&v, Rekey::Full);
    v.close().unwrap();
    let v = recipe.open_with(&backend, &[2], &[2]);
    assert_eq!(&tree(&v), before, "{what}");
    assert!(v.check(&[], false, &Quiet).unwrap().problems.is_empty(), "{what}");
    assert!(backend.root().open_dir(n("lamassu.staging")).unwrap().read_dir().unwrap().is_empty(), "{what}");
    v.close().unwrap();
}
