//! Random sequences of operations against a model: what a plain file system in memory would do, the vault does, also
//! after it is closed and opened again.

mod plain;

use crate::common;

use common::anchored::open_anchored;
use common::*;
use lamassu_anchor::table::{MemoryTable, Table};
use lamassu_format::Codec;
use lamassu_store::Backend;
use lamassu_store::backend::{CrashBackend, CrashSim, MemoryBackend};
use lamassu_vault::*;
use plain::{Body, Model, No, why};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::result::Result;
use std::sync::Arc;

/// Names to play with: short, long (by hash), and nearly long.
const NAMES: usize = 6;

fn name(i: usize) -> String {
    match i {
        4 => "q".repeat(255),
        5 => "r".repeat(160),
        i => format!("n{i}"),
    }
}

/// Directories to play in: the root, and one or two levels below it.
fn path(p: &[usize]) -> String {
    p.iter().map(|i| name(*i)).collect::<Vec<_>>().join("/")
}

#[derive(Clone, Debug)]
enum Op {
    Mkdir(Vec<usize>),
    Rmdir(Vec<usize>),
    Write(Vec<usize>, u64, usize, u8),
    Truncate(Vec<usize>, u64),
    Symlink(Vec<usize>, usize),
    Unlink(Vec<usize>),
    Link(Vec<usize>, Vec<usize>),
    Rename(Vec<usize>, Vec<usize>, u8),
    SetXattr(Vec<usize>, u8, usize),
    RemoveXattr(Vec<usize>, u8),
    Chmod(Vec<usize>, u32),
    Punch(Vec<usize>, u64, u64),
    Reopen,
    /// The daemon is killed, and the vault opened again.
    Kill,
    /// Everything is synced; then the power goes, with a seed that says what else survives.
    PowerCut(u64),
    Maintain,
}

fn place() -> impl Strategy<Value = Vec<usize>> {
    // Few names and short paths, so that most operations find something to act on.
    let name = || prop_oneof![6 => 0..3usize, 1 => 3..NAMES];
    prop_oneof![
        3 => prop::collection::vec(name(), 1),
        3 => prop::collection::vec(name(), 2),
        1 => prop::collection::vec(name(), 3),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => place().prop_map(Op::Mkdir),
        2 => place().prop_map(Op::Rmdir),
        6 => (place(), 0..600_000u64, 0..20_000usize, any::<u8>()).prop_map(|(p, o, l, b)| Op::Write(p, o, l, b)),
        2 => (place(), 0..600_000u64).prop_map(|(p, s)| Op::Truncate(p, s)),
        2 => (place(), prop_oneof![1..200usize, 690..4096usize]).prop_map(|(p, l)| Op::Symlink(p, l)),
        2 => place().prop_map(Op::Unlink),
        2 => (place(), place()).prop_map(|(a, b)| Op::Link(a, b)),
        6 => (place(), place(), 0..3u8).prop_map(|(a, b, m)| Op::Rename(a, b, m)),
        1 => (place(), 0..3u8, 0..300usize).prop_map(|(p, n, l)| Op::SetXattr(p, n, l)),
        1 => (place(), 0..3u8).prop_map(|(p, n)| Op::RemoveXattr(p, n)),
        1 => (place(), 0..0o1000u32).prop_map(|(p, m)| Op::Chmod(p, m | 0o700)),
        3 => (place(), 0..600_000u64, 0..100_000u64).prop_map(|(p, o, l)| Op::Punch(p, o, l)),
        1 => Just(Op::Reopen),
        1 => Just(Op::Kill),
        1 => any::<u64>().prop_map(Op::PowerCut),
        1 => Just(Op::Maintain),
    ]
}

/// The vault's side: the same operations by path.
struct Real {
    recipe: Recipe,
    backend: Arc<dyn Backend>,
    /// The backend, where it can crash.
    crash: Option<Arc<CrashBackend>>,
    /// That of its anchor, if it has one.
    table: Option<Arc<dyn Table>>,
    vault: Option<Vault>,
}

