//! Anchors of existing vaults: making one, and what a person accepts as the newest (`docs/freshness.md`, section 6).

pub use crate::anchored::accept::Accepted;
pub use crate::anchored::rebuild::{
    DEGREE_LOG2, NewTrees, RebuildProgress, Rebuilt, datasets_among, is_dataset_of, rebuild,
};
