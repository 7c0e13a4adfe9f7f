//! An anchor that many threads use while commits go on: what is known never goes away in between.
use lamassu_anchor::row::{Content, FileRow, Inodes, Sealed};
use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
use lamassu_anchor::{
    Anchor, AnchorError, Digest, EntryPlace, Made, ObjectId, Removal, Renamed, Row, Token, TokenKey, VaultRow,
};
use lamassu_format::header::VaultId;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

fn row(content: Content) -> Row {
    Row { mode: 0o644, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing }
}

fn file() -> Row {
    row(Content::File(FileRow::default()))
}

fn place(name: u64) -> EntryPlace {
    let mut token = [0; 16];
    token[..8].copy_from_slice(&name.to_be_bytes());
    EntryPlace { dir: ObjectId::ROOT, name: Token(token) }
}

fn anchor(table: Arc<dyn Table>) -> Anchor {
    let content = Content::Dir { record: Sealed::Is(Digest([1; 32])), parent: ObjectId::ROOT, name: Token([0; 16]) };
    Anchor::create(table, VaultRow::new(VaultId([1; 16]), TokenKey::random().unwrap()), row(content)).unwrap()
}

fn made(anchor: &Anchor, name: u64) -> ObjectId {
    match anchor.make(place(name), file()).unwrap() {
        Made::Queued(object) => object,
        Made::NameIsGoing => panic!("a new name"),
    }
}

/// Files that are made and changed while another thread commits: their rows are always there, and no change is lost.
#[test]
fn rows_are_known_while_they_are_committed() {
    const FILES: u64 = 60_000;
    let anchor = anchor(Arc::new(MemoryTable::default()));
    let (last, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                anchor.commit(anchor.mark()).unwrap();
            }
        });
        scope.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                let last = last.load(Ordering::Acquire);
                for object in last.saturating_sub(300).max(2)..=last {
                    anchor.row(ObjectId(object)).unwrap();
                }
            }
        });
        for n in 0..FILES {
            let object = made(&anchor, n);
            last.store(object.0, Ordering::Release);
            let earlier = ObjectId(object.0.saturating_sub(250).max(2));
            let changed = anchor.change(earlier, |row| row.uid += 1);
            if changed.is_err() || n == FILES - 1 {
                ended.store(true, Ordering::Release);
            }
            changed.unwrap();
        }
    });
    anchor.commit(anchor.mark()).unwrap();
    let changes: u64 = (2..2 + FILES).map(|object| u64::from(anchor.row(ObjectId(object)).unwrap().uid)).sum();
    assert_eq!(changes, FILES);
}

/// What is done to an anchor while its table commits.
type Meanwhile = Box<dyn FnOnce(&Anchor) + Send>;

/// A table that lets other threads in while it commits, and may fail then.
#[derive(Default)]
struct Slow {
    rows: MemoryTable,
    meanwhile: Mutex<Option<(Arc<Anchor>, Meanwhile)>>,
    /// Commits to go until one fails.
    fails_after: Mutex<Option<u32>>,
}

impl Slow {
    /// Has this be done in the next commit; it fails then.
    fn meanwhile(&self, anchor: &Arc<Anchor>, fails: bool, done: impl FnOnce(&Anchor) + Send + 'static) {
        *self.meanwhile.lock().unwrap() = Some((anchor.clone(), Box::new(done)));
        *self.fails_after.lock().unwrap() = fails.then_some(0);
    }
}

impl Table for Slow {
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
        self.rows.get(space, key)
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), AnchorError> {
        self.rows.scan(space, prefix, visit)
    }

    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError> {
        if let Some((anchor, done)) = self.meanwhile.lock().unwrap().take() {
            done(&anchor);
        }
        if self.fails_after.lock().unwrap().take().is_some() {
            self.rows.refuse(Some(libc::EIO));
            let failed = self.rows.commit(changes);
            self.rows.refuse(None);
            return failed;
        }
        self.rows.commit(changes)
    }
}

