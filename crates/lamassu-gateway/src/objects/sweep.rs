//! What a crash has left of objects that were being written is removed at the next start. In the background: it looks
//! at every name of the buckets.

use super::node::Node;
use super::put::STAGED;
use super::{Objects, Result, none_there};
use lamassu_vault::Kind;
use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};

impl Objects {
    /// Removes them, until `stopping`; how many there were.
    ///
    /// # Errors
    /// Those of the vault that hinder all of it. A directory that cannot be listed is logged, and left out.
    pub fn sweep(&self, stopping: &AtomicBool) -> Result<u64> {
        let mut removed = 0;
        let mut dirs: Vec<Node> = self.buckets()?.into_iter().map(|(_, bucket)| bucket).collect();
        while let Some(dir) = dirs.pop() {
            if stopping.load(Ordering::Relaxed) {
                break;
            }
            removed += self.sweep_dir(&dir, &mut dirs).unwrap_or_else(|error| {
                tracing::warn!(%error, "a directory was not searched for what a crash has left");
                0
            });
        }
        Ok(removed)
    }

    fn sweep_dir(&self, dir: &Node, below: &mut Vec<Node>) -> Result<u64> {
        let (mut left, mut names): (Vec<OsString>, Vec<OsString>) = Default::default();
        dir.list(&mut |name, kind| match kind {
            Kind::Dir => names.push(name.to_owned()),
            Kind::File if name.as_encoded_bytes().starts_with(STAGED.as_bytes()) => left.push(name.to_owned()),
            Kind::File | Kind::Symlink | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {}
        })?;
        // What is written now was known before its name was there.
        left.retain(|name| !self.staged.lock().contains(name));
        for name in &left {
            dir.unlink(name).or_else(none_there)?;
        }
        for name in names {
            below.extend(dir.child_if_there(&name)?);
        }
        Ok(left.len() as u64)
    }
}
