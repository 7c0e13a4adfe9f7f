//! Threads that help a submitter with its batch, if they get to run before it is done.
//!
//! Guarantees:
//!
//! * [`Pool::run`] does the work on the calling thread and *offers* it to idle workers. It waits only for workers that
//!   have begun, never for one that the system has not scheduled yet: on a busy machine a batch takes no longer than
//!   without a pool. (This is why it is not rayon, whose scopes wait for every spawned task. With all processors busy,
//!   a batch of 1 MiB took 2.1 to 2.4 ms there on average, 1.3 to 1.8 ms here.)
//! * Nothing queues: there are never more offers than idle workers.
//! * Workers that are gone after fork(2) are never waited for.
//! * A panic in a worker reaches the submitter; the worker lives on.
//! * Dropping the pool ends its threads.

use super::sync::thread::{Builder, JoinHandle};
use super::sync::{Condvar, Mutex, linger};
use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

type Panic = Box<dyn Any + Send>;

/// How long a thread spins before it sleeps. A sleeping thread is back after 5 to 100 µs, the longer times if an idle
/// processor has to be woken through the hypervisor; a chunk takes 30. So a submitter spins until the last chunks are
/// done, and a worker spins for the next batch if the one before came as quickly.
const LINGER: Duration = Duration::from_micros(20);

/// Which thread does a share of the work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// The thread that called [`Pool::run`].
    Submitter,
    Worker,
}

pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    /// The number of offers in the queue, to be read without the lock.
    offered: AtomicUsize,
    wake: Condvar,
}

struct Queue {
    offers: VecDeque<Arc<Batch>>,
    /// Idle workers, less the offers made to them.
    free: usize,
    stop: bool,
}

impl Pool {
    /// As many workers as the system gives, at most `count`.
    pub(super) fn new(count: usize) -> Pool {
        let queue = Queue { offers: VecDeque::with_capacity(count), free: 0, stop: false };
        let shared = Arc::new(Shared { queue: Mutex::new(queue), offered: AtomicUsize::new(0), wake: Condvar::new() });
        let spawn = |i| {
            let shared = shared.clone();
            Builder::new().name(format!("cipher-{i}")).spawn(move || shared.work()).ok()
        };
        let workers: Vec<_> = (0..count).map_while(spawn).collect();
        shared.queue.lock().free = workers.len();
        Pool { shared, workers }
    }

    pub(super) fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Runs `work` here and on up to `helpers` idle workers at once, and passes it the side on which it runs. Returns
    /// when every thread that began it has finished. `work` shares the batch out between its callers, so the batch is
    /// done when all of them have returned, however many there are.
    pub(super) fn run(&self, helpers: usize, work: &(dyn Fn(Side) + Sync)) {
        let batch = Arc::new(Batch::new(work));
        self.shared.offer(&batch, helpers);
        // Nothing may unwind from here to `close`: workers may be using `work`.
        let here = catch_unwind(AssertUnwindSafe(|| work(Side::Submitter)));
        self.shared.withdraw(&batch);
        let there = batch.close();
        if let Err(panic) = here.and(there) {
            resume_unwind(panic);
        }
    }
}

#[cfg(test)]
impl Pool {
    /// The numbers of idle workers and of open offers.
    pub(super) fn state(&self) -> (usize, usize) {
        let queue = self.shared.queue.lock();
        (queue.free, queue.offers.len())
    }

