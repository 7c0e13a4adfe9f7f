//! Random system calls on a mounted vault and on a plain directory: the same answers, the same errors, and the same
//! tree in the end. Among the calls the vault is mounted anew, and its daemon is killed: what was synced must be there,
//! the rest readable. Of an anchored vault a kill may also take back changes of names that nobody synced
//! (`docs/freshness.md`): each path is as it was at some moment since the last sync of all.
//!
//! `LAMASSU_MODEL_SEQUENCES` sets how many sequences each test plays; `LAMASSU_MODEL_SEED` begins elsewhere. A failure
//! prints the shortest sequence that fails.

use crate::support::Bench;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Files a sequence holds open at once.
const SLOTS: usize = 3;
const SIZE_MAX: u64 = 700_000;

/// A path: names by number, from the sequence's own directory down.
type Place = Vec<usize>;

fn name(i: usize) -> OsString {
    match i {
        3 => OsString::from("l".repeat(255)),
        4 => OsString::from_vec(b"not \xff\xfe UTF-8\n".to_vec()),
        5 => OsString::from("x".repeat(256)),
        i => OsString::from(format!("n{i}")),
    }
}

fn below(root: &Path, place: &[usize]) -> PathBuf {
    place.iter().fold(root.to_path_buf(), |path, i| path.join(name(*i)))
}

#[derive(Clone, Debug)]
enum Op {
    Mkdir(Place),
    Rmdir(Place),
    Open(usize, Place, u8),
    Close(usize),
    Write(usize, u64, usize, u8),
    Read(usize, u64, usize),
    Fsync(usize),
    Ftruncate(usize, u64),
    Fallocate(usize, u8, u64, u64),
    Truncate(Place, u64),
    Unlink(Place),
    Rename(Place, Place, u8),
    Link(Place, Place),
    Symlink(Place, u8),
    Readlink(Place),
    Chmod(Place, u32),
    SetXattr(Place, u8, usize, u8),
    GetXattr(Place, u8),
    RemoveXattr(Place, u8),
    Utimens(Place, i64),
    Stat(Place),
    List(Place),
    /// Everything closed; unmounted and mounted.
    Remount,
    /// SIGKILL; with true after an fsync of every file.
    Kill(bool),
}

fn place() -> impl Strategy<Value = Place> {
    // Few names and short paths, so that most operations find something to act on.
    let name = || prop_oneof![12 => 0..3usize, 1 => Just(3), 1 => Just(4), 1 => Just(5)];
    prop_oneof![4 => prop::collection::vec(name(), 1), 3 => prop::collection::vec(name(), 2), 1 => prop::collection::vec(name(), 3)]
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![2 => 0..200u64, 3 => 0..20_000u64, 1 => (0..170u64).prop_map(|n| n * 4096), 2 => 0..SIZE_MAX]
}

