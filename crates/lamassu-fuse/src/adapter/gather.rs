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

/// Of the kernel's limit for dirty pages, itself a fifth of the memory that is free for them, in millionths: what it gives to FUSE mounts, and what random writes get.
const KERNELS: u32 = PERCENT;
const RANDOM: u32 = 10 * PERCENT;
/// The same while nothing is known, which soon ends: so much, but no less than these bytes, since with a few pages alone every request would be a small one.
const UNKNOWN: u32 = PERCENT / 5;
const UNKNOWN_LEN: u64 = 8 << 20;
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
    unknown: u32,
    /// What the two read last, as we left them; `None` once somebody else has changed them: they are that one's then.
    left: Mutex<Option<[String; 2]>>,
}

impl DirtyLimits {
    /// Opens them where we may, and where nobody has set another limit than the kernel.
    pub(crate) fn of_device(device: &str) -> io::Result<Self> {
        let path = |name: &str| format!("/sys/class/bdi/{device}/{name}");
        let open = |name: &str| File::options().read(true).write(true).open(path(name));
        // A limit that is not kept for this mount by itself is one that others would wait for.
        if std::fs::read_to_string(path("strict_limit")).is_ok_and(|strict| strict.trim() == "0") {
            return Err(io::Error::other("the mount's limit is not kept strictly"));
        }
        // Before Linux 6.2 there are only percents.
        let (max, unit) = open("max_ratio_fine").map_or_else(|_| (open("max_ratio"), PERCENT), |fine| (Ok(fine), 1));
        let limits = DirtyLimits::new(open("min_ratio")?, max?, unit, dirty_threshold());
        let now = limits.read()?;
        if now != ["0".to_owned(), (KERNELS / unit).to_string()] {
            return Err(io::Error::other("somebody has set limits"));
        }
        *limits.left.lock() = Some(now);
        Ok(limits)
    }

    /// `threshold`: the kernel's limit in bytes, if it is known.
    fn new(min: File, max: File, unit: u32, threshold: Option<u64>) -> Self {
        let least = threshold.map_or(0, |bytes| UNKNOWN_LEN * 1_000_000 / bytes.max(UNKNOWN_LEN));
        let unknown = u32::try_from(least).map_or(KERNELS, |least| least.clamp(UNKNOWN, KERNELS));
        DirtyLimits { min, max, unit, unknown, left: Mutex::default() }
    }

    /// The lower limit, in percent, and the upper one, in units.
    fn read(&self) -> io::Result<[String; 2]> {
        let read = |file: &File| {
            let mut bytes = [0; 32];
            let n = file.read_at(&mut bytes, 0)?;
            let text = String::from_utf8_lossy(&bytes[..n]);
            Ok::<_, io::Error>(text.lines().next().unwrap_or_default().to_owned())
        };
        Ok([read(&self.min)?, read(&self.max)?])
    }

    fn set(&self, kind: Kind) {
        let mut left = self.left.lock();
        let Some(ours) = left.take() else { return };
        match self.change(kind, &ours) {
            Ok(now) => *left = now,
            Err(error) => {
                tracing::debug!(%error, ?kind, "limits of dirty pages");
                *left = self.read().ok();
            }
        }
    }

    /// What the limits read then, unless they are not ours any more.
    fn change(&self, kind: Kind, ours: &[String; 2]) -> io::Result<Option<[String; 2]>> {
        if self.read()? != *ours {
            return Ok(None);
        }
        // All of what random writes may have the mount is sure of: without, its share grows with what it has written lately, and is small at first.
        let (sure, share) = match kind {
            Kind::Unknown => (0, self.unknown),
            Kind::Sequential => (0, KERNELS),
            Kind::Random => (RANDOM / PERCENT, RANDOM),
        };
        let set_min = || self.min.write_all_at(format!("{sure}\n").as_bytes(), 0);
        let set_max = || self.max.write_all_at(format!("{}\n", (share / self.unit).max(1)).as_bytes(), 0);
        // In an order in which the lower is never above the upper, which the kernel refuses. It also refuses a sure share where others have all of it.
        match kind {
            Kind::Random => set_max().and_then(|()| set_min()),
            Kind::Unknown | Kind::Sequential => set_min().and_then(|()| set_max()),
        }?;
        self.read().map(Some)
    }
}

/// The kernel's limit for all dirty pages, bytes.
fn dirty_threshold() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/vmstat").ok()?;
    let pages = text.lines().find_map(|line| line.strip_prefix("nr_dirty_threshold "))?;
    Some(pages.trim().parse::<u64>().ok()?.saturating_mul(rustix::param::page_size() as u64))
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
        state.last = Instant::now();
        if state.requests < JUDGED && state.bytes < JUDGED_BYTES {
            return;
        }
        let kind = judge(state.bytes / u64::from(state.requests), state.kind);
        (state.requests, state.bytes) = (0, 0);
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

