//! Lets the kernel gather random writes before it writes them back.
//!
//! Of a FUSE mount the kernel holds only as many dirty pages as a hundredth of its limit for all, and begins to write back at half of that. Sequential
//! writes are served well so: while the next pages are filled, those before them are encrypted. Random writes are not: pages leave one by one, a request
//! and a commit's work each, whose neighbours would have been there a moment later. So the mount is granted more while the requests that come from
//! write-back are small, and less while it is not known yet of what kind they are (the limits of the mount's backing device, Documentation/ABI/testing/sysfs-class-bdi).
//! They stay limits that the kernel keeps strictly: a store that hangs stops no other writer.

use parking_lot::Mutex;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What comes from write-back, as far as its requests have shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Unknown,
    Sequential,
    Random,
}

impl Kind {
    /// What the mount may have of the kernel's limit for dirty pages, itself a fifth of the memory that is free for them, in millionths.
    fn share(self) -> u32 {
        match self {
            // It soon shows what it is.
            Kind::Unknown => 2_000,
            Kind::Sequential => KERNELS,
            Kind::Random => 100_000,
        }
    }

    /// Percent of it that the mount is sure of: without, its share grows with what it has written lately, and is small at first.
    fn sure(self) -> u32 {
        match self {
            Kind::Unknown | Kind::Sequential => 0,
            Kind::Random => 10,
        }
    }
}

/// The share that the kernel gives to FUSE mounts.
const KERNELS: u32 = 10_000;
const PERCENT: u32 = 10_000;

/// So many requests, or bytes, are judged together: with fewer bytes each than the first bound they are of random writes, with more than the second they are not.
const JUDGED: u32 = 64;
const JUDGED_BYTES: u64 = 4 << 20;
const SMALL: u64 = 32 << 10;
const LARGE: u64 = 128 << 10;
/// After so long without a request sequential writes are over. Random ones are after a longer while: the kernel writes everything back after half a minute.
pub(super) const PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(60)];

/// The limits of a mount in /sys.
pub(crate) struct DirtyLimits {
    min: File,
    max: File,
    /// What a unit of the upper limit is, in millionths.
    unit: u32,
}

impl DirtyLimits {
    /// Opens them where we may, and where nobody has set another limit than the kernel.
    pub(crate) fn of_device(device: &str) -> io::Result<Self> {
        let open = |name: &str| {
            let path = format!("/sys/class/bdi/{device}/{name}");
            Ok::<_, io::Error>((std::fs::read_to_string(&path)?, File::options().write(true).open(&path)?))
        };
        let (min_now, min) = open("min_ratio")?;
        // Before Linux 6.2 there are only percents.
        let ((max_now, max), unit) = match open("max_ratio_fine") {
            Ok(fine) => (fine, 1),
            Err(_) => (open("max_ratio")?, PERCENT),
        };
        if (min_now.trim(), max_now.trim()) != ("0", &*(KERNELS / unit).to_string()) {
            return Err(io::Error::other("the administrator has set limits"));
        }
        Ok(DirtyLimits { min, max, unit })
    }

    /// In an order in which the lower is never above the upper, which the kernel refuses. It also refuses a sure share where others have all of it.
    fn set(&self, kind: Kind) {
        let set_min = || self.min.write_all_at(kind.sure().to_string().as_bytes(), 0);
        let set_max = || self.max.write_all_at((kind.share() / self.unit).max(1).to_string().as_bytes(), 0);
        let done = match kind {
            Kind::Random => set_max().and_then(|()| set_min()),
            Kind::Unknown | Kind::Sequential => set_min().and_then(|()| set_max()),
        };
        if let Err(error) = done {
            tracing::debug!(%error, ?kind, "limits of dirty pages");
        }
    }
}

struct State {
    kind: Kind,
    /// Not judged yet.
    requests: u32,
    bytes: u64,
    last: Instant,
}

/// Judges the sizes of requests from write-back.
pub(super) struct Gather {
    limits: OnceLock<DirtyLimits>,
    state: Mutex<State>,
}

impl Default for Gather {
    fn default() -> Self {
        let state = State { kind: Kind::Unknown, requests: 0, bytes: 0, last: Instant::now() };
        Gather { limits: OnceLock::new(), state: Mutex::new(state) }
    }
}

impl Gather {
    /// Without limits nothing is judged.
    pub(super) fn set_limits(&self, limits: DirtyLimits) {
        limits.set(Kind::Unknown);
        // Set once, by `mount`.
        let _ = self.limits.set(limits);
    }

