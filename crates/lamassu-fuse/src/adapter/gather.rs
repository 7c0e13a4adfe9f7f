//! Lets the kernel gather random writes before it writes them back.
//!
//! Of a FUSE mount the kernel holds only as many dirty pages as a hundredth of its limit for all, and begins to write back at half of that. Sequential
//! writes are served well so: while the next pages are filled, those before them are encrypted. Random writes are not: pages leave one by one, a request
//! and a commit's work each, whose neighbours would have been there a moment later. While the requests that come from write-back are small, the mount is
//! therefore granted more, and what it has so far again when they are large (`max_ratio` and `min_ratio` of the mount's backing device,
//! Documentation/ABI/testing/sysfs-class-bdi). The limit stays one that the kernel keeps strictly: a store that hangs stops no other writer.

use parking_lot::Mutex;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Percent of the kernel's limit for dirty pages, which is a fifth of the memory that is free for them. What the kernel gives to FUSE mounts:
const NARROW: &str = "1";
/// While random writes come; also what the mount is sure of, as otherwise its share grows with what it has written lately.
const WIDE: &str = "10";
const NOTHING_SURE: &str = "0";

/// So many requests are judged together: with fewer bytes each than the first bound they are of random writes, with more than the second they are not.
const JUDGED: u32 = 64;
const SMALL: u64 = 32 << 10;
const LARGE: u64 = 128 << 10;
/// The kernel writes everything back after half a minute. So long without a request means that nothing is gathered.
pub(super) const IDLE: Duration = Duration::from_secs(60);

/// The two limits of a mount in /sys.
pub(crate) struct DirtyLimits {
    min: File,
    max: File,
}

impl DirtyLimits {
    /// Opens them where we may, and where nobody has set another limit than the kernel.
    pub(crate) fn of_device(device: &str) -> io::Result<Self> {
        let open = |name: &str| {
            let path = format!("/sys/class/bdi/{device}/{name}");
            Ok::<_, io::Error>((std::fs::read_to_string(&path)?, File::options().write(true).open(&path)?))
        };
        let ((min_now, min), (max_now, max)) = (open("min_ratio")?, open("max_ratio")?);
        if (min_now.trim(), max_now.trim()) != (NOTHING_SURE, NARROW) {
            return Err(io::Error::other("the administrator has set limits"));
        }
        Ok(DirtyLimits { min, max })
    }

    /// In an order in which the lower is never above the higher, which the kernel refuses. It also refuses a sure share where others have theirs.
    fn set(&self, wide: bool) {
        let (min, max) = if wide { (WIDE, WIDE) } else { (NOTHING_SURE, NARROW) };
        let set_min = || self.min.write_all_at(min.as_bytes(), 0);
        let set_max = || self.max.write_all_at(max.as_bytes(), 0);
        let done = if wide { set_max().and_then(|()| set_min()) } else { set_min().and_then(|()| set_max()) };
        if let Err(error) = done {
            tracing::debug!(%error, wide, "limits of dirty pages");
        }
    }
}

struct State {
    wide: bool,
    last: Instant,
}

/// Judges the sizes of requests from write-back.
pub(super) struct Gather {
    limits: OnceLock<DirtyLimits>,
    requests: AtomicU32,
    bytes: AtomicU64,
    state: Mutex<State>,
}

impl Default for Gather {
    fn default() -> Self {
        Gather {
            limits: OnceLock::new(),
            requests: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            state: Mutex::new(State { wide: false, last: Instant::now() }),
        }
    }
}

impl Gather {
    /// Without limits nothing is judged.
    pub(super) fn set_limits(&self, limits: DirtyLimits) {
        // Set once, by `mount`.
        let _ = self.limits.set(limits);
    }

    /// A request from write-back.
    pub(super) fn note(&self, len: usize) {
        let Some(limits) = self.limits.get() else { return };
        self.bytes.fetch_add(len as u64, Ordering::Relaxed);
        // Requests that are counted meanwhile may fall to either group; it is a judgement, no account.
        if self.requests.fetch_add(1, Ordering::Relaxed) + 1 == JUDGED {
            self.requests.store(0, Ordering::Relaxed);
            let mean = self.bytes.swap(0, Ordering::Relaxed) / u64::from(JUDGED);
            let mut state = self.state.lock();
            state.last = Instant::now();
            if let Some(wide) = judge(mean).filter(|wide| *wide != state.wide) {
                state.wide = wide;
                limits.set(wide);
            }
        }
    }

    /// What comes after a pause is taken for sequential until it shows what it is.
    pub(super) fn end_when_idle(&self, pause: Duration) {
        let Some(limits) = self.limits.get() else { return };
        let mut state = self.state.lock();
        if state.wide && state.last.elapsed() >= pause {
            state.wide = false;
            limits.set(false);
        }
    }
}

/// Whether requests of this many bytes in the mean want more pages to be gathered; `None` if that is not clear.
fn judge(mean: u64) -> Option<bool> {
    match mean {
        ..SMALL => Some(true),
        LARGE.. => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gather() -> (Gather, [File; 2]) {
        let [min, max] = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        let gather = Gather::default();
        gather.set_limits(DirtyLimits { min: min.try_clone().unwrap(), max: max.try_clone().unwrap() });
        (gather, [min, max])
    }

    /// What was last written, over what was longer.
    fn limits(files: &[File; 2]) -> [String; 2] {
        files.each_ref().map(|file| {
            let mut bytes = [0; 2];
            let n = file.read_at(&mut bytes, 0).unwrap();
            String::from_utf8(bytes[..n].to_vec()).unwrap()
        })
    }

    #[test]
    fn small_requests_widen_the_limits_and_large_ones_narrow_them() {
        let (gather, files) = gather();
        (0..JUDGED - 1).for_each(|_| gather.note(4096));
        assert_eq!(limits(&files), ["", ""], "not judged yet");
        gather.note(4096);
        assert_eq!(limits(&files), ["10", "10"]);
        files.iter().for_each(|file| file.set_len(0).unwrap());
        (0..JUDGED).for_each(|_| gather.note(64 << 10));
        (0..JUDGED).for_each(|_| gather.note(8 << 10));
        assert_eq!(limits(&files), ["", ""], "said once, and kept while it is not clear");
        (0..JUDGED).for_each(|_| gather.note(1 << 20));
        assert_eq!(limits(&files), ["0", "1"]);
    }

    #[test]
    fn a_pause_narrows_them() {
        let (gather, files) = gather();
        (0..JUDGED).for_each(|_| gather.note(4096));
        gather.end_when_idle(IDLE);
        assert_eq!(limits(&files), ["10", "10"]);
        files.iter().for_each(|file| file.set_len(0).unwrap());
        gather.end_when_idle(Duration::ZERO);
        assert_eq!(limits(&files), ["0", "1"]);
    }

    #[test]
    fn without_limits_nothing_is_counted() {
        let gather = Gather::default();
        (0..2 * JUDGED).for_each(|_| gather.note(4096));
        gather.end_when_idle(Duration::ZERO);
        assert_eq!(gather.requests.load(Ordering::Relaxed), 0);
    }
}
