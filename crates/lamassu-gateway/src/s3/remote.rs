//! Objects at a provider of S3. The properties of an object are sealed before its content. So properties known from the
//! request are passed on before a body arrives, and the gateway reads the content where it must compute a checksum.

use super::body::{Content, Digests, Sink};
use super::read::Piece;
use super::store::{Completing, Copying, PartCopying, PartOf, Putting, Rows, Store};
use super::sums::Summing;
use crate::objects::attrs::{Attrs, Shown};
use crate::objects::list::{Query, folder_of};
use crate::objects::uploads::{UploadPage, UploadQuery};
use crate::objects::{Guard, PIECE, Upload};
use crate::remote::list::Item;
use crate::remote::objects::{Open, time_of};
use crate::remote::upload::Upload as Storing;
use crate::remote::{Remote, RemoteError};
use crate::work;
use lamassu_vault::{Owner, Time};
use s3s::{S3Error, S3Result};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

impl Sink for Storing {
    fn add(&self, _: u64, data: &[u8]) -> S3Result<()> {
        Ok(self.write(data)?)
    }
}

impl Content for Open {
    fn piece(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        self.read(at, len).map_err(io::Error::other)
    }
}

/// A range of an object, piece by piece.
fn read_through(
    open: &Open,
    range: Range<u64>,
    mut each: impl FnMut(&[u8]) -> Result<(), RemoteError>,
) -> Result<(), RemoteError> {
    let mut at = range.start;
    while at < range.end {
        work::pause()?;
        let piece = open.read(at, PIECE.min(usize::try_from(range.end - at).unwrap_or(PIECE)))?;
        if piece.is_empty() {
            return Err(RemoteError::Damaged("an object ends too early".into()));
        }
        each(&piece)?;
        at += piece.len() as u64;
    }
    Ok(())
}

impl Store for Remote {
    type Staged = Storing;
    type StagedPart = Storing;
    type Content = Open;
    const IS_HERE: bool = false;

    fn buckets(&self, is_shown: &dyn Fn(&str) -> bool, most: usize) -> S3Result<Vec<(String, Time)>> {
        Ok(Remote::buckets(self, is_shown, most)?.into_iter().map(|(name, made)| (name, time_of(&made))).collect())
    }

    fn make_bucket(&self, bucket: &str, _: Owner) -> S3Result<()> {
        Ok(Remote::make_bucket(self, bucket)?)
    }

    fn remove_bucket(&self, bucket: &str) -> S3Result<()> {
        Ok(Remote::remove_bucket(self, bucket)?)
    }

    fn has_bucket(&self, bucket: &str) -> S3Result<()> {
        Ok(self.bucket(bucket)?)
    }

    fn list(&self, bucket: &str, query: &Query, may_list: &dyn Fn(&str) -> bool) -> S3Result<Rows> {
        let page = Remote::list(self, bucket, query)?;
        let mut rows = Rows { next: page.next, ..Rows::default() };
        for item in page.items {
            match item {
                Item::Group(group) => rows.groups.push(group),
                Item::Key(key, shown) if may_list(folder_of(&key)) => rows.keys.push((key, shown)),
                Item::Key(..) => {}
            }
        }
        Ok(rows)
    }

    fn shown(&self, bucket: &str, key: &str) -> S3Result<Shown> {
        Ok(self.find(bucket, key)?)
    }

    fn open(
        &self,
        bucket: &str,
        key: &str,
        likely: Option<u64>,
        choose: impl FnOnce(&Shown) -> S3Result<Piece>,
    ) -> S3Result<(Shown, Piece, Open)> {
        let (shown, reading) = self.read(bucket, key, likely)?;
        let piece = choose(&shown)?;
        // The object is opened even if nothing is read, to detect that it is not what was stored.
        let open = self.open_for(reading, &piece.range)?;
        Ok((shown, piece, open))
    }

    fn stage(self: &Arc<Self>, putting: &Putting, known: Attrs) -> S3Result<Storing> {
        Ok(Remote::stage(self, &putting.bucket, &putting.key, putting.length, &putting.guard, known)?)
    }

    fn place(self: &Arc<Self>, putting: &Putting, staged: Storing, attrs: Attrs) -> S3Result<Attrs> {
        let attrs = staged.place(&putting.guard, &attrs)?;
        self.changed(&putting.bucket, &putting.key, true);
        Ok(attrs)
    }

    fn copy(self: &Arc<Self>, copying: &Copying) -> S3Result<Shown> {
        let (from, key) = (copying.from.0.as_str(), copying.from.1.as_str());
        let place = (copying.bucket.as_str(), copying.key.as_str());
        Remote::copy::<S3Error>(self, (from, key), place, &copying.guard, false, |source, of| {
            let mut attrs = copying.attrs_of(source)?;
            if copying.lacks_sum(&attrs) {
                let mut digests = Digests::new(Summing::of(copying.asked.as_deref())?);
                let (shown, reading) = self.read(from, key, None)?;
                if !reading.has(of) {
                    return Ok(None);
                }
                let open = self.open_for(reading, &(0..shown.size))?;
                read_through(&open, 0..shown.size, |data| {
                    digests.update(data);
                    Ok(())
                })?;
                let received = digests.finish();
                let given = attrs.given;
                attrs = Attrs { given, etag: received.md5, checksums: received.sums, ..Attrs::default() };
            } else if attrs.etag.contains('-') && attrs.parts.is_empty() {
                // The tag is derived from the provider's.
                attrs.etag.clear();
            }
            Ok(Some(attrs))
        })
    }

