//! `--on-integrity-failure`: a command that gets integrity events.
//!
//! The process that serves a mount must not run programs ([`crate::confine`]), so a small process does, the *broker*:
//! this program started anew, before any key is loaded, with a socket to its parent as standard input and nothing else
//! open. Other processes cannot reach it. It has at most the environment of a login, and no key. The two exchange
//! frames of JSON: a [`Call`] to the broker, an [`Answer`] back.

mod broker;
mod command;
mod told;

pub use broker::serve;
pub use command::CommandSink;
pub use told::{AlertArg, Told, tell_refusal};

use crate::fault::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The argument that makes a process of this program a broker. Another caller gains nothing by it: the broker would
/// only run that caller's own command.
pub const WORD: &str = "__integrity-broker";
/// The command, only in the environment of the broker.
const COMMAND: &str = "LAMASSU_ALERT_COMMAND";
const MOUNTPOINT: &str = "LAMASSU_MOUNTPOINT";
const VAULT: &str = "LAMASSU_VAULT";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The variables that are kept of the environment.
const KEPT: [&str; 3] = ["HOME", "USER", "LOGNAME"];
/// The longest frame; events of a batch take less.
const FRAME_MAX: usize = 16 << 20;

/// One start of the command.
#[derive(Serialize, Deserialize)]
struct Call {
    /// words of the kinds of events, separated by commas
    kinds: String,
    /// events that had no room in the queue
    lost: u64,
    /// its standard input
    input: String,
}

/// The outcome.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    /// `None`: it succeeded
    failure: Option<String>,
}

/// Starts a broker, which ends by itself when its socket is closed. To be called before the process has keys, and
/// before it gives up rights: the command has the rights of the user who started the process.
pub fn start_broker(command: &str, vault: &Path, mountpoint: Option<&Path>) -> Result<UnixStream> {
    const WHAT: &str = "cannot start the process that runs the command of --on-integrity-failure";
    let (ours, theirs) = UnixStream::pair().context(WHAT)?;
    let kept = KEPT.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
    Command::new("/proc/self/exe")
        .arg0("lamassu")
        .arg(WORD)
        .env_clear()
        .envs(kept)
        .envs([("PATH", OsStr::new(PATH)), (COMMAND, command.as_ref()), (VAULT, vault.as_os_str())])
        .envs(mountpoint.map(|mountpoint| (MOUNTPOINT, mountpoint.as_os_str())))
        .current_dir("/")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context(WHAT)?;
    Ok(ours)
}

/// Writes a frame: its length in four bytes, little-endian, and JSON.
fn send(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(value)?;
    let len = u32::try_from(text.len()).map_err(io::Error::other)?;
    to.write_all(&[&len.to_le_bytes()[..], &text].concat())
}

/// Reads a frame.
fn receive<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > FRAME_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; len];
    from.read_exact(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}
