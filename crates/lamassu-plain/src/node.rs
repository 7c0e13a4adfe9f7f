//! Inodes the kernel holds references to, each with an `O_PATH` descriptor.

use super::io;
use lamassu_vault::{Attr, Entry, Ino, Kind, ROOT, Result, Time, VaultError};
use parking_lot::Mutex;
use rustix::fs::{FileType, Mode, OFlags, Stat};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

pub(super) struct Node {
    fd: OwnedFd,
    pub(super) kind: Kind,
}

impl Node {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The way to what an `O_PATH` descriptor cannot do by itself.
    pub(super) fn proc_path(&self) -> String {
        format!("/proc/self/fd/{}", self.fd.as_raw_fd())
    }

    pub(super) fn stat(&self) -> Result<Stat> {
        rustix::fs::fstat(&self.fd).map_err(|e| io("stat", e))
    }
}

struct Held {
    node: Arc<Node>,
    references: u64,
    key: (u64, u64),
}

#[derive(Default)]
struct Table {
    held: HashMap<Ino, Held>,
    by_key: HashMap<(u64, u64), Ino>,
    made_up: u64,
}

pub(super) struct Nodes {
    root_key: (u64, u64),
    table: Mutex<Table>,
}

impl Nodes {
    pub(super) fn new(root: OwnedFd) -> Result<Nodes> {
        let stat = rustix::fs::fstat(&root).map_err(|e| io("stat", e))?;
        let root_key = (stat.st_dev, stat.st_ino);
        let mut table = Table::default();
        let node = Arc::new(Node { fd: root, kind: Kind::Dir });
        table.held.insert(ROOT, Held { node, references: 1, key: root_key });
        table.by_key.insert(root_key, ROOT);
        Ok(Nodes { root_key, table: Mutex::new(table) })
    }

    pub(super) fn get(&self, ino: Ino) -> Result<Arc<Node>> {
        self.table.lock().held.get(&ino).map(|h| h.node.clone()).ok_or(VaultError::Stale)
    }

    /// Finds an entry of a directory and adds a reference to it.
    pub(super) fn look_up(&self, parent: Ino, name: &OsStr) -> Result<Entry> {
        self.look_up_in(&*self.get(parent)?, name)
    }

    /// The same in a directory at hand.
    pub(super) fn look_up_in(&self, parent: &Node, name: &OsStr) -> Result<Entry> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(parent.fd(), name, flags, Mode::empty()).map_err(|e| io("lookup", e))?;
        let stat = rustix::fs::fstat(&fd).map_err(|e| io("stat", e))?;
        let ino = self.hold(fd, &stat);
        Ok(Entry { attr: attr(&stat, ino), generation: 0 })
    }

    fn hold(&self, fd: OwnedFd, stat: &Stat) -> Ino {
        let key = (stat.st_dev, stat.st_ino);
        let mut table = self.table.lock();
        if let Some(ino) = table.by_key.get(&key).copied() {
            if let Some(held) = table.held.get_mut(&ino) {
                held.references += 1;
            }
            return ino;
        }
        let ino = if key.0 == self.root_key.0 && key.1 != ROOT {
            key.1
        } else {
            // Other file systems mounted below, or a number that is the root's: such numbers are ours, from the top
            // half.
            table.made_up += 1;
            1 << 63 | table.made_up
        };
        let node = Arc::new(Node { fd, kind: kind(stat.st_mode) });
        table.held.insert(ino, Held { node, references: 1, key });
        table.by_key.insert(key, ino);
        ino
    }

    pub(super) fn forget(&self, ino: Ino, count: u64) {
        let mut table = self.table.lock();
        let Some(held) = table.held.get_mut(&ino) else { return };
        held.references = held.references.saturating_sub(count);
        if held.references == 0 && ino != ROOT {
            let key = held.key;
            table.held.remove(&ino);
            table.by_key.remove(&key);
        }
    }
}

pub(super) fn kind(mode: u32) -> Kind {
    kind_of(FileType::from_raw_mode(mode))
}

pub(super) fn kind_of(file_type: FileType) -> Kind {
    match file_type {
        FileType::Directory => Kind::Dir,
        FileType::Symlink => Kind::Symlink,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::CharacterDevice => Kind::CharDevice,
        FileType::BlockDevice => Kind::BlockDevice,
        FileType::RegularFile | FileType::Unknown => Kind::File,
    }
}

pub(super) fn attr(stat: &Stat, ino: Ino) -> Attr {
    let time = |seconds, nanos: u64| Time { seconds, nanos: nanos as u32 };
    Attr {
        ino,
        kind: kind(stat.st_mode),
        mode: stat.st_mode & 0o7777,
        nlink: stat.st_nlink,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: stat.st_rdev,
        size: stat.st_size as u64,
        blocks: stat.st_blocks as u64,
        block_size: u32::try_from(stat.st_blksize).unwrap_or(4096),
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
    }
}
