//! The ciphertext of a round of a commit, and where it lies: sealed now, before the commit, or by another file.

use super::copy::CopiedBlock;
use super::form::Numbers;
use super::plan::Round;
use super::presealed::SealedBlock;
use super::primitives::Core;
use super::state::{Dirty, State};
use super::types::StoreError;
use crate::backend::BackendFile;
use lamassu_crypto::compress::stored_len;
use lamassu_format::{BlockNo, ByteOffset, Keys, PAGE_LEN, Suite};
use std::cell::Cell;

/// Capacity of the ciphertext buffer that a thread keeps.
const SCRATCH_KEPT_MAX: usize = 16 << 20;

thread_local! {
    /// Memory for the ciphertext of a round, used again: fresh memory of that size costs a page fault for every 4096
    /// bytes.
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// The ciphertext of a round's data blocks.
pub(super) struct Ciphertext {
    suite: Suite,
    /// Bytes of a block.
    len: usize,
    pub keys: Keys,
    places: Vec<Location>,
    scratch: Vec<u8>,
}

/// Where a block's ciphertext lies.
enum Location {
    /// In the scratch memory, from that byte on.
    Scratch(usize),
    Presealed(SealedBlock),
    OtherFile(CopiedBlock),
}

/// Blocks that are written by one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub n: usize,
    pub count: usize,
    /// Bytes: all but zeros at the end of the last block.
    pub bytes: usize,
}

impl Stretch {
    /// Whether it ends with a block of which not all is written.
    pub fn has_zeros_left_out(&self, of: &Ciphertext) -> bool {
        self.bytes < self.count * of.len
    }
}

impl Ciphertext {
    /// The stretches of `count` blocks from the `n`th on, which lie together from block `first` on. Zeros behind
    /// ciphertext are not written if `leaves_zeros` says that the store has zeros there already.
    pub fn stretches(
        &self,
        first: BlockNo,
        (n, count): (usize, usize),
        leaves_zeros: impl Fn(usize) -> bool,
    ) -> Vec<(BlockNo, Stretch)> {
        let mut stretches = Vec::new();
        for (at, count) in self.pieces(n, count) {
            let mut done = 0;
            while done < count {
                let stretch = self.stretch(at + done, count - done, &leaves_zeros);
                stretches.push((first + (at + done - n) as u64, stretch));
                done += stretch.count;
            }
        }
        stretches
    }

    /// Writes blocks, of one of [`Ciphertext::pieces`].
    pub fn write(&self, stretch: Stretch, to: &dyn BackendFile, offset: ByteOffset) -> std::io::Result<()> {
        let Stretch { n, count, bytes } = stretch;
        match &self.places[n] {
            Location::OtherFile(block) => block.copy_to(to, offset, count, self.len),
            Location::Scratch(_) | Location::Presealed(_) => {
                let mut parts = self.parts(n, count);
                if let Some(last) = parts.last_mut() {
                    *last = &last[..last.len() - (count * self.len - bytes)];
                }
                to.write_vectored_at(offset.0, &parts)
            }
        }
    }

    /// The blocks from the `n`th on, at most `count`, that one call writes. They end with a block whose trailing zeros
    /// are not written, as `leaves_zeros` says.
    fn stretch(&self, n: usize, count: usize, leaves_zeros: impl Fn(usize) -> bool) -> Stretch {
        let cut = (n..n + count).filter(|at| leaves_zeros(*at)).find_map(|at| {
            let zeros = self.zeros_behind(at);
            (zeros > 0).then(|| Stretch { n, count: at + 1 - n, bytes: (at + 1 - n) * self.len - zeros })
        });
        cut.unwrap_or(Stretch { n, count, bytes: count * self.len })
    }

    /// Bytes of zeros behind the ciphertext of a compressed block in memory, in whole pages, which a store need not
    /// keep. 0 for a block in another file: see [`Ciphertext::zeros_not_copied`].
    pub fn zeros_behind(&self, n: usize) -> usize {
        if self.len <= PAGE_LEN || !self.keys.is_compressed(n, self.suite) {
            return 0;
        }
        let bytes = match &self.places[n] {
            Location::Scratch(start) => &self.scratch[*start..][..self.len],
            Location::Presealed(block) => block.bytes(self.len),
            Location::OtherFile(_) => return 0,
        };
        zeros_behind(bytes)
    }

    /// Bytes of zeros at the end of a compressed block in another file, which that file does not keep. A store that
    /// copies instead of sharing may keep them in the copy.
    pub fn zeros_not_copied(&self, n: usize) -> usize {
        match &self.places[n] {
            Location::OtherFile(block) if self.len > PAGE_LEN && block.is_compressed(self.suite) => {
                block.zeros_not_kept(self.len)
            }
            _ => 0,
        }
    }

