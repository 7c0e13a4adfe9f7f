//! The anchor of the test's file: a table that remembers when each commit came, so that a crash has the one before it.

use lamassu_anchor::row::{Content, FileRow, Sealed};
use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
use lamassu_anchor::{Anchor, AnchorError, EntryMark, EntryPlace, Made, ObjectId, Row, Token, TokenKey, VaultRow};
use lamassu_format::Geometry;
use lamassu_format::header::VaultId;
use lamassu_format::tree::Shape;
use lamassu_store::file::{AnchoredFiles, ScrubContext, TreeOf, Trees};
use lamassu_store::integrity::{MemoryRecords, Records};
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};

const VAULT: VaultId = VaultId([1; 16]);
const PLACE: EntryPlace = EntryPlace { dir: ObjectId::ROOT, name: Token([7; 16]) };

/// Tells how many records a store has.
type Position = Arc<dyn Fn() -> usize + Send + Sync>;

/// Tables, and a copy of them after each commit.
pub struct RecordedTable {
    inner: MemoryTable,
    position: Position,
    copies: Mutex<Vec<(usize, MemoryTable)>>,
}

impl Table for RecordedTable {
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
        self.inner.get(space, key)
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), AnchorError> {
        self.inner.scan(space, prefix, visit)
    }

    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError> {
        self.inner.commit(changes)?;
        self.copies.lock().expect("no panic").push(((self.position)(), self.inner.clone()));
        Ok(())
    }
}

/// Tree records that a crash keeps, loses, or has kept from before.
#[derive(Clone, Default)]
pub struct MemoryTrees(Arc<Mutex<RecordsOf>>);

type RecordsOf = BTreeMap<(ObjectId, TreeOf), Arc<MemoryRecords>>;

impl Trees for MemoryTrees {
    fn records(&self, object: ObjectId, of: TreeOf) -> Arc<dyn Records> {
        self.0.lock().expect("no panic").entry((object, of)).or_default().clone()
    }
}

/// The commits of an anchor, by when they came.
#[derive(Clone)]
pub struct AnchorLog {
    copies: Vec<(usize, MemoryTable)>,
    trees: MemoryTrees,
}

/// The anchor of a process, and of its one file.
pub struct AnchorSide {
    pub files: Arc<AnchoredFiles>,
    table: Arc<RecordedTable>,
    trees: MemoryTrees,
    pub object: ObjectId,
}

fn row() -> Row {
    let content = Content::File(FileRow::default());
    Row { mode: 0o600, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing }
}

fn vault_row(degree_log2: u8) -> VaultRow {
    VaultRow { degree_log2, blocks: degree_log2 == 4, ..VaultRow::new(VAULT, TokenKey::new([2; 32])) }
}

impl AnchorSide {
    /// A new anchor. The file's entry is durable, or is yet to be.
    pub fn new(position: Position, degree_log2: u8, is_durable: bool) -> AnchorSide {
        AnchorSide::with_trees(position, degree_log2, is_durable, MemoryTrees::default())
    }

    pub fn with_trees(position: Position, degree_log2: u8, is_durable: bool, trees: MemoryTrees) -> AnchorSide {
        let table = Arc::new(RecordedTable { inner: MemoryTable::default(), position, copies: Mutex::default() });
        let content = Content::Dir { record: Sealed::Nothing, parent: ObjectId::ROOT, name: Token([0; 16]) };
        let root = Row { content, ..row() };
        let anchor = Arc::new(Anchor::create(table.clone(), vault_row(degree_log2), root).expect("creates"));
        let Ok(Made::Queued(object)) = anchor.make(PLACE, row()) else { panic!("the name is free") };
        if is_durable {
            anchor.commit(anchor.mark()).expect("commits");
        }
        let files = AnchoredFiles::new(anchor, Arc::new(trees.clone()));
        AnchorSide { files, table, trees, object }
    }

    /// Another process opens the anchor of `table`, and records its commits.
    pub fn again(position: Position, table: &MemoryTable, trees: MemoryTrees) -> AnchorSide {
        let copies = Mutex::new(vec![(0, table.clone())]);
        let table = Arc::new(RecordedTable { inner: table.clone(), position, copies });
        let anchor = Arc::new(Anchor::open(table.clone(), &VAULT).expect("opens"));
        let files = AnchoredFiles::new(anchor, Arc::new(trees.clone()));
        AnchorSide { files, table, trees, object: OBJECT }
    }

    /// As fsync of the file does, behind the barrier.
    pub fn commit(&self, mark: EntryMark) {
        self.files.anchor().commit_objects(&HashSet::from([self.object]), mark).expect("commits");
    }

