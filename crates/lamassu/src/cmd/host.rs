//! `lamassu host join`: makes this host known to a server that keeps anchors of shared vaults.

use crate::fault::{Context, Fault, Result};
use crate::output::Ui;
use lamassu_host::{Error, JoinToken};
use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use zeroize::Zeroizing;

/// Longest token that is read.
const TOKEN_MAX: u64 = 4096;

const EXAMPLES: &str = "\
Examples:
  lamassu-server enrol /var/lib/lamassu-server node1 | ssh node1 lamassu host join
  lamassu host join token.txt
Then move a vault's anchor to the server, or mount a vault whose anchor is there:
  lamassu anchor move VAULT server://HOST:PORT
  lamassu mount --anchor server://HOST:PORT VAULT DIR";

/// What to do about this host.
#[derive(clap::Subcommand, Debug)]
pub enum HostCommand {
    /// Join a server with a token printed by `lamassu-server enrol`
    Join(Join),
}

/// Options of `host join`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Join {
    /// File with the token [default: standard input]
    file: Option<PathBuf>,
}

pub fn run(ui: &Ui, command: &HostCommand) -> Result<()> {
    let HostCommand::Join(args) = command;
    let line = read(ui, args)?;
    let garbled = |_| Error::Usage("this is no token of `lamassu-server enrol`: it was cut off, or changed");
    let token: JoinToken = line.parse().map_err(garbled)?;
    let joined = ui.policy.anchors.join(&token).map_err(Fault::NotJoined)?;
    ui.note(format_args!("joined {} as {}", joined.server, joined.host));
    if joined.is_replaced {
        ui.warn("this host had joined that server before, and its former identity there is replaced: if that had another name, `lamassu-server host revoke` it");
    }
    Ok(())
}

fn read(ui: &Ui, args: &Join) -> Result<Zeroizing<String>> {
    let mut line = Zeroizing::new(String::new());
    match &args.file {
        // Not repeated in an error: it may still be used.
        Some(path) if path.to_str().is_some_and(|text| text.parse::<JoinToken>().is_ok()) => {
            return Err(Error::Usage(
                "a token was given as an argument, which other users of this machine can see: revoke the host, enrol it again, and give the new token on standard input or in a file",
            )
            .into());
        }
        Some(path) => {
            let local = |source| Error::Local { op: "read", path: path.clone(), source };
            let file = std::fs::File::open(path).map_err(local)?;
            file.take(TOKEN_MAX).read_to_string(&mut line).map_err(local)?;
        }
        None => {
            if std::io::stdin().is_terminal() {
                ui.note("the token, and return:");
                std::io::stdin().read_line(&mut line).context("cannot read the token")?;
            } else {
                let stdin = std::io::stdin().lock();
                stdin.take(TOKEN_MAX).read_to_string(&mut line).context("cannot read the token")?;
            }
        }
    }
    Ok(line)
}
