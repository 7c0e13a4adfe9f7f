//! Sets how many dirty pages the kernel may hold for the mount, so that random writes gather before they are written
//! back.
//!
//! The kernel gives a FUSE mount one hundredth of its limit for all dirty pages, and begins to write back at half of
//! that. This serves sequential writes well: while the next pages are filled, those before them are encrypted. It
//! serves random writes badly: pages leave one by one, each as a request and a commit of its own, although their
//! neighbours would follow a moment later. So the mount gets a larger share while the requests from write-back are
//! small, and a smaller one until their size is known. The share is set by the limits of the mount's backing device
//! (Documentation/ABI/testing/sysfs-class-bdi). The kernel keeps these limits strictly, so a store that hangs stops no
//! other writer.

use parking_lot::Mutex;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The kind of writes that write-back brings, judged by the size of its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LimitKind {
    Unknown,
    Sequential,
    Random,
}

/// Shares of the kernel's limit for dirty pages (a fifth of the memory that is free for them), in millionths: what the
/// kernel gives to FUSE mounts, and what random writes get.
const KERNELS: u32 = PERCENT;
const RANDOM: u32 = 10 * PERCENT;
/// The share until the kind of the store is known. A minimum in bytes keeps requests from becoming small.
const UNKNOWN: u32 = PERCENT / 5;
const UNKNOWN_LEN: u64 = 8 << 20;
const PERCENT: u32 = 10_000;

/// This many requests, or bytes, are judged together. A mean below `SMALL` bytes shows random writes, one from `LARGE`
/// on shows sequential writes.
const JUDGED: u32 = 64;
const JUDGED_BYTES: u64 = 4 << 20;
const SMALL: u64 = 32 << 10;
const LARGE: u64 = 128 << 10;
/// After this time without a request sequential and random writes count as ended. Random writes get longer: the kernel
/// writes everything back after half a minute.
pub(super) const PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(60)];

/// The limits of a mount in /sys.
pub(crate) struct DirtyLimits {
    min: File,
    max: File,
    /// The unit of the upper limit, in millionths.
    unit: u32,
    unknown: u32,
    /// What both files contained after our last change. `None` once another program has changed them: from then on they
    /// are left alone.
    left: Mutex<Option<[String; 2]>>,
}

