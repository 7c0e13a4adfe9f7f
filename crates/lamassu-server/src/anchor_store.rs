//! The stores of anchors' tables: files of the server's directory ([`Files`]), or etcd ([`crate::etcd::anchors`]).

use crate::{Result, ServerError};
use lamassu_anchor::AnchorError;
use lamassu_anchor::table::{DiskTable, Readers, Table};
use lamassu_format::header::VaultId;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The directory of tables in the server's directory.
pub const DIR: &str = "anchors";
/// Suffix of a file while its anchor is being received.
const NEW: &str = "new";
/// Suffix of a retired anchor's file. There is a number before it from the second one of a vault on.
const AWAY: &str = "given-up";

/// Bytes that stay free on the server's disk for the state. An anchor does not grow into them.
pub const RESERVE: u64 = 64 << 20;

/// Bytes of each file in memory, of what is read of it and of what is written: thousands may be open.
const CACHE_BYTES: usize = 512 << 10;

/// Tables by vault. A vault has at most one table, and may have retired ones.
pub trait AnchorStore: Send + Sync {
    /// The vaults that have a table.
    ///
    /// # Errors
    /// [`ServerError::File`], [`ServerError::Etcd`].
    fn all(&self) -> Result<Vec<VaultId>>;

    /// Whether a vault has a table.
    ///
    /// # Errors
    /// As for [`AnchorStore::all`].
    fn has(&self, id: &VaultId) -> Result<bool>;

    /// Opens a vault's table.
    ///
    /// # Errors
    /// [`AnchorError::Missing`], [`AnchorError::Locked`]; those of the table.
    fn open(&self, id: &VaultId) -> std::result::Result<Arc<dyn Table>, AnchorError>;

    /// A new table, which no vault has until it is installed.
    ///
    /// # Errors
    /// Those of the table.
    fn begin(&self, id: &VaultId) -> std::result::Result<Box<dyn NewAnchor>, AnchorError>;

    /// Retires a vault's table: it is kept, beside those that were retired before, but no longer found. False: it has
    /// none.
    ///
    /// # Errors
    /// As for [`AnchorStore::all`].
    fn put_away(&self, id: &VaultId) -> Result<bool>;

    /// Removes what an earlier server has left of tables that were being received or replaced. That may take long, and
    /// concerns no table that is here: hosts are served meanwhile.
    ///
    /// # Errors
    /// As for [`AnchorStore::all`]; the next call removes the rest.
    fn remove_left(&self) -> Result<()> {
        Ok(())
    }

    /// Free space in bytes, as far as that is known.
    fn free(&self) -> u64;

    /// The name of a vault's table in messages.
    fn name(&self, id: &VaultId) -> String;
}

/// A table that is being received. Dropping it before it is installed removes it.
pub trait NewAnchor: Send {
    /// The table.
    fn table(&self) -> Arc<dyn Table>;

    /// Installs it durably in place of the present table. No reference to the table may be left.
    ///
    /// # Errors
    /// [`ServerError::File`], [`ServerError::Etcd`].
    fn install(self: Box<Self>) -> Result<()>;
}

/// Tables in files. Each file is open in one process only.
pub struct Files {
    dir: PathBuf,
    /// No server runs: nothing is created or changed.
    is_read_only: bool,
}

impl Files {
    /// Checks that the tables of a server's directory can be listed. A start makes a missing directory of them.
    ///
    /// # Errors
    /// [`ServerError::File`].
    pub fn check_place(dir: &Path) -> Result<()> {
        let dir = dir.join(DIR);
        match fs::read_dir(&dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            listed => listed.map(drop).map_err(ServerError::file("list", &dir)),
        }
    }

    /// The tables in a server's directory. Tables whose transfer was interrupted are removed.
    ///
    /// # Errors
    /// [`ServerError::File`].
    pub fn open(dir: &Path) -> Result<Files> {
        let dir = dir.join(DIR);
        fs::create_dir_all(&dir).map_err(ServerError::file("make", &dir))?;
        for entry in fs::read_dir(&dir).map_err(ServerError::file("list", &dir))? {
            let path = entry.map_err(ServerError::file("list", &dir))?.path();
            if path.extension().is_some_and(|end| end == NEW) {
                fs::remove_file(&path).map_err(ServerError::file("remove", &path))?;
            }
        }
        Ok(Files { dir, is_read_only: false })
    }

    /// The same, read-only, for use while no server runs.
    pub fn to_look_at(dir: &Path) -> Files {
        Files { dir: dir.join(DIR), is_read_only: true }
    }

