//! What hosts send to a server in rows: commits, whole anchors, and what they know of one; the server's judgement of
//! rows by its policy.
//!
//! Whatever a host sends, the rows that are taken are in one form, of no other table than a vault's, and short. What
//! becomes an anchor can be read, exported and backed up. A host that is forbidden a profile makes no file of it, and
//! writes none.

use crate::bytes::Bytes;
use lamassu_anchor::head::Head;
use lamassu_anchor::row::{Content, FileRow, Open, Sealed};
use lamassu_anchor::table::{self, Change, MemoryTable, Space, Table};
use lamassu_anchor::{Anchor, Digest, ObjectId, Row, Token, TokenKey, VaultRow, Window, Windows, export};
use lamassu_format::header::VaultId;
use lamassu_format::{Domain, FileId, Profile, SessionTag, Suite};
use lamassu_rpc::convert::{self, Counted, to_changes, to_rows};
use lamassu_rpc::limits::Limits;
use lamassu_rpc::{CHANGES_MAX, ROWS_MAX, proto};
use lamassu_server::policy::{Judged, Subject, judge, parse};
use prost::Message;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Longest key and value of a row.
const KEY_MAX: usize = 64;
const VALUE_MAX: usize = 32 << 10;
/// The vault whose rows these are.
const VAULT: VaultId = VaultId([5; 16]);
/// Files that are made up, beside the root.
const FILES: u8 = 6;
/// The rules of a server, or none.
const RULES: [&str; 4] = [
    "",
    "forbid.protections = [\"none\", \"integrity\"]",
    "require.ciphers = [\"aes-256\"]",
    "require.keys = [\"random\"]\nforbid.hashes = [\"blake3\"]",
];

/// The first byte says what the rest is: rows, a commit, what a host knows, or the messages of an anchor that is put,
/// each after its length in two bytes.
pub fn host_rows(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    match bytes.u8() % 4 {
        0 => drop(taken(bytes.rest())),
        1 => {
            let Ok(commit) = proto::CommitRequest::decode(bytes.rest()) else { return };
            let Some(of) = &commit.of else { return };
            assert_eq!(convert::vault(&of.vault).is_ok(), of.vault.len() == 16);
            let (Ok(base), Some(changes)) = (convert::head(&commit.base), taken(&commit.changes)) else { return };
            let table = MemoryTable::default();
            table.commit(&changes).expect("memory takes everything");
            let last: BTreeMap<_, _> =
                changes.iter().map(|change| ((change.space, &change.key), &change.value)).collect();
            for ((space, key), value) in last {
                assert_eq!(&table.get(space, key).expect("memory reads"), value, "the last one of a key counts");
            }
            assert!(changes.is_empty() || base.after(&changes) != base);
        }
        2 => {
            let Ok(known) = proto::Known::decode(bytes.rest()) else { return };
            assert_eq!(convert::vault(&known.vault).is_ok(), known.vault.len() == 16);
            assert_eq!(convert::head(&known.head).ok(), known.head.clone().try_into().ok().map(Head));
        }
        _ => put(bytes),
    }
}

/// The changes in packed bytes, if they are taken.
fn taken(packed: &[u8]) -> Option<Vec<Change>> {
    let changes = to_changes(packed, CHANGES_MAX).ok()?;
    let is_short = |change: &Change| {
        change.key.len() <= KEY_MAX && change.value.as_ref().is_none_or(|value| value.len() <= VALUE_MAX)
    };
    assert!(changes.iter().all(|change| is_short(change) && change.space != Space::Head));
    assert_eq!(table::pack(&changes), packed, "one form");
    let are_rows = changes.len() <= ROWS_MAX && changes.iter().all(|change| change.value.is_some());
    assert_eq!(to_rows(packed).is_ok(), are_rows);
    if let Some(fewer) = changes.len().checked_sub(1) {
        assert!(to_changes(packed, fewer).is_err(), "there is a limit");
    }
    Some(changes)
}

