//! Requests to the provider's S3, with retries, and the meaning of its answers. `rusty_s3` signs, `ureq` sends; calls
//! block.
//!
//! A request is repeated if there was no answer, or one that may pass. A second request changes nothing more; where a
//! condition makes that untrue, the caller checks the state. But a provider that goes on with a request whose
//! connection is closed can carry out the first one after later ones. PutObject and DeleteObject do not do so at this
//! project's access proxy: they end before they change a name.

use super::document::{Page, TAG_MAX};
use super::error::{RemoteError, Result, cut};
use super::settings::Settings;
use crate::work;
use data_encoding::BASE64;
use http::{HeaderMap, Method, Request};
use parking_lot::RwLock;
use rusty_s3::actions::{CreateMultipartUpload, ListObjectsV2};
use rusty_s3::{Bucket, Credentials, S3Action};
use s3s::crypto::{Checksum as _, Md5};
use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::io::Read;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use ureq::Agent;
use url::Url;

/// Life of a signature.
const SIGNED_FOR: Duration = Duration::from_secs(900);
/// Wait before the first repetition. Each further wait is twice as long, up to the longest.
const WAIT_FIRST: Duration = Duration::from_millis(100);
const WAIT_LONGEST: Duration = Duration::from_secs(5);
/// Largest page of a listing, in bytes: 1000 names of 1 KiB, with the data of each.
const LISTING_MAX: u64 = 8 << 20;
/// Largest other document, in bytes. Of an error document, this much is read.
const DOCUMENT_MAX: u64 = 64 << 10;
/// Largest size of an object that is accepted from a provider, in bytes; none takes more than about 50 TB.
const OBJECT_MAX: u64 = 1 << 46;
/// Bytes of an answer that are read at once.
const PIECE: usize = 64 << 10;
/// The header with the sealed properties of an object.
const PROPERTIES: &str = "x-amz-meta-lamassu";

/// A client of the provider's bucket.
pub struct Client {
    agent: Agent,
    bucket: Bucket,
    credentials: RwLock<Arc<Credentials>>,
    retries: u32,
    /// hashes tokens of pages with a key that the provider cannot know
    tokens: RandomState,
}

/// A condition that the provider checks before it replaces an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Unless {
    /// no condition
    #[default]
    Nothing,
    /// fail if the name exists
    Present,
    /// fail if the name has another tag than this one of the provider
    Other(String),
}

/// The provider's data about an object.
#[derive(Clone, Debug)]
pub struct Found {
    /// bytes of ciphertext
    pub size: u64,
    /// the provider's entity tag, without quotes
    pub etag: String,
    /// time of storing, as in the header
    pub modified: String,
    /// the sealed properties
    pub properties: String,
}

struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Vec<u8>,
}

