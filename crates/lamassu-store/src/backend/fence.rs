//! A store that takes changes only while this process may make them.
//!
//! The anchor of a shared vault belongs to a session, which can end while this process runs. Then another host may hold
//! the vault (`docs/sharing.md`, L4), and changes that this process had decided on must not be carried out. Each change
//! of the store asks immediately before its system call, so a process that was stopped carries out one at most.

use super::{
    Backend, BackendDir, BackendEntry, BackendFile, BackendNode, Kind, Listed, RenameMode, SetTime, Stat, StatFs, errno,
};
use lamassu_anchor::Anchor;
use lamassu_anchor::table::Standing;
use rustix::fd::BorrowedFd;
use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::Arc;

/// The store as the holder of this anchor may change it: the store itself if the anchor's session cannot end.
///
/// A directory of it that becomes a store of its own ([`BackendDir::as_backend`]) belongs to another vault, with
/// another anchor, so it is not fenced.
pub fn fenced(store: Arc<dyn Backend>, anchor: &Arc<Anchor>) -> Arc<dyn Backend> {
    match anchor.may_end() {
        true => Arc::new(Fenced { inner: store, fence: Fence(anchor.clone()) }),
        false => store,
    }
}

/// A file of the store that stays open while the anchor's session ends ([`BackendFile::unfenced`]), as the holder of
/// another anchor of the same vault may change it.
pub fn fenced_again(file: Arc<dyn BackendFile>, anchor: &Arc<Anchor>) -> Arc<dyn BackendFile> {
    match anchor.may_end() {
        true => Arc::new(Fenced { inner: file, fence: Fence(anchor.clone()) }),
        false => file,
    }
}

/// A store that cannot copy reads and writes this much by one call.
const COPIED_AT_ONCE: u64 = 1 << 20;

#[derive(Clone)]
struct Fence(Arc<Anchor>);

impl Fence {
    fn check(&self) -> io::Result<()> {
        match self.0.standing() {
            Standing::Good => Ok(()),
            Standing::InDoubt | Standing::Ended | Standing::GivenUp => Err(errno(libc::EIO)),
        }
    }
}

/// Something of a store behind its fence.
struct Fenced<T: ?Sized> {
    fence: Fence,
    inner: Arc<T>,
}

impl<T: ?Sized> Fenced<T> {
    /// It, for a change.
    fn change(&self) -> io::Result<&T> {
        self.fence.check()?;
        Ok(&self.inner)
    }

    /// Something that was reached through it.
    fn with<U: ?Sized>(&self, inner: Arc<U>) -> Arc<Fenced<U>> {
        Arc::new(Fenced { fence: self.fence.clone(), inner })
    }
}

impl Backend for Fenced<dyn Backend> {
    fn root(&self) -> Arc<dyn BackendDir> {
        self.with(self.inner.root())
    }

    fn stat_fs(&self) -> io::Result<StatFs> {
        self.inner.stat_fs()
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn try_lock(&self, name: &OsStr) -> io::Result<Box<dyn std::any::Any + Send + Sync>> {
        self.inner.try_lock(name)
    }
}

impl<T: BackendNode + ?Sized> BackendNode for Fenced<T> {
    fn stat(&self) -> io::Result<Stat> {
        self.inner.stat()
    }

    fn set_times(&self, atime: SetTime, mtime: SetTime) -> io::Result<()> {
        self.change()?.set_times(atime, mtime)
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        self.change()?.set_mode(mode)
    }

    fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        self.change()?.set_owner(uid, gid)
    }

    fn get_xattr(&self, name: &OsStr) -> io::Result<Vec<u8>> {
        self.inner.get_xattr(name)
    }

    fn set_xattr(&self, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        self.change()?.set_xattr(name, value, flags)
    }

    fn list_xattr(&self) -> io::Result<Vec<OsString>> {
        self.inner.list_xattr()
    }

    fn remove_xattr(&self, name: &OsStr) -> io::Result<()> {
        self.change()?.remove_xattr(name)
    }
}

impl BackendFile for Fenced<dyn BackendFile> {
    fn unfenced(&self) -> Option<Arc<dyn BackendFile>> {
        Some(self.inner.clone())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change()?.write_at(offset, data)
    }

    fn write_vectored_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        self.change()?.write_vectored_at(offset, parts)
    }

    fn copy_from(&self, from: &dyn BackendFile, from_offset: u64, offset: u64, len: u64) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(COPIED_AT_ONCE);
            self.change()?.copy_from(from, from_offset + done, offset + done, piece)?;
            done += piece;
        }
        Ok(())
    }

    fn share_all(&self, from: &dyn BackendFile) -> io::Result<bool> {
        self.change()?.share_all(from)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change()?.set_len(len)
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
        self.change()?.punch(offset, len)
    }

    fn room_to_replace(&self) -> io::Result<u64> {
        self.inner.room_to_replace()
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.change()?.allocate(offset, len)
    }

    fn seek_data(&self, offset: u64) -> io::Result<Option<u64>> {
        self.inner.seek_data(offset)
    }

    fn seek_hole(&self, offset: u64) -> io::Result<Option<u64>> {
        self.inner.seek_hole(offset)
    }
}

/// The directory that the other directory of a link or rename stands for.
fn unwrap(dir: &dyn BackendDir) -> &dyn BackendDir {
    dir.as_any().downcast_ref::<Fenced<dyn BackendDir>>().map_or(dir, |dir| &*dir.inner)
}

impl BackendEntry for Fenced<dyn BackendEntry> {
    fn link(&self, to: &dyn BackendDir, to_name: &OsStr) -> io::Result<()> {
        self.change()?.link(unwrap(to), to_name)
    }
}