fn op() -> impl Strategy<Value = Op> {
    let slot = || 0..SLOTS;
    let data = prop_oneof![4 => (slot(), size(), 0..9000usize, any::<u8>()), 1 => (slot(), size(), 0..90_000usize, any::<u8>())];
    prop_oneof![
        5 => place().prop_map(Op::Mkdir),
        2 => place().prop_map(Op::Rmdir),
        12 => (slot(), place(), 0..12u8).prop_map(|(s, p, f)| Op::Open(s, p, f)),
        2 => slot().prop_map(Op::Close),
        14 => data.prop_map(|(s, o, l, b)| Op::Write(s, o, l, b)),
        5 => (slot(), size(), 0..20_000usize).prop_map(|(s, o, l)| Op::Read(s, o, l)),
        2 => slot().prop_map(Op::Fsync),
        4 => (slot(), size()).prop_map(|(s, n)| Op::Ftruncate(s, n)),
        4 => (slot(), 0..3u8, size(), size()).prop_map(|(s, m, o, l)| Op::Fallocate(s, m, o, l)),
        2 => (place(), size()).prop_map(|(p, n)| Op::Truncate(p, n)),
        3 => place().prop_map(Op::Unlink),
        5 => (place(), place(), 0..3u8).prop_map(|(a, b, m)| Op::Rename(a, b, m)),
        3 => (place(), place()).prop_map(|(a, b)| Op::Link(a, b)),
        2 => (place(), 0..5u8).prop_map(|(p, t)| Op::Symlink(p, t)),
        1 => place().prop_map(Op::Readlink),
        1 => (place(), 0..0o1000u32).prop_map(|(p, m)| Op::Chmod(p, m)),
        2 => (place(), 0..3u8, 0..300usize, 0..3u8).prop_map(|(p, n, l, f)| Op::SetXattr(p, n, l, f)),
        1 => (place(), 0..3u8).prop_map(|(p, n)| Op::GetXattr(p, n)),
        1 => (place(), 0..3u8).prop_map(|(p, n)| Op::RemoveXattr(p, n)),
        1 => (place(), -2_000_000_000..4_000_000_000i64).prop_map(|(p, t)| Op::Utimens(p, t)),
        3 => place().prop_map(Op::Stat),
        1 => place().prop_map(Op::List),
        1 => Just(Op::Remount),
        1 => any::<bool>().prop_map(Op::Kill),
    ]
}

/// What a call gave, as far as both sides must agree.
#[derive(Debug, PartialEq)]
enum Reply {
    Done,
    Bytes(Vec<u8>),
    Number(u64),
    Names(Vec<OsString>),
    Stat { kind: u32, mode: u32, links: u64, size: u64 },
}

/// One of the two: a directory and the files open in it.
struct Side {
    root: PathBuf,
    open: [Option<OwnedFd>; SLOTS],
}

fn open_flags(kind: u8) -> OFlags {
    let rw = OFlags::RDWR;
    match kind {
        0..=2 => rw | OFlags::CREATE,
        3 => rw,
        4 => rw | OFlags::CREATE | OFlags::EXCL,
        5 => rw | OFlags::CREATE | OFlags::TRUNC,
        6 => OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND,
        7 => OFlags::RDONLY,
        8 => OFlags::RDONLY | OFlags::NOFOLLOW,
        9 => OFlags::WRONLY | OFlags::TRUNC,
        10 => rw | OFlags::CREATE | OFlags::SYNC,
        _ => OFlags::RDONLY | OFlags::DIRECTORY,
    }
}

impl Side {
    fn file(&self, slot: usize) -> rustix::io::Result<&OwnedFd> {
        self.open[slot].as_ref().ok_or(Errno::BADF)
    }

    fn at(&self, place: &[usize]) -> PathBuf {
        below(&self.root, place)
    }

    fn apply(&mut self, op: &Op) -> rustix::io::Result<Reply> {
        match op {
            Op::Mkdir(p) => rustix::fs::mkdir(self.at(p), Mode::from_raw_mode(0o755))?,
            Op::Rmdir(p) => rustix::fs::rmdir(self.at(p))?,
            Op::Open(slot, p, kind) => {
                self.open[*slot] = None;
                let flags = open_flags(*kind) | OFlags::CLOEXEC;
                self.open[*slot] = Some(rustix::fs::open(self.at(p), flags, Mode::from_raw_mode(0o644))?);
            }
            Op::Close(slot) => self.open[*slot] = None,
            Op::Write(slot, offset, len, byte) => {
                let data: Vec<u8> = (0..*len).map(|i| byte.wrapping_add((i / 64) as u8)).collect();
                return Ok(Reply::Number(rustix::io::pwrite(self.file(*slot)?, &data, *offset)? as u64));
            }
            Op::Read(slot, offset, len) => {
                let mut data = vec![0; *len];
                let n = rustix::io::pread(self.file(*slot)?, &mut data, *offset)?;
                data.truncate(n);
                return Ok(Reply::Bytes(data));
            }
            Op::Fsync(slot) => rustix::fs::fsync(self.file(*slot)?)?,
            Op::Ftruncate(slot, size) => rustix::fs::ftruncate(self.file(*slot)?, *size)?,
            Op::Fallocate(slot, mode, offset, len) => {
                let keep = FallocateFlags::KEEP_SIZE;
                let mode = [FallocateFlags::empty(), keep, keep | FallocateFlags::PUNCH_HOLE][usize::from(*mode)];
                rustix::fs::fallocate(self.file(*slot)?, mode, *offset, *len)?;
            }
            _ => return self.apply_to_names(op),
        }
        Ok(Reply::Done)
    }

