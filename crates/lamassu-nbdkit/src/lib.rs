//! nbdkit's plugin `lamassu`: volumes of vaults as exports of an NBD server (docs/volumes.md). The protocol, TLS,
//! connections, threads and filters are nbdkit's; bytes, holes and durability are those of [`lamassu_volume`].
//!
//! Guarantees: no panic reaches nbdkit; every request is answered with one errno; vaults are opened when nbdkit has
//! forked, so that their threads and the locked memory of their keys are those of the process that serves.
//!
//! Never: copies what is read or written: nbdkit's buffer is what the vault seals from and opens into.
//!
//! | module | what |
//! |---|---|
//! | `abi` | nbdkit's C interface: the one module with unsafe code |
//! | `settings` | what stands on nbdkit's command line |
//! | `opened` | vaults that are open, and which exports they have |
//! | `plugin` | what each callback does |
//! | `end` | clients that are idle when nbdkit is to end |
//! | `failure` | errors, their errno, and how the process that started nbdkit learns of them |
//! | `log` | log events as messages of nbdkit |
#![allow(missing_docs)]

mod abi;
mod end;
mod failure;
mod log;
mod opened;
mod plugin;
mod settings;
