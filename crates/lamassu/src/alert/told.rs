//! Integrity events of commands that end by themselves, `check` and `scrub`: where they go, and that they arrive.

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

/// How long the end waits for the command: for one that hangs, and for one more.
const LAST_EVENTS: Duration = Duration::from_secs(30);

/// The option.
#[derive(clap::Args, Debug)]
pub struct AlertArg {
    /// Have /bin/sh run this command when something in the store is not as it was written; it reads the event as JSON
    /// (docs/alerts.md). It is waited for, 30 s at most
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
    /// Events of a command on the vault in `dir`. Before the process has keys.
    pub fn start(arg: &AlertArg, dir: &Path, found_by: FoundBy) -> Result<Told> {
        let events = match &arg.on_integrity_failure {
            Some(command) => {
                // It runs in another directory.
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

    /// The command is done. Delivers what waits, which a reader of the results need not wait for.
    pub fn end<T>(self, done: Result<T>) -> Result<T> {
        if let Err(error) = &done {
            tell_refusal(&self.events, &self.dir, self.found_by, error);
        }
        self.events.end(LAST_EVENTS);
        done
    }
}

/// A vault that is refused since it is not the newest is an event, too: of the vault as a whole.
pub fn tell_refusal(events: &Events, dir: &Path, found_by: FoundBy, error: &Error) {
    let Fault::Host(host) = error.fault() else { return };
    if FaultKind::from(host) != FaultKind::Stale {
        return;
    }
    let event = IntegrityKind::Stale.at("", error.message()).by(found_by);
    match header_file::read::<VaultHeader>(&dir.join(name::HEADER)) {
        Ok(header) => events.of_vault(&header.id()).found(event),
        Err(_) => events.found(event),
    }
}
