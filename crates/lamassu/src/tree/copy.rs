//! Copying from tree to tree: contents with their holes, modes, times, extended attributes, links, and, where the source is trusted with them, owners (as root)
//! and device nodes.

use super::grants::{Grants, LeftOut};
use super::whole::{make_whole, write_whole};
use super::{Dir, Meta, Node, Tree, read_data};
use crate::fault::Fault;
use crate::output::Ui;
use crate::progress::Meter;
use crate::signals;
use anyhow::{Context, Result};
use lamassu_vault::{Kind, VaultError};
use std::ffi::{OsStr, OsString};
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
    /// Both are one tree: then a file must not be copied onto itself.
    pub same_tree: bool,
    /// (st_dev, st_ino) of the vault's directory: ciphertext that is neither copied, which would never end, nor written.
    pub store: Option<(u64, u64)>,
    pub recursive: bool,
    /// One entry is asked for, and it is no directory: its failure is that of the command, which names it.
    pub alone: bool,
    pub grants: Grants,
    pub left_out: LeftOut,
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
    target: Box<dyn Dir>,
    /// For messages.
    name: String,
    /// It was made here, and was not there already.
    is_new: bool,
    meta: Meta,
    left: std::vec::IntoIter<OsString>,
}

/// Where an entry is copied to.
#[derive(Clone, Copy)]
pub enum Place<'d> {
    /// To this name in a directory.
    Named(&'d dyn Dir, &'d OsStr),
    /// To the tree's own directory at this path, which is there: what is in the source goes into it.
    Itself(&'d dyn Tree, &'d Path),
}

