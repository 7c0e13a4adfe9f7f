//! `lamassu umount`: ends a mount and waits until its vault is closed.

use crate::fault::Fault;
use crate::mounts::{self, Mount};
use crate::open;
use crate::output::Ui;
use crate::served;
use crate::served::protocol::{self, Request, Status};
use crate::signals;
use anyhow::{Context, Result};
use lamassu_fuse::control::{self, ControlError};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(10);
/// When it is said what is waited for, and when what else it may be.
const PATIENCE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];
const WRITING: &str = "waiting until everything is in the store; nothing is unmounted before";
const CLOSING: &str = "unmounted; waiting until everything is in the store";
const MUCH: &str = "still waiting: much is left to be written, or another mount namespace (of a container, a service) holds a copy \
    of the mount, and the vault is closed when that goes";
/// Namespaces that are named by a process in them.
const NAMED_MAX: usize = 3;

const EXAMPLES: &str = "\
Examples:
  lamassu umount ~/private
  lamassu umount --lazy /mnt      free at once; the vault is closed when the last open file is
`umount` and `fusermount3 -u` do as well, but return before the daemon has written everything, and tell of no failure.";

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
    if args.lazy {
        return Ok(unmount(&path, true)?);
    }
    let vault = mount.vault();
    settle(ui, &path)?;
    unmount(&path, false)?;
    if mount.is_read_only() {
        return Ok(());
    }
    wait_until_closed(ui, &vault, &mount)
}

/// Has everything arrive in the store while the mount is there to keep what does not: once it is gone, its daemon can tell only the log.
fn settle(ui: &Ui, path: &Path) -> Result<()> {
    let (tell, told) = mpsc::channel();
    let mountpoint = path.to_path_buf();
    let ask = move || _ = tell.send(written(&mountpoint));
    std::thread::Builder::new().name("settle".into()).spawn(ask).context("cannot start a thread")?;
    let done = told.recv_timeout(PATIENCE[0]).or_else(|error| match error {
        RecvTimeoutError::Timeout => {
            ui.note(WRITING);
            told.recv().map_err(|_| RecvTimeoutError::Disconnected)
        }
        RecvTimeoutError::Disconnected => Err(error),
    });
    match done {
        Ok(Written::All) => Ok(()),
        Ok(Written::Refused(error)) => {
            ui.warn(format_args!(
                "some of what programs wrote to {} was refused, and is lost: {error}; they were told when they closed or synced the file",
                path.display()
            ));
            Ok(())
        }
        Ok(Written::Unknown(error)) => {
            ui.warn(format_args!(
                "the daemon could not be asked whether everything is in the store, which its log tells: {error}"
            ));
            Ok(())
        }
        Ok(Written::Kept { code, message }) => Err(Fault::Unwritten { path: path.into(), code, message }.into()),
        Err(_) => Err(anyhow::anyhow!("nothing was unmounted: asking the daemon ended by a bug")),
    }
}

/// What became of what was written through a mount.
enum Written {
    /// It is in the store, or nobody is there who could say otherwise.
    All,
    /// The daemon has all that is not there.
    Kept { code: u8, message: String },
    /// The kernel could not hand something over, now or before, and has dropped it.
    Refused(ControlError),
    /// The daemon cannot be asked by this user.
    Unknown(anyhow::Error),
}

fn written(mountpoint: &Path) -> Written {
    // With files open the kernel may have more to write without end, and unmounting fails anyhow. Closing a file hands over what is cached of it.
    let is_open = served::ask::<Status>(mountpoint, &Request::Status {}).is_ok_and(|status| status.open_files > 0);
    let pushed = if is_open { Ok(()) } else { control::write_back(mountpoint) };
    let refused = match pushed {
        Err(error @ ControlError::Io { op: control::SYNCFS, source: _ }) => Some(error),
        Ok(()) | Err(_) => None,
    };
    let Err(error) = served::ask::<()>(mountpoint, &Request::Sync {}) else {
        return refused.map_or(Written::All, Written::Refused);
    };
    let known = match (error.downcast_ref(), error.downcast_ref()) {
        // A daemon of an earlier version.
        (Some(Fault::Told { code: _, message }), _) if message.starts_with(protocol::UNKNOWN) => Some(Written::All),
        (Some(Fault::Told { code, message }), _) => Some(Written::Kept { code: *code, message: message.clone() }),
        // Not encrypted: nothing is held back there.
        (_, Some(ControlError::NotMounted(_))) => Some(Written::All),
        // Nobody is left who could keep anything.
        (_, Some(ControlError::Io { op: _, source })) if is_gone(source) => Some(Written::All),
        _ => None,
    };
    known.unwrap_or(Written::Unknown(error))
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

fn is_gone(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOTCONN)
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
fn wait_until_closed(ui: &Ui, vault: &Path, mount: &Mount) -> Result<()> {
    let started = Instant::now();
    let mut hints = PATIENCE.into_iter().zip([|_: &Mount| CLOSING.to_string(), held]).peekable();
    while let Err(error) = open::lock_out_writers(vault) {
        let locked = matches!(error.downcast_ref(), Some(Fault::Locked { .. }));
        // Not the vault's directory (a stranger's `-o fsname=`), or somebody mounted it again: then there is nothing to wait for.
        if !locked || mounts::of_vault(vault).is_some() {
            return Ok(());
        }
        signals::check()?;
        if let Some((_, hint)) = hints.next_if(|(after, _)| started.elapsed() > *after) {
            ui.note(hint(mount));
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// Why that takes long.
fn held(mount: &Mount) -> String {
    let holders = mount.seen_by();
    if holders.is_empty() {
        return MUCH.into();
    }
    let mut named: Vec<_> =
        holders.iter().take(NAMED_MAX).map(|(pid, name)| format!("{name} (process {pid})")).collect();
    if holders.len() > NAMED_MAX {
        named.push(format!("{} more", holders.len() - NAMED_MAX));
    }
    let held = "still waiting: a copy of the mount is in the mount namespace of";
    format!("{held} {}; the vault is closed when that copy goes, also if this waits no longer", named.join(", "))
}
