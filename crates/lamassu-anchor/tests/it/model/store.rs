//! A slot of the store: a page, its block, and everything that they ever were.

use lamassu_anchor::Digest;
use lamassu_anchor::judge::Stamp;
use lamassu_crypto::wrap::sha256;
use std::hash::{Hash, Hasher};

/// A sealed page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageBytes {
    /// None in a convergent page.
    pub stamp: Option<Stamp>,
    /// The key of its block, which stands for the block's content.
    pub key: u8,
    /// The block's data may not have arrived: the key of what it was before, 0 for a hole.
    pub pending: Option<u8>,
    pub cut: bool,
}

impl Hash for PageBytes {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.digest().0.hash(state);
    }
}

impl PageBytes {
    pub fn digest(&self) -> Digest {
        let stamp = self.stamp.map_or([0; 24], |stamp| {
            let mut bytes = [0; 24];
            bytes[..4].copy_from_slice(&stamp.session.to_le_bytes());
            bytes[4..8].copy_from_slice(&stamp.sequence.to_le_bytes());
            bytes[8..].copy_from_slice(&stamp.file.0);
            bytes
        });
        let rest = [self.key, self.pending.map_or(0, |before| before + 1), self.cut.into()];
        Digest(sha256(&[&stamp[..], &rest].concat()))
    }

    /// The clean page without a stamp: equal for equal content.
    pub fn convergent(&self) -> PageBytes {
        PageBytes { stamp: None, key: self.key, pending: None, cut: false }
    }
}

/// All versions, the last one that a barrier has covered, and the one that is live (the last).
#[derive(Clone, Hash)]
struct Versions<T> {
    all: Vec<T>,
    durable: usize,
}

impl<T: Clone> Versions<T> {
    /// The version that is live from now on; what the store has seen it does not forget.
    fn crash(&mut self, keeps_all: bool) -> T {
        let kept = if keeps_all { self.all.len() - 1 } else { self.durable };
        let version = self.all[kept].clone();
        self.all.push(version.clone());
        self.durable = self.all.len() - 1;
        version
    }

    fn after_crash(&self) -> Vec<T> {
        self.all[self.durable..].to_vec()
    }
}

#[derive(Clone, Hash)]
pub struct Slot {
    pages: Versions<Option<PageBytes>>,
    data: Versions<u8>,
}

impl Default for Slot {
    fn default() -> Self {
        Slot { pages: Versions { all: vec![None], durable: 0 }, data: Versions { all: vec![0], durable: 0 } }
    }
}

impl Slot {
    pub fn write_page(&mut self, page: Option<PageBytes>) {
        self.pages.all.push(page);
    }

    pub fn write_data(&mut self, content: u8) {
        self.data.all.push(content);
    }

    pub fn barrier(&mut self) {
        self.pages.durable = self.pages.all.len() - 1;
        self.data.durable = self.data.all.len() - 1;
    }

    pub fn is_data_durable(&self) -> bool {
        self.data.durable == self.data.all.len() - 1
    }

    pub fn is_durable(&self) -> bool {
        self.pages.durable == self.pages.all.len() - 1 && self.is_data_durable()
    }

    /// What is there from now on, durably.
    pub fn crash(&mut self, keeps_all: bool) -> (Option<PageBytes>, u8) {
        (self.pages.crash(keeps_all), self.data.crash(keeps_all))
    }

    pub fn pages_after_crash(&self) -> Vec<Option<PageBytes>> {
        self.pages.after_crash()
    }

    pub fn data_after_crash(&self) -> Vec<u8> {
        self.data.after_crash()
    }

    pub fn all_pages(&self) -> impl Iterator<Item = &Option<PageBytes>> {
        self.pages.all.iter()
    }
}
