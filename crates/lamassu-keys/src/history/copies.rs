//! Copies of a vault's keys that its history has on record: of the header, and in the headers of clones and snapshots.
//!
//! Invariant: a history that takes the place of another goes on with what that one had on record of them. A copy opens
//! the vault as long as its keys are in use, however often the history began anew. Where some may be missing, the
//! history says so, and so does each later one.

use super::chain::{HistoryEntry, Report};
use super::event::{Event, EventKind};

/// Most entries that are taken over: the newest. Whoever opens the vault can add to its history without end, and what
/// is taken over is held in memory, and goes into receipts.
const ENTRIES_MAX: usize = 4096;

/// The detail of [`EventKind::Restarted`] that tells what became of the copies on record.
const DETAIL: &str = "copies";
/// Its value if none is missing.
const TAKEN_OVER: &str = "taken over";

/// A copy that an entry tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copy<'a> {
    /// of the header, in this file
    Header(&'a str),
    /// in the header of another vault
    Vault {
        /// `clone` or `snapshot`
        kind: &'static str,
        /// its id
        id: &'a str,
    },
}

impl HistoryEntry {
    /// The copy that it tells of, if it tells of one.
    pub fn copy(&self) -> Option<Copy<'_>> {
        let detail = |name: &str| self.details.get(name).map(String::as_str);
        if self.event == EventKind::BackedUp.name() {
            return Some(Copy::Header(detail("file").unwrap_or_default()));
        }
        let of = |kind: &'static str| detail(kind).map(|id| Copy::Vault { kind, id });
        if self.event == EventKind::Cloned.name() { of("clone").or_else(|| of("snapshot")) } else { None }
    }

    /// Whether the history before it may have had more copies on record.
    fn lacks_copies(&self) -> bool {
        let said = self.details.get(DETAIL).map(String::as_str);
        self.event == EventKind::Restarted.name() && said != Some(TAKEN_OVER)
    }
}

impl Report {
    /// Whether copies may be missing that were once on record.
    pub fn lacks_copies(&self) -> bool {
        self.fault.is_some() || self.entries.iter().any(HistoryEntry::lacks_copies)
    }
}

/// What a history has on record of copies, for the one that takes its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copies {
    pub(super) entries: Vec<HistoryEntry>,
    lacks: Option<String>,
}

impl Copies {
    /// Of a history of which nothing can be read, for this reason.
    pub(super) fn unread(why: String) -> Copies {
        Copies { entries: Vec::new(), lacks: Some(why) }
    }

    /// Of a history that was read.
    pub(super) fn of(report: Report) -> Copies {
        let mut lacks = match report.fault {
            Some(fault) => Some(fault.to_string()),
            None if report.lacks_copies() => Some("the history had begun without all of an earlier one".into()),
            None => None,
        };
        let mut entries = report.entries;
        entries.retain(|entry| entry.copy().is_some());
        let more = entries.len().saturating_sub(ENTRIES_MAX);
        if more > 0 {
            entries.drain(..more);
            lacks = Some(format!("the newest {ENTRIES_MAX} are kept, and {more} are not"));
        }
        Copies { entries, lacks }
    }

    /// The same, some of which are missing for this reason, unless another one is known.
    pub(super) fn lacking(self, why: &str) -> Copies {
        Copies { lacks: self.lacks.or_else(|| Some(why.into())), ..self }
    }

    /// Why some may be missing; `None`: none is.
    pub fn lacks(&self) -> Option<&str> {
        self.lacks.as_deref()
    }

    /// Puts into the entry that begins the next history what became of them.
    pub(super) fn told_in(&self, restarted: Event) -> Event {
        match &self.lacks {
            None => restarted.detail(DETAIL, TAKEN_OVER),
            Some(why) => restarted
                .detail(DETAIL, format_args!("{} {TAKEN_OVER}, some may be missing: {why}", self.entries.len())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backup(number: usize) -> HistoryEntry {
        HistoryEntry::of(&Event::new(EventKind::BackedUp).detail("file", number))
    }

    #[test]
    fn the_newest_copies_are_taken_over_and_the_rest_is_missed() {
        let report = |backups: usize| {
            let others = [EventKind::Created, EventKind::Loaded].map(|kind| HistoryEntry::of(&Event::new(kind)));
            Report { entries: others.into_iter().chain((0..backups).map(backup)).collect(), ..Report::default() }
        };
        let all = Copies::of(report(ENTRIES_MAX));
        assert_eq!((all.entries.len(), all.lacks()), (ENTRIES_MAX, None));
        let newest = Copies::of(report(ENTRIES_MAX + 3));
        assert_eq!(newest.entries.len(), ENTRIES_MAX);
        assert_eq!(newest.entries[0].copy(), Some(Copy::Header("3")));
        assert!(newest.lacks().unwrap().contains("and 3 are not"));
        // And so it is said in the next history, and in those after it.
        let begun = HistoryEntry::of(&newest.told_in(Event::new(EventKind::Restarted)));
        let next = Copies::of(Report { entries: vec![begun, backup(1)], ..Report::default() });
        assert!(next.lacks().is_some() && next.entries.len() == 1);
        let begun = HistoryEntry::of(&all.told_in(Event::new(EventKind::Restarted)));
        assert!(!Report { entries: vec![begun], ..Report::default() }.lacks_copies());
    }
}
