//! Log events as messages of nbdkit: on standard error, or in the system's log if nbdkit runs in the background.

use crate::abi;
use lamassu_host::slots::is_unsafe;
use std::io::{self, Write};
use std::time::{Duration, Instant};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// How many failed requests are logged in [`SPAN`].
const FAILED_MAX: u32 = 20;
const SPAN: Duration = Duration::from_secs(10);

/// A bound of what is logged about failed requests.
pub struct Bounded {
    /// When the span began.
    since: Option<Instant>,
    logged: u32,
    left_out: u64,
}

impl Bounded {
    pub const fn new() -> Bounded {
        Bounded { since: None, logged: 0, left_out: 0 }
    }

    /// The lines to log for one more that has failed.
    pub fn lines(&mut self, why: &str, now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        if self.since.is_none_or(|since| now.duration_since(since) >= SPAN) {
            let left_out = std::mem::take(&mut self.left_out);
            if left_out > 0 {
                lines.push(format!("{left_out} more requests have failed"));
            }
            (self.since, self.logged) = (Some(now), 0);
        }
        if self.logged < FAILED_MAX {
            self.logged += 1;
            lines.push(why.to_owned());
        } else {
            self.left_out += 1;
        }
        lines
    }
}

struct Messages;

impl MakeWriter<'_> for Messages {
    type Writer = Message;

    fn make_writer(&self) -> Message {
        Message
    }
}

struct Message;

impl Write for Message {
    // One call for one event.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        abi::say(&printable(String::from_utf8_lossy(line).trim_end()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The text as one line, even if it contains a name with line ends.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if is_unsafe(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// Starts logging: warnings and errors, or what `LAMASSU_LOG` asks for, of this program's own code alone.
pub fn start() {
    let filter = EnvFilter::try_from_env("LAMASSU_LOG").unwrap_or_else(|_| EnvFilter::new("off,lamassu=warn"));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(Messages);
    // A second start would belong to a second plugin in this process; the first logger then stays.
    let _ = lines.with_ansi(false).with_target(false).without_time().try_init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_bounded_and_what_is_left_out_is_counted() {
        let (mut bounded, now) = (Bounded::new(), Instant::now());
        let all: Vec<String> = (0..30).flat_map(|n| bounded.lines(&format!("{n}"), now)).collect();
        assert_eq!(all, (0..20).map(|n| n.to_string()).collect::<Vec<_>>());
        assert_eq!(bounded.lines("later", now + SPAN), ["10 more requests have failed", "later"]);
        assert_eq!(bounded.lines("again", now + SPAN), ["again"]);
    }
}
