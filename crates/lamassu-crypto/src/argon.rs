//! Argon2id (RFC 9106) for passphrases, and the choice of its cost for this machine. [`Argon2Params`] bounds the cost
//! (§4).

use crate::secret::{Secret, without_trace};
use argon2::{Algorithm, Argon2, Block, Params, Version};
use lamassu_format::header::Argon2Params;
use std::path::Path;
use std::time::{Duration, Instant};
use zeroize::Zeroize;

/// Always allowed: 64 MiB, the memory of RFC 9106's option for small machines.
pub const MEMORY_ALWAYS_KIB: u32 = 64 << 10;

/// The most memory, in KiB, that one derivation should take here and now. This is half of what is available without
/// swapping, by the kernel's own estimate (`MemAvailable`) and by the limits of this process's control groups, and at
/// least `MEMORY_ALWAYS_KIB`.
pub fn memory_to_spare_kib() -> u32 {
    let kib = free_memory_kib().min(group_memory_kib().unwrap_or(u64::MAX)) / 2;
    u32::try_from(kib).unwrap_or(u32::MAX).max(MEMORY_ALWAYS_KIB)
}

/// Argon2id version 0x13 to 32 bytes. `None`: there is not enough memory.
pub fn argon2id(passphrase: &[u8], salt: &[u8; 32], cost: Argon2Params) -> Option<Secret<32>> {
    let params = Params::new(cost.memory_kib(), cost.passes(), cost.lanes(), Some(32)).ok()?;
    let mut blocks = Vec::<Block>::new();
    blocks.try_reserve_exact(params.block_count()).ok()?;
    blocks.resize(params.block_count(), Block::default());
    let argon = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
    let mut done = Ok(());
    let secret = without_trace(|| {
        Secret::filled_by(|out| done = argon.hash_password_into_with_memory(passphrase, salt, out, &mut blocks[..]))
    });
    blocks.iter_mut().for_each(Block::zeroize);
    done.ok().map(|()| secret)
}

const MIB_KIB: u32 = 1024;
const MEMORY_MIN_KIB: u32 = 64 * MIB_KIB;
const MEMORY_MAX_KIB: u32 = 1024 * MIB_KIB;
/// The least memory, however small the machine: with less, a passphrase is badly protected.
const MEMORY_FLOOR_KIB: u32 = 16 * MIB_KIB;
/// RFC 9106 §4 recommends three passes where memory is below its 2 GiB choice.
const PASSES: u32 = 3;
const PASSES_MAX: u32 = 16;

/// A cost that takes about `target_ms` milliseconds here, by measurement. It has three passes or more, one lane per
/// processor up to four, and 64 MiB to 1 GiB, but at most a quarter of the free memory (and at least 16 MiB).
pub fn calibrate(target_ms: u32) -> Argon2Params {
    let cap = memory_cap_kib(free_memory_kib().min(group_memory_kib().unwrap_or(u64::MAX)));
    let lanes = std::thread::available_parallelism().map_or(1, |n| n.get().min(4) as u32);
    let probe = bounded(cap.min(MEMORY_MIN_KIB), 1, lanes);
    // The first run also pays for page faults and for starting threads.
    let first = fit(probe, measure(probe), target_ms, cap);
    // Larger memory is slower by the KiB (TLB, cache), so measure what was chosen and correct once.
    if first.memory_kib() == probe.memory_kib() { first } else { fit(first, measure(first), target_ms, cap) }
}

/// From one measured run, the cost that should take the target.
fn fit(ran: Argon2Params, took: Duration, target_ms: u32, cap_kib: u32) -> Argon2Params {
    let took_ms = took.as_secs_f64() * 1e3;
    let work = ran.work() as f64 * f64::from(target_ms) / took_ms.max(0.001);
    let floor = cap_kib.min(MEMORY_MIN_KIB);
    let memory = ((work / f64::from(PASSES)) as u32).clamp(floor, cap_kib) / MIB_KIB * MIB_KIB;
    let passes = ((work / f64::from(memory)) as u32).clamp(PASSES, PASSES_MAX);
    bounded(memory, passes, ran.lanes())
}

fn bounded(memory_kib: u32, passes: u32, lanes: u32) -> Argon2Params {
    Argon2Params::new(memory_kib, passes, lanes).expect("16 MiB to 1 GiB, 1 to 16 passes, 1 to 4 lanes")
}

fn measure(cost: Argon2Params) -> Duration {
    let start = Instant::now();
    // Out of memory counts as slow: the next choice is smaller.
    match argon2id(b"calibration", &[0; 32], cost) {
        Some(_) => start.elapsed(),
        None => Duration::from_secs(3600),
    }
}

fn memory_cap_kib(free_kib: u64) -> u32 {
    u32::try_from(free_kib / 4).unwrap_or(u32::MAX).clamp(MEMORY_FLOOR_KIB, MEMORY_MAX_KIB)
}

