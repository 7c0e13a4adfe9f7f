//! Counts distinct items exactly, in any number: an external sort of their digests.
//!
//! Memory is bounded by the given limit and the read buffers of the runs on disk; disk space by 40 bytes for each item.
//! Runs are merged in tiers, so that their number, and that of open files, grows with the logarithm of the count.
//! Digests are 128 bits of BLAKE3, so "exactly" means: except for one chance in 2⁶⁴ at 2³² items.

use crate::fault::Result;
use lamassu_host::Error as HostError;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const RECORD: usize = 20;
/// Read buffer of a run, in bytes.
const RUN_BUFFER: usize = 64 << 10;
/// So many runs of one tier are merged into one of the next.
const FAN_IN: usize = 16;

/// A digest, and the length of the item in bytes.
type Item = (u128, u32);

/// Begins a hash of bytes in a `domain`: equal bytes of different domains have different digests. The key is random in
/// each run of the program: digests of secret data go to a disk, and must not let a reader confirm guesses.
pub fn hasher(domain: u8) -> Result<blake3::Hasher> {
    static KEY: OnceLock<[u8; 32]> = OnceLock::new();
    let key = match KEY.get() {
        Some(key) => key,
        None => {
            let mut key = [0; 32];
            lamassu_crypto::random(&mut key)?;
            KEY.get_or_init(|| key)
        }
    };
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(&[domain]);
    Ok(hasher)
}

/// The digest of the hashed bytes.
pub fn finish(hasher: &blake3::Hasher) -> u128 {
    let hash = hasher.finalize();
    let (first, _) = hash.as_bytes().split_first_chunk().expect("a hash has 32 bytes");
    u128::from_le_bytes(*first)
}

/// The digest of bytes in a domain.
pub fn digest(domain: u8, bytes: &[u8]) -> Result<u128> {
    Ok(finish(hasher(domain)?.update(bytes)))
}

/// Items to count.
pub struct Distinct {
    items: Vec<Item>,
    items_max: usize,
    /// Sorted runs by tier: a run holds FAN_IN times as much as one of the tier before.
    tiers: Vec<Vec<File>>,
    dir: PathBuf,
}

/// The counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// all
    pub count: u64,
    /// bytes of all
    pub bytes: u64,
    /// distinct ones
    pub distinct: u64,
    /// bytes of the distinct ones
    pub distinct_bytes: u64,
    /// of these, how many occur more than once
    pub repeated: u64,
    /// how often the most frequent one occurs
    pub most: u64,
}

impl Distinct {
    /// Counts with `memory` bytes, and runs in files without a name in `dir`.
    pub fn new(memory: usize, dir: &Path) -> Distinct {
        let items_max = (memory / size_of::<Item>()).max(1);
        Distinct { items: Vec::new(), items_max, tiers: Vec::new(), dir: dir.into() }
    }

    /// Adds an item.
    pub fn add(&mut self, digest: u128, bytes: u32) -> Result<()> {
        self.items.push((digest, bytes));
        if self.items.len() >= self.items_max {
            self.spill().map_err(|source| HostError::Local { op: "write to", path: self.dir.clone(), source })?;
        }
        Ok(())
    }

    fn spill(&mut self) -> io::Result<()> {
        self.items.sort_unstable();
        let mut run = RunWriter::new(&self.dir)?;
        for item in self.items.drain(..) {
            run.put(item)?;
        }
        let mut run = run.finish()?;
        for tier in 0.. {
            if self.tiers.len() == tier {
                self.tiers.push(Vec::new());
            }
            self.tiers[tier].push(run);
            if self.tiers[tier].len() < FAN_IN {
                break;
            }
            let mut merged = RunWriter::new(&self.dir)?;
            merge(std::mem::take(&mut self.tiers[tier]), Vec::new(), |item| merged.put(item))?;
            run = merged.finish()?;
        }
        Ok(())
    }

    /// Counts.
    pub fn count(mut self) -> Result<Counted> {
        self.items.sort_unstable();
        let mut counted = Counted::default();
        let mut group: (Option<u128>, u64) = (None, 0);
        let runs = self.tiers.into_iter().flatten().collect();
        let merged = merge(runs, self.items, |(digest, bytes)| {
            counted.count += 1;
            counted.bytes += u64::from(bytes);
            if group.0 == Some(digest) {
                group.1 += 1;
                counted.repeated += u64::from(group.1 == 2);
            } else {
                counted.distinct += 1;
                counted.distinct_bytes += u64::from(bytes);
                group = (Some(digest), 1);
            }
            counted.most = counted.most.max(group.1);
            Ok(())
        });
        merged.map_err(|source| HostError::Local { op: "read from", path: self.dir, source })?;
        Ok(counted)
    }
}