impl Real {
    /// Goes on with what a crash left of the store.
    fn crashed(&mut self, left: &MemoryBackend) {
        let crash = Arc::new(CrashBackend::over(left, self.recipe.block_size.into()));
        // What the vault writes at its end goes to the old store, and of an anchored one nowhere.
        let vault = self.vault.take();
        if self.table.is_some() {
            std::mem::forget(vault);
        }
        (self.backend, self.crash) = (crash.clone(), Some(crash));
        self.open();
    }

    fn open(&mut self) {
        let opened = match &self.table {
            Some(table) => open_anchored(&self.recipe, &self.backend, table, false),
            None => self.recipe.open(&self.backend),
        };
        self.vault = Some(opened.unwrap());
    }

    fn v(&self) -> &Vault {
        self.vault.as_ref().expect("open")
    }

    fn at(&self, p: &[usize]) -> Result<Ino, No> {
        // Kept referenced, as a kernel does: numbers stay valid, and what they name is followed through renames.
        self.v().resolve(n(&path(p))).map(|e| e.attr.ino).map_err(|e| why(&e))
    }

    fn parent(&self, p: &[usize]) -> Result<(Ino, String), No> {
        let (last, dirs) = p.split_last().expect("not empty");
        let dir = self.at(dirs)?;
        match self.v().getattr(dir, None).unwrap().kind {
            Kind::Dir => Ok((dir, name(*last))),
            _ => Err(No::Dir),
        }
    }

    fn write(&self, p: &[usize], offset: u64, data: &[u8]) -> Result<(), No> {
        let (dir, name) = self.parent(p)?;
        let v = self.v();
        let handle = match v.create(dir, n(&name), 0o644, RW, me()) {
            Ok((_, handle)) => handle,
            Err(VaultError::Exists) => {
                let e = v.lookup(dir, n(&name)).unwrap();
                if e.attr.kind == Kind::Symlink {
                    return Err(No::Exists);
                }
                v.open_file(e.attr.ino, RW).map_err(|e| why(&e))?
            }
            Err(e) => return Err(why(&e)),
        };
        assert_eq!(v.write(handle, offset, data).unwrap(), data.len());
        v.flush(handle).unwrap();
        v.release(handle).unwrap();
        Ok(())
    }

    fn reopen(&mut self) {
        self.v().close().unwrap();
        self.vault = None;
        self.open();
    }
}

fn mode_of(m: u8) -> RenameMode {
    [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange][usize::from(m)]
}

fn apply(model: &mut Model, real: &mut Real, op: &Op) {
    let (expected, found): Done = match op {
        Op::Mkdir(p) => {
            let made = real.parent(p).and_then(|(d, n_)| real.v().mkdir(d, n(&n_), 0o755, me()).map_err(|e| why(&e)));
            (model.create(p, Body::Dir(BTreeMap::new())).map(drop), made.map(|_| ()))
        }
        Op::Rmdir(p) => {
            let gone = real.parent(p).and_then(|(d, n_)| real.v().rmdir(d, n(&n_)).map_err(|e| why(&e)));
            (model.remove(p, true), gone)
        }
        Op::Unlink(p) => {
            let gone = real.parent(p).and_then(|(d, n_)| real.v().unlink(d, n(&n_)).map_err(|e| why(&e)));
            (model.remove(p, false), gone)
        }
        Op::Write(p, offset, len, byte) => write(model, real, p, *offset, &vec![*byte; *len]),
        Op::Truncate(p, size) => truncate(model, real, p, *size),
        Op::Symlink(p, len) => {
            let target = vec![b't'; *len];
            let made =
                real.parent(p).and_then(|(d, n_)| real.v().symlink(d, n(&n_), &target, me()).map_err(|e| why(&e)));
            (model.create(p, Body::Link(target)).map(drop), made.map(|_| ()))
        }
        Op::Link(a, b) => link(model, real, a, b),
        Op::Rename(a, b, m) => {
            let done = real.parent(a).and_then(|(from, name)| {
                let (to, to_name) = real.parent(b)?;
                real.v().rename(from, n(&name), to, n(&to_name), mode_of(*m)).map_err(|e| why(&e))
            });
            (model.rename(a, b, mode_of(*m)), done)
        }
        Op::SetXattr(p, which, len) => set_xattr(model, real, p, (*which, *len)),
        Op::RemoveXattr(p, which) => remove_xattr(model, real, p, *which),
        Op::Chmod(p, mode) => {
            let Ok(i) = model.walk(p) else { return };
            if !matches!(model.inodes[i].body, Body::Link(_)) {
                let set = SetAttr { mode: Some(*mode), ..SetAttr::default() };
                real.v().setattr(real.at(p).unwrap(), None, &set).unwrap();
                model.inodes[i].mode = Some(*mode);
            }
            return;
        }
        Op::Punch(p, offset, len) => return punch(model, real, p, (*offset, *len)),
        Op::Reopen => {
            model.synced();
            return real.reopen();
        }
        Op::Maintain => {
            model.synced();
            return real.v().sync_all().unwrap();
        }
        Op::Kill => {
            let Some(crash) = real.crash.clone() else { return };
            if real.table.is_some() {
                // What the anchor has not heard of is gone, or was never removed: `anchored` tests that.
                real.v().sync_all().unwrap();
            }
            real.crashed(&crash.snapshot());
            return adopt(model, real);
        }
        Op::PowerCut(seed) => {
            let Some(crash) = real.crash.clone() else { return };
            real.v().sync_all().unwrap();
            model.synced();
            let sim = CrashSim::new(crash.log());
            return real.crashed(&sim.random_state(*seed, crash.position()));
        }
    };
    assert_eq!(found, expected, "{op:?}");
}

