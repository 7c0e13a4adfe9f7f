//! Shrinks of anchored files whose page 0 is not written: the write fails, or a crash comes before it. What the anchor
//! knows of such a shrink must not take effect with a page 0 that is written for another reason (A1 of
//! `docs/freshness.md`). Each test crashes at every point, also in recovery.

use crate::common;
use common::anchor::{self, AnchorSide, MemoryTrees, OBJECT};
use common::{Rng, Setup, create_in, fill, flip, raw};
use lamassu_anchor::Row;
use lamassu_anchor::table::MemoryTable;
use lamassu_format::{Geometry, PageNo};
use lamassu_store::Backend;
use lamassu_store::backend::crash::{CrashBackend, CrashSim};
use lamassu_store::backend::fault::{Call, Fault, FaultBackend};
use lamassu_store::backend::memory::MemoryBackend;
use lamassu_store::file::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a page at R = 62.
const SPAN: usize = 62 * 4096;
/// Bytes with content at the beginning of each page.
const TEXT: usize = 6000;

/// How page 0 of the shrink is not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// It is not.
    Not,
    /// It is, and an error is reported.
    Done,
}

/// What comes after the shrink that failed.
#[derive(Clone, Copy, Debug)]
enum Next {
    Nothing,
    Write(usize),
    Append,
    Truncate(usize),
    /// To fewer pages, which fails in the same way, and a write then.
    TruncateInVain(usize),
}

#[derive(Clone)]
struct Version {
    from: usize,
    content: Vec<u8>,
    /// It comes from a shrink that was reported as failed.
    is_of_failure: bool,
}

/// A file that processes use, the contents that it had, and when.
struct Story {
    setup: Setup,
    crash: Arc<CrashBackend>,
    store: FaultBackend,
    side: AnchorSide,
    file: Option<File>,
    model: Vec<u8>,
    /// Contents, and the record of the store from which on each may be found.
    versions: Vec<Version>,
    /// Acknowledged contents, and the record at which they were.
    acknowledged: Vec<(usize, usize)>,
}

impl Story {
    /// A file of six pages that was synced; `is_settled`: its row is clean, and page 0 has the size.
    fn new(degree_log2: u8, is_settled: bool) -> Story {
        let setup = Setup { anchored: true, ..Setup::default() };
        let crash = Arc::new(CrashBackend::new());
        let position = crash.clone();
        let side = AnchorSide::new(Arc::new(move || position.position()), degree_log2, true);
        let store = FaultBackend::new(crash.clone());
        let ctx = setup.context_with(Some(side.files.clone()));
        let file = File::create_object(ctx, create_in(&store), "test", side.object).unwrap();
        let (versions, acknowledged) = (Vec::new(), Vec::new());
        let model = Vec::new();
        let mut story = Story { setup, crash, store, side, file: Some(file), model, versions, acknowledged };
        (0..6).for_each(|page| story.write(page * SPAN, page as u64));
        story.sync();
        if is_settled {
            story.settle();
        }
        story.versions.clear();
        story.note();
        story.acknowledged = vec![(story.crash.position(), 0)];
        story
    }

    fn file(&self) -> &File {
        self.file.as_ref().unwrap()
    }

    fn note(&mut self) {
        let (from, content) = (self.crash.position(), self.model.clone());
        self.versions.push(Version { from, content, is_of_failure: false });
    }

    fn acknowledge(&mut self) {
        self.side.commit(self.side.files.anchor().mark());
        self.acknowledged.push((self.crash.position(), self.versions.len() - 1));
    }

    fn write(&mut self, at: usize, seed: u64) {
        let text = fill(TEXT, &mut Rng(seed));
        self.model.resize(self.model.len().max(at + TEXT), 0);
        self.model[at..at + TEXT].copy_from_slice(&text);
        self.note();
        self.file().write_at(at as u64, &text).unwrap();
    }

    fn truncate(&mut self, size: usize) {
        self.model.resize(size, 0);
        self.note();
        self.file().truncate(size as u64).unwrap();
    }

