//! The directories around an entry: they are durable before it is, or with it; and one that is replaced is still needed
//! as long as the store may lose what was taken out of it.

use lamassu_anchor::row::{Content, FileRow, Inodes, Sealed};
use lamassu_anchor::table::{MemoryTable, Space, Table};
use lamassu_anchor::{
    Anchor, Digest, EntryMark, EntryPlace, Made, ObjectId, Removal, Renamed, Replacing, Row, SealedPart, Seen, Token,
    TokenKey, VaultRow,
};
use lamassu_format::header::VaultId;
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

const VAULT: VaultId = VaultId([1; 16]);

fn place(dir: ObjectId, name: u8) -> EntryPlace {
    EntryPlace { dir, name: Token([name; 16]) }
}

fn row(content: Content) -> Row {
    Row { mode: 0o644, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing }
}

fn made(anchor: &Anchor, at: EntryPlace, content: Content) -> ObjectId {
    match anchor.make(at, row(content)).unwrap() {
        Made::Queued(object) => object,
        Made::NameIsGoing => panic!("nothing was removed"),
    }
}

fn dir(anchor: &Anchor, parent: ObjectId, name: u8) -> ObjectId {
    let at = place(parent, name);
    made(anchor, at, Content::Dir { record: Sealed::Nothing, parent, name: at.name })
}

fn file(anchor: &Anchor, parent: ObjectId, name: u8) -> ObjectId {
    made(anchor, place(parent, name), Content::File(FileRow::default()))
}

fn lab() -> (Arc<MemoryTable>, Anchor) {
    let table = Arc::new(MemoryTable::default());
    let root = Content::Dir { record: Sealed::Nothing, parent: ObjectId::ROOT, name: Token([0; 16]) };
    let vault = VaultRow::new(VAULT, TokenKey::new([2; 32]));
    (table.clone(), Anchor::create(table, vault, row(root)).unwrap())
}

/// Objects that a durable entry names. Each durable entry is in a directory that one names, or in the root.
fn durable(table: &MemoryTable) -> HashSet<ObjectId> {
    let (mut named, mut dirs) = (HashSet::from([ObjectId::ROOT]), HashSet::new());
    let anchor = Anchor::open(Arc::new(table.clone()), &VAULT).unwrap();
    table
        .scan(Space::Entries, &[], &mut |key, _| {
            let at = EntryPlace {
                dir: ObjectId(u64::from_be_bytes(*key.first_chunk().unwrap())),
                name: Token(key[8..].try_into().unwrap()),
            };
            dirs.insert(at.dir);
            named.insert(anchor.entry(&at).unwrap().unwrap().object);
            ControlFlow::Continue(())
        })
        .unwrap();
    assert!(dirs.is_subset(&named), "entries of {dirs:?}, of which {named:?} have a name");
    named
}

/// Steps of the store that are about a directory alone, and that a barrier has to cover.
const STEPS: [fn(&Anchor, ObjectId); 2] = [
    |anchor, _| {
        let (from, to) = (place(ObjectId::ROOT, 1), place(ObjectId::ROOT, 9));
        let renamed = anchor.rename(from, (to, b"to"), false, Inodes::default(), EntryMark::NOTHING).unwrap();
        assert_eq!(renamed, Renamed::Now);
        anchor.has_arrived(to);
    },
    |anchor, dir| {
        let (part, digests) = (SealedPart::Attributes, (Digest::NONE, Digest([3; 32])));
        let replacing = anchor.replacing(dir, part, digests, Seen::AtSomeTime, EntryMark::NOTHING).unwrap();
        assert_eq!(replacing, Replacing::Noted);
        anchor.replaced(dir, part, digests.1).unwrap();
    },
];

