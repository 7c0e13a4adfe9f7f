//! One simulated backing file that remembers every write and barrier, and rebuilds what a crash may leave.
#![allow(dead_code)]

use lamassu_crypto::{Engine, KeyRing, Secret};
use lamassu_format::{Geometry, Suite};
use lamassu_store::backend::{BackendFile, Kind, SetTime, Stat, Time};
use lamassu_store::file::{Durability, FileContext, Integrity};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::Arc;

pub const SECTOR: u64 = 4096;
type Sector = Arc<[u8; SECTOR as usize]>;

#[derive(Clone, Default)]
pub struct Image {
    pub sectors: BTreeMap<u64, Sector>,
    pub len: u64,
}

#[derive(Clone)]
pub enum Op {
    Write(u64, Arc<[u8]>),
    SetLen(u64),
    Punch(u64, u64),
    Sync,
}

impl Image {
    fn put(&mut self, offset: u64, data: &[u8]) {
        let mut at = offset;
        while at < offset + data.len() as u64 {
            let (sector, from) = (at / SECTOR, (at % SECTOR) as usize);
            let n = (SECTOR as usize - from).min((offset + data.len() as u64 - at) as usize);
            let entry = self.sectors.entry(sector).or_insert_with(|| Arc::new([0; SECTOR as usize]));
            Arc::make_mut(entry)[from..from + n].copy_from_slice(&data[(at - offset) as usize..][..n]);
            at += n as u64;
        }
        self.len = self.len.max(offset + data.len() as u64);
    }

    fn zero(&mut self, offset: u64, len: u64) {
        assert!(offset % SECTOR == 0 && len % SECTOR == 0, "punches are aligned");
        for sector in offset / SECTOR..(offset + len) / SECTOR {
            self.sectors.remove(&sector);
        }
    }

    pub fn apply(&mut self, op: &Op) {
        match op {
            Op::Write(offset, data) => self.put(*offset, data),
            Op::SetLen(len) => {
                self.len = *len;
                assert!(len % SECTOR == 0);
                self.sectors.split_off(&(len / SECTOR));
            }
            Op::Punch(offset, len) => self.zero(*offset, *len),
            Op::Sync => {}
        }
    }

    /// Applies a random part of `op`: `atom` bytes are written whole or not at all.
    pub fn apply_part(&mut self, op: &Op, atom: u64, rng: &mut Rng, keep_percent: u64) {
        match op {
            Op::Write(offset, data) => {
                let atom = if data.len() as u64 % atom == 0 { atom } else { SECTOR };
                for (i, piece) in data.chunks(atom as usize).enumerate() {
                    if rng.below(100) < keep_percent {
                        self.put(offset + i as u64 * atom, piece);
                    }
                }
            }
            Op::Punch(offset, len) => {
                let atom = if len % atom == 0 { atom } else { SECTOR };
                for at in (*offset..offset + len).step_by(atom as usize) {
                    if rng.below(100) < keep_percent {
                        self.zero(at, atom);
                    }
                }
            }
            Op::SetLen(_) if rng.below(100) < keep_percent => self.apply(op),
            Op::SetLen(_) | Op::Sync => {}
        }
    }
}

/// SplitMix64.
pub struct Rng(pub u64);
impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e3779b97f4a7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
        z ^ (z >> 31)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

#[derive(Default)]
pub struct Inner {
    pub image: Image,
    pub log: Vec<Op>,
    pub recording: bool,
    /// Sabotage: barriers are acknowledged and not recorded.
    pub lying: bool,
    pub fail_after: Option<u64>,
    pub fail_syncs: u32,
    pub mtime: Time,
}

#[derive(Clone, Default)]
pub struct SimFile(pub Arc<Mutex<Inner>>);

