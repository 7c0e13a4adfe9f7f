//! The files and directories of a [`super::FaultBackend`].

use super::{Call, Fault, FaultBackend, Faults, errno};
use crate::backend::{
    Backend, BackendDir, BackendEntry, BackendFile, BackendNode, Kind, Listed, RenameMode, SetTime, Stat,
};
use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An object of the store below, and the faults that its calls pass through.
pub(super) struct Faulty<T: ?Sized> {
    inner: Arc<T>,
    faults: Arc<Faults>,
    /// the name that rules see: for an entry the one under which it was found
    name: Option<OsString>,
    /// what a stat of it counts as
    stat: Call,
}

type FaultFile = Faulty<dyn BackendFile>;
pub(super) type FaultDir = Faulty<dyn BackendDir>;
type FaultEntry = Faulty<dyn BackendEntry>;

impl<T: ?Sized> Faulty<T> {
    fn pass(&self, call: Call) -> io::Result<()> {
        self.faults.pass(call, self.name.as_deref(), 0, 0)
    }
}

impl<T: ?Sized + BackendNode> BackendNode for Faulty<T> {
    fn stat(&self) -> io::Result<Stat> {
        self.pass(self.stat)?;
        Ok(self.faults.shown(self.inner.stat()?))
    }

    fn set_times(&self, atime: SetTime, mtime: SetTime) -> io::Result<()> {
        self.pass(Call::SetTimes)?;
        self.inner.set_times(atime, mtime)
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        self.pass(Call::SetMode)?;
        self.inner.set_mode(mode)
    }

    fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        self.pass(Call::SetOwner)?;
        self.inner.set_owner(uid, gid)
    }

    fn get_xattr(&self, name: &OsStr) -> io::Result<Vec<u8>> {
        self.pass(Call::GetXattr)?;
        self.inner.get_xattr(name)
    }

    fn set_xattr(&self, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        self.pass(Call::SetXattr)?;
        self.inner.set_xattr(name, value, flags)
    }

    fn list_xattr(&self) -> io::Result<Vec<OsString>> {
        self.pass(Call::ListXattr)?;
        self.inner.list_xattr()
    }

    fn remove_xattr(&self, name: &OsStr) -> io::Result<()> {
        self.pass(Call::RemoveXattr)?;
        self.inner.remove_xattr(name)
    }
}

impl BackendFile for FaultFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        match self.faults.enter(Call::Read, None, offset, buf.len() as u64) {
            Some(Fault::Errno(code)) => Err(errno(code)),
            Some(Fault::Short(most)) => {
                let len = buf.len().min(most);
                self.inner.read_at(offset, &mut buf[..len])
            }
            Some(Fault::After(_)) | None => self.inner.read_at(offset, buf),
        }
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        match self.faults.enter(Call::Write, None, offset, data.len() as u64) {
            Some(Fault::Errno(code)) => Err(errno(code)),
            Some(Fault::Short(most)) if most < data.len() => {
                self.inner.write_at(offset, &data[..most])?;
                Err(errno(libc::EIO))
            }
            Some(Fault::After(code)) => self.inner.write_at(offset, data).and(Err(errno(code))),
            Some(Fault::Short(_)) | None => self.inner.write_at(offset, data),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.faults.pass(Call::SetLen, None, len, 0)?;
        self.inner.set_len(len)
    }

    fn check_len(&self, len: u64) -> io::Result<()> {
        self.faults.pass(Call::Seek, None, len, 0)?;
        self.inner.check_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.pass(Call::SyncData)?;
        self.inner.sync_data()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.pass(Call::SyncAll)?;
        self.inner.sync_all()
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.faults.pass(Call::Punch, None, offset, len)?;
        self.inner.punch(offset, len)
    }

    fn room_to_replace(&self) -> io::Result<u64> {
        Ok(self.inner.room_to_replace()?.min(self.faults.room_to_replace.load(Ordering::Relaxed)))
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.faults.pass(Call::Allocate, None, offset, len)?;
        self.inner.allocate(offset, len)
    }

    fn seek_data(&self, offset: u64) -> io::Result<Option<u64>> {
        self.faults.pass(Call::Seek, None, offset, 0)?;
        self.inner.seek_data(offset)
    }

    fn seek_hole(&self, offset: u64) -> io::Result<Option<u64>> {
        self.faults.pass(Call::Seek, None, offset, 0)?;
        self.inner.seek_hole(offset)
    }
}

impl FaultDir {
    pub(super) fn over(inner: Arc<dyn BackendDir>, faults: Arc<Faults>) -> Arc<dyn BackendDir> {
        Arc::new(FaultDir { inner, faults, name: None, stat: Call::DirStat })
    }

    fn pass_by(&self, call: Call, name: &OsStr) -> io::Result<()> {
        self.faults.pass(call, Some(name), 0, 0)
    }

