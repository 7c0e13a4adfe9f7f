//! What programs ask for.

use lamassu_lease::locks::{Asked, Lock, LockKey, LockKind, Range};
use lamassu_lease::{Mode, Object};

const FILE: Object = Object(7);
/// The two bytes, and the whole file.
pub const CELLS: usize = 3;

/// The mode in which each cell is locked.
pub type Cells = [Option<Mode>; CELLS];

/// What a program asks for: the first and the last cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Want {
    pub cells: (usize, usize),
    /// `None`: to unlock.
    pub mode: Option<Mode>,
    pub waits: bool,
}

impl Want {
    pub fn lock(cells: (usize, usize), mode: Mode, waits: bool) -> Want {
        Want { cells, mode: Some(mode), waits }
    }

    pub fn unlock(cells: (usize, usize)) -> Want {
        Want { cells, mode: None, waits: false }
    }

    pub fn is_whole(self) -> bool {
        self.cells.0 == CELLS - 1
    }

    pub fn asked(self, owner: usize) -> Asked {
        let kind = if self.is_whole() { LockKind::Whole } else { LockKind::Range };
        let bytes = Range::new(self.cells.0 as u64, self.cells.1 as u64).unwrap();
        let range = if self.is_whole() { Range::ALL } else { bytes };
        let key = LockKey { file: FILE, kind, owner: owner as u64 };
        match self.mode {
            Some(mode) => {
                Asked::Lock { lock: Lock { key, range, mode, pid: 1 }, handle: owner as u64, waits: self.waits }
            }
            None => Asked::Unlock { key, range },
        }
    }

    /// The program can no longer rely on what this request may take from it. flock(2) gives a lock up before it waits
    /// for another mode.
    pub fn weakens(self, cells: &mut Cells) {
        for cell in &mut cells[self.cells.0..=self.cells.1] {
            let is_other = self.is_whole() && *cell != self.mode;
            *cell = if is_other { None } else { (*cell).min(self.mode) };
        }
    }
}
