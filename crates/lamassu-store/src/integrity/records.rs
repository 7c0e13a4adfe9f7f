//! Where the records of a tree lie.

use crate::BackendFile;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// A file of tree records, whose content is not trusted.
pub trait Records: Send + Sync {
    /// Reads a record; bytes past the end are zero.
    ///
    /// # Errors
    /// Those of the store.
    fn read(&self, offset: u64, record: &mut [u8]) -> io::Result<()>;
    /// Writes a record.
    ///
    /// # Errors
    /// Those of the store; they cost a rebuild later.
    fn write(&self, offset: u64, record: &[u8]) -> io::Result<()>;
}

/// A backing file. It is never synced.
pub struct FileRecords(pub Arc<dyn BackendFile>);

impl Records for FileRecords {
    fn read(&self, offset: u64, record: &mut [u8]) -> io::Result<()> {
        let got = self.0.read_at(offset, record)?;
        record[got..].fill(0);
        Ok(())
    }

    fn write(&self, offset: u64, record: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, record)
    }
}

/// In memory, for tests. It remembers every read.
#[derive(Default)]
pub struct MemoryRecords {
    records: Mutex<HashMap<u64, Vec<u8>>>,
    reads: Mutex<Vec<u64>>,
}

impl MemoryRecords {
    /// Offsets read so far.
    pub fn reads(&self) -> Vec<u64> {
        self.reads.lock().clone()
    }

    /// Changes the bytes of every record, as a store may.
    pub fn change(&self, mut change: impl FnMut(u64, &mut Vec<u8>)) {
        self.records.lock().iter_mut().for_each(|(offset, record)| change(*offset, record));
    }

    /// Loses all records.
    pub fn clear(&self) {
        self.records.lock().clear();
    }
}

impl Records for MemoryRecords {
    fn read(&self, offset: u64, record: &mut [u8]) -> io::Result<()> {
        self.reads.lock().push(offset);
        record.fill(0);
        if let Some(bytes) = self.records.lock().get(&offset) {
            let len = bytes.len().min(record.len());
            record[..len].copy_from_slice(&bytes[..len]);
        }
        Ok(())
    }

    fn write(&self, offset: u64, record: &[u8]) -> io::Result<()> {
        self.records.lock().insert(offset, record.to_vec());
        Ok(())
    }
}
