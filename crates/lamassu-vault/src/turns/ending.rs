//! The end of a turn, while the kernel still has pages of it, and asks for more.
//!
//! Programs that read on and on would hold up the end for ever. So after a while the kernel's reads wait for the next
//! turn. Their pages are locked and hold nothing of this turn. But dropping a page waits for its lock. So what these
//! reads have locked is left out when their file is dropped; and while a file is dropped, reads of it that come
//! meanwhile are answered, since the kernel may have reached their pages, and the file is dropped once more. A program
//! whose read waits asks for nothing more, so this ends.

use super::share::SHARE;
use super::{Need, Pages, Phase, State, Turns, Waiting};
use crate::Ino;
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long reads of pages are answered although only they hold up the end of a turn.
const HOLD_AFTER: Duration = SHARE;
/// Before files are dropped again: programs that run at this moment ask for their next pages, and then wait.
const PAUSE: Duration = Duration::from_millis(2);
/// A file that is dropped for longer than this may wait for a read that is held back, in a way not foreseen here. Then
/// reads are answered until it is dropped.
pub(super) const STUCK: Duration = Duration::from_secs(1);

/// What is under way at the end of a turn.
#[derive(Default)]
pub(super) struct Ending {
    /// From when on reads of pages are held back.
    holds_from: Option<Instant>,
    /// The file that is being dropped, and since when.
    dropping: Option<(Ino, Instant)>,
}

impl Ending {
    fn holds(&self, now: Instant) -> bool {
        self.holds_from.is_some_and(|from| now >= from)
    }

    /// When reads that are held back will be answered after all.
    pub fn stuck_from(&self) -> Option<Instant> {
        self.dropping.map(|(_, since)| since + STUCK)
    }

    /// Whether a request waits for the next turn although only the end of this one waits for it.
    pub fn holds_back(&self, need: Need) -> bool {
        let (Pages::Read { of, .. } | Pages::Resized(of)) = need.pages else { return false };
        let now = Instant::now();
        let is_admitted = self.dropping.is_some_and(|(ino, since)| ino == of || now >= since + STUCK);
        self.holds(now) && !is_admitted
    }

    /// The same for one that waits already.
    pub fn holds_back_waiting(&self, waiting: &Waiting) -> bool {
        let is_left_out = waiting.is_left_out && self.stuck_from().is_some_and(|stuck| Instant::now() < stuck);
        is_left_out || self.holds_back(waiting.need)
    }
}

impl State {
    /// Begins to drop a file; returns what of it must be dropped now.
    fn begin_drop(&mut self, ino: Ino) -> Vec<Range<u64>> {
        // First: what is read from here on may stay.
        if let Some(has_pages) = self.filled.get_mut(&ino) {
            *has_pages = false;
        }
        let now = Instant::now();
        let mut locked = Vec::new();
        if self.ending.holds(now) {
            for waiting in &mut self.waiting {
                if let Pages::Read { of, from, to } = waiting.need.pages
                    && of == ino
                {
                    waiting.is_left_out = true;
                    locked.push(from..to);
                }
            }
        }
        self.ending.dropping = Some((ino, now));
        all_but(locked)
    }

    fn end_drop(&mut self) {
        self.ending.dropping = None;
        self.waiting.iter_mut().for_each(|waiting| waiting.is_left_out = false);
    }

    /// Whether a request of another kind is under way, or can be carried out.
    fn has_callers(&self) -> bool {
        self.callers > 0 || self.ready().any(|at| !self.waiting[at].need.is_of_pages())
    }
}

/// The bytes of a file that are in none of these ranges.
fn all_but(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let (mut rest, mut from) = (Vec::new(), 0);
    for range in ranges {
        if range.start > from {
            rest.push(from..range.start);
        }
        from = from.max(range.end);
    }
    rest.push(from..u64::MAX);
    rest
}

impl Turns {
    /// Stops all new requests except those that dropping pages waits for. Waits for the others that are under way.
    pub fn stop_requests(&self) {
        let mut state = self.state.lock();
        if let Phase::Here(mode) = state.phase {
            (state.phase, state.ending) = (Phase::Ending(mode), Ending::default());
            self.runnable.notify_all();
        }
        self.quiet.wait_while(&mut state, |state| state.has_callers());
    }

    /// Ends the turn when the kernel has no page of it and requests none. Until then `drop_pages` is called, for parts
    /// of files whose pages the kernel must drop; it may wait for the kernel.
    pub fn end(&self, drop_pages: impl Fn(Ino, Range<u64>)) {
        self.state.lock().ending.holds_from = Some(Instant::now() + HOLD_AFTER);
        while let Some(files) = self.files_to_drop() {
            for ino in files {
                let parts = self.state.lock().begin_drop(ino);
                self.runnable.notify_all();
                parts.into_iter().for_each(|part| drop_pages(ino, part));
                self.state.lock().end_drop();
            }
        }
    }

    /// Waits until there are files to be dropped; `None`: the turn has ended.
    fn files_to_drop(&self) -> Option<Vec<Ino>> {
        let mut state = self.state.lock();
        loop {
            let mapped = state.mapped();
            if mapped.is_empty() && state.is_quiet() {
                (state.phase, state.ending) = (Phase::Away, Ending::default());
                state.share.end();
                state.due = 0;
                return None;
            }
            if !mapped.is_empty() {
                // Pages may be written on and on meanwhile: once dropped, they are read again first.
                let holds = state.ending.holds(Instant::now());
                drop(state);
                if holds {
                    std::thread::sleep(PAUSE);
                }
                return Some(mapped);
            }
            self.wake_ready(&state);
            // Not for ever: which requests are ready changes with time.
            self.quiet.wait_for(&mut state, HOLD_AFTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_locked_is_left_out() {
        assert_eq!(all_but(vec![]), std::slice::from_ref(&(0..u64::MAX)));
        assert_eq!(all_but(vec![8..12, 0..4, 10..16]), [4..8, 16..u64::MAX]);
        assert_eq!(all_but(vec![4..8, 5..6, 9..9]), [0..4, 8..9, 9..u64::MAX]);
    }
}
