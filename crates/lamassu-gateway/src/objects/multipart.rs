//! Objects that are uploaded in parts. Parts are files in a directory next to the future object, so they have its
//! profile and access lists. The object is made from them by the keys of their blocks.
//!
//! An upload has an entry in the bucket's index, with its key and the client's properties. It exists while both the
//! entry and the directory of its parts exist. It ends when its directory is durably renamed; the renamed directory is
//! removed then, or at the next start. So a crash leaves all of an upload or, after the next start, nothing.

use super::attrs::{Attrs, Given, NAME, Shown};
use super::key::Key;
use super::names::Names;
use super::node::{Node, Open};
use super::parts::{self, Completed};
use super::put::{again_if_gone, random_name};
use super::target::Target;
use super::uploads::{Paging, UploadPage, UploadQuery};
use super::{Guard, Object, ObjectError, Objects, Refusal, Result, Staged, none_there};
use crate::locks::Alone;
use crate::work;
use lamassu_vault::{Attr, Kind, Owner, RenameMode, VaultError};
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

/// The directory in a bucket that has an entry for each upload.
const INDEX: &str = ".lamassu-gateway";
/// Prefix of the name of an upload's directory.
const PARTS: &str = ".lamassu-upload-";
/// Prefix of the name of an ended upload's directory.
const ENDED: &str = ".lamassu-ended-";
const INDEX_MODE: u32 = 0o700;
/// Bytes of ids that are in memory at once for a listing.
const IDS_MAX: usize = 1 << 20;

/// The description of an upload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upload {
    /// of the object
    pub key: String,
    /// for the object
    pub given: Given,
    /// when it began, seconds since 1970
    pub begun: u64,
    /// the user who began it
    pub user: String,
    /// the algorithm of checksums, by its name
    pub algorithm: Option<String>,
    /// whether the checksum is of the whole object
    pub is_full: bool,
}

/// A part that was uploaded.
pub struct Part {
    /// from 1
    pub number: u32,
    /// what it is
    pub shown: Shown,
}

impl AsRef<Shown> for Part {
    fn as_ref(&self) -> &Shown {
        &self.shown
    }
}

/// Calls its argument with the content of an object, piece by piece.
pub type Reader<'a> = dyn FnMut(&mut dyn FnMut(&[u8])) -> Result<()> + 'a;
/// Removes the empty index of a bucket.
pub(super) fn remove_index(bucket: &Node) -> Result<()> {
    super::remove_if_empty(bucket, OsStr::new(INDEX)).map(drop)
}

fn part_name(number: u32) -> OsString {
    parts::name_of(number).into()
}

fn dir_name(id: &str) -> OsString {
    format!("{PARTS}{id}").into()
}

fn ended_name(id: &str) -> OsString {
    format!("{ENDED}{id}").into()
}

/// The id of the upload whose parts are in this directory.
pub(super) fn id_of_dir(name: &OsStr) -> Option<&str> {
    name.to_str()?.strip_prefix(PARTS)
}

/// Whether a directory belongs to an ended upload.
pub(super) fn is_ended_dir(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(ENDED.as_bytes())
}

/// Removes the directory of an ended upload. Others may do so at the same time. Parts that are still being written are
/// removed too: they will not be placed.
pub(super) fn remove_ended(parent: &Node, name: &OsStr) -> Result<()> {
    let Some(dir) = parent.child_if_there(name).or_else(|error| none_there(error).map(|()| None))? else {
        return Ok(());
    };
    let mut names = Vec::new();
    dir.list(&mut |name, _| names.push(name.to_owned())).or_else(none_there)?;
    for name in names {
        match dir.unlink(&name).or_else(none_there) {
            // A program has put a directory there. Its contents are not the gateway's.
            Err(VaultError::IsDirectory) => {}
            removed => removed?,
        }
    }
    super::remove_if_empty(parent, name).map(drop)
}

/// Whether something is in a bucket that stays when its uploads end: a program's directory, link or device.
pub(super) fn has_more_than_uploads(bucket: &Node) -> Result<bool> {
    let mut left = vec![bucket.clone()];
    while let Some(dir) = left.pop() {
        let (mut below, mut has_uploads, mut has_more) = (Vec::new(), false, false);
        dir.list(&mut |name, kind| match kind {
            Kind::Dir if id_of_dir(name).is_some() || is_ended_dir(name) || name == INDEX => has_uploads = true,
            Kind::Dir => below.push(name.to_owned()),
            _ => has_more = true,
        })?;
        // An empty directory stays, too. The bucket itself does not.
        if has_more || (below.is_empty() && !has_uploads && dir.ino() != bucket.ino()) {
            return Ok(true);
        }
        for name in below {
            left.extend(dir.child_if_there(&name)?);
        }
    }
    Ok(false)
}

