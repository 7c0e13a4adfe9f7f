//! A witness remembers, outside the store, which header and which history of a vault are the newest.
//!
//! The trait is here, below its implementations, so that every replacement of a header uses it ([`crate::Update`]).

use lamassu_crypto::wrap;
use lamassu_format::header::{Header, HeaderError, HistoryMark, VaultId};
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

/// Why a witness refuses, or cannot record something.
pub type WitnessError = Box<dyn std::error::Error + Send + Sync>;

/// What a new header is based on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// The header that was read: its digest.
    Read([u8; 32]),
    /// There was none, or a person has decided what it shall be. Digest of the one in place, if it could be read.
    Decided(Option<[u8; 32]>),
}

/// A header that is about to replace another.
#[derive(Clone, Copy, Debug)]
pub struct Replacement<'a> {
    /// the directory that the header is in
    pub dir: &'a Path,
    /// the vault's id
    pub id: VaultId,
    /// whether the header says that the vault is anchored
    pub is_anchored: bool,
    /// what it is based on
    pub basis: Basis,
    /// its digest
    pub new: [u8; 32],
    /// the new durable end of the history, if that has changed
    pub history: Option<HistoryMark>,
    /// that history begins with this header; the one before belongs to the header before
    pub begins_history: bool,
}

/// A header that is going to be replaced, or created.
#[derive(Clone, Copy, Debug)]
pub struct ToReplace {
    /// the vault's id
    pub id: VaultId,
    /// whether the header says that the vault is anchored
    pub is_anchored: bool,
    /// what the new one is based on
    pub basis: Basis,
}

/// What a witness needs to record a replacement. Others cannot take it before this is dropped.
pub trait Taken: Send + Sync + Debug {}

/// A record, outside the store, of the newest header and history of a vault.
///
/// Invariant: only the holder of an update lock ([`crate::Update`]) changes which header is the newest. Otherwise a
/// replacement and a recovery could undo each other.
pub trait Witness: Send + Sync + Debug {
    /// Takes what [`Witness::replacing`] will need, until the result is dropped. Called before a change that comes
    /// before the header's, so that nothing is changed if the header may not be replaced.
    ///
    /// # Errors
    /// Another process, or another host, uses the record or has the right to use the vault; and as
    /// [`Witness::replacing`].
    fn take(&self, _header: &ToReplace) -> Result<Box<dyn Taken>, WitnessError> {
        Ok(Box::new(Nobody))
    }

    /// Records durably that a header is about to be replaced: from now on both are the newest. If two were the newest
    /// already, the header that was read is made durable in the store first, since the other one is forgotten.
    ///
    /// # Errors
    /// The header may not be replaced then: it is based on an older one, or nothing can be recorded.
    fn replacing(&self, replacement: &Replacement<'_>) -> Result<Box<dyn Replacing>, WitnessError>;
}

/// A replacement under way. The witness's record stays locked until this is dropped, so that no other process
/// interferes.
pub trait Replacing: Send + Sync + Debug {
    /// Whether the store may be changed now. Called immediately before that.
    ///
    /// # Errors
    /// The right to replace the header has ended meanwhile, and another host may have it.
    fn may_go_on(&self) -> Result<(), WitnessError>;

    /// Records that the new header is in place, durably.
    ///
    /// # Errors
    /// Then both are still the newest.
    fn replaced(self: Box<Self>) -> Result<(), WitnessError>;
}

/// For zone files, and for vaults without an anchor.
#[derive(Clone, Copy, Debug, Default)]
struct Nobody;

impl Witness for Nobody {
    fn replacing(&self, _: &Replacement<'_>) -> Result<Box<dyn Replacing>, WitnessError> {
        Ok(Box::new(Nobody))
    }
}

impl Taken for Nobody {}

impl Replacing for Nobody {
    fn may_go_on(&self) -> Result<(), WitnessError> {
        Ok(())
    }

    fn replaced(self: Box<Self>) -> Result<(), WitnessError> {
        Ok(())
    }
}

/// A witness that remembers nothing: for zone files.
pub fn nobody() -> Arc<dyn Witness> {
    Arc::new(Nobody)
}

/// The digest by which a witness identifies a header: over its content, independent of indentation.
///
/// # Errors
/// Those of [`Header::to_json`].
pub fn digest<H: Header>(header: &H) -> Result<[u8; 32], HeaderError> {
    let content = header.to_json()?;
    Ok(wrap::sha256(&[&b"lamassu v1 anchored header\0"[..], &content].concat()))
}
