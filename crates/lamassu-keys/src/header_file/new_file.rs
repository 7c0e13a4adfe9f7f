//! The file of a header that is not in its place yet, whose lock is the right to change the header.

use super::error::writing;
use super::regular::{self, Links};
use super::{FileError, MODE_NEW, erase, shown};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Opens or makes the new file. True: it was made.
pub(super) fn open(path: &Path) -> Result<(File, bool), FileError> {
    const ATTEMPTS_MAX: usize = 16;
    for _ in 0..ATTEMPTS_MAX {
        match OpenOptions::new().write(true).create_new(true).mode(MODE_NEW).open(path) {
            Ok(file) => return Ok((file, true)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(writing("create", path)(e)),
        }
        match there(path) {
            Ok(Some(file)) => return Ok((file, false)),
            Ok(None) => return Err(writing("write, since it is no regular file,", path)(Errno::INVAL.into())),
            // Its holder has renamed or removed it.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(writing("open", path)(e)),
        }
    }
    Err(FileError::Busy { path: shown(path) })
}

fn there(path: &Path) -> io::Result<Option<File>> {
    match regular::find(path, Links::Refused, OpenOptions::new().write(true)) {
        // A program that died may have left a copy of a header without write permission.
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            let Some(file) = regular::find(path, Links::Refused, OpenOptions::new().read(true))? else {
                return Ok(None);
            };
            // A file with another name may be someone else's, whose mode must not be changed; it is not written to.
            let is_ours = file.metadata()?.nlink() <= 1;
            if is_ours { erase::writable(&file).map(Some) } else { Ok(Some(file)) }
        }
        found => found,
    }
}
