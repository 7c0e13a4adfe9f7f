//! Files in format v1 that lie outside the vault's directory, each by itself, as objects do at a provider: sealed and
//! opened as a stream, with the vault's keys, by the code that writes the vault's own files (`docs/format.md` §6c).
//!
//! * A file is sealed in one go, from its beginning to its end, and comes out in parts of one length. Only the first
//!   part, those with pages that are not complete and the one being filled are in memory.
//! * What comes out is settled: it has no pending state, and no session has to be asked about it.
//! * Names are sealed component by component under keys that follow from the path alone.
//! * Properties are sealed for one place, and say to which file they belong.
//!
//! This module does not know where the files lie, or how they get there.

mod backing;

use crate::error::io;
use crate::record::{DIRECTORY, read_text};
use crate::walk::read_header_bytes;
use crate::{Result, Vault, VaultError};
use backing::{Fetched, Loose, Spool};
use lamassu_crypto::name::{NameKey, derived_directory};
use lamassu_crypto::outer::RecordKind;
use lamassu_crypto::secret::Secret;
use lamassu_format::Geometry;
use lamassu_format::header::{HEADER_MAX, NameMode};
use lamassu_format::name::{self, HEADER};
use lamassu_format::record::DirRecord;
use lamassu_store::{File, FileContext};
use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;

pub use backing::Source;

/// Largest block of such a vault, bytes. A page of larger ones stands for more than a part.
pub const BLOCK_SIZE_MAX: u64 = 64 << 10;
/// Least length of a part, bytes: more than a page stands for, and what providers take.
pub const PART_LEN_MIN: u64 = 8 << 20;
/// Name of the directory above all others. No component of a path contains a slash.
const TOP: &[u8] = b"/";
/// Plaintext after which pages are settled, bytes, rounded to whole pages.
const WINDOW_LEN: u64 = 4 << 20;
/// Bytes of a page that tell it from all others: its nonce and its tag.
const HEAD_LEN: usize = 40;

/// Seals and opens files outside the vault's directory, with the vault's keys.
pub struct Detached {
    vault: Arc<Vault>,
    /// for files that are sealed, and for those that are opened
    ctx: Arc<FileContext>,
    ctx_read: Arc<FileContext>,
    top: Directory,
    header: Vec<u8>,
    record: Vec<u8>,
}

/// The names in one directory.
pub struct Directory {
    secret: Secret<32>,
    key: NameKey,
}

/// What tells a file from every other one, and from other states of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// of a file in one part: the beginning of its first page
    Head([u8; HEAD_LEN]),
    /// of a file in several parts: the id in all its pages, which no other file ever had
    Id([u8; 16]),
}

/// A part of a sealed file.
pub struct Part {
    /// from 0
    pub number: u64,
    /// ciphertext
    pub bytes: Vec<u8>,
}

impl Directory {
    fn new(secret: Secret<32>, id: [u8; 16]) -> Directory {
        let key = NameKey::new(&secret, id);
        Directory { secret, key }
    }

    /// The directory of this name in it.
    pub fn child(&self, name: &[u8]) -> Directory {
        let (secret, id) = derived_directory(&self.secret, self.key.id(), name);
        Directory::new(secret, id)
    }

    /// The stored form of a name: letters, digits, `-` and `_`.
    pub fn seal(&self, name: &[u8]) -> String {
        name::encode(&self.key.seal(name))
    }

    /// The name of a stored form; `None`: no name of this directory.
    pub fn open(&self, stored: &str) -> Option<Vec<u8>> {
        self.key.open(&name::decode(stored.as_bytes())?).ok()
    }
}

