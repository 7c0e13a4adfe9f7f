//! Which code computes the approved primitives: this crate's own, or the FIPS module of AWS-LC (feature `fips`).
//!
//! This is one value for the process. The composition root installs it once, before anything is computed
//! ([`Provider::install`]); afterwards it cannot change. It is not a part of each vault's policy, for two reasons:
//!
//! * The claim is one about the process. The module's self-tests, its approved mode, and its error state, which ends
//!   the process, belong to the process. A process that also holds keys expanded by other code could not make the
//!   claim.
//! * Every crate uses hashes, MACs and random bytes, often without a vault: in key sources, in histories and receipts.
//!   A value that is passed through all of them could be forgotten in one place, and nothing would show that.
//!
//! Both give equal bytes. Each [`Kernel`](crate::kernel::Kernel) belongs to one of them, so that tests compare them.

use std::sync::OnceLock;

static INSTALLED: OnceLock<Provider> = OnceLock::new();

/// The code that computes the approved primitives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// The kernels of this crate, and the crates of RustCrypto.
    Own,
    /// The FIPS module.
    #[cfg(feature = "fips")]
    Module,
}

/// Something was computed by the other provider already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cryptography is in use, so its provider can no longer be chosen")]
pub struct ProviderInUse;

impl Provider {
    /// The provider for approved primitives alone: the FIPS module, if it is built in.
    #[cfg(feature = "fips")]
    pub const APPROVED: Provider = Provider::Module;
    /// The provider for approved primitives alone: the FIPS module, if it is built in.
    #[cfg(not(feature = "fips"))]
    pub const APPROVED: Provider = Provider::Own;

    /// Chooses the provider for this process. [`crate::selftest`] tells whether the module is in its approved mode.
    ///
    /// # Errors
    /// [`ProviderInUse`]: another one was installed, or used.
    pub fn install(self) -> Result<(), ProviderInUse> {
        if *INSTALLED.get_or_init(|| self) == self { Ok(()) } else { Err(ProviderInUse) }
    }

    /// The one in use: [`Provider::Own`] unless another one was installed.
    pub fn current() -> Provider {
        *INSTALLED.get_or_init(|| Provider::Own)
    }

    /// Whether there is a FIPS module in this build.
    pub fn is_module_built_in() -> bool {
        cfg!(feature = "fips")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_use_stays() {
        assert_eq!(Provider::current(), Provider::Own);
        assert_eq!(Provider::Own.install(), Ok(()));
        #[cfg(feature = "fips")]
        assert_eq!(Provider::APPROVED.install(), Err(ProviderInUse));
        assert_eq!(Provider::current(), Provider::Own);
    }
}
