//! Whether a writer uses the vault: the anchor durably says so from before the writer's first change of the store until
//! everything is recorded. In between, the store has entries that the anchor does not have yet, and after an
//! interruption they remain.

use super::Anchored;
use crate::{Result, Vault};
use lamassu_anchor::AnchorError;
use std::sync::atomic::Ordering;

impl Anchored {
    /// Called before a change of the store. The first call waits for the anchor.
    ///
    /// # Errors
    /// Those of the anchor: then nothing may be changed.
    pub fn note_in_use(&self) -> Result<()> {
        if !self.in_use.load(Ordering::Acquire) {
            // A change that is only queued, since a commit failed, is known to this process alone.
            let is_noted = || Ok::<_, AnchorError>(self.anchor.vault().is_in_use && self.anchor.is_in_use_now()?);
            if self.is_use_in_doubt.load(Ordering::Acquire) || !is_noted()? {
                self.anchor.commit_vault(|vault| vault.is_in_use = true)?;
            }
            self.is_use_in_doubt.store(false, Ordering::Release);
            self.in_use.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Called when everything is recorded and no call changes anything. Leftovers of an interrupted writer may be
    /// anywhere, so after an interruption the vault stays in use until a repair has gone over all of it.
    fn note_out_of_use(&self) -> Result<()> {
        let is_over = self.anchor.queued() == 0 && !self.after_crash.load(Ordering::Acquire);
        if is_over && self.anchor.vault().is_in_use {
            let done = self.anchor.commit_vault(|vault| vault.is_in_use = false);
            if done.is_err() {
                // A later commit must not say so while the store is being changed. This one may have been made: what is
                // read does not tell. So the next change of the store waits for a commit that says the contrary.
                self.anchor.change_vault(|vault| vault.is_in_use = true);
                self.is_use_in_doubt.store(true, Ordering::Release);
            }
            self.in_use.store(false, Ordering::Release);
            done?;
        }
        Ok(())
    }
}

impl Vault {
    /// Called when everything is in the store and in the anchor, and no call changes anything.
    pub(crate) fn note_out_of_use(&self) {
        let done = self.anchored.as_ref().map_or(Ok(()), Anchored::note_out_of_use);
        if let Err(error) = done {
            tracing::warn!(%error, "the anchor could not note that the vault is not in use");
        }
    }

    /// After a repair of the whole vault: unrecorded leftovers of an interrupted writer were moved away.
    pub(crate) fn note_gone_over(&self) {
        if let Some(anchored) = &self.anchored {
            anchored.after_crash.store(false, Ordering::Release);
        }
    }
}
