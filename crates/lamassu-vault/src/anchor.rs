//! Anchors of vaults: how one comes to be for a vault that is there already, and what a person accepts
//! (`docs/freshness.md`, section 6).

pub use crate::anchored::accept::Accepted;
pub use crate::anchored::rebuild::{DEGREE_LOG2, NewTrees, RebuildProgress, Rebuilt, rebuild};
