//! Errors of a header's file, by whose fault they are.

use super::shown;
use crate::witness::WitnessError;
use lamassu_format::header::HeaderError;
use std::io;
use std::path::{Path, PathBuf};

/// A header file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The user's: nothing there.
    #[error("{path:?} does not exist: not a vault, or not a zone file")]
    Missing {
        /// the file
        path: PathBuf,
    },
    /// The user's: there is one already, and it is never overwritten.
    #[error("{path:?} exists already; nothing was changed")]
    Exists {
        /// the file
        path: PathBuf,
    },
    /// A directory, device or fifo in place of the file.
    #[error("{path:?} is no regular file")]
    NotAFile {
        /// the file
        path: PathBuf,
    },
    /// Another program is changing the header right now.
    #[error("another program is changing {path:?}; try again when it is done")]
    Busy {
        /// the file
        path: PathBuf,
    },
    /// The file is not a header.
    #[error("{path:?}: {source}")]
    Header {
        /// the file
        path: PathBuf,
        /// why
        source: HeaderError,
    },
    /// The witness of the newest header refuses, or cannot record a newer one.
    #[error("{path:?}: {source}")]
    Witness {
        /// the file
        path: PathBuf,
        /// of the witness
        source: WitnessError,
    },
    /// The store failed, or denies read access.
    #[error("cannot {op} {path:?}: {source}")]
    Read {
        /// what was tried
        op: &'static str,
        /// the file
        path: PathBuf,
        /// why
        source: io::Error,
    },
    /// The store failed, is full, or denies write access.
    #[error("cannot {op} {path:?}: {source}")]
    Write {
        /// what was tried
        op: &'static str,
        /// the file
        path: PathBuf,
        /// why
        source: io::Error,
    },
}

pub(super) fn reading(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_path_buf();
    move |source| FileError::Read { op, path: shown(&path), source }
}

pub(super) fn writing(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_path_buf();
    move |source| FileError::Write { op, path: shown(&path), source }
}
