//! Logs: to standard error, to a file, and, once a mount has left its terminal, to syslog, so that integrity errors
//! reach the administrator. Key events (target `lamassu::key`) go to syslog from every command. `LAMASSU_SYSLOG` names
//! another socket than /dev/log. Integrity events go to the journal instead if there is one, with their fields. Those
//! that a command prints itself (`check`, `scrub`) go there if there is no terminal, and never to standard error.
//!
//! This module decides where a line goes: [`Log::line`] and [`journal::takes_events`].

mod journal;
pub mod limit;
mod socket;

use self::journal::Journal;
use self::limit::Limited;
use self::socket::Socket;
use crate::fault::Result;
use crate::output::{Ui, has_terminal};
use crate::text::printable;
use lamassu_host::Error as HostError;
use lamassu_vault::event::{TARGET, TARGET_PRINTED};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use tracing::{Level, Metadata};
use tracing_subscriber::filter::{FilterExt, LevelFilter, filter_fn};
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Whether the process has left its terminal.
static DETACHED: AtomicBool = AtomicBool::new(false);
/// Made by [`connect`], or at the first message.
static SYSLOG: OnceLock<Option<Socket>> = OnceLock::new();

/// Starts logging. `LAMASSU_LOG` overrules `--verbose` with a filter in the syntax of `tracing_subscriber::EnvFilter`.
pub fn start(ui: &Ui, file: Option<&Path>) -> Result<()> {
    let level = match (ui.quiet, ui.verbose) {
        (true, _) => "warn",
        (false, 0) => "warn",
        (false, 1) => "info",
        (false, 2) => "debug",
        (false, _) => "trace",
    };
    let filter = EnvFilter::try_from_env("LAMASSU_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let open = |path: &Path| {
        File::options().append(true).create(true).open(path).map_err(|source| HostError::Local {
            op: "open log file",
            path: path.into(),
            source,
        })
    };
    let file = file.map(open).transpose()?.map(Arc::new);
    let timed = file.is_some();
    let lines = fmt::layer().with_ansi(false).with_target(ui.verbose > 1).with_writer(Log { file });
    let lines = match timed {
        true => lines.boxed(),
        // syslog has its own clock, and a person at a terminal knows the time.
        false => lines.without_time().boxed(),
    };
    // Key events go to syslog whatever the filter.
    let keys =
        fmt::layer().with_ansi(false).with_target(false).without_time().with_writer(|| Line::Syslog(Level::INFO));
    let keys = keys.with_filter(filter_fn(is_key_event).with_max_level_hint(LevelFilter::INFO));
    let lines = lines.with_filter(filter.and(Limited));
    // As key events do, whatever the filter.
    let only = filter_fn(is_integrity_event).with_max_level_hint(LevelFilter::WARN);
    let journal = (!timed).then(|| Journal.with_filter(only));
    let layers = tracing_subscriber::registry().with(lines).with(keys).with(journal);
    let started = layers.with(filter_fn(is_fit_for_a_log)).try_init();
    // A second start can only be a bug; the first logger then stays.
    debug_assert!(started.is_ok());
    Ok(())
}

/// With a filter for everything, libraries log the data that pass through them: bodies of answers, which hold keys, and
/// names of files. No filter that a user sets enables that. The S3 library logs documents of clients as errors: none of
/// its lines is let through.
fn is_fit_for_a_log(event: &Metadata<'_>) -> bool {
    let target = event.target();
    target.starts_with("lamassu")
        || (*event.level() <= Level::INFO && !matches!(target.split("::").next(), Some("s3s")))
}

/// Whether it is a change of keys: see `lamassu_keys::history`.
pub fn is_key_event(event: &Metadata<'_>) -> bool {
    event.target() == "lamassu::key" && *event.level() <= Level::INFO
}

/// Whether it is an integrity event: see `lamassu_vault::event`, which limits their number.
pub fn is_integrity_event(event: &Metadata<'_>) -> bool {
    (event.target() == TARGET || is_printed(event)) && *event.level() <= Level::WARN
}

/// Whether it is an integrity event that the command prints itself.
pub fn is_printed(event: &Metadata<'_>) -> bool {
    event.target() == TARGET_PRINTED
}

/// Connects to the system's logs before the process is confined; not needed with `--log-file`.
pub fn connect() {
    let _ = (syslog(), journal::socket());
}

/// The process has left its terminal: from now on standard error leads nowhere, and users of the mount cause most
/// lines.
pub fn detach() {
    DETACHED.store(true, Ordering::Release);
    limit::start();
}

pub fn is_detached() -> bool {
    DETACHED.load(Ordering::Acquire)
}

struct Log {
    file: Option<Arc<File>>,
}

/// Where one event goes. `tracing_subscriber` writes each event with a single call.
enum Line {
    File(Arc<File>),
    Stderr,
    Syslog(Level),
    /// syslog or the journal gets it
    Nowhere,
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        self.line(Level::INFO)
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Line {
        match self.line(*meta.level()) {
            Line::Syslog(_) if is_key_event(meta) => Line::Nowhere,
            Line::Syslog(_) | Line::Stderr if is_integrity_event(meta) && journal::takes_events(meta) => Line::Nowhere,
            Line::Stderr if is_printed(meta) => match has_terminal() {
                true => Line::Nowhere,
                false => Line::Syslog(*meta.level()),
            },
            line => line,
        }
    }
}

impl Log {
    fn line(&self, level: Level) -> Line {
        match &self.file {
            Some(file) => Line::File(file.clone()),
            None if is_detached() => Line::Syslog(level),
            None => Line::Stderr,
        }
    }
}

impl Write for Line {
    /// An event becomes one line, whatever names it quotes.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let line = printable(String::from_utf8_lossy(text).trim_end_matches('\n'));
        match self {
            Line::File(file) => (&**file).write_all((line + "\n").as_bytes())?,
            Line::Stderr => io::stderr().write_all((line + "\n").as_bytes())?,
            Line::Syslog(level) => to_syslog(*level, &line),
            Line::Nowhere => {}
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One datagram to /dev/log, in the form of syslog(3). Without a listener it is lost: a daemon has no other place for
/// it.
fn to_syslog(level: Level, text: &str) {
    const FACILITY_DAEMON: u8 = 3 << 3;
    let Some(socket) = syslog() else { return };
    let severity = match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    };
    let line = format!("<{}>lamassu[{}]: {}", FACILITY_DAEMON | severity, std::process::id(), text.trim());
    socket.send(line.as_bytes());
}

fn syslog() -> Option<&'static Socket> {
    let place = || std::env::var_os("LAMASSU_SYSLOG").unwrap_or_else(|| "/dev/log".into());
    SYSLOG.get_or_init(|| Socket::to(place().into())).as_ref()
}
