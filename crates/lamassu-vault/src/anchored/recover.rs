//! Recovery (N3, and section 4).

use crate::{Result, Vault};

impl Vault {
    pub(crate) fn recover_names(&self) -> Result<()> {
        Ok(())
    }

    pub(crate) fn recover_some(&self) -> Result<()> {
        Ok(())
    }
}
