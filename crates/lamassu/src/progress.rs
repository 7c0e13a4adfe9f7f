//! Progress on standard error: only on a terminal, and only once the work has taken a second.

use crate::output::{Ui, has_terminal};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a person waits without wondering.
const PATIENCE: Duration = Duration::from_secs(1);

/// A bar in bytes, or a counter where the end is not known.
pub struct Meter {
    bar: ProgressBar,
    started: Instant,
    allowed: bool,
    shown: AtomicBool,
}

impl Meter {
    /// A meter of bytes; `what` stands before it.
    pub fn bytes(ui: &Ui, what: &'static str) -> Meter {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        bar.set_style(style("{prefix} {bytes} ({bytes_per_sec}) {wide_msg}"));
        bar.set_prefix(what);
        Meter { bar, started: Instant::now(), allowed: has_terminal() && !ui.quiet, shown: AtomicBool::new(false) }
    }

    /// Now the end is known.
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
    }

    /// So much is done in all.
    pub fn reach(&self, bytes: u64) {
        self.bar.set_position(bytes);
        self.show_after_a_while();
    }

    /// What is being worked on.
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
