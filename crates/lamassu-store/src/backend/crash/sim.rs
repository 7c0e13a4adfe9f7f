//! Walks a log and builds the states a crash can leave.

use super::dirty::{Choice, Dirty};
use super::{CrashLog, Op, Record};
use crate::backend::memory::{Barrier, Content, MemoryBackend, NamespaceOp, Tree};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Builds crash states of one log. Cheap to ask: pages, files and directories are shared between states until written.
pub struct CrashSim {
    log: CrashLog,
    /// The state at every multiple of `stride`.
    checkpoints: Vec<Progress>,
    /// At the same places, the store with every change done.
    prefixes: Vec<Tree>,
    stride: usize,
}

/// The store at one moment of a log, with all that a crash there could lose.
pub struct CrashPoint<'a> {
    log: &'a CrashLog,
    progress: Progress,
}

/// What is durable, and what is not yet. Numbers are positions in the log.
#[derive(Clone)]
struct Progress {
    durable: Tree,
    names: Vec<usize>,
    attributes: BTreeMap<u64, Vec<usize>>,
    files: BTreeMap<u64, Arc<Dirty>>,
}

impl CrashSim {
    /// Prepares a log.
    pub fn new(log: CrashLog) -> CrashSim {
        // Few enough to hold, close enough to walk from.
        let stride = (log.records.len() / 64).max(32);
        let mut progress = Progress {
            durable: log.base.clone(),
            names: Vec::new(),
            attributes: BTreeMap::new(),
            files: BTreeMap::new(),
        };
        let (mut checkpoints, mut prefixes) = (vec![progress.clone()], vec![log.base.clone()]);
        let mut tree = log.base.clone();
        for index in 0..log.records.len() {
            progress.advance(&log, index);
            replay(&mut tree, &log.records[index]);
            if (index + 1).is_multiple_of(stride) {
                checkpoints.push(progress.clone());
                prefixes.push(tree.clone());
            }
        }
        CrashSim { log, checkpoints, prefixes, stride }
    }

    /// The log.
    pub fn log(&self) -> &CrashLog {
        &self.log
    }

    /// The store after each number of records that ends with a change (and after none): what a kill or an atomic
    /// snapshot leaves.
    pub fn prefixes(&self) -> impl Iterator<Item = (usize, MemoryBackend)> + '_ {
        let mut tree = self.log.base.clone();
        let first = std::iter::once((0, MemoryBackend::from_tree(tree.clone())));
        let later = self.log.records.iter().enumerate().filter(|(_, r)| r.op.is_change());
        first.chain(later.map(move |(index, record)| {
            replay(&mut tree, record);
            (index + 1, MemoryBackend::from_tree(tree.clone()))
        }))
    }

    /// The store after the first `index` records: what a kill or an atomic snapshot there leaves.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn prefix(&self, index: usize) -> MemoryBackend {
        let checkpoint = (index / self.stride).min(self.checkpoints.len() - 1);
        let mut tree = self.prefixes[checkpoint].clone();
        for record in &self.log.records[checkpoint * self.stride..index] {
            replay(&mut tree, record);
        }
        MemoryBackend::from_tree(tree)
    }

    /// The moment after the first `index` records.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn at(&self, index: usize) -> CrashPoint<'_> {
        assert!(index <= self.log.records.len(), "record {index} of {}", self.log.records.len());
        let checkpoint = (index / self.stride).min(self.checkpoints.len() - 1);
        let mut progress = self.checkpoints[checkpoint].clone();
        for next in checkpoint * self.stride..index {
            progress.advance(&self.log, next);
        }
        CrashPoint { log: &self.log, progress }
    }

    /// What a power cut after the first `index` records may leave, chosen by `seed`. See [`CrashSim::at`] for many
    /// seeds at one index.
    pub fn random_state(&self, seed: u64, index: usize) -> MemoryBackend {
        self.at(index).random_state(seed)
    }
}

