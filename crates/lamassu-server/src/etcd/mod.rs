//! State and anchors in etcd, so that another server can take over when one ends.
//!
//! Several servers, *replicas*, have the same directory (authority, policy) and the same cluster. One of them leads and
//! serves; the others stand by. The leader keeps in memory what a single server keeps in memory beyond its disk. A
//! replica that takes over is therefore like a server that restarts ([`lamassu_lease::server`]).
//!
//! | key, behind the prefix and a slash | value |
//! |---|---|
//! | `leader` | the address of the leader, bound to an etcd lease. Its create revision is the leader's *term of office* |
//! | `authority` | the digest of the authority; if it is missing, there is no state |
//! | `moved` | the number of the move that put the state here |
//! | `state/TABLE/KEY` | a row of [`crate::state`] |
//! | `anchors/VAULT` | the generation whose rows are the vault's anchor |
//! | `away/VAULT`, `away/VAULT-NUMBER` | the same, of retired anchors |
//! | `new/GENERATION` | its rows are being received, or belong to no anchor any more |
//! | `rows/GENERATION/SPACE KEY` | a row of an anchor |
//! | `journal/NAME/NUMBER`, `journal/NAME/whole` | a commit that is too large for one transaction |
//! | `last/NAME` | the number of the last transaction on the state (`state`), an anchor (its generation), or the list of anchors (`anchors`) |
//!
//! Fencing: every transaction compares the create revision of `leader` with its sender's term of office. An etcd lease
//! may end early without its holder's knowing ([`lead`]); a transaction of that holder then changes nothing.
//!
//! A transaction without an answer is repeated through another member, and its first attempt may be carried out much
//! later. So each transaction also compares the revision of `last/NAME`, and changes it: it takes effect once, and
//! never after a later one. Opening an anchor changes it first, so that no earlier attempt takes effect after that.
//!
//! A commit too large for one transaction is written to its journal first. With `whole` it is durable. It is then
//! carried out in as many transactions as it takes, and the next leader repeats it if it was cut off. No reader sees
//! the rows before that.

pub mod anchors;
pub mod config;
pub mod lead;
pub mod state;
mod transact;

use self::config::EtcdConfig;
pub use self::transact::Op;
use crate::{Result, ServerError};
use etcd_client::{Client, Error, GetOptions, ResponseHeader};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::future::Future;
use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tonic::Code;

/// Rows that are read at a time, and their bytes at most: a row of an anchor has up to 32 KiB.
const ROWS_AT_ONCE: i64 = 500;
const PAGE_BYTES_MAX: usize = 64 << 20;
/// How long a call is repeated while members do not answer or have no leader.
const PATIENCE: Duration = Duration::from_secs(10);
const AGAIN_AFTER: Duration = Duration::from_millis(50);
/// How long one answer may take.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Not expected: the code on that thread does not panic.
const THREAD: &str = "the thread that asks it has ended";
/// Versions whose members can lose acknowledged data (etcd's issue 13766).
const UNSAFE_VERSIONS: [&str; 3] = ["3.5.0", "3.5.1", "3.5.2"];

/// A key and its value.
pub type Pair = (Vec<u8>, Vec<u8>);
/// What is called with each key and its value.
type VisitRow<'a> = dyn FnMut(&[u8], Vec<u8>) -> Result<()> + 'a;

/// The keys of a server in a cluster.
pub struct Cluster {
    runtime: Handle,
    /// When it is dropped, the runtime's thread ends.
    _ends: oneshot::Sender<()>,
    client: Client,
    prefix: String,
    name: String,
    /// The create revision of `leader` while this process leads; 0: it does not.
    office: AtomicI64,
    lasts: Mutex<HashMap<String, Arc<Mutex<Last>>>>,
    /// The highest revision that was seen, and its cluster's id; 0: none yet.
    seen: AtomicI64,
    cluster: AtomicU64,
    /// Gets the reason when this process must end although etcd lets it lead.
    lost: OnceLock<UnboundedSender<String>>,
    /// A counter, so that each transaction of this process has a number of its own.
    transactions: AtomicU64,
}

/// The revision of `last/NAME`, if known. Locked during a transaction.
#[derive(Default)]
struct Last(Option<i64>);

