//! Taking old headers off the disk: their bytes are overwritten where they lie, before the file system forgets where that was.
//!
//! This reaches the blocks that the file has now. Where a store writes elsewhere instead (copy-on-write, a snapshot that shares the blocks, flash behind its
//! translation layer, a journal of data), the old bytes stay: `docs/threat-model.md` says so, and so does every receipt.

use super::steps::{self, Erasing};
use super::{FileError, sync_dir_of, writing};
use lamassu_format::header::HEADER_MAX;
use rustix::fs::{FallocateFlags, OFlags};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file whose content is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Erased {
    /// its name, in the vault's directory
    pub file: String,
    /// how many bytes were overwritten and synced
    pub bytes: u64,
    /// whether the store then gave their blocks back
    pub punched: bool,
    /// other names of the same file (hard links), which lead to the overwritten bytes now
    pub other_names: u64,
}

/// Overwrites a file, syncs it, gives its blocks back and removes it. `None` where there is none, or something else than a regular file: that holds no header.
///
/// # Errors
/// [`FileError::Write`].
pub fn file(path: &Path) -> Result<Option<Erased>, FileError> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match OpenOptions::new().write(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(_) if path.symlink_metadata().is_ok_and(|m| !m.is_file()) => return Ok(None),
        Err(e) => return Err(writing("open", path)(e)),
    };
    let meta = file.metadata().map_err(writing("stat", path))?;
    if !meta.is_file() {
        return Ok(None);
    }
    let mut on_disk = OnDisk { path: path.into(), file, punched: false };
    steps::erase(&mut on_disk)?;
    Ok(Some(Erased {
        file: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        bytes: meta.len().min(HEADER_MAX as u64),
        punched: on_disk.punched,
        other_names: meta.nlink().saturating_sub(1),
    }))
}

/// `f_type` of statfs(2): FUSE, 9p, CIFS and SMB 2. What fsync(2) of a directory says there is nothing that the machine below has promised.
const NAMES_UNSURE: [u64; 4] = [0x6573_5546, 0x0102_1997, 0xFF53_4D42, 0xFE53_4D42];

/// Whether a rename that was synced is durable. Where it may not be, a power cut at the server can bring the old name back, which must then lead to the old
/// header and not to noise.
fn keeps_names(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|st| !NAMES_UNSURE.contains(&(st.f_type as u64 & 0xffff_ffff)))
}

/// Overwrites a file that was replaced, durably, where no name leads to it any more: another name is somebody's copy. The change it belonged to has been made,
/// so a failure is none of that.
pub(super) fn unnamed(file: &File) {
    let is_unnamed = file.metadata().is_ok_and(|m| m.is_file() && m.nlink() == 0) && keeps_names(file);
    if is_unnamed && let Err(error) = overwrite(file).and_then(|()| punch(file)) {
        tracing::debug!(%error, "the header that was replaced could not be overwritten");
    }
}

/// Overwrites a file with random bytes, and syncs it; nothing where it is empty. Never more than a header can have: another file could be endless.
pub(super) fn overwrite(file: &File) -> io::Result<()> {
    const CHUNK: usize = 64 << 10;
    let len = file.metadata()?.len().min(HEADER_MAX as u64);
    let mut noise = vec![0; CHUNK];
    let mut offset = 0;
    while offset < len {
        let n = CHUNK.min(usize::try_from(len - offset).unwrap_or(CHUNK));
        lamassu_crypto::random(&mut noise[..n]).map_err(io::Error::other)?;
        file.write_all_at(&noise[..n], offset)?;
        offset += n as u64;
    }
    if len > 0 { file.sync_all() } else { Ok(()) }
}

fn punch(file: &File) -> io::Result<()> {
    let len = file.metadata()?.len().min(HEADER_MAX as u64);
    if len > 0 {
        rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, len)?;
    }
    Ok(())
}

struct OnDisk {
    path: PathBuf,
    file: File,
    punched: bool,
}

impl Erasing for OnDisk {
    type Error = FileError;

    fn overwrite(&mut self) -> Result<(), FileError> {
        overwrite(&self.file).map_err(writing("overwrite", &self.path))
    }

    fn sync(&mut self) -> Result<(), FileError> {
        self.file.sync_all().map_err(writing("sync", &self.path))
    }

    fn punch(&mut self) -> Result<(), FileError> {
        // The bytes are gone already: a store that cannot give blocks back keeps noise.
        self.punched = punch(&self.file).is_ok();
        Ok(())
    }

    fn remove(&mut self) -> Result<(), FileError> {
        std::fs::remove_file(&self.path).map_err(writing("remove", &self.path))
    }

    fn sync_dir(&mut self) -> Result<(), FileError> {
        sync_dir_of(&self.path)
    }
}
