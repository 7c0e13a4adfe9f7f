//! An open vault as a tree: the vault's interface by paths (`lamassu_vault::EntryRef`, `OpenEntry`) behind the traits
//! that copying is written for, with the names that messages show.

use super::{Dir, Input, Meta, Node, Output, Tree};
use crate::fault::{Context, Result};
use lamassu_vault::{
    Access, Attr, Entry, EntryRef, FileSystem, Forest, Kind, OpenEntry, Owner, RenameMode, SetAttr, SetTime, SetXattr,
    Sought, Time, VaultError, Whence, write_all,
};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// See the module.
pub struct VaultTree(pub Arc<Forest>);

const READ: Access = Access { read: true, write: false, truncate: false };
const WRITE: Access = Access { read: true, write: true, truncate: true };

/// An entry of the vault.
type Held = EntryRef<Arc<Forest>>;

fn set(entry: &Held, set: &SetAttr, what: &'static str) -> Result<()> {
    entry.fs().setattr(entry.ino(), None, set).context(what)?;
    Ok(())
}

impl Node for Held {
    fn ino(&self) -> Result<(u64, u64)> {
        Ok(meta_of(self.attr()).ino)
    }

    fn set_owner(&self, uid: u32, gid: u32) -> Result<()> {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        set(self, &SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() }, "cannot set the owner")
    }

    fn set_xattr(&self, name: &OsStr, value: &[u8]) -> Result<()> {
        Ok(self.fs().set_xattr(self.ino(), name, value, SetXattr::Any)?)
    }

    fn set_times(&self, atime: Time, mtime: Time) -> Result<()> {
        let (atime, mtime) = (Some(SetTime::At(atime)), Some(SetTime::At(mtime)));
        set(self, &SetAttr { atime, mtime, ..SetAttr::default() }, "cannot set the times")
    }

    fn set_mode(&self, mode: u32) -> Result<()> {
        match self.attr().kind {
            Kind::Symlink => Ok(()),
            _ => set(self, &SetAttr { mode: Some(mode), ..SetAttr::default() }, "cannot set the mode"),
        }
    }
}

impl VaultTree {
    fn held(&self, entry: Entry) -> Held {
        EntryRef::new(Arc::clone(&self.0), entry)
    }

    fn resolve(&self, path: &Path) -> Result<Held> {
        let entry = self.0.resolve(path.as_os_str()).with_context(|| self.name(path))?;
        Ok(self.held(entry))
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
        links: attr.nlink,
    }
}

impl Tree for VaultTree {
    fn name(&self, path: &Path) -> String {
        format!("vault:{}", path.display())
    }

    fn stat(&self, path: &Path) -> Result<Option<Meta>> {
        match self.0.resolve(path.as_os_str()) {
            Ok(entry) => Ok(Some(meta_of(self.held(entry).attr()))),
            Err(VaultError::NotFound) => Ok(None),
            Err(error) => Err(error).with_context(|| self.name(path)),
        }
    }

    fn list(&self, path: &Path) -> Result<Vec<OsString>> {
        let dir = self.resolve(path)?;
        self.done("list", path, dir.names())
    }

    fn read_link(&self, path: &Path) -> Result<OsString> {
        let link = self.resolve(path)?;
        let target = self.0.readlink(link.ino());
        Ok(OsString::from_vec(self.done("read the link", path, target)?))
    }

    fn xattrs(&self, path: &Path) -> Result<Vec<(OsString, Vec<u8>)>> {
        let entry = self.resolve(path)?;
        let ino = entry.ino();
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
        if entry.is_dir() {
            return self.done("open", path, Err(VaultError::IsDirectory));
        }
        Ok(Box::new(VaultFile { file: self.done("open", path, entry.open(READ))?, name: self.name(path) }))
    }

    fn dir(&self, path: &Path) -> Result<Box<dyn Dir>> {
        let held = self.resolve(path)?;
        if !held.is_dir() {
            return Err(self.fault(path, VaultError::NotDirectory));
        }
        Ok(Box::new(VaultDir { tree: VaultTree(Arc::clone(&self.0)), held, path: path.into() }))
    }
}

/// A directory of a vault.
struct VaultDir {
    tree: VaultTree,
    held: Held,
    path: PathBuf,
}

impl VaultDir {
    fn done<T>(&self, op: &'static str, name: &OsStr, result: lamassu_vault::Result<T>) -> Result<T> {
        self.tree.done(op, &self.path.join(name), result)
    }

    fn owner() -> Owner {
        Owner { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw(), umask: 0 }
    }

    fn below(&self, name: &OsStr, entry: Entry) -> Box<dyn Dir> {
        let tree = VaultTree(Arc::clone(&self.tree.0));
        Box::new(VaultDir { held: self.tree.held(entry), tree, path: self.path.join(name) })
    }
}

impl Node for VaultDir {
    fn ino(&self) -> Result<(u64, u64)> {
        Node::ino(&self.held)
    }

    fn set_owner(&self, uid: u32, gid: u32) -> Result<()> {
        self.held.set_owner(uid, gid)
    }

    fn set_xattr(&self, name: &OsStr, value: &[u8]) -> Result<()> {
        self.held.set_xattr(name, value)
    }

    fn set_times(&self, atime: Time, mtime: Time) -> Result<()> {
        self.held.set_times(atime, mtime)
    }

    fn set_mode(&self, mode: u32) -> Result<()> {
        self.held.set_mode(mode)
    }
}

impl Dir for VaultDir {
    fn name(&self, name: &OsStr) -> String {
        self.tree.name(&self.path.join(name))
    }

    fn fault(&self, name: &OsStr, what: VaultError) -> crate::fault::Error {
        self.tree.fault(&self.path.join(name), what)
    }

