//! A file that is opened for changes again before the anchor durably knows that it was clean in between.
use lamassu_anchor::row::{Content, FileRow, Sealed};
use lamassu_anchor::table::MemoryTable;
use lamassu_anchor::*;
use lamassu_format::header::VaultId;
use lamassu_format::{FileId, Profile, SessionTag};
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
            let opening =
                Opening { object, file: FileId([id; 16]), window: window(covered), held: Vec::new(), cut: None };
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
