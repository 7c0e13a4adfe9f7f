//! Copies of objects. The keys of blocks are copied, so nothing is encrypted again, and the store can share the blocks.

use super::attrs::{Attrs, Shown, Version};
use super::key::Key;
use super::node::{Node, Open};
use super::target::{State, Target};
use super::{Guard, ObjectError, Objects, Reader, Result};
use crate::work;
use lamassu_vault::{Attr, Owner};
use std::ops::Range;
use std::sync::Arc;

/// The source of a copy.
pub struct Source {
    /// its file; a directory has none
    pub open: Option<Open>,
    /// its properties
    pub shown: Shown,
    /// where it was found
    place: (String, Key),
    /// the file, and the content that the properties belong to
    state: State,
}

/// Gets: whether the source is unchanged, a reader of the copy, and the properties to complete.
pub type CopySum<'a> = dyn FnMut(bool, &mut Reader<'_>, &mut Attrs) -> Result<()> + 'a;

impl Objects {
    /// Opens the source of a copy.
    ///
    /// # Errors
    /// As [`Objects::find`].
    pub fn source(&self, bucket: &str, key: &Key) -> Result<Source> {
        let (open, object) = self.open_object(bucket, key)?;
        let state = State::with(&object.node, Some(object.attrs.clone()));
        Ok(Source { open, shown: object.shown(), place: (bucket.into(), key.clone()), state })
    }

    /// Makes an object with the content of another, and with these properties. `sum` completes them from the content of
    /// the copy. It is told whether the source's own properties still match its content.
    ///
    /// # Errors
    /// As [`Objects::stage`] and [`super::Staged::place`]; [`lamassu_vault::VaultError::Stale`]: a copy onto its own
    /// source, which was replaced meanwhile; or the client is gone, and something else is at the key by now. Only a
    /// copy that makes a directory always ends with its client.
    pub fn copy(
        self: &Arc<Self>,
        source: &Source,
        (bucket, key): (&str, &Key),
        owner: Owner,
        guard: &Guard,
        attrs: &mut Attrs,
        sum: &mut CopySum<'_>,
    ) -> Result<Attr> {
        let open = match &source.open {
            // The size of a directory is 0, too.
            _ if key.is_dir() && source.shown.size == 0 => {
                return Ok(*self.begin_directory(bucket, key, owner)?.place(guard, attrs)?.attr());
            }
            Some(open) if !key.is_dir() => open,
            Some(_) | None => return Err(ObjectError::DirectoryContent),
        };
        let target = Target::note(self, bucket, key)?;
        let staged = self.stage(bucket, key, owner)?;
        let size = source.shown.size;
        Self::append(&staged, open, 0, 0..size)?;
        // A program in the mount may have written to it meanwhile.
        let is_same = Version::of(&open.attr()?) == source.state.version();
        sum(is_same, &mut |each| Self::read_through(staged.open(), size, each), attrs)?;
        let replaces_source = (source.place.0.as_str(), &source.place.1) == (bucket, key);
        let is_meant = |there: Option<&Node>| {
            let is_source = || there.is_some_and(|there| State::of(there) == source.state);
            target.may_replace(there) && (!replaces_source || is_source())
        };
        staged.make_parents()?;
        work::in_turn_to_sync(size, || {
            let attr = staged.complete(attrs)?;
            staged.place_complete(guard, is_meant)?;
            Ok(attr)
        })
    }

    /// Makes a part of an upload from a range of an object.
    ///
    /// # Errors
    /// [`Refusal::NoUpload`]; those of the vault.
    pub fn copy_part(
        self: &Arc<Self>,
        source: &Source,
        range: Range<u64>,
        (bucket, key, upload): (&str, &Key, &str),
        hash: &mut dyn FnMut(&[u8]),
    ) -> Result<super::Staged> {
        let staged = self.stage_part(bucket, key, upload)?;
        if let Some(open) = &source.open {
            Self::append(&staged, open, 0, range.clone())?;
            Self::read_through(staged.open(), range.end - range.start, hash)?;
        }
        Ok(staged)
    }
}
