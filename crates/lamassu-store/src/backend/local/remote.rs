//! Stores behind FUSE and network protocols: what the kernel's calls do not do for them.
//!
//! * syncfs(2) reaches only as far as this host there: a barrier of the whole store is one fdatasync(2) for each file that was written.
//! * A connection that was lost and made again (sshfs with `reconnect`) leaves open files behind that fail for ever: they are opened
//!   anew. What was written through the old descriptor may never have arrived, so the next barrier of such a file fails.
//!
//! Files of other stores pass through here untouched.

use super::retry;
use parking_lot::Mutex;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// `f_type` of statfs(2): FUSE, 9p, CIFS and SMB 2. NFS and Ceph commit on syncfs(2).
const KINDS: [u64; 4] = [0x6573_5546, 0x0102_1997, 0xFF53_4D42, 0xFE53_4D42];

/// What the files of one such store share.
#[derive(Default)]
pub(super) struct Remote {
    /// Every file that was opened for writing, as far as it is still open.
    files: Mutex<Vec<Weak<Handle>>>,
    /// A file was closed whose writes could not be made durable: the next barrier of the store fails.
    lost: AtomicBool,
}

impl Remote {
    /// `None`: syncfs(2) does what it says on this store.
    pub(super) fn new(fs_type: u64) -> Option<Arc<Remote>> {
        KINDS.contains(&fs_type).then(Arc::default)
    }

    fn add(&self, handle: &Arc<Handle>) {
        let mut files = self.files.lock();
        if files.len() == files.capacity() {
            files.retain(|file| file.strong_count() > 0);
        }
        files.push(Arc::downgrade(handle));
    }

    /// A barrier for everything written so far.
    pub(super) fn sync(&self) -> rustix::io::Result<()> {
        let files: Vec<Arc<Handle>> = self.files.lock().iter().filter_map(Weak::upgrade).collect();
        let mut done = match self.lost.swap(false, Ordering::AcqRel) {
            true => Err(Errno::IO),
            false => Ok(()),
        };
        for file in files.iter().filter(|file| file.is_unsynced()) {
            done = done.and(file.sync(|fd| rustix::fs::fdatasync(fd)));
        }
        done
    }
}

/// An open file's descriptor.
pub(super) struct Handle {
    fd: OwnedFd,
    access: OFlags,
    remote: Option<Arc<Remote>>,
    /// Written since the last barrier.
    unsynced: AtomicBool,
    /// The last call failed as calls do whose connection is gone.
    stale: AtomicBool,
    /// What was written before the file was opened anew may be lost.
    gap: AtomicBool,
}

impl Handle {
    pub(super) fn new(fd: OwnedFd, access: OFlags, remote: Option<Arc<Remote>>) -> Arc<Handle> {
        let flag = AtomicBool::default;
        let handle = Arc::new(Handle { fd, access, remote, unsynced: flag(), stale: flag(), gap: flag() });
        if let Some(remote) = handle.remote.as_ref().filter(|_| access.contains(OFlags::RDWR)) {
            remote.add(&handle);
        }
        handle
    }

