//! What the tree of an anchored file costs, by degree and by how its records are fetched: for `scripts/bench tree`.
//!
//! `tree DIRECTORY SIZE_MIB DEGREE_LOG2 DELAY_US` writes one file to the directory and prints a line of JSON for each
//! pattern of access. Each read of the store takes DELAY_US microseconds more, as over a network (0: none). As root it
//! empties the page cache before each pattern; the anchor lies in memory.

use lamassu_anchor::row::{Content, FileRow, Sealed};
use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
use lamassu_anchor::{Anchor, AnchorError, EntryPlace, Made, ObjectId, Row, Token, TokenKey, VaultRow};
use lamassu_format::Suite;
use lamassu_format::header::VaultId;
use lamassu_store::backend::fault::Call;
use lamassu_store::backend::{BackendFile, FaultBackend, LocalBackend};
use lamassu_store::file::{AnchoredFiles, Fetching, TreeOf, Trees};
use lamassu_store::integrity::{FileRecords, Records};
use lamassu_store::{Backend, File, FileContext};
use std::collections::HashSet;
use std::error::Error;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;
const STEP: usize = 1 << 20;
const VAULT: VaultId = VaultId([1; 16]);
/// Blocks of a page; an access to a page in so many of them is one to each page.
const PAGE_BLOCKS: u64 = 116;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// How a file is used: name, bytes of an access, and how many.
enum Pattern {
    Sequential,
    /// Reads of 4 KiB at random.
    Random(u64),
    /// Reads of 4 KiB, one in each page, ascending.
    EachPage,
    /// Overwrites of 4 KiB at random, an fsync after each 16.
    Overwrite(u64),
}

/// Records in a file, counted.
#[derive(Clone)]
struct Counted {
    inner: Arc<FileRecords>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    reads: AtomicU64,
    writes: AtomicU64,
    held: AtomicU64,
}

impl Records for Counted {
    fn read(&self, offset: u64, record: &mut [u8]) -> io::Result<()> {
        self.counts.reads.fetch_add(1, Relaxed);
        self.inner.read(offset, record)
    }

    fn write(&self, offset: u64, record: &[u8]) -> io::Result<()> {
        self.counts.writes.fetch_add(1, Relaxed);
        self.inner.write(offset, record)
    }
}

impl Trees for Counted {
    fn records(&self, _: ObjectId, _: TreeOf) -> Arc<dyn Records> {
        Arc::new(self.clone())
    }
}

/// An anchor in memory, and how many bytes of tree records it was given.
struct CountedTable {
    inner: MemoryTable,
    counts: Arc<Counts>,
}

impl Table for CountedTable {
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
        self.inner.get(space, key)
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), AnchorError> {
        self.inner.scan(space, prefix, visit)
    }

    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError> {
        let held = changes.iter().filter(|change| change.space == Space::Held);
        let bytes: usize = held.filter_map(|change| change.value.as_ref()).map(Vec::len).sum();
        self.counts.held.fetch_add(bytes as u64, Relaxed);
        self.inner.commit(changes)
    }
}

struct Study {
    backing: Arc<dyn BackendFile>,
    anchor: Arc<Anchor>,
    trees: Counted,
    object: ObjectId,
    size: u64,
}

impl Study {
    fn file(&self, fetching: Fetching) -> Outcome<File> {
        let files = AnchoredFiles::with(self.anchor.clone(), Arc::new(self.trees.clone()), fetching);
        let context = FileContext { anchored: Some(files), ..FileContext::to_measure(Suite::Aes) };
        let len = self.backing.stat()?.len;
        Ok(File::open_object(Arc::new(context), self.backing.clone(), len, "tree", self.object)?)
    }

    /// Everything durable, and the row clean.
    fn finish(&self, file: &File) -> Outcome<()> {
        file.sync()?;
        self.anchor.commit_objects(&HashSet::from([self.object]), self.anchor.mark())?;
        file.settle_now()?;
        file.sync()?;
        self.anchor.commit_objects(&HashSet::from([self.object]), self.anchor.mark())?;
        Ok(())
    }

    fn fill(&self) -> Outcome<()> {
        let file = self.file(Fetching::Beside)?;
        let data: Vec<u8> = (0..STEP + 4096).map(|i| ((i * 2_654_435_761_usize) >> 13) as u8).collect();
        for at in (0..self.size).step_by(STEP) {
            file.write_at(at, &data[(at >> 20) as usize % 4096..][..STEP])?;
        }
        self.finish(&file)
    }

