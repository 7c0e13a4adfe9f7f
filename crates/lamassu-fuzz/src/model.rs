//! Encrypted files whose content is known: what a backing file in any state may be read as.

use crate::ring;
use lamassu_crypto::Engine;
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_store::backend::MemoryBackend;
use lamassu_store::file::{DamageKind, Durability, File, FileContext, Integrity, Sessions, StoreError};
use lamassu_store::{Backend, BackendFile};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::sync::{Arc, Mutex, OnceLock};

/// Blocks that a survey reads from the start of a file; and its last one.
pub const SURVEYED: u64 = 160;

/// How a file came about. Few enough to be kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Story {
    pub suite: Suite,
    pub block_size: u32,
    pub convergent: bool,
    pub shape: u8,
    pub state: u8,
}

impl Story {
    pub const SHAPES: u8 = 8;
    pub const STATES: u8 = 6;

    pub fn geometry(&self) -> Geometry {
        Geometry::new(self.block_size, 62).expect("a geometry")
    }

    pub fn context(&self, read_only: bool) -> Arc<FileContext> {
        Arc::new(FileContext {
            ring: ring(self.suite),
            geometry: self.geometry(),
            engine: Arc::new(Engine::new(1)),
            integrity: Integrity::Full,
            durability: Durability::Ordered,
            convergent_small_files: self.convergent,
            domain: Domain::Zone,
            compression: None,
            read_only,
            approved_only: false,
            sessions: Arc::new(Sessions::all_interrupted()),
            anchored: None,
            report: Arc::new(|_, _| true),
        })
    }

    pub fn is_sparse(&self) -> bool {
        matches!(self.shape, 6 | 7)
    }

    /// The file of this story, made once.
    pub fn told(&self) -> Arc<Told> {
        static TOLD: OnceLock<Mutex<HashMap<Story, Arc<Told>>>> = OnceLock::new();
        let told = TOLD.get_or_init(Default::default);
        if let Some(found) = told.lock().expect("no panic while it is held").get(self) {
            return found.clone();
        }
        let made = Arc::new(self.tell().expect("a store in memory does not fail"));
        told.lock().expect("no panic while it is held").insert(*self, made.clone());
        made
    }

    fn tell(&self) -> Result<Told, StoreError> {
        let (b, n) = (u64::from(self.block_size), self.geometry().blocks_per_page());
        let size = match self.shape {
            0 => 0,
            1 => 100,
            2 => 5 * b + 700,
            3 => n * b,
            4 => (n + 3) * b + 33,
            5 => (2 * n + 5) * b + 700,
            6 => (2 * n + 9) * b + 5,
            _ => 9 * b + 17,
        };
        let store = MemoryBackend::new();
        let backing = store.root().create_file(name()).map_err(io)?;
        let file = File::create(self.context(false), backing, "told")?;
        let mut old = vec![0; size as usize];
        if self.is_sparse() {
            file.truncate(size)?;
            for (at, len) in [(3 * b + 9, 2 * b), (size - 5, 5)] {
                patch(&file, &mut old, at, len as usize, 1)?;
            }
        } else {
            patch(&file, &mut old, 0, size as usize, 1)?;
        }
        // Twice: a floor is raised by the second.
        file.settle_now()?;
        file.settle_now()?;
        let before = store.snapshot();
        let mut new = old.clone();
        let settled = match self.state {
            0 => true,
            1 | 2 => {
                patch(&file, &mut new, size / 2, (2 * b + 100) as usize, 2)?;
                patch(&file, &mut new, size.saturating_sub(b), (3 * b) as usize, 3)?;
                self.state == 2
            }
            3 => {
                file.truncate(size / 2 + 1)?;
                new.resize((size / 2 + 1) as usize, 0);
                false
            }
            4 => {
                file.punch(b, 2 * b)?;
                let end = new.len().min(3 * b as usize);
                if let Some(hole) = new.get_mut(b as usize..end) {
                    hole.fill(0);
                }
                patch(&file, &mut new, 7, 40, 4)?;
                false
            }
            _ => {
                patch(&file, &mut new, size, (n * b) as usize, 5)?;
                true
            }
        };
        if settled {
            file.settle_now()?;
            file.settle_now()?;
        } else {
            file.flush()?;
        }
        let now = store.snapshot();
        drop(file);
        Ok(Told { before, now, old, new, settled })
    }
}

fn io(source: std::io::Error) -> StoreError {
    StoreError::Io { op: "create", offset: 0, source }
}

/// Writes bytes that tell where and by whom they were written, to a file and its model.
fn patch(file: &File, model: &mut Vec<u8>, at: u64, len: usize, salt: u8) -> Result<(), StoreError> {
    let data: Vec<u8> = (0..len as u64).map(|i| pattern(at + i, salt)).collect();
    let end = at as usize + len;
    model.resize(model.len().max(end), 0);
    model[at as usize..end].copy_from_slice(&data);
    file.write_at(at, &data)
}

/// Never zero, so that zeros in place of data are noticed; different in every block.
pub fn pattern(at: u64, salt: u8) -> u8 {
    let mixed = (at / 64).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(salt) << 32);
    (mixed >> 40) as u8 | 1
}

fn name() -> &'static OsStr {
    OsStr::new("file")
}

/// A file in two states.
pub struct Told {
    /// Settled.
    pub before: MemoryBackend,
    /// With changes; `settled`, or as a killed process leaves it.
    pub now: MemoryBackend,
    pub old: Vec<u8>,
    pub new: Vec<u8>,
    pub settled: bool,
}

pub fn backing(store: &MemoryBackend) -> Arc<dyn BackendFile> {
    store.root().open_file(name(), true).expect("it is there")
}

/// What each block reads as. A read that fails for other reasons than damage is a finding.
pub type Survey = BTreeMap<u64, Result<Vec<u8>, DamageKind>>;

pub fn survey(story: &Story, store: &MemoryBackend) -> (u64, Survey) {
    let file = File::open(story.context(true), backing(store), "survey").expect("opens, however damaged");
    let (size, b) = (file.size(), u64::from(story.block_size));
    let blocks = size.div_ceil(b);
    let mut found = Survey::new();
    for block in (0..blocks.min(SURVEYED)).chain(blocks.checked_sub(1)) {
        let mut buf = vec![0; b as usize];
        let read = match file.read_at(block * b, &mut buf) {
            Ok(got) => {
                assert_eq!(got as u64, b.min(size - block * b), "block {block}: short in the middle");
                buf.truncate(got);
                Ok(buf)
            }
            Err(StoreError::Damaged(damage)) => Err(damage.kind),
            Err(other) => panic!("block {block} of {size} bytes: {other}"),
        };
        found.insert(block, read);
    }
    (size, found)
}
