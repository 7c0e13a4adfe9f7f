//! Walking the directories of a vault in the store: one loop for all walks, also of other crates.
//!
//! A directory is opened in the one above it and never by its path, which in the store may be longer than the system
//! takes. The walk holds the directories on the way to the current one open, with the names that are left in each. It
//! does not recurse, and goes no deeper than `DEPTH_MAX`.
//!
//! Errors: [`Visit::failed`] is called for a directory that cannot be opened or listed. The visitor notes that, or ends
//! the walk with an error of its own. No directory is left out silently.
//!
//! Never: follows a link, reads a file, changes anything.

use crate::error::is_not_found;
use crate::inode::{DEPTH_MAX, StoreId};
use crate::{Kind, Result, VaultError};
use lamassu_format::header::{HEADER_MAX, Header, NameMode, VaultHeader, VaultId};
use lamassu_format::name::{HEADER, Stored, classify};
use lamassu_store::BackendDir;
use lamassu_store::backend::{Listed, Stat};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

/// A directory to be visited.
pub struct Met<P> {
    /// The directory it lies in; if `name` is empty, the directory itself.
    pub above: Arc<dyn BackendDir>,
    /// Its name there.
    pub name: OsString,
    /// Path in the store.
    pub stored: PathBuf,
    /// What the visit of its parent passes on.
    pub passed: P,
}

impl<P> Met<P> {
    /// The first directory of a walk, which is open.
    pub fn first(dir: Arc<dyn BackendDir>, stored: PathBuf, passed: P) -> Met<P> {
        Met { above: dir, name: OsString::new(), stored, passed }
    }

    /// Whether it is the vault's own directory.
    pub fn is_root(&self) -> bool {
        self.stored.as_os_str().is_empty()
    }
}

/// What cannot be done with a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// opened
    Open,
    /// listed
    List,
}

/// What a walk does with the directories.
pub trait Visit {
    /// What is known of a directory before it is opened.
    type Passed;
    /// What is kept while the entries of a directory are walked.
    type Here;
    /// What ends a walk.
    type Error;

    /// Opens a directory that a listing showed.
    fn open(&self, above: &dyn BackendDir, name: &OsStr) -> io::Result<Arc<dyn BackendDir>> {
        above.open_dir(name)
    }

    /// A directory is open. `None`: do not enter it.
    fn enter(&mut self, at: &Met<Self::Passed>, dir: &Arc<dyn BackendDir>) -> Result<Option<Self::Here>, Self::Error>;

    /// An entry of it. `Some`: a directory that is to be visited, after all entries of this one.
    fn entry(
        &mut self,
        at: &Met<Self::Passed>,
        dir: &Arc<dyn BackendDir>,
        here: &mut Self::Here,
        entry: &Listed,
    ) -> Result<Option<Self::Passed>, Self::Error>;

    /// All its entries were visited.
    fn leave(&mut self, _at: &Met<Self::Passed>, _dir: &Arc<dyn BackendDir>, _here: Self::Here) {}

    /// A directory cannot be opened or listed. By default that is ignored; an error ends the walk.
    fn failed(&mut self, _at: &Met<Self::Passed>, _what: Failed, _error: io::Error) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Whether to end now.
    fn is_stopped(&self) -> bool {
        false
    }
}

/// A directory that was visited, and what is left to visit in it.
struct Level<P> {
    dir: Arc<dyn BackendDir>,
    stored: PathBuf,
    below: Vec<(OsString, P)>,
}

/// Visits a directory and all below it, each before those in it.
///
/// # Errors
/// Those of the visitor.
pub fn walk<V: Visit>(first: Met<V::Passed>, visit: &mut V) -> Result<(), V::Error> {
    walk_to(DEPTH_MAX, first, visit)
}

fn walk_to<V: Visit>(depth_max: usize, first: Met<V::Passed>, visit: &mut V) -> Result<(), V::Error> {
    let mut levels = Vec::new();
    let mut first = Some(first);
    while let Some(met) = first.take().or_else(|| next(&mut levels)) {
        if let Some((dir, below)) = directory(&met, levels.len() < depth_max, visit)? {
            levels.push(Level { dir, stored: met.stored, below });
        }
        if visit.is_stopped() {
            break;
        }
    }
    Ok(())
}

