//! Removes leftovers of objects and uploads after a crash, at the next start. It runs in the background, because it
//! reads every name of the buckets.

use super::node::Node;
use super::put::STAGED;
use super::{Objects, Result, multipart, none_there};
use lamassu_vault::Kind;
use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a search for leftovers has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// leftovers that were removed
    pub removed: u64,
    /// places that could not be searched, and uploads of which nobody could tell whether they have ended; the log says
    /// why
    pub left_out: u64,
}

/// A directory to search.
struct DirToSweep {
    bucket: Node,
    /// names on the way from the bucket to it
    path: Vec<OsString>,
    dir: Node,
}

impl Objects {
    /// Removes leftovers until `stopping`.
    ///
    /// # Errors
    /// Those of the vault that prevent the whole sweep. A directory that cannot be listed is logged and skipped.
    pub fn sweep(&self, stopping: &AtomicBool) -> Result<Swept> {
        let mut swept = Swept::default();
        let mut places = Vec::new();
        for (_, bucket) in self.buckets(&|_| true, usize::MAX)? {
            // The index comes first: afterwards, a directory without an index entry is a leftover.
            let removed = self.sweep_index(&bucket).map(|removed| swept.removed += removed);
            removed.unwrap_or_else(|error| swept.leave_out(&error));
            places.push(DirToSweep { bucket: bucket.clone(), path: Vec::new(), dir: bucket });
        }
        while let Some(place) = places.pop() {
            if stopping.load(Ordering::Relaxed) {
                break;
            }
            self.sweep_dir(&place, &mut places, &mut swept).unwrap_or_else(|error| swept.leave_out(&error));
        }
        Ok(swept)
    }

    fn sweep_dir(&self, place: &DirToSweep, below: &mut Vec<DirToSweep>, swept: &mut Swept) -> Result<()> {
        let DirToSweep { bucket, path, dir } = place;
        let (mut left, mut names): (Vec<OsString>, Vec<OsString>) = Default::default();
        dir.list(&mut |name, kind| match kind {
            Kind::Dir => names.push(name.to_owned()),
            Kind::File if name.as_encoded_bytes().starts_with(STAGED.as_bytes()) => left.push(name.to_owned()),
            Kind::File | Kind::Symlink | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {}
        })?;
        // Files being written now were registered before their names existed.
        left.retain(|name| !self.under_way.has(name));
        for name in &left {
            dir.unlink(name).or_else(none_there)?;
            swept.removed += 1;
        }
        let mut has_removed = false;
        for name in names {
            let searched = match multipart::id_of_dir(&name) {
                Some(id) => self.sweep_upload(bucket, dir, id),
                None if multipart::is_ended_dir(&name) => multipart::remove_ended(dir, &name).map(|()| true),
                None => Ok(false),
            };
            // A directory that cannot be searched does not stop the search of others.
            match searched.and_then(|is_removed| Ok((is_removed, dir.child_if_there(&name)?))) {
                Ok((true, _)) => {
                    has_removed = true;
                    swept.removed += 1;
                }
                Ok((false, Some(dir))) => {
                    let path = path.iter().cloned().chain([name]).collect();
                    below.push(DirToSweep { bucket: bucket.clone(), path, dir });
                }
                Ok((false, None)) => {}
                Err(error) => swept.leave_out(&error),
            }
        }
        if has_removed {
            // Directories that were made only for them. Others were there before what was left in them, and may be a
            // program's.
            self.prune_path(bucket, &path.iter().map(OsString::as_os_str).collect::<Vec<_>>(), 0)?;
        }
        Ok(())
    }
}

impl Swept {
    fn leave_out(&mut self, error: &super::ObjectError) {
        tracing::warn!(%error, "a directory was not searched for what a crash has left");
        self.left_out += 1;
    }
}
