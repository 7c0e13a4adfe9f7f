//! The metadata page (§9): its plaintext, parsed strictly and built back.
//!
//! A page holds the keys of its blocks, and the tail of its file. Dropping it wipes both.

use crate::geometry::SLOTS;
use crate::profile::{KeyKind, Profile};
use crate::{FileId, Geometry, KEY_LEN, Keys, PAGE_LEN, PageNo, SessionTag, SlotKey};
use zeroize::Zeroize;

/// Offset of the AEAD tag.
pub const TAG_AT: usize = 24;
/// Where the sealed part begins.
pub const SEALED_AT: usize = 56;
const SIZE_AT: usize = 56;
const FILE_ID_AT: usize = 64;
const SESSION_AT: usize = 80;
const SEQUENCE_AT: usize = 84;
const FLAGS_AT: usize = 88;
const SESSION_TAG_AT: usize = 90;
const PENDING_AT: usize = 96;
const REPLACED_AT: usize = 112;
const SLOTS_AT: usize = 128;
const _: () = assert!(SLOTS_AT + SLOTS * KEY_LEN == PAGE_LEN);

const FLAG_TAIL: u16 = 1;
const FLAG_SPARSE: u16 = 2;
const FLAG_CUT: u16 = 4;
const PROFILE_SHIFT: u32 = 3;
const PROFILE_BITS: u16 = (1 << Profile::BITS) - 1;
const USED_SHIFT: u32 = 8;
const USED_BITS: u16 = 0x7f;
const _: () = assert!(SLOTS <= USED_BITS as usize && PROFILE_SHIFT + Profile::BITS == USED_SHIFT);
const FLAG_CHANGING: u16 = 1 << 15;
// Every bit has a meaning, so none is left to refuse.
const _: () = assert!(
    FLAG_TAIL | FLAG_SPARSE | FLAG_CUT | PROFILE_BITS << PROFILE_SHIFT | USED_BITS << USED_SHIFT | FLAG_CHANGING
        == u16::MAX
);

/// Why a page with a good seal is not a page: a faulty or newer program wrote it.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
pub enum PageError {
    /// A flag that does not belong to this page, or a profile that does not exist.
    #[error("page has flags {0:#x} that version 1 does not allow here")]
    Flags(u16),
    /// More key slots in use than the page has blocks.
    #[error("page uses {0} key slots of {1}")]
    Used(usize, usize),
    /// `pending` or `replaced` has a bit that it may not have, or more than R.
    #[error("page bitmaps contradict each other or the slots in use")]
    Bitmaps,
    /// A tail with no bytes, with a whole block, or without room for it.
    #[error("page tail does not fit its size")]
    Tail,
    /// A convergent page has no session and nothing unfinished; every other page has a session.
    #[error("page's session and state contradict its file id")]
    Session,
    /// Bytes that must be zero are not.
    #[error("page has data in unused slots")]
    Unused,
}

/// The plaintext of a metadata page.
#[derive(Clone, PartialEq, Eq)]
pub struct Page {
    /// Size of the file, or floor in page 0 of a longer file, in bytes.
    pub size: u64,
    /// Random id of the file; none in a convergent page.
    pub file_id: FileId,
    /// The session that wrote it, from 1; zero in a convergent page.
    pub session: u32,
    /// Random bits of that session; zero in a convergent page.
    pub session_tag: SessionTag,
    /// How many pages that session had written, including this one; zero in a convergent page.
    pub sequence: u32,
    /// Pages below the floor may be absent (page 0 only).
    pub sparse: bool,
    /// A shrink was begun: `size` is decisive (page 0 only).
    pub cut: bool,
    /// How its blocks are protected.
    pub profile: Profile,
    /// The profile is being changed: blocks of this page may still have the form of another profile. In page 0 it
    /// applies to the whole file: other pages may have other profiles.
    pub changing: bool,
    /// Blocks whose data is not known to be durable, bit i for slot i.
    pub pending: u128,
    /// Blocks whose previous key is kept, within `pending`.
    pub replaced: u128,
    /// Keys of the slots in use; zero for a hole.
    pub keys: Keys,
    /// Previous keys of the `replaced` blocks, ascending by block.
    pub previous: Keys,
    /// The last partial block of the file; empty if it is not in this page.
    pub tail: Vec<u8>,
}

