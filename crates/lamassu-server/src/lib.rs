//! The server of shared vaults (`docs/sharing.md`): it keeps their anchors, says who may use what and for how long, and
//! knows the hosts.
//!
//! | module | what it does |
//! |---|---|
//! | `config` | the configuration's file |
//! | `error` | what goes wrong, and the exit code of each |
//! | `state` | what outlives the process: hosts, tokens, leases, in one redb file |
//! | `authority` | certificates: its own, and those of hosts |
//! | `vaults` | one vault: its anchor's table and its leases |
//! | `service` | the calls of hosts |
//! | `accept` | TLS, connections, their limits |
//! | `admin` | what an administrator asks of a server that runs, or of its directory |
//! | `run` | all of it, until a signal comes |
//!
//! Who calls is known from the handshake ([`accept`]), and looked up again for each call: a host that is revoked is
//! refused from that moment on. Calls that wait for a disk run on threads of their own.
//!
//! Locks, in this order: the vaults, one vault, the state.
#![forbid(unsafe_code)]

pub mod accept;
pub mod admin;
pub mod authority;
pub mod config;
pub mod error;
pub mod run;
pub mod service;
pub mod state;
pub mod vaults;

pub use error::{Result, ServerError};
