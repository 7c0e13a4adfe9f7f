//! The rows of anchors in etcd. An anchor replaces another by a change of one key: the vault's generation.

use super::{Cluster, Op, behind};
use crate::anchor_store::{AnchorStore, NewAnchor};
use crate::{Result, ServerError};
use data_encoding::HEXLOWER;
use lamassu_anchor::AnchorError;
use lamassu_anchor::table::{Change, Space, Table, Visit, VisitRow};
use lamassu_format::header::VaultId;
use parking_lot::{Mutex, RwLock};
use ring::rand::SecureRandom;
use std::collections::HashMap;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;

/// The name of the list of anchors in `last/NAME`.
const LIST: &str = "anchors";
const ANCHORS: &str = "anchors/";
const AWAY: &str = "away/";
const NEW: &str = "new/";
const ROWS: &str = "rows/";
/// Where the numbers of transactions are, by what they are on.
const LAST: &str = "last/";

/// By generation, while somebody holds it: how often its table was opened.
type Openings = Arc<Mutex<HashMap<String, Arc<Opening>>>>;

/// The number of the newest opening of a table. Only the newest one reads and commits. The lock is held for writing by
/// a commit, which a journal carries out in pieces, and by an opening: a table that was opened before never commits
/// after that, whatever its user believes.
type Opening = RwLock<u64>;

/// The anchors of a server in a cluster.
pub struct EtcdAnchors {
    cluster: Arc<Cluster>,
    openings: Openings,
    /// Generations that belong to no anchor, and that no former leader can make one of any more.
    left: Mutex<Vec<String>>,
}

impl EtcdAnchors {
    /// The anchors in a cluster; for the leader. Rows that were being put under an earlier leader stay until
    /// [`AnchorStore::remove_left`]: hosts wait for the leader, and there may be any number of rows.
    ///
    /// # Errors
    /// [`ServerError::Etcd`], [`ServerError::NotLeading`].
    pub fn open(cluster: &Arc<Cluster>) -> Result<EtcdAnchors> {
        let mut left = Vec::new();
        cluster.visit(&cluster.key(NEW), |generation, _| {
            left.push(String::from_utf8_lossy(generation).into_owned());
            Ok(())
        })?;
        Ok(EtcdAnchors { cluster: cluster.clone(), openings: Openings::default(), left: Mutex::new(left) })
    }

    /// The same where there are none: rows that an interrupted move left are removed.
    ///
    /// # Errors
    /// As [`EtcdAnchors::open`].
    pub fn open_empty(cluster: &Arc<Cluster>) -> Result<EtcdAnchors> {
        for all in [ANCHORS, AWAY, NEW, ROWS] {
            cluster.transact(LIST, &[Op::DeleteAll(cluster.key(all))])?;
        }
        let (cluster, openings, left) = (cluster.clone(), Openings::default(), Mutex::default());
        Ok(EtcdAnchors { cluster, openings, left })
    }

    fn hold(&self, generation: String) -> Held {
        let opening = self.openings.lock().entry(generation.clone()).or_default().clone();
        Held { cluster: self.cluster.clone(), openings: self.openings.clone(), generation, opening }
    }

    /// For tests: how many generations are held.
    #[doc(hidden)]
    pub fn held(&self) -> usize {
        self.openings.lock().len()
    }

    /// A name under which no anchor of a vault was retired yet.
    fn free_away(&self, id: &str) -> Result<Vec<u8>> {
        let mut number = 1;
        loop {
            let key = self.cluster.key(&away(id, number));
            if self.cluster.get(&key)?.is_none() {
                return Ok(key);
            }
            number += 1;
        }
    }

    fn generation(&self, at: &str, id: &VaultId) -> Result<Option<String>> {
        let found = self.cluster.get(&self.cluster.key(&format!("{at}{id}")))?;
        Ok(found.map(|generation| String::from_utf8_lossy(&generation).into_owned()))
    }
}

/// A generation that is used. What is known of it here goes with its last user.
struct Held {
    cluster: Arc<Cluster>,
    openings: Openings,
    generation: String,
    opening: Arc<Opening>,
}

impl Held {
    /// Opens the table once more, and carries out what was committed to it before. Returns the number of this opening.
    fn open(&self) -> Result<u64> {
        let mut newest = self.opening.write();
        *newest += 1;
        self.cluster.recover(&self.generation)?;
        Ok(*newest)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        {
            // Of the last one that is used, two are left: this one's and the map's. Others are had under this lock.
            let mut openings = self.openings.lock();
            let is_last = Arc::strong_count(&self.opening) == 2;
            openings.retain(|generation, _| !(is_last && *generation == self.generation));
        }
        self.cluster.forget_last(&self.generation);
    }
}

/// The name of a retired anchor: with a number from the second one of a vault on, as with files.
fn away(id: &str, number: u64) -> String {
    if number == 1 { format!("{AWAY}{id}") } else { format!("{AWAY}{id}-{number}") }
}