/// Never shows keys or content.
impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Page")
            .field("size", &self.size)
            .field("session", &self.session)
            .field("sequence", &self.sequence)
            .field("sparse", &self.sparse)
            .field("cut", &self.cut)
            .field("profile", &self.profile)
            .field("changing", &self.changing)
            .field("pending", &format_args!("{:#x}", self.pending))
            .field("replaced", &format_args!("{:#x}", self.replaced))
            .field("used", &self.keys.len())
            .field("tail_len", &self.tail.len())
            .finish_non_exhaustive()
    }
}

/// The keys wipe themselves.
impl Drop for Page {
    fn drop(&mut self) {
        self.tail.zeroize();
    }
}

impl Page {
    /// A page without blocks.
    pub fn empty(file_id: FileId) -> Page {
        Page {
            size: 0,
            file_id,
            session: 0,
            session_tag: SessionTag::NONE,
            sequence: 0,
            sparse: false,
            cut: false,
            profile: Profile::DEFAULT,
            changing: false,
            pending: 0,
            replaced: 0,
            keys: Keys::default(),
            previous: Keys::default(),
            tail: Vec::new(),
        }
    }

    /// Clears id, session and sequence: a convergent page has none.
    pub fn clear_stamp(&mut self) {
        (self.file_id, self.session, self.session_tag, self.sequence) = (FileId::NONE, 0, SessionTag::NONE, 0);
    }

    /// Whether `used` keys, `previous` previous keys and a tail of `tail` bytes fit one page.
    pub fn fits(used: usize, previous: usize, tail: usize) -> bool {
        used + previous + tail.div_ceil(KEY_LEN) <= SLOTS
    }

    /// Previous key of slot `i`, if `replaced`.
    pub fn previous_key(&self, i: usize) -> Option<SlotKey> {
        if self.replaced >> i & 1 == 0 {
            return None;
        }
        let rank = (self.replaced & ((1u128 << i) - 1)).count_ones() as usize;
        self.previous.get(rank)
    }

