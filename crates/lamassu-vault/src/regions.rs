//! The datasets in a vault's directory in the store, and how many bytes each takes, found without any key.

use crate::error::{io, is_not_found};
use crate::walk::{Failed, Met, Visit, has_header, walk};
use crate::{Kind, Result};
use lamassu_format::name;
use lamassu_store::backend::{Listed, LocalBackend, Stat};
use lamassu_store::{Backend, BackendDir};
use std::io as stdio;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How many bytes of a file have to be read.
pub(crate) fn bytes_of(st: &Stat) -> u64 {
    st.len.min(st.blocks.saturating_mul(512).max(4096))
}

fn root(dir: &Path) -> Result<Arc<dyn BackendDir>> {
    Ok(LocalBackend::open(dir).map_err(io("open"))?.root())
}

/// Bytes of all files of the vault in a directory, as they are stored.
///
/// # Errors
/// As [`regions`].
pub fn stored_bytes(dir: &Path) -> Result<u64> {
    Ok(regions(dir)?.iter().map(|region| region.bytes).sum())
}

/// A vault, or a dataset in it at any depth: a directory with a header of its own, and what lies in it alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// path in the store, relative to the vault's directory
    pub stored: PathBuf,
    /// which of the regions it lies in; the vault itself: 0
    pub above: usize,
    /// bytes of its own files, as they are stored
    pub bytes: u64,
}

/// The vault in a directory, first, and all datasets in it, each after the one it lies in. It uses no key, so it goes
/// by the entries of the store, not by the header.
///
/// # Errors
/// Those of the store, for the directory itself. Directories that cannot be read count as empty.
pub fn regions(dir: &Path) -> Result<Vec<Region>> {
    let mut found = Regions(vec![Region { stored: PathBuf::new(), above: 0, bytes: 0 }]);
    walk(Met::first(root(dir)?, PathBuf::new(), 0), &mut found)?;
    Ok(found.0)
}

/// The region of each directory is passed on to those in it.
struct Regions(Vec<Region>);

impl Visit for Regions {
    type Passed = usize;
    type Here = usize;
    type Error = crate::VaultError;

    fn enter(&mut self, at: &Met<usize>, dir: &Arc<dyn BackendDir>) -> Result<Option<usize>> {
        if at.is_root() || !has_header(&**dir).unwrap_or(false) {
            return Ok(Some(at.passed));
        }
        self.0.push(Region { stored: at.stored.clone(), above: at.passed, bytes: 0 });
        Ok(Some(self.0.len() - 1))
    }

    fn entry(
        &mut self,
        _at: &Met<usize>,
        dir: &Arc<dyn BackendDir>,
        region: &mut usize,
        entry: &Listed,
    ) -> Result<Option<usize>> {
        let st = match entry.kind {
            Some(Kind::Dir) => return Ok(Some(*region)),
            Some(Kind::File) | None => dir.stat_entry(&entry.name).ok(),
            Some(_) => None,
        };
        match st {
            Some(st) if st.kind == Kind::Dir => return Ok(Some(*region)),
            Some(st) if st.kind == Kind::File => {
                let bytes = &mut self.0[*region].bytes;
                *bytes = bytes.saturating_add(bytes_of(&st));
            }
            Some(_) | None => {}
        }
        Ok(None)
    }
}

/// Paths in the store of all datasets in the vault in a directory, without those that are being made or removed.
///
/// # Errors
/// Those of the store: a directory that cannot be read is an error here.
pub fn datasets_below(dir: &Path) -> Result<Vec<PathBuf>> {
    datasets(dir, true)
}

/// Whether there is any dataset in the vault in a directory: the walk ends at the first.
///
/// # Errors
/// As [`regions`].
pub fn has_dataset(dir: &Path) -> Result<bool> {
    Ok(!datasets(dir, false)?.is_empty())
}

fn datasets(dir: &Path, wants_all: bool) -> Result<Vec<PathBuf>> {
    let mut datasets = Datasets { found: Vec::new(), wants_all };
    walk(Met::first(root(dir)?, PathBuf::new(), ()), &mut datasets)?;
    Ok(datasets.found)
}

/// Paths of datasets: all of them, or only the first, and then without errors.
struct Datasets {
    found: Vec<PathBuf>,
    wants_all: bool,
}

impl Datasets {
    fn seen<T>(&self, seen: stdio::Result<T>) -> Result<Option<T>> {
        match seen {
            Err(e) if self.wants_all && !is_not_found(&e) => Err(io("list a directory")(e)),
            seen => Ok(seen.ok()),
        }
    }
}

impl Visit for Datasets {
    type Passed = ();
    type Here = ();
    type Error = crate::VaultError;

    fn enter(&mut self, at: &Met<()>, dir: &Arc<dyn BackendDir>) -> Result<Option<()>> {
        if !at.is_root() && self.seen(has_header(&**dir))? == Some(true) {
            self.found.push(at.stored.clone());
        }
        Ok(Some(()))
    }

    fn entry(&mut self, _: &Met<()>, dir: &Arc<dyn BackendDir>, _: &mut (), entry: &Listed) -> Result<Option<()>> {
        if self.wants_all && entry.name == name::STAGING {
            return Ok(None);
        }
        let kind = match entry.kind {
            None => self.seen(dir.stat_entry(&entry.name))?.map(|st| st.kind),
            kind => kind,
        };
        Ok((kind == Some(Kind::Dir)).then_some(()))
    }

    fn failed(&mut self, _: &Met<()>, _: Failed, error: stdio::Error) -> Result<()> {
        self.seen::<()>(Err(error)).map(drop)
    }

    fn is_stopped(&self) -> bool {
        !self.wants_all && !self.found.is_empty()
    }
}