/// Memory that is available without swapping, by the kernel's own estimate if there is one. `freeram` leaves the page
/// cache out; on a busy host it would make a passphrase cheap to guess.
fn free_memory_kib() -> u64 {
    let estimate = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_kib(&text));
    estimate.unwrap_or_else(|| {
        let s = rustix::system::sysinfo();
        (s.freeram + s.bufferram).saturating_mul(u64::from(s.mem_unit.max(1))) / 1024
    })
}

/// Versions 2 and 1 of control groups: their root, what precedes this process's path in /proc/self/cgroup, and the
/// files with a group's limit and use.
const GROUPS: [(&str, &str, [&str; 2]); 2] = [
    ("/sys/fs/cgroup", "0::/", ["memory.max", "memory.current"]),
    ("/sys/fs/cgroup/memory", ":memory:/", ["memory.limit_in_bytes", "memory.usage_in_bytes"]),
];

/// The memory left in the narrowest of this process's control groups. `None`: none limits memory, or none can be read.
fn group_memory_kib() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let narrowest = |(root, before, [max, current]): (&str, &str, [&str; 2])| {
        let path = groups.lines().find_map(|line| Some(line.split_once(before)?.1))?;
        let (root, own) = (Path::new(root), Path::new(root).join(path));
        let left = |dir: &Path| {
            let read = |file: &str| std::fs::read_to_string(dir.join(file)).ok();
            group_left_kib(&read(max)?, &read(current)?, &read("memory.stat")?)
        };
        own.ancestors().take_while(|dir| dir.starts_with(root)).filter_map(left).min()
    };
    GROUPS.into_iter().filter_map(narrowest).min()
}

/// The memory left in one group, by its files of cgroups(7). Its page cache can be reclaimed.
fn group_left_kib(max: &str, current: &str, stat: &str) -> Option<u64> {
    let (max, current): (u64, u64) = (max.trim().parse().ok()?, current.trim().parse().ok()?);
    let cache = ["inactive_file ", "active_file "].iter().filter_map(|name| {
        let line = stat.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|bytes| bytes.parse::<u64>().ok())
    });
    Some(max.saturating_sub(current.saturating_sub(cache.sum())) / 1024)
}

/// `MemAvailable` of proc_meminfo(5).
fn available_kib(meminfo: &str) -> Option<u64> {
    meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fit_stays_in_bounds() {
        let ran = bounded(MEMORY_MIN_KIB, 1, 2);
        for took_ms in [0, 1, 10, 100, 100_000] {
            for cap in [MEMORY_FLOOR_KIB, MEMORY_MIN_KIB, MEMORY_MAX_KIB] {
                let c = fit(ran, Duration::from_millis(took_ms), 500, cap);
                assert!(c.memory_kib() <= cap && c.memory_kib() >= cap.min(MEMORY_MIN_KIB) && c.passes() >= 3, "{c:?}");
                // A quarter of what all slots of a header may ask for together.
                assert!(c.work() <= 16 << 20, "{c:?}");
            }
        }
    }

    #[test]
    fn calibration_gives_a_cost_that_runs() {
        let cost = calibrate(1);
        assert!(cost.passes() >= 3 && cost.memory_kib() <= MEMORY_MIN_KIB, "{cost:?}");
        assert!(argon2id(b"passphrase", &[1; 32], cost).is_some());
    }

    #[test]
    fn available_memory_is_read_from_meminfo() {
        assert_eq!(available_kib("MemTotal:  100 kB\nMemAvailable:   70 kB\n"), Some(70));
        assert_eq!(available_kib("MemTotal:  100 kB\nMemAvailable: x kB\n"), None);
        assert_eq!(available_kib(""), None);
    }

    #[test]
    fn a_control_group_leaves_what_its_limit_does() {
        let stat = "anon 1\ninactive_file 1048576\nactive_file 2097152\nfile 9\n";
        assert_eq!(group_left_kib("104857600\n", "52428800\n", stat), Some((50 << 10) + (3 << 10)));
        assert_eq!(group_left_kib("1024", "52428800", stat), Some(0), "over its limit");
        assert_eq!(group_left_kib("104857600", "1048576", stat), Some(100 << 10), "never more than the limit");
        assert_eq!(group_left_kib("max\n", "52428800\n", stat), None);
        assert_eq!(group_left_kib("104857600", "x", ""), None);
    }

    #[test]
    fn what_is_to_spare_is_no_more_than_the_machine_has() {
        let half = u32::try_from(free_memory_kib() / 2).unwrap_or(u32::MAX);
        // Other processes take and free memory meanwhile.
        assert!(memory_to_spare_kib() <= half.saturating_add(half / 4).max(MEMORY_ALWAYS_KIB));
        assert!(memory_to_spare_kib() >= MEMORY_ALWAYS_KIB);
    }

    #[test]
    fn memory_is_at_most_a_quarter_of_what_is_free() {
        assert_eq!(memory_cap_kib(1 << 20), 1 << 18);
        assert_eq!(memory_cap_kib(u64::MAX), MEMORY_MAX_KIB);
        assert_eq!(memory_cap_kib(0), MEMORY_FLOOR_KIB);
    }
}