    /// Parses the opened page `g`. Bytes before [`SEALED_AT`] are ignored.
    pub fn parse(bytes: &[u8; PAGE_LEN], geometry: &Geometry, g: PageNo) -> Result<Page, PageError> {
        let flags = u16::from_le_bytes([bytes[FLAGS_AT], bytes[FLAGS_AT + 1]]);
        if g > PageNo::ZERO && flags & (FLAG_SPARSE | FLAG_CUT) != 0 {
            return Err(PageError::Flags(flags));
        }
        let profile = Profile::of_number((flags >> PROFILE_SHIFT & PROFILE_BITS) as u8);
        let (profile, changing) = (profile.ok_or(PageError::Flags(flags))?, flags & FLAG_CHANGING != 0);
        let used = (flags >> USED_SHIFT & USED_BITS) as usize;
        let used_max = geometry.blocks_per_page() as usize;
        if used > used_max {
            return Err(PageError::Used(used, used_max));
        }
        let pending = u128_at(bytes, PENDING_AT);
        let replaced = u128_at(bytes, REPLACED_AT);
        let previous_len = replaced.count_ones() as usize;
        if pending >> used != 0 || replaced & !pending != 0 || previous_len > geometry.reserved() {
            return Err(PageError::Bitmaps);
        }
        let size = u64_at(bytes, SIZE_AT);
        let tail_len = match flags & FLAG_TAIL {
            0 => 0,
            _ => tail_len(size, used, previous_len, geometry, g)?,
        };
        let tail_at = PAGE_LEN - tail_len.div_ceil(KEY_LEN) * KEY_LEN;
        let free_at = SLOTS_AT + (used + previous_len) * KEY_LEN;
        if bytes[free_at..tail_at].iter().chain(&bytes[tail_at + tail_len..]).any(|&b| b != 0) {
            return Err(PageError::Unused);
        }
        let file_id = FileId(bytes[FILE_ID_AT..SESSION_AT].try_into().expect("16 bytes"));
        let (session, sequence) = (u32_at(bytes, SESSION_AT), u32_at(bytes, SEQUENCE_AT));
        let is_convergent = file_id.is_none();
        let session_tag = SessionTag(bytes[SESSION_TAG_AT..PENDING_AT].try_into().expect("6 bytes"));
        let is_unstamped = sequence == 0 && session_tag == SessionTag::NONE;
        let is_at_rest = pending == 0 && flags & (FLAG_SPARSE | FLAG_CUT) == 0 && is_unstamped && g == PageNo::ZERO;
        // The keys of random ones come from the file's id.
        let is_final = !changing && profile.key() == KeyKind::Convergent;
        if is_convergent != (session == 0) || (is_convergent && !(is_at_rest && is_final)) {
            return Err(PageError::Session);
        }
        let slots = |range: std::ops::Range<usize>| -> Keys {
            let slots = &bytes[SLOTS_AT + range.start * KEY_LEN..SLOTS_AT + range.end * KEY_LEN];
            let (slots, _) = slots.as_chunks::<KEY_LEN>();
            Keys::from(slots)
        };
        Ok(Page {
            size,
            file_id,
            session,
            session_tag,
            sequence,
            sparse: flags & FLAG_SPARSE != 0,
            cut: flags & FLAG_CUT != 0,
            profile,
            changing,
            pending,
            replaced,
            keys: slots(0..used),
            previous: slots(used..used + previous_len),
            tail: bytes[tail_at..tail_at + tail_len].to_vec(),
        })
    }

    /// Builds the plaintext. Bytes before [`SEALED_AT`] are zero; the seal fills them.
    ///
    /// # Panics
    /// If the page does not obey §9. A page is checked just before it is written, so that no faulty one is ever
    /// written.
    pub fn build(&self, geometry: &Geometry, g: PageNo) -> Box<[u8; PAGE_LEN]> {
        let mut bytes = Box::new([0u8; PAGE_LEN]);
        let mut flags = (self.keys.len() as u16) << USED_SHIFT;
        flags |= if self.tail.is_empty() { 0 } else { FLAG_TAIL };
        flags |= if self.sparse { FLAG_SPARSE } else { 0 };
        flags |= if self.cut { FLAG_CUT } else { 0 };
        flags |= u16::from(self.profile.number()) << PROFILE_SHIFT;
        flags |= if self.changing { FLAG_CHANGING } else { 0 };
        assert!(Page::fits(self.keys.len(), self.previous.len(), self.tail.len()), "page overflows");
        bytes[SIZE_AT..FILE_ID_AT].copy_from_slice(&self.size.to_le_bytes());
        bytes[FILE_ID_AT..SESSION_AT].copy_from_slice(&self.file_id.0);
        bytes[SESSION_AT..SEQUENCE_AT].copy_from_slice(&self.session.to_le_bytes());
        bytes[SEQUENCE_AT..FLAGS_AT].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[FLAGS_AT..SESSION_TAG_AT].copy_from_slice(&flags.to_le_bytes());
        bytes[SESSION_TAG_AT..PENDING_AT].copy_from_slice(&self.session_tag.0);
        bytes[PENDING_AT..REPLACED_AT].copy_from_slice(&self.pending.to_le_bytes());
        bytes[REPLACED_AT..SLOTS_AT].copy_from_slice(&self.replaced.to_le_bytes());
        let previous_at = SLOTS_AT + self.keys.len() * KEY_LEN;
        for (at, keys) in [(SLOTS_AT, &self.keys), (previous_at, &self.previous)] {
            let keys = keys.raw().as_flattened();
            bytes[at..at + keys.len()].copy_from_slice(keys);
        }
        let tail_at = PAGE_LEN - self.tail.len().div_ceil(KEY_LEN) * KEY_LEN;
        bytes[tail_at..tail_at + self.tail.len()].copy_from_slice(&self.tail);
        let back = Page::parse(&bytes, geometry, g);
        assert_eq!(back.as_ref(), Ok(self), "page {g} would not read back");
        bytes
    }
}