impl CrashPoint<'_> {
    /// One of the states a power cut here may leave.
    pub fn random_state(&self, seed: u64) -> MemoryBackend {
        self.build(&mut Random::new(seed))
    }

    /// The state in which everything is lost that may be lost.
    pub fn least_state(&self) -> MemoryBackend {
        self.build(&mut Least)
    }

    /// The state in which nothing is lost except what failed barriers no longer cover.
    pub fn most_state(&self) -> MemoryBackend {
        self.build(&mut Most)
    }

    fn build(&self, choice: &mut dyn Choice) -> MemoryBackend {
        let Progress { durable, names, attributes, files } = &self.progress;
        let mut tree = durable.clone();
        let kept = choice.pick(0, names.len());
        for &index in &names[..kept] {
            replay(&mut tree, &self.log.records[index]);
        }
        for changes in attributes.values() {
            let kept = choice.pick(0, changes.len());
            for &index in &changes[..kept] {
                replay(&mut tree, &self.log.records[index]);
            }
        }
        for (&ino, dirty) in files {
            let Some(covered) = tree.content(ino) else { continue };
            let content = dirty.crash(covered, self.log.granularity, choice);
            if let Some(node) = tree.get_mut(ino) {
                node.touch(dirty.time);
            }
            if let Some(slot) = tree.content_mut(ino) {
                *slot = content;
            }
        }
        MemoryBackend::from_tree(tree)
    }
}

/// Applies one record as it happened. Records of a file without a name have no effect.
fn replay(tree: &mut Tree, record: &Record) {
    let now = record.time;
    match &record.op {
        Op::Namespace(op) => {
            // Names depend on names alone and come in their order, so what succeeded once succeeds again.
            let gone = tree.apply_namespace(op, now);
            debug_assert!(gone.is_ok(), "{op:?}: {gone:?}");
            if let Ok(Some(ino)) = gone {
                tree.free_orphan(ino);
            }
        }
        Op::Attribute(ino, op) => tree.apply_attribute(*ino, op, now),
        Op::Write { ino, offset, data } => change(tree, *ino, record, |content| {
            // It fitted when it was recorded.
            let _ = content.write(*offset, data);
        }),
        Op::Punch { ino, offset, len } => change(tree, *ino, record, |content| content.punch(*offset, *len)),
        Op::SetLen { ino, len } => change(tree, *ino, record, |content| content.set_len(*len)),
        Op::Barrier(_) | Op::FailedBarrier(_) => {}
    }
}

fn change(tree: &mut Tree, ino: u64, record: &Record, f: impl FnOnce(&mut Content)) {
    if let Some(content) = tree.content_mut(ino) {
        f(content);
    }
    if let Some(node) = tree.get_mut(ino) {
        node.touch(record.time);
    }
}

impl Progress {
    fn advance(&mut self, log: &CrashLog, index: usize) {
        let record = &log.records[index];
        match &record.op {
            Op::Namespace(_) => self.names.push(index),
            Op::Attribute(ino, _) => self.attributes.entry(*ino).or_default().push(index),
            Op::Write { ino, .. } | Op::Punch { ino, .. } | Op::SetLen { ino, .. } => self.dirty(*ino, record, log),
            Op::Barrier(barrier) => self.barrier(*barrier, log),
            Op::FailedBarrier(barrier) => self.failed_barrier(*barrier),
        }
    }

    fn dirty(&mut self, ino: u64, record: &Record, log: &CrashLog) {
        let nothing = Default::default();
        let covered = self.durable.content(ino).unwrap_or(&nothing);
        let dirty = self.files.entry(ino).or_insert_with(|| Arc::new(Dirty::new(covered)));
        let dirty = Arc::make_mut(dirty);
        dirty.time = record.time;
        match &record.op {
            Op::Write { offset, data, .. } => dirty.write(covered, *offset, data, log.granularity),
            Op::Punch { offset, len, .. } => dirty.punch(covered, *offset, *len, log.granularity),
            Op::SetLen { len, .. } => dirty.set_len(covered, *len),
            _ => {}
        }
    }

