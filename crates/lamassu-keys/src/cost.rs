//! The cost of Argon2id, measured once when a passphrase slot is made.

use lamassu_crypto::wrap;
use lamassu_format::header::Argon2Params;
use std::time::Duration;

/// How long opening a slot may take on this machine, by default.
pub const TARGET: Duration = Duration::from_secs(1);

/// Second recommended option of RFC 9106 §4: 64 MiB, 3 passes, 4 lanes.
pub const FALLBACK: Argon2Params = match Argon2Params::new(64 << 10, 3, 4) {
    Some(params) => params,
    None => panic!("within the bounds of the format"),
};

/// The cost that takes about `target` on this machine; takes a second or two itself.
pub fn measure(target: Duration) -> Argon2Params {
    wrap::calibrate(u32::try_from(target.as_millis()).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_has_three_passes_or_more() {
        assert!(measure(Duration::from_millis(1)).passes() >= 3);
    }
}