/// A signed request without its body.
struct Signed {
    method: Method,
    url: Url,
    headers: Vec<(&'static str, String)>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Whether an answer with a success status has an error document, as CompleteMultipartUpload and CopyObject may.
    fn is_fault(&self) -> bool {
        let is_document = self.body.trim_ascii_start().starts_with(b"<");
        self.body.len() as u64 <= DOCUMENT_MAX && is_document && self.text().contains("<Error>")
    }

    fn etag(&self) -> Result<String> {
        checked(self.header("etag").map(|etag| etag.trim_matches('"').to_owned()), "")
    }

    /// The tag in the document of an answer.
    fn etag_within(&self, what: &str) -> Result<String> {
        let text = self.text();
        let etag = element(&text, "ETag").map(|etag| etag.replace("&quot;", "\"").trim_matches('"').to_owned());
        checked(etag, what)
    }

    fn found(&self) -> Result<Found> {
        let length = match self.header("content-range").and_then(|range| range.rsplit_once('/')) {
            Some((_, length)) => Some(length),
            None => self.header("content-length"),
        };
        let size = length.and_then(|length| length.parse().ok()).filter(|size| *size <= OBJECT_MAX);
        Ok(Found {
            size: size.ok_or_else(|| RemoteError::Answer("there is no length, or none that can be".into()))?,
            etag: self.etag()?,
            modified: self.header("last-modified").unwrap_or_default().into(),
            properties: self.header(PROPERTIES).unwrap_or_default().into(),
        })
    }
}

impl Answer {
    /// Whether the body is this range of an object of this size. A provider may answer with the whole of a small
    /// object.
    fn is_range(&self, asked: &Range<u64>, size: u64) -> bool {
        let end = asked.end.min(size);
        let is_meant = match self.status {
            206 => {
                let said = self.header("content-range").and_then(|said| said.strip_prefix("bytes ")?.split_once('/'));
                said.is_some_and(|(said, _)| said == format!("{}-{}", asked.start, end.saturating_sub(1)))
            }
            _ => asked.start == 0 && end == size,
        };
        is_meant && Some(self.body.len() as u64) == end.checked_sub(asked.start)
    }
}

/// Checks an entity tag.
fn checked(etag: Option<String>, what: &str) -> Result<String> {
    let etag = etag.filter(|etag| (1..=TAG_MAX).contains(&etag.len()));
    etag.ok_or_else(|| RemoteError::Answer(format!("{what}: there is no entity tag, or none that can be")))
}

/// The body of an answer, if it has at most `most` bytes.
fn received(mut body: impl Read, most: u64) -> Result<Vec<u8>> {
    let cut = |error: std::io::Error| RemoteError::Unreachable(format!("an answer was cut off: {error}"));
    let mut bytes = Vec::new();
    loop {
        let read = body.by_ref().take(PIECE as u64).read_to_end(&mut bytes).map_err(cut)?;
        match () {
            () if bytes.len() as u64 > most => {
                return Err(RemoteError::Answer(format!("an answer of more than the {most} bytes that it may have")));
            }
            () if read == 0 => return Ok(bytes),
            // A long body, however slowly it arrives, is given up once the client is gone. A short one is read to its
            // end, since it may confirm a change that other work depends on.
            () if bytes.len() as u64 > DOCUMENT_MAX && !work::is_wanted() => return Err(RemoteError::GivenUp),
            () => {}
        }
    }
}

/// The text of an element that occurs once in a document.
fn element<'a>(document: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = document.split_once(&format!("<{name}>"))?;
    Some(rest.split_once('<')?.0)
}

/// The meaning of a status other than success, and its document. `is_head`: an answer to HEAD, which has no document.
fn fault(status: u16, document: &str, what: &str, is_head: bool) -> RemoteError {
    let code = cut(element(document, "Code").unwrap_or_default());
    let text = || match element(document, "Message") {
        Some(message) => format!("{what}: {status} {code}: {}", cut(message)),
        None => format!("{what}: {status} {code}"),
    };
    match (status, code) {
        (_, "NoSuchBucket") => RemoteError::NoBackend(text()),
        (_, "NoSuchUpload") => RemoteError::Lost(text()),
        (300..=399, _) | (_, "AuthorizationHeaderMalformed" | "PermanentRedirect") => RemoteError::Elsewhere(text()),
        // With status 400 or 403: a credential with a session token ends after hours.
        (_, "ExpiredToken" | "TokenRefreshRequired") => RemoteError::Expired(text()),
        (401 | 403, _) | (_, "InvalidToken" | "InvalidAccessKeyId") => RemoteError::Denied(text()),
        // Any status: the answer to a completion may have begun with 200.
        (_, "KeyTooLongError") => RemoteError::LongKey,
        // A provider whose objects are files of a directory.
        (_, "ParentIsObject" | "KeyIsDirectory") => RemoteError::NoPlace(text()),
        // A proxy in between may answer 404, too; that says nothing about an object.
        (404, "NoSuchKey") => RemoteError::Missing(text()),
        (404, _) if is_head => RemoteError::Missing(text()),
        // Every object here has at least a page, and ranges lie within the known size.
        (416, _) => RemoteError::Damaged(text()),
        (412, _) | (_, "PreconditionFailed") => RemoteError::Changed(text()),
        // Two changes conflict; the provider may fail the one that came first.
        (_, "ConditionalRequestConflict") => RemoteError::Busy(text()),
        (501, _) | (_, "NotImplemented") => RemoteError::Unsupported(text()),
        (408 | 429 | 500..=599, _) | (_, "RequestTimeout" | "SlowDown" | "InternalError") => RemoteError::Busy(text()),
        _ => RemoteError::Answer(text()),
    }
}

