//! Objects as files of a vault.

use super::body::{Content, Digests, Received, Sink};
use super::read::Piece;
use super::store::{Completing, Copying, PartCopying, PartOf, Putting, Rows, Store};
use super::sums::Summing;
use crate::objects::attrs::{Attrs, Shown};
use crate::objects::key::Key;
use crate::objects::list::{Item, Query};
use crate::objects::node::Open;
use crate::objects::uploads::{UploadPage, UploadQuery};
use crate::objects::{Directory, Guard, ObjectError, Objects, Reader, Refusal, Staged, Upload};
use crate::work;
use lamassu_vault::{Owner, Time, VaultError};
use s3s::S3Result;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// How often a copy onto its own place is begun again because its source was replaced meanwhile.
const COPY_TRIES: usize = 16;

/// An object that is being stored.
pub enum Staging {
    /// in a file
    File(Staged),
    /// one whose key ends with a slash, which has no content
    Directory(Directory),
}

impl Sink for Staging {
    fn add(&self, at: u64, data: &[u8]) -> S3Result<()> {
        match self {
            Staging::File(staged) => staged.add(at, data),
            Staging::Directory(_) => Err(ObjectError::DirectoryContent.into()),
        }
    }
}

impl Sink for Staged {
    fn add(&self, at: u64, data: &[u8]) -> S3Result<()> {
        Ok(self.open().write(at, data).map_err(ObjectError::from)?)
    }
}

/// A directory has no content.
impl Content for Option<Open> {
    fn piece(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        self.as_ref().map_or(Ok(Vec::new()), |open| open.read(at, len).map_err(io::Error::other))
    }
}

fn key_of(text: &str) -> S3Result<Key> {
    Ok(Key::parse(text).map_err(ObjectError::from)?)
}

/// The attributes of content that was read.
fn attrs_of(received: Received) -> Attrs {
    Attrs { etag: received.md5, checksums: received.sums, ..Attrs::default() }
}

impl Store for Objects {
    type Staged = Staging;
    type StagedPart = Staged;
    type Content = Option<Open>;
    const IS_HERE: bool = true;

    fn buckets(&self, is_shown: &dyn Fn(&str) -> bool, most: usize) -> S3Result<Vec<(String, Time)>> {
        Ok(Objects::buckets(self, is_shown, most)?.into_iter().map(|(name, node)| (name, node.attr().mtime)).collect())
    }

    fn make_bucket(&self, bucket: &str, owner: Owner) -> S3Result<()> {
        Ok(Objects::make_bucket(self, bucket, owner)?)
    }

    fn remove_bucket(&self, bucket: &str) -> S3Result<()> {
        Ok(Objects::remove_bucket(self, bucket)?)
    }

    fn has_bucket(&self, bucket: &str) -> S3Result<()> {
        Ok(self.bucket(bucket).map(drop)?)
    }

    fn list(&self, bucket: &str, query: &Query, may_list: &dyn Fn(&str) -> bool) -> S3Result<Rows> {
        let page = Objects::list(self, bucket, query, may_list)?;
        let mut rows = Rows { next: page.next, ..Rows::default() };
        for item in page.items {
            match item {
                Item::Group(group) => rows.groups.push(group),
                Item::Key(key, shown) => rows.keys.push((key, shown)),
            }
        }
        Ok(rows)
    }

    fn shown(&self, bucket: &str, key: &str) -> S3Result<Shown> {
        Ok(self.find(bucket, &key_of(key)?)?.shown())
    }

    fn open(
        &self,
        bucket: &str,
        key: &str,
        _: Option<u64>,
        choose: impl FnOnce(&Shown) -> S3Result<Piece>,
    ) -> S3Result<(Shown, Piece, Option<Open>)> {
        let (open, object) = self.open_object(bucket, &key_of(key)?)?;
        let shown = object.shown();
        let piece = choose(&shown)?;
        Ok((shown, piece, open))
    }

    fn stage(self: &Arc<Self>, putting: &Putting, _: Attrs) -> S3Result<Staging> {
        let key = key_of(&putting.key)?;
        if key.is_dir() {
            return if putting.length == 0 {
                Ok(Staging::Directory(self.begin_directory(&putting.bucket, &key, putting.owner)?))
            } else {
                Err(ObjectError::DirectoryContent.into())
            };
        }
        // Checked before the body is received: most requests that fail do so here.
        if putting.guard != Guard::None && putting.guard != Guard::Absent {
            let there = match self.find(&putting.bucket, &key) {
                Err(ObjectError::Refused(Refusal::NoKey)) => None,
                found => Some(found?.attrs),
            };
            putting.guard.check(there.as_ref()).map_err(ObjectError::from)?;
        }
        Ok(Staging::File(Objects::stage(self, &putting.bucket, &key, putting.owner)?))
    }

    fn lacks_parents(_: &Putting, staged: &Staging) -> bool {
        match staged {
            Staging::File(staged) => staged.lacks_parents(),
            Staging::Directory(directory) => directory.lacks_parents(),
        }
    }

    fn make_parents(&self, _: &Putting, staged: &Staging) -> S3Result<()> {
        match staged {
            Staging::File(staged) => staged.make_parents()?,
            Staging::Directory(directory) => directory.make_parents()?,
        }
        Ok(())
    }

    fn place(self: &Arc<Self>, putting: &Putting, staged: Staging, attrs: Attrs) -> S3Result<Attrs> {
        match staged {
            Staging::File(staged) => drop(staged.place(&putting.guard, &attrs)?),
            Staging::Directory(directory) => drop(directory.place(&putting.guard, &attrs)?),
        }
        Ok(attrs)
    }

