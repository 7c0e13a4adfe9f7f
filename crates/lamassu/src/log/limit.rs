//! Limits what a mount writes to the log: users can cause any number of failing requests, and the log is the
//! administrator's.
//!
//! One place in the program writes the same warning or error at most [`SAME`] times a minute, and at most [`BURST`]
//! different lines, then one a second. So a flood of one kind does not hide another kind. Lines that are left out are
//! counted, and the counts are written after a minute at most, and when the process ends. Only a process that has left
//! its terminal is limited: commands, and a mount in the foreground, write every line. Never: leaves out key events.

use super::{is_detached, is_integrity_event, is_key_event};
use std::collections::HashMap;
use std::fmt::{Debug, Write};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata};
use tracing_subscriber::layer::{Context, Filter};

/// How often the same line may be written in a minute.
const SAME: u32 = 5;
/// How many different lines of a kind may be written before the limit of one a second.
const BURST: u32 = 60;
const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);
/// Bytes kept of an example of the lines that were left out.
const LIKE_MAX: usize = 400;

static LIMIT: LazyLock<Limit> = LazyLock::new(Limit::default);

/// The lines of one place in the program.
struct LineKind {
    /// How many lines may be written now, and when that was last increased.
    left: u32,
    added: Instant,
    /// How often lines, by their hash, were written since then.
    written: HashMap<u64, u32>,
    since: Instant,
    level: Level,
    repeated: u64,
    others: u64,
    /// An example of those left out.
    like: String,
}

/// Lines of one kind that were left out.
#[derive(Debug, PartialEq, Eq)]
struct LeftOut {
    level: Level,
    repeated: u64,
    others: u64,
    like: String,
}

#[derive(Default)]
struct Limit {
    /// Keyed by the address of the static description of the place.
    kinds: Mutex<HashMap<usize, LineKind>>,
    hash: RandomState,
    /// Signals that a line was left out.
    begun: Condvar,
}

impl LineKind {
    fn new(level: Level, now: Instant) -> Self {
        let (written, like) = (HashMap::new(), String::new());
        LineKind { left: BURST, added: now, written, since: now, level, repeated: 0, others: 0, like }
    }

    /// Whether a line is written.
    fn admits(&mut self, line: u64, now: Instant) -> bool {
        if now.duration_since(self.since) >= MINUTE {
            self.written.clear();
            self.since = now;
        }
        let seconds = now.duration_since(self.added).as_secs().min(BURST.into()) as u32;
        if seconds > 0 {
            self.left = (self.left + seconds).min(BURST);
            self.added = if self.left == BURST { now } else { self.added + SECOND * seconds };
        }
        if self.written.get(&line).is_some_and(|times| *times >= SAME) {
            self.repeated += 1;
            return false;
        }
        if self.left == 0 {
            self.others += 1;
            return false;
        }
        self.left -= 1;
        // Has at most as many entries as lines that may be written in a minute.
        *self.written.entry(line).or_default() += 1;
        true
    }
}