/// The error of a document that cannot be parsed. The parser's text may repeat much of it.
fn not_understood(what: &str, why: &str) -> RemoteError {
    RemoteError::Answer(format!("{what}: {}", cut(why)))
}

/// The error of a HEAD whose answer is not understood: that answer has no document, so `again` asks for one by another
/// request. An expired credential is known by its document alone.
fn with_reason(error: RemoteError, again: impl FnOnce() -> Result<()>) -> RemoteError {
    match error {
        RemoteError::Answer(_) | RemoteError::Denied(_) => match again() {
            Err(reason @ (RemoteError::Expired(_) | RemoteError::Denied(_) | RemoteError::LongKey)) => reason,
            Ok(()) | Err(_) => error,
        },
        error => error,
    }
}

fn no_answer(error: ureq::Error) -> RemoteError {
    match error {
        ureq::Error::Tls(text) => RemoteError::Tls(text.into()),
        ureq::Error::Rustls(error) => RemoteError::Tls(error.to_string()),
        ureq::Error::Io(error) if error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) => {
            RemoteError::Tls(error.to_string())
        }
        error => RemoteError::Unreachable(error.to_string()),
    }
}

impl Client {
    pub fn new(settings: &Settings) -> Client {
        let (bucket, credentials) = (settings.bucket.clone(), settings.credentials.clone());
        Client {
            agent: settings.agent.clone(),
            bucket,
            credentials: RwLock::new(Arc::new(credentials)),
            retries: settings.retries,
            tokens: RandomState::new(),
        }
    }

    fn credentials(&self) -> Arc<Credentials> {
        self.credentials.read().clone()
    }

    /// Signs further requests with other credentials.
    pub fn take_credentials(&self, credentials: Credentials) {
        *self.credentials.write() = Arc::new(credentials);
    }

    fn once(&self, signed: &Signed, body: Option<&[u8]>, most: u64) -> Result<Answer> {
        let mut request = Request::builder().method(signed.method.clone()).uri(signed.url.as_str());
        for (name, value) in &signed.headers {
            request = request.header(*name, value);
        }
        let malformed = |error: http::Error| RemoteError::Answer(format!("a request cannot be made: {error}"));
        let answer = match body {
            Some(body) => self.agent.run(request.body(body).map_err(malformed)?),
            None => self.agent.run(request.body(()).map_err(malformed)?),
        };
        let (head, body) = answer.map_err(no_answer)?.into_parts();
        let bytes = match head.status.is_success() {
            true => received(body.into_reader(), most)?,
            false => received(body.into_reader().take(DOCUMENT_MAX), DOCUMENT_MAX)?,
        };
        Ok(Answer { status: head.status.as_u16(), headers: head.headers, body: bytes })
    }

    /// Sends a request until it gets a final answer, a document. `what` names the operation in errors.
    fn send(&self, what: &str, sign: impl Fn() -> Signed, body: Option<&[u8]>) -> Result<Answer> {
        self.send_for(DOCUMENT_MAX, what, sign, body)
    }

    /// The same, for an answer of at most `most` bytes.
    fn send_for(&self, most: u64, what: &str, sign: impl Fn() -> Signed, body: Option<&[u8]>) -> Result<Answer> {
        let mut wait = WAIT_FIRST;
        let mut tries = 0;
        loop {
            let signed = sign();
            let is_head = signed.method == Method::HEAD;
            let answer = self.once(&signed, body, most).and_then(|answer| match answer.status {
                200..=299 if !answer.is_fault() => Ok(answer),
                200..=299 => Err(fault(500, &answer.text(), what, is_head)),
                status => Err(fault(status, &answer.text(), what, is_head)),
            });
            match answer {
                Err(error) if error.may_pass() && tries < self.retries => {
                    tries += 1;
                    tracing::info!(%error, tries, "a request to the provider is repeated");
                    std::thread::sleep(wait);
                    wait = (wait * 2).min(WAIT_LONGEST);
                }
                done => return done,
            }
        }
    }

