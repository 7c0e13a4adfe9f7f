//! A table whose commits can fail in doubt, as those of a table at a server: the answer is lost. And the rows that such
//! commits are about.
use lamassu_anchor::row::{Content, FileRow, Inodes, Sealed};
use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
use lamassu_anchor::*;
use lamassu_format::header::VaultId;
use lamassu_format::{FileId, SessionTag};
use parking_lot::Mutex;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// What reads see is a copy, which follows what is durable.
#[derive(Default)]
pub struct Doubtful {
    durable: MemoryTable,
    copy: MemoryTable,
    state: Mutex<State>,
}

/// Changes, in a form that can be hashed.
type Changes = Vec<(Space, Vec<u8>, Option<Vec<u8>>)>;

#[derive(Default, Hash)]
struct State {
    /// The next commit fails; true: it is made.
    armed: Option<bool>,
    /// Changes of the failed commit, and whether it was made.
    pending: Option<(Changes, bool)>,
    /// The repetition of that commit is refused by a policy; the commit is not made.
    is_forbidden: bool,
}

fn keys(changes: &[Change]) -> Changes {
    changes.iter().map(|change| (change.space, change.key.clone(), change.value.clone())).collect()
}

impl Doubtful {
    /// Lets the next commit fail in doubt.
    pub fn doubt(&self, is_made: bool) {
        self.state.lock().armed = Some(is_made);
    }

    /// Another process has only what is durable.
    pub fn begin_again(&self) {
        *self.state.lock() = State::default();
        let mut all = Vec::new();
        let mut note = |change| all.push(change);
        for (from, is_kept) in [(&self.copy, false), (&self.durable, true)] {
            from.visit_spaces(&Space::ALL, &mut |space, key, value| {
                note(Change { space, key: key.into(), value: is_kept.then(|| value.into()) });
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
        }
        self.copy.commit(&all).unwrap();
    }
}

impl Hash for Doubtful {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.durable.hash(hasher);
        self.copy.hash(hasher);
        self.state.lock().hash(hasher);
    }
}

impl Table for Doubtful {
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
        self.copy.get(space, key)
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), AnchorError> {
        self.copy.scan(space, prefix, visit)
    }

    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError> {
        let state = &mut *self.state.lock();
        if let Some((pending, is_made)) = state.pending.take() {
            assert!(pending == keys(changes), "what is in doubt is settled first");
            if std::mem::take(&mut state.is_forbidden) {
                let fault = ServerFault::Policy { rule: "rule".into(), what: "this profile".into() };
                return Err(AnchorError::Server { server: "server".into(), fault });
            }
            if !is_made {
                self.durable.commit(changes)?;
            }
            return self.copy.commit(changes);
        }
        if let Some(is_made) = state.armed.take() {
            if is_made {
                self.durable.commit(changes)?;
            }
            state.pending = Some((keys(changes), is_made));
            return Err(AnchorError::Broken);
        }
        self.durable.commit(changes)?;
        self.copy.commit(changes)
    }

    fn may_be_in_doubt(&self) -> bool {
        self.state.lock().pending.is_some()
    }
}

fn place(dir: ObjectId, name: u8) -> EntryPlace {
    EntryPlace { dir, name: Token([name; 16]) }
}

fn row(content: Content) -> Row {
    Row { mode: 0o644, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing }
}

fn dir(at: EntryPlace) -> Row {
    row(Content::Dir { record: Sealed::Nothing, parent: at.dir, name: at.name })
}

fn made(anchor: &Anchor, at: EntryPlace, row: Row) -> ObjectId {
    match anchor.make(at, row).unwrap() {
        Made::Queued(object) => object,
        Made::NameIsGoing => panic!("a new name"),
    }
}

