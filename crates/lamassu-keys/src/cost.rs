//! The cost of Argon2id: measured once, when a passphrase slot is made.

use lamassu_crypto::wrap::{self, Argon2Cost};
use lamassu_format::header::Argon2Params;
use std::time::Duration;

/// How long opening a slot may take on this machine, unless told otherwise.
pub const TARGET: Duration = Duration::from_secs(1);

/// Second recommended option of RFC 9106 §4: 64 MiB, 3 passes, 4 lanes.
pub const FALLBACK: Argon2Params = match Argon2Params::new(64 << 10, 3, 4) {
    Some(params) => params,
    None => panic!("within the bounds of the format"),
};

/// The cost that takes about `target` on this machine; takes a second or two itself.
pub fn measure(target: Duration) -> Argon2Params {
    let cost = wrap::calibrate(u32::try_from(target.as_millis()).unwrap_or(u32::MAX));
    Argon2Params::new(cost.memory_kib, cost.passes, cost.lanes).unwrap_or(FALLBACK)
}

/// The parameters as `lamassu-crypto` takes them.
pub(crate) fn of(params: Argon2Params) -> Argon2Cost {
    Argon2Cost { memory_kib: params.memory_kib(), passes: params.passes(), lanes: params.lanes() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_is_allowed_and_no_less_than_three_passes() {
        let params = measure(Duration::from_millis(1));
        assert!(of(params).is_allowed());
        assert!(params.passes() >= 3);
        assert!(of(FALLBACK).is_allowed());
    }

    /// The bounds stand in both crates (the one below knows no cipher, the one above no header): they must be the same.
    #[test]
    fn both_crates_have_the_same_bounds() {
        for memory_kib in [0, 7, 8, 127, 128, 4 << 20, (4 << 20) + 1, u32::MAX] {
            for passes in [0, 1, 64, 65] {
                for lanes in [0, 1, 16, 17, u32::MAX] {
                    let allowed = Argon2Cost { memory_kib, passes, lanes };
                    let ours = Argon2Params::new(memory_kib, passes, lanes).is_some();
                    assert_eq!(ours, allowed.is_allowed(), "{allowed:?}");
                }
            }
        }
    }
}