    fn copy(self: &Arc<Self>, copying: &Copying) -> S3Result<Shown> {
        let (from, key) = (key_of(&copying.from.1)?, key_of(&copying.key)?);
        let mut tries = 0;
        loop {
            let source = self.source(&copying.from.0, &from)?;
            let mut attrs = copying.attrs_of(&source.shown)?;
            let mut summing = Some(Summing::of(copying.asked.as_deref())?);
            let mut complete = |is_same, read: &mut Reader<'_>, attrs: &mut Attrs| {
                let is_good = is_same && !copying.lacks_sum(attrs) && attrs.has_own_tag();
                // If a program has changed the content, the digests are computed now.
                let Some(summing) = summing.take().filter(|_| !is_good) else { return Ok(()) };
                let mut digests = Digests::new(summing);
                read(&mut |data| digests.update(data))?;
                *attrs = Attrs { given: std::mem::take(&mut attrs.given), ..attrs_of(digests.finish()) };
                Ok(())
            };
            let place = (copying.bucket.as_str(), &key);
            let copied = Objects::copy(self, &source, place, copying.owner, &copying.guard, &mut attrs, &mut complete);
            tries += 1;
            match copied {
                // The copy was to replace its source, which is another object by now.
                Err(ObjectError::Vault(VaultError::Stale)) if tries < COPY_TRIES && work::is_wanted() => {}
                copied => return Ok(Shown { attrs, size: source.shown.size, mtime: copied?.mtime }),
            }
        }
    }

    fn remove(&self, bucket: &str, key: &str, guard: &Guard) -> S3Result<()> {
        Ok(Objects::remove(self, bucket, &key_of(key)?, guard)?)
    }

    fn remove_all(&self, bucket: &str, keys: &[(String, Guard)]) -> Vec<S3Result<()>> {
        let remove = |(key, guard): &(String, Guard)| {
            work::pause()?;
            Store::remove(self, bucket, key, guard)
        };
        keys.iter().map(remove).collect()
    }

    fn set_tags(&self, bucket: &str, key: &str, tags: BTreeMap<String, String>) -> S3Result<()> {
        Ok(Objects::set_tags(self, bucket, &key_of(key)?, tags)?)
    }

    fn begin_upload(&self, bucket: &str, upload: &Upload, owner: Owner) -> S3Result<String> {
        Ok(Objects::begin_upload(self, bucket, upload, owner)?)
    }

    fn stage_part(self: &Arc<Self>, part: &PartOf, _: u64, _: Attrs) -> S3Result<(Option<String>, Staged)> {
        let (bucket, key, id) = (&part.bucket, key_of(&part.key)?, &part.upload);
        let upload = self.find_upload(bucket, &key, id)?;
        Ok((upload.algorithm, Objects::stage_part(self, bucket, &key, id)?))
    }

    fn place_part(self: &Arc<Self>, part: &PartOf, staged: Staged, attrs: Attrs) -> S3Result<(Attrs, Time)> {
        let place = (part.bucket.as_str(), &key_of(&part.key)?, part.upload.as_str());
        let attr = Objects::place_part(self, place, staged, part.number, &attrs)?;
        Ok((attrs, attr.mtime))
    }

    fn copy_part(self: &Arc<Self>, copying: &PartCopying) -> S3Result<(Attrs, Time)> {
        let part = &copying.part;
        let (bucket, key, id) = (part.bucket.as_str(), key_of(&part.key)?, part.upload.as_str());
        let source = self.source(&copying.from.0, &key_of(&copying.from.1)?)?;
        let range = copying.range_of(&source.shown)?;
        let (size, upload) = (range.end - range.start, self.find_upload(bucket, &key, id)?);
        let mut digests = Digests::new(Summing::of(upload.algorithm.as_deref())?);
        let staged = Objects::copy_part(self, &source, range, (bucket, &key, id), &mut |data| digests.update(data))?;
        let attrs = attrs_of(digests.finish());
        work::in_turn_to_sync(size, || Store::place_part(self, part, staged, attrs))
    }

    fn complete(self: &Arc<Self>, completing: &Completing) -> S3Result<Attrs> {
        let Completing { bucket, key, upload: id, parts, owner, guard, .. } = completing;
        let place = (bucket.as_str(), &key_of(key)?, id.as_str());
        self.complete_upload(place, parts, *owner, guard, |upload, parts, read| {
            let composite = completing.check_parts(upload, parts)?;
            let Some(algorithm) = upload.algorithm.as_deref().filter(|_| upload.is_full) else {
                return Ok(composite);
            };
            let mut summing = Summing::of([algorithm])?;
            read(&mut |data| summing.update(data))?;
            let sum = summing.finish().remove(algorithm).unwrap_or_default();
            completing.compare(upload, &sum)?;
            Ok(Some(sum))
        })
    }

    fn abort(&self, bucket: &str, key: &str, id: &str) -> S3Result<()> {
        Ok(self.abort_upload(bucket, &key_of(key)?, id)?)
    }

    fn parts(&self, bucket: &str, key: &str, id: &str) -> S3Result<(Upload, Vec<(u32, Shown)>)> {
        let (upload, parts) = Objects::parts(self, bucket, &key_of(key)?, id)?;
        Ok((upload, parts.into_iter().map(|part| (part.number, part.shown)).collect()))
    }

    fn uploads(&self, bucket: &str, query: &UploadQuery, may_list: &dyn Fn(&str) -> bool) -> S3Result<UploadPage> {
        Ok(Objects::uploads(self, bucket, query, may_list)?)
    }
}
