//! Exports: what is written comes back, and what was changed does not.
use lamassu_anchor::export::{self, ExportError, Exported};
use lamassu_anchor::row::{Content, FileRow, Sealed};
use lamassu_anchor::table::{Change, DiskTable, MemoryTable, Table};
use lamassu_anchor::{
    Anchor, AnchorError, Digest, EntryMark, EntryPlace, HeaderBasis, ObjectId, Revision, Row, Token, TokenKey, VaultRow,
};
use lamassu_crypto::Secret;
use lamassu_format::header::VaultId;
use std::path::Path;
use std::sync::Arc;

const VAULT: VaultId = VaultId([7; 16]);

fn key(byte: u8) -> Secret<32> {
    Secret::new(&mut [byte; 32])
}

fn row(content: Content) -> Row {
    Row { mode: 0o755, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing }
}

fn anchor(path: &Path, files: u64) -> Arc<Anchor> {
    let table = Arc::new(DiskTable::create(path).unwrap());
    let root = row(Content::Dir { record: Sealed::Nothing, parent: ObjectId::ROOT, name: Token([0; 16]) });
    let vault = VaultRow::new(VAULT, TokenKey::new([3; 32]));
    let anchor = Anchor::create(table, vault, root).unwrap();
    for n in 0..files {
        let name = anchor.token(ObjectId::ROOT, &n.to_le_bytes());
        anchor.make(EntryPlace { dir: ObjectId::ROOT, name }, row(Content::File(FileRow::default()))).unwrap();
    }
    let mark: EntryMark = anchor.mark();
    anchor.commit(mark).unwrap();
    Arc::new(anchor)
}

fn read(bytes: &[u8], key: &Secret<32>) -> Result<(Exported, Vec<Change>), ExportError> {
    let mut rows = Vec::new();
    let exported = export::read(&mut &bytes[..], &VAULT, key, &mut |change| {
        rows.push(change);
        Ok(())
    })?;
    Ok((exported, rows))
}

#[test]
fn what_was_exported_comes_back_the_same() {
    let dir = tempfile::tempdir().unwrap();
    drop(anchor(&dir.path().join("a"), 3000));
    let table = DiskTable::open(&dir.path().join("a")).unwrap();
    let mut bytes = Vec::new();
    let written = export::write(&table, &key(1), &mut bytes).unwrap();
    assert_eq!((written.vault, written.revision, written.rows), (VAULT, Revision(2), 6002));
    assert_eq!(export::digest(&table).unwrap(), written);
    let (exported, rows) = read(&bytes, &key(1)).unwrap();
    assert_eq!(exported, written);
    let again = DiskTable::create(&dir.path().join("b")).unwrap();
    again.commit(&rows).unwrap();
    assert_eq!(export::digest(&again).unwrap(), written);
    assert!(matches!(read(&bytes, &key(2)), Err(ExportError::Unauthentic)));
    Anchor::open(Arc::new(again), &VAULT).unwrap();
}

#[test]
fn what_was_changed_or_cut_off_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    drop(anchor(&dir.path().join("a"), 3));
    let table = DiskTable::open(&dir.path().join("a")).unwrap();
    let mut bytes = Vec::new();
    export::write(&table, &key(1), &mut bytes).unwrap();
    for at in 0..bytes.len() {
        for bit in [1, 0x80] {
            let mut changed = bytes.clone();
            changed[at] ^= bit;
            assert!(read(&changed, &key(1)).is_err(), "byte {at}");
        }
        assert!(read(&bytes[..at], &key(1)).is_err(), "{at} bytes");
    }
    bytes.push(0);
    assert!(matches!(read(&bytes, &key(1)), Err(ExportError::Damaged { rows: 8 })));
    assert!(matches!(read(b"something else that is long enough for a head", &key(1)), Err(ExportError::NotAnExport)));
}

#[test]
fn a_copy_has_the_same_objects_under_another_id() {
    let dir = tempfile::tempdir().unwrap();
    let origin = anchor(&dir.path().join("a"), 5);
    assert!(origin.replacing_header(HeaderBasis::Decided(None), Digest([1; 32]), None).unwrap());
    assert!(origin.header_is(Digest([1; 32])).unwrap());
    let entries = origin.entries(ObjectId::ROOT).unwrap();
    drop(origin);
    let table = DiskTable::open(&dir.path().join("a")).unwrap();
    let to = Arc::new(MemoryTable::default());
    export::copy_to(&table, &*to, VaultId([8; 16]), export::Rights::Kept).unwrap();
    assert!(matches!(Anchor::open(to.clone(), &VAULT), Err(AnchorError::Foreign)));
    let copy = Anchor::open(to, &VaultId([8; 16])).unwrap();
    assert_eq!(copy.entries(ObjectId::ROOT).unwrap(), entries);
    assert_eq!((copy.vault().header, copy.vault().revision), (Sealed::Nothing, Revision(1)));
}

#[test]
fn a_header_is_replaced_on_top_of_the_newest_alone() {
    let dir = tempfile::tempdir().unwrap();
    let anchor = anchor(&dir.path().join("a"), 0);
    let digest = |n| Digest([n; 32]);
    assert!(anchor.replacing_header(HeaderBasis::Decided(None), digest(1), Some((1, digest(9)))).unwrap());
    let replaces = |basis, new| anchor.replacing_header(HeaderBasis::Read(basis), new, Some((2, digest(9)))).unwrap();
    // Interrupted: both are current.
    assert!(anchor.vault().header.is_current(digest(1)) && anchor.vault().header.is_current(Digest::NONE));
    assert!(anchor.header_is(digest(1)).unwrap());
    assert!(!anchor.header_is(Digest::NONE).unwrap(), "what came too late changes nothing");
    assert!(!replaces(digest(5), digest(6)));
    assert_eq!(anchor.vault().header, Sealed::Is(digest(1)));
    assert!(replaces(digest(1), digest(2)));
    assert!(anchor.header_is(digest(2)).unwrap());
    assert!(!replaces(digest(1), digest(3)), "an older header is no basis");
    assert!(anchor.replacing_header(HeaderBasis::Decided(None), digest(1), None).unwrap(), "a person may decide");
    assert_eq!(anchor.vault().history, (2, digest(9)));
}

/// A person's decision that is cut off again and again, each time before the header is replaced.
#[test]
fn the_header_in_place_stays_current_until_it_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let anchor = anchor(&dir.path().join("a"), 0);
    let digest = |n| Digest([n; 32]);
    let decides = |in_place, new| anchor.replacing_header(HeaderBasis::Decided(in_place), new, None).unwrap();
    assert!(decides(None, digest(1)));
    assert!(anchor.header_is(digest(1)).unwrap());
    for new in 2..5 {
        assert!(decides(Some(digest(1)), digest(new)));
        assert_eq!(anchor.vault().header, Sealed::Becomes { old: digest(1), new: digest(new) });
    }
    // An older one that the store shows is none of them.
    assert!(decides(Some(digest(9)), digest(5)));
    assert_eq!(anchor.vault().header, Sealed::Becomes { old: digest(4), new: digest(5) });
}
