//! Open files and directories of the store in memory. A node lives while a handle on it does.

use super::tree::Body;
use super::{AttributeOp, Barrier, LEN_MAX, Live, NamespaceOp, NewNode, Node, Shared};
use crate::backend::{
    BackendDir, BackendEntry, BackendFile, BackendNode, Kind, Listed, RenameMode, SetTime, Stat, Time,
};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

/// Keeps a node from being freed.
pub(super) struct Handle {
    shared: Arc<Shared>,
    ino: u64,
}

impl Handle {
    /// Opens a node, under the lock in which it was found.
    pub(super) fn open(shared: &Arc<Shared>, live: &mut Live, ino: u64) -> Handle {
        *live.open.entry(ino).or_default() += 1;
        Handle { shared: shared.clone(), ino }
    }

    fn node<T>(&self, f: impl FnOnce(&Node) -> io::Result<T>) -> io::Result<T> {
        f(self.shared.live.read().tree.get(self.ino).ok_or(Errno::BADF)?)
    }

    /// Looks at an entry of this directory.
    fn entry<T>(&self, name: &OsStr, f: impl FnOnce(u64, &Node) -> io::Result<T>) -> io::Result<T> {
        let live = self.shared.live.read();
        let ino = live.tree.lookup(self.ino, name)?;
        f(ino, live.tree.get(ino).ok_or(Errno::NOENT)?)
    }

    fn attribute(&self, form: impl FnOnce(&Node, Time) -> io::Result<AttributeOp>) -> io::Result<()> {
        self.shared.attribute(self.ino, form)
    }

    fn create(&self, name: &OsStr, node: NewNode, mode: u32) -> io::Result<()> {
        let (dir, name) = (self.ino, name.to_owned());
        self.shared.namespace(|tree| Ok(NamespaceOp::Create { dir, name, ino: tree.next_ino(), node, mode }))
    }
}

/// Something that is a node, by the handle on it.
trait OnHandle: Send + Sync {
    fn handle(&self) -> &Handle;
}

impl<T: OnHandle> BackendNode for T {
    fn stat(&self) -> io::Result<Stat> {
        self.handle().node(|node| Ok(node.stat(self.handle().ino)))
    }

    fn set_times(&self, atime: SetTime, mtime: SetTime) -> io::Result<()> {
        self.handle().attribute(|_, now| times(atime, mtime, now))
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        self.handle().attribute(|node, _| chmod(node, mode))
    }

    fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        self.handle().attribute(|_, _| Ok(AttributeOp::Owner(uid, gid)))
    }

    fn get_xattr(&self, attr: &OsStr) -> io::Result<Vec<u8>> {
        self.handle().node(|node| get_xattr(node, attr))
    }

    fn set_xattr(&self, attr: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        self.handle().attribute(|node, _| set_xattr(node, attr, value, flags))
    }

    fn list_xattr(&self) -> io::Result<Vec<OsString>> {
        self.handle().node(|node| Ok(list_xattr(node)))
    }

    fn remove_xattr(&self, attr: &OsStr) -> io::Result<()> {
        self.handle().attribute(|node, _| remove_xattr(node, attr))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.closed(self.ino);
    }
}

fn times(atime: SetTime, mtime: SetTime, now: Time) -> io::Result<AttributeOp> {
    let resolve = |t| match t {
        SetTime::Keep => Ok(None),
        SetTime::Now => Ok(Some(now)),
        SetTime::At(t) if t.nanos >= 1_000_000_000 => Err(Errno::INVAL),
        SetTime::At(t) => Ok(Some(t)),
    };
    Ok(AttributeOp::Times(resolve(atime)?, resolve(mtime)?))
}

const XATTR_NAME_BYTES_MAX: usize = 255;
const XATTR_VALUE_BYTES_MAX: usize = 64 << 10;

fn check_xattr_name(attr: &OsStr) -> io::Result<()> {
    let known = ["user.", "trusted.", "security.", "system."].iter().any(|ns| {
        attr.as_bytes().len() > ns.len() && attr.as_bytes().starts_with(ns.as_bytes()) //
    });
    match attr.len() {
        0 => Err(Errno::RANGE.into()),
        len if len > XATTR_NAME_BYTES_MAX => Err(Errno::RANGE.into()),
        _ if !known => Err(Errno::OPNOTSUPP.into()),
        _ => Ok(()),
    }
}

fn get_xattr(node: &Node, attr: &OsStr) -> io::Result<Vec<u8>> {
    check_xattr_name(attr)?;
    Ok(node.xattrs.get(attr).ok_or(Errno::NODATA)?.to_vec())
}

fn may_change_xattr(node: &Node, attr: &OsStr) -> io::Result<()> {
    check_xattr_name(attr)?;
    let has_user = matches!(node.kind(), Kind::File | Kind::Dir);
    if !has_user && attr.as_bytes().starts_with(b"user.") { Err(Errno::PERM.into()) } else { Ok(()) }
}