/// Otherwise a file that was synced would lie in a directory that the anchor does not have.
#[test]
fn an_entry_becomes_durable_with_its_directory_and_not_before() {
    for step in STEPS {
        let (table, anchor) = lab();
        let top = dir(&anchor, ObjectId::ROOT, 1);
        let inner = dir(&anchor, top, 2);
        let synced = file(&anchor, inner, 3);
        let (root, objects) = (HashSet::from([ObjectId::ROOT]), HashSet::from([synced]));
        // A barrier begins, and another call changes the directory meanwhile.
        let before = anchor.mark();
        step(&anchor, top);
        anchor.commit(before).unwrap();
        assert_eq!(durable(&table), root);
        anchor.commit_objects(&objects, before).unwrap();
        assert_eq!(durable(&table), root);
        assert!(!anchor.commit_unless_late(&objects, before).unwrap(), "no barrier covers the way");
        assert!(anchor.commit_unless_late(&objects, anchor.mark()).unwrap());
        assert_eq!(durable(&table), HashSet::from([ObjectId::ROOT, top, inner, synced]));
        assert_eq!(anchor.queued(), 0);
    }
}

/// A file with a durable name stays as it is when it gets another one in such a directory.
#[test]
fn what_has_a_durable_name_does_not_wait_for_the_directory_of_another() {
    let (table, anchor) = lab();
    let known = file(&anchor, ObjectId::ROOT, 5);
    anchor.commit(anchor.mark()).unwrap();
    let top = dir(&anchor, ObjectId::ROOT, 1);
    anchor.link(place(top, 2), known).unwrap();
    let before = anchor.mark();
    STEPS[0](&anchor, top);
    anchor.change(known, |row| row.mode = 0o600).unwrap();
    anchor.commit(before).unwrap();
    assert_eq!(durable(&table), HashSet::from([ObjectId::ROOT, known]));
    let row = Anchor::open(table.clone(), &VAULT).unwrap().row(known).unwrap();
    assert_eq!((row.mode, row.links), (0o600, 1));
    anchor.commit(anchor.mark()).unwrap();
    assert_eq!(durable(&table), HashSet::from([ObjectId::ROOT, known, top]));
}

/// After such a rename nothing durable has the place of the replaced directory. So the store must not lose a step that
/// has taken something out of it.
#[test]
fn a_directory_is_not_replaced_before_a_barrier_covers_what_was_taken_out_of_it() {
    for is_removed in [false, true] {
        let (_, anchor) = lab();
        let [old, new] = [1, 2].map(|name| dir(&anchor, ObjectId::ROOT, name));
        let from = place(old, 3);
        file(&anchor, old, 3);
        anchor.commit(anchor.mark()).unwrap();
        let covered = anchor.mark();
        let rename =
            |from, to, covered| anchor.rename(from, (to, b"to".as_slice()), false, Inodes::default(), covered).unwrap();
        if is_removed {
            assert!(matches!(anchor.remove(from).unwrap(), Removal::WhenDue(_)));
            anchor.commit(covered).unwrap();
            anchor.carried_out(anchor.due().into_keys());
        } else {
            let Renamed::Intended(number) = rename(from, place(ObjectId::ROOT, 4), covered) else { panic!("durable") };
            anchor.carried_out([number]);
        }
        let ends = || (place(ObjectId::ROOT, 2), place(ObjectId::ROOT, 1));
        assert_eq!(rename(ends().0, ends().1, covered), Renamed::NeedsBarrier);
        assert_eq!(anchor.entry(&ends().1).unwrap().unwrap().object, old, "nothing was changed");
        assert!(matches!(rename(ends().0, ends().1, anchor.mark()), Renamed::Intended(_)));
        assert_eq!(anchor.entry(&ends().1).unwrap().unwrap().object, new);
    }
}

