//! Locks of programs (L6), in every order of events of two hosts and a server, with the state machines that the program
//! uses.
//!
//! **L6.** No two owners hold conflicting locks. An owner holds what its host has told it, until it asks for less, and
//! only while its host uses the session. And they agree: when nothing is under way, the server has the locks that the
//! hosts have, and each request that waits has a lock in its way.
//!
//! One file: two bytes for fcntl(2), and the whole file for flock(2). Connections break, and lose what is in flight;
//! the server restarts; sessions end after their hosts have stopped; requests are cancelled and given up.

mod want;

use self::want::{CELLS, Cells, Want};
use super::{as_newest, explored, next_report};
use lamassu_lease::locks::{Asked, Conflict, Holder, Lock, LockAnswer, LockKind, Outcome, Range};
use lamassu_lease::server::{Durable, Server, Step};
use lamassu_lease::{Call, Millis, Mode, Reply, RequestNo, SessionId, Terms};
use stateright::{Checker, HasDiscoveries, Model, Property};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const HOSTS: usize = 2;
const OWNERS: usize = 2;
const NOW: Millis = Millis(0);

const EXCLUSION: &str = "L6 no two owners hold conflicting locks";
const IN_USE: &str = "L6 no session is ended that is in use";
const AGREEMENT: &str = "hosts and server agree once nothing is under way";

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Event {
    Ask(usize, usize, Want),
    Cancel(usize, RequestNo),
    Abandon(usize, RequestNo),
    Up(usize),
    Down(usize),
    Break(usize),
    Connect(usize),
    /// A report of a connection that has broken arrives.
    LateReport(usize),
    /// By its clock, the host stops.
    Stop(usize),
    /// An answer to a heartbeat comes.
    GoOn(usize),
    /// The server ends the session.
    Expire(usize),
    Join(usize),
    CrashServer,
    StartServer,
}

/// A rule that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// After a restart nothing is granted until every session has reported.
    Grace,
    /// What an unanswered request may have reduced is not reported.
    Doubt,
    /// A request that is given up is followed by a report.
    Report,
    /// A session that waits or holds reports its locks on a new connection.
    Locks,
    /// Requests are made again on a new connection.
    Again,
    /// Of two reports the one that was made later counts, and not the one that arrives later.
    Number,
    /// A host stops before the server ends its session.
    Stop,
}