/// An anchor that is put, message after message, as the server takes it.
fn put(mut bytes: Bytes<'_>) {
    let (table, mut counted, mut sum, mut last) = (Arc::new(MemoryTable::default()), Counted::default(), 0, 0);
    while !bytes.is_empty() {
        let len = usize::from(bytes.u16());
        let Ok(message) = proto::PutRequest::decode(bytes.take(len)) else { return };
        let Ok(rows) = to_rows(&message.rows) else { return };
        if counted.take(rows.len(), message.all).is_err() {
            return;
        }
        (sum, last) = (sum + rows.len() as u64, message.all);
        table.commit(&rows).expect("memory takes everything");
    }
    if counted.finish().is_err() {
        return;
    }
    assert!(sum > 0 && sum == last, "it has not come to its end");
    let Ok(anchor) = Anchor::open(table.clone(), &VAULT) else { return };
    let vault = anchor.vault();
    drop(anchor);
    if let Ok((revision, count)) = export::check(&*table, &VAULT) {
        assert_eq!((revision, vault.vault), (vault.revision, VAULT));
        assert!(count <= sum);
        is_exported(&*table, &vault);
    }
}

/// All rows of an anchor are rows of its vault, and go through an export.
fn is_exported(table: &dyn Table, vault: &VaultRow) {
    let (mut rows, mut out) = (Vec::new(), Vec::new());
    let visited = table.visit_all(|space, key, value| {
        assert!(export::is_row_of(vault, space, key, value));
        rows.push((space, key.to_vec(), value.to_vec()));
        Ok::<(), lamassu_anchor::AnchorError>(())
    });
    visited.expect("memory reads");
    let mut writer = export::Writer::begin(&mut out, vault).expect("memory takes everything");
    for (space, key, value) in &rows {
        writer.row(*space, key, value).expect("a row that was taken is short");
    }
    writer.end(&lamassu_crypto::Secret::new(&mut [3; 32])).expect("memory takes everything");
    let mut read = Vec::new();
    let parsed = export::parse(&mut &out[..], None, &mut |row| {
        read.push((row.space, row.key, row.value.expect("an export removes nothing")));
        Ok(())
    });
    parsed.expect("what was written reads");
    assert_eq!(read, rows);
}

/// Two bytes for the policies, then commits of a host: a byte for the number of changes, and the changes.
pub fn judged_rows(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    let mut host = Judge::new([bytes.u8(), bytes.u8()]);
    while !bytes.is_empty() {
        // The high bit: a turn ends, and another one begins.
        let count = bytes.u8();
        if count & 0x80 != 0 {
            host.opened.clear();
        }
        let changes: Vec<_> = (0..=count & 3).filter_map(|_| host.change(&mut bytes)).collect();
        host.commit(&changes);
    }
}

/// A table, and the policies under which a host changes it: the one in force, and perhaps one before.
struct Judge {
    table: MemoryTable,
    vault: VaultRow,
    limits: Vec<Arc<Limits>>,
    /// the forbidden files that were opened in this turn
    opened: HashSet<Vec<u8>>,
}

impl Judge {
    fn new(policies: [u8; 2]) -> Judge {
        let suite = Suite::ALL[usize::from(policies[1] >> 2) % Suite::ALL.len()];
        let vault = VaultRow { suite, ..VaultRow::new(VAULT, TokenKey::new([2; 32])) };
        let subject =
            Subject { host: "node1".into(), vault: "05".repeat(16), around: vec![], suite, domain: Domain::Zone };
        let limits = |rule: &str| {
            let text = if rule.is_empty() { String::new() } else { format!("[[rule]]\nname = \"r\"\n{rule}") };
            Arc::new(parse(&text).expect("a policy").limits(&subject))
        };
        let now = RULES[usize::from(policies[0]) % RULES.len()];
        let before = (policies[0] & 0x80 != 0).then(|| RULES[usize::from(policies[1]) % RULES.len()]);
        let limits = std::iter::once(now).chain(before).map(limits).collect();
        let table = MemoryTable::default();
        let parent = ObjectId::ROOT;
        let root = Content::Dir { record: Sealed::Nothing, parent, name: Token([0; 16]) };
        let rows = [
            Change { space: Space::Vault, key: b"vault".to_vec(), value: Some(vault.encode()) },
            object(ObjectId::ROOT.0, &row(root)),
        ];
        // Files of all profiles are there before the policies.
        let files = (0..FILES).filter_map(|n| {
            let file =
                FileRow { profile: Profile::of_number(n)?, root: Digest([n; 32]), size: 9, ..FileRow::default() };
            Some(object(2 + u64::from(n), &row(Content::File(file))))
        });
        table.commit(&rows.into_iter().chain(files).collect::<Vec<_>>()).expect("memory takes everything");
        Judge { table, vault, limits, opened: HashSet::new() }
    }