/// Some rows of a range.
pub struct Page {
    /// in order
    pub pairs: Vec<Pair>,
    /// whether there are more behind them
    pub has_more: bool,
    /// the revision they are of
    pub revision: i64,
    /// how many there are in the range
    pub count: i64,
}

impl Cluster {
    /// Connects to a cluster.
    ///
    /// # Errors
    /// [`ServerError::Etcd`], [`ServerError::Config`], [`ServerError::File`].
    pub fn connect(dir: &Path, config: &EtcdConfig) -> Result<Arc<Cluster>> {
        let (endpoints, options) = (config.endpoints.clone(), config.options(dir)?);
        let name = config.name();
        let failed = |detail: String| ServerError::Etcd { name: config.name(), detail };
        // A runtime of its own: the waiting thread may belong to another one.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| failed(error.to_string()))?;
        let handle = runtime.handle().clone();
        let (ends, ended) = oneshot::channel::<()>();
        let drive = move || drop(runtime.block_on(ended));
        let started = std::thread::Builder::new().name("etcd".into()).spawn(drive);
        started.map_err(|error| failed(error.to_string()))?;
        let connect = async move { Client::connect(endpoints, Some(options)).await };
        let client = wait(&handle, connect).unwrap_or_else(|| Err(Error::Internal(THREAD.into())));
        let client = client.map_err(|error| failed(said(&error)))?;
        let (office, lasts, seen, cluster, lost, transactions) = Default::default();
        let cluster = Cluster {
            runtime: handle,
            _ends: ends,
            client,
            prefix: config.prefix.clone(),
            name,
            office,
            lasts,
            seen,
            cluster,
            lost,
            transactions,
        };
        cluster.check_version()?;
        Ok(Arc::new(cluster))
    }

    fn check_version(&self) -> Result<()> {
        let status = self.ask(|mut client| async move { client.status().await })?;
        match UNSAFE_VERSIONS.contains(&status.version()) {
            false => Ok(()),
            true => Err(self.failed(format!(
                "a member has version {}, which can lose what it acknowledged: update it",
                status.version()
            ))),
        }
    }

    fn failed(&self, detail: impl Into<String>) -> ServerError {
        ServerError::Etcd { name: self.name.clone(), detail: detail.into() }
    }

    /// Checks that an answer comes from the same cluster, and not from a restored older state: revisions never fall.
    /// `before`: the highest revision that was known at the request.
    fn heard(&self, header: Option<&ResponseHeader>, before: i64) -> Result<()> {
        let (revision, cluster) = header.map_or((0, 0), |header| (header.revision(), header.cluster_id()));
        let known = self
            .cluster
            .compare_exchange(0, cluster, Ordering::AcqRel, Ordering::Acquire)
            .unwrap_or_else(|known| known);
        if revision < before || (known != 0 && known != cluster) {
            return Err(self.failed("it has gone back to an older state, or is another cluster"));
        }
        self.seen.fetch_max(revision, Ordering::AcqRel);
        Ok(())
    }

