//! Turns of a vault that several hosts use (`docs/sharing.md`). Requests wait here, without a thread each, until this
//! host holds the vault in the mode that they need.
//!
//! A *driver* takes the turns and opens the vault ([`Turns::wanted`], [`Turns::begin`]). When another host wants the
//! vault, or a request of this host needs more than a shared turn, the driver stops further requests, lets the kernel
//! drop its caches, and closes the vault ([`Turns::wait_for_end`], [`Turns::stop_requests`], [`Turns::end`]).
//!
//! In an exclusive turn the kernel may cache names and attributes ([`Turns::keep`]). Before such a turn ends, they are
//! dropped ([`Turns::stop_keeping`]). Dropping takes locks of the kernel which callers hold while their requests wait.
//! So all requests are carried out meanwhile, and nothing more is cached.
//!
//! Cached pages are dropped when the turn ends. The kernel's requests for pages, and its writes of them, hold locks
//! that dropping waits for. So these are carried out while a turn ends, until the kernel has no page of the turn left.

mod end;
mod freeze;
mod need;
mod together;
mod told;
mod under_way;

pub use need::Need;
pub use together::{TOGETHER, run_in_both};
pub use under_way::Use;

use crate::Ino;
use freeze::Freezing;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use told::Told;

/// How long the kernel may use a cached name or attributes without asking again.
pub const KEPT_FOR: Duration = Duration::from_secs(2);
/// How long a turn may last although another host wants the vault, while requests of this host follow each other.
/// Shorter than the time after which the kernel may cache: dropping its caches would cost more.
const SHARE: Duration = Duration::from_millis(100);
/// A host that had no request for this long has no program at work.
const IDLE: Duration = Duration::from_millis(2);
/// The time after which an answer has certainly taken effect in the kernel.
const TAKEN_IN: Duration = Duration::from_millis(200);

/// No two turns of a process have the same number, whatever vault they are of.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// A request, which also sends its reply. `None`: it has waited for as long as it may.
type Job = Box<dyn FnOnce(Option<Use>) + Send>;

/// The mode in which this host holds the vault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Shared: other hosts may read at the same time.
    Look,
    /// Exclusive.
    Change,
}

/// The reason why a turn ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Another host wants the vault, or this host's session is over.
    Recalled,
    /// A request of this host needs an exclusive turn.
    TooLittle,
    /// The vault is unloaded, and the mount goes on.
    Retired,
    /// The mount ends.
    Stopping,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// This host does not hold the vault.
    Away,
    /// Requests are carried out.
    Here(Mode),
    /// Only requests for pages are, and those that were waiting when the turn began.
    Ending(Mode),
    /// There will be no further turn: requests are carried out, and fail.
    Over,
}

/// Whether the kernel may cache names and attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keeping {
    No,
    Yes,
    /// Its caches are being dropped.
    Dropping,
}

/// A name in a directory, or its absence.
type Name = (Ino, Box<OsStr>);

/// What the kernel may have cached.
#[derive(Debug, PartialEq, Eq)]
pub struct Kept {
    /// inodes with cached attributes
    pub inodes: Vec<Ino>,
    /// the time after which all of it has expired
    pub runs_out_in: Duration,
}

struct Waiting {
    need: Need,
    job: Job,
    /// When it gives up.
    until: Option<Instant>,
}

struct State {
    phase: Phase,
    /// The number of the last turn that began.
    number: u64,
    /// Requests under way, and those of them that a freeze holds back.
    users: usize,
    changers: usize,
    freezing: Freezing,
    /// The driver has begun to end the turn, or is dropping caches.
    is_ending: bool,
    waiting: VecDeque<Waiting>,
    /// How many of the waiting requests were waiting when the turn began.
    due: usize,
    /// Files whose pages the kernel has read in this turn, and whether it may have any now.
    filled: HashMap<Ino, bool>,
    keeping: Keeping,
    inodes: Told<Ino>,
    names: Told<Name>,
    /// Names that the kernel still has to drop. A name that is moved here again gets a new number.
    expiring: HashMap<Name, u64>,
    last_told: Option<Instant>,
    /// The number of the last drop of caches.
    dropping: u64,
    /// Requests under way that began before it.
    older_users: usize,
    /// The number of the last name that was added to `expiring`.
    dropping_names: u64,
    /// Whether a request came since the last look.
    is_used: bool,
    /// Whether a request of the turn changed something.
    is_changing: bool,
    /// When the turn began.
    begun: Instant,
    /// When a request last began or ended.
    last_used: Instant,
    is_recalled: bool,
    is_retired: bool,
    is_stopping: bool,
    /// Threads that carry out waiting requests.
    runners: usize,
}

