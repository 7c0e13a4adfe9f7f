//! The content of the record of sessions (§6a): which sessions wrote this vault, and which of them were not closed.
//!
//! A session begins with the first page that it writes, and is closed when everything it wrote is durable and settled.
//! Each page names the session that wrote it. Unfinished state in a page is accepted only if this record says that its
//! session is open.

/// Version of the record's own layout.
pub const SESSIONS_VERSION: u16 = 1;
/// Most ranges of open sessions.
pub const RANGES_MAX: usize = 64;
const HEAD_LEN: usize = 8;
const RANGE_LEN: usize = 8;

/// From this Unix time on (in the year 2105), numbers are consecutive: a clock that is this wrong must not use them up.
pub const CLOCK_MAX: u32 = u32::MAX - (1 << 24) + 1;

/// The sessions of a vault.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionRecord {
    /// Number of the last session that began; 0: none did.
    last: u32,
    /// Sessions that were not closed: first and last of each range, ascending. Ranges do not touch.
    open: Vec<(u32, u32)>,
}

/// Why the content of a sealed record of sessions is refused. Its seal is good, so a newer or faulty program wrote it.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
pub enum SessionsError {
    /// Shorter or longer than its fields say.
    #[error("record of sessions of {len} bytes, not {expected}")]
    Length {
        /// bytes found
        len: usize,
        /// what its fields say
        expected: usize,
    },
    /// Written by a later Lamassu.
    #[error("record of sessions, version {found}, is not supported; use a newer lamassu")]
    Version {
        /// version found
        found: u16,
    },
    /// Ranges that are empty, not ascending, that touch, or that name sessions that never began.
    #[error("record of sessions names ranges that no writer names")]
    Ranges,
}

impl SessionRecord {
    /// The record of a vault that lost its own. Every session up to `last` is closed, and so is every session that
    /// began before `now` (seconds since 1970).
    pub fn after(last: u32, now: u64) -> SessionRecord {
        SessionRecord { last: last.max(number_at(now)), open: Vec::new() }
    }

    /// Notes that numbers up to this one were given, even if the record did not know that.
    pub fn go_on_behind(&mut self, last: u32) {
        self.last = self.last.max(last);
    }

    /// Number of the last session that began; 0: none did.
    pub fn last(&self) -> u32 {
        self.last
    }

    /// Sessions that were not closed: first and last of each range, ascending.
    pub fn open(&self) -> &[(u32, u32)] {
        &self.open
    }

    /// Whether a session began and was not closed.
    pub fn is_open(&self, session: u32) -> bool {
        self.open.iter().any(|(from, to)| (*from..=*to).contains(&session))
    }

    /// Begins a session at `now` (seconds since 1970) and returns its number: that time, or the next number if that is
    /// higher. So no number is given twice, neither by a record older than the vault, nor by the record of another
    /// copy. `None` if no number is left.
    #[must_use]
    pub fn begin(&mut self, now: u64) -> Option<u32> {
        let next = self.last.checked_add(1)?.max(number_at(now));
        match self.open.last_mut() {
            Some((_, to)) if to.checked_add(1) == Some(next) => *to = next,
            _ => self.open.push((next, next)),
        }
        self.last = next;
        if self.open.len() > RANGES_MAX {
            self.join_nearest();
        }
        Some(next)
    }

    /// Closes a session.
    pub fn close(&mut self, session: u32) {
        let Some(at) = self.open.iter().position(|(from, to)| (*from..=*to).contains(&session)) else { return };
        let (from, to) = self.open.remove(at);
        let before = (from < session).then(|| (from, session - 1));
        let after = (session < to).then(|| (session + 1, to));
        self.open.splice(at..at, before.into_iter().chain(after));
        if self.open.len() > RANGES_MAX {
            self.join_nearest();
        }
    }

    /// Closes all sessions except `except`.
    pub fn close_all_but(&mut self, except: Option<u32>) {
        let kept = except.filter(|session| self.is_open(*session));
        self.open = kept.map(|session| (session, session)).into_iter().collect();
    }

    /// Joins the two nearest ranges, and counts the sessions between them as open. So no open session is forgotten, and
    /// the record stays small.
    fn join_nearest(&mut self) {
        let gap = |at: &usize| self.open[at + 1].0 - self.open[*at].1;
        let Some(at) = (0..self.open.len().saturating_sub(1)).min_by_key(gap) else { return };
        let (_, to) = self.open.remove(at + 1);
        self.open[at].1 = to;
    }

    /// The content of the record.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_LEN + self.open.len() * RANGE_LEN);
        bytes.extend(SESSIONS_VERSION.to_le_bytes());
        bytes.extend((self.open.len() as u16).to_le_bytes());
        bytes.extend(self.last.to_le_bytes());
        for (from, to) in &self.open {
            bytes.extend(from.to_le_bytes());
            bytes.extend(to.to_le_bytes());
        }
        bytes
    }

    /// Parses the content of a sealed record of kind 7.
    ///
    /// # Errors
    /// [`SessionsError`]; never panics, whatever the bytes.
    pub fn parse(content: &[u8]) -> Result<SessionRecord, SessionsError> {
        let length = |expected| SessionsError::Length { len: content.len(), expected };
        let (head, ranges) = content.split_first_chunk::<HEAD_LEN>().ok_or(length(HEAD_LEN))?;
        let version = u16::from_le_bytes([head[0], head[1]]);
        if version != SESSIONS_VERSION {
            return Err(SessionsError::Version { found: version });
        }
        let count = usize::from(u16::from_le_bytes([head[2], head[3]]));
        if count > RANGES_MAX {
            return Err(SessionsError::Ranges);
        }
        let expected = HEAD_LEN + count * RANGE_LEN;
        if content.len() != expected {
            return Err(length(expected));
        }
        let last = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        let (ranges, _) = ranges.as_chunks::<RANGE_LEN>();
        let number = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let open: Vec<(u32, u32)> = ranges.iter().map(|r| (number(&r[..4]), number(&r[4..]))).collect();
        let in_order = open.iter().all(|(from, to)| 1 <= *from && from <= to && *to <= last);
        let apart = open.windows(2).all(|pair| u64::from(pair[0].1) + 1 < u64::from(pair[1].0));
        if in_order && apart { Ok(SessionRecord { last, open }) } else { Err(SessionsError::Ranges) }
    }
}

