//! Files that are being written by this process, and uploads that are being begun. While one is in a directory, the
//! directory is not empty, and an object that is removed there leaves it. Whoever ends the last one then removes the
//! directory, if nothing else came to be there.

use super::key::Key;
use super::multipart;
use super::node::Node;
use super::put::STAGED;
use super::{Objects, Result};
use lamassu_vault::Ino;
use lru::LruCache;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;

/// Names of a directory that are kept.
const OTHERS: usize = 16;
/// Directories that names are kept of.
const DIRS: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// The files under way.
pub(super) struct UnderWay {
    files: Mutex<Files>,
    /// Names that were in a directory beside files under way. As long as one of them is there, nobody has to read the
    /// directory to know that it is not left to those files. They are chosen by chance, so whatever order the names
    /// are removed in, a directory is read a few times in all.
    others: Mutex<LruCache<Ino, Vec<OsString>>>,
    chance: RandomState,
}

#[derive(Default)]
struct Files {
    /// by name, each with the directory that it is in
    dirs: HashMap<OsString, Ino>,
    /// those directories
    used: HashMap<Ino, Used>,
}

/// A directory with files under way.
#[derive(Default)]
struct Used {
    files: usize,
    /// It would have been removed otherwise, and the empty ones above it but for those of so many levels.
    left: Option<usize>,
}

impl Default for UnderWay {
    fn default() -> UnderWay {
        UnderWay { files: Mutex::default(), others: Mutex::new(LruCache::new(DIRS)), chance: RandomState::new() }
    }
}

impl Files {
    /// Takes a file out of its directory, which is given back if no other one is there.
    fn end(&mut self, name: &OsStr) -> (Option<Ino>, Option<usize>) {
        let Some(dir) = self.dirs.remove(name) else { return (None, None) };
        let Some(used) = self.used.get_mut(&dir) else { return (Some(dir), None) };
        used.files -= 1;
        match used.files {
            0 => (Some(dir), self.used.remove(&dir).and_then(|used| used.left)),
            _ => (Some(dir), None),
        }
    }
}

impl UnderWay {
    /// Registers a file. It may have been registered in a directory that is gone.
    pub fn begin(&self, name: &OsStr, dir: &Node) {
        let files = &mut *self.files.lock();
        files.end(name);
        files.dirs.insert(name.to_owned(), dir.ino());
        files.used.entry(dir.ino()).or_default().files += 1;
    }

    /// Whether a file is under way.
    pub fn has(&self, name: &OsStr) -> bool {
        self.files.lock().dirs.contains_key(name)
    }

    /// A file is no longer in its directory. Returns whether the directory is to be removed now, if it is empty, and
    /// of how many levels those above stay.
    pub fn end(&self, name: &OsStr) -> Option<usize> {
        self.files.lock().end(name).1
    }

    /// A file is in its place. Its directory has an object now, or directories of one, and is no longer left to the
    /// other files: whoever removes the object looks after it again.
    pub fn placed(&self, name: &OsStr) {
        let files = &mut *self.files.lock();
        let (dir, _) = files.end(name);
        if let Some(used) = dir.and_then(|dir| files.used.get_mut(&dir)) {
            used.left = None;
        }
    }

    /// Whether files are under way in a directory.
    pub fn is_in(&self, dir: Ino) -> bool {
        self.files.lock().used.contains_key(&dir)
    }

    /// A directory has nothing but files under way, and would have been removed. Returns whether that is left to
    /// them. Of several who would have removed it, one may have kept more of the directories above than another.
    pub fn leave(&self, dir: Ino, levels: usize) -> bool {
        let files = &mut *self.files.lock();
        let Some(used) = files.used.get_mut(&dir) else { return false };
        used.left = Some(used.left.map_or(levels, |left| left.min(levels)));
        true
    }

    /// Whether a directory has more than files under way.
    pub fn has_others(&self, dir: &Node) -> Result<bool> {
        let is_there = |name: &OsString| -> Result<bool> { Ok(dir.child_if_there(name)?.is_some()) };
        let any_there = |names: &[OsString]| names.iter().map(is_there).find(|found| !matches!(found, Ok(false)));
        let known = self.others.lock().get(&dir.ino()).cloned().unwrap_or_default();
        if let Some(found) = any_there(&known) {
            return found;
        }
        let (mut names, mut count) = (Vec::new(), 0_u64);
        dir.list(&mut |name, _| {
            if self.is_another(name) {
                count += 1;
                let at = (self.chance.hash_one(count) % count) as usize;
                match names.len() < OTHERS {
                    true => names.push(name.to_owned()),
                    false if at < OTHERS => names[at] = name.to_owned(),
                    false => {}
                }
            }
        })?;
        // What is gone by now was an upload that could not begin, or a name whose remover looks after the directory.
        let found = any_there(&names).unwrap_or(Ok(false));
        self.others.lock().put(dir.ino(), names);
        found
    }

    fn is_another(&self, name: &OsStr) -> bool {
        let is_file = name.as_encoded_bytes().starts_with(STAGED.as_bytes());
        let is_begun = multipart::id_of_dir(name).is_some_and(|_| self.has(name));
        !is_file && !is_begun && !multipart::is_ended_dir(name)
    }
}

impl Objects {
    /// Ends a file or an upload that was not placed, and removes directories that are empty without it: those that
    /// were made since its beginning, when `levels` of its key were there, and those that another request has left to
    /// it. The others may be a program's.
    pub(super) fn end_unplaced(&self, name: &OsStr, (bucket, key): (&Node, &Key), levels: usize) {
        let left = self.under_way.end(name);
        let levels = left.map_or(levels, |left| left.min(levels));
        if let Err(error) = self.prune(bucket, key, levels) {
            tracing::debug!(%error, "directories that may be empty stay");
        }
    }
}

#[cfg(test)]
mod tests;
