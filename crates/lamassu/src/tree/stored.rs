//! Single files of a store, given by the path of their ciphertext: neither their name nor their directory is needed.
//! Read-only.

use super::local::Local;
use super::{Dir, Input, Meta, Tree};
use crate::fault::{Context, Fault, Result};
use crate::open::{self, Unsealed};
use lamassu_format::header::VaultHeader;
use lamassu_host::Error as HostError;
use lamassu_store::{Backend, File};
use lamassu_vault::{Kind, Options, VaultError};
use std::ffi::OsString;
use std::io;
use std::path::Path;

/// See the module.
pub struct Stored<'a> {
    unsealed: &'a Unsealed,
}

impl<'a> Stored<'a> {
    pub fn new(unsealed: &'a Unsealed) -> Self {
        Stored { unsealed }
    }

    fn file(&self, path: &Path) -> Result<File> {
        let no_file = |source| Fault::NoSuchStored { path: path.into(), source };
        let name = path.file_name().ok_or_else(|| no_file(io::ErrorKind::InvalidInput.into()))?;
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let dir = lamassu_store::backend::LocalBackend::open(parent).map_err(no_file)?;
        let backing = dir.root().open_file(name, false).map_err(no_file)?;
        let header: &VaultHeader = &self.unsealed.found.header;
        let ring = self.unsealed.keys.key_ring(header.suite())?;
        let tag = path.display().to_string();
        let approved_only = self.unsealed.policy().is_approved_only();
        let options = Options { approved_only, ..open::options(true) };
        lamassu_vault::open_orphan(backing, header, ring, &options, &tag).with_context(|| self.name(path))
    }
}

impl Tree for Stored<'_> {
    fn name(&self, path: &Path) -> String {
        path.display().to_string()
    }

    fn fault(&self, path: &Path, what: VaultError) -> crate::fault::Error {
        Local.fault(path, what)
    }

    fn stat(&self, path: &Path) -> Result<Option<Meta>> {
        let Some(meta) = Local.stat(path)? else { return Ok(None) };
        match meta.kind {
            Kind::File => Ok(Some(Meta { size: self.file(path)?.size(), ..meta })),
            _ => Ok(Some(meta)),
        }
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Input + '_>> {
        Ok(Box::new(StoredFile { file: self.file(path)?, name: self.name(path) }))
    }

    fn list(&self, _: &Path) -> Result<Vec<OsString>> {
        Err(HostError::Usage(
            "only single files can be read by their path in the store; for directories give the vault",
        )
        .into())
    }

    fn read_link(&self, _: &Path) -> Result<OsString> {
        Err(VaultError::Unsupported.into())
    }

    fn xattrs(&self, _: &Path) -> Result<Vec<(OsString, Vec<u8>)>> {
        Ok(Vec::new())
    }

    fn dir(&self, _: &Path) -> Result<Box<dyn Dir>> {
        Err(VaultError::ReadOnly.into())
    }
}

struct StoredFile {
    file: File,
    name: String,
}

impl Input for StoredFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.file.read_at(offset, buf).with_context(|| self.name.clone())
    }

    fn next_data(&self, offset: u64) -> Result<Option<(u64, u64)>> {
        let Some(start) = self.file.seek_data(offset).with_context(|| self.name.clone())? else { return Ok(None) };
        let end = self.file.seek_hole(start).with_context(|| self.name.clone())?;
        Ok(Some((start, end.unwrap_or_else(|| self.file.size()))))
    }

    fn size(&self) -> Result<u64> {
        Ok(self.file.size())
    }
}