    fn signed<'a>(action: &impl S3Action<'a>, method: Method, headers: Vec<(&'static str, String)>) -> Signed {
        Signed { method, url: action.sign(SIGNED_FOR), headers }
    }

    /// Checks that the provider's bucket exists.
    ///
    /// # Errors
    /// [`RemoteError::NoBackend`]; those of the provider.
    pub fn check(&self) -> Result<()> {
        let sign = || Self::signed(&self.bucket.head_bucket(Some(&*self.credentials())), Method::HEAD, Vec::new());
        match self.send("HeadBucket", sign, None) {
            Ok(_) => Ok(()),
            Err(RemoteError::Missing(_)) => Err(RemoteError::NoBackend(self.bucket.name().into())),
            Err(error) => Err(with_reason(error, || self.list("", true, None, 1).map(drop))),
        }
    }

    /// The provider's data about a name.
    ///
    /// # Errors
    /// [`RemoteError::Missing`]; those of the provider.
    pub fn head(&self, name: &str) -> Result<Found> {
        let sign =
            || Self::signed(&self.bucket.head_object(Some(&*self.credentials()), name), Method::HEAD, Vec::new());
        let answer = self.send("HeadObject", sign, None);
        answer.map_err(|error| with_reason(error, || self.get(name, 0..1, None).map(drop)))?.found()
    }

    /// Fetches a range of an object, shorter at the object's end, but never partially. If `of` is given, of that state
    /// only.
    ///
    /// # Errors
    /// [`RemoteError::Missing`]; [`RemoteError::Changed`]: it has another tag or size by now; [`RemoteError::Answer`]:
    /// what came is not the range; those of the provider.
    pub fn get(&self, name: &str, range: Range<u64>, of: Option<(&str, u64)>) -> Result<(Vec<u8>, Found)> {
        let mut headers = vec![("range", format!("bytes={}-{}", range.start, range.end.saturating_sub(1)))];
        headers.extend(of.map(|(etag, _)| ("if-match", format!("\"{etag}\""))));
        let sign =
            || Self::signed(&self.bucket.get_object(Some(&*self.credentials()), name), Method::GET, headers.clone());
        let most = range.end.saturating_sub(range.start);
        let answer = self.send_for(most.max(DOCUMENT_MAX), "GetObject", sign, None)?;
        let found = answer.found()?;
        if of.is_some_and(|(etag, size)| etag != found.etag || size != found.size) {
            return Err(RemoteError::Changed(format!("{name}: another tag or size than was asked for")));
        }
        match answer.is_range(&range, found.size) {
            true => Ok((answer.body, found)),
            false => Err(RemoteError::Answer(format!("GetObject: {name}: other bytes than were asked for"))),
        }
    }

    /// Stores an object whole. Returns its tag.
    ///
    /// # Errors
    /// [`RemoteError::Changed`]; those of the provider.
    pub fn put(&self, name: &str, body: &[u8], properties: &str, unless: &Unless) -> Result<String> {
        self.conditional(name, properties, unless, |client, unless| {
            let credentials = client.credentials();
            let mut action = client.bucket.put_object(Some(&*credentials), name);
            let mut headers = vec![("content-md5", md5(body)), ("content-type", "application/octet-stream".into())];
            if !properties.is_empty() {
                headers.push((PROPERTIES, properties.into()));
            }
            for (header, value) in &headers {
                action.headers_mut().insert(*header, value.clone());
            }
            headers.extend(condition(unless));
            let sign = || Self::signed(&action, Method::PUT, headers.clone());
            client.send("PutObject", sign, Some(body))?.etag()
        })
    }

