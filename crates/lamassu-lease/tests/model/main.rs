//! Every order of events of two hosts, a server and a store, with the state machines that the program uses
//! (`docs/sharing.md`, section 9).
//!
//! One file. Hosts read it, write it and sync it. Messages are late, or lost with their connection; hosts stop for any
//! time, crash, and come back as new sessions; the server crashes, and starts again on what is durable; a write that
//! was sent to the store arrives at any later time, also after its host has been taken for dead.
#![allow(clippy::unwrap_used)] // a panic is a failed test

mod locks;
mod progress;
mod world;

use self::world::{Connection, FILE, HOSTS, IN_FLIGHT_MAX, Inode, Late, Left, Row, Seen, Work, World};
use lamassu_lease::server::{Durable, Server, Step};
use lamassu_lease::{Call, Millis, Mode, Object, SessionId, Terms};
use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::hash::Hash;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Event {
    /// Time passes. The server need not notice at once: its next message may come before.
    Time,
    /// The server looks at the time.
    Tick,
    Beat(usize),
    Read(usize),
    Write(usize),
    Go(usize),
    /// A write returns, and nobody syncs it.
    Return(usize),
    /// A host keeps its lease although the other one wants it, or no longer.
    Keep(usize),
    Up(usize),
    Down(usize),
    Break(usize),
    Connect(usize),
    /// A report of a connection that has broken arrives.
    LateReport(usize),
    /// The administrator revokes a host. It may join again.
    Revoke(usize),
    /// A host that waits ends its session. It may join again.
    Leave(usize),
    CrashHost(usize),
    Join(usize),
    CrashServer,
    StartServer,
    Land(Late),
}

/// A rule that is left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Without {
    #[default]
    Nothing,
    /// A host stops before the server ends its session.
    Stop,
    /// Commits are accepted of holders alone.
    Fence,
    /// A takeover makes a new inode.
    NewInode,
    /// A takeover comes before anything else.
    TakeOver,
    /// Nothing is granted exclusively until every session is back.
    Grace,
    /// Exclusive leases are durable.
    Durable,
    /// What is dirty is committed before a lease is released.
    Flush,
    /// What a finished operation read counts only if the session is good.
    Finish,
    /// The row is durably open before a page changes.
    Open,
    /// A session is answered only by a connection on which it has said what it holds.
    Resume,
    /// Of two reports the one that was made later counts, and not the one that arrives later.
    Number,
    /// The leases of a revoked host are granted to others when it has stopped by its own clock.
    Revoked,
    /// A lease is granted only if no other session holds it exclusively.
    Exclusion,
}

#[derive(Clone, Debug)]
struct Sharing {
    without: Without,
    left: Left,
}

impl Sharing {
    fn terms(&self) -> Terms {
        // Both clocks go at one rate: a host may stop just when the server ends its session.
        if self.without == Without::Stop { Terms::of_model(2, 4) } else { Terms::of_model(2, 2) }
    }
}

/// The server as it would be if every session were back.
fn without_grace(server: &Server, now: Millis) -> Server {
    let mut other = server.clone();
    for session in server.durable().sessions.clone() {
        let held = server.durable().exclusive.iter().filter(|(_, (of, _))| *of == session);
        let grant = |(object, (_, number)): (&Object, &(SessionId, lamassu_lease::GrantNo))| lamassu_lease::Grant {
            object: *object,
            mode: Mode::Exclusive,
            number: *number,
        };
        if !server.is_back(session) {
            let _ = other.call(session, next_report(server, session, held.map(grant).collect()), now);
        }
    }
    other
}

/// A report that the server takes for the newest one of its session.
fn next_report(server: &Server, session: SessionId, held: Vec<lamassu_lease::Grant>) -> Call {
    let (kept, taken_over, locks) = (Vec::new(), Vec::new(), Vec::new());
    as_newest(server, session, Call::Resume { number: 0, held, kept, taken_over, locks })
}

/// The same of a report that arrives.
fn as_newest(server: &Server, session: SessionId, mut call: Call) -> Call {
    if let Call::Resume { number, .. } = &mut call {
        *number = (1..).find(|number| !server.is_late(session, *number)).unwrap();
    }
    call
}

