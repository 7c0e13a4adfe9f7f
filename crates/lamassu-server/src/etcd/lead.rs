//! Election of the leading replica.
//!
//! The leader has created the key `leader`, bound to an etcd lease that it keeps alive. When the key is gone, another
//! replica creates it. Each transaction compares the key's create revision, so that a former leader changes nothing any
//! more, whatever it believes.
//!
//! Replies to sessions depend on facts that are not in etcd, such as when a host was last heard. So no reply leaves a
//! replica until etcd has confirmed, after the reply was made, that the replica leads ([`Lead::confirm`]). A host
//! counts its term from when it sent its message. So every such term began before another replica could take over. The
//! new leader grants nothing that hosts may still hold until a term has passed, as a restarted server does. Nor does a
//! refusal leave it ([`crate::guard`]): a host takes it for final, and the next leader may have begun the session, or
//! made the commit.

use super::{Cluster, TIMEOUT, said};
use crate::{Result, ServerError};
use etcd_client::{Compare, CompareOp, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc::UnboundedSender, watch};

/// The key that names the leader.
pub const LEADER: &str = "leader";
/// How often a standby checks whether there is a leader.
const LOOKS: Duration = Duration::from_millis(250);

/// The right to lead. It ends when this is dropped, or when etcd reports so.
pub struct Lead {
    cluster: Arc<Cluster>,
    lease: i64,
    /// The number of the newest request for confirmation, and of the newest one that was confirmed.
    asked: watch::Sender<u64>,
    confirmed: watch::Receiver<u64>,
    is_given_up: AtomicBool,
}

impl Cluster {
    /// The address of the leader, if there is one.
    ///
    /// # Errors
    /// [`ServerError::Etcd`].
    pub fn leader(&self) -> Result<Option<String>> {
        let leader = self.get(&self.key(LEADER))?;
        Ok(leader.map(|address| String::from_utf8_lossy(&address).into_owned()))
    }

    /// Ends this process's term of office, since what it has in memory may differ from what etcd has: it changes
    /// nothing more, and the next leader begins with what etcd has.
    pub(super) fn end_office(&self, why: &ServerError) {
        self.office.store(0, Ordering::Release);
        if let Some(lost) = self.lost.get() {
            let _ = lost.send(why.to_string());
        }
    }

    /// Becomes the leader, if there is none.
    fn try_to_lead(&self, address: &str, seconds: u64) -> Result<Option<i64>> {
        if self.leader()?.is_some() {
            return Ok(None);
        }
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        let lease = self.ask(move |mut client| async move { client.lease_grant(seconds, None).await })?.id();
        let (key, address) = (self.key(LEADER), address.as_bytes().to_vec());
        let taken = self.ask(|mut client| {
            let is_free = Compare::create_revision(key.clone(), CompareOp::Equal, 0);
            let put = TxnOp::put(key.clone(), address.clone(), Some(PutOptions::new().with_lease(lease)));
            // A transaction that succeeded without an answer is found by the read below.
            let txn = Txn::new().when([is_free]).and_then([put]);
            async move { client.txn(txn).await }
        })?;
        drop(taken);
        let mut found = self.ask(|mut client| {
            let key = key.clone();
            async move { client.get(key, None).await }
        })?;
        match found.take_kvs().pop().filter(|pair| pair.lease() == lease) {
            Some(pair) => {
                self.office.store(pair.create_revision(), Ordering::Release);
                Ok(Some(lease))
            }
            None => {
                let _ = self.ask(move |mut client| async move { client.lease_revoke(lease).await });
                Ok(None)
            }
        }
    }
}

impl Lead {
    /// Stands by until there is no leader, then becomes it. `is_over` tells that this replica is to end. `None`: it has
    /// ended.
    ///
    /// # Errors
    /// [`ServerError::Etcd`].
    pub fn take(
        cluster: &Arc<Cluster>,
        (address, seconds): (&str, u64),
        lost: UnboundedSender<String>,
        is_over: impl Fn() -> bool,
    ) -> Result<Option<Arc<Lead>>> {
        let mut last = None;
        let lease = loop {
            if is_over() {
                return Ok(None);
            }
            match cluster.try_to_lead(address, seconds) {
                Ok(Some(lease)) => break lease,
                Ok(None) => {
                    let leader = cluster.leader()?;
                    if leader.is_some() && leader != last {
                        tracing::info!(leader = leader.as_deref().unwrap_or_default(), "standing by");
                        last = leader;
                    }
                }
                // The cluster may be starting, or may have lost its majority for a while.
                Err(ServerError::Etcd { detail, .. }) => {
                    tracing::warn!(%detail, "standing by: {} does not answer", cluster.name);
                }
                Err(error) => return Err(error),
            }
            std::thread::sleep(LOOKS);
        };
        let (asked, asks) = watch::channel(0);
        let (confirms, confirmed) = watch::channel(0);
        let lead =
            Arc::new(Lead { cluster: cluster.clone(), lease, asked, confirmed, is_given_up: AtomicBool::new(false) });
        let seconds = Duration::from_secs(seconds);
        let _ = cluster.lost.set(lost.clone());
        let of = cluster.clone();
        cluster.runtime.spawn(async move {
            let why = tokio::select! {
                why = keep_alive(&of, lease, seconds) => why,
                why = answer(&of, asks, confirms, seconds) => why,
            };
            let _ = lost.send(why);
        });
        tracing::info!(cluster = %cluster.name, "leading");
        Ok(Some(lead))
    }

