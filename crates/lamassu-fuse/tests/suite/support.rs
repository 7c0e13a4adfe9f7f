//! Helpers of the suite.

use std::fs::{File, OpenOptions};
use std::path::Path;

/// Bytes that tell their own position.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
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

/// Runs `body` with the file-system identity of another user, without root's capabilities on files, in a thread of its own.
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
