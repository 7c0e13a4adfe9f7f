//! The local file system as a tree.

use super::{Input, Meta, Output, Tree};
use crate::fault::Fault;
use crate::signals;
use anyhow::{Context, Result};
use lamassu_store::backend::next_data;
use lamassu_vault::{Kind, Time, VaultError};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::IntoRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

/// See the module.
pub struct Local;

fn failed(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Fault {
    let path = path.to_path_buf();
    move |source| Fault::Local { op, path, source }
}

fn meta_of(m: &fs::Metadata) -> Meta {
    let kind = match FileType::from_raw_mode(m.mode()) {
        FileType::Directory => Kind::Dir,
        FileType::Symlink => Kind::Symlink,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::CharacterDevice => Kind::CharDevice,
        FileType::BlockDevice => Kind::BlockDevice,
        _ => Kind::File,
    };
    let time = |seconds, nanos: i64| Time { seconds, nanos: u32::try_from(nanos).unwrap_or(0) };
    Meta {
        kind,
        mode: m.mode() & 0o7777,
        uid: m.uid(),
        gid: m.gid(),
        rdev: m.rdev(),
        size: m.len(),
        atime: time(m.atime(), m.atime_nsec()),
        mtime: time(m.mtime(), m.mtime_nsec()),
        ino: (m.dev(), m.ino()),
    }
}

impl Tree for Local {
    fn name(&self, path: &Path) -> String {
        path.display().to_string()
    }

    fn fault(&self, path: &Path, what: VaultError) -> anyhow::Error {
        Fault::LocalPath { path: path.into(), source: what }.into()
    }

    fn stat(&self, path: &Path) -> Result<Option<Meta>> {
        match fs::symlink_metadata(path) {
            Ok(m) => Ok(Some(meta_of(&m))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed("stat", path)(e).into()),
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

    /// Of users, and access control lists; others belong to this system or need its root.
    fn xattrs(&self, path: &Path) -> Result<Vec<(OsString, Vec<u8>)>> {
        let fail = |e: Errno| failed("read attributes of", path)(e.into());
        let mut names = vec![0u8; 64 << 10];
        let len = match rustix::fs::llistxattr(path, &mut names[..]) {
            Ok(len) => len,
            Err(Errno::OPNOTSUPP | Errno::PERM) => return Ok(Vec::new()),
            Err(e) => return Err(fail(e).into()),
        };
        let carried = |n: &&[u8]| n.starts_with(b"user.") || n.starts_with(b"system.posix_acl_");
        let mut out = Vec::new();
        for name in names[..len].split(|b| *b == 0).filter(carried) {
            let mut value = vec![0u8; 64 << 10];
            let len = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..]).map_err(fail)?;
            value.truncate(len);
            out.push((OsString::from_vec(name.to_vec()), value));
        }
        Ok(out)
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Input + '_>> {
        let file = File::open(path).map_err(failed("open", path))?;
        Ok(Box::new(LocalFile { file, path: path.into() }))
    }

    fn create(&self, path: &Path) -> Result<Box<dyn Output + '_>> {
        let file =
            File::options().write(true).create_new(true).mode(0o600).open(path).map_err(failed("create", path))?;
        Ok(Box::new(LocalFile { file, path: path.into() }))
    }

    fn make_dir(&self, path: &Path) -> Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        Ok(fs::DirBuilder::new().mode(0o700).create(path).map_err(failed("make directory", path))?)
    }

    fn make_symlink(&self, path: &Path, target: &OsString) -> Result<()> {
        Ok(std::os::unix::fs::symlink(target, path).map_err(failed("make link", path))?)
    }

    fn make_node(&self, path: &Path, meta: &Meta) -> Result<()> {
        let kind = match meta.kind {
            Kind::Fifo => FileType::Fifo,
            Kind::Socket => FileType::Socket,
            Kind::CharDevice => FileType::CharacterDevice,
            Kind::BlockDevice => FileType::BlockDevice,
            Kind::File | Kind::Dir | Kind::Symlink => FileType::RegularFile,
        };
        let made = rustix::fs::mknodat(CWD, path, kind, Mode::RUSR | Mode::WUSR, meta.rdev);
        Ok(made.map_err(|e| failed("make", path)(e.into()))?)
    }

    fn remove(&self, path: &Path) -> Result<()> {
        Ok(fs::remove_file(path).map_err(failed("remove", path))?)
    }

    fn rename(&self, from: &Path, to: &Path, replaces: bool) -> Result<()> {
        if replaces {
            return Ok(fs::rename(from, to).map_err(failed("replace", to))?);
        }
        let renamed = match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            // NFS and a few others know no flags. The caller has just seen that nothing is there.
            Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::renameat(CWD, from, CWD, to),
            other => other,
        };
        Ok(renamed.map_err(|e| failed("make", to)(e.into()))?)
    }

    fn set_xattr(&self, path: &Path, name: &OsString, value: &[u8]) -> Result<()> {
        Ok(rustix::fs::lsetxattr(path, name.as_os_str(), value, XattrFlags::empty()).map_err(io::Error::from)?)
    }

    fn set_meta(&self, path: &Path, meta: &Meta) -> Result<()> {
        let fail = |op| move |e: Errno| failed(op, path)(e.into());
        if rustix::process::geteuid().is_root() {
            let (uid, gid) = (Some(Uid::from_raw(meta.uid)), Some(Gid::from_raw(meta.gid)));
            rustix::fs::chownat(CWD, path, uid, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(fail("set the owner of"))?;
        }
        if meta.kind != Kind::Symlink {
            rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(meta.mode), AtFlags::empty())
                .map_err(fail("set the mode of"))?;
        }
        let spec = |t: Time| Timespec { tv_sec: t.seconds, tv_nsec: t.nanos.into() };
        let times = Timestamps { last_access: spec(meta.atime), last_modification: spec(meta.mtime) };
        rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(fail("set the times of"))?;
        Ok(())
    }

    /// A link of /proc, as /dev/stdout leads to one, stands for what a process has open: no file that is meant by its name. Where a link leads that cannot be
    /// followed is not known.
    fn leads_to_no_file(&self, link: &Path) -> bool {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let led_to = match rustix::fs::openat2(CWD, link, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS) {
            Ok(file) => rustix::fs::fstat(file),
            // Linux before 5.6, and sandboxes that do not know the call.
            Err(Errno::NOSYS | Errno::PERM) => rustix::fs::statat(CWD, link, AtFlags::empty()),
            Err(error) => Err(error),
        };
        match led_to {
            Ok(stat) => FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile,
            Err(Errno::NOENT | Errno::NOTDIR) => false,
            Err(_) => true,
        }
    }

    fn lies_in(&self, path: &Path, dir: (u64, u64)) -> bool {
        let Ok(path) = path.canonicalize() else { return false };
        path.ancestors().any(|above| fs::symlink_metadata(above).is_ok_and(|m| (m.dev(), m.ino()) == dir))
    }
}

