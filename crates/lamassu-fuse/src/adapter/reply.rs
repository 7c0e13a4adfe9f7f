//! Answers that several requests have in common, and listings with attributes.

use super::convert::{file_attr, file_type, negative_entry};
use super::{Adapter, Shared, TTL, failed};
use crate::fs::FileSystem;
use fuser::{Errno, Generation, INodeNo, ReplyAttr, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyXattr};
use lamassu_vault::{Attr, DirEntry, Entry, HandleId, Ino, Result, VaultError};
use std::ffi::OsStr;

/// Entries fetched at a time for a listing with attributes: their lookups happen outside the listing.
const BATCH: usize = 64;

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

fn is_dot(name: &OsStr) -> bool {
    name == "." || name == ".."
}

impl<F: FileSystem> Shared<F> {
    pub(super) fn send_entry(&self, op: &'static str, result: Result<Entry>, reply: ReplyEntry) {
        match result {
            Ok(entry) => {
                let attr_ttl = self.ttl(entry.attr.ino);
                reply.entry_with_ttls(&attr_ttl, &TTL, &file_attr(&entry.attr), Generation(entry.generation));
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
    pub(super) fn readdirplus_batches(
        shared: &Shared<F>,
        parent: Ino,
        handle: HandleId,
        mut cookie: u64,
        reply: &mut ReplyDirectoryPlus,
    ) -> Result<()> {
        let mut first = true;
        loop {
            let mut batch: Vec<(DirEntry, u64)> = Vec::with_capacity(BATCH);
            let listed = shared.fs.read_dir(handle, cookie, &mut |entry, next| {
                batch.push((entry.clone(), next));
                batch.len() < BATCH
            });
            match listed {
                Ok(()) => {}
                Err(error) if first => return Err(error),
                // What is in the reply has its references counted, so it must be sent; the next request meets the error.
                Err(_) => return Ok(()),
            }
            first = false;
            let ended = batch.len() < BATCH;
            for (entry, next) in batch {
                cookie = next;
                if Self::add_plus(shared, parent, &entry, next, reply) {
                    return Ok(());
                }
            }
            if ended {
                return Ok(());
            }
        }
    }

    /// Adds one entry with its attributes, and so one reference. True: the reply is full and the entry is not in it.
    fn add_plus(shared: &Shared<F>, parent: Ino, entry: &DirEntry, next: u64, reply: &mut ReplyDirectoryPlus) -> bool {
        let ino = INodeNo(entry.ino);
        if is_dot(&entry.name) {
            // The kernel reads no attributes here and takes no reference.
            let attr = fuser::FileAttr { ino, kind: file_type(entry.kind), ..negative_entry() };
            return reply.add(ino, next, &entry.name, &TTL, &attr, Generation(0));
        }
        let Ok(found) = shared.fs.lookup(parent, &entry.name) else {
            // Removed since it was listed, or damaged: a listing goes on without it, a lookup by name says which.
            return false;
        };
        let ttl = shared.ttl(found.attr.ino);
        let full = reply.add(ino, next, &entry.name, &ttl, &file_attr(&found.attr), Generation(found.generation));
        if full {
            shared.fs.forget(found.attr.ino, 1);
        }
        full
    }
}