/// A file is renamed over another one that is in use and has a second name: both are known and can be changed while the
/// move is committed, also if that fails.
#[test]
fn what_is_replaced_stays_known_while_a_move_is_committed() {
    for (fails, names) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
        let table = Arc::new(Slow::default());
        let anchor = Arc::new(anchor(table.clone()));
        let (source, target) = (made(&anchor, 1), made(&anchor, 2));
        if names == 2 {
            anchor.link(place(3), target).unwrap();
        }
        anchor.commit(anchor.mark()).unwrap();
        table.meanwhile(&anchor, fails, move |anchor| {
            for object in [source, target] {
                anchor.change(object, |row| row.mode = 0o600).unwrap();
            }
        });
        let renamed = anchor.rename(place(1), (place(2), b"two"), false, Inodes::default(), anchor.mark());
        assert_eq!(renamed.is_err(), fails);
        anchor.commit(anchor.mark()).unwrap();
        let rows = [source, target].map(|object| anchor.row(object).unwrap());
        assert!(rows.iter().all(|row| row.mode == 0o600), "{fails} {names}");
        let links = rows.map(|row| row.links);
        assert_eq!(links, if fails { [1, names] } else { [1, names - 1] }, "{fails} {names}");
        let is_kept = table.get(Space::Objects, &target.0.to_be_bytes()).unwrap().is_some();
        assert_eq!(is_kept, fails || names == 2, "an object without a name has no durable row");
        assert_eq!(anchor.entry(&place(2)).unwrap().unwrap().object, if fails { target } else { source });
        assert_eq!(anchor.entry(&place(1)).unwrap().is_some(), fails);
        if !fails {
            assert!(matches!(renamed, Ok(Renamed::Intended(_))));
        }
    }
}

/// A name that is removed while its making is committed goes by an intent: the commit may make it durable.
#[test]
fn what_is_removed_while_its_making_is_committed_is_due_later() {
    for fails in [false, true] {
        let table = Arc::new(Slow::default());
        let anchor = Arc::new(anchor(table.clone()));
        made(&anchor, 1);
        let (removal, seen) = (Arc::new(Mutex::new(None)), Arc::new(Mutex::new(None)));
        let (into, seen_into) = (removal.clone(), seen.clone());
        table.meanwhile(&anchor, fails, move |anchor| {
            *into.lock().unwrap() = Some(anchor.remove(place(1)).unwrap());
            *seen_into.lock().unwrap() = Some(anchor.entry(&place(1)).unwrap());
        });
        assert_eq!(anchor.commit(anchor.mark()).is_err(), fails);
        let Some(Removal::WhenDue(number)) = *removal.lock().unwrap() else { panic!("{removal:?}") };
        assert_eq!(*seen.lock().unwrap(), Some(None));
        anchor.commit(anchor.mark()).unwrap();
        assert!(anchor.due().contains_key(&number));
        anchor.carried_out([number]);
        anchor.commit(anchor.mark()).unwrap();
        assert!(table.get(Space::Intents, &number.to_be_bytes()).unwrap().is_none());
        assert!(anchor.entry(&place(1)).unwrap().is_none());
    }
}

/// Nobody who reads waits for a commit's flush: while one is under way, entries are listed as they are, those that it
/// makes durable and those that came or went meanwhile.
#[test]
fn a_directory_is_listed_while_a_commit_is_under_way() {
    let table = Arc::new(Slow::default());
    let anchor = Arc::new(anchor(table.clone()));
    made(&anchor, 1);
    anchor.commit(anchor.mark()).unwrap();
    made(&anchor, 2);
    let (seen, all_seen) = mpsc::channel();
    table.meanwhile(&anchor, false, move |anchor| {
        let look = |anchor: &Anchor| {
            let names: Vec<_> = anchor.entries(ObjectId::ROOT).unwrap().into_keys().collect();
            (names, anchor.is_empty(ObjectId::ROOT).unwrap(), anchor.held(ObjectId(2)).unwrap().len())
        };
        // By the thread that commits: it would wait for itself.
        seen.send(look(anchor)).unwrap();
        made(anchor, 3);
        anchor.remove(place(2)).unwrap();
        seen.send(look(anchor)).unwrap();
        anchor.remove(place(1)).unwrap();
        anchor.remove(place(3)).unwrap();
        seen.send(look(anchor)).unwrap();
    });
    anchor.commit(anchor.mark()).unwrap();
    let names = |names: &[u64]| names.iter().map(|name| place(*name).name).collect::<Vec<_>>();
    let all_seen: Vec<_> = all_seen.try_iter().collect();
    assert_eq!(all_seen, [(names(&[1, 2]), false, 0), (names(&[1, 3]), false, 0), (names(&[]), true, 0)]);
    assert!(anchor.is_empty(ObjectId::ROOT).unwrap());
    let going = [1, 2, 3].map(|name| !anchor.may_make(&place(name)));
    assert_eq!(going, [true, true, false], "what was never durable has gone");
    anchor.commit(anchor.mark()).unwrap();
    anchor.carried_out(anchor.due().into_keys());
    assert!((1..=3).all(|name| anchor.may_make(&place(name))) && !anchor.has_removals());
}
