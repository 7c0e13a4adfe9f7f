//! Copying a directory of the store whole, as it is: ciphertext, names, links, attributes and times, without any key.
//!
//! Files share their blocks with the source if the store can do that (FICLONE), and are copied with their holes
//! otherwise. Nothing follows a symbolic link. Owners and trusted attributes that an unprivileged user may not set are
//! counted; they are no error. Set-id bits and device nodes give rights on this host and are not verified: they are
//! left out and counted, unless [`Privileges::Kept`] is given.
//!
//! The copy is changed only by descriptors of entries that this module has just made and checked: files by the
//! descriptor that created them, directories opened and found to be new, other entries held with `O_PATH` and found to
//! be the ones that were made. No other user reaches names in it before it is done: the target directory is private to
//! its maker until the end.
//!
//! Never: syncs, interprets the content of files, writes into the source.

use super::xattr::Target;
use super::{LocalBackend, kind_of, mode, next_data, retry, stat_at, stat_fd, stat_of};
use crate::backend::{Kind, Stat};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

/// Bytes copied at once if the store cannot share them.
const PIECE_LEN: usize = 1 << 20;

/// What was copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Regular files that share their blocks with the source.
    pub shared: u64,
    /// Regular files that were copied.
    pub copied: u64,
    /// Bytes of those, without holes.
    pub copied_bytes: u64,
    /// Further names of files counted above.
    pub links: u64,
    /// Directories, the first one included.
    pub directories: u64,
    /// Symbolic links, fifos, sockets, devices.
    pub others: u64,
    /// Entries whose owner could not be kept: only root can change owners.
    pub owners_lost: u64,
    /// Attributes of the store's own that could not be set.
    pub attributes_lost: u64,
    /// Entries that had set-user-id or set-group-id bits and have none in the copy.
    pub set_id_dropped: u64,
    /// Device nodes that are not in the copy.
    pub devices_left_out: u64,
}

/// How to treat modes and entries that give rights on this host: the store chooses them, and nothing verifies them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privileges {
    /// Set-id bits and device nodes are left out, and the target directory keeps the owner and mode it was made with.
    Dropped,
    /// All is taken as the store has it.
    Kept,
}

/// A copy that did not succeed. What was copied so far is left where it is.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The store failed, or is full.
    #[error("cannot {op} {path:?}: {source}")]
    Io {
        /// what was tried
        op: &'static str,
        /// relative to the directory that is copied
        path: PathBuf,
        /// why
        source: io::Error,
    },
    /// The store has replaced the entry of this name, although no process of Lamassu writes the vault.
    #[error(
        "{path:?} was exchanged for another entry while it was copied: keep other users from changing the store, and copy again"
    )]
    Exchanged {
        /// relative to the directory that is copied
        path: PathBuf,
    },
    /// [`Watch::advance`] asked for it.
    #[error("stopped before the copy was done")]
    Stopped,
}

/// Gets the progress of a copy.
pub trait Watch {
    /// Whether `name` in the directory `dir` (relative to the source) is to be copied, with everything below it.
    fn wants(&mut self, dir: &Path, name: &OsStr) -> bool;
    /// Further files and bytes are done. False: stop.
    fn advance(&mut self, files: u64, bytes: u64) -> bool;
}

impl LocalBackend {
    /// Copies everything below this directory into `to`, which must be an empty directory; attributes and times of the
    /// directory itself too, and its owner and mode if privileges are kept.
    ///
    /// # Errors
    /// [`CopyError`].
    pub fn copy_to(
        &self,
        to: &LocalBackend,
        privileges: Privileges,
        watch: &mut dyn Watch,
    ) -> Result<Copied, CopyError> {
        let mut copy = Copy {
            root: to.root.as_fd(),
            watch,
            privileges,
            done: Copied::default(),
            can_share: true,
            linked: HashMap::new(),
        };
        copy.run(self.root.as_fd())?;
        Ok(copy.done)
    }
}

/// A directory under way.
struct Level {
    from: OwnedFd,
    to: OwnedFd,
    /// relative to the source
    path: PathBuf,
    left: std::vec::IntoIter<OsString>,
    st: Stat,
}

struct Copy<'a> {
    /// Where the copy begins.
    root: BorrowedFd<'a>,
    watch: &'a mut dyn Watch,
    privileges: Privileges,
    done: Copied,
    /// Until the store has said that it cannot.
    can_share: bool,
    /// Where the first name of a file with several lies in the copy.
    linked: HashMap<(u64, u64), PathBuf>,
}

/// An entry on its way.
struct Item<'a> {
    from: BorrowedFd<'a>,
    to: BorrowedFd<'a>,
    name: &'a OsStr,
    path: &'a Path,
    st: Stat,
}

