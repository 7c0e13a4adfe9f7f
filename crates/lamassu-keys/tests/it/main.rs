//! Headers, keys and their sources. One program: it is linked once, and its tests share all processors.
#![allow(clippy::unwrap_used)] // a helper of a test may panic, too

mod admin;
mod dataset;
mod header_file;
mod history;
mod https;
#[cfg(any(feature = "https", feature = "kmip"))]
#[path = "support/https_server.rs"]
mod https_server;
mod kmip;
mod old_headers;
mod rotate;
mod sources;
mod unlock;