impl State {
    /// Whether a turn is enough for a request. Opening a file for writing in a shared turn takes effect in the next
    /// exclusive turn. Until then its pages, if it was read before, are treated as those of a file open for reading:
    /// dropping them waits for that request.
    fn is_enough(&self, mode: Mode, need: Need) -> bool {
        need.mode <= mode || need.fills.is_some_and(|ino| self.filled.contains_key(&ino))
    }

    fn admits(&self, need: Need) -> bool {
        self.is_beside(need) || self.admits_in_turn(need)
    }

    /// Whether a request is carried out beside the turns: nothing waits for it, so nobody can hold up the end of a turn
    /// by such requests.
    fn is_beside(&self, need: Need) -> bool {
        need.is_of_root && self.freezing == Freezing::Wanted && !self.admits_in_turn(need)
    }

    fn admits_in_turn(&self, need: Need) -> bool {
        match self.phase {
            Phase::Away => false,
            Phase::Here(mode) => {
                let goes_on = !self.is_recalled || self.is_frozen() || self.keeping == Keeping::Dropping;
                self.is_enough(mode, need) && (goes_on || need.is_of_pages) && !self.holds_back(need)
            }
            Phase::Ending(mode) => need.is_of_pages && self.is_enough(mode, need),
            Phase::Over => true,
        }
    }

    /// The position of the next waiting request that can be carried out.
    fn next(&self) -> Option<usize> {
        let is_due = |at: usize| at < self.due && matches!(self.phase, Phase::Here(_) | Phase::Ending(_));
        let fits = |need: Need| match self.phase {
            Phase::Here(mode) | Phase::Ending(mode) => self.is_enough(mode, need),
            Phase::Away | Phase::Over => false,
        };
        let of = |(at, waiting): (usize, &Waiting)| {
            let may_go =
                self.admits(waiting.need) || (is_due(at) && fits(waiting.need) && !self.holds_back(waiting.need));
            may_go.then_some(at)
        };
        self.waiting.iter().enumerate().find_map(of)
    }

    /// Whether no further turn begins.
    fn is_last(&self) -> bool {
        self.is_stopping || self.is_retired
    }

    fn is_quiet(&self) -> bool {
        self.users == 0 && self.next().is_none()
    }

    fn wanted(&self) -> Option<Mode> {
        let by_freeze = (self.freezing == Freezing::Wanted).then_some(Mode::Change);
        self.waiting.iter().map(|waiting| waiting.need.mode).max().max(by_freeze)
    }

    /// How long the turn with this number certainly goes on although another host wants the vault; `None`: it ends.
    fn goes_on(&self, number: u64, now: Instant) -> Option<Duration> {
        if self.number != number || !matches!(self.phase, Phase::Here(_)) || self.is_last() {
            return None;
        }
        let share = SHARE.saturating_sub(now.duration_since(self.begun));
        let idle = match self.users {
            0 => IDLE.saturating_sub(now.duration_since(self.last_used)),
            _ => IDLE,
        };
        Some(share.min(idle)).filter(|time| !time.is_zero())
    }

    /// Files that may have pages in the kernel's cache.
    fn mapped(&self) -> Vec<Ino> {
        self.filled.iter().filter(|(_, has_pages)| **has_pages).map(|(ino, _)| *ino).collect()
    }
}

/// The queue of requests that wait for a turn of this host.
pub struct Turns {
    state: Mutex<State>,
    /// Waiting requests may have become ready.
    runnable: Condvar,
    /// The driver may have something to do, or has ended.
    driver: Condvar,
    /// No request is under way. A condition variable of its own, since that happens after each request.
    quiet: Condvar,
}

