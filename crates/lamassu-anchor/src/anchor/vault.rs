//! What is known of the vault as a whole: its header and its history (`docs/freshness.md`, section 5).

use super::{Anchor, Result, VAULT_KEY};
use crate::queue::Mark;
use crate::row::{Announced, Sealed, VaultRow};
use crate::table::Space;
use crate::{AnchorError, Digest, ObjectId};
use std::collections::HashSet;

/// What the store shows of a vault, or is about to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderBasis {
    /// There is none yet, or a person has decided what it shall be.
    Decided,
    /// The header that was read, and to which the change was made.
    Read(Digest),
}

impl Anchor {
    /// Changes what is known of the vault, durably.
    ///
    /// # Errors
    /// Those of the table; the change is in force here and durable with the next commit.
    pub fn commit_vault(&self, change: impl FnOnce(&mut VaultRow)) -> Result<()> {
        self.change_vault(change);
        self.commit_objects(&HashSet::new(), Mark(0))
    }

    /// The same, where `change` says that it has changed anything: it sees what it changes.
    fn commit_vault_if(&self, change: impl FnOnce(&mut VaultRow) -> bool) -> Result<bool> {
        let is_changed = {
            let state = &mut *self.state.lock();
            let is_changed = change(&mut state.vault);
            if is_changed {
                state.queued.vault = Some(state.vault.clone());
            }
            is_changed
        };
        if is_changed {
            self.commit_objects(&HashSet::new(), Mark(0))?;
        }
        Ok(is_changed)
    }

    /// Notes durably that the header is about to be replaced, and how far the history goes if that has changed. False:
    /// the header that the change was made to is not the newest, and nothing is noted.
    ///
    /// # Errors
    /// As [`Anchor::commit_vault`]; the header may not be replaced then.
    pub fn replacing_header(&self, basis: HeaderBasis, new: Digest, history: Option<(u64, Digest)>) -> Result<bool> {
        self.commit_vault_if(|vault| {
            let old = match (basis, vault.header) {
                (HeaderBasis::Read(read), header) if !header.is_current(read) => return false,
                (HeaderBasis::Read(read), _) => read,
                (HeaderBasis::Decided, Sealed::Nothing) => Digest::NONE,
                // Which of two it was nobody knows: the newer one then, and what is there goes in any case.
                (HeaderBasis::Decided, Sealed::Is(old) | Sealed::Becomes { new: old, .. }) => old,
            };
            vault.header = if old == new { Sealed::Is(new) } else { Sealed::Becomes { old, new } };
            vault.history = history.unwrap_or(vault.history);
            true
        })
    }

    /// The header is this one, durably: where it was being replaced, the other of the two is the newest no more. False:
    /// it is not the newest itself, and nothing is noted.
    ///
    /// # Errors
    /// As [`Anchor::commit_vault`].
    pub fn header_is(&self, seen: Digest) -> Result<bool> {
        if self.vault().header == Sealed::Is(seen) {
            return Ok(true);
        }
        self.commit_vault_if(|vault| {
            let is_newest = vault.header.is_current(seen);
            if is_newest {
                vault.header = Sealed::Is(seen);
            }
            is_newest
        })
    }

    /// The history goes further than was known.
    ///
    /// # Errors
    /// As [`Anchor::commit_vault`].
    pub fn history_goes_to(&self, count: u64, head: Digest) -> Result<()> {
        match self.vault().history.0 < count {
            true => self.commit_vault(|vault| vault.history = (count, head)),
            false => Ok(()),
        }
    }

    /// That the store's record of sessions, which goes to `recorded`, is one that can be there.
    ///
    /// # Errors
    /// [`AnchorError::Older`]. False: the record is an older one.
    pub fn may_be_recorded(&self, recorded: u32) -> Result<bool> {
        let known = self.vault().sessions;
        match recorded > known.last {
            true => Err(AnchorError::Older { first: known.last + 1, last: recorded }),
            false => Ok(recorded >= known.recorded),
        }
    }

    /// Notes durably that a session is about to begin: the store's record of sessions may have it from now on.
    ///
    /// # Errors
    /// [`AnchorError::Order`]: its number is not above all that were announced; those of the table.
    pub fn announce_session(&self, session: u32) -> Result<()> {
        if session <= self.vault().sessions.last {
            return Err(AnchorError::Order { object: ObjectId::ROOT, rule: "session numbers ascend" });
        }
        self.commit_vault(|vault| vault.sessions.last = session)
    }

    /// The store's record durably has all sessions up to this one, which was announced. Not waited for: until a commit
    /// takes it the record may be the one before, too.
    pub fn session_is_recorded(&self, session: u32) {
        self.change_vault(|vault| vault.sessions.recorded = session);
    }

    /// Sessions up to this one are in the store's record, though nobody announced them here: the state that they left
    /// was accepted.
    ///
    /// # Errors
    /// As [`Anchor::commit_vault`].
    pub fn sessions_go_to(&self, last: u32) -> Result<()> {
        let known = self.vault().sessions;
        match known.recorded < last {
            true => {
                self.commit_vault(|vault| vault.sessions = Announced { recorded: last, last: last.max(known.last) })
            }
            false => Ok(()),
        }
    }

    /// Whether a writer uses the vault, or was interrupted, as it is durable now: another process may be that writer.
    ///
    /// # Errors
    /// [`AnchorError::Damaged`]; those of the table.
    pub fn is_in_use_now(&self) -> Result<bool> {
        Ok(self.vault_now()?.is_in_use)
    }

    /// What is durably known of the vault now, where another process may write the anchor.
    ///
    /// # Errors
    /// [`AnchorError::Empty`], [`AnchorError::Damaged`]; those of the table.
    pub fn vault_now(&self) -> Result<VaultRow> {
        let bytes = self.table.get(Space::Vault, VAULT_KEY)?.ok_or(AnchorError::Empty)?;
        VaultRow::decode(&bytes)
    }

    /// That the anchor is of this vault.
    ///
    /// # Errors
    /// [`AnchorError::Foreign`].
    pub fn is_of(&self, vault: &[u8; 16]) -> Result<()> {
        if self.vault().vault == *vault { Ok(()) } else { Err(AnchorError::Foreign) }
    }
}