    fn stat(&self, name: &OsStr) -> Result<Option<Meta>> {
        match self.tree.0.lookup(self.held.ino(), name) {
            Ok(entry) => Ok(Some(meta_of(self.tree.held(entry).attr()))),
            Err(VaultError::NotFound) => Ok(None),
            Err(error) => Err(error).with_context(|| self.name(name)),
        }
    }

    fn open(&self, name: &OsStr) -> Result<Box<dyn Dir>> {
        let entry = self.done("open", name, self.tree.0.lookup(self.held.ino(), name))?;
        Ok(self.below(name, entry))
    }

    fn make_dir(&self, name: &OsStr) -> Result<Box<dyn Dir>> {
        let made = self.tree.0.mkdir(self.held.ino(), name, 0o700, Self::owner());
        Ok(self.below(name, self.done("make directory", name, made)?))
    }

    fn create(&self, name: &OsStr) -> Result<Box<dyn Output>> {
        let made = self.tree.0.create(self.held.ino(), name, 0o600, WRITE, Self::owner());
        let (entry, handle) = self.done("create", name, made)?;
        Ok(Box::new(VaultFile { file: OpenEntry::new(self.tree.held(entry), handle), name: self.name(name) }))
    }

    fn make_symlink(&self, name: &OsStr, target: &OsStr) -> Result<Box<dyn Node>> {
        let made = self.tree.0.symlink(self.held.ino(), name, target.as_encoded_bytes(), Self::owner());
        Ok(Box::new(self.tree.held(self.done("make link", name, made)?)))
    }

    fn make_node(&self, name: &OsStr, meta: &Meta) -> Result<Box<dyn Node>> {
        let made = self.tree.0.mknod(self.held.ino(), name, meta.kind, 0o600, meta.rdev, Self::owner());
        Ok(Box::new(self.tree.held(self.done("make", name, made)?)))
    }

    fn link(&self, from: &dyn Dir, file: &OsStr, ino: (u64, u64), name: &OsStr) -> Result<()> {
        let (_, from) = from.ino()?;
        let found = self.tree.held(self.done("link", name, self.tree.0.lookup(from, file))?);
        if Node::ino(&found)? != ino {
            return Err(self.fault(name, VaultError::Stale));
        }
        let linked = self.tree.0.link(found.ino(), self.held.ino(), name);
        self.tree.held(self.done("link", name, linked)?);
        Ok(())
    }

    fn remove(&self, name: &OsStr) -> Result<()> {
        self.done("remove", name, self.tree.0.unlink(self.held.ino(), name))
    }

    fn rename(&self, from: &OsStr, to: &OsStr, replaces: bool) -> Result<()> {
        let (op, mode) = if replaces { ("replace", RenameMode::Replace) } else { ("make", RenameMode::NoReplace) };
        let dir = self.held.ino();
        self.done(op, to, self.tree.0.rename(dir, from, dir, to, mode))
    }
}

struct VaultFile {
    file: OpenEntry<Arc<Forest>>,
    name: String,
}

impl VaultFile {
    fn sought(&self, mut offset: u64, whence: Whence) -> Result<u64, VaultError> {
        loop {
            match self.file.fs().seek(self.file.handle(), offset, whence, u64::MAX)? {
                Sought::Found(found) => return Ok(found),
                Sought::NotBefore(next) => offset = next,
            }
        }
    }
}

impl Input for VaultFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.file.fs().read(self.file.handle(), offset, buf).with_context(|| self.name.clone())
    }

    fn next_data(&self, offset: u64) -> Result<Option<(u64, u64)>> {
        let found = self.sought(offset, Whence::Data);
        let start = match found {
            Ok(start) => start,
            Err(VaultError::NoData) => return Ok(None),
            Err(error) => return Err(error).with_context(|| self.name.clone()),
        };
        let end = self.sought(start, Whence::Hole).with_context(|| self.name.clone())?;
        Ok(Some((start, end)))
    }

    fn size(&self) -> Result<u64> {
        let attr = self.file.fs().getattr(self.file.entry().ino(), Some(self.file.handle()));
        Ok(attr.with_context(|| self.name.clone())?.size)
    }
}

impl Node for VaultFile {
    fn ino(&self) -> Result<(u64, u64)> {
        Node::ino(self.file.entry())
    }

    fn set_owner(&self, uid: u32, gid: u32) -> Result<()> {
        self.file.entry().set_owner(uid, gid)
    }

    fn set_xattr(&self, name: &OsStr, value: &[u8]) -> Result<()> {
        self.file.entry().set_xattr(name, value)
    }

    fn set_times(&self, atime: Time, mtime: Time) -> Result<()> {
        self.file.entry().set_times(atime, mtime)
    }

    fn set_mode(&self, mode: u32) -> Result<()> {
        self.file.entry().set_mode(mode)
    }
}

impl Output for VaultFile {
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        write_all(offset, data, |at, part| self.file.fs().write(self.file.handle(), at, part))
            .with_context(|| format!("cannot write {}", self.name))
    }

    fn set_len(&self, len: u64) -> Result<()> {
        let set = SetAttr { size: Some(len), ..SetAttr::default() };
        self.file
            .fs()
            .setattr(self.file.entry().ino(), Some(self.file.handle()), &set)
            .with_context(|| format!("cannot set the length of {}", self.name))?;
        Ok(())
    }

    fn flush(&self, durable: bool) -> Result<()> {
        let (vault, handle) = (self.file.fs(), self.file.handle());
        let written = if durable { vault.fsync(handle, true) } else { vault.flush(handle) };
        written.with_context(|| format!("cannot write {}", self.name))
    }
}
