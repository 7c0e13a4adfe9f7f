//! The tree of a file's pages against a naive one, and against a store that does what it likes with its records.
use lamassu_format::tree::Shape;
use lamassu_format::{Digest, PAGE_LEN, PageNo};
use lamassu_store::integrity::{Leaves, MemoryRecords, Records, Tree, TreeError, leaf_digest, record_digest};
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

const DEGREES: [usize; 5] = [2, 4, 16, 64, 256];
const MEMORY: usize = 64 << 10;

type Pages = BTreeMap<u64, Digest>;

/// The pages of a store, and how many were read.
struct Store {
    pages: Pages,
    reads: Cell<usize>,
}

impl Store {
    fn of(pages: &Pages) -> Store {
        Store { pages: pages.clone(), reads: Cell::new(0) }
    }
}

impl Leaves for Store {
    fn leaf(&self, page: PageNo) -> io::Result<Digest> {
        self.reads.set(self.reads.get() + 1);
        Ok(self.pages.get(&page.0).copied().unwrap_or_default())
    }

    fn next_present(&self, from: PageNo) -> io::Result<Option<PageNo>> {
        Ok(self.pages.range(from.0..).next().map(|(page, _)| PageNo(*page)))
    }
}

fn digest(n: u64) -> Digest {
    let mut page = [0; PAGE_LEN];
    page[..8].copy_from_slice(&n.to_le_bytes());
    leaf_digest(PageNo(n), &page)
}

/// By the definition: every record of every level, from all pages.
fn naive_root(shape: Shape, pages: &Pages, count: u64) -> Digest {
    let mut level: Pages = pages.range(..count).map(|(page, digest)| (*page, *digest)).collect();
    for height in 1..=shape.height(count) {
        let mut above: BTreeMap<u64, Vec<Digest>> = BTreeMap::new();
        for (index, digest) in level {
            let children = above.entry(index / shape.degree() as u64).or_insert(vec![Digest::NONE; shape.degree()]);
            children[(index % shape.degree() as u64) as usize] = digest;
        }
        level = above.into_iter().map(|(index, children)| (index, record_digest(height, &children))).collect();
    }
    level.get(&0).copied().unwrap_or_default()
}

#[derive(Clone, Debug)]
enum Op {
    Set(u64, u64),
    Clear(u64),
    Truncate(u64),
    Seal,
    Commit,
    Look(u64),
    /// The process ends, after a commit; the store keeps, loses, or changes its records.
    Reopen(u8),
}

fn page() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0_u64..6, 4 => 0_u64..300, 2 => 60_000_u64..70_000, 1 => 1_u64 << 39..1 << 40]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (page(), any::<u64>()).prop_map(|(page, n)| Op::Set(page, n)),
        1 => page().prop_map(Op::Clear),
        2 => page().prop_map(Op::Truncate),
        2 => Just(Op::Seal),
        2 => Just(Op::Commit),
        4 => page().prop_map(Op::Look),
        2 => any::<u8>().prop_map(Op::Reopen),
    ]
}