impl Turns {
    /// Without a turn so far: requests wait for the first one.
    pub fn new() -> Arc<Turns> {
        Arc::new(Turns {
            state: Mutex::new(State {
                phase: Phase::Away,
                number: NUMBERS.fetch_add(1 << 32, Ordering::Relaxed),
                users: 0,
                changers: 0,
                freezing: Freezing::No,
                is_ending: false,
                waiting: VecDeque::new(),
                due: 0,
                filled: HashMap::new(),
                keeping: Keeping::No,
                inodes: Told::new(),
                names: Told::new(),
                expiring: HashMap::new(),
                last_told: None,
                dropping: 0,
                dropping_names: 0,
                older_users: 0,
                is_used: false,
                is_changing: false,
                begun: Instant::now(),
                last_used: Instant::now(),
                is_recalled: false,
                is_retired: false,
                is_stopping: false,
                runners: 0,
            }),
            runnable: Condvar::new(),
            driver: Condvar::new(),
            quiet: Condvar::new(),
        })
    }

    // --- requests

    /// Begins a request; `None`: it has to wait ([`Turns::run`]).
    pub fn enter(self: &Arc<Self>, need: Need) -> Option<Use> {
        let mut state = self.state.lock();
        state.admits(need).then(|| self.begin_request(&mut state, need))
    }

    fn begin_request(self: &Arc<Self>, state: &mut State, need: Need) -> Use {
        if state.is_beside(need) {
            return Use { turns: self.clone(), is_beside: true, changes: false, dropping: state.dropping };
        }
        state.users += 1;
        state.changers += usize::from(need.changes());
        state.is_used = true;
        state.is_changing |= need.mode == Mode::Change;
        state.last_used = Instant::now();
        if let Some(ino) = need.fills {
            state.filled.insert(ino, true);
            // The turn may now be enough for other requests.
            if !state.waiting.is_empty() {
                self.runnable.notify_all();
            }
        }
        Use { turns: self.clone(), is_beside: false, changes: need.changes(), dropping: state.dropping }
    }

    /// Carries a request out now, or when there is a turn for it.
    pub fn run(self: &Arc<Self>, need: Need, job: impl FnOnce(Use) + Send + 'static) {
        self.run_until(None, need, move |turn| turn.map_or((), job));
    }

    /// The same; `None`: there was no turn until then.
    pub fn run_until(
        self: &Arc<Self>,
        until: Option<Instant>,
        need: Need,
        job: impl FnOnce(Option<Use>) + Send + 'static,
    ) {
        let mut state = self.state.lock();
        if state.admits(need) {
            let turn = self.begin_request(&mut state, need);
            drop(state);
            return job(Some(turn));
        }
        state.waiting.push_back(Waiting { need, job: Box::new(job), until });
        self.driver.notify_all();
        if until.is_some() {
            self.runnable.notify_all();
        }
    }

