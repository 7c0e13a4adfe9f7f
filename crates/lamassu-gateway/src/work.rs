//! Blocking work for requests. A client that disconnects ends its request, but not the thread's work. So the work
//! itself holds the request's turn, and a tenant never has more threads than turns.
//!
//! Work of an unknown length, which is not begun piece by piece, takes places in the queues itself: [`in_turn`].

use crate::limits::{Reading, Turn};
use crate::queue::{LARGE_MIN, Permit, Queue, Queues};
use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinHandle, spawn_blocking};

/// How long work of unknown length has its place before others have theirs ([`pause`]): about as long as a large piece
/// of contents. In tests every pause is one.
const SLICE: Duration = Duration::from_millis(if cfg!(test) { 0 } else { 20 });

thread_local! {
    /// The turn of the request that this thread works for. If it is set, the thread may block.
    static CURRENT: RefCell<Option<Arc<Turn>>> = const { RefCell::new(None) };
    /// Where this thread's work waits for its tenant's turn. Not set: it takes no place, or has one already.
    static QUEUES: RefCell<Option<Arc<Queues>>> = const { RefCell::new(None) };
    /// The place of the piece that this thread does, and since when it has it.
    static PLACE: RefCell<Option<(Permit, Instant)>> = const { RefCell::new(None) };
    /// How many [`Unpaused`] this thread has.
    static UNPAUSED: Cell<u32> = const { Cell::new(0) };
    /// Of work without a known end: it goes on in turns, and only as long as the request's credential is in force.
    static IN_FORCE: RefCell<Option<InForce>> = const { RefCell::new(None) };
    /// Set once the request's client is gone.
    static GIVEN_UP: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Resets what this thread knows of its work, also if the work panics.
struct Working;

impl Working {
    fn begin(turn: Option<Arc<Turn>>, queues: Option<Arc<Queues>>, given_up: Option<Arc<AtomicBool>>) -> Working {
        CURRENT.set(turn);
        QUEUES.set(queues);
        GIVEN_UP.set(given_up);
        Working
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        CURRENT.set(None);
        QUEUES.set(None);
        PLACE.set(None);
        UNPAUSED.set(0);
        IN_FORCE.set(None);
        GIVEN_UP.set(None);
    }
}

/// Tells whether a request's credential is in force.
pub type InForce = Box<dyn Fn() -> bool + Send>;

/// The credential of the request was revoked or has expired, so its work may not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoLonger;

/// Whether the request's credential is in force.
fn goes_on() -> Result<(), NoLonger> {
    IN_FORCE.with_borrow(|is_so| is_so.as_ref().is_none_or(|is_so| is_so())).then_some(()).ok_or(NoLonger)
}

/// Work on another thread, and its result. Dropping this gives the work up: the work continues, but can ask
/// [`is_wanted`].
pub struct Work<T> {
    thread: JoinHandle<T>,
    given_up: Arc<AtomicBool>,
}

impl<T> Future for Work<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.thread).poll(cx)
    }
}

impl<T> Drop for Work<T> {
    fn drop(&mut self) {
        self.given_up.store(true, Ordering::Relaxed);
    }
}

/// Whether the client still waits for this thread's work. Work without a known end asks.
pub fn is_wanted() -> bool {
    GIVEN_UP.with_borrow(|given_up| given_up.as_ref().is_none_or(|given_up| !given_up.load(Ordering::Relaxed)))
}

/// Ends work, with this error, if its client no longer waits.
///
/// # Errors
/// `error`.
pub fn wanted<E>(error: E) -> Result<(), E> {
    if is_wanted() { Ok(()) } else { Err(error) }
}

/// A thread's knowledge of its client, to be passed to threads that work for it.
#[derive(Clone)]
pub struct Client(Option<Arc<AtomicBool>>);

impl Client {
    /// The client of this thread.
    pub fn here() -> Client {
        Client(GIVEN_UP.with_borrow(Clone::clone))
    }

    /// Runs `work` for this client on the present thread.
    pub fn serve<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = GIVEN_UP.replace(self.0.clone());
        let done = work();
        GIVEN_UP.set(before);
        done
    }
}

/// The turn of the request that this thread works for.
pub fn current() -> Option<Arc<Turn>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Waits for a tenant's permit to hold a whole listing in memory. Meanwhile the thread has no place: those who have a
/// permit may wait for one.
///
/// # Errors
/// `error`: the client has gone.
pub fn reading<E>(error: E) -> Result<Option<Reading>, E> {
    let Some(turn) = current() else { return Ok(None) };
    if let Some(reading) = turn.reading_now() {
        return Ok(Some(reading));
    }
    let reading = without_place(|| turn.reading(is_wanted));
    reading.map(Some).ok_or(error)
}

