//! The interface of an object store, which vault files and objects at a provider implement. Checks that are the same
//! for both (rights, limits, request parameters) are made once, before these calls.

use super::body::{Content, Sink};
use super::given::{Conditions, Reads};
use super::read::Piece;
use super::sums::{self, Sums};
use crate::objects::attrs::{Attrs, Given, Shown};
use crate::objects::list::Query;
use crate::objects::uploads::{UploadPage, UploadQuery};
use crate::objects::{Completed, Guard, Upload};
use lamassu_vault::{Owner, Time};
use s3s::{S3Error, S3Result, s3_error};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An object store. Calls block. Keys are as the client sent them; an implementation refuses invalid ones. Errors are
/// those for clients, made by `fault`.
pub trait Store: Send + Sync + 'static {
    /// an object that is being stored
    type Staged: Sink;
    /// a part that is being stored
    type StagedPart: Sink;
    /// an object that is read
    type Content: Content;
    /// whether what takes time is this machine's work, and not waiting for another one
    const IS_HERE: bool;

    /// The first `most` buckets whose names `is_shown` accepts, by name, with the times when they were made.
    fn buckets(&self, is_shown: &dyn Fn(&str) -> bool, most: usize) -> S3Result<Vec<(String, Time)>>;
    /// Makes a bucket.
    fn make_bucket(&self, bucket: &str, owner: Owner) -> S3Result<()>;
    /// Removes an empty bucket.
    fn remove_bucket(&self, bucket: &str) -> S3Result<()>;
    /// Checks that a bucket exists.
    fn has_bucket(&self, bucket: &str) -> S3Result<()>;
    /// A page of keys. `may_list`: whether the user may list a folder.
    fn list(&self, bucket: &str, query: &Query, may_list: &dyn Fn(&str) -> bool) -> S3Result<Rows>;

    /// An object.
    fn shown(&self, bucket: &str, key: &str) -> S3Result<Shown>;
    /// An object to be read. `likely` is the offset of the wanted range, if the request gives one; `choose` selects the
    /// range, or refuses.
    fn open(
        &self,
        bucket: &str,
        key: &str,
        likely: Option<u64>,
        choose: impl FnOnce(&Shown) -> S3Result<Piece>,
    ) -> S3Result<(Shown, Piece, Self::Content)>;
    /// Begins to store an object. `known`: the attributes that the request gives before the content.
    fn stage(self: &Arc<Self>, putting: &Putting, known: Attrs) -> S3Result<Self::Staged>;
    /// Whether something has to be made for the object, which may take long, before it is placed.
    fn lacks_parents(_: &Putting, _: &Self::Staged) -> bool {
        false
    }
    /// Makes that. Called when the content is known to be good.
    fn make_parents(&self, _: &Putting, _: &Self::Staged) -> S3Result<()> {
        Ok(())
    }
    /// Completes the object. `attrs` are those of the received content; the result has those that were kept.
    fn place(self: &Arc<Self>, putting: &Putting, staged: Self::Staged, attrs: Attrs) -> S3Result<Attrs>;
    /// Copies an object.
    fn copy(self: &Arc<Self>, copying: &Copying) -> S3Result<Shown>;
    /// Removes an object. Without a condition, a missing object is no error.
    fn remove(&self, bucket: &str, key: &str, guard: &Guard) -> S3Result<()>;
    /// Removes several objects. The results are in the order of the keys.
    fn remove_all(&self, bucket: &str, keys: &[(String, Guard)]) -> Vec<S3Result<()>> {
        keys.iter().map(|(key, guard)| self.remove(bucket, key, guard)).collect()
    }
    /// Sets the tags of an object.
    fn set_tags(&self, bucket: &str, key: &str, tags: BTreeMap<String, String>) -> S3Result<()>;

    /// Begins an upload; returns its id.
    fn begin_upload(&self, bucket: &str, upload: &Upload, owner: Owner) -> S3Result<String>;
    /// Begins to store a part; also returns the upload's checksum algorithm.
    fn stage_part(
        self: &Arc<Self>,
        part: &PartOf,
        length: u64,
        known: Attrs,
    ) -> S3Result<(Option<String>, Self::StagedPart)>;
    /// Completes a part.
    fn place_part(self: &Arc<Self>, part: &PartOf, staged: Self::StagedPart, attrs: Attrs) -> S3Result<(Attrs, Time)>;
    /// Makes a part from a range of an object.
    fn copy_part(self: &Arc<Self>, copying: &PartCopying) -> S3Result<(Attrs, Time)>;
    /// Makes the object of an upload.
    fn complete(self: &Arc<Self>, completing: &Completing) -> S3Result<Attrs>;
    /// Aborts an upload.
    fn abort(&self, bucket: &str, key: &str, id: &str) -> S3Result<()>;
    /// An upload and its parts, by part number.
    fn parts(&self, bucket: &str, key: &str, id: &str) -> S3Result<(Upload, Vec<(u32, Shown)>)>;
    /// A page of uploads. `may_list`: whether the user may list a folder.
    fn uploads(&self, bucket: &str, query: &UploadQuery, may_list: &dyn Fn(&str) -> bool) -> S3Result<UploadPage>;
}

