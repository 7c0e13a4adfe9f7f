//! Copying from tree to tree: contents with their holes, modes, times, extended attributes, links, further names of a
//! file; if the source is trusted with them, also owners (as root) and device nodes.
//!
//! A copy takes no more space than the source: a file with several names is copied once if the target can link, and a
//! directory that contains itself is refused.

use super::grants::{Grants, LeftOut};
use super::whole::{link_whole, make_whole, write_whole};
use super::{Dir, Meta, Node, Tree, read_data};
use crate::fault::{Context, Fault, Result};
use crate::output::Ui;
use crate::progress::Meter;
use crate::signals;
use lamassu_host::Error as HostError;
use lamassu_vault::{Kind, VaultError};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A directory deeper than this, below where a command begins, is not entered. A writer of the store can make a valid
/// tree of any depth, and resolving every path in it takes time with the square of the depth. PATH_MAX allows other
/// programs 2048 names in a path.
pub const DEPTH_MAX: usize = 2000;

/// The error for a directory deeper than [`DEPTH_MAX`].
pub fn too_deep(name: &str) -> crate::fault::Error {
    Fault::TooDeep { path: name.into(), max: DEPTH_MAX }.into()
}

/// The error for a directory that is one of those above it.
fn lies_in_itself(name: &str) -> crate::fault::Error {
    Fault::LiesInItself { path: name.into() }.into()
}

/// The error for a local path that is the vault's directory in the store, or lies in it.
pub fn in_store(name: String) -> crate::fault::Error {
    crate::fault::Error::from(HostError::Usage("belongs to the vault's own directory, which holds its ciphertext"))
        .context(name)
}

/// One run of copying.
pub struct Copier<'a> {
    pub ui: &'a Ui,
    pub from: &'a dyn Tree,
    /// Source and target are one tree: then a file must not be copied onto itself.
    pub same_tree: bool,
    /// (st_dev, st_ino) of the vault's directory: its ciphertext is not copied, which would never end, and not
    /// overwritten.
    pub store: Option<(u64, u64)>,
    pub recursive: bool,
    /// One entry is asked for, and it is not a directory: its failure is the command's, whose message names it.
    pub alone: bool,
    pub grants: Grants,
    pub left_out: LeftOut,
    pub meter: Meter,
    /// Entries that failed and were named; the rest goes on.
    pub failed: usize,
    pub all: usize,
    /// Files with several names that were copied, by their [`Meta::ino`] in the source.
    pub linked: HashMap<(u64, u64), Linked>,
    /// The first failure: its exit code is that of the command.
    pub first: Option<crate::fault::Error>,
}

/// The names from the target directory down to an entry. Entries of one directory share theirs: separate paths would
/// need memory with the square of the depth.
struct Trail {
    above: Option<Rc<Trail>>,
    name: OsString,
}

/// A file that was copied, and has further names in the source.
pub struct Linked {
    trail: Trail,
    /// [`Meta::ino`] of the copy.
    made: (u64, u64),
}

/// A directory under way.
struct Level {
    source: PathBuf,
    target: Box<dyn Dir>,
    /// `None`: it is the target directory itself.
    trail: Option<Rc<Trail>>,
    /// For messages.
    name: String,
    /// It was made by this copy, and did not exist before.
    is_new: bool,
    meta: Meta,
    left: std::vec::IntoIter<OsString>,
}

/// Where an entry is copied to.
#[derive(Clone, Copy)]
pub enum CopyPlace<'d> {
    /// To this name in a directory.
    Named(&'d dyn Dir, &'d OsStr),
    /// To the existing directory at this path: the content of the source goes into it.
    Itself(&'d dyn Tree, &'d Path),
}

