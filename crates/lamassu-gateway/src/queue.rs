//! The order of tenants' work. Pieces of contents and pages of listings take a processor. Some of them run at once, and
//! the others wait, without a thread: tenants take turns, however much one of them asks for. Pieces cannot be
//! interrupted, so no tenant has all places, also when it is alone: the next one to come finds a place at once.
//!
//! Copies and the ends of uploads in parts are pieces, too: they load the store and the processors as contents of
//! clients do. So are listings, deletions of many keys, and directories that are made for a key. How long these take
//! depends on how deep keys are, so they give their places to others after some milliseconds (`work::pause`).
//!
//! Syncs of large objects have places of their own: the store knows no tenants, so only a few syncs may be under way.
//! Other work that waits for the store or a provider takes no place: it is bounded by the requests of its tenant.
//!
//! One thread has one place at most, besides that of a copy. A thread holds no lock while it waits for a place of
//! pieces. The locks of an upload and a key are taken after a place of syncs, never before.

use crate::limits::Tenant;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Places for each processor. More than one: a piece may wait for the store.
const OF_PROCESSOR: usize = 2;
const PLACES_MIN: usize = 4;

/// Syncs of large objects at once.
const SYNCS: usize = 4;
/// Threads for work that blocks. Most of them wait.
pub const THREADS: usize = 4096;
/// Copies, ends of uploads in parts, deletions of many keys, listings and what makes directories, at once: half of the
/// threads. The other half is left for pieces. Such work holds its thread while it waits for a place of pieces. A copy
/// can take hours, so there are many of these: as many as dozens of tenants have requests at once by default.
const COPIES: usize = THREADS / 2;
/// The size from which on one is large. Small ones are many, and the store syncs them together.
pub const LARGE_MIN: u64 = 1 << 20;

/// The places of a gateway.
pub struct Queues {
    /// for what takes a processor
    pub pieces: Arc<Queue>,
    /// for syncs of large objects
    pub syncs: Arc<Queue>,
    /// for copies as a whole
    pub copies: Arc<Queue>,
}

impl Default for Queues {
    fn default() -> Queues {
        Queues { pieces: Queue::of_processors(), syncs: Queue::new(SYNCS), copies: Queue::new(COPIES) }
    }
}

/// Tells tenants apart: the address of one that lives as long as its place, or its wait for one.
type Key = usize;

fn key_of(tenant: &Arc<Tenant>) -> Key {
    Arc::as_ptr(tenant) as Key
}

/// See the module's head.
pub struct Queue {
    state: Mutex<State>,
    places: usize,
    /// of one tenant
    most: usize,
}

#[derive(Default)]
struct State {
    taken: usize,
    of: HashMap<Key, usize>,
    /// In the order of turns. None is empty. If places are free, every waiting tenant has as many as it may have.
    waiting: VecDeque<(Arc<Tenant>, VecDeque<oneshot::Sender<Permit>>)>,
}

/// A place, until it is dropped.
pub struct Permit {
    queue: Arc<Queue>,
    /// `None`: it was given back.
    tenant: Option<Arc<Tenant>>,
}

impl Queue {
    /// With places for what this machine's processors do at once.
    pub fn of_processors() -> Arc<Queue> {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Queue::new((OF_PROCESSOR * processors).max(PLACES_MIN))
    }

    /// With as many places. One tenant has three of four.
    pub fn new(places: usize) -> Arc<Queue> {
        Arc::new(Queue { state: Mutex::default(), places, most: (places * 3 / 4).max(1) })
    }

    /// Waits for a place for a tenant's work.
    pub async fn place(self: &Arc<Self>, tenant: &Arc<Tenant>) -> Permit {
        match self.ask(tenant) {
            Ok(place) => place,
            Err(turn) => turn.await.unwrap_or_else(|_| self.unsent(tenant)),
        }
    }

    /// The same on a thread that may block.
    pub fn place_blocking(self: &Arc<Self>, tenant: &Arc<Tenant>) -> Permit {
        match self.ask(tenant) {
            Ok(place) => place,
            Err(turn) => turn.blocking_recv().unwrap_or_else(|_| self.unsent(tenant)),
        }
    }

    /// A free place, or what tells of the next.
    fn ask(self: &Arc<Self>, tenant: &Arc<Tenant>) -> Result<Permit, oneshot::Receiver<Permit>> {
        let state = &mut *self.state.lock();
        if state.taken < self.places && state.has_less(key_of(tenant), self.most) {
            state.take(key_of(tenant));
            return Ok(self.of(tenant.clone()));
        }
        let (tell, turn) = oneshot::channel();
        match state.waiting.iter_mut().find(|(of, _)| Arc::ptr_eq(of, tenant)) {
            Some((_, waiting)) => {
                // Those whose clients have gone. Looked for now and then, so that it takes no time.
                if waiting.len().is_power_of_two() {
                    waiting.retain(|tell| !tell.is_closed());
                }
                waiting.push_back(tell);
            }
            None => state.waiting.push_back((tenant.clone(), VecDeque::from([tell]))),
        }
        Err(turn)
    }

    /// A place for a waiter whose sender was dropped without a message. That should not happen.
    fn unsent(self: &Arc<Self>, tenant: &Arc<Tenant>) -> Permit {
        self.state.lock().take(key_of(tenant));
        self.of(tenant.clone())
    }

    /// How many of a tenant's wait.
    #[cfg(test)]
    pub fn waiting_of(&self, tenant: &Arc<Tenant>) -> usize {
        let state = self.state.lock();
        state.waiting.iter().find(|(of, _)| Arc::ptr_eq(of, tenant)).map_or(0, |(_, waiting)| waiting.len())
    }