    /// For calls that ask for attributes.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn is_unsynced(&self) -> bool {
        self.unsynced.load(Ordering::Acquire)
    }

    /// A call that reads.
    pub(super) fn read<T>(&self, call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>) -> rustix::io::Result<T> {
        self.call(call)
    }

    /// A call that writes.
    pub(super) fn write<T>(&self, call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>) -> rustix::io::Result<T> {
        if self.remote.is_some() {
            self.unsynced.store(true, Ordering::Release);
        }
        self.call(call)
    }

    /// A barrier.
    pub(super) fn sync(&self, call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<()>) -> rustix::io::Result<()> {
        let was_unsynced = self.unsynced.swap(false, Ordering::AcqRel);
        let mut done = self.call_with(call, was_unsynced);
        if self.gap.swap(false, Ordering::AcqRel) {
            done = done.and(Err(Errno::IO));
        }
        if done.is_err() && was_unsynced {
            self.unsynced.store(true, Ordering::Release);
        }
        done
    }

    fn call<T>(&self, call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>) -> rustix::io::Result<T> {
        self.call_with(call, self.is_unsynced())
    }

    /// `unsynced`: whether a new open file would leave unsynced writes behind.
    fn call_with<T>(
        &self,
        mut call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>,
        unsynced: bool,
    ) -> rustix::io::Result<T> {
        if self.remote.is_none() {
            return retry(|| call(self.fd.as_fd()));
        }
        if self.stale.load(Ordering::Acquire) {
            self.open_anew(unsynced)?;
        }
        let done = retry(|| call(self.fd.as_fd()));
        if let Err(Errno::IO | Errno::STALE | Errno::NOTCONN | Errno::CONNABORTED | Errno::BADF) = done {
            self.stale.store(true, Ordering::Release);
        }
        done
    }

    /// Puts a new open file behind the same descriptor, at once for all its users.
    fn open_anew(&self, unsynced: bool) -> rustix::io::Result<()> {
        let path = super::mode::proc_path(self.fd.as_fd());
        let fresh = retry(|| rustix::fs::open(&path, self.access | OFlags::CLOEXEC, Mode::empty()))?;
        if unsynced {
            self.gap.store(true, Ordering::Release);
        }
        // SAFETY: both descriptors are open, and ours. The old one stays a valid descriptor throughout: dup3(2) replaces what
        // lies behind it in one step, so who uses it at this moment uses either the old open file or the new one.
        let done = unsafe { libc::dup3(fresh.as_raw_fd(), self.fd.as_raw_fd(), libc::O_CLOEXEC) };
        if done < 0 {
            return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
        }
        self.stale.store(false, Ordering::Release);
        Ok(())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(remote) = &self.remote
            && *self.unsynced.get_mut()
            && rustix::fs::fdatasync(&self.fd).is_err()
        {
            remote.lost.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FUSE: u64 = KINDS[0];

    fn file(dir: &std::path::Path, remote: &Option<Arc<Remote>>) -> Arc<Handle> {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
        let fd = rustix::fs::open(dir.join("f"), flags, Mode::RUSR | Mode::WUSR).expect("opens");
        Handle::new(fd, OFlags::RDWR, remote.clone())
    }

    fn put(handle: &Handle, text: &str) -> rustix::io::Result<usize> {
        handle.write(|fd| rustix::io::pwrite(fd, text.as_bytes(), 0))
    }

    #[test]
    fn a_lost_connection_costs_one_error_and_the_next_barrier() {
        let dir = tempfile::tempdir().expect("a directory");
        let remote = Remote::new(FUSE);
        let handle = file(dir.path(), &remote);
        put(&handle, "before").expect("writes");
        assert_eq!(handle.read(|_| Err::<(), _>(Errno::IO)), Err(Errno::IO));
        put(&handle, "after").expect("writes through the new open file");
        assert_eq!(handle.sync(|fd| rustix::fs::fdatasync(fd)), Err(Errno::IO), "what was written before may be lost");
        put(&handle, "again").expect("writes");
        handle.sync(|fd| rustix::fs::fdatasync(fd)).expect("and now it is durable");
        remote.expect("a remote store").sync().expect("nothing is left");
    }

    #[test]
    fn nothing_unsynced_means_nothing_lost() {
        let dir = tempfile::tempdir().expect("a directory");
        let handle = file(dir.path(), &Remote::new(FUSE));
        put(&handle, "before").expect("writes");
        handle.sync(|fd| rustix::fs::fdatasync(fd)).expect("syncs");
        assert_eq!(handle.read(|_| Err::<(), _>(Errno::NOTCONN)), Err(Errno::NOTCONN));
        handle.sync(|fd| rustix::fs::fdatasync(fd)).expect("all of it was durable before");
    }

    #[test]
    fn a_barrier_of_the_store_covers_each_written_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let remote = Remote::new(FUSE);
        let handle = file(dir.path(), &remote);
        let store = remote.expect("a remote store");
        put(&handle, "one").expect("writes");
        assert!(handle.is_unsynced());
        store.sync().expect("syncs");
        assert!(!handle.is_unsynced());
        put(&handle, "two").expect("writes");
        handle.stale.store(true, Ordering::Release);
        assert_eq!(store.sync(), Err(Errno::IO), "a file that was opened anew");
        assert!(handle.is_unsynced());
        store.sync().expect("its content is to be written again by then");
        for _ in 0..100 {
            drop(file(dir.path(), &Some(store.clone())));
        }
        assert!(store.files.lock().len() < 100, "closed files are forgotten");
    }

    #[test]
    fn local_stores_are_left_alone() {
        assert!(Remote::new(0x5846_5342).is_none());
        let dir = tempfile::tempdir().expect("a directory");
        let handle = file(dir.path(), &None);
        assert_eq!(handle.read(|_| Err::<(), _>(Errno::IO)), Err(Errno::IO));
        assert!(!handle.stale.load(Ordering::Acquire));
    }
}
