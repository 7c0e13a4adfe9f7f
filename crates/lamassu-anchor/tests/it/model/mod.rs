//! The writer, the store and the adversary of `file_model.rs`.

mod questions;
mod store;

use lamassu_anchor::judge::{self, Stamp, Verdict};
use lamassu_anchor::row::{Announced, Content, FileRow, Open, Sealed};
use lamassu_anchor::table::MemoryTable;
use lamassu_anchor::{
    Anchor, Digest, EntryPlace, FileCommit, Made, ObjectId, Opening, RecordNo, Row, Token, TokenKey, VaultRow, Window,
};
use lamassu_crypto::wrap::sha256;
use lamassu_format::header::VaultId;
use lamassu_format::{FileId, PageNo, Profile, SessionTag};
use questions::{judged, resolve};
use smallvec::smallvec;
use std::collections::{BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use store::{PageBytes, Slot};

const FILES: usize = 2;
const PAGES: usize = 2;
const RECORD: RecordNo = RecordNo(0);
const DEGREE: usize = 2;
/// Pages written before none is written again in vain.
const TOUCHED_MAX: u32 = 4;
/// Writes of new content in one history.
const WRITES_MAX: u8 = 4;

/// A rule that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// A1: a window in the row.
    Window,
    /// A1: records held.
    Held,
    /// A1: a shrink.
    Cut,
    /// A1: a shrink that no page 0 records is dropped before another page 0 is written.
    Unmade,
    /// A1: a shrink that page 0 records is noted again, if it was dropped, before pages are removed.
    Again,
    /// A1: a file's own id.
    FileId,
    /// A4: the barrier.
    Barrier,
    /// A4: the mark before the barrier.
    MarkFirst,
    /// A5.
    Covered,
    /// A6.
    Twin,
    /// A7: nothing was written after the mark.
    NothingAfter,
    /// A9: no page between mark and barrier.
    Between,
    /// A9: a shrink voids the mark.
    Void,
    /// A9: pending bits end with the barrier.
    Bits,
    /// J3: only sequences above the covered one.
    Sequence,
}

/// What a rule should have prevented.
#[derive(Debug, PartialEq, Eq)]
pub enum Lie {
    /// F3: an honest crash gave an error.
    FalseAlarm { file: usize, page: usize, path: Vec<Step> },
    /// F1: a read returned what it must not.
    Wrong { file: usize, page: usize, content: u8, path: Vec<Step> },
}

pub struct Explored {
    pub states: usize,
    pub lie: Option<Lie>,
}

/// What the writer does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Opens the file in the anchor and writes a page with a new key.
    WritePage(usize, usize),
    /// Writes the data of that page.
    WriteData,
    /// Shortens a file to one page: page 0 with `cut`, a barrier.
    Cut(usize),
    /// The same, but the write of page 0 fails. It may be done all the same.
    FailCut { file: usize, is_done: bool },
    /// Opens the file in the anchor, to write page 0 for another reason.
    GiveUp(usize),
    /// Takes away what was cut.
    Drop(usize),
    /// Notes what is to be committed.
    Mark(usize),
    /// A barrier of the file.
    Barrier(usize),
    /// Commits what was marked.
    Commit(usize),
    /// Writes pages without pending bits, as far as a barrier has covered them.
    Settle(usize),
    /// Writes a page again for the sake of another of its blocks, which this model does not have.
    Touch(usize, usize),
    /// The process ends. The store keeps everything, or what its barriers covered.
    Crash { keeps_all: bool },
    /// The next process resolves what the crash left of a file, and marks it to be committed.
    Recover(usize),
}

/// What a commit will say.
#[derive(Clone, Debug, Hash)]
struct Marked {
    covered: u32,
    leaves: [Digest; PAGES],
    twin: Option<Digest>,
    contents: [u8; PAGES],
    is_durable: bool,
}

