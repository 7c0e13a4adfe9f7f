//! The server of shared vaults (`docs/sharing.md`). It keeps the anchors of vaults, grants leases of them, and knows
//! the hosts that may use them.
//!
//! | module | what it does |
//! |---|---|
//! | `config` | the configuration file |
//! | `error` | the errors, and the exit code of each |
//! | `audit` | the audit log, a chain of digests |
//! | `state/` | what outlives the process: hosts, tokens, leases, alerts, keys, the audit log; one redb file, or etcd |
//! | `authority` | certificates: the authority that hosts trust, and the server's own |
//! | `anchor_store` | the tables of anchors in files |
//! | `origin` | opens state and anchors, in files or in etcd |
//! | `etcd/` | state and anchors in etcd; which replica leads (feature `etcd`) |
//! | `vaults` | all vaults: opening, putting, putting away |
//! | `vault` | one vault: its anchor's table, its leases, its sessions |
//! | `recent` | the changes of a vault's newest commits |
//! | `accept` | TLS, connections, their limits |
//! | `guard` | checks the caller before a call is read; limits calls under way |
//! | `sessions` | the calls of hosts that hold leases |
//! | `service` | the other calls of hosts |
//! | `counts` | counts what is in use at once |
//! | `alerts`, `webhook` | alerts from hosts; posting them to a URL |
//! | `keys/` | keys that are kept for hosts, wrapped under a master key |
//! | `policy/` | which protections and algorithms hosts may use in which vaults |
//! | `metrics` | what monitoring reads |
//! | `backup` | makes a new server directory from one whose server may be running |
//! | `check` | checks that the data is consistent |
//! | `admin` | requests of an administrator, with or without a running server |
//! | `run` | makes a directory, and serves it until a signal comes |
//!
//! The caller is known from the handshake ([`accept`]), and looked up again for each call: a host that is revoked is
//! refused from that moment on. Calls that wait for a disk run on threads of their own.
//!
//! Everything that a host can cause is limited: memory is allocated only for bytes that have arrived, each message of a
//! stream has a time limit, and only threads that [`service`] counts wait for a host. Administrators are answered by
//! threads of their own.
//!
//! Locks, in this order: the slot of a vault (`vaults`); the vault (`vault`); of the state (`state`) `changing`, then
//! `restored`, then `hosts` or `database`; with etcd, `committing` of an anchor, then `last` of what a transaction
//! changes. All other locks (the list of slots, the policy, counters, log limits) are held briefly, and no other lock
//! is taken under them.
#![forbid(unsafe_code)]

pub mod accept;
pub mod admin;
pub mod alerts;
pub mod anchor_store;
pub mod audit;
pub mod authority;
pub mod backup;
pub mod check;
pub mod config;
pub mod counts;
pub mod error;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod guard;
pub mod keys;
pub mod metrics;
pub mod origin;
pub mod policy;
pub mod recent;
pub mod run;
pub mod service;
pub mod sessions;
pub mod state;
pub mod vault;
pub mod vaults;
pub mod webhook;

pub use error::{Result, ServerError};
