//! The plug for an accelerator: a device that ciphers in place of this process's threads.
//!
//! A batch is cut into jobs, as it is cut into chunks for threads. The device has up to [`Device::depth`] of them at a
//! time. Meanwhile the submitting thread prepares the next job, and completes those that come back, in any order
//! (prepare, cipher, complete). Blocks travel in memory of their own, as they do to a card.
//!
//! A device can cost time, but no data: if it loses a job or returns it undone, the submitting thread does that job
//! itself, from the original. A device is trusted like the processor: if it seals wrongly, that is found when the block
//! is read.

use super::open_blocks;
use crate::kernel::Kernel;
use crate::salt::OwnedSalts;
use crate::{BlockKey, InnerKey, KeyRing, Keyed, Salts, Verify};
use parking_lot::Mutex;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use zeroize::Zeroizing;

/// An accelerator for jobs.
pub trait Device: std::fmt::Debug + Send + Sync {
    /// One word, for tables.
    fn name(&self) -> &'static str;

    /// How many jobs of a batch it has at a time. This bounds the memory of a batch in transit.
    fn depth(&self) -> usize;

    /// How many blocks a job may have.
    fn blocks_max(&self) -> usize {
        usize::MAX
    }

    /// Takes a job. The device carries it out and calls [`Job::finish`], on any thread, in any order. A job that is
    /// dropped instead counts as lost. This call may wait for room, but not until the submitter takes a job back.
    fn submit(&self, job: Job);
}

/// Blocks on their way to a device and back.
#[derive(Debug)]
pub struct Job {
    contents: Option<Box<Contents>>,
    number: usize,
    back: Sender<Returned>,
}

struct Returned {
    number: usize,
    contents: Option<Box<Contents>>,
}

/// The content of a job.
pub(super) struct Contents {
    pub work: Work,
    pub blocks: Zeroizing<Vec<u8>>,
    pub block_size: usize,
    pub keys: Zeroizing<Vec<BlockKey>>,
    pub salts: OwnedSalts,
    pub done: bool,
}

/// The work to do with the blocks.
pub(super) enum Work {
    /// Derive the keys, encrypt.
    Seal(Arc<InnerKey>),
    /// Decrypt and verify; the result is which blocks have failed.
    Open { ring: KeyRing, kernel: Kernel, verify: Verify, failed: Vec<usize> },
}

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let work = if matches!(self.work, Work::Seal(_)) { "seal" } else { "open" };
        write!(f, "{work} {} blocks", self.keys.len())
    }
}

impl Job {
    /// How many bytes of blocks it has.
    pub fn bytes(&self) -> usize {
        self.contents.as_ref().map_or(0, |contents| contents.blocks.len())
    }

    /// Does the work on this thread.
    pub fn carry_out(&mut self) {
        let Some(contents) = self.contents.as_deref_mut() else { return };
        let Contents { work, blocks, block_size, keys, salts, done } = contents;
        match work {
            Work::Seal(key) => key.seal(salts.as_salts(), blocks, *block_size, keys),
            Work::Open { ring, kernel, verify, failed } => {
                let keyed = Keyed { keys, salts: salts.as_salts() };
                open_blocks(*kernel, ring, blocks, *block_size, keyed, *verify, |i| failed.push(i));
            }
        }
        *done = true;
    }

    /// Returns it to its submitter.
    pub fn finish(self) {
        drop(self);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let contents = self.contents.take();
        // There is no receiver if the submitter has panicked.
        let _ = self.back.send(Returned { number: self.number, contents });
    }
}

/// Runs the `count` jobs of a batch on a device. `prepare` makes the contents of a job; `complete` takes them back, or
/// gets `None` if the device did not do the job. After an error no job is prepared, and those in transit are completed.
pub(super) fn pipeline<E>(
    device: &dyn Device,
    count: usize,
    mut prepare: impl FnMut(usize) -> Result<Contents, E>,
    mut complete: impl FnMut(usize, Option<Contents>),
) -> Result<(), E> {
    let (back, returned): (_, Receiver<Returned>) = channel();
    let depth = device.depth().max(1);
    let (mut next, mut under_way, mut error) = (0, 0, None);
    loop {
        while next < count && under_way < depth && error.is_none() {
            match prepare(next) {
                Ok(contents) => {
                    let (contents, back) = (Some(Box::new(contents)), back.clone());
                    device.submit(Job { contents, number: next, back });
                    under_way += 1;
                }
                Err(e) => error = Some(e),
            }
            next += 1;
        }
        if under_way == 0 {
            return error.map_or(Ok(()), Err);
        }
        // Every job comes back exactly once: dropping it returns it.
        let Ok(Returned { number, contents }) = returned.recv() else { return error.map_or(Ok(()), Err) };
        under_way -= 1;
        complete(number, contents.map(|contents| *contents).filter(|contents| contents.done));
    }
}

