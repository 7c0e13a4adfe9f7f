//! Copying from tree to tree: contents with their holes, modes, times, owners (as root), extended attributes, links, device nodes.

use super::whole::{make_whole, write_whole};
use super::{Meta, Tree, read_data};
use crate::fault::Fault;
use crate::output::Ui;
use crate::progress::Meter;
use crate::signals;
use anyhow::Result;
use lamassu_vault::{Kind, VaultError};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A directory deeper than this, below where a command begins, is not gone into. Whoever can write the store makes a valid tree of any depth, and
/// resolving every path in it anew takes time with the square of the depth; PATH_MAX leaves other programs room for 2048 names in a path.
pub const DEPTH_MAX: usize = 2000;

/// The error for a directory deeper than [`DEPTH_MAX`].
pub fn too_deep(name: &str) -> anyhow::Error {
    anyhow::anyhow!("{name}: more than {DEPTH_MAX} directories deep; what is in it is left out")
}

/// The error for a local path that is the vault's directory in the store, or lies in it.
pub fn in_store(name: String) -> anyhow::Error {
    anyhow::Error::from(Fault::Usage("belongs to the vault's own directory, which holds its ciphertext")).context(name)
}

/// One run of copying.
pub struct Copier<'a> {
    pub ui: &'a Ui,
    pub from: &'a dyn Tree,
    pub to: &'a dyn Tree,
    /// Both are one tree: then a file must not be copied onto itself.
    pub same_tree: bool,
    /// (st_dev, st_ino) of the vault's directory: ciphertext that is neither copied, which would never end, nor written.
    pub store: Option<(u64, u64)>,
    pub recursive: bool,
    /// One entry is asked for, and it is no directory: its failure is that of the command, which names it.
    pub alone: bool,
    pub meter: Meter,
    /// Entries that failed and were named; the rest goes on.
    pub failed: usize,
    pub all: usize,
    /// The first failure: its exit code is that of the command.
    pub first: Option<anyhow::Error>,
}

/// A directory under way.
struct Level {
    source: PathBuf,
    target: PathBuf,
    meta: Meta,
    left: std::vec::IntoIter<OsString>,
}