/// What the model expects of an operation, and what the vault did.
type Done = (Result<(), No>, Result<(), No>);

fn truncate(model: &mut Model, real: &Real, p: &[usize], size: u64) -> Done {
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    let done = real.at(p).and_then(|i| real.v().setattr(i, None, &set).map_err(|e| why(&e)));
    let expected = model.walk(p).and_then(|i| match &model.inodes[i].body {
        Body::File(_) => {
            model.change(i, |data| data.resize(size as usize, 0));
            Ok(())
        }
        Body::Dir(_) => Err(No::IsDir),
        Body::Link(_) => Err(No::Invalid),
    });
    (expected, done.map(|_| ()))
}

fn set_xattr(model: &mut Model, real: &Real, p: &[usize], (which, len): (u8, usize)) -> Done {
    let (key, value) = (format!("user.a{which}"), vec![which; len]);
    let done = real.at(p).and_then(|i| real.v().set_xattr(i, n(&key), &value, SetXattr::Any).map_err(|e| why(&e)));
    let expected = model.walk(p).and_then(|i| match model.inodes[i].body {
        Body::Link(_) => Err(No::Permission),
        _ => {
            model.inodes[i].xattrs.insert(key, value);
            Ok(())
        }
    });
    (expected, done)
}

fn remove_xattr(model: &mut Model, real: &Real, p: &[usize], which: u8) -> Done {
    let key = format!("user.a{which}");
    let done = real.at(p).and_then(|i| real.v().remove_xattr(i, n(&key)).map_err(|e| why(&e)));
    let expected = model.walk(p).and_then(|i| match model.inodes[i].body {
        Body::Link(_) => Err(No::Permission),
        _ => model.inodes[i].xattrs.remove(&key).map(drop).ok_or(No::Attribute),
    });
    (expected, done)
}

/// Punches a hole, where there is a file.
fn punch(model: &mut Model, real: &Real, p: &[usize], (offset, len): (u64, u64)) {
    let Ok(i) = model.walk(p) else { return };
    if matches!(model.inodes[i].body, Body::File(_)) && len > 0 {
        let v = real.v();
        let handle = v.open_file(real.at(p).unwrap(), RW).unwrap();
        v.fallocate(handle, Fallocate::Punch, offset, len).unwrap();
        v.release(handle).unwrap();
        model.change(i, |data| {
            let (from, to) = (data.len().min(offset as usize), data.len().min((offset + len) as usize));
            data[from..to].fill(0);
        });
    }
}

fn write(model: &mut Model, real: &Real, p: &[usize], offset: u64, data: &[u8]) -> Done {
    let found = real.write(p, offset, data);
    let expected = match model.create(p, Body::File(Vec::new())) {
        Err(No::Exists) => model.walk(p),
        other => other,
    };
    let expected = expected.and_then(|i| match &model.inodes[i].body {
        Body::File(_) => {
            let end = offset as usize + data.len();
            if !data.is_empty() {
                model.change(i, |content| {
                    content.resize(content.len().max(end), 0);
                    content[offset as usize..end].copy_from_slice(data);
                });
            }
            Ok(())
        }
        Body::Dir(_) => Err(No::IsDir),
        Body::Link(_) => Err(No::Exists),
    });
    (expected, found)
}

