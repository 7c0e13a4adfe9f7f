//! `lamassu umount`: ends a mount and waits until its vault is closed.
//!
//! A process that has sent a request to a daemon cannot end before the answer comes, whatever signal it gets, and the
//! answer may never come where the daemon or its store hangs. So a second process, the worker, sends the requests. The
//! first one waits for it, and leaves it behind at a signal. With `--lazy` no answer is waited for.

use crate::exit::Code;
use crate::fault::{Context, Fault, Result};
use crate::mounts::{self, Mount};
use crate::output::Ui;
use lamassu_format::name;
use lamassu_fuse::MountError;
use lamassu_fuse::control::{self, ControlError, Root};
use lamassu_host::control::AskError;
use lamassu_host::control::protocol::{Failed, Status, pid_namespace};
use lamassu_host::{Error as HostError, FaultKind, lock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, set_parent_process_death_signal};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(10);
/// When it is said what is waited for, and when what else it may be.
const PATIENCE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];
const WRITING: &str = "waiting until everything is in the store; nothing is unmounted before";
const UNANSWERED: &str = "still waiting: much is left to be written, or the daemon, or the store below it, does not answer. To interrupt this does no harm; \
    `lamassu umount --lazy` unmounts at once, and gives up what cannot be written";
const CLOSING: &str = "unmounted; waiting until everything is in the store";
const MUCH: &str = "still waiting: much is left to be written, or another mount namespace (of a container, a service) holds a copy \
    of the mount, and the vault is closed when that goes";
/// Namespaces that are named by a process in them.
const NAMED_MAX: usize = 3;
/// How long a daemon may take to say that a mount is of this program.
const ANSWER_MAX: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "\
Examples:
  lamassu umount ~/private
  lamassu umount --lazy /mnt      free at once; the vault is closed with the last open file
`umount` and `fusermount3 -u` work, too, but return before the daemon has written everything, and
report no failure.";

/// Options of `umount`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Unmount even while files are open; they stay usable until they are closed
    #[arg(short, long, short_alias = 'z')]
    lazy: bool,
    /// Be the process that can be left behind
    #[arg(long, hide = true)]
    worker: bool,
    /// The mountpoint of the vault
    mountpoint: PathBuf,
}

pub fn run(ui: &Ui, args: Args) -> Result<Code> {
    match (args.lazy, args.worker) {
        (false, false) => return by_worker(ui, &args.mountpoint),
        (false, true) => settle_and_unmount(ui, &args.mountpoint)?,
        (true, false) => detach(&args.mountpoint)?,
        (true, true) => thaw_given()?,
    }
    Ok(Code::Done)
}

/// This program, to be started once more.
fn itself() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("lamassu").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Has a worker settle and unmount, and says what it says. At a signal this process ends, and so the worker, as soon as
/// it can: it holds nothing that others wait for, such as this process's standard error.
fn by_worker(ui: &Ui, mountpoint: &Path) -> Result<Code> {
    let mut command = itself();
    command.args(ui.quiet.then_some("--quiet")).args(vec!["-v"; ui.verbose.into()]);
    // A group of its own: Ctrl-C is for this process, which says that it ends.
    command.args(["umount", "--worker", "--"]).arg(mountpoint).stderr(Stdio::piped()).process_group(0);
    let mut worker = command.spawn().context("cannot start the process that unmounts")?;
    if let Some(mut said) = worker.stderr.take() {
        // Standard error may be closed.
        let _ = io::copy(&mut said, &mut io::stderr());
    }
    let status = worker.wait().context("cannot wait for the process that unmounts")?;
    Ok(status.code().map(Code::from_number).ok_or(Fault::WorkerKilled { status })?)
}

/// Takes the mount away, whatever its daemon does. If its type is not ours alone, the daemon has to say that it is,
/// unless it says nothing.
fn detach(given: &Path) -> Result<()> {
    let (path, mount) = mounts::fuse_at(given)?;
    // Writers that wait for a thaw would keep a frozen mount from ending, and no path leads to it any more to thaw it.
    let thawing = thaw(&mount);
    if mount.fs_type != mounts::TYPE && thawing.is_some_and(has_failed) {
        return Err(Fault::NotAMount { path: given.into() }.into());
    }
    Ok(unmount(&path, &mount, true)?)
}

/// Starts a process that thaws a mount when its daemon answers, also once it is detached. It need not be waited for.
fn thaw(mount: &Mount) -> Option<Child> {
    let root = lamassu_fuse::root_of(mount).ok()?;
    itself().args(["umount", "--lazy", "--worker", "--"]).arg(&mount.mountpoint).stdin(root).spawn().ok()
}

/// What that process does: its standard input is the root of the mount.
fn thaw_given() -> Result<()> {
    let root = Root::open(Path::new("/proc/self/fd/0"))?;
    // Also a freeze that waits for another host.
    match root.thaw() {
        Err(ControlError::NotFrozen) => Ok(()),
        thawed => Ok(thawed?),
    }
}

