//! Opens state and anchors in etcd, and moves them there.

use super::{Office, Origin, Waits};
use crate::anchor_store::{self, AnchorStore, Files};
use crate::authority::{self, Authority};
use crate::config::{self, Config};
use crate::etcd::Cluster;
use crate::etcd::anchors::{self, EtcdAnchors};
use crate::etcd::config::EtcdConfig;
use crate::etcd::lead::Lead;
use crate::state::{self, State};
use crate::{Result, ServerError, dir};
use data_encoding::HEXLOWER;
use lamassu_anchor::table::Change;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Rows of an anchor that are moved at a time.
const AT_ONCE: usize = 5000;
/// Suffix of files whose content has moved to etcd.
const MOVED: &str = "moved";
/// Time before etcd is tried again when it does not answer.
const CONNECTS_AGAIN: Duration = Duration::from_secs(1);
/// The file that records a move that is under way.
const MOVE: &str = "to-etcd";

/// Locks the directory against other processes, while the file is open.
fn lock(dir: &Path) -> Result<fs::File> {
    use rustix::fs::{FlockOperation, flock};
    let lock = fs::File::open(dir).map_err(ServerError::file("open", dir))?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| ServerError::Running { dir: dir.to_owned() })?;
    Ok(lock)
}

/// Opens state and anchors, as [`Origin::open`] does.
///
/// # Errors
/// As for that.
pub fn open(
    dir: &Path,
    (config, etcd): (&Config, &EtcdConfig),
    authority: &str,
    waits: &Waits<'_>,
) -> Result<Option<Origin>> {
    let lock = match waits {
        Waits::Until { .. } => lock_when_free(dir)?,
        Waits::Not => match lock(dir) {
            Err(ServerError::Running { .. }) => return Err(stands_by(dir, etcd)?),
            lock => lock?,
        },
    };
    is_moved(dir, etcd)?;
    let connect = || {
        let cluster = Cluster::connect(dir, etcd)?;
        cluster.check_authority(authority).map(|()| cluster)
    };
    let (address, seconds) = (config.reached_at(), etcd.leader_seconds);
    let cluster = loop {
        match (connect(), waits) {
            // etcd may be starting as well.
            (Err(ServerError::Etcd { name, detail }), Waits::Until { is_over, .. }) => {
                tracing::warn!(detail, "standing by: {name}");
                if is_over() {
                    return Ok(None);
                }
                std::thread::sleep(CONNECTS_AGAIN);
            }
            (connected, _) => break connected?,
        }
    };
    let lead = match waits {
        Waits::Until { is_over, lost } => {
            let Some(lead) = Lead::take(&cluster, (&address, seconds), lost.clone(), is_over)? else {
                return Ok(None);
            };
            lead
        }
        Waits::Not => lead_now(&cluster, &address, seconds)?,
    };
    let state = cluster.open_state()?;
    state.keep_audit(config.audit_kept());
    let anchors = Arc::new(EtcdAnchors::open(&cluster)?);
    let office = Arc::new(Office::of(lead, lock));
    Ok(Some(Origin { state: Arc::new(state), anchors, office, reserve: None }))
}

/// Checks that a directory has no state of its own.
///
/// # Errors
/// [`ServerError::NotMoved`].
pub fn is_moved(dir: &Path, etcd: &EtcdConfig) -> Result<()> {
    match dir.join(state::FILE).symlink_metadata() {
        Ok(_) => Err(ServerError::NotMoved { name: etcd.name(), dir: dir.to_owned() }),
        Err(_) => Ok(()),
    }
}

/// The same for a server: waits while an administrator's command, or a server that is ending, has the lock.
fn lock_when_free(dir: &Path) -> Result<fs::File> {
    let until = Instant::now() + state::FREE_WITHIN;
    loop {
        match lock(dir) {
            Err(ServerError::Running { .. }) if Instant::now() < until => std::thread::sleep(state::AGAIN_AFTER),
            locked => return locked,
        }
    }
}

/// Why a command fails if a server runs that does not answer.
fn stands_by(dir: &Path, etcd: &EtcdConfig) -> Result<ServerError> {
    let cluster = Cluster::connect(dir, etcd)?;
    Ok(match cluster.leader()? {
        Some(leader) => elsewhere(&cluster, Some(leader)),
        None => ServerError::Running { dir: dir.to_owned() },
    })
}

fn elsewhere(cluster: &Cluster, leader: Option<String>) -> ServerError {
    let leader = leader.map_or("try again".into(), |leader| format!("{leader} does, ask there"));
    ServerError::Elsewhere { name: cluster.name().to_owned(), leader }
}