    fn apply_to_names(&self, op: &Op) -> rustix::io::Result<Reply> {
        let attr = |n: &u8| format!("user.a{n}");
        match op {
            Op::Truncate(p, size) => {
                let file = rustix::fs::open(self.at(p), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
                rustix::fs::ftruncate(file, *size)?;
            }
            Op::Unlink(p) => rustix::fs::unlink(self.at(p))?,
            Op::Rename(a, b, mode) => {
                let mode = [RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE][usize::from(*mode)];
                rustix::fs::renameat_with(CWD, self.at(a), CWD, self.at(b), mode)?;
            }
            Op::Link(a, b) => rustix::fs::link(self.at(a), self.at(b))?,
            Op::Symlink(p, target) => match target {
                0..=2 => rustix::fs::symlink(name((*target).into()), self.at(p))?,
                3 => rustix::fs::symlink("t".repeat(700), self.at(p))?,
                _ => rustix::fs::symlink("a/".repeat(1500), self.at(p))?,
            },
            Op::Readlink(p) => {
                return Ok(Reply::Bytes(rustix::fs::readlink(self.at(p), Vec::new())?.into_bytes()));
            }
            Op::Chmod(p, mode) => rustix::fs::chmod(self.at(p), Mode::from_raw_mode(*mode))?,
            Op::SetXattr(p, n, len, flags) => {
                let flags = [XattrFlags::empty(), XattrFlags::CREATE, XattrFlags::REPLACE][usize::from(*flags)];
                rustix::fs::lsetxattr(self.at(p), attr(n), &vec![*n; *len], flags)?;
            }
            Op::GetXattr(p, n) => {
                let mut value = vec![0; 400];
                let len = rustix::fs::lgetxattr(self.at(p), attr(n), &mut value[..])?;
                value.truncate(len);
                return Ok(Reply::Bytes(value));
            }
            Op::RemoveXattr(p, n) => rustix::fs::lremovexattr(self.at(p), attr(n))?,
            Op::Utimens(p, seconds) => {
                let time = Timespec { tv_sec: *seconds, tv_nsec: 123_456_789 };
                let times = Timestamps { last_access: time, last_modification: time };
                rustix::fs::utimensat(CWD, self.at(p), &times, AtFlags::SYMLINK_NOFOLLOW)?;
                let found = rustix::fs::lstat(self.at(p))?;
                return Ok(Reply::Number(found.st_mtime as u64));
            }
            Op::Stat(p) => {
                let s = rustix::fs::lstat(self.at(p))?;
                // The size of a directory, and how its links are counted, are the store's own affair.
                let is_dir = s.st_mode & 0o170_000 == 0o040_000;
                let (links, size) = if is_dir { (0, 0) } else { (s.st_nlink as u64, s.st_size as u64) };
                return Ok(Reply::Stat { kind: s.st_mode & 0o170_000, mode: s.st_mode & 0o7777, links, size });
            }
            Op::List(p) => return names_of(&self.at(p)).map(Reply::Names),
            other => panic!("not an operation of one side: {other:?}"),
        }
        Ok(Reply::Done)
    }
}

fn names_of(dir: &Path) -> rustix::io::Result<Vec<OsString>> {
    let entries = fs::read_dir(dir).map_err(|e| Errno::from_io_error(&e).unwrap())?;
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name()).collect();
    names.sort();
    Ok(names)
}

