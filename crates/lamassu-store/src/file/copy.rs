//! Copying between files of a vault without decrypting: a block's key goes into a slot of the target's page, and its
//! ciphertext from one backing file to the other, which a store may do by sharing it.
//!
//! To the commit protocol these are blocks like any others (`docs/format.md` §13): the page with their keys is written
//! first, with `pending` bits, and recovery after a crash hashes the content. Nothing is verified on the way: a damaged
//! block is copied as it is, and reported when it is read.
//!
//! The source is locked against writers until the target's blocks are in the store, so the copied blocks fit the keys
//! in its pages.

use super::File;
use super::block::Block;
use super::primitives::Core;
use super::read::{Source, View};
use super::state::{Dirty, State};
use super::types::StoreError;
use crate::backend::BackendFile;
use lamassu_format::{BlockKey, BlockNo, ByteOffset, Keys, SlotKey, Suite};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes whose blocks are committed together.
const PIECE_LEN: u64 = 64 << 20;

/// A block of another file, as it lies in the store.
#[derive(Clone)]
pub(super) struct CopiedBlock {
    backing: Arc<dyn BackendFile>,
    offset: ByteOffset,
    /// Keys of the blocks that are copied together, and the index of this one among them.
    keys: Arc<Keys>,
    n: usize,
}

impl CopiedBlock {
    pub fn key(&self) -> &BlockKey {
        &self.keys.raw()[self.n]
    }

    /// Whether it is compressed, in a vault of this suite.
    pub fn is_compressed(&self, suite: Suite) -> bool {
        self.keys.is_compressed(self.n, suite)
    }

    /// Whether it follows another of `len` bytes without a gap.
    pub fn follows(&self, other: &CopiedBlock, len: usize) -> bool {
        self.offset == other.offset + len as u64 && Arc::ptr_eq(&self.backing, &other.backing)
    }

    /// Bytes of zeros at its end, of `len` in all, that its file does not keep. 0 if the store does not say.
    pub fn zeros_not_kept(&self, len: usize) -> usize {
        let end = (self.offset + len as u64).0;
        let Ok(Some(hole)) = self.backing.seek_hole(self.offset.0) else { return 0 };
        if hole >= end || !matches!(self.backing.seek_data(hole), Ok(data) if data.is_none_or(|data| data >= end)) {
            return 0;
        }
        (end - hole) as usize
    }

    /// Copies this block and those that follow it, `count` blocks of `size` bytes in all. If its file ends with the
    /// ciphertext of the last block, zeros follow: that block is written whole, by one write (I13).
    pub fn copy_to(&self, to: &dyn BackendFile, offset: ByteOffset, count: usize, size: usize) -> io::Result<()> {
        let len = (count * size) as u64;
        let there = self.backing.stat()?.len.saturating_sub(self.offset.0);
        if there >= len || there <= len - size as u64 {
            return to.copy_from(&*self.backing, self.offset.0, offset.0, len);
        }
        let before = len - size as u64;
        if before > 0 {
            to.copy_from(&*self.backing, self.offset.0, offset.0, before)?;
        }
        let mut last = vec![0; size];
        let got = self.backing.read_at((self.offset + before).0, &mut last)?;
        last[got..].fill(0);
        to.write_at((offset + before).0, &last)
    }
}

/// [`File::copy_from`].
pub(super) fn copy(from: &File, to: &File, from_offset: u64, offset: u64, len: u64) -> Result<Option<u64>, StoreError> {
    let geo = *from.core.geo();
    let size = geo.block_size();
    if from.core.ctx.domain.is_salted() {
        return Ok(None); // a key that depends on its file opens nothing in another
    }
    let aligned = from_offset.is_multiple_of(size) && offset.is_multiple_of(size);
    if std::ptr::eq(from, to) || !aligned || len < size || geo != *to.core.geo() {
        return Ok(None);
    }
    if to.core.ctx.read_only {
        return Err(StoreError::ReadOnly);
    }
    from.flush()?;
    // Both locks are taken in an order that is the same for a copy the other way.
    let (source, mut st);
    if std::ptr::from_ref(from) < std::ptr::from_ref(to) {
        source = from.state.read();
        st = to.exclusive();
    } else {
        st = to.exclusive();
        source = from.state.read();
    }
    if !source.buffer.is_empty() || source.failures.needs_rewrite() {
        return Ok(None);
    }
    // The form of a block depends on its file's profile.
    let is_final = |st: &State| !st.identity.is_changing() && !from.core.is_salted(&st.identity);
    if source.identity.profile() != st.identity.profile() || !is_final(&source) || !is_final(&st) {
        return Ok(None);
    }
    let end = from_offset.saturating_add(len).min(source.sizes.logical());
    let blocks = geo.block_at(from_offset)..geo.block_at(end);
    if blocks.is_empty() {
        return Ok(None);
    }
    let first_there = geo.block_at(offset);
    // Content that was written before the copy must survive a failed copy. Blocks of the copy replace buffered blocks
    // in their place, and are dropped if the copy fails. So those buffered blocks are committed first. Other buffered
    // blocks stay, and go to the store with the copy.
    let there = first_there..BlockNo(first_there.0.saturating_add(blocks.end - blocks.start));
    if st.buffer.first_in(there).is_some() {
        to.core.commit(&mut st)?;
    }
    let mut done = blocks.start;
    while done < blocks.end {
        let piece = done..blocks.end.min(done + PIECE_LEN / size);
        let there = first_there + (done - blocks.start);
        match copy_piece(&from.core, &source, &to.core, &mut st, piece, there) {
            Ok(0) => break,
            Ok(count) => done = done + count,
            Err(_) if done > blocks.start => break, // reported if it happens again
            Err(error) => return Err(error),
        }
    }
    Ok((done > blocks.start).then(|| (done - blocks.start) * size))
}

