//! Protocols by which clients reach a vault without a mount: objects over S3.
//!
//! A gateway is a front-end, as a mount is: it calls the [`lamassu_vault::Forest`] of a vault that its process has
//! open, and that the same process may have mounted at the same time. It guarantees what S3 promises: an object exists
//! completely or not at all, and is durable once it was acknowledged.
//!
//! | module | what |
//! |---|---|
//! | `config`, `credentials` | the operator's files |
//! | `secrets` | files that others must not read |
//! | `limits` | the limits of a tenant |
//! | `queue` | whose work is next |
//! | `work` | blocking work, which holds the turn of its request |
//! | `front` | where clients connect: the part of a configuration that every gateway has |
//! | `objects` | buckets and keys as directories and files: calls that block |
//! | `remote` | the same as objects at a provider of S3, each a ciphertext object: calls that block |
//! | `s3` | the protocol: from requests to those calls, from errors to answers |
//! | `door` | connections: TLS, limits, time-outs |
//! | `memory` | returns memory after a large reading |
//! | `metrics`, `log` | metrics and the access log |
//! | `served` | where objects are, by the configuration |
//! | `run` | runs the gateway until a signal comes |
//! | `provider` | the access proxy of a provider, over a plain directory: who may come decides on tokens |
//!
//! Never: bypasses the vault, has a key of it (the vault seals what lies at a provider, too), follows a link, logs a
//! secret. Async code stays in this crate.

pub mod config;
pub mod credentials;
mod door;
mod error;
mod front;
mod limits;
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