    /// The ciphertext of `count` blocks from the `n`th on, in as few pieces as possible.
    fn parts(&self, n: usize, count: usize) -> Vec<&[u8]> {
        let mut parts = Vec::new();
        let mut at = n;
        while at < n + count {
            let from = at;
            at += 1;
            while at < n + count && self.places[at].follows(&self.places[at - 1], self.len) {
                at += 1;
            }
            parts.push(match &self.places[from] {
                Location::Scratch(start) => &self.scratch[*start..][..(at - from) * self.len],
                Location::Presealed(block) => block.bytes((at - from) * self.len),
                Location::OtherFile(_) => unreachable!("`pieces` splits them off"),
            });
        }
        parts
    }

    /// Splits `count` blocks from the `n`th on into those in memory and those in another file, the latter into runs:
    /// (index, count).
    fn pieces(&self, n: usize, count: usize) -> Vec<(usize, usize)> {
        let mut pieces: Vec<(usize, usize)> = Vec::new();
        for at in n..n + count {
            let goes_on = at > n
                && match (&self.places[at - 1], &self.places[at]) {
                    (Location::OtherFile(before), Location::OtherFile(block)) => block.follows(before, self.len),
                    (Location::OtherFile(_), _) | (_, Location::OtherFile(_)) => false,
                    _ => true,
                };
            match pieces.last_mut() {
                Some((_, count)) if goes_on => *count += 1,
                _ => pieces.push((at, 1)),
            }
        }
        pieces
    }

    /// Keeps the scratch memory for the thread's next round.
    pub fn give_back(self) {
        if self.scratch.capacity() <= SCRATCH_KEPT_MAX {
            SCRATCH.set(self.scratch);
        }
    }
}

/// Bytes of zeros behind the ciphertext of a compressed block, in whole pages.
pub(super) fn zeros_behind(block: &[u8]) -> usize {
    block.len() - stored_len(block).next_multiple_of(PAGE_LEN)
}

impl Location {
    /// Whether a block of `len` bytes lies right behind another.
    fn follows(&self, other: &Location, len: usize) -> bool {
        match (self, other) {
            (Location::Scratch(at), Location::Scratch(before)) => *at == before + len,
            (Location::Presealed(block), Location::Presealed(before)) => block.follows(before, len),
            _ => false,
        }
    }
}

impl Core {
    /// Ciphertext and keys of the round's data blocks, in their order.
    pub fn seal(&self, st: &mut State, round: &Round) -> Result<Ciphertext, StoreError> {
        let len = self.ctx.block_len();
        if self.is_salted(&st.identity) && !round.data.is_empty() {
            st.identity.ensure_id()?;
        }
        let mut keys = Keys::holes(round.data.len());
        let mut places = Vec::with_capacity(round.data.len());
        let (mut plain, mut contents, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
        for (n, (block, _)) in round.data.iter().enumerate() {
            match st.buffer.get(*block).expect("a round's blocks are buffered") {
                Dirty::Data(bytes) => {
                    places.push(Location::Scratch(plain.len() * len));
                    plain.push(n);
                    contents.push(&**bytes);
                    numbers.push(*block);
                }
                Dirty::Sealed(block) => {
                    places.push(Location::Presealed(block.clone()));
                    keys.raw_mut()[n] = *block.key();
                }
                Dirty::Copied(block) => {
                    places.push(Location::OtherFile(block.clone()));
                    keys.raw_mut()[n] = *block.key();
                }
                Dirty::Hole => unreachable!("holes are punched, not sealed"),
            }
        }
        let mut new_keys = Keys::holes(plain.len());
        let salts = self.forms(&st.identity).salts(Numbers::Each(&numbers));
        let mut scratch = SCRATCH.take();
        if let Some(more) = (plain.len() * len).checked_sub(scratch.len()) {
            scratch.reserve_exact(more); // more capacity than needed could exceed the limit of what is kept
            scratch.resize(plain.len() * len, 0);
        }
        let fetch = |first: usize, blocks: &mut [u8]| {
            blocks
                .chunks_exact_mut(len)
                .zip(&contents[first..])
                .for_each(|(block, bytes)| block.copy_from_slice(bytes));
        };
        let sealed = &mut scratch[..plain.len() * len];
        let done = self.ctx.engine.seal_fetched(&self.ctx.ring.inner(), salts, sealed, len, new_keys.raw_mut(), fetch);
        if let Err(error) = done {
            SCRATCH.set(scratch);
            return Err(error.into());
        }
        for (n, key) in plain.into_iter().zip(new_keys.raw()) {
            keys.raw_mut()[n] = *key;
        }
        Ok(Ciphertext { suite: self.ctx.ring.suite(), len, keys, places, scratch })
    }
}