    fn remove(&self, bucket: &str, key: &str, guard: &Guard) -> S3Result<()> {
        Ok(Remote::remove(self, bucket, key, guard)?)
    }

    fn remove_all(&self, bucket: &str, keys: &[(String, Guard)]) -> Vec<S3Result<()>> {
        Remote::remove_all(self, bucket, keys).into_iter().map(|done| Ok(done?)).collect()
    }

    fn set_tags(&self, bucket: &str, key: &str, tags: BTreeMap<String, String>) -> S3Result<()> {
        Ok(Remote::set_tags(self, bucket, key, tags)?)
    }

    fn begin_upload(&self, bucket: &str, upload: &Upload, _: Owner) -> S3Result<String> {
        Ok(Remote::begin_upload(self, bucket, upload)?)
    }

    fn stage_part(self: &Arc<Self>, part: &PartOf, length: u64, known: Attrs) -> S3Result<(Option<String>, Storing)> {
        let place = (part.bucket.as_str(), part.key.as_str(), part.upload.as_str());
        let (upload, storing) = Remote::stage_part(self, place, part.number, length, known)?;
        Ok((upload.algorithm, storing))
    }

    fn place_part(self: &Arc<Self>, part: &PartOf, staged: Storing, attrs: Attrs) -> S3Result<(Attrs, Time)> {
        let place = (part.bucket.as_str(), part.key.as_str(), part.upload.as_str());
        Ok((Remote::place_part(self, place, part.number, &staged, &attrs)?, Time::now()))
    }

    fn copy_part(self: &Arc<Self>, copying: &PartCopying) -> S3Result<(Attrs, Time)> {
        let (shown, reading) = self.read(&copying.from.0, &copying.from.1, None)?;
        let range = copying.range_of(&shown)?;
        let open = self.open_for(reading, &range)?;
        let length = range.end - range.start;
        let (algorithm, staged) = Store::stage_part(self, &copying.part, length, Attrs::default())?;
        let mut digests = Digests::new(Summing::of(algorithm.as_deref())?);
        read_through(&open, range, |data| {
            digests.update(data);
            staged.write(data)
        })?;
        let received = digests.finish();
        let attrs = Attrs { etag: received.md5, checksums: received.sums, ..Attrs::default() };
        Store::place_part(self, &copying.part, staged, attrs)
    }

    /// A checksum of the whole object is computed while its parts are sealed again. It is kept only if the client sent
    /// it before, because the properties are sealed before the content.
    fn complete(self: &Arc<Self>, completing: &Completing) -> S3Result<Attrs> {
        let Completing { bucket, key, upload: id, parts, guard, .. } = completing;
        let summed: RefCell<Option<(Upload, Summing)>> = RefCell::new(None);
        let attrs = |upload: &Upload, parts: &[crate::remote::multipart::Part]| {
            let composite = completing.check_parts(upload, parts)?;
            let said = completing.said_of(upload).filter(|_| upload.is_full);
            if let (Some(algorithm), Some(_)) = (&upload.algorithm, said) {
                *summed.borrow_mut() = Some((upload.clone(), Summing::of([algorithm.as_str()])?));
            }
            let is_composite = composite.is_some();
            let checksums = upload.algorithm.clone().zip(composite.or(said.cloned())).into_iter().collect();
            Ok::<_, S3Error>(Attrs { checksums, is_composite, ..Attrs::default() })
        };
        let mut each = |data: &[u8]| {
            if let Some((_, summing)) = &mut *summed.borrow_mut() {
                summing.update(data);
            }
        };
        let check = || {
            let Some((upload, summing)) = summed.borrow_mut().take() else { return Ok(()) };
            let sum = summing.finish().into_values().next().unwrap_or_default();
            completing.compare(&upload, &sum)
        };
        self.complete_upload((bucket, key, id), parts, guard, attrs, &mut each, check)
    }

    fn abort(&self, bucket: &str, key: &str, id: &str) -> S3Result<()> {
        Ok(self.abort_upload(bucket, key, id)?)
    }

    fn parts(&self, bucket: &str, key: &str, id: &str) -> S3Result<(Upload, Vec<(u32, Shown)>)> {
        let (upload, parts) = Remote::parts(self, bucket, key, id)?;
        Ok((upload, parts.into_iter().map(|part| (part.number, part.shown)).collect()))
    }

    fn uploads(&self, bucket: &str, query: &UploadQuery, may_list: &dyn Fn(&str) -> bool) -> S3Result<UploadPage> {
        Ok(Remote::uploads(self, bucket, query, may_list)?)
    }
}
