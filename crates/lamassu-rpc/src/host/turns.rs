//! A vault by turns: any number of hosts have it whole, one after the other, or read it together (rules R1 to R13 of
//! `docs/sharing.md`).

use super::{Connection, Mirrored, Result};
use lamassu_anchor::head::Head;
use lamassu_anchor::table::Change;
use lamassu_lease::Mode;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A session that has the vault by turns. Dropped, or by [`Turns::leave`], it ends.
pub struct Turns {}

/// What the holder of a turn is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Another host wants the vault: pass it on soon, within a term at most.
    Recalled,
    /// The session has ended: what was not committed is lost.
    Ended,
}

/// One turn. Dropped, it is passed.
pub struct Turn {
    /// the table of this turn, for [`lamassu_anchor::Anchor::open`]
    pub table: Arc<Mirrored>,
    /// An earlier holder ended without passing the vault: what it left is to be put right before anything else, then
    /// [`Turn::taken_over`]. The turn is exclusive, whatever was asked for.
    pub takes_over: bool,
    /// head of the table when the turn began
    pub head: Head,
    /// What was changed since this host's copy was written last, in order; `None`: perhaps everything.
    pub changed: Option<Vec<Change>>,
}

impl Turns {
    /// Begins a session, which has nothing yet. The copy in `file` is this process's alone from now on.
    ///
    /// # Errors
    /// As [`Mirrored::open`].
    pub fn begin(connection: &Connection, vault: [u8; 16], file: &Path) -> Result<Arc<Turns>> {
        let _ = (connection, vault, file);
        unimplemented!()
    }

    /// Waits until this host has the vault in this mode, and brings the copy up to date. Waits for this process's turn
    /// before, too. Where the session has ended another one is begun.
    ///
    /// # Errors
    /// [`lamassu_anchor::AnchorError::Server`]: `Unreachable` after a term of silence, `Ended` behind [`Turns::leave`];
    /// those of the copy.
    pub fn take(self: &Arc<Self>, mode: Mode) -> Result<Turn> {
        let _ = mode;
        unimplemented!()
    }

    /// Has this called when the holder of a turn is told something; once. It does not wait.
    pub fn on_told(&self, call: impl Fn() + Send + Sync + 'static) {
        let _ = call;
        unimplemented!()
    }

    /// Ends the session, and a turn with it. Nothing is taken by it any more.
    pub fn leave(&self) {
        unimplemented!()
    }
}

impl Turn {
    /// How the vault is held.
    pub fn mode(&self) -> Mode {
        unimplemented!()
    }

    /// What the holder is told, once that is something: `None`: nothing until so long had passed.
    pub fn wait(&self, until: Duration) -> Option<Told> {
        let _ = until;
        unimplemented!()
    }

    /// The same, now.
    pub fn told(&self) -> Option<Told> {
        unimplemented!()
    }

    /// What an earlier holder left is put right, and committed.
    pub fn taken_over(&self) {
        unimplemented!()
    }

    /// All is committed, and nothing is cached any more: the vault goes on. The table of this turn fails every call
    /// with `Ended` from now on.
    pub fn pass(self) {
        unimplemented!()
    }

    /// Whether what the table says may be believed now.
    pub fn is_good(&self) -> bool {
        unimplemented!()
    }
}
