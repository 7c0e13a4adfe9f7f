//! Entries and open files of the vault, whose references and handles are released when they are dropped.

use super::ObjectError;
use crate::limits::Turn;
use crate::{memory, work};
use lamassu_plain::PlainFs;
use lamassu_vault::{
    Access, Attr, Entry, EntryRef, FileSystem, Forest, HandleId, Ino, Kind, Owner, ROOT, RenameMode, Result, SetXattr,
    VaultError, read_full, write_all,
};
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Read-only access.
pub const READ: Access = Access { read: true, write: false, truncate: false };
const READ_WRITE: Access = Access { read: true, write: true, truncate: false };
/// Bytes that are copied by keys at once: what one turn moves in the store without a cipher.
const COPIED_AT_ONCE: u64 = 8 << 20;

/// The tree that objects are kept in: a vault with its datasets, or a provider's directory.
pub trait Tree: FileSystem {
    /// The entry at a path; adds a reference.
    ///
    /// # Errors
    /// Those of a lookup.
    fn at(&self, path: &OsStr) -> Result<Entry>;
    /// Tells the kernel that a name has changed, if the tree is mounted too.
    fn changed(&self, parent: Ino, name: &OsStr);
    /// Calls `each` for the entries of a directory except `.` and `..`. A vault holds all of them in memory meanwhile,
    /// so it first waits for a permit of the tenant.
    ///
    /// # Errors
    /// Those of the directory.
    fn each_name(&self, dir: Ino, each: &mut dyn FnMut(&OsStr, Kind)) -> Result<()>;
    /// Whether the store of an entry has free blocks.
    fn has_space(&self, ino: Ino) -> bool;
    /// The namespace of extended attributes: one that programs in a mount cannot reach, where there is a mount.
    fn namespace(&self) -> &'static str;
}

/// How long one call goes through a directory.
const PART: Duration = Duration::from_millis(10);
/// Entries of a directory whose reading takes enough memory, some 5 MiB, that it is given back.
const LARGE: usize = 20_000;

impl Tree for Forest {
    fn at(&self, path: &OsStr) -> Result<Entry> {
        self.resolve(path)
    }
    fn changed(&self, parent: Ino, name: &OsStr) {
        self.changed_beside_kernel(parent, name);
    }
    fn each_name(&self, dir: Ino, each: &mut dyn FnMut(&OsStr, Kind)) -> Result<()> {
        let _reading = work::reading(VaultError::Stale)?;
        let mut count = 0;
        let listed = each_in_turns(self, dir, &mut |name, kind| {
            count += 1;
            each(name, kind);
        });
        if count >= LARGE {
            memory::give_back();
        }
        listed
    }
    fn has_space(&self, _: Ino) -> bool {
        self.statfs().is_ok_and(|fs| fs.blocks_available > 0)
    }
    fn namespace(&self) -> &'static str {
        "trusted."
    }
}

/// Goes through a directory, and gives way to others between parts of it, when no call holds a lock of the vault.
fn each_in_turns(forest: &Forest, dir: Ino, each: &mut dyn FnMut(&OsStr, Kind)) -> Result<()> {
    let handle = forest.open_dir(dir)?;
    let mut read = || {
        let mut from = 0;
        loop {
            let (begun, mut is_all) = (Instant::now(), true);
            forest.read_dir(handle, from, &mut |entry, next| {
                if entry.name != "." && entry.name != ".." {
                    each(&entry.name, entry.kind);
                }
                (from, is_all) = (next, begun.elapsed() < PART);
                is_all
            })?;
            if is_all {
                return Ok(());
            }
            work::give_way();
        }
    };
    let read = read();
    read.and(forest.release_dir(handle))
}

impl Tree for PlainFs {
    fn at(&self, path: &OsStr) -> Result<Entry> {
        match path.to_str() {
            Some("/") => Ok(Entry { attr: self.getattr(ROOT, None)?, generation: 0 }),
            _ => Err(VaultError::NotFound),
        }
    }
    fn changed(&self, _: Ino, _: &OsStr) {}
    fn each_name(&self, dir: Ino, each: &mut dyn FnMut(&OsStr, Kind)) -> Result<()> {
        PlainFs::each_name(self, dir, &mut |name, kind| {
            work::give_way();
            each(name, kind);
        })
    }
    fn has_space(&self, ino: Ino) -> bool {
        PlainFs::has_space(self, ino).unwrap_or(false)
    }
    fn namespace(&self) -> &'static str {
        // Only root can set `trusted.` attributes. No other user reaches a provider's directory.
        "user."
    }
}

