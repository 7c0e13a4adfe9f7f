//! A simulated device: threads behind a bounded ring, which take jobs and give them back as a card does.
//!
//! For tests, and to measure what the way to a device costs (feature `measure`).

use super::device::{Device, Job};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Jobs in the ring of a loop-back device. Two would keep it busy while the submitter works; more absorb delays of the
/// scheduler.
pub const DEPTH: usize = 8;

/// A simulated device behind a bounded ring.
#[derive(Debug)]
pub struct LoopBack {
    /// None while it ends.
    ring: Option<SyncSender<Job>>,
    threads: Vec<JoinHandle<()>>,
    depth: usize,
    blocks_max: usize,
}

impl LoopBack {
    /// One that gets a single block at a time, and is awaited before the next: a device without a pipeline.
    pub fn one_at_a_time() -> LoopBack {
        let mut device = LoopBack::new(1, 1);
        device.blocks_max = 1;
        device
    }

    /// With `threads` threads behind a ring of `depth` jobs, both at least 1. There are fewer threads where the system
    /// refuses some; without any, jobs are lost.
    pub fn new(threads: usize, depth: usize) -> LoopBack {
        let depth = depth.max(1);
        let (ring, jobs) = sync_channel::<Job>(depth);
        let jobs = Arc::new(Mutex::new(jobs));
        let serve = |jobs: Arc<Mutex<Receiver<Job>>>| {
            move || loop {
                let next = jobs.lock().recv();
                let Ok(mut job) = next else { return };
                job.carry_out();
                job.finish();
            }
        };
        let start = |n| std::thread::Builder::new().name(format!("device-{n}")).spawn(serve(jobs.clone())).ok();
        let threads = (0..threads.max(1)).filter_map(start).collect();
        LoopBack { ring: Some(ring), threads, depth, blocks_max: usize::MAX }
    }
}

impl Device for LoopBack {
    fn name(&self) -> &'static str {
        "loop-back"
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn blocks_max(&self) -> usize {
        self.blocks_max
    }

    fn submit(&self, job: Job) {
        if let Some(ring) = &self.ring {
            // With no thread left it comes back in the error, and is lost.
            let _ = ring.send(job);
        }
    }
}

impl Drop for LoopBack {
    fn drop(&mut self) {
        self.ring = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
