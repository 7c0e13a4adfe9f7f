//! The local file system as a tree.

use super::held::{LocalDir, failed, meta_of};
use super::{Dir, Input, Meta, Tree, grants};
use crate::fault::{Context, Fault, Result};
use crate::signals;
use lamassu_store::backend::next_data;
use lamassu_vault::VaultError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

/// See the module.
pub struct Local;

impl Tree for Local {
    fn name(&self, path: &Path) -> String {
        path.display().to_string()
    }

    fn fault(&self, path: &Path, what: VaultError) -> crate::fault::Error {
        Fault::LocalPath { path: path.into(), source: what }.into()
    }

    fn stat(&self, path: &Path) -> Result<Option<Meta>> {
        match rustix::fs::lstat(path) {
            Ok(st) => Ok(Some(meta_of(&st))),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(failed("stat", path)(e.into()).into()),
        }
    }

    fn list(&self, path: &Path) -> Result<Vec<OsString>> {
        let entries = fs::read_dir(path).map_err(failed("list", path))?;
        let names: io::Result<Vec<_>> = entries.map(|e| e.map(|e| e.file_name())).collect();
        let mut names = names.map_err(failed("list", path))?;
        names.sort();
        Ok(names)
    }

    fn read_link(&self, path: &Path) -> Result<OsString> {
        Ok(fs::read_link(path).map_err(failed("read the link", path))?.into_os_string())
    }

    /// Attributes of users, and access control lists; others belong to this system or need root.
    fn xattrs(&self, path: &Path) -> Result<Vec<(OsString, Vec<u8>)>> {
        let fail = |e: Errno| failed("read attributes of", path)(e.into());
        let mut names = vec![0u8; 64 << 10];
        let len = match rustix::fs::llistxattr(path, &mut names[..]) {
            Ok(len) => len,
            Err(Errno::OPNOTSUPP | Errno::PERM) => return Ok(Vec::new()),
            Err(e) => return Err(fail(e).into()),
        };
        let mut out = Vec::new();
        for name in names[..len].split(|b| *b == 0).filter(|name| grants::is_harmless(name)) {
            let mut value = vec![0u8; 64 << 10];
            let len = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..]).map_err(fail)?;
            value.truncate(len);
            out.push((OsString::from_vec(name.to_vec()), value));
        }
        Ok(out)
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Input + '_>> {
        // stat has just shown a regular file; a link in its place is not followed, and a fifo does not block.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| failed("open", path)(e.into()))?;
        Ok(Box::new(LocalFile { file: file.into(), path: path.into() }))
    }

    fn dir(&self, path: &Path) -> Result<Box<dyn Dir>> {
        Ok(Box::new(LocalDir::open(path)?))
    }

    fn lies_in(&self, path: &Path, dir: (u64, u64)) -> bool {
        let Ok(path) = path.canonicalize() else { return false };
        path.ancestors().any(|above| fs::symlink_metadata(above).is_ok_and(|m| (m.dev(), m.ino()) == dir))
    }
}

struct LocalFile {
    file: File,
    path: PathBuf,
}

impl Input for LocalFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match self.file.read_at(&mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(failed("read", &self.path)(e).into()),
            }
        }
        Ok(done)
    }

    fn next_data(&self, offset: u64) -> Result<Option<(u64, u64)>> {
        let len = self.file.metadata().map_err(failed("stat", &self.path))?.len();
        let (start, end) = next_data(&self.file, offset, len).map_err(failed("read", &self.path))?;
        Ok((start < end).then_some((start, end)))
    }

    fn size(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(failed("stat", &self.path))?.len())
    }
}

/// Pieces of standard input that are read ahead.
const AHEAD_MAX: usize = 4;
/// How long a signal waits at most while no input comes.
const POLL: Duration = Duration::from_millis(100);

/// Standard input, which has no offsets, is passed on as it comes. A thread of its own reads it: a read may block for
/// ever, and a signal must end the command in good order.
pub fn read_stdin(mut sink: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
    const FAILED: &str = "cannot read standard input";
    let (sender, pieces) = mpsc::sync_channel(AHEAD_MAX);
    thread::Builder::new().name("stdin".into()).spawn(move || send_stdin(&sender)).context(FAILED)?;
    let mut at = 0;
    loop {
        signals::check()?;
        match pieces.recv_timeout(POLL) {
            Ok(piece) => {
                let data = piece.context(FAILED)?;
                if data.is_empty() {
                    return Ok(());
                }
                sink(at, &data)?;
                at += data.len() as u64;
            }
            Err(RecvTimeoutError::Timeout) => {}
            // The end is sent explicitly. If the thread is gone without that, it is an error.
            Err(RecvTimeoutError::Disconnected) => return Err(Fault::Other(FAILED).into()),
        }
    }
}

/// Sends the pieces that are read; an empty piece, or an error, is the last.
fn send_stdin(to: &SyncSender<io::Result<Vec<u8>>>) {
    let mut buf = vec![0u8; super::CHUNK];
    let mut input = io::stdin().lock();
    loop {
        let piece = match input.read(&mut buf) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            read => read.map(|n| buf[..n].to_vec()),
        };
        let is_last = piece.as_ref().map_or(true, Vec::is_empty);
        // A receiver that is gone has failed.
        if to.send(piece).is_err() || is_last {
            return;
        }
    }
}
