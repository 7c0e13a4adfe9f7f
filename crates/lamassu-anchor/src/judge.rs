//! The rules (`docs/freshness.md`, sections 3 and 5): whether what a store shows is current. Pure.
//!
//! This module decides only whether data is current, not what to do about stale data. The caller passes in leaf digests
//! that were verified under the row's root, or that the anchor holds.

use crate::row::{EntryRow, FileRow, Row};
use crate::{Digest, ObjectKind, Window};
use lamassu_format::{FileId, PageNo, SessionTag};

/// What a store shows as a page of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    /// the page
    pub page: PageNo,
    /// the leaf digest of the page; [`Digest::NONE`]: it is absent
    pub digest: Digest,
    /// the stamp under its seal, if that opens
    pub stamp: Option<Stamp>,
}

/// The stamp of a page, under its seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The session that wrote it; 0 in a convergent page.
    pub session: u32,
    /// Random bits of that session.
    pub tag: SessionTag,
    /// the page's number among that session's pages
    pub sequence: u32,
    /// The id of its file.
    pub file: FileId,
}

/// The judgement on a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// J1, J2: as acknowledged. Its pending bits are ignored (A5).
    Acknowledged,
    /// J3: by a session that may have changed the file since. Its pending bits count.
    InFlight,
    /// J4: a hole of the tree, or past the end.
    Hole,
    /// J6.
    Stale,
}

/// Whether a file has one page: then its root is its leaf, and a twin may replace it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// One.
    One,
    /// Several.
    Several,
}

/// Judges a page of a clean file, or of a file in recovery. `leaf` is its digest under the row's root. `zero` is the
/// stamp of page 0, once that was judged to be in flight.
pub fn page(row: &FileRow, pages: Pages, leaf: Digest, zero: Option<Stamp>, shown: &Shown) -> Verdict {
    let cut = row.open.as_ref().and_then(|open| open.cut).filter(|cut| cut.from <= shown.page);
    // J5: by its stamp, page 0 was written after the shrink, so no acknowledged page is left beyond the cut.
    let past = cut.filter(|cut| zero.is_some_and(|zero| is_after(zero, cut.after)));
    let leaf = if past.is_some() { Digest::NONE } else { leaf };
    if shown.digest.is_none() {
        return if leaf.is_none() { Verdict::Hole } else { Verdict::Stale };
    }
    let is_twin = pages == Pages::One && shown.page == PageNo::ZERO && row.twin == Some(shown.digest);
    if shown.digest == leaf || is_twin {
        return Verdict::Acknowledged;
    }
    let stamp = shown.stamp.filter(|stamp| past.is_none_or(|cut| is_after(*stamp, cut.after)));
    match stamp {
        Some(stamp) if is_in_flight(row, stamp) => Verdict::InFlight,
        _ => Verdict::Stale,
    }
}

/// Whether a page was written after a point in a session: later in it, or in a later session.
pub fn is_after(stamp: Stamp, point: Window) -> bool {
    (stamp.session, stamp.sequence) > (point.session, point.covered)
}

/// J3 for a stamp alone: whether it may be of a session that is not acknowledged yet.
pub fn is_in_flight(row: &FileRow, stamp: Stamp) -> bool {
    let Some(open) = &row.open else { return false };
    // The last sequence number cannot be ordered.
    let is_later = |covered: u32| stamp.sequence > covered && stamp.sequence < u32::MAX;
    let is_of = |window: Window| window.tag == stamp.tag && is_later(window.covered);
    stamp.file == open.file && open.window(stamp.session).is_some_and(is_of)
}

/// The judgement on an entry of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryVerdict {
    /// It names this object.
    Current,
    /// The anchor and the store both have no entry.
    Nothing,
    /// N1: only the anchor has it.
    Missing,
    /// N2: only the store has it.
    Unrecorded,
    /// The store shows another kind of object.
    OtherKind,
}

/// Judges the kind that a store shows under a name; `None`: it shows no entry.
pub fn entry(recorded: Option<&EntryRow>, shown: Option<ObjectKind>) -> EntryVerdict {
    match (recorded, shown) {
        (None, None) => EntryVerdict::Nothing,
        (Some(_), None) => EntryVerdict::Missing,
        (None, Some(_)) => EntryVerdict::Unrecorded,
        (Some(entry), Some(kind)) if entry.kind == kind => EntryVerdict::Current,
        (Some(_), Some(_)) => EntryVerdict::OtherKind,
    }
}