/// A number that is in use nowhere.
///
/// # Errors
/// [`ServerError::NoRandom`].
pub fn fresh_number() -> Result<String> {
    let mut number = [0; 16];
    ring::rand::SystemRandom::new().fill(&mut number).map_err(|_| ServerError::NoRandom)?;
    Ok(HEXLOWER.encode(&number))
}

/// Removes rows that belong to no anchor.
fn remove(cluster: &Cluster, generation: &str) -> Result<()> {
    // What was tried on them is not carried out after that.
    cluster.end_tries(generation)?;
    // In batches: deleting that many rows at once would block etcd for seconds.
    let rows = cluster.key(&format!("{ROWS}{generation}/"));
    loop {
        let page = cluster.page(&rows, &behind(&rows), 0)?;
        cluster.commit_in_pieces(LIST, page.pairs.into_iter().map(|(key, _)| Op::Delete(key)).collect())?;
        if !page.has_more {
            break;
        }
    }
    cluster.transact(LIST, &[Op::DeleteAll(cluster.journal(generation))])?;
    let ops = [NEW, LAST].map(|at| Op::Delete(cluster.key(&format!("{at}{generation}"))));
    cluster.transact(LIST, &ops)?;
    cluster.forget_last(generation);
    Ok(())
}

impl AnchorStore for EtcdAnchors {
    fn all(&self) -> Result<Vec<VaultId>> {
        let mut all = Vec::new();
        self.cluster.visit(&self.cluster.key(ANCHORS), |id, _| {
            all.extend(VaultId::of_hex(id));
            Ok(())
        })?;
        Ok(all)
    }

    fn has(&self, id: &VaultId) -> Result<bool> {
        Ok(self.generation(ANCHORS, id)?.is_some())
    }

    fn open(&self, id: &VaultId) -> std::result::Result<Arc<dyn Table>, AnchorError> {
        let missing = || AnchorError::Missing { path: self.name(id).into() };
        let generation = self.generation(ANCHORS, id).map_err(|error| in_anchor("find", error))?;
        let generation = generation.ok_or_else(missing)?;
        let held = self.hold(generation);
        let number = held.open().map_err(|error| in_anchor("recover", error))?;
        Ok(Arc::new(EtcdTable { held, is_new: false, number }))
    }

    fn begin(&self, id: &VaultId) -> std::result::Result<Box<dyn NewAnchor>, AnchorError> {
        let generation = fresh_number().map_err(|error| in_anchor("make", error))?;
        // With a number of the last transaction: the first one compares that, which is there only as long as the rows
        // may be used. Without it the first one could be carried out when the rows were removed.
        let is_new = [NEW, LAST].map(|at| Op::Put(self.cluster.key(&format!("{at}{generation}")), Vec::new()));
        self.cluster.transact(LIST, &is_new).map_err(|error| in_anchor("make", error))?;
        let (cluster, openings, opening) = (self.cluster.clone(), self.openings.clone(), Arc::default());
        let held = Held { cluster, openings, generation: generation.clone(), opening };
        let table = Arc::new(EtcdTable { held, is_new: true, number: 0 });
        Ok(Box::new(NewRows { cluster: self.cluster.clone(), generation: Some(generation), id: *id, table }))
    }

    fn put_away(&self, id: &VaultId) -> Result<bool> {
        let Some(generation) = self.generation(ANCHORS, id)? else { return Ok(false) };
        let id = id.to_string();
        // An interrupted commit belongs to the anchor.
        self.hold(generation.clone()).open()?;
        let mut ops = vec![Op::Delete(self.cluster.key(&format!("{ANCHORS}{id}")))];
        ops.push(Op::Put(self.free_away(&id)?, generation.into_bytes()));
        self.cluster.transact(LIST, &ops).map(|()| true)
    }

    fn remove_left(&self) -> Result<()> {
        let left = std::mem::take(&mut *self.left.lock());
        let (mut failed, mut done) = (Vec::new(), Ok(()));
        for generation in left {
            // One that cannot be removed does not keep the others.
            if let Err(error) = remove(&self.cluster, &generation) {
                failed.push(generation);
                done = Err(error);
            }
        }
        *self.left.lock() = failed;
        done
    }

    /// The cluster's quota cannot be read.
    fn free(&self) -> u64 {
        u64::MAX
    }

    fn name(&self, id: &VaultId) -> String {
        format!("{} ({ANCHORS}{id})", self.cluster.name())
    }
}

struct NewRows {
    cluster: Arc<Cluster>,
    /// `None`: it is installed, or may be.
    generation: Option<String>,
    id: VaultId,
    table: Arc<EtcdTable>,
}

impl NewAnchor for NewRows {
    fn table(&self) -> Arc<dyn Table> {
        self.table.clone()
    }

