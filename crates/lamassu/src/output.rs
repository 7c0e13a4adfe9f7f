//! The output of this program: results to standard output, everything else to standard error.
//!
//! Each message to standard error is one line, whatever names it quotes: the only function that writes it escapes
//! everything else.

use crate::fault::{Error, Fault, Result};
use lamassu_host::Error as HostError;
use lamassu_host::Policy;
use lamassu_host::anchors::Choice;
use serde::Serialize;
use std::io::{self, IsTerminal, Write};

/// What every command gets: the verbosity, and the policy for opening vaults.
#[derive(Clone, Debug, Default)]
pub struct Ui {
    /// errors only
    pub quiet: bool,
    /// 0: warnings, 1: what is being done, 2: debug, 3: trace
    pub verbose: u8,
    /// what vaults are opened with
    pub policy: Policy,
}

impl Ui {
    /// The same without the anchor, for commands that show the store as it is, newest or not.
    pub fn without_anchor(&self) -> Ui {
        let anchors = self.policy.anchors.clone().chosen(Choice::Unverified);
        Ui { policy: self.policy.clone().anchored_by(anchors), ..self.clone() }
    }

    /// Prints a note; not with `--quiet`.
    pub fn note(&self, text: impl std::fmt::Display) {
        if !self.quiet {
            say(format_args!("{text}"));
        }
    }

    /// Prints a warning about something that does not stop the work, even with `--quiet`.
    pub fn warn(&self, text: impl std::fmt::Display) {
        say(format_args!("lamassu: warning: {text}"));
    }

    /// Prints a detail, only with `--verbose`.
    pub fn detail(&self, text: impl std::fmt::Display) {
        if self.verbose > 0 && !self.quiet {
            say(format_args!("{text}"));
        }
    }
}

/// Prints one line to standard error, whatever the text contains. If standard error is closed, the line is lost.
pub fn say(text: std::fmt::Arguments<'_>) {
    let line = crate::text::printable(&text.to_string()) + "\n";
    let _ = io::stderr().lock().write_all(line.as_bytes());
}

/// Prints the message of a failed command.
pub fn say_error(error: &Error) {
    say(format_args!("lamassu: {}", message(error)));
}

/// An error and its causes in one line, each once.
pub fn message(error: &Error) -> String {
    error.message()
}

/// Prints a text to standard output.
pub fn print(text: impl std::fmt::Display) -> Result<()> {
    let mut out = io::stdout().lock();
    written(writeln!(out, "{text}").and_then(|()| out.flush()))
}

/// Prints bytes to standard output.
pub fn print_bytes(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    written(out.write_all(bytes).and_then(|()| out.flush()))
}

/// Prints one JSON document to standard output.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    print(serde_json::to_string_pretty(value)?)
}

/// A reader that has seen enough (`| head`) ends the program quietly.
fn written(result: io::Result<()>) -> Result<()> {
    match result {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(Fault::ReaderGone.into()),
        Err(source) => Err(HostError::Local { op: "write to", path: "standard output".into(), source }.into()),
    }
}

/// A name for people: at a terminal, characters that would move the cursor are escaped.
pub fn shown(name: &std::ffi::OsStr) -> String {
    use std::os::unix::ffi::OsStrExt;
    if !io::stdout().is_terminal() {
        return name.to_string_lossy().into_owned();
    }
    crate::text::printable(&String::from_utf8_lossy(name.as_bytes()))
}

/// Whether progress can be shown.
pub fn has_terminal() -> bool {
    io::stderr().is_terminal()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_no_failure() {
        let gone = written(Err(io::ErrorKind::BrokenPipe.into())).unwrap_err();
        assert_eq!(crate::exit::code_of(&gone), crate::exit::Code::Done);
        assert!(written(Err(io::ErrorKind::StorageFull.into())).is_err());
    }
}