    /// Upgrades as long as a thread of the pool lives.
    pub(super) fn threads(&self) -> std::sync::Weak<dyn Any + Send + Sync> {
        Arc::downgrade(&self.shared) as std::sync::Weak<_>
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.queue.lock().stop = true;
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its work, so its result says nothing.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn offer(&self, batch: &Arc<Batch>, helpers: usize) {
        let mut queue = self.queue.lock();
        let count = helpers.min(queue.free);
        queue.free -= count;
        queue.offers.extend((0..count).map(|_| batch.clone()));
        self.offered.store(queue.offers.len(), Ordering::Relaxed);
        drop(queue);
        (0..count).for_each(|_| {
            self.wake.notify_one();
        });
    }

    /// Withdraws the offers that no worker has taken.
    fn withdraw(&self, batch: &Arc<Batch>) {
        let mut queue = self.queue.lock();
        let before = queue.offers.len();
        queue.offers.retain(|offered| !Arc::ptr_eq(offered, batch));
        queue.free += before - queue.offers.len();
        self.offered.store(queue.offers.len(), Ordering::Relaxed);
    }

    fn work(&self) {
        let mut queue = self.queue.lock();
        let mut free_since: Option<Instant> = None;
        while !queue.stop {
            match queue.offers.pop_front() {
                None => self.wake.wait(&mut queue),
                Some(batch) => {
                    self.offered.store(queue.offers.len(), Ordering::Relaxed);
                    drop(queue);
                    let came_soon =
                        free_since.is_some_and(|free| batch.offered.saturating_duration_since(free) < LINGER);
                    batch.help();
                    drop(batch);
                    self.queue.lock().free += 1;
                    free_since = Some(Instant::now());
                    if came_soon {
                        linger(LINGER, || self.offered.load(Ordering::Relaxed) == 0);
                    }
                    queue = self.queue.lock();
                }
            }
        }
    }
}

/// One call of [`Pool::run`], as its workers see it.
struct Batch {
    /// The submitter's closure, its lifetime erased. Only workers that `Helpers::inside` counts may use it.
    work: *const (dyn Fn(Side) + Sync),
    offered: Instant,
    state: Mutex<Helpers>,
    /// A copy of `Helpers::inside`, to be read without the lock.
    inside: AtomicUsize,
    left: Condvar,
}

struct Helpers {
    closed: bool,
    /// Workers in `work` now. None enters once `closed`.
    inside: usize,
    panic: Option<Panic>,
}

// SAFETY: `work` points to a Sync closure, so any thread may call it. Batch::help says why it is still alive then.
unsafe impl Send for Batch {}
// SAFETY: as above; the rest is behind a mutex.
unsafe impl Sync for Batch {}

impl Batch {
    fn new<'a>(work: &'a (dyn Fn(Side) + Sync + 'a)) -> Batch {
        let work: *const (dyn Fn(Side) + Sync + 'a) = work;
        // SAFETY: the types differ only in a lifetime. The pointer is not used beyond it: see `help`.
        let work =
            unsafe { std::mem::transmute::<*const (dyn Fn(Side) + Sync + 'a), *const (dyn Fn(Side) + Sync)>(work) };
        let state = Helpers { closed: false, inside: 0, panic: None };
        Batch {
            work,
            offered: Instant::now(),
            state: Mutex::new(state),
            inside: AtomicUsize::new(0),
            left: Condvar::new(),
        }
    }

    /// A worker's share. Does nothing once the batch is closed.
    fn help(&self) {
        {
            let mut state = self.state.lock();
            if state.closed {
                return;
            }
            state.inside += 1;
            self.inside.store(state.inside, Ordering::Relaxed);
        }
        // SAFETY: this worker was counted in `inside` before `closed`. Pool::run, which borrows the closure, neither
        // returns nor unwinds until `close` has seen `inside` at zero after closing. So the closure lives at least
        // until the count goes down below.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*self.work)(Side::Worker) }));
        let mut state = self.state.lock();
        state.inside -= 1;
        self.inside.store(state.inside, Ordering::Relaxed);
        if let Err(panic) = result {
            state.panic.get_or_insert(panic);
        }
        if state.inside == 0 {
            self.left.notify_all();
        }
    }

    /// Lets no further worker in, and waits for those inside.
    fn close(&self) -> Result<(), Panic> {
        self.state.lock().closed = true;
        linger(LINGER, || self.inside.load(Ordering::Relaxed) > 0);
        let mut state = self.state.lock();
        while state.inside > 0 {
            self.left.wait(&mut state);
        }
        state.panic.take().map_or(Ok(()), Err)
    }
}
