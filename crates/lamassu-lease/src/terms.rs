//! How long leases last.

use crate::Millis;

/// Spans of time, the same for the server of a vault and its clients.
///
/// The rates of the server's clock and a client's may differ by a tenth of the slower one. A client therefore stops
/// after nine tenths of the term, by its own clock, from before it sent the heartbeat. The server waits for the whole
/// term, from the arrival of the heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// The server ends a session after this time without a heartbeat.
    term: Millis,
    /// A client stops this long after sending the last heartbeat that was answered.
    stop: Millis,
    /// The time between heartbeats.
    heartbeat: Millis,
    /// A lease is not recalled before it was held for this long.
    min_hold: Millis,
}

/// Terms that would break the guarantees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TermsError {
    /// The term is out of bounds.
    #[error("the term of leases must be 5 to 600 seconds, not {0:?} ms")]
    Term(u64),
    /// Heartbeats are too rare.
    #[error("there must be at least three heartbeats in a term of leases: give at most a quarter of it")]
    Heartbeat,
    /// Other sessions could wait for longer than a term.
    #[error("the least time that a lease is held must be at most a tenth of the term")]
    MinHold,
}

impl Terms {
    /// A term of 30 s, a heartbeat every 5 s, and at least 10 ms of use.
    pub const DEFAULT: Terms =
        Terms { term: Millis(30_000), stop: Millis(27_000), heartbeat: Millis(5_000), min_hold: Millis(10) };

    /// All in milliseconds.
    ///
    /// # Errors
    /// [`TermsError`].
    pub fn new(term: u64, heartbeat: u64, min_hold: u64) -> Result<Terms, TermsError> {
        if !(5_000..=600_000).contains(&term) {
            return Err(TermsError::Term(term));
        }
        if heartbeat == 0 || heartbeat > term / 4 {
            return Err(TermsError::Heartbeat);
        }
        if min_hold > term / 10 {
            return Err(TermsError::MinHold);
        }
        Ok(Terms::unchecked(term, term / 10 * 9, heartbeat, min_hold))
    }

    /// Terms that may break the guarantees.
    pub(crate) const fn unchecked(term: u64, stop: u64, heartbeat: u64, min_hold: u64) -> Terms {
        Terms { term: Millis(term), stop: Millis(stop), heartbeat: Millis(heartbeat), min_hold: Millis(min_hold) }
    }

    /// Terms for a model whose clocks have the same rate: a few ticks, and a given time at which a client stops.
    #[cfg(feature = "testing")]
    pub const fn of_model(term: u64, stop: u64) -> Terms {
        Terms::unchecked(term, stop, 1, 0)
    }

    /// The server ends a session after this time without a heartbeat.
    pub const fn term(&self) -> Millis {
        self.term
    }

    /// A client stops this long after sending the last heartbeat that was answered.
    pub const fn stop(&self) -> Millis {
        self.stop
    }

    /// The time between heartbeats.
    pub const fn heartbeat(&self) -> Millis {
        self.heartbeat
    }

    /// A lease is not recalled before it was held for this long.
    pub const fn min_hold(&self) -> Millis {
        self.min_hold
    }
}

impl Default for Terms {
    fn default() -> Terms {
        Terms::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_keep_what_the_proof_needs() {
        assert_eq!(Terms::new(30_000, 5_000, 10), Ok(Terms::DEFAULT));
        for (term, heartbeat, min_hold, error) in [
            (4_999, 1_000, 0, TermsError::Term(4_999)),
            (600_001, 1_000, 0, TermsError::Term(600_001)),
            (30_000, 0, 0, TermsError::Heartbeat),
            (30_000, 7_501, 0, TermsError::Heartbeat),
            (30_000, 7_500, 3_001, TermsError::MinHold),
        ] {
            assert_eq!(Terms::new(term, heartbeat, min_hold), Err(error), "{term} {heartbeat} {min_hold}");
        }
        for term in [5_000, 5_001, 5_009, 30_000, 600_000] {
            let terms = Terms::new(term, 1_000, 0).expect("within the bounds");
            // The client's clock is the slower one by a tenth: what it counts as `stop` is longer in truth.
            assert!(terms.stop().0 * 11 / 10 <= terms.term().0, "{term}");
        }
    }
}