/// Gives the items of sorted runs and of sorted memory in order.
fn merge(runs: Vec<File>, items: Vec<Item>, mut each: impl FnMut(Item) -> io::Result<()>) -> io::Result<()> {
    let mut runs: Vec<BufReader<File>> = runs.into_iter().map(|f| BufReader::with_capacity(RUN_BUFFER, f)).collect();
    let mut rest = items.into_iter();
    let memory = runs.len();
    let mut next = |run: usize| -> io::Result<Option<Item>> {
        if run == memory { Ok(rest.next()) } else { read_item(&mut runs[run]) }
    };
    let mut heap = BinaryHeap::new();
    for run in 0..=memory {
        heap.extend(next(run)?.map(|item| Reverse((item, run))));
    }
    while let Some(Reverse((item, run))) = heap.pop() {
        heap.extend(next(run)?.map(|item| Reverse((item, run))));
        each(item)?;
    }
    Ok(())
}

/// A run being written.
struct RunWriter(BufWriter<File>);

impl RunWriter {
    fn new(dir: &Path) -> io::Result<RunWriter> {
        Ok(RunWriter(BufWriter::new(unnamed(dir)?)))
    }

    fn put(&mut self, (digest, bytes): Item) -> io::Result<()> {
        self.0.write_all(&digest.to_le_bytes())?;
        self.0.write_all(&bytes.to_le_bytes())
    }

    fn finish(self) -> io::Result<File> {
        let mut file = self.0.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.rewind()?;
        Ok(file)
    }
}

fn read_item(run: &mut impl Read) -> io::Result<Option<Item>> {
    let mut record = [0; RECORD];
    match run.read_exact(&mut record) {
        Ok(()) => {}
        // Runs are whole records.
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e),
    }
    let (digest, bytes) = record.split_at(16);
    let digest = u128::from_le_bytes(digest.try_into().expect("16 of 20 bytes"));
    Ok(Some((digest, u32::from_le_bytes(bytes.try_into().expect("4 of 20 bytes")))))
}

/// A file without a name, which is removed when it is closed.
fn unnamed(dir: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(fd) = rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR) {
        return Ok(File::from(fd));
    }
    // Not every file system supports that: then it has a name for a moment.
    let path = dir.join(format!(".lamassu-{}-{:x}", std::process::id(), rand_u64()?));
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

fn rand_u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    lamassu_crypto::random(&mut bytes).map_err(io::Error::other)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(memory: usize, things: impl IntoIterator<Item = u64>) -> Counted {
        let dir = tempfile::tempdir().unwrap();
        let mut distinct = Distinct::new(memory, dir.path());
        for thing in things {
            distinct.add(digest(0, &thing.to_le_bytes()).unwrap(), 10).unwrap();
        }
        let counted = distinct.count().unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
        counted
    }

    #[test]
    fn counts_are_exact_in_memory_and_on_disk() {
        // 0 to 999, then 0 to 499 again, then 7 a hundred times.
        let things = || (0..1000).chain(0..500).chain(std::iter::repeat_n(7, 100));
        let expected =
            Counted { count: 1600, bytes: 16000, distinct: 1000, distinct_bytes: 10000, repeated: 500, most: 102 };
        for memory in [1 << 20, 32 * 100, 32 * 7, 1] {
            assert_eq!(counted(memory, things()), expected, "with {memory} bytes");
        }
        assert_eq!(counted(1000, []), Counted::default());
    }

    #[test]
    fn open_files_grow_with_the_logarithm() {
        let dir = tempfile::tempdir().unwrap();
        let mut distinct = Distinct::new(1, dir.path());
        for thing in 0..1000_u64 {
            distinct.add(digest(0, &thing.to_le_bytes()).unwrap(), 1).unwrap();
        }
        // 1000 = 3 * 256 + 14 * 16 + 8
        assert_eq!(distinct.tiers.iter().map(Vec::len).collect::<Vec<_>>(), [8, 14, 3]);
        assert_eq!(distinct.count().unwrap().distinct, 1000);
    }

    #[test]
    fn domains_are_apart() {
        assert_ne!(digest(0, b"x").unwrap(), digest(1, b"x").unwrap());
        assert_eq!(digest(1, b"x").unwrap(), digest(1, b"x").unwrap());
    }
}
