//! Multipart uploads of clients. A client's part can end in the middle of a page. So each part is stored as an object
//! of its own under `lamassu.uploads/`; completing the upload reads the parts and seals them again as one object. In
//! all, three times the content passes between gateway and provider. Sums of a large part that are known only at its
//! end are stored in a separate record.
//!
//! An upload exists while its record does. The next start removes parts without a record.

use super::error::{RemoteError, Result};
use super::objects::shown;
use super::properties::Properties;
use super::upload::Upload as Storing;
use super::{NAMES_MAX, Remote, at_once};
use crate::locks::Alone;
use crate::objects::attrs::{Attrs, Shown};
use crate::objects::parts::{self, tag_of};
use crate::objects::uploads::{Paging, UploadPage, UploadQuery};
use crate::objects::{Completed, Guard, PARTS_MAX, PIECE, Refusal, Upload};
use crate::work;
use lamassu_vault::detached::Identity;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The place of uploads. No sealed name has a dot.
const UPLOADS: &str = "lamassu.uploads";
/// An upload's record.
const RECORD: &str = "upload";
/// Number of records that a listing holds in memory at once.
const RECORDS_MAX: usize = 256;

/// A part that was uploaded.
pub struct Part {
    /// from 1
    pub number: u32,
    /// what it is
    pub shown: Shown,
    place: String,
    /// the provider's tag: a part that is uploaded again has another one
    stored: String,
}

impl AsRef<Shown> for Part {
    fn as_ref(&self) -> &Shown {
        &self.shown
    }
}

/// The place of a part's sums that were unknown when the part was begun. It includes the file identity, since another
/// request may upload the same part at the same time.
fn sums_place(place: &str, part: &Properties) -> String {
    format!("{place}.{}", part.file())
}

/// The part numbers among untrusted names of a provider: ascending, each once.
fn numbers_of(names: &[String]) -> Vec<u32> {
    let number = |name: &String| name.parse().ok().filter(|number| *name == format!("{number:05}"));
    let numbers: BTreeSet<u32> = names.iter().filter_map(number).collect();
    numbers.range(1..=PARTS_MAX).copied().collect()
}

/// The largest properties that the object of an upload can have, without the list of its parts, which is dropped if it
/// does not fit.
fn largest(upload: &Upload) -> Properties {
    // 64 characters: the base64 of 32 bytes, or an MD5, each with a number of parts.
    let sum = "s".repeat(64);
    let checksums = upload.algorithm.iter().map(|algorithm| (algorithm.clone(), sum.clone())).collect();
    let attrs =
        Attrs { etag: sum.clone(), given: upload.given.clone(), checksums, is_composite: true, ..Attrs::default() };
    Properties::new(&attrs, u64::MAX, Identity::Head([0; 40]))
}

/// Maps a missing upload to `None`.
fn unless_ended<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Err(RemoteError::Refused(Refusal::NoUpload)) => Ok(None),
        found => found.map(Some),
    }
}

impl Remote {
    fn uploads_of(&self, bucket: &str) -> String {
        format!("{UPLOADS}/{}", self.files.top().seal(bucket.as_bytes()))
    }