/// An entry, with a reference to it. Cheap to clone.
#[derive(Clone)]
pub struct Node(Arc<EntryRef<Arc<dyn Tree>>>);

impl Node {
    /// Takes over the reference to an entry.
    pub fn new(fs: &Arc<dyn Tree>, entry: Entry) -> Node {
        Node(Arc::new(EntryRef::new(fs.clone(), entry)))
    }

    /// The entry at a path of the vault.
    ///
    /// # Errors
    /// Those of [`Tree::at`].
    pub fn at(fs: &Arc<dyn Tree>, path: &OsStr) -> Result<Node> {
        Ok(Node::new(fs, fs.at(path)?))
    }

    /// Its number.
    pub fn ino(&self) -> Ino {
        self.0.ino()
    }

    /// Its attributes when it was looked up.
    pub fn attr(&self) -> &Attr {
        self.0.attr()
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.0.is_dir()
    }

    /// The file system it lies in.
    pub fn fs(&self) -> &Arc<dyn Tree> {
        self.0.fs()
    }

    /// The entry of this directory under a name.
    ///
    /// # Errors
    /// [`VaultError::NotFound`]; [`VaultError::NotDirectory`]; those of the vault.
    pub fn child(&self, name: &OsStr) -> Result<Node> {
        self.0.child(name).map(|entry| Node(Arc::new(entry)))
    }