/// Everything below a directory: kind, mode, links, attributes; content of files and targets of links.
#[derive(PartialEq, Clone)]
struct Node {
    mode: u32,
    links: u64,
    attributes: BTreeMap<OsString, Vec<u8>>,
    content: Vec<u8>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (mode, len) = (self.mode, self.content.len());
        write!(f, "mode {mode:o}, {} links, {len} bytes, attributes {:?}", self.links, self.attributes.keys())
    }
}

fn tree(root: &Path) -> BTreeMap<PathBuf, Node> {
    let mut found = BTreeMap::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(dir) = todo.pop() {
        for name in names_of(&root.join(&dir)).unwrap() {
            let path = dir.join(name);
            let full = root.join(&path);
            let meta = fs::symlink_metadata(&full).unwrap_or_else(|e| panic!("{full:?}: {e}"));
            let content = match meta.mode() & 0o170_000 {
                0o100_000 => fs::read(&full).unwrap_or_else(|e| panic!("{full:?}: {e}")),
                0o120_000 => fs::read_link(&full).unwrap().into_os_string().into_vec(),
                _ => Vec::new(),
            };
            let links = if meta.is_dir() { 0 } else { meta.nlink() };
            if meta.is_dir() {
                todo.push(path.clone());
            }
            found.insert(path, Node { mode: meta.mode(), links, attributes: attributes(&full), content });
        }
    }
    found
}

fn attributes(path: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let mut list = vec![0; 4096];
    let Ok(len) = rustix::fs::llistxattr(path, &mut list[..]) else { return BTreeMap::new() };
    let names = list[..len].split(|b| *b == 0).filter(|n| n.starts_with(b"user."));
    let value = |n: &[u8]| {
        let mut value = vec![0; 4096];
        let len = rustix::fs::lgetxattr(path, OsStr::from_bytes(n), &mut value[..]).unwrap();
        (OsStr::from_bytes(n).to_owned(), value[..len].to_vec())
    };
    names.map(value).collect()
}

/// The first difference between two trees; `contents` false looks at names, kinds, modes, links and attributes alone.
fn difference(plain: &BTreeMap<PathBuf, Node>, vault: &BTreeMap<PathBuf, Node>, contents: bool) -> Option<String> {
    let all: BTreeSet<_> = plain.keys().chain(vault.keys()).collect();
    all.into_iter().find_map(|path| {
        let (a, b) = (plain.get(path), vault.get(path));
        let same = match (a, b) {
            (Some(a), Some(b)) if !contents => {
                Node { content: Vec::new(), ..a.clone() } == Node { content: Vec::new(), ..b.clone() }
            }
            _ => a == b,
        };
        let at = || a.zip(b).and_then(|(a, b)| a.content.iter().zip(&b.content).position(|(x, y)| x != y));
        (!same).then(|| format!("{path:?}: plain {a:?}, vault {b:?}, contents differ from {:?}", at()))
    })
}

/// What each path was at some moment since all was synced: a kind, or nothing.
#[derive(Default)]
struct Past {
    moments: usize,
    paths: BTreeMap<PathBuf, BTreeMap<u32, usize>>,
}

impl Past {
    fn since(root: &Path) -> Past {
        let mut past = Past::default();
        past.note(root);
        past
    }

    fn note(&mut self, root: &Path) {
        self.moments += 1;
        let mut todo = vec![PathBuf::new()];
        while let Some(dir) = todo.pop() {
            for name in names_of(&root.join(&dir)).unwrap() {
                let path = dir.join(name);
                let kind = fs::symlink_metadata(root.join(&path)).unwrap().mode() & 0o170_000;
                if kind == 0o040_000 {
                    todo.push(path.clone());
                }
                *self.paths.entry(path).or_default().entry(kind).or_default() += 1;
            }
        }
    }

