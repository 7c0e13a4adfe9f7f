//! The state as one file of a server's directory.

use super::{AGAIN_AFTER, FILE, FREE_WITHIN, State};
use crate::{Result, ServerError, reserve};
use std::path::{Path, PathBuf};
use std::time::Instant;

impl State {
    /// Makes the state of a new server.
    ///
    /// # Errors
    /// [`ServerError::Database`].
    pub fn make(dir: &Path) -> Result<State> {
        State::open_file(dir, dir.join(FILE))
    }

    /// Opens the state in a server's directory.
    ///
    /// # Errors
    /// [`ServerError::Running`], [`ServerError::Damaged`], [`ServerError::Database`].
    pub fn open(dir: &Path) -> Result<State> {
        State::open_file(dir, State::file_in(dir)?)
    }

    /// The file of the state, which is there. It is not opened.
    ///
    /// # Errors
    /// [`ServerError::Damaged`].
    pub fn file_in(dir: &Path) -> Result<PathBuf> {
        let path = dir.join(FILE);
        // A new file would know no host and no lease, and nothing would report that.
        match path.metadata() {
            Ok(st) if st.len() > 0 => Ok(path),
            _ if path.with_extension("redb.moved").exists() => {
                Err(ServerError::Damaged { path, what: "it was moved into etcd, and server.toml does not name that" })
            }
            _ => Err(ServerError::Damaged { path, what: "it is gone, or empty" }),
        }
    }

    /// The same for a server: waits while an administrator's command, or a server that is ending, has it open.
    ///
    /// # Errors
    /// As [`State::open`].
    pub fn open_when_free(dir: &Path) -> Result<State> {
        let until = Instant::now() + FREE_WITHIN;
        loop {
            match State::open(dir) {
                Err(ServerError::Running { .. }) if Instant::now() < until => std::thread::sleep(AGAIN_AFTER),
                opened => return opened,
            }
        }
    }

    fn open_file(dir: &Path, path: PathBuf) -> Result<State> {
        let database = reserve::database(dir, &path)?;
        State::of(path, database, None, &|_| Ok(()))
    }
}
