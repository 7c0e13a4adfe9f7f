//! Copying from tree to tree: contents with their holes, modes, times, owners (as root), extended attributes, links, device nodes.

use super::{Input, Meta, Tree, is_damage, read_data};
use crate::fault::Fault;
use crate::output::Ui;
use crate::progress::Meter;
use crate::signals;
use anyhow::Result;
use lamassu_vault::{Kind, VaultError};
use std::path::Path;

/// One run of copying.
pub struct Copier<'a> {
    pub ui: &'a Ui,
    pub from: &'a dyn Tree,
    pub to: &'a dyn Tree,
    /// Both are one tree: then a file must not be copied onto itself.
    pub same_tree: bool,
    pub recursive: bool,
    pub meter: Meter,
    /// Entries that failed and were named; the rest goes on.
    pub failed: usize,
    pub all: usize,
    /// The first failure: its exit code is that of the command.
    pub first: Option<anyhow::Error>,
}

impl Copier<'_> {
    /// Copies an entry and what is below it. One that fails is named and counted, and the others go on; an error is for what concerns them all.
    pub fn copy(&mut self, source: &Path, target: &Path) -> Result<()> {
        self.all += 1;
        signals::check()?;
        let Err(error) = self.try_copy(source, target) else { return Ok(()) };
        if matches!(error.downcast_ref(), Some(Fault::Interrupted)) || is_store_full(&error) {
            return Err(error);
        }
        self.failed += 1;
        self.meter.suspend(|| crate::output::say_error(&error));
        self.first.get_or_insert(error);
        Ok(())
    }

    fn try_copy(&mut self, source: &Path, target: &Path) -> Result<()> {
        let meta = match self.from.stat(source)? {
            Some(meta) => meta,
            None => {
                let name = self.from.name(source);
                return Err(anyhow::Error::from(VaultError::NotFound).context(name));
            }
        };
        if self.same_tree && self.to.stat(target)?.is_some_and(|t| t.ino == meta.ino) {
            let name = format!("{} and {}", self.from.name(source), self.to.name(target));
            return Err(anyhow::Error::from(Fault::Usage("are the same file")).context(name));
        }
        self.meter.set_message(self.from.name(source));
        match meta.kind {
            Kind::Dir => return self.copy_dir(source, target, &meta),
            Kind::File => self.copy_file(source, target)?,
            Kind::Symlink => {
                let link = self.from.read_link(source)?;
                self.replace(target)?;
                self.to.make_symlink(target, &link)?;
            }
            Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {
                self.replace(target)?;
                self.to.make_node(target, &meta)?;
            }
        }
        self.finish(source, target, &meta)
    }

    fn copy_dir(&mut self, source: &Path, target: &Path, meta: &Meta) -> Result<()> {
        if !self.recursive {
            let name = self.from.name(source);
            return Err(anyhow::Error::from(Fault::Usage("is a directory; use -r to copy it")).context(name));
        }
        // Listed before anything is made: a directory copied into itself then has an end.
        let names = self.from.list(source)?;
        match self.to.stat(target)? {
            Some(Meta { kind: Kind::Dir, .. }) => {}
            Some(_) => {
                let name = self.to.name(target);
                return Err(anyhow::Error::from(VaultError::NotDirectory).context(name));
            }
            None => self.to.make_dir(target)?,
        }
        for name in names {
            self.copy(&source.join(&name), &target.join(&name))?;
        }
        // Last: copying into it changed its times, and its mode may forbid writing.
        self.finish(source, target, meta)
    }

    fn copy_file(&mut self, source: &Path, target: &Path) -> Result<()> {
        let input = self.from.open(source)?;
        if !matches!(self.to.stat(target)?, None | Some(Meta { kind: Kind::File, .. })) {
            self.replace(target)?;
        }
        let size = self.from.stat(source)?.map_or(0, |m| m.size);
        match self.copy_content(&*input, target, size) {
            Ok(()) => Ok(()),
            Err(error) if is_damage(&error) => {
                // What is there is good, but not the file: nobody shall take it for that.
                let _ = self.to.remove(target);
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    fn copy_content(&mut self, input: &dyn Input, target: &Path, size: u64) -> Result<()> {
        let output = self.to.create(target)?;
        read_data(input, |offset, data| {
            signals::check()?;
            self.meter.advance(data.len() as u64);
            output.write_at(offset, data)
        })?;
        output.set_len(size)?;
        output.finish()
    }

    /// Makes room for something that cannot be written over.
    fn replace(&self, target: &Path) -> Result<()> {
        match self.to.stat(target)? {
            None => Ok(()),
            Some(Meta { kind: Kind::Dir, .. }) => {
                let name = self.to.name(target);
                Err(anyhow::Error::from(VaultError::IsDirectory).context(name))
            }
            Some(_) => self.to.remove(target),
        }
    }

    fn finish(&self, source: &Path, target: &Path, meta: &Meta) -> Result<()> {
        for (name, value) in self.from.xattrs(source)? {
            if let Err(error) = self.to.set_xattr(target, &name, &value) {
                // A store without attributes takes the file all the same.
                self.meter.suspend(|| self.ui.warn(format_args!("{error:#}")));
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