fn set_xattr(node: &Node, attr: &OsStr, value: &[u8], flags: i32) -> io::Result<AttributeOp> {
    if flags & !(libc::XATTR_CREATE | libc::XATTR_REPLACE) != 0 {
        return Err(Errno::INVAL.into());
    }
    if value.len() > XATTR_VALUE_BYTES_MAX {
        return Err(Errno::TOOBIG.into());
    }
    may_change_xattr(node, attr)?;
    let exists = node.xattrs.contains_key(attr);
    if exists && flags & libc::XATTR_CREATE != 0 {
        return Err(Errno::EXIST.into());
    }
    if !exists && flags & libc::XATTR_REPLACE != 0 {
        return Err(Errno::NODATA.into());
    }
    Ok(AttributeOp::SetXattr(attr.to_owned(), value.into()))
}

fn remove_xattr(node: &Node, attr: &OsStr) -> io::Result<AttributeOp> {
    may_change_xattr(node, attr)?;
    if !node.xattrs.contains_key(attr) {
        return Err(Errno::NODATA.into());
    }
    Ok(AttributeOp::RemoveXattr(attr.to_owned()))
}

fn list_xattr(node: &Node) -> Vec<OsString> {
    node.xattrs.keys().cloned().collect()
}

/// chmod of anything but a symbolic link.
fn chmod(node: &Node, mode: u32) -> io::Result<AttributeOp> {
    if node.kind() == Kind::Symlink { Err(Errno::OPNOTSUPP.into()) } else { Ok(AttributeOp::Mode(mode)) }
}

struct MemoryFile {
    handle: Handle,
    write: bool,
}

impl MemoryFile {
    fn ino(&self) -> u64 {
        self.handle.ino
    }

    fn writable(&self, refusal: Errno) -> io::Result<()> {
        if self.write { Ok(()) } else { Err(refusal.into()) }
    }

    fn seek(&self, f: impl FnOnce(&super::Content) -> Option<u64>) -> io::Result<Option<u64>> {
        Ok(f(self.handle.shared.live.read().tree.content(self.ino()).ok_or(Errno::BADF)?))
    }
}

impl OnHandle for MemoryFile {
    fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl BackendFile for MemoryFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        if offset > LEN_MAX {
            return Err(Errno::INVAL.into());
        }
        Ok(self.handle.shared.live.read().tree.content(self.ino()).ok_or(Errno::BADF)?.read(offset, buf))
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.writable(Errno::BADF)?;
        if data.is_empty() {
            return Ok(());
        }
        let shared = &self.handle.shared;
        shared.change(
            self.ino(),
            |content| content.write(offset, data),
            |observer, (), now| observer.write(self.ino(), offset, data, now),
        )
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.writable(Errno::INVAL)?;
        if len > LEN_MAX {
            return Err(Errno::INVAL.into());
        }
        self.handle.shared.change(
            self.ino(),
            |content| {
                content.set_len(len);
                Ok(())
            },
            |observer, (), now| observer.set_len(self.ino(), len, now),
        )
    }

    fn sync_data(&self) -> io::Result<()> {
        self.handle.shared.barrier(Barrier::Data(self.ino()))
    }

    fn sync_all(&self) -> io::Result<()> {
        self.handle.shared.barrier(Barrier::All(self.ino()))
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.writable(Errno::BADF)?;
        if offset.checked_add(len).is_none_or(|end| end > LEN_MAX) {
            return Err(Errno::FBIG.into());
        }
        self.handle.shared.change(
            self.ino(),
            |content| {
                let present = content.pages_in(offset, len);
                content.punch(offset, len);
                Ok(present)
            },
            |observer, present, now| observer.punch(self.ino(), offset, len, present, now),
        )
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.writable(Errno::BADF)?;
        if offset.checked_add(len).is_none_or(|end| end > LEN_MAX) {
            return Err(Errno::FBIG.into());
        }
        Ok(())
    }

    fn seek_data(&self, offset: u64) -> io::Result<Option<u64>> {
        self.seek(|content| content.seek_data(offset))
    }

    fn seek_hole(&self, offset: u64) -> io::Result<Option<u64>> {
        self.seek(|content| content.seek_hole(offset))
    }
}

struct MemoryEntry(Handle);

impl OnHandle for MemoryEntry {
    fn handle(&self) -> &Handle {
        &self.0
    }
}

impl BackendEntry for MemoryEntry {
    fn link(&self, to: &dyn BackendDir, to_name: &OsStr) -> io::Result<()> {
        let to: &MemoryDir = to.as_any().downcast_ref().ok_or(Errno::XDEV)?;
        let dir = to.0.ino;
        if !Arc::ptr_eq(&to.0.shared, &self.0.shared) {
            return Err(Errno::XDEV.into());
        }
        let (ino, name) = (self.0.ino, to_name.to_owned());
        self.0.shared.namespace(|_| Ok(NamespaceOp::Link { dir, name, ino }))
    }
}

pub(super) struct MemoryDir(pub(super) Handle);

