//! Sealed parts that are replaced as a whole: directory records, link targets, attributes, including access lists.
//!
//! A part is verified by its digest: what the store shows is the newest, or it is an error. A change is made in steps:
//! before each step of the store the anchor durably has {old, new}, and after it the step is noted.
//! [`Vault::replacing`] is the only way to write a part. A change that needs several calls of the store is several such
//! steps.

use super::take::shown;
use crate::digests::{ShownLink, StoredAttrs, digest_of_attributes, digest_of_dataset, digest_of_text};
use crate::dirs::Dir;
use crate::error::{errno, io};
use crate::event::IntegrityKind;
use crate::target::Target;
use crate::{Ino, Result, Vault, VaultError, symlink};
use lamassu_anchor::{Digest, ObjectId, Replacing, SealedPart, Seen};
use lamassu_format::header::VaultId;
use parking_lot::{RwLockReadGuard, RwLockWriteGuard};
use std::ffi::OsStr;

/// Attempts at a barrier while other calls make names of the object.
const TRIES_MAX: usize = 8;

impl Vault {
    /// The error, and the event, for an outdated part of an object.
    pub(crate) fn outdated_at(&self, what: &'static str, stored: String) -> VaultError {
        self.outdated_as(IntegrityKind::Stale, what, stored)
    }

    /// Whether what the store shows of an object is the newest; true in a vault without an anchor.
    ///
    /// # Errors
    /// [`VaultError::Anchor`].
    pub(crate) fn is_newest(&self, object: ObjectId, part: SealedPart, shown: Digest) -> Result<bool> {
        let Some(anchored) = &self.anchored else { return Ok(true) };
        let queued = anchored.anchor.queued();
        let is_newest = anchored.anchor.seen(object, part, shown, !self.options.read_only)?;
        if anchored.anchor.queued() != queued {
            anchored.touched(self.now());
        }
        Ok(is_newest)
    }

    /// The same for a link's target. If its replacement was cut off, some of its names may lead to the old target and
    /// some to the new one. So both stay current until all names lead to one.
    fn is_newest_link(&self, object: ObjectId, shown: Digest) -> Result<bool> {
        match &self.anchored {
            Some(anchored) if anchored.anchor.row(object)?.links > 1 => {
                Ok(anchored.anchor.seen(object, SealedPart::Content, shown, false)?)
            }
            Some(_) | None => self.is_newest(object, SealedPart::Content, shown),
        }
    }

    /// Refuses an outdated directory record; `text`: `None` if it is missing.
    ///
    /// # Errors
    /// [`VaultError::Outdated`], [`VaultError::Anchor`].
    pub(crate) fn verify_record(
        &self,
        object: ObjectId,
        text: Option<&[u8]>,
        stored: &dyn Fn() -> String,
    ) -> Result<()> {
        let shown = text.map_or(Digest::NONE, digest_of_text);
        match self.is_newest(object, SealedPart::Content, shown)? {
            true => Ok(()),
            false => Err(self.outdated_at("directory record", stored())),
        }
    }

    /// Refuses a dataset unless it is the one that was last put there.
    ///
    /// # Errors
    /// [`VaultError::Outdated`], [`VaultError::Anchor`].
    pub(crate) fn verify_dataset(&self, ino: Ino, id: &VaultId) -> Result<()> {
        let object = self.nodes.lock().object(ino);
        match self.is_newest(object, SealedPart::Content, digest_of_dataset(id))? {
            true => Ok(()),
            false => Err(self.outdated_at("dataset", self.tag(ino))),
        }
    }

    /// The target of a link in the store, verified as the newest.
    ///
    /// # Errors
    /// [`VaultError::Outdated`], [`VaultError::Anchor`], those of the store.
    pub(crate) fn stored_link(&self, object: ObjectId, dir: &Dir, name: &OsStr) -> Result<ShownLink> {
        self.newest_link(object, dir, name)?.ok_or_else(|| self.outdated("link target", dir.ino, name))
    }

    /// The same for a node, by one of its names. If that name was removed meanwhile, and another link with the same
    /// inode number was made there, the result is [`VaultError::Stale`].
    pub(crate) fn stored_link_of(&self, ino: Ino, dir: &Dir, name: &OsStr) -> Result<ShownLink> {
        let object = self.nodes.lock().object(ino);
        match self.newest_link(object, dir, name)? {
            Some(link) => Ok(link),
            None if !self.nodes.lock().has_name(ino, dir.ino, name) => Err(VaultError::Stale),
            None => Err(self.outdated("link target", dir.ino, name)),
        }
    }

    /// `None`: the store shows an outdated one.
    fn newest_link(&self, object: ObjectId, dir: &Dir, name: &OsStr) -> Result<Option<ShownLink>> {
        let link = symlink::shown(&self.ctx.ring, &*dir.handle, name).map_err(io("read a link"))?;
        Ok(self.is_newest_link(object, link.digest())?.then_some(link))
    }