impl SimFile {
    pub fn of(image: Image) -> SimFile {
        SimFile(Arc::new(Mutex::new(Inner { image, ..Inner::default() })))
    }
    pub fn recording() -> SimFile {
        let file = SimFile::default();
        file.0.lock().recording = true;
        file
    }
    pub fn image(&self) -> Image {
        self.0.lock().image.clone()
    }
    pub fn flip(&self, offset: u64) {
        let mut inner = self.0.lock();
        let sector = inner.image.sectors.get_mut(&(offset / SECTOR)).expect("there is data to damage");
        Arc::make_mut(sector)[(offset % SECTOR) as usize] ^= 0x10;
    }
    fn op(&self, op: Op) -> io::Result<()> {
        let mut inner = self.0.lock();
        if let (Op::Write(..), Some(left)) = (&op, inner.fail_after.as_mut()) {
            if *left == 0 {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            *left -= 1;
        }
        inner.image.apply(&op);
        if inner.recording && !(inner.lying && matches!(op, Op::Sync)) {
            inner.log.push(op);
        }
        Ok(())
    }
}

impl BackendFile for SimFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let inner = self.0.lock();
        let n = inner.image.len.saturating_sub(offset).min(buf.len() as u64) as usize;
        let mut at = 0;
        while at < n {
            let (sector, from) = ((offset + at as u64) / SECTOR, ((offset + at as u64) % SECTOR) as usize);
            let take = (SECTOR as usize - from).min(n - at);
            match inner.image.sectors.get(&sector) {
                Some(bytes) => buf[at..at + take].copy_from_slice(&bytes[from..from + take]),
                None => buf[at..at + take].fill(0),
            }
            at += take;
        }
        Ok(n)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.op(Op::Write(offset, data.into()))
    }
    fn stat(&self) -> io::Result<Stat> {
        let inner = self.0.lock();
        let mtime = inner.mtime;
        Ok(Stat {
            dev: 1,
            ino: 2,
            kind: Kind::File,
            mode: 0o644,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            len: inner.image.len,
            blocks: 0,
            atime: mtime,
            mtime,
            ctime: mtime,
        })
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.op(Op::SetLen(len))
    }
    fn sync_data(&self) -> io::Result<()> {
        {
            let mut inner = self.0.lock();
            if inner.fail_syncs > 0 {
                inner.fail_syncs -= 1;
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
        }
        self.op(Op::Sync)
    }
    fn sync_all(&self) -> io::Result<()> {
        self.sync_data()
    }
    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.op(Op::Punch(offset, len))
    }
    fn allocate(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn seek_data(&self, offset: u64) -> io::Result<Option<u64>> {
        let inner = self.0.lock();
        let next = inner.image.sectors.range(offset / SECTOR..).next().map(|(s, _)| (s * SECTOR).max(offset));
        Ok(next.filter(|at| *at < inner.image.len))
    }
    fn seek_hole(&self, offset: u64) -> io::Result<Option<u64>> {
        Ok(Some(offset))
    }
    fn set_times(&self, _: SetTime, mtime: SetTime) -> io::Result<()> {
        if let SetTime::At(time) = mtime {
            self.0.lock().mtime = time;
        }
        Ok(())
    }
    fn set_mode(&self, _: u32) -> io::Result<()> {
        Ok(())
    }
    fn set_owner(&self, _: Option<u32>, _: Option<u32>) -> io::Result<()> {
        Ok(())
    }
    fn get_xattr(&self, _: &OsStr) -> io::Result<Vec<u8>> {
        Err(io::Error::from_raw_os_error(libc::ENODATA))
    }
    fn set_xattr(&self, _: &OsStr, _: &[u8], _: i32) -> io::Result<()> {
        Ok(())
    }
    fn list_xattr(&self) -> io::Result<Vec<OsString>> {
        Ok(vec![])
    }
    fn remove_xattr(&self, _: &OsStr) -> io::Result<()> {
        Ok(())
    }
}

pub struct Setup {
    pub suite: Suite,
    pub block_size: u32,
    pub reserved: u16,
    pub integrity: Integrity,
    pub read_only: bool,
    pub convergent: bool,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            suite: Suite::Aes,
            block_size: 4096,
            reserved: 62,
            integrity: Integrity::Full,
            read_only: false,
            convergent: true,
        }
    }
}

impl Setup {
    pub fn context(&self) -> Arc<FileContext> {
        let ring = KeyRing::new(self.suite, &[Secret::new(&mut [1; 32])], &[Secret::new(&mut [2; 32])]);
        Arc::new(FileContext {
            ring,
            geometry: Geometry::new(self.block_size, self.reserved).expect("good geometry"),
            engine: Arc::new(Engine::new(1)),
            integrity: self.integrity,
            durability: Durability::Ordered,
            convergent_small_files: self.convergent,
            read_only: self.read_only,
            report: Arc::new(|_, _| {}),
        })
    }
}

/// Bytes that tell what wrote them.
pub fn fill(len: usize, rng: &mut Rng) -> Vec<u8> {
    let seed = rng.next();
    (0..len).map(|i| (seed >> (i % 7 * 8)) as u8 ^ (i / 512) as u8).map(|b| b | 1).collect()
}
