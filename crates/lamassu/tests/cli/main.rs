//! The program as users run it: every command, every exit code of docs/cli.md that can be provoked, JSON shapes, and
//! real mounts.
#![allow(missing_docs, clippy::unwrap_used)]

mod admin;
mod alerts;
mod anchor_disk;
mod anchor_faults;
mod anchored_datasets;
mod anchors;
mod asked;
mod ciphers;
mod clones;
mod compression;
mod copies;
mod dataset_keys;
mod dataset_memory;
mod datasets;
mod destroy;
mod destroy_elsewhere;
mod domains;
mod files;
mod fips;
mod golden;
mod hardening;
mod helper;
mod history;
#[path = "../../../lamassu-keys/tests/it/support/https_server.rs"]
mod https_server;
mod keys;
#[cfg(feature = "kmip")]
mod kmip;
mod leaks;
mod limits;
mod lines;
mod meanwhile;
mod model;
mod mounts;
mod old_headers;
mod planted;
mod private;
mod profiles;
mod put_back;
#[path = "../../../lamassu-keys/tests/it/support/pykmip.rs"]
#[cfg(feature = "kmip")]
mod pykmip;
mod receipts;
mod recipes;
mod records;
mod rekey;
mod restored;
mod scrubs;
mod served;
mod shares;
mod slots;
mod small_store;
mod sources;
mod support;
mod tokens;
mod told;
mod trial;
mod trust;
mod umount;
mod usage;
