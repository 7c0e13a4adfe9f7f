//! Makes, lists, resizes, copies and destroys the volumes of a vault. The caller is the vault's only writer.

use crate::held::{Held, Open};
use crate::volume::Info;
use crate::{BlockSize, DIRECTORY, Name, Result, SIZE_MAX, Volume, VolumeError};
use lamassu_vault::{Access, Attr, FileSystem, Forest, Kind, Owner, ROOT, RenameMode, SetXattr, VaultError};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::sync::Arc;

/// The sealed attribute of a volume's file.
const ATTRIBUTE: &str = "trusted.lamassu.volume";

/// The content of that attribute, as JSON.
#[derive(Serialize, Deserialize)]
struct Attributes {
    block_size: BlockSize,
}

/// The volumes of an open vault.
pub struct Volumes {
    fs: Arc<Forest>,
}

impl Volumes {
    /// The volumes of this vault.
    pub fn of(fs: &Arc<Forest>) -> Volumes {
        Volumes { fs: fs.clone() }
    }

    fn directory(&self) -> Result<Option<Held>> {
        match Held::find(self.fs.clone(), ROOT, OsStr::new(DIRECTORY)) {
            Ok(directory) if directory.is_dir() => {
                // In a mount, other users may have made the directory first, and could exchange volumes.
                let owners = [0, owner().uid, self.fs.getattr(ROOT, None)?.uid];
                let Attr { uid, mode, .. } = *directory.attr();
                match owners.contains(&uid) && mode & 0o022 == 0 {
                    true => Ok(Some(directory)),
                    false => Err(VolumeError::NotOurs { uid }),
                }
            }
            Ok(_) => Err(VaultError::NotDirectory.into()),
            Err(VaultError::NotFound) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The directory, to be changed: without what an interrupted change has left. The caller is the only one that
    /// changes it.
    fn swept_directory(&self) -> Result<Option<Held>> {
        let Some(directory) = self.directory()? else { return Ok(None) };
        for file in directory.names()?.iter().filter(|file| Name::is_staged(&file.to_string_lossy())) {
            match self.fs.unlink(directory.ino(), file) {
                // Not made by this program, so it is in the way of nothing.
                Err(VaultError::IsDirectory) => continue,
                removed => removed?,
            }
        }
        Ok(Some(directory))
    }

    fn made_directory(&self) -> Result<Held> {
        if let Some(directory) = self.swept_directory()? {
            return Ok(directory);
        }
        let entry = self.fs.mkdir(ROOT, OsStr::new(DIRECTORY), 0o700, owner())?;
        Ok(Held::new(self.fs.clone(), entry))
    }

    /// The file of an existing volume.
    fn file(&self, name: &Name) -> Result<(Held, Info)> {
        let missing = || VolumeError::NotFound(name.clone());
        let directory = self.directory()?.ok_or_else(missing)?;
        let file = directory.child_if_there(&name.file())?.ok_or_else(missing)?;
        let info = self.described(name, &file)?;
        Ok((file, info))
    }

    fn described(&self, name: &Name, file: &Held) -> Result<Info> {
        let wrong = |why| VolumeError::NotAVolume { what: name.to_string(), why };
        if file.attr().kind != Kind::File {
            return Err(wrong("it is no regular file"));
        }
        let attribute = match self.fs.get_xattr(file.ino(), OsStr::new(ATTRIBUTE)) {
            Err(VaultError::NoAttribute) => return Err(wrong("`lamassu volume create` has not made it")),
            attribute => attribute?,
        };
        let Attributes { block_size } =
            serde_json::from_slice(&attribute).map_err(|_| wrong("its attribute makes no sense"))?;
        let attr = file.attr();
        let info =
            Info { name: name.clone(), size: attr.size, block_size, stored: attr.blocks * 512, written: attr.mtime };
        match info.size.is_multiple_of(u64::from(block_size.bytes())) && info.size > 0 {
            true => Ok(info),
            false => Err(wrong("its size is no multiple of its blocks")),
        }
    }

    /// The properties of a volume.
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], [`VolumeError::NotAVolume`]; those of the vault.
    pub fn info(&self, name: &Name) -> Result<Info> {
        self.file(name).map(|(_, info)| info)
    }

    /// All volumes and snapshots, by name. `odd` is called with the name of each file that is none, and
    /// [`VolumeError::NotAVolume`], and with that of each that cannot be described, and the reason.
    ///
    /// # Errors
    /// Those of the vault about the directory.
    pub fn list(&self, odd: &mut dyn FnMut(&str, VolumeError)) -> Result<Vec<Info>> {
        let mut found = Vec::new();
        let Some(directory) = self.directory()? else { return Ok(found) };
        for file in directory.names()? {
            let text = file.to_string_lossy();
            if Name::is_staged(&text) {
                continue;
            }
            let Ok(name) = text.parse() else {
                let error = VolumeError::NotAVolume { what: text.to_string(), why: "no volume has such a name" };
                odd(&text, error);
                continue;
            };
            match self.info(&name) {
                Ok(info) => found.push(info),
                // Removed meanwhile, by a writer beside an export that takes no lock.
                Err(VolumeError::NotFound(_)) => {}
                Err(error) => odd(&text, error),
            }
        }
        found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Makes a volume that reads as zeros, and takes no space yet.
    ///
    /// # Errors
    /// [`VolumeError::BadSize`], [`VolumeError::IsSnapshot`], [`VolumeError::Exists`]; those of the vault.
    pub fn create(&self, name: &Name, size: u64, block_size: BlockSize) -> Result<()> {
        check_size(size, block_size)?;
        if name.is_snapshot() {
            return Err(VolumeError::IsSnapshot(name.clone()));
        }
        self.make(name, 0o600, &Attributes { block_size }, |file| Ok(file.set_size(size)?))
    }

    /// Creates a file under a temporary name, calls `fill`, and renames it when its content is durable.
    fn make(
        &self,
        name: &Name,
        mode: u32,
        attributes: &Attributes,
        fill: impl FnOnce(&Open) -> Result<()>,
    ) -> Result<()> {
        let directory = self.made_directory()?;
        if directory.child_if_there(&name.file())?.is_some() {
            return Err(VolumeError::Exists(name.clone()));
        }
        let staged = name.staged();
        let access = Access { read: true, write: true, truncate: false };
        let (entry, handle) = self.fs.create(directory.ino(), &staged, mode, access, owner())?;
        let file = Open::new(Held::new(self.fs.clone(), entry), handle);
        let filled = fill(&file).and_then(|()| {
            let value = serde_json::to_vec(attributes).map_err(|_| VaultError::Invalid)?;
            self.fs.set_xattr(file.node().ino(), OsStr::new(ATTRIBUTE), &value, SetXattr::Any)?;
            file.fs().fsync(file.handle(), false)?;
            Ok(self.fs.rename(directory.ino(), &staged, directory.ino(), &name.file(), RenameMode::NoReplace)?)
        });
        if let Err(error) = filled {
            let _ = self.fs.unlink(directory.ino(), &staged);
            return Err(match error {
                VolumeError::Vault(VaultError::Exists) => VolumeError::Exists(name.clone()),
                error => error,
            });
        }
        Ok(directory.sync_names()?)
    }

    /// Changes the size of a volume: an added range reads as zeros. With `shrink` it may become smaller.
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], [`VolumeError::IsSnapshot`], [`VolumeError::BadSize`], [`VolumeError::Shrinks`];
    /// those of the vault.
    pub fn resize(&self, name: &Name, size: u64, shrink: bool) -> Result<()> {
        if name.is_snapshot() {
            return Err(VolumeError::IsSnapshot(name.clone()));
        }
        let (file, info) = self.file(name)?;
        check_size(size, info.block_size)?;
        if size < info.size && !shrink {
            return Err(VolumeError::Shrinks { name: name.clone(), now: info.size, wanted: size });
        }
        let file = Open::of(file, true)?;
        file.set_size(size)?;
        Ok(file.sync()?)
    }

    /// Makes a snapshot of a volume as it is. `goes_on` is asked between pieces; if it answers false, nothing is made.
    ///
    /// # Errors
    /// As [`Volumes::clone_to`].
    pub fn snapshot(&self, name: &Name, snapshot: &str, goes_on: &dyn Fn() -> bool) -> Result<Name> {
        let snapshot = name.at(snapshot)?;
        self.copy(name, &snapshot, 0o400, goes_on)?;
        Ok(snapshot)
    }

    /// Makes a volume with the content of another, or of a snapshot: by the keys of blocks, so that nothing is
    /// encrypted again, and the store may share the blocks. `goes_on` as in [`Volumes::snapshot`].
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], [`VolumeError::IsSnapshot`], [`VolumeError::Exists`], [`VolumeError::Interrupted`];
    /// those of the vault.
    pub fn clone_to(&self, name: &Name, to: &Name, goes_on: &dyn Fn() -> bool) -> Result<()> {
        match to.is_snapshot() {
            true => Err(VolumeError::IsSnapshot(to.clone())),
            false => self.copy(name, to, 0o600, goes_on),
        }
    }

