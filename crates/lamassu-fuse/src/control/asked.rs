//! The directory that calls are about. It is opened once and held open, and its mount is found in the mount table by
//! the open directory.
//!
//! Guarantees: it lies in a FUSE mount that root or the user of this process has mounted, and every call goes there,
//! even if its name leads elsewhere later. The owner of a directory on the way could exchange it for a link to a mount
//! of their own, which could answer anything and learn what it is sent; or to another directory of the same mount,
//! which the caller did not name. So no link in a mount is followed, and outside of mounts only those of root and of
//! the user.
//!
//! Never: asks the file system anything before that is known.

use super::{ControlError, OPEN, Root};
use lamassu_store::mount_table::{MountLine, mount_id, mounts};
use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

/// Most links on the way to a directory, as for the kernel.
const LINKS_MAX: usize = 40;

/// An open directory in a FUSE mount, to which control calls go.
#[derive(Debug)]
pub struct Asked {
    /// by `O_PATH`
    dir: OwnedFd,
    path: PathBuf,
    mount: MountLine,
}

impl Asked {
    /// Opens a directory.
    ///
    /// # Errors
    /// [`ControlError::NotMounted`] if there is no FUSE mount, [`ControlError::Strangers`],
    /// [`ControlError::LeadsAway`], [`ControlError::Io`].
    pub fn open(path: &Path) -> Result<Asked, ControlError> {
        let dir = walk(path)?;
        let (found, mount) = place_of(&dir)?;
        let mount = mount.filter(|m| m.fs_type.starts_with("fuse."));
        let mount = mount.ok_or_else(|| ControlError::NotMounted(path.into()))?;
        match mount.is_trusted() {
            true => Ok(Asked { dir, path: found, mount }),
            false => Err(ControlError::Strangers(path.into())),
        }
    }

    /// Its path when it was opened, without links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory that its mount is on.
    pub fn mountpoint(&self) -> &Path {
        &self.mount.mountpoint
    }

    /// The number of its mount.
    pub fn mount(&self) -> u64 {
        self.mount.id
    }

    /// The type of its mount, `fuse.` first.
    pub fn fs_type(&self) -> &str {
        &self.mount.fs_type
    }

    /// The directory itself, opened for calls: its name may lead to another one by now.
    ///
    /// # Errors
    /// [`ControlError::Io`].
    pub fn root(&self) -> Result<Root, ControlError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&self.dir, c".", flags, Mode::empty());
        let dir = opened.map_err(|e| ControlError::Io { op: OPEN, source: e.into() })?;
        Ok(Root { dir: dir.into(), path: self.path.clone() })
    }
}

/// A directory on the way.
struct Step {
    /// by `O_PATH`
    dir: OwnedFd,
    mount: Option<u64>,
    /// It lies in a FUSE mount, or in what is mounted there.
    is_within: bool,
}

impl Step {
    fn root() -> Result<Step, ControlError> {
        let dir = open(CWD, OsStr::new("/")).map_err(failed)?;
        Ok(Step { mount: mount_id(&dir).map_err(looked_up)?, dir, is_within: false })
    }

    /// The directory `dir`, which was found in this one. `given`: for the error.
    fn to(&self, dir: OwnedFd, given: &Path) -> Result<Step, ControlError> {
        let mount = mount_id(&dir).map_err(looked_up)?;
        if mount == self.mount {
            return Ok(Step { dir, mount, is_within: self.is_within });
        }
        let line = mounts().into_iter().find(|line| Some(line.id) == mount);
        let fuse = line.filter(|line| line.fs_type.starts_with("fuse"));
        match &fuse {
            Some(line) if !line.is_trusted() => Err(ControlError::Strangers(given.into())),
            _ => Ok(Step { dir, mount, is_within: self.is_within || fuse.is_some() }),
        }
    }

    /// Where the link of this name leads, and whether root or the user of this process has made it; `None`: it is no
    /// link.
    fn link(&self, name: &OsStr) -> Option<(PathBuf, bool)> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let link = rustix::fs::openat(&self.dir, name, flags, Mode::empty()).ok()?;
        let stat = rustix::fs::fstat(&link).ok()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            return None;
        }
        let target = rustix::fs::readlinkat(&link, c"", Vec::new()).ok()?;
        let is_trusted = [0, rustix::process::geteuid().as_raw()].contains(&stat.st_uid);
        Some((OsString::from_vec(target.into_bytes()).into(), is_trusted && !self.is_within))
    }
}

