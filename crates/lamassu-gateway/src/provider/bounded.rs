//! A bound of what is logged about requests that are refused: clients send such requests as often as they like.

use std::time::{Duration, Instant};

/// How many requests are logged in [`SPAN`].
const LOGGED_MAX: u32 = 20;
pub const SPAN: Duration = Duration::from_secs(10);

/// Says which requests of a kind are logged, and counts the others.
#[derive(Debug, Default)]
pub struct Bounded {
    /// When the span began.
    since: Option<Instant>,
    logged: u32,
    left_out: u64,
}

impl Bounded {
    /// One more was refused. Returns how many were left out that are to be told of now, and whether this one is logged.
    pub fn one_more(&mut self, now: Instant) -> (u64, bool) {
        let mut left_out = 0;
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= SPAN) {
            left_out = std::mem::take(&mut self.left_out);
            (self.since, self.logged) = (Some(now), 0);
        }
        let is_logged = self.logged < LOGGED_MAX;
        match is_logged {
            true => self.logged += 1,
            false => self.left_out += 1,
        }
        (left_out, is_logged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_logged_is_bounded_and_what_is_left_out_is_counted() {
        let (mut bounded, now) = (Bounded::default(), Instant::now());
        let all: Vec<_> = (0..30).map(|_| bounded.one_more(now)).collect();
        assert_eq!(all[..20], [(0, true); 20]);
        assert_eq!(all[20..], [(0, false); 10]);
        assert_eq!(bounded.one_more(now + SPAN), (10, true));
        assert_eq!(bounded.one_more(now + SPAN), (0, true));
    }
}