/// Whether a process fails, in the time there is.
fn has_failed(mut child: Child) -> bool {
    let started = Instant::now();
    while started.elapsed() < ANSWER_MAX {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(POLL),
            Ok(Some(status)) => return !status.success(),
            Err(_) => return false,
        }
    }
    false
}

/// The work of the worker.
fn settle_and_unmount(ui: &Ui, given: &Path) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot end with the process that was called")?;
    let (path, mount) = mounts::fuse_at(given)?;
    let status = settle(ui, given, &path, mount.fs_type == mounts::TYPE)?;
    // While it is mounted its number is its own.
    let daemon = status.as_ref().and_then(|status| daemon(status, &mount));
    unmount(&path, &mount, false)?;
    let Some(served) = served_vault(&mount, status) else { return Ok(()) };
    match daemon {
        Some(daemon) => wait_for(ui, &mount, || has_ended(&daemon)),
        None if served.is_read_only => {}
        None => wait_for(ui, &mount, || is_closed(ui, &served.dir)),
    }
    Ok(())
}

/// A vault that a mount showed.
struct ServedVault {
    dir: PathBuf,
    is_read_only: bool,
}

/// The vault that a mount showed, as its daemon said, or else the table. `None`: there was none, or its daemon is not
/// to be believed.
fn served_vault(mount: &Mount, status: Option<Status>) -> Option<ServedVault> {
    let served = match status {
        Some(Status { dir, read_only, .. }) => ServedVault { dir: dir.into(), is_read_only: read_only },
        None => ServedVault { dir: mount.source.clone(), is_read_only: mount.is_read_only() },
    };
    (mount.is_believed_of(&served.dir) && mounts::has_vault(&served.dir)).then_some(served)
}

/// Has everything arrive in the store while the mount is there to keep what does not: once it is gone, its daemon can
/// tell only the log. What the daemon said of itself before.
///
/// `is_ours`: its type says so; otherwise its daemon has to.
fn settle(ui: &Ui, given: &Path, path: &Path, is_ours: bool) -> Result<Option<Status>> {
    let (tell, told) = mpsc::channel();
    let mountpoint = path.to_path_buf();
    let ask = move || _ = tell.send(settled(&mountpoint, is_ours));
    std::thread::Builder::new().name("settle".into()).spawn(ask).context("cannot start a thread")?;
    let (status, written) = patiently(ui, &told)?;
    match written {
        Written::All => {}
        Written::Kept(failed) => return Err(Fault::Unwritten { path: path.into(), failed }.into()),
        Written::NotAllowed(error) => return Err(error),
        Written::NotOurs => return Err(Fault::NotAMount { path: given.into() }.into()),
        Written::InUse => return Err(Fault::MountBusy { path: path.into() }.into()),
        Written::Lost(failed) => ui.warn(format_args!(
            "what was written to {} and not synced is lost: {}; programs were told when they synced or closed the file, or not at all",
            path.display(),
            failed.message
        )),
        Written::Gone => ui.warn(format_args!(
            "the daemon of {} had ended before: what it had not put into the store by then is lost; `lamassu check DIR` tells whether the vault is whole",
            path.display()
        )),
        Written::Refused(error) => ui.warn(format_args!(
            "some of what programs wrote to {} was refused, and is lost: {error}; they were told when they closed or synced the file",
            path.display()
        )),
        Written::Unknown(error) => ui.warn(format_args!(
            "the daemon could not be asked whether everything is in the store, which its log tells: {error}"
        )),
    }
    Ok(status)
}

/// Waits for an answer, and says so.
fn patiently<T>(ui: &Ui, told: &Receiver<T>) -> Result<T> {
    let bug = || Fault::Other("nothing was unmounted: asking the daemon ended by a bug").into();
    let started = Instant::now();
    for (after, note) in PATIENCE.into_iter().zip([WRITING, UNANSWERED]) {
        match told.recv_timeout(after.saturating_sub(started.elapsed())) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Timeout) => ui.note(note),
            Err(RecvTimeoutError::Disconnected) => return Err(bug()),
        }
    }
    told.recv().map_err(|_| bug())
}

/// What became of what was written through a mount.
enum Written {
    /// It is in the store.
    All,
    /// The daemon has all that is not there.
    Kept(Failed),
    /// The kernel could not hand something over, now or before, and has dropped it.
    Refused(ControlError),
    /// This host's session has ended at the server, and with it what was not committed.
    Lost(Failed),
    /// It is no Lamassu mount.
    NotOurs,
    /// There is no daemon any more: it had what was not in the store by then.
    Gone,
    /// A command has frozen the mount as long as it has a directory open there.
    InUse,
    /// The daemon does not do it for this user, who may not unmount either.
    NotAllowed(crate::fault::Error),
    /// The daemon cannot be asked.
    Unknown(crate::fault::Error),
}