    /// The object of a link at a place; 0 in a vault without an anchor.
    ///
    /// # Errors
    /// [`VaultError::NotFound`], [`VaultError::Anchor`].
    pub(crate) fn object_at(&self, dir: &Dir, name: &OsStr) -> Result<ObjectId> {
        let Some(anchored) = &self.anchored else { return Ok(ObjectId::default()) };
        let entry = anchored.anchor.entry(&anchored.place(dir.object, name))?;
        entry.map(|entry| entry.object).ok_or(VaultError::NotFound)
    }

    /// Keeps other calls from changing the attributes of a node. Taken by calls that read them, not by their helpers.
    pub(crate) fn attrs_still(&self, ino: Ino) -> Option<RwLockReadGuard<'_, ()>> {
        let anchored = self.anchored.as_ref()?;
        let object = self.nodes.lock().object(ino);
        Some(anchored.attrs_of(object).read())
    }

    /// Keeps other calls from reading the attributes of a node.
    pub(crate) fn attrs_alone(&self, ino: Ino) -> Option<RwLockWriteGuard<'_, ()>> {
        let anchored = self.anchored.as_ref()?;
        let object = self.nodes.lock().object(ino);
        Some(anchored.attrs_of(object).write())
    }

    /// All sealed attributes of a node, verified as the newest; `None` in a vault without an anchor. The caller must
    /// keep them from changing.
    ///
    /// # Errors
    /// [`VaultError::Outdated`], [`VaultError::Anchor`], those of the store.
    pub(crate) fn verified_attrs(&self, target: &Target, ino: Ino) -> Result<Option<StoredAttrs>> {
        if self.anchored.is_none() {
            return Ok(None);
        }
        let object = self.nodes.lock().object(ino);
        let attrs = shown(|| target.list_xattr(), |attr| target.get_xattr(attr))?;
        // Attributes read by a name that the node has lost meanwhile may be those of another node.
        let is_still_its = || match target {
            Target::Entry { dir, name, .. } => self.nodes.lock().has_name(ino, dir.ino, name),
            Target::Open(_) | Target::Root(..) | Target::Dir(_) => true,
        };
        match self.is_newest(object, SealedPart::Attributes, digest_of_attributes(&attrs))? {
            true => Ok(Some(attrs)),
            false if !is_still_its() => Err(VaultError::Stale),
            false => Err(self.outdated_at("attributes", self.tag(ino))),
        }
    }

    /// One step of a change of attributes: `step` sets or removes one. `attrs` are the verified ones and, after the
    /// call, the present ones.
    ///
    /// # Errors
    /// [`VaultError::Outdated`], [`VaultError::Anchor`], those of the step.
    pub(crate) fn change_attr(
        &self,
        ino: Ino,
        attrs: &mut StoredAttrs,
        (attr, value): (&OsStr, Option<&[u8]>),
        step: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut changed = attrs.clone();
        match value {
            Some(value) => changed.insert(attr.to_owned(), value.to_vec()),
            None => changed.remove(attr),
        };
        let digests = (digest_of_attributes(attrs), digest_of_attributes(&changed));
        let object = self.nodes.lock().object(ino);
        self.replacing(object, SealedPart::Attributes, digests, &|| self.tag(ino), step)?;
        *attrs = changed;
        Ok(())
    }

    /// Replaces a sealed part of an object by one step of the store: the anchor durably has both states first. In a
    /// vault without an anchor only the step is made. No other call may replace the same part.
    ///
    /// # Errors
    /// [`VaultError::Outdated`], [`VaultError::Anchor`], those of the step and of the store. If the step fails, both
    /// states stay current.
    pub(crate) fn replacing<T>(
        &self,
        object: ObjectId,
        part: SealedPart,
        (old, new): (Digest, Digest),
        stored: &dyn Fn() -> String,
        step: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Some(anchored) = &self.anchored else { return step() };
        let mut seen = Seen::AtSomeTime;
        for _ in 0..TRIES_MAX {
            match anchored.anchor.replacing(object, part, (old, new), seen, anchored.covered())? {
                Replacing::Noted => {
                    anchored.touched(self.now());
                    let done = step()?;
                    anchored.anchor.replaced(object, part, new)?;
                    return Ok(done);
                }
                Replacing::Stale => {
                    let what = if part == SealedPart::Attributes { "attributes" } else { "record or target" };
                    return Err(self.outdated_at(what, stored()));
                }
                Replacing::NeedsBarrier => {
                    self.sync_store()?;
                    anchored.anchor.commit(anchored.covered())?;
                    seen = Seen::BeforeBarrier;
                }
            }
        }
        Err(errno("replace what is sealed", libc::EBUSY))
    }
}

impl super::Anchored {
    /// The lock of an object's attributes.
    pub fn attrs_of(&self, object: ObjectId) -> &parking_lot::RwLock<()> {
        &self.attrs_locks[(object.0 % crate::STRIPES as u64) as usize]
    }
}