/// Opens a directory, name by name. `..` is the directory before, by its name: its owner may have moved what is in it.
fn walk(given: &Path) -> Result<OwnedFd, ControlError> {
    let absolute = std::path::absolute(given).map_err(failed)?;
    let mut ahead: Vec<OsString> = names(&absolute).collect();
    let mut way = vec![Step::root()?];
    let mut links = 0;
    while let (Some(name), Some(here)) = (ahead.pop(), way.last()) {
        if name == ".." {
            // That of the root is the root.
            way.truncate(1.max(way.len() - 1));
            continue;
        }
        let errno = match open(&here.dir, &name) {
            Ok(dir) => {
                let next = here.to(dir, given)?;
                way.push(next);
                continue;
            }
            Err(errno) => errno,
        };
        let (target, is_trusted) = here.link(&name).ok_or_else(|| failed(errno))?;
        if !is_trusted {
            // Not where it leads in the end: who follows it may wait for the daemon of another user's mount.
            return Err(ControlError::LeadsAway { path: given.into(), target });
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(failed(Errno::LOOP));
        }
        if target.is_absolute() {
            way.truncate(1);
        }
        ahead.extend(names(&target));
    }
    way.pop().map(|step| step.dir).ok_or_else(|| failed(Errno::NOENT))
}

/// The names of a path, the last one first.
fn names(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().rev().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::CurDir | Component::RootDir | Component::Prefix(_) => None,
    })
}

/// Opens a directory, not a link to one.
fn open(at: impl std::os::fd::AsFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::empty())
}

fn failed(error: impl Into<io::Error>) -> ControlError {
    ControlError::Io { op: OPEN, source: error.into() }
}

fn looked_up(source: io::Error) -> ControlError {
    ControlError::Io { op: "look up a mount in /proc", source }
}

/// The path of the open directory, and the mount that it lies in, if this process sees that.
fn place_of(dir: &OwnedFd) -> Result<(PathBuf, Option<MountLine>), ControlError> {
    let number = dir.as_raw_fd();
    let read = || -> io::Result<(PathBuf, Option<MountLine>)> {
        let path = std::fs::read_link(format!("/proc/self/fd/{number}"))?;
        let id = mount_id(dir)?;
        Ok((path, mounts().into_iter().find(|mount| Some(mount.id) == id)))
    };
    read().map_err(looked_up)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{lchown, symlink};

    #[test]
    fn what_is_in_no_mount_of_fuse_is_not_asked() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        symlink(dir.path(), &link).unwrap();
        for given in [dir.path().to_path_buf(), link.clone(), link.join("")] {
            assert!(matches!(Asked::open(&given), Err(ControlError::NotMounted(_))), "{given:?}");
        }
    }

    #[test]
    fn a_path_leads_where_the_kernel_would_go() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("a/b/c")).unwrap();
        symlink("a/b", at("relative")).unwrap();
        symlink(at("relative/../.."), at("a/absolute")).unwrap();
        symlink("loop", at("loop")).unwrap();
        std::fs::write(at("file"), b"").unwrap();
        for given in ["", "a/./b//c/", "relative/c", "relative/../b", "a/absolute/a", "a/absolute/relative/c/../../.."]
        {
            let found = place_of(&walk(&at(given)).unwrap()).unwrap().0;
            assert_eq!(found, at(given).canonicalize().unwrap(), "{given}");
        }
        for (given, errno) in [("loop", libc::ELOOP), ("file", libc::ENOTDIR), ("none", libc::ENOENT)] {
            let failed = walk(&at(given)).unwrap_err();
            let ControlError::Io { op: _, source } = &failed else { panic!("{failed:?}") };
            assert_eq!(source.raw_os_error(), Some(errno), "{given}");
        }
        if rustix::process::geteuid().is_root() {
            lchown(at("relative"), Some(54_321), None).unwrap();
            let failed = walk(&at("a/absolute/a")).unwrap_err();
            assert!(matches!(failed, ControlError::LeadsAway { .. }), "{failed:?}");
        }
    }
}
