//! Protocols by which clients reach a vault without a mount: objects over S3.
//!
//! A gateway is a front-end, as a mount is: it calls the [`lamassu_vault::Forest`] of a vault that its process has
//! open, and that the same process may have mounted at the same time. It guarantees what S3 promises: an object exists
//! completely or not at all, and is durable once it was acknowledged.
//!
//! | module | what |
//! |---|---|
//! | `error` | errors that keep a gateway from starting, or end it |
//! | `config`, `credentials` | the operator's files |
//! | `secrets` | files that other users must not read |
//! | `limits` | the limits of a tenant |
//! | `queue` | whose work is next |
//! | `locks` | locks of names |
//! | `work` | blocking work, which holds the turn of its request |
//! | `front` | client connections: the options that every gateway shares |
//! | `objects` | buckets and keys as directories and files: calls that block |
//! | `remote` | the same calls over objects at an S3 provider, each one ciphertext object; they block |
//! | `s3` | the protocol: requests to calls, errors to answers |
//! | `document` | documents of requests: bounded, and parsed in the tenant's turn |
//! | `door` | connections: TLS, limits, timeouts |
//! | `memory` | returns memory after a large reading |
//! | `metrics`, `log` | metrics and the access log |
//! | `served` | the two object stores behind a gateway |
//! | `run` | runs the gateway until a signal comes |
//! | `provider` | the access proxy of a provider, over a plain directory: it decides on tokens |
//!
//! Locks, in this order: an upload, a bucket, one or two keys (`objects`, `remote`). All other locks are held alone.
//!
//! Never: bypasses the vault, has a key of it (the vault seals what lies at a provider, too), follows a link, logs a
//! secret. Async code stays in this crate.

pub mod config;
pub mod credentials;
mod document;
mod door;
mod error;
mod front;
mod limits;
mod locks;
mod log;
mod memory;
mod metrics;
mod objects;
pub mod provider;
mod queue;
mod remote;
mod run;
mod s3;
mod secrets;
mod served;
mod work;

pub use config::Config;
pub use credentials::Credentials;
pub use error::{GatewayError, Result};
#[cfg(feature = "testing")]
pub use remote::testing;
pub use run::{Serving, check, serve};
pub use tokio::sync::watch;
