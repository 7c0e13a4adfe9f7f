//! An open vault as a tree.

use super::{Input, Meta, Output, Tree};
use anyhow::{Context, Result};
use lamassu_vault::{
    Access, Attr, Entry, Forest, HandleId, Ino, Kind, Owner, RenameMode, SetAttr, SetTime, SetXattr, VaultError, Whence,
};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::sync::Arc;

/// See the module.
pub struct VaultTree(pub Arc<Forest>);

const READ: Access = Access { read: true, write: false, truncate: false };
const WRITE: Access = Access { read: true, write: true, truncate: true };

/// An entry whose reference is given back.
struct Held<'a> {
    vault: &'a Forest,
    entry: Entry,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.vault.forget(self.entry.attr.ino, 1);
    }
}

impl VaultTree {
    fn held(&self, entry: Entry) -> Held<'_> {
        Held { vault: &self.0, entry }
    }

    fn resolve(&self, path: &Path) -> Result<Held<'_>> {
        let entry = self.0.resolve(path.as_os_str()).with_context(|| self.name(path))?;
        Ok(self.held(entry))
    }

    /// The directory and the name in it.
    fn place<'p>(&self, path: &'p Path) -> Result<(Held<'_>, &'p OsStr)> {
        let name = path.file_name().ok_or(VaultError::InvalidName).with_context(|| self.name(path))?;
        let parent = self.resolve(path.parent().unwrap_or(Path::new("")))?;
        Ok((parent, name))
    }

    fn owner() -> Owner {
        Owner { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw(), umask: 0 }
    }

    fn done<T>(&self, op: &'static str, path: &Path, result: lamassu_vault::Result<T>) -> Result<T> {
        result.with_context(|| format!("cannot {op} {}", self.name(path)))
    }
}

fn meta_of(attr: &Attr) -> Meta {
    Meta {
        kind: attr.kind,
        mode: attr.mode,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        size: attr.size,
        atime: attr.atime,
        mtime: attr.mtime,
        ino: (0, attr.ino),
    }
}

impl Tree for VaultTree {
    fn name(&self, path: &Path) -> String {
        format!("vault:{}", path.display())
    }

    fn stat(&self, path: &Path) -> Result<Option<Meta>> {
        match self.0.resolve(path.as_os_str()) {
            Ok(entry) => Ok(Some(meta_of(&self.held(entry).entry.attr))),
            Err(VaultError::NotFound) => Ok(None),
            Err(error) => Err(error).with_context(|| self.name(path)),
        }
    }

    fn list(&self, path: &Path) -> Result<Vec<OsString>> {
        let dir = self.resolve(path)?;
        let mut names = Vec::new();
        let listed = list(&self.0, dir.entry.attr.ino, &mut |name, _| names.push(name.to_os_string()));
        self.done("list", path, listed)?;
        names.sort();
        Ok(names)
    }

    fn read_link(&self, path: &Path) -> Result<OsString> {
        let link = self.resolve(path)?;
        let target = self.0.readlink(link.entry.attr.ino);
        Ok(OsString::from_vec(self.done("read the link", path, target)?))
    }

    fn xattrs(&self, path: &Path) -> Result<Vec<(OsString, Vec<u8>)>> {
        let entry = self.resolve(path)?;
        let ino = entry.entry.attr.ino;
        let names = self.done("read attributes of", path, self.0.list_xattr(ino))?;
        let pairs = names.into_iter().map(|name| {
            let name = OsString::from_vec(name);
            let value = self.done("read attributes of", path, self.0.get_xattr(ino, &name))?;
            Ok((name, value))
        });
        pairs.collect()
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Input + '_>> {
        let entry = self.resolve(path)?;
        let attr = entry.entry.attr;
        if attr.kind == Kind::Dir {
            return self.done("open", path, Err(VaultError::IsDirectory));
        }
        let handle = self.done("open", path, self.0.open_file(attr.ino, READ))?;
        Ok(Box::new(VaultFile { entry, handle, name: self.name(path) }))
    }