impl Item<'_> {
    fn failed(&self, op: &'static str) -> impl FnOnce(Errno) -> CopyError {
        failed(op, self.path)
    }
}

fn failed(op: &'static str, path: &Path) -> impl FnOnce(Errno) -> CopyError {
    let path = path.to_path_buf();
    move |errno| CopyError::Io { op, path, source: errno.into() }
}

fn failed_io(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CopyError {
    let path = path.to_path_buf();
    move |source| CopyError::Io { op, path, source }
}

/// Set-user-id and set-group-id.
const SET_ID: u32 = 0o6000;

const DIR: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Copy<'_> {
    fn run(&mut self, from: BorrowedFd<'_>) -> Result<(), CopyError> {
        let here = |fd| retry(|| rustix::fs::openat(fd, ".", DIR, Mode::empty()));
        let path = PathBuf::new();
        let from = here(from).map_err(failed("open", &path))?;
        let to = here(self.root).map_err(failed("open the copy of", &path))?;
        let mut levels = vec![level(from, to, path)?];
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.left.next() else {
                let level = levels.pop().expect("there is a last one");
                self.finish_dir(&level)?;
                continue;
            };
            if self.watch.wants(&level.path, &name)
                && let Some(below) = self.entry(level, &name)?
            {
                levels.push(below);
            }
        }
        Ok(())
    }

    /// Copies an entry; a directory is returned, to be filled.
    fn entry(&mut self, level: &Level, name: &OsStr) -> Result<Option<Level>, CopyError> {
        let path = level.path.join(name);
        let st = retry(|| stat_at(level.from.as_fd(), name)).map_err(failed("stat", &path))?;
        let st = stat_of(&st).map_err(failed_io("stat", &path))?;
        let item = Item { from: level.from.as_fd(), to: level.to.as_fd(), name, path: &path, st };
        let is_device = matches!(st.kind, Kind::CharDevice | Kind::BlockDevice);
        if is_device && self.privileges == Privileges::Dropped {
            self.done.devices_left_out += 1;
            return Ok(None);
        }
        if st.kind == Kind::Dir {
            return self.directory(&item).map(Some);
        }
        if st.nlink > 1 {
            if let Some(first) = self.linked.get(&(st.dev, st.ino)) {
                self.link(first, &item)?;
                self.done.links += 1;
                return Ok(None);
            }
            self.linked.insert((st.dev, st.ino), path.clone());
        }
        match st.kind {
            Kind::File => self.file(&item)?,
            _ => {
                self.other(&item)?;
                self.done.others += 1;
            }
        }
        match self.watch.advance(1, st.len) {
            true => Ok(None),
            false => Err(CopyError::Stopped),
        }
    }

    fn directory(&mut self, item: &Item<'_>) -> Result<Level, CopyError> {
        let from =
            retry(|| rustix::fs::openat(item.from, item.name, DIR, Mode::empty())).map_err(item.failed("open"))?;
        rustix::fs::mkdirat(item.to, item.name, Mode::RWXU).map_err(item.failed("make the copy of"))?;
        let to = retry(|| rustix::fs::openat(item.to, item.name, DIR, Mode::empty()))
            .map_err(item.failed("open the copy of"))?;
        check_fresh(&to).map_err(item.failed("open the copy of"))?;
        level(from, to, item.path.to_path_buf())
    }

    /// Makes a further name of a file that was copied already. Its first name is reached component by component, since
    /// the path may exceed the limit of the system.
    fn link(&self, first: &Path, item: &Item<'_>) -> Result<(), CopyError> {
        let mut dir = retry(|| rustix::fs::openat(self.root, ".", DIR, Mode::empty())).map_err(item.failed("open"))?;
        for name in first.parent().into_iter().flatten() {
            dir = retry(|| rustix::fs::openat(&dir, name, DIR, Mode::empty())).map_err(item.failed("open"))?;
        }
        let name = first.file_name().unwrap_or_default();
        rustix::fs::linkat(&dir, name, item.to, item.name, AtFlags::empty()).map_err(item.failed("link the copy of"))
    }

    fn file(&mut self, item: &Item<'_>) -> Result<(), CopyError> {
        let held = super::hold(item.from, item.name).map_err(item.failed("open"))?;
        let now =
            stat_of(&stat_fd(held.as_fd()).map_err(item.failed("stat"))?).map_err(failed_io("stat", item.path))?;
        if !now.is_same(&item.st) {
            return Err(CopyError::Exchanged { path: item.path.to_path_buf() });
        }
        let opened = mode::open_regular(held.as_fd(), now.kind, OFlags::RDONLY);
        let from = opened.map_err(failed_io("open", item.path))?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let to = retry(|| rustix::fs::openat(item.to, item.name, flags, Mode::RUSR | Mode::WUSR))
            .map_err(item.failed("make the copy of"))?;
        match self.share(&from, &to).map_err(item.failed("share the blocks of"))? {
            true => self.done.shared += 1,
            false => {
                self.content(&from, &to, item)?;
                self.done.copied += 1;
            }
        }
        self.attributes(
            &Target::Open(from.as_fd()),
            &Target::Open(to.as_fd()),
            item.path,
            Changed { st: &item.st, copy: to.as_fd(), as_what: As::Original },
        )?;
        rustix::fs::futimens(&to, &times(&item.st)).map_err(item.failed("set the times of the copy of"))
    }

    /// False: the store cannot, for this file at least.
    fn share(&mut self, from: &OwnedFd, to: &OwnedFd) -> rustix::io::Result<bool> {
        if !self.can_share {
            return Ok(false);
        }
        match retry(|| rustix::fs::ioctl_ficlone(to, from)) {
            Ok(()) => Ok(true),
            Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::NOTTY | Errno::NOSYS | Errno::PERM | Errno::ACCESS) => {
                self.can_share = false;
                Ok(false)
            }
            // An attribute of the file prevents it.
            Err(Errno::INVAL) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Copies the data and leaves the holes.
    fn content(&mut self, from: &OwnedFd, to: &OwnedFd, item: &Item<'_>) -> Result<(), CopyError> {
        let len = item.st.len;
        let mut buf = vec![0u8; PIECE_LEN];
        let mut at = 0;
        while at < len {
            let (start, end) = next_data(from, at, len).map_err(failed_io("find the data of", item.path))?;
            at = start;
            while at < end {
                let most = usize::try_from(end - at).unwrap_or(PIECE_LEN).min(PIECE_LEN);
                let n = retry(|| rustix::io::pread(from, &mut buf[..most], at)).map_err(item.failed("read"))?;
                if n == 0 {
                    break;
                }
                let mut written = 0;
                while written < n {
                    let offset = at + written as u64;
                    written += retry(|| rustix::io::pwrite(to, &buf[written..n], offset))
                        .map_err(item.failed("write the copy of"))?;
                }
                at += n as u64;
                self.done.copied_bytes += n as u64;
                if !self.watch.advance(0, 0) {
                    return Err(CopyError::Stopped);
                }
            }
            at = at.max(end);
        }
        retry(|| rustix::fs::ftruncate(to, len)).map_err(item.failed("set the length of the copy of"))
    }

    /// Makes a link or a special file, and holds it to give it owner, mode, attributes and times.
    fn other(&mut self, item: &Item<'_>) -> Result<(), CopyError> {
        let is_link = item.st.kind == Kind::Symlink;
        if is_link {
            let target =
                rustix::fs::readlinkat(item.from, item.name, Vec::new()).map_err(item.failed("read the link"))?;
            rustix::fs::symlinkat(target, item.to, item.name).map_err(item.failed("make the copy of"))?;
        } else {
            let file_type = FileType::from_raw_mode(file_type_bits(item.st.kind));
            rustix::fs::mknodat(item.to, item.name, file_type, Mode::RUSR | Mode::WUSR, item.st.rdev)
                .map_err(item.failed("make the copy of"))?;
        }
        let copy = hold(item).map_err(item.failed("open the copy of"))?;
        let original = super::hold(item.from, item.name).map_err(item.failed("open"))?;
        let (from, to) = (Target::followed(original.as_fd()), Target::followed(copy.as_fd()));
        let as_what = if is_link { As::Link } else { As::Original };
        self.attributes(&from, &to, item.path, Changed { st: &item.st, copy: copy.as_fd(), as_what })?;
        rustix::fs::utimensat(&copy, "", &times(&item.st), AtFlags::EMPTY_PATH)
            .map_err(item.failed("set the times of the copy of"))
    }

    /// The mode that an entry gets in the copy. Set-group-id of a directory gives no rights: entries made in it inherit
    /// its group.
    fn mode_kept(&mut self, st: &Stat) -> u32 {
        if self.privileges == Privileges::Kept || st.kind == Kind::Dir || st.mode & SET_ID == 0 {
            return st.mode;
        }
        self.done.set_id_dropped += 1;
        st.mode & !SET_ID
    }

    /// Called after its content was copied, which would change its times.
    fn finish_dir(&mut self, level: &Level) -> Result<(), CopyError> {
        let (from, to) = (Target::Open(level.from.as_fd()), Target::Open(level.to.as_fd()));
        let is_top = level.path.as_os_str().is_empty();
        let is_private = is_top && self.privileges == Privileges::Dropped;
        let as_what = if is_private { As::Made } else { As::Original };
        self.attributes(&from, &to, &level.path, Changed { st: &level.st, copy: level.to.as_fd(), as_what })?;
        self.done.directories += 1;
        rustix::fs::futimens(&level.to, &times(&level.st)).map_err(failed("set the times of the copy of", &level.path))
    }

    /// Owner first, since a change of it clears set-user-id bits and capabilities; then mode and attributes, among
    /// which an access control list may change the mode.
    fn attributes(
        &mut self,
        from: &Target<'_>,
        to: &Target<'_>,
        path: &Path,
        changed: Changed<'_>,
    ) -> Result<(), CopyError> {
        let Changed { st, copy, as_what } = changed;
        if as_what != As::Made {
            let (uid, gid) = (rustix::fs::Uid::from_raw(st.uid), rustix::fs::Gid::from_raw(st.gid));
            match rustix::fs::chownat(copy, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH) {
                Ok(()) => {}
                Err(Errno::PERM | Errno::INVAL) => self.done.owners_lost += 1,
                Err(e) => return Err(failed("set the owner of the copy of", path)(e)),
            }
        }
        if as_what == As::Original {
            let mode = self.mode_kept(st);
            mode::chmod_fd(copy, mode).map_err(failed_io("set the mode of the copy of", path))?;
        }
        // Only the vault's own attributes: the store chooses others, such as a file's capabilities, and nothing
        // verifies them.
        let mut wanted = listed(from).map_err(failed_io("list the attributes of", path))?;
        wanted.retain(|name| name.as_encoded_bytes().starts_with(lamassu_format::name::XATTR_PREFIX.as_bytes()));
        for name in listed(to).map_err(failed_io("list the attributes of the copy of", path))? {
            // Inherited from the directory the copy is made in.
            if !wanted.contains(&name) && to.remove(&name).is_err() {
                self.done.attributes_lost += 1;
            }
        }
        for name in wanted {
            let value = from.get(&name).map_err(failed_io("read an attribute of", path))?;
            to.set(&name, &value, 0).map_err(failed_io("set an attribute of the copy of", path))?;
        }
        Ok(())
    }
}