    /// For calls that may fail after they were made.
    fn around(&self, call: Call, name: &OsStr, made: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        match self.faults.enter(call, Some(name), 0, 0) {
            Some(Fault::Errno(code)) => Err(errno(code)),
            Some(Fault::After(code)) => made().and(Err(errno(code))),
            Some(Fault::Short(_)) | None => made(),
        }
    }

    fn file(&self, inner: Arc<dyn BackendFile>) -> Arc<dyn BackendFile> {
        Arc::new(FaultFile { inner, faults: self.faults.clone(), name: None, stat: Call::FileStat })
    }
}

/// The directory that the other directory of a link or rename wraps. If that wraps nothing, it is another device to the
/// store below.
fn unwrap(dir: &dyn BackendDir) -> &dyn BackendDir {
    dir.as_any().downcast_ref::<FaultDir>().map_or(dir, |dir| &*dir.inner)
}

impl BackendDir for FaultDir {
    fn open_dir(&self, name: &OsStr) -> io::Result<Arc<dyn BackendDir>> {
        self.pass_by(Call::OpenDir, name)?;
        Ok(FaultDir::over(self.inner.open_dir(name)?, self.faults.clone()))
    }

    fn open_file(&self, name: &OsStr, write: bool) -> io::Result<Arc<dyn BackendFile>> {
        self.pass_by(Call::OpenFile, name)?;
        Ok(self.file(self.inner.open_file(name, write)?))
    }

    fn open_same(&self, name: &OsStr, seen: &Stat, write: bool) -> io::Result<Option<Arc<dyn BackendFile>>> {
        self.pass_by(Call::OpenFile, name)?;
        Ok(self.inner.open_same(name, seen, write)?.map(|file| self.file(file)))
    }

    fn create_file(&self, name: &OsStr) -> io::Result<Arc<dyn BackendFile>> {
        self.pass_by(Call::CreateFile, name)?;
        Ok(self.file(self.inner.create_file(name)?))
    }

    fn make_dir(&self, name: &OsStr, mode: u32) -> io::Result<()> {
        self.pass_by(Call::MakeDir, name)?;
        self.inner.make_dir(name, mode)
    }

    fn make_node(&self, name: &OsStr, kind: Kind, rdev: u64) -> io::Result<()> {
        self.pass_by(Call::MakeNode, name)?;
        self.inner.make_node(name, kind, rdev)
    }

    fn make_symlink(&self, name: &OsStr, target: &OsStr) -> io::Result<()> {
        self.pass_by(Call::MakeSymlink, name)?;
        self.inner.make_symlink(name, target)
    }

    fn read_link(&self, name: &OsStr) -> io::Result<OsString> {
        self.pass_by(Call::ReadLink, name)?;
        self.inner.read_link(name)
    }

    fn hold(&self, name: &OsStr) -> io::Result<Arc<dyn BackendEntry>> {
        self.pass_by(Call::DirStat, name)?;
        let inner = self.inner.hold(name)?;
        Ok(Arc::new(FaultEntry {
            inner,
            faults: self.faults.clone(),
            name: Some(name.to_owned()),
            stat: Call::DirStat,
        }))
    }

    fn rename(&self, name: &OsStr, to: &dyn BackendDir, to_name: &OsStr, mode: RenameMode) -> io::Result<()> {
        self.around(Call::Rename, name, || self.inner.rename(name, unwrap(to), to_name, mode))
    }

    fn unlink(&self, name: &OsStr) -> io::Result<()> {
        self.around(Call::Unlink, name, || self.inner.unlink(name))
    }

    fn remove_dir(&self, name: &OsStr) -> io::Result<()> {
        self.around(Call::RemoveDir, name, || self.inner.remove_dir(name))
    }

    fn stat_entry(&self, name: &OsStr) -> io::Result<Stat> {
        self.pass_by(Call::DirStat, name)?;
        Ok(self.faults.shown(self.inner.stat_entry(name)?))
    }

    fn read_dir(&self) -> io::Result<Vec<Listed>> {
        self.pass(Call::ReadDir)?;
        self.inner.read_dir()
    }

    fn sync(&self) -> io::Result<()> {
        self.pass(Call::SyncDir)?;
        self.inner.sync()
    }

    fn as_backend(&self, write: bool) -> io::Result<Arc<dyn Backend>> {
        Ok(Arc::new(FaultBackend { inner: self.inner.as_backend(write)?, faults: self.faults.clone() }))
    }

    fn lending(&self) -> Option<Arc<dyn BackendDir>> {
        Some(FaultDir::over(self.inner.lending()?, self.faults.clone()))
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl BackendEntry for FaultEntry {
    fn link(&self, to: &dyn BackendDir, to_name: &OsStr) -> io::Result<()> {
        self.pass(Call::Link)?;
        self.inner.link(unwrap(to), to_name)
    }
}
