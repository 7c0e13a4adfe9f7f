//! The tree in memory: nodes by inode number, changed only by [`Op`]s, so that a log of them rebuilds it.
//!
//! A copy of a tree costs one reference count per node; nodes, pages and directories are shared until changed.

use super::content::Content;
use crate::backend::{Kind, RenameMode, Stat, Time, check_name};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

/// Inode number of the root.
pub const ROOT_INO: u64 = 1;
const NAME_BYTES_MAX: usize = 255;
const LINK_BYTES_MAX: usize = 4095;

/// What a new entry is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewNode {
    /// An empty file.
    File,
    /// An empty directory.
    Dir,
    /// A link to this target.
    Symlink(OsString),
    /// A fifo, socket or device, with its device number.
    Special(Kind, u64),
}

/// An operation on names, by inode number of the directories.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of the system calls")]
pub enum NamespaceOp {
    /// A new entry, whose inode number is `ino`.
    Create { dir: u64, name: OsString, ino: u64, node: NewNode, mode: u32 },
    /// Another name of a file.
    Link { dir: u64, name: OsString, ino: u64 },
    /// A rename.
    Rename { from: u64, name: OsString, to: u64, to_name: OsString, mode: RenameMode },
    /// A name of anything but a directory goes.
    Unlink { dir: u64, name: OsString },
    /// An empty directory goes.
    RemoveDir { dir: u64, name: OsString },
}

/// A change of what an inode says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttributeOp {
    /// chmod.
    Mode(u32),
    /// chown.
    Owner(Option<u32>, Option<u32>),
    /// Access and modification time.
    Times(Option<Time>, Option<Time>),
    /// setxattr.
    SetXattr(OsString, Arc<[u8]>),
    /// removexattr.
    RemoveXattr(OsString),
}

#[derive(Clone)]
pub(in crate::backend) enum Body {
    File(Content),
    Dir { entries: BTreeMap<OsString, u64>, parent: u64 },
    Symlink(OsString),
    Special(Kind, u64),
}

#[derive(Clone)]
pub(in crate::backend) struct Node {
    pub body: Body,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Zero: gone from the tree, kept for its open handles.
    pub nlink: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    pub born: u64,
    pub xattrs: BTreeMap<OsString, Arc<[u8]>>,
}

impl Node {
    fn new(body: Body, mode: u32, now: Time) -> Node {
        let nlink = if matches!(body, Body::Dir { .. }) { 2 } else { 1 };
        Node {
            body,
            mode: mode & 0o7777,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            nlink,
            atime: now,
            mtime: now,
            ctime: now,
            born: (now.seconds as u64).wrapping_mul(1_000_000_000).wrapping_add(now.nanos.into()),
            xattrs: BTreeMap::new(),
        }
    }

    pub(in crate::backend) fn kind(&self) -> Kind {
        match &self.body {
            Body::File(_) => Kind::File,
            Body::Dir { .. } => Kind::Dir,
            Body::Symlink(_) => Kind::Symlink,
            Body::Special(kind, _) => *kind,
        }
    }

    pub(in crate::backend) fn stat(&self, ino: u64) -> Stat {
        let (len, blocks, rdev) = match &self.body {
            Body::File(content) => (content.len(), content.page_count() * 8, 0),
            Body::Dir { .. } => (4096, 8, 0),
            Body::Symlink(target) => (target.len() as u64, 0, 0),
            Body::Special(_, rdev) => (0, 0, *rdev),
        };
        let Node { mode, nlink, uid, gid, atime, mtime, ctime, born, .. } = *self;
        Stat { dev: 1, ino, kind: self.kind(), mode, nlink, uid, gid, rdev, len, blocks, atime, mtime, ctime, born }
    }

    /// Times after a change of the bytes or the entries.
    pub(in crate::backend) fn touch(&mut self, now: Time) {
        self.mtime = now;
        self.ctime = now;
    }
}

/// How a store gives inode numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// Each is used once.
    Once,
    /// The highest free one is used first, and a birth time tells the inodes apart.
    Again,
    /// The same without birth times.
    AgainUnseen,
}