fn tail_len(size: u64, used: usize, previous: usize, geometry: &Geometry, g: PageNo) -> Result<usize, PageError> {
    let start = geometry.first_block(g).0.checked_add(used as u64).and_then(|b| b.checked_mul(geometry.block_size()));
    let len = start.and_then(|start| size.checked_sub(start)).ok_or(PageError::Tail)?;
    let is_full = used as u64 == geometry.blocks_per_page();
    if is_full || len == 0 || len >= geometry.block_size() || !Page::fits(used, previous, len as usize) {
        return Err(PageError::Tail);
    }
    Ok(len as usize)
}

fn u32_at(bytes: &[u8; PAGE_LEN], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8; PAGE_LEN], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn u128_at(bytes: &[u8; PAGE_LEN], at: usize) -> u128 {
    u128::from_le_bytes(bytes[at..at + 16].try_into().expect("16 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry::new(4096, 8).unwrap()
    }

    fn stamped(profile: Profile) -> Page {
        let mut page = Page::empty(FileId([1; 16]));
        (page.size, page.tail, page.profile) = (5, vec![7; 5], profile);
        (page.session_tag, page.session, page.sequence) = (SessionTag([3; 6]), 4, 5);
        page
    }

    #[test]
    fn a_page_says_its_profile_and_the_default_takes_no_flag() {
        for profile in (0..=u8::MAX).filter_map(Profile::of_number) {
            for changing in [false, true] {
                for g in [PageNo::ZERO, PageNo(1)] {
                    let mut page = stamped(profile);
                    (page.changing, page.size) = (changing, geometry().page_start(g) + 5);
                    let bytes = page.build(&geometry(), g);
                    let flags = [1 | profile.number() << 3, u8::from(changing) << 7];
                    assert_eq!(bytes[FLAGS_AT..FLAGS_AT + 2], flags);
                    assert_eq!(Page::parse(&bytes, &geometry(), g), Ok(page));
                }
            }
        }
    }

    #[test]
    fn no_page_has_flags_that_mean_nothing() {
        let bytes = *stamped(Profile::DEFAULT).build(&geometry(), PageNo::ZERO);
        // Plain blocks have no keys that could be random, and no cipher that could be another.
        for flags in [1 | 5 << 3, 1 | 7 << 3, 1 | 9 << 3, 1 | 27 << 3] {
            let mut bytes = bytes;
            bytes[FLAGS_AT] = flags;
            assert_eq!(Page::parse(&bytes, &geometry(), PageNo::ZERO), Err(PageError::Flags(flags.into())));
        }
    }

    #[test]
    fn a_convergent_page_has_no_random_keys_and_no_change_under_way() {
        let parsed = |profile: Profile, changing: bool| {
            let mut page = stamped(profile);
            page.changing = changing;
            let mut bytes = *page.build(&geometry(), PageNo::ZERO);
            bytes[FILE_ID_AT..FLAGS_AT].fill(0);
            bytes[SESSION_TAG_AT..PENDING_AT].fill(0);
            Page::parse(&bytes, &geometry(), PageNo::ZERO).map(|page| page.profile)
        };
        for profile in (0..=u8::MAX).filter_map(Profile::of_number) {
            let is_random = profile.key() == KeyKind::Random;
            assert_eq!(parsed(profile, false), if is_random { Err(PageError::Session) } else { Ok(profile) });
            assert_eq!(parsed(profile, true), Err(PageError::Session));
        }
    }
}