impl Detached {
    /// Uses the keys of an open vault.
    ///
    /// # Errors
    /// [`VaultError::Refused`] for a vault with an anchor at a server, with plain names, or with larger blocks than
    /// [`BLOCK_SIZE_MAX`]; [`VaultError::Damaged`]: the root's record does not open.
    pub fn of(vault: Arc<Vault>) -> Result<Detached> {
        if vault.options.anchor.as_ref().is_some_and(|anchor| anchor.may_end()) {
            return Err(VaultError::Refused(
                "the vault's anchor is at a server, which may give the vault to other hosts",
            ));
        }
        if vault.name_mode != NameMode::Encrypted {
            return Err(VaultError::Refused("the vault has plain names: make one with encrypted names"));
        }
        if vault.ctx.geometry.block_size() > BLOCK_SIZE_MAX {
            return Err(VaultError::Refused("the vault has blocks of more than 64 KiB: make one with smaller blocks"));
        }
        let root = vault.backend.root();
        let parse = |content: &[u8]| {
            let record = DirRecord::parse(content)?;
            Ok::<_, lamassu_format::record::RecordError>((Secret::new(&mut record.secret.clone()), record.id))
        };
        let record = read_text(&*root, OsStr::new(DIRECTORY.name)).map_err(io("read the record of the root"))?;
        let opened = DIRECTORY.open(&record, vault.ring(), &[], parse);
        let (secret, id) = opened.map_err(|error| {
            tracing::error!(%error, "the record of the root does not open");
            VaultError::Damaged { what: "directory record", stored: DIRECTORY.name.into() }
        })?;
        let top = Directory::new(secret, id).child(TOP);
        let header = read_header_bytes(&*root).map_err(io("read the header"))?;
        if header.len() > HEADER_MAX {
            return Err(VaultError::Damaged { what: "header", stored: HEADER.into() });
        }
        // An anchor remembers the vault's header and its sessions; of files that lie elsewhere it knows nothing.
        let unanchored = |ctx: &FileContext| Arc::new(FileContext { anchored: None, ..ctx.clone() });
        let (ctx, ctx_read) = (unanchored(&vault.ctx), unanchored(&vault.ctx_read));
        Ok(Detached { vault, ctx, ctx_read, top, header, record })
    }

    /// The vault's header, as it lies in its directory.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// The record of the vault's root, sealed: the names of all objects follow from it.
    pub fn record(&self) -> &[u8] {
        &self.record
    }

    /// The directory above all others.
    pub fn top(&self) -> &Directory {
        &self.top
    }

    /// Whether nothing may be sealed.
    pub fn is_read_only(&self) -> bool {
        self.vault.is_read_only()
    }

    fn geometry(&self) -> &Geometry {
        &self.vault.ctx.geometry
    }

    /// Where in the sealed form the blocks of a range of the plaintext lie, with what is between them.
    pub fn sealed_range(&self, range: &Range<u64>) -> Range<u64> {
        let geo = self.geometry();
        let (first, last) = (geo.block_at(range.start), geo.block_at(range.end.saturating_sub(1)));
        geo.block_offset(first).0..(geo.block_offset(last) + geo.block_size()).0
    }

    /// Begins to seal a file, which `tag` names in reports.
    ///
    /// # Errors
    /// [`VaultError::ReadOnly`]; those of the store that keeps the record of sessions.
    pub fn seal(&self, part_len: u64, tag: &str) -> Result<Sealing> {
        drop(self.vault.change()?); // not in a vault that is read-only or closed
        let spool = Arc::new(Loose(Spool::new(part_len.max(PART_LEN_MIN))));
        let file = File::create(self.ctx.clone(), spool.clone(), tag)?;
        let span = self.geometry().page_span();
        let (vault, window) = (self.vault.clone(), (WINDOW_LEN / span).max(1) * span);
        Ok(Sealing { vault, file, spool, geometry: *self.geometry(), window, written: 0 })
    }

    /// Opens a sealed file, and checks that it is the one meant, and as long.
    ///
    /// # Errors
    /// [`VaultError::Damaged`]: another file, or a part of one; those of `source`.
    pub fn open(&self, source: Arc<dyn Source>, meant: &Identity, size: u64, tag: &str) -> Result<Opened> {
        let damaged = |what| VaultError::Damaged { what, stored: tag.into() };
        let mut head = [0; HEAD_LEN];
        let read = source.read_at(0, &mut head).map_err(io("read a page"))?;
        if read < HEAD_LEN {
            return Err(damaged("object, which is no sealed file"));
        }
        let file = File::open(self.ctx_read.clone(), Arc::new(Loose(Fetched(source))), tag)?;
        let is_meant = match meant {
            Identity::Head(meant) => *meant == head,
            Identity::Id(id) => file.id()?.0 == *id,
        };
        match is_meant {
            false => Err(damaged("object, which holds another file than its properties say")),
            true if file.size() != size => Err(damaged("object, which has another size than its properties say")),
            true => Ok(Opened { file }),
        }
    }