/// Whether this thread's work may wait for a place: it holds no lock of a name.
pub fn may_pause() -> bool {
    UNPAUSED.get() == 0
}

/// While a thread has this, its work does not pause: it holds a lock, and those whose turn it is could wait for that.
pub struct Unpaused(());

impl Unpaused {
    /// From now on.
    pub fn begin() -> Unpaused {
        UNPAUSED.set(UNPAUSED.get() + 1);
        Unpaused(())
    }
}

impl Drop for Unpaused {
    fn drop(&mut self) {
        UNPAUSED.set(UNPAUSED.get() - 1);
    }
}

/// Gives the place of this thread's piece to others if the piece has had it for long, and waits for another.
pub fn give_way() {
    let is_over = |(_, since): &(Permit, Instant)| since.elapsed() >= SLICE;
    if may_pause() && PLACE.with_borrow(|place| place.as_ref().is_some_and(is_over)) {
        without_place(|| ());
    }
}

/// The same, in the middle of a piece of unknown length. The credential is asked for again.
///
/// # Errors
/// [`NoLonger`].
pub fn pause() -> Result<(), NoLonger> {
    give_way();
    goes_on()
}

/// Does what may wait for the store or for others without the place of this thread's piece. It may take locks, which it
/// gives back before it ends.
pub fn without_place<T>(wait: impl FnOnce() -> T) -> T {
    if !may_pause() {
        return wait();
    }
    let place = PLACE.take();
    let again = place.map(|(place, _)| place.give_back());
    let done = wait();
    PLACE.set(again.map(|again| (again.place_blocking(), Instant::now())));
    done
}

/// Does a piece of this thread's work when it is its tenant's turn. A piece takes milliseconds, as 1 MiB of content
/// does, or pauses ([`pause`]). Its caller holds no lock.
///
/// # Errors
/// [`NoLonger`]; those of the piece.
pub fn in_turn<T, E: From<NoLonger>>(piece: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    at_place(|queues| Some(&queues.pieces), piece)
}

/// The same for work that ends with a sync of so many bytes.
///
/// # Errors
/// [`NoLonger`]; those of the work.
pub fn in_turn_to_sync<T, E: From<NoLonger>>(bytes: u64, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    at_place(|queues| (bytes >= LARGE_MIN).then_some(&queues.syncs), work)
}

/// While the work goes on, it has no queues: within it nothing waits for another place.
fn at_place<T, E: From<NoLonger>>(
    queue_of: impl FnOnce(&Queues) -> Option<&Arc<Queue>>,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    /// Sets [`QUEUES`] again, also if the work panics.
    struct Without(Option<Arc<Queues>>);
    impl Drop for Without {
        fn drop(&mut self) {
            QUEUES.set(self.0.take());
        }
    }
    /// Gives the place back, also if the work panics. If the work had a place before, it keeps that one.
    struct At(bool);
    impl At {
        fn place(place: Option<Permit>) -> At {
            let is_new = place.is_some();
            if let Some(place) = place {
                PLACE.set(Some((place, Instant::now())));
            }
            At(is_new)
        }
    }
    impl Drop for At {
        fn drop(&mut self) {
            if self.0 {
                PLACE.set(None);
            }
        }
    }
    let queues = Without(QUEUES.take());
    let place = match (&queues.0, current()) {
        (Some(queues), Some(turn)) => queue_of(queues).map(|queue| queue.place_blocking(turn.tenant())),
        _ => None,
    };
    debug_assert!(place.is_none() || may_pause(), "a place was waited for with a lock held");
    let _at = At::place(place);
    // Asked last: the turn may have come after a long time.
    goes_on()?;
    work()
}

/// Runs the work of a request on a thread that may block. The request's turn lasts at least as long as the work.
/// `queues`: where [`in_turn`] waits; `None` for work that takes no place, or has one.
pub fn spawn<T: Send + 'static>(
    turn: Arc<Turn>,
    queues: Option<Arc<Queues>>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Work<T> {
    let given_up = Arc::new(AtomicBool::new(false));
    let told = given_up.clone();
    let thread = spawn_blocking(move || {
        let _working = Working::begin(Some(turn), queues, Some(told));
        work()
    });
    Work { thread, given_up }
}