    /// Waits until etcd has confirmed that this replica led at a moment after this call. False: it does not lead, and
    /// ends.
    pub async fn confirm(&self) -> bool {
        let mut number = 0;
        self.asked.send_modify(|asked| {
            *asked += 1;
            number = *asked;
        });
        let mut confirmed = self.confirmed.clone();
        confirmed.wait_for(|confirmed| *confirmed >= number).await.is_ok()
    }

    /// Lets another replica lead at once.
    pub fn give_up(&self) {
        // Its term of office may have ended before, but its lease has not.
        if self.is_given_up.swap(true, Ordering::AcqRel) {
            return;
        }
        self.cluster.office.store(0, Ordering::Release);
        let lease = self.lease;
        let _ = self.cluster.ask(move |mut client| async move { client.lease_revoke(lease).await });
    }
}

/// Keeps a lease alive. Returns the reason when that fails.
async fn keep_alive(cluster: &Cluster, lease: i64, term: Duration) -> String {
    let mut last = Instant::now();
    let mut open: Option<(LeaseKeeper, LeaseKeepAliveStream)> = None;
    loop {
        if open.is_none() {
            let mut client = cluster.client.clone();
            // Leaves time to ask another member before the lease expires.
            let opened = tokio::time::timeout(term / 4, client.lease_keep_alive(lease)).await;
            open = opened.ok().and_then(|done| done.ok());
        }
        if let Some((keeper, stream)) = &mut open {
            let sent = Instant::now();
            let kept = async {
                keeper.keep_alive().await.ok()?;
                stream.message().await.ok()?
            };
            match tokio::time::timeout(term / 4, kept).await.ok().flatten() {
                Some(answer) if answer.ttl() > 0 => last = sent,
                Some(_) => return "etcd has ended the lease of this leader".into(),
                // Reconnects for the next attempt.
                None => open = None,
            }
        }
        if last.elapsed() > term {
            return format!("{} has not answered for {} s", cluster.name, term.as_secs());
        }
        tokio::time::sleep(term / 6).await;
    }
}

/// Confirms that this replica leads, for many requests at once. Returns the reason when it no longer leads.
async fn answer(
    cluster: &Cluster,
    mut asks: watch::Receiver<u64>,
    confirms: watch::Sender<u64>,
    term: Duration,
) -> String {
    let (key, office) = (cluster.key(LEADER), cluster.office.load(Ordering::Acquire));
    let mut last = Instant::now();
    loop {
        // Checks now and then also without a request.
        if let Ok(Err(_)) = tokio::time::timeout(term / 3, asks.changed()).await {
            return "nothing is left that asks whether this replica leads".into();
        }
        let asked = *asks.borrow_and_update();
        let mut client = cluster.client.clone();
        let (sent, seen) = (Instant::now(), cluster.seen.load(Ordering::Acquire));
        match tokio::time::timeout(TIMEOUT.min(term / 4), client.get(key.clone(), None)).await {
            Ok(Ok(found)) => {
                let leads = found.kvs().first().is_some_and(|pair| pair.create_revision() == office);
                if !leads {
                    return "another replica leads".into();
                }
                if let Err(error) = cluster.heard(found.header(), seen) {
                    return error.to_string();
                }
                last = sent;
                confirms.send_replace(asked);
            }
            Ok(Err(error)) => tracing::debug!(error = said(&error), "the check which replica leads got no answer"),
            Err(_) => {}
        }
        // Requests without an answer are tried again.
        if *confirms.borrow() < asked {
            if last.elapsed() > term {
                return format!("{} has not answered for {} s", cluster.name, term.as_secs());
            }
            asks.mark_changed();
            tokio::time::sleep(super::AGAIN_AFTER).await;
        }
    }
}