/// Seals the chunks of a batch on a device. Plaintext that is in the chunks already is part of it.
pub(super) fn seal_on(
    device: &dyn Device,
    key: &Arc<InnerKey>,
    salts: Salts<'_>,
    mut chunks: Vec<(&mut [u8], &mut [BlockKey])>,
    (block_size, per_chunk): (usize, usize),
    fetch: impl Fn(usize, &mut [u8]),
) {
    let mut undone = Vec::new();
    let lengths: Vec<usize> = chunks.iter().map(|(_, keys)| keys.len()).collect();
    let places = Mutex::new(&mut chunks);
    let prepare = |n: usize| {
        let mut blocks = Zeroizing::new(places.lock()[n].0.to_vec());
        fetch(n * per_chunk, &mut blocks);
        let keys = Zeroizing::new(vec![[0; 32]; lengths[n]]);
        let salts = salts.skip(n * per_chunk).to_owned(lengths[n]);
        Ok::<_, Infallible>(Contents { work: Work::Seal(key.clone()), blocks, block_size, keys, salts, done: false })
    };
    let complete = |n: usize, done: Option<Contents>| match done {
        Some(done) => {
            let (blocks, keys) = &mut places.lock()[n];
            blocks.copy_from_slice(&done.blocks);
            keys.copy_from_slice(&done.keys);
        }
        None => undone.push(n),
    };
    let Ok(()) = pipeline(device, lengths.len(), prepare, complete);
    for n in undone {
        let (blocks, keys) = &mut chunks[n];
        fetch(n * per_chunk, blocks);
        key.seal(salts.skip(n * per_chunk), blocks, block_size, keys);
    }
}

/// How to open a batch.
pub(super) struct Opening<'a> {
    pub kernel: Kernel,
    pub ring: &'a KeyRing,
    pub verify: Verify,
    pub salts: Salts<'a>,
    pub block_size: usize,
    pub per_chunk: usize,
}

/// Opens the chunks of a batch on a device. Returns the blocks that failed.
pub(super) fn open_on<E>(
    device: &dyn Device,
    how: &Opening<'_>,
    mut chunks: Vec<(&mut [u8], &[BlockKey])>,
    fetch: impl Fn(usize, &mut [u8]) -> Result<(), E>,
) -> Result<Vec<usize>, E> {
    let Opening { kernel, ring, verify, salts, block_size, per_chunk } = *how;
    let (mut undone, mut failed, count) = (Vec::new(), Vec::new(), chunks.len());
    let places = Mutex::new(&mut chunks);
    let prepare = |n: usize| {
        let (mut blocks, keys) = {
            let (blocks, keys) = &places.lock()[n];
            (Zeroizing::new(blocks.to_vec()), Zeroizing::new(keys.to_vec()))
        };
        fetch(n * per_chunk, &mut blocks)?;
        let salts = salts.skip(n * per_chunk).to_owned(keys.len());
        let work = Work::Open { ring: ring.clone(), kernel, verify, failed: Vec::new() };
        Ok(Contents { work, blocks, block_size, keys, salts, done: false })
    };
    let complete = |n: usize, done: Option<Contents>| match done {
        Some(Contents { work: Work::Open { failed: bad, .. }, blocks, .. }) => {
            places.lock()[n].0.copy_from_slice(&blocks);
            failed.extend(bad.into_iter().map(|i| n * per_chunk + i));
        }
        Some(_) | None => undone.push(n),
    };
    pipeline(device, count, prepare, complete)?;
    for n in undone {
        let (blocks, keys) = &mut chunks[n];
        fetch(n * per_chunk, blocks)?;
        let keyed = Keyed { keys, salts: salts.skip(n * per_chunk) };
        open_blocks(kernel, ring, blocks, block_size, keyed, verify, |i| failed.push(n * per_chunk + i));
    }
    failed.sort_unstable();
    Ok(failed)
}
