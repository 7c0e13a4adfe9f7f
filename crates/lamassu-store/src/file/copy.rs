//! Copying between files of a vault without decrypting: a block's key goes into a slot of the target's page, and its ciphertext from one backing file to the
//! other, which a store may do by sharing it.
//!
//! To the commit protocol these are blocks like any others (`docs/format.md` §13): the page with their keys is written first, with `pending` bits, and whoever
//! meets those after a crash hashes the content. Nothing is verified on the way: a damaged block is copied as it is, and told by whoever reads it.
//!
//! The source is held against writers until the target's blocks are in the store, so what is copied is what its pages say.

use super::File;
use super::block::Block;
use super::open::HOLE;
use super::read::Source;
use super::state::{Core, Dirty, State};
use super::types::StoreError;
use crate::backend::BackendFile;
use lamassu_format::{BlockKey, Keys};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes whose blocks are committed together.
const PIECE_LEN: u64 = 64 << 20;

/// A block of another file, as it lies in the store.
#[derive(Clone)]
pub(super) struct Elsewhere {
    backing: Arc<dyn BackendFile>,
    offset: u64,
    /// Of the blocks that are copied with it, and which of them this is.
    keys: Arc<Keys>,
    n: usize,
}

impl Elsewhere {
    pub fn key(&self) -> &BlockKey {
        &self.keys[self.n]
    }

    /// Whether it lies right behind another of `len` bytes.
    pub fn follows(&self, other: &Elsewhere, len: usize) -> bool {
        self.offset == other.offset + len as u64 && Arc::ptr_eq(&self.backing, &other.backing)
    }

    /// Copies it, and what lies behind it, `len` bytes in all.
    pub fn copy_to(&self, to: &dyn BackendFile, offset: u64, len: u64) -> io::Result<()> {
        to.copy_from(&*self.backing, self.offset, offset, len)
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
    // Both, in an order that is the same for whoever copies the other way.
    let (source, mut st);
    if std::ptr::from_ref(from) < std::ptr::from_ref(to) {
        source = from.state.read();
        st = to.alone();
    } else {
        st = to.alone();
        source = from.state.read();
    }
    if !source.dirty.is_empty() || source.barrier_failed {
        return Ok(None);
    }
    let end = from_offset.saturating_add(len).min(source.size);
    let blocks = from_offset / size..end / size;
    if blocks.is_empty() {
        return Ok(None);
    }
    let first_there = offset / size;
    // What was written before is not the copy's to lose: blocks of it take the place of what is buffered there, and go again where the copy fails. What is
    // buffered elsewhere stays where it is, and goes to the store with the copy.
    let there = first_there..first_there.saturating_add(blocks.end - blocks.start);
    if st.dirty.range(there).next().is_some() {
        to.core.commit(&mut st)?;
    }
    let mut done = blocks.start;
    while done < blocks.end {
        let piece = done..blocks.end.min(done + PIECE_LEN / size);
        let there = first_there + (done - blocks.start);
        match copy_piece(&from.core, &source, &to.core, &mut st, piece, there) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(_) if done > blocks.start => break, // told if it happens again
            Err(error) => return Err(error),
        }
    }
    Ok((done > blocks.start).then(|| (done - blocks.start) * size))
}

fn is_copy(dirty: &Dirty) -> bool {
    matches!(dirty, Dirty::Elsewhere(_))
}

/// Copies as many blocks from the first of `blocks` on as are holes or ciphertext; returns their number.
fn copy_piece(
    from: &Core,
    source: &State,
    to: &Core,
    st: &mut State,
    blocks: Range<u64>,
    there: u64,
) -> Result<u64, StoreError> {
    let Some(view) = from.view(source, blocks.start, blocks.end - 1)? else { return Ok(0) };
    let mut found = Keys::default();
    for block in blocks.clone() {
        let (g, i) = from.geo().slot_of(block);
        match from.source(source, view.entry(g), block, i) {
            Source::Sealed(key) => found.push(*key),
            Source::Zeros => found.push(HOLE),
            Source::Bytes(_) | Source::Buffered(_) | Source::Bad(_) => break,
        }
    }
    if found.is_empty() {
        return Ok(0);
    }
    let size = to.geo().block_size();
    let found = Arc::new(found);
    let elsewhere = |n: usize| {
        let offset = from.geo().block_offset(blocks.start + n as u64);
        Elsewhere { backing: from.backing.clone(), offset, keys: found.clone(), n }
    };
    to.prepare_write(st)?;
    let end = (there + found.len() as u64).checked_mul(size).ok_or(StoreError::TooLarge)?;
    to.check_size(st, end)?;
    // Before anything is changed: a page of the target that does not open forbids the copy.
    for g in to.geo().slot_of(there).0..=to.geo().slot_of(there + found.len() as u64 - 1).0 {
        to.good_page(st, g)?;
    }
    let before = st.size;
    let mut put = || {
        if there * size > st.size {
            to.grow(st, there * size)?;
        }
        // What must be zero there is made so by the ways of punching; what lies past the end is zero already.
        let mut n = 0;
        while n < found.len() {
            let run = found[n..].iter().take_while(|key| **key == HOLE).count();
            if run > 0 {
                to.punch_range(st, (there + n as u64) * size, run as u64 * size)?;
            }
            n += run.max(1);
        }
        for (n, key) in found.iter().enumerate() {
            if *key == HOLE {
                continue;
            }
            to.good_page(st, to.geo().slot_of(there + n as u64).0)?;
            st.dirty.insert(there + n as u64, Dirty::Elsewhere(elsewhere(n)));
        }
        st.size = st.size.max(end);
        st.wants_page = true;
        to.note_change();
        to.commit(st)
    };
    let done = put();
    if done.is_err() {
        // The source may change from here on, so none may stay, whatever failed. What was not reached keeps what it had; what was reached in part holds
        // neither that nor what it should, and gets its content from here, to be written again.
        let torn: Vec<u64> =
            st.dirty.iter().filter_map(|(b, d)| (is_copy(d) && to.is_lost(st, *b)).then_some(*b)).collect();
        st.dirty.retain(|_, dirty| !is_copy(dirty));
        st.size = before.max(st.disk_size);
        for block in torn {
            let mut bytes = Block::zeroed(size as usize);
            let mut bad = |b: u64, kind| Err(from.damaged(kind, from.geo().slot_of(b).0, Some(b)));
            let read = from.read_blocks(&view, block - there + blocks.start, &mut bytes, from.verify(), &mut bad);
            if read.is_ok() && block * size < st.size {
                st.dirty.insert(block, Dirty::Data(bytes));
            }
        }
    }
    done.map(|()| found.len() as u64)
}
