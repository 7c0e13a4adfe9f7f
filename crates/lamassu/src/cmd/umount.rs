//! `lamassu umount`: ends a mount and waits until its vault is closed.

use crate::fault::Fault;
use crate::mounts::{self, Mount};
use crate::open;
use crate::output::Ui;
use crate::signals;
use anyhow::Result;
use lamassu_fuse::control;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(10);
/// When it is said what is waited for, and when what else it may be.
const PATIENCE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];
const CLOSING: &str = "unmounted; waiting until everything is in the store";
const HELD: &str = "still waiting: much is left to be written, or another mount namespace (of a container, a service) holds a copy \
    of the mount, and the vault is closed when that goes; `grep -l fuse.lamassu /proc/[0-9]*/mountinfo` names the processes \
    that see one";

const EXAMPLES: &str = "\
Examples:
  lamassu umount ~/private
  lamassu umount --lazy /mnt      free at once; the vault is closed when the last open file is
`umount` and `fusermount3 -u` do as well, but return before the daemon has written everything.";

/// Options of `umount`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Also while files are open there; they stay usable until they are closed
    #[arg(short, long, short_alias = 'z')]
    lazy: bool,
    /// Where the vault is mounted
    mountpoint: PathBuf,
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    let (path, mount) = ours(&args.mountpoint)?;
    // Unmounting writes back what the kernel caches, and those writes would wait for a thaw. Not frozen is what it normally is.
    let _ = control::thaw(&path);
    unmount(&path, args.lazy)?;
    if args.lazy || mount.is_read_only() {
        return Ok(());
    }
    wait_until_closed(ui, &mount)
}

/// The path without links, and the mount of ours that is there. Nothing is asked of the mount itself: its daemon may be dead.
pub fn ours(given: &Path) -> Result<(PathBuf, Mount), Fault> {
    let not_ours = || Fault::NotAMount { path: given.into() };
    let path = match (given.parent(), given.file_name()) {
        (Some(parent), Some(name)) => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            parent.canonicalize().map_err(|_| not_ours())?.join(name)
        }
        _ => given.canonicalize().map_err(|_| not_ours())?,
    };
    // The last component may itself be a link to a mount point.
    let path = if mounts::at(&path).is_some() { path } else { path.canonicalize().map_err(|_| not_ours())? };
    let mount = mounts::at(&path).ok_or_else(not_ours)?;
    let is_ours =
        mount.fs_type == mounts::TYPE || (mount.fs_type.starts_with("fuse.") && control::status(&path).is_ok());
    if is_ours { Ok((path, mount)) } else { Err(not_ours()) }
}

fn unmount(path: &Path, lazy: bool) -> Result<(), Fault> {
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(path, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(Fault::MountBusy { path: path.into() }),
        Err(Errno::PERM) => unmount_by_helper(path, lazy),
        Err(error) => Err(Fault::Umount { path: path.into(), reason: error.to_string() }),
    }
}

/// fusermount3 is set-uid and unmounts for the user who mounted.
fn unmount_by_helper(path: &Path, lazy: bool) -> Result<(), Fault> {
    let failed = |reason| Fault::Umount { path: path.into(), reason };
    let output = Command::new("fusermount3")
        .args(if lazy { ["-u", "-z"].as_slice() } else { &["-u"] })
        .arg("--")
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| failed(format!("cannot run fusermount3: {e}; install the package fuse3")))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_string();
    match output.status.success() {
        true => Ok(()),
        false if said.to_ascii_lowercase().contains("busy") => Err(Fault::MountBusy { path: path.into() }),
        false => Err(failed(said)),
    }
}

/// The kernel is done; the daemon still commits. It holds the vault's lock until it has.
fn wait_until_closed(ui: &Ui, mount: &Mount) -> Result<()> {
    let started = Instant::now();
    let mut hints = PATIENCE.into_iter().zip([CLOSING, HELD]).peekable();
    while let Err(error) = open::lock_out_writers(&mount.source) {
        let locked = matches!(error.downcast_ref(), Some(Fault::Locked { .. }));
        // Not the vault's directory (`-o fsname=`), or somebody mounted it again: then there is nothing to wait for.
        if !locked || mounts::of_vault(&mount.source).is_some() {
            return Ok(());
        }
        signals::check()?;
        if let Some((_, hint)) = hints.next_if(|(after, _)| started.elapsed() > *after) {
            ui.note(hint);
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}
