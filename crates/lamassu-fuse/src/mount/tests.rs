//! A file system that panics in every method must still give every caller an answer.

use super::{MountError, Mounted, mount, of_unmounting};
use crate::control;
use crate::fs::Panics;
use crate::options::MountOptions;
use lamassu_vault::VaultError;
use std::path::Path;
use std::sync::Arc;

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
    assert!(matches!(control::status(point.path()), Err(control::ControlError::NotMounted(_))));
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
