use super::*;
use crate::backend::ByName;
use crate::backend::{BackendFile, Kind, RenameMode};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};

const G: u64 = 16384;
const EIO: i32 = libc::EIO;

fn n(s: &str) -> &OsStr {
    OsStr::new(s)
}

/// Everything a reader can see but times and inode numbers.
#[derive(Debug, PartialEq, Eq, Clone)]
struct Seen {
    kind: Kind,
    mode: u32,
    nlink: u64,
    len: u64,
    bytes: Vec<u8>,
    target: Option<OsString>,
    xattrs: Vec<(OsString, Vec<u8>)>,
}

fn seen(backend: &dyn Backend) -> BTreeMap<String, Seen> {
    let mut all = BTreeMap::new();
    walk(&backend.root(), "", &mut all);
    all
}

fn walk(dir: &Arc<dyn BackendDir>, path: &str, all: &mut BTreeMap<String, Seen>) {
    for entry in dir.read_dir().unwrap() {
        let name = entry.name.as_os_str();
        let stat = dir.stat_entry(name).unwrap();
        let path = format!("{path}/{}", name.to_str().unwrap());
        let attrs = dir.list_xattr_entry(name).unwrap();
        let xattrs = attrs.into_iter().map(|a| (a.clone(), dir.get_xattr_entry(name, &a).unwrap())).collect();
        let bytes = if stat.kind == Kind::File { read(dir, name) } else { Vec::new() };
        let target = (stat.kind == Kind::Symlink).then(|| dir.read_link(name).unwrap());
        let (kind, mode, nlink, len) = (stat.kind, stat.mode, stat.nlink, stat.len);
        all.insert(path.clone(), Seen { kind, mode, nlink, len, bytes, target, xattrs });
        if kind == Kind::Dir {
            walk(&dir.open_dir(name).unwrap(), &path, all);
        }
    }
}

fn read(dir: &Arc<dyn BackendDir>, name: &OsStr) -> Vec<u8> {
    let file = dir.open_file(name, false).unwrap();
    let mut bytes = vec![0; file.stat().unwrap().len as usize];
    assert_eq!(file.read_at(0, &mut bytes).unwrap(), bytes.len());
    bytes
}

/// The bytes of `f` in a state, if it is there.
fn bytes(state: &MemoryBackend) -> Option<Vec<u8>> {
    state.root().stat_entry(n("f")).ok().map(|_| read(&state.root(), n("f")))
}

/// The first byte of each page of `f`.
fn pages(state: &MemoryBackend) -> Vec<u8> {
    bytes(state).unwrap().chunks(4096).map(|page| page[0]).collect()
}

/// A file `f` of `count` durable pages of 1s.
fn durable_file(backend: &CrashBackend, count: usize) -> Arc<dyn BackendFile> {
    let file = backend.root().create_file(n("f")).unwrap();
    file.write_at(0, &vec![1; count * 4096]).unwrap();
    backend.sync().unwrap();
    file
}

fn states(backend: &CrashBackend) -> impl Iterator<Item = MemoryBackend> {
    let sim = CrashSim::new(backend.log());
    (0..400).map(move |seed| sim.random_state(seed, sim.log().records().len()))
}

fn outcomes<T: Ord>(backend: &CrashBackend, f: impl Fn(&MemoryBackend) -> T) -> BTreeSet<T> {
    states(backend).map(|s| f(&s)).collect()
}

#[test]
fn pages_not_covered_come_in_any_order() {
    let backend = CrashBackend::new();
    let file = durable_file(&backend, 3);
    file.write_at(0, &[2; 4096]).unwrap();
    file.write_at(4096, &[3; 4096]).unwrap();
    let all = outcomes(&backend, pages);
    assert_eq!(all, BTreeSet::from([vec![1, 1, 1], vec![2, 1, 1], vec![1, 3, 1], vec![2, 3, 1]]));
    file.sync_data().unwrap();
    assert_eq!(outcomes(&backend, pages), BTreeSet::from([vec![2, 3, 1]]));
}

