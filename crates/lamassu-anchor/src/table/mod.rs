//! Tables of rows: ordered by key, changed by durable commits.

mod memory;
mod on_disk;
mod packed;

pub use memory::MemoryTable;
#[cfg(feature = "testing")]
pub use on_disk::fuzz_log;
pub use on_disk::{DiskTable, FILE_MODE, Readers};
pub use packed::{pack, unpack};

use crate::AnchorError;
use lamassu_format::Profile;
use std::ops::ControlFlow;

/// The tables of an anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Space {
    /// One row: the vault's.
    Vault,
    /// Rows by object.
    Objects,
    /// Objects whose file is open: what recovery looks at.
    Open,
    /// Entries by directory and token.
    Entries,
    /// Digests by object and tree record.
    Held,
    /// Changes of names by number.
    Intents,
    /// One row, in tables that a server keeps and in copies of them: the head ([`crate::head`]).
    Head,
}

impl Space {
    /// All of them.
    pub const ALL: [Space; 7] =
        [Space::Vault, Space::Objects, Space::Open, Space::Entries, Space::Held, Space::Intents, Space::Head];

    /// Those about the vault, not about one table: they are exported, copied, sent.
    pub const OF_VAULT: [Space; 6] =
        [Space::Vault, Space::Objects, Space::Open, Space::Entries, Space::Held, Space::Intents];
}

/// A change of one key: a new value, or its removal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// the table
    pub space: Space,
    /// The key.
    pub key: Vec<u8>,
    /// the new value; `None`: the key is removed
    pub value: Option<Vec<u8>>,
}

/// A time in which reads are in doubt, until they are valid again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doubt(pub u64);

/// Called with each key and value of a scan.
pub type Visit<'a> = dyn FnMut(&[u8], &[u8]) -> ControlFlow<()> + 'a;

/// Called with each row of several tables.
pub type VisitRow<'a> = dyn FnMut(Space, &[u8], &[u8]) -> ControlFlow<()> + 'a;

/// Ordered tables of bytes. Reads see the last commit that returned.
pub trait Table: Send + Sync {
    /// The value of a key.
    ///
    /// # Errors
    /// [`AnchorError::Io`], [`AnchorError::Unreadable`].
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError>;

    /// Visits the keys that begin with `prefix`, ascending, until `visit` breaks.
    ///
    /// # Errors
    /// As for [`Table::get`].
    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), AnchorError>;

    /// Visits all rows of some tables as of one moment, in the given order and by key, until `visit` breaks. `visit`
    /// must not use this table. Commits wait meanwhile, unless a table says otherwise.
    ///
    /// # Errors
    /// As for [`Table::get`].
    fn visit_spaces(&self, spaces: &[Space], visit: &mut VisitRow<'_>) -> Result<(), AnchorError> {
        let mut done = ControlFlow::Continue(());
        for space in spaces.iter().copied() {
            self.scan(space, &[], &mut |key, value| {
                done = visit(space, key, value);
                done
            })?;
            if done.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Verifies all checksums. False: the table has none, or they cannot be verified now.
    ///
    /// # Errors
    /// [`AnchorError::Unreadable`], [`AnchorError::Io`].
    fn verify(&self) -> Result<bool, AnchorError> {
        Ok(false)
    }

    /// Makes all changes durable, or none.
    ///
    /// # Errors
    /// As for [`Table::get`]; then nothing has changed, unless [`Table::may_be_in_doubt`].
    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError>;

    /// Whether a failed commit may have been made, or may still be made.
    fn may_be_in_doubt(&self) -> bool {
        false
    }

    /// Whether the right to use the table can end while it is open: then another process changes it.
    fn may_end(&self) -> bool {
        false
    }

    /// Whether reads are valid now, and decisions based on them may be carried out. Never waits.
    fn standing(&self) -> Standing {
        Standing::Good
    }

    /// Waits until reads are valid, as long as that is possible. If there are caches, it does not wait before
    /// [`Table::caches_are_dropped`].
    ///
    /// # Errors
    /// [`AnchorError::Server`].
    fn wait_until_good(&self) -> Result<(), AnchorError> {
        Ok(())
    }

    /// From now on what is read may be cached, for example by a kernel; the caller drops the caches when reads may be
    /// invalid. From now on a call fails at once instead of waiting: dropping caches waits for calls under way.
    fn has_caches(&self) {}

    /// Why reads are not valid now; `None`: they are, or the right to use the table has ended.
    fn doubt(&self) -> Option<Doubt> {
        None
    }

    /// All caches were dropped during this doubt.
    fn caches_are_dropped(&self, _doubt: Doubt) {}

    /// Returns when reads are no longer valid, and now and then before that.
    fn wait_while_good(&self) {}

    /// Whether the server's current policy allows files of this profile to be made and written. Never waits.
    ///
    /// # Errors
    /// [`ServerFault::Policy`](crate::ServerFault::Policy).
    fn check_profile(&self, _profile: Profile) -> Result<(), AnchorError> {
        Ok(())
    }
}

impl dyn Table + '_ {
    /// Visits all rows of the vault, as [`Table::visit_spaces`] does. `visit` stops it by its own error.
    ///
    /// # Errors
    /// That of `visit`; those of the table.
    pub fn visit_all<E: From<AnchorError>>(
        &self,
        visit: impl FnMut(Space, &[u8], &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.visit_until_error(&Space::OF_VAULT, visit)
    }

    /// The same, including the rows of this table alone: for a copy that replaces it.
    ///
    /// # Errors
    /// As for `visit_all`.
    pub fn visit_whole<E: From<AnchorError>>(
        &self,
        visit: impl FnMut(Space, &[u8], &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.visit_until_error(&Space::ALL, visit)
    }

    fn visit_until_error<E: From<AnchorError>>(
        &self,
        spaces: &[Space],
        mut visit: impl FnMut(Space, &[u8], &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = Ok(());
        self.visit_spaces(spaces, &mut |space, key, value| {
            done = visit(space, key, value);
            if done.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        done
    }
}

/// The validity of a table's reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Reads are valid.
    Good,
    /// Not now: another session may be about to change the table. They can become valid again.
    InDoubt,
    /// Never again: another session may use the table.
    Ended,
    /// Never again: this process has released it.
    GivenUp,
}