/// The server without the exclusive leases of sessions other than this one. Their hosts do not know that.
fn without_exclusion(server: &mut Server, session: SessionId, now: Millis) -> Step {
    let mut step = Step::default();
    for (object, (of, number)) in server.durable().exclusive.clone() {
        if of != session {
            let grant = lamassu_lease::Grant { object, mode: Mode::Exclusive, number };
            let released = server.call(of, Call::Release { grant, keeps: None }, now);
            step.changes.extend(released.changes);
            step.replies.extend(released.replies);
        }
    }
    step
}

impl Model for Sharing {
    type State = World;
    type Action = Event;

    fn init_states(&self) -> Vec<World> {
        let (server, _) = Server::start(self.terms(), Durable::default(), Millis(0));
        let world = World {
            now: Millis(0),
            durable: server.durable().clone(),
            server: Some(server),
            row: Row { inode: 0, committed: 0, open: None },
            inodes: vec![Inode { value: 0, by: None }],
            late: BTreeSet::new(),
            late_reports: Vec::new(),
            hosts: [const { None }; HOSTS],
            next_value: 1,
            acknowledged: 0,
            wrong: None,
            left: self.left,
            seen: Seen::default(),
        };
        let mut world = world;
        (0..HOSTS).for_each(|at| world.join(self, at));
        vec![world]
    }

    fn actions(&self, world: &World, all: &mut Vec<Event>) {
        if world.wrong.is_some() {
            return;
        }
        if world.left.ticks > 0 {
            all.push(Event::Time);
        }
        if world.server.as_ref().is_some_and(|server| server.clone().tick(world.now) != Step::default()) {
            all.push(Event::Tick);
        }
        if world.server.is_none() {
            all.push(Event::StartServer);
        } else if world.left.server_crashes > 0 {
            all.push(Event::CrashServer);
        }
        all.extend(world.late.iter().cloned().map(Event::Land));
        all.extend((0..world.late_reports.len()).map(Event::LateReport));
        for at in 0..HOSTS {
            let Some(host) = &world.hosts[at] else {
                if world.server.is_some() {
                    all.push(Event::Join(at));
                }
                continue;
            };
            if world.left.host_crashes > 0 {
                all.push(Event::CrashHost(at));
            }
            if world.left.revokes > 0 && world.server.is_some() {
                all.push(Event::Revoke(at));
            }
            if world.left.leaves > 0 && world.only_waits(at) {
                all.push(Event::Leave(at));
            }
            if host.work.is_some() {
                all.push(Event::Go(at));
            }
            if matches!(host.work, Some(Work::Written(_))) {
                all.push(Event::Return(at));
                if world.left.keeps > 0 {
                    all.push(Event::Keep(at));
                }
            }
            if host.asked.is_none() && host.work.is_none() {
                if world.left.reads > 0 {
                    all.push(Event::Read(at));
                }
                if world.left.writes > 0 {
                    all.push(Event::Write(at));
                }
            }
            match &host.connection {
                None if world.server.is_some() => all.push(Event::Connect(at)),
                None => {}
                Some(connection) => {
                    if world.left.breaks > 0 {
                        all.push(Event::Break(at));
                    }
                    if !connection.up.is_empty() {
                        all.push(Event::Up(at));
                    }
                    if !connection.down.is_empty() {
                        all.push(Event::Down(at));
                    }
                    if world.left.beats > 0 && world.now >= host.next_beat {
                        all.push(Event::Beat(at));
                    }
                }
            }
        }
    }