#[derive(Clone, Default, Hash)]
struct FileState {
    /// What the writer knows to be on disk.
    pages: [Option<PageBytes>; PAGES],
    contents: [u8; PAGES],
    marked: Option<Marked>,
    /// Contents that a read may return after a crash.
    allowed: [BTreeSet<u8>; PAGES],
    /// Leaves under the committed root.
    committed: [Digest; PAGES],
    /// Page 0 says `cut`.
    is_cut: bool,
    /// A crash left it open, and nothing else may be done with it.
    is_left: bool,
    /// The highest sequence of its pages.
    last: u32,
    /// A write of page 0 has failed, and none since has not: nothing is committed.
    is_unsure: bool,
    /// The row notes a shrink that no page 0 records, as far as is known.
    is_unmade: bool,
}

#[derive(Clone)]
struct World {
    table: Arc<MemoryTable>,
    slots: [[Slot; PAGES]; FILES],
    files: [FileState; FILES],
    session: u32,
    sequence: u32,
    next_content: u8,
    writing: Option<(usize, usize)>,
    has_failed: bool,
    path: Vec<Step>,
}

/// The first.
const SESSION: u32 = 7;
const CRASHES_MAX: u32 = 2;

fn object(file: usize) -> ObjectId {
    ObjectId(2 + file as u64)
}

fn id(left: Option<Left>, file: usize) -> FileId {
    FileId([if left == Some(Left::FileId) { 1 } else { 1 + file as u8 }; 16])
}

fn root_of(leaves: &[Digest; PAGES]) -> Digest {
    if leaves[1].is_none() {
        return leaves[0];
    }
    let record: Vec<u8> = leaves.iter().flat_map(|leaf| leaf.0).collect();
    Digest(sha256(&record))
}

fn vault_row() -> VaultRow {
    VaultRow {
        next_object: object(0),
        sessions: Announced::up_to(SESSION),
        degree_log2: DEGREE.ilog2() as u8,
        ..VaultRow::new(VaultId([1; 16]), TokenKey::new([2; 32]))
    }
}

fn dir_row() -> Row {
    let content = Content::Dir { record: Sealed::Nothing, parent: ObjectId::ROOT, name: Token([0; 16]) };
    Row { mode: 0o755, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing }
}

impl World {
    /// Two files that this session has made: their rows are durable, and open (A2).
    fn new(left: Option<Left>) -> World {
        let mut world = World {
            table: Arc::default(),
            slots: Default::default(),
            files: Default::default(),
            session: SESSION,
            sequence: 0,
            next_content: 1,
            writing: None,
            has_failed: false,
            path: Vec::new(),
        };
        world.files.iter_mut().for_each(|file| file.allowed = [BTreeSet::from([0]), BTreeSet::from([0])]);
        let anchor = Anchor::create(world.table.clone(), vault_row(), dir_row()).unwrap();
        for file in 0..FILES {
            let open = Open {
                file: id(left, file),
                windows: smallvec![Window { session: SESSION, tag: SessionTag::NONE, covered: 0 }],
                cut: None,
            };
            let row = FileRow { open: Some(open), ..FileRow::default() };
            let row = Row { content: Content::File(row), ..dir_row() };
            let place = EntryPlace { dir: ObjectId::ROOT, name: Token([file as u8; 16]) };
            assert_eq!(anchor.make(place, row).unwrap(), Made::Queued(object(file)));
        }
        anchor.commit(anchor.mark()).unwrap();
        world
    }

    fn anchor(&self) -> Anchor {
        Anchor::open(self.table.clone(), &VaultId([1; 16])).unwrap()
    }

    fn row(&self, file: usize) -> FileRow {
        self.anchor().row(object(file)).unwrap().file().unwrap().clone()
    }

    fn leaves(&self, file: usize) -> [Digest; PAGES] {
        self.files[file].pages.clone().map(|page| page.map_or(Digest::NONE, |page| page.digest()))
    }

