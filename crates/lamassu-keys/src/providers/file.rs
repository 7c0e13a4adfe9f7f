//! `file:PATH`: a key from a file, or from anything else that can be read by a path, for example `/dev/fd/3`.

use super::Location;
use super::bytes::{KEY_MAX, read_key};
use crate::source::{Ask, Fetched, KeyProvider, SourceError, Warning};
use lamassu_format::header::SlotKind;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(super) const LOCATION: Location = Location {
    name: "file",
    is_scheme: false,
    usage: "file:PATH",
    kinds: super::READABLE,
    interactive: false,
    provider: |argument| {
        argument.filter(|path| !path.is_empty()).map(|path| Arc::new(KeyFile { path: path.into() }) as _)
    },
};

struct KeyFile {
    path: PathBuf,
}

impl KeyProvider for KeyFile {
    fn fetch(&self, kind: SlotKind, _ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        let path = &self.path;
        let fail = |source| SourceError::File { path: path.clone(), source };
        let mut file = File::open(path).map_err(fail)?;
        let warnings = warnings(path, &file).map_err(fail)?;
        match read_key(&mut file, kind).map_err(fail)? {
            Some(bytes) => Ok(Fetched::Bytes { bytes, warnings }),
            None => Err(SourceError::FileTooLong { path: path.clone(), max: KEY_MAX }),
        }
    }
}

fn warnings(path: &Path, file: &File) -> io::Result<Vec<Warning>> {
    const OTHERS_RW: u32 = 0o006;
    let meta = file.metadata()?;
    let mode = meta.mode() & 0o7777;
    let open = meta.is_file() && mode & OTHERS_RW != 0;
    Ok(if open { vec![Warning::OpenToOthers { path: path.into(), mode }] } else { Vec::new() })
}
