//! A server and hosts, real programs over real stores. One program: it is linked once, and its tests, which mostly wait
//! for terms to end, wait at the same time.
#![allow(clippy::unwrap_used)] // a helper of a test may panic, too

mod alerts;
mod clocks;
mod commands;
mod common;
mod crowds;
mod datasets;
mod doubts;
#[cfg(feature = "etcd")]
mod etcd;
mod freeze;
mod hostile;
mod hosts;
mod keys;
mod locks;
mod moves;
mod nameless;
mod newer;
mod oblivious;
mod operations;
mod outages;
mod permissions;
mod policy;
mod preflight;
mod rekey;
mod removed_trees;
mod replays;
mod rotation;
mod service;
mod shared;
mod slow_links;
mod stopped;
mod takeover;
mod turns;
mod versions;
mod withheld;