/// The number of a session that begins at this time; 0 if the clock cannot be right.
fn number_at(now: u64) -> u32 {
    u32::try_from(now).ok().filter(|now| *now < CLOCK_MAX).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn sessions_are_open_from_their_beginning_to_their_end() {
        let mut record = SessionRecord::default();
        let first = record.begin(0).unwrap();
        assert_eq!((first, record.is_open(1), record.is_open(2)), (1, true, false));
        let second = record.begin(0).unwrap();
        record.close(second);
        assert_eq!((record.last(), record.open()), (2, &[(1, 1)][..]));
        record.close(first);
        assert_eq!(record.open(), &[]);
        assert_eq!(record.begin(0), Some(3));
    }

    #[test]
    fn numbers_are_times_and_none_is_given_twice() {
        let mut record = SessionRecord::default();
        assert_eq!(record.begin(1_000), Some(1_000));
        assert_eq!(record.begin(1_000), Some(1_001), "two in one second");
        let older = record.clone();
        assert_eq!(record.begin(2_000), Some(2_000));
        assert_eq!(record.open(), [(1_000, 1_001), (2_000, 2_000)], "what never began is in no range");
        assert_eq!(record.begin(1_500), Some(2_001), "a clock that was put back");
        let mut restored = older.clone();
        restored.go_on_behind(2_001);
        restored.go_on_behind(7);
        assert_eq!((restored.begin(1_500), restored.is_open(1_001)), (Some(2_002), true), "what was left open stays");
        let mut older = older;
        assert_eq!(older.begin(2_500), Some(2_500), "an older record gives no number that a later one gave");
        let mut renewed = SessionRecord::after(7, 3_000);
        assert_eq!((renewed.last(), renewed.begin(3_000)), (3_000, Some(3_001)));
        let clocks = [u64::from(CLOCK_MAX), u64::from(u32::MAX), 1 << 40];
        assert!(clocks.iter().all(|now| older.clone().begin(*now) == Some(2_501)), "a wrong clock uses up no numbers");
        assert_eq!(older.begin(u64::from(CLOCK_MAX) - 1), Some(CLOCK_MAX - 1));
        assert_eq!(older.begin(0), Some(CLOCK_MAX));
    }

    #[test]
    fn there_is_an_end_of_numbers() {
        let mut record = SessionRecord { last: u32::MAX, open: vec![(u32::MAX, u32::MAX)] };
        assert_eq!(record.begin(9), None);
        record.close(u32::MAX);
        assert_eq!(record.open(), &[]);
    }

    #[test]
    fn bad_contents_are_refused() {
        let good = SessionRecord { last: 9, open: vec![(2, 3), (5, 5)] }.encode();
        assert_eq!(SessionRecord::parse(&good).unwrap().open(), &[(2, 3), (5, 5)]);
        assert!(matches!(SessionRecord::parse(&good[..good.len() - 1]), Err(SessionsError::Length { .. })));
        assert!(matches!(SessionRecord::parse(&good[..3]), Err(SessionsError::Length { .. })));
        let edited = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            SessionRecord::parse(&bytes)
        };
        assert_eq!(edited(0, 2), Err(SessionsError::Version { found: 2 }));
        assert_eq!(edited(4, 4), Err(SessionsError::Ranges), "open, and never begun");
        assert_eq!(edited(8, 0), Err(SessionsError::Ranges), "there is no session 0");
        assert_eq!(edited(12, 4), Err(SessionsError::Ranges), "one range in two");
        assert_eq!(edited(12, 1), Err(SessionsError::Ranges), "backwards");
    }

    proptest! {
        #[test]
        fn no_open_session_is_ever_forgotten(steps in prop::collection::vec(any::<(bool, u16)>(), 0..600)) {
            let (mut record, mut open, mut now) = (SessionRecord::default(), BTreeSet::new(), 0);
            for (begins, which) in steps {
                if begins || open.is_empty() {
                    now += u64::from(which % 5);
                    open.insert(record.begin(now).unwrap());
                } else {
                    let session = *open.iter().nth(usize::from(which) % open.len()).unwrap();
                    open.remove(&session);
                    record.close(session);
                }
                prop_assert!(open.iter().all(|session| record.is_open(*session)));
                prop_assert!(record.open().len() <= RANGES_MAX);
                prop_assert_eq!(SessionRecord::parse(&record.encode()), Ok(record.clone()));
            }
        }

        #[test]
        fn whatever_the_bytes_they_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(record) = SessionRecord::parse(&bytes) {
                prop_assert_eq!(record.encode(), bytes);
            }
        }
    }
}