    /// Has every commit fail with this errno from now on, or none.
    pub fn refuse(&self, errno: Option<i32>) {
        self.table.inner.refuse(errno);
    }

    /// How often it was committed to.
    pub fn commits(&self) -> usize {
        self.table.copies.lock().expect("no panic").len()
    }

    /// What is durable.
    pub fn table(&self) -> Arc<MemoryTable> {
        Arc::new(self.table.inner.clone())
    }

    pub fn log(&self) -> AnchorLog {
        AnchorLog { copies: self.table.copies.lock().expect("no panic").clone(), trees: self.trees.clone() }
    }
}

/// How the order of store and anchor could be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disorder {
    /// A4: the anchor is told before the barrier.
    TooEarly,
    /// A1: pages are written before the anchor knows.
    TooLate,
    /// A1: the neighbours of changed pages are not held.
    NothingHeld,
    /// A1: a shrink is not noted.
    NoCut,
    /// A6: a convergent page is written that the anchor does not know.
    NoTwin,
}

impl AnchorLog {
    /// The log as it would be if a rule were not kept: for tests that prove that they find that.
    pub fn disordered(&self, how: Disorder) -> AnchorLog {
        let changed = |at: usize, table: &MemoryTable| match how {
            Disorder::TooEarly => (at.saturating_sub(2), table.clone()),
            Disorder::TooLate => (at + 2, table.clone()),
            Disorder::NothingHeld => (at, without(table, Space::Held, |_| None)),
            Disorder::NoCut => (at, rewritten(table, |file| file.open.iter_mut().for_each(|open| open.cut = None))),
            Disorder::NoTwin => (at, rewritten(table, |file| file.twin = None)),
        };
        let copies = self.copies.iter().map(|(at, table)| changed(*at, table)).collect();
        AnchorLog { copies, trees: self.trees.clone() }
    }

    /// What crashes after that many records of the store may leave: as of each commit between that record and the next,
    /// and before them.
    pub fn tables_at(&self, position: usize) -> Vec<MemoryTable> {
        let before = self.copies.iter().rev().find(|(at, _)| *at < position);
        let there = self.copies.iter().filter(|(at, _)| *at == position);
        before.into_iter().chain(there).map(|(_, table)| table.clone()).collect()
    }

    /// What a crash after that many records of the store leaves. `None`: the file's entry is not durable. `loses`: the
    /// tree records, which are never synced.
    pub fn at(&self, position: usize, loses: bool) -> Option<(Arc<AnchoredFiles>, Arc<MemoryTable>)> {
        let (_, table) = self.copies.iter().rev().find(|(at, _)| *at <= position)?;
        let table = Arc::new(table.clone());
        let trees = if loses { MemoryTrees::default() } else { self.trees.clone() };
        let files = open(table.clone(), trees);
        files.anchor().entry(&PLACE).expect("reads")?;
        Some((files, table))
    }
}

/// Another process opens the anchor.
pub fn open(table: Arc<MemoryTable>, trees: MemoryTrees) -> Arc<AnchoredFiles> {
    AnchoredFiles::new(Arc::new(Anchor::open(table, &VAULT).expect("opens")), Arc::new(trees))
}

/// The object of the test's file.
pub const OBJECT: ObjectId = ObjectId(2);

/// A copy of tables, with other values in one of them.
fn without(table: &MemoryTable, space: Space, value: impl Fn(&[u8]) -> Option<Vec<u8>>) -> MemoryTable {
    let copy = table.clone();
    let mut changes = Vec::new();
    let visit = &mut |key: &[u8], old: &[u8]| {
        changes.push(Change { space, key: key.to_vec(), value: value(old) });
        std::ops::ControlFlow::Continue(())
    };
    table.scan(space, &[], visit).expect("reads");
    copy.commit(&changes).expect("commits");
    copy
}

fn rewritten(table: &MemoryTable, change: impl Fn(&mut FileRow)) -> MemoryTable {
    without(table, Space::Objects, |bytes| {
        let mut row = Row::decode(bytes).expect("a row");
        if let Content::File(file) = &mut row.content {
            change(file);
        }
        Some(row.encode())
    })
}

/// A scrub without keys, and without the tree records of before.
pub fn scrub(geometry: &Geometry, anchor: &Anchor) -> ScrubContext {
    let shape = Shape::new(anchor.degree()).expect("a degree");
    ScrubContext { geometry: *geometry, shape, trees: Arc::new(MemoryTrees::default()) }
}