/// Copies as many blocks from the first of `blocks` on as are holes or ciphertext; returns their number.
fn copy_piece(
    from: &Core,
    source: &State,
    to: &Core,
    st: &mut State,
    blocks: Range<BlockNo>,
    there: BlockNo,
) -> Result<u64, StoreError> {
    let last = blocks.start + (blocks.end - blocks.start - 1);
    let Some(view) = from.view(source, blocks.start, last)? else { return Ok(0) };
    let found = Arc::new(copied_keys(from, source, &view, blocks.clone()));
    if found.is_empty() {
        return Ok(0);
    }
    to.prepare_write(st)?;
    let end = there + found.len() as u64;
    let size = end.0.checked_mul(to.geo().block_size()).ok_or(StoreError::TooLarge)?;
    to.check_size(st, size)?;
    // Before anything is changed: a page of the target that does not open forbids the copy.
    for g in to.geo().page_of(there).until(to.geo().last_page(size).next()) {
        to.good_page(st, g)?;
    }
    let before = st.sizes.logical();
    let copied = |n: usize| {
        let offset = from.geo().block_offset(blocks.start + n as u64);
        CopiedBlock { backing: from.backing.clone(), offset, keys: found.clone(), n }
    };
    let done = put_copies(to, st, there, &found, copied);
    if done.is_err() {
        // The source may change from here on, so no copy may stay buffered. A block that was not reached keeps its
        // content. A block that was written in part holds neither the old content nor the new; it gets the new content
        // here, to be written again.
        let copies = st.buffer.drop_copies();
        st.sizes.set_logical(before.max(st.sizes.stored()));
        for block in copies.into_iter().filter(|block| to.is_lost(st, *block)).collect::<Vec<_>>() {
            let mut bytes = Block::zeroed(to.ctx.block_len());
            let mut bad = |b: BlockNo, kind| Err(from.damaged(kind, from.geo().page_of(b), Some(b)));
            let read = from.read_blocks(
                &view,
                blocks.start + (block - there),
                &mut bytes,
                from.verify(&source.identity),
                &mut bad,
            );
            if read.is_ok() && to.geo().block_start(block) < st.sizes.logical() {
                st.buffer.put(block, Dirty::Data(bytes), false);
            }
        }
    }
    done.map(|()| found.len() as u64)
}

/// Keys of the blocks from the first on that are holes or ciphertext.
fn copied_keys(from: &Core, source: &State, view: &View<'_>, blocks: Range<BlockNo>) -> Keys {
    let mut found = Keys::default();
    for block in blocks.start.until(blocks.end) {
        let (g, i) = from.geo().slot_of(block);
        match from.source(source, view.entry(g), block, i) {
            Source::Sealed(key) => found.push(&SlotKey::new(*key)),
            Source::Zeros => found.push(&SlotKey::HOLE),
            Source::Bytes(_) | Source::Buffered(_) | Source::Bad(_) => break,
        }
    }
    found
}

/// Puts blocks with the keys `found` at block `there`, and commits them.
fn put_copies(
    to: &Core,
    st: &mut State,
    there: BlockNo,
    found: &Keys,
    copied: impl Fn(usize) -> CopiedBlock,
) -> Result<(), StoreError> {
    let geo = *to.geo();
    let start = geo.block_start(there);
    if start > st.sizes.logical() {
        to.grow(st, start)?;
    }
    // Holes below the end are punched; past the end there are zeros already.
    let mut n = 0;
    while n < found.len() {
        let run = (n..found.len()).take_while(|n| found.is_hole(*n)).count();
        if run > 0 {
            to.punch_range(st, geo.block_start(there + n as u64), run as u64 * geo.block_size())?;
        }
        n += run.max(1);
    }
    for n in (0..found.len()).filter(|n| found.is_keyed(*n)) {
        let block = there + n as u64;
        to.good_page(st, geo.page_of(block))?;
        st.buffer.put(block, Dirty::Copied(copied(n)), false);
    }
    st.sizes.extend_to(geo.block_start(there + found.len() as u64));
    st.identity.want_page();
    to.note_change();
    to.commit(st)
}