    fn upload_place(&self, bucket: &str, id: &str) -> Result<String> {
        let is_id = id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit());
        if is_id { Ok(format!("{}/{id}", self.uploads_of(bucket))) } else { Err(Refusal::NoUpload.into()) }
    }

    /// Begins an upload; returns its id.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`], [`RemoteError::MuchMetadata`]; those of the provider.
    pub fn begin_upload(&self, bucket: &str, upload: &Upload) -> Result<String> {
        self.writable()?;
        let place = self.place(bucket, &upload.key)?;
        self.seal(&place, &largest(upload))?;
        let _kept = self.keep_bucket(bucket)?;
        let id = crate::objects::random_name().map_err(|error| RemoteError::Answer(error.to_string()))?;
        // Maps of text can always be encoded as JSON.
        let content = serde_json::to_vec(upload).unwrap_or_default();
        self.put_record(&format!("{}/{RECORD}", self.upload_place(bucket, &id)?), &content)?;
        Ok(id)
    }

    /// The record of an upload to a key.
    ///
    /// # Errors
    /// [`Refusal::NoUpload`]; those of the provider.
    pub fn find_upload(&self, bucket: &str, key: &str, id: &str) -> Result<Upload> {
        let record = match self.record(&format!("{}/{RECORD}", self.upload_place(bucket, id)?)) {
            Err(RemoteError::Missing(_)) => return Err(Refusal::NoUpload.into()),
            record => record?,
        };
        let upload: Upload =
            serde_json::from_slice(&record).map_err(|error| RemoteError::Damaged(error.to_string()))?;
        if upload.key == key { Ok(upload) } else { Err(Refusal::NoUpload.into()) }
    }

    /// Begins to store a part.
    ///
    /// # Errors
    /// As [`Remote::begin`]; [`Refusal::NoUpload`].
    pub fn stage_part(
        self: &Arc<Self>,
        (bucket, key, id): (&str, &str, &str),
        number: u32,
        size: u64,
        attrs: Attrs,
    ) -> Result<(Upload, Storing)> {
        let upload = self.find_upload(bucket, key, id)?;
        let place = format!("{}/{number:05}", self.upload_place(bucket, id)?);
        Ok((upload, self.begin(place, None, size, attrs)?))
    }

    /// The parts of an upload, in their order.
    ///
    /// # Errors
    /// [`Refusal::NoUpload`]; those of the provider.
    pub fn parts(&self, bucket: &str, key: &str, id: &str) -> Result<(Upload, Vec<Part>)> {
        let upload = self.find_upload(bucket, key, id)?;
        let dir = self.upload_place(bucket, id)?;
        let numbers = numbers_of(&self.below(&dir)?);
        let part = |number: &u32| {
            work::wanted(RemoteError::GivenUp)?;
            self.part(&dir, *number, upload.algorithm.as_deref())
        };
        let parts = at_once(&numbers, part)?.into_iter().flatten().collect();
        Ok((upload, parts))
    }

    /// A part; `None`: the upload is ending.
    fn part(&self, dir: &str, number: u32, algorithm: Option<&str>) -> Result<Option<Part>> {
        let place = format!("{dir}/{number:05}");
        let (found, properties) = match self.found(&place) {
            Err(RemoteError::Missing(_)) => return Ok(None),
            found => found?,
        };
        let mut shown = shown(&found, &properties);
        if !properties.are_whole(algorithm)
            && let Some(known) = self.sums(&place, &properties)?
        {
            shown.attrs = known.attrs(&found.etag);
        }
        Ok(Some(Part { number, shown, place, stored: found.etag }))
    }

    /// The sums of a part that became known at its end.
    fn sums(&self, place: &str, part: &Properties) -> Result<Option<Properties>> {
        let record = match self.record(&sums_place(place, part)) {
            Err(RemoteError::Missing(_)) => return Ok(None),
            record => record?,
        };
        let known: Properties =
            serde_json::from_slice(&record).map_err(|error| RemoteError::Damaged(error.to_string()))?;
        Ok(Some(known).filter(|known| known.are_of_file(part)))
    }

    /// The names of objects below a place, relative to it. Stops when `go_on` returns false.
    ///
    /// # Errors
    /// Those of the provider; [`RemoteError::GivenUp`]; [`RemoteError::Answer`]: there are too many.
    fn below_while(&self, place: &str, go_on: &dyn Fn() -> bool) -> Result<Vec<String>> {
        let prefix = self.name(place) + "/";
        let (mut names, mut bytes) = (Vec::new(), 0);
        self.client.pages(&prefix, false, |page| {
            for name in page.objects.iter().filter_map(|object| object.name.strip_prefix(&prefix)) {
                bytes += size_of::<String>() + name.len();
                names.push(String::from(name));
            }
            match () {
                () if !go_on() => Err(RemoteError::GivenUp),
                () if bytes > NAMES_MAX => Err(RemoteError::Answer(format!("too many names below {prefix}"))),
                () => Ok(()),
            }
        })?;
        Ok(names)
    }

    fn below(&self, place: &str) -> Result<Vec<String>> {
        self.below_while(place, &|| true)
    }

    /// A page of the uploads of a bucket: those to keys in folders that `may_list` allows.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`]; those of the provider.
    pub fn uploads(&self, bucket: &str, query: &UploadQuery, may_list: &dyn Fn(&str) -> bool) -> Result<UploadPage> {
        self.bucket(bucket)?;
        let dir = self.uploads_of(bucket);
        let names = self.below(&dir)?;
        let ids: Vec<&str> = names.iter().filter_map(|name| name.strip_suffix("/upload")).collect();
        let read = |id: &&str| {
            work::wanted(RemoteError::GivenUp)?;
            match self.record(&format!("{dir}/{id}/{RECORD}")) {
                Ok(record) => Ok(serde_json::from_slice::<Upload>(&record).ok()),
                Err(RemoteError::Missing(_)) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let marker = query.after_id.as_deref().filter(|id| ids.contains(id)).map(|id| read(&id)).transpose()?.flatten();
        let mut paging = Paging::new(query, may_list, marker.as_ref());
        for some in ids.chunks(RECORDS_MAX) {
            let found = at_once(some, read)?;
            some.iter().zip(found).for_each(|(id, found)| {
                if let Some(upload) = found {
                    paging.offer(id, &upload);
                }
            });
        }
        Ok(paging.page())
    }

    /// Aborts an upload.
    ///
    /// # Errors
    /// [`Refusal::NoUpload`]; those of the provider.
    pub fn abort_upload(&self, bucket: &str, key: &str, id: &str) -> Result<()> {
        self.writable()?;
        let place = self.upload_place(bucket, id)?;
        {
            let _alone = self.alone_with_upload(id);
            self.find_upload(bucket, key, id)?;
            self.remove_record(&place)?;
        }
        self.remove_parts(&place)
    }

    fn alone_with_upload(&self, id: &str) -> Alone<'_, String> {
        self.uploads.alone(id.into())
    }

    /// Removes the record, which ends the upload.
    fn remove_record(&self, place: &str) -> Result<()> {
        self.client.delete(&self.name(&format!("{place}/{RECORD}")))
    }

    /// Removes what is left of an upload that has ended.
    fn remove_parts(&self, place: &str) -> Result<()> {
        let names = self.below(place)?;
        at_once(&names, |name| self.client.delete(&self.name(&format!("{place}/{name}")))).map(drop)
    }

    /// Aborts the uploads of a bucket, as long as the client waits and its credential is in force.
    pub(super) fn end_uploads_of(&self, bucket: &str) -> Result<()> {
        let dir = self.uploads_of(bucket);
        let ids: BTreeSet<String> =
            self.below(&dir)?.iter().filter_map(|name| Some(name.split_once('/')?.0.into())).collect();
        ids.iter().map(|id| format!("{dir}/{id}")).try_for_each(|place| {
            work::wanted(RemoteError::GivenUp)?;
            work::pause()?;
            self.remove_record(&place)?;
            self.remove_parts(&place)
        })
    }

    /// Removes parts of ended uploads; returns their number.
    ///
    /// # Errors
    /// Those of the provider.
    pub fn sweep(&self, stopping: &AtomicBool) -> Result<u64> {
        let mut uploads: BTreeMap<String, (bool, Vec<String>)> = BTreeMap::new();
        for name in self.below_while(UPLOADS, &|| !stopping.load(Ordering::Relaxed))? {
            let Some((dir, last)) = name.rsplit_once('/') else { continue };
            let (is_there, parts) = uploads.entry(dir.into()).or_default();
            match last {
                RECORD => *is_there = true,
                _ => parts.push(format!("{UPLOADS}/{name}")),
            }
        }
        let ended: Vec<String> =
            uploads.into_values().filter(|(is_there, _)| !is_there).flat_map(|(_, parts)| parts).collect();
        at_once(&ended, |place| self.client.delete(&self.name(place)))?;
        Ok(ended.len() as u64)
    }

    /// Makes the object from the parts that the client names. `attrs` computes its attributes, except the tag, from the
    /// parts. `each` gets its content. `check` is called after all of it was read: an error ends the operation without
    /// a change.
    ///
    /// # Errors
    /// [`Refusal::NoUpload`], [`Refusal::Precondition`]; as [`parts::chosen`]; those of the provider, of `attrs` and of
    /// `check`.
    pub fn complete_upload<E: From<RemoteError>>(
        self: &Arc<Self>,
        (bucket, key, id): (&str, &str, &str),
        completed: &[Completed],
        guard: &Guard,
        attrs: impl FnOnce(&Upload, &[Part]) -> Result<Attrs, E>,
        each: &mut dyn FnMut(&[u8]),
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<Attrs, E> {
        self.writable()?;
        // The answer to an earlier request may have been lost, or that request is still under way.
        let before = || self.completed_before(bucket, key, completed);
        let Some((upload, there)) = unless_ended(self.parts(bucket, key, id))? else { return Ok(before()?) };
        let mut there: BTreeMap<u32, Part> = there.into_iter().map(|part| (part.number, part)).collect();
        let place = (bucket, key, id);
        let chosen = parts::chosen(completed, upload.algorithm.as_deref(), |number| Ok(there.remove(&number)));
        let Some(parts): Option<Vec<Part>> = unless_ended(self.of_upload(place, chosen))? else {
            return Ok(before()?);
        };
        let mut attrs = attrs(&upload, &parts)?;
        attrs.given = upload.given.clone();
        attrs.etag = tag_of(parts.iter().map(|part| part.shown.attrs.etag.as_str())).unwrap_or_default();
        parts.iter().for_each(|part| attrs.add_part(part.shown.size));
        let size = parts.iter().map(|part| part.shown.size).sum();
        let storing = match self.stage(bucket, key, size, guard, attrs.clone()) {
            Err(RemoteError::MuchMetadata) => {
                attrs.parts.clear();
                self.stage(bucket, key, size, guard, attrs.clone())?
            }
            storing => storing?,
        };
        for part in &parts {
            if unless_ended(self.of_upload(place, self.pour(part, &storing, each)))?.is_none() {
                return Ok(before()?);
            }
        }
        check()?;
        match unless_ended(self.end_by(place, || storing.place(guard, &attrs)))? {
            Some(attrs) => Ok(attrs),
            None => Ok(before()?),
        }
    }

    /// A part may be missing because another request has ended the upload.
    fn of_upload<T>(&self, (bucket, key, id): (&str, &str, &str), done: Result<T>) -> Result<T> {
        match done {
            Err(error @ RemoteError::Refused(Refusal::NoPart(_))) => self.find_upload(bucket, key, id).and(Err(error)),
            done => done,
        }
    }

    /// Ends an upload by making its object. Only one request of this gateway does so: later requests to complete or
    /// abort it find no upload.
    fn end_by(&self, (bucket, key, id): (&str, &str, &str), make: impl FnOnce() -> Result<Attrs>) -> Result<Attrs> {
        let place = self.upload_place(bucket, id)?;
        let (attrs, ended) = {
            let _alone = self.alone_with_upload(id);
            self.find_upload(bucket, key, id)?;
            let attrs = make()?;
            self.changed(bucket, key, true);
            (attrs, self.remove_record(&place))
        };
        if let Err(error) = ended.and_then(|()| self.remove_parts(&place)) {
            tracing::warn!(%error, "an upload is completed, and what is left of it could not be removed");
        }
        Ok(attrs)
    }

    /// The object of a completed upload, for a client that lost the answer and asks again.
    ///
    /// # Errors
    /// [`Refusal::NoUpload`]: the object is another one; those of the provider.
    fn completed_before(&self, bucket: &str, key: &str, completed: &[Completed]) -> Result<Attrs> {
        let tag = tag_of(completed.iter().map(|part| part.etag.as_str())).ok_or(Refusal::NoUpload)?;
        match self.find(bucket, key) {
            Ok(shown) if shown.attrs.etag == tag => Ok(shown.attrs),
            Ok(_) | Err(RemoteError::Refused(Refusal::NoKey)) => Err(Refusal::NoUpload.into()),
            Err(error) => Err(error),
        }
    }

    /// Completes a part; a listing shows these attributes. If the upload has ended meanwhile, the part is removed
    /// again.
    ///
    /// # Errors
    /// [`Refusal::NoUpload`]; as [`Storing::place`].
    pub fn place_part(
        &self,
        (bucket, key, id): (&str, &str, &str),
        number: u32,
        part: &Storing,
        attrs: &Attrs,
    ) -> Result<Attrs> {
        let place = format!("{}/{number:05}", self.upload_place(bucket, id)?);
        let (properties, etag) = part.placed(&Guard::None, attrs)?;
        let beside = (properties.attrs(&etag) != *attrs).then(|| sums_place(&place, &properties));
        if let Some(beside) = &beside {
            // Maps of text can always be encoded as JSON.
            let known = serde_json::to_vec(&properties.with(attrs)).unwrap_or_default();
            self.put_record(beside, &known)?;
        }
        match self.find_upload(bucket, key, id) {
            // Any other error says nothing about the upload, which an earlier answer to the same request may have
            // confirmed.
            Err(error @ RemoteError::Refused(Refusal::NoUpload)) => {
                for place in [Some(&place), beside.as_ref()].into_iter().flatten() {
                    self.client.delete(&self.name(place))?;
                }
                Err(error)
            }
            found => found.map(|_| attrs.clone()),
        }
    }

    /// Reads a part and appends it to the object being stored.
    fn pour(&self, part: &Part, storing: &Storing, each: &mut dyn FnMut(&[u8])) -> Result<()> {
        let reading = match self.reading(&part.place) {
            Ok(reading) if reading.is_of(&part.stored) => reading,
            Ok(_) | Err(RemoteError::Missing(_)) => return Err(Refusal::NoPart(part.number).into()),
            Err(error) => return Err(error),
        };
        let open = self.open_for(reading, &(0..part.shown.size))?;
        let mut at = 0;
        while at < part.shown.size {
            work::pause()?;
            let piece = open.read(at, PIECE)?;
            if piece.is_empty() {
                return Err(RemoteError::Damaged(format!("{}: it ends too early", part.place)));
            }
            each(&piece);
            storing.write(&piece)?;
            at += piece.len() as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_the_numbers_that_parts_may_have() {
        let names = ["00002", "upload", "00001", "1", "00002", "00000", "10000", "10001", "00003.hAAAA", "-0001"];
        let mut names: Vec<String> = names.into_iter().map(String::from).collect();
        names.extend((0..1000).map(|_| "00001".into()));
        assert_eq!(numbers_of(&names), [1, 2, 10_000]);
    }
}