/// What requests of this many bytes in the mean are of, those before having been of kind `before`.
fn judge(mean: u64, before: Kind) -> Kind {
    match (mean, before) {
        (..SMALL, _) => Kind::Random,
        (LARGE.., _) | (_, Kind::Unknown) => Kind::Sequential,
        (_, before) => before,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With limits in plain files.
    fn gather(unit: u32, threshold: Option<u64>) -> (Gather, [File; 2]) {
        let files = [(); 2].map(|()| tempfile::tempfile().unwrap());
        let [min, max] = files.each_ref().map(|file| file.try_clone().unwrap());
        let limits = DirtyLimits::new(min, max, unit, threshold);
        *limits.left.lock() = Some(limits.read().unwrap());
        let gather = Gather::default();
        gather.set_limits(limits);
        (gather, files)
    }

    fn limits(gather: &Gather) -> [String; 2] {
        gather.limits.get().unwrap().read().unwrap()
    }

    #[test]
    fn limits_follow_the_size_of_requests() {
        let (gather, _files) = gather(1, None);
        assert_eq!(limits(&gather), ["0", "2000"]);
        (0..JUDGED - 1).for_each(|_| gather.note(4096));
        assert_eq!(limits(&gather), ["0", "2000"], "not judged yet");
        gather.note(4096);
        assert_eq!(limits(&gather), ["10", "100000"]);
        (0..JUDGED).for_each(|_| gather.note(64 << 10));
        assert_eq!(limits(&gather), ["10", "100000"], "kept while it is not clear");
        (0..4).for_each(|_| gather.note(1 << 20));
        assert_eq!(limits(&gather), ["0", "10000"]);
        (0..JUDGED).for_each(|_| gather.note(64 << 10));
        assert_eq!(limits(&gather), ["0", "10000"]);
    }

    #[test]
    fn what_is_not_clear_at_first_gets_what_the_kernel_gives() {
        let (gather, _files) = gather(1, None);
        (0..JUDGED).for_each(|_| gather.note(64 << 10));
        assert_eq!(limits(&gather), ["0", "10000"]);
    }

    #[test]
    fn a_few_megabytes_are_the_least() {
        for (threshold, least) in
            [(100 << 30, "2000"), (2 << 30, "3906"), (100 << 20, "10000"), (1, "10000"), (0, "10000")]
        {
            assert_eq!(limits(&gather(1, Some(threshold)).0), ["0", least]);
        }
    }

    #[test]
    fn percents_will_do() {
        let (gather, _files) = gather(PERCENT, None);
        assert_eq!(limits(&gather), ["0", "1"]);
        (0..JUDGED).for_each(|_| gather.note(4096));
        assert_eq!(limits(&gather), ["10", "10"]);
    }

    #[test]
    fn after_a_pause_nothing_is_known() {
        const NOW: Duration = Duration::ZERO;
        let (gather, _files) = gather(1, None);
        (0..4).for_each(|_| gather.note(1 << 20));
        gather.end_after(PAUSES);
        assert_eq!(limits(&gather), ["0", "10000"]);
        gather.end_after([NOW, Duration::MAX]);
        assert_eq!(limits(&gather), ["0", "2000"]);
        (0..JUDGED).for_each(|_| gather.note(4096));
        gather.end_after([NOW, Duration::MAX]);
        assert_eq!(limits(&gather), ["10", "100000"]);
        gather.end_after([NOW, NOW]);
        assert_eq!(limits(&gather), ["0", "2000"]);
    }

    #[test]
    fn what_somebody_else_has_set_stays() {
        let (gather, [_, max]) = gather(1, None);
        max.write_all_at(b"5000\n", 0).unwrap();
        (0..JUDGED).for_each(|_| gather.note(4096));
        assert_eq!(limits(&gather), ["0", "5000"]);
        max.write_all_at(b"2000\n", 0).unwrap();
        (0..4).for_each(|_| gather.note(1 << 20));
        assert_eq!(limits(&gather), ["0", "2000"], "for good");
    }

    #[test]
    fn without_limits_nothing_is_counted() {
        let gather = Gather::default();
        (0..2 * JUDGED).for_each(|_| gather.note(4096));
        gather.end_after([Duration::ZERO; 2]);
        assert_eq!(gather.state.lock().requests, 0);
    }
}
