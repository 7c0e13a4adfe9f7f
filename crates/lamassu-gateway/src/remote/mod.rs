//! Objects at a provider's S3: each is one ciphertext object in format v1 under a sealed name.
//!
//! Guarantees: an object exists completely or not at all, since the provider makes it in one step. What a client reads
//! verifies under the vault's keys as whole, as stored, and as belonging to this key. Not detected: a provider that
//! restores an older state, and one that omits an object from a listing (`docs/threat-model.md`).
//!
//! | module | what |
//! |---|---|
//! | `error` | errors of operations at a provider |
//! | `failures` | failures that a provider can cause any number of |
//! | `settings` | the operator's options |
//! | `client` | the provider's S3: requests, retries, errors |
//! | `document` | the XML document of a listing |
//! | `place` | keys to sealed names, and back |
//! | `properties` | the sealed properties of an object |
//! | `source` | reading of an object's bytes |
//! | `upload` | storing of an object |
//! | `objects` | calls on objects |
//! | `list` | listings in the order of keys |
//! | `multipart` | clients' uploads in parts |
//!
//! Calls block. This module does not decide on rights, and does not know HTTP towards clients.

mod client;
mod document;
mod error;
mod failures;
pub mod list;
pub mod multipart;
pub mod objects;
mod place;
pub mod properties;
pub mod settings;
mod source;
#[cfg(feature = "testing")]
pub mod testing;
pub mod upload;

pub use error::{RemoteError, Result};
pub use settings::{Provider, Settings};

use crate::locks::{Alone, Locks, Shared};
use crate::objects::Refusal;
use crate::work;
use client::{Client, Unless};
use lamassu_vault::detached::Detached;
use list::Listings;
use lru::LruCache;
use parking_lot::Mutex;
use properties::Properties;
use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Most bytes of names of buckets that are accepted from a provider, which may list anything: enough for a million.
const NAMES_MAX: usize = 128 << 20;
/// Number of objects whose properties are kept in memory: 25 MiB, if clients give few with them.
const KNOWN_MAX: NonZeroUsize = NonZeroUsize::new(50_000).unwrap();
/// How long a bucket counts as existing after a check.
const BUCKET_KNOWN: Duration = Duration::from_secs(30);
/// The object that stands for a bucket. No sealed name has a dot.
const BUCKET: &str = "lamassu.bucket";
/// The header's copy at the provider.
const HEADER: &str = "lamassu.vault";
/// The copy of the record of the vault's root.
const RECORD: &str = "lamassu.dir";
/// Requests to the provider at once for one request of a client.
const AT_ONCE: usize = 16;

/// The object store at a provider.
pub struct Remote {
    files: Detached,
    client: Arc<Client>,
    prefix: String,
    /// Held while a condition is checked and the object is replaced.
    keys: Locks<String>,
    /// Buckets: held alone while one is removed, shared while an object or an upload is placed in it.
    kept: Locks<String>,
    /// Held while an upload is ended; taken before the others.
    uploads: Locks<String>,
    known: Mutex<LruCache<String, (String, Arc<Properties>)>>,
    buckets: Mutex<Seen>,
    listings: Listings,
}

/// Buckets that existed, with the time of the check.
#[derive(Default)]
struct Seen {
    buckets: HashMap<String, Instant>,
    /// Number of removals: an answer from before the last one may be outdated.
    removed: u64,
}

impl Remote {
    /// Opens the provider's bucket. The prefix must be empty there, or hold objects of the same vault.
    ///
    /// # Errors
    /// Those of the provider; [`RemoteError::Answer`]: another vault's objects lie there.
    pub fn open(files: Detached, settings: &Settings, listing_max: usize) -> Result<Remote> {
        let client = Arc::new(Client::new(settings));
        let remote = Remote {
            files,
            client,
            prefix: settings.prefix.clone(),
            keys: Locks::default(),
            uploads: Locks::default(),
            kept: Locks::default(),
            known: Mutex::new(LruCache::new(KNOWN_MAX)),
            buckets: Mutex::default(),
            listings: Listings::new(listing_max),
        };
        remote.client.check()?;
        remote.leave_header()?;
        Ok(remote)
    }

