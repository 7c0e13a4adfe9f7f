//! `lamassu check`: verifies the tree, names what is wrong, mends what can be mended.
mod report;
pub use report::{Problem, Progress, Report};
