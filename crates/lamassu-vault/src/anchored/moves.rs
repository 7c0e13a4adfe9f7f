//! Moves of entries: durable in the anchor first, then made in the store (N4, N5).

use super::Anchored;
use crate::dirs::Dir;
use crate::{Kind, Result, Vault, VaultError};
use lamassu_anchor::row::Inodes;
use lamassu_anchor::{AnchorError, EntryPlace, ObjectId, Renamed};
use lamassu_store::backend::Stat;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// A move that the store may make now: how the anchor has it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Moving {
    /// There is no anchor.
    Unanchored,
    /// Not durably, since the entry never was.
    Queued { from: EntryPlace, to: EntryPlace },
    /// Durably, with this intent.
    Intended(u64),
}

/// A stored name in a directory.
type NameIn<'a> = (&'a Dir, &'a OsStr);

impl Vault {
    /// Whether an entry removed from a name is still in the store.
    pub(crate) fn is_going(&self, dir: &Dir, stored: &OsStr) -> bool {
        let going = |anchored: &Anchored| !anchored.anchor.may_make(&anchored.place(dir.object, stored));
        self.anchored.as_ref().is_some_and(going)
    }

    /// Whether the entry under a name leaves the store as soon as it is removed: it was never durable in the anchor.
    /// Entries inside such a directory may be durable, and leave later.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn leaves_at_once(&self, dir: &Dir, stored: &OsStr) -> Result<bool> {
        let Some(anchored) = &self.anchored else { return Ok(false) };
        Ok(!anchored.anchor.has_durably(&anchored.place(dir.object, stored))?)
    }

    /// Whether an entry removed from a known directory is still in the store.
    pub(crate) fn has_going_in(&self, dir: ObjectId) -> bool {
        self.anchored.as_ref().is_some_and(|anchored| anchored.departures.is_waiting_in(dir))
    }

    /// Whether an inode has lost its last name; called after it has lost one.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn is_last(&self, st: &Stat, object: ObjectId) -> Result<bool> {
        match &self.anchored {
            Some(anchored) => Ok(anchored.anchor.row(object)?.links == 0),
            None => Ok(st.kind == Kind::Dir || st.nlink <= 1),
        }
    }

    /// Records a move in the anchor, before the store's step. `None`: a barrier of the whole store must come first, and
    /// nothing was recorded.
    ///
    /// # Errors
    /// [`VaultError::Anchor`]; [`VaultError::NotFound`].
    pub(crate) fn record_move(
        &self,
        from: NameIn<'_>,
        to: NameIn<'_>,
        is_exchange: bool,
        inodes: Inodes,
    ) -> Result<Option<Moving>> {
        self.record_move_of(from, to, |anchored, source, target| {
            anchored.anchor.rename(source, target, is_exchange, inodes, anchored.covered())
        })
    }

    fn record_move_of(
        &self,
        from: NameIn<'_>,
        to: NameIn<'_>,
        rename: impl FnOnce(&Anchored, EntryPlace, (EntryPlace, &[u8])) -> std::result::Result<Renamed, AnchorError>,
    ) -> Result<Option<Moving>> {
        let Some(anchored) = &self.anchored else { return Ok(Some(Moving::Unanchored)) };
        let (source, target) = (anchored.place(from.0.object, from.1), anchored.place(to.0.object, to.1));
        let renamed = rename(anchored, source, (target, to.1.as_bytes()))?;
        anchored.touched(self.now());
        match renamed {
            Renamed::NoEntry => Err(VaultError::NotFound),
            Renamed::NeedsBarrier => Ok(None),
            Renamed::Now => Ok(Some(Moving::Queued { from: source, to: target })),
            Renamed::Intended(number) => Ok(Some(Moving::Intended(number))),
        }
    }

    /// The store has made the move.
    pub(crate) fn has_moved(&self, moving: Moving) {
        let Some(anchored) = &self.anchored else { return };
        match moving {
            Moving::Unanchored => {}
            Moving::Queued { to, .. } => anchored.anchor.has_arrived(to),
            Moving::Intended(number) => anchored.anchor.carried_out([number]),
        }
    }

    /// The store has not made the move: the anchor undoes it, by another move. `target`: the object that is still under
    /// the name `to`. `back`: that other move, once it is durable.
    ///
    /// # Errors
    /// [`VaultError::Anchor`]; those of the store. It may be called again then.
    pub(crate) fn take_move_back(
        &self,
        from: NameIn<'_>,
        to: NameIn<'_>,
        is_exchange: bool,
        (moving, inodes): (Moving, Inodes),
        target: Option<ObjectId>,
        back: &mut Option<Moving>,
    ) -> Result<()> {
        let Some(anchored) = &self.anchored else { return Ok(()) };
        let number = match moving {
            Moving::Unanchored => return Ok(()),
            Moving::Queued { from, to } => {
                anchored.anchor.has_stayed(from, to);
                return Ok(());
            }
            Moving::Intended(number) => number,
        };
        let inodes = Inodes { target: if is_exchange { inodes.target } else { 0 }, ..inodes };
        let target = target.filter(|_| !is_exchange);
        let record_once = || match target {
            None => self.record_move(to, from, is_exchange, inodes),
            // In one commit: if the object were not recorded at a crash, recovery would take the move for one that the
            // store may have made, and replace the object by it.
            Some(replaced) => self.record_move_of(to, from, |anchored, source, target| {
                anchored.anchor.rename_back(source, target, inodes, anchored.covered(), replaced)
            }),
        };
        let record = || -> Result<Moving> {
            if let Some(back) = record_once()? {
                return Ok(back);
            }
            self.sync_store()?;
            record_once()?.ok_or(VaultError::Stale)
        };
        let moved = match *back {
            Some(moved) => moved,
            None => *back.insert(record()?),
        };
        if let (Some(target), Moving::Queued { .. }) = (target, moved) {
            anchored.anchor.link_again(anchored.place(to.0.object, to.1), target)?;
        }
        anchored.anchor.carried_out([number]);
        self.has_moved(moved);
        Ok(())
    }
}
