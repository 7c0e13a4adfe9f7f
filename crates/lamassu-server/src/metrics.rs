//! The server's counters, which [monitoring](crate::monitoring) reads. They name no host, no vault and no key.

use crate::refused::At;
use lamassu_lease::Reply;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use std::time::Duration;

/// The kind of a call, and whether its caller may make it.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Call {
    call: &'static str,
    admitted: &'static str,
}

/// Whether a message was taken.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Post {
    taken: &'static str,
}

/// Whether a key was given.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Asked {
    given: &'static str,
}

/// What a policy has refused.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Forbidden {
    at: &'static str,
}

/// The server's counters. Cheap to clone; all clones share the counts.
#[derive(Clone)]
pub struct Metrics {
    calls: Family<Call, Counter>,
    commits: Counter,
    rows: Counter,
    commit_seconds: Histogram,
    refused: Counter,
    turns: Counter,
    recalls: Counter,
    held_on: Counter,
    findings: Counter,
    posts: Family<Post, Counter>,
    keys: Family<Asked, Counter>,
    policy_refusals: Family<Forbidden, Counter>,
    policy_reads: Family<Post, Counter>,
    evaluations: Counter,
    put_off: Counter,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            calls: Family::default(),
            commits: Counter::default(),
            rows: Counter::default(),
            // From a write to a cache to a failing disk: 0.2 ms to 6.5 s.
            commit_seconds: Histogram::new(exponential_buckets(0.0002, 2.0, 16)),
            refused: Counter::default(),
            turns: Counter::default(),
            recalls: Counter::default(),
            held_on: Counter::default(),
            findings: Counter::default(),
            posts: Family::default(),
            keys: Family::default(),
            policy_refusals: Family::default(),
            policy_reads: Family::default(),
            evaluations: Counter::default(),
            put_off: Counter::default(),
        }
    }
}

impl Metrics {
    /// Counts a call of this path.
    pub fn called(&self, path: &str, is_admitted: bool) {
        // Only names of the protocol, so that a client cannot create series.
        const CALLS: [&str; 12] = [
            "Join",
            "Attend",
            "Rows",
            "Commit",
            "Put",
            "Reconcile",
            "GiveUp",
            "Report",
            "MakeKey",
            "GiveKey",
            "OpenOblivious",
            "Evaluate",
        ];
        let name = path.rsplit('/').next().unwrap_or_default();
        let call = CALLS.iter().find(|call| **call == name).copied().unwrap_or("other");
        let admitted = if is_admitted { "yes" } else { "no" };
        self.calls.get_or_create(&Call { call, admitted }).inc();
    }

    /// Counts rows that became durable, and how long that took.
    pub fn committed(&self, rows: usize, took: Duration) {
        self.commits.inc();
        self.rows.inc_by(rows as u64);
        self.commit_seconds.observe(took.as_secs_f64());
    }

    /// Counts a reply to a session.
    pub fn told(&self, reply: &Reply) {
        match reply {
            Reply::Granted { .. } => drop(self.turns.inc()),
            Reply::Recall { .. } => drop(self.recalls.inc()),
            Reply::Alive { .. } | Reply::Lock { .. } | Reply::Ended => {}
        }
    }

    /// Counts sessions that ended because they did not release a recalled lease.
    pub fn held_on(&self, sessions: usize) {
        self.held_on.inc_by(sessions as u64);
    }

    /// Counts findings that a host has reported.
    pub fn found(&self, findings: u64) {
        self.findings.inc_by(findings);
    }

    /// Counts a message to the webhook, accepted or not.
    pub fn posted(&self, is_taken: bool) {
        self.posts.get_or_create(&Post { taken: if is_taken { "yes" } else { "no" } }).inc();
    }

    /// Counts a host's request for a key, granted or not.
    pub fn asked_for_key(&self, is_given: bool) {
        self.keys.get_or_create(&Asked { given: if is_given { "yes" } else { "no" } }).inc();
    }

    /// Counts a request that the policy forbids.
    pub fn policy_refused(&self, at: At) {
        self.policy_refusals.get_or_create(&Forbidden { at: at.name() }).inc();
    }

    /// Counts a reload of the policy, accepted or not.
    pub fn policy_read(&self, is_taken: bool) {
        self.policy_reads.get_or_create(&Post { taken: if is_taken { "yes" } else { "no" } }).inc();
    }

    /// Counts evaluated elements.
    pub fn evaluated(&self, elements: usize) {
        self.evaluations.inc_by(elements as u64);
    }

    /// Counts a batch that exceeded a host's limit of evaluations.
    pub fn put_off(&self) {
        self.put_off.inc();
    }

    /// Counts a connection that was refused before its peer was known.
    pub fn refused(&self) {
        self.refused.inc();
    }

    /// Registers all of them.
    pub fn register(&self, all: &mut Registry) {
        let Metrics { calls, commits, rows, commit_seconds, refused, .. } = self.clone();
        let Metrics { turns, recalls, held_on, findings, posts, keys, .. } = self.clone();
        let Metrics { policy_refusals, policy_reads, evaluations, put_off, .. } = self.clone();
        all.register("calls", "Calls, by kind and by whether the caller may make them", calls);
        all.register("commits", "Commits that are durable", commits);
        all.register("rows", "Rows that these changed", rows);
        all.register_with_unit("commit", "How long commits took", Unit::Seconds, commit_seconds);
        all.register("turns", "Times that a session was given a vault", turns);
        all.register("recalls", "Times that a session was asked for a vault that it had", recalls);
        all.register("sessions_held_on", "Sessions that ended since they held on to a vault for a term", held_on);
        all.register("findings", "What hosts have reported not to be as it was written", findings);
        all.register("webhook_posts", "Messages to the webhook, by whether it has taken them", posts);
        all.register("keys_asked_for", "Times that a host asked for a key, by whether it was given", keys);
        all.register("policy_refusals", "Sessions, commits and anchors that the policy forbade", policy_refusals);
        all.register("policy_reads", "Times that the policy was read again, by whether it was taken", policy_reads);
        all.register("evaluations", "Elements that oblivious keys have evaluated for hosts", evaluations);
        all.register("evaluations_put_off", "Batches of hosts that had asked for as much as they may", put_off);
        all.register("connections_refused", "Connections that ended before their peer was known", refused);
    }
}
