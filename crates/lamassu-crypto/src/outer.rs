//! Tier two: pages, sealed records and attribute names under K_out (§5, §7, §9).
use crate::{NoRandom, Secret, Suite, Unauthentic};
use lamassu_format::PAGE_LEN;
/// Kinds of sealed record (§5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordKind {
    /// 1
    Directory = 1,
    /// 2
    Symlink = 2,
    /// 3
    SymlinkHead = 3,
    /// 4
    SymlinkRest = 4,
    /// 5
    Xattr = 5,
}
/// K_out of one epoch, expanded for a suite.
pub struct OuterKey {
    suite: Suite,
}
impl OuterKey {
    /// Expands `k_out`.
    pub fn new(suite: Suite, k_out: &Secret<32>) -> Self {
        let _ = k_out;
        OuterKey { suite }
    }
    /// The suite.
    pub fn suite(&self) -> Suite {
        self.suite
    }
    /// Seals bytes 56.. of `page` in place under a random nonce and fills nonce, tag and epoch tag.
    pub fn seal_page(&self, aad: &[u8; 16], page: &mut [u8; PAGE_LEN]) -> Result<(), NoRandom> {
        let _ = (aad, page);
        todo!()
    }
    /// The same with the nonce of a convergent page.
    pub fn seal_page_convergent(&self, aad: &[u8; 16], page: &mut [u8; PAGE_LEN]) {
        let _ = (aad, page);
        todo!()
    }
    /// Whether the epoch tag says that this key sealed the page.
    pub fn matches_page(&self, aad: &[u8; 16], page: &[u8; PAGE_LEN]) -> bool {
        let _ = (aad, page);
        todo!()
    }
    /// Opens in place. On failure the page's content is unspecified.
    pub fn open_page(&self, aad: &[u8; 16], page: &mut [u8; PAGE_LEN]) -> Result<(), Unauthentic> {
        let _ = (aad, page);
        todo!()
    }
    /// A sealed record.
    pub fn seal_record(&self, kind: RecordKind, context: &[u8], content: &[u8]) -> Result<Vec<u8>, NoRandom> {
        let _ = (kind, context, content);
        todo!()
    }
    /// Whether the epoch tag says that this key sealed the record.
    pub fn matches_record(&self, kind: RecordKind, context: &[u8], record: &[u8]) -> bool {
        let _ = (kind, context, record);
        todo!()
    }
    /// Content of a sealed record.
    pub fn open_record(&self, kind: RecordKind, context: &[u8], record: &[u8]) -> Result<Vec<u8>, Unauthentic> {
        let _ = (kind, context, record);
        todo!()
    }
    /// AES-SIV of an attribute's name.
    pub fn seal_xattr_name(&self, name: &[u8]) -> Vec<u8> {
        let _ = name;
        todo!()
    }
    /// And back.
    pub fn open_xattr_name(&self, sealed: &[u8]) -> Result<Vec<u8>, Unauthentic> {
        let _ = sealed;
        todo!()
    }
}