impl Copier<'_> {
    /// Copies an entry and everything below it. A failing entry is named and counted, and the others are copied; an
    /// error is returned for failures that concern all.
    ///
    /// Without recursion: the source decides the depth of a tree.
    pub fn copy(&mut self, source: &Path, target: CopyPlace<'_>) -> Result<()> {
        let mut levels = Vec::new();
        levels.extend(self.entry(source, target, &[], target.dir())?);
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.left.next() else {
                // Last: copying into it changed its times, and its mode may forbid writing.
                let done = self.finish_dir(level);
                levels.pop();
                self.note(done)?;
                continue;
            };
            let source = level.source.join(&name);
            let Some((first, level)) = levels.first().zip(levels.last()) else { break };
            let top = target.dir().unwrap_or(&*first.target);
            let begun = self.entry(&source, CopyPlace::Named(&*level.target, &name), &levels, Some(top))?;
            levels.extend(begun);
        }
        Ok(())
    }

    /// Copies an entry in these directories, the first of which is the named one. A directory is only begun: its
    /// content is copied later.
    fn entry(
        &mut self,
        source: &Path,
        target: CopyPlace<'_>,
        above: &[Level],
        top: Option<&dyn Dir>,
    ) -> Result<Option<Level>> {
        self.all += 1;
        signals::check()?;
        let begun = self.try_copy(source, target, above, top);
        Ok(self.note(begun)?.flatten())
    }

    /// Names and counts a failure; returns an error for failures that concern all entries.
    fn note<T>(&mut self, done: Result<T>) -> Result<Option<T>> {
        let error = match done {
            Ok(value) => return Ok(Some(value)),
            Err(error) => error,
        };
        if matches!(error.fault(), Fault::Host(HostError::Interrupted)) || is_store_full(&error) || self.alone {
            return Err(error);
        }
        self.failed += 1;
        self.meter.suspend(|| crate::output::say_error(&error));
        self.first.get_or_insert(error);
        Ok(None)
    }

    fn try_copy(
        &mut self,
        source: &Path,
        target: CopyPlace<'_>,
        above: &[Level],
        top: Option<&dyn Dir>,
    ) -> Result<Option<Level>> {
        let meta = match self.from.stat(source)? {
            Some(meta) => meta,
            None => return Err(self.from.fault(source, VaultError::NotFound)),
        };
        if self.same_tree && target.ino()? == Some(meta.ino) {
            let name = format!("{} and {}", self.from.name(source), target.name());
            return Err(crate::fault::Error::from(HostError::Usage("are the same file")).context(name));
        }
        if self.leaves_out(source, &meta, above.len())? {
            return Ok(None);
        }
        self.grants.check_kind(&meta).with_context(|| self.from.name(source))?;
        self.meter.set_message(self.from.name(source));
        let (dir, name) = match (meta.kind, target) {
            (Kind::Dir, _) => return self.begin_dir(source, target, meta, above).map(Some),
            (_, CopyPlace::Named(dir, name)) => (dir, name),
            (_, CopyPlace::Itself(tree, path)) => return Err(tree.fault(path, VaultError::IsDirectory)),
        };
        match meta.kind {
            Kind::Dir | Kind::File => {
                let trail = Trail { above: above.last().and_then(|level| level.trail.clone()), name: name.into() };
                self.copy_or_link(source, (dir, name), &meta, (top.unwrap_or(dir), trail))?;
            }
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

    /// Whether this is the vault's own directory, found below the named source. An error if it, or an entry in it, was
    /// named itself.
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

    fn begin_dir(&self, source: &Path, target: CopyPlace<'_>, meta: Meta, above: &[Level]) -> Result<Level> {
        if !self.recursive {
            let name = self.from.name(source);
            return Err(crate::fault::Error::from(HostError::Usage("is a directory; use -r to copy it")).context(name));
        }
        if above.len() > DEPTH_MAX {
            return Err(too_deep(&self.from.name(source)));
        }
        if above.iter().any(|level| level.meta.ino == meta.ino) {
            return Err(lies_in_itself(&self.from.name(source)));
        }
        // Listed before anything is made, so that copying a directory into itself ends.
        let names = self.from.list(source)?;
        let trail = match target {
            CopyPlace::Itself(..) => None,
            CopyPlace::Named(_, name) => {
                let above = above.last().and_then(|level| level.trail.clone());
                Some(Rc::new(Trail { above, name: name.into() }))
            }
        };
        let (target, name, is_new) = target.open()?;
        if self.store.is_some() && Some(target.ino()?) == self.store {
            return Err(in_store(name));
        }
        Ok(Level { source: source.into(), target, trail, name, is_new, meta, left: names.into_iter() })
    }

    /// A file that was copied already under another name gets this name too. If the target cannot link, it is copied
    /// again.
    fn copy_or_link(
        &mut self,
        source: &Path,
        (dir, name): (&dyn Dir, &OsStr),
        meta: &Meta,
        (top, trail): (&dyn Dir, Trail),
    ) -> Result<()> {
        if meta.links < 2 {
            return self.copy_file(source, dir, name, meta).map(drop);
        }
        if let Some(linked) = self.linked.get(&meta.ino) {
            match link_whole(dir, name, |place| linked.link(top, dir, place)) {
                Ok(()) => return Ok(()),
                Err(error) => tracing::debug!(%error, "copied again, and not linked"),
            }
        }
        let made = self.copy_file(source, dir, name, meta)?;
        self.linked.insert(meta.ino, Linked { trail, made });
        Ok(())
    }

    /// Returns [`Meta::ino`] of the copy.
    fn copy_file(&self, source: &Path, dir: &dyn Dir, target: &OsStr, meta: &Meta) -> Result<(u64, u64)> {
        let input = self.from.open(source)?;
        let (made, attributes) = write_whole(
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
            |node| Ok((node.ino()?, self.finish(source, node, meta))),
        )?;
        attributes.with_context(|| dir.name(target))?;
        Ok(made)
    }

    /// Copies an entry without contents: a link, or an entry that `mknod` makes.
    fn copy_node(
        &self,
        source: &Path,
        (dir, target): (&dyn Dir, &OsStr),
        meta: &Meta,
        make: &dyn Fn(&OsStr) -> Result<Box<dyn Node>>,
    ) -> Result<()> {
        let old = dir.stat(target)?;
        // As for files.
        let attributes = make_whole(dir, target, old, make, |node| Ok(self.finish(source, &*node, meta)))?;
        attributes.with_context(|| dir.name(target))
    }

    /// A directory that existed before keeps its mode and owner, unless the source is trusted.
    fn finish_dir(&self, level: &Level) -> Result<()> {
        if !level.is_new && self.grants != Grants::Kept {
            return Ok(());
        }
        self.finish(&level.source, &*level.target, &level.meta).with_context(|| level.name.clone())
    }

    /// The owner comes first, since setting it clears set-id bits and capabilities; the mode last, since an access
    /// control list sets one too.
    fn finish(&self, source: &Path, node: &dyn Node, meta: &Meta) -> Result<()> {
        if self.grants.keeps_owner(meta, &self.left_out) {
            node.set_owner(meta.uid, meta.gid)?;
        }
        for (name, value) in self.from.xattrs(source)? {
            if !self.grants.keeps_attribute(name.as_encoded_bytes(), &self.left_out) {
                continue;
            }
            if let Err(error) = node.set_xattr(&name, &value) {
                // If the target cannot store attributes, the file is copied nevertheless.
                let (of, why) = (self.from.name(source), crate::output::message(&error));
                self.meter.suspend(|| self.ui.warn(format_args!("attribute {name:?} of {of} is not kept: {why}")));
            }
        }
        node.set_times(meta.atime, meta.mtime)?;
        node.set_mode(self.grants.mode(meta, &self.left_out))
    }
}

impl Linked {
    /// Gives it the name `name` in `dir`, a directory at or below `top`, where the trail begins. Each step opens one
    /// name in an open directory.
    fn link(&self, top: &dyn Dir, dir: &dyn Dir, name: &OsStr) -> Result<()> {
        let mut names = Vec::new();
        let mut above = self.trail.above.as_ref();
        while let Some(trail) = above {
            names.push(&trail.name);
            above = trail.above.as_ref();
        }
        let mut at: Option<Box<dyn Dir>> = None;
        for name in names.into_iter().rev() {
            at = Some(at.as_deref().unwrap_or(top).open(name)?);
        }
        dir.link(at.as_deref().unwrap_or(top), &self.trail.name, self.made, name)
    }
}

impl<'d> CopyPlace<'d> {
    /// The directory that it lies in, if that is held.
    fn dir(&self) -> Option<&'d dyn Dir> {
        match self {
            CopyPlace::Named(dir, _) => Some(*dir),
            CopyPlace::Itself(..) => None,
        }
    }

    fn name(&self) -> String {
        match self {
            CopyPlace::Named(dir, name) => dir.name(name),
            CopyPlace::Itself(tree, path) => tree.name(path),
        }
    }

    /// [`Meta::ino`] of the existing entry.
    fn ino(&self) -> Result<Option<(u64, u64)>> {
        match self {
            CopyPlace::Named(dir, name) => Ok(dir.stat(name)?.map(|meta| meta.ino)),
            CopyPlace::Itself(tree, path) => Ok(Some(tree.dir(path)?.ino()?)),
        }
    }

    /// Opens it as a directory, made if it does not exist. Returns it with its name, and whether it was made.
    fn open(&self) -> Result<(Box<dyn Dir>, String, bool)> {
        let (dir, is_new) = match self {
            CopyPlace::Itself(tree, path) => (tree.dir(path)?, false),
            CopyPlace::Named(dir, name) => match dir.stat(name)? {
                Some(Meta { kind: Kind::Dir, .. }) => (dir.open(name)?, false),
                Some(_) => return Err(dir.fault(name, VaultError::NotDirectory)),
                None => (dir.make_dir(name)?, true),
            },
        };
        Ok((dir, self.name(), is_new))
    }
}

/// A full store fails every file that follows; one message is enough.
fn is_store_full(error: &crate::fault::Error) -> bool {
    error
        .causes()
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
        let ui = Ui { quiet: true, ..Ui::default() };
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
            linked: HashMap::new(),
            first: None,
        };
        // A descriptor is held for every level.
        crate::open::raise_descriptor_limit();
        let held = Local.dir(dir.path()).unwrap();
        copier.copy(&source, CopyPlace::Named(&*held, "t".as_ref())).unwrap();
        assert_eq!((copier.failed, copier.all), (1, DEPTH_MAX + 3));
        assert!(copier.first.unwrap().to_string().contains("directories deep"));
        assert_eq!(std::fs::read(target.join("z")).unwrap(), b"after it");
        let deepest: PathBuf = std::iter::repeat_n("d", DEPTH_MAX).collect();
        assert!(target.join(&deepest).is_dir());
        // tempfile would hold a descriptor for every level.
        assert!(std::process::Command::new("rm").arg("-rf").args([source, target]).status().unwrap().success());
    }
}
