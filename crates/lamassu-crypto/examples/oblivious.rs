//! How fast blocks of 4 KiB are sealed under an oblivious K_in, by one core of a host, and by one core of its server:
//! `oblivious [BLOCKS]`. Both are in this process, without a network, and each by the processor's time that it took.
//! `scripts/bench server` runs it. Prints one JSON document, rates in MB/s.

use lamassu_crypto::oblivious::{Evaluate, KeyServerFault, Oblivious};
use lamassu_crypto::oprf::{Element, Evaluation, ServerKey};
use lamassu_crypto::{Engine, KeyRing, Salts, Secret, Suite};
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const BLOCK: usize = 4096;
/// Blocks of one write of the kernel, and of a large commit.
const BATCHES: [usize; 2] = [256, 1024];

/// A server, and how long it took.
struct Server {
    key: ServerKey,
    nanos: AtomicU64,
}

impl Evaluate for Server {
    fn place(&self) -> String {
        "server://here/zone".into()
    }

    fn evaluate(&self, blinded: &[Element]) -> Result<Evaluation, KeyServerFault> {
        let begun = taken(ClockId::ThreadCPUTime);
        let evaluation = self.key.evaluate(blinded).map_err(|_| KeyServerFault::NoRandom)?;
        let took = taken(ClockId::ThreadCPUTime) - begun;
        self.nanos.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
        Ok(evaluation)
    }
}

fn main() {
    let blocks: usize = std::env::args().nth(1).map_or(8192, |n| n.parse().expect("a number"));
    let rows = BATCHES.map(|batch| measure(blocks.next_multiple_of(batch), batch));
    println!("{}", serde_json::Value::from(rows.to_vec()));
}

fn measure(blocks: usize, batch: usize) -> serde_json::Value {
    let key = ServerKey::derive(&Secret::new(&mut [3; 32]), b"measure");
    let server = Arc::new(Server { key, nanos: AtomicU64::new(0) });
    let oblivious = Arc::new(Oblivious::new(*server.key.public(), server.clone()));
    let key = |byte| Secret::new(&mut [byte; 32]);
    let ring = KeyRing::of_epochs(Suite::Aes, &[(1, key(1), Some(oblivious))], &[(1, key(2))]);
    let engine = Engine::new(1);
    let content: Vec<u8> = (0..blocks).flat_map(|n| n.to_le_bytes().repeat(BLOCK / 8)).collect();
    let mut sealed = vec![0; BLOCK * batch];
    let mut keys = vec![[0; 32]; batch];
    let mut seal = || {
        let begun = taken(ClockId::ProcessCPUTime);
        for plain in content.chunks(BLOCK * batch) {
            let done = engine.seal_to(&ring.inner(), Salts::EMPTY, plain, &mut sealed, BLOCK, &mut keys);
            done.expect("the server is here");
        }
        let at_server = Duration::from_nanos(server.nanos.swap(0, Ordering::Relaxed));
        (taken(ClockId::ProcessCPUTime) - begun - at_server, at_server)
    };
    let (first, at_server) = seal();
    let (again, _) = seal();
    let rate = |time: Duration| (blocks * BLOCK) as f64 / 1e6 / time.as_secs_f64();
    serde_json::json!({"batch": batch, "first": rate(first), "server": rate(at_server), "again": rate(again)})
}

fn taken(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
