//! Removes leftovers of objects and uploads after a crash, at the next start. It runs in the background, because it
//! reads every name of the buckets.

use super::node::Node;
use super::put::STAGED;
use super::{Objects, Result, multipart, none_there};
use lamassu_vault::Kind;
use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};

/// A directory to search.
struct DirToSweep {
    bucket: Node,
    /// names on the way from the bucket to it
    path: Vec<OsString>,
    dir: Node,
}

impl Objects {
    /// Removes leftovers until `stopping`. Returns their number.
    ///
    /// # Errors
    /// Those of the vault that prevent the whole sweep. A directory that cannot be listed is logged and skipped.
    pub fn sweep(&self, stopping: &AtomicBool) -> Result<u64> {
        let mut removed = 0;
        let mut places = Vec::new();
        for (_, bucket) in self.buckets(&|_| true, usize::MAX)? {
            // The index comes first: afterwards, a directory without an index entry is a leftover.
            removed += self.sweep_index(&bucket).unwrap_or_else(not_searched);
            places.push(DirToSweep { bucket: bucket.clone(), path: Vec::new(), dir: bucket });
        }
        while let Some(place) = places.pop() {
            if stopping.load(Ordering::Relaxed) {
                break;
            }
            removed += self.sweep_dir(&place, &mut places).unwrap_or_else(not_searched);
        }
        Ok(removed)
    }

    fn sweep_dir(&self, place: &DirToSweep, below: &mut Vec<DirToSweep>) -> Result<u64> {
        let DirToSweep { bucket, path, dir } = place;
        let (mut left, mut names): (Vec<OsString>, Vec<OsString>) = Default::default();
        dir.list(&mut |name, kind| match kind {
            Kind::Dir => names.push(name.to_owned()),
            Kind::File if name.as_encoded_bytes().starts_with(STAGED.as_bytes()) => left.push(name.to_owned()),
            Kind::File | Kind::Symlink | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {}
        })?;
        // Files being written now were registered before their names existed.
        left.retain(|name| !self.staged.lock().contains(name));
        for name in &left {
            dir.unlink(name).or_else(none_there)?;
        }
        let mut removed = left.len() as u64;
        for name in names {
            let searched = match multipart::id_of_dir(&name) {
                Some(id) => self.sweep_upload(bucket, dir, id),
                None if multipart::is_ended_dir(&name) => multipart::remove_ended(dir, &name).map(|()| true),
                None => Ok(false),
            };
            // A directory that cannot be searched does not stop the search of others.
            match searched.and_then(|is_removed| Ok((is_removed, dir.child_if_there(&name)?))) {
                Ok((true, _)) => removed += 1,
                Ok((false, Some(dir))) => {
                    let path = path.iter().cloned().chain([name]).collect();
                    below.push(DirToSweep { bucket: bucket.clone(), path, dir });
                }
                Ok((false, None)) => {}
                Err(error) => removed += not_searched(error),
            }
        }
        if removed > 0 {
            // Directories that were made only for it. Empty ones without such leftovers may be a program's.
            self.prune_path(bucket, &path.iter().map(OsString::as_os_str).collect::<Vec<_>>())?;
        }
        Ok(removed)
    }
}

fn not_searched(error: super::ObjectError) -> u64 {
    tracing::warn!(%error, "a directory was not searched for what a crash has left");
    0
}