impl Limit {
    fn kinds(&self) -> MutexGuard<'_, HashMap<usize, LineKind>> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admits(&self, kind: usize, level: Level, line: &str, now: Instant) -> bool {
        let mut kinds = self.kinds();
        let kind = kinds.entry(kind).or_insert_with(|| LineKind::new(level, now));
        let admitted = kind.admits(self.hash.hash_one(line), now);
        if !admitted && kind.repeated + kind.others == 1 {
            kind.like = line[..line.floor_char_boundary(LIKE_MAX)].to_owned();
            self.begun.notify_all();
        }
        admitted
    }

    /// Takes the counts of lines left out since the last call.
    fn take(kinds: &mut HashMap<usize, LineKind>) -> Vec<LeftOut> {
        let some = kinds.values_mut().filter(|kind| kind.repeated + kind.others > 0);
        some.map(|kind| LeftOut {
            level: kind.level,
            repeated: std::mem::take(&mut kind.repeated),
            others: std::mem::take(&mut kind.others),
            like: std::mem::take(&mut kind.like),
        })
        .collect()
    }

    /// Waits until a line was left out.
    fn wait(&self) {
        let nothing =
            |kinds: &mut HashMap<usize, LineKind>| kinds.values().all(|kind| kind.repeated + kind.others == 0);
        drop(self.begun.wait_while(self.kinds(), nothing).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Writes the counts of lines that were left out, if there are any.
pub fn tell() {
    let left_out = Limit::take(&mut LIMIT.kinds());
    for LeftOut { level, repeated, others, like } in left_out {
        match level {
            Level::ERROR => tracing::error!(repeated, others, "lines left out like this one: {like}"),
            _ => tracing::warn!(repeated, others, "lines left out like this one: {like}"),
        }
    }
}

/// Starts the thread that writes the counts, for a process that has left its terminal.
pub fn start() {
    let told = std::thread::Builder::new().name("log".into()).spawn(|| {
        loop {
            LIMIT.wait();
            std::thread::sleep(MINUTE);
            tell();
        }
    });
    if let Err(error) = told {
        tracing::warn!(%error, "no thread for the counts of lines left out: they are written when this ends");
    }
}

/// The filter in front of the writer of lines.
pub struct Limited;

impl<S> Filter<S> for Limited {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn callsite_enabled(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::always()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let meta = event.metadata();
        if *meta.level() > Level::WARN || !is_detached() || is_bounded_elsewhere(meta) {
            return true;
        }
        let mut line = Text(String::new());
        event.record(&mut line);
        LIMIT.admits(std::ptr::from_ref(meta).addr(), *meta.level(), line.0.trim(), Instant::now())
    }
}

/// The counts themselves, key events, and integrity events, which have a limit of their own.
fn is_bounded_elsewhere(meta: &Metadata<'_>) -> bool {
    meta.target() == module_path!() || is_key_event(meta) || is_integrity_event(meta)
}

/// The message and the fields of an event.
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?} "),
            name => write!(self.0, "{name}={value:?} "),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two kinds of lines.
    const DAMAGE: usize = 1;
    const NAME: usize = 2;

    fn written<'a>(limit: &Limit, kind: usize, lines: impl IntoIterator<Item = &'a str>, now: Instant) -> usize {
        lines.into_iter().filter(|line| limit.admits(kind, Level::ERROR, line, now)).count()
    }

    #[test]
    fn the_same_line_is_written_some_times_a_minute_and_the_rest_counted() {
        let (limit, now) = (Limit::default(), Instant::now());
        assert_eq!(written(&limit, DAMAGE, ["record a"; 1000], now), SAME as usize);
        // Events of another object, and of another kind, are not limited by it.
        assert_eq!(written(&limit, DAMAGE, ["record b"; 2], now), 2);
        assert_eq!(written(&limit, NAME, ["record a"; 2], now), 2);
        let like = "record a".to_owned();
        let left_out = LeftOut { level: Level::ERROR, repeated: 1000 - u64::from(SAME), others: 0, like };
        assert_eq!(Limit::take(&mut limit.kinds()), [left_out]);
        assert_eq!(Limit::take(&mut limit.kinds()), []);
        assert_eq!(written(&limit, DAMAGE, ["record a"; 9], now + MINUTE), SAME as usize);
        assert_eq!(Limit::take(&mut limit.kinds())[0].repeated, 9 - u64::from(SAME));
    }

    #[test]
    fn different_lines_are_bound_by_the_second_and_none_is_lost_from_the_count() {
        let (limit, start) = (Limit::default(), Instant::now());
        let lines: Vec<_> = (0..10_000).map(|i| format!("record {i}")).collect();
        let (mut count, mut next) = (0, lines.iter().map(String::as_str));
        for tenth in 0..100 {
            let now = start + Duration::from_millis(100) * tenth;
            count += written(&limit, DAMAGE, next.by_ref().take(100), now);
        }
        assert_eq!(count, BURST as usize + 9);
        assert_eq!(written(&limit, NAME, ["another kind"], start), 1);
        let left_out = Limit::take(&mut limit.kinds());
        assert_eq!((left_out.len(), left_out[0].repeated, left_out[0].others), (1, 0, 10_000 - count as u64));
        assert!(limit.kinds()[&DAMAGE].written.len() <= count);
    }
}