/// All nodes.
#[derive(Clone)]
pub(in crate::backend) struct Tree {
    nodes: Vec<Option<Arc<Node>>>,
    pub numbers: Numbers,
}

impl Tree {
    pub(in crate::backend) fn new(now: Time) -> Tree {
        let root = Body::Dir { entries: BTreeMap::new(), parent: ROOT_INO };
        Tree { nodes: vec![None, Some(Arc::new(Node::new(root, 0o755, now)))], numbers: Numbers::Once }
    }

    /// The number the next created node gets.
    pub(in crate::backend) fn next_ino(&self) -> u64 {
        let next = self.nodes.len();
        let is_free = |ino: &usize| *ino > ROOT_INO as usize && self.nodes[*ino].is_none();
        match self.numbers {
            Numbers::Once => next as u64,
            Numbers::Again | Numbers::AgainUnseen => (0..next).rev().find(is_free).unwrap_or(next) as u64,
        }
    }

    pub(in crate::backend) fn get(&self, ino: u64) -> Option<&Node> {
        self.nodes.get(ino as usize)?.as_deref()
    }

    pub(in crate::backend) fn get_mut(&mut self, ino: u64) -> Option<&mut Node> {
        self.nodes.get_mut(ino as usize)?.as_mut().map(Arc::make_mut)
    }

    pub(in crate::backend) fn content(&self, ino: u64) -> Option<&Content> {
        match &self.get(ino)?.body {
            Body::File(content) => Some(content),
            _ => None,
        }
    }

    pub(in crate::backend) fn content_mut(&mut self, ino: u64) -> Option<&mut Content> {
        match &mut self.get_mut(ino)?.body {
            Body::File(content) => Some(content),
            _ => None,
        }
    }

    pub(in crate::backend) fn entries(&self, dir: u64) -> io::Result<&BTreeMap<OsString, u64>> {
        match self.get(dir).map(|n| &n.body) {
            Some(Body::Dir { entries, .. }) => Ok(entries),
            Some(_) => Err(Errno::NOTDIR.into()),
            None => Err(Errno::NOENT.into()),
        }
    }

    pub(in crate::backend) fn lookup(&self, dir: u64, name: &OsStr) -> io::Result<u64> {
        check_entry_name(name)?;
        self.entries(dir)?.get(name).copied().ok_or(Errno::NOENT.into())
    }

    /// Frees nodes without a name, except those that `kept` says are open.
    pub(in crate::backend) fn free_orphan(&mut self, ino: u64) {
        if let Some(slot) = self.nodes.get_mut(ino as usize)
            && slot.as_ref().is_some_and(|n| n.nlink == 0)
        {
            *slot = None;
        }
    }

    /// Frees every node without a name: what a kill does to files that were open.
    pub(in crate::backend) fn free_orphans(&mut self) {
        for slot in &mut self.nodes {
            if slot.as_ref().is_some_and(|n| n.nlink == 0) {
                *slot = None;
            }
        }
    }

    /// Applies an operation on names, or refuses it with the errno Linux gives and changes nothing.
    /// Answers the inode that lost its last name, if one did; freeing it is up to the caller.
    pub(in crate::backend) fn apply_namespace(&mut self, op: &NamespaceOp, now: Time) -> io::Result<Option<u64>> {
        match op {
            NamespaceOp::Create { dir, name, ino, node, mode } => {
                self.create(*dir, name, *ino, node, *mode, now).map(|()| None)
            }
            NamespaceOp::Link { dir, name, ino } => self.link(*dir, name, *ino, now).map(|()| None),
            NamespaceOp::Rename { from, name, to, to_name, mode } => {
                self.rename((*from, name), (*to, to_name), *mode, now)
            }
            NamespaceOp::Unlink { dir, name } => self.remove(*dir, name, false, now).map(Some).map(|gone| {
                gone.filter(|&ino| self.get(ino).is_some_and(|n| n.nlink == 0)) //
            }),
            NamespaceOp::RemoveDir { dir, name } => self.remove(*dir, name, true, now).map(Some),
        }
    }