    /// A shrink whose page 0 is not written, or is and fails.
    fn truncate_in_vain(&mut self, size: usize, failure: Failure) {
        if failure == Failure::Done {
            let (from, content) = (self.crash.position(), self.model[..size].to_vec());
            self.versions.push(Version { from, content, is_of_failure: true });
            self.note();
        }
        let is_due = AtomicBool::new(true);
        self.store.faults().rule(move |c| {
            let is_zero = c.call == Call::Write && c.offset == 0;
            (is_zero && is_due.swap(false, Ordering::Relaxed)).then_some(match failure {
                Failure::Not => Fault::Errno(libc::EIO),
                Failure::Done => Fault::After(libc::EIO),
            })
        });
        self.file().truncate(size as u64).expect_err("page 0 could not be written");
        self.store.faults().clear_rules();
        assert_eq!(self.file().size(), self.model.len() as u64);
    }

    fn sync(&mut self) {
        self.file().sync().unwrap();
        self.acknowledge();
    }

    fn settle(&mut self) {
        for _ in 0..2 {
            self.file().settle_now().unwrap();
            let mark = self.file().covered_mark();
            self.store.sync().unwrap();
            self.file().covered(mark).unwrap();
            self.acknowledge();
        }
    }

    /// The process is killed, and the next one opens the file; from its `n`th change on the store fails.
    fn next_process(&self, store: &MemoryBackend, n: u64) -> Story {
        let crash = Arc::new(CrashBackend::over(store, 4096));
        let position = crash.clone();
        let side = AnchorSide::again(Arc::new(move || position.position()), &self.side.table(), MemoryTrees::default());
        let store = FaultBackend::new(crash.clone());
        let setup = Setup { anchored: true, ..Setup::default() };
        let ctx = setup.context_with(Some(side.files.clone()));
        let backing = raw(&store);
        let len = backing.stat().unwrap().len;
        store.faults().die_after(n);
        let file = File::open_object(ctx, backing, len, "next", OBJECT).ok();
        let versions = vec![Version { from: 0, ..self.versions.last().unwrap().clone() }];
        Story { setup, crash, store, side, file, model: self.model.clone(), versions, acknowledged: vec![(0, 0)] }
    }

    /// Crashes at every point from `from` on: killed there, or with a power cut. Returns how many states there were.
    fn crashes(&self, from: usize, what: &str) -> u64 {
        let (sim, log) = (CrashSim::new(self.crash.log()), self.side.log());
        let mut states = 0;
        for at in from..=self.crash.position() {
            let tables = log.tables_at(at);
            for (n, table) in tables.iter().enumerate() {
                let is_last = n + 1 == tables.len();
                let reached = |(record, _): &&(usize, usize)| *record < at || (*record == at && is_last);
                let first = self.acknowledged.iter().rev().find(reached).map_or(0, |(_, version)| *version);
                let until = self.versions.iter().rposition(|version| version.from <= at).unwrap();
                let versions = &self.versions[first..=until.max(first)];
                let point = sim.at(at);
                let cut = (0..4).map(|seed| (format!("power cut {seed}"), point.random_state(seed)));
                let killed = [("killed".to_owned(), sim.prefix(at)), ("all lost".to_owned(), point.least_state())];
                for (how, state) in killed.into_iter().chain(cut) {
                    let what = format!("{what}, record {at}, commit {n} of {} there, {how}", tables.len());
                    self.judge(versions, table, &state, &what);
                    states += 1;
                }
            }
        }
        states
    }