    fn barrier(&mut self, barrier: Barrier, log: &CrashLog) {
        match barrier {
            Barrier::Data(ino) | Barrier::All(ino) => {
                let creation = |op: &NamespaceOp| matches!(op, NamespaceOp::Create { ino: new, .. } if *new == ino);
                self.cover_names(log, creation);
                self.cover_file(ino);
                if matches!(barrier, Barrier::All(_)) {
                    self.cover_attributes(log, ino);
                }
            }
            Barrier::Dir(ino) => {
                self.cover_names(log, |op| concerns(op, ino));
                self.cover_attributes(log, ino);
            }
            Barrier::Store => {
                self.cover_names(log, |_| true);
                for ino in self.files.keys().copied().collect::<Vec<_>>() {
                    self.cover_file(ino);
                }
                for ino in self.attributes.keys().copied().collect::<Vec<_>>() {
                    self.cover_attributes(log, ino);
                }
            }
        }
    }

    fn failed_barrier(&mut self, barrier: Barrier) {
        let fail = |dirty: &mut Arc<Dirty>| Arc::make_mut(dirty).fail();
        match barrier {
            Barrier::Data(ino) | Barrier::All(ino) => {
                self.files.get_mut(&ino).into_iter().for_each(fail);
            }
            Barrier::Store => self.files.values_mut().for_each(fail),
            Barrier::Dir(_) => {}
        }
    }

    /// Makes names durable up to the last operation that `covered` says yes to.
    fn cover_names(&mut self, log: &CrashLog, covered: impl Fn(&NamespaceOp) -> bool) {
        let is_covered = |&index: &usize| matches!(&log.records[index].op, Op::Namespace(op) if covered(op));
        let Some(last) = self.names.iter().rposition(is_covered) else { return };
        for index in self.names.drain(..=last) {
            replay(&mut self.durable, &log.records[index]);
        }
    }

    fn cover_attributes(&mut self, log: &CrashLog, ino: u64) {
        for index in self.attributes.remove(&ino).unwrap_or_default() {
            replay(&mut self.durable, &log.records[index]);
        }
    }

    fn cover_file(&mut self, ino: u64) {
        let Some(dirty) = self.files.get_mut(&ino) else { return };
        let Some(content) = self.durable.content_mut(ino) else {
            // Without a name for good.
            self.files.remove(&ino);
            return;
        };
        let dirty = Arc::make_mut(dirty);
        let (left, time) = (dirty.cover(content), dirty.time);
        if !left {
            self.files.remove(&ino);
        }
        if let Some(node) = self.durable.get_mut(ino) {
            node.touch(time);
        }
    }
}

/// Whether an operation changed this directory's entries.
fn concerns(op: &NamespaceOp, ino: u64) -> bool {
    match op {
        NamespaceOp::Create { dir, .. }
        | NamespaceOp::Link { dir, .. }
        | NamespaceOp::Unlink { dir, .. }
        | NamespaceOp::RemoveDir { dir, .. } => *dir == ino,
        NamespaceOp::Rename { from, to, .. } => *from == ino || *to == ino,
    }
}

struct Least;

impl Choice for Least {
    fn pick(&mut self, least: usize, _: usize) -> usize {
        least
    }
}

struct Most;

impl Choice for Most {
    fn pick(&mut self, _: usize, most: usize) -> usize {
        most
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014), with the fraction that this state tends to keep: states in which nearly all or
/// nearly nothing survives are as likely as mixed ones.
struct Random {
    state: u64,
    /// Of 8: how much is kept.
    keeps: u64,
}

impl Random {
    fn new(seed: u64) -> Random {
        let mut random = Random { state: seed, keeps: 0 };
        random.keeps = [0, 1, 4, 7, 8, 4][(random.next() % 6) as usize];
        random
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Choice for Random {
    fn pick(&mut self, least: usize, most: usize) -> usize {
        if least == most {
            return least;
        }
        let draw = self.next();
        if draw % 8 < self.keeps {
            most
        } else if draw & 8 == 0 {
            least
        } else {
            least + (draw >> 8) as usize % (most - least + 1)
        }
    }
}
