//! How a vault is opened.

use crate::event::Events;
use crate::{Durability, Integrity, Upkeep};
use lamassu_anchor::Anchor;
use lamassu_crypto::engine::device::Device;
use std::sync::Arc;

/// Options of an open vault.
#[derive(Clone, Debug)]
pub struct Options {
    /// integrity on reads
    pub integrity: Integrity,
    /// barriers
    pub durability: Durability,
    /// never write
    pub read_only: bool,
    /// approved primitives alone: files whose hash is not approved do not open
    pub approved_only: bool,
    /// cipher threads, 0: as many as processors
    pub threads: usize,
    /// ciphers in place of those threads
    pub device: Option<Arc<dyn Device>>,
    /// the anchor, which remembers the newest state outside the store; `None`: an unanchored vault
    pub anchor: Option<Arc<Anchor>>,
    /// when the anchor knows what an fsync covers
    pub freshness: Freshness,
    /// where integrity events go; by default to the log alone
    pub events: Events,
    /// how work in the background is asked for
    pub upkeep: Upkeep,
    /// it is open for a turn, for which other hosts may wait: what takes long is done bit by bit
    pub by_turns: bool,
}

/// When the anchor of a vault learns of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Freshness {
    /// An fsync waits for a commit of the anchor.
    #[default]
    Fsync,
    /// An fsync waits for the store alone: the anchor follows within an interval.
    Interval,
}
