//! The vault's own sealed records: their text in the store, their seal and their content.
//!
//! A record is a short text in base64url, kept as the target of a symbolic link, or as a regular file if the store has
//! no symbolic links. Either way it appears whole. Companions (`names`, `symlink`) are kept in the same way.

use crate::Result;
use crate::error::{is_not_found, is_unsupported};
use lamassu_crypto::outer::RecordKind;
use lamassu_crypto::ring::OpenError;
use lamassu_crypto::{KeyRing, SecretBytes};
use lamassu_format::name::{self, DIR_RECORD, ROOT_RECORD, SESSIONS_RECORD};
use lamassu_store::BackendDir;
use std::ffi::OsStr;
use std::io as stdio;
use std::os::unix::ffi::OsStringExt;

/// Longest text of a record or companion that is kept as a file: that of a symbolic link.
const TEXT_MAX: usize = 8191;

/// One type of record: its name in the store, and the kind in its seal.
pub(crate) struct RecordType {
    pub name: &'static str,
    kind: RecordKind,
}

/// A directory's: its id, and the secret of its names.
pub(crate) const DIRECTORY: RecordType = RecordType { name: DIR_RECORD, kind: RecordKind::Directory };
/// The root's permissions.
pub(crate) const ROOT: RecordType = RecordType { name: ROOT_RECORD, kind: RecordKind::Root };
/// The record of sessions.
pub(crate) const SESSIONS: RecordType = RecordType { name: SESSIONS_RECORD, kind: RecordKind::Sessions };

/// Why a record does not open. `E`: why its content is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordFault<E> {
    #[error("it is missing")]
    Missing,
    #[error("something else has its name")]
    NotARecord,
    #[error("{0}")]
    Unreadable(stdio::Error),
    #[error("it is not base64url")]
    Text,
    #[error("{0}")]
    Seal(OpenError),
    #[error("{0}")]
    Content(E),
}

impl<E> From<stdio::Error> for RecordFault<E> {
    fn from(e: stdio::Error) -> Self {
        match e.raw_os_error() {
            Some(libc::ENOENT) => RecordFault::Missing,
            // A directory, or another entry that is neither link nor file.
            Some(libc::EISDIR | libc::EINVAL) => RecordFault::NotARecord,
            _ => RecordFault::Unreadable(e),
        }
    }
}

impl RecordType {
    /// Reads and opens the record in a directory. `context`: what its seal is bound to in addition.
    pub fn read<T, E>(
        &self,
        dir: &dyn BackendDir,
        ring: &KeyRing,
        context: &[u8],
        parse: impl FnOnce(&[u8]) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, RecordFault<E>> {
        self.open(&read_text(dir, OsStr::new(self.name))?, ring, context, parse)
    }

    /// Opens the text of a record.
    pub fn open<T, E>(
        &self,
        text: &[u8],
        ring: &KeyRing,
        context: &[u8],
        parse: impl FnOnce(&[u8]) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, RecordFault<E>> {
        let sealed = name::decode(text).ok_or(RecordFault::Text)?;
        let content = ring.open_record(self.kind, context, &sealed).map_err(RecordFault::Seal)?;
        parse(SecretBytes::new(content).expose()).map_err(RecordFault::Content)
    }

    /// The text of a record with this content.
    ///
    /// # Errors
    /// No randomness.
    pub fn seal(&self, ring: &KeyRing, context: &[u8], content: &[u8]) -> Result<String> {
        Ok(name::encode(&ring.outer().seal_record(self.kind, context, content)?))
    }

    /// Whether the record in a directory is sealed under the newest key.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn is_newest(&self, dir: &dyn BackendDir, ring: &KeyRing, context: &[u8]) -> stdio::Result<bool> {
        let sealed = name::decode(&read_text(dir, OsStr::new(self.name))?);
        let epoch = sealed.and_then(|sealed| ring.record_epoch(self.kind, context, &sealed));
        Ok(epoch == Some(ring.newest().1))
    }
}

/// Reads a record or companion.
pub(crate) fn read_text(dir: &dyn BackendDir, name: &OsStr) -> stdio::Result<Vec<u8>> {
    match dir.read_link(name) {
        Ok(text) => Ok(text.into_vec()),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            let file = dir.open_file(name, false)?;
            let mut text = vec![0; TEXT_MAX + 1];
            let n = file.read_at(0, &mut text)?;
            text.truncate(n);
            if n <= TEXT_MAX { Ok(text) } else { Err(stdio::ErrorKind::InvalidData.into()) }
        }
        Err(e) => Err(e),
    }
}

/// Writes a record or companion; fails if something of that name exists.
pub(crate) fn write_text(dir: &dyn BackendDir, name: &OsStr, text: &str) -> stdio::Result<()> {
    match dir.make_symlink(name, OsStr::new(text)) {
        Err(e) if is_unsupported(&e) => write_file(dir, name, text),
        other => other,
    }
}

/// Writes such a text as a regular file, durably, before anything refers to it.
pub(crate) fn write_file(dir: &dyn BackendDir, name: &OsStr, text: &str) -> stdio::Result<()> {
    let file = dir.create_file(name)?;
    let written = file.write_at(0, text.as_bytes()).and_then(|()| file.sync_data());
    if written.is_err() {
        remove_companion(dir, name); // an incomplete text must not stay
    }
    written
}

/// Removes a companion whose entry is gone. One that stays behind is harmless: `check` counts it.
pub(crate) fn remove_companion(dir: &dyn BackendDir, name: &OsStr) {
    if let Err(e) = dir.unlink(name)
        && !is_not_found(&e)
    {
        tracing::warn!(companion = %name.to_string_lossy(), error = %e, "a companion without an entry stays behind");
    }
}