/// Opens the root once: each open may wait for a daemon that has lost its server.
fn settled(mountpoint: &Path, is_ours: bool) -> (Option<Status>, Written) {
    let root = match Root::open(mountpoint) {
        Ok(root) if is_ours || root.status().is_ok() => root,
        Ok(_) => return (None, Written::NotOurs),
        Err(_) if !is_ours => return (None, Written::NotOurs),
        Err(error) => return (None, unanswered(mountpoint, AskError::Transport(error))),
    };
    // What the kernel writes back would wait for a thaw. Not frozen is what a mount normally is.
    if let Err(ControlError::AlreadyFrozen) = root.thaw_to_unmount() {
        return (None, Written::InUse);
    }
    let status = crate::control::claimed_status(&root).ok();
    // With files open the kernel may have more to write without end, and unmounting fails anyhow. Closing a file hands
    // over what is cached of it.
    let is_open = status.as_ref().is_some_and(|status| status.open_files > 0);
    (status, written(mountpoint, &root, is_open))
}

fn written(mountpoint: &Path, root: &Root, is_open: bool) -> Written {
    let pushed = if is_open { Ok(()) } else { root.write_back() };
    let refused = match pushed {
        Err(error @ ControlError::Io { op: control::SYNCFS, source: _ }) => Some(error),
        Ok(()) | Err(_) => None,
    };
    match crate::control::sync(root) {
        Ok(()) => refused.map_or(Written::All, Written::Refused),
        Err(error) => unanswered(mountpoint, error),
    }
}

/// Of a daemon that has not written everything, or has not said so.
fn unanswered(mountpoint: &Path, error: AskError<ControlError>) -> Written {
    match error {
        error @ AskError::Told(Failed { kind: FaultKind::Refused, .. }) => {
            Written::NotAllowed(crate::served::not_asked(mountpoint, error))
        }
        AskError::Told(failed) => {
            let failed = Failed { message: crate::text::printable(&failed.message), ..failed };
            match failed.kind {
                FaultKind::SessionEnded | FaultKind::AnchorServerRefuses => Written::Lost(failed),
                _ => Written::Kept(failed),
            }
        }
        // Not encrypted: nothing is held back there.
        AskError::Transport(ControlError::NotMounted(_)) => Written::All,
        AskError::Transport(ControlError::Io { op: _, source }) if is_gone(&source) => Written::Gone,
        error => Written::Unknown(crate::served::not_asked(mountpoint, error)),
    }
}

/// The daemon had ended, or did so before it answered.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED))
}

/// Takes this mount away, and no other one: its daemon chose when it answered, and its user what the path leads to.
fn unmount(path: &Path, mount: &Mount, lazy: bool) -> Result<(), Fault> {
    lamassu_fuse::unmount(mount, lazy).map_err(|error| match error {
        MountError::Busy(_) => Fault::MountBusy { path: path.into() },
        MountError::HelperRefused(said) => Fault::Umount { path: path.into(), reason: said.to_string() },
        MountError::Mount { path: _, source } => Fault::Umount { path: path.into(), reason: source.to_string() },
        error => Fault::Umount { path: path.into(), reason: error.to_string() },
    })
}

/// The process that serves a mount, if it is known here under the number that it tells. It is of the user who mounted:
/// the daemon of another user may name any process.
fn daemon(status: &Status, mount: &Mount) -> Option<OwnedFd> {
    let is_same = status.pid_namespace.is_some() && status.pid_namespace == pid_namespace();
    let pid = Pid::from_raw(status.pid.try_into().ok()?).filter(|_| is_same)?;
    let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    let user = std::fs::metadata(format!("/proc/{}", status.pid)).ok()?.uid();
    (mount.user() == Some(user)).then_some(process)
}

/// Whether a process has ended, which waits for that for [`POLL`]. Then the vault, its anchor and its session at a
/// server are free.
fn has_ended(process: &OwnedFd) -> bool {
    let most = Timespec { tv_sec: 0, tv_nsec: POLL.subsec_nanos().into() };
    // What cannot be asked about is not waited for.
    match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&most)) {
        Ok(ended) => ended > 0,
        Err(error) => error != Errno::INTR,
    }
}

/// Whether no daemon has a vault locked any more, as far as that can be told.
fn is_closed(ui: &Ui, vault: &Path) -> bool {
    std::thread::sleep(POLL);
    // To ask for the lock may make its file, which has no place in another directory that lies in that path by now.
    if !vault.join(name::HEADER).exists() {
        return true;
    }
    let locked = lock::lock_out_writers(&ui.policy, vault);
    // One that was mounted again stays locked.
    !matches!(locked, Err(HostError::Locked { .. })) || mounts::of_vault(vault).is_some()
}

/// The kernel is done with a mount; its daemon still commits, and closes the vault.
fn wait_for(ui: &Ui, mount: &Mount, is_done: impl Fn() -> bool) {
    let started = Instant::now();
    let mut hints = PATIENCE.into_iter().zip([|_: &Mount| CLOSING.to_string(), held]).peekable();
    while !is_done() {
        if let Some((_, hint)) = hints.next_if(|(after, _)| started.elapsed() > *after) {
            ui.note(hint(mount));
        }
    }
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
