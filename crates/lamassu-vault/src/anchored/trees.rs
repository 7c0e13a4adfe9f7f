//! The tree records of files in the store: `lamassu.tree/xx/<object>`, in hexadecimal, where `xx` is its last two
//! digits, with `.blocks` appended for the tree over blocks (`docs/format.md`). They are a cache: never synced, never
//! trusted. Records that cannot be read count as zeros, which costs a rebuild from the pages; so do records that cannot
//! be written.

use crate::stored::{PRIVATE, keeping_times};
use lamassu_anchor::ObjectId;
use lamassu_format::name::TREE;
use lamassu_store::file::{TreeOf, Trees};
use lamassu_store::integrity::Records;
use lamassu_store::{BackendDir, BackendFile};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::Arc;

/// The directory of all tree records of a vault.
#[derive(Clone)]
pub(crate) struct TreeFiles {
    root: Arc<dyn BackendDir>,
    read_only: bool,
    /// Directories `xx` that did not exist at the last look, so that a removal need not look again: most files have no
    /// records. An entry is removed when a record is made there.
    absent: Arc<Mutex<HashSet<OsString>>>,
}

impl TreeFiles {
    pub fn new(root: Arc<dyn BackendDir>, read_only: bool) -> TreeFiles {
        TreeFiles { root, read_only, absent: Arc::default() }
    }

    /// Removes the records of an object that is gone. A leftover does no harm: a number that a commit has recorded is
    /// never used again, and if another one is, what is left does not match the new object's root.
    pub fn remove(&self, object: ObjectId) {
        let (dir, _) = place((object, TreeOf::Pages));
        if self.read_only || self.absent.lock().contains(&dir) {
            return;
        }
        let opened = self.root.open_dir(OsStr::new(TREE)).and_then(|tree| tree.open_dir(&dir));
        let removed = opened.map(|dir| [TreeOf::Pages, TreeOf::Blocks].map(|of| dir.unlink(&place((object, of)).1)));
        let errors = match removed {
            Ok(removed) => removed.map(Result::err),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.absent.lock().insert(dir);
                return;
            }
            Err(error) => [Some(error), None],
        };
        for error in errors.into_iter().flatten().filter(|error| error.kind() != io::ErrorKind::NotFound) {
            tracing::debug!(object = object.0, %error, "stays in {TREE}");
        }
    }

    fn open(&self, tree: (ObjectId, TreeOf), write: bool) -> io::Result<Arc<dyn BackendFile>> {
        let (dir, name) = place(tree);
        self.root.open_dir(OsStr::new(TREE))?.open_dir(&dir)?.open_file(&name, write)
    }

    /// The directory of all records.
    fn made_tree(&self) -> io::Result<Arc<dyn BackendDir>> {
        match self.root.open_dir(OsStr::new(TREE)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            opened => return opened,
        }
        keeping_times(&*self.root, || made_dir(&*self.root, OsStr::new(TREE)))
    }

    fn create(&self, of: (ObjectId, TreeOf)) -> io::Result<Arc<dyn BackendFile>> {
        let (dir, name) = place(of);
        let tree = self.made_tree()?;
        let files = made_dir(&*tree, &dir)?;
        self.absent.lock().remove(&dir);
        match files.create_file(&name) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => files.open_file(&name, true),
            made => made,
        }
    }
}

/// The directory and the name of an object's records.
fn place((object, of): (ObjectId, TreeOf)) -> (OsString, OsString) {
    let end = if of == TreeOf::Blocks { ".blocks" } else { "" };
    (format!("{:02x}", object.0 & 0xff).into(), format!("{:016x}{end}", object.0).into())
}

fn made_dir(parent: &dyn BackendDir, name: &OsStr) -> io::Result<Arc<dyn BackendDir>> {
    match parent.open_dir(name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    match parent.make_dir(name, PRIVATE) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        Ok(()) | Err(_) => {}
    }
    parent.open_dir(name)
}

impl Trees for TreeFiles {
    fn records(&self, object: ObjectId, of: TreeOf) -> Arc<dyn Records> {
        Arc::new(TreeRecords { files: self.clone(), object, of, open: Mutex::new(Open::Unknown) })
    }
}

/// The file of one object, opened when it is first needed.
struct TreeRecords {
    files: TreeFiles,
    object: ObjectId,
    of: TreeOf,
    open: Mutex<Open>,
}

enum Open {
    Unknown,
    /// There is no readable file.
    Absent,
    File(Arc<dyn BackendFile>),
}

impl Records for TreeRecords {
    fn read(&self, offset: u64, record: &mut [u8]) -> io::Result<()> {
        let file = {
            let open = &mut *self.open.lock();
            if matches!(open, Open::Unknown) {
                let write = !self.files.read_only;
                *open = self.files.open((self.object, self.of), write).map_or(Open::Absent, Open::File);
            }
            if let Open::File(file) = open { Some(file.clone()) } else { None }
        };
        let got = file.and_then(|file| file.read_at(offset, record).ok()).unwrap_or_default();
        record[got..].fill(0);
        Ok(())
    }

    fn write(&self, offset: u64, record: &[u8]) -> io::Result<()> {
        if self.files.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        let file = {
            let open = &mut *self.open.lock();
            match open {
                Open::File(file) => file.clone(),
                Open::Unknown | Open::Absent => {
                    let file = self.files.create((self.object, self.of))?;
                    *open = Open::File(file.clone());
                    file
                }
            }
        };
        file.write_at(offset, record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_store::Backend;
    use lamassu_store::backend::MemoryBackend;

    fn read(trees: &TreeFiles, object: u64) -> [u8; 4] {
        let mut record = [9; 4];
        trees.records(ObjectId(object), TreeOf::Pages).read(8, &mut record).unwrap();
        record
    }

    #[test]
    fn what_was_not_written_reads_as_zeros_and_goes_with_its_object() {
        let trees = TreeFiles::new(MemoryBackend::new().root(), false);
        assert_eq!(read(&trees, 0x1ab), [0; 4]);
        trees.records(ObjectId(0x1ab), TreeOf::Pages).write(8, &[1, 2, 3, 4]).unwrap();
        assert_eq!(read(&trees, 0x1ab), [1, 2, 3, 4]);
        assert_eq!(read(&trees, 0xab), [0; 4]);
        trees.remove(ObjectId(0x1ab));
        trees.remove(ObjectId(0x1ab));
        assert_eq!(read(&trees, 0x1ab), [0; 4]);
        // Its directory was not there, and is now.
        trees.remove(ObjectId(0x1ac));
        trees.records(ObjectId(0x1ac), TreeOf::Blocks).write(0, &[1]).unwrap();
        trees.remove(ObjectId(0x1ac));
        let dir = trees.root.open_dir(OsStr::new(TREE)).unwrap().open_dir(OsStr::new("ac")).unwrap();
        assert!(dir.read_dir().unwrap().is_empty());
    }

    #[test]
    fn what_somebody_put_in_its_place_is_no_error_of_a_read() {
        let root = MemoryBackend::new().root();
        root.make_symlink(OsStr::new(TREE), OsStr::new("/etc")).unwrap();
        let trees = TreeFiles::new(root, false);
        assert_eq!(read(&trees, 1), [0; 4]);
        assert!(trees.records(ObjectId(1), TreeOf::Pages).write(0, &[1]).is_err());
    }
}
