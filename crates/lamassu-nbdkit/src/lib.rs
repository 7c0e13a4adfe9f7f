//! nbdkit's plugin `lamassu`: volumes of vaults as exports of an NBD server (docs/volumes.md). The protocol, TLS,
//! connections, threads and filters are nbdkit's; bytes, holes and durability are those of [`lamassu_volume`].
//!
//! Guarantees: no panic reaches nbdkit; every failed request is answered with one errno; vaults are opened in the
//! process that their keys were loaded in, and not in a child of it: so nbdkit stays in the foreground.
//!
//! Never: copies data that are read or written: the vault seals from nbdkit's buffer, and opens into it.
//!
//! | module | what |
//! |---|---|
//! | `abi` | nbdkit's C interface: the one module with unsafe code |
//! | `settings` | the parameters on nbdkit's command line |
//! | `opened` | open vaults, and their exports |
//! | `plugin` | the work of each callback |
//! | `metrics` | counts of each export, in a file |
//! | `files` | files for other programs: whole whenever they are read; the one with the process id |
//! | `end` | disconnects idle clients when nbdkit is to end |
//! | `failure` | errors, their errno, and how the process that started nbdkit learns of them |
//! | `log` | log events as messages of nbdkit |
//!
//! Locks: those of `plugin` are held alone, but that of open vaults (`SERVING`) is held for reading during each
//! request, and the vault takes its own under it.
#![allow(missing_docs)]

mod abi;
mod end;
mod failure;
mod files;
mod log;
mod metrics;
mod opened;
mod plugin;
mod settings;