    /// A1.
    fn open(&mut self, file: usize, cut: Option<PageNo>, left: Option<Left>) {
        let row = self.row(file);
        let is_open = row.open.is_some_and(|open| open.window(self.session).is_some());
        if is_open && row.root.is_none() {
            return; // A2
        }
        let covered = self.sequence;
        let held =
            if left == Some(Left::Held) { vec![] } else { vec![(RECORD, Box::from(self.files[file].committed))] };
        if left == Some(Left::Window) {
            return;
        }
        let window = Window { session: self.session, tag: SessionTag::NONE, covered };
        let cut = cut.filter(|_| left != Some(Left::Cut));
        let drops_cut = self.files[file].is_unmade && left != Some(Left::Unmade);
        let opening =
            Opening { object: object(file), file: id(left, file), window, held, cut, drops_cut, drops_window: None };
        self.anchor().open_files(&[opening]).unwrap();
        self.files[file].is_unmade = cut.is_some() || (self.files[file].is_unmade && !drops_cut);
    }

    fn write_page(&mut self, file: usize, page: usize, change: impl FnOnce(&mut PageBytes), left: Option<Left>) {
        self.sequence += 1;
        let mut bytes = self.files[file].pages[page].clone().unwrap_or_default();
        if self.slots[file][page].is_data_durable() && left != Some(Left::Bits) {
            bytes.pending = None; // A9
        }
        if left != Some(Left::Between) && self.files[file].marked.as_ref().is_some_and(|marked| !marked.is_durable) {
            self.files[file].marked = None; // A9
        }
        bytes.stamp =
            Some(Stamp { session: self.session, tag: SessionTag::NONE, sequence: self.sequence, file: id(left, file) });
        change(&mut bytes);
        self.slots[file][page].write_page(Some(bytes.clone()));
        self.files[file].pages[page] = Some(bytes);
        self.files[file].last = self.sequence;
        if page == 0 {
            (self.files[file].is_unsure, self.files[file].is_unmade) = (false, false);
        }
    }

    /// A shrink that ends with a failed write of page 0.
    fn fail_cut(&mut self, file: usize, is_done: bool, left: Option<Left>) {
        self.has_failed = true;
        self.open(file, Some(PageNo(1)), left);
        let (before, slot) = (self.files[file].clone(), self.slots[file][0].clone());
        self.write_page(file, 0, |page| page.cut = true, left);
        // The sequence is used.
        let last = self.files[file].last;
        self.files[file] = FileState { marked: None, is_unsure: true, last, ..before };
        if is_done {
            self.files[file].allowed[1].insert(0);
        } else {
            self.slots[file][0] = slot;
        }
    }

    fn barrier(&mut self, file: usize) {
        self.slots[file].iter_mut().for_each(Slot::barrier);
        if let Some(marked) = &mut self.files[file].marked {
            marked.is_durable = true;
        }
    }

    fn page_count(&self, file: usize) -> usize {
        if self.files[file].is_cut {
            1
        } else {
            self.files[file].pages.iter().take_while(|page| page.is_some()).count()
        }
    }

