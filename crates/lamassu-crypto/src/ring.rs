//! The loaded keys of a vault: every epoch, newest first.
//!
//! A ring gets new epochs while it is in use ([`KeyRing::add`]). Its clones see them from then on; work that has begun
//! ends under the epochs it began with. An epoch is known by its number in the keychain, which never changes.

use crate::kernel::Kernel;
use crate::oblivious::Oblivious;
use crate::outer::{HEAD_LEN, RecordKind};
use crate::suite::CipherSuite;
use crate::{InnerKey, OuterKey, Secret, Suite};
use lamassu_format::{PAGE_LEN, PageAad};
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of an epoch, from 1.
pub type EpochNumber = u32;

/// Keys of all epochs of a vault. Clones share them.
#[derive(Clone)]
pub struct KeyRing {
    suite: &'static CipherSuite,
    kernel: Kernel,
    epochs: Arc<RwLock<Arc<Epochs>>>,
    /// The epoch of K_in that last verified a block.
    inner_hit: Arc<AtomicU32>,
}

/// A key of an epoch.
type Numbered<K> = (EpochNumber, Arc<K>);

/// The epochs of a ring at one moment. Each list is newest first and never empty.
struct Epochs {
    inner: Vec<Numbered<InnerKey>>,
    outer: Vec<Numbered<OuterKey>>,
}

/// An epoch of K_in, to be loaded: its number, its key, and the server on which its block keys depend, if it is
/// oblivious.
pub trait InnerEpoch {
    /// The number.
    fn number(&self) -> EpochNumber;

    /// The key.
    fn key(&self) -> &Secret<32>;

    /// See [`Oblivious`].
    fn oblivious(&self) -> Option<Arc<Oblivious>>;
}

impl InnerEpoch for (EpochNumber, Secret<32>) {
    fn number(&self) -> EpochNumber {
        self.0
    }

    fn key(&self) -> &Secret<32> {
        &self.1
    }

    fn oblivious(&self) -> Option<Arc<Oblivious>> {
        None
    }
}

impl InnerEpoch for (EpochNumber, Secret<32>, Option<Arc<Oblivious>>) {
    fn number(&self) -> EpochNumber {
        self.0
    }

    fn key(&self) -> &Secret<32> {
        &self.1
    }

    fn oblivious(&self) -> Option<Arc<Oblivious>> {
        self.2.clone()
    }
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

impl Epochs {
    fn of(suite: Suite, kernel: Kernel, inner: &[impl InnerEpoch], outer: &[(EpochNumber, Secret<32>)]) -> Arc<Epochs> {
        assert!(!inner.is_empty() && !outer.is_empty(), "a key ring has at least one epoch of each key");
        let key = |epoch: &dyn InnerEpoch| InnerKey::of_epoch(suite, epoch.key(), epoch.oblivious(), kernel);
        Arc::new(Epochs {
            inner: inner.iter().map(|epoch| (epoch.number(), Arc::new(key(epoch)))).collect(),
            outer: outer.iter().map(|(n, k)| (*n, Arc::new(OuterKey::new(suite, k)))).collect(),
        })
    }
}

/// The keys of `had`, and those of `given` with other numbers; newest first.
fn merged<K>(had: &[(EpochNumber, Arc<K>)], given: &[(EpochNumber, Arc<K>)]) -> Vec<(EpochNumber, Arc<K>)> {
    let lacks = |(number, _): &&(EpochNumber, Arc<K>)| had.iter().all(|(n, _)| n != number);
    let mut all: Vec<_> = had.iter().chain(given.iter().filter(lacks)).cloned().collect();
    all.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    all
}

/// Numbers keys that are given newest first: the last is 1.
fn numbered(keys: &[Secret<32>]) -> Vec<(EpochNumber, Secret<32>)> {
    let newest = EpochNumber::try_from(keys.len()).unwrap_or(EpochNumber::MAX);
    keys.iter().enumerate().map(|(i, k)| (newest.saturating_sub(i as EpochNumber), k.duplicate())).collect()
}

impl KeyRing {
    /// From the keys of a keychain, newest epoch first; the oldest is epoch 1.
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
        Self::holding(suite, kernel, Epochs::of(suite, kernel, &numbered(inner), &numbered(outer)))
    }

    /// From numbered keys, newest first.
    ///
    /// # Panics
    /// As `new`.
    pub fn of_epochs(suite: Suite, inner: &[impl InnerEpoch], outer: &[(EpochNumber, Secret<32>)]) -> Self {
        let kernel = Kernel::best();
        Self::holding(suite, kernel, Epochs::of(suite, kernel, inner, outer))
    }

