//! The mount's end: gives waiting events to the broker together, and waits for its answer before the next call.

use super::{Answer, Call, receive, send};
use lamassu_vault::event::{IntegrityEvent, IntegritySink, TARGET};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How long writing a frame may take. A busy broker reads nothing, and the socket holds some frames.
const SEND_MAX: Duration = Duration::from_secs(15);
const SEND_MAX_AT_THE_END: Duration = Duration::from_secs(1);
const BETWEEN_FAILURES: Duration = Duration::from_secs(1);
/// How often it is checked whether the process ends.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Makes a broker run the command.
pub struct CommandSink {
    broker: Mutex<UnixStream>,
    is_ending: AtomicBool,
    /// Whether the end of the process waits for the command.
    is_waited_for: bool,
    failures: AtomicU64,
}

impl CommandSink {
    pub fn new(broker: UnixStream) -> CommandSink {
        let (is_ending, failures) = (AtomicBool::new(false), AtomicU64::new(0));
        CommandSink { broker: Mutex::new(broker), is_ending, is_waited_for: false, failures }
    }

    /// A sink for which the end of the process waits for the command, so that its failure is reported.
    pub fn that_is_waited_for(broker: UnixStream) -> CommandSink {
        CommandSink { is_waited_for: true, ..CommandSink::new(broker) }
    }

    /// Sends a call, and returns the broker's answer.
    fn run(&self, call: &Call) -> io::Result<Answer> {
        let mut broker = self.broker.lock().unwrap_or_else(PoisonError::into_inner);
        let is_ending = || self.is_ending.load(Ordering::Acquire);
        broker.set_write_timeout(Some(if is_ending() { SEND_MAX_AT_THE_END } else { SEND_MAX }))?;
        send(&mut *broker, call)?;
        while !is_ending() {
            let mut fds = [PollFd::new(&*broker, PollFlags::IN)];
            match poll(&mut fds, Some(&LOOK)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => {
                    return receive(&mut *broker);
                }
                Err(error) => return Err(error.into()),
            }
        }
        // The broker runs it, and no process is left to get the result.
        Ok(Answer { failure: None })
    }

    fn tell_failure(&self, events: usize, error: &dyn std::fmt::Display) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        tracing::error!(target: TARGET, events, %error, "the command of --on-integrity-failure failed");
    }
}

impl IntegritySink for CommandSink {
    fn deliver(&self, events: &[IntegrityEvent], lost: u64) {
        let mut kinds: Vec<&str> = Vec::new();
        for word in events.iter().map(|event| event.what.word()) {
            if !kinds.contains(&word) {
                kinds.push(word);
            }
        }
        let input = match events {
            [one] => serde_json::to_string(one),
            events => serde_json::to_string(events),
        };
        let call = |input| Call { kinds: kinds.join(","), lost, input };
        match input.map_err(io::Error::from).and_then(|input| self.run(&call(input))) {
            Ok(Answer { failure: None }) => {}
            Ok(Answer { failure: Some(failure) }) => self.tell_failure(events.len(), &failure),
            Err(error) => {
                self.tell_failure(events.len(), &format!("its process does not answer: {error}"));
                // A broker that is gone takes no time, and fails each time.
                if !self.is_ending.load(Ordering::Acquire) {
                    std::thread::sleep(BETWEEN_FAILURES);
                }
            }
        }
    }

    fn end(&self) {
        self.is_ending.store(!self.is_waited_for, Ordering::Release);
    }

    fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}