/// A page: objects, groups, and the start of the next page.
#[derive(Default)]
pub struct Rows {
    pub keys: Vec<(String, Shown)>,
    pub groups: Vec<String>,
    pub next: Option<(String, bool)>,
}

/// The parameters of a PutObject.
pub struct Putting {
    pub bucket: String,
    pub key: String,
    /// length of the content, bytes
    pub length: u64,
    pub owner: Owner,
    pub guard: Guard,
}

/// The parameters of a CopyObject.
pub struct Copying {
    /// bucket and key of the source
    pub from: (String, String),
    pub bucket: String,
    pub key: String,
    pub owner: Owner,
    pub guard: Guard,
    /// conditions on the source
    pub conditions: Conditions,
    /// properties in the request
    pub new: Given,
    /// whether they replace headers and metadata
    pub is_new: bool,
    /// whether they replace tags
    pub has_new_tags: bool,
    /// algorithm of a checksum that the copy must have
    pub asked: Option<String>,
}

impl Copying {
    /// The attributes of the copy, as far as they follow from the source's.
    pub fn attrs_of(&self, source: &Shown) -> S3Result<Attrs> {
        self.conditions.check(&source.attrs, source.mtime, Reads::Source)?;
        let mut attrs = source.attrs.clone();
        if self.is_new {
            (attrs.given.headers, attrs.given.metadata) = (self.new.headers.clone(), self.new.metadata.clone());
        }
        if self.has_new_tags {
            attrs.given.tags.clone_from(&self.new.tags);
        }
        Ok(attrs)
    }

    /// Whether the content has to be read for a checksum.
    pub fn lacks_sum(&self, attrs: &Attrs) -> bool {
        self.asked.as_ref().is_some_and(|algorithm| !attrs.checksums.contains_key(algorithm))
    }
}

/// The part's upload and number.
pub struct PartOf {
    pub bucket: String,
    pub key: String,
    pub upload: String,
    pub number: u32,
}

/// The parameters of an UploadPartCopy.
pub struct PartCopying {
    /// bucket and key of the source
    pub from: (String, String),
    pub part: PartOf,
    /// conditions on the source
    pub conditions: Conditions,
    /// range of the source, as it was sent
    pub range: Option<String>,
}

impl PartCopying {
    /// The range of a source.
    pub fn range_of(&self, source: &Shown) -> S3Result<std::ops::Range<u64>> {
        self.conditions.check(&source.attrs, source.mtime, Reads::Source)?;
        super::upload::copied_range(self.range.as_deref(), source.size)
    }
}

/// The parameters of a CompleteMultipartUpload.
pub struct Completing {
    pub bucket: String,
    pub key: String,
    pub upload: String,
    pub parts: Vec<Completed>,
    pub owner: Owner,
    pub guard: Guard,
    /// checksums of the object that the client sent
    pub said: Sums,
    /// size of the object, bytes, if the client sent it
    pub size: Option<u64>,
}

impl Completing {
    /// Checks what can be checked before the content is read. Returns the checksum of the parts' checksums, if the
    /// object is to have one.
    pub fn check_parts(&self, upload: &Upload, parts: &[impl AsRef<Shown>]) -> S3Result<Option<String>> {
        self.check_sums(upload)?;
        let bytes: u64 = parts.iter().map(|part| part.as_ref().size).sum();
        if self.size.is_some_and(|size| size != bytes) {
            return Err(s3_error!(InvalidRequest, "the object has another size"));
        }
        let Some(algorithm) = upload.algorithm.as_ref().filter(|_| !upload.is_full) else { return Ok(None) };
        let sums = parts.iter().map(|part| part.as_ref().attrs.checksums.get(algorithm));
        let sum = sums::composite(algorithm, sums)?;
        self.compare(upload, &sum)?;
        Ok(Some(sum))
    }

    /// The client's checksum of the object.
    pub fn said_of(&self, upload: &Upload) -> Option<&String> {
        upload.algorithm.as_ref().and_then(|algorithm| self.said.get(algorithm))
    }

    /// Refuses checksums of an object that is to have none: an upload has those that were asked for when it was begun.
    pub fn check_sums(&self, upload: &Upload) -> S3Result<()> {
        let is_known = |algorithm: &String| upload.algorithm.as_ref() == Some(algorithm);
        match self.said.keys().find(|algorithm| !is_known(algorithm)) {
            None => Ok(()),
            Some(algorithm) => Err(s3_error!(InvalidRequest, "the upload was not begun with the checksum {algorithm}")),
        }
    }

    /// Compares the client's checksum of the object with its own.
    pub fn compare(&self, upload: &Upload, sum: &str) -> S3Result<()> {
        match self.said_of(upload) {
            // Some clients omit the number of parts in a composite checksum.
            Some(said) if said != sum && sum.split('-').next() != Some(said) => Err(wrong_sum()),
            _ => Ok(()),
        }
    }
}

fn wrong_sum() -> S3Error {
    s3_error!(BadDigest, "the object has another checksum")
}