    fn install(mut self: Box<Self>) -> Result<()> {
        let cluster = self.cluster.clone();
        let place = cluster.key(&format!("{ANCHORS}{}", self.id));
        let old = cluster.get(&place)?.map(|old| String::from_utf8_lossy(&old).into_owned());
        // From here on the rows are not removed: even if this fails, they may be the anchor. If they are not, their key
        // under [`NEW`] is there, and the next leader removes them.
        let Some(generation) = self.generation.take() else { return Ok(()) };
        let mut ops =
            vec![Op::Delete(cluster.key(&format!("{NEW}{generation}"))), Op::Put(place, generation.into_bytes())];
        ops.extend(old.iter().map(|old| Op::Put(cluster.key(&format!("{NEW}{old}")), Vec::new())));
        cluster.transact(LIST, &ops)?;
        old.map_or(Ok(()), |old| remove(&cluster, &old))
    }
}

impl Drop for NewRows {
    fn drop(&mut self) {
        if let Some(generation) = self.generation.take() {
            // What remains is removed by the next leader.
            let _ = remove(&self.cluster, &generation);
        }
    }
}

/// The table of an anchor.
struct EtcdTable {
    held: Held,
    /// Only the put that creates it uses it yet, so its commits need not be atomic.
    is_new: bool,
    /// The number of this opening.
    number: u64,
}

impl EtcdTable {
    /// Fails if the table was opened again since: what this one would do is based on what may have changed.
    fn check(&self, newest: u64) -> Result<()> {
        match self.number == newest {
            true => Ok(()),
            false => Err(self.held.cluster.failed("this anchor was opened again, since a commit was in doubt")),
        }
    }

    fn key(&self, space: Space, key: &[u8]) -> Vec<u8> {
        let number = Space::ALL.iter().position(|one| *one == space).unwrap_or_default();
        let mut all = self.held.cluster.key(&format!("{ROWS}{}/{number}", self.held.generation));
        all.extend(key);
        all
    }

    /// Visits rows whose keys have this prefix. `revision`: 0, or the revision of an earlier part of the same visit.
    /// Returns whether the visit was stopped, and its revision.
    fn visit(
        &self,
        space: Space,
        prefix: &[u8],
        revision: i64,
        visit: &mut Visit<'_>,
    ) -> Result<(ControlFlow<()>, i64)> {
        let skipped = self.key(space, &[]).len();
        let (mut from, mut revision) = (self.key(space, prefix), revision);
        let to = behind(&from);
        loop {
            let page = {
                // The first page must not fall into a commit. Later pages have the same revision.
                let whole = (revision == 0).then(|| self.held.opening.read());
                whole.as_ref().map_or(Ok(()), |newest| self.check(**newest))?;
                self.held.cluster.page(&from, &to, revision)?
            };
            revision = page.revision;
            for (key, value) in page.pairs {
                if visit(key.get(skipped..).unwrap_or_default(), &value).is_break() {
                    return Ok((ControlFlow::Break(()), revision));
                }
                from = key;
            }
            if !page.has_more {
                return Ok((ControlFlow::Continue(()), revision));
            }
            from.push(0);
        }
    }
}

impl Table for EtcdTable {
    fn get(&self, space: Space, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, AnchorError> {
        let whole = self.held.opening.read();
        self.check(*whole)
            .and_then(|()| self.held.cluster.get(&self.key(space, key)))
            .map_err(|error| in_anchor("read", error))
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> std::result::Result<(), AnchorError> {
        self.visit(space, prefix, 0, visit).map(drop).map_err(|error| in_anchor("read", error))
    }

    fn visit_spaces(&self, spaces: &[Space], visit: &mut VisitRow<'_>) -> std::result::Result<(), AnchorError> {
        let mut revision = 0;
        for space in spaces.iter().copied() {
            let visited = self.visit(space, &[], revision, &mut |key, value| visit(space, key, value));
            let (done, of) = visited.map_err(|error| in_anchor("read", error))?;
            if done.is_break() {
                break;
            }
            revision = of;
        }
        Ok(())
    }

    fn may_be_in_doubt(&self) -> bool {
        true
    }

    fn commit(&self, changes: &[Change]) -> std::result::Result<(), AnchorError> {
        let alone = self.held.opening.write();
        self.check(*alone).map_err(|error| in_anchor("commit to", error))?;
        let op = |Change { space, key, value }: &Change| match value {
            Some(value) => Op::Put(self.key(*space, key), value.clone()),
            None => Op::Delete(self.key(*space, key)),
        };
        let ops = changes.iter().map(op).collect();
        // Nothing of this generation is read or opened meanwhile.
        let done = match self.is_new {
            true => self.held.cluster.commit_in_pieces(&self.held.generation, ops),
            false => self.held.cluster.commit(&self.held.generation, ops),
        };
        done.map_err(|error| in_anchor("commit to", error))
    }
}

fn in_anchor(op: &'static str, error: ServerError) -> AnchorError {
    let path = match &error {
        ServerError::Etcd { name, .. } | ServerError::NotLeading { name } => name.into(),
        _ => "in etcd".into(),
    };
    AnchorError::Io { op, path, source: io::Error::other(error.to_string()) }
}
