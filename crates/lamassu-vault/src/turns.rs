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
//! that dropping waits for. So these are carried out while a turn ends, until the kernel has no page of the turn left
//! (`ending`). So are changes of a file's size: until they are answered, the kernel writes no page of the file.

mod end;
mod ending;
mod freeze;
mod keeping;
mod need;
mod share;
mod together;
mod told;
mod under_way;

pub use need::Need;
use need::Pages;
pub use together::{TOGETHER, run_in_both};
pub use under_way::Use;

use crate::Ino;
use ending::Ending;
use freeze::Freezing;
use parking_lot::{Condvar, Mutex, MutexGuard};
use share::Share;
use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use told::Told;

/// How long the kernel may use a cached name or attributes without asking again.
pub const KEPT_FOR: Duration = Duration::from_secs(2);
/// The time after which an answer has certainly taken effect in the kernel.
const TAKEN_IN: Duration = Duration::from_millis(200);

/// No two turns of a process have the same number, whatever vault they are of.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// A request, which also sends its reply. `None`: it has waited for as long as it may.
type Job = Box<dyn FnOnce(Option<Use>) + Send>;

/// Whether a file may be written.
type IsWritten = Box<dyn Fn() -> bool + Send>;

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
    /// Of a request for pages, see [`Turns::read_pages`].
    is_written: Option<IsWritten>,
    job: Job,
    /// When it came.
    since: Instant,
    /// When it gives up.
    until: Option<Instant>,
    /// Its pages are left out while its file is dropped.
    is_left_out: bool,
}

impl Waiting {
    /// What it needs now.
    fn need(&self) -> Need {
        self.is_written.as_ref().map_or(self.need, |is_written| self.need.written(is_written()))
    }
}

struct State {
    phase: Phase,
    /// The number of the last turn that began.
    number: u64,
    /// Requests under way, and those of them that a freeze holds back.
    users: usize,
    changers: usize,
    /// Those that have nothing to do with locked pages.
    callers: usize,
    freezing: Freezing,
    ending: Ending,
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
    /// How long it goes on although another host wants the vault.
    share: Share,
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
        need.mode <= mode || need.fills().is_some_and(|ino| self.filled.contains_key(&ino))
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
                let may_fill = self.keeping == Keeping::Yes || !matches!(need.pages, Pages::Put(_));
                let comes_in_time = goes_on || need.is_of_pages();
                self.is_enough(mode, need) && comes_in_time && may_fill && !self.holds_back(need)
            }
            Phase::Ending(mode) => need.is_of_pages() && self.is_enough(mode, need) && !self.ending.holds_back(need),
            Phase::Over => true,
        }
    }

    /// The position of the next waiting request that can be carried out.
    fn next(&self) -> Option<usize> {
        self.ready().next()
    }

    /// The positions of all of them.
    fn ready(&self) -> impl Iterator<Item = usize> {
        let is_due = |at: usize| at < self.due && matches!(self.phase, Phase::Here(_) | Phase::Ending(_));
        let fits = |need: Need| match self.phase {
            Phase::Here(mode) | Phase::Ending(mode) => self.is_enough(mode, need),
            Phase::Away | Phase::Over => false,
        };
        self.waiting.iter().enumerate().filter_map(move |(at, waiting)| {
            let need = waiting.need();
            let may_go = self.admits(need) && !self.ending.holds_back_waiting(waiting);
            (may_go || (is_due(at) && fits(need) && !self.holds_back(need))).then_some(at)
        })
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
        self.waiting.iter().map(|waiting| waiting.need().mode).max().max(by_freeze)
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
                callers: 0,
                freezing: Freezing::No,
                ending: Ending::default(),
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
                share: Share::new(),
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
        let (changes, is_caller) = (need.changes(), !need.is_of_pages());
        let is_beside = state.is_beside(need);
        let turn = Use { turns: self.clone(), is_beside, changes, is_caller, dropping: state.dropping };
        if is_beside {
            return turn;
        }
        state.users += 1;
        state.changers += usize::from(changes);
        state.callers += usize::from(is_caller);
        state.is_used = true;
        state.is_changing |= need.mode == Mode::Change;
        state.last_used = Instant::now();
        if let Some(ino) = need.fills() {
            state.filled.insert(ino, true);
            // The turn may now be enough for other requests.
            if !state.waiting.is_empty() {
                self.runnable.notify_all();
            }
            if matches!(state.phase, Phase::Ending(_)) {
                self.quiet.notify_all();
            }
        }
        turn
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
        let (job, since) = (Box::new(job), Instant::now());
        self.run_waiting_for(Waiting { need, is_written: None, job, since, until, is_left_out: false });
    }

    /// The same as [`Turns::run`] to read pages of a mapped file. `locked`: the bytes whose pages the kernel has locked
    /// for this request, whole pages; empty if that is not certain. If the file may be written, the turn must be
    /// exclusive: the kernel does not report the change of a page, and must be able to write it back in the same turn.
    /// `is_written` is asked when that is decided, under a lock of the turns: it waits for nothing.
    pub fn read_pages(
        self: &Arc<Self>,
        ino: Ino,
        locked: &Range<u64>,
        is_written: impl Fn() -> bool + Send + 'static,
        job: impl FnOnce(Use) + Send + 'static,
    ) {
        let (need, is_written) = (Need::read_pages(ino, locked), Some(Box::new(is_written) as IsWritten));
        let job = Box::new(move |turn: Option<Use>| turn.map_or((), job));
        let since = Instant::now();
        self.run_waiting_for(Waiting { need, is_written, job, since, until: None, is_left_out: false });
    }

    fn run_waiting_for(self: &Arc<Self>, request: Waiting) {
        let mut state = self.state.lock();
        let need = request.need();
        if state.admits(need) {
            let turn = self.begin_request(&mut state, need);
            drop(state);
            return (request.job)(Some(turn));
        }
        let has_limit = request.until.is_some();
        state.waiting.push_back(request);
        self.driver.notify_all();
        // Also one that is held back while a file is dropped is carried out after a time.
        if has_limit || state.ending.stuck_from().is_some() {
            self.runnable.notify_all();
        }
    }

    /// The loop of a thread that carries out waiting requests, until the end.
    pub fn run_waiting(self: &Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            if let Some(at) = state.next()
                && let Some(waiting) = state.take(at)
            {
                let turn = self.begin_request(&mut state, waiting.need());
                MutexGuard::unlocked(&mut state, || (waiting.job)(Some(turn)));
            } else if let Some(Waiting { job, .. }) = state.overdue(Instant::now()).and_then(|at| state.take(at)) {
                MutexGuard::unlocked(&mut state, || job(None));
            } else if state.phase == Phase::Over {
                return;
            } else if let Some(until) = state.next_time() {
                self.runnable.wait_until(&mut state, until);
            } else {
                self.runnable.wait(&mut state);
            }
        }
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
        state.ending = Ending::default();
        state.filled.clear();
        state.is_used = false;
        state.is_changing = false;
        state.begun = Instant::now();
        state.last_used = state.begun;
        state.begin_share(mode);
        state.number += 1;
        self.runnable.notify_all();
        state.number
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
            self.wake_ready(&state);
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

    /// Has waiting requests carried out that have become ready without a word: a file may be written no more, so that a
    /// read of its pages needs less. Called again and again in each turn.
    fn wake_ready(&self, state: &State) {
        if state.next().is_some() {
            self.runnable.notify_all();
        }
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
}

#[cfg(test)]
mod tests;