    fn next_state(&self, last: &World, event: Event) -> Option<World> {
        let mut world = last.clone();
        let now = world.now;
        match event {
            Event::Time => {
                world.left.ticks -= 1;
                world.now = world.now + Millis(1);
            }
            Event::Tick => world.serve(self, |server, now| server.tick(now)),
            Event::Beat(at) => {
                let host = world.hosts[at].as_mut()?;
                host.next_beat = now + Millis(1);
                world.left.beats -= 1;
                let one = host.client.beat(now);
                world.act(self, at, vec![one]);
            }
            Event::Read(at) => {
                world.left.reads -= 1;
                world.begin(self, at, Mode::Shared)?;
            }
            Event::Write(at) => {
                world.left.writes -= 1;
                world.begin(self, at, Mode::Exclusive)?;
            }
            Event::Go(at) => world.go(self, at)?,
            Event::Return(at) => {
                let host = world.hosts[at].as_mut()?;
                let Some(Work::Written(ticket)) = host.work.take() else { return None };
                let (_, all) = host.client.finish(ticket, now);
                world.act(self, at, all);
            }
            Event::Keep(at) => {
                world.left.keeps -= 1;
                let host = world.hosts[at].as_mut()?;
                host.is_keeping = !host.is_keeping;
                let all = host.client.keep(FILE, host.is_keeping);
                world.act(self, at, all);
            }
            Event::Up(at) => world.up(self, at)?,
            Event::Down(at) => world.down(self, at)?,
            Event::Break(at) => {
                world.left.breaks -= 1;
                world.break_connection(at)?;
            }
            Event::LateReport(number) => world.late_report(self, number),
            Event::Revoke(at) => {
                world.left.revokes -= 1;
                let session = world.hosts[at].as_ref()?.client.session();
                world.serve(self, |server, now| match self.without {
                    Without::Revoked => server.end_session(session, now),
                    _ => server.turn_out(session, now),
                });
            }
            Event::Leave(at) => {
                world.left.leaves -= 1;
                world.leave(self, at)?;
            }
            Event::Connect(at) => {
                let host = world.hosts[at].as_mut()?;
                host.connection = Some(Connection::default());
                let all = host.client.connected(Vec::new());
                world.act(self, at, all);
            }
            Event::CrashHost(at) => {
                world.left.host_crashes -= 1;
                world.hosts[at] = None;
            }
            Event::Join(at) => world.join(self, at),
            Event::CrashServer => {
                world.left.server_crashes -= 1;
                world.crash_server();
            }
            Event::StartServer => world.start_server(self),
            Event::Land(late) => {
                world.late.remove(&late);
                world.seen.kept_late |= late.inode != world.row.inode;
                world.inodes[late.inode] = Inode { value: late.value, by: Some(late.by) };
            }
        }
        Some(world)
    }

    fn within_boundary(&self, world: &World) -> bool {
        let short =
            |connection: &Connection| connection.up.len() <= IN_FLIGHT_MAX && connection.down.len() <= IN_FLIGHT_MAX;
        world.hosts.iter().flatten().filter_map(|host| host.connection.as_ref()).all(short)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("L1 no host uses what another one changes", |_, world: &World| {
                let good = world.hosts.iter().flatten().filter(|host| host.client.is_good(world.now));
                let modes: Vec<_> = good.filter_map(|host| host.client.mode_of(FILE)).collect();
                modes.len() <= 1 || modes.iter().all(|mode| *mode == Mode::Shared)
            }),
            Property::always("L1 an operation keeps its lease until it has ended", |_, world: &World| {
                world.hosts.iter().flatten().all(|host| match host.work.as_ref().and_then(Work::ticket) {
                    Some(ticket) => host.client.mode_of(FILE) >= Some(ticket.mode),
                    None => true,
                })
            }),
            Property::always("L2 what was acknowledged is not lost", |_, world: &World| {
                world.row.committed >= world.acknowledged
            }),
            Property::always("L3 reads are current, and no alarm is false", |_, world: &World| world.wrong.is_none()),
            Property::always("L4 late writers change nothing that is committed", |_, world: &World| {
                let inode = &world.inodes[world.row.inode];
                world.row.open.is_some() && inode.by == world.row.open || inode.value == world.row.committed
            }),
            Property::sometimes("a takeover", |_, world: &World| world.seen.took_over),
            Property::sometimes("a late write to an inode that is not used any more", |_, world: &World| {
                world.seen.kept_late
            }),
            Property::sometimes("a restart while something is held", |_, world: &World| {
                world.seen.restarted_with_lease
            }),
            Property::sometimes("a recalled lease that is kept, with the server's consent", |_, world: &World| {
                world.seen.kept
            }),
            Property::sometimes("a session that is good again", |_, world: &World| world.seen.good_again),
            Property::sometimes("a report that arrives after a newer one", |_, world: &World| world.seen.late_report),
            Property::sometimes("a host that leaves while its grant is on the way", |_, world: &World| {
                world.seen.left_granted
            }),
        ]
    }
}

/// The most of each, in the order of [`Left`].
const fn left([ticks, beats, reads, writes, breaks, host_crashes, server_crashes]: [u8; 7]) -> Left {
    let (keeps, late_reports, revokes, leaves) = (0, 0, 0, 0);
    Left { ticks, beats, reads, writes, breaks, host_crashes, server_crashes, keeps, late_reports, revokes, leaves }
}

