//! Stores behind FUSE and network protocols: makes up for what the kernel's calls do not do for them.
//!
//! * syncfs(2) flushes only this host there, so a barrier of the whole store is one fdatasync(2) for each file that was
//!   written.
//! * After a connection was lost and made again (sshfs with `reconnect`), open files fail for ever. A call that fails
//!   in this way is repeated on the file, opened again. Writes before that without a sync may never have arrived, so
//!   the next barrier of such a file fails.
//!
//! Files of other stores are not affected.

use super::retry;
use lamassu_crypto::stages::{Stage, timed};
use parking_lot::Mutex;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// `f_type` of statfs(2): FUSE, 9p, CIFS and SMB 2. NFS and Ceph commit on syncfs(2).
const KINDS: [u64; 4] = [0x6573_5546, 0x0102_1997, 0xFF53_4D42, 0xFE53_4D42];

/// State that the files of one such store share.
#[derive(Default)]
pub(super) struct Remote {
    /// Every file that is open for writing.
    files: Mutex<Vec<Weak<Handle>>>,
    /// A file was closed whose writes could not be made durable: the next barrier of the store fails.
    lost: AtomicBool,
}

impl Remote {
    /// `None`: syncfs(2) is a barrier on this store.
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
            done = done.and(file.sync_for_all());
        }
        done
    }
}

/// An open file's descriptor.
pub(super) struct Handle {
    fd: OwnedFd,
    access: OFlags,
    remote: Option<Arc<Remote>>,
    /// Counts each call that writes before it and after it, since a barrier in between does not cover it. And the count
    /// that the last barrier covered.
    writes: AtomicU64,
    synced: AtomicU64,
    /// Writes from before the file was opened again may be lost. Set before the new open file is in place, and cleared
    /// only by the file's own barrier: a barrier of the store must not hide it from a concurrent fsync.
    gap: AtomicBool,
}

impl Handle {
    pub(super) fn new(fd: OwnedFd, access: OFlags, remote: Option<Arc<Remote>>) -> Arc<Handle> {
        let (writes, synced, gap) = Default::default();
        let handle = Arc::new(Handle { fd, access, remote, writes, synced, gap });
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
        self.writes.load(Ordering::Acquire) > self.synced.load(Ordering::Acquire)
    }

    /// A call that reads.
    pub(super) fn read<T>(&self, call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>) -> rustix::io::Result<T> {
        self.call(0, call)
    }

    /// A call that writes.
    pub(super) fn write<T>(&self, call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>) -> rustix::io::Result<T> {
        self.writes.fetch_add(1, Ordering::AcqRel);
        let done = self.call(1, call);
        self.writes.fetch_add(1, Ordering::AcqRel);
        done
    }

    /// A barrier.
    pub(super) fn sync(
        &self,
        mut call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<()>,
    ) -> rustix::io::Result<()> {
        let writes = self.writes.load(Ordering::Acquire);
        let done = match self.remote {
            Some(_) => self.call(0, call),
            None => self.call(0, |fd| super::barrier(fd, &mut call)),
        };
        if self.gap.swap(false, Ordering::AcqRel) {
            return done.and(Err(Errno::IO));
        }
        self.covered(writes, done)
    }

    /// The file's part of a barrier of the store.
    fn sync_for_all(&self) -> rustix::io::Result<()> {
        let writes = self.writes.load(Ordering::Acquire);
        let done = self.call(0, |fd| rustix::fs::fdatasync(fd));
        if self.gap.load(Ordering::Acquire) {
            return done.and(Err(Errno::IO));
        }
        self.covered(writes, done)
    }

    fn covered(&self, writes: u64, done: rustix::io::Result<()>) -> rustix::io::Result<()> {
        if done.is_ok() {
            self.synced.fetch_max(writes, Ordering::AcqRel);
        }
        done
    }

