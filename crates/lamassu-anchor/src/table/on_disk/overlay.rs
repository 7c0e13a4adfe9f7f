//! A backend for verifying a file's database: what redb writes to repair it stays in memory.

use super::log::DATABASE_AT;
use parking_lot::Mutex;
use redb::StorageBackend;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const CHUNK_LEN: usize = 4096;

/// A database backend whose writes stay in memory. The file must not change while this is used.
#[derive(Debug)]
pub(super) struct Overlay {
    file: File,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    len: u64,
    /// Written chunks, by number.
    chunks: HashMap<u64, [u8; CHUNK_LEN]>,
}

impl Overlay {
    pub fn over(file: &File) -> io::Result<Overlay> {
        let file = file.try_clone()?;
        let len = file.metadata()?.len().saturating_sub(DATABASE_AT);
        Ok(Overlay { file, state: Mutex::new(State { len, chunks: HashMap::new() }) })
    }

    /// A chunk as in the file, padded with zeros.
    fn chunk(&self, number: u64) -> io::Result<[u8; CHUNK_LEN]> {
        let mut chunk = [0; CHUNK_LEN];
        let (mut at, mut filled) = (DATABASE_AT + number * CHUNK_LEN as u64, 0);
        while filled < CHUNK_LEN {
            match self.file.read_at(&mut chunk[filled..], at) {
                Ok(0) => break,
                Ok(read) => (filled, at) = (filled + read, at + read as u64),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(chunk)
    }
}

/// Divides a range by chunks: the chunk's number, the offset in it, the number of bytes.
fn parts(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, usize)> {
    let end = offset + len as u64;
    let mut at = offset;
    std::iter::from_fn(move || {
        let (number, within) = (at / CHUNK_LEN as u64, (at % CHUNK_LEN as u64) as usize);
        let more = usize::try_from(end - at).unwrap_or(usize::MAX).min(CHUNK_LEN - within);
        at += more as u64;
        (more > 0).then_some((number, within, more))
    })
}

impl StorageBackend for Overlay {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state.lock().len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = &*self.state.lock();
        let end = offset.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > state.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut out = out;
        for (number, within, more) in parts(offset, out.len()) {
            let (into, rest) = out.split_at_mut(more);
            match state.chunks.get(&number) {
                Some(chunk) => into.copy_from_slice(&chunk[within..within + more]),
                None => into.copy_from_slice(&self.chunk(number)?[within..within + more]),
            }
            out = rest;
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.state.lock().len = len;
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let state = &mut *self.state.lock();
        let mut data = data;
        for (number, within, more) in parts(offset, data.len()) {
            let (from, rest) = data.split_at(more);
            if let std::collections::hash_map::Entry::Vacant(vacant) = state.chunks.entry(number) {
                vacant.insert(self.chunk(number)?);
            }
            if let Some(chunk) = state.chunks.get_mut(&number) {
                chunk[within..within + more].copy_from_slice(from);
            }
            data = rest;
        }
        Ok(())
    }

    // The process that has the file open holds its locks.

    fn try_lock_range(&self, _: std::ops::Bound<u64>, _: std::ops::Bound<u64>) -> Result<bool, redb::BackendError> {
        Ok(true)
    }

    fn unlock_range(&self, _: std::ops::Bound<u64>, _: std::ops::Bound<u64>) -> Result<(), redb::BackendError> {
        Ok(())
    }
}
