//! Integrity events of the commands `check` and `scrub`: where they go, and waiting until they have arrived.

use super::{CommandSink, start_broker};
use crate::fault::{Context, Error, Fault, Result};
use lamassu_format::header::VaultHeader;
use lamassu_format::name;
use lamassu_host::FaultKind;
use lamassu_keys::header_file;
use lamassu_vault::event::{Events, FoundBy, IntegrityKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How long the end waits for the command: enough for one that hangs and another one.
const LAST_EVENTS: Duration = Duration::from_secs(30);

/// The option.
#[derive(clap::Args, Debug)]
pub struct AlertArg {
    /// Run this command with /bin/sh when something in the store is not as it was written. The command reads the event
    /// as JSON (docs/alerts.md); Lamassu waits for it for 30 s at most
    #[arg(long, value_name = "COMMAND")]
    on_integrity_failure: Option<String>,
}

/// Where the events of a command go.
pub struct Told {
    events: Events,
    found_by: FoundBy,
    dir: PathBuf,
}

impl Told {
    /// Events of a command on the vault in `dir`. To be called before the process has keys.
    pub fn start(arg: &AlertArg, dir: &Path, found_by: FoundBy) -> Result<Told> {
        let events = match &arg.on_integrity_failure {
            Some(command) => {
                // The broker runs in another directory.
                let dir = std::path::absolute(dir).context("cannot tell where the vault lies")?;
                let broker = start_broker(command, &dir, None)?;
                Events::with_sink(Arc::new(CommandSink::that_is_waited_for(broker)))?
            }
            None => Events::default(),
        };
        Ok(Told { events, found_by, dir: dir.to_owned() })
    }

    pub fn events(&self) -> &Events {
        &self.events
    }

    /// The command is done. Delivers waiting events, after the results are printed.
    pub fn end<T>(self, done: Result<T>) -> Result<T> {
        if let Err(error) = &done {
            tell_refusal(&self.events, &self.dir, self.found_by, error);
        }
        self.events.end(LAST_EVENTS);
        done
    }
}

/// Reports a vault that is refused because it is not the newest: an event about the vault as a whole.
pub fn tell_refusal(events: &Events, dir: &Path, found_by: FoundBy, error: &Error) {
    let Fault::Host(host) = error.fault() else { return };
    if FaultKind::from(host) != FaultKind::Stale {
        return;
    }
    let event = IntegrityKind::Stale.at("", error.message()).by(found_by);
    match header_file::read::<VaultHeader>(&dir.join(name::HEADER)) {
        Ok(header) => events.of_vault(&header.id()).found(event),
        Err(_) => events.found(event),
    };
}
