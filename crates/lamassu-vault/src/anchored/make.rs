//! New entries: the store's step first, then a queued entry and row.

use crate::dirs::Dir;
use crate::error::errno;
use crate::names::StoredName;
use crate::wanted::Wanted;
use crate::{Kind, Result, Vault, VaultError};
use lamassu_anchor::row::{Content, FileRow, Sealed};
use lamassu_anchor::{AnchorError, Digest, EntryPlace, Made, ObjectId, Row};
use lamassu_format::Profile;
use lamassu_store::backend::Stat;

/// Attempts to make a name whose removal is under way.
pub(super) const TRIES_MAX: usize = 16;

/// An object that was just made in the store.
pub(crate) struct Fresh {
    pub st: Stat,
    /// the mode it was given; a symbolic link has none
    pub mode: Option<u32>,
    /// a directory's record, or a link's stored target; [`Digest::NONE`] for other kinds
    pub content: Digest,
    /// all its sealed attributes
    pub attributes: Sealed,
    /// the requested device number
    pub rdev: u64,
    /// the protection of a file's blocks
    pub profile: Profile,
}

impl Fresh {
    /// An object without content and attributes.
    pub fn new(st: Stat, mode: Option<u32>) -> Fresh {
        Fresh { st, mode, content: Digest::NONE, attributes: Sealed::Nothing, rdev: 0, profile: Profile::DEFAULT }
    }

    /// Its row. Only the kind is taken from the store.
    fn row(&self, place: &EntryPlace, wanted: &Wanted) -> Row {
        let sealed = if self.content.is_none() { Sealed::Nothing } else { Sealed::Is(self.content) };
        let content = match self.st.kind {
            Kind::File => Content::File(FileRow { profile: self.profile, ..FileRow::default() }),
            Kind::Dir => Content::Dir { record: sealed, parent: place.dir, name: place.name },
            Kind::Symlink => Content::Link(sealed),
            Kind::Fifo => Content::Fifo,
            Kind::Socket => Content::Socket,
            Kind::CharDevice => Content::Char(self.rdev),
            Kind::BlockDevice => Content::Block(self.rdev),
        };
        let mode = self.mode.unwrap_or(0o777) & 0o7777;
        Row { mode, uid: wanted.uid, gid: wanted.gid, links: 1, content, attributes: self.attributes }
    }
}

impl Vault {
    /// Whether a name may be made in the store now. False: pending removals must be carried out first, which a caller
    /// does without holding a lock ([`Vault::commit_removals`]). An unrecorded entry is moved out of the way.
    ///
    /// # Errors
    /// [`VaultError::Outdated`] for a missing entry; those of the store.
    pub(crate) fn may_make(&self, dir: &Dir, stored: &StoredName) -> Result<bool> {
        let Some(anchored) = &self.anchored else { return Ok(true) };
        if !anchored.anchor.may_make(&anchored.place(dir.object, &stored.name)) {
            return Ok(false);
        }
        let shown = self.shown(dir, &stored.name)?;
        match self.judged(dir, &stored.name, shown.map(|st| st.kind))? {
            // The store will report it.
            Some(_) => Ok(true),
            None if shown.is_some() => self.move_to_lost(dir, &stored.name).map(|()| true),
            None => Ok(true),
        }
    }

    /// Records a new object under a name that [`Vault::may_make`] has allowed. Returns the object; 0 in a vault without
    /// an anchor.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn record_made(
        &self,
        dir: &Dir,
        stored: &StoredName,
        fresh: &Fresh,
        wanted: &Wanted,
    ) -> Result<ObjectId> {
        let Some(anchored) = &self.anchored else { return Ok(ObjectId::default()) };
        let place = anchored.place(dir.object, &stored.name);
        let made = anchored.anchor.make(place, fresh.row(&place, wanted))?;
        anchored.queued(made, self.now())
    }

    /// Records another name of an object.
    ///
    /// # Errors
    /// [`VaultError::NotFound`]: another thread has removed its last one. As [`Vault::record_made`].
    pub(crate) fn record_link(&self, dir: &Dir, stored: &StoredName, object: ObjectId) -> Result<()> {
        let Some(anchored) = &self.anchored else { return Ok(()) };
        match anchored.anchor.link(anchored.place(dir.object, &stored.name), object) {
            Err(AnchorError::Unknown { .. }) => Err(VaultError::NotFound),
            made => anchored.queued(made?, self.now()).map(drop),
        }
    }
}

impl super::Anchored {
    fn queued(&self, made: Made, now: crate::handles::Millis) -> Result<ObjectId> {
        self.touched(now);
        match made {
            Made::Queued(object) => Ok(object),
            // No removal of it can have begun meanwhile: the caller holds the directory's lock.
            Made::NameIsGoing => Err(errno("record an entry", libc::EBUSY)),
        }
    }
}
