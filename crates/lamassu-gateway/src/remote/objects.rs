//! Calls on one object.

use super::client::{Found, Unless};
use super::error::{RemoteError, Result};
use super::properties::Properties;
use super::source::{Location, Object};
use super::upload::Upload;
use super::{Remote, at_once};
use crate::objects::attrs::{Attrs, Shown};
use crate::objects::{Guard, Refusal};
use crate::work;
use lamassu_vault::Time;
use lamassu_vault::detached::Opened;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use time::OffsetDateTime;

/// Bytes of an object that are fetched before its size is known: a smaller object takes one request.
const BEGINNING: u64 = 512 << 10;
/// Size of a page; every object begins with one.
const PAGE: u64 = 4096;
/// How often a copy is begun again because its source was changed meanwhile.
const COPY_TRIES: usize = 16;
/// The largest object that providers copy at once.
const COPY_MAX: u64 = 5 << 30;

/// Largest record of the gateway's own, in bytes.
pub(super) const RECORD_MAX: u64 = 1 << 20;

/// The year 9999, in seconds since 1970.
const TIME_MAX: i64 = 253_370_764_800;

/// An object that is read.
pub struct Open {
    opened: Opened,
}

impl Open {
    /// Reads; short only at the end.
    ///
    /// # Errors
    /// Damage; those of the provider.
    pub fn read(&self, at: u64, len: usize) -> Result<Vec<u8>> {
        Ok(self.opened.read(at, len)?)
    }
}

/// Parses the time in a header.
pub fn time_of(text: &str) -> Time {
    use time::format_description::well_known::{Rfc2822, Rfc3339};
    let parsed = OffsetDateTime::parse(text, &Rfc2822).or_else(|_| OffsetDateTime::parse(text, &Rfc3339));
    // A provider may send anything: a time outside the calendar in any time zone counts as no time.
    let seconds = parsed.map_or(0, OffsetDateTime::unix_timestamp);
    Time { seconds: if (0..TIME_MAX).contains(&seconds) { seconds } else { 0 }, nanos: 0 }
}

/// The object as clients see it.
pub(super) fn shown(found: &Found, properties: &Properties) -> Shown {
    shown_at(&found.etag, &found.modified, properties)
}

/// The same, from the provider's tag and time.
pub(super) fn shown_at(etag: &str, modified: &str, properties: &Properties) -> Shown {
    let stored = properties.stored.map(|seconds| Time { seconds, nanos: 0 });
    let mtime = stored.unwrap_or_else(|| time_of(modified));
    Shown { attrs: properties.attrs(etag), size: properties.size, mtime }
}

impl Remote {
    /// The object at a place.
    pub(super) fn found(&self, place: &str) -> Result<(Found, Arc<Properties>)> {
        let found = self.client.head(&self.name(place))?;
        let properties = self.opened(place, &found)?;
        Ok((found, properties))
    }

    /// A missing object is the client's key or its bucket.
    fn of_key<T>(&self, bucket: &str, done: Result<T>) -> Result<T> {
        match done {
            Err(RemoteError::Missing(_)) => self.bucket(bucket).and(Err(Refusal::NoKey.into())),
            done => done,
        }
    }

    /// An object.
    ///
    /// # Errors
    /// [`Refusal::NoKey`], [`Refusal::NoBucket`], [`RemoteError::Damaged`]; those of the provider.
    pub fn find(&self, bucket: &str, key: &str) -> Result<Shown> {
        let place = self.place(bucket, key)?;
        let (found, properties) = self.of_key(bucket, self.found(&place))?;
        Ok(shown(&found, &properties))
    }

