//! The broker: runs one command at a time, limits how long it may run, and starts at most one a second.
//!
//! When the mount's process is gone, it finishes what it was given, and ends.

use super::{Answer, COMMAND, Call, receive, send};
use crate::exit::Code;
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal};
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long a command may run.
const RUN_MAX: Duration = Duration::from_secs(10);
/// Between two starts.
const BETWEEN_STARTS: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(10);

/// Runs the broker in this process.
pub fn serve() -> Code {
    close_all_others();
    // Signals of the terminal are for the mount, which ends in good order.
    let _ = rustix::process::setsid();
    let Ok(socket) = io::stdin().as_fd().try_clone_to_owned() else { return Code::Usage };
    let (mut socket, Some(command)) = (UnixStream::from(socket), std::env::var_os(COMMAND)) else {
        return Code::Usage;
    };
    while let Ok(call) = receive::<Call>(&mut socket) {
        let started = Instant::now();
        let failure = run(&command, &call).err().map(|error| error.to_string());
        std::thread::sleep(BETWEEN_STARTS.saturating_sub(started.elapsed()));
        // If the daemon no longer listens, calls that it has sent are still read.
        let _ = send(&mut socket, &Answer { failure });
    }
    Code::Done
}

/// Descriptors that the mounting process inherited must stay with it: the key may be read from one of them.
fn close_all_others() {
    let listed = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    for number in numbers.collect::<Vec<_>>().into_iter().filter(|number| *number > 2) {
        // SAFETY: the process has just begun, has one thread, and has opened nothing that it still holds.
        unsafe { libc::close(number) };
    }
}

fn run(command: &std::ffi::OsStr, call: &Call) -> io::Result<()> {
    let mut shell = Command::new("/bin/sh");
    shell
        .arg("-c")
        .arg(command)
        .env_remove(COMMAND)
        .env("LAMASSU_EVENT_KIND", &call.kinds)
        .env("LAMASSU_EVENTS_LOST", call.lost.to_string())
        .stdin(Stdio::from(file_of(&call.input)?))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // A process group of its own, so that its child processes are ended with it.
        .process_group(0);
    // SAFETY: between fork and exec one system call is made, prctl(2), and no memory is allocated.
    unsafe { shell.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)) };
    let mut child = shell.spawn().map_err(|error| io::Error::new(error.kind(), format!("cannot start: {error}")))?;
    match wait(&mut child)? {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(io::Error::other(status.to_string())),
        None => {
            if let Some(group) = Pid::from_raw(child.id() as i32) {
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
            }
            let _ = child.kill();
            child.wait()?;
            Err(io::Error::other(format!("killed after {} s", RUN_MAX.as_secs())))
        }
    }
}

/// `None`: it still runs.
fn wait(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let until = Instant::now() + RUN_MAX;
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(Some(status)),
            None if Instant::now() >= until => return Ok(None),
            None => std::thread::sleep(POLL),
        }
    }
}

/// A text as a file, so that a command that does not read its input blocks nothing.
fn file_of(text: &str) -> io::Result<OwnedFd> {
    let mut file = File::from(rustix::fs::memfd_create("event", MemfdFlags::CLOEXEC)?);
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call() -> Call {
        Call { kinds: "name".into(), lost: 3, input: "[1]".into() }
    }

    #[test]
    fn a_command_has_its_input_and_its_failure_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let line = format!("cat > {0}; echo \" $LAMASSU_EVENT_KIND $LAMASSU_EVENTS_LOST\" >> {0}", out.display());
        run(line.as_ref(), &call()).unwrap();
        assert_eq!(std::fs::read_to_string(&out).unwrap(), "[1] name 3\n");
        assert_eq!(run("exit 7".as_ref(), &call()).unwrap_err().to_string(), "exit status: 7");
    }

    #[test]
    fn frames_have_an_end_and_a_greatest_length() {
        let mut bytes = Vec::new();
        send(&mut bytes, &call()).unwrap();
        send(&mut bytes, &call()).unwrap();
        let mut from = &bytes[..];
        assert_eq!(receive::<Call>(&mut from).unwrap().lost, 3);
        assert_eq!(receive::<Call>(&mut &from[..from.len() - 1]).err().unwrap().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(receive::<Call>(&mut from).unwrap().input, "[1]");
        assert!(receive::<Call>(&mut from).is_err());
        assert!(receive::<Call>(&mut &[0xff; 64][..]).is_err());
    }
}
