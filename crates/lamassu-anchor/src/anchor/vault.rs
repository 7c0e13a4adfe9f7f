//! What is recorded of the vault as a whole: its header, its history, its sessions (`docs/freshness.md`, section 5).

use super::{Anchor, Result, VAULT_KEY};
use crate::queue::EntryMark;
use crate::row::{Announced, Sealed, VaultRow};
use crate::table::Space;
use crate::{AnchorError, Digest, ObjectId, Revision};
use lamassu_format::header::VaultId;
use std::collections::HashSet;

/// The header that a replacement is based on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderBasis {
    /// There is none yet, or a person decides what it shall be. Digest of the one in place, if it could be read.
    Decided(Option<Digest>),
    /// The header that was read and changed.
    Read(Digest),
}

impl Anchor {
    /// Changes the vault's row, durably.
    ///
    /// # Errors
    /// Those of the table; the change is then in force in memory, and durable with the next commit.
    pub fn commit_vault(&self, change: impl FnOnce(&mut VaultRow)) -> Result<()> {
        self.change_vault(change);
        self.commit_objects(&HashSet::new(), EntryMark(0))
    }

    /// The same, unless `change` returns false after looking at the row.
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
            self.commit_objects(&HashSet::new(), EntryMark(0))?;
        }
        Ok(is_changed)
    }

    /// Notes durably that the header is about to be replaced, and the new end of the history if that has changed.
    /// False: the header that the change is based on is not the newest, and nothing is noted.
    ///
    /// # Errors
    /// As [`Anchor::commit_vault`]; the header may not be replaced then.
    pub fn replacing_header(&self, basis: HeaderBasis, new: Digest, history: Option<(u64, Digest)>) -> Result<bool> {
        self.header_becomes(basis, new, |vault| vault.history = history.unwrap_or(vault.history))
    }

    /// The same if another history begins with the new header: until it is in place, the old one belongs to the old
    /// header, and `history` to the new one.
    ///
    /// # Errors
    /// As [`Anchor::replacing_header`].
    pub fn replacing_header_and_history(
        &self,
        basis: HeaderBasis,
        new: Digest,
        history: (u64, Digest),
    ) -> Result<bool> {
        self.header_becomes(basis, new, |vault| match vault.header {
            Sealed::Becomes { .. } => vault.next_history = Some(history),
            Sealed::Nothing | Sealed::Is(_) => vault.history = history,
        })
    }

    fn header_becomes(&self, basis: HeaderBasis, new: Digest, note: impl FnOnce(&mut VaultRow)) -> Result<bool> {
        self.commit_vault_if(|vault| {
            let old = match (basis, vault.header) {
                (HeaderBasis::Read(read), header) if !header.is_current(read) => return false,
                (HeaderBasis::Read(read), _) => read,
                (HeaderBasis::Decided(Some(in_place)), header) if header.is_current(in_place) => in_place,
                (HeaderBasis::Decided(_), Sealed::Nothing) => Digest::NONE,
                // Neither of two headers could be read in its place. The newer one is taken as the old one here: a
                // person's decision replaces either.
                (HeaderBasis::Decided(_), Sealed::Is(old) | Sealed::Becomes { new: old, .. }) => old,
            };
            // If two were current, this is the one that is in place, with its history.
            vault.settle_header(old);
            if old != new {
                vault.header = Sealed::Becomes { old, new };
            }
            note(vault);
            true
        })
    }

    /// Notes durably that the header is this one: if it was being replaced, the other of the two is no longer current.
    /// False: this one is not current, and nothing is noted.
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
                vault.settle_header(seen);
            }
            is_newest
        })
    }

    /// Notes that the history has grown.
    ///
    /// # Errors
    /// As [`Anchor::commit_vault`].
    pub fn history_goes_to(&self, count: u64, head: Digest) -> Result<()> {
        match self.vault().history.0 < count {
            true => self.commit_vault(|vault| vault.history = (count, head)),
            false => Ok(()),
        }
    }

    /// Continues the revisions of an anchor that this one replaces. Who has seen that one takes a lower revision for an
    /// older state.
    ///
    /// # Errors
    /// As [`Anchor::commit_vault`].
    pub fn revisions_go_on_after(&self, replaced: Revision) -> Result<()> {
        match self.vault().revision <= replaced {
            // The commit itself is one more.
            true => self.commit_vault(|vault| vault.revision = replaced),
            false => Ok(()),
        }
    }

    /// Checks that the store's record of sessions, which goes up to `recorded`, can be current.
    ///
    /// # Errors
    /// [`AnchorError::Older`]: the anchor is too old. False: the record is too old.
    pub fn may_be_recorded(&self, recorded: u32) -> Result<bool> {
        let known = self.vault().sessions;
        match recorded > known.last {
            true => Err(AnchorError::Older { first: known.last + 1, last: recorded }),
            false => Ok(recorded >= known.recorded),
        }
    }

    /// Notes durably that a session is about to begin: from now on the store's record of sessions may have it.
    ///
    /// # Errors
    /// [`AnchorError::Order`]: its number is not higher than all announced ones; those of the table.
    pub fn announce_session(&self, session: u32) -> Result<()> {
        if session <= self.vault().sessions.last {
            return Err(AnchorError::Order { object: ObjectId::ROOT, rule: "session numbers ascend" });
        }
        self.commit_vault(|vault| vault.sessions.last = session)
    }

    /// The store's record durably has all sessions up to this one, which was announced. Queued: until it is committed,
    /// the previous record counts as current too.
    pub fn session_is_recorded(&self, session: u32) {
        self.change_vault(|vault| vault.sessions.recorded = session);
    }

    /// A person has accepted a state with sessions up to this one, which were not announced here.
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

    /// Whether a writer uses the vault, or was interrupted, by what is durable now: the writer may be another process.
    ///
    /// # Errors
    /// [`AnchorError::Damaged`]; those of the table.
    pub fn is_in_use_now(&self) -> Result<bool> {
        Ok(self.vault_now()?.is_in_use)
    }

    /// The durable row of the vault, read again: another process may write the anchor.
    ///
    /// # Errors
    /// [`AnchorError::Empty`], [`AnchorError::Damaged`]; those of the table.
    pub fn vault_now(&self) -> Result<VaultRow> {
        let bytes = self.table.get(Space::Vault, VAULT_KEY)?.ok_or(AnchorError::Empty)?;
        VaultRow::decode(&bytes)
    }

    /// Checks that the anchor belongs to this vault.
    ///
    /// # Errors
    /// [`AnchorError::Foreign`].
    pub fn is_of(&self, vault: &VaultId) -> Result<()> {
        if self.vault().vault == *vault { Ok(()) } else { Err(AnchorError::Foreign) }
    }
}