    /// An object to be read. `likely` is the offset of the wanted range, if the request gives one; a range that is
    /// counted from the end gives none.
    ///
    /// # Errors
    /// As [`Remote::find`].
    pub fn read(&self, bucket: &str, key: &str, likely: Option<u64>) -> Result<(Shown, Reading)> {
        let place = self.place(bucket, key)?;
        let first = if likely.is_some_and(|at| at > BEGINNING) { PAGE } else { BEGINNING };
        let got = self.client.get(&self.name(&place), 0..first, None);
        let (beginning, found) = self.of_key(bucket, got)?;
        let properties = self.opened(&place, &found)?;
        Ok((shown(&found, &properties), Reading { place, found, properties, beginning }))
    }

    /// The same for an object that will be read whole.
    pub(super) fn reading(&self, place: &str) -> Result<Reading> {
        let (beginning, found) = self.client.get(&self.name(place), 0..BEGINNING, None)?;
        let properties = self.opened(place, &found)?;
        Ok(Reading { place: place.into(), found, properties, beginning })
    }

    /// Opens a found object for reading a range.
    ///
    /// # Errors
    /// [`RemoteError::Damaged`]; those of the provider.
    pub fn open_for(&self, reading: Reading, range: &Range<u64>) -> Result<Open> {
        let Reading { place, found, properties, beginning } = reading;
        let name = self.name(&place);
        let lies = Location { client: self.client.clone(), name: name.clone(), etag: found.etag, size: found.size };
        let source = Object::new(lies, self.files.sealed_range(range), beginning);
        let opened = self.files.open(Arc::new(source), &properties.identity, properties.size, &name)?;
        Ok(Open { opened })
    }

    /// Begins to store an object.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`], [`Refusal::Precondition`]; as [`Remote::begin`].
    pub fn stage(self: &Arc<Self>, bucket: &str, key: &str, size: u64, guard: &Guard, attrs: Attrs) -> Result<Upload> {
        self.writable()?;
        let place = self.place(bucket, key)?;
        self.bucket(bucket)?;
        // Checked before the body is received: most requests that fail do so here.
        self.unless(&place, guard)?;
        self.begin(place, Some(bucket), size, attrs)
    }

    /// Notes a created or removed key in the kept listings.
    pub fn changed(&self, bucket: &str, key: &str, is_there: bool) {
        self.listings.changed(bucket, key, is_there);
    }

    /// Removes an object. Without a condition, a missing object is no error.
    ///
    /// # Errors
    /// [`Refusal::Precondition`], [`RemoteError::GivenUp`]; those of the provider.
    pub fn remove(&self, bucket: &str, key: &str, guard: &Guard) -> Result<()> {
        self.writable()?;
        let place = self.place(bucket, key)?;
        self.bucket(bucket)?;
        let _alone = self.alone_with(&place);
        work::wanted(RemoteError::GivenUp)?;
        self.unless(&place, guard)?;
        self.client.delete(&self.name(&place))?;
        self.known.lock().pop(&place);
        self.changed(bucket, key, false);
        Ok(())
    }

    /// Removes several objects, a few at once. The results are in the order of the keys.
    pub fn remove_all(&self, bucket: &str, keys: &[(String, Guard)]) -> Vec<Result<()>> {
        let removed = at_once(keys, |(key, guard)| Ok(self.remove(bucket, key, guard)));
        removed.unwrap_or_default()
    }