    /// A change that the bytes choose.
    fn change(&self, bytes: &mut Bytes<'_>) -> Option<Change> {
        match bytes.u8() % 8 {
            0 => {
                let len = usize::from(bytes.u16());
                to_changes(bytes.take(len), 1).ok()?.pop()
            }
            1 => Some(Change {
                space: bytes.one_of(&Space::OF_VAULT),
                key: (2 + u64::from(bytes.u8() % (FILES + 2))).to_be_bytes().to_vec(),
                value: None,
            }),
            2 => {
                let suite = bytes.one_of(&Suite::ALL);
                let step = if bytes.u8().is_multiple_of(8) { bytes.u64() } else { 1 };
                let revision = lamassu_anchor::Revision(self.vault.revision.0.wrapping_add(step));
                let degree_log2 = 4 - bytes.u8() % 2;
                let vault = VaultRow { suite, revision, degree_log2, ..self.vault.clone() };
                Some(Change { space: Space::Vault, key: b"vault".to_vec(), value: Some(vault.encode()) })
            }
            _ => {
                let (number, how, size) = (bytes.u8() % (FILES + 2), bytes.u8(), bytes.u8() % 3);
                let profile = Profile::of_number(bytes.u8() % (FILES + 2))?;
                let digest = |byte: u8| Digest([byte % 4; 32]);
                let window = Window { session: 3, tag: SessionTag([1; 6]), covered: 0 };
                let open = Open { file: FileId([1; 16]), windows: Windows::from_iter([window]), cut: None };
                let file = FileRow {
                    root: digest(bytes.u8()),
                    size: 8 + u64::from(size),
                    profile,
                    twin: (how & 1 != 0).then(|| digest(bytes.u8())),
                    blocks: (how & 2 != 0).then(|| digest(bytes.u8())),
                    open: (how & 4 != 0).then_some(open),
                };
                Some(object(2 + u64::from(number), &row(Content::File(file))))
            }
        }
    }

    /// The host commits. What the server decides is right, and leaves an anchor.
    fn commit(&mut self, changes: &[Change]) {
        let judged = judge(&self.table, &self.vault, changes, &self.limits, &self.opened).expect("memory reads");
        let opens = match judged {
            Judged::Good(opens) => opens,
            Judged::Forbidden(_) => {
                assert!(!self.allows_all(), "nothing is forbidden");
                return;
            }
            Judged::Nonsense => return,
        };
        let before = self.files();
        self.table.commit(changes).expect("memory takes everything");
        for (key, file) in self.files().iter().filter(|(_, file)| self.is_forbidden(file.profile)) {
            let was = before.get(key).expect("no file of a forbidden profile is made");
            assert_eq!(was.profile, file.profile, "none is brought to a forbidden profile");
            let was_left_open = was.open.is_some() && !self.opened.contains(key);
            let is_known = |root: Digest| root == was.root || was.twin == Some(root);
            let is_same = file.size == was.size && is_known(file.root) && file.twin.is_none_or(is_known);
            assert!(is_same || was_left_open, "none is written");
        }
        self.opened.extend(opens);
        let row = self.table.get(Space::Vault, b"vault").expect("memory reads").expect("no vault's row is removed");
        let row = VaultRow::decode(&row).expect("it was judged");
        assert_eq!((row.vault, row.suite, row.domain), (VAULT, self.vault.suite, self.vault.domain));
        assert!(row.revision >= self.vault.revision, "none is older");
        self.vault = row;
        export::check(&self.table, &VAULT).expect("it is an anchor as before");
        is_exported(&self.table, &self.vault);
    }

    fn allows_all(&self) -> bool {
        self.limits.iter().any(|limits| limits.is_empty())
    }

    fn is_forbidden(&self, profile: Profile) -> bool {
        self.limits.iter().all(|limits| limits.forbids(profile).is_some())
    }

    fn files(&self) -> BTreeMap<Vec<u8>, FileRow> {
        let mut files = BTreeMap::new();
        let scanned = self.table.scan(Space::Objects, &[], &mut |key, value| {
            let row = Row::decode(value).expect("it was judged");
            files.extend(row.file().map(|file| (key.to_vec(), file.clone())));
            std::ops::ControlFlow::Continue(())
        });
        scanned.expect("memory reads");
        files
    }
}

fn row(content: Content) -> Row {
    Row { mode: 0o600, uid: 1, gid: 1, links: 1, content, attributes: Sealed::Nothing }
}

fn object(number: u64, row: &Row) -> Change {
    Change { space: Space::Objects, key: number.to_be_bytes().to_vec(), value: Some(row.encode()) }
}
