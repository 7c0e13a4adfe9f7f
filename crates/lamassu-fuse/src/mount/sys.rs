//! mount(2), umount(2), their set-uid helper fusermount3, and the entries of a mount in /proc and /sys. No libfuse.

use super::{MountError, Mountpoint};
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
pub(super) fn attach(mountpoint: &Mountpoint, options: &MountOptions) -> Result<OwnedFd, MountError> {
    match attach_directly(mountpoint, options) {
        Err(MountError::Mount { source, .. } | MountError::NoFuse(source))
            if matches!(Errno::from_io_error(&source), Some(Errno::PERM | Errno::ACCESS)) =>
        {
            attach_by_helper(mountpoint.path(), options)
        }
        result => result,
    }
}

fn attach_directly(mountpoint: &Mountpoint, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let failed = |source: io::Error| MountError::Mount { path: mountpoint.path().into(), source };
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| MountError::NoFuse(e.into()))?;
    let root = mountpoint.stat().map_err(|e| failed(e.into()))?;
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
    rustix::mount::mount(options.fsname.as_str(), mountpoint.held(), kind.as_str(), flags, &*data)
        .map_err(|e| failed(e.into()))?;
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

/// One mount. Its mount point has another path once a directory above it is renamed; its identity stays.
pub(super) struct MountId {
    /// where it was mounted
    path: PathBuf,
    /// `None` if it was gone before it could be asked for
    identity: Option<Identity>,
}

/// What distinguishes a mount from later ones of other vaults: the kernel's number of it, that of its file system
/// (`major:minor`), and its source. The kernel gives both numbers again, often both at once to the next mount.
#[derive(Clone, PartialEq, Eq)]
struct Identity {
    mount: u64,
    device: String,
    source: PathBuf,
}

impl Identity {
    fn of(mount: &MountLine) -> Identity {
        Identity { mount: mount.id, device: mount.device.clone(), source: mount.source.clone() }
    }
}

impl MountId {
    /// The mount that this process has just made on a directory.
    pub(super) fn on(point: &Mountpoint) -> MountId {
        // As a mount point it cannot be renamed any more, and what is above it is not gone through.
        let path = point.place().unwrap_or_else(|_| point.path().into());
        let me = rustix::process::geteuid().as_raw();
        let there = topmost_on(point, &path).ok().flatten().filter(|mount| mount.user() == Some(me));
        MountId { path, identity: there.as_ref().map(Identity::of) }
    }

    /// The mount of a line of the table.
    pub(super) fn of_line(mount: &MountLine) -> MountId {
        MountId { path: mount.mountpoint.clone(), identity: Some(Identity::of(mount)) }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Where this mount is now, if it is anywhere.
    fn place(&self) -> Option<PathBuf> {
        let identity = self.identity.as_ref()?;
        mounts().into_iter().find(|mount| Identity::of(mount) == *identity).map(|mount| mount.mountpoint)
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
        let is_this = id.is_some() && id == self.identity.as_ref().map(|identity| identity.mount);
        Ok(is_this.then_some((parent, root)))
    }

    /// Raises the read-ahead of the mount: the kernel starts FUSE mounts with 128 KiB. Needs root; for other users
    /// reads are a little slower.
    pub(super) fn raise_read_ahead(&self, kib: u32) {
        let Some(Identity { device, .. }) = &self.identity else { return };
        if let Err(error) = std::fs::write(format!("/sys/class/bdi/{device}/read_ahead_kb"), kib.to_string()) {
            tracing::debug!(%error, "read-ahead stays as it is");
        }
    }

    /// The limits of the mount's dirty pages, if we may change them: that needs root too.
    pub(super) fn dirty_limits(&self) -> Option<DirtyLimits> {
        let opened = DirtyLimits::of_device(&self.identity.as_ref()?.device);
        opened.inspect_err(|error| tracing::debug!(%error, "limits of dirty pages stay as they are")).ok()
    }
}

/// Refuses a directory on which something has been mounted since it was named: the new mount would hide that.
///
/// # Errors
/// [`MountError::Mountpoint`].
pub fn refuse_what_is_mounted_on(point: &Mountpoint) -> Result<(), MountError> {
    let refused = match topmost_on(point, point.path()) {
        Ok(None) => return Ok(()),
        Ok(Some(_)) => io::Error::other("something has been mounted on it since the command began"),
        Err(error) => error,
    };
    Err(MountError::Mountpoint { path: point.path().to_owned(), source: refused })
}

/// The topmost mount on a directory, whose path is this; `None`: nothing is mounted there. What is mounted there is not
/// asked.
fn topmost_on(point: &Mountpoint, path: &Path) -> io::Result<Option<MountLine>> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let parent = rustix::fs::openat(point.dir(), "..", flags | OFlags::DIRECTORY, Mode::empty())?;
    let name = path.file_name().unwrap_or(OsStr::new("."));
    let root = rustix::fs::openat(&parent, name, flags | OFlags::NOFOLLOW, Mode::empty())?;
    let id = mount_id(&root)?;
    if id == mount_id(point.dir())? {
        return Ok(None);
    }
    Ok(mounts().into_iter().find(|mount| Some(mount.id) == id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_mounted_on_a_plain_directory() {
        let dir = tempfile::tempdir().unwrap();
        let point = Mountpoint::open(dir.path()).unwrap();
        assert!(topmost_on(&point, point.path()).unwrap().is_none());
        assert!(MountId::on(&point).identity.is_none());
    }

    #[test]
    fn a_later_mount_with_the_same_numbers_is_another_one() {
        let there = mounts().pop().unwrap();
        let of = |source: &str| MountId::of_line(&MountLine { source: source.into(), ..there.clone() });
        assert!(MountId::of_line(&there).is_mounted());
        assert!(!of("/srv/another-vault").is_mounted());
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
