//! The loaded keys of a vault: every epoch, newest first.
use crate::{InnerKey, OuterKey, Secret, Suite, outer::RecordKind};
use std::sync::Arc;
/// Keys of all epochs of a vault.
#[derive(Clone)]
pub struct KeyRing {
    suite: Suite,
    inner: Vec<Arc<InnerKey>>,
    outer: Vec<Arc<OuterKey>>,
}
/// Why a page or record did not open.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
pub enum OpenError {
    /// No epoch tag matches.
    #[error("no loaded key matches: key not loaded, or damaged")]
    NoKey,
    /// The key is known and the seal is broken.
    #[error("seal broken")]
    Unauthentic,
    /// Too short to be one.
    #[error("truncated")]
    Truncated,
}
impl KeyRing {
    /// From the keys of a keychain, newest epoch first; neither list is empty.
    pub fn new(suite: Suite, inner: &[Secret<32>], outer: &[Secret<32>]) -> Self {
        KeyRing {
            suite,
            inner: inner.iter().map(|k| Arc::new(InnerKey::new(suite, k))).collect(),
            outer: outer.iter().map(|k| Arc::new(OuterKey::new(suite, k))).collect(),
        }
    }
    /// The suite.
    pub fn suite(&self) -> Suite {
        self.suite
    }
    /// Keys for new data.
    pub fn inner(&self) -> &Arc<InnerKey> {
        &self.inner[0]
    }
    /// Every K_in, newest first.
    pub fn inners(&self) -> &[Arc<InnerKey>] {
        &self.inner
    }
    /// Key for new metadata.
    pub fn outer(&self) -> &OuterKey {
        &self.outer[0]
    }
    /// Opens a page under whichever epoch sealed it; returns the index of the epoch (0 = newest).
    pub fn open_page(&self, aad: &[u8; 16], page: &mut [u8; 4096]) -> Result<usize, OpenError> {
        let _ = (aad, page);
        todo!()
    }
    /// Opens a record under whichever epoch sealed it.
    pub fn open_record(&self, kind: RecordKind, context: &[u8], record: &[u8]) -> Result<Vec<u8>, OpenError> {
        let _ = (kind, context, record);
        todo!()
    }
    /// Opens an attribute name, trying the epochs.
    pub fn open_xattr_name(&self, sealed: &[u8]) -> Result<Vec<u8>, OpenError> {
        let _ = sealed;
        todo!()
    }
    /// The stored forms an attribute name may have, newest epoch first.
    pub fn seal_xattr_names(&self, name: &[u8]) -> Vec<Vec<u8>> {
        self.outer.iter().map(|k| k.seal_xattr_name(name)).collect()
    }
}
