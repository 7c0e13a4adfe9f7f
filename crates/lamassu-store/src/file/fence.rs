//! A backing file that takes changes only while this process may make them.
//!
//! The anchor of a shared vault belongs to a session, which can end while this process runs. Then another host may hold
//! the vault (`docs/sharing.md`, L4), and changes that this process had decided on must not be carried out.

use crate::backend::{BackendFile, BackendNode, SetTime, Stat};
use lamassu_anchor::Anchor;
use lamassu_anchor::table::Standing;
use rustix::fd::BorrowedFd;
use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::Arc;

/// See the module's head.
pub(super) struct Fenced {
    inner: Arc<dyn BackendFile>,
    anchor: Arc<Anchor>,
}

impl Fenced {
    /// Returns the file itself if the anchor's session cannot end.
    pub fn of(inner: Arc<dyn BackendFile>, anchor: &Arc<Anchor>) -> Arc<dyn BackendFile> {
        match anchor.may_end() {
            true => Arc::new(Fenced { inner, anchor: anchor.clone() }),
            false => inner,
        }
    }

    /// The file, for a change.
    fn open(&self) -> io::Result<&dyn BackendFile> {
        match self.anchor.standing() {
            Standing::Good => Ok(&*self.inner),
            Standing::InDoubt | Standing::Ended | Standing::GivenUp => Err(io::Error::from_raw_os_error(libc::EIO)),
        }
    }
}

impl BackendNode for Fenced {
    fn stat(&self) -> io::Result<Stat> {
        self.inner.stat()
    }

    fn set_times(&self, atime: SetTime, mtime: SetTime) -> io::Result<()> {
        self.open()?.set_times(atime, mtime)
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        self.open()?.set_mode(mode)
    }

    fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        self.open()?.set_owner(uid, gid)
    }

    fn get_xattr(&self, name: &OsStr) -> io::Result<Vec<u8>> {
        self.inner.get_xattr(name)
    }

    fn set_xattr(&self, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        self.open()?.set_xattr(name, value, flags)
    }

    fn list_xattr(&self) -> io::Result<Vec<OsString>> {
        self.inner.list_xattr()
    }

    fn remove_xattr(&self, name: &OsStr) -> io::Result<()> {
        self.open()?.remove_xattr(name)
    }
}

impl BackendFile for Fenced {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.open()?.write_at(offset, data)
    }

    fn write_vectored_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        self.open()?.write_vectored_at(offset, parts)
    }

    fn copy_from(&self, from: &dyn BackendFile, from_offset: u64, offset: u64, len: u64) -> io::Result<()> {
        self.open()?.copy_from(from, from_offset, offset, len)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.open()?.set_len(len)
    }

    fn check_len(&self, len: u64) -> io::Result<()> {
        self.inner.check_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.inner.sync_data()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.inner.sync_all()
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.open()?.punch(offset, len)
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.open()?.allocate(offset, len)
    }

    fn seek_data(&self, offset: u64) -> io::Result<Option<u64>> {
        self.inner.seek_data(offset)
    }

    fn seek_hole(&self, offset: u64) -> io::Result<Option<u64>> {
        self.inner.seek_hole(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Backend, MemoryBackend};
    use lamassu_anchor::row::{Content, FileRow, Row, Sealed, VaultRow};
    use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
    use lamassu_anchor::{AnchorError, TokenKey};
    use std::sync::atomic::{AtomicBool, Ordering};

    /// A test table whose session can end.
    #[derive(Default)]
    struct Ending {
        rows: MemoryTable,
        has_ended: AtomicBool,
    }

    impl Table for Ending {
        fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
            self.rows.get(space, key)
        }

        fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), AnchorError> {
            self.rows.scan(space, prefix, visit)
        }

        fn commit(&self, changes: &[Change]) -> Result<(), AnchorError> {
            self.rows.commit(changes)
        }

        fn may_end(&self) -> bool {
            true
        }

        fn standing(&self) -> Standing {
            match self.has_ended.load(Ordering::Relaxed) {
                true => Standing::Ended,
                false => Standing::Good,
            }
        }
    }

    #[test]
    fn nothing_is_changed_behind_the_end_of_the_session() {
        let table = Arc::new(Ending::default());
        let vault = VaultRow::new([1; 16], TokenKey::new([2; 32]));
        let content = Content::File(FileRow::default());
        let root = Row { mode: 0o700, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing };
        let anchor = Arc::new(Anchor::create(table.clone(), vault, root).expect("creates"));
        let store = MemoryBackend::new();
        let file = Fenced::of(store.root().create_file(OsStr::new("f")).expect("creates"), &anchor);
        file.write_at(0, b"before").expect("writes");
        table.has_ended.store(true, Ordering::Relaxed);
        let is_refused = |done: io::Result<()>| done.is_err_and(|error| error.raw_os_error() == Some(libc::EIO));
        assert!(is_refused(file.write_at(0, b"behind")) && is_refused(file.set_len(0)) && is_refused(file.punch(0, 1)));
        assert!(is_refused(file.write_vectored_at(0, &[b"be", b"hind"])) && is_refused(file.set_mode(0o777)));
        let mut back = [0; 6];
        file.read_at(0, &mut back).expect("reads");
        assert_eq!(&back, b"before");
    }
}