/// While it is there in the store, the directory cannot be removed.
#[test]
fn a_directory_is_not_removed_before_what_was_in_it() {
    let (table, anchor) = lab();
    let top = dir(&anchor, ObjectId::ROOT, 1);
    let inner = dir(&anchor, top, 2);
    let known = file(&anchor, inner, 3);
    anchor.commit(anchor.mark()).unwrap();
    let all = HashSet::from([ObjectId::ROOT, top, inner, known]);
    for at in [place(inner, 3), place(top, 2), place(ObjectId::ROOT, 1)] {
        assert!(matches!(anchor.remove(at).unwrap(), Removal::WhenDue(_)));
    }
    for asked in [HashSet::from([top]), HashSet::from([inner]), HashSet::from([top, inner])] {
        assert!(!anchor.commit_unless_late(&asked, anchor.mark()).unwrap(), "{asked:?}");
        anchor.commit_objects(&asked, anchor.mark()).unwrap();
        assert_eq!(durable(&table), all, "{asked:?}");
    }
    assert!(anchor.commit_unless_late(&HashSet::from([top, inner, known]), anchor.mark()).unwrap());
    assert_eq!(durable(&table), HashSet::from([ObjectId::ROOT]));
}

/// A step of a small model: a directory that is made, moved back and forth, and has one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    MakeDir,
    MakeFile,
    /// Asks the anchor; the store's step is the next but for what other calls do.
    Rename,
    Move,
    /// A barrier of the whole store begins, and ends.
    Begin,
    End,
    Commit,
    /// fsync of the file.
    Sync,
}

const ALL: [Step; 8] =
    [Step::MakeDir, Step::MakeFile, Step::Rename, Step::Move, Step::Begin, Step::End, Step::Commit, Step::Sync];

/// The name of the directory in the root, and whether the file is in it.
type Store = Option<(u8, bool)>;

struct World {
    table: Arc<MemoryTable>,
    anchor: Anchor,
    store: Store,
    /// What a crash may leave: what the last barrier covered, and each state since.
    kept: Vec<Store>,
    objects: Option<(ObjectId, Option<ObjectId>)>,
    covered: EntryMark,
    begun: Option<(EntryMark, usize)>,
    moving: Option<Renamed>,
    is_acknowledged: bool,
}

impl World {
    fn new() -> World {
        let (table, anchor) = lab();
        let covered = anchor.mark();
        World {
            table,
            anchor,
            store: None,
            kept: vec![None],
            objects: None,
            covered,
            begun: None,
            moving: None,
            is_acknowledged: false,
        }
    }

    fn now(&mut self, store: Store) {
        self.store = store;
        self.kept.push(store);
    }

    fn barrier(&mut self) {
        self.covered = self.anchor.mark();
        self.kept = vec![self.store];
        self.begun = None;
    }

    fn rename(&mut self, at: u8) -> Renamed {
        let (from, to) = (place(ObjectId::ROOT, at), place(ObjectId::ROOT, 1 - at));
        let name = [1 - at];
        self.anchor.rename(from, (to, &name), false, Inodes::default(), self.covered).unwrap()
    }

    /// False: the step is not possible now.
    fn take(&mut self, step: Step) -> bool {
        // While the store's step is missing, a rename holds up what needs the tree.
        if self.moving.is_some() && matches!(step, Step::MakeDir | Step::MakeFile | Step::Rename) {
            return false;
        }
        match (step, self.store, self.objects) {
            (Step::MakeDir, None, _) => {
                self.now(Some((0, false)));
                self.objects = Some((dir(&self.anchor, ObjectId::ROOT, 0), None));
            }
            (Step::MakeFile, Some((at, false)), Some((dir, None))) => {
                self.now(Some((at, true)));
                self.objects = Some((dir, Some(file(&self.anchor, dir, 7))));
            }
            (Step::Rename, Some((at, _)), _) => {
                let renamed = match self.rename(at) {
                    Renamed::NeedsBarrier => {
                        self.barrier();
                        self.rename(at)
                    }
                    renamed => renamed,
                };
                assert!(matches!(renamed, Renamed::Now | Renamed::Intended(_)), "{renamed:?}");
                self.moving = Some(renamed);
            }
            (Step::Move, Some((at, has_file)), _) => {
                let Some(moving) = self.moving.take() else { return false };
                self.now(Some((1 - at, has_file)));
                match moving {
                    Renamed::Intended(number) => self.anchor.carried_out([number]),
                    _ => self.anchor.has_arrived(place(ObjectId::ROOT, 1 - at)),
                }
            }
            (Step::Begin, _, _) if self.begun.is_none() => {
                self.begun = Some((self.anchor.mark(), self.kept.len() - 1));
            }
            (Step::End, _, _) => {
                let Some((mark, covered)) = self.begun.take() else { return false };
                self.covered = self.covered.max(mark);
                self.kept.drain(..covered);
            }
            (Step::Commit, _, _) => self.anchor.commit(self.covered).unwrap(),
            (Step::Sync, _, Some((_, Some(synced)))) => {
                let objects = HashSet::from([synced]);
                self.barrier();
                self.is_acknowledged |= self.anchor.commit_unless_late(&objects, self.covered).unwrap();
            }
            _ => return false,
        }
        true
    }

