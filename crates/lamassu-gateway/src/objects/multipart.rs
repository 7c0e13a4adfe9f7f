//! Objects that are uploaded in parts. Parts are files of their own, in a directory beside the object-to-be, whose
//! profile and access lists they so have; the object is made of them by the keys of their blocks.
//!
//! An upload has an entry in the bucket's index, which says its key and what was given; without it there is none.

use super::attrs::{Attrs, Given, NAME};
use super::key::Key;
use super::node::Node;
use super::put::{STAGED, random_name};
use super::{Guard, ObjectError, Objects, Result, Staged, none_there};
use data_encoding::HEXLOWER;
use lamassu_vault::{Attr, Owner, VaultError};
use s3s::crypto::{Checksum as _, Md5};
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

/// The directory in a bucket that has an entry for each upload.
const INDEX: &str = ".lamassu-gateway";
/// What begins the name of an upload's directory.
const PARTS: &str = ".lamassu-upload-";
/// Most parts, as in S3.
pub const PARTS_MAX: u32 = 10_000;
/// Smallest part but the last, as in S3.
const PART_MIN: u64 = 5 << 20;
const INDEX_MODE: u32 = 0o700;

/// What is known of an upload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upload {
    /// of the object
    pub key: String,
    /// for the object
    pub given: Given,
    /// when it began, seconds since 1970
    pub begun: u64,
    /// who began it
    pub user: String,
    /// the algorithm of checksums, by its name
    pub algorithm: Option<String>,
    /// whether the checksum is of the whole object
    pub is_full: bool,
}

/// An upload and its id.
pub type Uploads = Vec<(String, Upload)>;

/// A part that was uploaded.
pub struct Part {
    /// from 1
    pub number: u32,
    /// stat
    pub attr: Attr,
    /// entity tag, checksums
    pub attrs: Attrs,
}

/// What the client says of a part when it completes an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completed {
    /// from 1
    pub number: u32,
    /// its entity tag
    pub etag: String,
    /// its checksum, if it says one
    pub checksum: Option<String>,
}

/// Calls what it is given with the content of an object, piece by piece.
pub type Reader<'a> = dyn FnMut(&mut dyn FnMut(&[u8])) -> Result<()> + 'a;
/// Turns the checksums of the parts, and what reads the object, into the checksum of the object.
pub type Summed<'a> = dyn FnMut(&[Part], &mut Reader<'_>) -> Result<Option<String>> + 'a;

/// Removes the empty index of a bucket.
pub(super) fn remove_index(bucket: &Node) -> Result<()> {
    super::remove_if_empty(bucket, OsStr::new(INDEX)).map(drop)
}

fn part_name(number: u32) -> OsString {
    format!("{number:05}").into()
}

fn dir_name(id: &str) -> OsString {
    format!("{PARTS}{id}").into()
}

