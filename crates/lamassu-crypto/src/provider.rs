//! Who computes the approved primitives: this crate's own code, or the FIPS module of AWS-LC where that is built in (feature `fips`) and was asked for.
//!
//! Chosen once, before any key is known: what was expanded by one stays with it. Both give equal bytes.

use std::sync::atomic::{AtomicBool, Ordering};

static MODULE: AtomicBool = AtomicBool::new(false);

/// See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// The kernels of this crate, and the crates of RustCrypto.
    Own,
    /// The FIPS module.
    #[cfg(feature = "fips")]
    Module,
}

impl Provider {
    /// Has the FIPS module used from here on, where it is built in. Whether it is in its approved mode is for [`crate::selftest`] to say.
    pub fn require_module() {
        MODULE.store(cfg!(feature = "fips"), Ordering::Relaxed);
    }

    /// The one in use.
    pub fn current() -> Provider {
        match MODULE.load(Ordering::Relaxed) {
            #[cfg(feature = "fips")]
            true => Provider::Module,
            _ => Provider::Own,
        }
    }

    /// Whether there is a FIPS module in this build.
    pub fn is_module_built_in() -> bool {
        cfg!(feature = "fips")
    }
}