impl MemoryDir {
    /// The other directory of a link or rename; one of another store is another device.
    fn same_store<'a>(&self, dir: &'a dyn BackendDir) -> io::Result<&'a MemoryDir> {
        let dir: &MemoryDir = dir.as_any().downcast_ref().ok_or(Errno::XDEV)?;
        if Arc::ptr_eq(&self.0.shared, &dir.0.shared) { Ok(dir) } else { Err(Errno::XDEV.into()) }
    }
}

impl OnHandle for MemoryDir {
    fn handle(&self) -> &Handle {
        &self.0
    }
}

impl BackendDir for MemoryDir {
    fn open_dir(&self, name: &OsStr) -> io::Result<Arc<dyn BackendDir>> {
        let mut live = self.0.shared.live.write();
        let ino = live.tree.lookup(self.0.ino, name)?;
        live.tree.entries(ino)?;
        Ok(Arc::new(MemoryDir(Handle::open(&self.0.shared, &mut live, ino))))
    }

    fn open_file(&self, name: &OsStr, write: bool) -> io::Result<Arc<dyn BackendFile>> {
        let mut live = self.0.shared.live.write();
        let ino = live.tree.lookup(self.0.ino, name)?;
        match live.tree.get(ino).map(Node::kind) {
            Some(Kind::File) => {}
            Some(Kind::Dir) => return Err(Errno::ISDIR.into()),
            Some(Kind::Symlink) => return Err(Errno::LOOP.into()),
            _ => return Err(Errno::INVAL.into()),
        }
        Ok(Arc::new(MemoryFile { handle: Handle::open(&self.0.shared, &mut live, ino), write }))
    }

    fn create_file(&self, name: &OsStr) -> io::Result<Arc<dyn BackendFile>> {
        let shared = &self.0.shared;
        let (dir, name) = (self.0.ino, name.to_owned());
        let mut live = shared.live.write();
        let ino = live.tree.next_ino();
        shared.apply_namespace(&mut live, |_| {
            Ok(NamespaceOp::Create { dir, name, ino, node: NewNode::File, mode: 0o600 }) //
        })?;
        Ok(Arc::new(MemoryFile { handle: Handle::open(shared, &mut live, ino), write: true }))
    }

    fn make_dir(&self, name: &OsStr, mode: u32) -> io::Result<()> {
        self.0.create(name, NewNode::Dir, mode)
    }

    fn make_node(&self, name: &OsStr, kind: Kind, rdev: u64) -> io::Result<()> {
        let rdev = if matches!(kind, Kind::CharDevice | Kind::BlockDevice) { rdev } else { 0 };
        self.0.create(name, NewNode::Special(kind, rdev), 0o600)
    }

    fn make_symlink(&self, name: &OsStr, target: &OsStr) -> io::Result<()> {
        self.0.create(name, NewNode::Symlink(target.to_owned()), 0o777)
    }

    fn read_link(&self, name: &OsStr) -> io::Result<OsString> {
        self.0.entry(name, |_, node| match &node.body {
            Body::Symlink(target) => Ok(target.clone()),
            _ => Err(Errno::INVAL.into()),
        })
    }

    fn hold(&self, name: &OsStr) -> io::Result<Arc<dyn BackendEntry>> {
        let mut live = self.0.shared.live.write();
        let ino = live.tree.lookup(self.0.ino, name)?;
        Ok(Arc::new(MemoryEntry(Handle::open(&self.0.shared, &mut live, ino))))
    }

    fn rename(&self, name: &OsStr, to: &dyn BackendDir, to_name: &OsStr, mode: RenameMode) -> io::Result<()> {
        let to = self.same_store(to)?.0.ino;
        let (name, to_name) = (name.to_owned(), to_name.to_owned());
        self.0.shared.namespace(|_| Ok(NamespaceOp::Rename { from: self.0.ino, name, to, to_name, mode }))
    }

    fn unlink(&self, name: &OsStr) -> io::Result<()> {
        self.0.shared.namespace(|_| Ok(NamespaceOp::Unlink { dir: self.0.ino, name: name.to_owned() }))
    }

    fn remove_dir(&self, name: &OsStr) -> io::Result<()> {
        self.0.shared.namespace(|_| Ok(NamespaceOp::RemoveDir { dir: self.0.ino, name: name.to_owned() }))
    }

    fn stat_entry(&self, name: &OsStr) -> io::Result<Stat> {
        self.0.entry(name, |ino, node| Ok(node.stat(ino)))
    }

    fn read_dir(&self) -> io::Result<Vec<Listed>> {
        let live = self.0.shared.live.read();
        let entries = live.tree.entries(self.0.ino)?;
        let entry = |(name, &ino): (&OsString, &u64)| {
            let kind = live.tree.get(ino).map(Node::kind);
            Listed { name: name.clone(), ino, kind }
        };
        Ok(entries.iter().map(entry).collect())
    }

    fn sync(&self) -> io::Result<()> {
        self.0.shared.barrier(Barrier::Dir(self.0.ino))
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