fn link(model: &mut Model, real: &Real, a: &[usize], b: &[usize]) -> Done {
    let done = real.at(a).and_then(|i| {
        let (d, name) = real.parent(b)?;
        real.v().link(i, d, n(&name)).map(drop_entry).map_err(|e| why(&e))
    });
    let expected = model.walk(a).and_then(|i| {
        let (dir, name) = model.parent(b)?;
        if model.is_dir(i) {
            return Err(No::Permission);
        }
        if model.entries(dir)?.contains_key(&name) {
            return Err(No::Exists);
        }
        model.entries_mut(dir).insert(name, i);
        Ok(())
    });
    (expected, done)
}

fn drop_entry(_: Entry) {}

/// After a kill: every block of every file is one of those it had since the last sync, and from now on that is what the
/// file holds.
fn adopt(model: &mut Model, real: &Real) {
    let mut files: BTreeMap<usize, String> = BTreeMap::new();
    let mut todo = vec![(0, String::new())];
    while let Some((dir, path)) = todo.pop() {
        for (name, ino) in model.entries(dir).unwrap() {
            let path = if path.is_empty() { name.clone() } else { format!("{path}/{name}") };
            match model.inodes[*ino].body {
                Body::Dir(_) => todo.push((*ino, path)),
                Body::File(_) => drop(files.insert(*ino, path)),
                Body::Link(_) => {}
            }
        }
    }
    for (ino, path) in files {
        let (found, inode) = (real.v().get(&path), &mut model.inodes[ino]);
        let Body::File(now) = &mut inode.body else { panic!("a file") };
        let versions: Vec<&Vec<u8>> = inode.earlier.iter().chain([&*now]).collect();
        assert!(versions.iter().any(|v| v.len() >= found.len()), "{path}: {} bytes is too long", found.len());
        let size = real.recipe.block_size as usize;
        for (b, block) in found.chunks(size).enumerate() {
            let is =
                |v: &&&Vec<u8>| block.iter().enumerate().all(|(i, x)| *x == v.get(b * size + i).copied().unwrap_or(0));
            // Of a growth the size may be there and the data not yet.
            let fresh = versions.iter().any(|v| v.len() <= b * size) && block.iter().all(|x| *x == 0);
            assert!(fresh || versions.iter().find(is).is_some(), "{path}: block {b} is neither old nor new");
        }
        *now = found;
        inode.earlier.clear();
    }
}

/// Compares everything below a directory.
fn compare(model: &Model, real: &Real, p: &str, ino: usize, names: &mut BTreeMap<usize, Ino>) {
    let v = real.v();
    let e = v.find(p).unwrap_or_else(|e| panic!("{p}: {e}"));
    let inode = &model.inodes[ino];
    assert_eq!(*names.entry(ino).or_insert(e.attr.ino), e.attr.ino, "{p}: names of one inode");
    if let Some(mode) = inode.mode {
        assert_eq!(e.attr.mode, mode, "{p}");
    }
    let mut listed = v.list_xattr(e.attr.ino).unwrap();
    listed.sort();
    assert!(listed.iter().map(Vec::as_slice).eq(inode.xattrs.keys().map(|k| k.as_bytes())), "{p}: attributes");
    for (key, value) in &inode.xattrs {
        assert_eq!(&v.get_xattr(e.attr.ino, n(key)).unwrap(), value, "{p}: {key}");
    }
    match &inode.body {
        Body::File(data) => {
            assert_eq!(e.attr.size, data.len() as u64, "{p}");
            assert!(v.get(p) == *data, "{p}: content");
        }
        Body::Link(target) => {
            assert_eq!(e.attr.size, target.len() as u64, "{p}");
            assert_eq!(&v.readlink(e.attr.ino).unwrap(), target, "{p}");
        }
        Body::Dir(entries) => {
            assert!(v.list(p).iter().eq(entries.keys()), "{p}: {:?} is not {entries:?}", v.list(p));
            for (name, below) in entries {
                let path = if p.is_empty() { name.clone() } else { format!("{p}/{name}") };
                compare(model, real, &path, *below, names);
            }
        }
    }
}