fn next<P>(levels: &mut Vec<Level<P>>) -> Option<Met<P>> {
    while let Some(level) = levels.last_mut() {
        if let Some((name, passed)) = level.below.pop() {
            return Some(Met { above: level.dir.clone(), stored: level.stored.join(&name), name, passed });
        }
        levels.pop();
    }
    None
}

/// An open directory, and those in it; `None`: do not enter it.
type Opened<P> = Option<(Arc<dyn BackendDir>, Vec<(OsString, P)>)>;

fn directory<V: Visit>(met: &Met<V::Passed>, may_open: bool, visit: &mut V) -> Result<Opened<V::Passed>, V::Error> {
    let opened = match may_open {
        _ if met.name.is_empty() => Ok(met.above.clone()),
        true => visit.open(&*met.above, &met.name),
        false => Err(io::Error::from_raw_os_error(libc::ELOOP)),
    };
    let dir = match opened {
        Ok(dir) => dir,
        Err(error) => return visit.failed(met, Failed::Open, error).map(|()| None),
    };
    let Some(mut here) = visit.enter(met, &dir)? else { return Ok(None) };
    let entries = match dir.read_dir() {
        Ok(entries) => entries,
        Err(error) => return visit.failed(met, Failed::List, error).map(|()| None),
    };
    let mut below = Vec::new();
    for entry in entries {
        if let Some(passed) = visit.entry(met, &dir, &mut here, &entry)? {
            below.push((entry.name, passed));
        }
    }
    visit.leave(met, &dir, here);
    Ok(Some((dir, below)))
}

/// Whether a vault lies in this directory.
pub(crate) fn has_header(dir: &dyn BackendDir) -> io::Result<bool> {
    match dir.stat_entry(OsStr::new(HEADER)) {
        Ok(st) => Ok(st.kind == Kind::File),
        Err(e) if is_not_found(&e) => Ok(false),
        Err(e) => Err(e),
    }
}