    /// The same; `None`: there is none.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn child_if_there(&self, name: &OsStr) -> Result<Option<Node>> {
        Ok(self.0.child_if_there(name)?.map(|entry| Node(Arc::new(entry))))
    }

    /// Makes a directory in this one.
    ///
    /// # Errors
    /// [`VaultError::Exists`]; those of the vault.
    pub fn make_dir(&self, name: &OsStr, mode: u32, owner: Owner) -> Result<Node> {
        let made = Node::new(self.0.fs(), self.0.fs().mkdir(self.ino(), name, mode, owner)?);
        self.0.fs().changed(self.ino(), name);
        Ok(made)
    }

    /// Creates a file in this directory, open for reading and writing.
    ///
    /// # Errors
    /// [`VaultError::Exists`]; those of the vault.
    pub fn create(&self, name: &OsStr, mode: u32, owner: Owner) -> Result<Open> {
        let (entry, handle) = self.0.fs().create(self.ino(), name, mode, READ_WRITE, owner)?;
        self.0.fs().changed(self.ino(), name);
        Ok(Open::new(Node::new(self.0.fs(), entry), handle))
    }

    /// Removes a file from this directory.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn unlink(&self, name: &OsStr) -> Result<()> {
        let done = self.0.fs().unlink(self.ino(), name);
        self.0.fs().changed(self.ino(), name);
        done
    }

    /// Removes an empty directory from this one.
    ///
    /// # Errors
    /// [`VaultError::NotEmpty`]; those of the vault.
    pub fn remove_dir(&self, name: &OsStr) -> Result<()> {
        let done = self.0.fs().rmdir(self.ino(), name);
        self.0.fs().changed(self.ino(), name);
        done
    }

    /// Renames an entry within this directory.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn rename(&self, name: &OsStr, new: &OsStr, mode: RenameMode) -> Result<()> {
        self.rename_into(name, self, new, mode)
    }

    /// Renames an entry of this directory to a name in another.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn rename_into(&self, name: &OsStr, to: &Node, new: &OsStr, mode: RenameMode) -> Result<()> {
        let done = self.0.fs().rename(self.ino(), name, to.ino(), new, mode);
        self.0.fs().changed(self.ino(), name);
        self.0.fs().changed(to.ino(), new);
        done
    }

    /// Makes the names of this directory durable.
    ///
    /// # Errors
    /// Those of the store.
    pub fn sync_names(&self) -> Result<()> {
        self.0.sync_names()
    }

    /// Calls `each` for the entries of this directory except `.` and `..`.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn list(&self, each: &mut dyn FnMut(&OsStr, Kind)) -> Result<()> {
        self.0.fs().each_name(self.ino(), each)
    }

    fn named(&self, name: &str) -> String {
        format!("{}{name}", self.0.fs().namespace())
    }

    /// An attribute, by its name in the namespace; `None`: it does not exist.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn xattr(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match self.0.fs().get_xattr(self.ino(), OsStr::new(&self.named(name))) {
            Ok(value) => Ok(Some(value)),
            Err(VaultError::NoAttribute) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn set_xattr(&self, name: &str, value: &[u8]) -> Result<()> {
        self.0.fs().set_xattr(self.ino(), OsStr::new(&self.named(name)), value, SetXattr::Any)
    }

    /// Removes an attribute, if it exists.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn remove_xattr(&self, name: &str) -> Result<()> {
        match self.0.fs().remove_xattr(self.ino(), OsStr::new(&self.named(name))) {
            Ok(()) | Err(VaultError::NoAttribute) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Makes content and attributes of a file, or of a directory, durable.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn sync(&self) -> Result<()> {
        if self.is_dir() {
            return self.sync_names();
        }
        // A vault syncs nothing of a file that is only read.
        let handle = self.0.fs().open_file(self.ino(), READ_WRITE)?;
        Open::new(self.clone(), handle).sync()
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn open(self) -> Result<Open> {
        let handle = self.0.fs().open_file(self.ino(), READ)?;
        Ok(Open::new(self, handle))
    }
}

/// An open file.
pub struct Open {
    node: Node,
    handle: HandleId,
    turn: Option<Arc<Turn>>,
}

impl Drop for Open {
    fn drop(&mut self) {
        let (node, handle) = (self.node.clone(), self.handle);
        // Written data was synced before, or is discarded.
        work::beside_async(self.turn.take(), move || drop(node.fs().release(handle)));
    }
}

impl Open {
    fn new(node: Node, handle: HandleId) -> Open {
        Open { node, handle, turn: work::current() }
    }

    /// The entry.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// stat, now.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn attr(&self) -> Result<Attr> {
        self.node.fs().getattr(self.node.ino(), Some(self.handle))
    }

    /// Reads up to `len` bytes from `offset`; fewer only at the end of the file.
    ///
    /// # Errors
    /// Those of the vault, damage among them.
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut buf = vec![0; len];
        let filled = read_full(&**self.node.fs(), self.handle, offset, &mut buf)?;
        buf.truncate(filled);
        Ok(buf)
    }

    /// Writes all of `data` at `offset`.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        write_all(offset, data, |at, part| self.node.fs().write(self.handle, at, part))
    }

    /// Writes everything to the store.
    ///
    /// # Errors
    /// Those of the store.
    pub fn flush(&self) -> Result<()> {
        self.node.fs().flush(self.handle)
    }

    /// Makes content and attributes durable.
    ///
    /// # Errors
    /// Those of the store.
    pub fn sync(&self) -> Result<()> {
        self.node.fs().fsync(self.handle, false)
    }

    /// Copies a range of another file. The vault copies block keys without reading data, as far as it can; the rest is
    /// read and written.
    ///
    /// # Errors
    /// [`VaultError::NoData`] if the source has become shorter; [`ObjectError::NoLonger`]; those of the vault.
    pub fn copy_from(
        &self,
        from: &Open,
        (mut source, mut target): (u64, u64),
        mut len: u64,
    ) -> Result<(), ObjectError> {
        let mut by_keys = true;
        while len > 0 {
            let piece = || Ok::<_, ObjectError>(self.copy_piece(from, (source, target), len, &mut by_keys)?);
            let done = work::in_turn(piece)?;
            (source, target, len) = (source + done, target + done, len.saturating_sub(done));
        }
        Ok(())
    }

    /// Copies the next piece of a range; returns its length.
    fn copy_piece(&self, from: &Open, at: (u64, u64), len: u64, by_keys: &mut bool) -> Result<u64> {
        if *by_keys && let Some(done @ 1..) = self.copy_by_keys(from, at, len.min(COPIED_AT_ONCE))? {
            return Ok(done);
        }
        // Only the partial block at the end is left, or keys cannot be copied at all.
        *by_keys = false;
        let data = from.read(at.0, usize::try_from(len).unwrap_or(usize::MAX).min(super::PIECE))?;
        if data.is_empty() {
            return Err(VaultError::NoData);
        }
        self.write(at.1, &data)?;
        Ok(data.len() as u64)
    }

    fn copy_by_keys(&self, from: &Open, (source, target): (u64, u64), len: u64) -> Result<Option<u64>> {
        match self.node.fs().copy_range((from.handle, source), (self.handle, target), len) {
            // Another dataset has other keys.
            Err(VaultError::OtherDataset | VaultError::Unsupported) => Ok(None),
            done => done,
        }
    }
}
