//! Volumes as users have them: the program, nbdkit with the plugin, and the clients that there are for NBD.
#![allow(missing_docs, clippy::unwrap_used)]

mod clients;
mod commands;
mod crash;
mod exports;
mod lab;
mod operation;
mod tls;
