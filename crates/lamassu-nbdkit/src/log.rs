//! Log events as messages of nbdkit: on standard error, or in the system's log if nbdkit runs in the background.

use crate::abi;
use lamassu_host::slots::is_unsafe;
use std::io::{self, Write};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

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