    /// Makes a change under a condition. If the provider does not support conditions, it is asked without. If an answer
    /// was lost, the repeated request may fail because of the first one's change; the caller then finds that change.
    fn conditional(
        &self,
        name: &str,
        properties: &str,
        unless: &Unless,
        change: impl Fn(&Client, &Unless) -> Result<String>,
    ) -> Result<String> {
        match change(self, unless) {
            Err(RemoteError::Unsupported(text)) if *unless != Unless::Nothing => {
                tracing::warn!(%text, "the provider knows no conditions: other gateways may change the same object");
                change(self, &Unless::Nothing)
            }
            Err(error @ (RemoteError::Changed(_) | RemoteError::Lost(_))) => match self.head(name) {
                Ok(found) if !properties.is_empty() && found.properties == properties => Ok(found.etag),
                _ => Err(error),
            },
            done => done,
        }
    }

    /// Copies an object with this tag at the provider, with other properties. Returns the copy's tag.
    ///
    /// # Errors
    /// [`RemoteError::Missing`], [`RemoteError::Changed`]; those of the provider.
    pub fn copy(&self, from: &str, etag: &str, name: &str, properties: &str) -> Result<String> {
        let credentials = self.credentials();
        let mut action = self.bucket.put_object(Some(&*credentials), name);
        let headers = vec![
            ("x-amz-copy-source", format!("/{}/{from}", self.bucket.name())),
            ("x-amz-copy-source-if-match", format!("\"{etag}\"")),
            ("x-amz-metadata-directive", "REPLACE".into()),
            (PROPERTIES, properties.into()),
        ];
        for (header, value) in &headers {
            action.headers_mut().insert(*header, value.clone());
        }
        let sign = || Self::signed(&action, Method::PUT, headers.clone());
        self.send("CopyObject", sign, Some(&[]))?.etag_within("CopyObject")
    }