/// The bytes of a header, at most one more than a header may have. As `lamassu_keys::header_file::read_bytes`.
pub(crate) fn read_header_bytes(dir: &dyn BackendDir) -> io::Result<Vec<u8>> {
    const ATTEMPTS_MAX: usize = 16;
    for _ in 0..ATTEMPTS_MAX {
        let file = dir.open_file(OsStr::new(HEADER), false)?;
        let mut bytes = vec![0; HEADER_MAX + 1];
        let len = file.read_at(0, &mut bytes)?;
        // A header that is replaced is overwritten, so the bytes that were read may be noise.
        if StoreId::from(&file.stat()?) == StoreId::from(&dir.stat_entry(OsStr::new(HEADER))?) {
            bytes.truncate(len);
            return Ok(bytes);
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

/// The id in the header of the vault that lies in this directory. Not authenticated; `None` if it does not parse.
pub(crate) fn header_id(dir: &dyn BackendDir) -> io::Result<Option<VaultId>> {
    Ok(VaultHeader::parse(&read_header_bytes(dir)?).ok().map(|header| header.id()))
}

/// Whether a stored name is that of an entry of the tree.
pub(crate) fn is_entry(mode: NameMode, name: &OsStr) -> bool {
    matches!(classify(mode, name.as_bytes()), Stored::Sealed(_) | Stored::Long(_) | Stored::Plain)
}

/// Counts what a walk over a tree will find. Directories that cannot be read count nothing: the walk itself notes them.
pub(crate) struct Ahead<'a> {
    pub mode: NameMode,
    /// Whether datasets are skipped.
    pub skips_datasets: bool,
    /// How many bytes an entry counts.
    pub measure: fn(&Stat) -> u64,
    pub is_stopped: &'a dyn Fn() -> bool,
    /// Entries but directories.
    pub entries: u64,
    pub bytes: u64,
}

impl Ahead<'_> {
    pub fn add(&mut self, st: &Stat) {
        self.entries += 1;
        // Saturating: sizes that a store claims need not be true.
        self.bytes = self.bytes.saturating_add((self.measure)(st));
    }
}

impl Visit for Ahead<'_> {
    type Passed = ();
    type Here = ();
    type Error = VaultError;

    fn enter(&mut self, at: &Met<()>, dir: &Arc<dyn BackendDir>) -> Result<Option<()>> {
        let is_left_out = self.skips_datasets && !at.name.is_empty() && has_header(&**dir).unwrap_or(false);
        Ok((!is_left_out).then_some(()))
    }

    fn entry(
        &mut self,
        _at: &Met<()>,
        dir: &Arc<dyn BackendDir>,
        _here: &mut (),
        entry: &Listed,
    ) -> Result<Option<()>> {
        if !is_entry(self.mode, &entry.name) {
            return Ok(None);
        }
        Ok(match dir.stat_entry(&entry.name) {
            Ok(st) if st.kind == Kind::Dir => Some(()),
            Ok(st) => {
                self.add(&st);
                None
            }
            Err(_) => None,
        })
    }

    fn is_stopped(&self) -> bool {
        (self.is_stopped)()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VaultError;
    use lamassu_store::Backend;
    use lamassu_store::backend::MemoryBackend;

    /// Notes what is visited, and what cannot be; may end the walk there.
    #[derive(Default)]
    struct Seen {
        paths: Vec<String>,
        failed: Vec<(String, Failed, Option<i32>)>,
        ends: bool,
        most: usize,
    }

    impl Visit for Seen {
        type Passed = ();
        type Here = ();
        type Error = VaultError;

        fn enter(&mut self, at: &Met<()>, _dir: &Arc<dyn BackendDir>) -> Result<Option<()>> {
            self.paths.push(at.stored.display().to_string());
            Ok((at.name != "closed").then_some(()))
        }

        fn entry(&mut self, _: &Met<()>, _: &Arc<dyn BackendDir>, _: &mut (), e: &Listed) -> Result<Option<()>> {
            // A file that is taken for a directory cannot be opened.
            Ok((e.kind == Some(Kind::Dir) || e.name == "file").then_some(()))
        }

        fn failed(&mut self, at: &Met<()>, what: Failed, error: io::Error) -> Result<()> {
            self.failed.push((at.stored.display().to_string(), what, error.raw_os_error()));
            if self.ends { Err(VaultError::Invalid) } else { Ok(()) }
        }

        fn is_stopped(&self) -> bool {
            self.most > 0 && self.paths.len() >= self.most
        }
    }

    fn seen(depth_max: usize, seen: Seen) -> (Seen, Result<()>) {
        let root = MemoryBackend::new().root();
        let make = |dir: &Arc<dyn BackendDir>, name: &str| {
            dir.make_dir(OsStr::new(name), 0o700).unwrap();
            dir.open_dir(OsStr::new(name)).unwrap()
        };
        make(&make(&make(&root, "a"), "b"), "c");
        make(&make(&root, "closed"), "within");
        root.create_file(OsStr::new("file")).unwrap();
        let mut seen = seen;
        let done = walk_to(depth_max, Met::first(root, PathBuf::new(), ()), &mut seen);
        seen.paths.sort();
        (seen, done)
    }

    #[test]
    fn every_directory_is_visited_but_those_that_are_not_gone_into() {
        let (seen, done) = seen(9, Seen::default());
        assert_eq!(seen.paths, ["", "a", "a/b", "a/b/c", "closed"]);
        assert_eq!(seen.failed, [("file".to_owned(), Failed::Open, Some(libc::ENOTDIR))]);
        done.unwrap();
    }

    #[test]
    fn what_lies_too_deep_is_told_and_not_opened() {
        let (seen, done) = seen(2, Seen::default());
        assert_eq!(seen.paths, ["", "a", "closed"]);
        assert!(seen.failed.contains(&("a/b".to_owned(), Failed::Open, Some(libc::ELOOP))), "{:?}", seen.failed);
        done.unwrap();
    }

    #[test]
    fn a_visitor_ends_a_walk_by_an_error_or_a_word() {
        let (_, done) = seen(9, Seen { ends: true, ..Seen::default() });
        assert!(matches!(done, Err(VaultError::Invalid)));
        let (seen, done) = seen(9, Seen { most: 2, ..Seen::default() });
        assert_eq!(seen.paths.len(), 2);
        done.unwrap();
    }
}