    /// The next process finds a content that was, and the one after it finds the same, whether or not the file is
    /// written in between.
    fn judge(&self, versions: &[Version], table: &MemoryTable, store: &MemoryBackend, what: &str) {
        let table = Arc::new(table.clone());
        let open = || {
            let files = anchor::open(table.clone(), MemoryTrees::default());
            let ctx = self.setup.context_with(Some(files.clone()));
            let backing = raw(store);
            let len = backing.stat().unwrap().len;
            let file = File::open_object(ctx, backing, len, "crashed", OBJECT);
            (files, file.unwrap_or_else(|e| panic!("{what}: open: {e}")))
        };
        let read = |file: &File| {
            let mut back = vec![0; file.size() as usize];
            let done = file.read_at(0, &mut back);
            assert!(matches!(done, Ok(n) if n == back.len()), "{what}: {} bytes, {done:?}", back.len());
            back
        };
        let (files, file) = open();
        let found = read(&file);
        let sizes = || versions.iter().map(|version| version.content.len());
        let (least, most) = (sizes().min().unwrap(), sizes().max().unwrap());
        assert!((least..=most).contains(&found.len()), "{what}: {} bytes of {least} to {most}", found.len());
        for (n, block) in found.chunks(4096).enumerate() {
            let from = n * 4096;
            let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
            let is_of = |version: &Version| {
                let there = version.content.len().saturating_sub(from).min(block.len());
                let (had, beyond) = block.split_at(there);
                there > 0 && had == &version.content[from..from + there] && is_zero(beyond)
            };
            // The data of a file that grows may not have arrived.
            let is_short = |version: &Version| !version.is_of_failure && version.content.len() <= from;
            let short = versions.iter().position(is_short);
            let has_grown = short.is_some_and(|n| versions[n..].iter().any(|later| later.content.len() > from));
            let page = from / SPAN;
            let is_known = versions.iter().any(is_of) || (has_grown && is_zero(block));
            assert!(is_known, "{what}: block {n}, of page {page}, never was");
        }
        let row = files.anchor().row(OBJECT).unwrap().file().unwrap().clone();
        assert_eq!(row.size, file.size(), "{what}: the store chooses once");
        drop(file);
        let (files, file) = open();
        assert!(read(&file) == found, "{what}: read again");
        file.write_at(7, b"afterwards").unwrap();
        file.settle_now().unwrap();
        drop(file);
        let closed = files.closed();
        files.covered(closed).unwrap();
        files.anchor().commit(files.anchor().mark()).unwrap();
        let (files, file) = open();
        let row = files.anchor().row(OBJECT).unwrap().file().unwrap().clone();
        assert!(row.open.is_none(), "{what}: {row:?}");
        assert!(
            read(&file).get(17..).unwrap_or_default() == found.get(17..).unwrap_or_default(),
            "{what}: read at last"
        );
        assert_eq!(file.check(false, &mut |_| {}).unwrap().damage, [], "{what}");
    }
}

fn noted_cut(story: &Story) -> Option<PageNo> {
    let row = story.side.files.anchor().row(OBJECT).unwrap();
    row.file().unwrap().open.as_ref().and_then(|open| open.cut).map(|cut| cut.from)
}

fn all(nexts: &[Next]) {
    let mut states = 0;
    for (n, next) in nexts.iter().enumerate() {
        for (failure, is_settled, is_dirty) in [
            (Failure::Not, false, false),
            (Failure::Not, true, true),
            (Failure::Done, false, true),
            (Failure::Done, true, false),
        ] {
            let degree_log2 = if (n % 2 == 0) == is_dirty { 4 } else { 1 };
            let what = format!("{failure:?}, {next:?}, settled {is_settled}, dirty {is_dirty}, degree {degree_log2}");
            let mut story = Story::new(degree_log2, is_settled);
            let from = story.crash.position();
            if is_dirty {
                story.write(100, 50);
                story.write(4 * SPAN, 51);
                story.file().flush().unwrap();
            }
            story.truncate_in_vain(2 * SPAN + 100, failure);
            assert_eq!(noted_cut(&story), Some(PageNo(3)), "{what}");
            match *next {
                Next::Nothing => {}
                Next::Write(at) => story.write(at, 60),
                Next::Append => story.write(7 * SPAN, 60),
                Next::Truncate(size) => story.truncate(size),
                Next::TruncateInVain(size) => {
                    story.truncate_in_vain(size, failure);
                    story.write(3 * SPAN, 60);
                }
            }
            if !matches!(next, Next::Nothing) {
                story.file().flush().unwrap();
                story.sync();
                story.write(SPAN, 61);
                story.settle();
            }
            states += story.crashes(from, &what);
        }
    }
    println!("{states} states after shrinks that failed");
    assert!(states > 600 * nexts.len() as u64, "{states}");
}

/// The file goes on with the pages that were to be removed.
#[test]
fn a_shrink_that_failed_takes_nothing_when_page_0_is_written_for_another_reason() {
    all(&[Next::Nothing, Next::Write(0), Next::Write(4 * SPAN), Next::Append]);
}

/// The next shrink is another one: to more, or to less.
#[test]
fn a_shrink_that_failed_does_not_count_for_the_next_one() {
    all(&[
        Next::Truncate(4 * SPAN + 50),
        Next::Truncate(SPAN + 50),
        Next::Truncate(0),
        Next::TruncateInVain(4 * SPAN + 50),
        Next::TruncateInVain(50),
    ]);
}

