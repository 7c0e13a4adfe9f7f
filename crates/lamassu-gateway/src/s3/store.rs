//! Where objects lie: the calls that a vault's files and objects at a provider answer each in its way. What is the same
//! for both is asked in front of them, once: rights, limits, and all that a request says.

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

/// See the module's head. Calls block. Keys are as they were sent: what none can be is refused. Errors are those for
/// clients, in the one form that `fault` gives them.
pub trait Store: Send + Sync + 'static {
    /// an object that is being stored
    type Staged: Sink;
    /// a part that is being stored
    type StagedPart: Sink;
    /// an object that is read
    type Content: Content;
    /// whether what takes time is this machine's work, and not waiting for another one
    const IS_HERE: bool;

    /// Buckets, with the times when they were made.
    fn buckets(&self) -> S3Result<Vec<(String, Time)>>;
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
    /// An object to be read. `likely`: where, if the request says it; `choose` says what, or refuses it.
    fn open(
        &self,
        bucket: &str,
        key: &str,
        likely: Option<u64>,
        choose: impl FnOnce(&Shown) -> S3Result<Piece>,
    ) -> S3Result<(Shown, Piece, Self::Content)>;
    /// Begins to store an object. `known`: what is said of it before it comes.
    fn stage(self: &Arc<Self>, putting: &Putting, known: Attrs) -> S3Result<Self::Staged>;
    /// Ends it. The attributes are those of what has come; the answer has those that were kept.
    fn place(self: &Arc<Self>, putting: &Putting, staged: Self::Staged, attrs: Attrs) -> S3Result<Attrs>;
    /// Copies an object.
    fn copy(self: &Arc<Self>, copying: &Copying) -> S3Result<Shown>;
    /// Removes an object; one that is not there is no error without a condition.
    fn remove(&self, bucket: &str, key: &str, guard: &Guard) -> S3Result<()>;
    /// Removes several. The results are in the order of the keys.
    fn remove_all(&self, bucket: &str, keys: &[(String, Guard)]) -> Vec<S3Result<()>> {
        keys.iter().map(|(key, guard)| self.remove(bucket, key, guard)).collect()
    }
    /// Sets the tags of an object.
    fn set_tags(&self, bucket: &str, key: &str, tags: BTreeMap<String, String>) -> S3Result<()>;

    /// Begins an upload; its id.
    fn begin_upload(&self, bucket: &str, upload: &Upload, owner: Owner) -> S3Result<String>;
    /// Begins to store a part; the algorithm of the upload's checksums.
    fn stage_part(
        self: &Arc<Self>,
        part: &PartOf,
        length: u64,
        known: Attrs,
    ) -> S3Result<(Option<String>, Self::StagedPart)>;
    /// Ends a part.
    fn place_part(self: &Arc<Self>, part: &PartOf, staged: Self::StagedPart, attrs: Attrs) -> S3Result<(Attrs, Time)>;
    /// Makes a part of a range of an object.
    fn copy_part(self: &Arc<Self>, copying: &PartCopying) -> S3Result<(Attrs, Time)>;
    /// Makes the object of an upload.
    fn complete(self: &Arc<Self>, completing: &Completing) -> S3Result<Attrs>;
    /// Gives an upload up.
    fn abort(&self, bucket: &str, key: &str, id: &str) -> S3Result<()>;
    /// An upload and its parts, by their numbers.
    fn parts(&self, bucket: &str, key: &str, id: &str) -> S3Result<(Upload, Vec<(u32, Shown)>)>;
    /// A page of uploads. `may_list`: whether the user may list a folder.
    fn uploads(&self, bucket: &str, query: &UploadQuery, may_list: &dyn Fn(&str) -> bool) -> S3Result<UploadPage>;
}

/// A page: objects, and groups; where the next one begins.
#[derive(Default)]
pub struct Rows {
    pub keys: Vec<(String, Shown)>,
    pub groups: Vec<String>,
    pub next: Option<(String, bool)>,
}

/// An object that is put.
pub struct Putting {
    pub bucket: String,
    pub key: String,
    /// bytes
    pub length: u64,
    pub owner: Owner,
    pub guard: Guard,
}

/// A copy.
pub struct Copying {
    /// bucket and key of the source
    pub from: (String, String),
    pub bucket: String,
    pub key: String,
    pub owner: Owner,
    pub guard: Guard,
    /// on the source
    pub conditions: Conditions,
    /// what the request gives
    pub new: Given,
    /// whether that replaces headers and metadata
    pub is_new: bool,
    /// whether it replaces tags
    pub has_new_tags: bool,
    /// the algorithm of a checksum that the copy has to have
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

/// Where a part belongs.
pub struct PartOf {
    pub bucket: String,
    pub key: String,
    pub upload: String,
    pub number: u32,
}

/// A copy of a range, which becomes a part.
pub struct PartCopying {
    /// bucket and key of the source
    pub from: (String, String),
    pub part: PartOf,
    /// on the source
    pub conditions: Conditions,
    /// as it was sent
    pub range: Option<String>,
}

impl PartCopying {
    /// The range of a source.
    pub fn range_of(&self, source: &Shown) -> S3Result<std::ops::Range<u64>> {
        self.conditions.check(&source.attrs, source.mtime, Reads::Source)?;
        super::upload::copied_range(self.range.as_deref(), source.size)
    }
}

/// The end of an upload.
pub struct Completing {
    pub bucket: String,
    pub key: String,
    pub upload: String,
    pub parts: Vec<Completed>,
    pub owner: Owner,
    pub guard: Guard,
    /// the client's checksums of the object
    pub said: Sums,
    /// bytes, if the client says them
    pub size: Option<u64>,
}

impl Completing {
    /// Checks what can be checked before the content is read. Returns the checksum of the parts' checksums, if the
    /// object is to have one.
    pub fn check_parts(&self, upload: &Upload, parts: &[impl AsRef<Shown>]) -> S3Result<Option<String>> {
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
