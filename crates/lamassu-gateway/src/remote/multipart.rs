//! Multipart uploads of clients. A client's part can end in the middle of a page. So each part is stored as an object
//! of its own under `lamassu.uploads/`; completing the upload reads the parts and seals them again as one object. In
//! all, three times the content passes between gateway and provider. Sums of a large part that are known only at its
//! end are stored in a separate record.
//!
//! An upload exists while its record does. The next start removes parts without a record.
//!
//! A provider may list any number of names. So pages of them are worked off as they come, and none are kept.

use super::error::{RemoteError, Result};
use super::failures::Failures;
use super::objects::{RECORD_MAX, shown};
use super::properties::Properties;
use super::upload::Upload as Storing;
use super::{Remote, at_once};
use crate::locks::Alone;
use crate::objects::attrs::{Attrs, Shown};
use crate::objects::parts::{self, tag_of};
use crate::objects::uploads::{Paging, UploadPage, UploadQuery};
use crate::objects::{Completed, Guard, PIECE, Refusal, Swept, Upload};
use crate::work;
use lamassu_vault::detached::Identity;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The place of uploads. No sealed name has a dot.
const UPLOADS: &str = "lamassu.uploads";
/// An upload's record.
const RECORD: &str = "upload";
/// Number of records, or of errors in their place, that are in memory at once.
pub(super) const RECORDS_MAX: usize = 256;
/// The end of names that have others below them.
const SLASH: char = '/';

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

/// Tells whether a sweep goes on; otherwise its error ends it.
type GoOn<'a> = dyn Fn() -> Result<()> + Sync + 'a;

/// What a sweep has done.
#[derive(Default)]
struct Sweep {
    removed: u64,
    /// buckets whose uploads cannot be listed
    unsearched: AtPlaces,
    /// uploads whose records cannot be read
    unread: AtPlaces,
}

/// Failures, each with its place.
type AtPlaces = Failures<(String, RemoteError)>;

fn tell(failures: &AtPlaces, what: &str) {
    failures.tell(|count, (place, error)| tracing::warn!(%error, place, count, "{what}; this is the first error"));
}

/// The place of a part's sums that were unknown when the part was begun. It includes the file identity, since another
/// request may upload the same part at the same time.
fn sums_place(place: &str, part: &Properties) -> String {
    format!("{place}.{}", part.file())
}

