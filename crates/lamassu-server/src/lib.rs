//! The server of shared vaults (`docs/sharing.md`). It keeps the anchors of vaults, grants leases of them, and knows
//! the hosts that may use them.
//!
//! | module | what it does |
//! |---|---|
//! | `error` | the errors, and the exit code of each |
//! | `dir` | the directory of a server |
//! | `alerts` | alerts from hosts |
//! | `writing`, `audit` | a transaction that records its changes; the audit log, a chain of digests |
//! | `reserve` | disk space that only the state may use |
//! | `state/` | the durable state: hosts, tokens, leases, alerts, keys, the policy, the audit log; one redb file, or etcd |
//! | `authority` | certificates: the authority that hosts trust, and the server's own |
//! | `anchor_store` | the tables of anchors in files |
//! | `etcd/` | state and anchors in etcd; which replica leads (feature `etcd`) |
//! | `config` | the configuration file |
//! | `origin/` | opens state and anchors, in files or in etcd |
//! | `caller` | the other end of a connection, and the host that calls |
//! | `refused` | why a request of a host is refused |
//! | `metrics` | the server's counters |
//! | `keys/` | the master key, under which keys for hosts are wrapped; limits of evaluations |
//! | `policy/` | which protections and algorithms hosts may use in which vaults |
//! | `pauses` | the clock of all vaults, which notices when the process was suspended |
//! | `recent` | the changes of a vault's newest commits |
//! | `numbers` | how many numbers of sessions were given |
//! | `counts`, `threads` | counts what is in use at once; threads for calls that wait |
//! | `arrivals` | messages of sessions that wait for their vault |
//! | `bounds`, `files`, `crowd` | what one host has in all vaults; which files hosts may take; peers not known yet |
//! | `vault/` | one vault: its anchor's table, its leases, its sessions |
//! | `vaults` | all vaults: opening, receiving, retiring |
//! | `accept` | TLS, connections, their limits |
//! | `guard` | checks the caller before a call is read; limits calls under way |
//! | `service/`, `sessions` | the calls of hosts; those of hosts that hold leases |
//! | `webhook` | posts alerts to a URL |
//! | `monitoring` | what monitoring reads |
//! | `administered` | the data behind an administrator's requests, with or without a running server |
//! | `backup`, `check` | makes a new server directory from another one; checks that the data is consistent |
//! | `admin/`, `answering` | requests of an administrator; the socket by which a running server answers them |
//! | `run` | makes a server's directory, and serves it until a signal comes |
//! | `preflight` | checks what a start reads |
//! | `keys_command`, `policy_command` | subcommands of the program |
//!
//! A module names only modules above it.
//!
//! The caller is known from the handshake ([`accept`]), and looked up again for each call: a host that is revoked is
//! refused from that moment on. Calls that wait for a disk run on threads of their own.
//!
//! Everything that a host can cause is limited: memory is allocated only for bytes that have arrived, each message of a
//! stream has a time limit, and only threads that [`service`] counts wait for a host. Administrators are answered by
//! threads of their own.
//!
//! Whoever calls or speaks for a host waits for the turn of its vault first, without a thread (`threads`). Then locks,
//! in this order: the slot of a vault (`vaults`); `placing`, or the vault (`vault`); of the state (`state`) `changing`,
//! then `restored`, then `hosts` or `database`; with etcd, `committing` of an anchor, then `last` of what a transaction
//! changes. All other locks (the list of slots, the policy, counters, log limits) are held briefly, and no other lock
//! is taken under them.
#![forbid(unsafe_code)]

pub mod accept;
pub mod admin;
pub mod administered;
pub mod alerts;
pub mod anchor_store;
pub mod answering;
pub mod arrivals;
pub mod audit;
pub mod authority;
pub mod backup;
pub mod bounds;
pub mod caller;
pub mod check;
pub mod config;
pub mod counts;
mod crowd;
pub mod dir;
pub mod error;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod files;
pub mod guard;
pub mod keys;
pub mod metrics;
pub mod monitoring;
pub mod numbers;
pub mod origin;
pub mod pauses;
pub mod policy;
pub mod preflight;
pub mod recent;
pub mod refused;
pub mod reserve;
pub mod run;
pub mod service;
pub mod sessions;
pub mod state;
pub mod threads;
pub mod vault;
pub mod vaults;
pub mod webhook;
pub mod writing;

pub use error::{Result, ServerError};
