//! The parser of vault headers and zone files: what it accepts and refuses, and that the canonical form covers all of
//! it.
#![allow(clippy::unwrap_used)] // helpers outside of #[test] functions; a panic is a failed test

mod bounds;
mod canonical;
mod members;
mod samples;
