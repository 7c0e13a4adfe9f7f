//! What a vault does, by its whole interface. One program: it is linked once, and its tests share all processors.
#![allow(clippy::unwrap_used)] // a helper of a test may panic, too

mod acl;
mod adversary;
mod anchored;
mod anchored_accept;
mod anchored_attrs;
mod anchored_attrs_crash;
mod anchored_crash;
mod anchored_killed;
mod anchored_owners;
mod anchored_recovery;
mod anchored_replaced;
mod api;
mod common;
mod crash;
mod damage;
mod detached;
mod ended;
mod entries;
mod events;
mod failed_names;
mod fault;
mod forest;
mod forest_modes;
mod matrix;
mod matrix_lab;
mod model;
mod names;
mod profiles;
mod rekey;
mod rekey_turns;
mod reuse;
mod room;
mod scale;
mod sessions;
mod staging;