#[test]
fn one_page_keeps_its_own_order() {
    let backend = CrashBackend::new();
    let file = durable_file(&backend, 1);
    file.write_at(0, &[2; 100]).unwrap();
    file.write_at(50, &[3; 100]).unwrap();
    let all = outcomes(&backend, |s| bytes(s).map(|b| (b[0], b[75], b[125])).unwrap());
    assert_eq!(all, BTreeSet::from([(1, 1, 1), (2, 2, 1), (2, 3, 3)]));
}

#[test]
fn a_block_of_the_granularity_is_never_torn() {
    let backend = CrashBackend::with_granularity(G);
    let file = durable_file(&backend, 12);
    file.write_at(0, &vec![2; 2 * G as usize]).unwrap();
    file.punch(0, G).unwrap();
    let all = outcomes(&backend, pages);
    let block = |s: &[u8], b: usize| s[b * 4..b * 4 + 4].to_vec();
    assert_eq!(
        all.iter().map(|s| block(s, 0)).collect::<BTreeSet<_>>(),
        [[0; 4], [1; 4], [2; 4]].map(Vec::from).into()
    );
    assert_eq!(all.iter().map(|s| block(s, 1)).collect::<BTreeSet<_>>(), [[1; 4], [2; 4]].map(Vec::from).into());
    assert_eq!(all.len(), 6);
    // A page within the block is its own piece, but only where the block's piece before it is there.
    file.write_at(4096, &[5; 4096]).unwrap();
    let first: BTreeSet<_> = outcomes(&backend, |s| block(&pages(s), 0));
    assert_eq!(first, [[0; 4], [1; 4], [2; 4], [0, 5, 0, 0]].map(Vec::from).into());
}

#[test]
fn a_block_is_torn_at_pages_where_the_store_is_finer() {
    let backend = CrashBackend::new();
    let file = durable_file(&backend, 4);
    file.write_at(0, &vec![2; G as usize]).unwrap();
    assert_eq!(outcomes(&backend, pages).len(), 16);
    let sim = CrashSim::new(backend.log());
    let last = sim.log().records().len();
    let seen: Vec<_> = sim.prefixes().filter(|(i, _)| *i > last - 4).map(|(_, s)| pages(&s)).collect();
    assert_eq!(seen, [[2, 1, 1, 1], [2, 2, 1, 1], [2, 2, 2, 1], [2, 2, 2, 2]]);
}

#[test]
fn a_cut_happens_or_not() {
    let backend = CrashBackend::new();
    let file = durable_file(&backend, 3);
    file.set_len(4096 + 10).unwrap();
    assert_eq!(outcomes(&backend, pages), BTreeSet::from([vec![1, 1, 1], vec![1, 1]]));
    file.write_at(3 * 4096, &[4; 4096]).unwrap();
    // The cut lost or not, the write lost or not: old bytes come back beside what was appended.
    let all = outcomes(&backend, pages);
    assert_eq!(all, BTreeSet::from([vec![1, 1, 1], vec![1, 1], vec![1, 1, 1, 4], vec![1, 1, 0, 4]]));
    let tail = outcomes(&backend, |s| bytes(s).unwrap().get(4096 + 10).copied());
    assert_eq!(tail, BTreeSet::from([None, Some(0), Some(1)]));
    file.sync_data().unwrap();
    assert_eq!(outcomes(&backend, pages), BTreeSet::from([vec![1, 1, 0, 4]]));
}

#[test]
fn growth_is_lost_with_what_grew() {
    let backend = CrashBackend::new();
    let file = durable_file(&backend, 1);
    file.write_at(4096, &[2; 4096]).unwrap();
    file.write_at(2 * 4096, &[3; 100]).unwrap();
    let all = outcomes(&backend, |s| (bytes(s).unwrap().len(), pages(s)));
    let expected = [(4096, vec![1]), (8192, vec![1, 2]), (8292, vec![1, 0, 3]), (8292, vec![1, 2, 3])];
    assert_eq!(all, BTreeSet::from(expected));
    file.set_len(100_000).unwrap();
    assert!(outcomes(&backend, |s| bytes(s).unwrap().len()).contains(&100_000));
}

