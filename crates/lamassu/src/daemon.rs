//! Leaving the terminal: the first process waits until the second has mounted, or has failed and printed why.
//!
//! The fork comes before any thread and before any key. The second process asks for the passphrase itself (it is still
//! on the terminal then), so no secret crosses a process boundary, and its exit code becomes that of the first.

use crate::exit::Code;
use crate::fault::{Context, Fault, Result};
use crate::log;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, WaitOptions, waitpid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::os::fd::OwnedFd;

/// Which of the two processes this is.
pub enum Side {
    Parent(Waiter),
    Child(Ready),
}

/// The first process's end.
pub struct Waiter {
    child: Pid,
    pipe: OwnedFd,
}

/// The second process's end. If it is dropped without [`Ready::tell`], that means failure.
pub struct Ready {
    pipe: OwnedFd,
}

/// Forks. Only while the process has a single thread.
pub fn fork() -> Result<Side> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).context("cannot make a pipe")?;
    // SAFETY: the process has one thread (commands that fork start none before), so the child finds no lock held by a
    // thread that is not there.
    match unsafe { libc::fork() } {
        0 => {
            drop(read);
            Ok(Side::Child(Ready { pipe: write }))
        }
        pid => match Pid::from_raw(pid) {
            Some(child) if pid > 0 => {
                drop(write);
                Ok(Side::Parent(Waiter { child, pipe: read }))
            }
            Some(_) | None => Err(std::io::Error::last_os_error()).context("cannot start the mount process"),
        },
    }
}

impl Waiter {
    /// Waits until the mount is usable or the second process has ended; its exit code. It has printed its own message.
    pub fn wait(self) -> Result<Code> {
        let pid = self.child.as_raw_nonzero().get();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            let forward = move || {
                // SAFETY: a plain system call. The pid is our child's until it is waited for below, after which this
                // process ends.
                let _ = unsafe { libc::kill(pid, signal) };
            };
            // SAFETY: the handler calls kill(2) alone, which is async-signal-safe.
            unsafe { signal_hook::low_level::register(signal, forward) }.context("cannot forward signals")?;
        }
        let mut byte = [0u8; 1];
        let told = loop {
            match rustix::io::read(&self.pipe, &mut byte) {
                Err(Errno::INTR) => {}
                Ok(n) => break n == 1,
                Err(_) => break false,
            }
        };
        if told {
            return Ok(Code::Done);
        }
        loop {
            match waitpid(Some(self.child), WaitOptions::empty()) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait for the mount process"),
                Ok(None) => {}
                Ok(Some((_, status))) => {
                    return match (status.exit_status(), status.terminating_signal()) {
                        // It ended without error before it could tell: it was unmounted at once.
                        (Some(number), _) => Ok(Code::from_number(number)),
                        (None, signal) => Err(Fault::DaemonKilled { signal: signal.unwrap_or(0) }.into()),
                    };
                }
            }
        }
    }
}

impl Ready {
    /// Leaves the terminal and tells the first process that all is well.
    pub fn tell(self) -> Result<()> {
        rustix::process::setsid().context("cannot leave the terminal")?;
        rustix::process::chdir("/").context("cannot leave the working directory")?;
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .context("cannot open /dev/null")?;
        log::detach();
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        rustix::stdio::dup2_stderr(&null)?;
        // The first process may have been killed; the mount works nevertheless.
        let _ = rustix::io::write(&self.pipe, &[1]);
        Ok(())
    }
}