struct LocalFile {
    file: File,
    path: std::path::PathBuf,
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

impl Output for LocalFile {
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        Ok(self.file.write_all_at(data, offset).map_err(failed("write", &self.path))?)
    }

    fn set_len(&self, len: u64) -> Result<()> {
        Ok(self.file.set_len(len).map_err(failed("set the length of", &self.path))?)
    }

    fn finish(self: Box<Self>, durable: bool) -> Result<()> {
        let LocalFile { file, path } = *self;
        let synced = if durable { file.sync_data() } else { Ok(()) };
        Ok(synced.and_then(|()| close(file)).map_err(failed("write", &path))?)
    }
}

/// close(2) with its result, which `File` ignores: NFS and FUSE say there what they could not write.
fn close(file: File) -> io::Result<()> {
    // SAFETY: the descriptor is open, and since `file` has given it up nothing else closes it.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Pieces of standard input that are read ahead.
const AHEAD_MAX: usize = 4;
/// How long a signal waits at most while nothing comes.
const POLL: Duration = Duration::from_millis(100);

/// Standard input, which has no offsets: handed on as it comes. A thread of its own reads it: that may take for ever, and a signal has to end it in good order.
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
            // The end is said. A thread that is gone without that is not the end.
            Err(RecvTimeoutError::Disconnected) => anyhow::bail!(FAILED),
        }
    }
}

/// Sends what is read; an empty piece, or an error, is the last.
fn send_stdin(to: &SyncSender<io::Result<Vec<u8>>>) {
    let mut buf = vec![0u8; super::CHUNK];
    let mut input = io::stdin().lock();
    loop {
        let piece = match input.read(&mut buf) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            read => read.map(|n| buf[..n].to_vec()),
        };
        let is_last = piece.as_ref().map_or(true, Vec::is_empty);
        // Whoever takes no more has failed.
        if to.send(piece).is_err() || is_last {
            return;
        }
    }
}
