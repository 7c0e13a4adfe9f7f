//! Admission of changes.

use crate::anchored::Anchored;
use crate::gate::Pass;
use crate::{Result, Vault, VaultError};
use std::sync::atomic::Ordering;

impl Vault {
    /// Admission of a change: refuses it, or holds off `freeze` until the pass is dropped. Waits while frozen. Never
    /// taken twice by one call: in between, `freeze` would wait for the first pass, and the second would wait for
    /// `thaw`.
    pub(crate) fn change(&self) -> Result<Pass<'_>> {
        if self.options.read_only {
            return Err(VaultError::ReadOnly);
        }
        self.admitted(self.gate.enter())
    }

    /// The same for what only writes buffers to the store. It waits until a freeze has done that, not for the thaw:
    /// close(2) must end, since a request to thaw needs the thread that it waits in. `None`: nothing is left to write.
    pub(crate) fn change_unless_still(&self) -> Result<Option<Pass<'_>>> {
        self.gate.enter_unless_still().map(|pass| self.admitted(pass)).transpose()
    }

    fn admitted<'a>(&self, pass: Pass<'a>) -> Result<Pass<'a>> {
        if self.closed.load(Ordering::Acquire) {
            return Err(VaultError::ReadOnly);
        }
        self.anchored.as_ref().map_or(Ok(()), Anchored::note_in_use)?;
        Ok(pass)
    }
}
