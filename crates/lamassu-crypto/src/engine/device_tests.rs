//! Devices: they compute what the processor computes, and jobs that they fail to do are done.

use super::device::{Device, Job};
use super::loop_back::LoopBack;
use super::{Engine, Verify};
use crate::{BlockKey, KeyRing, Keyed, Salts, Secret, Suite};
use lamassu_format::{BlockNo, Domain, FileId, Method};
use parking_lot::Mutex;
use proptest::prelude::*;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn ring(suite: Suite, inner: &[u8]) -> KeyRing {
    let inner: Vec<_> = inner.iter().map(|&b| Secret::new(&mut [b; 32])).collect();
    KeyRing::new(suite, &inner, &[Secret::new(&mut [1; 32])])
}

/// Carries jobs out as they are submitted.
#[derive(Debug)]
struct Cpu;

impl Device for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn depth(&self) -> usize {
        1
    }

    fn submit(&self, mut job: Job) {
        job.carry_out();
        job.finish();
    }
}

/// Loses every third job and gives every third back undone.
#[derive(Debug)]
struct Careless {
    behind: LoopBack,
    jobs: AtomicUsize,
    most: AtomicUsize,
}

impl Device for Careless {
    fn name(&self) -> &'static str {
        "careless"
    }

    fn depth(&self) -> usize {
        self.behind.depth()
    }

    fn submit(&self, job: Job) {
        self.most.fetch_max(job.bytes(), Ordering::Relaxed);
        match self.jobs.fetch_add(1, Ordering::Relaxed) % 3 {
            0 => drop(job),
            1 => job.finish(),
            _ => self.behind.submit(job),
        }
    }
}

/// Seals a batch, damages every seventh block, and opens it. Returns the sealed blocks, the keys, which blocks failed,
/// and the opened blocks.
fn round(
    engine: &Engine,
    ring: &KeyRing,
    salts: Salts<'_>,
    plain: &[u8],
    size: usize,
) -> (Vec<u8>, Vec<BlockKey>, Vec<usize>, Vec<u8>) {
    let (mut sealed, mut keys) = (plain.to_vec(), vec![[0; 32]; plain.len() / size]);
    engine.seal(&ring.inner(), salts, &mut sealed, size, &mut keys).unwrap();
    let mut opened = sealed.clone();
    opened.chunks_mut(size).step_by(7).for_each(|block| block[0] ^= 1);
    let failed = engine.open(ring, &mut opened, size, Keyed { keys: &keys, salts }, Verify::Full);
    (sealed, keys, failed, opened)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_device_does_what_the_processor_does(
        suite in proptest::sample::select(&Suite::ALL[..]), count in 0usize..90, log2 in 12u32..15, depth in 1usize..6, threads in 1usize..4, each: bool, plain_blocks: bool, method in proptest::sample::select(&Method::ALL[..]),
    ) {
        let (size, ring) = (1 << log2, ring(suite, &[9, 8]));
        let mut plain = vec![0; count * size];
        blake3::Hasher::new_keyed(&[depth as u8; 32]).finalize_xof().fill(&mut plain);
        let numbers: Vec<BlockNo> = (0..count as u64).map(|n| BlockNo(n * n)).collect();
        let domain = Domain::ALL.into_iter().rfind(|domain| domain.is_for(suite)).unwrap();
        let salts = if each { Salts::of_blocks(domain, FileId([7; 16]), &numbers) } else { Salts::from_block(domain, FileId([7; 16]), BlockNo(40)) };
        let salts = if plain_blocks { Salts::PLAIN } else { salts };
        let salts = if method.check(suite).is_ok() { salts.by(method) } else { salts };
        let expected = round(&Engine::new(2), &ring, salts, &plain, size);
        let careless = Careless { behind: LoopBack::new(threads, depth), jobs: 0.into(), most: 0.into() };
        let devices: [Arc<dyn Device>; 4] =
            [Arc::new(Cpu), Arc::new(LoopBack::new(threads, depth)), Arc::new(LoopBack::one_at_a_time()), Arc::new(careless)];
        for device in devices {
            let name = device.name();
            prop_assert!(round(&Engine::with_device(device), &ring, salts, &plain, size) == expected, "{name}");
        }
    }
}

