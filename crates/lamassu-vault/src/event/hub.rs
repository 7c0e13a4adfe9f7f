//! All events pass through this module.

use super::limit::{Known, Limit};
use super::queue::Queue;
use super::{IntegrityEvent, IntegritySink, TARGET, TARGET_PRINTED};
use lamassu_anchor::Anchor;
use lamassu_format::header::VaultId;
use lamassu_store::file::Reporter;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// After this time a line in the log says how much was left out.
const SUMMARY: Duration = Duration::from_secs(1);

/// Takes events. Shared by all vaults that were opened with clones of it. The default only counts and logs.
#[derive(Clone, Default)]
pub struct Events {
    shared: Arc<Shared>,
    /// Id of the vault that reports, in hex.
    vault: Option<Arc<str>>,
    /// The vault's anchor, if a session that can end lets this host use it.
    session: Option<Weak<Anchor>>,
}

struct Shared {
    state: Mutex<State>,
    hash: RandomState,
    /// One for each sink.
    queues: Mutex<Vec<Arc<Queue>>>,
    has_ended: AtomicBool,
}

struct State {
    /// By word. They only grow.
    found: BTreeMap<&'static str, KindCount>,
    known: Known,
    limit: Limit,
    suppressed: u64,
    /// Whether the line that was left out last is of a printed finding.
    is_printed: bool,
    /// Whether a thread is about to log how much was left out.
    is_summary_due: bool,
}

/// How many events of a kind there were.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindCount {
    /// its word
    pub kind: String,
    /// events
    pub count: u64,
    /// how often one of these occurred again within ten minutes
    pub repeated: u64,
}

/// Counts since the process began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// by kind; those that were never found are left out
    pub found: Vec<KindCount>,
    /// events that were left out of the log
    pub not_logged: u64,
    /// events that had no room in the queue to the alert command, or to the server
    pub not_delivered: u64,
    /// how often the alert command failed, or the server refused a report
    pub failed_alerts: u64,
}

impl Default for Shared {
    fn default() -> Shared {
        let now = Instant::now();
        let state = State {
            found: BTreeMap::new(),
            known: Known::new(now),
            limit: Limit::new(now),
            suppressed: 0,
            is_printed: false,
            is_summary_due: false,
        };
        Shared {
            state: Mutex::new(state),
            hash: RandomState::new(),
            queues: Mutex::default(),
            has_ended: AtomicBool::new(false),
        }
    }
}

impl Events {
    /// With a sink.
    ///
    /// # Errors
    /// As [`Events::add_sink`].
    pub fn with_sink(sink: Arc<dyn IntegritySink>) -> io::Result<Events> {
        let events = Events::default();
        events.add_sink(sink)?;
        Ok(events)
    }

    /// From now on a sink gets all events of all vaults that share this. A thread of its own delivers to it.
    ///
    /// # Errors
    /// No thread.
    pub fn add_sink(&self, sink: Arc<dyn IntegritySink>) -> io::Result<()> {
        self.shared.queues.lock().push(Queue::start(sink)?);
        Ok(())
    }

    /// Whether both share the same counts and sinks.
    pub fn is_same_as(&self, other: &Events) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// The same for one vault: events that name no vault get this id.
    #[must_use]
    pub fn of_vault(&self, id: &VaultId) -> Events {
        Events { shared: self.shared.clone(), vault: Some(id.to_string().into()), session: None }
    }

    /// The same for a vault with this anchor. If its session has ended, another host may have changed the vault, and
    /// what is found is no finding: such events are dropped.
    #[must_use]
    pub(crate) fn while_good(self, anchor: Option<&Arc<Anchor>>) -> Events {
        let session = anchor.filter(|anchor| anchor.may_end()).map(Arc::downgrade);
        Events { session, ..self }
    }

    /// Whether what was found before this call was found in the session. If it is in doubt, this waits.
    fn is_in_session(&self) -> bool {
        let Some(session) = &self.session else { return true };
        session.upgrade().is_some_and(|anchor| anchor.wait_until_good().is_ok())
    }

    /// Takes an event: counts it, logs it, hands it on. Never blocks, except while a session is in doubt. False: the
    /// event is dropped ([`Events::while_good`]).
    pub fn found(&self, mut event: IntegrityEvent) -> bool {
        if !self.is_in_session() {
            tracing::debug!(what = event.what.word(), "no finding: the session has ended");
            return false;
        }
        event.vault = event.vault.or_else(|| self.vault.as_deref().map(str::to_owned));
        let shared = &*self.shared;
        let hash = &shared.hash;
        let object = hash.hash_one((&event.vault, &event.path, event.inode));
        let same = hash.hash_one((object, event.what, event.range, event.is_damage, event.found_by, &event.text));
        let now = Instant::now();
        let (is_logged, is_summary_due) = {
            let mut state = shared.state.lock();
            let is_new = state.known.is_new(same, now);
            let count = state.found.entry(event.what.word()).or_default();
            if !is_new {
                count.repeated += 1;
                return true;
            }
            count.count += 1;
            let is_logged = state.limit.admits(object, now);
            if !is_logged {
                state.is_printed = event.found_by.is_printed();
            }
            let is_first = state.limit.has_suppressed() && !state.is_summary_due;
            state.is_summary_due |= is_first;
            (is_logged, is_first)
        };
        if is_logged {
            log(&event);
        }
        if is_summary_due {
            Shared::tell_soon(&self.shared);
        }
        for queue in shared.queues() {
            queue.put(event.clone());
        }
        true
    }