/// The changes of an entry of the copy, which is held.
struct Changed<'a> {
    /// the original's
    st: &'a Stat,
    copy: BorrowedFd<'a>,
    as_what: As,
}

/// Whose owner and mode an entry of the copy has in the end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum As {
    /// The original's.
    Original,
    /// The original's, but a link has no mode.
    Link,
    /// The ones it was made with: only its maker can enter it, whatever modes the store has for entries below.
    Made,
}

/// `EAGAIN` unless it is a directory that was just made, by the kind that its open has told and by being empty.
fn check_fresh(dir: &OwnedFd) -> rustix::io::Result<()> {
    match super::dir::list(dir)?.is_empty() {
        true => Ok(()),
        false => Err(Errno::AGAIN),
    }
}

/// The link or special file that was just made as the copy of an entry, by an `O_PATH` descriptor. `EAGAIN` if another
/// one has its name by now.
fn hold(item: &Item<'_>) -> rustix::io::Result<OwnedFd> {
    let copy = super::hold(item.to, item.name)?;
    let st = stat_of(&stat_fd(copy.as_fd())?).map_err(|_| Errno::IO)?;
    match (st.kind, st.nlink, st.rdev) == (item.st.kind, 1, item.st.rdev) {
        true => Ok(copy),
        false => Err(Errno::AGAIN),
    }
}

