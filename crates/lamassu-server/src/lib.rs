//! The server of shared vaults (`docs/sharing.md`): it keeps their anchors, says who may use what and for how long, and
//! knows the hosts.
//!
//! | module | what it does |
//! |---|---|
//! | `config` | the configuration's file |
//! | `error` | what goes wrong, and the exit code of each |
//! | `audit` | the audit log, a chain |
//! | `state/` | what outlives the process: hosts, tokens, leases, the audit log, in one redb file or in etcd |
//! | `authority` | certificates: the authority that hosts know, and the server's own |
//! | `anchor_store` | where the tables of anchors lie: in files |
//! | `origin` | state and anchors, opened, wherever they are |
//! | `etcd/` | state and anchors in etcd; which replica leads (feature `etcd`) |
//! | `vaults` | the vaults: opened, put, put away |
//! | `vault` | one: its anchor's table, its leases, its sessions |
//! | `recent` | the changes of a vault's newest commits |
//! | `accept` | TLS, connections, their limits |
//! | `guard` | who may make a call, before anything of it is read; how many at once |
//! | `sessions` | the calls of hosts that hold leases |
//! | `service` | their other calls |
//! | `counts` | how many of a kind there are at once |
//! | `alerts`, `webhook` | what hosts found not to be as it was written; where that is posted |
//! | `keys/` | keys that are kept for hosts, wrapped under a master key |
//! | `policy/` | which protections and algorithms hosts may use in which vaults |
//! | `metrics` | what monitoring asks |
//! | `backup` | a server's directory made of another, while a server runs on that |
//! | `check` | whether what is kept makes sense |
//! | `admin` | what an administrator asks of a server that runs, or of its directory |
//! | `run` | all of it, until a signal comes |
//!
//! Who calls is known from the handshake ([`accept`]), and looked up again for each call: a host that is revoked is
//! refused from that moment on. Calls that wait for a disk run on threads of their own.
//!
//! What a host can do it can do without limit, if nothing limits it: memory is taken for what was read alone, streams
//! have a time for each message, and no thread waits for a host but those that [`service`] counts. Administrators are
//! answered by threads of their own.
//!
//! Locks, in this order: the slot of a vault, the vault, changes of the state. Nothing is waited for under that of the
//! policy.
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