#[test]
fn punches_are_lost_or_not() {
    let backend = CrashBackend::new();
    let file = durable_file(&backend, 2);
    file.punch(0, 8192).unwrap();
    let all = outcomes(&backend, pages);
    assert_eq!(all, BTreeSet::from([vec![1, 1], vec![0, 1], vec![1, 0], vec![0, 0]]));
    // Of holes nothing is recorded.
    let before = backend.position();
    file.punch(0, 1 << 40).unwrap();
    assert_eq!(backend.position(), before);
}

#[test]
fn names_lose_a_suffix() {
    let backend = CrashBackend::new();
    let root = backend.root();
    for name in ["a", "b", "c"] {
        root.create_file(n(name)).unwrap();
    }
    root.rename(n("a"), &*root, n("d"), RenameMode::Replace).unwrap();
    let names = |s: &MemoryBackend| seen(s).into_keys().collect::<String>();
    assert_eq!(outcomes(&backend, names), ["", "/a", "/a/b", "/a/b/c", "/b/c/d"].map(String::from).into());
    // The file's own sync makes its creation durable, and what came before.
    root.open_file(n("b"), true).unwrap().sync_data().unwrap();
    assert_eq!(outcomes(&backend, names), ["/a/b", "/a/b/c", "/b/c/d"].map(String::from).into());
    root.sync().unwrap();
    assert_eq!(outcomes(&backend, names), ["/b/c/d"].map(String::from).into());
}

#[test]
fn a_sync_of_another_directory_does_not_help() {
    let backend = CrashBackend::new();
    let root = backend.root();
    root.make_dir(n("d"), 0o700).unwrap();
    let dir = root.open_dir(n("d")).unwrap();
    dir.sync().unwrap();
    assert_eq!(outcomes(&backend, |s| seen(s).len()), [0, 1].into());
    dir.create_file(n("x")).unwrap();
    dir.sync().unwrap();
    assert_eq!(outcomes(&backend, |s| seen(s).len()), [2].into());
    dir.rename(n("x"), &*root, n("x"), RenameMode::Replace).unwrap();
    root.sync().unwrap();
    assert_eq!(outcomes(&backend, |s| seen(s).into_keys().collect::<String>()), ["/d/x".to_owned()].into());
}

#[test]
fn bytes_go_with_the_creation_and_come_back_with_the_removal() {
    let backend = CrashBackend::new();
    let file = backend.root().create_file(n("f")).unwrap();
    file.write_at(0, &[2; 10]).unwrap();
    let all = outcomes(&backend, bytes);
    assert_eq!(all, [None, Some(vec![]), Some(vec![2; 10])].into());
    file.sync_all().unwrap();
    assert_eq!(outcomes(&backend, bytes), [Some(vec![2; 10])].into());
    backend.root().unlink(n("f")).unwrap();
    file.write_at(0, &[3; 10]).unwrap();
    let all = outcomes(&backend, bytes);
    assert_eq!(all, [None, Some(vec![2; 10]), Some(vec![3; 10])].into());
    backend.root().sync().unwrap();
    file.sync_all().unwrap();
    assert_eq!(outcomes(&backend, bytes), [None].into());
}

#[test]
fn attributes_lose_a_suffix_per_inode() {
    let backend = CrashBackend::new();
    let file = durable_file(&backend, 1);
    file.set_mode(0o640).unwrap();
    file.set_xattr(n("user.a"), b"1", 0).unwrap();
    let look = |s: &MemoryBackend| (seen(s)["/f"].mode, seen(s)["/f"].xattrs.len());
    assert_eq!(outcomes(&backend, look), [(0o600, 0), (0o640, 0), (0o640, 1)].into());
    file.sync_data().unwrap();
    assert_eq!(outcomes(&backend, look).len(), 3);
    file.sync_all().unwrap();
    assert_eq!(outcomes(&backend, look), [(0o640, 1)].into());
}

