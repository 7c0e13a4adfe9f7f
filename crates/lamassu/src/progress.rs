//! Progress on standard error, once the work has taken a second. On a terminal it is a bar. Elsewhere there is none,
//! since cron would send mail of it, or with `--verbose` a line a minute.

use crate::output::{self, Ui, has_terminal};
use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long nothing is shown.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two lines.
const BETWEEN_LINES: Duration = Duration::from_secs(60);

/// A bar in bytes, or a counter if the total is not known.
pub struct Meter {
    bar: ProgressBar,
    started: Instant,
    allowed: bool,
    shown: AtomicBool,
    what: &'static str,
    lines: Option<Lines>,
}

/// Lines, if there is no terminal.
struct Lines {
    /// Milliseconds after the beginning when the next one is due.
    next_ms: AtomicU64,
}

impl Lines {
    fn new() -> Lines {
        Lines { next_ms: AtomicU64::new(millis(PATIENCE)) }
    }

    /// Whether a line is due at this time after the beginning. If several threads ask, only one gets true.
    fn is_due(&self, elapsed: Duration) -> bool {
        let (now, due) = (millis(elapsed), self.next_ms.load(Ordering::Relaxed));
        let next = now.saturating_add(millis(BETWEEN_LINES));
        now >= due && self.next_ms.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

fn millis(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

impl Meter {
    /// A meter of bytes, labelled `what`.
    pub fn bytes(ui: &Ui, what: &'static str) -> Meter {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        bar.set_style(style("{prefix} {bytes} ({bytes_per_sec}) {wide_msg}"));
        bar.set_prefix(what);
        let lines = (!has_terminal() && ui.verbose > 0 && !ui.quiet).then(Lines::new);
        let allowed = has_terminal() && !ui.quiet;
        Meter { bar, started: Instant::now(), allowed, shown: AtomicBool::new(false), what, lines }
    }

    /// Sets the total, once it is known.
    pub fn set_total(&self, bytes: u64) {
        self.bar.set_style(style("{prefix} [{bar:30}] {bytes}/{total_bytes} ({bytes_per_sec}, {eta} left) {wide_msg}"));
        self.bar.set_length(bytes);
    }

    /// More done.
    pub fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
        self.show_after_a_while();
    }

    fn show_after_a_while(&self) {
        if self.allowed && !self.shown.load(Ordering::Relaxed) && self.started.elapsed() > PATIENCE {
            self.shown.store(true, Ordering::Relaxed);
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        if self.lines.as_ref().is_some_and(|lines| lines.is_due(self.started.elapsed())) {
            output::say(format_args!("{}", self.line()));
        }
    }

    fn line(&self) -> String {
        let done = HumanBytes(self.bar.position());
        match self.bar.length() {
            Some(all) => format!("{} {done} of {}", self.what, HumanBytes(all)),
            None => format!("{} {done}", self.what),
        }
    }

    /// Sets how much is done in all.
    pub fn reach(&self, bytes: u64) {
        self.bar.set_position(bytes);
        self.show_after_a_while();
    }

    /// Shows what is being worked on.
    pub fn set_message(&self, text: String) {
        self.bar.set_message(crate::text::printable(&text));
    }

    /// Prints a line to standard output or error without tearing the bar.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_due_after_a_second_and_then_each_minute() {
        let lines = Lines::new();
        let due = (0..200u64).filter(|second| lines.is_due(Duration::from_secs(*second)));
        assert_eq!(due.collect::<Vec<_>>(), [1, 61, 121, 181]);
    }
}