    fn create(&self, path: &Path) -> Result<Box<dyn Output + '_>> {
        let (parent, name) = self.place(path)?;
        let made = self.0.create(parent.entry.attr.ino, name, 0o600, WRITE, Self::owner());
        let (entry, handle) = self.done("create", path, made)?;
        Ok(Box::new(VaultFile { entry: self.held(entry), handle, name: self.name(path) }))
    }

    fn make_dir(&self, path: &Path) -> Result<()> {
        let (parent, name) = self.place(path)?;
        let made = self.0.mkdir(parent.entry.attr.ino, name, 0o700, Self::owner());
        drop(self.held(self.done("make directory", path, made)?));
        Ok(())
    }

    fn make_symlink(&self, path: &Path, target: &OsString) -> Result<()> {
        let (parent, name) = self.place(path)?;
        let made = self.0.symlink(parent.entry.attr.ino, name, target.as_encoded_bytes(), Self::owner());
        drop(self.held(self.done("make link", path, made)?));
        Ok(())
    }

    fn make_node(&self, path: &Path, meta: &Meta) -> Result<()> {
        let (parent, name) = self.place(path)?;
        let made = self.0.mknod(parent.entry.attr.ino, name, meta.kind, 0o600, meta.rdev, Self::owner());
        drop(self.held(self.done("make", path, made)?));
        Ok(())
    }

    fn remove(&self, path: &Path) -> Result<()> {
        let (parent, name) = self.place(path)?;
        self.done("remove", path, self.0.unlink(parent.entry.attr.ino, name))
    }

    fn rename(&self, from: &Path, to: &Path, replaces: bool) -> Result<()> {
        let ((dir, name), (to_dir, to_name)) = (self.place(from)?, self.place(to)?);
        let (dir, to_dir) = (dir.entry.attr.ino, to_dir.entry.attr.ino);
        let (op, mode) = if replaces { ("replace", RenameMode::Replace) } else { ("make", RenameMode::NoReplace) };
        self.done(op, to, self.0.rename(dir, name, to_dir, to_name, mode))
    }

    fn set_xattr(&self, path: &Path, name: &OsString, value: &[u8]) -> Result<()> {
        let entry = self.resolve(path)?;
        Ok(self.0.set_xattr(entry.entry.attr.ino, name, value, SetXattr::Any)?)
    }

    fn set_meta(&self, path: &Path, meta: &Meta) -> Result<()> {
        let entry = self.resolve(path)?;
        let root = rustix::process::geteuid().is_root();
        let set = SetAttr {
            mode: (meta.kind != Kind::Symlink).then_some(meta.mode),
            uid: root.then_some(meta.uid),
            gid: root.then_some(meta.gid),
            size: None,
            atime: Some(SetTime::At(meta.atime)),
            mtime: Some(SetTime::At(meta.mtime)),
        };
        self.done("set mode and times of", path, self.0.setattr(entry.entry.attr.ino, None, &set))?;
        Ok(())
    }
}

/// Calls `each` for the entries of a directory but `.` and `..`.
pub fn list(vault: &Forest, dir: Ino, each: &mut dyn FnMut(&OsStr, Kind)) -> lamassu_vault::Result<()> {
    let handle = vault.open_dir(dir)?;
    let listed = vault.read_dir(handle, 0, &mut |entry, _| {
        if entry.name != "." && entry.name != ".." {
            each(&entry.name, entry.kind);
        }
        true
    });
    let closed = vault.release_dir(handle);
    listed.and(closed)
}

struct VaultFile<'a> {
    entry: Held<'a>,
    handle: HandleId,
    name: String,
}

impl Drop for VaultFile<'_> {
    fn drop(&mut self) {
        // `finish` reports what a flush could not write.
        let _ = self.entry.vault.release(self.handle);
    }
}

impl Input for VaultFile<'_> {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.entry.vault.read(self.handle, offset, buf).with_context(|| self.name.clone())
    }

    fn next_data(&self, offset: u64) -> Result<Option<(u64, u64)>> {
        let found = self.entry.vault.seek(self.handle, offset, Whence::Data);
        let start = match found {
            Ok(start) => start,
            Err(VaultError::NoData) => return Ok(None),
            Err(error) => return Err(error).with_context(|| self.name.clone()),
        };
        let end = self.entry.vault.seek(self.handle, start, Whence::Hole).with_context(|| self.name.clone())?;
        Ok(Some((start, end)))
    }

    fn size(&self) -> Result<u64> {
        let attr = self.entry.vault.getattr(self.entry.entry.attr.ino, Some(self.handle));
        Ok(attr.with_context(|| self.name.clone())?.size)
    }
}

impl Output for VaultFile<'_> {
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.entry.vault.write(self.handle, offset, data).with_context(|| format!("cannot write {}", self.name))?;
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<()> {
        let set = SetAttr { size: Some(len), ..SetAttr::default() };
        self.entry
            .vault
            .setattr(self.entry.entry.attr.ino, Some(self.handle), &set)
            .with_context(|| format!("cannot set the length of {}", self.name))?;
        Ok(())
    }

    fn finish(self: Box<Self>, durable: bool) -> Result<()> {
        let vault = self.entry.vault;
        let written = if durable { vault.fsync(self.handle, true) } else { vault.flush(self.handle) };
        written.with_context(|| format!("cannot write {}", self.name))
    }
}
