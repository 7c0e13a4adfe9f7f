//! Reads the bytes of an object by range requests, which grow during a sequential read. The last bytes fetched stay in
//! memory, since the page that describes blocks is read before them.

use super::client::Client;
use super::error::{RemoteError, Result};
use lamassu_vault::detached::Source;
use parking_lot::Mutex;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a range request: the first one, and the largest.
const FETCHED_FIRST: u64 = 256 << 10;
const FETCHED_MOST: u64 = 4 << 20;
/// Longest gap in front of a read that is still fetched as a part of a sequential read, in bytes.
const GAP_MAX: u64 = 2 << 20;
/// Bytes of a page, and of the smallest block.
const PAGE: u64 = 4096;
/// Most bytes that are kept in memory.
const HELD_MAX: usize = 9 << 20;

/// The object at the provider.
pub struct Location {
    /// the provider's client
    pub client: Arc<Client>,
    /// the whole name
    pub name: String,
    /// entity tag of the state that is read
    pub etag: String,
    /// size, bytes
    pub size: u64,
}

/// An object that is read.
pub struct Object {
    place: Location,
    /// the range that will be read, as offsets in the ciphertext
    wanted: Range<u64>,
    held: Mutex<Held>,
}

struct Held {
    start: u64,
    bytes: Vec<u8>,
    next: u64,
}

impl Held {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    fn give(&self, offset: u64, buf: &mut [u8]) -> bool {
        let within = offset.checked_sub(self.start).and_then(|at| usize::try_from(at).ok());
        match within.and_then(|at| self.bytes.get(at..at + buf.len())) {
            Some(bytes) => {
                buf.copy_from_slice(bytes);
                true
            }
            None => false,
        }
    }
}

impl Object {
    /// An object whose beginning was already fetched.
    pub fn new(place: Location, wanted: Range<u64>, beginning: Vec<u8>) -> Object {
        let wanted = wanted.start.min(place.size)..wanted.end.min(place.size);
        Object { place, wanted, held: Mutex::new(Held { start: 0, bytes: beginning, next: FETCHED_FIRST }) }
    }

    /// Fetches a range, cut at the end of the object. A shorter answer is an error.
    fn fetch(&self, range: Range<u64>) -> Result<Vec<u8>> {
        let range = range.start..range.end.min(self.place.size);
        Ok(self.place.client.get(&self.place.name, range, Some((&self.place.etag, self.place.size)))?.0)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let mut held = self.held.lock();
        if held.give(offset, buf) {
            return Ok(());
        }
        let end = offset + buf.len() as u64;
        let goes_on = !held.bytes.is_empty() && offset >= held.start && offset <= held.end() + GAP_MAX;
        let (wanted, is_page) = (&self.wanted, buf.len() as u64 <= PAGE);
        let is_near = offset + GAP_MAX >= wanted.start && offset < wanted.start + GAP_MAX;
        let begins = !is_page || (is_near && wanted.end - wanted.start > FETCHED_FIRST);
        match (goes_on, begins) {
            (true, _) => {}
            (false, true) => *held = Held { start: offset, bytes: Vec::new(), next: held.next },
            // A single page outside the wanted range, or a single block.
            (false, false) => {
                drop(held);
                return give(&self.fetch(offset..end)?, buf);
            }
        }
        while held.end() < end {
            let from = held.end();
            let most = (from + held.next).min(self.wanted.end.max(end)).max(end.min(from + FETCHED_MOST));
            held.bytes.extend_from_slice(&self.fetch(from..most)?);
            held.next = (held.next * 2).min(FETCHED_MOST);
        }
        let at = usize::try_from(offset - held.start).unwrap_or(usize::MAX);
        give(held.bytes.get(at..).unwrap_or_default(), buf)?;
        let excess = held.bytes.len().saturating_sub(HELD_MAX);
        held.bytes.drain(..excess);
        held.start += excess as u64;
        Ok(())
    }
}

/// Fills a buffer from the beginning of `bytes`.
fn give(bytes: &[u8], buf: &mut [u8]) -> Result<()> {
    let bytes = bytes.get(..buf.len()).ok_or_else(|| RemoteError::Answer("an object ends too early".into()))?;
    buf.copy_from_slice(bytes);
    Ok(())
}

impl Source for Object {
    fn size(&self) -> u64 {
        self.place.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let len = usize::try_from(self.place.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(buf.len());
        if len > 0 {
            self.read(offset, &mut buf[..len]).map_err(io::Error::other)?;
        }
        Ok(len)
    }
}