    fn run(&self, pattern: &Pattern, fetching: Fetching) -> Outcome<f64> {
        let file = self.file(fetching)?;
        let mut random = Random(42);
        let blocks = self.size / BLOCK;
        let mut buffer = vec![0u8; STEP];
        let begun = Instant::now();
        match pattern {
            Pattern::Sequential => {
                for at in (0..self.size).step_by(STEP) {
                    file.read_at(at, &mut buffer)?;
                }
            }
            Pattern::EachPage => {
                for block in (0..blocks).step_by(PAGE_BLOCKS as usize) {
                    file.read_at(block * BLOCK, &mut buffer[..BLOCK as usize])?;
                }
            }
            Pattern::Random(count) => {
                for _ in 0..*count {
                    file.read_at(random.below(blocks) * BLOCK, &mut buffer[..BLOCK as usize])?;
                }
            }
            Pattern::Overwrite(count) => {
                for n in 0..*count {
                    buffer[..8].copy_from_slice(&random.next().to_le_bytes());
                    file.write_at(random.below(blocks) * BLOCK, &buffer[..BLOCK as usize])?;
                    if n % 16 == 15 {
                        file.sync()?;
                        self.anchor.commit_objects(&HashSet::from([self.object]), self.anchor.mark())?;
                    }
                }
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        self.finish(&file)?;
        Ok(seconds)
    }
}

/// A generator of numbers that repeats (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

fn anchor(degree_log2: u8, counts: Arc<Counts>) -> Outcome<(Arc<Anchor>, ObjectId)> {
    let vault = VaultRow { degree_log2, ..VaultRow::new(VAULT, TokenKey::new([2; 32])) };
    let row = |content| Row { mode: 0o600, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing };
    let top = Content::Dir { record: Sealed::Nothing, parent: ObjectId::ROOT, name: Token([0; 16]) };
    let table = CountedTable { inner: MemoryTable::default(), counts };
    let anchor = Arc::new(Anchor::create(Arc::new(table), vault, row(top))?);
    let place = EntryPlace { dir: ObjectId::ROOT, name: Token([7; 16]) };
    let Made::Queued(object) = anchor.make(place, row(Content::File(FileRow::default())))? else {
        return Err("the name is taken".into());
    };
    anchor.commit(anchor.mark())?;
    Ok((anchor, object))
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, mib, degree_log2, delay_us] = &arguments[..] else {
        return Err("tree DIRECTORY SIZE_MIB DEGREE_LOG2 DELAY_US".into());
    };
    let (mib, degree_log2, delay_us): (u64, u8, u64) = (mib.parse()?, degree_log2.parse()?, delay_us.parse()?);
    let backend = FaultBackend::new(Arc::new(LocalBackend::open(dir)?));
    let create = |name: &str| backend.root().create_file(OsStr::new(name));
    let counts = Arc::new(Counts::default());
    let (anchor, object) = anchor(degree_log2, counts.clone())?;
    let trees = Counted { inner: Arc::new(FileRecords(create("records")?)), counts: counts.clone() };
    let study = Study { backing: create("file")?, anchor, trees, object, size: mib << 20 };
    study.fill()?;
    if delay_us > 0 {
        backend.faults().rule(move |context| {
            if context.call == Call::Read {
                std::thread::sleep(Duration::from_micros(delay_us));
            }
            None
        });
    }
    let patterns = [
        ("sequential", Pattern::Sequential),
        ("each page", Pattern::EachPage),
        ("random", Pattern::Random(1000)),
        ("overwrite", Pattern::Overwrite(256)),
    ];
    for (name, pattern) in &patterns {
        for (how, fetching) in [("beside", Fetching::Beside), ("in series", Fetching::InSeries)] {
            backend.sync()?;
            // Only root may; then what is cached is the same for all.
            let _ = std::fs::write("/proc/sys/vm/drop_caches", "3");
            let before = [&counts.reads, &counts.writes, &counts.held].map(|count| count.load(Relaxed));
            let seconds = study.run(pattern, fetching)?;
            let after = [&counts.reads, &counts.writes, &counts.held].map(|count| count.load(Relaxed));
            let [reads, writes, held] = [0, 1, 2].map(|n| after[n] - before[n]);
            println!(
                "{{\"size_mib\": {mib}, \"delay_us\": {delay_us}, \"degree\": {}, \"pattern\": \"{name}\", \"fetching\": \"{how}\", \"seconds\": \
                 {seconds:.6}, \"records_read\": {reads}, \"records_written\": {writes}, \"anchor_bytes\": {held}}}",
                1u64 << degree_log2,
            );
        }
    }
    Ok(())
}
