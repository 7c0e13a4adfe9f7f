//! Batches under an oblivious K_in: all blocks are hashed, the server is asked once for all, then they are encrypted.
//!
//! The plaintext is fetched once, so the bytes that are encrypted are those that were hashed. A device is not used: it
//! would save little compared with the cost of the server's function.

use super::Engine;
use crate::inner::Lens;
use crate::kernel::GROUP;
use crate::oblivious::{NotEvaluated, Oblivious};
use crate::stages::{Stage, timed};
use crate::{BlockKey, InnerKey, Salts};
use zeroize::{Zeroize, Zeroizing};

impl Engine {
    /// [`Engine::seal_fetched`] under an oblivious key. If the server gives no tokens, the blocks are wiped.
    pub(super) fn seal_obliviously(
        &self,
        (key, oblivious): (&InnerKey, &Oblivious),
        salts: Salts<'_>,
        blocks: &mut [u8],
        block_size: usize,
        keys: &mut [BlockKey],
        fetch: impl Fn(usize, &mut [u8]) + Sync,
    ) -> Result<(), NotEvaluated> {
        let (bytes, per_chunk) = (blocks.len(), self.blocks_per_chunk(block_size, keys.len()));
        let chunk_bytes = per_chunk * block_size;
        let mut inputs = Zeroizing::new(vec![[0; 32]; keys.len()]);
        let mut tokens = Zeroizing::new(vec![[0; 16]; keys.len()]);
        let mut lens = vec![Lens::whole(block_size); groups_in(keys.len(), per_chunk)];
        let made = inputs.chunks_mut(per_chunk).zip(lens.chunks_mut(per_chunk.div_ceil(GROUP)));
        let chunks = blocks.chunks_mut(chunk_bytes).zip(made);
        self.each(bytes, chunk_bytes, chunks.enumerate(), |(n, (blocks, (inputs, lens)))| {
            fetch(n * per_chunk, blocks);
            let made = inputs.chunks_mut(GROUP).zip(lens);
            let groups = blocks.chunks_mut(GROUP * block_size).zip(made).enumerate();
            for (g, (group, (inputs, lens))) in groups {
                let salts = salts.skip(n * per_chunk + g * GROUP);
                *lens = Lens::packing(salts, group, block_size);
                let plain = lens.of(group);
                timed(Stage::Key, || key.inputs_of_group(salts, plain.as_slice(), inputs));
            }
        });
        // Waiting for the server is not counted as a stage.
        if let Err(error) = oblivious.tokens(&inputs, &mut tokens) {
            blocks.zeroize();
            return Err(error);
        }
        let made = inputs.chunks(per_chunk).zip(tokens.chunks(per_chunk)).zip(lens.chunks(per_chunk.div_ceil(GROUP)));
        let chunks = blocks.chunks_mut(chunk_bytes).zip(keys.chunks_mut(per_chunk)).zip(made);
        self.each(bytes, chunk_bytes, chunks, |((blocks, keys), ((inputs, tokens), lens))| {
            let made = inputs.chunks(GROUP).zip(tokens.chunks(GROUP)).zip(lens);
            for ((group, keys), ((inputs, tokens), lens)) in
                blocks.chunks_mut(GROUP * block_size).zip(keys.chunks_mut(GROUP)).zip(made)
            {
                timed(Stage::Key, || {
                    key.keys_of_tokens(salts.method(), inputs, tokens, keys);
                    key.mark_group(lens, keys);
                });
                timed(Stage::Encrypt, || key.encrypt_group(salts.method(), group, keys, lens));
            }
        });
        Ok(())
    }
}

/// How many groups the chunks of a batch have; all chunks except the last have the same number.
fn groups_in(blocks: usize, per_chunk: usize) -> usize {
    blocks / per_chunk * per_chunk.div_ceil(GROUP) + (blocks % per_chunk).div_ceil(GROUP)
}