/// Whether this gateway could have made this id.
fn is_id(id: &str) -> bool {
    id.len() == 32 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

impl Objects {
    /// Begins an upload; returns its id.
    ///
    /// # Errors
    /// As [`Objects::stage`].
    pub fn begin_upload(&self, bucket: &str, upload: &Upload, owner: Owner) -> Result<String> {
        let key = Key::parse(&upload.key)?;
        if key.is_dir() {
            return Err(ObjectError::DirectoryContent);
        }
        let bucket = self.bucket(bucket)?;
        let id = random_name()?;
        let (_, mut levels) = Self::lowest(&bucket, &key)?;
        // Hundreds of directories, perhaps: made before the lock is taken.
        let made = work::in_turn(|| self.make_missing(&bucket, &key, owner, &mut levels));
        let begun = made.and_then(|_| {
            // Until the index knows its directory, the sweep would remove it.
            let _alone = self.alone_with_upload(&id);
            self.make_upload((&bucket, &key, &id), upload, owner, &mut levels)
        });
        if let Err(error) = begun {
            let ended = {
                let _alone = self.alone_with_upload(&id);
                self.end_alone(&bucket, &key, &id)
            };
            if let Err(error) = ended.and_then(|()| self.remove_parts(&bucket, &key, &id)) {
                tracing::warn!(%error, "what was made for an upload could not be removed; the next start does it");
            }
            self.end_unplaced(&dir_name(&id), (&bucket, &key), levels);
            return Err(error);
        }
        self.under_way.placed(&dir_name(&id));
        Ok(id)
    }

    fn make_upload(
        &self,
        (bucket, key, id): (&Node, &Key, &str),
        upload: &Upload,
        owner: Owner,
        levels: &mut usize,
    ) -> Result<()> {
        let index = match bucket.make_dir(OsStr::new(INDEX), INDEX_MODE, owner) {
            Err(VaultError::Exists) => bucket.child(OsStr::new(INDEX))?,
            made => {
                let made = made?;
                bucket.sync_names()?;
                made
            }
        };
        again_if_gone(|| {
            let dir = self.make_missing(bucket, key, owner, levels)?;
            // Until it has begun, those who remove objects there leave the directory to it.
            self.under_way.begin(&dir_name(id), &dir);
            dir.make_dir(&dir_name(id), INDEX_MODE, owner)?;
            Ok(dir.sync_names()?)
        })?;
        let entry = index.create(OsStr::new(id), self.modes.file, owner)?;
        let described = serde_json::to_vec(upload).unwrap_or_default();
        entry.node().set_xattr(NAME, &described).map_err(|error| super::much_metadata(entry.node(), error))?;
        entry.sync()?;
        Ok(index.sync_names()?)
    }

    /// Locks an upload for a change. Taken before the lock of a key, never after it.
    fn alone_with_upload(&self, id: &str) -> Alone<'_, String> {
        self.uploads.alone(id.into())
    }

    /// An upload, and the directory of its parts.
    fn upload(&self, bucket: &Node, key: &Key, id: &str) -> Result<(Upload, Node)> {
        let described = self.described(bucket, id)?.filter(|upload| upload.key == key.as_str());
        let upload = described.ok_or(Refusal::NoUpload)?;
        let dir = self.parent(bucket, key)?.ok_or(Refusal::NoUpload)?;
        let parts = dir.child_if_there(&dir_name(id))?.ok_or(Refusal::NoUpload)?;
        Ok((upload, parts))
    }

    fn described(&self, bucket: &Node, id: &str) -> Result<Option<Upload>> {
        if !is_id(id) {
            return Ok(None);
        }
        let Some(index) = bucket.child_if_there(OsStr::new(INDEX))? else { return Ok(None) };
        let Some(entry) = index.child_if_there(OsStr::new(id))? else { return Ok(None) };
        Ok(entry.xattr(NAME)?.and_then(|value| serde_json::from_slice(&value).ok()))
    }

    /// The description of an upload.
    ///
    /// # Errors
    /// [`Refusal::NoUpload`], [`Refusal::NoBucket`]; those of the vault.
    pub fn find_upload(&self, bucket: &str, key: &Key, id: &str) -> Result<Upload> {
        Ok(self.upload(&self.bucket(bucket)?, key, id)?.0)
    }

    /// Begins a part.
    ///
    /// # Errors
    /// As [`Objects::find_upload`].
    pub fn stage_part(self: &Arc<Self>, bucket: &str, key: &Key, id: &str) -> Result<Staged> {
        let bucket = self.bucket(bucket)?;
        let _alone = self.alone_with_upload(id);
        let (_, dir) = self.upload(&bucket, key, id)?;
        let owner = Owner { uid: dir.attr().uid, gid: dir.attr().gid, umask: 0 };
        self.stage_in(&dir, owner)
    }

    /// Puts a part in its place.
    ///
    /// # Errors
    /// [`Refusal::NoUpload`] if the upload has ended meanwhile; [`VaultError::Stale`]: the client is gone; those of the
    /// vault.
    pub fn place_part(
        &self,
        (bucket, key, id): (&str, &Key, &str),
        staged: Staged,
        number: u32,
        attrs: &Attrs,
    ) -> Result<Attr> {
        let attr = unless_removed(staged.complete(attrs))?;
        let bucket = unless_removed(self.bucket(bucket))?;
        let _alone = self.alone_with_upload(id);
        // A client that is gone may have sent the part again, and then another: this one must not come after them.
        work::wanted(VaultError::Stale)?;
        unless_removed(self.upload(&bucket, key, id).and_then(|_| staged.place_as(&part_name(number))))?;
        Ok(attr)
    }

    /// The parts of an upload, by number.
    ///
    /// # Errors
    /// As [`Objects::find_upload`].
    pub fn parts(&self, bucket: &str, key: &Key, id: &str) -> Result<(Upload, Vec<Part>)> {
        let (upload, dir) = self.upload(&self.bucket(bucket)?, key, id)?;
        let mut numbers = Vec::new();
        dir.list(&mut |name, _| numbers.extend(name.to_str().and_then(parts::number_of)))?;
        numbers.sort_unstable();
        let part = |number| work::pause().map_err(ObjectError::from).and_then(|()| Self::part(&dir, number));
        let parts = numbers.into_iter().map(part).filter_map(Result::transpose);
        Ok((upload, parts.collect::<Result<_>>()?))
    }

    fn part(dir: &Node, number: u32) -> Result<Option<Part>> {
        let Some(node) = dir.child_if_there(&part_name(number))? else { return Ok(None) };
        let attrs = Attrs::of(&node)?;
        Ok(Some(Part { number, shown: Object { node, attrs }.shown() }))
    }

    /// Opens a part, if it is still the one that was listed: another may have replaced it.
    fn open_part(dir: &Node, part: &Part) -> Result<Open> {
        let none = |error| match error {
            VaultError::NotFound | VaultError::Stale => Refusal::NoPart(part.number).into(),
            error => error.into(),
        };
        let node = dir.child(&part_name(part.number)).map_err(none)?;
        // The tag is an MD5 of the content, so another content has another tag.
        match node.attr().size == part.shown.size && Attrs::of(&node)? == part.shown.attrs {
            true => node.open().map_err(none),
            false => Err(Refusal::NoPart(part.number).into()),
        }
    }

    /// A page of the uploads of a bucket: those to keys in folders that `may_list` allows.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`]; those of the vault.
    pub fn uploads(&self, bucket: &str, query: &UploadQuery, may_list: &dyn Fn(&str) -> bool) -> Result<UploadPage> {
        let bucket = self.bucket(bucket)?;
        let marker = query.after_id.as_deref().map(|id| self.described(&bucket, id)).transpose()?.flatten();
        let mut paging = Paging::new(query, may_list, marker.as_ref());
        if let Some(index) = bucket.child_if_there(OsStr::new(INDEX))? {
            let mut from = Some(String::new());
            while let Some(begin) = from {
                work::wanted(VaultError::Stale)?;
                let ids = Names::read(&index, &begin, IDS_MAX)?;
                for id in (0..ids.len()).map(|at| ids.get(at)) {
                    work::pause()?;
                    if let Some(upload) = self.described(&bucket, id)? {
                        paging.offer(id, &upload);
                    }
                }
                from = ids.next().map(String::from);
            }
        }
        Ok(paging.page())
    }

    /// Makes the object from the parts. `sum` computes the checksum, from the parts' checksums or from the content.
    ///
    /// # Errors
    /// [`Refusal::NoUpload`]; as [`parts::chosen`] and [`Staged::place`]; those of `sum`; [`VaultError::Stale`]: the
    /// client is gone, and something else is at the key by now. Then the upload continues.
    pub fn complete_upload<E: From<ObjectError>>(
        self: &Arc<Self>,
        (bucket, key, id): (&str, &Key, &str),
        completed: &[Completed],
        owner: Owner,
        guard: &Guard,
        sum: impl FnOnce(&Upload, &[Part], &mut Reader<'_>) -> Result<Option<String>, E>,
    ) -> Result<Attrs, E> {
        let at = self.bucket(bucket)?;
        // The answer to an earlier request may have been lost, or that request is still under way.
        let before = || self.completed_before(bucket, key, completed);
        let Some((upload, dir)) = unless_ended(self.upload(&at, key, id))? else { return Ok(before()?) };
        let chosen = parts::chosen(completed, upload.algorithm.as_deref(), |number| Self::part(&dir, number));
        let Some(parts): Option<Vec<Part>> = unless_ended(self.of_upload(&at, (key, id), chosen))? else {
            return Ok(before()?);
        };
        let mut attrs = Attrs { given: upload.given.clone(), ..Attrs::default() };
        let target = Target::note(self, bucket, key)?;
        let staged = self.stage(bucket, key, owner)?;
        let mut size = 0;
        for part in &parts {
            let open = self.of_upload(&at, (key, id), Self::open_part(&dir, part));
            let Some(open) = unless_ended(open)? else { return Ok(before()?) };
            Self::append(&staged, &open, size, 0..part.shown.size)?;
            size += part.shown.size;
            attrs.add_part(part.shown.size);
        }
        attrs.etag = parts_tag(&parts)?;
        let mut read = |each: &mut dyn FnMut(&[u8])| Self::read_through(staged.open(), size, each);
        if let (Some(sum), Some(algorithm)) = (sum(&upload, &parts, &mut read)?, &upload.algorithm) {
            attrs.checksums.insert(algorithm.clone(), sum);
            attrs.is_composite = !upload.is_full;
        }
        staged.make_parents()?;
        let ended = work::in_turn_to_sync(size, || {
            complete_with_parts(&staged, &mut attrs)?;
            self.end_by(&at, (key, id), || staged.place_complete(guard, |there| target.may_replace(there)))
        });
        match unless_ended(ended)? {
            Some(()) => {
                // Thousands of names: not where others wait to sync.
                if let Err(error) = self.remove_parts(&at, key, id) {
                    tracing::warn!(%error, "parts of a complete upload could not be removed; the next start does so");
                }
                Ok(attrs)
            }
            None => Ok(before()?),
        }
    }

    /// A part may be missing because another request has ended the upload.
    fn of_upload<T>(&self, bucket: &Node, (key, id): (&Key, &str), done: Result<T>) -> Result<T> {
        match done {
            Err(
                error @ (ObjectError::Refused(Refusal::NoPart(_))
                | ObjectError::Vault(VaultError::NotFound | VaultError::Stale)),
            ) => self.upload(bucket, key, id).and(Err(error)),
            done => done,
        }
    }

    /// Ends an upload by making its object. Only one request does so: later requests to complete or abort it find no
    /// upload.
    fn end_by(&self, bucket: &Node, (key, id): (&Key, &str), place: impl FnOnce() -> Result<()>) -> Result<()> {
        let ended = {
            let _alone = self.alone_with_upload(id);
            self.upload(bucket, key, id)?;
            place()?;
            self.end_alone(bucket, key, id)
        };
        if let Err(error) = ended {
            tracing::warn!(%error, "an upload that is complete could not be ended; it can be aborted");
        }
        Ok(())
    }

    /// The present object, if it was made from these parts.
    fn completed_before(&self, bucket: &str, key: &Key, completed: &[Completed]) -> Result<Attrs> {
        let etag = parts::tag_of(completed.iter().map(|part| part.etag.as_str())).ok_or(Refusal::NoUpload)?;
        match self.find(bucket, key) {
            Ok(found) if found.attrs.etag == etag => Ok(found.attrs),
            Ok(_) | Err(ObjectError::Refused(Refusal::NoKey)) => Err(Refusal::NoUpload.into()),
            Err(error) => Err(error),
        }
    }

    /// Ends an upload, and removes its parts.
    ///
    /// # Errors
    /// As [`Objects::find_upload`].
    pub fn abort_upload(&self, bucket: &str, key: &Key, id: &str) -> Result<()> {
        let bucket = self.bucket(bucket)?;
        {
            let _alone = self.alone_with_upload(id);
            // Also without its directory: an earlier end may have been interrupted.
            let described = self.described(&bucket, id)?.filter(|upload| upload.key == key.as_str());
            described.ok_or(Refusal::NoUpload)?;
            self.end_alone(&bucket, key, id)?;
        }
        self.remove_parts(&bucket, key, id)?;
        self.prune(&bucket, key, 0)
    }

    /// Ends a locked upload. The new name is durable before the entry is removed, so a directory without an entry never
    /// looks like that of a live upload.
    fn end_alone(&self, bucket: &Node, key: &Key, id: &str) -> Result<()> {
        if let Some(parent) = self.parent(bucket, key)? {
            parent.rename(&dir_name(id), &ended_name(id), RenameMode::Replace).or_else(none_there)?;
            parent.sync_names().or_else(none_there)?;
        }
        remove_entry(bucket, id)
    }

    /// Removes what is left of an upload that has ended.
    fn remove_parts(&self, bucket: &Node, key: &Key, id: &str) -> Result<()> {
        let parent = self.parent(bucket, key)?;
        parent.map_or(Ok(()), |parent| remove_ended(&parent, &ended_name(id)))
    }

    /// Removes entries of a bucket's index without an upload. Returns their number.
    pub(super) fn sweep_index(&self, bucket: &Node) -> Result<u64> {
        let mut ids = Vec::new();
        if let Some(index) = bucket.child_if_there(OsStr::new(INDEX))? {
            index.list(&mut |name, _| ids.extend(name.to_str().map(String::from)))?;
        }
        let mut removed = 0;
        for id in ids {
            let _alone = self.alone_with_upload(&id);
            let key = self.described(bucket, &id)?.and_then(|upload| Key::parse(&upload.key).ok());
            let is_there = match key.map(|key| self.upload(bucket, &key, &id)) {
                None | Some(Err(ObjectError::Refused(Refusal::NoUpload))) => false,
                Some(found) => found.map(|_| true)?,
            };
            if !is_there {
                remove_entry(bucket, &id)?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// Removes the directory of an upload in `parent` unless the index knows it. Returns whether it did.
    pub(super) fn sweep_upload(&self, bucket: &Node, parent: &Node, id: &str) -> Result<bool> {
        {
            let _alone = self.alone_with_upload(id);
            let key = self.described(bucket, id)?.and_then(|upload| Key::parse(&upload.key).ok());
            let place = key.map(|key| self.parent(bucket, &key)).transpose()?.flatten();
            if place.is_some_and(|place| place.ino() == parent.ino()) {
                return Ok(false);
            }
            parent.rename(&dir_name(id), &ended_name(id), RenameMode::Replace).or_else(none_there)?;
        }
        remove_ended(parent, &ended_name(id))?;
        Ok(true)
    }
}

/// Completes the file of an object that was made of parts. The list of parts is dropped if it does not fit, since the
/// client could not complete the upload otherwise.
fn complete_with_parts(staged: &Staged, attrs: &mut Attrs) -> Result<()> {
    match staged.complete(attrs) {
        Err(ObjectError::MuchMetadata) if !attrs.parts.is_empty() => {
            attrs.parts.clear();
            staged.complete(attrs).map(drop)
        }
        completed => completed.map(drop),
    }
}

fn remove_entry(bucket: &Node, id: &str) -> Result<()> {
    let Some(index) = bucket.child_if_there(OsStr::new(INDEX))? else { return Ok(()) };
    index.unlink(OsStr::new(id)).or_else(none_there)?;
    Ok(index.sync_names().or_else(none_there)?)
}

/// What is missing was removed with the upload.
fn unless_removed<T>(done: Result<T>) -> Result<T> {
    match done {
        Err(ObjectError::Vault(VaultError::NotFound | VaultError::Stale)) => Err(Refusal::NoUpload.into()),
        done => done,
    }
}

/// Maps a missing upload to `None`.
fn unless_ended<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Err(ObjectError::Refused(Refusal::NoUpload)) => Ok(None),
        found => found.map(Some),
    }
}

/// The tag of an object of these parts, each of which has an MD5.
fn parts_tag(parts: &[Part]) -> Result<String> {
    Ok(parts::tag_of(parts.iter().map(|part| part.shown.attrs.etag.as_str())).ok_or(Refusal::NoPart(1))?)
}
