use super::*;
use crate::{AnchorError, WINDOWS_MAX};
use lamassu_format::SessionTag;
use proptest::prelude::*;

fn digest() -> impl Strategy<Value = Digest> {
    any::<[u8; 32]>().prop_map(Digest).prop_filter("zero stands for nothing", |digest| !digest.is_none())
}

fn sealed_of_any_sort() -> impl Strategy<Value = Sealed> {
    let becomes = (any::<[u8; 32]>(), digest()).prop_map(|(old, new)| Sealed::Becomes { old: Digest(old), new });
    prop_oneof![Just(Sealed::Nothing), digest().prop_map(Sealed::Is), becomes]
        .prop_filter("both are one", |sealed| !matches!(sealed, Sealed::Becomes { old, new } if old == new))
}

fn windows() -> impl Strategy<Value = Windows> {
    let numbers = proptest::collection::btree_map(1_u32.., (any::<[u8; 6]>(), any::<u32>()), 1..=WINDOWS_MAX);
    let window = |(session, (tag, covered))| Window { session, tag: SessionTag(tag), covered };
    numbers.prop_map(move |map| map.into_iter().map(window).collect())
}

fn file_row() -> impl Strategy<Value = FileRow> {
    let id = (1_u8.., any::<[u8; 15]>()).prop_map(|(first, rest)| {
        let mut id = [first; 16];
        id[1..].copy_from_slice(&rest);
        FileId(id)
    });
    let cut = (any::<u32>(), any::<[u8; 6]>(), any::<u32>(), any::<u64>()).prop_map(|(session, tag, covered, from)| {
        Cut { after: Window { session, tag: SessionTag(tag), covered }, from: PageNo(from) }
    });
    let open = (id, windows(), proptest::option::of(cut));
    let open = open.prop_map(|(file, windows, cut)| Open { file, windows, cut });
    let digests = || proptest::option::of(digest());
    let profile = (0..=u8::MAX).prop_filter_map("a profile", Profile::of_number);
    let parts = (any::<[u8; 32]>(), any::<u64>(), profile, digests(), digests(), proptest::option::of(open));
    parts.prop_map(|(root, size, profile, twin, blocks, open)| {
        let root = Digest(root);
        FileRow { root, size, profile, twin, blocks, open }
    })
}

fn content() -> impl Strategy<Value = Content> {
    let dir = (sealed_of_any_sort(), any::<u64>(), any::<[u8; 16]>());
    let dir =
        dir.prop_map(|(record, parent, name)| Content::Dir { record, parent: ObjectId(parent), name: Token(name) });
    prop_oneof![
        file_row().prop_map(Content::File),
        dir,
        sealed_of_any_sort().prop_map(Content::Link),
        any::<u64>().prop_map(Content::Char),
        any::<u64>().prop_map(Content::Block),
        Just(Content::Fifo),
        Just(Content::Socket),
    ]
}

fn row() -> impl Strategy<Value = Row> {
    let parts = (0_u32..=0o7777, any::<u32>(), any::<u32>(), any::<u64>(), content(), sealed_of_any_sort());
    parts.prop_map(|(mode, uid, gid, links, content, attributes)| Row { mode, uid, gid, links, content, attributes })
}

fn some_entry() -> impl Strategy<Value = EntryRow> {
    let kind = (0_u8..7).prop_map(|number| ObjectKind::of_number(number).expect("seven kinds"));
    (kind, any::<u64>()).prop_map(|(kind, object)| EntryRow { kind, object: ObjectId(object) })
}

fn some_intent() -> impl Strategy<Value = Intent> {
    let place = || {
        (any::<u64>(), any::<[u8; 16]>()).prop_map(|(dir, name)| EntryPlace { dir: ObjectId(dir), name: Token(name) })
    };
    prop_oneof![
        (place(), some_entry()).prop_map(|(at, was)| Intent::Remove { at, was }),
        (
            place(),
            place(),
            proptest::collection::vec(any::<u8>(), 0..=255),
            prop::sample::select(&Over::ALL[..]),
            any::<[u64; 2]>()
        )
            .prop_map(|(from, to, name, over, [source, target])| {
                let inodes = Inodes { source, target };
                Intent::Move { from, to, to_name: name.into(), over, inodes }
            }),
    ]
}

fn some_vault() -> impl Strategy<Value = VaultRow> {
    let numbers = (any::<u64>(), 2_u64.., any::<u64>(), any::<u32>(), 1_u8..=8, any::<u64>());
    (any::<[u8; 16]>(), any::<[u8; 32]>(), numbers, any::<[u8; 32]>(), sealed_of_any_sort(), sealed_of_any_sort())
        .prop_map(
            |(vault, tokens, (revision, next_object, next_intent, session, degree_log2, count), head, header, root)| {
                let is_begun = session % 5 == 1 && matches!(header, Sealed::Becomes { .. });
                VaultRow {
                    vault: VaultId(vault),
                    revision: Revision(revision),
                    next_object: ObjectId(next_object),
                    next_intent,
                    sessions: Announced { recorded: session / 2, last: session },
                    suite: Suite::ALL[session as usize % Suite::ALL.len()],
                    domain: Domain::ALL[count as usize % Domain::ALL.len()],
                    degree_log2,
                    blocks: session % 2 == 1,
                    is_in_use: session % 3 == 1,
                    tokens: TokenKey::new(tokens),
                    header,
                    history: (count, Digest(head)),
                    next_history: is_begun.then_some((count / 2, Digest(tokens))),
                    root_permissions: root,
                }
            },
        )
}

proptest! {
    #[test]
    fn rows_come_back(row in row()) {
        prop_assert_eq!(Row::decode(&row.encode()).unwrap(), row);
    }

    #[test]
    fn entries_and_intents_come_back(entry in some_entry(), intent in some_intent()) {
        prop_assert_eq!(EntryRow::decode(&entry.encode()).unwrap(), entry);
        prop_assert_eq!(Intent::decode(&intent.encode()).unwrap(), intent);
    }

    #[test]
    fn the_vaults_row_comes_back(row in some_vault()) {
        let bytes = row.encode();
        prop_assert_eq!(VaultRow::decode(&bytes).unwrap().encode(), bytes);
    }

    /// A row has one encoding: whatever is read, at any length and with any byte changed, is written the same.
    #[test]
    fn nothing_else_is_read(row in row(), at: prop::sample::Index, byte: u8, cut: prop::sample::Index) {
        let mut bytes = row.encode();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        for bytes in [&bytes[..], &bytes[..cut.index(bytes.len())]] {
            if let Ok(row) = Row::decode(bytes) {
                prop_assert_eq!(row.encode(), bytes);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes: Vec<u8>) {
        let _ = (Row::decode(&bytes), EntryRow::decode(&bytes), Intent::decode(&bytes), VaultRow::decode(&bytes));
    }
}

#[test]
fn the_row_of_a_plain_file_is_small() {
    let content = Content::File(FileRow { root: Digest([7; 32]), size: 100_000, ..FileRow::default() });
    let row = Row { mode: 0o644, uid: 1000, gid: 1000, links: 1, content, attributes: Sealed::Nothing };
    let entry = EntryRow { kind: ObjectKind::File, object: ObjectId(1 << 20) };
    // Keys: 8 bytes of an object, 24 of an entry.
    assert!(8 + row.encode().len() + 24 + entry.encode().len() <= 90);
}

#[test]
fn a_later_version_says_so() {
    assert!(matches!(VaultRow::decode(&[9, 4]), Err(AnchorError::Version { found: 9 })));
}
