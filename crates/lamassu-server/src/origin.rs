//! Where a server's state and anchors are, opened: files in its directory, or etcd; and the right to serve them.

use crate::Result;
use crate::anchor_store::{AnchorStore, Files};
use crate::authority::Authority;
use crate::config::Config;
use crate::state::State;
use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "etcd")]
use crate::etcd::lead::Lead;

/// What is kept.
pub struct Origin {
    /// all but anchors
    pub state: Arc<State>,
    /// anchors
    pub anchors: Arc<dyn AnchorStore>,
    /// the right to both
    pub office: Arc<Office>,
}

/// The right to serve, which ends where several servers take turns.
#[derive(Default)]
pub struct Office {
    /// `None`: no other can serve what is in this server's directory.
    #[cfg(feature = "etcd")]
    lead: Option<Arc<Lead>>,
    /// No other process has the directory.
    _lock: Option<std::fs::File>,
}

impl Office {
    /// Waits until it is known that this server had the right at a moment after this call. False: it has lost it.
    pub async fn confirm(&self) -> bool {
        #[cfg(feature = "etcd")]
        if let Some(lead) = &self.lead {
            return lead.confirm().await;
        }
        true
    }

    /// Lets another server have it, at once.
    pub fn give_up(&self) {
        #[cfg(feature = "etcd")]
        if let Some(lead) = &self.lead {
            lead.give_up();
        }
    }
}

impl Drop for Office {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// How long a server that has no right to serve waits for it.
pub enum Waits<'a> {
    /// Not at all: an administrator's command, which looks at what is kept, or changes it.
    Not,
    /// A server: until it has it, or this says that it is to end. `lost` is told, with the reason, when it has it no
    /// more.
    Until {
        /// whether to end
        is_over: &'a dyn Fn() -> bool,
        /// who is told
        lost: tokio::sync::mpsc::UnboundedSender<String>,
    },
}

impl Origin {
    /// Opens it. `None`: what waited is to end.
    ///
    /// # Errors
    /// [`ServerError::Running`], [`ServerError::Damaged`], [`ServerError::Elsewhere`], [`ServerError::Etcd`],
    /// [`ServerError::NothingInEtcd`]; those of the state.
    pub fn open(dir: &Path, config: &Config, authority: &Authority, waits: &Waits<'_>) -> Result<Option<Origin>> {
        #[cfg(feature = "etcd")]
        if let Some(etcd) = &config.etcd {
            return in_etcd(dir, (config, etcd), &data_encoding::HEXLOWER.encode(&authority.digest()), waits);
        }
        let _ = authority;
        let (state, anchors) = match waits {
            Waits::Not => (State::open(dir)?, Files::to_look_at(dir)),
            Waits::Until { .. } => (State::open_when_free(dir)?, Files::open(dir)?),
        };
        state.keep_entries(config.audit_entries);
        Ok(Some(Origin { state: Arc::new(state), anchors: Arc::new(anchors), office: Arc::default() }))
    }
}

#[cfg(feature = "etcd")]
use self::moved::in_etcd;
#[cfg(feature = "etcd")]
pub use self::moved::to_etcd;

#[cfg(feature = "etcd")]
mod moved {
    use super::*;
    use crate::ServerError;
    use crate::etcd::Cluster;
    use crate::etcd::anchors::{self, EtcdAnchors};
    use crate::etcd::config::EtcdConfig;
    use crate::state;
    use crate::{anchor_store, config, run};
    use data_encoding::HEXLOWER;
    use lamassu_anchor::table::Change;
    use std::fs;
    use std::time::{Duration, Instant};

    /// Rows of an anchor that are moved at a time.
    const AT_ONCE: usize = 5000;
    /// How the files end whose content is in etcd.
    const MOVED: &str = "moved";
    /// Until etcd is tried again that does not answer.
    const CONNECTS_AGAIN: Duration = Duration::from_secs(1);
    /// What a move that is under way is noted in.
    const MOVE: &str = "to-etcd";