/// Leads for a command, if there is no leader.
fn lead_now(cluster: &Arc<Cluster>, address: &str, seconds: u64) -> Result<Arc<Lead>> {
    let elsewhere = |leader| elsewhere(cluster, leader);
    let leader = cluster.leader()?;
    if leader.is_some() {
        return Err(elsewhere(leader));
    }
    // One attempt only: the first to come leads.
    let tried = std::cell::Cell::new(false);
    let (lost, _) = tokio::sync::mpsc::unbounded_channel();
    let lead = Lead::take(cluster, (address, seconds), lost, || tried.replace(true))?;
    match lead {
        Some(lead) => Ok(lead),
        None => Err(elsewhere(cluster.leader()?)),
    }
}

/// The result of a move.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    /// how many anchors
    pub anchors: usize,
}

/// Moves the state and the anchors of a server into the cluster that its configuration names. The server must not be
/// running, and the cluster must have no state under this prefix. The directory keeps them until the end; an
/// interrupted move starts again.
///
/// # Errors
/// [`ServerError::Config`], [`ServerError::Running`], [`ServerError::FullEtcd`]; those of both.
pub fn to_etcd(dir: &Path) -> Result<Moved> {
    dir::check_dir(dir)?;
    let config = Config::read(dir)?;
    let etcd = config.etcd.as_ref().ok_or_else(|| ServerError::Config {
        path: dir.join(config::FILE),
        detail: "it has no table [etcd] that says where to".into(),
    })?;
    let _lock = lock(dir)?;
    let state = State::open(dir)?;
    let number = move_number(dir)?;
    let authority = HEXLOWER.encode(&Authority::read(dir)?.digest());
    let cluster = Cluster::connect(dir, etcd)?;
    let lead = lead_now(&cluster, &config.reached_at(), etcd.leader_seconds)?;
    // Checked as the leader: no other process writes a state meanwhile.
    if cluster.has_state()? {
        // Interrupted after its last transaction.
        let is_own = cluster.was_moved_by(&number)?;
        drop(state);
        return match is_own {
            true => {
                let anchors = Files::to_look_at(dir).all()?.len();
                put_files_away(dir)?;
                lead.give_up();
                Ok(Moved { anchors })
            }
            false => Err(ServerError::FullEtcd { name: etcd.name() }),
        };
    }
    let (files, anchors) = (Files::to_look_at(dir), EtcdAnchors::open_empty(&cluster)?);
    let mut moved = Moved { anchors: 0 };
    for id in files.all()? {
        let (from, new) = (files.open(&id)?, anchors.begin(&id)?);
        let (to, mut rows) = (new.table(), Vec::new());
        from.visit_whole(|space, key, value| {
            rows.push(Change { space, key: key.to_vec(), value: Some(value.to_vec()) });
            if rows.len() < AT_ONCE { Ok(()) } else { to.commit(&std::mem::take(&mut rows)) }
        })?;
        to.commit(&rows)?;
        new.install()?;
        moved.anchors += 1;
    }
    cluster.put_state(&state)?;
    drop(state);
    cluster.put_authority(&authority, &number)?;
    put_files_away(dir)?;
    lead.give_up();
    Ok(moved)
}

/// The number of a directory's move, which is stored there until the move is done.
fn move_number(dir: &Path) -> Result<String> {
    let path = dir.join(MOVE);
    if let Ok(number) = fs::read_to_string(&path) {
        return Ok(number);
    }
    let number = anchors::fresh_number()?;
    authority::write_new(&path, number.as_bytes())?;
    anchor_store::sync(dir)?;
    Ok(number)
}

/// Renames the files whose content is in etcd, the state last: while that is in place, the move is not done.
fn put_files_away(dir: &Path) -> Result<()> {
    for name in [anchor_store::DIR, state::FILE] {
        let (from, to) = (dir.join(name), free_moved(dir, name));
        match fs::rename(&from, &to) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            done => done.map_err(ServerError::file("rename", &from))?,
        }
        anchor_store::sync(dir)?;
    }
    let _ = fs::remove_file(dir.join(MOVE));
    Ok(())
}

/// A name that no earlier move has given to what it left: with a number from the second one on.
fn free_moved(dir: &Path, name: &str) -> PathBuf {
    let (mut to, mut number) = (dir.join(format!("{name}.{MOVED}")), 1_u64);
    while to.symlink_metadata().is_ok() {
        number += 1;
        to = dir.join(format!("{name}-{number}.{MOVED}"));
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that was in files again has moved to etcd twice.
    #[test]
    fn a_second_move_leaves_what_the_first_one_left() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        for round in ["1", "2", "3"] {
            fs::create_dir(path(anchor_store::DIR)).expect("makes");
            fs::write(path(anchor_store::DIR).join("v.anchor"), round).expect("writes");
            fs::write(path(state::FILE), round).expect("writes");
            put_files_away(dir.path()).expect("renames");
            put_files_away(dir.path()).expect("there is nothing left to do");
        }
        let read = |name: &str| fs::read_to_string(path(name)).expect(name);
        for (round, number) in [("1", ""), ("2", "-2"), ("3", "-3")] {
            assert_eq!(read(&format!("anchors{number}.moved/v.anchor")), round);
            assert_eq!(read(&format!("state.redb{number}.moved")), round);
        }
    }
}