    /// Applies a change of attributes. A node that is gone ignores it.
    pub(in crate::backend) fn apply_attribute(&mut self, ino: u64, op: &AttributeOp, now: Time) {
        let Some(node) = self.get_mut(ino) else { return };
        node.ctime = now;
        match op {
            AttributeOp::Mode(mode) => node.mode = mode & 0o7777,
            AttributeOp::Owner(uid, gid) => {
                node.uid = uid.unwrap_or(node.uid);
                node.gid = gid.unwrap_or(node.gid);
            }
            AttributeOp::Times(atime, mtime) => {
                node.atime = atime.unwrap_or(node.atime);
                node.mtime = mtime.unwrap_or(node.mtime);
            }
            AttributeOp::SetXattr(name, value) => {
                node.xattrs.insert(name.clone(), value.clone());
            }
            AttributeOp::RemoveXattr(name) => {
                node.xattrs.remove(name);
            }
        }
    }

    /// A directory that still has a name, to put entries in.
    fn live_dir(&self, dir: u64) -> io::Result<&BTreeMap<OsString, u64>> {
        let entries = self.entries(dir)?;
        if self.get(dir).is_some_and(|n| n.nlink == 0) { Err(Errno::NOENT.into()) } else { Ok(entries) }
    }

    fn vacant(&self, dir: u64, name: &OsStr) -> io::Result<()> {
        check_entry_name(name)?;
        if self.live_dir(dir)?.contains_key(name) { Err(Errno::EXIST.into()) } else { Ok(()) }
    }

    fn create(&mut self, dir: u64, name: &OsStr, ino: u64, new: &NewNode, mode: u32, now: Time) -> io::Result<()> {
        self.vacant(dir, name)?;
        let body = match new {
            NewNode::File => Body::File(Content::default()),
            NewNode::Dir => Body::Dir { entries: BTreeMap::new(), parent: dir },
            NewNode::Symlink(target) if target.is_empty() => return Err(Errno::NOENT.into()),
            NewNode::Symlink(target) if target.len() > LINK_BYTES_MAX => return Err(Errno::NAMETOOLONG.into()),
            NewNode::Symlink(target) => Body::Symlink(target.clone()),
            NewNode::Special(Kind::File | Kind::Dir | Kind::Symlink, _) => return Err(Errno::INVAL.into()),
            NewNode::Special(kind, rdev) => Body::Special(*kind, *rdev),
        };
        if self.nodes.len() <= ino as usize {
            self.nodes.resize(ino as usize + 1, None);
        }
        let mut node = Node::new(body, mode, now);
        if self.numbers == Numbers::AgainUnseen {
            node.born = 0;
        }
        self.nodes[ino as usize] = Some(Arc::new(node));
        self.attach(dir, name, ino, now);
        Ok(())
    }

    fn link(&mut self, dir: u64, name: &OsStr, ino: u64, now: Time) -> io::Result<()> {
        let node = self.get(ino).filter(|n| n.nlink > 0).ok_or(Errno::NOENT)?;
        let is_dir = node.kind() == Kind::Dir;
        self.vacant(dir, name)?;
        if is_dir {
            return Err(Errno::PERM.into());
        }
        self.attach(dir, name, ino, now);
        if let Some(node) = self.get_mut(ino) {
            node.nlink += 1;
            node.ctime = now;
        }
        Ok(())
    }

    fn remove(&mut self, dir: u64, name: &OsStr, want_dir: bool, now: Time) -> io::Result<u64> {
        let ino = self.lookup(dir, name)?;
        match (self.entries(ino), want_dir) {
            (Ok(_), false) => return Err(Errno::ISDIR.into()),
            (Err(_), true) => return Err(Errno::NOTDIR.into()),
            (Ok(entries), true) if !entries.is_empty() => return Err(Errno::NOTEMPTY.into()),
            _ => {}
        }
        self.detach(dir, name, now);
        self.drop_link(ino, now);
        Ok(ino)
    }

