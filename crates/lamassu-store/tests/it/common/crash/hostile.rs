//! A hostile store: puts together what it ever had of a file, after crashes and after none.

use super::super::{Rng, Setup, raw};
use super::{Crash, Trace, content_of, is_allowed, versions_at};
use lamassu_store::StoreError;
use lamassu_store::backend::crash::CrashSim;
use lamassu_store::backend::memory::MemoryBackend;

/// What a hostile store did to a file, and what came of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attacks {
    /// States tried.
    pub states: u64,
    /// Those in which something was found stale.
    pub found: u64,
    /// Blocks that could be read.
    pub read: u64,
}

/// After crashes, and after none, the store puts together what it ever had: whole files, pages and blocks from before,
/// absent ones, shorter files. Whatever is read must be what an honest crash could have left.
///
/// # Errors
/// The first lie that was believed.
pub fn attack(setup: &Setup, trace: &Trace, seed: u64, stride: usize) -> Result<Attacks, String> {
    let (start, end) = (trace.start, trace.log.records().len());
    let sim = CrashSim::new(trace.log.clone());
    let mut rng = Rng(seed);
    let mut done = Attacks::default();
    let mut before: Vec<Vec<u8>> = Vec::new();
    for at in (start..=end).filter(|at| (at - start).is_multiple_of(stride) || *at == end) {
        let killed = sim.prefix(at);
        before.push(content_of(&killed));
        for n in 0..6 {
            let store = if n % 2 == 0 { sim.prefix(at) } else { sim.at(at).random_state(rng.next()) };
            let how = tamper(&store, &before, &mut rng);
            let Some(crash) = Crash::new(setup, trace, at, rng.below(2) == 0) else { continue };
            done.states += 1;
            let of = |e: String| format!("seed {seed}, after {at} of {end} records, attack {n} ({how}): {e}");
            tampered(&crash, versions_at(trace, at), &store, &mut done).map_err(of)?;
        }
    }
    Ok(done)
}

/// Puts something from before into a file.
fn tamper(store: &MemoryBackend, before: &[Vec<u8>], rng: &mut Rng) -> String {
    const PIECE: usize = 4096;
    let mut now = content_of(store);
    let mut any = || &before[rng.below(before.len() as u64) as usize];
    let older = any().clone();
    let how = rng.below(6);
    let pieces = now.len().max(older.len()).div_ceil(PIECE);
    let at = rng.below(pieces.max(1) as u64) as usize;
    let put = |now: &mut Vec<u8>, from: &[u8], n: usize| {
        let (start, end) = (n * PIECE, (n + 1) * PIECE);
        now.resize(now.len().max(end), 0);
        now[start..end].fill(0);
        if start < from.len() {
            let until = end.min(from.len());
            now[start..until].copy_from_slice(&from[start..until]);
        }
    };
    match how {
        0 => now = older.clone(),
        1 => put(&mut now, &older, at),
        2 => (0..pieces).filter(|_| rng.below(3) == 0).for_each(|n| put(&mut now, &older, n)),
        3 => {
            for n in 0..pieces {
                let from = &before[rng.below(before.len() as u64) as usize];
                put(&mut now, from, n);
            }
        }
        4 => put(&mut now, &[], at),
        _ => now.truncate(rng.below(now.len() as u64 + 1) as usize),
    }
    let file = raw(store);
    file.set_len(0).expect("cuts");
    file.write_at(0, &now).expect("writes");
    // Zeros at the end are a hole, or are not there.
    format!("{how} at piece {at}, {} bytes", now.len())
}

/// Reads a file that was tampered with.
fn tampered(crash: &Crash<'_>, versions: &[Vec<u8>], store: &MemoryBackend, done: &mut Attacks) -> Result<(), String> {
    let file = match crash.open(&crash.ctx, store) {
        Ok(file) => file,
        Err(StoreError::Damaged(_)) => {
            done.found += 1;
            return Ok(());
        }
        Err(error) => return Err(format!("open: {error}")),
    };
    let found = file.check(false, &mut |_| {});
    let is_found = found.is_err() || found.is_ok_and(|found| !found.damage.is_empty());
    let size = file.size() as usize;
    let sizes = versions.iter().map(|v| v.len());
    let (min, max) = (sizes.clone().min().unwrap_or(0), sizes.max().unwrap_or(0));
    if size < min || size > max {
        return Err(format!("size {size} is none of {min}..={max}"));
    }
    done.found += u64::from(is_found);
    let b = crash.ctx.geometry.block_size() as usize;
    for offset in (0..size).step_by(b) {
        let mut block = vec![0; b.min(size - offset)];
        match file.read_at(offset as u64, &mut block) {
            Ok(_) if is_allowed(versions, offset, &block) => done.read += 1,
            Ok(_) => return Err(format!("block {} of {size} bytes is a lie", offset / b)),
            Err(StoreError::Damaged(_)) => {}
            Err(error) => return Err(format!("read: {error}")),
        }
    }
    Ok(())
}
