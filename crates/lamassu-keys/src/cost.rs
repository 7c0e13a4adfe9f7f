//! The cost of Argon2id: measured once, when a passphrase slot is made.

use crate::KeyError;
use lamassu_crypto::wrap::{self, Argon2Cost};
use lamassu_format::header::Argon2Params;
use std::time::{Duration, Instant};

/// How long opening a slot may take on this machine, unless told otherwise.
pub const TARGET: Duration = Duration::from_secs(1);

/// Second recommended option of RFC 9106 §4: 64 MiB, 3 passes, 4 lanes. [`measure`] never goes below.
pub const FLOOR: Argon2Params = match Argon2Params::new(64 << 10, 3, 4) {
    Some(params) => params,
    None => panic!("within the bounds of the format"),
};

/// Memories tried, in KiB, largest first. No more, so that a vault opens on small machines too.
const MEMORIES_KIB: [u32; 3] = [256 << 10, 128 << 10, 64 << 10];

/// The cost that takes about `target` here: as much memory as leaves room for 3 passes, then as many passes as fit. At least [`FLOOR`], whatever that takes.
///
/// # Errors
/// [`KeyError::Argon2`].
pub fn measure(target: Duration) -> Result<Argon2Params, KeyError> {
    let probe_kib = FLOOR.memory_kib();
    let probe = Argon2Cost { memory_kib: probe_kib, passes: 1, lanes: FLOOR.lanes() };
    let start = Instant::now();
    wrap::argon2id(b"how fast is this machine?", &[0; 32], probe).ok_or(KeyError::Argon2 { memory_kib: probe_kib })?;
    Ok(choose(start.elapsed(), target, available_kib()))
}

/// `probe`: time of one pass over the floor's memory. `available_kib`: memory that can be had.
fn choose(probe: Duration, target: Duration, available_kib: u64) -> Argon2Params {
    let pass_of = |memory_kib: u32| probe.as_secs_f64() * f64::from(memory_kib) / f64::from(FLOOR.memory_kib());
    let fits = |m: &&u32| pass_of(**m) * 3.0 <= target.as_secs_f64() && u64::from(**m) * 4 <= available_kib;
    let memory_kib = *MEMORIES_KIB.iter().find(fits).unwrap_or(&FLOOR.memory_kib());
    let passes = (target.as_secs_f64() / pass_of(memory_kib).max(1e-9)) as u32;
    let passes = passes.clamp(FLOOR.passes(), Argon2Params::PASSES_MAX);
    Argon2Params::new(memory_kib, passes, FLOOR.lanes()).unwrap_or(FLOOR)
}

/// `MemAvailable` of `/proc/meminfo`; 0 where that cannot be read.
fn available_kib() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse().ok()).unwrap_or(0)
}

/// The parameters as `lamassu-crypto` takes them.
pub(crate) fn of(params: Argon2Params) -> Argon2Cost {
    Argon2Cost { memory_kib: params.memory_kib(), passes: params.passes(), lanes: params.lanes() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(probe_ms: u64, available_mib: u64) -> (u32, u32) {
        let c = choose(Duration::from_millis(probe_ms), TARGET, available_mib << 10);
        (c.memory_kib() >> 10, c.passes())
    }

    #[test]
    fn memory_first_then_passes() {
        assert_eq!(chosen(50, 16_000), (256, 5));
        assert_eq!(chosen(100, 16_000), (128, 5));
        assert_eq!(chosen(300, 16_000), (64, 3));
        assert_eq!(chosen(5_000, 16_000), (64, 3), "never below the floor");
        assert_eq!(chosen(50, 300), (64, 20), "little memory");
        assert_eq!(chosen(0, 16_000), (256, 64), "never above the format's bound");
    }
}