/// Keeps jobs until it has as many as it may have.
#[derive(Debug)]
struct Hoarder {
    kept: parking_lot::Mutex<Vec<Job>>,
    most: AtomicUsize,
}

impl Device for Hoarder {
    fn name(&self) -> &'static str {
        "hoarder"
    }

    fn depth(&self) -> usize {
        4
    }

    fn submit(&self, job: Job) {
        let mut kept = self.kept.lock();
        kept.push(job);
        self.most.fetch_max(kept.len(), Ordering::Relaxed);
        if kept.len() == 4 {
            // In another order than they came.
            while let Some(mut job) = kept.pop() {
                job.carry_out();
                job.finish();
            }
        }
    }
}

#[test]
fn as_many_jobs_as_fit_are_under_way_and_no_more() {
    let ring = ring(Suite::Aes, &[5]);
    let device = Arc::new(Hoarder { kept: Vec::new().into(), most: 0.into() });
    let plain = vec![3; 8 * 16 * 4096];
    let engine = Engine::with_device(device.clone());
    let (sealed, ..) = {
        let (mut sealed, mut keys) = (plain.clone(), vec![[0; 32]; 8 * 16]);
        engine.seal(&ring.inner(), Salts::EMPTY, &mut sealed, 4096, &mut keys).unwrap();
        (sealed, keys)
    };
    assert_eq!(device.most.load(Ordering::Relaxed), 4);
    let (mut expected, mut keys) = (plain, vec![[0; 32]; 8 * 16]);
    Engine::new(1).seal(&ring.inner(), Salts::EMPTY, &mut expected, 4096, &mut keys).unwrap();
    assert!(sealed == expected);
}

#[test]
fn what_cannot_be_fetched_is_an_error() {
    let ring = ring(Suite::Aes, &[5]);
    let engine = Engine::with_device(Arc::new(LoopBack::new(1, 3)));
    let (mut blocks, mut keys) = (vec![0; 64 * 4096], vec![[0; 32]; 64]);
    engine.seal(&ring.inner(), Salts::EMPTY, &mut blocks, 4096, &mut keys).unwrap();
    let fetch = |fails: bool| move |first: usize, _: &mut [u8]| if fails && first >= 32 { Err(first) } else { Ok(()) };
    let open = |fails, blocks: &mut [u8]| {
        engine.open_fetched(&ring, blocks, 4096, Keyed::unsalted(&keys), Verify::Full, fetch(fails))
    };
    assert_eq!(open(true, &mut blocks.clone()), Err(32));
    assert_eq!(open(false, &mut blocks), Ok(Vec::new()));
    assert!(blocks.iter().all(|&b| b == 0));
    let nothing =
        engine.open_fetched(&ring, &mut [], 4096, Keyed::unsalted(&[]), Verify::Full, |_, _| Ok::<(), Infallible>(()));
    assert_eq!(nothing, Ok(Vec::new()));
}

/// Records the sizes of jobs.
#[derive(Debug)]
struct Noting {
    behind: LoopBack,
    jobs: Mutex<Vec<usize>>,
}

impl Device for Noting {
    fn name(&self) -> &'static str {
        "noting"
    }

    fn depth(&self) -> usize {
        self.behind.depth()
    }

    fn blocks_max(&self) -> usize {
        self.behind.blocks_max()
    }

    fn submit(&self, job: Job) {
        self.jobs.lock().push(job.bytes());
        self.behind.submit(job);
    }
}

#[test]
fn a_batch_is_cut_as_the_device_takes_it() {
    const K: usize = 1 << 10;
    let jobs_of = |behind: LoopBack, size: usize, count: usize| {
        let device = Arc::new(Noting { behind, jobs: Mutex::default() });
        let engine = Engine::with_device(device.clone());
        engine
            .seal(
                &ring(Suite::Aes, &[1]).inner(),
                Salts::EMPTY,
                &mut vec![7; size * count],
                size,
                &mut vec![[0; 32]; count],
            )
            .unwrap();
        device.jobs.lock().clone()
    };
    assert_eq!(jobs_of(LoopBack::one_at_a_time(), 4 * K, 5), [4 * K; 5]);
    assert_eq!(jobs_of(LoopBack::new(1, 8), 64 * K, 33), [1024 * K, 1024 * K, 64 * K]);
    assert_eq!(jobs_of(LoopBack::new(1, 8), 4 * K, 64), [64 * K; 4]);
}