// A session lasts two ticks without a heartbeat.
const CONNECTIONS_BREAK: Left = left([2, 1, 1, 2, 1, 0, 0]);
const SERVER_CRASHES: Left = left([3, 1, 1, 1, 0, 0, 1]);
const HOSTS_CRASH: Left = left([2, 0, 1, 2, 0, 1, 0]);
const LEASES_ARE_KEPT: Left = Left { keeps: 1, ..left([2, 1, 0, 2, 0, 0, 0]) };
const REPORTS_ARE_LATE: Left = Left { late_reports: 1, ..left([0, 0, 0, 2, 2, 0, 0]) };
const HOSTS_ARE_REVOKED: Left = Left { revokes: 1, ..left([0, 0, 1, 1, 0, 0, 1]) };
const WAITERS_LEAVE: Left = Left { leaves: 1, ..left([2, 0, 0, 2, 1, 0, 0]) };
const RUNS: [Left; 7] = [
    left([2, 0, 1, 2, 1, 0, 0]),
    left([3, 0, 1, 1, 0, 0, 1]),
    HOSTS_CRASH,
    LEASES_ARE_KEPT,
    REPORTS_ARE_LATE,
    HOSTS_ARE_REVOKED,
    WAITERS_LEAVE,
];
/// In `make torture`.
const LONG_RUNS: [Left; 8] = [
    CONNECTIONS_BREAK,
    SERVER_CRASHES,
    left([3, 0, 1, 2, 0, 1, 0]),
    left([3, 0, 1, 2, 0, 0, 1]),
    left([3, 1, 1, 2, 0, 0, 0]),
    left([3, 0, 1, 2, 1, 0, 0]),
    Left { revokes: 1, ..left([2, 0, 1, 1, 0, 0, 1]) },
    Left { leaves: 1, ..left([2, 0, 0, 2, 1, 1, 0]) },
];

/// Goes through all states of a model and checks its properties. Adds those that are to be seen, and were; returns the
/// number of states.
fn explored<M>(model: M, seen: &mut BTreeSet<&'static str>) -> usize
where
    M: Model<State: Clone + Debug + Hash + PartialEq + Send + Sync, Action: Clone + Debug + PartialEq>
        + Send
        + Sync
        + 'static,
{
    let checker = model.checker().threads(2).spawn_bfs().join();
    for property in checker.model().properties() {
        match property.expectation {
            Expectation::Always => checker.assert_no_discovery(property.name),
            Expectation::Sometimes | Expectation::Eventually => {
                seen.extend(checker.discovery(property.name).map(|_| property.name));
            }
        }
    }
    checker.unique_state_count()
}

#[test]
fn every_order_of_events_keeps_the_promises() {
    let (mut states, mut seen) = (0, BTreeSet::new());
    let more = std::env::var_os("LAMASSU_MODEL_SCALE").map(|_| LONG_RUNS).into_iter().flatten();
    for left in RUNS.into_iter().chain(more) {
        let model = Sharing { without: Without::Nothing, left };
        let before = states;
        states += explored(model, &mut seen);
        println!("{} states with {left:?}", states - before);
    }
    println!("{states} states of leases");
    assert_eq!(seen.len(), 7, "not everything happens that can: {seen:?}");
    assert!(states > 1_000_000);
}

/// Each rule that is left out breaks a promise.
#[test]
fn every_rule_is_needed() {
    let rules = [
        (Without::Stop, HOSTS_CRASH),
        (Without::Fence, HOSTS_CRASH),
        (Without::NewInode, HOSTS_CRASH),
        (Without::TakeOver, HOSTS_CRASH),
        (Without::Grace, SERVER_CRASHES),
        (Without::Durable, SERVER_CRASHES),
        (Without::Flush, HOSTS_CRASH),
        (Without::Finish, HOSTS_CRASH),
        (Without::Open, HOSTS_CRASH),
        (Without::Resume, CONNECTIONS_BREAK),
        (Without::Number, REPORTS_ARE_LATE),
        (Without::Revoked, HOSTS_ARE_REVOKED),
        (Without::Exclusion, HOSTS_CRASH),
    ];
    for (without, left) in rules {
        let model = Sharing { without, left };
        let checker = model.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
        let all = checker.model().properties().into_iter();
        let always = all.filter(|property| property.expectation == Expectation::Always);
        let broken: Vec<_> =
            always.map(|property| property.name).filter(|name| checker.discovery(name).is_some()).collect();
        println!("without {without:?}: {broken:?} in {left:?}");
        assert!(!broken.is_empty(), "{without:?}");
    }
}