/// Opens a directory and lists its entries to be copied.
fn level(from: OwnedFd, to: OwnedFd, path: PathBuf) -> Result<Level, CopyError> {
    let st = stat_of(&stat_fd(from.as_fd()).map_err(failed("stat", &path))?).map_err(failed_io("stat", &path))?;
    let mut names: Vec<OsString> =
        super::dir::list(&from).map_err(failed("list", &path))?.into_iter().map(|e| e.name).collect();
    names.sort_unstable();
    Ok(Level { from, to, path, left: names.into_iter(), st })
}

/// A store without attributes has none.
fn listed(target: &Target<'_>) -> io::Result<Vec<OsString>> {
    match target.list() {
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(Vec::new()),
        other => other,
    }
}

fn times(st: &Stat) -> Timestamps {
    let at = |t: crate::backend::Time| Timespec { tv_sec: t.seconds, tv_nsec: t.nanos.into() };
    Timestamps { last_access: at(st.atime), last_modification: at(st.mtime) }
}

fn file_type_bits(kind: Kind) -> u32 {
    let file_type = match kind {
        Kind::File => FileType::RegularFile,
        Kind::Dir => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::Fifo,
        Kind::Socket => FileType::Socket,
        Kind::CharDevice => FileType::CharacterDevice,
        Kind::BlockDevice => FileType::BlockDevice,
    };
    debug_assert_eq!(kind_of(file_type), Some(kind));
    file_type.as_raw_mode()
}