    /// Whether a line about the vault says something new: the same was not asked within ten minutes. A vault that hosts
    /// take in turn is opened at each turn.
    pub(crate) fn is_new_line(&self, line: &str) -> bool {
        let same = self.shared.hash.hash_one((&self.vault, line));
        self.shared.state.lock().known.is_new(same, Instant::now())
    }

    /// What files report to. A file that was opened without a tag reports nothing: its caller does.
    pub(crate) fn reporter(&self) -> Reporter {
        let events = self.clone();
        Arc::new(move |tag, damage| tag.is_empty() || events.found(IntegrityEvent::of_file(tag, damage)))
    }

    /// The counts.
    pub fn counts(&self) -> Counts {
        let state = self.shared.state.lock();
        let named = |(word, count): (&&str, &KindCount)| KindCount { kind: (*word).to_owned(), ..count.clone() };
        Counts {
            found: state.found.iter().map(named).collect(),
            not_logged: state.suppressed + state.limit.suppressed(),
            not_delivered: self.shared.queues().iter().map(|queue| queue.not_delivered()).sum(),
            failed_alerts: self.shared.queues().iter().map(|queue| queue.failures()).sum(),
        }
    }

    /// At the end of the process: delivers waiting events for at most `wait`, and logs how many lines were left out.
    pub fn end(&self, wait: Duration) {
        // A second call does not wait again.
        let wait = if self.shared.has_ended.swap(true, Ordering::Relaxed) { Duration::ZERO } else { wait };
        let until = Instant::now() + wait;
        for queue in self.shared.queues() {
            queue.end(until.saturating_duration_since(Instant::now()));
        }
        self.shared.tell_suppressed();
    }
}

impl Shared {
    /// A copy, so that no thread holds the lock while it waits for the writer of a log.
    fn queues(&self) -> Vec<Arc<Queue>> {
        self.queues.lock().clone()
    }

    /// Writes the summary after a while, from a thread that ends then.
    fn tell_soon(shared: &Arc<Shared>) {
        let later = Arc::downgrade(shared);
        let tell = move || {
            std::thread::sleep(SUMMARY);
            // If the process has ended this, it has logged the summary.
            later.upgrade().iter().for_each(|shared| shared.tell_suppressed());
        };
        if std::thread::Builder::new().name("integrity-log".into()).spawn(tell).is_err() {
            shared.state.lock().is_summary_due = false;
        }
    }

    fn tell_suppressed(&self) {
        let (suppressed, is_printed) = {
            let mut state = self.state.lock();
            state.is_summary_due = false;
            let suppressed = state.limit.take_suppressed();
            state.suppressed += suppressed;
            (suppressed, state.is_printed)
        };
        match (suppressed, is_printed) {
            (0, _) => {}
            (_, true) => tracing::error!(
                target: TARGET_PRINTED,
                suppressed,
                "more was found than is written here; what `check` or `scrub` prints has all of it"
            ),
            (_, false) => tracing::error!(
                target: TARGET,
                suppressed,
                "more was found than is written here; `lamassu info` of the mount has all counts"
            ),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.tell_suppressed();
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").field("sinks", &self.shared.queues.lock().len()).finish_non_exhaustive()
    }
}

/// The line of an event.
fn log(event: &IntegrityEvent) {
    macro_rules! line {
        ($level:ident, $target:ident) => {
            tracing::$level!(
                target: $target,
                kind = event.what.word(),
                stored = event.path,
                inode = event.inode,
                segment = event.range.map(|range| range.segment),
                page = event.range.map(|range| range.page),
                pages = event.range.map(|range| range.pages).filter(|pages| *pages > 1),
                block = event.range.and_then(|range| range.block),
                blocks = event.range.and_then(|range| range.blocks).filter(|blocks| *blocks > 1),
                found_by = event.found_by.word(),
                vault = event.vault,
                "{}",
                event.text
            )
        };
    }
    match (event.is_damage, event.found_by.is_printed()) {
        (true, false) => line!(error, TARGET),
        (false, false) => line!(warn, TARGET),
        (true, true) => line!(error, TARGET_PRINTED),
        (false, true) => line!(warn, TARGET_PRINTED),
    }
}

#[cfg(test)]
mod tests {
    use super::super::IntegrityKind;
    use super::*;

    fn count(events: &Events, kind: IntegrityKind) -> (u64, u64) {
        let counts = events.counts();
        let of = counts.found.iter().find(|count| count.kind == kind.word());
        of.map_or((0, 0), |count| (count.count, count.repeated))
    }

    #[test]
    fn nothing_is_lost_from_the_counts() {
        let events = Events::default();
        let at = |i: usize| IntegrityKind::Name.at(format!("d/{i}"), "its name does not open");
        std::thread::scope(|scope| {
            for part in 0..4 {
                let events = events.of_vault(&VaultId([7; 16]));
                scope.spawn(move || (0..500).for_each(|i| assert!(events.found(at(part * 500 + i)))));
            }
        });
        events.of_vault(&VaultId([7; 16])).found(at(3));
        events.of_vault(&VaultId([8; 16])).found(at(3));
        events.found(IntegrityKind::Sessions.at("lamassu.sessions", "does not open"));
        assert_eq!(count(&events, IntegrityKind::Name), (2001, 1), "of another vault it is another");
        assert_eq!(count(&events, IntegrityKind::Sessions), (1, 0));
        assert!(events.counts().not_logged >= 2001 - 200, "{:?}", events.counts());
        let before = events.counts().not_logged;
        events.end(Duration::ZERO);
        assert_eq!(events.counts().not_logged, before, "nor by being told");
    }
}