/// Whether an upload can have this id, which a client or a provider may have made up.
fn is_id(id: &str) -> bool {
    id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit())
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
        if is_id(id) { Ok(format!("{}/{id}", self.uploads_of(bucket))) } else { Err(Refusal::NoUpload.into()) }
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
        let place = format!("{}/{}", self.upload_place(bucket, id)?, parts::name_of(number));
        Ok((upload, self.begin(place, None, size, attrs)?))
    }

    /// The parts of an upload, in their order.
    ///
    /// # Errors
    /// [`Refusal::NoUpload`]; those of the provider.
    pub fn parts(&self, bucket: &str, key: &str, id: &str) -> Result<(Upload, Vec<Part>)> {
        let upload = self.find_upload(bucket, key, id)?;
        let dir = self.upload_place(bucket, id)?;
        let mut numbers = BTreeSet::new();
        self.below(&dir, &mut |names| {
            numbers.extend(names.iter().filter_map(|name| parts::number_of(name)));
            Ok(())
        })?;
        let numbers: Vec<u32> = numbers.into_iter().collect();
        let part = |number: &u32| {
            work::wanted(RemoteError::GivenUp)?;
            self.part(&dir, *number, upload.algorithm.as_deref())
        };
        let parts = at_once(&numbers, part)?.into_iter().flatten().collect();
        Ok((upload, parts))
    }

    /// A part; `None`: the upload is ending.
    fn part(&self, dir: &str, number: u32, algorithm: Option<&str>) -> Result<Option<Part>> {
        let place = format!("{dir}/{}", parts::name_of(number));
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

    /// Calls `each` with the names of objects below a place, relative to it, page by page.
    ///
    /// # Errors
    /// Those of the provider, and of `each`; [`RemoteError::GivenUp`].
    fn below(&self, place: &str, each: &mut dyn FnMut(Vec<String>) -> Result<()>) -> Result<()> {
        let prefix = self.name(place) + "/";
        self.client.pages(&prefix, false, |page| {
            let names = page.objects.iter().filter_map(|object| object.name.strip_prefix(&prefix));
            each(names.map(String::from).collect())
        })
    }

    /// The same with the names directly below a place that have objects below them: the provider lists none of those.
    fn dirs_below(&self, place: &str, each: &mut dyn FnMut(Vec<String>) -> Result<()>) -> Result<()> {
        let prefix = self.name(place) + "/";
        self.client.pages(&prefix, true, |page| {
            let names = page.prefixes.iter().filter_map(|name| name.strip_prefix(&prefix)?.strip_suffix(SLASH));
            each(names.filter(|name| !name.is_empty() && !name.contains(SLASH)).map(String::from).collect())
        })
    }

    /// The ids of the uploads in a directory of uploads. A provider may list one again and again.
    fn ids_in(&self, dir: &str, each: &mut dyn FnMut(&[String]) -> Result<()>) -> Result<()> {
        self.dirs_below(dir, &mut |mut names| {
            names.retain(|name| is_id(name));
            each(&names)
        })
    }

    /// A page of the uploads of a bucket: those to keys in folders that `may_list` allows.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`]; those of the provider.
    pub fn uploads(&self, bucket: &str, query: &UploadQuery, may_list: &dyn Fn(&str) -> bool) -> Result<UploadPage> {
        self.bucket(bucket)?;
        let dir = self.uploads_of(bucket);
        let read = |id: &String| {
            work::wanted(RemoteError::GivenUp)?;
            match self.record(&format!("{dir}/{id}/{RECORD}")) {
                Ok(record) => Ok(serde_json::from_slice::<Upload>(&record).ok()),
                Err(RemoteError::Missing(_)) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let marker = query.after_id.as_ref().filter(|id| is_id(id)).map(read).transpose()?.flatten();
        let mut paging = Paging::new(query, may_list, marker.as_ref());
        self.ids_in(&dir, &mut |ids| {
            work::pause()?;
            for some in ids.chunks(RECORDS_MAX) {
                let found = at_once(some, read)?;
                for (id, found) in some.iter().zip(found) {
                    found.into_iter().for_each(|upload| paging.offer(id, &upload));
                }
            }
            Ok(())
        })?;
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
        self.remove_parts_while(place, &|| Ok(())).map(drop)
    }

    /// The same, until `go_on` fails; returns the number of objects.
    fn remove_parts_while(&self, place: &str, go_on: &GoOn<'_>) -> Result<u64> {
        let remove = |name: &String| {
            go_on()?;
            self.client.delete(&self.name(&format!("{place}/{name}")))
        };
        let mut removed = 0;
        self.below(place, &mut |names| {
            go_on()?;
            removed += at_once(&names, remove)?.len() as u64;
            Ok(())
        })?;
        Ok(removed)
    }

    /// Aborts the uploads of a bucket, as long as the client waits and its credential is in force.
    pub(super) fn end_uploads_of(&self, bucket: &str) -> Result<()> {
        let dir = self.uploads_of(bucket);
        self.ids_in(&dir, &mut |ids| {
            ids.iter().map(|id| format!("{dir}/{id}")).try_for_each(|place| {
                work::wanted(RemoteError::GivenUp)?;
                work::pause()?;
                self.remove_record(&place)?;
                self.remove_parts(&place)
            })
        })
    }

    /// Removes parts of ended uploads. A bucket whose uploads cannot be searched is skipped, and so is an upload whose
    /// record cannot be read: the first of each is logged.
    ///
    /// # Errors
    /// Those of the provider that prevent the whole sweep.
    pub fn sweep(&self, stopping: &AtomicBool) -> Result<Swept> {
        let go_on = || if stopping.load(Ordering::Relaxed) { Err(RemoteError::GivenUp) } else { Ok(()) };
        let mut sweep = Sweep::default();
        let searched = self.dirs_below(UPLOADS, &mut |buckets| {
            go_on()?;
            // A provider may list any other names. Those of buckets it cannot make up.
            for bucket in buckets.iter().filter(|bucket| self.files.top().open(bucket).is_some()) {
                let dir = format!("{UPLOADS}/{bucket}");
                match self.sweep_uploads_in(&dir, &go_on, &mut sweep) {
                    Err(error) if !stopping.load(Ordering::Relaxed) => sweep.unsearched.add((dir, error)),
                    searched => searched?,
                }
            }
            Ok(())
        });
        let Sweep { removed, unsearched, unread } = sweep;
        tell(&unsearched, "uploads of buckets were not searched for what a crash has left");
        tell(&unread, "uploads are kept whose records cannot be read");
        searched.map(|()| Swept { removed, left_out: unsearched.count() + unread.count() })
    }

    fn sweep_uploads_in(&self, dir: &str, go_on: &GoOn<'_>, sweep: &mut Sweep) -> Result<()> {
        let has_ended = |id: &String| {
            go_on()?;
            match self.has_ended(&format!("{dir}/{id}")) {
                Err(error @ (RemoteError::Damaged(_) | RemoteError::Answer(_))) => Ok(Err(error)),
                ended => ended.map(Ok),
            }
        };
        self.ids_in(dir, &mut |ids| {
            go_on()?;
            for some in ids.chunks(RECORDS_MAX) {
                // Ids do not come back: an upload without its record has ended.
                for (id, has_ended) in some.iter().zip(at_once(some, has_ended)?) {
                    let place = format!("{dir}/{id}");
                    match has_ended {
                        Ok(true) => sweep.removed += self.remove_parts_while(&place, go_on)?,
                        Ok(false) => {}
                        Err(error) => sweep.unread.add((place, error)),
                    }
                }
            }
            Ok(())
        })
    }

    /// Whether an upload's record is missing. An answer to HEAD does not tell that from a proxy's error.
    fn has_ended(&self, place: &str) -> Result<bool> {
        // As much as of every record: a provider may answer with the whole of a small object.
        match self.client.get(&self.name(&format!("{place}/{RECORD}")), 0..RECORD_MAX, None) {
            Ok(_) => Ok(false),
            Err(RemoteError::Missing(_)) => Ok(true),
            Err(error) => Err(error),
        }
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
        let place = format!("{}/{}", self.upload_place(bucket, id)?, parts::name_of(number));
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
