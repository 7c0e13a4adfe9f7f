//! The adapter under a real kernel, over `PlainFs`: the whole suite in each cache mode, and what concerns mounts as
//! such.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

#[macro_use]
mod suite;

use lamassu_fuse::{CacheMode, MountOptions, Mounted};
use lamassu_plain::PlainFs;
use std::path::Path;
use std::process::Stdio;
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
        rustix::process::umask(rustix::fs::Mode::empty());
        let fs = Arc::new(PlainFs::open(store.path()).unwrap());
        let mounted = lamassu_fuse::mount(fs, point.path(), options).unwrap();
        Fixture { mounted: Some(mounted), _dirs: [store, point] }
    }

    fn root(&self) -> &Path {
        self._dirs[1].path()
    }

    fn end(&mut self) {
        let mounted = self.mounted.take().unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
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

/// The example, running; killed if the test fails, and its mount taken away.
struct Example(std::process::Child, std::path::PathBuf);

impl Example {
    /// Returns with the line of the mount in mountinfo.
    fn start(store: &Path, point: &Path, options: &str) -> (Example, String) {
        let program = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("examples/passthrough");
        assert!(program.exists(), "not built: `cargo build --package lamassu-fuse --example passthrough`");
        let mut command = std::process::Command::new(&program);
        command.args([store, point]).args(["-o", options]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut example = Example(command.spawn().unwrap(), point.to_owned());
        loop {
            let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
            if let Some(line) = table.lines().find(|l| l.split(' ').nth(4) == point.to_str()) {
                return (example, line.to_owned());
            }
            assert!(example.0.try_wait().unwrap().is_none(), "it has ended");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    fn unmount(&self) -> bool {
        std::process::Command::new("fusermount3").arg("-u").arg(&self.1).status().unwrap().success()
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        if self.0.try_wait().unwrap().is_none() {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
            self.unmount();
        }
    }
}

/// The program that benchmarks use: it mounts the directory as it is, shows a type of its own, and ends when it is
/// unmounted.
#[test]
fn the_example_mounts_a_directory_as_it_is() {
    if !fuse_is_there() {
        return;
    }
    let (store, point) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::create_dir(store.path().join("sub")).unwrap();
    let content = suite::support::pattern(300_000, 3);
    for (options, may_write) in [("rw", true), ("ro,noatime", false)] {
        let (mut example, line) = Example::start(store.path(), point.path(), options);
        assert!(line.contains(" fuse.lamassu-passthrough "), "it does not pass for a vault: {line}");
        if may_write {
            std::fs::write(point.path().join("sub/f"), &content).unwrap();
        } else {
            assert!(std::fs::read(point.path().join("sub/f")).unwrap() == content);
            assert!(std::fs::write(point.path().join("g"), b"").is_err());
        }
        assert!(example.unmount() && example.0.wait().unwrap().success());
        assert!(std::fs::read(store.path().join("sub/f")).unwrap() == content);
    }
}
