//! Tier two: pages, sealed records and attribute names under K_out (§5, §7, §9).
//!
//! Pages and records share one head: nonce (24 bytes), tag (16), epoch tag (16), then ciphertext.

use crate::aead::Aead;
use crate::name::{siv_open, siv_seal};
use crate::secret::{Secret, without_trace};
use crate::suite::CipherSuite;
use crate::{NoRandom, Suite, Unauthentic, derive, wrap};
use lamassu_format::{PAGE_LEN, PageAad, VERSION};

const NONCE_LEN: usize = 24;
const TAG_LEN: usize = 16;
/// Bytes before the ciphertext of a page or record.
pub const HEAD_LEN: usize = NONCE_LEN + TAG_LEN + TAG_LEN;
const XATTR_AAD: &[u8] = b"lamassu v1 xattr";

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
    /// 6
    ParentSlot = 6,
    /// 7
    Sessions = 7,
    /// 8
    Root = 8,
    /// 9
    Object = 9,
}

/// K_out of one epoch, expanded for a suite.
pub struct OuterKey {
    suite: Suite,
    page: Sealer,
    record: Sealer,
    page_convergent: Secret<32>,
    nonce: Secret<32>,
    xattr_name: Secret<64>,
}

impl OuterKey {
    /// Expands `k_out`.
    pub fn new(suite: Suite, k_out: &Secret<32>) -> Self {
        without_trace(|| OuterKey {
            suite,
            page: Sealer::new(suite, k_out, "page seal", "page select"),
            record: Sealer::new(suite, k_out, "record seal", "record select"),
            page_convergent: derive(suite, k_out, "page convergent"),
            nonce: derive(suite, k_out, "nonce"),
            xattr_name: derive(suite, k_out, "xattr name"),
        })
    }

    /// Seals bytes 56.. of `page` in place under a fresh nonce and fills nonce, tag and epoch tag.
    ///
    /// # Errors
    /// [`NoRandom`] when getrandom(2) fails; the page is then as it was.
    pub fn seal_page(&self, aad: &PageAad, page: &mut [u8; PAGE_LEN]) -> Result<(), NoRandom> {
        let nonce = wrap::fresh_nonce(&self.nonce, &aad.0, &page[HEAD_LEN..])?;
        self.page.seal(&nonce, &aad.0, page);
        Ok(())
    }

    /// The same under a given nonce, for stored vectors. Two pages under one nonce reveal their XOR.
    #[doc(hidden)]
    pub fn seal_page_with(&self, nonce: &[u8; 24], aad: &PageAad, page: &mut [u8; PAGE_LEN]) {
        self.page.seal(nonce, &aad.0, page);
    }

    /// The same with the nonce of a convergent page (§9).
    pub fn seal_page_convergent(&self, aad: &PageAad, page: &mut [u8; PAGE_LEN]) {
        let prf = wrap::hmac_of(&self.page_convergent, &[&aad.0, &page[HEAD_LEN..]]);
        let nonce = prf.first_chunk().expect("32 bytes have a first 24");
        self.page.seal(nonce, &aad.0, page);
    }

    /// Whether this key sealed the page, by the epoch tag in its first [`HEAD_LEN`] bytes; false if there are fewer.
    pub fn matches_page(&self, aad: &PageAad, page: &[u8]) -> bool {
        self.page.matches(&aad.0, page)
    }

    /// Opens in place. On failure the page's content is unspecified.
    ///
    /// # Errors
    /// [`Unauthentic`] for another key, another AAD or a changed page.
    pub fn open_page(&self, aad: &PageAad, page: &mut [u8; PAGE_LEN]) -> Result<(), Unauthentic> {
        self.page.open(&aad.0, page)
    }

    /// A sealed record.
    ///
    /// # Errors
    /// [`NoRandom`] when getrandom(2) fails.
    pub fn seal_record(&self, kind: RecordKind, context: &[u8], content: &[u8]) -> Result<Vec<u8>, NoRandom> {
        let nonce = wrap::fresh_nonce(&self.nonce, &self.record_aad(kind, context), content)?;
        Ok(self.seal_record_with(&nonce, kind, context, content))
    }