    fn holding(suite: Suite, kernel: Kernel, epochs: Arc<Epochs>) -> Self {
        let hit = epochs.inner[0].0;
        KeyRing {
            suite: CipherSuite::of(suite),
            kernel,
            epochs: Arc::new(RwLock::new(epochs)),
            inner_hit: Arc::new(AtomicU32::new(hit)),
        }
    }

    /// Adds the epochs that the ring lacks, given newest first, to all clones. New writes use the newest from now on.
    /// An epoch that the ring has is never removed or replaced: data may be encrypted under it.
    ///
    /// # Panics
    /// As `new`.
    pub fn add(&self, inner: &[impl InnerEpoch], outer: &[(EpochNumber, Secret<32>)]) {
        let given = Epochs::of(self.suite.id, self.kernel, inner, outer);
        let mut epochs = self.epochs.write();
        let inner = merged(&epochs.inner, &given.inner);
        *epochs = Arc::new(Epochs { inner, outer: merged(&epochs.outer, &given.outer) });
    }

    /// Replaces the epochs: for tests alone. In use, a ring only gains epochs ([`KeyRing::add`]).
    ///
    /// # Panics
    /// As `new`.
    #[doc(hidden)]
    pub fn replace(&self, inner: &[impl InnerEpoch], outer: &[(EpochNumber, Secret<32>)]) {
        *self.epochs.write() = Epochs::of(self.suite.id, self.kernel, inner, outer);
    }

    /// A separate ring with the newest K_in alone: nothing of an older epoch verifies under it.
    pub fn newest_inner(&self) -> KeyRing {
        let now = self.now();
        let epochs = Epochs { inner: now.inner[..1].to_vec(), outer: now.outer.clone() };
        Self::holding(self.suite.id, self.kernel, Arc::new(epochs))
    }

    fn now(&self) -> Arc<Epochs> {
        self.epochs.read().clone()
    }

    /// The suite.
    pub fn suite(&self) -> Suite {
        self.suite.id
    }