fn all(table: &MemoryTable) -> Vec<(Space, Vec<u8>, Vec<u8>)> {
    let mut all = Vec::new();
    table
        .visit_spaces(&[Space::Objects, Space::Open, Space::Entries, Space::Held, Space::Intents], &mut |s, k, v| {
            all.push((s, k.into(), v.into()));
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
    all
}

/// A move whose commit has failed in doubt is none: rows, entries and held records are as before, in force at once and
/// durable with the next commit, whether the first one was made or not.
#[test]
fn a_move_in_doubt_is_taken_back() {
    for is_made in [false, true] {
        for (is_dir, to_free, is_exchange) in [
            (false, true, false),
            (true, true, false),
            (false, false, false),
            (false, false, true),
            (true, false, true),
        ] {
            let table = Arc::new(Doubtful::default());
            let vault = VaultRow::new(VaultId([1; 16]), TokenKey::new([2; 32]));
            let anchor = Anchor::create(table.clone(), vault, dir(place(ObjectId::ROOT, 0))).unwrap();
            let [a, b] = [1, 2].map(|name| {
                let at = place(ObjectId::ROOT, name);
                made(&anchor, at, dir(at))
            });
            let (from, to) = (place(a, 3), place(b, 4));
            let of = |at| if is_dir { dir(at) } else { row(Content::File(FileRow::default())) };
            made(&anchor, from, of(from));
            if !to_free {
                let target = made(&anchor, to, of(to));
                anchor.commit(anchor.mark()).unwrap();
                if !is_dir {
                    let window = Window { session: 1, tag: SessionTag::NONE, covered: 0 };
                    let held = vec![(RecordNo(7), vec![Digest([9; 32]); 16].into())];
                    let opening = Opening {
                        object: target,
                        file: FileId([7; 16]),
                        window,
                        held,
                        cut: None,
                        drops_cut: false,
                        drops_window: None,
                    };
                    anchor.open_files(&[opening]).unwrap();
                }
            }
            anchor.commit(anchor.mark()).unwrap();
            let before = all(&table.durable);
            table.doubt(is_made);
            let mark = anchor.mark();
            anchor.rename(from, (to, b"to"), is_exchange, Inodes::default(), mark).unwrap_err();
            assert_eq!(all(&table.durable) != before, is_made);
            let what =
                format!("made {is_made}, directories {is_dir}, to a free name {to_free}, exchange {is_exchange}");
            assert!(anchor.queued() > 0 && anchor.due().is_empty(), "{what}");
            anchor.commit(anchor.mark()).unwrap();
            assert!(anchor.due().is_empty() && anchor.queued() == 0, "{what}");
            assert_eq!(all(&table.durable), before, "{what}");
            // And it can be made.
            let renamed = anchor.rename(from, (to, b"to"), is_exchange, Inodes::default(), anchor.mark()).unwrap();
            assert!(matches!(renamed, Renamed::Intended(_)), "{what}");
        }
    }
}

/// A move that replaced a file is taken back, and the file has its entry again in the same commit: also if that is in
/// doubt at first.
#[test]
fn a_replaced_file_comes_back_with_the_move_that_is_taken_back() {
    for doubt in [None, Some(false), Some(true)] {
        for has_other_name in [false, true] {
            let table = Arc::new(Doubtful::default());
            let vault = VaultRow::new(VaultId([1; 16]), TokenKey::new([2; 32]));
            let anchor = Anchor::create(table.clone(), vault, dir(place(ObjectId::ROOT, 0))).unwrap();
            let [from, to, other] = [1, 2, 3].map(|name| place(ObjectId::ROOT, name));
            let [source, target] = [from, to].map(|at| made(&anchor, at, row(Content::File(FileRow::default()))));
            if has_other_name {
                assert_eq!(anchor.link(other, target).unwrap(), Made::Queued(target));
            }
            anchor.commit(anchor.mark()).unwrap();
            let window = Window { session: 1, tag: SessionTag::NONE, covered: 0 };
            let held = vec![(RecordNo(7), vec![Digest([9; 32]); 16].into())];
            let opening = Opening {
                object: target,
                file: FileId([7; 16]),
                window,
                held,
                cut: None,
                drops_cut: false,
                drops_window: None,
            };
            anchor.open_files(&[opening]).unwrap();
            let held = anchor.held(target).unwrap();
            let renamed = anchor.rename(from, (to, b"to"), false, Inodes::default(), anchor.mark()).unwrap();
            assert!(matches!(renamed, Renamed::Intended(_)));
            let replaced = all(&table.durable);
            let back = || anchor.rename_back(to, (from, b"from"), Inodes::default(), anchor.mark(), target);
            if let Some(is_made) = doubt {
                table.doubt(is_made);
                back().unwrap_err();
                anchor.commit(anchor.mark()).unwrap();
                assert_eq!(all(&table.durable), replaced, "{doubt:?}, {has_other_name}");
            }
            let links = 1 + u64::from(has_other_name);
            assert_eq!(anchor.row(target).unwrap().links, links - 1);
            assert!(matches!(back().unwrap(), Renamed::Intended(_)));
            assert_eq!(anchor.row(target).unwrap().links, links);
            let durable = Anchor::open(Arc::new(table.durable.clone()), &VaultId([1; 16])).unwrap();
            let entry = |at| durable.entry(at).unwrap().map(|entry| entry.object);
            assert_eq!([&from, &to].map(entry), [Some(source), Some(target)], "{doubt:?}, {has_other_name}");
            assert_eq!(durable.row(target).unwrap().links, links);
            assert_eq!((durable.held(target).unwrap(), anchor.held(target).unwrap()), (held.clone(), held));
        }
    }
}

/// The store has not made it. Recovery would take it to have made all moves before another one that it has made.
#[test]
fn a_move_that_was_taken_back_is_no_intent_beside_a_later_one() {
    for is_made in [false, true] {
        let table = Arc::new(Doubtful::default());
        let vault = VaultRow::new(VaultId([1; 16]), TokenKey::new([2; 32]));
        let anchor = Anchor::create(table.clone(), vault, dir(place(ObjectId::ROOT, 0))).unwrap();
        let at = |name| place(ObjectId::ROOT, name);
        let [first, second] = [1, 2].map(|name| made(&anchor, at(name), row(Content::File(FileRow::default()))));
        anchor.commit(anchor.mark()).unwrap();
        let rename = |from, to| anchor.rename(at(from), (at(to), b"to"), false, Inodes::default(), anchor.mark());
        table.doubt(is_made);
        rename(1, 3).unwrap_err();
        assert!(matches!(rename(2, 4).unwrap(), Renamed::Intended(_)));
        let durable = Anchor::open(Arc::new(table.durable.clone()), &VaultId([1; 16])).unwrap();
        assert_eq!(durable.intents().unwrap().len(), 1, "made {is_made}");
        let entry = |name| durable.entry(&at(name)).unwrap().map(|entry| entry.object);
        assert_eq!([1, 2, 3, 4].map(entry), [Some(first), None, None, Some(second)], "made {is_made}");
    }
}

/// A file that may be recorded is treated as one that is: its pages wait for an opening (A1).
#[test]
fn a_file_in_doubt_counts_as_recorded() {
    for is_made in [false, true] {
        let table = Arc::new(Doubtful::default());
        let vault = VaultRow::new(VaultId([1; 16]), TokenKey::new([2; 32]));
        let anchor = Anchor::create(table.clone(), vault, dir(place(ObjectId::ROOT, 0))).unwrap();
        let file = made(&anchor, place(ObjectId::ROOT, 1), row(Content::File(FileRow::default())));
        table.doubt(is_made);
        anchor.commit(anchor.mark()).unwrap_err();
        assert!(anchor.has_queued(file), "an fsync does not take it for durable");
        assert!(!anchor.note_first_page(file, Digest([1; 32]), 9).unwrap(), "its first page must carry a stamp");
        assert!(matches!(anchor.remove(place(ObjectId::ROOT, 1)).unwrap(), Removal::WhenDue(_)));
        anchor.commit(anchor.mark()).unwrap();
        assert_eq!(anchor.due().len(), 1);
        assert!(table.durable.get(Space::Entries, &[]).unwrap().is_none());
        assert!(
            all(&table.durable)
                .iter()
                .all(|(space, _, _)| matches!(space, Space::Objects | Space::Intents | Space::Open))
        );
    }
}

/// What a policy refuses when it is sent again is nobody's but its own.
#[test]
fn who_settles_a_doubt_does_not_get_the_refusal_of_another() {
    let table = Arc::new(Doubtful::default());
    let vault = VaultRow::new(VaultId([1; 16]), TokenKey::new([2; 32]));
    let anchor = Anchor::create(table.clone(), vault, dir(place(ObjectId::ROOT, 0))).unwrap();
    let file = |n| made(&anchor, place(ObjectId::ROOT, n), row(Content::File(FileRow::default())));
    let forbidden = file(1);
    table.doubt(false);
    anchor.commit(anchor.mark()).unwrap_err();
    table.state.lock().is_forbidden = true;
    let other = file(2);
    anchor.commit_objects(&[other].into(), anchor.mark()).unwrap();
    assert!(!anchor.has_queued(other));
    assert!(anchor.has_queued(forbidden), "it is queued again");
}