    fn of(self: &Arc<Self>, tenant: Arc<Tenant>) -> Permit {
        Permit { queue: self.clone(), tenant: Some(tenant) }
    }

    /// Returns a place, and gives it to the first request in turn that still waits.
    fn give_back(self: &Arc<Self>, mut tenant: Arc<Tenant>) {
        loop {
            let next = {
                let state = &mut *self.state.lock();
                state.leave(key_of(&tenant));
                state.next(self.most)
            };
            let Some((of, tell)) = next else { return };
            match tell.send(self.of(of)).map_err(|mut place| place.tenant.take()) {
                Err(Some(gone)) => tenant = gone,
                Ok(()) | Err(None) => return,
            }
        }
    }
}

impl State {
    fn has_less(&self, key: Key, most: usize) -> bool {
        self.of.get(&key).is_none_or(|taken| *taken < most)
    }

    fn take(&mut self, key: Key) {
        self.taken += 1;
        *self.of.entry(key).or_default() += 1;
    }

    fn leave(&mut self, key: Key) {
        self.taken -= 1;
        if let Some(taken) = self.of.get_mut(&key) {
            *taken -= 1;
            if *taken == 0 {
                self.of.remove(&key);
            }
        }
    }

    /// The next waiting request; takes a place for it. Its tenant then moves to the end of the order.
    fn next(&mut self, most: usize) -> Option<(Arc<Tenant>, oneshot::Sender<Permit>)> {
        let at = self.waiting.iter().position(|(tenant, _)| self.has_less(key_of(tenant), most))?;
        let (tenant, mut waiting) = self.waiting.remove(at)?;
        let tell = waiting.pop_front()?;
        if !waiting.is_empty() {
            self.waiting.push_back((tenant.clone(), waiting));
        }
        self.take(key_of(&tenant));
        Some((tenant, tell))
    }
}

impl Permit {
    /// Gives the place to whose turn it is. The tenant can wait for another.
    pub fn give_back(mut self) -> Again {
        let again = Again { queue: self.queue.clone(), tenant: self.tenant.take() };
        if let Some(tenant) = again.tenant.clone() {
            self.queue.give_back(tenant);
        }
        again
    }
}

/// A tenant that has given its place back.
pub struct Again {
    queue: Arc<Queue>,
    tenant: Option<Arc<Tenant>>,
}

impl Again {
    /// Waits for another place. The thread may block.
    pub fn place_blocking(self) -> Permit {
        match &self.tenant {
            Some(tenant) => self.queue.place_blocking(tenant),
            None => Permit { queue: self.queue, tenant: None },
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(tenant) = self.tenant.take() {
            self.queue.give_back(tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use futures_util::FutureExt;
    use std::pin::Pin;

    fn tenant() -> Arc<Tenant> {
        Arc::new(Tenant::new("t", Limits::default()))
    }

    /// One that waits for a place.
    fn waits<'a>(queue: &'a Arc<Queue>, tenant: &'a Arc<Tenant>) -> Pin<Box<dyn Future<Output = Permit> + 'a>> {
        let mut waits = Box::pin(queue.place(tenant));
        assert!(waits.as_mut().now_or_never().is_none(), "no place is free");
        waits
    }

    fn has(waits: &mut Pin<Box<dyn Future<Output = Permit> + '_>>) -> Option<Permit> {
        waits.as_mut().now_or_never()
    }

    #[test]
    fn no_tenant_has_all_places() {
        let (queue, one, other) = (Queue::new(4), tenant(), tenant());
        let places: Vec<_> = (0..3).map(|_| queue.place(&one).now_or_never().expect("free")).collect();
        let mut fourth = waits(&queue, &one);
        let last = queue.place(&other).now_or_never().expect("kept for others");
        let mut second = waits(&queue, &other);
        drop(last);
        let last = has(&mut second).expect("it is free again");
        assert!(has(&mut fourth).is_none(), "it is not for the tenant with the most places");
        drop(places);
        let fourth = has(&mut fourth).expect("its own was given back");
        drop((fourth, last));
        let state = queue.state.lock();
        assert!(state.taken == 0 && state.of.is_empty() && state.waiting.is_empty());
    }

    #[test]
    fn tenants_take_turns_however_many_wait() {
        let (queue, many, few) = (Queue::new(1), tenant(), tenant());
        let mut place = queue.place(&many).now_or_never().expect("free");
        let mut of_many: Vec<_> = (0..10).map(|_| waits(&queue, &many)).collect();
        let mut of_few: Vec<_> = (0..3).map(|_| waits(&queue, &few)).collect();
        let mut order = String::new();
        while !(of_many.is_empty() && of_few.is_empty()) {
            drop(place);
            let next = of_many.first_mut().and_then(has).map(|next| (next, 'm'));
            let (next, whose) = next.or_else(|| of_few.first_mut().and_then(has).map(|next| (next, 'f'))).expect("one");
            drop(if whose == 'm' { of_many.remove(0) } else { of_few.remove(0) });
            (place, order) = (next, order + &whose.to_string());
        }
        assert_eq!(order, "mfmfmfmmmmmmm");
    }

    #[test]
    fn who_has_gone_takes_no_place() {
        let (queue, one) = (Queue::new(1), tenant());
        let place = queue.place(&one).now_or_never().expect("free");
        let gone: Vec<_> = (0..10_000).map(|_| waits(&queue, &one)).collect();
        let mut last = waits(&queue, &one);
        drop(gone);
        drop(place);
        let place = has(&mut last).expect("it is the only one that waits");
        // It is given to one that goes without looking.
        let goes = waits(&queue, &one);
        drop(place);
        drop(goes);
        assert!(queue.place(&one).now_or_never().is_some());
    }
}
