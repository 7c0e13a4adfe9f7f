//! A file that is opened for changes again before the anchor durably knows that it was clean in between.
use lamassu_anchor::row::{Content, FileRow, Sealed};
use lamassu_anchor::table::MemoryTable;
use lamassu_anchor::*;
use lamassu_format::header::VaultId;
use lamassu_format::{FileId, PageNo, Profile, SessionTag};
use std::sync::Arc;

fn row(content: Content) -> Row {
    Row { mode: 0o644, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing }
}

fn window(covered: u32) -> Window {
    Window { session: 1, tag: SessionTag::NONE, covered }
}

fn commit(anchor: &Anchor, object: ObjectId, root: u8, covered: u32, is_clean: bool) {
    let commit = FileCommit {
        object,
        root: Digest([root; 32]),
        size: 4096,
        profile: Profile::default(),
        twin: None,
        blocks: None,
        window: Some(window(covered)),
        held: Vec::new(),
        is_clean,
        drops_cut: false,
    };
    anchor.commit_file(commit).unwrap();
}

#[test]
fn an_opening_under_another_id_is_durable_before_a_page_carries_it() {
    for (id, root) in [(7, 1), (8, 2)] {
        let table = Arc::new(MemoryTable::default());
        let content =
            Content::Dir { record: Sealed::Is(Digest([1; 32])), parent: ObjectId::ROOT, name: Token([0; 16]) };
        let vault = VaultRow::new(VaultId([1; 16]), TokenKey::random().unwrap());
        let anchor = Anchor::create(table.clone(), vault, row(content)).unwrap();
        let place = EntryPlace { dir: ObjectId::ROOT, name: Token([1; 16]) };
        let Made::Queued(object) = anchor.make(place, row(Content::File(FileRow::default()))).unwrap() else {
            panic!()
        };
        anchor.commit(anchor.mark()).unwrap();
        let open = |id, covered| {
            let opening = Opening {
                object,
                file: FileId([id; 16]),
                window: window(covered),
                held: Vec::new(),
                cut: None,
                drops_cut: false,
                drops_window: None,
            };
            anchor.open_files(&[opening]).unwrap();
        };
        let durable = || {
            let anchor = Anchor::open(table.clone(), &VaultId([1; 16])).unwrap();
            let row = anchor.row(object).unwrap();
            let file = row.file().unwrap().clone();
            (file.open.unwrap().file.0[0], file.root.0[0])
        };
        open(7, 0);
        commit(&anchor, object, 1, 1, false);
        anchor.commit(anchor.mark()).unwrap();
        commit(&anchor, object, 2, 2, true);
        // As the file of a convergent page, which names no id.
        open(id, 2);
        // Under the same id nothing has to be waited for: what was durable allows the page.
        assert_eq!(durable(), (id, root));
    }
}

/// A shrink whose page 0 was not written is given up, or another one takes its place, durably before the opening
/// returns; also if a commit fails meanwhile.
#[test]
fn a_shrink_that_was_not_made_is_dropped_durably() {
    let table = Arc::new(MemoryTable::default());
    let content = Content::Dir { record: Sealed::Is(Digest([1; 32])), parent: ObjectId::ROOT, name: Token([0; 16]) };
    let vault = VaultRow::new(VaultId([1; 16]), TokenKey::random().unwrap());
    let anchor = Anchor::create(table.clone(), vault, row(content)).unwrap();
    let place = EntryPlace { dir: ObjectId::ROOT, name: Token([1; 16]) };
    let Made::Queued(object) = anchor.make(place, row(Content::File(FileRow::default()))).unwrap() else { panic!() };
    anchor.commit(anchor.mark()).unwrap();
    let open = |covered, cut: Option<u64>, drops_cut| {
        let (file, cut) = (FileId([7; 16]), cut.map(PageNo));
        anchor.open_files(&[Opening {
            object,
            file,
            window: window(covered),
            held: Vec::new(),
            cut,
            drops_cut,
            drops_window: None,
        }])
    };
    let durable = || {
        let anchor = Anchor::open(table.clone(), &VaultId([1; 16])).unwrap();
        let cut = anchor.row(object).unwrap().file().unwrap().open.as_ref().unwrap().cut;
        cut.map(|cut| (cut.from.0, cut.after.covered))
    };
    open(3, Some(5), false).unwrap();
    assert_eq!(durable(), Some((5, 3)));
    // It was made: a shrink to more pages is covered by it, one to fewer is refused.
    open(4, Some(6), false).unwrap();
    open(4, Some(4), false).unwrap_err();
    assert_eq!(durable(), Some((5, 3)));
    // It was not made.
    for (covered, from) in [(6, 7), (8, 2)] {
        table.refuse(Some(libc::EIO));
        open(covered, Some(from), true).unwrap_err();
        table.refuse(None);
        open(covered + 1, Some(from), true).unwrap();
        assert_eq!(durable(), Some((from, covered + 1)));
    }
    table.refuse(Some(libc::EIO));
    open(10, None, true).unwrap_err();
    assert_eq!(durable(), Some((2, 9)));
    table.refuse(None);
    open(10, None, true).unwrap();
    assert_eq!(durable(), None);
    // A commit that the queue has says nothing of what is durable.
    open(11, Some(3), false).unwrap();
    commit(&anchor, object, 1, 12, false);
    open(12, None, true).unwrap();
    assert_eq!(durable(), None);
}