    /// `own`: writes that this call has counted, and that it repeats if the first attempt failed.
    fn call<T>(
        &self,
        own: u64,
        mut call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> rustix::io::Result<T> {
        let done = timed(Stage::Store, || retry(|| call(self.fd())));
        match done {
            Err(Errno::IO | Errno::STALE | Errno::NOTCONN | Errno::CONNABORTED | Errno::BADF)
                if self.remote.is_some() && self.open_anew(own).is_ok() =>
            {
                retry(|| call(self.fd()))
            }
            done => done,
        }
    }

    /// Puts a new open file behind the same descriptor, at once for all its users.
    fn open_anew(&self, own: u64) -> rustix::io::Result<()> {
        let fresh = super::mode::open_held(self.fd(), self.access | OFlags::CLOEXEC)?;
        if self.writes.load(Ordering::Acquire) - own > self.synced.load(Ordering::Acquire) {
            self.gap.store(true, Ordering::Release);
        }
        // SAFETY: both descriptors are open, and ours. The old one stays a valid descriptor throughout: dup3(2)
        // replaces what lies behind it in one step, so a thread that uses it at this moment uses either the old open
        // file or the new one.
        let done = unsafe { libc::dup3(fresh.as_raw_fd(), self.fd.as_raw_fd(), libc::O_CLOEXEC) };
        if done < 0 {
            return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
        }
        Ok(())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(remote) = &self.remote
            && self.is_unsynced()
            && (*self.gap.get_mut() || rustix::fs::fdatasync(&self.fd).is_err())
        {
            remote.lost.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::Mode;

    const FUSE: u64 = KINDS[0];

    fn file(dir: &std::path::Path, remote: &Option<Arc<Remote>>) -> Arc<Handle> {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
        let fd = rustix::fs::open(dir.join("f"), flags, Mode::RUSR | Mode::WUSR).expect("opens");
        Handle::new(fd, OFlags::RDWR, remote.clone())
    }

    fn put(handle: &Handle, text: &str) -> rustix::io::Result<usize> {
        handle.write(|fd| rustix::io::pwrite(fd, text.as_bytes(), 0))
    }

    /// The first call fails as over a lost connection, the next ones work.
    fn once<T>(
        mut call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T> {
        let mut failed = false;
        move |fd| if std::mem::replace(&mut failed, true) { call(fd) } else { Err(Errno::IO) }
    }

    #[test]
    fn a_lost_connection_costs_the_next_barrier() {
        let dir = tempfile::tempdir().expect("a directory");
        let remote = Remote::new(FUSE);
        let handle = file(dir.path(), &remote);
        put(&handle, "before").expect("writes");
        handle.write(once(|fd| rustix::io::pwrite(fd, b"after", 0))).expect("writes through the new open file");
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
        handle.write(once(|fd| rustix::io::pwrite(fd, b"after", 0))).expect("writes through the new open file");
        handle.sync(|fd| rustix::fs::fdatasync(fd)).expect("all that went before was durable");
        handle.sync(once(|fd| rustix::fs::fdatasync(fd))).expect("and there is nothing to lose now");
    }

    #[test]
    fn a_connection_that_stays_lost_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let handle = file(dir.path(), &Remote::new(FUSE));
        put(&handle, "before").expect("writes");
        assert_eq!(handle.read(|_| Err::<(), _>(Errno::NOTCONN)), Err(Errno::NOTCONN));
        assert_eq!(handle.sync(|_| Err(Errno::IO)), Err(Errno::IO));
        assert!(handle.is_unsynced());
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
        handle.read(once(|_| Ok(()))).expect("reads from the file opened anew");
        assert_eq!(store.sync(), Err(Errno::IO), "a file that was opened anew");
        assert_eq!(store.sync(), Err(Errno::IO), "the file itself has not heard of it yet");
        assert_eq!(handle.sync(|fd| rustix::fs::fdatasync(fd)), Err(Errno::IO));
        assert!(handle.is_unsynced());
        store.sync().expect("its content is to be written again by then");
        for _ in 0..100 {
            drop(file(dir.path(), &Some(store.clone())));
        }
        assert!(store.files.lock().len() < 100, "closed files are forgotten");
    }

    /// The barrier of another thread may come just before the call that writes, or just after it.
    #[test]
    fn a_barrier_in_the_middle_of_a_write_does_not_cover_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let remote = Remote::new(FUSE);
        let handle = file(dir.path(), &remote);
        let store = remote.expect("a remote store");
        let write = |fd: BorrowedFd<'_>| {
            store.sync().expect("syncs");
            rustix::io::pwrite(fd, b"after the barrier", 0)
        };
        handle.write(write).expect("writes");
        assert!(handle.is_unsynced());
        store.sync().expect("syncs");
        assert!(!handle.is_unsynced());
    }

    #[test]
    fn local_stores_are_left_alone() {
        assert!(Remote::new(0x5846_5342).is_none());
        let dir = tempfile::tempdir().expect("a directory");
        let handle = file(dir.path(), &None);
        let mut calls = 0;
        let failing = |_: BorrowedFd<'_>| {
            calls += 1;
            Err::<(), _>(Errno::IO)
        };
        assert_eq!(handle.read(failing), Err(Errno::IO));
        assert_eq!(calls, 1);
    }
}
