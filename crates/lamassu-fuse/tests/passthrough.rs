//! The adapter under a real kernel, over `PlainFs`: the whole suite in each cache mode, and what concerns mounts as such.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

#[macro_use]
mod suite;

use lamassu_fuse::plain::PlainFs;
use lamassu_fuse::{CacheMode, MountOptions, Mounted};
use std::path::Path;
use std::sync::Arc;

/// Whether mounting is possible here; if not, says so.
fn fuse_is_there() -> bool {
    let there = Path::new("/dev/fuse").exists();
    if !there {
        eprintln!("SKIPPED: there is no /dev/fuse on this machine");
    }
    there
}

fn options(cache: CacheMode) -> MountOptions {
    MountOptions { cache, allow_other: rustix::process::geteuid().is_root(), ..MountOptions::default() }
}

struct Fixture {
    mounted: Option<Mounted>,
    // Removed after the mount is gone.
    _dirs: [tempfile::TempDir; 2],
}

impl Fixture {
    fn new(options: &MountOptions) -> Fixture {
        let (store, point) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let fs = Arc::new(PlainFs::open(store.path()).unwrap());
        let mounted = lamassu_fuse::mount(fs, point.path(), options).unwrap();
        Fixture { mounted: Some(mounted), _dirs: [store, point] }
    }

    fn root(&self) -> &Path {
        self._dirs[1].path()
    }

    fn end(&mut self) {
        let mounted = self.mounted.take().unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        // A process that a test beside this one is just starting may hold our descriptors for a moment.
        while let Err(error) = mounted.unmounter().unmount(false) {
            assert!(std::time::Instant::now() < deadline, "{error}");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        mounted.wait().unwrap();
    }
}

fn with(cache: CacheMode, test: &str, body: fn(&Path)) {
    if let Some(dir) = suite::support::child_dir() {
        return body(&dir);
    }
    if !fuse_is_there() {
        return;
    }
    let mut fixture = Fixture::new(&options(cache));
    let dir = fixture.root().join("work");
    std::fs::create_dir(&dir).unwrap();
    suite::support::in_child(test, &dir);
    fixture.end();
}

mod write_back {
    suite_tests!(|test, body| super::with(lamassu_fuse::CacheMode::WriteBack, test, body));
}
mod through {
    suite_tests!(|test, body| super::with(lamassu_fuse::CacheMode::Through, test, body));
}
mod uncached {
    suite_tests!(|test, body| super::with(lamassu_fuse::CacheMode::None, test, body));
}

/// A file system that keeps no lists says so: to store them unenforced would promise what is not kept.
#[test]
fn access_lists_are_refused() {
    if !fuse_is_there() {
        return;
    }
    let mut fixture = Fixture::new(&options(CacheMode::WriteBack));
    let path = fixture.root().join("f");
    std::fs::write(&path, b"").unwrap();
    let entry =
        [2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 4, 0, 4, 0, 255, 255, 255, 255, 32, 0, 4, 0, 255, 255, 255, 255];
    let set = rustix::fs::setxattr(&path, "system.posix_acl_access", &entry, rustix::fs::XattrFlags::empty());
    assert_eq!(set, Err(rustix::io::Errno::OPNOTSUPP));
    std::fs::copy(&path, fixture.root().join("g")).unwrap();
    fixture.end();
}
