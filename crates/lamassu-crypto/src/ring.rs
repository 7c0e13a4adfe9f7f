//! The loaded keys of a vault: every epoch, newest first.

use crate::kernel::Kernel;
use crate::outer::{HEAD_LEN, RecordKind};
use crate::{InnerKey, OuterKey, Secret, Suite};
use lamassu_format::PAGE_LEN;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Keys of all epochs of a vault.
#[derive(Clone)]
pub struct KeyRing {
    suite: Suite,
    inner: Vec<Arc<InnerKey>>,
    outer: Vec<Arc<OuterKey>>,
    /// Index into `inner` of the epoch that verified a block last.
    inner_hit: Arc<AtomicUsize>,
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
    /// From the keys of a keychain, newest epoch first.
    ///
    /// # Panics
    /// When either list is empty: the keychain's parser refuses one (§4).
    pub fn new(suite: Suite, inner: &[Secret<32>], outer: &[Secret<32>]) -> Self {
        Self::with_kernel(suite, inner, outer, Kernel::best())
    }

    /// The same on a kernel of choice.
    ///
    /// # Panics
    /// As `new`.
    pub fn with_kernel(suite: Suite, inner: &[Secret<32>], outer: &[Secret<32>], kernel: Kernel) -> Self {
        assert!(!inner.is_empty() && !outer.is_empty(), "a key ring has at least one epoch of each key");
        KeyRing {
            suite,
            inner: inner.iter().map(|k| Arc::new(InnerKey::with_kernel(suite, k, kernel))).collect(),
            outer: outer.iter().map(|k| Arc::new(OuterKey::new(suite, k))).collect(),
            inner_hit: Arc::new(AtomicUsize::new(0)),
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

    /// Every K_in, the last that verified a block first.
    pub(crate) fn inners_by_last_hit(&self) -> impl Iterator<Item = (usize, &InnerKey)> {
        let last = self.inner_hit.load(Ordering::Relaxed);
        let others = (0..self.inner.len()).filter(move |&i| i != last);
        std::iter::once(last).chain(others).map(|i| (i, &*self.inner[i]))
    }

    /// Remembers which K_in verified a block.
    pub(crate) fn note_hit(&self, index: usize) {
        // A hint: any order of concurrent stores will do, and the value is an index that `inners_by_last_hit` gave out.
        if self.inner_hit.load(Ordering::Relaxed) != index {
            self.inner_hit.store(index, Ordering::Relaxed);
        }
    }

    /// Key for new metadata.
    pub fn outer(&self) -> &OuterKey {
        &self.outer[0]
    }

    /// Every K_out, newest first.
    pub fn outers(&self) -> &[Arc<OuterKey>] {
        &self.outer
    }

    /// Opens a page under whichever epoch sealed it; returns the index of the epoch (0 = newest).
    ///
    /// # Errors
    /// [`OpenError::NoKey`] leaves the page as it was; [`OpenError::Unauthentic`] leaves it unspecified.
    pub fn open_page(&self, aad: &[u8; 16], page: &mut [u8; PAGE_LEN]) -> Result<usize, OpenError> {
        let epoch = self.outer.iter().position(|k| k.matches_page(aad, page)).ok_or(OpenError::NoKey)?;
        self.outer[epoch].open_page(aad, page).map_err(|_| OpenError::Unauthentic)?;
        Ok(epoch)
    }

    /// Opens a record under whichever epoch sealed it.
    ///
    /// # Errors
    /// As [`OpenError`] says.
    pub fn open_record(&self, kind: RecordKind, context: &[u8], record: &[u8]) -> Result<Vec<u8>, OpenError> {
        if record.len() < HEAD_LEN {
            return Err(OpenError::Truncated);
        }
        let key = self.outer.iter().find(|k| k.matches_record(kind, context, record)).ok_or(OpenError::NoKey)?;
        key.open_record(kind, context, record).map_err(|_| OpenError::Unauthentic)
    }

    /// Opens an attribute name, trying the epochs: attribute names carry no epoch tag.
    ///
    /// # Errors
    /// [`OpenError::NoKey`] if none opens it, [`OpenError::Truncated`] below 16 bytes.
    pub fn open_xattr_name(&self, sealed: &[u8]) -> Result<Vec<u8>, OpenError> {
        if sealed.len() < 16 {
            return Err(OpenError::Truncated);
        }
        self.outer.iter().find_map(|k| k.open_xattr_name(sealed).ok()).ok_or(OpenError::NoKey)
    }

    /// The stored forms an attribute name may have, newest epoch first.
    pub fn seal_xattr_names(&self, name: &[u8]) -> Vec<Vec<u8>> {
        self.outer.iter().map(|k| k.seal_xattr_name(name)).collect()
    }
}
