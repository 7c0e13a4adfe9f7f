//! An object that loses its last entry and gets one again, as when the store does not carry a removal out: all that is
//! recorded of it comes back.
use lamassu_anchor::row::{Content, FileRow, Inodes, Sealed};
use lamassu_anchor::table::{MemoryTable, Table};
use lamassu_anchor::*;
use lamassu_format::header::VaultId;
use lamassu_format::{FileId, Profile, SessionTag};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// What happens to a file while it has no entry.
type Meanwhile<'a> = &'a dyn Fn(&Anchor, ObjectId);
/// How it loses its entry.
type Loses<'a> = &'a dyn Fn(&Anchor);

const FILE: EntryPlace = EntryPlace { dir: ObjectId::ROOT, name: Token([1; 16]) };
const OTHER: EntryPlace = EntryPlace { dir: ObjectId::ROOT, name: Token([2; 16]) };

fn row(content: Content) -> Row {
    Row { mode: 0o644, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing }
}

fn window(covered: u32) -> Window {
    Window { session: 1, tag: SessionTag::NONE, covered }
}

fn digests(fill: u8) -> Digests {
    vec![Digest([fill; 32]); 16].into()
}

fn open(anchor: &Anchor, object: ObjectId, record: u64, fill: u8) {
    let held = vec![(RecordNo(record), digests(fill))];
    let opening = Opening {
        object,
        file: FileId([7; 16]),
        window: window(0),
        held,
        cut: None,
        drops_cut: false,
        drops_window: None,
    };
    anchor.open_files(&[opening]).unwrap();
}

fn commit(anchor: &Anchor, object: ObjectId, is_clean: bool) {
    let held = vec![(RecordNo(5), digests(5))];
    anchor
        .commit_file(FileCommit {
            object,
            root: Digest([9; 32]),
            size: 4096,
            profile: Profile::default(),
            twin: None,
            blocks: None,
            window: Some(window(1)),
            held: if is_clean { Vec::new() } else { held },
            is_clean,
            drops_cut: false,
        })
        .unwrap();
}

/// The digests that are durably held of a file which was written before it lost its entry, and got it again.
fn held_after(loses: Loses<'_>, meanwhile: Meanwhile<'_>) -> BTreeMap<u64, u8> {
    let table = Arc::new(MemoryTable::default());
    let content = Content::Dir { record: Sealed::Is(Digest([1; 32])), parent: ObjectId::ROOT, name: Token([0; 16]) };
    let vault = VaultRow::new(VaultId([1; 16]), TokenKey::random().unwrap());
    let anchor = Anchor::create(table.clone(), vault, row(content)).unwrap();
    let make = |place| match anchor.make(place, row(Content::File(FileRow::default()))).unwrap() {
        Made::Queued(object) => object,
        Made::NameIsGoing => panic!("a new name"),
    };
    let object = make(FILE);
    make(OTHER);
    anchor.commit(anchor.mark()).unwrap();
    open(&anchor, object, 1, 1);
    loses(&anchor);
    assert_eq!(anchor.row(object).unwrap().links, 0);
    meanwhile(&anchor, object);
    let again = EntryPlace { name: Token([3; 16]), ..FILE };
    assert!(matches!(anchor.link(again, object), Err(AnchorError::Unknown { .. })), "no other thread revives it");
    assert_eq!(anchor.link_again(again, object).unwrap(), Made::Queued(object));
    anchor.commit_objects(&HashSet::from([object]), anchor.mark()).unwrap();
    let durable = Anchor::open(table as Arc<dyn Table>, &VaultId([1; 16])).unwrap();
    assert_eq!(durable.entry(&again).unwrap().map(|entry| entry.object), Some(object));
    let held = durable.held(object).unwrap();
    assert_eq!(held, anchor.held(object).unwrap());
    assert_eq!(durable.open_objects().unwrap().is_empty(), held.is_empty());
    held.into_iter().map(|(record, digests)| (record.0, digests[0].0[0])).collect()
}

#[test]
fn what_is_held_of_a_file_comes_back_with_its_entry() {
    let removed: Loses<'_> = &|anchor| assert!(matches!(anchor.remove(FILE).unwrap(), Removal::WhenDue(_)));
    let removed_durably: Loses<'_> = &|anchor| {
        removed(anchor);
        anchor.commit(anchor.mark()).unwrap();
    };
    let replaced: Loses<'_> = &|anchor| {
        let inodes = Inodes { source: 1, target: 2 };
        let renamed = anchor.rename(OTHER, (FILE, b"stored"), false, inodes, anchor.mark()).unwrap();
        assert!(matches!(renamed, Renamed::Intended(_)), "{renamed:?}");
    };
    for loses in [removed, removed_durably, replaced] {
        assert_eq!(held_after(loses, &|_, _| {}), BTreeMap::from([(1, 1)]));
        // What changes meanwhile is no part of what is durable, until it has an entry.
        assert_eq!(held_after(loses, &|a, o| open(a, o, 2, 2)), BTreeMap::from([(1, 1), (2, 2)]));
        // The digests as of the root: a second opening says the same of them, or nothing.
        assert_eq!(held_after(loses, &|a, o| open(a, o, 1, 2)), BTreeMap::from([(1, 1)]));
        assert_eq!(held_after(loses, &|a, o| commit(a, o, false)), BTreeMap::from([(5, 5)]));
        assert_eq!(held_after(loses, &|a, o| commit(a, o, true)), BTreeMap::new());
    }
}