    /// What is wrong after a crash.
    fn lie(&self) -> Option<String> {
        let durable = Anchor::open(Arc::new((*self.table).clone()), &VAULT).unwrap();
        let entry = |dir, name| durable.entry(&place(dir, name)).unwrap().map(|entry| entry.object);
        let (dir, synced) = self.objects?;
        let recorded: Vec<u8> = (0..2).filter(|name| entry(ObjectId::ROOT, *name) == Some(dir)).collect();
        let has_file = synced.is_some_and(|synced| entry(dir, 7) == Some(synced));
        // Recovery makes moves again whose intents are there: the directory is where it is recorded.
        let is_moved = !durable.intents().unwrap().is_empty();
        for left in &self.kept {
            let is_there = |name: &u8| left.is_some_and(|(at, _)| at == *name || is_moved);
            if !recorded.iter().all(is_there) || recorded.len() > 1 {
                return Some(format!("the directory is recorded as {recorded:?}, and the store has {left:?}"));
            }
            if has_file && (recorded.is_empty() || !left.is_some_and(|(_, has)| has)) {
                return Some(format!("the file is recorded in {recorded:?}, and the store has {left:?}"));
            }
        }
        (self.is_acknowledged && !has_file).then(|| "the file was synced, and is not recorded".to_owned())
    }

    fn fingerprint(&self) -> impl std::hash::Hash + Eq + use<> {
        let entry = |name| self.anchor.entry(&place(ObjectId::ROOT, name)).unwrap().map(|entry| entry.object);
        let is_due = |mark: EntryMark| format!("{:?}", (mark, self.anchor.mark()));
        (
            (self.store, self.kept.clone(), self.objects, self.is_acknowledged),
            (format!("{:?}", self.moving), self.begun.map(|(mark, at)| (is_due(mark), at)), is_due(self.covered)),
            (durable(&self.table).len(), self.anchor.queued(), [entry(0), entry(1)]),
            self.anchor.intents().unwrap().len(),
        )
    }
}

/// Every order of steps up to a depth, with a crash after each, of which the store keeps any prefix.
#[test]
fn a_synced_file_is_reached_whatever_becomes_of_its_directory() {
    let replay = |path: &[Step]| {
        let mut world = World::new();
        path.iter().all(|step| world.take(*step)).then_some(world)
    };
    let (mut seen, mut paths) = (HashSet::new(), vec![Vec::new()]);
    for _ in 0..12 {
        let mut next = Vec::new();
        for path in paths.iter().flat_map(|path: &Vec<Step>| ALL.map(|step| [&path[..], &[step]].concat())) {
            let Some(world) = replay(&path).filter(|world| seen.insert(world.fingerprint())) else { continue };
            assert_eq!(world.lie(), None, "{path:?}");
            next.push(path);
        }
        paths = next;
    }
    println!("{} states", seen.len());
    assert!(seen.len() > 500, "{} states", seen.len());
}