    /// That no other process uses this directory, while the file is open.
    fn lock(dir: &Path) -> Result<fs::File> {
        use rustix::fs::{FlockOperation, flock};
        let lock = fs::File::open(dir).map_err(ServerError::file("open", dir))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| ServerError::Running { dir: dir.to_owned() })?;
        Ok(lock)
    }

    pub(super) fn in_etcd(
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
        if dir.join(state::FILE).symlink_metadata().is_ok() {
            return Err(ServerError::NotMoved { name: etcd.name(), dir: dir.to_owned() });
        }
        let connect = || {
            let cluster = Cluster::connect(dir, etcd)?;
            cluster.check_authority(authority).map(|()| cluster)
        };
        let (address, seconds) = (config.reached_at(), etcd.leader_seconds);
        let cluster = loop {
            match (connect(), waits) {
                // It may be starting, too.
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
        state.keep_entries(config.audit_entries);
        let anchors = Arc::new(EtcdAnchors::open(&cluster)?);
        let office = Arc::new(Office { lead: Some(lead), _lock: Some(lock) });
        Ok(Some(Origin { state: Arc::new(state), anchors, office }))
    }

    /// The same for a server: an administrator's command, or a server that ends, may have it for a moment.
    fn lock_when_free(dir: &Path) -> Result<fs::File> {
        let until = Instant::now() + state::FREE_WITHIN;
        loop {
            match lock(dir) {
                Err(ServerError::Running { .. }) if Instant::now() < until => std::thread::sleep(state::AGAIN_AFTER),
                locked => return locked,
            }
        }
    }

    /// Why a command is not carried out where a server runs that does not answer.
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

    /// Leads for a command, if nobody does.
    fn lead_now(cluster: &Arc<Cluster>, address: &str, seconds: u64) -> Result<Arc<Lead>> {
        let elsewhere = |leader| elsewhere(cluster, leader);
        let leader = cluster.leader()?;
        if leader.is_some() {
            return Err(elsewhere(leader));
        }
        // Once: who comes first has it.
        let tried = std::cell::Cell::new(false);
        let (lost, _) = tokio::sync::mpsc::unbounded_channel();
        let lead = Lead::take(cluster, (address, seconds), lost, || tried.replace(true))?;
        match lead {
            Some(lead) => Ok(lead),
            None => Err(elsewhere(cluster.leader()?)),
        }
    }

    /// What was moved.
    #[derive(Clone, Copy, Debug)]
    pub struct Moved {
        /// how many anchors
        pub anchors: usize,
    }

    /// Moves the state and the anchors of a server that does not run into the cluster that its configuration names,
    /// which has none of this prefix. Until the end of it they are in the directory; cut off, it is begun anew.
    ///
    /// # Errors
    /// [`ServerError::Config`], [`ServerError::Running`], [`ServerError::FullEtcd`]; those of both.
    pub fn to_etcd(dir: &Path) -> Result<Moved> {
        run::check_dir(dir)?;
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
        // Looked up as the leader: nobody else puts one meanwhile.
        if cluster.has_state()? {
            // Cut off behind its last transaction.
            let is_own = cluster.was_moved_by(&number)?;
            drop(state);
            return match is_own {
                true => {
                    let anchors = Files::to_look_at(dir).all()?.len();
                    put_files_away(dir, &lead).map(|()| Moved { anchors })
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
        put_files_away(dir, &lead).map(|()| moved)
    }

    /// The number of the move of a directory, which is noted there until it is done.
    fn move_number(dir: &Path) -> Result<String> {
        let path = dir.join(MOVE);
        if let Ok(number) = fs::read_to_string(&path) {
            return Ok(number);
        }
        let number = anchors::fresh_number()?;
        crate::authority::write_new(&path, number.as_bytes())?;
        anchor_store::sync(dir)?;
        Ok(number)
    }

    /// The files whose content is in etcd get other names, the state last: with it in its place the move is not done.
    fn put_files_away(dir: &Path, lead: &Lead) -> Result<()> {
        for name in [anchor_store::DIR, state::FILE] {
            let (from, to) = (dir.join(name), dir.join(format!("{name}.{MOVED}")));
            match fs::rename(&from, &to) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                done => done.map_err(ServerError::file("rename", &from))?,
            }
            anchor_store::sync(dir)?;
        }
        let _ = fs::remove_file(dir.join(MOVE));
        lead.give_up();
        Ok(())
    }
}
