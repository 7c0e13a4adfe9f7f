//! mount(2), umount(2), their set-uid helper fusermount3, and the entries of a mount in /proc and /sys. No libfuse.

use super::MountError;
use crate::options::MountOptions;
use crate::tuning::DirtyLimits;
use lamassu_store::mount_table::{MountLine, mount_id, mounts};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg, socketpair,
};
use std::ffi::{CString, OsStr};
use std::fmt;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What the helper wrote to its standard error.
#[derive(Debug)]
pub struct HelperMessage(String);

impl fmt::Display for HelperMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.trim())
    }
}

impl std::error::Error for HelperMessage {}

/// Mounts, and returns the device from which requests are read: by mount(2) if permitted, otherwise by fusermount3.
pub(super) fn attach(path: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    match attach_directly(path, options) {
        Err(MountError::Mount { source, .. } | MountError::NoFuse(source))
            if matches!(Errno::from_io_error(&source), Some(Errno::PERM | Errno::ACCESS)) =>
        {
            attach_by_helper(path, options)
        }
        result => result,
    }
}

fn attach_directly(path: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let failed = |source: io::Error| MountError::Mount { path: path.into(), source };
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| MountError::NoFuse(e.into()))?;
    let root = rustix::fs::stat(path).map_err(|e| failed(e.into()))?;
    let mut data = format!(
        "fd={},rootmode={:o},user_id={},group_id={},default_permissions,max_read={}",
        device.as_raw_fd(),
        FileType::Directory.as_raw_mode() | (root.st_mode & 0o7777),
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
        options.max_read,
    );
    if options.allow_other || options.allow_root {
        data.push_str(",allow_other");
    }
    let mut flags = MountFlags::empty();
    let switches = [
        (options.read_only, MountFlags::RDONLY),
        (!options.dev, MountFlags::NODEV),
        (!options.suid, MountFlags::NOSUID),
        (!options.exec, MountFlags::NOEXEC),
        (options.noatime, MountFlags::NOATIME),
        (options.sync, MountFlags::SYNCHRONOUS),
        (options.dirsync, MountFlags::DIRSYNC),
    ];
    for (on, flag) in switches {
        flags.set(flag, on);
    }
    let data = CString::new(data).map_err(|e| failed(e.into()))?;
    let kind = format!("fuse.{}", options.subtype);
    rustix::mount::mount(options.fsname.as_str(), path, kind.as_str(), flags, &*data).map_err(|e| failed(e.into()))?;
    Ok(device)
}

/// fusermount3 mounts and sends the device over a socket, which it is given here as its standard input
/// (`_FUSE_COMMFD`), so that no other descriptor need survive into it.
fn attach_by_helper(path: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|e| MountError::NoHelper(e.into()))?;
    let child = helper()
        .args(["-o", &helper_options(options), "--"])
        .arg(path)
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(MountError::NoHelper)?;
    let device = receive_descriptor(&ours);
    let output = child.wait_with_output().map_err(MountError::NoHelper)?;
    match device {
        Ok(device) if output.status.success() => Ok(device),
        _ => Err(MountError::HelperRefused(HelperMessage(String::from_utf8_lossy(&output.stderr).into_owned()))),
    }
}

fn helper() -> Command {
    Command::new(std::env::var_os("FUSERMOUNT_PATH").as_deref().unwrap_or(OsStr::new("fusermount3")))
}

fn helper_options(options: &MountOptions) -> String {
    let escape = |s: &str| s.replace('\\', "\\\\").replace(',', "\\,");
    let mut words = vec![
        format!("fsname={}", escape(&options.fsname)),
        format!("subtype={}", options.subtype),
        "default_permissions".into(),
        format!("max_read={}", options.max_read),
    ];
    let switches = [
        (options.read_only, "ro"),
        (options.dev, "dev"),
        (options.suid, "suid"),
        (!options.exec, "noexec"),
        (options.noatime, "noatime"),
        (options.sync, "sync"),
        (options.dirsync, "dirsync"),
        (options.allow_other || options.allow_root, "allow_other"),
    ];
    words.extend(switches.iter().filter(|(on, _)| *on).map(|(_, word)| (*word).to_string()));
    words.join(",")
}

/// The descriptor that the helper sends. An end of the stream without one means that the helper refused.
fn receive_descriptor(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8; 1];
    let mut buffers = [IoSliceMut::new(&mut byte)];
    loop {
        match recvmsg(socket, &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
            Ok(_) => break,
        }
    }
    control
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        })
        .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Unmounts the mount at `path`. Its parent is open, so that renames above it cannot lead to another mount; the mount
/// point itself cannot be renamed while it is in use.
fn detach(parent: &OwnedFd, path: &Path, lazy: bool) -> Result<(), MountError> {
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    let held =
        PathBuf::from(format!("/proc/self/fd/{}", parent.as_raw_fd())).join(path.file_name().unwrap_or_default());
    match rustix::mount::unmount(&held, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(MountError::Busy(path.into())),
        Err(Errno::PERM) => detach_by_helper(path, lazy),
        Err(error) => Err(MountError::Mount { path: path.into(), source: error.into() }),
    }
}