    pub(crate) fn cipher_suite(&self) -> &'static CipherSuite {
        self.suite
    }

    /// Keys for new data.
    pub fn inner(&self) -> Arc<InnerKey> {
        self.epochs.read().inner[0].1.clone()
    }

    /// To be called before a process is confined in which blocks will be written: see [`Oblivious::prepare`].
    pub fn prepare(&self) {
        if let Some(oblivious) = self.inner().oblivious() {
            oblivious.prepare();
        }
    }

    /// Every K_in, newest first.
    pub fn inners(&self) -> Vec<Arc<InnerKey>> {
        self.now().inner.iter().map(|(_, k)| k.clone()).collect()
    }

    /// Numbers of the newest K_in and of the newest K_out.
    pub fn newest(&self) -> (EpochNumber, EpochNumber) {
        let now = self.now();
        (now.inner[0].0, now.outer[0].0)
    }

    /// Every K_in, starting with the one that last verified a block.
    pub(crate) fn inners_by_last_hit(&self) -> impl Iterator<Item = (EpochNumber, Arc<InnerKey>)> {
        let last = self.inner_hit.load(Ordering::Relaxed);
        let now = self.now();
        let first = now.inner.iter().position(|(n, _)| *n == last).unwrap_or(0);
        let others = (0..now.inner.len()).filter(move |&i| i != first);
        std::iter::once(first).chain(others).map(move |i| now.inner[i].clone())
    }

    /// Remembers which K_in verified a block.
    pub(crate) fn note_hit(&self, epoch: EpochNumber) {
        // A hint: any order of concurrent stores will do, and an epoch that is gone meanwhile is skipped.
        if self.inner_hit.load(Ordering::Relaxed) != epoch {
            self.inner_hit.store(epoch, Ordering::Relaxed);
        }
    }

    /// Key for new metadata.
    pub fn outer(&self) -> Arc<OuterKey> {
        self.epochs.read().outer[0].1.clone()
    }

    /// Opens a page under the epoch that sealed it; returns that epoch.
    ///
    /// # Errors
    /// [`OpenError::NoKey`] leaves the page as it was; [`OpenError::Unauthentic`] leaves it unspecified.
    pub fn open_page(&self, aad: &PageAad, page: &mut [u8; PAGE_LEN]) -> Result<EpochNumber, OpenError> {
        let now = self.now();
        let (epoch, key) = now.outer.iter().find(|(_, k)| k.matches_page(aad, page)).ok_or(OpenError::NoKey)?;
        key.open_page(aad, page).map_err(|_| OpenError::Unauthentic)?;
        Ok(*epoch)
    }

    /// The epoch that sealed a page, by its first [`HEAD_LEN`] bytes. `None`: it is not loaded, or there are too few
    /// bytes.
    pub fn page_epoch(&self, aad: &PageAad, head: &[u8]) -> Option<EpochNumber> {
        self.now().outer.iter().find(|(_, k)| k.matches_page(aad, head)).map(|(n, _)| *n)
    }

    /// Opens a record under the epoch that sealed it.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_record(&self, kind: RecordKind, context: &[u8], record: &[u8]) -> Result<Vec<u8>, OpenError> {
        if record.len() < HEAD_LEN {
            return Err(OpenError::Truncated);
        }
        let now = self.now();
        let (_, key) =
            now.outer.iter().find(|(_, k)| k.matches_record(kind, context, record)).ok_or(OpenError::NoKey)?;
        key.open_record(kind, context, record).map_err(|_| OpenError::Unauthentic)
    }

    /// The epoch that sealed a record. `None`: it is not loaded.
    pub fn record_epoch(&self, kind: RecordKind, context: &[u8], record: &[u8]) -> Option<EpochNumber> {
        self.now().outer.iter().find(|(_, k)| k.matches_record(kind, context, record)).map(|(n, _)| *n)
    }

    /// Opens an attribute name, trying the epochs: attribute names carry no epoch tag.
    ///
    /// # Errors
    /// [`OpenError::NoKey`] if none opens it, [`OpenError::Truncated`] below 16 bytes.
    pub fn open_xattr_name(&self, sealed: &[u8]) -> Result<Vec<u8>, OpenError> {
        if sealed.len() < 16 {
            return Err(OpenError::Truncated);
        }
        self.now().outer.iter().find_map(|(_, k)| k.open_xattr_name(sealed).ok()).ok_or(OpenError::NoKey)
    }

    /// The stored forms an attribute name may have, newest epoch first.
    pub fn seal_xattr_names(&self, name: &[u8]) -> Vec<Vec<u8>> {
        self.now().outer.iter().map(|(_, k)| k.seal_xattr_name(name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> Secret<32> {
        Secret::new(&mut [byte; 32])
    }

    #[test]
    fn clones_see_new_epochs_and_numbers_do_not_shift() {
        let ring = KeyRing::of_epochs(Suite::Aes, &[(3, key(3))], &[(7, key(7))]);
        let clone = ring.clone();
        let (aad, mut page) = (PageAad([0; 16]), [5; PAGE_LEN]);
        ring.outer().seal_page(&aad, &mut page).unwrap();
        let record = ring.outer().seal_record(RecordKind::Xattr, b"c", b"content").unwrap();
        ring.add(&[(4, key(4)), (3, key(3))], &[(9, key(9)), (7, key(7))]);
        assert_eq!(clone.newest(), (4, 9));
        assert_eq!((clone.page_epoch(&aad, &page[..HEAD_LEN]), clone.page_epoch(&aad, &page[..40])), (Some(7), None));
        assert_eq!(clone.record_epoch(RecordKind::Xattr, b"c", &record), Some(7));
        assert_eq!(clone.open_page(&aad, &mut page.clone()), Ok(7));
        let mut newer = [6; PAGE_LEN];
        clone.outer().seal_page(&aad, &mut newer).unwrap();
        assert_eq!(ring.open_page(&aad, &mut newer), Ok(9));
        // Epochs that are not given again stay, and no given key replaces another of its number.
        ring.add(&[(2, key(2))], &[(9, key(8)), (1, key(1))]);
        assert_eq!((clone.newest(), clone.inners().len()), ((4, 9), 3));
        assert_eq!(clone.open_page(&aad, &mut page), Ok(7));
        assert!(clone.open_record(RecordKind::Xattr, b"c", &record).is_ok());
        let again = KeyRing::of_epochs(Suite::Aes, &[(4, key(4))], &[(9, key(9))]);
        assert_eq!(again.open_record(RecordKind::Xattr, b"c", &record), Err(OpenError::NoKey));
    }

    #[test]
    fn keys_without_numbers_count_from_the_oldest() {
        let ring = KeyRing::new(Suite::Aes, &[key(1), key(2)], &[key(3), key(4), key(5)]);
        assert_eq!(ring.newest(), (2, 3));
        assert_eq!(ring.newest_inner().newest(), (2, 3));
        assert_eq!((ring.inners().len(), ring.newest_inner().inners().len()), (2, 1));
    }
}
