//! Common parts of answers, and listings with attributes.

use super::convert::{file_attr, file_type, negative_entry};
use super::{Adapter, Shared, failed};
use fuser::{Errno, Generation, INodeNo, ReplyAttr, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyXattr};
use lamassu_vault::{Attr, DirEntry, Entry, FileSystem, HandleId, Ino, Result, VaultError};
use std::ffi::OsStr;
use std::time::Duration;

pub(super) fn send_empty(op: &'static str, result: Result<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(failed(op, &error)),
    }
}

/// xattr replies: `size` 0 asks how large a buffer must be.
pub(super) fn send_xattr(op: &'static str, result: Result<Vec<u8>>, size: u32, reply: ReplyXattr) {
    match result {
        Ok(value) => match u32::try_from(value.len()) {
            Ok(len) if size == 0 => reply.size(len),
            Ok(len) if len <= size => reply.data(&value),
            Ok(_) | Err(_) => reply.error(Errno::ERANGE),
        },
        Err(error) => reply.error(failed(op, &error)),
    }
}

pub(super) fn is_not_found(error: &VaultError) -> bool {
    crate::errno_of(error) == libc::ENOENT
}

impl<F: FileSystem> Shared<F> {
    pub(super) fn send_entry(
        &self,
        op: &'static str,
        (dir, name): (Ino, &OsStr),
        result: Result<Entry>,
        reply: ReplyEntry,
    ) {
        match result {
            Ok(entry) => {
                let attr_ttl = self.ttl(entry.attr.ino);
                let name_ttl = self.name_ttl(dir, name);
                reply.entry_with_ttls(&attr_ttl, &name_ttl, &file_attr(&entry.attr), Generation(entry.generation));
            }
            Err(error) => reply.error(failed(op, &error)),
        }
    }

    pub(super) fn send_attr(&self, op: &'static str, result: Result<Attr>, reply: ReplyAttr) {
        match result {
            Ok(attr) => reply.attr(&self.ttl(attr.ino), &file_attr(&attr)),
            Err(error) => reply.error(failed(op, &error)),
        }
    }
}

impl<F: FileSystem> Adapter<F> {
    pub(super) fn send_listing_with_attributes(
        shared: &Shared<F>,
        dir: Ino,
        handle: HandleId,
        cookie: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let mut is_empty = true;
        let mut add = |listed: &DirEntry, entry: Option<Entry>, next| {
            let full = match entry {
                Some(entry) => {
                    let (ino, generation) = (entry.attr.ino, Generation(entry.generation));
                    // One for the name and the attributes.
                    let ttl = shared.ttl(ino).min(shared.name_ttl(dir, &listed.name));
                    let full = reply.add(INodeNo(ino), next, &listed.name, &ttl, &file_attr(&entry.attr), generation);
                    if full {
                        shared.fs.forget(ino, 1);
                    }
                    full
                }
                None => {
                    // Node 0: the kernel links the name to no inode, and looks it up when it is used. The number in the
                    // listing may belong to another file (a link that the store has made).
                    let attr =
                        fuser::FileAttr { ino: INodeNo(listed.ino), kind: file_type(listed.kind), ..negative_entry() };
                    reply.add(INodeNo(0), next, &listed.name, &Duration::ZERO, &attr, Generation(0))
                }
            };
            is_empty &= full;
            !full
        };
        let listed = match shared.keeps(handle.0) {
            true => shared.read_dir_plus(handle, cookie, &mut add),
            // With attributes the kernel would ask again for each entry.
            false => shared.read_dir(handle, cookie, &mut |listed, next| add(listed, None, next)),
        };
        match listed {
            Err(error) if is_empty => reply.error(failed("readdirplus", &error)),
            // The references of the entries in the reply are counted, so it must be sent; the next request gets the
            // error.
            Ok(()) | Err(_) => reply.ok(),
        }
    }
}