impl Copier<'_> {
    /// Copies an entry and what is below it. One that fails is named and counted, and the others go on; an error is for what concerns them all.
    ///
    /// Without recursion: the depth of a tree is its maker's choice.
    pub fn copy(&mut self, source: &Path, target: &Path) -> Result<()> {
        let mut levels = Vec::new();
        levels.extend(self.entry(source, target, 0)?);
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.left.next() else {
                // Last: copying into it changed its times, and its mode may forbid writing.
                let done = self.finish(&level.source, &level.target, &level.meta);
                levels.pop();
                self.note(done)?;
                continue;
            };
            let (source, target) = (level.source.join(&name), level.target.join(&name));
            let depth = levels.len();
            levels.extend(self.entry(&source, &target, depth)?);
        }
        Ok(())
    }

    /// Copies an entry at this depth below where the copy begins. A directory is only begun: what is in it is still to be copied.
    fn entry(&mut self, source: &Path, target: &Path, depth: usize) -> Result<Option<Level>> {
        self.all += 1;
        signals::check()?;
        let begun = self.try_copy(source, target, depth);
        Ok(self.note(begun)?.flatten())
    }

    /// Names and counts a failure; an error is for what concerns all entries.
    fn note<T>(&mut self, done: Result<T>) -> Result<Option<T>> {
        let error = match done {
            Ok(value) => return Ok(Some(value)),
            Err(error) => error,
        };
        if matches!(error.downcast_ref(), Some(Fault::Interrupted)) || is_store_full(&error) || self.alone {
            return Err(error);
        }
        self.failed += 1;
        self.meter.suspend(|| crate::output::say_error(&error));
        self.first.get_or_insert(error);
        Ok(None)
    }

    fn try_copy(&mut self, source: &Path, target: &Path, depth: usize) -> Result<Option<Level>> {
        let meta = match self.from.stat(source)? {
            Some(meta) => meta,
            None => return Err(self.from.fault(source, VaultError::NotFound)),
        };
        if self.same_tree && self.to.stat(target)?.is_some_and(|t| t.ino == meta.ino) {
            let name = format!("{} and {}", self.from.name(source), self.to.name(target));
            return Err(anyhow::Error::from(Fault::Usage("are the same file")).context(name));
        }
        if self.leaves_out(source, &meta, depth)? {
            return Ok(None);
        }
        self.meter.set_message(self.from.name(source));
        match meta.kind {
            Kind::Dir => return self.begin_dir(source, target, meta, depth).map(Some),
            Kind::File => self.copy_file(source, target, &meta)?,
            Kind::Symlink => {
                let link = self.from.read_link(source)?;
                self.copy_node(source, target, &meta, &|place| self.to.make_symlink(place, &link))?;
            }
            Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {
                self.copy_node(source, target, &meta, &|place| self.to.make_node(place, &meta))?;
            }
        }
        Ok(None)
    }

    /// Whether this is the vault's own directory, come upon below what was named. An error where it, or what lies in it, was named itself.
    fn leaves_out(&self, source: &Path, meta: &Meta, depth: usize) -> Result<bool> {
        let Some(store) = self.store else { return Ok(false) };
        if depth == 0 && meta.kind != Kind::Symlink && self.from.lies_in(source, store) {
            return Err(in_store(self.from.name(source)));
        }
        if depth == 0 || meta.ino != store {
            return Ok(false);
        }
        let name = self.from.name(source);
        self.meter.suspend(|| self.ui.warn(format_args!("{name} is left out: it is the vault's own directory")));
        Ok(true)
    }

    fn begin_dir(&self, source: &Path, target: &Path, meta: Meta, depth: usize) -> Result<Level> {
        if !self.recursive {
            let name = self.from.name(source);
            return Err(anyhow::Error::from(Fault::Usage("is a directory; use -r to copy it")).context(name));
        }
        if depth > DEPTH_MAX {
            return Err(too_deep(&self.from.name(source)));
        }
        // Listed before anything is made: a directory copied into itself then has an end.
        let names = self.from.list(source)?;
        match self.to.stat(target)? {
            Some(Meta { kind: Kind::Dir, ino, .. }) if self.store == Some(ino) => {
                return Err(in_store(self.to.name(target)));
            }
            Some(Meta { kind: Kind::Dir, .. }) => {}
            Some(_) => return Err(self.to.fault(target, VaultError::NotDirectory)),
            None => self.to.make_dir(target)?,
        }
        Ok(Level { source: source.into(), target: target.into(), meta, left: names.into_iter() })
    }

    fn copy_file(&self, source: &Path, target: &Path, meta: &Meta) -> Result<()> {
        let input = self.from.open(source)?;
        let attributes = write_whole(
            self.to,
            target,
            |output| {
                let len = read_data(&*input, |offset, data| {
                    signals::check()?;
                    self.meter.advance(data.len() as u64);
                    output.write_at(offset, data)
                })?;
                output.set_len(len)
            },
            // Contents without their attributes are still worth keeping.
            |place| Ok(self.finish(source, place, meta)),
        )?;
        // Once more where that failed: the error then has the file's own name.
        attributes.or_else(|_| self.finish(source, target, meta))
    }

    /// Copies what has no contents: a link, or what `mknod` makes.
    fn copy_node(&self, source: &Path, target: &Path, meta: &Meta, make: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
        let old = self.to.stat(target)?;
        // As with files.
        let attributes = make_whole(self.to, target, old, make, |(), place| Ok(self.finish(source, place, meta)))?;
        attributes.or_else(|_| self.finish(source, target, meta))
    }

    fn finish(&self, source: &Path, target: &Path, meta: &Meta) -> Result<()> {
        for (name, value) in self.from.xattrs(source)? {
            if let Err(error) = self.to.set_xattr(target, &name, &value) {
                // A store without attributes takes the file all the same.
                let (of, why) = (self.from.name(source), crate::output::message(&error));
                self.meter.suspend(|| self.ui.warn(format_args!("attribute {name:?} of {of} is not kept: {why}")));
            }
        }
        self.to.set_meta(target, meta)
    }
}

/// A full store fails every file that follows; one message is enough.
fn is_store_full(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|c| c.downcast_ref::<std::io::Error>())
        .any(|e| matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EROFS)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::local::Local;
    use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};

    #[test]
    fn a_directory_too_deep_is_named_and_the_others_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let (source, target) = (dir.path().join("s"), dir.path().join("t"));
        std::fs::create_dir(&source).unwrap();
        // Opened one by one: the path of the deepest is near PATH_MAX.
        let mut at = openat(CWD, &source, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..=DEPTH_MAX {
            mkdirat(&at, "d", Mode::RWXU).unwrap();
            at = openat(&at, "d", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        }
        std::fs::write(source.join("z"), b"after it").unwrap();
        let ui = Ui { quiet: true, verbose: 0 };
        let mut copier = Copier {
            ui: &ui,
            from: &Local,
            to: &Local,
            same_tree: false,
            store: None,
            recursive: true,
            alone: false,
            meter: Meter::bytes(&ui, "copied"),
            failed: 0,
            all: 0,
            first: None,
        };
        copier.copy(&source, &target).unwrap();
        assert_eq!((copier.failed, copier.all), (1, DEPTH_MAX + 3));
        assert!(copier.first.unwrap().to_string().contains("directories deep"));
        assert_eq!(std::fs::read(target.join("z")).unwrap(), b"after it");
        let deepest: PathBuf = std::iter::repeat_n("d", DEPTH_MAX).collect();
        assert!(target.join(&deepest).is_dir());
        // tempfile would hold a descriptor for every level.
        assert!(std::process::Command::new("rm").arg("-rf").args([source, target]).status().unwrap().success());
    }
}