#[test]
fn a_failed_sync_covers_nothing_and_never_will() {
    let backend = CrashBackend::new();
    let file = durable_file(&backend, 2);
    file.write_at(0, &[2; 4096]).unwrap();
    file.write_at(4096, &[2; 4096]).unwrap();
    backend.fail_syncs(1, EIO);
    assert_eq!(file.sync_data().unwrap_err().raw_os_error(), Some(EIO));
    file.sync_data().unwrap();
    assert_eq!(outcomes(&backend, pages).len(), 4, "the second sync covered what the first one dropped");
    file.write_at(0, &[2; 4096]).unwrap();
    file.sync_data().unwrap();
    assert_eq!(outcomes(&backend, pages), BTreeSet::from([vec![2, 1], vec![2, 2]]));
    file.set_len(4096).unwrap();
    file.sync_data().unwrap();
    file.set_len(8192).unwrap();
    file.sync_data().unwrap();
    assert_eq!(outcomes(&backend, pages), BTreeSet::from([vec![2, 0]]));
}

#[test]
fn a_crash_during_recovery_builds_on_the_first() {
    let backend = CrashBackend::new();
    let file = durable_file(&backend, 1);
    file.write_at(0, &[2; 4096]).unwrap();
    let first = CrashSim::new(backend.log()).at(backend.position()).most_state();
    let second = CrashBackend::over(&first, 4096);
    let file = second.root().open_file(n("f"), true).unwrap();
    file.write_at(0, &[3; 4096]).unwrap();
    assert_eq!(outcomes(&second, pages), BTreeSet::from([vec![2], vec![3]]));
}

#[derive(Clone, Debug)]
enum Step {
    Write(usize, u64, usize),
    Punch(usize, u64, u64),
    SetLen(usize, u64),
    SyncFile(usize),
    Names(u8),
    SyncDir,
    Sync,
}

fn step() -> impl Strategy<Value = Step> {
    let offset = prop_oneof![(0..20u64).prop_map(|page| page * 4096), 0..80_000u64];
    let len = prop_oneof![Just(4096usize), Just(G as usize), 1..40_000usize];
    prop_oneof![
        6 => (0..3usize, offset, len).prop_map(|(f, o, l)| Step::Write(f, o, l)),
        2 => (0..3usize, 0..80_000u64, 0..40_000u64).prop_map(|(f, o, l)| Step::Punch(f, o, l)),
        2 => (0..3usize, 0..80_000u64).prop_map(|(f, l)| Step::SetLen(f, l)),
        1 => (0..3usize).prop_map(Step::SyncFile),
        3 => (0..8u8).prop_map(Step::Names),
        1 => Just(Step::SyncDir),
        1 => Just(Step::Sync),
    ]
}

