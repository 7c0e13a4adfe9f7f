//! Erases old headers: their bytes are overwritten in place, before the file system forgets where they are.
//!
//! This reaches only the blocks that the file has now. If a store writes elsewhere (copy-on-write, a snapshot that
//! shares the blocks, flash behind its translation layer, a data journal), the old bytes stay. `docs/threat-model.md`
//! and every receipt say so.

use super::error::{reading, writing};
use super::regular::{self, Links};
use super::steps::{self, Erasing};
use super::{FileError, dir_of, is_same, sync_dir_of};
use lamassu_format::header::{HEADER_MAX, Header, VaultHeader, VaultId};
use rustix::fs::FallocateFlags;
use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A file whose content is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Erased {
    /// its name, in the vault's directory
    pub file: String,
    /// number of bytes that were overwritten and synced
    pub bytes: u64,
    /// whether the store then freed their blocks
    pub punched: bool,
    /// other names of the same file (hard links), which now lead to the overwritten bytes
    pub other_names: u64,
}

/// The result for a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// There is none, or it is not a regular file and so no header.
    Nothing,
    /// Overwritten and removed.
    Erased(Erased),
    /// It is not a header of the vault, or cannot be read, and has other names: someone else's file, linked there by
    /// someone who can write to the store.
    Left,
}

/// Overwrites a file, syncs it, frees its blocks and removes it, if it is an old header of the vault `id`. If it is the
/// one in place, at `header`, it only loses this name. So does one that says that the keys are destroyed: it has none,
/// and is in place under another name, where names of one file show different numbers.
///
/// # Errors
/// [`FileError::Read`], [`FileError::Write`].
pub fn file(path: &Path, header: &Path, id: &VaultId) -> Result<Outcome, FileError> {
    named_or_not(path, header, id, false)
}

/// The same, but the file keeps its name: [`has_left`] finds it.
pub(crate) fn content(path: &Path, header: &Path, id: &VaultId) -> Result<Outcome, FileError> {
    named_or_not(path, header, id, true)
}