/// How often what can happen happens at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Left {
    asks: [u8; HOSTS],
    cancels: u8,
    abandons: u8,
    breaks: u8,
    stops: u8,
    restarts: u8,
    late_reports: u8,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Connection {
    up: VecDeque<Call>,
    down: VecDeque<Reply>,
    /// The server answers by it.
    is_known: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Host {
    session: SessionId,
    holder: Holder,
    connection: Option<Connection>,
    /// Another connection must follow.
    must_resume: bool,
    reports: u64,
    /// A report that is still on the way by a connection that has broken.
    late: Option<Call>,
    is_used: bool,
    /// The session has ended, and the host knows it.
    is_over: bool,
    /// What owners rely on.
    told: [Cells; OWNERS],
    waiting: BTreeMap<RequestNo, (usize, Want)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    server: Option<Server>,
    durable: Durable,
    hosts: [Host; HOSTS],
    left: Left,
    wrong: Option<&'static str>,
    restarted_with_lock: bool,
}

#[derive(Clone, Debug)]
struct Locks {
    without: Without,
    owners: [usize; HOSTS],
    /// Requests of one owner at once.
    at_once: usize,
    wants: Vec<Want>,
    left: Left,
}

impl Host {
    fn join(session: SessionId, holder: Holder) -> Host {
        Host {
            session,
            holder,
            connection: Some(Connection { is_known: true, ..Connection::default() }),
            must_resume: false,
            reports: 0,
            late: None,
            is_used: true,
            is_over: false,
            told: Default::default(),
            waiting: BTreeMap::new(),
        }
    }

    fn send(&mut self, call: Call) {
        // Whatever is sent before a report that must follow: the holder makes it again.
        if let Some(connection) = &mut self.connection {
            connection.up.push_back(call);
        }
    }

    /// A program is told how its request has ended.
    fn tell(&mut self, request: RequestNo, outcome: Outcome) {
        let Some((owner, want)) = self.waiting.remove(&request) else { return };
        if let (Outcome::Done, Some(mode)) = (outcome, want.mode) {
            self.told[owner][want.cells.0..=want.cells.1].fill(Some(mode));
            // Others of its requests may still take it away.
            let others: Vec<_> = self.waiting.values().filter(|(of, _)| *of == owner).map(|(_, want)| *want).collect();
            others.into_iter().for_each(|want| want.weakens(&mut self.told[owner]));
        }
    }

    fn ended(&mut self) {
        self.is_over = true;
        self.connection = None;
        self.told = Default::default();
        for answered in self.holder.session_ended() {
            self.tell(answered.request, answered.outcome);
        }
    }

    /// The locks that its holder has, if all its requests wait at the server.
    fn held(&self) -> [Cells; OWNERS] {
        let mut holder = self.holder.clone();
        for (request, (_, want)) in &self.waiting {
            let conflict = LockAnswer::Conflict(Conflict { range: Range::ALL, mode: Mode::Shared, pid: 0 });
            // A request for the whole file has given up what there was before it waits; other ones change nothing.
            holder.answer(*request, if want.is_whole() { conflict } else { LockAnswer::Deadlock });
        }
        let mut held: [Cells; OWNERS] = Default::default();
        for lock in holder.resumed().0 {
            let owner = &mut held[lock.key.owner as usize];
            match lock.key.kind {
                LockKind::Whole => owner[CELLS - 1] = Some(lock.mode),
                LockKind::Range => {
                    owner[lock.range.first() as usize..=lock.range.last() as usize].fill(Some(lock.mode))
                }
            }
        }
        held
    }

    /// The locks to report and the calls to make again, by the rules that are not left out.
    fn resumed(&mut self, without: Without) -> (Vec<Lock>, Vec<Call>) {
        let mut before = self.holder.clone();
        for request in self.waiting.keys() {
            before.answer(*request, LockAnswer::Deadlock); // changes nothing
        }
        let (locks, again) = self.holder.resumed();
        match without {
            Without::Doubt => (before.resumed().0, again),
            Without::Locks => (Vec::new(), again),
            Without::Again => (locks, Vec::new()),
            Without::Nothing | Without::Grace | Without::Report | Without::Number | Without::Stop => (locks, again),
        }
    }
}

fn is_conflict(one: Option<Mode>, other: Option<Mode>) -> bool {
    one.is_some() && other.is_some() && one.max(other) == Some(Mode::Exclusive)
}

impl World {
    /// Has the server do something: durable first, then told.
    fn serve(&mut self, act: impl FnOnce(&mut Server) -> Step) {
        let Some(server) = &mut self.server else { return };
        let step = act(server);
        self.durable = server.durable().clone();
        for (session, reply) in step.replies {
            let host = self.hosts.iter_mut().find(|host| host.session == session && !host.is_over);
            if let Some(connection) = host.and_then(|host| host.connection.as_mut().filter(|known| known.is_known)) {
                connection.down.push_back(reply);
            }
        }
    }

    fn ask(&mut self, at: usize, owner: usize, want: Want) {
        let host = &mut self.hosts[at];
        self.left.asks[at] -= 1;
        want.weakens(&mut host.told[owner]);
        if let Ok((request, call)) = host.holder.ask(want.asked(owner)) {
            host.waiting.insert(request, (owner, want));
            host.send(call);
        }
    }

    fn hear(&mut self, without: Without, session: SessionId, call: Call) {
        self.serve(|server| {
            let call = match without {
                Without::Number | Without::Grace => as_newest(server, session, call),
                _ => call,
            };
            server.call(session, call, NOW)
        });
    }

    /// A connection breaks. What was sent by it may be on the way.
    fn break_connection(&mut self, at: usize) -> Option<()> {
        let host = &mut self.hosts[at];
        self.left.breaks -= u8::from(!host.must_resume);
        host.must_resume = false;
        let first = host.connection.take()?.up.pop_front();
        if let Some(report @ Call::Resume { .. }) = first.filter(|_| self.left.late_reports > 0) {
            self.left.late_reports -= 1;
            host.late = Some(report);
        }
        Some(())
    }

    fn up(&mut self, at: usize, without: Without) -> Option<()> {
        let host = &mut self.hosts[at];
        let session = host.session;
        let connection = host.connection.as_mut()?;
        let call = connection.up.pop_front()?;
        connection.is_known |= matches!(call, Call::Resume { .. });
        self.hear(without, session, call);
        Some(())
    }

    fn down(&mut self, at: usize) -> Option<()> {
        let host = &mut self.hosts[at];
        match host.connection.as_mut()?.down.pop_front()? {
            Reply::Lock { request, answer } => {
                if let Some(answered) = host.holder.answer(request, answer) {
                    host.tell(request, answered.outcome);
                }
            }
            Reply::Ended => {
                if host.is_used {
                    self.wrong = Some("a session that its host uses was ended");
                }
                host.ended();
            }
            Reply::Alive { .. } | Reply::Granted { .. } | Reply::Recall { .. } => {}
        }
        Some(())
    }

    fn connect(&mut self, at: usize, without: Without) {
        let host = &mut self.hosts[at];
        let (locks, again) = host.resumed(without);
        host.must_resume = false;
        host.reports += 1;
        let (number, held, kept, taken_over) = (host.reports, Vec::new(), Vec::new(), Vec::new());
        let report = Call::Resume { number, held, kept, taken_over, locks };
        let up = std::iter::once(report).chain(again).collect();
        host.connection = Some(Connection { up, ..Connection::default() });
    }

    fn start_server(&mut self, without: Without) {
        let (mut server, _) = Server::start(Terms::of_model(2, 2), self.durable.clone(), NOW);
        if without == Without::Grace {
            for session in self.durable.sessions.clone() {
                let report = next_report(&server, session, Vec::new());
                let _ = server.call(session, report, NOW);
            }
        }
        self.restarted_with_lock |= self.hosts.iter().flat_map(|host| host.told).flatten().any(|cell| cell.is_some());
        self.server = Some(server);
        self.serve(|_| Step::default());
    }

    /// No two owners rely on conflicting locks.
    fn is_exclusive(&self) -> bool {
        let used = self.hosts.iter().filter(|host| host.is_used);
        let owners: Vec<Cells> = used.flat_map(|host| host.told).collect();
        let conflict = |one: &Cells, other: &Cells| (0..CELLS).any(|cell| is_conflict(one[cell], other[cell]));
        let mut pairs =
            owners.iter().enumerate().flat_map(|(at, one)| owners[at + 1..].iter().map(move |other| (one, other)));
        !pairs.any(|(one, other)| conflict(one, other))
    }

    /// Whether every message has arrived, by connections that the server knows.
    fn is_quiet(&self) -> bool {
        let Some(server) = &self.server else { return false };
        let is_quiet =
            |connection: &Connection| connection.is_known && connection.up.is_empty() && connection.down.is_empty();
        self.hosts.iter().all(|host| {
            !host.must_resume && server.is_back(host.session) && host.connection.as_ref().is_some_and(is_quiet)
        })
    }

    /// The strongest mode in which the server has each cell.
    fn on_record(&self) -> Cells {
        let Some(mut server) = self.server.clone() else { return Default::default() };
        let (nobody, _) = server.join(NOW);
        let mut is_free = |cell, mode| {
            let Asked::Lock { lock, .. } = Want::lock((cell, cell), mode, false).asked(0) else { return true };
            let step = server.call(nobody, Call::TestLock { request: RequestNo(0), lock }, NOW);
            matches!(step.replies[..], [(_, Reply::Lock { answer: LockAnswer::Done, .. })])
        };
        std::array::from_fn(|cell| match (is_free(cell, Mode::Exclusive), is_free(cell, Mode::Shared)) {
            (true, _) => None,
            (false, true) => Some(Mode::Shared),
            (false, false) => Some(Mode::Exclusive),
        })
    }

    /// When nothing is under way, the server has what the hosts have, and nothing waits without a reason.
    fn agrees(&self) -> bool {
        if !self.is_quiet() {
            return true;
        }
        let held: Vec<_> = self.hosts.iter().map(Host::held).collect();
        let strongest = |cell: usize| held.iter().flatten().map(|cells| cells[cell]).max().flatten();
        let record = self.on_record();
        let is_in_the_way = |at: usize, owner: usize, want: &Want| {
            let others = (0..HOSTS).flat_map(|at| (0..OWNERS).map(move |owner| (at, owner)));
            let mut others = others.filter(|other| *other != (at, owner)).map(|(at, owner)| held[at][owner]);
            others.any(|cells| (want.cells.0..=want.cells.1).any(|cell| is_conflict(cells[cell], want.mode)))
        };
        (0..CELLS).all(|cell| record[cell] == strongest(cell))
            && self
                .hosts
                .iter()
                .enumerate()
                .all(|(at, host)| host.waiting.values().all(|(owner, want)| is_in_the_way(at, *owner, want)))
    }
}

impl Locks {
    /// What a host, and the server with it, may do.
    fn actions_of(&self, world: &World, at: usize, all: &mut Vec<Event>) {
        let (host, left) = (&world.hosts[at], &world.left);
        if host.is_over {
            if world.server.is_some() {
                all.push(Event::Join(at));
            }
            return;
        }
        for owner in 0..self.owners[at] {
            let its = host.waiting.values().filter(|(of, _)| *of == owner).count();
            if left.asks[at] > 0 && its < self.at_once {
                all.extend(self.wants.iter().map(|want| Event::Ask(at, owner, *want)));
            }
        }
        for (request, (_, want)) in &host.waiting {
            if left.cancels > 0 && want.waits {
                all.push(Event::Cancel(at, *request));
            }
            if left.abandons > 0 {
                all.push(Event::Abandon(at, *request));
            }
        }
        let is_alive = world.server.as_ref().is_some_and(|server| server.is_alive(host.session));
        if host.is_used && left.stops > 0 {
            all.push(Event::Stop(at));
        }
        if !host.is_used && is_alive {
            all.push(Event::GoOn(at));
        }
        let may_expire = if self.without == Without::Stop { left.stops > 0 } else { !host.is_used };
        if may_expire && is_alive {
            all.push(Event::Expire(at));
        }
        if host.late.is_some() && world.server.is_some() {
            all.push(Event::LateReport(at));
        }
        match &host.connection {
            None if world.server.is_some() => all.push(Event::Connect(at)),
            None => {}
            Some(connection) => {
                if left.breaks > 0 || host.must_resume {
                    all.push(Event::Break(at));
                }
                if !connection.up.is_empty() {
                    all.push(Event::Up(at));
                }
                if !connection.down.is_empty() {
                    all.push(Event::Down(at));
                }
            }
        }
    }
}

impl Model for Locks {
    type State = World;
    type Action = Event;

    fn init_states(&self) -> Vec<World> {
        let (mut server, _) = Server::start(Terms::of_model(2, 2), Durable::default(), NOW);
        let hosts = std::array::from_fn(|_| Host::join(server.join(NOW).0, Holder::default()));
        let durable = server.durable().clone();
        let left = self.left;
        vec![World { server: Some(server), durable, hosts, left, wrong: None, restarted_with_lock: false }]
    }

    fn actions(&self, world: &World, all: &mut Vec<Event>) {
        if world.wrong.is_some() {
            return;
        }
        if world.server.is_none() {
            all.push(Event::StartServer);
        } else if world.left.restarts > 0 {
            all.push(Event::CrashServer);
        }
        (0..HOSTS).for_each(|at| self.actions_of(world, at, all));
    }

    fn next_state(&self, last: &World, event: Event) -> Option<World> {
        let mut world = last.clone();
        match event {
            Event::Ask(at, owner, want) => world.ask(at, owner, want),
            Event::Cancel(at, request) => {
                let call = world.hosts[at].holder.cancel(request)?;
                world.hosts[at].send(call);
                world.left.cancels -= 1;
            }
            Event::Abandon(at, request) => {
                world.left.abandons -= 1;
                let host = &mut world.hosts[at];
                if host.holder.abandon(request) {
                    host.must_resume = self.without != Without::Report && host.connection.is_some();
                    host.tell(request, Outcome::Unanswered);
                }
            }
            Event::Up(at) => world.up(at, self.without)?,
            Event::Down(at) => world.down(at)?,
            Event::Break(at) => world.break_connection(at)?,
            Event::LateReport(at) => {
                let (session, report) = (world.hosts[at].session, world.hosts[at].late.take()?);
                world.hear(self.without, session, report);
            }
            Event::Connect(at) => world.connect(at, self.without),
            Event::Stop(at) => {
                world.left.stops -= 1;
                world.hosts[at].is_used = false;
            }
            Event::GoOn(at) => world.hosts[at].is_used = true,
            Event::Expire(at) => {
                world.left.stops -= u8::from(self.without == Without::Stop);
                let session = world.hosts[at].session;
                world.serve(|server| server.end_session(session, NOW));
            }
            Event::Join(at) => {
                let (session, step) = world.server.as_mut()?.join(NOW);
                let holder = std::mem::take(&mut world.hosts[at].holder);
                world.hosts[at] = Host::join(session, holder);
                world.serve(|_| step);
            }
            Event::CrashServer => {
                world.left.restarts -= 1;
                world.server = None;
                world.hosts.iter_mut().for_each(|host| (host.connection, host.must_resume) = (None, false));
            }
            Event::StartServer => world.start_server(self.without),
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(EXCLUSION, |_, world: &World| world.is_exclusive()),
            Property::always(IN_USE, |_, world: &World| world.wrong.is_none()),
            Property::always(AGREEMENT, |_, world: &World| world.agrees()),
            Property::sometimes("a restart while a lock is held", |_, world: &World| world.restarted_with_lock),
            Property::sometimes("an owner that has lost locks, in another session", |_, world: &World| {
                world.hosts.iter().any(|host| !host.is_over && (0..2).any(|owner| host.holder.is_lost(owner)))
            }),
            Property::sometimes("a request that waits for a lock of another host", |_, world: &World| {
                world.is_quiet() && world.hosts.iter().any(|host| !host.waiting.is_empty())
            }),
        ]
    }
}

const BYTES: (usize, usize) = (0, 1);
const BYTE: (usize, usize) = (0, 0);
const WHOLE: (usize, usize) = (2, 2);

const NONE: Left =
    Left { asks: [0; HOSTS], cancels: 0, abandons: 0, breaks: 0, stops: 0, restarts: 0, late_reports: 0 };

/// Each with all of one kind, and with what happens to them.
fn runs(without: Without) -> Vec<Locks> {
    use Mode::{Exclusive, Shared};
    let bytes = vec![
        Want::lock(BYTE, Exclusive, true),
        Want::lock(BYTES, Shared, true),
        Want::lock(BYTES, Exclusive, true),
        Want::unlock(BYTE),
    ];
    let whole = vec![
        Want::lock(WHOLE, Shared, true),
        Want::lock(WHOLE, Exclusive, true),
        Want::lock(WHOLE, Exclusive, false),
        Want::unlock(WHOLE),
    ];
    let mut runs = Vec::new();
    for wants in [bytes, whole] {
        let run = |owners, at_once, left| Locks { without, owners, at_once, wants: wants.clone(), left };
        runs.push(run([1, 1], 1, Left { asks: [3, 2], restarts: 1, ..NONE }));
        runs.push(run([1, 1], 1, Left { asks: [3, 2], breaks: 1, cancels: 1, ..NONE }));
        runs.push(run([1, 1], 1, Left { asks: [3, 1], abandons: 1, cancels: 1, ..NONE }));
        runs.push(run([1, 1], 1, Left { asks: [3, 1], stops: 1, breaks: 1, ..NONE }));
        runs.push(run([1, 1], 1, Left { asks: [2, 1], breaks: 1, stops: 1, restarts: 1, ..NONE }));
        runs.push(run([2, 1], 1, Left { asks: [3, 1], breaks: 1, ..NONE }));
        runs.push(run([1, 1], 2, Left { asks: [3, 1], abandons: 1, cancels: 1, ..NONE }));
        runs.push(run([1, 1], 1, Left { asks: [2, 1], breaks: 2, late_reports: 1, ..NONE }));
    }
    runs
}

#[test]
fn no_order_of_events_gives_two_owners_conflicting_locks() {
    let (mut states, mut seen) = (0, BTreeSet::new());
    for model in runs(Without::Nothing) {
        let (left, before) = (model.left, states);
        states += explored(model, &mut seen);
        println!("{} states with {left:?}", states - before);
    }
    println!("{states} states of locks");
    assert_eq!(seen.len(), 3, "not everything happens that can: {seen:?}");
    assert!(states > 100_000);
}

/// Each rule that is left out breaks this promise.
#[test]
fn every_rule_of_locks_is_needed() {
    let rules = [
        (Without::Grace, EXCLUSION),
        (Without::Doubt, EXCLUSION),
        (Without::Doubt, IN_USE),
        // Locks leak: the server keeps one that no host knows of.
        (Without::Report, AGREEMENT),
        (Without::Locks, EXCLUSION),
        (Without::Again, AGREEMENT),
        (Without::Number, EXCLUSION),
        (Without::Stop, EXCLUSION),
    ];
    for (without, promise) in rules {
        let breaks = |model: Locks| {
            let finish = HasDiscoveries::AnyOf(BTreeSet::from([promise]));
            let checker = model.checker().threads(2).finish_when(finish).spawn_bfs().join();
            checker.discovery(promise).is_some()
        };
        let found = runs(without).into_iter().position(breaks);
        println!("without {without:?}: {promise:?} is broken in run {found:?}");
        assert!(found.is_some(), "{without:?}");
    }
}