/// Whether it is one that this gateway could have given.
fn is_id(id: &str) -> bool {
    id.len() == 32 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

impl Objects {
    /// Begins an upload; its id.
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
        let index = match bucket.make_dir(OsStr::new(INDEX), INDEX_MODE, owner) {
            Err(VaultError::Exists) => bucket.child(OsStr::new(INDEX))?,
            made => made?,
        };
        let (_, ()) = self.in_parent(&bucket, &key, owner, |dir| {
            dir.make_dir(&dir_name(&id), INDEX_MODE, owner)?;
            Ok(dir.sync_names()?)
        })?;
        let entry = index.create(OsStr::new(&id), self.modes.file, owner)?;
        let described = serde_json::to_vec(upload).unwrap_or_default();
        if let Err(error) = entry.node().set_xattr(NAME, &described).and_then(|()| entry.sync()) {
            let _ = index.unlink(OsStr::new(&id));
            return Err(super::much_metadata(error));
        }
        index.sync_names()?;
        Ok(id)
    }

    /// An upload, and the directory of its parts.
    fn upload(&self, bucket: &Node, key: &Key, id: &str) -> Result<(Upload, Node)> {
        let described = self.described(bucket, id)?.filter(|upload| upload.key == key.as_str());
        let upload = described.ok_or(ObjectError::NoUpload)?;
        let dir = self.parent(bucket, key)?.ok_or(ObjectError::NoUpload)?;
        let parts = dir.child_if_there(&dir_name(id))?.ok_or(ObjectError::NoUpload)?;
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

    /// What is known of an upload.
    ///
    /// # Errors
    /// [`ObjectError::NoUpload`], [`ObjectError::NoBucket`]; those of the vault.
    pub fn find_upload(&self, bucket: &str, key: &Key, id: &str) -> Result<Upload> {
        Ok(self.upload(&self.bucket(bucket)?, key, id)?.0)
    }

    /// Begins a part.
    ///
    /// # Errors
    /// As [`Objects::find_upload`].
    pub fn stage_part(self: &Arc<Self>, bucket: &str, key: &Key, id: &str) -> Result<Staged> {
        let (_, dir) = self.upload(&self.bucket(bucket)?, key, id)?;
        let owner = Owner { uid: dir.attr().uid, gid: dir.attr().gid, umask: 0 };
        self.stage_in(&dir, owner)
    }

    /// Puts a part in its place.
    ///
    /// # Errors
    /// [`ObjectError::NoUpload`] where the upload has ended meanwhile; those of the vault.
    pub fn place_part(staged: Staged, number: u32, attrs: &mut Attrs) -> Result<Attr> {
        match staged.place_as(&part_name(number), attrs) {
            Err(ObjectError::Vault(VaultError::NotFound | VaultError::Stale)) => Err(ObjectError::NoUpload),
            placed => placed,
        }
    }

    /// The parts of an upload, by number.
    ///
    /// # Errors
    /// As [`Objects::find_upload`].
    pub fn parts(&self, bucket: &str, key: &Key, id: &str) -> Result<(Upload, Vec<Part>)> {
        let (upload, dir) = self.upload(&self.bucket(bucket)?, key, id)?;
        let mut numbers = Vec::new();
        dir.list(&mut |name, _| numbers.extend(name.to_str().and_then(|name| name.parse::<u32>().ok())))?;
        numbers.sort_unstable();
        let parts = numbers.into_iter().map(|number| Self::part(&dir, number)).filter_map(Result::transpose);
        Ok((upload, parts.collect::<Result<_>>()?))
    }

    fn part(dir: &Node, number: u32) -> Result<Option<Part>> {
        let Some(node) = dir.child_if_there(&part_name(number))? else { return Ok(None) };
        Ok(Some(Part { number, attr: *node.attr(), attrs: Attrs::of(&node)? }))
    }

    /// The uploads of a bucket whose keys begin with `prefix`, by key and then by age.
    ///
    /// # Errors
    /// [`ObjectError::NoBucket`]; those of the vault.
    pub fn uploads(&self, bucket: &str, prefix: &str) -> Result<Uploads> {
        let bucket = self.bucket(bucket)?;
        let mut ids = Vec::new();
        if let Some(index) = bucket.child_if_there(OsStr::new(INDEX))? {
            index.list(&mut |name, _| ids.extend(name.to_str().map(String::from)))?;
        }
        let mut uploads = Vec::new();
        for id in ids {
            let upload = self.described(&bucket, &id)?.filter(|upload| upload.key.starts_with(prefix));
            uploads.extend(upload.map(|upload| (id, upload)));
        }
        uploads.sort_by(|(id, one), (other_id, other)| {
            (&one.key, one.begun, id).cmp(&(&other.key, other.begun, other_id))
        });
        Ok(uploads)
    }

    /// Makes the object of its parts. `sum` says what its checksum is.
    ///
    /// # Errors
    /// [`ObjectError::NoPart`], [`ObjectError::PartOrder`], [`ObjectError::SmallPart`]; as [`Staged::place`]. The
    /// upload goes on then.
    pub fn complete_upload(
        self: &Arc<Self>,
        (bucket, key, id): (&str, &Key, &str),
        completed: &[Completed],
        owner: Owner,
        guard: &Guard,
        sum: &mut Summed<'_>,
    ) -> Result<(Attrs, Attr)> {
        let at = self.bucket(bucket)?;
        let (upload, dir) = match self.upload(&at, key, id) {
            // The answer to an earlier request may have been lost.
            Err(ObjectError::NoUpload) => return self.completed_before(bucket, key, completed),
            found => found?,
        };
        let parts = Self::chosen(&dir, &upload, completed)?;
        let mut attrs = Attrs { given: upload.given.clone(), ..Attrs::default() };
        let staged = self.stage(bucket, key, owner)?;
        let (mut hash, mut size) = (Md5::new(), 0);
        for part in &parts {
            let open = dir.child(&part_name(part.number))?.open()?;
            Self::append(&staged, &open, size, 0..part.attr.size)?;
            size += part.attr.size;
            attrs.add_part(part.attr.size);
            hash.update(&HEXLOWER.decode(part.attrs.etag.as_bytes()).unwrap_or_default());
        }
        attrs.etag = format!("{}-{}", HEXLOWER.encode(hash.finalize().as_ref()), parts.len());
        let mut read = |each: &mut dyn FnMut(&[u8])| Self::read_through(staged.open(), size, each);
        if let (Some(algorithm), Some(sum)) = (&upload.algorithm, sum(&parts, &mut read)?) {
            attrs.checksums.insert(algorithm.clone(), sum);
            attrs.is_composite = !upload.is_full;
        }
        let attr = staged.place(guard, &mut attrs)?;
        if let Err(error) = self.end_upload(&at, key, id, &dir) {
            tracing::warn!(%error, "an upload that is complete could not be removed; it can be aborted");
        }
        Ok((attrs, attr))
    }

    /// The object, if it was made of these parts.
    fn completed_before(&self, bucket: &str, key: &Key, completed: &[Completed]) -> Result<(Attrs, Attr)> {
        let mut hash = Md5::new();
        for part in completed {
            hash.update(&HEXLOWER.decode(part.etag.as_bytes()).map_err(|_| ObjectError::NoUpload)?);
        }
        let etag = format!("{}-{}", HEXLOWER.encode(hash.finalize().as_ref()), completed.len());
        let found = self.find(bucket, key).map_err(|_| ObjectError::NoUpload)?;
        match found.attrs.etag == etag && !found.attrs.parts.is_empty() {
            true => Ok((found.attrs, *found.node.attr())),
            false => Err(ObjectError::NoUpload),
        }
    }

    fn chosen(dir: &Node, upload: &Upload, completed: &[Completed]) -> Result<Vec<Part>> {
        let mut parts: Vec<Part> = Vec::with_capacity(completed.len());
        for wanted in completed {
            if parts.last().is_some_and(|last| last.number >= wanted.number) {
                return Err(ObjectError::PartOrder);
            }
            let part = Self::part(dir, wanted.number)?.filter(|part| part.attrs.etag == wanted.etag);
            let part = part.ok_or(ObjectError::NoPart(wanted.number))?;
            let known = upload.algorithm.as_ref().and_then(|algorithm| part.attrs.checksums.get(algorithm));
            if wanted.checksum.is_some() && wanted.checksum.as_ref() != known {
                return Err(ObjectError::NoPart(wanted.number));
            }
            parts.push(part);
        }
        let small = parts.iter().rev().skip(1).find(|part| part.attr.size < PART_MIN);
        match (small, parts.is_empty()) {
            (Some(part), _) => Err(ObjectError::SmallPart(part.number)),
            (None, true) => Err(ObjectError::NoPart(1)),
            (None, false) => Ok(parts),
        }
    }

    /// Ends an upload, and removes its parts.
    ///
    /// # Errors
    /// As [`Objects::find_upload`].
    pub fn abort_upload(&self, bucket: &str, key: &Key, id: &str) -> Result<()> {
        let bucket = self.bucket(bucket)?;
        let (_, dir) = self.upload(&bucket, key, id)?;
        self.end_upload(&bucket, key, id, &dir)?;
        self.prune(&bucket, key)
    }

    fn end_upload(&self, bucket: &Node, key: &Key, id: &str, dir: &Node) -> Result<()> {
        let mut names = Vec::new();
        dir.list(&mut |name, _| names.push(name.to_owned()))?;
        // A part that is being written ends by itself, and finds its upload gone.
        let is_staged = |name: &OsString| name.as_encoded_bytes().starts_with(STAGED.as_bytes());
        for name in names.iter().filter(|name| !is_staged(name) || !self.staged.lock().contains(*name)) {
            dir.unlink(name).or_else(none_there)?;
        }
        let index = bucket.child(OsStr::new(INDEX))?;
        index.unlink(OsStr::new(id)).or_else(none_there)?;
        index.sync_names()?;
        if let Some(parent) = self.parent(bucket, key)? {
            super::remove_if_empty(&parent, &dir_name(id))?;
        }
        Ok(())
    }
}
