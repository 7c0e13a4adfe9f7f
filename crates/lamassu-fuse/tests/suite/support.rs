//! Helpers of the suite.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;

const DIR: &str = "LAMASSU_SUITE_DIR";

/// In a child process made by [`in_child`]: the directory to work in.
pub fn child_dir() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

/// Runs the test of this binary with that name again, in a process of its own, over `dir`. The daemon's threads live in
/// this process: a caller in it that unmaps dirty pages would hold the lock of the address space that the daemon needs
/// to serve it.
pub fn in_child(test: &str, dir: &Path) {
    let name = test.split_once("::").unwrap().1;
    let args = [name, "--exact", "--nocapture", "--test-threads=1"];
    let out = Command::new(std::env::current_exe().unwrap()).args(args).env(DIR, dir).output().unwrap();
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(out.status.success() && text.contains("1 passed"), "{text}");
}

/// Bytes that tell their own position. Those of an even seed compress.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            if seed.is_multiple_of(2) { b'a' + (state & 3) as u8 } else { state as u8 }
        })
        .collect()
}

pub fn read_write(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

pub fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Runs `body` with the file-system identity of another user, without root's capabilities on files, in a thread of its
/// own.
pub fn as_user(uid: u32, body: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: these two system calls change the identity of this thread only; it ends with the scope.
            unsafe {
                libc::syscall(libc::SYS_setfsgid, uid);
                libc::syscall(libc::SYS_setfsuid, uid);
            }
            body();
        });
    });
}
