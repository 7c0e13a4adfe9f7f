//! Has wake-ups cost less while requests come in quick succession.
//!
//! A request wakes a thread here, and its answer wakes the caller: two wake-ups, each of an idle processor where there is more than one. In a virtual
//! machine an idle processor has left for the hypervisor, and takes longer to come back than a small request takes altogether. While there are many
//! requests a second, the kernel is therefore asked, by its interface for quality of service, for idle processors that wait without sleeping
//! (`/dev/cpu_dma_latency`, Documentation/power/pm_qos_interface.rst). The request ends with the descriptor, however this process ends. Where the user
//! may not ask for that, a thread of this process keeps one processor busy instead, see `decoy`.

use super::decoy::{Decoy, Trial};
use crate::options::KeepAwake;
use parking_lot::{Condvar, Mutex};
use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

const DEVICE: &str = "/dev/cpu_dma_latency";
const IDLE_DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";
/// What the kernel calls the idle driver of KVM's guests, whose every sleep is an exit to the hypervisor.
const GUEST_DRIVER: &str = "haltpoll";
/// With more, processors that have nothing to do with this mount would mostly be kept awake.
const PROCESSORS_MAX: usize = 8;

/// So many requests within [`BURST`] are a burst.
const BURST_LEN: u64 = 16;
const BURST: Duration = Duration::from_millis(10);
/// How often a burst is looked at, and with how many requests since the last look it goes on.
const ROUND: Duration = Duration::from_millis(10);
const GOES_ON: u64 = 4;
/// So many rounds without are its end.
const PATIENCE: u32 = 3;

/// Microseconds an idle processor may take to wake up.
const NONE: i32 = 0;
/// `PM_QOS_CPU_LATENCY_DEFAULT_VALUE` of the kernel: as long as it likes.
const ANY: i32 = 2_000_000_000;

#[derive(Default)]
struct State {
    /// When the current run of [`BURST_LEN`] requests began.
    since: Option<Instant>,
    stopping: bool,
}

/// How wake-ups are made to cost less.
enum Way {
    /// By the kernel's interface.
    Device(File),
    /// Without it: there are two processors, and one is kept busy.
    Decoy(Decoy),
}

/// What the watcher sees of a burst.
enum Seen {
    Begins,
    /// A round, with so many requests a second.
    Round(u64),
    /// A round with hardly any.
    Pause,
    Ends,
}

/// Counts requests, and has wake-ups cost less during bursts of them.
pub(super) struct Awake {
    way: Option<Way>,
    requests: AtomicU64,
    in_burst: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Awake {
    /// Opens the device where it is wanted. An error only if it was asked for in so many words.
    pub(super) fn new(wanted: KeepAwake) -> io::Result<Self> {
        let open = || File::options().write(true).open(DEVICE);
        let way = match wanted {
            KeepAwake::Never => None,
            KeepAwake::Always => Some(Way::Device(open()?)),
            KeepAwake::Thread => Some(Way::Decoy(Decoy::default())),
            KeepAwake::Auto if !is_small_guest() => None,
            KeepAwake::Auto => match open() {
                Ok(device) => Some(Way::Device(device)),
                Err(error) => {
                    tracing::debug!(%error, DEVICE);
                    (processors() == 2).then(|| Way::Decoy(Decoy::default()))
                }
            },
        };
        Ok(Awake {
            way,
            requests: AtomicU64::new(0),
            in_burst: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Notes a request.
    pub(super) fn request(&self) {
        if self.way.is_none() {
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
        match &self.way {
            None => {}
            Some(Way::Device(device)) => self.watch(|seen| match seen {
                Seen::Begins => allow(device, NONE),
                Seen::Round(_) | Seen::Pause => {}
                Seen::Ends => allow(device, ANY),
            }),
            Some(Way::Decoy(decoy)) => std::thread::scope(|scope| {
                let thread = Builder::new().name("lamassu-decoy".into()).spawn_scoped(scope, || decoy.run());
                if let Err(error) = thread {
                    tracing::debug!(%error, "no thread to keep a processor busy");
                    return;
                }
                let mut trial = Trial::default();
                self.watch(|seen| match seen {
                    Seen::Begins => {}
                    Seen::Round(rate) => decoy.set(trial.next(rate)),
                    Seen::Pause | Seen::Ends => {
                        trial.pause();
                        decoy.set(false);
                    }
                });
                decoy.end();
            }),
        }
    }

    fn watch(&self, mut tell: impl FnMut(Seen)) {
        let mut state = self.state.lock();
        while !state.stopping {
            if !self.in_burst.load(Ordering::Relaxed) {
                self.changed.wait(&mut state);
                continue;
            }
            tell(Seen::Begins);
            let (mut before, mut quiet) = (self.requests.load(Ordering::Relaxed), 0);
            while quiet < PATIENCE && !state.stopping {
                let begun = Instant::now();
                self.changed.wait_for(&mut state, ROUND);
                let now = self.requests.load(Ordering::Relaxed);
                let (came, millis) = (now - before, begun.elapsed().as_millis().max(1) as u64);
                before = now;
                if came < GOES_ON {
                    quiet += 1;
                    tell(Seen::Pause);
                } else {
                    quiet = 0;
                    tell(Seen::Round(came * 1000 / millis));
                }
            }
            tell(Seen::Ends);
            state.since = None;
            self.in_burst.store(false, Ordering::Relaxed);
        }
    }

    pub(super) fn stop(&self) {
        self.state.lock().stopping = true;
        self.changed.notify_all();
    }
}

/// A virtual machine on KVM that says so, with few processors.
fn is_small_guest() -> bool {
    let driver = std::fs::read_to_string(IDLE_DRIVER).unwrap_or_default();
    driver.trim() == GUEST_DRIVER && (2..=PROCESSORS_MAX).contains(&processors())
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn allow(mut device: &File, microseconds: i32) {
    if let Err(error) = device.write_all(&microseconds.to_ne_bytes()) {
        tracing::debug!(%error, DEVICE, microseconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek};
    use std::sync::Arc;

    /// What was written to a file that stands for the device.
    fn written(file: &mut File) -> Vec<i32> {
        let mut bytes = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        bytes.chunks(4).map(|four| i32::from_ne_bytes(four.try_into().unwrap())).collect()
    }

    #[test]
    fn a_burst_is_noticed_and_its_end_too() {
        let mut file = tempfile::tempfile().unwrap();
        let awake = Arc::new(Awake {
            way: Some(Way::Device(file.try_clone().unwrap())),
            ..Awake::new(KeepAwake::Never).unwrap()
        });
        let watcher = std::thread::spawn({
            let awake = awake.clone();
            move || awake.run()
        });
        let until = |wanted: bool| {
            while awake.in_burst.load(Ordering::Relaxed) != wanted {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        for _ in 0..BURST_LEN {
            awake.request();
        }
        assert!(!awake.in_burst.load(Ordering::Relaxed), "one run of requests tells no rate");
        while !awake.in_burst.load(Ordering::Relaxed) {
            awake.request();
        }
        until(false);
        assert_eq!(written(&mut file), [NONE, ANY]);
        while !awake.in_burst.load(Ordering::Relaxed) {
            awake.request();
        }
        while written(&mut file).len() < 3 {
            std::thread::yield_now();
        }
        awake.stop();
        watcher.join().unwrap();
        assert_eq!(written(&mut file), [NONE, ANY, NONE, ANY]);
    }

    #[test]
    fn requests_far_apart_are_no_burst() {
        let awake = Awake::new(KeepAwake::Thread).unwrap();
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
