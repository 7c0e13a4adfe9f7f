//! A queue that no single commit could take becomes durable in pieces, each of which is a complete state.

use lamassu_anchor::row::{Content, FileRow, Sealed};
use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
use lamassu_anchor::{
    Anchor, AnchorError, Digest, EntryMark, EntryPlace, EntryRow, Made, ObjectId, ObjectKind, Removal, Row, Token,
    TokenKey, VaultRow,
};
use lamassu_format::header::VaultId;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

const DIRS: usize = 40;
const FILES_IN_EACH: usize = 250;
/// Bytes of keys and values that one commit may have.
const COMMIT_MAX: usize = 2 << 20;

/// Checks each commit's size, and counts them.
#[derive(Default)]
struct Watched {
    table: MemoryTable,
    sizes: Mutex<Vec<usize>>,
    /// Whether commits fail from this one on.
    fails_from: Mutex<Option<usize>>,
}

impl Table for Watched {
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
        self.table.get(space, key)
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), AnchorError> {
        self.table.scan(space, prefix, visit)
    }

    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError> {
        let sizes = &mut *self.sizes.lock();
        if self.fails_from.lock().is_some_and(|from| sizes.len() >= from) {
            return Err(AnchorError::Broken);
        }
        sizes.push(changes.iter().map(|c| c.key.len() + c.value.as_ref().map_or(0, Vec::len)).sum());
        self.table.commit(changes)?;
        must_be_complete(&self.table);
        Ok(())
    }
}

