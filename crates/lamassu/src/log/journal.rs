//! Integrity events in the systemd journal, field by field, in its native protocol
//! (https://systemd.io/JOURNAL_NATIVE_PROTOCOL): `journalctl LAMASSU_KIND=block-hash`.
//!
//! Implemented here, like the datagrams to syslog: crates for it connect to a fixed socket, which tests cannot replace,
//! and it takes thirty lines. Events that the journal does not take go to syslog.

use super::socket::Socket;
use super::{is_detached, is_printed, to_syslog};
use crate::output::has_terminal;
use crate::text::printable;
use std::fmt::{Debug, Write};
use std::os::linux::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

const PLACE: &str = "/run/systemd/journal/socket";

static JOURNAL: OnceLock<Option<Socket>> = OnceLock::new();
static IS_STDERR: OnceLock<bool> = OnceLock::new();

/// Whether integrity events go to the journal: if there is one, and standard error leads to it, or nowhere. Findings
/// that a command prints itself go there if there is no terminal.
pub fn takes_events(meta: &Metadata<'_>) -> bool {
    let is_wanted = match is_printed(meta) {
        true => !has_terminal(),
        false => is_detached() || *IS_STDERR.get_or_init(is_stderr),
    };
    is_wanted && socket().is_some()
}

/// Connects, if there is a journal. `LAMASSU_JOURNAL` names another socket. If only another syslog is named, that gets
/// everything.
pub fn socket() -> Option<&'static Socket> {
    let connect = || {
        let place = match std::env::var_os("LAMASSU_JOURNAL") {
            Some(place) => PathBuf::from(place),
            None if std::env::var_os("LAMASSU_SYSLOG").is_some() => return None,
            None => PLACE.into(),
        };
        Socket::to(place).filter(Socket::is_connected)
    };
    JOURNAL.get_or_init(connect).as_ref()
}

/// Whether standard error is the journal. systemd tells its services: JOURNAL_STREAM is device and inode.
fn is_stderr() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stderr) = std::fs::metadata("/proc/self/fd/2") else { return false };
    stream == format!("{}:{}", stderr.st_dev(), stderr.st_ino())
}

/// The layer that writes integrity events to the journal.
pub struct Journal;

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if !takes_events(event.metadata()) {
            return;
        }
        let level = *event.metadata().level();
        let mut fields = Fields::default();
        event.record(&mut fields);
        if !socket().is_some_and(|socket| socket.send(fields.message(level).as_bytes())) {
            to_syslog(level, &fields.line());
        }
    }
}

/// The message and the fields of an event. No value has a line break, so that none makes a field of its own.
#[derive(Default)]
struct Fields {
    text: String,
    values: Vec<(&'static str, String)>,
}

impl Fields {
    fn message(&self, level: Level) -> String {
        let priority = if level == Level::ERROR { 3 } else { 4 };
        let mut out = format!("MESSAGE={}\nPRIORITY={priority}\nSYSLOG_IDENTIFIER=lamassu\n", self.line());
        let _ = writeln!(out, "SYSLOG_FACILITY=3\nSYSLOG_PID={}", std::process::id());
        for (name, value) in &self.values {
            let _ = writeln!(out, "LAMASSU_{}={value}", name.to_uppercase());
        }
        out
    }

    /// The line for people, who see only the message.
    fn line(&self) -> String {
        let shown = self.values.iter().map(|(name, value)| format!(" {name}={value}"));
        format!("{}{}", self.text, shown.collect::<String>())
    }

    fn add(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.text = printable(value),
            name => self.values.push((name, printable(value))),
        }
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, &format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_makes_no_field_of_its_own() {
        let values = vec![("stored", printable("a\nPRIORITY=0")), ("inode", "7".into())];
        let message = Fields { text: "damaged block".into(), values }.message(Level::ERROR);
        let names: Vec<_> = message.lines().map(|line| line.split_once('=').unwrap().0).collect();
        let expected = ["MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "SYSLOG_FACILITY", "SYSLOG_PID"];
        assert_eq!(names[..5], expected);
        assert_eq!(names[5..], ["LAMASSU_STORED", "LAMASSU_INODE"]);
        assert!(message.contains("PRIORITY=3\n") && message.contains("LAMASSU_INODE=7\n"), "{message}");
    }
}
