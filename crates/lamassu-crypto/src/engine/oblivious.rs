//! Batches under an oblivious K_in: all blocks are hashed, the server is asked once for all, then they are encrypted.
//!
//! The plaintext is fetched once, and what was hashed is what is encrypted. A device takes no part in it: what it would
//! save is small beside what the server's function costs.

use super::Engine;
use crate::inner::{GROUP, Group};
use crate::oblivious::{NotEvaluated, Oblivious};
use crate::stages::{Stage, timed};
use crate::{BlockKey, InnerKey, Salts};
use zeroize::{Zeroize, Zeroizing};

impl Engine {
    /// [`Engine::seal_fetched`] under an oblivious key. Where the server gives no tokens the blocks are wiped.
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
        let chunks = blocks.chunks_mut(chunk_bytes).zip(inputs.chunks_mut(per_chunk));
        self.each(bytes, chunk_bytes, chunks.enumerate(), |(n, (blocks, inputs))| {
            fetch(n * per_chunk, blocks);
            let groups = blocks.chunks(GROUP * block_size).zip(inputs.chunks_mut(GROUP)).enumerate();
            for (g, (group, inputs)) in groups {
                let plain = Group::of(group.chunks_exact(block_size));
                let salts = salts.skip(n * per_chunk + g * GROUP);
                timed(Stage::Key, || key.inputs_of_group(salts, plain.as_slice(), inputs));
            }
        });
        // No time of this process's: not a stage.
        if let Err(error) = oblivious.tokens(&inputs, &mut tokens) {
            blocks.zeroize();
            return Err(error);
        }
        let made = inputs.chunks(per_chunk).zip(tokens.chunks(per_chunk));
        let chunks = blocks.chunks_mut(chunk_bytes).zip(keys.chunks_mut(per_chunk)).zip(made);
        self.each(bytes, chunk_bytes, chunks, |((blocks, keys), (inputs, tokens))| {
            let made = inputs.chunks(GROUP).zip(tokens.chunks(GROUP));
            for ((group, keys), (inputs, tokens)) in
                blocks.chunks_mut(GROUP * block_size).zip(keys.chunks_mut(GROUP)).zip(made)
            {
                timed(Stage::Key, || key.keys_of_tokens(salts.method(), inputs, tokens, keys));
                timed(Stage::Encrypt, || key.encrypt_group(salts.method(), group, keys));
            }
        });
        Ok(())
    }
}
