//! Tables in memory, for tests. They can show the state that a crash would leave.

use super::{Change, Space, Table, Visit};
use crate::AnchorError;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::Path;

type Rows = BTreeMap<(Space, Vec<u8>), Vec<u8>>;

/// Tables that vanish with the process. A clone has the state at its making.
#[derive(Default)]
pub struct MemoryTable {
    state: Mutex<State>,
}

#[derive(Clone, Default)]
struct State {
    rows: Rows,
    commits: u64,
    refusing: Option<i32>,
}

impl MemoryTable {
    /// The number of commits.
    pub fn commits(&self) -> u64 {
        self.state.lock().commits
    }

    /// Makes every commit fail with this errno from now on; `None`: no more.
    pub fn refuse(&self, errno: Option<i32>) {
        self.state.lock().refusing = errno;
    }

    /// Bytes of all keys and values.
    pub fn bytes(&self) -> usize {
        self.state.lock().rows.iter().map(|((_, key), value)| key.len() + value.len()).sum()
    }
}

/// Hashes the rows only.
impl Hash for MemoryTable {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.state.lock().rows.hash(hasher);
    }
}

impl Clone for MemoryTable {
    fn clone(&self) -> Self {
        MemoryTable { state: Mutex::new(self.state.lock().clone()) }
    }
}

impl Table for MemoryTable {
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
        Ok(self.state.lock().rows.get(&(space, key.to_vec())).cloned())
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), AnchorError> {
        let from = (space, prefix.to_vec());
        let is_meant = |key: &(Space, Vec<u8>)| key.0 == space && key.1.starts_with(prefix);
        // Copied first: `visit` may use this table.
        let found: Vec<_> = {
            let rows = &self.state.lock().rows;
            let found = rows.range(from..).take_while(|(key, _)| is_meant(key));
            found.map(|((_, key), value)| (key.clone(), value.clone())).collect()
        };
        for (key, value) in found {
            if visit(&key, &value).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError> {
        let state = &mut *self.state.lock();
        if let Some(errno) = state.refusing {
            return Err(AnchorError::io("commit to", Path::new("in memory"))(io::Error::from_raw_os_error(errno)));
        }
        for Change { space, key, value } in changes.iter().cloned() {
            match value {
                Some(value) => state.rows.insert((space, key), value),
                None => state.rows.remove(&(space, key)),
            };
        }
        state.commits += 1;
        Ok(())
    }
}