    /// Removes an object, if it exists.
    ///
    /// # Errors
    /// Those of the provider.
    pub fn delete(&self, name: &str) -> Result<()> {
        let sign =
            || Self::signed(&self.bucket.delete_object(Some(&*self.credentials()), name), Method::DELETE, Vec::new());
        match self.send("DeleteObject", sign, None) {
            Ok(_) | Err(RemoteError::Missing(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// A page of names that begin with `prefix`, at most 1000. If `grouped`, names are grouped up to the next slash.
    ///
    /// # Errors
    /// Those of the provider.
    pub fn list(&self, prefix: &str, grouped: bool, from: Option<&str>, max: usize) -> Result<Page> {
        let credentials = self.credentials();
        let mut action = ListObjectsV2::new(&self.bucket, Some(&*credentials));
        // Names here are sealed: letters, digits, `-`, `_`, dots and slashes.
        action.query_mut().remove("encoding-type");
        action.with_prefix(prefix);
        action.with_max_keys(max);
        if grouped {
            action.with_delimiter("/");
        }
        if let Some(token) = from {
            action.with_continuation_token(token);
        }
        let sign = || Self::signed(&action, Method::GET, Vec::new());
        let answer = self.send_for(LISTING_MAX, "ListObjectsV2", sign, None).map_err(|error| match error {
            // The request concerned no object: the endpoint answers something else.
            RemoteError::Missing(text) | RemoteError::Changed(text) => RemoteError::Answer(text),
            error => error,
        })?;
        Page::parse(&answer.body).map_err(|why| not_understood("ListObjectsV2", &why))
    }

    /// All pages of names, as [`Client::list`] returns them. A provider could list without end, so the listing stops
    /// once the client is gone.
    ///
    /// # Errors
    /// Those of the provider, and of `each`. [`RemoteError::GivenUp`]. [`RemoteError::Answer`]: it lists in a circle.
    pub fn pages(&self, prefix: &str, grouped: bool, mut each: impl FnMut(Page) -> Result<()>) -> Result<()> {
        let (mut seen, mut next) = (HashSet::new(), None::<String>);
        loop {
            if !work::is_wanted() {
                return Err(RemoteError::GivenUp);
            }
            let mut page = self.list(prefix, grouped, next.as_deref(), 1000)?;
            next = page.next.take();
            each(page)?;
            let Some(token) = &next else { return Ok(()) };
            if !seen.insert(self.tokens.hash_one(token)) {
                return Err(RemoteError::Answer("ListObjectsV2: it lists in a circle".into()));
            }
        }
    }

    /// Begins a multipart upload; returns its id.
    ///
    /// # Errors
    /// Those of the provider.
    pub fn begin(&self, name: &str, properties: &str) -> Result<String> {
        let credentials = self.credentials();
        let mut action = self.bucket.create_multipart_upload(Some(&*credentials), name);
        let headers = vec![("content-type", "application/octet-stream".to_owned()), (PROPERTIES, properties.into())];
        for (header, value) in &headers {
            action.headers_mut().insert(*header, value.clone());
        }
        let sign = || Self::signed(&action, Method::POST, headers.clone());
        let answer = self.send("CreateMultipartUpload", sign, Some(&[]))?;
        let parsed = CreateMultipartUpload::parse_response(&answer.body);
        let parsed = parsed.map_err(|error| not_understood("CreateMultipartUpload", &error.to_string()))?;
        Ok(parsed.upload_id().into())
    }

    /// Uploads part `number`, from 1; returns its tag.
    ///
    /// # Errors
    /// Those of the provider.
    pub fn part(&self, name: &str, upload: &str, number: u16, body: &[u8]) -> Result<String> {
        let credentials = self.credentials();
        let mut action = self.bucket.upload_part(Some(&*credentials), name, number, upload);
        let headers = vec![("content-md5", md5(body))];
        for (header, value) in &headers {
            action.headers_mut().insert(*header, value.clone());
        }
        let sign = || Self::signed(&action, Method::PUT, headers.clone());
        self.send("UploadPart", sign, Some(body))?.etag()
    }

    /// Completes an upload from parts with these tags, in their order. Returns the object's tag.
    ///
    /// # Errors
    /// [`RemoteError::Changed`]; those of the provider.
    pub fn complete(
        &self,
        name: &str,
        upload: &str,
        etags: &[String],
        properties: &str,
        unless: &Unless,
    ) -> Result<String> {
        let quoted: Vec<String> = etags.iter().map(|etag| format!("\"{etag}\"")).collect();
        self.conditional(name, properties, unless, |client, unless| {
            let headers: Vec<_> = condition(unless).into_iter().collect();
            let credentials = client.credentials();
            let action = || {
                let etags = quoted.iter().map(String::as_str);
                client.bucket.complete_multipart_upload(Some(&*credentials), name, upload, etags)
            };
            let sign = || Self::signed(&action(), Method::POST, headers.clone());
            let body = action().body();
            client.send("CompleteMultipartUpload", sign, Some(body.as_bytes()))?.etag_within("CompleteMultipartUpload")
        })
    }

    /// Aborts an upload.
    ///
    /// # Errors
    /// Those of the provider.
    pub fn abort(&self, name: &str, upload: &str) -> Result<()> {
        let credentials = self.credentials();
        let action = self.bucket.abort_multipart_upload(Some(&*credentials), name, upload);
        let sign = || Self::signed(&action, Method::DELETE, Vec::new());
        match self.send("AbortMultipartUpload", sign, None) {
            Ok(_) | Err(RemoteError::Lost(_) | RemoteError::Missing(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn md5(body: &[u8]) -> String {
    let mut md5 = Md5::new();
    md5.update(body);
    BASE64.encode(md5.finalize().as_ref())
}

fn condition(unless: &Unless) -> Option<(&'static str, String)> {
    match unless {
        Unless::Nothing => None,
        Unless::Present => Some(("if-none-match", "*".into())),
        Unless::Other(etag) => Some(("if-match", format!("\"{etag}\""))),
    }
}

#[cfg(test)]
mod tests;
