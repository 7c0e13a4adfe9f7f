//! Files and directories that a manager reads and writes.

use crate::{AccessError, Result};
use data_encoding::HEXLOWER;
use lamassu_crypto::Secret;
use rustix::fs::{Mode, OFlags};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Refuses a directory to which group or others have any permission.
pub fn check_private(dir: &Path) -> Result<()> {
    let st = fs::metadata(dir).map_err(AccessError::file("look at", dir))?;
    if st.mode() & 0o077 != 0 { Err(AccessError::NotPrivate(dir.into())) } else { Ok(()) }
}

/// Replaces a file as a whole, durably. Another party may control the directory and have put links or FIFOs there. So
/// the new file has an unpredictable name and is created exclusively.
pub fn place(dir: &Path, name: &str, text: &str) -> Result<()> {
    let number = Secret::<16>::random()?;
    let (path, new) = (dir.join(name), dir.join(format!(".{name}.{}", HEXLOWER.encode(number.expose()))));
    let written = || {
        let mut file = fs::File::options().write(true).create_new(true).mode(0o644).open(&new)?;
        // The provider's proxy must be able to read it, whatever the umask here.
        file.set_permissions(fs::Permissions::from_mode(0o644))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &path)
    };
    let written = written().map_err(AccessError::file("write", &path));
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written?;
    sync_dir(dir)
}

/// The contents of a file in a directory, if it is a regular file of at most `most` bytes and can be read. The contents
/// are untrusted.
pub fn placed(dir: &Path, name: &str, most: usize) -> Option<String> {
    // The checks run on the open file, since its name may point elsewhere by then. `NONBLOCK` keeps a FIFO from
    // blocking.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = fs::File::from(rustix::fs::open(dir.join(name), flags, Mode::empty()).ok()?);
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = String::new();
    file.take(most as u64 + 1).read_to_string(&mut text).ok()?;
    (text.len() <= most).then_some(text)
}

/// Makes the entries of a directory durable.
pub fn sync_dir(dir: &Path) -> Result<()> {
    fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(AccessError::file("sync", dir))
}
