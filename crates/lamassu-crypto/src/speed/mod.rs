//! How fast the suites are here, for `lamassu speed`: every kernel of this processor, and a plain composition of
//! RustCrypto's calls to compare with.

#[cfg(any(test, feature = "measure"))]
pub mod beyond;

use crate::kernel::Kernel;
use crate::{BlockKey, Engine, KeyRing, Keyed, NoRandom, Salts, Secret, Suite, Verify};
use lamassu_format::Method;
use std::convert::Infallible;
use std::time::{Duration, Instant};

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Hash, derive, encrypt.
    Seal,
    /// Decrypt, re-hash, compare.
    Open,
    /// Decrypt alone.
    OpenUnverified,
    /// A part of `Seal`, and of `Open`: hash alone, in the same groups.
    #[cfg(any(test, feature = "measure"))]
    Hash,
    /// A part of `Seal`: encrypt alone, under keys that are known already, in the same lanes.
    #[cfg(any(test, feature = "measure"))]
    Encrypt,
}

impl Op {
    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Seal => "seal",
            Op::Open => "open",
            Op::OpenUnverified => "open_unverified",
            #[cfg(any(test, feature = "measure"))]
            Op::Hash => "hash",
            #[cfg(any(test, feature = "measure"))]
            Op::Encrypt => "encrypt",
        }
    }
}

/// One measurement.
#[derive(Clone, Debug)]
pub struct Row {
    /// The suite.
    pub suite: Suite,
    /// The cipher and the hash.
    pub method: Method,
    /// What was done.
    pub op: Op,
    /// The kernel, or how a device is used. `library` composes RustCrypto calls one block after another, as a program
    /// without kernels of its own would.
    pub kernel: String,
    /// Threads that worked on each batch.
    pub threads: usize,
    /// 10⁹ bytes of data a second.
    pub gb_per_s: f64,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// Which suites.
    pub suites: &'a [Suite],
    /// By which methods, of those that a suite has.
    pub methods: &'a [Method],
    /// Which kernels.
    pub kernels: &'a [Kernel],
    /// Which numbers of threads. The `library` kernel is measured with one.
    pub threads: &'a [usize],
    /// Block size in bytes, a multiple of 16.
    pub block_size: usize,
    /// Bytes of a batch, rounded down to whole blocks, at least one: 1 MiB is what one FUSE write brings, 16 MiB the
    /// most that a commit seals at once.
    pub batch_bytes: usize,
    /// How long each row is measured for.
    pub duration: Duration,
}

/// Measures; calls `row` with each row as it is ready.
///
/// # Errors
/// [`NoRandom`]: keys and data are random.
///
/// # Panics
/// If a kernel gives wrong bytes.
pub fn measure(plan: &Plan<'_>, mut row: impl FnMut(Row)) -> Result<(), NoRandom> {
    for &suite in plan.suites {
        let (k_in, k_out) = (Secret::random()?, Secret::random()?);
        for &kernel in plan.kernels {
            let ring = KeyRing::with_kernel(suite, std::slice::from_ref(&k_in), std::slice::from_ref(&k_out), kernel);
            for &threads in plan.threads {
                if kernel != Kernel::library() || threads == 1 {
                    let engine = Engine::with_kernel(threads, kernel);
                    for method in plan.methods_of(suite) {
                        measure_one(plan, (suite, method, &kernel.to_string()), &ring, &engine, &mut row)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Why sealing cannot fail here.
const ASKS_NOBODY: &str = "no epoch that is measured is oblivious";

fn measure_one(
    plan: &Plan<'_>,
    (suite, method, kernel): (Suite, Method, &str),
    ring: &KeyRing,
    engine: &Engine,
    row: &mut impl FnMut(Row),
) -> Result<(), NoRandom> {
    let (size, salts) = (plan.block_size, Salts::EMPTY.by(method));
    let plain = plan.batch()?;
    let mut keys = vec![BlockKey::default(); plain.len() / size];
    let mut sealed = plain.clone();
    let key = &ring.inner();
    engine.seal(key, salts, &mut sealed, size, &mut keys).expect(ASKS_NOBODY);
    let mut work = plain;
    let mut scratch = keys.clone();
    for op in [Op::Seal, Op::Open, Op::OpenUnverified] {
        // Sealing sealed blocks again costs the same, so nothing is copied for it. The input of `Open` must verify:
        // each chunk is copied just before it is opened, as a file's is read.
        let gb_per_s = rate(plan.duration, work.len(), || match op {
            Op::Seal => engine.seal(key, salts, &mut work, size, &mut scratch).expect(ASKS_NOBODY),
            Op::Open => {
                let fetch = |first: usize, blocks: &mut [u8]| {
                    blocks.copy_from_slice(&sealed[first * size..][..blocks.len()]);
                    Ok::<(), Infallible>(())
                };
                let keyed = Keyed { keys: &keys, salts };
                let Ok(failed) = engine.open_fetched(ring, &mut work, size, keyed, Verify::Full, fetch);
                assert!(failed.is_empty());
            }
            Op::OpenUnverified => {
                let keyed = Keyed { keys: &keys, salts };
                assert!(engine.open_as_told(ring, &mut work, size, keyed, Verify::No).is_empty());
            }
            #[cfg(any(test, feature = "measure"))]
            Op::Hash | Op::Encrypt => unreachable!("parts are measured without an engine"),
        });
        row(Row { suite, method, op, kernel: kernel.into(), threads: engine.threads(), gb_per_s });
    }
    Ok(())
}

impl Plan<'_> {
    fn methods_of(&self, suite: Suite) -> impl Iterator<Item = Method> {
        self.methods.iter().copied().filter(move |method| method.check(suite).is_ok())
    }

    /// Random data.
    fn batch(&self) -> Result<Vec<u8>, NoRandom> {
        let mut batch = vec![0; (self.batch_bytes / self.block_size).max(1) * self.block_size];
        crate::random(&mut batch)?;
        Ok(batch)
    }
}

fn rate(duration: Duration, bytes: usize, mut work: impl FnMut()) -> f64 {
    work();
    let start = Instant::now();
    let mut rounds = 0u32;
    while start.elapsed() < duration {
        work();
        rounds += 1;
    }
    bytes as f64 * f64::from(rounds.max(1)) / start.elapsed().as_secs_f64() / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_there_once() {
        let mut rows = Vec::new();
        let plan = Plan {
            suites: &Suite::ALL,
            methods: &Method::ALL,
            kernels: &[Kernel::library(), Kernel::best()],
            threads: &[1, 2],
            block_size: 8192,
            batch_bytes: 100_000,
            duration: Duration::from_millis(1),
        };
        measure(&plan, |r| rows.push(r)).unwrap();
        let methods = 4 + 1 + 4 + 2;
        assert_eq!(rows.len(), methods * 3 * 3);
        beyond::parts(&plan, |r| rows.push(r)).unwrap();
        assert_eq!(rows.len(), methods * (3 * 3 + 2 * 2));
        beyond::device(&plan, |r| rows.push(r)).unwrap();
        assert_eq!(rows.len(), methods * (3 * (3 + 2) + 2 * 2));
        for (i, r) in rows.iter().enumerate() {
            assert!(r.gb_per_s > 0.0);
            let key = |r: &Row| (r.suite.id(), r.method, r.op.name(), r.kernel.clone(), r.threads);
            assert!(rows[..i].iter().all(|other| key(other) != key(r)));
        }
    }
}