impl BackendDir for Fenced<dyn BackendDir> {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }

    fn open_dir(&self, name: &OsStr) -> io::Result<Arc<dyn BackendDir>> {
        Ok(self.with(self.inner.open_dir(name)?))
    }

    fn open_file(&self, name: &OsStr, write: bool) -> io::Result<Arc<dyn BackendFile>> {
        Ok(self.with(self.inner.open_file(name, write)?))
    }

    fn open_same(&self, name: &OsStr, seen: &Stat, write: bool) -> io::Result<Option<Arc<dyn BackendFile>>> {
        Ok(self.inner.open_same(name, seen, write)?.map(|file| self.with(file) as _))
    }

    fn create_file(&self, name: &OsStr) -> io::Result<Arc<dyn BackendFile>> {
        Ok(self.with(self.change()?.create_file(name)?))
    }

    fn make_dir(&self, name: &OsStr, mode: u32) -> io::Result<()> {
        self.change()?.make_dir(name, mode)
    }

    fn make_node(&self, name: &OsStr, kind: Kind, rdev: u64) -> io::Result<()> {
        self.change()?.make_node(name, kind, rdev)
    }

    fn make_symlink(&self, name: &OsStr, target: &OsStr) -> io::Result<()> {
        self.change()?.make_symlink(name, target)
    }

    fn read_link(&self, name: &OsStr) -> io::Result<OsString> {
        self.inner.read_link(name)
    }

    fn hold(&self, name: &OsStr) -> io::Result<Arc<dyn BackendEntry>> {
        Ok(self.with(self.inner.hold(name)?))
    }

    fn hold_same(&self, name: &OsStr, seen: &Stat) -> io::Result<Option<Arc<dyn BackendEntry>>> {
        Ok(self.inner.hold_same(name, seen)?.map(|entry| self.with(entry) as _))
    }

    fn rename(&self, name: &OsStr, to: &dyn BackendDir, to_name: &OsStr, mode: RenameMode) -> io::Result<()> {
        self.change()?.rename(name, unwrap(to), to_name, mode)
    }

    fn unlink(&self, name: &OsStr) -> io::Result<()> {
        self.change()?.unlink(name)
    }

    fn remove_dir(&self, name: &OsStr) -> io::Result<()> {
        self.change()?.remove_dir(name)
    }

    fn stat_entry(&self, name: &OsStr) -> io::Result<Stat> {
        self.inner.stat_entry(name)
    }

    fn stat_and_open(&self, name: &OsStr) -> io::Result<(Stat, Option<Arc<dyn BackendFile>>)> {
        let (stat, file) = self.inner.stat_and_open(name)?;
        Ok((stat, file.map(|file| self.with(file) as _)))
    }

    fn read_dir(&self) -> io::Result<Vec<Listed>> {
        self.inner.read_dir()
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn as_backend(&self, write: bool) -> io::Result<Arc<dyn Backend>> {
        self.inner.as_backend(write)
    }

    fn lending(&self) -> Option<Arc<dyn BackendDir>> {
        Some(self.with(self.inner.lending()?))
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryBackend;
    use lamassu_anchor::row::{Content, FileRow, Row, Sealed, VaultRow};
    use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
    use lamassu_anchor::{AnchorError, TokenKey};
    use lamassu_format::header::VaultId;
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
        let vault = VaultRow::new(VaultId([1; 16]), TokenKey::new([2; 32]));
        let content = Content::File(FileRow::default());
        let root = Row { mode: 0o700, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing };
        let anchor = Arc::new(Anchor::create(table.clone(), vault, root).expect("creates"));
        let store = fenced(Arc::new(MemoryBackend::new()), &anchor);
        let [f, d, l, m, n] = ["f", "d", "l", "m", "n"].map(OsStr::new);
        let root = store.root();
        let file = root.create_file(f).expect("creates");
        root.make_dir(d, 0o700).expect("makes");
        let dir = root.open_dir(d).expect("opens");
        root.hold(f).expect("holds").link(&*dir, l).expect("links");
        dir.rename(l, &*root, m, RenameMode::NoReplace).expect("moves between two directories of it");
        let held = root.hold(m).expect("holds");
        file.write_at(0, b"before").expect("writes");
        table.has_ended.store(true, Ordering::Relaxed);
        let is_refused = |done: io::Result<()>| done.is_err_and(|error| error.raw_os_error() == Some(libc::EIO));
        assert!(is_refused(file.write_at(0, b"behind")) && is_refused(file.set_len(0)) && is_refused(file.punch(0, 1)));
        assert!(is_refused(file.write_vectored_at(0, &[b"be", b"hind"])) && is_refused(file.set_mode(0o777)));
        assert!(is_refused(root.create_file(n).map(drop)) && is_refused(dir.make_dir(n, 0o700)));
        assert!(is_refused(root.unlink(m)) && is_refused(root.remove_dir(d)) && is_refused(held.link(&*dir, n)));
        assert!(is_refused(root.rename(m, &*dir, n, RenameMode::Replace)) && is_refused(held.set_mode(0o777)));
        assert!(is_refused(dir.make_symlink(n, n)) && is_refused(dir.make_node(n, Kind::Fifo, 0)));
        assert!(is_refused(root.open_file(m, true).expect("opens").write_at(0, b"behind")));
        let (_, opened) = root.stat_and_open(m).expect("opens");
        assert!(is_refused(opened.expect("is a file").set_len(0)));
        let mut back = [0; 6];
        file.read_at(0, &mut back).expect("reads");
        assert_eq!(&back, b"before");
    }
}
