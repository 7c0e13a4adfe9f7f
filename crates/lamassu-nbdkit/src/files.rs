//! Files for other programs: whole whenever they are read.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Writes a file that everyone may read, in place of the one that is there.
///
/// # Errors
/// Those of the file system.
pub fn replace(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    // Collectors read the files whose names end in `.prom`.
    name.push(".new");
    let new = file.with_file_name(name);
    // Made anew: another user may have made it, or a link of that name. A killed process leaves its own.
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut to = File::options().write(true).create_new(true).mode(0o644).open(&new)?;
    to.write_all(bytes)?;
    std::fs::rename(&new, file)
}

/// A file with this process's id, until it is dropped.
pub struct Pidfile(PathBuf);

impl Pidfile {
    /// Writes it.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write(file: PathBuf) -> io::Result<Pidfile> {
        replace(&file, format!("{}\n", std::process::id()).as_bytes())?;
        Ok(Pidfile(file))
    }
}

impl Drop for Pidfile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