    fn file(&self, id: &VaultId) -> PathBuf {
        file_of(&self.dir, id)
    }

    /// A name under which no anchor of a vault was retired yet. No other process retires files here, and those of one
    /// vault are retired one after the other.
    fn free_away(&self, id: &VaultId) -> PathBuf {
        let (mut away, mut number) = (self.dir.join(format!("{id}.{AWAY}")), 1_u64);
        while Files::is_there(&away) {
            number += 1;
            away = self.dir.join(format!("{id}-{number}.{AWAY}"));
        }
        away
    }

    fn is_there(path: &Path) -> bool {
        path.symlink_metadata().is_ok()
    }
}

impl AnchorStore for Files {
    fn all(&self) -> Result<Vec<VaultId>> {
        let mut all = Vec::new();
        let entries = match fs::read_dir(&self.dir) {
            // This server has never run. The state knows which tables should be here.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(all),
            entries => entries.map_err(ServerError::file("list", &self.dir))?,
        };
        for entry in entries {
            let name = entry.map_err(ServerError::file("list", &self.dir))?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".anchor"));
            all.extend(id.and_then(VaultId::of_hex));
        }
        Ok(all)
    }

    fn has(&self, id: &VaultId) -> Result<bool> {
        Ok(Files::is_there(&self.file(id)))
    }

    fn open(&self, id: &VaultId) -> std::result::Result<Arc<dyn Table>, AnchorError> {
        let file = self.file(id);
        Ok(Arc::new(match self.is_read_only {
            true => DiskTable::open_read_only(&file, Readers::InsteadOfWriter)?,
            false => DiskTable::open_caching(&file, CACHE_BYTES)?.keeping_free(RESERVE).staying_loose(),
        }))
    }

    fn begin(&self, id: &VaultId) -> std::result::Result<Box<dyn NewAnchor>, AnchorError> {
        static BEGUN: AtomicU64 = AtomicU64::new(0);
        let number = BEGUN.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(format!("{id}-{number}.{NEW}"));
        let table = Arc::new(DiskTable::create_caching(&path, CACHE_BYTES)?.keeping_free(RESERVE));
        Ok(Box::new(NewFile { table, path: NewPath(path), place: self.file(id) }))
    }

    fn put_away(&self, id: &VaultId) -> Result<bool> {
        let file = self.file(id);
        match fs::rename(&file, self.free_away(id)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            done => {
                done.map_err(ServerError::file("rename", &file))?;
                sync(&self.dir).map(|()| true)
            }
        }
    }

    fn free(&self) -> u64 {
        rustix::fs::statvfs(&self.dir).map_or(u64::MAX, |st| st.f_bavail.saturating_mul(st.f_frsize))
    }

    fn name(&self, id: &VaultId) -> String {
        self.file(id).display().to_string()
    }
}

struct NewFile {
    table: Arc<DiskTable>,
    path: NewPath,
    place: PathBuf,
}

/// Removes the file when dropped, if it is still there.
struct NewPath(PathBuf);

impl Drop for NewPath {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl NewAnchor for NewFile {
    fn table(&self) -> Arc<dyn Table> {
        self.table.clone()
    }

    fn install(self: Box<Self>) -> Result<()> {
        let NewFile { table, path, place } = *self;
        // The table has to be closed before its file is moved.
        drop(table);
        fs::rename(&path.0, &place).map_err(ServerError::file("put in place", &place))?;
        place.parent().map_or(Ok(()), sync)
    }
}

/// How long after a failure what is left is looked at again.
const REMOVED_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// Removes what an earlier server has left, on a thread of its own. It ends with the right to serve.
pub fn remove_left(anchors: Arc<dyn AnchorStore>) {
    let removes = move || {
        loop {
            match anchors.remove_left() {
                Ok(()) | Err(ServerError::NotLeading { .. }) => return,
                Err(error) => tracing::warn!(%error, "rows that belong to no anchor could not be removed yet"),
            }
            std::thread::sleep(REMOVED_AGAIN_AFTER);
        }
    };
    let _ = std::thread::Builder::new().name("left".into()).spawn(removes);
}

pub(crate) fn sync(dir: &Path) -> Result<()> {
    fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(ServerError::file("sync", dir))
}

/// The file of a vault's anchor in the directory of anchors.
pub fn file_of(dir: &Path, id: &VaultId) -> PathBuf {
    dir.join(format!("{id}.anchor"))
}
