//! When this user last opened a slot on this host: a note beside no vault, for `key list`, and so that the slot which opened last is tried first. Nothing is believed of
//! it but the order of trying: a note that is damaged, or somebody else's, costs time.
//!
//! A header cannot say when a slot was used without being written at each use, so each host keeps a note of its own, below `$STATE_DIRECTORY` (systemd),
//! `$XDG_STATE_HOME/lamassu` or `~/.local/state/lamassu`; where there is none of them, nothing is noted. A note that cannot be written fails nothing.
//! Never: holds more than the ids of a header and its slots, and times.

use crate::text;
use lamassu_keys::unix_now;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;

/// What is noted of a header.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Used {
    /// the slot that opened last
    pub last: Option<u32>,
    /// when each did: Unix seconds
    pub times: BTreeMap<u32, u64>,
}

/// What is noted of the header with this id.
pub fn of(id: &[u8; 16]) -> Used {
    let read = |dir: PathBuf| std::fs::read(dir.join(file_name(id))).ok();
    place().and_then(read).and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// Notes that a slot opened its header just now.
pub fn note(id: &[u8; 16], slot: u32) {
    let Some(dir) = place() else { return };
    let mut used = of(id);
    used.times.insert(slot, unix_now());
    used.last = Some(slot);
    if let Err(error) = write(&dir, id, &used) {
        tracing::debug!(%error, "the use of the slot is not noted");
    }
}

fn write(dir: &std::path::Path, id: &[u8; 16], used: &Used) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let (path, new) = (dir.join(file_name(id)), dir.join(format!("{}.{}", file_name(id), std::process::id())));
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(&serde_json::to_vec(used)?)?;
    std::fs::rename(new, path)
}

fn file_name(id: &[u8; 16]) -> String {
    format!("used-{}.json", text::hex(id))
}

fn place() -> Option<PathBuf> {
    let var = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    var("STATE_DIRECTORY")
        .or_else(|| var("XDG_STATE_HOME").map(|p| p.join("lamassu")))
        .or_else(|| var("HOME").map(|p| p.join(".local/state/lamassu")))
}