    /// The cluster's name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn key(&self, rest: &str) -> Vec<u8> {
        format!("{}/{rest}", self.prefix).into_bytes()
    }

    /// Makes a request, and repeats it if a member does not answer. It may be carried out more than once.
    fn ask<T, F>(&self, ask: impl Fn(Client) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = std::result::Result<T, Error>> + Send + 'static,
    {
        let until = Instant::now() + PATIENCE;
        loop {
            let asked = ask(self.client.clone());
            let Some(answer) = wait(&self.runtime, in_time(asked)) else { return Err(self.failed(THREAD)) };
            match answer {
                Ok(answer) => return Ok(answer),
                Err(Asked::Failed(error)) if !is_passing(&error) => return Err(self.failed(said(&error))),
                Err(error) if Instant::now() >= until => {
                    return Err(self.failed(match error {
                        Asked::Failed(error) => said(&error),
                        Asked::Silent => "no member answers".into(),
                    }));
                }
                Err(_) => std::thread::sleep(AGAIN_AFTER),
            }
        }
    }

    /// The value of a key.
    ///
    /// # Errors
    /// [`ServerError::Etcd`].
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let seen = self.seen.load(Ordering::Acquire);
        let mut answer = self.ask(|mut client| {
            let key = key.to_vec();
            async move { client.get(key, None).await }
        })?;
        self.heard(answer.header(), seen)?;
        Ok(answer.take_kvs().pop().map(|pair| pair.into_key_value().1))
    }

    /// The first rows with keys from `from` to before `to`, as of a revision; 0: as of now.
    ///
    /// # Errors
    /// [`ServerError::Etcd`].
    pub fn page(&self, from: &[u8], to: &[u8], revision: i64) -> Result<Page> {
        let seen = self.seen.load(Ordering::Acquire);
        let mut answer = self.ask(|client| {
            let options = GetOptions::new().with_range(to).with_limit(ROWS_AT_ONCE).with_revision(revision);
            let from = from.to_vec();
            let mut client = client.kv_client().max_decoding_message_size(PAGE_BYTES_MAX);
            async move { client.get(from, Some(options)).await }
        })?;
        self.heard(answer.header(), seen)?;
        let now = answer.header().map_or(0, |header| header.revision());
        let revision = if revision == 0 { now } else { revision };
        let (has_more, count) = (answer.more(), answer.count());
        let pairs = answer.take_kvs().into_iter().map(|pair| pair.into_key_value()).collect();
        Ok(Page { pairs, has_more, revision, count })
    }

    /// Visits all rows whose keys have this prefix, as of one moment.
    ///
    /// # Errors
    /// [`ServerError::Etcd`]; those of `visit`.
    pub fn visit(&self, prefix: &[u8], mut visit: impl FnMut(&[u8], Vec<u8>) -> Result<()>) -> Result<()> {
        self.visit_range((prefix.to_vec(), behind(prefix)), 0, &mut |key, value| {
            visit(key.get(prefix.len()..).unwrap_or_default(), value)
        })
        .map(drop)
    }

    /// Visits all rows of a range, as of a revision; 0: as of now. Returns the revision.
    fn visit_range(
        &self,
        (mut from, to): (Vec<u8>, Vec<u8>),
        mut revision: i64,
        visit: &mut VisitRow<'_>,
    ) -> Result<i64> {
        loop {
            let page = self.page(&from, &to, revision)?;
            revision = page.revision;
            for (key, value) in page.pairs {
                visit(&key, value)?;
                from = key;
            }
            if !page.has_more {
                return Ok(revision);
            }
            from.push(0);
        }
    }
}

/// The first key after all keys with this prefix.
pub fn behind(prefix: &[u8]) -> Vec<u8> {
    let mut behind = prefix.to_vec();
    while let Some(last) = behind.last_mut() {
        match last.checked_add(1) {
            Some(next) => {
                *last = next;
                return behind;
            }
            None => drop(behind.pop()),
        }
    }
    // For etcd: to the end of all keys.
    vec![0]
}

/// The reason why there is no answer.
enum Asked {
    Failed(Error),
    Silent,
}

async fn in_time<T>(asked: impl Future<Output = std::result::Result<T, Error>>) -> std::result::Result<T, Asked> {
    match tokio::time::timeout(TIMEOUT, asked).await {
        Ok(answer) => answer.map_err(Asked::Failed),
        Err(_) => Err(Asked::Silent),
    }
}

/// Runs a future on the runtime of another thread, and waits for it. Any thread may call it, also one of another
/// runtime. `None`: the future panicked.
fn wait<T: Send + 'static>(runtime: &Handle, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
    let (done, result) = std::sync::mpsc::sync_channel(1);
    runtime.spawn(async move {
        let _ = done.send(work.await);
    });
    result.recv().ok()
}

/// Whether the same member may answer later, or another member now.
fn is_passing(error: &Error) -> bool {
    match error {
        Error::GRpcStatus(status) => match status.code() {
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Aborted | Code::Internal => true,
            // A member that has lost its leader answers so.
            Code::Unknown => !status.message().contains("duplicate key"),
            _ => false,
        },
        Error::TransportError(_) | Error::IoError(_) => true,
        _ => false,
    }
}

fn said(error: &Error) -> String {
    match error {
        Error::GRpcStatus(status) => status.message().to_owned(),
        error => error.to_string(),
    }
}
