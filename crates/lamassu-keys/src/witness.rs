//! What remembers, outside the store, which header and which history of a vault are the newest.
//!
//! The trait is here, below its implementations, so that no way of replacing a header goes around it
//! ([`crate::Update`]).

use lamassu_crypto::wrap;
use lamassu_format::header::{Header, HeaderError, HistoryMark};
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

/// Why a witness refuses, or cannot remember.
pub type WitnessError = Box<dyn std::error::Error + Send + Sync>;

/// What a new header is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// The header that was read: its digest.
    Read([u8; 32]),
    /// There was none, or a person has decided what it shall be.
    Decided,
}

/// A header that is about to be put in place.
#[derive(Clone, Copy, Debug)]
pub struct Replacement<'a> {
    /// the directory that the header is in
    pub dir: &'a Path,
    /// the vault's id
    pub id: [u8; 16],
    /// whether the header says that something remembers the vault's newest state
    pub is_anchored: bool,
    /// what it is made of
    pub basis: Basis,
    /// its digest
    pub new: [u8; 32],
    /// how far the history goes, durably, if that has changed
    pub history: Option<HistoryMark>,
}

/// See the module's head.
///
/// Invariant: which header is the newest is changed by nobody but the holder of the right to replace it
/// ([`crate::Update`]). Who replaces and who settles what an interruption has left would else undo each other's word.
pub trait Witness: Send + Sync + Debug {
    /// Remembers durably that a header is about to be replaced: from now on both are the newest. Where two were the
    /// newest already, the one that was read is durable in the store first, since the other is forgotten.
    ///
    /// # Errors
    /// The header may not be replaced then: it was made of an older one, or nothing can be remembered.
    fn replacing(&self, replacement: &Replacement<'_>) -> Result<Box<dyn Replacing>, WitnessError>;
}

/// A replacement under way. What it is told to is held until it is dropped, so that no other process gets in between.
pub trait Replacing {
    /// The new header is in place, durably.
    ///
    /// # Errors
    /// Both are still the newest then.
    fn replaced(self: Box<Self>) -> Result<(), WitnessError>;
}

/// Remembers nothing: of zone files, and of vaults that nothing outside the store remembers.
#[derive(Clone, Copy, Debug, Default)]
struct Nobody;

impl Witness for Nobody {
    fn replacing(&self, _: &Replacement<'_>) -> Result<Box<dyn Replacing>, WitnessError> {
        Ok(Box::new(Nobody))
    }
}

impl Replacing for Nobody {
    fn replaced(self: Box<Self>) -> Result<(), WitnessError> {
        Ok(())
    }
}

/// A witness that remembers nothing: for zone files.
pub fn nobody() -> Arc<dyn Witness> {
    Arc::new(Nobody)
}

/// By what a witness knows a header: a digest over its content, however it is indented.
///
/// # Errors
/// Those of [`Header::to_json`].
pub fn digest<H: Header>(header: &H) -> Result<[u8; 32], HeaderError> {
    let content = header.to_json()?;
    Ok(wrap::sha256(&[&b"lamassu v1 anchored header\0"[..], &content].concat()))
}
