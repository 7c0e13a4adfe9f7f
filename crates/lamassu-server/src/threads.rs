//! The threads on which calls wait for disks and for vaults. They have shares, so that no kind of work takes them all:
//! a host that sends commits to a slow vault leaves heartbeats of all vaults their threads.
//!
//! Who uses a vault waits for its turn without a thread, so a slow vault has one thread of sessions, and holds up
//! itself alone. A host has few of them, and of those one in each vault.

use crate::caller::CallPermit;
use lamassu_format::header::VaultId;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

/// All threads of the runtime that may wait.
pub const THREADS_MAX: usize = 512;
/// Threads for calls that use no vault; for calls that use one, in its turn; for messages of sessions. Who has a turn
/// keeps others from the vault, so it waits for no call of another kind.
const OF_CALLS: usize = 96;
const OF_TURNS: usize = 160;
const OF_SESSIONS: usize = 192;
/// The remaining ones are for ticks, reloads and notes.
const _: () = assert!(OF_CALLS + OF_TURNS + OF_SESSIONS + 64 <= THREADS_MAX);
/// Threads for messages of one host's sessions.
const OF_HOST: usize = 16;
/// Sessions that begin at once, in all vaults. More than one, so that a vault whose commit takes long does not hold up
/// the others.
const BEGINNING_AT_ONCE: usize = 4;

/// How often it may be too late for one of two that are needed at once, before the other one is kept.
const ATTEMPTS: usize = 16;

/// How long a place of a session that begins is kept while its vault has other work.
const PLACE_KEPT: Duration = Duration::from_secs(1);

/// How long a client may take for the first bytes of a stream, and how many it must move a second after that.
const AT_FIRST: Duration = Duration::from_secs(120);
const BYTES_PER_SECOND: u64 = 32 << 10;

/// The shares.
#[derive(Clone)]
pub struct Threads {
    calls: Arc<Semaphore>,
    in_turn: Arc<Semaphore>,
    sessions: Arc<Semaphore>,
    /// A session that begins is made durable while its vault is locked, and one after the other for all vaults.
    beginning: Arc<Semaphore>,
    of_hosts: Shares<String>,
    of_both: Shares<(String, VaultId)>,
    turns: Arc<Mutex<HashMap<VaultId, Weak<Turns>>>>,
}

impl Default for Threads {
    fn default() -> Threads {
        let of = |most| Arc::new(Semaphore::new(most));
        Threads {
            calls: of(OF_CALLS),
            in_turn: of(OF_TURNS),
            sessions: of(OF_SESSIONS),
            beginning: of(BEGINNING_AT_ONCE),
            of_hosts: Shares::of(OF_HOST),
            of_both: Shares::of(1),
            turns: Arc::default(),
        }
    }
}

/// Shares by key, each while it is used.
#[derive(Clone)]
struct Shares<K> {
    most: usize,
    used: Arc<Mutex<HashMap<K, Weak<Semaphore>>>>,
}

impl<K: Hash + Eq> Shares<K> {
    fn of(most: usize) -> Shares<K> {
        Shares { most, used: Arc::default() }
    }

    fn share(&self, key: K) -> Arc<Semaphore> {
        let mut used = self.used.lock();
        if let Some(share) = used.get(&key).and_then(Weak::upgrade) {
            return share;
        }
        used.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(Semaphore::new(self.most));
        used.insert(key, Arc::downgrade(&share));
        share
    }
}

/// The order of those who use a vault.
pub struct Turns {
    next: Arc<Semaphore>,
    /// Of sessions that begin, one waits for its turn: a crowd of them would delay heartbeats.
    begins: Arc<Semaphore>,
    /// Of the vault's own work, too.
    upkeep: Arc<Semaphore>,
}

impl Default for Turns {
    fn default() -> Turns {
        let [next, begins, upkeep] = [(); 3].map(|()| Arc::new(Semaphore::new(1)));
        Turns { next, begins, upkeep }
    }
}

/// The way of a session's messages to the threads.
#[derive(Clone)]
pub struct Way {
    of_both: Arc<Semaphore>,
    of_host: Arc<Semaphore>,
}

