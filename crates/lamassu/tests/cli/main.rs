//! The program as users run it: every command, every exit code of docs/cli.md that can be provoked, JSON shapes, and real mounts.
#![allow(missing_docs, clippy::unwrap_used)]

mod clones;
mod files;
mod golden;
mod hardening;
mod helper;
#[path = "../../../lamassu-keys/tests/support/https_server.rs"]
mod https_server;
mod keys;
mod leaks;
mod model;
mod mounts;
mod recipes;
mod slots;
mod sources;
mod support;
mod tokens;
mod usage;
