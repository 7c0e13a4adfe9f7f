//! Further measurements for benchmarks (feature `measure`).

use super::{Op, Plan, Row, measure_one, rate};
use crate::engine::loop_back::{DEPTH, LoopBack};
use crate::inner::{Group, Lens};
use crate::kernel::GROUP;
use crate::{BlockKey, Engine, InnerKey, KeyRing, NoRandom, Salts, Secret};
use std::hint::black_box;
use std::sync::Arc;

/// The parts by themselves, with one thread. They bound what `Seal` and `Open` can do: 1 ÷ (1 ÷ hash + 1 ÷ encrypt),
/// and 1 ÷ (1 ÷ hash + 1 ÷ open_unverified).
///
/// # Errors
/// [`NoRandom`]: keys and data are random.
pub fn parts(plan: &Plan<'_>, mut row: impl FnMut(Row)) -> Result<(), NoRandom> {
    let size = plan.block_size;
    for &suite in plan.suites {
        let k_in = Secret::random()?;
        for (&kernel, method) in plan.kernels.iter().flat_map(|k| plan.methods_of(suite).map(move |m| (k, m))) {
            let key = InnerKey::with_kernel(suite, &k_in, kernel);
            let mut work = plan.batch()?;
            let mut keys = vec![BlockKey::default(); work.len() / size];
            key.seal(Salts::EMPTY.by(method), &mut work, size, &mut keys);
            let mut hashes = [[0; 32]; GROUP];
            let lens = Lens::whole(size);
            for op in [Op::Hash, Op::Encrypt] {
                let gb_per_s = rate(plan.duration, work.len(), || {
                    for (blocks, keys) in work.chunks_mut(GROUP * size).zip(keys.chunks(GROUP)) {
                        if op == Op::Encrypt {
                            key.encrypt_group(method, blocks, keys, &lens);
                        } else {
                            let (blocks, hashes) = (Group::of(blocks.chunks_exact(size)), &mut hashes[..keys.len()]);
                            key.hash_group(method, black_box(blocks.as_slice()), black_box(hashes));
                        }
                    }
                });
                row(Row { suite, method, op, kernel: kernel.to_string(), threads: 1, gb_per_s });
            }
        }
    }
    Ok(())
}

/// Blocks through a loop-back device: one thread with the best kernel behind a ring. `device, one at a time` waits for
/// each block, `device, pipelined` for each batch.
///
/// # Errors
/// [`NoRandom`]: keys and data are random.
pub fn device(plan: &Plan<'_>, mut row: impl FnMut(Row)) -> Result<(), NoRandom> {
    for &suite in plan.suites {
        let ring = KeyRing::new(suite, &[Secret::random()?], &[Secret::random()?]);
        let pipelined = LoopBack::new(1, DEPTH);
        for (name, device) in [("device, one at a time", LoopBack::one_at_a_time()), ("device, pipelined", pipelined)] {
            let engine = Engine::with_device(Arc::new(device));
            for method in plan.methods_of(suite) {
                measure_one(plan, (suite, method, name), &ring, &engine, &mut row)?;
            }
        }
    }
    Ok(())
}