impl Copier<'_> {
    /// Copies an entry and what is below it. One that fails is named and counted, and the others go on; an error is for what concerns them all.
    ///
    /// Without recursion: the depth of a tree is its maker's choice.
    pub fn copy(&mut self, source: &Path, target: Place<'_>) -> Result<()> {
        let mut levels = Vec::new();
        levels.extend(self.entry(source, target, 0)?);
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.left.next() else {
                // Last: copying into it changed its times, and its mode may forbid writing.
                let done = self.finish_dir(level);
                levels.pop();
                self.note(done)?;
                continue;
            };
            let source = level.source.join(&name);
            // The first is no level below what was named.
            let depth = levels.len();
            let Some(level) = levels.last() else { break };
            let begun = self.entry(&source, Place::Named(&*level.target, &name), depth)?;
            levels.extend(begun);
        }
        Ok(())
    }

    /// Copies an entry at this depth below where the copy begins. A directory is only begun: what is in it is still to be copied.
    fn entry(&mut self, source: &Path, target: Place<'_>, depth: usize) -> Result<Option<Level>> {
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

    fn try_copy(&mut self, source: &Path, target: Place<'_>, depth: usize) -> Result<Option<Level>> {
        let meta = match self.from.stat(source)? {
            Some(meta) => meta,
            None => return Err(self.from.fault(source, VaultError::NotFound)),
        };
        if self.same_tree && target.ino()? == Some(meta.ino) {
            let name = format!("{} and {}", self.from.name(source), target.name());
            return Err(anyhow::Error::from(Fault::Usage("are the same file")).context(name));
        }
        if self.leaves_out(source, &meta, depth)? {
            return Ok(None);
        }
        self.grants.check_kind(&meta).with_context(|| self.from.name(source))?;
        self.meter.set_message(self.from.name(source));
        let (dir, name) = match (meta.kind, target) {
            (Kind::Dir, _) => return self.begin_dir(source, target, meta, depth).map(Some),
            (_, Place::Named(dir, name)) => (dir, name),
            (_, Place::Itself(tree, path)) => return Err(tree.fault(path, VaultError::IsDirectory)),
        };
        match meta.kind {
            Kind::Dir | Kind::File => self.copy_file(source, dir, name, &meta)?,
            Kind::Symlink => {
                let link = self.from.read_link(source)?;
                self.copy_node(source, (dir, name), &meta, &|place| dir.make_symlink(place, &link))?;
            }
            Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {
                self.copy_node(source, (dir, name), &meta, &|place| dir.make_node(place, &meta))?;
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

    fn begin_dir(&self, source: &Path, target: Place<'_>, meta: Meta, depth: usize) -> Result<Level> {
        if !self.recursive {
            let name = self.from.name(source);
            return Err(anyhow::Error::from(Fault::Usage("is a directory; use -r to copy it")).context(name));
        }
        if depth > DEPTH_MAX {
            return Err(too_deep(&self.from.name(source)));
        }
        // Listed before anything is made: a directory copied into itself then has an end.
        let names = self.from.list(source)?;
        let (target, name, is_new) = target.open()?;
        if self.store.is_some() && Some(target.ino()?) == self.store {
            return Err(in_store(name));
        }
        Ok(Level { source: source.into(), target, name, is_new, meta, left: names.into_iter() })
    }

    fn copy_file(&self, source: &Path, dir: &dyn Dir, target: &OsStr, meta: &Meta) -> Result<()> {
        let input = self.from.open(source)?;
        let attributes = write_whole(
            dir,
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
            |node| Ok(self.finish(source, node, meta)),
        )?;
        attributes.with_context(|| dir.name(target))
    }

    /// Copies what has no contents: a link, or what `mknod` makes.
    fn copy_node(
        &self,
        source: &Path,
        (dir, target): (&dyn Dir, &OsStr),
        meta: &Meta,
        make: &dyn Fn(&OsStr) -> Result<Box<dyn Node>>,
    ) -> Result<()> {
        let old = dir.stat(target)?;
        // As with files.
        let attributes = make_whole(dir, target, old, make, |node| Ok(self.finish(source, &*node, meta)))?;
        attributes.with_context(|| dir.name(target))
    }

    /// A directory that was there already is not the source's to describe, unless that is trusted.
    fn finish_dir(&self, level: &Level) -> Result<()> {
        if !level.is_new && self.grants != Grants::Kept {
            return Ok(());
        }
        self.finish(&level.source, &*level.target, &level.meta).with_context(|| level.name.clone())
    }

    /// The owner comes first, since setting it takes set-id bits and capabilities away; the mode last, since an access control list sets one too.
    fn finish(&self, source: &Path, node: &dyn Node, meta: &Meta) -> Result<()> {
        if self.grants.keeps_owner(meta, &self.left_out) {
            node.set_owner(meta.uid, meta.gid)?;
        }
        for (name, value) in self.from.xattrs(source)? {
            if !self.grants.keeps_attribute(name.as_encoded_bytes(), &self.left_out) {
                continue;
            }
            if let Err(error) = node.set_xattr(&name, &value) {
                // A store without attributes takes the file all the same.
                let (of, why) = (self.from.name(source), crate::output::message(&error));
                self.meter.suspend(|| self.ui.warn(format_args!("attribute {name:?} of {of} is not kept: {why}")));
            }
        }
        node.set_times(meta.atime, meta.mtime)?;
        node.set_mode(self.grants.mode(meta, &self.left_out))
    }
}

impl Place<'_> {
    fn name(&self) -> String {
        match self {
            Place::Named(dir, name) => dir.name(name),
            Place::Itself(tree, path) => tree.name(path),
        }
    }

    /// [`Meta::ino`] of what is there.
    fn ino(&self) -> Result<Option<(u64, u64)>> {
        match self {
            Place::Named(dir, name) => Ok(dir.stat(name)?.map(|meta| meta.ino)),
            Place::Itself(tree, path) => Ok(Some(tree.dir(path)?.ino()?)),
        }
    }

    /// Opens it as a directory, made where nothing is there, with its name, and whether it was made.
    fn open(&self) -> Result<(Box<dyn Dir>, String, bool)> {
        let (dir, is_new) = match self {
            Place::Itself(tree, path) => (tree.dir(path)?, false),
            Place::Named(dir, name) => match dir.stat(name)? {
                Some(Meta { kind: Kind::Dir, .. }) => (dir.open(name)?, false),
                Some(_) => return Err(dir.fault(name, VaultError::NotDirectory)),
                None => (dir.make_dir(name)?, true),
            },
        };
        Ok((dir, self.name(), is_new))
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
            same_tree: false,
            store: None,
            recursive: true,
            alone: false,
            grants: Grants::Kept,
            left_out: LeftOut::default(),
            meter: Meter::bytes(&ui, "copied"),
            failed: 0,
            all: 0,
            first: None,
        };
        // A descriptor is held for every level.
        crate::open::raise_descriptor_limit();
        let held = Local.dir(dir.path()).unwrap();
        copier.copy(&source, Place::Named(&*held, "t".as_ref())).unwrap();
        assert_eq!((copier.failed, copier.all), (1, DEPTH_MAX + 3));
        assert!(copier.first.unwrap().to_string().contains("directories deep"));
        assert_eq!(std::fs::read(target.join("z")).unwrap(), b"after it");
        let deepest: PathBuf = std::iter::repeat_n("d", DEPTH_MAX).collect();
        assert!(target.join(&deepest).is_dir());
        // tempfile would hold a descriptor for every level.
        assert!(std::process::Command::new("rm").arg("-rf").args([source, target]).status().unwrap().success());
    }
}
