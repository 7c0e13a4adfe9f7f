//! Volumes of a vault on this host, without a server of block devices.
#![allow(missing_docs, clippy::unwrap_used)]

mod copies;
mod lab;
mod runs;