/// Every entry leads from a recorded directory to a recorded object, which counts it.
fn must_be_complete(table: &MemoryTable) {
    let mut links = HashMap::<ObjectId, u64>::new();
    let number = |key: &[u8]| ObjectId(u64::from_be_bytes(*key.first_chunk().unwrap()));
    let mut rows = HashMap::new();
    table
        .scan(Space::Objects, &[], &mut |key, value| {
            rows.insert(number(key), Row::decode(value).unwrap());
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
    table
        .scan(Space::Entries, &[], &mut |key, value| {
            let entry = EntryRow::decode(value).unwrap();
            assert!(rows.contains_key(&number(key)), "an entry in a directory that is not recorded");
            *links.entry(entry.object).or_default() += 1;
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
    for (object, row) in rows.iter().filter(|(object, _)| **object != ObjectId::ROOT) {
        assert_eq!(links.remove(object), Some(row.links), "entries of {object:?}");
    }
    assert_eq!(links.len(), 0, "entries of objects that are not recorded");
}

fn row(content: Content) -> Row {
    Row { mode: 0o600, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing }
}

fn place(dir: ObjectId, n: usize) -> EntryPlace {
    let mut name = [0; 16];
    name[..8].copy_from_slice(&n.to_be_bytes());
    EntryPlace { dir, name: Token(name) }
}

fn made(anchor: &Anchor, place: EntryPlace, content: Content) -> ObjectId {
    match anchor.make(place, row(content)).unwrap() {
        Made::Queued(object) => object,
        Made::NameIsGoing => panic!("nothing was removed"),
    }
}

/// An anchor with directories of files, all queued, and a second name for some; and the directories.
fn lab() -> (Arc<Watched>, Anchor, Vec<ObjectId>) {
    let table = Arc::new(Watched::default());
    let dir_row = |parent, name| Content::Dir { record: Sealed::Is(Digest([1; 32])), parent, name };
    let vault = VaultRow::new(VaultId([1; 16]), TokenKey::new([2; 32]));
    let root = row(dir_row(ObjectId::ROOT, Token([0; 16])));
    let anchor = Anchor::create(table.clone(), vault, root).unwrap();
    let mut dirs = Vec::new();
    for n in 0..DIRS {
        // Each in the one before: the way to the last is long.
        let at = place(dirs.last().copied().unwrap_or(ObjectId::ROOT), usize::MAX - n);
        let dir = made(&anchor, at, dir_row(at.dir, at.name));
        for file in 0..FILES_IN_EACH {
            let object = made(&anchor, place(dir, file), Content::File(FileRow::default()));
            if file % 10 == 0 {
                let other = dirs.first().copied().unwrap_or(ObjectId::ROOT);
                anchor.link(place(other, 1_000_000 + n * FILES_IN_EACH + file), object).unwrap();
            }
        }
        dirs.push(dir);
    }
    table.sizes.lock().clear();
    (table, anchor, dirs)
}

fn must_be_in_pieces(table: &Watched) {
    let sizes = std::mem::take(&mut *table.sizes.lock());
    assert!(sizes.len() > 1 && sizes.iter().all(|size| *size <= COMMIT_MAX), "{sizes:?}");
}

fn nothing_is_queued(anchor: &Anchor) {
    assert_eq!(anchor.queued(), 0);
    assert!(anchor.intents().unwrap().is_empty());
}

#[test]
fn what_was_made_becomes_durable_in_pieces() {
    let (table, anchor, dirs) = lab();
    anchor.commit(anchor.mark()).unwrap();
    must_be_in_pieces(&table);
    nothing_is_queued(&anchor);
    assert_eq!(anchor.entries(*dirs.last().unwrap()).unwrap().len(), FILES_IN_EACH);
}

#[test]
fn so_does_what_an_fsync_of_much_asks_for() {
    let (table, anchor, dirs) = lab();
    let all = anchor.queued_in(ObjectId::ROOT);
    let asked: HashSet<_> = dirs[1..].iter().flat_map(|dir| anchor.queued_in(*dir)).collect();
    assert!(!all.is_empty() && asked.len() > DIRS / 2 * FILES_IN_EACH);
    assert!(!anchor.commit_unless_late(&asked, EntryMark::NOTHING).unwrap(), "no barrier covers them");
    assert!(table.sizes.lock().is_empty(), "and nothing is committed");
    assert!(anchor.commit_unless_late(&asked, anchor.mark()).unwrap());
    must_be_in_pieces(&table);
    let durable = Anchor::open(table.clone(), &VaultId([1; 16])).unwrap();
    assert!(asked.iter().all(|object| durable.row(*object).is_ok()));
}

#[test]
fn a_tree_that_is_removed_leaves_from_the_bottom_and_its_intents_end_in_pieces() {
    let (table, anchor, dirs) = lab();
    anchor.commit(anchor.mark()).unwrap();
    table.sizes.lock().clear();
    let mut dirs_and_root = vec![ObjectId::ROOT];
    dirs_and_root.extend(&dirs);
    for dir in dirs_and_root.iter().rev() {
        for name in anchor.entries(*dir).unwrap().into_keys() {
            assert!(matches!(anchor.remove(EntryPlace { dir: *dir, name }).unwrap(), Removal::WhenDue(_)));
        }
    }
    anchor.commit(anchor.mark()).unwrap();
    must_be_in_pieces(&table);
    let due = anchor.due();
    assert!(due.len() > DIRS * FILES_IN_EACH);
    anchor.carried_out(due.into_keys());
    anchor.commit(anchor.mark()).unwrap();
    nothing_is_queued(&anchor);
    assert!(anchor.is_empty(ObjectId::ROOT).unwrap());
    assert_eq!(table.scan_objects(), vec![ObjectId::ROOT]);
}

impl Watched {
    fn scan_objects(&self) -> Vec<ObjectId> {
        let mut objects = Vec::new();
        self.scan(Space::Objects, &[], &mut |key, _| {
            objects.push(ObjectId(u64::from_be_bytes(*key.first_chunk().unwrap())));
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
        objects
    }
}

#[test]
fn a_commit_that_fails_in_the_middle_goes_on_from_there() {
    let (table, anchor, dirs) = lab();
    let queued = anchor.queued();
    *table.fails_from.lock() = Some(2);
    anchor.commit(anchor.mark()).unwrap_err();
    assert_eq!(table.sizes.lock().len(), 2);
    let left = anchor.queued();
    assert!(0 < left && left < queued);
    // What a crash now leaves has no number that will be given again.
    let kinds = |anchor: &Anchor| anchor.row(dirs[DIRS - 1]).map(|row| row.kind());
    assert_eq!(kinds(&anchor).unwrap(), ObjectKind::Dir, "what is queued is in force");
    *table.fails_from.lock() = None;
    anchor.commit(anchor.mark()).unwrap();
    nothing_is_queued(&anchor);
    let durable = Anchor::open(table, &VaultId([1; 16])).unwrap();
    assert_eq!(kinds(&durable).unwrap(), ObjectKind::Dir);
}