/// `LAMASSU_MODEL_SCALE`: how many times more is tried than by default.
fn cases(default: u32) -> u32 {
    std::env::var("LAMASSU_MODEL_SCALE").ok().and_then(|s| s.parse().ok()).map_or(default, |scale: u32| default * scale)
}

/// Compression: none, or that of the mode, or one.
fn codec() -> impl Strategy<Value = Option<Codec>> {
    prop::sample::select(vec![codec_of_mode(), Some(Codec::Lz4), Some(Codec::Zstd(1))])
}

/// Plays operations in memory, where crashes can be had.
fn run(recipe: Recipe, ops: &[Op]) {
    let crash = Arc::new(CrashBackend::with_granularity(recipe.block_size.into()));
    play(recipe, crash.clone(), Some(crash), ops);
}

fn play(recipe: Recipe, backend: Arc<dyn Backend>, crash: Option<Arc<CrashBackend>>, ops: &[Op]) {
    play_with(recipe, backend, crash, None, ops);
}

fn play_with(
    recipe: Recipe,
    backend: Arc<dyn Backend>,
    crash: Option<Arc<CrashBackend>>,
    table: Option<Arc<dyn Table>>,
    ops: &[Op],
) {
    Vault::make_tree(&*backend, &recipe.header(), &recipe.ring()).unwrap();
    backend.sync().unwrap();
    let (mut model, mut real) = (Model::new(), Real { recipe, backend, crash, table, vault: None });
    real.open();
    for op in ops {
        apply(&mut model, &mut real, op);
    }
    compare(&model, &real, "", 0, &mut BTreeMap::new());
    real.reopen();
    compare(&model, &real, "", 0, &mut BTreeMap::new());
    let report = real.v().check(&[], false, &Quiet).unwrap();
    // Rests of hard-linked long targets may stay behind; nothing else.
    assert!(report.problems.iter().all(|p| p.kind == check::kind::ORPHAN), "{:#?}", report.problems);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(1000), ..ProptestConfig::default() })]

    #[test]
    fn the_vault_is_a_file_system(ops in prop::collection::vec(op(), 1..150)) {
        run(Recipe { reserved: 2, ..Recipe::default() }, &ops);
    }

    #[test]
    fn so_it_is_with_plain_names_and_other_blocks(ops in prop::collection::vec(op(), 1..40), codec in codec()) {
        let recipe = Recipe { block_size: 16384, suite: lamassu_format::Suite::Chacha, codec, ..Recipe::plain() };
        run(recipe, &ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(40), ..ProptestConfig::default() })]

    #[test]
    fn so_it_is_with_an_anchor(ops in prop::collection::vec(op(), 1..150), is_plain: bool, codec in codec()) {
        let recipe = if is_plain { Recipe::plain() } else { Recipe { reserved: 2, ..Recipe::default() } };
        let recipe = match codec {
            Some(_) => Recipe { block_size: 8192, codec, ..recipe },
            None => recipe,
        };
        let crash = Arc::new(CrashBackend::with_granularity(recipe.block_size.into()));
        play_with(recipe, crash.clone(), Some(crash), Some(Arc::new(MemoryTable::default())), &ops);
    }

    #[test]
    fn so_it_is_in_every_domain(ops in prop::collection::vec(op(), 1..60), domain in prop::sample::select(&lamassu_format::Domain::ALL[1..])) {
        run(Recipe { domain, reserved: 2, ..Recipe::default() }, &ops);
    }

    #[test]
    fn so_it_is_with_large_blocks(ops in prop::collection::vec(op(), 1..60), block_size in prop::sample::select(&[65536, 1 << 20]), codec in codec()) {
        run(Recipe { block_size, codec, ..Recipe::default() }, &ops);
    }

    #[test]
    fn and_over_a_directory_of_this_host(ops in prop::collection::vec(op(), 1..40)) {
        let (_dir, backend) = local();
        play(Recipe { name_max: 143, ..Recipe::default() }, backend, None, &ops);
    }
}