    /// The steps that may come next.
    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.session < SESSION + CRASHES_MAX {
            steps.extend([Step::Crash { keeps_all: true }, Step::Crash { keeps_all: false }]);
        }
        if self.writing.is_some() {
            steps.push(Step::WriteData);
            return steps;
        }
        for file in 0..FILES {
            let state = &self.files[file];
            if state.is_left {
                steps.push(match &state.marked {
                    None => Step::Recover(file),
                    Some(marked) if marked.is_durable => Step::Commit(file),
                    Some(_) => Step::Barrier(file),
                });
                continue;
            }
            let dropping = state.is_cut && state.pages[1].is_some();
            if dropping {
                steps.push(Step::Drop(file));
                continue;
            }
            if state.is_unsure {
                steps.extend([Step::Cut(file), Step::Touch(file, 0)]);
                steps.extend(state.is_unmade.then_some(Step::GiveUp(file)));
                steps.extend((self.next_content <= WRITES_MAX).then_some(Step::WritePage(file, 0)));
                continue;
            }
            if self.next_content <= WRITES_MAX {
                let next = self.page_count(file).min(PAGES - 1);
                steps.extend((0..=next).map(|page| Step::WritePage(file, page)));
            }
            if self.page_count(file) == PAGES {
                steps.push(Step::Cut(file));
                if file == 0 && !self.has_failed {
                    steps.extend([true, false].map(|is_done| Step::FailCut { file, is_done }));
                }
            }
            if self.page_count(file) > 0 {
                steps.extend([Step::Mark(file), Step::Settle(file)]);
                if file == 0 {
                    steps.push(Step::Touch(file, 0));
                }
            }
            if state.marked.is_some() {
                steps.extend([Step::Barrier(file), Step::Commit(file)]);
            }
        }
        steps
    }

    /// Takes a step; `None` where it is not possible now, or changes nothing.
    fn take(&self, step: Step, left: Option<Left>) -> Option<World> {
        let mut next = self.clone();
        next.table = Arc::new((*self.table).clone());
        next.path.push(step);
        match step {
            Step::WritePage(file, page) => next.begin_write(file, page, left),
            Step::WriteData => {
                let (file, page) = next.writing.take()?;
                let content = next.files[file].contents[page];
                next.slots[file][page].write_data(content);
            }
            Step::Cut(file) => {
                next.open(file, Some(PageNo(1)), left);
                if left != Some(Left::Void) {
                    next.files[file].marked = None; // A9
                }
                next.write_page(file, 0, |page| page.cut = true, left);
                next.files[file].is_cut = true;
                next.files[file].allowed[1].insert(0);
                next.files[file].contents[1] = 0;
                next.barrier(file);
            }
            Step::FailCut { file, is_done } => next.fail_cut(file, is_done, left),
            Step::GiveUp(file) => next.open(file, None, left),
            Step::Drop(file) => {
                next.slots[file][1].write_page(None);
                next.slots[file][1].write_data(0);
                next.files[file].pages[1] = None;
            }
            Step::Mark(file) => {
                let is_clean = self.row(file).open.is_none() && left != Some(Left::Window);
                if self.files[file].marked.is_some() || is_clean {
                    return None;
                }
                next.mark(file);
            }
            Step::Barrier(file) => {
                if self.files[file].marked.as_ref()?.is_durable {
                    return None;
                }
                next.barrier(file);
            }
            Step::Commit(file) => {
                let is_durable = self.files[file].marked.as_ref()?.is_durable;
                if !is_durable && left != Some(Left::Barrier) {
                    return None;
                }
                if left == Some(Left::MarkFirst) {
                    next.mark(file);
                }
                next.commit(file, left)?;
            }
            Step::Settle(file) => next.settle(file, left)?,
            Step::Touch(file, page) => {
                if matches!(self.path.last(), Some(Step::Touch(..))) || self.sequence > TOUCHED_MAX {
                    return None;
                }
                next.open(file, None, left);
                next.write_page(file, page, |_| (), left);
            }
            Step::Crash { keeps_all } => next.crash(keeps_all, left),
            Step::Recover(file) => next.recover(file, left),
        }
        Some(next)
    }

    fn begin_write(&mut self, file: usize, page: usize, left: Option<Left>) {
        self.open(file, None, left);
        // I4, I10: page 0 says no `cut` when pages follow it.
        if self.files[file].is_cut {
            self.barrier(file);
            self.write_page(file, 0, |page| page.cut = false, left);
            self.barrier(file);
            self.files[file].is_cut = false;
        }
        let may_be_cut = self.slots[file][0].pages_after_crash().iter().flatten().any(|page| page.cut);
        if page > 0 && may_be_cut {
            self.barrier(file);
        }
        let is_uncovered = self.files[file].pages[page].as_ref().is_some_and(|page| page.pending.is_some());
        if is_uncovered {
            self.barrier(file); // I2: a previous key is that of durable content
        }
        let (before, content) = (self.files[file].contents[page], self.next_content);
        self.next_content += 1;
        let change = |page: &mut PageBytes| (page.key, page.pending, page.cut) = (content, Some(before), false);
        self.write_page(file, page, change, left);
        self.files[file].contents[page] = content;
        self.files[file].allowed[page].insert(content);
        if before != 0 {
            self.barrier(file); // step 2 of the commit protocol
        }
        self.writing = Some((file, page));
    }

    fn mark(&mut self, file: usize) {
        let leaves = self.leaves(file);
        let is_one = self.page_count(file) == 1;
        let twin = self.files[file].pages[0].as_ref().filter(|_| is_one).map(|page| page.convergent().digest());
        let state = &mut self.files[file];
        let marked = Marked { covered: self.sequence, leaves, twin, contents: state.contents, is_durable: false };
        state.marked = Some(marked);
    }

    fn commit(&mut self, file: usize, left: Option<Left>) -> Option<()> {
        let marked = self.files[file].marked.take()?;
        let is_after = self.files[file].last > marked.covered;
        let is_settled = self.files[file].pages.iter().flatten().all(|page| page.stamp.is_none());
        let commit = FileCommit {
            object: object(file),
            root: root_of(&marked.leaves),
            size: if marked.leaves[1].is_none() { 1 } else { 2 },
            profile: Profile::DEFAULT,
            blocks: None,
            twin: marked.twin.filter(|_| left != Some(Left::Twin)),
            window: Some(Window { session: self.session, tag: SessionTag::NONE, covered: marked.covered }),
            held: vec![(RECORD, Box::from(marked.leaves))],
            drops_cut: false,
            is_clean: left == Some(Left::NothingAfter)
                || (!is_after && (self.sequence.is_multiple_of(2) || is_settled)),
        };
        let anchor = self.anchor();
        let done = anchor.commit_file(commit).and_then(|()| anchor.commit(anchor.mark()));
        if done.is_err() {
            // Without a window nothing can be committed; and the anchor knows of a shrink that voids a mark.
            assert!(matches!(left, Some(Left::Window | Left::Void)));
            return None;
        }
        // Acknowledged: only this, and what was written since.
        let state = &mut self.files[file];
        (state.committed, state.is_left) = (marked.leaves, false);
        for page in 0..PAGES {
            let since: BTreeSet<u8> =
                state.allowed[page].iter().copied().filter(|c| *c > marked.contents[page]).collect();
            let is_cut_since = state.contents[page] == 0 && marked.contents[page] != 0;
            state.allowed[page] = since;
            state.allowed[page].insert(marked.contents[page]);
            if is_cut_since {
                state.allowed[page].insert(0);
            }
        }
        Some(())
    }

    /// After a barrier: pages without pending bits. A file of one page gets its convergent page, if its twin is known.
    fn settle(&mut self, file: usize, left: Option<Left>) -> Option<()> {
        let mut done = None;
        let row = self.row(file);
        for page in 0..self.page_count(file) {
            let bytes = self.files[file].pages[page].clone()?;
            if !self.slots[file][page].is_durable() || !self.slots[file].iter().all(Slot::is_durable) {
                continue;
            }
            let convergent = bytes.convergent();
            let is_twin = row.twin == Some(convergent.digest()) || left == Some(Left::Twin);
            let is_committed = row.root == root_of(&self.leaves(file));
            if self.page_count(file) == 1 && is_committed && is_twin && bytes.stamp.is_some() {
                self.slots[file][0].write_page(Some(convergent.clone()));
                self.files[file].pages[0] = Some(convergent);
                done = Some(());
            } else if (bytes.pending.is_some() || bytes.cut) && row.open.is_some() {
                self.write_page(file, page, |page| (page.pending, page.cut) = (None, false), left);
                self.files[file].is_cut = false;
                done = Some(());
            }
        }
        done
    }

    fn crash(&mut self, keeps_all: bool, left: Option<Left>) {
        (self.session, self.sequence, self.writing) = (self.session + 1, 0, None);
        for file in 0..FILES {
            let pages = self.slots[file].each_mut().map(|slot| slot.crash(keeps_all));
            let row = self.row(file);
            let held = self.held(file);
            let verdicts = judged(&row, held, [pages[0].0.as_ref(), pages[1].0.as_ref()], left);
            let zero = pages[0].0.as_ref().filter(|_| verdicts[0] == Verdict::InFlight).and_then(|page| page.stamp);
            let cut = row.open.as_ref().and_then(|open| open.cut);
            let state = &mut self.files[file];
            state.is_unsure = false;
            state.is_unmade = cut.is_some_and(|cut| zero.is_none_or(|zero| !judge::is_after(zero, cut.after)));
            for (page, (bytes, data)) in pages.into_iter().enumerate() {
                let content = resolve(verdicts[page], bytes.as_ref(), data, left);
                state.contents[page] = content.expect("an honest crash was asked about before");
                state.pages[page] = bytes;
            }
            state.is_left = row.open.is_some();
            state.is_cut = state.pages[0].as_ref().is_some_and(|page| page.cut);
            (state.marked, state.last) = (None, 0);
        }
    }

    fn recover(&mut self, file: usize, left: Option<Left>) {
        self.open(file, None, left);
        let row = self.row(file);
        let windows = row.open.as_ref().map_or(0, |open| open.windows.len());
        assert!(windows > 0 || left == Some(Left::Window));
        if self.files[file].is_cut && self.files[file].pages[1].is_some() {
            if row.open.is_none_or(|open| open.cut.is_none()) && left != Some(Left::Again) {
                self.open(file, Some(PageNo(1)), left);
                self.write_page(file, 0, |_| (), left);
                self.barrier(file);
            }
            self.slots[file][1].write_page(None);
            self.slots[file][1].write_data(0);
            self.files[file].pages[1] = None;
            self.barrier(file);
        }
        for page in 0..PAGES {
            let content = self.files[file].contents[page];
            let needs_write = |bytes: &PageBytes| bytes.pending.is_some() || bytes.cut;
            if self.files[file].pages[page].as_ref().is_some_and(needs_write) {
                let change = |bytes: &mut PageBytes| (bytes.key, bytes.pending, bytes.cut) = (content, None, false);
                self.write_page(file, page, change, left);
            }
        }
        self.files[file].is_cut = false;
        self.mark(file);
    }

    fn held(&self, file: usize) -> Option<[Digest; PAGES]> {
        let held = self.anchor().held(object(file)).unwrap();
        held.get(&RECORD).map(|digests| [digests[0], digests[1]])
    }

    fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.slots, &self.files, self.session, self.sequence, self.next_content, self.writing).hash(&mut hasher);
        self.has_failed.hash(&mut hasher);
        self.table.hash(&mut hasher);
        hasher.finish()
    }
}

/// Goes through every order of steps; ends at the first lie.
pub fn explore(left: Option<Left>, depth: usize) -> Explored {
    let mut seen = HashSet::new();
    let mut now = vec![World::new(left)];
    for _ in 0..depth {
        let mut next = Vec::new();
        for world in &now {
            for step in world.steps() {
                let Some(taken) = world.take(step, left) else { continue };
                if !seen.insert(taken.fingerprint()) {
                    continue;
                }
                if let Some(lie) = taken.lie(left) {
                    return Explored { states: seen.len(), lie: Some(lie) };
                }
                next.push(taken);
            }
        }
        now = next;
    }
    Explored { states: seen.len(), lie: None }
}