    fn rename(
        &mut self,
        (from, name): (u64, &OsStr),
        (to, to_name): (u64, &OsStr),
        mode: RenameMode,
        now: Time,
    ) -> io::Result<Option<u64>> {
        let source = self.lookup(from, name)?;
        check_entry_name(to_name)?;
        let target = self.live_dir(to)?.get(to_name).copied();
        self.check_rename(from, source, to, target, mode)?;
        if target == Some(source) {
            return Ok(None);
        }
        self.detach(from, name, now);
        let mut gone = None;
        if let Some(target) = target {
            self.detach(to, to_name, now);
            if mode == RenameMode::Exchange {
                self.attach(from, name, target, now);
            } else {
                self.drop_link(target, now);
                gone = Some(target).filter(|&ino| self.get(ino).is_some_and(|n| n.nlink == 0));
            }
        }
        self.attach(to, to_name, source, now);
        Ok(gone)
    }

    fn check_rename(&self, from: u64, source: u64, to: u64, target: Option<u64>, mode: RenameMode) -> io::Result<()> {
        let target = match (target, mode) {
            (Some(_), RenameMode::NoReplace) => return Err(Errno::EXIST.into()),
            (None, RenameMode::Exchange) => return Err(Errno::NOENT.into()),
            (target, _) => target,
        };
        if self.is_within(to, source) {
            return Err(Errno::INVAL.into());
        }
        let Some(target) = target.filter(|&t| t != source) else { return Ok(()) };
        if self.is_within(from, target) {
            let errno = if mode == RenameMode::Exchange { Errno::INVAL } else { Errno::NOTEMPTY };
            return Err(errno.into());
        }
        if mode == RenameMode::Exchange {
            return Ok(());
        }
        match (self.entries(source).is_ok(), self.entries(target)) {
            (false, Ok(_)) => Err(Errno::ISDIR.into()),
            (true, Err(_)) => Err(Errno::NOTDIR.into()),
            (true, Ok(entries)) if !entries.is_empty() => Err(Errno::NOTEMPTY.into()),
            _ => Ok(()),
        }
    }

    /// Whether `dir` is `ancestor` or lies below it.
    fn is_within(&self, mut dir: u64, ancestor: u64) -> bool {
        loop {
            if dir == ancestor {
                return true;
            }
            match self.get(dir).map(|n| &n.body) {
                Some(Body::Dir { parent, .. }) if dir != ROOT_INO => dir = *parent,
                _ => return false,
            }
        }
    }

    /// Enters a node in a directory; the name is vacant.
    fn attach(&mut self, dir: u64, name: &OsStr, ino: u64, now: Time) {
        let mut is_dir = false;
        if let Some(node) = self.get_mut(ino) {
            node.ctime = now;
            if let Body::Dir { parent, .. } = &mut node.body {
                *parent = dir;
                is_dir = true;
            }
        }
        if let Some(node) = self.get_mut(dir) {
            node.touch(now);
            node.nlink += u64::from(is_dir);
            if let Body::Dir { entries, .. } = &mut node.body {
                entries.insert(name.to_owned(), ino);
            }
        }
    }

    /// Takes an entry out of a directory; the node keeps its link count.
    fn detach(&mut self, dir: u64, name: &OsStr, now: Time) {
        let Some(node) = self.get_mut(dir) else { return };
        node.touch(now);
        let Body::Dir { entries, .. } = &mut node.body else { return };
        let gone = entries.remove(name);
        if gone.is_some_and(|ino| self.entries(ino).is_ok())
            && let Some(node) = self.get_mut(dir)
        {
            node.nlink -= 1;
        }
    }

    fn drop_link(&mut self, ino: u64, now: Time) {
        if let Some(node) = self.get_mut(ino) {
            node.ctime = now;
            node.nlink = if matches!(node.body, Body::Dir { .. }) { 0 } else { node.nlink - 1 };
        }
    }
}

fn check_entry_name(name: &OsStr) -> io::Result<()> {
    if check_name(name)?.as_bytes().len() > NAME_BYTES_MAX { Err(Errno::NAMETOOLONG.into()) } else { Ok(()) }
}
