//! What a sealed file lies in while it comes to be or is read: a few parts in memory, or whatever fetches bytes.

use lamassu_store::backend::{Kind, SetTime, Stat, Time};
use lamassu_store::{BackendFile, BackendNode};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::Part;

/// Fetches bytes of a sealed file.
pub trait Source: Send + Sync {
    /// Bytes in all.
    fn size(&self) -> u64;
    /// Reads up to `buf.len()` bytes at `offset`; short only at the end.
    ///
    /// # Errors
    /// Those of where it lies.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
}

/// A file's bytes, and nothing of what a file system has besides.
pub(super) trait Bytes: Send + Sync {
    fn size(&self) -> u64;
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()>;
    fn set_size(&self, size: u64) -> io::Result<()>;
}

/// Such bytes as a backing file. It has no name, so nobody opens it again: an interruption leaves nothing of it.
pub(super) struct Loose<B>(pub B);

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

/// The parts of a file that is being sealed.
pub(super) struct Spool {
    part_len: u64,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    size: u64,
    parts: BTreeMap<u64, Vec<u8>>,
    taken: BTreeSet<u64>,
}

impl Spool {
    pub fn new(part_len: u64) -> Spool {
        Spool { part_len, held: Mutex::default() }
    }

    /// Takes the parts that end before `until` and have nothing of `held`; never the first one.
    pub fn take_complete(&self, until: u64, held: &Range<u64>) -> Vec<Part> {
        let state = &mut *self.held.lock();
        let numbers = state.parts.keys().copied().filter(|number| {
            let (start, end) = (number * self.part_len, (number + 1) * self.part_len);
            *number > 0 && end <= until && (held.is_empty() || end <= held.start || start >= held.end)
        });
        let numbers: Vec<u64> = numbers.collect();
        state.taken.extend(&numbers);
        numbers.into_iter().filter_map(|number| Some(Part { number, bytes: state.parts.remove(&number)? })).collect()
    }

    /// Whether a part was taken before.
    pub fn has_given(&self) -> bool {
        !self.held.lock().taken.is_empty()
    }

    /// Takes what is left; the last part ends where the file does.
    pub fn take_all(&self) -> Vec<Part> {
        let state = &mut *self.held.lock();
        let (size, part_len) = (state.size, self.part_len);
        let parts = std::mem::take(&mut state.parts);
        parts
            .into_iter()
            .filter(|(number, _)| number * part_len < size)
            .map(|(number, mut bytes)| {
                bytes.truncate(usize::try_from(size - number * part_len).unwrap_or(usize::MAX));
                Part { number, bytes }
            })
            .collect()
    }

    /// Calls `each` with the number of a part, the place in it, and what of `len` bytes at `offset` lies there.
    fn split(
        &self,
        offset: u64,
        len: usize,
        mut each: impl FnMut(u64, usize, Range<usize>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let within = at % self.part_len;
            let now = ((self.part_len - within) as usize).min(len - done);
            each(at / self.part_len, within as usize, done..done + now)?;
            done += now;
        }
        Ok(())
    }
}

impl Bytes for Spool {
    fn size(&self) -> u64 {
        self.held.lock().size
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let state = &*self.held.lock();
        let len = usize::try_from(state.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(buf.len());
        self.split(offset, len, |number, within, range| match state.parts.get(&number) {
            Some(part) => {
                let len = range.len();
                buf[range].copy_from_slice(&part[within..within + len]);
                Ok(())
            }
            None if state.taken.contains(&number) => Err(errno(libc::EIO)),
            None => {
                buf[range].fill(0);
                Ok(())
            }
        })?;
        Ok(len)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let state = &mut *self.held.lock();
        self.split(offset, data.len(), |number, within, range| {
            if state.taken.contains(&number) {
                return Err(errno(libc::EIO)); // a bug of the caller's: the part has left
            }
            let part = state.parts.entry(number).or_insert_with(|| vec![0; self.part_len as usize]);
            part[within..within + range.len()].copy_from_slice(&data[range]);
            Ok(())
        })?;
        state.size = state.size.max(offset + data.len() as u64);
        Ok(())
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        let state = &mut *self.held.lock();
        if size < state.size {
            let part_len = self.part_len;
            state.parts.retain(|number, _| number * part_len < size);
            if let Some(last) = state.parts.get_mut(&(size / part_len)) {
                last[(size % part_len) as usize..].fill(0);
            }
        }
        state.size = size;
        Ok(())
    }
}

/// A file that is read from somewhere.
pub(super) struct Fetched(pub Arc<dyn Source>);

impl Bytes for Fetched {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read_at(offset, buf)
    }

    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(errno(libc::EROFS))
    }

    fn set_size(&self, _: u64) -> io::Result<()> {
        Err(errno(libc::EROFS))
    }
}

impl<B: Bytes> BackendNode for Loose<B> {
    fn stat(&self) -> io::Result<Stat> {
        let (len, none) = (self.0.size(), Time::default());
        Ok(Stat {
            dev: 0,
            ino: 0,
            kind: Kind::File,
            mode: 0o600,
            nlink: 0,
            uid: 0,
            gid: 0,
            rdev: 0,
            len,
            blocks: len.div_ceil(512),
            atime: none,
            mtime: none,
            ctime: none,
            born: 0,
        })
    }
    fn set_times(&self, _: SetTime, _: SetTime) -> io::Result<()> {
        Ok(())
    }
    fn set_mode(&self, _: u32) -> io::Result<()> {
        Err(errno(libc::EOPNOTSUPP))
    }
    fn set_owner(&self, _: Option<u32>, _: Option<u32>) -> io::Result<()> {
        Err(errno(libc::EOPNOTSUPP))
    }
    fn get_xattr(&self, _: &OsStr) -> io::Result<Vec<u8>> {
        Err(errno(libc::ENODATA))
    }
    fn set_xattr(&self, _: &OsStr, _: &[u8], _: i32) -> io::Result<()> {
        Err(errno(libc::EOPNOTSUPP))
    }
    fn list_xattr(&self) -> io::Result<Vec<OsString>> {
        Ok(Vec::new())
    }
    fn remove_xattr(&self, _: &OsStr) -> io::Result<()> {
        Err(errno(libc::ENODATA))
    }
}

impl<B: Bytes> BackendFile for Loose<B> {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(offset, buf)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_size(len)
    }
    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }
    fn sync_all(&self) -> io::Result<()> {
        Ok(())
    }
    /// Zeros behind compressed blocks: they are zeros already, and whatever keeps the part sees that.
    fn punch(&self, _: u64, _: u64) -> io::Result<()> {
        Err(errno(libc::EOPNOTSUPP))
    }
    fn allocate(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn seek_data(&self, offset: u64) -> io::Result<Option<u64>> {
        Ok((offset < self.0.size()).then_some(offset))
    }
    fn seek_hole(&self, offset: u64) -> io::Result<Option<u64>> {
        let size = self.0.size();
        Ok((offset < size).then_some(size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_leave_when_they_are_complete() {
        let spool = Spool::new(8);
        spool.write(0, &[1; 40]).expect("written");
        let taken: Vec<u64> = spool.take_complete(33, &(18..20)).into_iter().map(|part| part.number).collect();
        assert_eq!(taken, [1, 3], "0 is the first, 2 is held, 4 goes on");
        assert!(spool.write(8, &[1]).is_err() && spool.read(8, &mut [0]).is_err());
        spool.set_size(35).expect("shorter");
        let left: Vec<_> = spool.take_all().into_iter().map(|part| (part.number, part.bytes.len())).collect();
        assert_eq!(left, [(0, 8), (2, 8), (4, 3)]);
    }
}