    /// Stores copies of the header and of the root's record at the provider, so that these objects and the key suffice
    /// to read objects and names.
    fn leave_header(&self) -> Result<()> {
        let (name, own) = (self.name(HEADER), self.files.header());
        match self.client.get(&name, 0..(1 << 20), None) {
            Ok((found, _)) if id_of(&found) != id_of(own) => {
                let text = format!("{name} there is another vault's: give this one a bucket or a prefix of its own");
                return Err(RemoteError::Answer(text));
            }
            Ok((found, _)) if found == own => {}
            Ok(_) | Err(RemoteError::Missing(_)) => self.leave(&name, own)?,
            Err(error) => return Err(error),
        }
        let (name, own) = (self.name(RECORD), self.files.record());
        match self.client.get(&name, 0..(1 << 20), None) {
            Ok((found, _)) if found == own => Ok(()),
            Ok(_) | Err(RemoteError::Missing(_)) => self.leave(&name, own),
            Err(error) => Err(error),
        }
    }

    fn leave(&self, name: &str, content: &[u8]) -> Result<()> {
        if self.files.is_read_only() {
            return Ok(());
        }
        self.client.put(name, content, "", &Unless::Nothing).map(drop)
    }

    /// Uses other credentials at the provider from now on.
    pub fn take_credentials(&self, settings: Settings) {
        self.client.take_credentials(settings.credentials);
    }

    /// Whether the provider answers.
    ///
    /// # Errors
    /// Those of the provider.
    pub fn check(&self) -> Result<()> {
        self.client.list(&self.prefix, true, None, 1).map(drop)
    }

    fn writable(&self) -> Result<()> {
        if self.files.is_read_only() { Err(RemoteError::ReadOnly) } else { Ok(()) }
    }

    /// The provider's name for a place.
    fn name(&self, place: &str) -> String {
        format!("{}{place}", self.prefix)
    }

