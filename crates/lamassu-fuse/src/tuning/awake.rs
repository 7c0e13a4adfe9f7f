//! Keeps idle processors from sleeping while many requests come (`keep_awake=always`, off by default).
//!
//! A request wakes a thread of the daemon, and its answer wakes the caller. In a virtual machine the hypervisor takes
//! an idle processor away, and waking it takes longer than a small request does. During a burst of requests the kernel
//! is therefore asked, by its interface for quality of service, for idle processors that wait without sleeping
//! (`/dev/cpu_dma_latency`, Documentation/power/pm_qos_interface.rst). The request ends with the descriptor, however
//! this process ends.

use crate::options::KeepAwake;
use parking_lot::{Condvar, Mutex};
use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const DEVICE: &str = "/dev/cpu_dma_latency";

/// This many requests within [`BURST`] begin a burst.
const BURST_LEN: u64 = 16;
const BURST: Duration = Duration::from_millis(10);
/// Time between two checks of a burst.
const ROUND: Duration = Duration::from_millis(10);
/// A burst goes on while at least this many requests come in a round.
const GOES_ON: u64 = 4;
/// It ends after this many rounds with fewer.
const PATIENCE: u32 = 3;

/// Microseconds an idle processor may take to wake up.
const NONE: i32 = 0;
/// `PM_QOS_CPU_LATENCY_DEFAULT_VALUE` of the kernel: no limit.
const ANY: i32 = 2_000_000_000;

#[derive(Default)]
struct State {
    /// When the current run of [`BURST_LEN`] requests began.
    since: Option<Instant>,
    stopping: bool,
}

/// Counts requests, and holds the device at zero during bursts of them.
pub(super) struct Awake {
    /// `None`: the option is off.
    device: Option<File>,
    requests: AtomicU64,
    in_burst: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Awake {
    /// Opens the device if it is wanted; an error if it cannot be opened.
    pub(super) fn new(wanted: KeepAwake) -> io::Result<Self> {
        Ok(match wanted {
            KeepAwake::Never => Awake::of(None),
            KeepAwake::Always => Awake::of(Some(File::options().write(true).open(DEVICE)?)),
        })
    }

    fn of(device: Option<File>) -> Self {
        Awake {
            device,
            requests: AtomicU64::new(0),
            in_burst: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Notes a request.
    pub(super) fn request(&self) {
        if self.device.is_none() {
            return;
        }
        let n = self.requests.fetch_add(1, Ordering::Relaxed);
        if !n.is_multiple_of(BURST_LEN) || self.in_burst.load(Ordering::Relaxed) {
            return;
        }
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.since.replace(now).is_some_and(|since| now.duration_since(since) < BURST) {
            self.in_burst.store(true, Ordering::Relaxed);
            self.changed.notify_all();
        }
    }

    /// Watches over bursts until [`Awake::stop`].
    pub(super) fn run(&self) {
        let Some(device) = &self.device else { return };
        let mut state = self.state.lock();
        while !state.stopping {
            if !self.in_burst.load(Ordering::Relaxed) {
                self.changed.wait(&mut state);
                continue;
            }
            allow(device, NONE);
            let (mut before, mut quiet) = (self.requests.load(Ordering::Relaxed), 0);
            while quiet < PATIENCE && !state.stopping {
                self.changed.wait_for(&mut state, ROUND);
                let now = self.requests.load(Ordering::Relaxed);
                quiet = if now - before < GOES_ON { quiet + 1 } else { 0 };
                before = now;
            }
            allow(device, ANY);
            state.since = None;
            self.in_burst.store(false, Ordering::Relaxed);
        }
    }

    pub(super) fn stop(&self) {
        self.state.lock().stopping = true;
        self.changed.notify_all();
    }
}

fn allow(mut device: &File, microseconds: i32) {
    if let Err(error) = device.write_all(&microseconds.to_ne_bytes()) {
        tracing::debug!(%error, DEVICE, microseconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::sync::Arc;

    /// What was written to a file that stands for the device. By a descriptor of its own: one that was duplicated would
    /// move the place that the other writes to.
    fn written(file: &File) -> Vec<i32> {
        let bytes = std::fs::read(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        bytes.chunks(4).map(|four| i32::from_ne_bytes(four.try_into().unwrap())).collect()
    }

    #[test]
    fn a_burst_is_noticed_and_its_end_too() {
        let file = tempfile::tempfile().unwrap();
        let awake = Arc::new(Awake::of(Some(file.try_clone().unwrap())));
        let watcher = std::thread::spawn({
            let awake = awake.clone();
            move || awake.run()
        });
        for _ in 0..BURST_LEN {
            awake.request();
        }
        assert!(!awake.in_burst.load(Ordering::Relaxed), "one run of requests tells no rate");
        // On a busy machine a burst may end, and another begin, between two requests.
        let until = |is_written: &dyn Fn(&[i32]) -> bool| {
            while !is_written(&written(&file)) {
                awake.request();
            }
        };
        until(&|values| values.first() == Some(&NONE));
        while awake.in_burst.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let ended = written(&file).len();
        assert!(ended >= 2);
        until(&|values| values.len() > ended);
        awake.stop();
        watcher.join().unwrap();
        let values = written(&file);
        assert!(values.chunks(2).all(|pair| pair == [NONE, ANY]), "{values:?}");
    }

    #[test]
    fn requests_far_apart_are_no_burst() {
        let awake = Awake::of(Some(tempfile::tempfile().unwrap()));
        for _ in 0..3 {
            for _ in 0..BURST_LEN {
                awake.request();
            }
            std::thread::sleep(2 * BURST);
        }
        assert!(!awake.in_burst.load(Ordering::Relaxed));
    }

    #[test]
    fn never_costs_nothing() {
        let awake = Awake::new(KeepAwake::Never).unwrap();
        awake.request();
        assert_eq!(awake.requests.load(Ordering::Relaxed), 0);
        awake.run();
    }
}
