//! What lies in a vault's directory in the store, found without any key: the datasets in it, and how many bytes each takes.
//!
//! A directory is opened in the one above it and never by its path, which in the store may be longer than the system takes. As many are held open as lie
//! above one another.
//!
//! Never: follows a link, reads what is in a file, changes anything.

use crate::dataset::has_header;
use crate::error::{io, is_not_found};
use crate::{Kind, Result};
use lamassu_format::name;
use lamassu_store::backend::{LocalBackend, Stat};
use lamassu_store::{Backend, BackendDir};
use std::ffi::OsStr;
use std::io as stdio;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Who looks on at a walk. A region is what a directory passes on to those in it: the first one is in region 0.
pub(crate) trait Visit {
    /// Whether anybody asks for files, which takes a stat of each.
    const FILES: bool = true;

    /// A directory, by its path below the first, in another of region `above`: its own region; `None`: nobody goes into it.
    fn enter(&mut self, path: &Path, dir: &dyn BackendDir, above: usize) -> stdio::Result<Option<usize>>;

    /// Whether an entry counts, with all that is in it.
    fn wants(&self, _name: &OsStr) -> bool {
        true
    }

    /// A file, and its bytes in the store.
    fn file(&mut self, _region: usize, _bytes: u64) {}

    /// What cannot be looked into counts nothing; or it ends the walk, with this error.
    fn failed(&mut self, _error: stdio::Error) -> stdio::Result<()> {
        Ok(())
    }

    /// Whether to end now.
    fn is_stopped(&self) -> bool {
        false
    }
}

/// A directory that was met: the one it lies in, its path below the first, and the region of the former.
type Met = (Arc<dyn BackendDir>, PathBuf, usize);

/// Goes through the directories below one, each before those in it.
///
/// # Errors
/// Those of [`Visit::failed`].
pub(crate) fn walk<V: Visit>(first: Arc<dyn BackendDir>, visit: &mut V) -> stdio::Result<()> {
    let mut todo: Vec<Met> = vec![(first, PathBuf::new(), 0)];
    while let Some(met) = todo.pop() {
        directory(met, visit, &mut todo).or_else(|error| visit.failed(error))?;
        if visit.is_stopped() {
            break;
        }
    }
    Ok(())
}

fn directory<V: Visit>((above, path, region): Met, visit: &mut V, todo: &mut Vec<Met>) -> stdio::Result<()> {
    let (dir, region) = match path.file_name() {
        None => (above, region),
        Some(name) => {
            let dir = above.open_dir(name)?;
            let Some(region) = visit.enter(&path, &*dir, region)? else { return Ok(()) };
            (dir, region)
        }
    };
    for entry in dir.read_dir()?.into_iter().filter(|e| visit.wants(&e.name)).collect::<Vec<_>>() {
        let stat = match entry.kind {
            Some(Kind::Dir) => None,
            Some(Kind::File) if V::FILES => Some(dir.stat_entry(&entry.name)),
            Some(_) => continue,
            None => Some(dir.stat_entry(&entry.name)),
        };
        match stat {
            None => todo.push((dir.clone(), path.join(&entry.name), region)),
            Some(Ok(st)) if st.kind == Kind::Dir => todo.push((dir.clone(), path.join(&entry.name), region)),
            Some(Ok(st)) if st.kind == Kind::File => visit.file(region, bytes_of(&st)),
            Some(Ok(_)) => {}
            Some(Err(error)) => visit.failed(error)?,
        }
    }
    Ok(())
}

/// What of a file has to be gone through.
pub(crate) fn bytes_of(st: &Stat) -> u64 {
    st.len.min(st.blocks.saturating_mul(512).max(4096))
}

fn root(dir: &Path) -> Result<Arc<dyn BackendDir>> {
    Ok(LocalBackend::open(dir).map_err(io("open"))?.root())
}

/// Bytes of all files of the vault in a directory, as they are stored.
///
/// # Errors
/// Those of the store, for the directory itself; what cannot be looked into counts nothing.
pub fn stored_bytes(dir: &Path) -> Result<u64> {
    struct Sum(u64);
    impl Visit for Sum {
        fn enter(&mut self, _path: &Path, _dir: &dyn BackendDir, above: usize) -> stdio::Result<Option<usize>> {
            Ok(Some(above))
        }

        fn file(&mut self, _region: usize, bytes: u64) {
            self.0 += bytes;
        }
    }
    let mut sum = Sum(0);
    walk(root(dir)?, &mut sum).map_err(io("list a directory"))?;
    Ok(sum.0)
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

/// The vault in a directory, first, and all datasets in it, each behind the one it lies in. Takes no key, so it goes by what lies in the store, and not by what
/// the header says.
///
/// # Errors
/// Those of the store, for the directory itself; what cannot be looked into counts nothing.
pub fn regions(dir: &Path) -> Result<Vec<Region>> {
    struct Found(Vec<Region>);
    impl Visit for Found {
        fn enter(&mut self, path: &Path, dir: &dyn BackendDir, above: usize) -> stdio::Result<Option<usize>> {
            if !has_header(dir).unwrap_or(false) {
                return Ok(Some(above));
            }
            self.0.push(Region { stored: path.into(), above, bytes: 0 });
            Ok(Some(self.0.len() - 1))
        }

        fn file(&mut self, region: usize, bytes: u64) {
            self.0[region].bytes += bytes;
        }
    }
    let mut found = Found(vec![Region { stored: PathBuf::new(), above: 0, bytes: 0 }]);
    walk(root(dir)?, &mut found).map_err(io("list a directory"))?;
    Ok(found.0)
}

/// Paths in the store of all datasets in the vault in a directory, those not counted that are being made or removed.
///
/// # Errors
/// Those of the store: none is left out because it could not be looked into.
pub fn datasets_below(dir: &Path) -> Result<Vec<PathBuf>> {
    struct Found(Vec<PathBuf>);
    impl Visit for Found {
        const FILES: bool = false;

        fn enter(&mut self, path: &Path, dir: &dyn BackendDir, above: usize) -> stdio::Result<Option<usize>> {
            if has_header(dir)? {
                self.0.push(path.into());
            }
            Ok(Some(above))
        }

        fn wants(&self, name: &OsStr) -> bool {
            name != name::STAGING
        }

        fn failed(&mut self, error: stdio::Error) -> stdio::Result<()> {
            if is_not_found(&error) { Ok(()) } else { Err(error) }
        }
    }
    let mut found = Found(Vec::new());
    walk(root(dir)?, &mut found).map_err(io("list a directory"))?;
    Ok(found.0)
}

/// Whether there is any dataset in the vault in a directory: the walk ends at the first.
///
/// # Errors
/// As [`regions`].
pub fn has_dataset(dir: &Path) -> Result<bool> {
    struct First(bool);
    impl Visit for First {
        const FILES: bool = false;

        fn enter(&mut self, _path: &Path, dir: &dyn BackendDir, above: usize) -> stdio::Result<Option<usize>> {
            self.0 |= has_header(dir).unwrap_or(false);
            Ok(if self.0 { None } else { Some(above) })
        }

        fn is_stopped(&self) -> bool {
            self.0
        }
    }
    let mut first = First(false);
    walk(root(dir)?, &mut first).map_err(io("list a directory"))?;
    Ok(first.0)
}
