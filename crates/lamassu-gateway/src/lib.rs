//! Protocols by which clients reach a vault without a mount: objects over S3.
//!
//! A gateway is a front-end as a mount is: it calls the [`lamassu_vault::Forest`] of a vault that its process has open,
//! and that the same process may have mounted at the same time. It guarantees what S3 promises of an object: it is
//! there whole or not at all, and durable once that was said.
//!
//! | module | what |
//! |---|---|
//! | `config`, `credentials` | the files of an operator |
//! | `limits` | what a tenant may do |
//! | `work` | what blocks, for as long as a request's turn |
//! | `objects` | buckets and keys as directories and files: calls that block |
//! | `s3` | the protocol: requests to those calls, errors to answers |
//! | `door` | connections: TLS, limits, time-outs |
//! | `metrics`, `log` | what an operator sees |
//! | `run` | all of it, until a signal comes |
//!
//! Never: reaches around the vault, has a key of it, follows a link, logs a secret. Async stays in this crate.

pub mod config;
pub mod credentials;
mod door;
mod error;
mod limits;
mod log;
mod metrics;
mod objects;
mod run;
mod s3;
mod work;

pub use config::Config;
pub use credentials::Credentials;
pub use error::{GatewayError, Result};
pub use run::{Serving, check, serve};
pub use tokio::sync::watch;
