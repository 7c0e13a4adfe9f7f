//! Metadata pages (`docs/format.md` §9): parsed and built again, and found behind a seal.

use crate::bytes::Bytes;
use crate::ring;
use lamassu_crypto::ring::OpenError;
use lamassu_format::page::SEALED_AT;
use lamassu_format::{Geometry, PAGE_LEN, Page, PageNo, Suite};

/// A page's plaintext: refused, or built again byte for byte; and its seal opens to it, and to nothing else.
pub fn page(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    let suite = bytes.one_of(&Suite::ALL);
    let size = 4096 << (bytes.u8() % 9);
    let geometry = Geometry::new(size, 1 + u16::from(bytes.u8() % 62)).expect("a geometry");
    let g = PageNo(match bytes.u8() {
        wide @ 0xf0.. => bytes.u64() >> (wide & 15),
        small => u64::from(small & 3),
    });
    let mut plain = [0; PAGE_LEN];
    let content = bytes.take(PAGE_LEN - SEALED_AT);
    plain[SEALED_AT..SEALED_AT + content.len()].copy_from_slice(content);
    if let Ok(page) = Page::parse(&plain, &geometry, g) {
        assert_eq!(page.build(&geometry, g)[SEALED_AT..], plain[SEALED_AT..], "two plaintexts for one page");
        assert!(page.keys.len() as u64 <= geometry.blocks_per_page() && page.previous.len() <= geometry.reserved());
        for i in 0..page.keys.len() {
            assert_eq!(page.previous_key(i).is_some(), page.replaced >> i & 1 == 1);
        }
    }
    let aad = geometry.page_aad(suite, g);
    let ring = ring(suite);
    let mut sealed = plain;
    ring.outer().seal_page_convergent(&aad, &mut sealed);
    let mut opened = sealed;
    assert_eq!(ring.open_page(&aad, &mut opened), Ok(1));
    assert_eq!(opened[SEALED_AT..], plain[SEALED_AT..]);
    let at = usize::from(bytes.u16()) % PAGE_LEN;
    sealed[at] ^= bytes.u8().max(1);
    let refused = ring.open_page(&aad, &mut sealed);
    assert!(matches!(refused, Err(OpenError::NoKey | OpenError::Unauthentic)), "byte {at} is not authenticated");
}