    /// Seals the properties of what lies at `place`.
    ///
    /// # Errors
    /// No randomness.
    pub fn seal_properties(&self, place: &str, content: &[u8]) -> Result<String> {
        let outer = self.vault.ring().outer();
        Ok(name::encode(&outer.seal_record(RecordKind::Object, place.as_bytes(), content)?))
    }

    /// And back.
    ///
    /// # Errors
    /// [`VaultError::Damaged`]: they were changed, or belong elsewhere, or no loaded key opens them.
    pub fn open_properties(&self, place: &str, text: &str) -> Result<Vec<u8>> {
        let sealed = name::decode(text.as_bytes());
        let opened =
            sealed.and_then(|sealed| self.vault.ring().open_record(RecordKind::Object, place.as_bytes(), &sealed).ok());
        opened.ok_or_else(|| VaultError::Damaged { what: "properties of an object", stored: place.into() })
    }
}

/// A file that is being sealed. Any page may begin a session, so each step passes the vault's gate.
pub struct Sealing {
    vault: Arc<Vault>,
    file: File,
    spool: Arc<Loose<Spool>>,
    geometry: Geometry,
    window: u64,
    written: u64,
}

impl Sealing {
    /// The identity that the file has if it comes to be several parts.
    ///
    /// # Errors
    /// No randomness.
    pub fn id(&self) -> Result<Identity> {
        Ok(Identity::Id(self.file.id()?.0))
    }

    /// Bytes so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Adds to the end. Returns the parts that have become complete, which are never the first one. Waits while the
    /// vault is frozen.
    ///
    /// # Errors
    /// [`VaultError::Store`]; [`VaultError::ReadOnly`] after the vault was closed.
    pub fn write(&mut self, mut data: &[u8]) -> Result<Vec<Part>> {
        let mut done = Vec::new();
        while !data.is_empty() {
            let room = self.window - self.written % self.window;
            let (now, later) = data.split_at(data.len().min(usize::try_from(room).unwrap_or(usize::MAX)));
            let _pass = self.vault.change()?;
            self.file.write_at(self.written, now)?;
            self.written += now.len() as u64;
            data = later;
            if self.written.is_multiple_of(self.window) {
                self.file.settle_now()?;
                done.extend(self.complete());
            }
        }
        Ok(done)
    }

    /// Parts that nothing is written to any more: all up to here but those with the pages of a segment that goes on.
    fn complete(&self) -> Vec<Part> {
        let geo = &self.geometry;
        let next = geo.block_at(self.written);
        let page = geo.page_of(next);
        let segment = geo.segment_of(page) * geo.segment_len();
        let (until, held) = match geo.page_offset(page).0 == segment {
            true => (segment, segment..segment),
            false => (geo.block_offset(next).0, segment..segment + geo.block_size()),
        };
        self.spool.0.take_complete(until, &held)
    }

    /// Ends the file: the parts that are left, the first one among them, and what identifies the file.
    ///
    /// # Errors
    /// As [`Sealing::write`].
    pub fn finish(self) -> Result<(Vec<Part>, Identity)> {
        let _pass = self.vault.change()?;
        self.file.settle_now()?;
        let parts = self.spool.0.take_all();
        let head = match &*parts {
            [part] if part.number == 0 && !self.spool.0.has_given() => part.bytes.first_chunk().copied(),
            _ => None,
        };
        let identity = match head {
            Some(head) => Identity::Head(head),
            None => self.id()?,
        };
        Ok((parts, identity))
    }
}

/// A sealed file, open for reading.
pub struct Opened {
    file: File,
}

impl Opened {
    /// Bytes.
    pub fn size(&self) -> u64 {
        self.file.size()
    }

    /// Reads; short only at the end.
    ///
    /// # Errors
    /// [`VaultError::Store`]: damage, or the source fails.
    pub fn read(&self, at: u64, len: usize) -> Result<Vec<u8>> {
        let mut data = vec![0; len];
        let read = self.file.read_at(at, &mut data)?;
        data.truncate(read);
        Ok(data)
    }
}
