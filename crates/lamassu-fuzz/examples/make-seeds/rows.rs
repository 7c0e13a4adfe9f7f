//! Rows as hosts send them to a server, and changes that its policy judges.

use super::Seeds;
use lamassu_anchor::row::{Content, FileRow, Sealed};
use lamassu_anchor::table::{self, Change, Space};
use lamassu_anchor::{Digest, EntryRow, ObjectId, ObjectKind, Row, Token, TokenKey, VaultRow};
use lamassu_format::header::VaultId;
use lamassu_rpc::proto;
use prost::Message;

/// A file's row that is made up: its number, what it has (1: a twin, 2: a root of blocks, 4: it is open), its size, its
/// profile, its root, and what it has.
const FILES: [&[u8]; 6] = [
    &[3, 0, 0, 1, 0, 2],
    &[3, 7, 0, 1, 3, 1],
    &[3, 3, 4, 1, 3, 3],
    &[3, 3, 4, 1, 3, 2],
    &[3, 1, 3, 2, 1, 3, 2, 3],
    &[3, 4, 1, 1, 4, 0, 1],
];

pub fn rows(seeds: &mut Seeds) {
    let vault = VaultRow::new(VaultId([5; 16]), TokenKey::new([2; 32]));
    let row = |content| Row { mode: 0o600, uid: 1, gid: 1, links: 1, content, attributes: Sealed::Nothing };
    let dir = Content::Dir { record: Sealed::Nothing, parent: ObjectId::ROOT, name: Token([0; 16]) };
    let file = FileRow { root: Digest([1; 32]), size: 9, ..FileRow::default() };
    let entry = EntryRow { kind: ObjectKind::File, object: ObjectId(2) };
    let change = |space, key: &[u8], value: Vec<u8>| Change { space, key: key.to_vec(), value: Some(value) };
    let object = |number: u64, content| change(Space::Objects, &number.to_be_bytes(), row(content).encode());
    let all = [
        change(Space::Vault, b"vault", vault.encode()),
        object(1, dir),
        object(2, Content::File(file)),
        change(Space::Open, &2u64.to_be_bytes(), Vec::new()),
        change(Space::Entries, &[&1u64.to_be_bytes()[..], &[9; 16]].concat(), entry.encode()),
        change(Space::Held, &[&2u64.to_be_bytes()[..], &[0; 8]].concat(), vec![7; 16 * 32]),
    ];
    let removal = Change { space: Space::Open, key: 2u64.to_be_bytes().to_vec(), value: None };
    let packed = |rows: &[Change]| table::pack(rows);
    let of = Some(proto::Of { vault: vec![5; 16], session: 3 });
    let changes = packed(&[all[2].clone(), removal.clone()]);
    let commit = proto::CommitRequest { of, base: vec![7; 32], changes, grant: 1 };
    let known = proto::Known { vault: vec![5; 16], revision: 9, head: vec![7; 32] };
    let put = |rows: &[Change], all: u64| {
        let (vault, around) = (vec![5; 16], vec![6; 16]);
        let message = proto::PutRequest { vault, rows: packed(rows), head: Vec::new(), around, all }.encode_to_vec();
        [&(message.len() as u16).to_le_bytes()[..], &message].concat()
    };
    let as_a_whole = |all: &[Change]| put(all, all.len() as u64);
    let in_two = [put(&all[..2], 0), put(&all[2..], 6)].concat();
    let inputs = [
        (0, packed(&all)),
        (0, packed(&[removal])),
        (1, commit.encode_to_vec()),
        (2, known.encode_to_vec()),
        (3, as_a_whole(&all)),
        (3, as_a_whole(&all[..5])),
        (3, in_two),
        (3, put(&all, 7)),
    ];
    let inputs = inputs.into_iter().map(|(what, rest)| [&[what][..], &rest].concat());
    seeds.entry("host_rows").or_default().extend(inputs);
    judged(seeds, &packed(&all[3..4]));
}

/// The policies, and commits of one change and of several.
fn judged(seeds: &mut Seeds, packed: &[u8]) {
    let raw = [&[0][..], &(packed.len() as u16).to_le_bytes(), packed].concat();
    let (removal, vault): (&[u8], &[u8]) = (&[1, 1, 3], &[2, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0]);
    let one_by_one = FILES.iter().copied().chain([&raw[..], removal, vault]).flat_map(|change| [&[0], change].concat());
    let one_by_one: Vec<u8> = one_by_one.collect();
    let at_once = [&[0x83][..], FILES[0], FILES[2], removal, vault, &[1], FILES[1], FILES[4]].concat();
    for policies in [[0, 0], [1, 0], [2, 0], [3, 0], [0x81, 2], [0x81, 0], [0x82, 5]] {
        for commits in [&one_by_one, &at_once] {
            seeds.entry("judged_rows").or_default().push([&policies[..], commits, commits].concat());
        }
    }
}