/// A crash between the commit that notes a shrink and the write of page 0, which an earlier write had left in flight.
/// The next process writes page 0 again, and its store fails after any number of changes.
#[test]
fn recovery_does_not_make_a_shrink_that_was_only_noted() {
    for (degree_log2, is_settled) in [(4, false), (4, true), (1, false)] {
        let mut story = Story::new(degree_log2, is_settled);
        story.write(100, 50);
        story.write(4 * SPAN, 51);
        story.file().flush().unwrap();
        story.truncate_in_vain(2 * SPAN + 100, Failure::Not);
        story.file = None;
        for n in 0.. {
            let mut next = story.next_process(&story.crash.snapshot(), n);
            let is_open = next.file.take().is_some();
            next.crashes(0, &format!("degree {degree_log2}, settled {is_settled}, {n} changes"));
            if is_open {
                // A shrink of a high tree begins with a commit: nothing is in flight.
                assert!(degree_log2 == 1 || n > 3, "settled {is_settled}: {n} changes");
                assert_eq!(noted_cut(&next), None);
                break;
            }
        }
    }
}

/// The anchor cannot note a shrink, which fails, and notes it with a later commit of something else.
#[test]
fn a_shrink_that_was_noted_too_late_takes_nothing() {
    for is_written in [false, true] {
        let mut story = Story::new(4, false);
        let from = story.crash.position();
        story.side.refuse(Some(libc::ENOSPC));
        story.file().truncate(2 * SPAN as u64 + 100).expect_err("the anchor does not know it");
        story.side.refuse(None);
        let anchor = story.side.files.anchor().clone();
        anchor.commit(anchor.mark()).unwrap();
        assert_eq!(noted_cut(&story), Some(PageNo(3)));
        if is_written {
            story.write(100, 60);
            story.file().flush().unwrap();
        }
        story.sync();
        assert_eq!(noted_cut(&story), None);
        story.crashes(from, &format!("written {is_written}"));
    }
}

/// A shrink was done although its write failed, and the anchor has dropped it since. Recovery cannot commit the result,
/// because a block is lost. The next write removes the pages past the end, and the file grows over them: a crash at any
/// point leaves no stale page.
#[test]
fn a_shrink_that_was_dropped_and_done_is_noted_again() {
    let size = 2 * SPAN + 100;
    let mut story = Story::new(4, true);
    story.write(SPAN, 50);
    story.file().flush().unwrap();
    story.truncate_in_vain(size, Failure::Done);
    story.store.faults().rule(|c| (c.call == Call::Write && c.offset == 0).then_some(Fault::Errno(libc::EIO)));
    story.write(100, 60);
    story.file().flush().expect_err("page 0 cannot be written");
    assert_eq!(noted_cut(&story), None);
    story.file = None;
    let left = story.crash.snapshot();
    let geometry = Geometry::new(4096, 62).unwrap();
    flip(&left, geometry.block_offset(geometry.block_at(SPAN as u64)).0 + 9);
    let next = story.next_process(&left, 1 << 40);
    assert_eq!(next.file().size(), size as u64);
    let is_open = |row: &Row| row.file().unwrap().open.is_some();
    assert!(is_open(&next.side.files.anchor().row(OBJECT).unwrap()), "nothing is committed");
    let text = fill(TEXT, &mut Rng(70));
    for at in [100, 4 * SPAN as u64] {
        next.file().write_at(at, &text).unwrap();
        next.file().flush().unwrap();
    }
    let (sim, log) = (CrashSim::new(next.crash.log()), next.side.log());
    for at in 0..=next.crash.position() {
        for table in log.tables_at(at) {
            let point = sim.at(at);
            for (n, state) in [sim.prefix(at), point.least_state(), point.random_state(1)].iter().enumerate() {
                let files = anchor::open(Arc::new(table.clone()), MemoryTrees::default());
                let backing = raw(state);
                let len = backing.stat().unwrap().len;
                let ctx = story.setup.context_with(Some(files));
                let file = File::open_object(ctx, backing, len, "crashed", OBJECT).unwrap();
                assert!(file.size() >= size as u64, "record {at}, state {n}");
                // All but the block that is lost.
                for from in [0, SPAN + 4096, 2 * SPAN, 3 * SPAN, 4 * SPAN].map(|from| from as u64) {
                    let read = file.read_at(from, &mut [0; 4096]);
                    read.unwrap_or_else(|e| panic!("record {at}, state {n}, from {from}: {e}"));
                }
            }
        }
    }
}
