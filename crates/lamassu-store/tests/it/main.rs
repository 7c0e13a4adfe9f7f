//! What the files of a store do. One program: it is linked once, and its tests share all processors.
#![allow(clippy::unwrap_used)] // a helper of a test may panic, too

mod anchored;
mod backend_local;
mod common;
mod concurrent;
mod copy;
mod crash;
mod damage;
mod domain;
mod failed_shrinks;
mod failed_writes;
mod faults;
mod integrity;
mod model;
mod profile;
mod recovery;
mod rekey;
