//! What a scrub remembers of itself (`--state`), so that the next one goes on where it was stopped.
//!
//! A file is in it once all of it was as the anchor says. What was found, or could not be told, is not: the scrub that
//! goes on looks at it again, and tells it again, so that its exit code is that of the whole. Nor is a file that has
//! changed in the anchor since.

use crate::fault::{Fault, Result};
use lamassu_anchor::ObjectId;
use lamassu_host::Error;
use lamassu_vault::scrub::RowDigest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// The bit of a directory's mode: only their owners remove and rename files in it.
const STICKY: u32 = 0o1000;

/// What was verified, by vault.
#[derive(Serialize, Deserialize, Default)]
pub struct State {
    vault: String,
    /// the objects whose files were verified, by number, and the digests of their rows
    verified: BTreeMap<u64, u64>,
    /// the same of datasets, by their ids
    #[serde(default)]
    datasets: BTreeMap<String, BTreeMap<u64, u64>>,
}

impl State {
    /// The state in a file, which may not be there yet. Another file than the state of a scrub of this vault is
    /// refused: it would be replaced, and removed in the end. So is one that others may write: whoever can have files
    /// skipped can hide damage.
    pub fn read(file: &Path, dir: &Path, vault: &str) -> Result<State> {
        let refused = || Fault::NotAScrubState { path: file.to_owned() };
        let local = |source| Error::Local { op: "read", path: file.to_owned(), source };
        let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let parent = parent.canonicalize().map_err(local)?;
        if parent.starts_with(dir.canonicalize().map_err(local)?) {
            return Err(refused().into());
        }
        let own_uid = rustix::process::geteuid().as_raw();
        // In a directory of others an older state of this user could be put in its place.
        let st = parent.metadata().map_err(local)?;
        let is_others = st.mode() & 0o022 != 0 && st.mode() & STICKY == 0;
        if is_others || (st.uid() != own_uid && st.uid() != 0) {
            return Err(Fault::ScrubStateOfOthers { path: file.to_owned() }.into());
        }
        let bytes = match file.symlink_metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(State::of(vault)),
            Ok(st) if !st.is_file() => return Err(refused().into()),
            Ok(_) => {
                let mut open = std::fs::File::open(file).map_err(local)?;
                let st = open.metadata().map_err(local)?;
                if st.uid() != own_uid || st.mode() & 0o022 != 0 {
                    return Err(Fault::ScrubStateOfOthers { path: file.to_owned() }.into());
                }
                let mut bytes = Vec::new();
                open.read_to_end(&mut bytes).map_err(local)?;
                bytes
            }
            Err(error) => return Err(local(error).into()),
        };
        // A power cut may have left it empty, on a file system that does not order a rename behind the content.
        if bytes.is_empty() {
            return Ok(State::of(vault));
        }
        let read: State = serde_json::from_slice(&bytes).map_err(|_| refused())?;
        if read.vault == vault { Ok(read) } else { Err(refused().into()) }
    }

    /// The state of a scrub that has verified nothing yet.
    pub fn of(vault: &str) -> State {
        State { vault: vault.into(), ..State::default() }
    }

    pub fn add(&mut self, vault: &str, object: ObjectId, row: RowDigest) {
        let verified = match vault == self.vault {
            true => &mut self.verified,
            false => self.datasets.entry(vault.into()).or_default(),
        };
        verified.insert(object.0, row.0);
    }

    pub fn has(&self, vault: &str, object: ObjectId, row: RowDigest) -> bool {
        let verified = if vault == self.vault { Some(&self.verified) } else { self.datasets.get(vault) };
        verified.is_some_and(|verified| verified.get(&object.0) == Some(&row.0))
    }

    /// Whole or not at all: it is written under a temporary name, then renamed. For this user alone.
    pub fn write(&self, file: &Path) -> std::io::Result<()> {
        let mut beside = file.as_os_str().to_owned();
        beside.push(".new");
        let bytes = serde_json::to_vec(self).map_err(std::io::Error::other)?;
        match std::fs::remove_file(&beside) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let new = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside);
        let mut new = new?;
        new.write_all(&bytes)?;
        new.sync_all()?;
        std::fs::rename(&beside, file)
    }
}
