//! Makes the anchor of an existing vault: of a new one with its root alone, or after an anchor was lost. The store's
//! state is taken as the newest; nothing is known of earlier states.

use super::take::{Taken, Taker, damaged};
use crate::digests::digest_of_dataset;
use crate::error::io;
use crate::inode::StoreId;
use crate::names::{NameFault, Names};
use crate::root::shown_digest;
use crate::walk::{Failed, Met, Visit, walk};
use crate::{Kind, Result, Vault, VaultError};
use lamassu_anchor::row::Content;
use lamassu_anchor::table::{Space, Table};
use lamassu_anchor::{Anchor, AnchorError, Builder, ObjectId, Row, TokenKey, VaultRow};
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_store::BackendDir;
use lamassu_store::backend::Listed;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io as stdio;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Whether the anchor in a table says that a dataset lies in its vault.
///
/// # Errors
/// [`AnchorError::Damaged`]; those of the table.
pub fn is_dataset_of(table: &dyn Table, dataset: &VaultId) -> std::result::Result<bool, AnchorError> {
    let (id, mut found) = (digest_of_dataset(dataset), Ok(false));
    table.scan(Space::Objects, &[], &mut |_, row| {
        found = Row::decode(row).map(|row| match row.content {
            Content::Dir { record, .. } => record.is_current(id),
            _ => false,
        });
        if matches!(found, Ok(false)) { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    found
}

/// Which of these datasets lie in the vault, as the anchor in a table says: in one pass over its rows.
///
/// # Errors
/// As [`is_dataset_of`].
pub fn datasets_among(
    table: &dyn Table,
    datasets: &HashSet<VaultId>,
) -> std::result::Result<HashSet<VaultId>, AnchorError> {
    let of_digest: HashMap<_, _> = datasets.iter().map(|id| (digest_of_dataset(id).0, *id)).collect();
    let (mut all, mut done) = (HashSet::new(), Ok(()));
    table.scan(Space::Objects, &[], &mut |_, row| {
        let found = Row::decode(row).map(|row| match row.content {
            Content::Dir { record, .. } => record.digests(),
            _ => [None; 2],
        });
        match found {
            Ok(found) => all.extend(found.into_iter().flatten().filter_map(|digest| of_digest.get(&digest.0))),
            Err(error) => done = Err(error),
        }
        if done.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    done.map(|()| all)
}

/// Default degree of trees: 16 children.
pub const DEGREE_LOG2: u8 = 4;

/// The trees by which an anchor verifies files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewTrees {
    /// log2 of their degree, 1 to 8
    pub degree_log2: u8,
    /// whether files also have a root over their blocks
    pub blocks: bool,
}

impl Default for NewTrees {
    fn default() -> Self {
        NewTrees { degree_log2: DEGREE_LOG2, blocks: false }
    }
}

/// Receives the progress; may cancel.
pub trait RebuildProgress: Send + Sync {
    /// More objects, and bytes of files, were processed.
    fn advance(&self, objects: u64, bytes: u64);
    /// An object that does not open, by its path in the store: it is left out, with everything below it.
    fn damaged(&self, stored: &Path, error: &VaultError);
    /// Whether to end now.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// What an anchor was made from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rebuilt {
    /// Objects, the root among them.
    pub objects: u64,
    /// Names.
    pub entries: u64,
    /// Regular files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Datasets, which have anchors of their own.
    pub datasets: u64,
    /// Objects that do not open and were left out.
    pub damaged: u64,
}

/// Makes the anchor of an existing vault in an empty table, from what its store shows. The vault is open for writing
/// without an anchor, so that interrupted writes can be completed; nothing in it is in use. Each name, record and page
/// is opened; blocks are not read. The caller records header and history.
///
/// # Errors
/// [`VaultError::Refused`] for a vault that is open with an anchor, or if it was cancelled; [`VaultError::Invalid`] for
/// an invalid degree; [`VaultError::Damaged`] if the record of the root, or of sessions, does not open;
/// [`VaultError::Anchor`]: `table` is not empty, or fails. Then the table is not an anchor.
pub fn rebuild(
    vault: &Vault,
    header: &VaultHeader,
    table: Arc<dyn Table>,
    trees: NewTrees,
    progress: &dyn RebuildProgress,
) -> Result<(Anchor, Rebuilt)> {
    if vault.anchored.is_some() {
        return Err(VaultError::Refused("the vault is open with an anchor"));
    }
    if !(1..=8).contains(&trees.degree_log2) {
        return Err(VaultError::Invalid);
    }
    if !vault.options.read_only {
        vault.settle_all()?;
    }
    vault.verify_sessions()?;
    let row = VaultRow {
        suite: header.params().suite,
        domain: header.params().domain,
        degree_log2: trees.degree_log2,
        blocks: trees.blocks,
        root_permissions: super::take::is(shown_digest(&*vault.dirs.root().handle)?),
        ..VaultRow::new(header.id(), TokenKey::random()?)
    };
    let mut rebuild = Rebuild {
        vault,
        taker: Taker::new(vault, 1 << trees.degree_log2),
        builder: Builder::new(table, row)?,
        progress,
        linked: HashMap::new(),
        done: Rebuilt { objects: 1, ..Rebuilt::default() },
    };
    let root = rebuild.taker.root()?;
    walk(Met::first(vault.dirs.root().handle.clone(), PathBuf::new(), ObjectId::ROOT), &mut rebuild)?;
    if progress.is_cancelled() {
        return Err(VaultError::Refused("the anchor was not made: cancelled"));
    }
    if !vault.options.read_only {
        // Completed writes must be durable before the anchor says so.
        vault.sync_store()?;
    }
    // Completed writes belong to a session too.
    let session = vault.book.last().unwrap_or_default();
    Ok((rebuild.builder.finish(root, session)?, rebuild.done))
}

struct Rebuild<'a> {
    vault: &'a Vault,
    taker: Taker<'a>,
    builder: Builder,
    progress: &'a dyn RebuildProgress,
    /// Inodes with several names, some of which were not found yet.
    linked: HashMap<StoreId, (ObjectId, u64)>,
    done: Rebuilt,
}

impl Rebuild<'_> {
    fn left_out(&mut self, stored: &Path, error: &VaultError) {
        self.done.damaged += 1;
        self.progress.damaged(stored, error);
    }

    fn take(
        &mut self,
        dir: &Arc<dyn BackendDir>,
        object: ObjectId,
        name: &OsStr,
        stored: &Path,
    ) -> Result<Option<ObjectId>> {
        let place = self.builder.place(object, name.as_encoded_bytes());
        let st = dir.stat_entry(name).map_err(io("stat"))?;
        let id = StoreId::from(&st);
        if st.kind != Kind::Dir
            && let Some((known, left)) = self.linked.get_mut(&id)
        {
            self.builder.link(place, *known)?;
            self.done.entries += 1;
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.linked.remove(&id);
            }
            return Ok(None);
        }
        let Taken { st, row, dir } = self.taker.entry(dir, name, stored)?;
        self.count(&row, dir.is_some());
        let made = self.builder.add(place, row)?;
        if st.kind != Kind::Dir && st.nlink > 1 {
            self.linked.insert(StoreId::from(&st), (made, st.nlink - 1));
        }
        Ok(dir.map(|_| made))
    }

    fn count(&mut self, row: &Row, is_entered: bool) {
        let bytes = row.file().map_or(0, |file| file.size);
        self.done.objects += 1;
        self.done.entries += 1;
        self.done.files += u64::from(row.file().is_some());
        self.done.bytes += bytes;
        self.done.datasets += u64::from(matches!(row.content, Content::Dir { .. }) && !is_entered);
        self.progress.advance(1, bytes);
    }
}

impl Visit for Rebuild<'_> {
    type Passed = ObjectId;
    type Here = Names;
    type Error = VaultError;

    fn enter(&mut self, at: &Met<ObjectId>, dir: &Arc<dyn BackendDir>) -> Result<Option<Names>> {
        match self.vault.read_names(&**dir) {
            Ok(names) => Ok(Some(names)),
            Err(_) => {
                self.left_out(&at.stored, &damaged("directory record", &at.stored));
                Ok(None)
            }
        }
    }

    fn entry(
        &mut self,
        at: &Met<ObjectId>,
        dir: &Arc<dyn BackendDir>,
        names: &mut Names,
        entry: &Listed,
    ) -> Result<Option<ObjectId>> {
        if !crate::walk::is_entry(self.vault.name_mode, &entry.name) || self.is_stopped() {
            return Ok(None);
        }
        let stored = at.stored.join(&entry.name);
        match names.open(&**dir, &entry.name) {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(None),
            Err(fault) => {
                let error = match fault {
                    NameFault::Unreadable(error) => io("read a companion")(error),
                    _ => damaged("name", &stored),
                };
                self.left_out(&stored, &error);
                return Ok(None);
            }
        }
        match self.take(dir, at.passed, &entry.name, &stored) {
            Err(VaultError::Anchor(error)) => Err(error.into()),
            Err(error) => {
                self.left_out(&stored, &error);
                Ok(None)
            }
            taken => taken,
        }
    }

    fn failed(&mut self, at: &Met<ObjectId>, what: Failed, error: stdio::Error) -> Result<()> {
        let op = if what == Failed::Open { "open a directory" } else { "list a directory" };
        self.left_out(&at.stored, &io(op)(error));
        Ok(())
    }

    fn is_stopped(&self) -> bool {
        self.progress.is_cancelled()
    }
}