impl DirtyLimits {
    /// Opens the files; an error if this process may not, or if they do not contain the kernel's defaults.
    pub(crate) fn of_device(device: &str) -> io::Result<Self> {
        let path = |name: &str| format!("/sys/class/bdi/{device}/{name}");
        let open = |name: &str| File::options().read(true).write(true).open(path(name));
        // Without a strict limit, writers of other file systems would wait for this mount.
        if std::fs::read_to_string(path("strict_limit")).is_ok_and(|strict| strict.trim() == "0") {
            return Err(io::Error::other("the mount's limit is not kept strictly"));
        }
        // Before Linux 6.2 there are only percents.
        let (max, unit) = open("max_ratio_fine").map_or_else(|_| (open("max_ratio"), PERCENT), |fine| (Ok(fine), 1));
        let limits = DirtyLimits::new(open("min_ratio")?, max?, unit, dirty_threshold());
        let now = limits.read()?;
        if now != ["0".to_owned(), (KERNELS / unit).to_string()] {
            return Err(io::Error::other("the limits are not those that the kernel sets"));
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

    fn set(&self, kind: LimitKind) {
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

    /// Sets the limits and returns what the files contain then; `None`: another program has changed them.
    fn change(&self, kind: LimitKind, ours: &[String; 2]) -> io::Result<Option<[String; 2]>> {
        if self.read()? != *ours {
            return Ok(None);
        }
        // Random writes get their whole share as a minimum: otherwise the kernel lets it grow from a small one with
        // what was written lately.
        let (sure, share) = match kind {
            LimitKind::Unknown => (0, self.unknown),
            LimitKind::Sequential => (0, KERNELS),
            LimitKind::Random => (RANDOM / PERCENT, RANDOM),
        };
        let set_min = || self.min.write_all_at(format!("{sure}\n").as_bytes(), 0);
        let set_max = || self.max.write_all_at(format!("{}\n", (share / self.unit).max(1)).as_bytes(), 0);
        // In this order the lower limit is never above the upper one, which the kernel refuses. It also refuses a
        // minimum if other devices have all of it.
        match kind {
            LimitKind::Random => set_max().and_then(|()| set_min()),
            LimitKind::Unknown | LimitKind::Sequential => set_min().and_then(|()| set_max()),
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
    kind: LimitKind,
    /// Requests and bytes that are not judged yet.
    requests: u32,
    bytes: u64,
    last: Instant,
}

/// Judges the sizes of requests from write-back.
pub(super) struct DirtyShare {
    limits: OnceLock<DirtyLimits>,
    state: Mutex<State>,
}

impl Default for DirtyShare {
    fn default() -> Self {
        let state = State { kind: LimitKind::Unknown, requests: 0, bytes: 0, last: Instant::now() };
        DirtyShare { limits: OnceLock::new(), state: Mutex::new(state) }
    }
}

impl DirtyShare {
    /// Without limits nothing is judged.
    pub(super) fn set_limits(&self, limits: DirtyLimits) {
        limits.set(LimitKind::Unknown);
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

    /// After a pause the kind is unknown again.
    pub(super) fn end_after(&self, [sequential, random]: [Duration; 2]) {
        let Some(limits) = self.limits.get() else { return };
        let mut state = self.state.lock();
        let pause = match state.kind {
            LimitKind::Unknown => return,
            LimitKind::Sequential => sequential,
            LimitKind::Random => random,
        };
        if state.last.elapsed() >= pause {
            (state.kind, state.requests, state.bytes) = (LimitKind::Unknown, 0, 0);
            limits.set(LimitKind::Unknown);
        }
    }
}

/// The kind that requests of `mean` bytes show, after those of kind `before`.
fn judge(mean: u64, before: LimitKind) -> LimitKind {
    match (mean, before) {
        (..SMALL, _) => LimitKind::Random,
        (LARGE.., _) | (_, LimitKind::Unknown) => LimitKind::Sequential,
        (_, before) => before,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With limits in plain files.
    fn share(unit: u32, threshold: Option<u64>) -> (DirtyShare, [File; 2]) {
        let files = [(); 2].map(|()| tempfile::tempfile().unwrap());
        let [min, max] = files.each_ref().map(|file| file.try_clone().unwrap());
        let limits = DirtyLimits::new(min, max, unit, threshold);
        *limits.left.lock() = Some(limits.read().unwrap());
        let share = DirtyShare::default();
        share.set_limits(limits);
        (share, files)
    }

    fn limits(share: &DirtyShare) -> [String; 2] {
        share.limits.get().unwrap().read().unwrap()
    }

    #[test]
    fn limits_follow_the_size_of_requests() {
        let (share, _files) = share(1, None);
        assert_eq!(limits(&share), ["0", "2000"]);
        (0..JUDGED - 1).for_each(|_| share.note(4096));
        assert_eq!(limits(&share), ["0", "2000"], "not judged yet");
        share.note(4096);
        assert_eq!(limits(&share), ["10", "100000"]);
        (0..JUDGED).for_each(|_| share.note(64 << 10));
        assert_eq!(limits(&share), ["10", "100000"], "kept while it is not clear");
        (0..4).for_each(|_| share.note(1 << 20));
        assert_eq!(limits(&share), ["0", "10000"]);
        (0..JUDGED).for_each(|_| share.note(64 << 10));
        assert_eq!(limits(&share), ["0", "10000"]);
    }

    #[test]
    fn what_is_not_clear_at_first_gets_what_the_kernel_gives() {
        let (share, _files) = share(1, None);
        (0..JUDGED).for_each(|_| share.note(64 << 10));
        assert_eq!(limits(&share), ["0", "10000"]);
    }

    #[test]
    fn a_few_megabytes_are_the_least() {
        for (threshold, least) in
            [(100 << 30, "2000"), (2 << 30, "3906"), (100 << 20, "10000"), (1, "10000"), (0, "10000")]
        {
            assert_eq!(limits(&share(1, Some(threshold)).0), ["0", least]);
        }
    }

    #[test]
    fn percents_will_do() {
        let (share, _files) = share(PERCENT, None);
        assert_eq!(limits(&share), ["0", "1"]);
        (0..JUDGED).for_each(|_| share.note(4096));
        assert_eq!(limits(&share), ["10", "10"]);
    }

    #[test]
    fn after_a_pause_nothing_is_known() {
        const NOW: Duration = Duration::ZERO;
        let (share, _files) = share(1, None);
        (0..4).for_each(|_| share.note(1 << 20));
        share.end_after(PAUSES);
        assert_eq!(limits(&share), ["0", "10000"]);
        share.end_after([NOW, Duration::MAX]);
        assert_eq!(limits(&share), ["0", "2000"]);
        (0..JUDGED).for_each(|_| share.note(4096));
        share.end_after([NOW, Duration::MAX]);
        assert_eq!(limits(&share), ["10", "100000"]);
        share.end_after([NOW, NOW]);
        assert_eq!(limits(&share), ["0", "2000"]);
    }

    #[test]
    fn what_somebody_else_has_set_stays() {
        let (share, [_, max]) = share(1, None);
        max.write_all_at(b"5000\n", 0).unwrap();
        (0..JUDGED).for_each(|_| share.note(4096));
        assert_eq!(limits(&share), ["0", "5000"]);
        max.write_all_at(b"2000\n", 0).unwrap();
        (0..4).for_each(|_| share.note(1 << 20));
        assert_eq!(limits(&share), ["0", "2000"], "for good");
    }

    #[test]
    fn without_limits_nothing_is_counted() {
        let share = DirtyShare::default();
        (0..2 * JUDGED).for_each(|_| share.note(4096));
        share.end_after([Duration::ZERO; 2]);
        assert_eq!(share.state.lock().requests, 0);
    }
}