    /// The first path that is as it never was.
    fn contradiction(&self, found: &BTreeMap<PathBuf, Node>) -> Option<String> {
        let all: BTreeSet<_> = self.paths.keys().chain(found.keys()).collect();
        all.into_iter().find_map(|path| {
            let kinds = self.paths.get(path).cloned().unwrap_or_default();
            let is_possible = match found.get(path) {
                Some(node) => kinds.contains_key(&(node.mode & 0o170_000)),
                None => kinds.values().sum::<usize>() < self.moments,
            };
            (!is_possible)
                .then(|| format!("{path:?} is {:?}, was {kinds:?} at {} moments", found.get(path), self.moments))
        })
    }
}

/// A mounted vault `m`, and a directory `p` to compare with.
struct Lab {
    bench: Bench,
    options: &'static str,
    is_anchored: bool,
    sequence: Cell<u64>,
}

impl Lab {
    fn new(init: &str, options: &'static str) -> Lab {
        let bench = Bench::new();
        let is_anchored = bench.run(&format!("init --json {init} v")).ok().json()["anchored"] == true;
        bench.dir("m");
        bench.dir("p");
        let lab = Lab { bench, options, is_anchored, sequence: Cell::new(0) };
        lab.mount();
        lab
    }

    fn mount(&self) {
        self.bench.run(&format!("mount {} v m", self.options)).ok();
    }

    fn kill(&self, root: &Path, synced: bool) {
        if synced && self.is_anchored {
            sync_names(root);
        }
        if synced {
            for path in
                tree(root).into_iter().filter(|(_, node)| node.mode & 0o170_000 == 0o100_000).map(|(path, _)| path)
            {
                File::open(root.join(path)).unwrap().sync_all().unwrap();
            }
        }
        super::mounts::kill(super::mounts::daemon_of(&self.bench), "-KILL");
        // Nobody serves it now; what the kernel still holds goes with it.
        let gone = std::process::Command::new("umount").arg("-l").arg(self.bench.path("m")).status().unwrap();
        assert!(gone.success());
        self.mount_when_free();
    }

    /// The lock of a killed daemon is free when the kernel has ended it.
    fn mount_when_free(&self) {
        super::mounts::wait_for("the vault stays locked", || {
            self.bench.run(&format!("mount {} v m", self.options)).code == 0
        });
    }

    fn play(&self, ops: &[Op]) -> Result<(), TestCaseError> {
        let own = format!("s{}", self.sequence.replace(self.sequence.get() + 1));
        let side = |dir: &str| Side { root: self.bench.dir(&format!("{dir}/{own}")), open: [const { None }; SLOTS] };
        let (mut plain, mut vault) = (side("p"), side("m"));
        if self.is_anchored {
            // Else the sequence's own directory may go with a kill.
            sync_names(&self.bench.path("m"));
        }
        let mut past = Past::since(&plain.root);
        for (n, op) in ops.iter().enumerate() {
            match op {
                Op::Remount | Op::Kill(_) => {
                    (plain.open, vault.open) = ([const { None }; SLOTS], [const { None }; SLOTS]);
                    let fail = |what: String| TestCaseError::fail(format!("after {n} operations, {op:?}: {what}"));
                    match op {
                        Op::Kill(synced) => {
                            self.kill(&vault.root, *synced);
                            let found = tree(&vault.root);
                            if self.is_anchored && !synced {
                                past.contradiction(&found).map_or(Ok(()), |c| Err(fail(c)))?;
                                adopt_all(&plain.root, &vault.root);
                            } else {
                                let expected = tree(&plain.root);
                                difference(&expected, &found, *synced).map_or(Ok(()), |d| Err(fail(d)))?;
                                adopt(&plain.root, &expected, &found);
                            }
                        }
                        _ => {
                            self.bench.unmount("m");
                            self.mount();
                            difference(&tree(&plain.root), &tree(&vault.root), true)
                                .map_or(Ok(()), |d| Err(fail(d)))?;
                        }
                    }
                    past = Past::since(&plain.root);
                }
                op => {
                    let (expected, found) = (plain.apply(op), vault.apply(op));
                    prop_assert!(expected == found, "operation {n}, {op:?}: plain {expected:?}, vault {found:?}");
                    if self.is_anchored {
                        past.note(&plain.root);
                    }
                }
            }
        }
        (plain.open, vault.open) = ([const { None }; SLOTS], [const { None }; SLOTS]);
        let end = difference(&tree(&plain.root), &tree(&vault.root), true);
        prop_assert!(end.is_none(), "in the end: {}", end.unwrap_or_default());
        fs::remove_dir_all(&plain.root).unwrap();
        fs::remove_dir_all(&vault.root).unwrap();
        Ok(())
    }
}