/// Runs work without a known end, in turns ([`in_turn`]): each of them only if the request's credential is in force.
pub fn in_turns<T: Send + 'static>(
    turn: Arc<Turn>,
    queues: Option<Arc<Queues>>,
    in_force: InForce,
    work: impl FnOnce() -> T + Send + 'static,
) -> Work<T> {
    spawn(turn, queues, move || {
        IN_FORCE.set(Some(in_force));
        work()
    })
}

/// Runs work that may wait for the store, when a value is dropped. If a client disconnects during its request, an async
/// thread drops the values and must not block: then another thread, which holds `turn`, does the work.
pub fn beside_async(turn: Option<Arc<Turn>>, work: impl FnOnce() + Send + 'static) {
    match Handle::try_current() {
        Ok(runtime) if current().is_none() => {
            drop(runtime.spawn_blocking(move || {
                let _working = Working::begin(turn, None, None);
                work();
            }));
        }
        Ok(_) | Err(_) => work(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{Limits, READINGS_AT_ONCE, Tenant};
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    fn one_at_once() -> Arc<Tenant> {
        Arc::new(Tenant::new("t", Limits { requests_at_once: 1, ..Limits::default() }))
    }

    #[tokio::test]
    async fn work_learns_that_it_is_given_up() {
        let tenant = one_at_once();
        let turn = Arc::new(tenant.begin("u").expect("the first"));
        assert!(spawn(turn.clone(), None, is_wanted).await.expect("no panic") && is_wanted());
        let (tell, told) = mpsc::channel();
        let work = spawn(turn, None, move || {
            while is_wanted() {
                std::thread::yield_now();
            }
            tell.send(()).expect("it is waited for");
        });
        drop(work);
        tokio::task::spawn_blocking(move || told.recv()).await.expect("no panic").expect("it ends");
    }

    /// However many requests a tenant has, and also if their clients go away.
    #[tokio::test]
    async fn few_large_readings_of_a_tenant_are_in_memory_at_once() {
        let tenant = Arc::new(Tenant::new("t", Limits::default()));
        let turn = Arc::new(tenant.begin("u").expect("the first"));
        let (most, now) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let read = || {
            let (most, now) = (most.clone(), now.clone());
            move || {
                let reading = reading(()).expect("it is waited for");
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                (0..1000).for_each(|_| std::thread::yield_now());
                now.fetch_sub(1, Ordering::SeqCst);
                drop(reading);
            }
        };
        let all: Vec<_> = (0..16).map(|_| spawn(turn.clone(), None, read())).collect();
        for one in all {
            one.await.expect("no panic");
        }
        assert!(most.load(Ordering::SeqCst) <= READINGS_AT_ONCE, "{most:?}");
        // Work that waits for a permit ends when it is given up.
        let readings: Vec<_> = (0..READINGS_AT_ONCE).map(|_| turn.reading(|| true).expect("free")).collect();
        let (tell, told) = mpsc::channel();
        drop(spawn(turn.clone(), None, move || tell.send(reading(()).is_err()).expect("it is waited for")));
        let is_refused = tokio::task::spawn_blocking(move || told.recv()).await.expect("no panic");
        assert!(is_refused.expect("it ends"));
        drop(readings);
        assert!(turn.reading(|| false).is_some() && reading(()).expect("no request").is_none());
    }

    async fn is_given_back(tenant: &Arc<Tenant>) {
        while tenant.begin("u").is_err() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_request_that_is_given_up_counts_as_long_as_its_work_goes_on() {
        let tenant = one_at_once();
        let turn = Arc::new(tenant.begin("u").expect("the first"));
        let (end, ended) = mpsc::channel::<()>();
        let work = spawn(turn.clone(), None, move || ended.recv());
        // The client hangs up.
        drop((turn, work));
        assert!(tenant.begin("u").is_err());
        end.send(()).expect("it waits");
        is_given_back(&tenant).await;
    }

    #[tokio::test]
    async fn what_is_left_to_another_thread_counts_too() {
        let tenant = one_at_once();
        let turn = Arc::new(tenant.begin("u").expect("the first"));
        let found = spawn(turn, None, || {
            // A thread that may block does it itself.
            let thread = std::thread::current().id();
            let (told, tell) = mpsc::channel();
            beside_async(None, move || told.send(std::thread::current().id()).expect("it is waited for"));
            (current(), tell.try_recv() == Ok(thread))
        });
        let (turn, is_done) = found.await.expect("no panic");
        assert!(is_done && turn.is_some() && current().is_none());
        let (end, ended) = mpsc::channel::<()>();
        beside_async(turn, move || ended.recv().expect("it is sent"));
        assert!(tenant.begin("u").is_err());
        end.send(()).expect("it waits");
        is_given_back(&tenant).await;
    }
}