fn named_or_not(path: &Path, header: &Path, id: &VaultId, keeps_name: bool) -> Result<Outcome, FileError> {
    let Some((file, meta)) = regular(path)? else { return Ok(Outcome::Nothing) };
    let is_in_place = match header.symlink_metadata() {
        Ok(m) => (m.dev(), m.ino()) == (meta.dev(), meta.ino()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        // Without an answer it may be that one.
        Err(e) => return Err(writing("stat", header)(e)),
    };
    let found = header_of(&file, id);
    if is_in_place || matches!(&found, Ok(Some(found)) if found.destroyed().is_some()) {
        if keeps_name {
            return Ok(Outcome::Nothing);
        }
        return std::fs::remove_file(path).map(|()| Outcome::Nothing).map_err(writing("remove", path));
    }
    match found {
        Ok(found) if found.is_none() && meta.nlink() > 1 => return Ok(Outcome::Left),
        Ok(_) => {}
        Err(_) if meta.nlink() > 1 => return Ok(Outcome::Left),
        // Its bad blocks are overwritten too.
        Err(_) if keeps_names(path).map_err(writing("look at", path))? => {}
        Err(e) => return Err(reading("read", path)(e)),
    }
    opened(&file, &meta, path, keeps_name).map(Outcome::Erased)
}

/// Whether [`file`] would erase something. A file without another name may be half overwritten by an interrupted run.
/// Others must be headers of the vault by their content.
///
/// # Errors
/// [`FileError::Read`], [`FileError::Write`].
pub fn has_left(path: &Path, id: &VaultId) -> Result<bool, FileError> {
    match regular(path)? {
        None => Ok(false),
        Some((_, meta)) if meta.nlink() <= 1 => Ok(true),
        Some((file, _)) => header_of(&file, id).map(|found| found.is_some()).map_err(reading("read", path)),
    }
}

/// The content of a file, if it is a header of the vault `id`.
fn header_of(file: &File, id: &VaultId) -> io::Result<Option<VaultHeader>> {
    let mut bytes = vec![0; HEADER_MAX + 1];
    let len = file.read_at(&mut bytes, 0)?;
    Ok(VaultHeader::parse(&bytes[..len]).ok().filter(|header| header.id() == *id))
}

/// Opens the regular file at `path` once: all checks and changes then apply to the same file.
fn regular(path: &Path) -> Result<Option<(File, Metadata)>, FileError> {
    let file = match regular::find(path, Links::Refused, OpenOptions::new().read(true)) {
        Ok(Some(file)) => file,
        Ok(None) => return Ok(None),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(writing("open", path)(e)),
    };
    let meta = file.metadata().map_err(writing("stat", path))?;
    Ok(Some((file, meta)))
}

/// Erases the open file at `path`. What took its place is durable before: a power cut would bring the noise back.
fn opened(file: &File, meta: &Metadata, path: &Path, keeps_name: bool) -> Result<Erased, FileError> {
    sync_dir_of(path)?;
    let file = writable(file).map_err(writing("open", path))?;
    let mut on_disk = OnDisk { path: path.into(), file, punched: false, keeps_name };
    steps::erase(&mut on_disk)?;
    Ok(Erased {
        file: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        bytes: meta.len().min(HEADER_MAX as u64),
        punched: on_disk.punched,
        other_names: meta.nlink().saturating_sub(1),
    })
}

/// Overwrites and empties the open file at `path`, durably. `None`: it was empty.
pub(super) fn emptied(file: &File, path: &Path) -> Result<Option<Erased>, FileError> {
    let meta = file.metadata().map_err(writing("stat", path))?;
    if meta.len() == 0 {
        return Ok(None);
    }
    overwrite(file).map_err(writing("overwrite", path))?;
    let punched = punch(file).is_ok();
    file.set_len(0).and_then(|()| file.sync_all()).map_err(writing("truncate", path))?;
    Ok(Some(Erased {
        file: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        bytes: meta.len().min(HEADER_MAX as u64),
        punched,
        other_names: meta.nlink().saturating_sub(1),
    }))
}

/// Removes what is at `path`, usually a replaced header. It is overwritten first, unless another name leads to it,
/// which is someone's copy, or the store may lose the name of the header that replaced it. What cannot be looked at
/// keeps its name.
///
/// # Errors
/// [`FileError::Write`].
pub fn replaced(path: &Path) -> Result<(), FileError> {
    if let Some((file, meta)) = regular(path)?
        && meta.nlink() == 1
        && keeps_names(path).map_err(writing("look at", path))?
    {
        return opened(&file, &meta, path, false).map(drop);
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(writing("remove", path)(e)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// The same for the header `old`, which was open before it was replaced, and has had the name `path` since then. By now
/// `path` may be another file.
pub(super) fn replaced_header(old: &File, path: &Path) -> Result<(), FileError> {
    let meta = old.metadata().map_err(writing("stat", path))?;
    let is_there = is_same(old, path).map_err(writing("stat", path))?;
    let keeps_names = keeps_names(path).map_err(writing("look at", path))?;
    match (is_there, meta.nlink()) {
        (true, 1) if meta.is_file() && keeps_names => opened(old, &meta, path, false).map(drop),
        (true, _) => std::fs::remove_file(path).map_err(writing("remove", path)),
        (false, _) => unnamed(old, path),
    }
}

/// Erases the header `old` of the vault `id`, which was replaced and kept as `path`, if it has lost that name and has
/// no other. Not every file system counts names: where one is counted, it must be a header of the vault by its content.
/// Behind a server that count means nothing, nor do the numbers of files.
pub(super) fn nameless(old: &File, path: &Path, id: &VaultId) -> Result<Option<Erased>, FileError> {
    let meta = old.metadata().map_err(writing("stat", path))?;
    let counts = keeps_names(path).map_err(writing("look at", path))?;
    let is_there = match path.symlink_metadata() {
        Ok(there) => !counts || (there.dev(), there.ino()) == (meta.dev(), meta.ino()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        Err(e) => return Err(writing("stat", path)(e)),
    };
    let may_be_erased = match meta.nlink() {
        _ if is_there || !meta.is_file() => false,
        0 => true,
        1 => counts && header_of(old, id).map_err(reading("read", path))?.is_some(),
        _ => false,
    };
    match may_be_erased {
        true => emptied(&writable(old).map_err(writing("open", path))?, path),
        false => Ok(None),
    }
}

/// The same regular file, opened for writing. If its owner has removed the write permission, it is set: the file is
/// erased anyway.
pub(super) fn writable(file: &File) -> io::Result<File> {
    let again = || OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()));
    match again() {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            let mode = file.metadata()?.mode() & 0o7777;
            file.set_permissions(Permissions::from_mode(mode | 0o200))?;
            again()
        }
        done => done,
    }
}

/// `f_type` of statfs(2): FUSE, 9p, CIFS and SMB 2. There, fsync(2) of a directory does not guarantee what the machine
/// below has stored.
const NAMES_UNSURE: [u64; 4] = [0x6573_5546, 0x0102_1997, 0xFF53_4D42, 0xFE53_4D42];

/// `f_type` of NFS. If a file is open that loses its name, it is first renamed aside.
const RENAMES_OPEN: u64 = 0x6969;

fn type_of(path: &Path) -> io::Result<u64> {
    Ok(rustix::fs::statfs(dir_of(path))?.f_type as u64 & 0xffff_ffff)
}

/// Whether a rename that was synced is durable. If not, a power cut at the server can bring the old name back, which
/// must then lead to the old header and not to noise. There, numbers of files and of their names mean nothing either.
pub(super) fn keeps_names(path: &Path) -> io::Result<bool> {
    Ok(!NAMES_UNSURE.contains(&type_of(path)?))
}

/// Whether a file that is open when it loses its name stays open, without a name. Where it gets another one first, as
/// on NFS and behind libfuse, it must not be open: for a moment no name would lead to a header.
pub(super) fn keeps_nameless(path: &Path) -> io::Result<bool> {
    let found = type_of(path)?;
    Ok(found != RENAMES_OPEN && !NAMES_UNSURE.contains(&found))
}

/// Overwrites a file that was replaced at `path`, durably, if no name leads to it: another name is someone's copy.
pub(super) fn unnamed(file: &File, path: &Path) -> Result<(), FileError> {
    let meta = file.metadata().map_err(writing("stat what was at", path))?;
    if !meta.is_file() || meta.nlink() > 0 || !keeps_names(path).map_err(writing("look at", path))? {
        return Ok(());
    }
    let done = writable(file).and_then(|file| overwrite(&file).map(|()| file));
    // A store that cannot free blocks keeps noise.
    done.map(|file| drop(punch(&file))).map_err(writing("overwrite what was at", path))
}

/// Overwrites a file with random bytes, and syncs it; not if it is empty. At most the length of a header is written:
/// another file could be endless.
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
    keeps_name: bool,
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
        // The bytes are gone already: a store that cannot free blocks keeps noise.
        self.punched = punch(&self.file).is_ok();
        Ok(())
    }

    fn remove(&mut self) -> Result<(), FileError> {
        if self.keeps_name {
            return Ok(());
        }
        std::fs::remove_file(&self.path).map_err(writing("remove", &self.path))
    }

    fn sync_dir(&mut self) -> Result<(), FileError> {
        sync_dir_of(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Between the moment when the old header is found to have one name and the moment when it is overwritten, the
    /// store puts another file in its place.
    #[test]
    fn a_file_that_was_put_in_the_place_of_the_old_header_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let [kept, away, foreign] = ["kept", "away", "foreign"].map(|name| dir.path().join(name));
        fs::write(&kept, b"old header").unwrap();
        fs::write(&foreign, b"somebody's").unwrap();
        let old = regular::open(&kept).unwrap();
        fs::rename(&kept, &away).unwrap();
        fs::hard_link(&foreign, &kept).unwrap();
        replaced_header(&old, &kept).unwrap();
        assert_eq!(
            (fs::read(&foreign).unwrap(), fs::read(&away).unwrap()),
            (b"somebody's".to_vec(), b"old header".to_vec())
        );
        // Nor where it is met later, however many names it has then.
        replaced(&kept).unwrap();
        assert_eq!((fs::read(&foreign).unwrap(), kept.exists()), (b"somebody's".to_vec(), false));
        fs::rename(&away, &kept).unwrap();
        replaced_header(&old, &kept).unwrap();
        assert!(!kept.exists());
    }
}