    fn alone_with(&self, place: &str) -> Alone<'_, String> {
        self.keys.alone(place.into())
    }

    /// Locks two places.
    fn alone_with_both(&self, one: &str, other: &str) -> (Alone<'_, String>, Option<Alone<'_, String>>) {
        let first = self.alone_with(one.min(other));
        (first, (one != other).then(|| self.alone_with(one.max(other))))
    }

    /// Keeps a bucket from being removed while something is put there. Taken before the lock of a key.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`]; those of the provider.
    fn keep_bucket(&self, bucket: &str) -> Result<Shared<'_, String>> {
        let kept = self.kept.shared(bucket.into());
        self.bucket(bucket)?;
        Ok(kept)
    }

    /// Buckets, with the times when they were made.
    ///
    /// # Errors
    /// Those of the provider.
    pub fn buckets(&self, is_shown: &dyn Fn(&str) -> bool, most: usize) -> Result<Vec<(String, String)>> {
        // By name: a provider may send the same one again and again.
        let (mut names, mut bytes) = (BTreeMap::new(), 0);
        self.client.pages(&self.prefix, true, |page| {
            for prefix in page.prefixes {
                let stored = prefix.strip_prefix(&self.prefix).unwrap_or_default().trim_end_matches('/').to_owned();
                let opened = self.files.top().open(&stored).and_then(|name| String::from_utf8(name).ok());
                if let Some(name) = opened.filter(|name| is_shown(name)) {
                    let len = name.len() + stored.len();
                    bytes += if names.insert(name, stored).is_none() { len } else { 0 };
                }
            }
            match bytes > NAMES_MAX {
                true => Err(RemoteError::Answer(format!("too many names below {}", self.prefix))),
                false => Ok(()),
            }
        })?;
        let mut found = Vec::new();
        for (name, stored) in names {
            work::wanted(RemoteError::GivenUp)?;
            match self.client.head(&self.name(&format!("{stored}/{BUCKET}"))) {
                Ok(marker) => found.push((name, marker.modified)),
                Err(RemoteError::Missing(_)) => {}
                Err(error) => return Err(error),
            }
            if found.len() == most {
                break;
            }
        }
        Ok(found)
    }

    fn marker(&self, bucket: &str) -> String {
        format!("{}/{BUCKET}", self.files.top().seal(bucket.as_bytes()))
    }

    /// Checks that a bucket exists.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`]; those of the provider.
    pub fn bucket(&self, bucket: &str) -> Result<()> {
        let removed = {
            let seen = self.buckets.lock();
            if seen.buckets.get(bucket).is_some_and(|seen| seen.elapsed() < BUCKET_KNOWN) {
                return Ok(());
            }
            seen.removed
        };
        match self.client.head(&self.name(&self.marker(bucket))) {
            Ok(_) => {
                let mut seen = self.buckets.lock();
                if seen.removed == removed {
                    seen.buckets.insert(bucket.into(), Instant::now());
                }
                Ok(())
            }
            // An answer to HEAD does not tell the provider's own missing bucket from a missing object, so that is
            // checked.
            Err(RemoteError::Missing(_)) => self.client.check().and(Err(Refusal::NoBucket.into())),
            Err(error) => Err(error),
        }
    }

    /// Makes a bucket.
    ///
    /// # Errors
    /// [`Refusal::BucketExists`], [`RemoteError::GivenUp`]; those of the provider.
    pub fn make_bucket(&self, bucket: &str) -> Result<()> {
        self.writable()?;
        let place = self.marker(bucket);
        let _alone = self.alone_with(&place);
        work::wanted(RemoteError::GivenUp)?;
        match self.client.head(&self.name(&place)) {
            Ok(_) => return Err(Refusal::BucketExists.into()),
            Err(RemoteError::Missing(_)) => {}
            Err(error) => return Err(error),
        }
        let sealed = self.files.seal_properties(&place, b"{}")?;
        match self.client.put(&self.name(&place), sealed.as_bytes(), &sealed, &Unless::Present) {
            Ok(_) => Ok(()),
            Err(RemoteError::Changed(_)) => Err(Refusal::BucketExists.into()),
            Err(error) => Err(error),
        }
    }

    /// Removes an empty bucket. Its uploads are aborted, also if the bucket then stays, because another request has put
    /// an object there.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`], [`Refusal::BucketNotEmpty`], [`RemoteError::NoLonger`], [`RemoteError::GivenUp`]; those
    /// of the provider.
    pub fn remove_bucket(&self, bucket: &str) -> Result<()> {
        self.writable()?;
        self.bucket(bucket)?;
        self.require_empty(bucket)?;
        // This may take hours. Meanwhile nobody waits for the bucket.
        self.end_uploads_of(bucket)?;
        let place = self.marker(bucket);
        let _kept = self.kept.alone(bucket.into());
        let _alone = self.alone_with(&place);
        self.require_empty(bucket)?;
        // Those that were begun meanwhile.
        self.end_uploads_of(bucket)?;
        self.client.delete(&self.name(&place))?;
        let mut seen = self.buckets.lock();
        seen.buckets.remove(bucket);
        seen.removed += 1;
        Ok(())
    }

    fn require_empty(&self, bucket: &str) -> Result<()> {
        let place = self.marker(bucket);
        let (name, dir) = (self.name(&place), place.trim_end_matches(BUCKET));
        let page = self.client.list(&self.name(dir), false, None, 2)?;
        match page.objects.iter().any(|object| object.name != name) {
            true => Err(Refusal::BucketNotEmpty.into()),
            false => Ok(()),
        }
    }
}

/// The id in a header.
fn id_of(header: &[u8]) -> Option<String> {
    let parsed: serde_json::Value = serde_json::from_slice(header).ok()?;
    Some(parsed.get("id")?.as_str()?.to_owned())
}

/// Runs `each` for every item, a few at once, until one fails. Returns the results in the items' order, or an error.
fn at_once<T: Sync, R: Send>(items: &[T], each: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let (next, client) = (AtomicUsize::new(0), work::Client::here());
    let done: Mutex<Vec<(usize, Result<R>)>> = Mutex::new(Vec::with_capacity(items.len()));
    let go = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return };
            let result = each(item);
            if result.is_err() {
                next.store(items.len(), Ordering::Relaxed);
            }
            done.lock().push((at, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..AT_ONCE.min(items.len()) {
            // If no thread can be started, this one does more of the work.
            let thread = std::thread::Builder::new().name("lamassu-ask".into());
            if thread.spawn_scoped(scope, || client.serve(go)).is_err() {
                break;
            }
        }
        go();
    });
    let mut done = done.into_inner();
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests;
