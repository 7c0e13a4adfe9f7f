//! An open file of the local file system. Positions are always explicit, so calls from several threads do not disturb
//! one another.

use super::remote::Handle;
use super::xattr::Target;
use super::{forward, mode, owner, stat_fd, stat_of, timestamps, unit};
use crate::backend::{BackendFile, BackendNode, SetTime, Stat};
use rustix::fd::BorrowedFd;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice};
use std::sync::Arc;

/// Pieces of one vectored write: `IOV_MAX` of Linux.
const SLICES_MAX: usize = 1024;

pub(super) struct LocalFile {
    pub(super) handle: Arc<Handle>,
}

impl LocalFile {
    /// SEEK_DATA and SEEK_HOLE. Moves the descriptor's own position, which nothing here uses.
    fn seek(
        &self,
        offset: u64,
        to: SeekFrom,
        without_holes: impl FnOnce(u64) -> Option<u64>,
    ) -> io::Result<Option<u64>> {
        match self.handle.read(|fd| rustix::fs::seek(fd, to)) {
            Ok(at) => forward(offset, at).map(Some),
            Err(Errno::NXIO) => Ok(None),
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOTTY) => Ok(without_holes(self.stat()?.len)),
            Err(e) => Err(e.into()),
        }
    }
}

impl BackendNode for LocalFile {
    fn stat(&self) -> io::Result<Stat> {
        stat_of(&mode::steady(|| stat_fd(self.handle.fd()))?)
    }

    fn set_times(&self, atime: SetTime, mtime: SetTime) -> io::Result<()> {
        Ok(rustix::fs::futimens(self.handle.fd(), &timestamps(atime, mtime)?)?)
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        mode::chmod_fd(self.handle.fd(), mode)
    }

    fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        let (uid, gid) = owner(uid, gid);
        Ok(rustix::fs::fchown(self.handle.fd(), uid, gid)?)
    }

    fn get_xattr(&self, name: &OsStr) -> io::Result<Vec<u8>> {
        Target::Open(self.handle.fd()).get(name)
    }

    fn set_xattr(&self, name: &OsStr, value: &[u8], flags: i32) -> io::Result<()> {
        Target::Open(self.handle.fd()).set(name, value, flags)
    }

    fn list_xattr(&self) -> io::Result<Vec<OsString>> {
        Target::Open(self.handle.fd()).list()
    }

    fn remove_xattr(&self, name: &OsStr) -> io::Result<()> {
        Target::Open(self.handle.fd()).remove(name)
    }
}

/// Types of file systems (statfs(2)) that never overwrite in place: btrfs, ZFS, bcachefs.
const COPIES_ON_WRITE: [u64; 3] = [0x9123_683e, 0x2fc1_2fc1, 0xca45_1a4e];

impl BackendFile for LocalFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset.checked_add(done as u64).ok_or(Errno::INVAL)?;
            match self.handle.read(|fd| rustix::io::pread(fd, &mut buf[done..], at))? {
                0 => break,
                n => done += n,
            }
        }
        Ok(done)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            let at = offset.checked_add(done as u64).ok_or(Errno::FBIG)?;
            match self.handle.write(|fd| rustix::io::pwrite(fd, &data[done..], at))? {
                // Not allowed by POSIX for a non-empty write; a loop without end would be worse.
                0 => return Err(Errno::IO.into()),
                n => done += n,
            }
        }
        Ok(())
    }

    fn write_vectored_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        let mut at = offset;
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut left = &mut slices[..];
        while !left.is_empty() {
            let most = left.len().min(SLICES_MAX);
            let n = match self.handle.write(|fd| rustix::io::pwritev(fd, &left[..most], at))? {
                0 if left.iter().any(|slice| !slice.is_empty()) => return Err(Errno::IO.into()),
                n => n,
            };
            IoSlice::advance_slices(&mut left, n);
            at = at.checked_add(n as u64).ok_or(Errno::FBIG)?;
        }
        Ok(())
    }

    fn copy_from(&self, from: &dyn BackendFile, from_offset: u64, offset: u64, len: u64) -> io::Result<()> {
        let mut done = 0;
        while let Some(source) = from.descriptor().filter(|_| done < len) {
            let left = usize::try_from(len - done).unwrap_or(usize::MAX);
            let copied = self.handle.write(|fd| {
                let (mut at, mut to) = (from_offset + done, offset + done);
                rustix::fs::copy_file_range(source, Some(&mut at), fd, Some(&mut to), left)
            });
            match copied {
                Ok(0) => return Err(Errno::IO.into()),
                Ok(n) => done += n as u64,
                // Another store, or one that cannot.
                Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM) => break,
                Err(e) => return Err(e.into()),
            }
        }
        match len - done {
            0 => Ok(()),
            left => crate::backend::copy_through_memory(self, from, from_offset + done, offset + done, left),
        }
    }

    fn share_all(&self, from: &dyn BackendFile) -> io::Result<bool> {
        let Some(source) = from.descriptor() else { return Ok(false) };
        match self.handle.write(|fd| rustix::fs::ioctl_ficlone(fd, source)) {
            Ok(()) => Ok(true),
            Err(
                Errno::OPNOTSUPP
                | Errno::XDEV
                | Errno::NOTTY
                | Errno::NOSYS
                | Errno::PERM
                | Errno::ACCESS
                | Errno::INVAL,
            ) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.handle.fd())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        Ok(self.handle.write(|fd| rustix::fs::ftruncate(fd, len))?)
    }

    fn check_len(&self, len: u64) -> io::Result<()> {
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| len > limit) {
            return Err(Errno::FBIG.into());
        }
        // The kernel refuses a file position past the file system's limit. Nothing here uses the position.
        match self.handle.read(|fd| rustix::fs::seek(fd, SeekFrom::Start(len))) {
            Err(Errno::INVAL) => Err(Errno::FBIG.into()),
            other => Ok(other.map(drop)?),
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(self.handle.sync(|fd| rustix::fs::fdatasync(fd))?)
    }

    fn sync_all(&self) -> io::Result<()> {
        Ok(self.handle.sync(|fd| rustix::fs::fsync(fd))?)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(self.handle.write(|fd| rustix::fs::fallocate(fd, flags, offset, len))?)
    }

    fn room_to_replace(&self) -> io::Result<u64> {
        let st = rustix::fs::fstatfs(self.handle.fd())?;
        let copies = COPIES_ON_WRITE.contains(&(st.f_type as u64 & 0xffff_ffff));
        Ok(if copies { (st.f_bavail as u64).saturating_mul(unit(&st)) } else { u64::MAX })
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        // Only space: there is nothing for a barrier to cover.
        Ok(self.handle.read(|fd| rustix::fs::fallocate(fd, FallocateFlags::KEEP_SIZE, offset, len))?)
    }

    fn seek_data(&self, offset: u64) -> io::Result<Option<u64>> {
        self.seek(offset, SeekFrom::Data(offset), |len| (offset < len).then_some(offset))
    }

    fn seek_hole(&self, offset: u64) -> io::Result<Option<u64>> {
        self.seek(offset, SeekFrom::Hole(offset), |len| (offset < len).then_some(len))
    }
}