    /// A request from write-back.
    pub(super) fn note(&self, len: usize) {
        let Some(limits) = self.limits.get() else { return };
        let mut state = self.state.lock();
        state.requests += 1;
        state.bytes += len as u64;
        if state.requests < JUDGED && state.bytes < JUDGED_BYTES {
            return;
        }
        let kind = judge(state.bytes / u64::from(state.requests)).unwrap_or(state.kind);
        (state.requests, state.bytes, state.last) = (0, 0, Instant::now());
        if kind != state.kind {
            state.kind = kind;
            limits.set(kind);
        }
    }

    /// What comes after a pause has to show anew what it is.
    pub(super) fn end_after(&self, [sequential, random]: [Duration; 2]) {
        let Some(limits) = self.limits.get() else { return };
        let mut state = self.state.lock();
        let pause = match state.kind {
            Kind::Unknown => return,
            Kind::Sequential => sequential,
            Kind::Random => random,
        };
        if state.last.elapsed() >= pause {
            (state.kind, state.requests, state.bytes) = (Kind::Unknown, 0, 0);
            limits.set(Kind::Unknown);
        }
    }
}

/// What requests of this many bytes in the mean are of; `None` if that is not clear.
fn judge(mean: u64) -> Option<Kind> {
    match mean {
        ..SMALL => Some(Kind::Random),
        LARGE.. => Some(Kind::Sequential),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Limits([File; 2]);

    impl Limits {
        /// The lower and the upper one, if they were set since this was asked for last.
        fn told(&self) -> [String; 2] {
            self.0.each_ref().map(|file| {
                let mut bytes = [0; 8];
                let n = file.read_at(&mut bytes, 0).unwrap();
                file.set_len(0).unwrap();
                String::from_utf8(bytes[..n].to_vec()).unwrap()
            })
        }
    }

    fn gather(unit: u32) -> (Gather, Limits) {
        let [min, max] = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        let gather = Gather::default();
        gather.set_limits(DirtyLimits { min: min.try_clone().unwrap(), max: max.try_clone().unwrap(), unit });
        (gather, Limits([min, max]))
    }

    #[test]
    fn limits_follow_the_size_of_requests() {
        let (gather, limits) = gather(1);
        assert_eq!(limits.told(), ["0", "2000"]);
        (0..JUDGED - 1).for_each(|_| gather.note(4096));
        assert_eq!(limits.told(), ["", ""], "not judged yet");
        gather.note(4096);
        assert_eq!(limits.told(), ["10", "100000"]);
        (0..JUDGED).for_each(|_| gather.note(64 << 10));
        (0..JUDGED).for_each(|_| gather.note(8 << 10));
        assert_eq!(limits.told(), ["", ""], "said once, and kept while it is not clear");
        (0..4).for_each(|_| gather.note(1 << 20));
        assert_eq!(limits.told(), ["0", "10000"]);
    }

    #[test]
    fn percents_will_do() {
        let (gather, limits) = gather(PERCENT);
        assert_eq!(limits.told(), ["0", "1"]);
        (0..JUDGED).for_each(|_| gather.note(4096));
        assert_eq!(limits.told(), ["10", "10"]);
    }

    #[test]
    fn a_pause_makes_them_small_again() {
        const NOW: Duration = Duration::ZERO;
        let (gather, limits) = gather(1);
        (0..4).for_each(|_| gather.note(1 << 20));
        assert_eq!(limits.told(), ["0", "10000"]);
        gather.end_after(PAUSES);
        assert_eq!(limits.told(), ["", ""]);
        gather.end_after([NOW, Duration::MAX]);
        assert_eq!(limits.told(), ["0", "2000"]);
        (0..JUDGED).for_each(|_| gather.note(4096));
        assert_eq!(limits.told(), ["10", "100000"]);
        gather.end_after([NOW, Duration::MAX]);
        assert_eq!(limits.told(), ["", ""]);
        gather.end_after([NOW, NOW]);
        assert_eq!(limits.told(), ["0", "2000"]);
    }

    #[test]
    fn without_limits_nothing_is_counted() {
        let gather = Gather::default();
        (0..2 * JUDGED).for_each(|_| gather.note(4096));
        gather.end_after([Duration::ZERO; 2]);
        assert_eq!(gather.state.lock().requests, 0);
    }
}
