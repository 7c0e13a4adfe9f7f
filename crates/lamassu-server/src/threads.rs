//! The threads on which calls wait for disks and for vaults. They have shares, so that no kind of work takes them all:
//! a host that sends commits to a slow vault leaves heartbeats of all vaults their threads.

use crate::caller::CallPermit;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tonic::Status;

/// All threads of the runtime that may wait.
pub const THREADS_MAX: usize = 512;
/// Threads for calls; those for messages of sessions follow.
const OF_CALLS: usize = 256;
const OF_SESSIONS: usize = 192;
/// The remaining ones are for ticks, reloads and notes.
const _: () = assert!(OF_CALLS + OF_SESSIONS + 64 <= THREADS_MAX);

/// How long a client may take for the first bytes of a stream, and how many it must move a second after that.
const AT_FIRST: Duration = Duration::from_secs(120);
const BYTES_PER_SECOND: u64 = 32 << 10;

/// The shares.
#[derive(Clone)]
pub struct Threads {
    calls: Arc<Semaphore>,
    sessions: Arc<Semaphore>,
}

impl Default for Threads {
    fn default() -> Threads {
        Threads { calls: Arc::new(Semaphore::new(OF_CALLS)), sessions: Arc::new(Semaphore::new(OF_SESSIONS)) }
    }
}

impl Threads {
    /// Runs work of a call. The call keeps its place until the work is done, even if its client has gone: otherwise a
    /// client that gives up its calls could have any number of them.
    pub async fn call<T: Send + 'static>(
        &self,
        place: CallPermit,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Status> {
        run(&self.calls, move || {
            let _place = place;
            work()
        })
        .await
    }

    /// Runs work of a session, which sends its next message after that.
    pub async fn session<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Status> {
        run(&self.sessions, work).await
    }
}

async fn run<T: Send + 'static>(
    share: &Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    let ended = || Status::internal("a thread of the server has ended");
    let turn = share.clone().acquire_owned().await.map_err(|_| ended())?;
    let done = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        work()
    });
    done.await.map_err(|_| ended())
}

/// How fast a client moves a stream that keeps something open here.
pub struct Pace {
    begun: Instant,
    bytes: u64,
}

impl Pace {
    /// The pace of a stream that begins now.
    pub fn begin() -> Pace {
        Pace { begun: Instant::now(), bytes: 0 }
    }

    /// The client has moved so many bytes more. False: it is too slow.
    #[must_use]
    pub fn moved(&mut self, bytes: usize) -> bool {
        self.bytes += bytes as u64;
        self.begun.elapsed() <= allowed(self.bytes)
    }
}

/// How long so many bytes may take.
fn allowed(bytes: u64) -> Duration {
    AT_FIRST + Duration::from_secs(bytes / BYTES_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::Counts;
    use std::sync::mpsc;

    fn place(counts: &Counts<Arc<[u8]>>, host: &[u8], most: usize) -> Option<CallPermit> {
        counts.one_more(&Arc::from(host), most).map(Arc::new)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_call_whose_client_has_gone_keeps_its_place_until_its_work_is_done() {
        let (threads, counts) = (Threads::default(), Counts::default());
        let (begins, begun) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let work = move || {
            begins.send(()).expect("is awaited");
            let _ = released.recv();
        };
        let (of, held) = (threads.clone(), place(&counts, b"a", 1).expect("the first"));
        let call = tokio::spawn(async move { of.call(held, work).await });
        tokio::task::block_in_place(|| begun.recv()).expect("begins");
        call.abort();
        assert!(call.await.expect_err("was aborted").is_cancelled());
        assert!(place(&counts, b"a", 1).is_none(), "a place for work that goes on");
        drop(release);
        while place(&counts, b"a", 1).is_none() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn calls_leave_sessions_their_threads() {
        let (threads, counts) = (Threads::default(), Counts::default());
        let (release, released) = tokio::sync::watch::channel(());
        let mut calls = Vec::new();
        for _ in 0..THREADS_MAX {
            let (of, mut released) = (threads.clone(), released.clone());
            let held = place(&counts, b"a", THREADS_MAX).expect("one more");
            let runtime = tokio::runtime::Handle::current();
            let waits = move || drop(runtime.block_on(released.changed()));
            calls.push(tokio::spawn(async move { of.call(held, waits).await }));
        }
        assert_eq!(threads.session(|| 7).await.expect("runs"), 7);
        assert_eq!(tokio::task::spawn_blocking(|| 8).await.expect("runs"), 8);
        drop(release);
        for call in calls {
            call.await.expect("ends").expect("is done");
        }
    }

    #[test]
    fn a_stream_may_take_as_long_as_its_bytes_need() {
        assert!(allowed(0) == AT_FIRST && allowed(1 << 30) > Duration::from_secs(3600 * 9));
        let mut pace = Pace { begun: Instant::now() - AT_FIRST - Duration::from_secs(60), bytes: 0 };
        assert!(!pace.moved(1 << 10), "a kilobyte in three minutes");
        assert!(pace.moved(64 << 20));
    }
}