async fn one_of(share: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Status> {
    share.clone().acquire_owned().await.map_err(|_| ended())
}

fn ended() -> Status {
    Status::internal("a thread of the server has ended")
}

type Both = (OwnedSemaphorePermit, OwnedSemaphorePermit);

/// Waits for both, and holds none of them while it waits for the other one. `None`: that was taken again and again when
/// it came.
async fn free_together(turn: &Arc<Semaphore>, share: &Arc<Semaphore>) -> Result<Option<Both>, Status> {
    let (mut first, mut second) = (turn, share);
    for _ in 0..ATTEMPTS {
        let waited_for = one_of(first).await?;
        if let Ok(free) = second.clone().try_acquire_owned() {
            return Ok(Some((waited_for, free)));
        }
        drop(waited_for);
        std::mem::swap(&mut first, &mut second);
    }
    Ok(None)
}

/// Waits for both, and keeps `kept`, which is one of them, if they are never free together. Nobody holds the other one
/// and waits for `kept`.
async fn both_of((turn, share): (&Arc<Semaphore>, &Arc<Semaphore>), kept: &Arc<Semaphore>) -> Result<Both, Status> {
    if let Some(both) = free_together(turn, share).await? {
        return Ok(both);
    }
    let other = if Arc::ptr_eq(kept, turn) { share } else { turn };
    Ok((one_of(kept).await?, one_of(other).await?))
}

/// Waits for a vault's turn and for one of the places of sessions that begin. Who waits for a place never holds the
/// turn: sessions may take long to begin, and the vault's heartbeats would wait as long. Who has a place keeps it for a
/// limited time: a few slow vaults would hold up all others.
async fn turn_and_place(turn: &Arc<Semaphore>, places: &Arc<Semaphore>) -> Result<Both, Status> {
    if let Some(both) = free_together(turn, places).await? {
        return Ok(both);
    }
    // Its position among those who wait for the turn is kept when the place is given back.
    let mut queued = None;
    loop {
        let place = match &mut queued {
            None => one_of(places).await?,
            Some(in_queue) => tokio::select! {
                place = one_of(places) => place?,
                came = in_queue => {
                    let came = came?;
                    if let Ok(place) = places.clone().try_acquire_owned() {
                        return Ok((came, place));
                    }
                    queued = None;
                    continue;
                }
            },
        };
        let in_queue = queued.get_or_insert_with(|| Box::pin(one_of(turn)));
        if let Ok(came) = tokio::time::timeout(PLACE_KEPT, in_queue).await {
            return Ok((came?, place));
        }
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
        run(&self.calls, place, work).await
    }

    /// The same for a call that uses a vault, in its turn.
    pub async fn call_of<T: Send + 'static>(
        &self,
        (turns, place): (&Turns, CallPermit),
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Status> {
        let turn = one_of(&turns.next).await?;
        run(&self.in_turn, (turn, place), work).await
    }

    /// The same for a session that begins. Those that wait for their vault are in the way of no other vault, and those
    /// that wait for other vaults are not in the way of theirs.
    pub async fn begin<T: Send + 'static>(
        &self,
        (turns, place): (&Turns, CallPermit),
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Status> {
        let both = turn_and_place(&turns.next, &self.beginning);
        let held = (one_of(&turns.begins).await?, both.await?, place);
        run(&self.in_turn, held, work).await
    }

    /// The order of those who use a vault. It outlives the object of the vault, which is opened anew when its table has
    /// failed: who waits for its turn does not keep that one open.
    pub fn turns(&self, vault: VaultId) -> Arc<Turns> {
        let all = &mut *self.turns.lock();
        if let Some(turns) = all.get(&vault).and_then(Weak::upgrade) {
            return turns;
        }
        all.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::<Turns>::default();
        all.insert(vault, Arc::downgrade(&turns));
        turns
    }

    /// The way of messages that a session of a host sends about a vault.
    pub fn way(&self, host: &str, vault: VaultId) -> Way {
        let (of_both, of_host) = (self.of_both.share((host.into(), vault)), self.of_hosts.share(host.into()));
        Way { of_both, of_host }
    }

    /// Runs work of a session, which sends its next message after that.
    pub async fn session<T: Send + 'static>(
        &self,
        (way, turns): (&Way, &Turns),
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Status> {
        // What waits for the turn of a slow vault takes none of the host's threads: those are for its other vaults.
        // Nor does a vault wait for the host's other vaults.
        let both = both_of((&turns.next, &way.of_host), &way.of_host);
        let held = (one_of(&way.of_both).await?, both.await?);
        run(&self.sessions, held, work).await
    }

    /// Runs work that a vault has to do, in its turn. `None`: the same work waits for its turn already, so it is done
    /// later than now.
    pub async fn upkeep<T: Send + 'static>(
        &self,
        turns: &Turns,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Option<T>, Status> {
        let Ok(waits) = turns.upkeep.clone().try_acquire_owned() else { return Ok(None) };
        let turn = one_of(&turns.next).await?;
        drop(waits);
        run(&self.sessions, turn, work).await.map(Some)
    }
}

/// Runs work, which has what it `held` until it is done.
async fn run<H: Send + 'static, T: Send + 'static>(
    share: &Arc<Semaphore>,
    held: H,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    let thread = one_of(share).await?;
    let done = tokio::task::spawn_blocking(move || {
        let _held = (thread, held);
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
    use tokio::sync::watch;

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
        let (way, turns) = (threads.way("h", VaultId([1; 16])), Turns::default());
        assert_eq!(threads.session((&way, &turns), || 7).await.expect("runs"), 7);
        assert_eq!(tokio::task::spawn_blocking(|| 8).await.expect("runs"), 8);
        drop(release);
        for call in calls {
            call.await.expect("ends").expect("is done");
        }
    }

    /// Work that goes on until this is dropped.
    fn endless() -> (watch::Sender<()>, impl FnOnce() + Clone + Send + 'static) {
        let (release, released) = watch::channel(());
        let runtime = tokio::runtime::Handle::current();
        let work = move || {
            let mut released = released;
            drop(runtime.block_on(released.changed()));
        };
        (release, work)
    }

    /// Passed only if it hangs.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test(flavor = "multi_thread")]
    async fn a_slow_vault_and_a_host_with_many_slow_vaults_leave_others_their_threads() {
        let threads = Threads::default();
        let vault = |number: u16| VaultId([number.to_be_bytes(); 8].concat().try_into().expect("16 bytes"));
        let (release, work) = endless();
        let mut slow = Vec::new();
        let mut attend = |host: String, of: VaultId, turns: &Arc<Turns>| {
            let (threads, turns, work) = (threads.clone(), turns.clone(), work.clone());
            let way = threads.way(&host, of);
            slow.push(tokio::spawn(async move { threads.session((&way, &turns), work).await }));
        };
        let one = Arc::new(Turns::default());
        (0..THREADS_MAX).for_each(|host| attend(format!("h{host}"), vault(0), &one));
        (1..=THREADS_MAX as u16).for_each(|number| attend("many".into(), vault(number), &Arc::default()));
        let (turns, other) = (Turns::default(), vault(u16::MAX));
        for host in ["h1", "other"] {
            let way = threads.way(host, other);
            let done = tokio::time::timeout(PATIENCE, threads.session((&way, &turns), || 7)).await;
            assert_eq!(done.expect("a heartbeat of another vault is held up").expect("runs"), 7);
        }
        drop(release);
        for work in slow {
            work.await.expect("ends").expect("is done");
        }
        assert!(threads.way("new", other).of_host.available_permits() == OF_HOST);
        assert_eq!(threads.of_hosts.used.lock().len(), 1, "what is not used is forgotten");
    }

    /// Each message may ask for it.
    #[tokio::test]
    async fn work_of_a_vault_that_waits_for_its_turn_is_not_asked_for_again() {
        let (threads, turns) = (Threads::default(), Arc::new(Turns::default()));
        let turn = one_of(&turns.next).await.expect("is free");
        let (of, waits) = (threads.clone(), turns.clone());
        let first = tokio::spawn(async move { of.upkeep(&waits, || 1).await });
        tokio::task::yield_now().await;
        assert_eq!(threads.upkeep(&turns, || 2).await.expect("runs"), None);
        drop(turn);
        assert_eq!(first.await.expect("ends").expect("runs"), Some(1));
        assert_eq!(threads.upkeep(&turns, || 3).await.expect("runs"), Some(3));
    }

    /// On one thread, where all that was spawned goes as far as it can while this one yields.
    #[tokio::test]
    async fn sessions_that_begin_in_a_slow_vault_are_in_the_way_of_no_other() {
        let (threads, counts) = (Threads::default(), Counts::default());
        let (release, work) = endless();
        let slow = Arc::new(Turns::default());
        let mut all = Vec::new();
        let held = || place(&counts, b"a", THREADS_MAX).expect("one more");
        for _ in 0..4 * BEGINNING_AT_ONCE {
            let (threads, slow, place, work) = (threads.clone(), slow.clone(), held(), work.clone());
            all.push(tokio::spawn(async move { threads.begin((&slow, place), work).await }));
        }
        // And commits.
        let (of, commits, place, work) = (threads.clone(), slow.clone(), held(), work.clone());
        all.push(tokio::spawn(async move { of.call_of((&commits, place), work).await }));
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        let done = tokio::time::timeout(PATIENCE, threads.begin((&Turns::default(), held()), || 7)).await;
        assert_eq!(done.expect("a session of another vault does not begin").expect("runs"), 7);
        drop(release);
        for work in all {
            work.await.expect("ends").expect("is done");
        }
    }

    /// A host with a place for each vault that somebody else makes slow would else be late in all others.
    #[tokio::test]
    async fn messages_that_wait_for_slow_vaults_leave_their_host_its_threads() {
        let threads = Threads::default();
        let slow: Vec<_> = (0..=OF_HOST as u8).map(|number| VaultId([number; 16])).collect();
        let turns: Vec<_> = slow.iter().map(|vault| threads.turns(*vault)).collect();
        let mut busy = Vec::new();
        for turns in &turns {
            busy.push(one_of(&turns.next).await.expect("is free"));
        }
        let mut all = Vec::new();
        for (vault, turns) in slow.iter().zip(&turns) {
            let (threads, way, turns) = (threads.clone(), threads.way("h", *vault), turns.clone());
            all.push(tokio::spawn(async move { threads.session((&way, &turns), || 1).await }));
        }
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        let other = VaultId([99; 16]);
        let (way, its) = (threads.way("h", other), threads.turns(other));
        let done = tokio::time::timeout(PATIENCE, threads.session((&way, &its), || 7)).await;
        assert_eq!(done.expect("a heartbeat of another vault is held up").expect("runs"), 7);
        drop(busy);
        for work in all {
            assert_eq!(work.await.expect("ends").expect("is done"), 1);
        }
    }

    #[tokio::test]
    async fn a_session_that_waits_for_others_to_begin_does_not_hold_its_vault_up() {
        let (threads, counts) = (Threads::default(), Counts::default());
        let (release, work) = endless();
        let held = || place(&counts, b"a", THREADS_MAX).expect("one more");
        let begin = |vault: u8, place| {
            let (threads, turns, work) = (threads.clone(), threads.turns(VaultId([vault; 16])), work.clone());
            tokio::spawn(async move { threads.begin((&turns, place), work).await })
        };
        let mut all: Vec<_> = (0..BEGINNING_AT_ONCE as u8).map(|vault| begin(vault, held())).collect();
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        let vault = VaultId([99; 16]);
        let turns = threads.turns(vault);
        all.push(begin(99, held()));
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        let way = threads.way("h", vault);
        let done = tokio::time::timeout(PATIENCE, threads.session((&way, &turns), || 7)).await;
        assert_eq!(done.expect("a heartbeat is held up").expect("runs"), 7);
        let done = tokio::time::timeout(PATIENCE, threads.call_of((&turns, held()), || 8)).await;
        assert_eq!(done.expect("a commit is held up").expect("runs"), 8);
        drop(release);
        for work in all {
            work.await.expect("ends").expect("is done");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn calls_that_use_no_vault_leave_turns_their_threads() {
        let (threads, counts) = (Threads::default(), Counts::default());
        let (release, work) = endless();
        let held = || place(&counts, b"a", THREADS_MAX).expect("one more");
        let mut calls = Vec::new();
        for _ in 0..THREADS_MAX / 2 {
            let (of, place, work) = (threads.clone(), held(), work.clone());
            calls.push(tokio::spawn(async move { of.call(place, work).await }));
        }
        let turns = threads.turns(VaultId([1; 16]));
        while threads.calls.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let done = tokio::time::timeout(PATIENCE, threads.call_of((&turns, held()), || 7)).await;
        assert_eq!(done.expect("a commit is held up").expect("runs"), 7);
        drop(release);
        for call in calls {
            call.await.expect("ends").expect("is done");
        }
    }

    #[tokio::test]
    async fn who_uses_a_vault_keeps_its_order_and_nobody_else_does() {
        let threads = Threads::default();
        let (one, other) = (threads.turns(VaultId([1; 16])), threads.turns(VaultId([2; 16])));
        assert!(Arc::ptr_eq(&one, &threads.turns(VaultId([1; 16]))) && !Arc::ptr_eq(&one, &other));
        drop((one, other));
        let _ = threads.turns(VaultId([3; 16]));
        assert_eq!(threads.turns.lock().len(), 1, "what is not used is forgotten");
    }

    #[test]
    fn a_stream_may_take_as_long_as_its_bytes_need() {
        assert!(allowed(0) == AT_FIRST && allowed(1 << 30) > Duration::from_secs(3600 * 9));
        let mut pace = Pace { begun: Instant::now() - AT_FIRST - Duration::from_secs(60), bytes: 0 };
        assert!(!pace.moved(1 << 10), "a kilobyte in three minutes");
        assert!(pace.moved(64 << 20));
    }

    /// It comes too late for one of the two again and again, and gets both in the end.
    #[test]
    fn who_waits_to_begin_does_not_hold_its_vault_up_nor_others_for_long() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("starts");
        let _within = runtime.enter();
        let [turn, places] = [(); 2].map(|()| Arc::new(Semaphore::new(1)));
        let take = |one: &Arc<Semaphore>| one.clone().try_acquire_owned().ok();
        let (mut busy, mut others) = (take(&turn), take(&places));
        let mut waits = std::pin::pin!(turn_and_place(&turn, &places));
        let mut is_done =
            || waits.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())).is_ready();
        assert!(!is_done());
        let mut rounds = 0..10 * ATTEMPTS;
        while others.is_some() {
            rounds.next().expect("it keeps a place in the end");
            drop(busy.take());
            assert!(!is_done());
            busy = take(&turn);
            assert!(busy.is_some(), "a heartbeat is held up");
            drop(others.take());
            assert!(!is_done());
            others = take(&places);
        }
        // Its vault has other work for long.
        runtime.block_on(async {
            let other = tokio::time::timeout(PATIENCE, async {
                tokio::select! {
                    _ = &mut waits => None,
                    place = one_of(&places) => Some(place.expect("is there")),
                }
            });
            let place = other.await.expect("other vaults are held up").expect("the turn is taken");
            drop((place, busy));
            drop(waits.await.expect("gets both"));
        });
    }

    /// Of the two, one is free when the other is not, each time that it is looked for.
    #[test]
    fn who_comes_too_late_again_and_again_gets_both_in_the_end() {
        for keeps in 0..2 {
            let both = [(); 2].map(|()| Arc::new(Semaphore::new(1)));
            let mut taken = both.each_ref().map(|one| one.clone().try_acquire_owned().ok());
            let mut waits = std::pin::pin!(both_of((&both[0], &both[1]), &both[keeps]));
            let mut is_done =
                || waits.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())).is_ready();
            assert!(!is_done());
            let rounds = (0..10 * ATTEMPTS).take_while(|round| {
                let one = round % 2;
                taken[one] = None;
                let goes_on = !is_done();
                // Unless it keeps it.
                taken[one] = both[one].clone().try_acquire_owned().ok();
                goes_on
            });
            assert!((ATTEMPTS..9 * ATTEMPTS).contains(&rounds.count()), "{keeps}");
        }
    }
}