fn damage(records: &MemoryRecords, how: u8) {
    match how % 5 {
        0 => {}
        1 => records.clear(),
        2 => records.change(|offset, record| {
            record.iter_mut().skip((offset % 31) as usize).take(1).for_each(|byte| *byte ^= how | 1)
        }),
        3 => records.change(|_, record| record.truncate(usize::from(how))),
        _ => records.change(|_, record| {
            let by = record.len().min(32);
            record.rotate_left(by);
        }),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever is set, cut off, sealed, committed, and lost of the records: digests and roots are the naive ones.
    #[test]
    fn it_is_what_a_naive_tree_is(degree in prop::sample::select(&DEGREES[..]), ops in prop::collection::vec(op(), 1..60)) {
        let shape = Shape::new(degree).unwrap();
        let records = Arc::new(MemoryRecords::default());
        let (mut pages, mut count) = (Pages::new(), 0);
        let mut tree = Tree::new(shape, Digest::NONE, 0, records.clone(), MEMORY);
        let (mut sealed, mut sealed_pages) = (None, (Pages::new(), 0));
        for op in ops {
            // The store has what was there when the tree was last made: later pages are in memory.
            let store = Store::of(&pages);
            match op {
                Op::Set(page, n) => {
                    let before = tree.record_before(PageNo(page), &store).unwrap();
                    let was_there = shape.record_of(PageNo(page), 1);
                    if let Some((number, children)) = before {
                        prop_assert_eq!(number, shape.number(was_there));
                        for (at, child) in children.iter().enumerate() {
                            let page = shape.first_page(was_there).0 + at as u64;
                            let expected = sealed_pages.0.get(&page).copied().unwrap_or_default();
                            prop_assert_eq!(*child, expected, "page {} as of the last seal", page);
                        }
                    }
                    tree.set(PageNo(page), digest(n), &store).unwrap();
                    pages.insert(page, digest(n));
                    count = count.max(page + 1);
                }
                Op::Clear(page) => {
                    tree.set(PageNo(page), Digest::NONE, &store).unwrap();
                    pages.remove(&page);
                }
                Op::Truncate(to) => {
                    tree.truncate(to, &store).unwrap();
                    pages.split_off(&to);
                    count = count.min(to);
                }
                Op::Seal => {
                    let seal = tree.seal();
                    prop_assert_eq!(seal.root, naive_root(shape, &pages, count));
                    prop_assert_eq!(seal.pages, count);
                    for (number, children) in &seal.changed {
                        let place = shape.place(*number).unwrap();
                        for (at, child) in children.iter().enumerate() {
                            let page = shape.first_page(place).0 + at as u64;
                            prop_assert_eq!(*child, pages.get(&page).copied().unwrap_or_default());
                        }
                    }
                    sealed = Some(seal);
                    sealed_pages = (pages.clone(), count);
                }
                Op::Commit => if sealed.take().is_some() { tree.committed() },
                Op::Look(page) => {
                    let next = pages.range(page..).next().map(|(page, _)| PageNo(*page));
                    prop_assert_eq!(tree.next_leaf(PageNo(page), &store).unwrap(), next);
                    let expected = pages.get(&page).copied().unwrap_or_default();
                    prop_assert_eq!(tree.leaf(PageNo(page), &store).unwrap(), expected);
                }
                Op::Reopen(how) => {
                    let root = tree.seal().root;
                    tree.committed();
                    sealed = None;
                    sealed_pages = (pages.clone(), count);
                    damage(&records, how);
                    tree = Tree::new(shape, root, count, records.clone(), shape.record_len());
                }
            }
            prop_assert_eq!(tree.pages(), count);
        }
        prop_assert_eq!(tree.root(), naive_root(shape, &pages, count));
    }

    /// A page that is not the one under the root is found, with its place: by its digest where the records are good,
    /// with its neighbours where they are lost.
    #[test]
    fn another_page_is_found(
        degree in prop::sample::select(&DEGREES[..]),
        numbers in prop::collection::btree_map(0_u64..2000, any::<u64>(), 2..100),
        which: prop::sample::Index,
        lost: bool,
    ) {
        let shape = Shape::new(degree).unwrap();
        let pages: Pages = numbers.iter().map(|(page, n)| (*page, digest(*n))).collect();
        let count = pages.keys().last().unwrap() + 1;
        let records = Arc::new(MemoryRecords::default());
        let mut tree = Tree::new(shape, Digest::NONE, 0, records.clone(), MEMORY);
        for (page, digest) in &pages {
            tree.set(PageNo(*page), *digest, &Store::of(&Pages::new())).unwrap();
        }
        let root = tree.seal().root;
        tree.committed();
        prop_assert_eq!(root, naive_root(shape, &pages, count));
        if lost {
            records.clear();
        }
        let changed = *which.get(&pages.keys().copied().collect::<Vec<_>>());
        let mut other = pages.clone();
        other.insert(changed, digest(u64::MAX));
        let store = Store::of(&other);
        let mut tree = Tree::new(shape, root, count, records, MEMORY);
        match tree.leaf(PageNo(changed), &store) {
            Ok(leaf) => prop_assert!(!lost && leaf == pages[&changed] && leaf != other[&changed]),
            Err(TreeError::Stale(stale)) => {
                prop_assert!(lost && (stale.first.0..stale.first.0 + stale.pages).contains(&changed), "{stale:?}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A crash behind changes that no commit covers: with what an anchor holds, every page is told as it was under the
/// root, whatever became of the records and of the pages that were changed or cut off.
#[derive(Clone, Debug)]
struct Crash {
    before: BTreeMap<u64, u64>,
    changes: BTreeMap<u64, Option<u64>>,
    cut: Option<u64>,
    how: u8,
}

fn crash() -> impl Strategy<Value = Crash> {
    let near = || prop_oneof![0_u64..40, 0_u64..2000];
    let before = prop::collection::btree_map(near(), any::<u64>(), 1..60);
    let changes = prop::collection::btree_map(near(), prop::option::of(any::<u64>()), 0..20);
    (before, changes, prop::option::of(1_u64..2000), any::<u8>()).prop_map(|(before, changes, cut, how)| Crash {
        before,
        changes,
        cut,
        how,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn what_was_committed_is_told_after_a_crash(degree in prop::sample::select(&DEGREES[..]), crash in crash()) {
        let shape = Shape::new(degree).unwrap();
        let committed: Pages = crash.before.iter().map(|(page, n)| (*page, digest(*n))).collect();
        let count = committed.keys().last().unwrap() + 1;
        let records = Arc::new(MemoryRecords::default());
        let mut tree = Tree::new(shape, Digest::NONE, 0, records.clone(), MEMORY);
        for (page, digest) in &committed {
            tree.set(PageNo(*page), *digest, &Store::of(&Pages::new())).unwrap();
        }
        let root = tree.seal().root;
        tree.committed();
        let (mut pages, mut held) = (committed.clone(), BTreeMap::new());
        let cut = crash.cut.filter(|cut| *cut < count).unwrap_or(count);
        if cut < count {
            let store = Store::of(&pages);
            held.extend(tree.way_to(PageNo(cut - 1), &store).unwrap());
            tree.truncate(cut, &store).unwrap();
            pages.split_off(&cut);
        }
        for (page, n) in &crash.changes {
            let store = Store::of(&pages);
            if let Some((number, children)) = tree.record_before(PageNo(*page), &store).unwrap() {
                held.entry(number).or_insert(children);
            }
            tree.set(PageNo(*page), n.map_or(Digest::NONE, digest), &store).unwrap();
            match n {
                Some(n) => drop(pages.insert(*page, digest(*n))),
                None => drop(pages.remove(page)),
            }
        }
        damage(&records, crash.how);
        let store = Store::of(&pages);
        let mut tree = Tree::new(shape, root, count, records, MEMORY);
        tree.hold(held, &store).unwrap();
        for page in (0..cut).filter(|page| page % 7 == 0 || *page < 40 || committed.contains_key(page)) {
            let expected = committed.get(&page).copied().unwrap_or_default();
            prop_assert_eq!(tree.leaf(PageNo(page), &store).unwrap(), expected, "page {}", page);
        }
        // What is committed of it then is whole, of records of pages alone; also when the file is longer again.
        for pages in [count, cut, count] {
            tree.truncate(pages, &store).unwrap();
            tree.extend_to(pages);
            let changed = tree.seal().changed;
            prop_assert!(changed.values().all(|children| children.len() == degree), "{:?}", changed.keys());
            prop_assert!(changed.keys().all(|number| shape.place(*number).is_some_and(|place| place.level == 1)));
        }
    }
}

fn filled(shape: Shape, count: u64, records: &Arc<MemoryRecords>) -> (Digest, Pages) {
    let pages: Pages = (0..count).map(|page| (page, digest(page))).collect();
    let mut tree = Tree::new(shape, Digest::NONE, 0, records.clone(), MEMORY);
    pages.iter().for_each(|(page, digest)| tree.set(PageNo(*page), *digest, &Store::of(&Pages::new())).unwrap());
    let root = tree.seal().root;
    tree.committed();
    (root, pages)
}

/// One record a level at most, each once; none where the one below is known; and all of them can be asked for before.
#[test]
fn a_page_costs_a_record_of_each_level_once() {
    let (shape, records) = (Shape::default(), Arc::new(MemoryRecords::default()));
    let (root, pages) = filled(shape, 5000, &records);
    assert_eq!(shape.height(5000), 4);
    let store = Store::of(&pages);
    let mut tree = Tree::new(shape, root, 5000, records.clone(), MEMORY);
    let mut expected = Vec::new();
    for (page, records_read) in [(4000, 4), (4000, 0), (4001, 0), (4016, 1), (0, 2), (255, 1), (4999, 3)] {
        let wanted = tree.wanted([PageNo(page)]);
        assert_eq!(wanted.len(), records_read, "page {page}");
        tree.leaf(PageNo(page), &store).unwrap();
        expected.extend(wanted);
        let (mut read, mut asked) = (records.reads(), expected.clone());
        read.sort_unstable();
        asked.sort_unstable();
        assert_eq!(read, asked, "page {page}");
    }
    assert_eq!(store.reads.get(), 0, "no page is read where the records are good");
    // Without the records only the pages of one record are read for each level.
    records.clear();
    let mut tree = Tree::new(shape, root, 5000, records.clone(), MEMORY);
    tree.leaf(PageNo(4000), &store).unwrap();
    let (first, looked) = (store.reads.get(), records.reads().len());
    assert!(first >= 5000, "the top is rebuilt from all");
    tree.leaf(PageNo(4000), &store).unwrap();
    assert_eq!((store.reads.get(), records.reads().len()), (first, looked), "once");
}

/// What was fetched beside a page is not read again; of what is wrong in it nothing is believed.
#[test]
fn records_that_were_fetched_are_taken_once_and_verified() {
    let (shape, records) = (Shape::default(), Arc::new(MemoryRecords::default()));
    let (root, pages) = filled(shape, 5000, &records);
    let store = Store::of(&pages);
    let fetched = |tree: &Tree, page| -> Vec<(u64, Vec<u8>)> {
        let read = |offset| {
            let mut bytes = vec![0; shape.record_len()];
            records.read(offset, &mut bytes).unwrap();
            (offset, bytes)
        };
        tree.wanted([PageNo(page)]).into_iter().map(read).collect()
    };
    let mut tree = Tree::new(shape, root, 5000, records.clone(), MEMORY);
    tree.bring(fetched(&tree, 4000));
    let before = records.reads().len();
    assert_eq!(tree.leaf(PageNo(4000), &store).unwrap(), pages[&4000]);
    assert_eq!(records.reads().len(), before, "all of them were there");
    let mut wrong = fetched(&tree, 100);
    assert!(!wrong.is_empty());
    wrong.iter_mut().for_each(|(_, bytes)| bytes[5] ^= 1);
    tree.bring(wrong);
    assert_eq!(tree.leaf(PageNo(100), &store).unwrap(), pages[&100]);
    assert!(records.reads().len() > before, "the file has the right ones");
    assert_eq!(store.reads.get(), 0);
}

/// A store that reads slowly, as any does beside memory.
struct Slow<'a>(&'a Store);

impl Leaves for Slow<'_> {
    fn leaf(&self, page: PageNo) -> io::Result<Digest> {
        std::thread::sleep(std::time::Duration::from_micros(50));
        self.0.leaf(page)
    }

    fn next_present(&self, from: PageNo) -> io::Result<Option<PageNo>> {
        self.0.next_present(from)
    }
}

/// A store changes one page of a long file and drops its records: what can be had of the others is found out some
/// times, and not for each page that is asked for. What is put right is seen.
#[test]
fn records_that_cannot_be_had_are_not_looked_for_each_time() {
    const PAGES: u64 = 1000;
    let (shape, records) = (Shape::default(), Arc::new(MemoryRecords::default()));
    let (root, pages) = filled(shape, PAGES, &records);
    records.clear();
    let mut changed = pages.clone();
    changed.insert(500, digest(0));
    let store = Store::of(&changed);
    let mut tree = Tree::new(shape, root, PAGES, records, MEMORY);
    for page in 0..PAGES {
        let found = tree.leaf(PageNo(page), &Slow(&store));
        assert!(matches!(found, Err(TreeError::Stale(stale)) if stale.pages == PAGES), "{page}: {found:?}");
    }
    assert!(store.reads.get() as u64 <= 20 * PAGES, "{} pages were read", store.reads.get());
    let store = Store::of(&pages);
    let again = (0..).find_map(|_| tree.leaf(PageNo(7), &Slow(&store)).ok());
    assert_eq!(again, Some(pages[&7]));
}

/// Clean records take no more memory than they may, and a page is found all the same.
#[test]
fn clean_records_are_bounded() {
    let (shape, records) = (Shape::default(), Arc::new(MemoryRecords::default()));
    let (root, pages) = filled(shape, 2000, &records);
    let store = Store::of(&pages);
    let mut tree = Tree::new(shape, root, 2000, records.clone(), 0);
    for page in (0..2000).rev() {
        assert_eq!(tree.leaf(PageNo(page), &store).unwrap(), pages[&page]);
    }
    let wanted = tree.wanted((0..2000).step_by(16).map(PageNo));
    assert!(wanted.len() >= 125, "next to nothing is kept: {}", wanted.len());
}

/// docs/freshness-tree.md has these values.
#[test]
fn the_worked_example() {
    let page = include_str!("../../../../docs/freshness-tree.md");
    let hex = |digest: Digest| digest.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let shape = Shape::default();
    let leaves: Vec<Digest> = (0..3).map(|n| leaf_digest(PageNo(n), &[n as u8 + 1; PAGE_LEN])).collect();
    let mut record = vec![Digest::NONE; 16];
    record[..3].copy_from_slice(&leaves);
    for shown in leaves.iter().copied().chain([record_digest(1, &record)]) {
        assert!(page.contains(&hex(shown)), "{}", hex(shown));
    }
    let of = |n, level| shape.offset(shape.number(shape.record_of(PageNo(n), level)));
    for (n, level) in [(0, 1), (16, 1), (4095, 1), (4096, 3)] {
        assert!(page.contains(&format!("| {n} | {level} | {} |", of(n, level))), "{n} {level} {}", of(n, level));
    }
}