    /// The loop of a thread that carries out waiting requests, until the end.
    pub fn run_waiting(self: &Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            if let Some(at) = state.next()
                && let Some(Waiting { need, job, .. }) = state.take(at)
            {
                let turn = self.begin_request(&mut state, need);
                MutexGuard::unlocked(&mut state, || job(Some(turn)));
            } else if let Some(Waiting { job, .. }) = state.overdue(Instant::now()).and_then(|at| state.take(at)) {
                MutexGuard::unlocked(&mut state, || job(None));
            } else if state.phase == Phase::Over {
                return;
            } else if let Some(until) = state.waiting.iter().filter_map(|waiting| waiting.until).min() {
                self.runnable.wait_until(&mut state, until);
            } else {
                self.runnable.wait(&mut state);
            }
        }
    }

    /// Called in a request before the kernel is given attributes to cache. False: it must not cache them.
    pub fn may_keep(&self, ino: Ino) -> bool {
        self.tell(|state, now| state.inodes.add(ino, now))
    }

    /// The same for a name, or for its absence.
    pub fn may_keep_name(&self, dir: Ino, name: &OsStr) -> bool {
        self.tell(|state, now| state.names.add((dir, name.into()), now))
    }

    /// Notes that the kernel moves a cached name to another one, or exchanges two.
    pub fn is_moved(&self, names: [(Ino, &OsStr); 2]) {
        let state = &mut *self.state.lock();
        let names = names.map(|(dir, name)| (dir, Box::from(name)));
        match state.keeping {
            Keeping::No => {}
            Keeping::Yes => names.into_iter().for_each(|name| state.names.note(name, Instant::now())),
            // If the kernel has dropped the old name, it does not have the new one either.
            Keeping::Dropping if names.iter().any(|name| state.expiring.contains_key(name)) => {
                for name in names {
                    state.dropping_names += 1;
                    state.expiring.insert(name, state.dropping_names);
                }
            }
            Keeping::Dropping => {}
        }
    }

    fn tell(&self, add: impl FnOnce(&mut State, Instant) -> bool) -> bool {
        let mut state = self.state.lock();
        if state.keeping != Keeping::Yes {
            return false;
        }
        let now = Instant::now();
        state.last_told = Some(now);
        add(&mut state, now)
    }

    /// Whether the kernel may cache answers now.
    pub fn is_keeping(&self) -> bool {
        self.state.lock().keeping == Keeping::Yes
    }

    // --- the driver

    /// Waits until a request needs a turn, and returns the mode; `None`: the mount ends.
    pub fn wanted(&self) -> Option<Mode> {
        let mut state = self.state.lock();
        loop {
            match state.wanted() {
                _ if state.is_last() => return None,
                Some(mode) => return Some(mode),
                None => self.driver.wait(&mut state),
            }
        }
    }

    /// Whether a turn in this mode is still waited for.
    pub fn is_wanted(&self, mode: Mode) -> bool {
        let state = self.state.lock();
        !state.is_last() && state.wanted() >= Some(mode)
    }

    /// Begins a turn: the vault is open, and requests are carried out. Returns the turn's number.
    pub fn begin(&self, mode: Mode) -> u64 {
        let mut state = self.state.lock();
        (state.phase, state.is_recalled, state.is_ending) = (Phase::Here(mode), false, false);
        self.freeze_now(&mut state);
        state.due = state.waiting.len();
        state.filled.clear();
        state.is_used = false;
        state.is_changing = false;
        state.begun = Instant::now();
        state.last_used = state.begun;
        state.number += 1;
        self.runnable.notify_all();
        state.number
    }

    /// Another host wants the vault: waits while the turn with this number has a share of time left, and programs of
    /// this host use it. A hand-over takes as long as many requests, so a turn of a single one would be waste.
    pub fn wait_while_used(&self, number: u64) {
        loop {
            let goes_on = self.state.lock().goes_on(number, Instant::now());
            match goes_on {
                Some(time) => std::thread::sleep(time),
                None => return,
            }
        }
    }

    /// Lets the turn with this number end, if it is under way: another host wants the vault.
    pub fn recall(&self, number: u64) {
        let mut state = self.state.lock();
        state.is_recalled |= state.number == number;
        self.driver.notify_all();
    }

    /// Whether a long request should stop, because the turn is to end.
    pub fn is_to_end(&self) -> bool {
        let state = self.state.lock();
        let is_wanted = state.is_recalled && !state.is_frozen();
        state.is_last() || is_wanted || state.freezing != Freezing::No || !matches!(state.phase, Phase::Here(_))
    }

    /// Waits until the turn is to end; `None`: not yet, after `at_most`.
    pub fn wait_for_end(&self, at_most: Duration) -> Option<End> {
        let until = Instant::now() + at_most;
        let mut state = self.state.lock();
        loop {
            let lacks = matches!(state.phase, Phase::Here(mode) if state.wanted().is_some_and(|wanted| wanted > mode));
            let end = match () {
                () if state.is_stopping => End::Stopping,
                () if state.is_retired => End::Retired,
                () if state.is_recalled && !state.is_frozen() => End::Recalled,
                () if lacks => End::TooLittle,
                () if self.driver.wait_until(&mut state, until).timed_out() => return None,
                () => continue,
            };
            state.is_ending = true;
            return Some(end);
        }
    }

    /// From now on the kernel may cache answers, if the turn is exclusive. (In a shared one, callers wait for the next
    /// turn while they hold locks that dropping caches would need.)
    pub fn keep(&self) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Here(Mode::Change)) && !state.is_recalled && state.keeping == Keeping::No {
            state.keeping = Keeping::Yes;
        }
    }

    /// From now on the kernel may cache nothing more. Waits until all answers have reached their callers. Returns what
    /// the kernel may have cached, except names; `None`: nothing. Until [`Turns::forgotten`] all requests are carried
    /// out, even in a recalled turn; not if this turn or one that they need too is frozen, so a freeze ends first.
    pub fn stop_keeping(&self) -> Option<Kept> {
        let mut state = self.state.lock();
        if state.keeping == Keeping::No {
            return None;
        }
        state.keeping = Keeping::Dropping;
        state.dropping += 1;
        state.older_users = state.users;
        self.runnable.notify_all();
        self.quiet.wait_while(&mut state, |state| state.older_users > 0);
        let names = state.names.take();
        // A number of its own: a thread that was left behind by an earlier turn still takes away what it has dropped.
        state.dropping_names += 1;
        let number = state.dropping_names;
        state.expiring = names.into_iter().map(|name| (name, number)).collect();
        let (inodes, last_told) = (state.inodes.take(), state.last_told.take());
        drop(state);
        let until = |after| {
            let at = last_told.map(|at| at + after);
            at.map(|at| at.saturating_duration_since(Instant::now())).unwrap_or_default()
        };
        std::thread::sleep(until(TAKEN_IN));
        Some(Kept { inodes, runs_out_in: until(KEPT_FOR + TAKEN_IN) })
    }

    /// Calls `expire` for every name that the kernel has to drop; it may wait for requests. Names that are renamed
    /// meanwhile are included.
    pub fn expire_names(&self, expire: impl Fn(Ino, &OsStr)) {
        loop {
            let all: Vec<(Name, u64)> = self.state.lock().expiring.clone().into_iter().collect();
            if all.is_empty() {
                return;
            }
            for (name, number) in all {
                expire(name.0, &name.1);
                let expiring = &mut self.state.lock().expiring;
                if expiring.get(&name) == Some(&number) {
                    expiring.remove(&name);
                }
            }
        }
    }

    /// The kernel has dropped everything.
    pub fn forgotten(&self) {
        let mut state = self.state.lock();
        state.keeping = Keeping::No;
        state.expiring.clear();
    }

    /// Whether a request came since the last call.
    pub fn was_used(&self) -> bool {
        std::mem::take(&mut self.state.lock().is_used)
    }

    /// Whether a request of this turn, or of the last one, changed something.
    pub fn is_changing(&self) -> bool {
        self.state.lock().is_changing
    }

    /// Files that may have pages in the kernel's cache.
    pub fn filled(&self) -> Vec<Ino> {
        self.state.lock().mapped()
    }

    /// Stops all new requests except those for pages, and waits for those under way.
    pub fn stop_requests(&self) {
        let mut state = self.state.lock();
        if let Phase::Here(mode) = state.phase {
            state.phase = Phase::Ending(mode);
            self.runnable.notify_all();
        }
        self.quiet.wait_while(&mut state, |state| !state.is_quiet());
    }

    /// Ends the turn if the kernel has no page of it and requests none; otherwise returns the files whose pages must be
    /// dropped first.
    pub fn end(&self) -> Option<Vec<Ino>> {
        let mut state = self.state.lock();
        self.quiet.wait_while(&mut state, |state| !state.is_quiet());
        let mapped = state.mapped();
        if mapped.is_empty() {
            state.phase = Phase::Away;
            state.due = 0;
            return None;
        }
        state.filled.values_mut().for_each(|has_pages| *has_pages = false);
        Some(mapped)
    }
}

#[cfg(test)]
mod tests;