/// Runs steps; errors of names are part of the game.
fn run(backend: &CrashBackend, steps: &[Step], mut after: impl FnMut()) {
    let root = backend.root();
    root.make_dir(n("d"), 0o700).unwrap();
    let dir = root.open_dir(n("d")).unwrap();
    let files = ["f", "g", "h"].map(|name| dir.create_file(n(name)).unwrap());
    after();
    for (i, step) in steps.iter().enumerate() {
        match *step {
            Step::Write(f, offset, len) => files[f].write_at(offset, &vec![i as u8 + 1; len]).unwrap(),
            Step::Punch(f, offset, len) => files[f].punch(offset, len).unwrap(),
            Step::SetLen(f, len) => files[f].set_len(len).unwrap(),
            Step::SyncFile(f) => files[f].sync_all().unwrap(),
            Step::SyncDir => dir.sync().unwrap(),
            Step::Sync => backend.sync().unwrap(),
            Step::Names(kind) => {
                let _ = match kind {
                    0 => dir.rename(n("f"), &*root, n("f"), RenameMode::NoReplace),
                    1 => root.rename(n("f"), &*dir, n("g"), RenameMode::Replace),
                    2 => dir.rename(n("g"), &*dir, n("h"), RenameMode::Exchange),
                    3 => dir.link(n("h"), &*root, n("link")),
                    4 => root.unlink(n("link")),
                    5 => dir.make_symlink(n("s"), n("target")),
                    6 => dir.set_mode_entry(n("h"), 0o600 + i as u32 % 8),
                    _ => dir.set_xattr(n("user.x"), &[i as u8], 0),
                };
            }
        }
        after();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn prefixes_are_the_store_as_it_was(steps in proptest::collection::vec(step(), 1..25), coarse in any::<bool>()) {
        let backend = CrashBackend::with_granularity(if coarse { G } else { 4096 });
        let mut live = BTreeMap::new();
        run(&backend, &steps, || { live.insert(backend.position(), seen(&backend)); });
        let sim = CrashSim::new(backend.log());
        for (index, state) in sim.prefixes() {
            if let Some(expected) = live.get(&index) {
                prop_assert_eq!(&seen(&state), expected);
            }
            // Losing nothing is a crash, too.
            prop_assert_eq!(seen(&sim.at(index).most_state()), seen(&state));
        }
    }

    #[test]
    fn states_are_within_the_model(steps in proptest::collection::vec(step(), 1..25), seed in any::<u64>()) {
        let backend = CrashBackend::new();
        run(&backend, &steps, || {});
        let end = backend.position();
        let sim = CrashSim::new(backend.log());
        for seed in (0..20).map(|i| seed.wrapping_add(i)) {
            let state = seen(&sim.random_state(seed, end));
            prop_assert_eq!(&seen(&sim.random_state(seed, end)), &state, "not deterministic");
            // Each byte of each file is one that was once written there. (Whole versions of pages would be too much to
            // ask: a length change inside a page may be lost while a later write to the page is not. Nor is it enough
            // to look at files that had a name: a removal may be lost, and writes after it through an open handle be
            // kept.)
            for file in state.values() {
                for (i, page) in file.bytes.chunks(4096).enumerate() {
                    let mut had: Vec<bool> = page.iter().map(|&b| b == 0).collect();
                    for record in sim.log().records() {
                        let Op::Write { offset, data, .. } = &record.op else { continue };
                        let start = i as u64 * 4096;
                        for (j, had) in had.iter_mut().enumerate() {
                            let at = (start + j as u64).checked_sub(*offset).and_then(|at| data.get(at as usize));
                            *had |= at == Some(&page[j]);
                        }
                    }
                    prop_assert!(had.iter().all(|had| *had));
                }
            }
        }
        backend.sync().unwrap();
        let point = CrashSim::new(backend.log());
        let point = point.at(backend.position());
        prop_assert_eq!(seen(&point.least_state()), seen(&backend));
        prop_assert_eq!(seen(&point.random_state(seed)), seen(&backend));
    }
}

/// Prints how fast states are built (`--nocapture`); asserts nothing about it.
#[test]
fn many_states() {
    let backend = CrashBackend::new();
    let steps: Vec<Step> = (0..150).map(|i| Step::Write(i % 3, (i as u64 * 7 % 60) * 4096, 8192)).collect();
    run(&backend, &steps, || {
        if backend.position().is_multiple_of(10) {
            backend.sync().unwrap();
        }
    });
    let sim = CrashSim::new(backend.log());
    let start = std::time::Instant::now();
    let mut count = 0u64;
    for index in 0..=sim.log().records().len() {
        for seed in 0..10 {
            count += sim.random_state(seed, index).root().read_dir().unwrap().len() as u64 / 100 + 1;
        }
    }
    println!("{:.0} states per second", count as f64 / start.elapsed().as_secs_f64());
}
