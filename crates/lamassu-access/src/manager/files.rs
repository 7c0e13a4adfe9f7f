//! Files and directories of a manager.

use crate::{AccessError, Result};
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Refuses a directory that others can use.
pub fn check_private(dir: &Path) -> Result<()> {
    let st = fs::metadata(dir).map_err(AccessError::file("look at", dir))?;
    if st.mode() & 0o077 != 0 { Err(AccessError::NotPrivate(dir.into())) } else { Ok(()) }
}

/// Replaces a file as a whole, durably.
pub fn place(dir: &Path, name: &str, text: &str) -> Result<()> {
    let (path, new) = (dir.join(name), dir.join(format!(".{name}.new")));
    let written = || {
        let mut file = fs::File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &path)
    };
    written().map_err(AccessError::file("write", &path))?;
    sync_dir(dir)
}

/// Makes the names in a directory durable.
pub fn sync_dir(dir: &Path) -> Result<()> {
    fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(AccessError::file("sync", dir))
}
