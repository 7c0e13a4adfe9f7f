//! Files that lose their last name while programs of several hosts have them open.

use crate::common::*;
use crate::shared::{shared, unmounted_and_checked};
use rustix::fs::{AtFlags, CWD, FlockOperation, flock, linkat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};

fn whole(file: &File, len: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, 0).map(|()| bytes)
}

#[test]
fn a_program_goes_on_with_a_file_that_it_has_removed() {
    let lab = Lab::new();
    let [a, b, c] = shared(&lab);
    let make = |name| File::options().read(true).write(true).create_new(true).open(a.file(name)).unwrap();
    // As tmpfile(3) makes it; and one whose handle is not used in the turn of its removal.
    let (temporary, later) = (make("temporary"), make("later"));
    let mut content = vec![1; 700_000];
    temporary.write_all_at(&content, 0).unwrap();
    later.write_all_at(b"later", 0).unwrap();
    // Its locks are of the file, whatever becomes of the name.
    let opened_twice = File::open(a.file("temporary")).unwrap();
    flock(&temporary, FlockOperation::LockExclusive).unwrap();
    fs::remove_file(a.file("temporary")).unwrap();
    // A program that runs, and is replaced by a newer version.
    fs::write(a.file("program"), [3; 300_000]).unwrap();
    let program = File::open(a.file("program")).unwrap();
    // SAFETY: a new map, which nothing else refers to, as long as the file.
    let map = unsafe { mmap(std::ptr::null_mut(), 300_000, ProtFlags::READ, MapFlags::PRIVATE, &program, 0) }.unwrap();
    fs::write(a.file("newer"), "newer").unwrap();
    fs::rename(a.file("newer"), a.file("program")).unwrap();
    for round in 0..5_u8 {
        fs::write(b.file(&format!("b{round}")), [round; 50_000]).unwrap();
        if round == 0 {
            fs::remove_file(a.file("later")).unwrap();
            fs::write(b.file("b"), "b").unwrap();
        }
        assert!(whole(&temporary, content.len()).unwrap() == content, "round {round}");
        content[350_000] = round;
        content.extend_from_slice(&[round; 5_000]);
        temporary.write_all_at(&[round], 350_000).unwrap();
        temporary.write_all_at(&[round; 5_000], content.len() as u64 - 5_000).unwrap();
        fs::write(c.file(&format!("c{round}")), "c").unwrap();
        let meta = temporary.metadata().unwrap();
        assert_eq!((meta.nlink(), meta.len()), (0, content.len() as u64), "round {round}");
        assert_eq!(whole(&later, 5).unwrap(), b"later");
        assert!(flock(&opened_twice, FlockOperation::NonBlockingLockExclusive).is_err());
        // SAFETY: within the map; nobody changes the file.
        let mapped = unsafe { std::slice::from_raw_parts(map.cast::<u8>(), 300_000) };
        assert!(mapped.iter().all(|byte| *byte == 3), "round {round}");
        assert_eq!(fs::read(b.file("program")).unwrap(), b"newer");
    }
    flock(&temporary, FlockOperation::Unlock).unwrap();
    flock(&opened_twice, FlockOperation::NonBlockingLockExclusive).unwrap();
    let open = format!("/proc/self/fd/{}", temporary.as_raw_fd());
    let linked = linkat(CWD, open, CWD, a.file("again"), AtFlags::SYMLINK_FOLLOW);
    assert!(matches!(linked, Err(Errno::NOENT | Errno::STALE)), "{linked:?}");
    temporary.sync_all().unwrap();
    temporary.set_len(10).unwrap();
    fs::write(b.file("b"), "again").unwrap();
    assert_eq!(temporary.metadata().unwrap().len(), 10);
    // SAFETY: the map of above, of which nothing is borrowed any more.
    unsafe { munmap(map, 300_000) }.unwrap();
    // What another host removes is gone.
    let other = make("other");
    other.write_all_at(b"other", 0).unwrap();
    fs::remove_file(c.file("other")).unwrap();
    assert_eq!(whole(&other, 5).unwrap_err().raw_os_error(), Some(libc::ESTALE));
    drop((temporary, later, program, other, opened_twice));
    unmounted_and_checked(&lab, &[a, b, c]);
}
