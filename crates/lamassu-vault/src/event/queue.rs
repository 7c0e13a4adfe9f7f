//! The queue between the threads that find damage and the sink. It is bounded, and a thread never waits for it.

use super::{IntegrityEvent, IntegritySink};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most events that wait, and most bytes they take.
const EVENTS_MAX: usize = 10_000;
const BYTES_MAX: usize = 8 << 20;
/// Most that are delivered at once.
const BATCH_MAX: usize = 2_000;
const BATCH_BYTES_MAX: usize = 1 << 20;

pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    sink: Arc<dyn IntegritySink>,
}

#[derive(Default)]
struct Waiting {
    events: VecDeque<IntegrityEvent>,
    bytes: usize,
    /// Events lost since the last delivery.
    lost: u64,
    lost_in_all: u64,
    is_ending: bool,
    has_ended: bool,
}

impl Queue {
    /// Starts the thread that delivers.
    pub fn start(sink: Arc<dyn IntegritySink>) -> std::io::Result<Arc<Queue>> {
        let queue = Arc::new(Queue { waiting: Mutex::default(), changed: Condvar::new(), sink });
        let own = queue.clone();
        std::thread::Builder::new().name("integrity".into()).spawn(move || own.deliver())?;
        Ok(queue)
    }

    /// Puts an event in, or counts it as lost.
    pub fn put(&self, event: IntegrityEvent) {
        let mut waiting = self.waiting.lock();
        let bytes = waiting.bytes + event.bytes();
        if waiting.is_ending || waiting.events.len() >= EVENTS_MAX || bytes > BYTES_MAX {
            waiting.lost += 1;
            waiting.lost_in_all += 1;
            let is_first = waiting.lost == 1;
            // So that no thread waits with the lock for the writer of the log.
            drop(waiting);
            if is_first {
                let text = "events are found faster than they are delivered: some are counted, and not delivered";
                tracing::warn!(target: super::TARGET, "{text}");
            }
            return;
        }
        waiting.bytes = bytes;
        waiting.events.push_back(event);
        self.changed.notify_all();
    }

    fn deliver(&self) {
        loop {
            let (batch, lost) = {
                let mut waiting = self.waiting.lock();
                while waiting.events.is_empty() && !waiting.is_ending {
                    self.changed.wait(&mut waiting);
                }
                if waiting.events.is_empty() {
                    waiting.has_ended = true;
                    self.changed.notify_all();
                    return;
                }
                (waiting.take(), std::mem::take(&mut waiting.lost))
            };
            self.sink.deliver(&batch, lost);
        }
    }

    /// Delivers the waiting events, for at most `wait`. Whether all were delivered.
    pub fn end(&self, wait: Duration) -> bool {
        let until = Instant::now() + wait;
        self.sink.end();
        let mut waiting = self.waiting.lock();
        waiting.is_ending = true;
        self.changed.notify_all();
        while !waiting.has_ended {
            if self.changed.wait_until(&mut waiting, until).timed_out() {
                break;
            }
        }
        let (left, has_ended) = (waiting.events.len(), waiting.has_ended);
        drop(waiting);
        if left > 0 {
            tracing::warn!(target: super::TARGET, left, "events could not be delivered before the end");
        }
        has_ended
    }

    pub fn not_delivered(&self) -> u64 {
        self.waiting.lock().lost_in_all
    }

    pub fn failures(&self) -> u64 {
        self.sink.failures()
    }
}

impl Waiting {
    /// Takes some of the oldest events.
    fn take(&mut self) -> Vec<IntegrityEvent> {
        let (mut batch, mut taken) = (Vec::new(), 0);
        while batch.len() < BATCH_MAX && taken < BATCH_BYTES_MAX {
            let Some(event) = self.events.pop_front() else { break };
            taken += event.bytes();
            batch.push(event);
        }
        self.bytes -= taken;
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::super::IntegrityKind;
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    /// Hangs while it is told to.
    #[derive(Default)]
    struct Slow {
        hangs: AtomicBool,
        seen: AtomicU64,
        lost: AtomicU64,
    }

    impl IntegritySink for Slow {
        fn deliver(&self, events: &[IntegrityEvent], lost: u64) {
            self.lost.fetch_add(lost, Ordering::Relaxed);
            while self.hangs.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.seen.fetch_add(events.len() as u64, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_sink_that_hangs_keeps_nobody_and_all_are_delivered_or_counted() {
        let sink = Arc::new(Slow { hangs: true.into(), ..Slow::default() });
        let queue = Queue::start(sink.clone()).unwrap();
        const FOUND: u64 = 30_000;
        (0..FOUND).for_each(|i| queue.put(IntegrityKind::Name.at(format!("{i}"), "")));
        assert!(queue.not_delivered() >= FOUND - EVENTS_MAX as u64 - BATCH_MAX as u64);
        assert!(queue.waiting.lock().bytes <= BYTES_MAX);
        assert!(!queue.end(Duration::from_millis(10)), "it hangs, and is not waited for");
        sink.hangs.store(false, Ordering::Relaxed);
        assert!(queue.end(Duration::from_secs(60)));
        assert_eq!(sink.seen.load(Ordering::Relaxed) + queue.not_delivered(), FOUND);
        assert_eq!(sink.lost.load(Ordering::Relaxed), queue.not_delivered(), "the sink is told");
        assert_eq!(queue.waiting.lock().bytes, 0);
    }
}