    /// Copies an object at the provider, which learns only that the contents are equal; nothing is encrypted again.
    /// With `keeps_time` the copy is as old as its source. `change` makes the copy's attributes from the source's; it
    /// returns `None` if the source is no longer the expected one.
    ///
    /// # Errors
    /// [`Refusal::NoKey`], [`Refusal::Precondition`], [`RemoteError::LargeCopy`], [`RemoteError::GivenUp`]; those of
    /// the provider, and of `change`.
    pub fn copy<E: From<RemoteError>>(
        &self,
        (from, from_key): (&str, &str),
        (bucket, key): (&str, &str),
        guard: &Guard,
        keeps_time: bool,
        change: impl Fn(&Shown, &Properties) -> Result<Option<Attrs>, E>,
    ) -> Result<Shown, E> {
        self.writable()?;
        let (from_place, place) = (self.place(from, from_key)?, self.place(bucket, key)?);
        self.bucket(bucket)?;
        for _ in 0..COPY_TRIES {
            let (found, of) = self.of_key(from, self.found(&from_place))?;
            if found.size > COPY_MAX {
                return Err(RemoteError::LargeCopy.into());
            }
            let source = shown(&found, &of);
            let Some(attrs) = change(&source, &of)? else { continue };
            let mut properties = Properties::new(&attrs, of.size, of.identity);
            properties.stored = keeps_time.then_some(source.mtime.seconds);
            let sealed = self.seal(&place, &properties)?;
            let _kept = self.keep_bucket(bucket)?;
            // The lock covers the source, too: properties of one state with the content of another do not open. Not
            // every provider compares the tag in the request.
            let _alone = self.alone_with_both(&from_place, &place);
            work::wanted(RemoteError::GivenUp)?;
            let now = self.of_key(from, self.client.head(&self.name(&from_place)))?;
            if (&now.etag, &now.properties) != (&found.etag, &found.properties) {
                continue;
            }
            self.unless(&place, guard)?;
            let etag = match self.client.copy(&self.name(&from_place), &found.etag, &self.name(&place), &sealed) {
                // Another gateway has replaced or removed the object.
                Err(RemoteError::Changed(_) | RemoteError::Missing(_)) => continue,
                copied => copied?,
            };
            let attrs = properties.attrs(&etag);
            self.known.lock().put(place.clone(), (etag, Arc::new(properties)));
            self.changed(bucket, key, true);
            return Ok(Shown { attrs, size: of.size, mtime: Time::now() });
        }
        Err(RemoteError::Busy("the source of a copy was changed again and again".into()).into())
    }

    /// Sets the tags of an object: a copy of it to itself, with other properties.
    ///
    /// # Errors
    /// As [`Remote::copy`].
    pub fn set_tags(&self, bucket: &str, key: &str, tags: BTreeMap<String, String>) -> Result<()> {
        let set = |shown: &Shown, _: &Properties| {
            let mut attrs = shown.attrs.clone();
            attrs.given.tags.clone_from(&tags);
            Ok::<_, RemoteError>(Some(attrs))
        };
        self.copy((bucket, key), (bucket, key), &Guard::None, true, set).map(drop)
    }

    /// Stores a small record of the gateway's own.
    pub(super) fn put_record(&self, place: &str, content: &[u8]) -> Result<()> {
        let sealed = self.files.seal_properties(place, content)?;
        self.client.put(&self.name(place), sealed.as_bytes(), "", &Unless::Nothing).map(drop)
    }

    /// Reads such a record.
    pub(super) fn record(&self, place: &str) -> Result<Vec<u8>> {
        let (text, _) = self.client.get(&self.name(place), 0..RECORD_MAX, None)?;
        let text = std::str::from_utf8(&text).unwrap_or_default();
        Ok(self.files.open_properties(place, text)?)
    }
}

/// A found object, with its beginning.
pub struct Reading {
    place: String,
    found: Found,
    properties: Arc<Properties>,
    beginning: Vec<u8>,
}

impl Reading {
    /// Whether it has this tag of the provider.
    pub(super) fn is_of(&self, etag: &str) -> bool {
        self.found.etag == etag
    }

    /// Whether it is the same stored file as that of these properties.
    pub fn has(&self, properties: &Properties) -> bool {
        self.properties.are_of_file(properties)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_provider_are_taken_or_are_none() {
        assert_eq!(time_of("Wed, 21 Oct 2015 07:28:00 GMT").seconds, 1_445_412_480);
        assert_eq!(time_of("2015-10-21T07:28:00.000Z").seconds, 1_445_412_480);
        for text in ["", "yesterday", "9999-12-31T23:59:59-23:59", "0000-01-01T00:00:00+23:59", "1969-12-31T00:00:00Z"]
        {
            assert_eq!(time_of(text).seconds, 0, "{text}");
        }
    }
}