/// Whether the attributes that a store shows are current, by the digest over all of them.
pub fn attributes(row: &Row, seen: Digest) -> bool {
    row.attributes.is_current(seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Windows;
    use crate::row::{Cut, Open};

    const LEAF: Digest = Digest([1; 32]);
    const TWIN: Digest = Digest([2; 32]);
    const OTHER: Digest = Digest([3; 32]);
    const ID: FileId = FileId([9; 16]);
    const TAG: SessionTag = SessionTag([4; 6]);

    fn row(windows: &[(u32, u32)]) -> FileRow {
        let windows: Windows =
            windows.iter().map(|&(session, covered)| Window { session, tag: TAG, covered }).collect();
        let open = (!windows.is_empty()).then_some(Open { file: ID, windows, cut: None });
        FileRow { root: LEAF, size: 1, twin: Some(TWIN), open, ..FileRow::default() }
    }

    fn stamp((session, sequence, file): (u32, u32, FileId)) -> Stamp {
        Stamp { session, tag: TAG, sequence, file }
    }

    fn shown(digest: Digest, stamped: Option<(u32, u32, FileId)>) -> Shown {
        Shown { page: PageNo(0), digest, stamp: stamped.map(stamp) }
    }

    #[test]
    fn what_was_acknowledged_is_taken_and_nothing_older() {
        let clean = row(&[]);
        assert_eq!(page(&clean, Pages::One, LEAF, None, &shown(LEAF, None)), Verdict::Acknowledged);
        assert_eq!(page(&clean, Pages::One, LEAF, None, &shown(TWIN, None)), Verdict::Acknowledged);
        assert_eq!(page(&clean, Pages::Several, LEAF, None, &shown(TWIN, None)), Verdict::Stale);
        assert_eq!(page(&clean, Pages::One, LEAF, None, &shown(OTHER, Some((5, 9, ID)))), Verdict::Stale);
        assert_eq!(page(&clean, Pages::One, LEAF, None, &shown(Digest::NONE, None)), Verdict::Stale);
        assert_eq!(page(&clean, Pages::One, Digest::NONE, None, &shown(Digest::NONE, None)), Verdict::Hole);
        // A page behind the end that an earlier state had.
        assert_eq!(page(&clean, Pages::Several, Digest::NONE, None, &shown(OTHER, None)), Verdict::Stale);
    }

    #[test]
    fn of_an_open_file_what_its_sessions_wrote_since_is_taken() {
        let open = row(&[(5, 10), (7, 0)]);
        let of = |stamp| page(&open, Pages::Several, LEAF, None, &shown(OTHER, Some(stamp)));
        assert_eq!(of((5, 11, ID)), Verdict::InFlight);
        assert_eq!(of((7, 1, ID)), Verdict::InFlight);
        assert_eq!(of((5, 10, ID)), Verdict::Stale, "the root covers it");
        assert_eq!(of((6, 11, ID)), Verdict::Stale, "not a session of this file");
        assert_eq!(of((5, 11, FileId([8; 16]))), Verdict::Stale, "another file's");
        assert_eq!(of((7, u32::MAX, ID)), Verdict::Stale, "a sequence that says nothing");
        let of_a_copy = Stamp { tag: SessionTag([5; 6]), ..stamp((5, 11, ID)) };
        let shown = Shown { stamp: Some(of_a_copy), ..shown(OTHER, None) };
        assert_eq!(page(&open, Pages::Several, LEAF, None, &shown), Verdict::Stale, "a copy's session of that number");
        assert_eq!(of((0, 11, FileId::NONE)), Verdict::Stale, "a convergent page has no stamp");
    }

    #[test]
    fn pages_go_by_a_shrink_that_page_0_tells_of() {
        let mut open = row(&[(5, 10), (7, 0)]);
        let of = |open: &FileRow, zero: Option<(u32, u32)>, digest, seen: Option<(u32, u32)>| {
            let stamped = |(session, sequence)| stamp((session, sequence, ID));
            let shown = Shown { page: PageNo(3), digest, stamp: seen.map(stamped) };
            page(open, Pages::Several, LEAF, zero.map(stamped), &shown)
        };
        assert_eq!(of(&open, Some((5, 20)), Digest::NONE, None), Verdict::Stale, "no shrink was noted");
        let cut = Cut { after: Window { session: 5, tag: TAG, covered: 15 }, from: PageNo(3) };
        open.open.iter_mut().for_each(|open| open.cut = Some(cut));
        assert_eq!(of(&open, None, Digest::NONE, None), Verdict::Stale, "page 0 knows nothing of it");
        assert_eq!(of(&open, Some((5, 15)), Digest::NONE, None), Verdict::Stale);
        assert_eq!(of(&open, Some((5, 15)), LEAF, None), Verdict::Acknowledged);
        for zero in [(5, 16), (7, 1)] {
            assert_eq!(of(&open, Some(zero), Digest::NONE, None), Verdict::Hole);
            assert_eq!(of(&open, Some(zero), LEAF, None), Verdict::Stale, "it was cut off");
            assert_eq!(of(&open, Some(zero), OTHER, Some((5, 12))), Verdict::Stale, "written before the shrink");
            assert_eq!(of(&open, Some(zero), OTHER, Some((5, 17))), Verdict::InFlight, "written after it");
        }
        open.open.iter_mut().for_each(|open| open.cut = Some(Cut { from: PageNo(4), ..cut }));
        assert_eq!(of(&open, Some((5, 16)), Digest::NONE, None), Verdict::Stale, "it is before the cut");
    }
}
