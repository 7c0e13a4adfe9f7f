//! Where rows lie: ordered tables of bytes, changed by durable commits.

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
    /// One row: what is known of the vault.
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
    /// One row, of tables that a server keeps and of copies of them: how far they have come ([`crate::head`]).
    Head,
}

impl Space {
    /// All of them.
    pub const ALL: [Space; 7] =
        [Space::Vault, Space::Objects, Space::Open, Space::Entries, Space::Held, Space::Intents, Space::Head];

    /// Those that say something of the vault, and not of one table: what is exported, copied, sent.
    pub const OF_VAULT: [Space; 6] =
        [Space::Vault, Space::Objects, Space::Open, Space::Entries, Space::Held, Space::Intents];
}

/// A change of one key: a new value, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// In which table.
    pub space: Space,
    /// The key.
    pub key: Vec<u8>,
    /// What it has from now on.
    pub value: Option<Vec<u8>>,
}

/// What is called with each key and value of a scan.
pub type Visit<'a> = dyn FnMut(&[u8], &[u8]) -> ControlFlow<()> + 'a;

/// What is called with each row of several tables.
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

    /// Visits all rows of some tables as of one moment, in the order given and of keys, until `visit` breaks. `visit`
    /// asks nothing of this table. Unless a table says otherwise, nobody commits meanwhile.
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

    /// Verifies the checksums of all that it holds. False: it has none, or they cannot be told at the moment.
    ///
    /// # Errors
    /// [`AnchorError::Unreadable`], [`AnchorError::Io`].
    fn verify(&self) -> Result<bool, AnchorError> {
        Ok(false)
    }

    /// Makes all changes, whole and durable, or none.
    ///
    /// # Errors
    /// As for [`Table::get`]; nothing was changed then, unless the table says otherwise ([`Table::may_be_in_doubt`]).
    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError>;

    /// Whether a commit that has failed may have been made, or may be yet.
    fn may_be_in_doubt(&self) -> bool {
        false
    }

    /// Whether the right to the table can end while it is open: then somebody else changes what it says.
    fn may_end(&self) -> bool {
        false
    }

    /// Whether what it says may be believed, and what is decided by it carried out, now. Never waits.
    fn standing(&self) -> Standing {
        Standing::Good
    }

    /// Waits until it is good, for as long as that may come; where there are caches, not before
    /// [`Table::caches_are_dropped`].
    ///
    /// # Errors
    /// [`AnchorError::Server`].
    fn wait_until_good(&self) -> Result<(), AnchorError> {
        Ok(())
    }

    /// From now on what it says is cached, as by a kernel, and somebody drops that when it becomes doubtful. Until then
    /// who asks for it fails and does not wait: dropping waits for calls that are under way.
    fn has_caches(&self) {}

    /// Since it became doubtful, those caches have been dropped.
    fn caches_are_dropped(&self) {}

    /// Returns when it is not good any more, and now and then before.
    fn wait_while_good(&self) {}

    /// Whether files of this profile may be made and written, as its server's policy has it at the moment. Never waits.
    ///
    /// # Errors
    /// [`ServerFault::Policy`](crate::ServerFault::Policy).
    fn check_profile(&self, _profile: Profile) -> Result<(), AnchorError> {
        Ok(())
    }
}

impl dyn Table + '_ {
    /// Visits all rows of the vault, as [`Table::visit_spaces`] does. `visit` stops it by an error of its own.
    ///
    /// # Errors
    /// That of `visit`; those of the table.
    pub fn visit_all<E: From<AnchorError>>(
        &self,
        visit: impl FnMut(Space, &[u8], &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.visit_until_error(&Space::OF_VAULT, visit)
    }

    /// The same, with the rows that are of this table alone: for a copy that takes its place.
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

/// What a table is good for, where the right to it can end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It may be believed.
    Good,
    /// Not now: somebody else may be about to change what it says. It can become good again.
    InDoubt,
    /// Never again: somebody else may have it.
    Ended,
    /// Never again: this process has given it up.
    GivenUp,
}
