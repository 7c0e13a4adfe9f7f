//! How long the server waits for a client in the middle of a request or an answer. Each pause is bounded, and so is the
//! sum of all pauses: a client that trickles bytes holds a connection no longer than an idle one.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// The longest pauses.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// one pause; also the sum of all pauses, less the time that bytes take at the slowest rate
    pub idle: Duration,
    /// the slowest rate
    bytes_per_second: u64,
}

impl Patience {
    /// By what the configuration says.
    pub fn new(idle_seconds: u64, kib_per_second: u64) -> Patience {
        Patience { idle: Duration::from_secs(idle_seconds), bytes_per_second: kib_per_second << 10 }
    }

    /// How long a client that has moved these bytes may pause, after pauses of `waited` in all.
    fn left(&self, bytes: u64, waited: Duration) -> Duration {
        let earned = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        (self.idle + earned).saturating_sub(waited).min(self.idle)
    }
}

/// The pauses of one client. Only the time in which it is waited for counts.
pub struct Pace {
    patience: Patience,
    bytes: u64,
    waited: Duration,
    since: Option<Instant>,
    timer: Pin<Box<Sleep>>,
}

impl Pace {
    /// None so far.
    pub fn new(patience: Patience) -> Pace {
        let timer = Box::pin(tokio::time::sleep(patience.idle));
        Pace { patience, bytes: 0, waited: Duration::ZERO, since: None, timer }
    }

    /// The client has sent or taken bytes: a pause has ended, if there was one.
    pub fn moved(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.waited += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
    }

    /// It is waited for. Ready: it pauses for too long.
    pub fn poll_wait(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.since.is_none() {
            let now = Instant::now();
            self.since = Some(now);
            self.timer.as_mut().reset(now + self.patience.left(self.bytes, self.waited));
        }
        self.timer.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn bytes_earn_time_and_drips_do_not() {
        let patience = Patience::new(30, 1);
        assert_eq!(patience.left(0, Duration::ZERO), 30 * SECOND);
        // A byte every 29 seconds: the second pause is the last.
        assert_eq!(patience.left(1, 29 * SECOND).as_secs(), 1);
        assert_eq!(patience.left(2, 31 * SECOND), Duration::ZERO);
        // At the slowest rate there is always time, but never for a longer pause.
        for seconds in [1, 60, 3600, 86_400] {
            assert_eq!(patience.left(u64::from(seconds) << 10, seconds * SECOND), 30 * SECOND);
        }
        assert_eq!(patience.left(5 << 40, Duration::ZERO), 30 * SECOND);
    }

    #[tokio::test]
    async fn pauses_add_up() {
        let mut pace = Pace::new(Patience { idle: Duration::from_millis(20), bytes_per_second: 1 << 40 });
        let (mut pauses, begun) = (0_u32, Instant::now());
        // A client that moves one byte in each pause times out as an idle client does.
        let ended = std::future::poll_fn(|cx| pace.poll_wait(cx));
        tokio::pin!(ended);
        ended.await;
        assert!(begun.elapsed() >= Duration::from_millis(20));
        while pace.patience.left(pace.bytes, pace.waited) > Duration::ZERO {
            pace.moved(1);
            pauses += 1;
            assert!(pauses < 3, "{:?}", pace.waited);
        }
        std::future::poll_fn(|cx| pace.poll_wait(cx)).await;
    }
}