    fn copy(&self, name: &Name, to: &Name, mode: u32, goes_on: &dyn Fn() -> bool) -> Result<()> {
        let (file, info) = self.file(name)?;
        let from = Open::of(file, false)?;
        self.make(to, mode, &Attributes { block_size: info.block_size }, |file| {
            // Otherwise the copy's blocks would be stored as the directory's profile says.
            self.fs.take_profile(from.handle(), file.handle())?;
            file.set_size(info.size)?;
            file.copy_all(&from, info.size, goes_on)
        })
    }

    /// Removes a volume, with its snapshots if `snapshots` is true, or one snapshot. Returns how many were removed.
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], [`VolumeError::HasSnapshots`]; those of the vault.
    pub fn destroy(&self, name: &Name, snapshots: bool) -> Result<usize> {
        let missing = || VolumeError::NotFound(name.clone());
        let directory = self.swept_directory()?.ok_or_else(missing)?;
        if directory.child_if_there(&name.file())?.is_none() {
            return Err(missing());
        }
        let is_below = |other: &Name| !name.is_snapshot() && other.is_snapshot() && other.volume() == name.volume();
        let names = directory.names()?;
        let names = names.iter().filter_map(|file| file.to_str()?.parse::<Name>().ok());
        let below: Vec<Name> = names.filter(is_below).collect();
        if !below.is_empty() && !snapshots {
            return Err(VolumeError::HasSnapshots { name: name.clone(), count: below.len() });
        }
        // The volume comes last, so that it can be destroyed again after a crash.
        for one in below.iter().chain([name]) {
            self.fs.unlink(directory.ino(), &one.file())?;
        }
        directory.sync_names()?;
        Ok(below.len() + 1)
    }

    /// Opens a volume. Snapshots are always opened for reading.
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], [`VolumeError::NotAVolume`]; those of the vault.
    pub fn open(&self, name: &Name, read_only: bool) -> Result<Volume> {
        let (file, info) = self.file(name)?;
        let read_only = read_only || name.is_snapshot();
        Ok(Volume::new(Open::of(file, !read_only)?, info, read_only))
    }
}

fn check_size(size: u64, block_size: BlockSize) -> Result<()> {
    let block = block_size.bytes();
    match size.is_multiple_of(u64::from(block)) && (1..=SIZE_MAX).contains(&size) {
        true => Ok(()),
        false => Err(VolumeError::BadSize { size, block }),
    }
}

/// The user of this process.
fn owner() -> Owner {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Owner { uid, gid, umask: 0 }
}
