//! A file system that panics in every method must still give every caller an answer.

use super::sys::{MountId, attach};
use super::{MountError, Mounted, Mountpoint, mount, of_unmounting};
use crate::control::{self, Root};
use crate::options::MountOptions;
use lamassu_vault::{Panics, VaultError};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Option<i32> {
    result.unwrap_err().raw_os_error()
}

fn mounted(point: &Path) -> Option<Mounted> {
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: there is no /dev/fuse on this machine");
        return None;
    }
    Some(mount(Arc::new(Panics), point, &MountOptions::default()).unwrap())
}

#[test]
fn panics_become_errors_and_the_mount_lives_on() {
    let point = tempfile::tempdir().unwrap();
    let Some(mounted) = mounted(point.path()) else { return };
    // More requests than there are threads: none may die.
    for _ in 0..20 {
        assert_eq!(errno(std::fs::metadata(point.path().join("x"))), Some(libc::EIO));
        assert_eq!(errno(std::fs::read_dir(point.path())), Some(libc::EIO));
        assert_eq!(errno(std::fs::write(point.path().join("y"), b"")), Some(libc::EIO));
        assert_eq!(errno(std::fs::create_dir(point.path().join("d"))), Some(libc::EIO));
    }
    mounted.unmounter().unmount(false).unwrap();
    assert!(matches!(mounted.wait(), Err(MountError::Close(VaultError::Io { op: "close", .. }))));
    assert!(matches!(
        Root::open(point.path()).and_then(|root| root.status()),
        Err(control::ControlError::NotMounted(_))
    ));
}

/// Panics before any of our own code could catch it.
struct Falls;

impl fuser::Filesystem for Falls {
    fn lookup(&self, _: &fuser::Request, _: fuser::INodeNo, _: &std::ffi::OsStr, _: fuser::ReplyEntry) {
        panic!("on purpose");
    }
}

#[test]
fn a_panic_in_a_request_thread_answers_the_request_and_ends_nothing() {
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
    let (kernel, device) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let ask = |opcode: u32, unique: u64, rest: &[u8]| {
        let len = 40 + rest.len() as u32;
        let header =
            [&len.to_le_bytes()[..], &opcode.to_le_bytes(), &unique.to_le_bytes(), &1u64.to_le_bytes(), &[0; 16]];
        send(&kernel, &[&header.concat(), rest].concat(), SendFlags::empty()).unwrap();
    };
    // The error of the first answer to a request. A second one, which a kernel refuses, may come to one that panicked.
    let answer_to = |unique: u64| loop {
        let mut bytes = [0; 256];
        assert!(recv(&kernel, &mut bytes[..], RecvFlags::empty()).unwrap().0 >= 16);
        if bytes[8..16] == unique.to_le_bytes() {
            return -i32::from_le_bytes(bytes[4..8].try_into().unwrap());
        }
    };
    let (init, lookup, getattr) = (26, 1, 3);
    ask(init, 1, &[7u32, 31, 0, 0].map(u32::to_le_bytes).concat());
    let config = fuser::Config::default();
    let session = fuser::Session::from_fd(Falls, device, fuser::SessionACL::All, config).unwrap().spawn().unwrap();
    assert_eq!(answer_to(1), 0);
    for unique in 2..10 {
        ask(lookup, unique, b"name\0");
        assert_eq!(answer_to(unique), libc::EIO);
    }
    ask(getattr, 10, &[0; 16]);
    assert_eq!(answer_to(10), libc::ENOSYS);
    drop(kernel);
    drop(session);
}

#[test]
fn a_request_that_the_end_of_the_mount_cut_off_is_no_error() {
    let ended = |errno| of_unmounting(Err(std::io::Error::from_raw_os_error(errno)));
    assert!(ended(libc::ECONNABORTED).is_ok() && ended(libc::EIO).is_err());
}

#[test]
fn bad_mount_points_are_refused_before_anything_is_mounted() {
    let point = tempfile::tempdir().unwrap();
    let try_on = |path: &Path| mount(Arc::new(Panics), path, &MountOptions::default()).err().unwrap();
    assert!(matches!(try_on(&point.path().join("none")), MountError::Mountpoint { .. }));
    std::fs::write(point.path().join("file"), b"").unwrap();
    assert!(matches!(try_on(&point.path().join("file")), MountError::Mountpoint { .. }));
    assert!(matches!(try_on(point.path()), MountError::NotEmpty(_)));
}

/// A daemon that lets the kernel keep the attributes of the root for an hour, and can do nothing else. It ends when it
/// is told to.
fn serve_root(device: OwnedFd, is_over: &AtomicBool) {
    const INIT: [u64; 8] = [7 | 31 << 32, 0, 0, 0, 0, 0, 0, 0];
    const ATTRIBUTES: [u64; 13] = [3600, 0, 1, 0, 0, 0, 0, 0, 0, 0o40755 << 32, 2, 0, 4096];
    rustix::fs::fcntl_setfl(&device, rustix::fs::OFlags::NONBLOCK).unwrap();
    let mut request = vec![0; 1 << 16];
    while !is_over.load(Ordering::SeqCst) {
        if rustix::io::read(&device, &mut request[..]).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(1));
            continue;
        }
        let (errno, body) = match u32::from_le_bytes(request[4..8].try_into().unwrap()) {
            26 => (0, &INIT[..]),
            3 => (0, &ATTRIBUTES[..]),
            _ => (-libc::ENOSYS, &[][..]),
        };
        let len = 16 + 8 * body.len() as u32;
        let body: Vec<u8> = body.iter().flat_map(|number| number.to_le_bytes()).collect();
        let _ = rustix::io::write(
            &device,
            &[&len.to_le_bytes()[..], &errno.to_le_bytes(), &request[8..16], &body].concat(),
        );
    }
}

#[test]
fn a_mount_whose_daemon_has_ended_is_no_mount_point_although_the_kernel_knows_its_attributes() {
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: there is no /dev/fuse on this machine");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let below = Mountpoint::open(dir.path()).unwrap();
    let device = attach(&below, &MountOptions::default()).unwrap();
    let (id, is_over) = (MountId::on(&below), AtomicBool::new(false));
    let [while_served, later] = std::thread::scope(|scope| {
        let daemon = scope.spawn(|| serve_root(device, &is_over));
        let while_served = Mountpoint::open(dir.path());
        let _ = rustix::fs::stat(dir.path());
        is_over.store(true, Ordering::SeqCst);
        daemon.join().unwrap();
        [while_served, Mountpoint::open(dir.path())]
    });
    let (known, checked) = (rustix::fs::stat(dir.path()), while_served.unwrap().check(true));
    id.detach_quietly();
    known.unwrap();
    assert_eq!(Errno::from_io_error(&later.unwrap_err()), Some(Errno::NOTCONN));
    assert!(matches!(checked, Err(MountError::Mountpoint { .. })), "{checked:?}");
}