fn detach_by_helper(path: &Path, lazy: bool) -> Result<(), MountError> {
    let output = helper()
        .args(["-u", if lazy { "-qz" } else { "-q" }, "--"])
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .map_err(MountError::NoHelper)?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    // With -q the helper says nothing about a busy mount.
    if !lazy && (message.trim().is_empty() || message.contains("busy")) {
        return Err(MountError::Busy(path.into()));
    }
    Err(MountError::HelperRefused(HelperMessage(message)))
}

/// One mount. Its mount point has another path once a directory above it is renamed; its numbers stay.
pub(super) struct MountId {
    /// where it was mounted
    path: PathBuf,
    /// `None` if it was gone before it could be asked for
    numbers: Option<Numbers>,
}

/// The kernel's number of a mount, and that of its file system (`major:minor`). The kernel reuses the first; the second
/// distinguishes two mounts with the same number.
#[derive(Clone, PartialEq, Eq)]
struct Numbers {
    mount: u64,
    device: String,
}

impl Numbers {
    fn of(mount: &MountLine) -> Numbers {
        Numbers { mount: mount.id, device: mount.device.clone() }
    }
}

impl MountId {
    /// The mount that is topmost at `path` now.
    pub(super) fn of(path: PathBuf) -> MountId {
        let numbers = topmost_at(&path);
        MountId { path, numbers }
    }

    /// The mount of a line of the table.
    pub(super) fn of_line(mount: &MountLine) -> MountId {
        MountId { path: mount.mountpoint.clone(), numbers: Some(Numbers::of(mount)) }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Where this mount is now, if it is anywhere.
    fn place(&self) -> Option<PathBuf> {
        let numbers = self.numbers.as_ref()?;
        mounts().into_iter().find(|mount| Numbers::of(mount) == *numbers).map(|mount| mount.mountpoint)
    }

    /// Whether this mount is anywhere.
    pub(super) fn is_mounted(&self) -> bool {
        self.place().is_some()
    }

    /// Unmounts it, wherever it is now, and no other.
    pub(super) fn detach(&self, lazy: bool) -> Result<(), MountError> {
        let Some(place) = self.place() else { return Ok(()) };
        match self.hold(&place).map_err(|source| MountError::Mount { path: place.clone(), source })? {
            Some((parent, root)) => {
                // It would be in use.
                drop(root);
                detach(&parent, &place, lazy)
            }
            // Another mount hides it, or the path leads elsewhere by now.
            None => Err(MountError::Busy(place)),
        }
    }

    /// The root of this mount, which nothing done to the path can exchange. The mount is not asked: it may hang.
    pub(super) fn root(&self) -> io::Result<OwnedFd> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let (_, root) = self.hold(&self.place().ok_or_else(gone)?)?.ok_or_else(gone)?;
        Ok(root)
    }

    /// After a failed start, when no thread serves the mount: errors are ignored.
    pub(super) fn detach_quietly(&self) {
        if let Err(error) = self.detach(true) {
            tracing::warn!(%error, "unmount failed");
        }
    }

    /// Opens the directory of its mount point and its root; `None`: the path does not lead to this mount. The kernel
    /// answers without asking the mount, which may hang.
    fn hold(&self, place: &Path) -> io::Result<Option<(OwnedFd, OwnedFd)>> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let parent = rustix::fs::open(place.parent().unwrap_or(place), flags | OFlags::DIRECTORY, Mode::empty())?;
        let name = place.file_name().unwrap_or_default();
        let root = rustix::fs::openat(&parent, name, flags | OFlags::NOFOLLOW, Mode::empty())?;
        let id = mount_id(&root)?;
        let is_this = id.is_some() && id == self.numbers.as_ref().map(|numbers| numbers.mount);
        Ok(is_this.then_some((parent, root)))
    }

    /// Raises the read-ahead of the mount: the kernel starts FUSE mounts with 128 KiB. Needs root; for other users
    /// reads are a little slower.
    pub(super) fn raise_read_ahead(&self, kib: u32) {
        let Some(Numbers { device, .. }) = &self.numbers else { return };
        if let Err(error) = std::fs::write(format!("/sys/class/bdi/{device}/read_ahead_kb"), kib.to_string()) {
            tracing::debug!(%error, "read-ahead stays as it is");
        }
    }

    /// The limits of the mount's dirty pages, if we may change them: that needs root too.
    pub(super) fn dirty_limits(&self) -> Option<DirtyLimits> {
        let opened = DirtyLimits::of_device(&self.numbers.as_ref()?.device);
        opened.inspect_err(|error| tracing::debug!(%error, "limits of dirty pages stay as they are")).ok()
    }
}

/// The topmost mount at `path`.
fn topmost_at(path: &Path) -> Option<Numbers> {
    mounts().into_iter().rfind(|mount| mount.mountpoint == path).map(|mount| Numbers::of(&mount))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_mounted_and_a_plain_directory_is_not() {
        assert!(topmost_at(Path::new("/")).is_some());
        let dir = tempfile::tempdir().unwrap();
        assert!(topmost_at(dir.path()).is_none());
    }

    #[test]
    fn helper_options_are_escaped() {
        let mut options = MountOptions { read_only: true, ..MountOptions::default() };
        options.fsname = r"/srv/a,suid\b".into();
        assert_eq!(
            helper_options(&options),
            r"fsname=/srv/a\,suid\\b,subtype=lamassu,default_permissions,max_read=524288,ro"
        );
    }
}