/// Syncs every directory: names are acknowledged with that, also of links, and removals. (syncfs(2) does not reach a
/// FUSE file system.)
fn sync_names(root: &Path) {
    let is_dir = |node: &Node| node.mode & 0o170_000 == 0o040_000;
    let below = tree(root).into_iter().filter(|(_, node)| is_dir(node)).map(|(path, _)| root.join(path));
    for dir in below.chain([root.to_owned()]) {
        File::open(dir).unwrap().sync_all().unwrap();
    }
}

/// After a kill without a sync the plain side takes what the vault still has: its readability was the question.
fn adopt(root: &Path, expected: &BTreeMap<PathBuf, Node>, found: &BTreeMap<PathBuf, Node>) {
    for (path, node) in found.iter().filter(|(path, node)| expected.get(*path) != Some(node)) {
        fs::write(root.join(path), &node.content).unwrap();
    }
}

/// The same of names: it takes all that the vault has, as it is.
fn adopt_all(plain: &Path, vault: &Path) {
    fs::remove_dir_all(plain).unwrap();
    let copied = std::process::Command::new("cp").arg("-a").args([vault, plain]).status().unwrap();
    assert!(copied.success());
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|s| s.parse().ok()).unwrap_or(default)
}

/// Plays sequences over one vault; it is clean afterwards.
fn compare(test: &str, init: &str, options: &'static str) {
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: there is no /dev/fuse on this machine");
        return;
    }
    let (seed, cases) = (number("LAMASSU_MODEL_SEED", 1), number("LAMASSU_MODEL_SEQUENCES", 60));
    let lab = Lab::new(init, options);
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config { cases: cases as u32, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let result = TestRunner::new_with_rng(config, rng).run(&prop::collection::vec(op(), 1..90), |ops| lab.play(&ops));
    if let Err(error) = result {
        let what = match error {
            TestError::Fail(why, ops) => format!("{why}\nthe shortest sequence that fails: {ops:#?}"),
            TestError::Abort(why) => why.to_string(),
        };
        panic!(
            "{what}\nreproduce: LAMASSU_MODEL_SEED={seed} LAMASSU_MODEL_SEQUENCES={cases} cargo test -p lamassu --test cli -- --exact model::{test}"
        );
    }
    println!("model::{test}: {} sequences", lab.sequence.get());
    lab.bench.unmount("m");
    lab.bench.run("check v").ok();
}

#[test]
fn a_mount_is_a_file_system() {
    compare("a_mount_is_a_file_system", "", "");
}

#[test]
fn with_writes_that_go_through() {
    compare("with_writes_that_go_through", "--suite chacha --names plain", "--cache through");
}

#[test]
fn without_a_page_cache() {
    compare("without_a_page_cache", "--suite blake3 -b 64K", "--cache none");
}

#[test]
fn in_large_blocks() {
    compare("in_large_blocks", "-b 1M", "");
}

#[test]
fn compressed() {
    compare("compressed", "-b 16K --compress zstd", "");
}

#[test]
fn without_an_anchor() {
    compare("without_an_anchor", "--anchor none", "");
}

#[test]
fn without_an_anchor_or_encrypted_names() {
    compare(
        "without_an_anchor_or_encrypted_names",
        "--anchor none --names plain -b 64K --compress lz4",
        "--cache none",
    );
}