    /// The same under a given nonce, for stored vectors.
    #[doc(hidden)]
    pub fn seal_record_with(&self, nonce: &[u8; 24], kind: RecordKind, context: &[u8], content: &[u8]) -> Vec<u8> {
        // Reserved in full at once, so that no reallocation leaves plaintext behind.
        let mut record = Vec::with_capacity(HEAD_LEN + content.len());
        record.resize(HEAD_LEN, 0);
        record.extend_from_slice(content);
        self.record.seal(nonce, &self.record_aad(kind, context), &mut record);
        record
    }

    /// Whether this key sealed the record, by its epoch tag.
    pub fn matches_record(&self, kind: RecordKind, context: &[u8], record: &[u8]) -> bool {
        self.record.matches(&self.record_aad(kind, context), record)
    }

    /// Content of a sealed record.
    ///
    /// # Errors
    /// [`Unauthentic`] for another key, kind or context, a changed or a short record.
    pub fn open_record(&self, kind: RecordKind, context: &[u8], record: &[u8]) -> Result<Vec<u8>, Unauthentic> {
        let mut opened = record.to_vec();
        self.record.open(&self.record_aad(kind, context), &mut opened)?;
        opened.drain(..HEAD_LEN);
        Ok(opened)
    }

    /// AES-SIV of an attribute's name: 16 bytes longer than the name.
    pub fn seal_xattr_name(&self, name: &[u8]) -> Vec<u8> {
        siv_seal(&self.xattr_name, XATTR_AAD, name)
    }

    /// And back.
    ///
    /// # Errors
    /// [`Unauthentic`] for a name sealed by another epoch, a changed or a short one.
    pub fn open_xattr_name(&self, sealed: &[u8]) -> Result<Vec<u8>, Unauthentic> {
        siv_open(&self.xattr_name, XATTR_AAD, sealed)
    }

    fn record_aad(&self, kind: RecordKind, context: &[u8]) -> Vec<u8> {
        let [v0, v1] = VERSION.to_le_bytes();
        [&[v0, v1, self.suite.id(), kind as u8], context].concat()
    }
}

/// The AEAD of pages or of records, and the PRF of its epoch tags.
struct Sealer {
    aead: Box<dyn Aead>,
    select: Secret<32>,
}

impl Sealer {
    fn new(suite: Suite, k_out: &Secret<32>, seal: &str, select: &str) -> Self {
        let aead = (CipherSuite::of(suite).aead)(&derive(suite, k_out, seal));
        Sealer { aead, select: derive(suite, k_out, select) }
    }

    fn epoch_tag(&self, nonce: &[u8; NONCE_LEN], aad: &[u8]) -> [u8; TAG_LEN] {
        let prf = wrap::hmac_of(&self.select, &[nonce, aad]);
        *prf.first_chunk().expect("32 bytes have a first 16")
    }

    /// Seals the bytes after the head, and writes the head. `sealed` is at least a head long.
    fn seal(&self, nonce: &[u8; NONCE_LEN], aad: &[u8], sealed: &mut [u8]) {
        let (head, content) = sealed.split_at_mut(HEAD_LEN);
        let tag = without_trace(|| self.aead.seal(nonce, aad, content));
        head[..NONCE_LEN].copy_from_slice(nonce);
        head[NONCE_LEN..NONCE_LEN + TAG_LEN].copy_from_slice(&tag);
        head[NONCE_LEN + TAG_LEN..].copy_from_slice(&self.epoch_tag(nonce, aad));
    }

    fn matches(&self, aad: &[u8], sealed: &[u8]) -> bool {
        head(sealed).is_some_and(|h| wrap::equal(&self.epoch_tag(h.nonce, aad), h.epoch_tag))
    }

    fn open(&self, aad: &[u8], sealed: &mut [u8]) -> Result<(), Unauthentic> {
        let Head { nonce: &nonce, tag: &tag, .. } = head(sealed).ok_or(Unauthentic)?;
        without_trace(|| self.aead.open(&nonce, aad, &mut sealed[HEAD_LEN..], &tag))
    }
}

/// The head of a page or record.
struct Head<'a> {
    nonce: &'a [u8; NONCE_LEN],
    tag: &'a [u8; TAG_LEN],
    epoch_tag: &'a [u8; TAG_LEN],
}

/// `None` if it is too short.
fn head(sealed: &[u8]) -> Option<Head<'_>> {
    let (nonce, rest) = sealed.split_first_chunk()?;
    let (tag, rest) = rest.split_first_chunk()?;
    Some(Head { nonce, tag, epoch_tag: rest.first_chunk()? })
}
