//! Notes on which slots opened last on this host, and when: the slot that opened last is tried first, and lists of
//! slots show the times. A note has no other effect. A damaged or forged one costs time, shows false times, and chooses
//! among the slots that a key opens, where administrators' slots come before use-only ones.
//!
//! A header cannot record the use of a slot without being written each time. So each host keeps a file for each header,
//! in a directory that the front-end names; without one, nothing is noted. A note that cannot be written is no error. A
//! note holds only the ids of a header and its slots, and times.

use crate::hex;
use lamassu_keys::header_file::regular::{self, Links};
use lamassu_keys::unix_now;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The most bytes of the notes on a header: more than those on all the slots that one can have.
const NOTES_MAX: u64 = 1 << 20;

/// The notes on a header.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Used {
    /// the slot that opened last
    pub last: Option<u32>,
    /// when each slot last opened, in seconds since 1970
    pub times: BTreeMap<u32, u64>,
}

/// The place of notes.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    dir: Option<PathBuf>,
}

impl Notes {
    /// Notes in a directory, which is created when needed.
    pub fn within(dir: Option<PathBuf>) -> Notes {
        Notes { dir }
    }

    /// The notes on the header with this id.
    pub fn of(&self, id: &[u8; 16]) -> Used {
        let read = |dir: &PathBuf| read(&dir.join(file_name(id))).ok().flatten();
        self.dir.as_ref().and_then(read).and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
    }

    /// Notes that a slot has just opened its header.
    pub fn opened(&self, id: &[u8; 16], slot: u32) {
        let Some(dir) = &self.dir else { return };
        let mut used = self.of(id);
        used.times.insert(slot, unix_now());
        used.last = Some(slot);
        if let Err(error) = write(dir, id, &used) {
            tracing::debug!(%error, "the use of the slot is not noted");
        }
    }
}

/// What is no file is not opened, and nothing is read without end: the directory may be another user's.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = regular::find(path, Links::Followed, File::options().read(true))? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(NOTES_MAX).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn write(dir: &Path, id: &[u8; 16], used: &Used) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let (path, new) = (dir.join(file_name(id)), dir.join(format!("{}.{}", file_name(id), std::process::id())));
    // One of a process that was killed. The directory may be another user's, who has put a link there: it is not
    // followed.
    let _ = std::fs::remove_file(&new);
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(&serde_json::to_vec(used)?)?;
    std::fs::rename(new, path)
}

fn file_name(id: &[u8; 16]) -> String {
    format!("used-{}.json", hex(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_that_opened_last_is_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let notes = Notes::within(Some(dir.path().join("state")));
        assert_eq!(notes.of(&[7; 16]).last, None);
        notes.opened(&[7; 16], 3);
        notes.opened(&[7; 16], 1);
        let used = notes.of(&[7; 16]);
        assert_eq!((used.last, used.times.keys().copied().collect::<Vec<_>>()), (Some(1), vec![1, 3]));
        std::fs::write(dir.path().join("state").join(file_name(&[7; 16])), "damaged").unwrap();
        assert_eq!(notes.of(&[7; 16]).last, None);
        Notes::default().opened(&[7; 16], 3);
    }
}
