//! The program as users run it: every command, every exit code of docs/cli.md that can be provoked, JSON shapes, and real mounts.
#![allow(missing_docs, clippy::unwrap_used)]

mod files;
mod golden;
mod hardening;
mod helper;
mod keys;
mod model;
mod mounts;
mod support;
mod usage;
