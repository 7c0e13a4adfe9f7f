//! Oblivious keys of a zone (§10): block keys depend on a server's function; the server learns nothing by evaluating
//! it.
//!
//! In an epoch of K_in that is *oblivious* a block has an *input*, derived from its hash under K_in, and the server's
//! pseudorandom function of that input is its *token* ([`crate::oprf`]). Its key is the token and a MAC under K_in of
//! input and token. So a key cannot be derived without the server, but a holder of K_in can verify one without it:
//! reading never asks the server.
//!
//! Tokens are asked for in batches, each input of a batch once, and kept in a bounded cache in secret memory.
//! [`Evaluate`] is the interface to the server; its answers are accepted only with a proof.

mod cache;
mod fault;

use crate::oprf::{BATCH_MAX, Element, Evaluation, OprfError, PublicKey};
use cache::Cache;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};
use zeroize::Zeroizing;

pub use fault::KeyServerFault;

/// The part of a block's key that comes from the server.
pub type Token = [u8; 16];
/// The input of the server's function, derived from a block's hash.
pub type Input = [u8; 32];

/// Most batches of one call that are under way at once: while the server handles one, another is blinded.
const UNDER_WAY_MAX: usize = 2;
/// The least number of inputs of such a batch. Proofs of smaller batches cost more for each input.
const PART_MIN: usize = 256;

/// New blocks cannot be keyed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no oblivious keys from {server}: {fault}. What is stored can be read; new blocks wait until this is mended")]
pub struct NotEvaluated {
    /// the key's place, `server://HOST:PORT/NAME`
    pub server: String,
    /// the reason
    pub fault: KeyServerFault,
}

/// A server that evaluates.
pub trait Evaluate: Send + Sync {
    /// Its address, for people: `server://HOST:PORT/NAME`.
    fn place(&self) -> String;

    /// Prepares requests, as far as a confined process can no longer do that. Sends nothing.
    fn prepare(&self) {}

    /// Evaluates up to [`BATCH_MAX`] elements. Waits, within bounds.
    ///
    /// # Errors
    /// [`KeyServerFault`].
    fn evaluate(&self, blinded: &[Element]) -> Result<Evaluation, KeyServerFault>;
}

/// A server's function, by its public key, and the cache of tokens.
pub struct Oblivious {
    public: Element,
    parsed: OnceLock<Result<PublicKey, OprfError>>,
    server: Arc<dyn Evaluate>,
    cache: Mutex<Option<Cache>>,
}

impl std::fmt::Debug for Oblivious {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Oblivious({})", self.server.place())
    }
}

impl Oblivious {
    /// The function of the key with this public key, at `server`. Sends nothing yet.
    pub fn new(public: Element, server: Arc<dyn Evaluate>) -> Oblivious {
        Oblivious { public, parsed: OnceLock::new(), server, cache: Mutex::default() }
    }

    /// See [`Evaluate::prepare`].
    pub fn prepare(&self) {
        self.server.prepare();
    }

    /// The token of each input.
    ///
    /// # Errors
    /// [`NotEvaluated`]: `tokens` is then unspecified.
    pub(crate) fn tokens(&self, inputs: &[Input], tokens: &mut [Token]) -> Result<(), NotEvaluated> {
        let asked = self.look_up(inputs, tokens);
        if asked.is_empty() {
            return Ok(());
        }
        let found = self.ask(inputs, &asked).map_err(|fault| NotEvaluated { server: self.server.place(), fault })?;
        let mut cache = self.cache.lock();
        let cache = cache.get_or_insert_with(Cache::new);
        for (same, token) in asked.iter().zip(found.iter()) {
            cache.put(&inputs[same[0]], token);
            same.iter().for_each(|at| tokens[*at] = *token);
        }
        Ok(())
    }

    /// Fills in cached tokens. Returns the indices of the other inputs, those of equal inputs together.
    fn look_up(&self, inputs: &[Input], tokens: &mut [Token]) -> Vec<Vec<usize>> {
        let mut missing: Vec<usize> = match &mut *self.cache.lock() {
            Some(cache) => (0..inputs.len()).filter(|at| !cache.get(&inputs[*at], &mut tokens[*at])).collect(),
            None => (0..inputs.len()).collect(),
        };
        missing.sort_unstable_by_key(|at| &inputs[*at]);
        missing.chunk_by(|a, b| inputs[*a] == inputs[*b]).map(<[usize]>::to_vec).collect()
    }

    /// Asks for the tokens of the inputs at the first index of each group, in several batches if they are many.
    fn ask(&self, inputs: &[Input], asked: &[Vec<usize>]) -> Result<Zeroizing<Vec<Token>>, KeyServerFault> {
        let inputs: Vec<&Input> = asked.iter().map(|same| &inputs[same[0]]).collect();
        let mut found = Zeroizing::new(vec![[0; 16]; inputs.len()]);
        let part = inputs.len().div_ceil(UNDER_WAY_MAX).clamp(PART_MIN, BATCH_MAX);
        let parts = Mutex::new(inputs.chunks(part).zip(found.chunks_mut(part)));
        let failed = Mutex::new(None);
        let work = || {
            while failed.lock().is_none() {
                let Some((inputs, tokens)) = parts.lock().next() else { break };
                if let Err(fault) = self.ask_at_once(inputs, tokens) {
                    failed.lock().get_or_insert(fault);
                }
            }
        };
        let others = inputs.len().div_ceil(part).min(UNDER_WAY_MAX) - 1;
        std::thread::scope(|scope| {
            for _ in 0..others {
                // If the thread cannot be started, it is not needed.
                let _ = std::thread::Builder::new().name("oblivious".into()).spawn_scoped(scope, work);
            }
            work();
        });
        failed.into_inner().map_or(Ok(found), Err)
    }

    /// One batch.
    fn ask_at_once(&self, inputs: &[&Input], tokens: &mut [Token]) -> Result<(), KeyServerFault> {
        let public = self.parsed.get_or_init(|| PublicKey::parse(&self.public)).as_ref().map_err(|error| *error)?;
        let blinded = public.blind(inputs).map_err(|_| KeyServerFault::NoRandom)?;
        let evaluation = self.server.evaluate(blinded.elements())?;
        let outputs = public.finalize(inputs, &blinded, &evaluation)?;
        for (token, output) in tokens.iter_mut().zip(outputs.iter()) {
            token.copy_from_slice(&output[..size_of::<Token>()]);
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests;
