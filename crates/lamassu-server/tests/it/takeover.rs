//! Files that a host left open when its session ended (rule R9 of `docs/sharing.md`): a store may still carry out what
//! that host had sent.

use crate::common::*;
use crate::shared::{shared, unmounted_and_checked};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Files of the store, with their names there.
fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap()) {
        let name = entry.file_name().into_string().unwrap();
        match entry.file_type().unwrap() {
            kind if kind.is_dir() && name != "lamassu.tree" => files(&entry.path(), found),
            kind if kind.is_file() && !name.starts_with("lamassu.") => found.push(entry.path()),
            _ => {}
        }
    }
}

/// The file of the store that has this many names.
fn stored(lab: &Lab, links: u64) -> PathBuf {
    let mut found = Vec::new();
    files(&lab.path("store/v"), &mut found);
    let is_it = |path: &PathBuf| fs::metadata(path).unwrap().nlink() == links;
    found.into_iter().find(is_it).expect("the file in the store")
}

fn killed(host: Host<'_>) {
    let pid = Pid::from_raw(i32::try_from(host.daemon()).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    host.run(&format!("umount --lazy m-{}", host.name)).ok();
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Everything that the store has of the file is written again and destroyed, through the inode that the host had open.
fn written_late(inode: &File) {
    let len = inode.metadata().unwrap().len();
    for at in (0..len).step_by(4096) {
        inode.write_all_at(&[0xaa; 4096], at).unwrap();
    }
    inode.sync_all().unwrap();
}

#[test]
fn late_writes_of_a_host_whose_session_ended_change_nothing() {
    let lab = Lab::new();
    let hosts = shared(&lab);
    let [a, b, c] = hosts;
    fs::create_dir(a.file("d")).unwrap();
    fs::write(a.file("f"), [1; 40_000]).unwrap();
    fs::hard_link(a.file("f"), a.file("d/g")).unwrap();
    fs::set_permissions(a.file("f"), fs::Permissions::from_mode(0o640)).unwrap();
    let value = b"of the file".as_slice();
    rustix::fs::setxattr(a.file("f"), "user.said", value, rustix::fs::XattrFlags::empty()).unwrap();
    // Another host has it open, and goes on with the same inode afterwards.
    let other = open(&c.file("d/g"));
    let number = other.metadata().unwrap().ino();
    let writer = open(&a.file("f"));
    writer.write_all_at(&[2; 4096], 0).unwrap();
    writer.sync_all().unwrap();
    writer.write_all_at(&[3; 4096], 4096).unwrap();
    // A close puts into the store what was not synced.
    drop(open(&a.file("f")));
    let inode = open(&stored(&lab, 2));
    killed(a);
    let read = fs::read(b.file("f")).unwrap();
    let mut expected = [1; 40_000];
    expected[..4096].fill(2);
    expected[4096..8192].fill(3);
    assert!(read == expected, "synced or not: it was in the store");
    assert_eq!(inode.metadata().unwrap().nlink(), 0, "the inode that the host had open has lost its names");
    let writer = open(&b.file("f"));
    writer.write_all_at(&[4; 4096], 8192).unwrap();
    writer.sync_all().unwrap();
    written_late(&inode);
    // Everything is read from the store, by a host that has had nothing of it.
    expected[8192..12_288].fill(4);
    let mut now = vec![0; 40_000];
    other.read_exact_at(&mut now, 0).unwrap();
    assert!(now == expected, "what was committed after the takeover is there");
    other.write_all_at(&[5; 4096], 12_288).unwrap();
    other.sync_all().unwrap();
    expected[12_288..16_384].fill(5);
    for file in ["f", "d/g"] {
        assert!(fs::read(b.file(file)).unwrap() == expected, "{file}");
        let seen = fs::metadata(c.file(file)).unwrap();
        assert_eq!((seen.ino(), seen.nlink(), seen.mode() & 0o777), (number, 2, 0o640), "{file}");
    }
    let mut said = [0; 32];
    let len = rustix::fs::getxattr(b.file("d/g"), "user.said", said.as_mut_slice()).unwrap();
    assert_eq!(&said[..len], value);
    assert_eq!(fs::metadata(stored(&lab, 2)).unwrap().mode() & 0o777, 0o640, "also in the store");
    drop((writer, other));
    assert_eq!(lab.metric("alerts"), 0.0, "nothing is called stale");
    unmounted_and_checked(&lab, &[b, c]);
}
