//! Every order of events of two hosts, a server and a store, with the state machines that the program uses
//! (`docs/sharing.md`, section 7).
//!
//! One file. Hosts read it, write it and sync it. Messages are late, or lost with their connection; hosts stop for any
//! time, crash, and come back as new sessions; the server crashes, and starts again on what is durable; a write that
//! was sent to the store arrives at any later time, also after its host has been taken for dead.
#![allow(clippy::unwrap_used)] // a panic is a failed test

use lamassu_lease::client::{Client, Do, Op, Ticket};
use lamassu_lease::server::{Durable, Server, Step};
use lamassu_lease::{Call, Millis, Mode, Object, Reply, SessionId, Terms};
use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};
use std::collections::{BTreeSet, VecDeque};

const FILE: Object = Object(7);
const HOSTS: usize = 2;
/// Messages in flight in one direction.
const IN_FLIGHT_MAX: usize = 3;

/// Content of the file; each write has a new one, larger than all before.
type Value = u8;

/// What the server durably knows of the file: its row in the anchor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Row {
    inode: usize,
    committed: Value,
    /// A session that may have changed it since.
    open: Option<SessionId>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Inode {
    value: Value,
    /// Who wrote it, as its stamp says.
    by: Option<SessionId>,
}

/// A write that the store has not carried out yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Late {
    inode: usize,
    value: Value,
    by: SessionId,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Connection {
    up: VecDeque<Call>,
    down: VecDeque<Reply>,
    /// The server answers by it: the session has resumed on it.
    is_known: bool,
}

/// What an operation is about to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Work {
    Read(Ticket),
    /// The value was read.
    HasRead(Ticket, Value),
    Write(Ticket),
    /// It is in the store, or on its way.
    Written(Ticket),
    /// The lease is recalled: what is dirty is committed first.
    Flush,
    /// The operation that begins with it, if one waits, uses the lease from then on.
    TakeOver(Option<Ticket>),
    /// The new inode is there, with what is accepted of the old.
    Copied(usize, Option<Ticket>),
}

impl Work {
    /// The first step of an operation.
    fn of(ticket: Ticket) -> Work {
        match ticket.mode {
            Mode::Shared => Work::Read(ticket),
            Mode::Exclusive => Work::Write(ticket),
        }
    }

    /// The operation.
    fn ticket(&self) -> Option<Ticket> {
        match self {
            Work::Read(ticket) | Work::HasRead(ticket, _) | Work::Write(ticket) | Work::Written(ticket) => {
                Some(*ticket)
            }
            Work::TakeOver(by) | Work::Copied(_, by) => *by,
            Work::Flush => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Host {
    client: Client,
    connection: Option<Connection>,
    /// Operations that wait for a lease: what they want.
    asked: Option<Mode>,
    work: Option<Work>,
    /// What this host wrote and has not committed.
    dirty: Option<Value>,
    /// What it wrote last: as long as its session is good others see that.
    wrote: Value,
    /// When it may send a heartbeat.
    next_beat: Millis,
    /// What is cached of the file, under its lease: the row as it was when the lease came.
    row: Option<Row>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    now: Millis,
    server: Option<Server>,
    durable: Durable,
    row: Row,
    inodes: Vec<Inode>,
    late: BTreeSet<Late>,
    hosts: [Option<Host>; HOSTS],
    next_value: Value,
    /// The newest value whose fsync has returned.
    acknowledged: Value,
    /// What went wrong.
    wrong: Option<&'static str>,
    /// What is left to happen.
    left: Left,
    /// What has happened, for the properties that say that it can.
    seen: Seen,
}

/// How often what can happen happens at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Left {
    ticks: u8,
    beats: u8,
    reads: u8,
    writes: u8,
    breaks: u8,
    host_crashes: u8,
    server_crashes: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Seen {
    took_over: bool,
    kept_late: bool,
    restarted_with_lease: bool,
    good_again: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Event {
    Tick,
    Beat(usize),
    Read(usize),
    Write(usize),
    Go(usize),
    /// A write returns, and nobody syncs it.
    Return(usize),
    Up(usize),
    Down(usize),
    Break(usize),
    Connect(usize),
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

impl World {
    /// Has the server do something: durable first, then told.
    fn serve(&mut self, model: &Sharing, act: impl FnOnce(&mut Server, Millis) -> Step) {
        let Some(server) = &mut self.server else { return };
        let step = act(server, self.now);
        if model.without == Without::Grace {
            // As if all had said at once that they hold nothing.
            *server = without_grace(server, self.now);
        }
        self.durable = server.durable().clone();
        if model.without == Without::Durable {
            self.durable.exclusive.clear();
        }
        for (session, reply) in step.replies {
            let host = self.hosts.iter_mut().flatten().find(|host| host.client.session() == session);
            let known = |connection: &&mut Connection| connection.is_known || model.without == Without::Resume;
            if let Some(connection) = host.and_then(|host| host.connection.as_mut().filter(known)) {
                connection.down.push_back(reply);
            }
        }
    }

    /// Carries out what a client wants.
    fn act(&mut self, model: &Sharing, at: usize, all: Vec<Do>) {
        for one in all {
            let Some(host) = &mut self.hosts[at] else { return };
            match one {
                Do::Send(call) => {
                    if let Some(connection) = &mut host.connection {
                        connection.up.push_back(call);
                    }
                }
                Do::Go(ticket) => (host.asked, host.work) = (None, Some(Work::of(ticket))),
                Do::Fail(_) => host.asked = None,
                Do::Flush { .. } => host.work = Some(Work::Flush),
                Do::TakeOver { by, .. } if model.without == Without::TakeOver => {
                    let all = host.client.taken_over(FILE, self.now);
                    (host.asked, host.work) = (None, by.map(Work::of));
                    self.act(model, at, all);
                }
                Do::TakeOver { by, .. } => (host.asked, host.work) = (None, Some(Work::TakeOver(by))),
                // It has forgotten everything, and its writes are in the store's hands. It may begin another session.
                Do::Lost => self.hosts[at] = None,
            }
        }
    }

    /// Whether the server takes what this host says of the file.
    fn is_accepted(&self, model: &Sharing, session: SessionId) -> bool {
        let holds = |server: &Server| server.may_change(session, FILE) || model.without == Without::Fence;
        self.server.as_ref().is_some_and(holds)
    }

    fn is_late_of(&self, session: SessionId) -> bool {
        self.late.iter().any(|late| late.by == session)
    }

    /// The next step of what a host does.
    #[allow(clippy::too_many_lines, reason = "an arm for each step of a host")]
    fn go(&mut self, model: &Sharing, at: usize) -> Option<()> {
        let host = self.hosts[at].as_ref()?;
        let (session, work) = (host.client.session(), host.work.clone()?);
        match work {
            Work::Read(ticket) => {
                let row = host.row.clone().unwrap_or_else(|| self.row.clone());
                let host = self.hosts[at].as_mut()?;
                // A host sees its own writes, wherever they are.
                let value = host.dirty.unwrap_or(self.inodes[row.inode].value);
                host.work = Some(Work::HasRead(ticket, value));
                // What the row does not know, and this host did not write, is refused: a false alarm, if the session
                // is good.
                if host.dirty.is_none() && value != row.committed && host.client.is_good(self.now) {
                    self.wrong = Some("false alarm");
                }
            }
            Work::HasRead(ticket, value) => {
                let good = self.hosts.iter().flatten().filter(|host| host.client.is_good(self.now));
                let newest = good.map(|host| host.wrote).max().unwrap_or_default().max(self.row.committed);
                let host = self.hosts[at].as_mut()?;
                host.work = None;
                let (counts, all) = host.client.finish(ticket, self.now);
                let counts = counts || model.without == Without::Finish;
                if counts && value != newest {
                    self.wrong = Some("stale read");
                }
                self.act(model, at, all);
            }
            // The store keeps the order of one host's writes of one page.
            Work::Write(_) if self.is_late_of(session) => return None,
            Work::Write(ticket) => {
                if model.without != Without::Open {
                    if !self.is_accepted(model, session) {
                        return None; // until it is, or the session has ended
                    }
                    self.row.open = Some(session);
                }
                let host = self.hosts[at].as_mut()?;
                let row = host.row.get_or_insert_with(|| self.row.clone());
                let late = Late { inode: row.inode, value: self.next_value, by: session };
                (host.dirty, host.wrote) = (Some(self.next_value), self.next_value);
                self.next_value += 1;
                self.late.insert(late);
                host.work = Some(Work::Written(ticket));
            }
            Work::Written(ticket) => {
                // fsync(2): the store's barrier, then the server.
                if self.is_late_of(session) || !self.commit(model, at, false)? {
                    return None;
                }
                let host = self.hosts[at].as_mut()?;
                host.work = None;
                let (_, all) = host.client.finish(ticket, self.now);
                self.act(model, at, all);
            }
            Work::Flush => {
                if model.without != Without::Flush && (self.is_late_of(session) || !self.commit(model, at, true)?) {
                    return None;
                }
                let host = self.hosts[at].as_mut()?;
                (host.work, host.row, host.dirty) = (None, None, None);
                let all = host.client.flushed(FILE, self.now);
                self.act(model, at, all);
            }
            Work::TakeOver(by) => {
                let old = &self.inodes[self.row.inode];
                let is_left = self.row.open.is_some_and(|open| open != session);
                let is_accepted = old.value == self.row.committed || old.by == self.row.open;
                let copied = match (is_left, model.without == Without::NewInode) {
                    (false, _) | (true, true) => self.row.inode,
                    (true, false) => {
                        let value = if is_accepted { old.value } else { self.row.committed };
                        self.inodes.push(Inode { value, by: Some(session) });
                        self.inodes.len() - 1
                    }
                };
                self.hosts[at].as_mut()?.work = Some(Work::Copied(copied, by));
            }
            Work::Copied(inode, by) => {
                if !self.is_accepted(model, session) {
                    return None;
                }
                self.seen.took_over |= inode != self.row.inode;
                self.row = Row { inode, committed: self.inodes[inode].value, open: None };
                let host = self.hosts[at].as_mut()?;
                (host.work, host.row) = (by.map(Work::of), Some(self.row.clone()));
                let all = host.client.taken_over(FILE, self.now);
                self.act(model, at, all);
            }
        }
        Some(())
    }

    /// Commits what is dirty; `clean`: nothing more will change. False: not accepted.
    fn commit(&mut self, model: &Sharing, at: usize, clean: bool) -> Option<bool> {
        let host = self.hosts[at].as_mut()?;
        let session = host.client.session();
        let Some(value) = host.dirty.filter(|_| self.is_accepted(model, session)) else {
            let host = self.hosts[at].as_ref()?;
            return Some(host.dirty.is_none());
        };
        let host = self.hosts[at].as_mut()?;
        let inode = host.row.as_ref()?.inode;
        self.row = Row { inode, committed: value, open: Some(session).filter(|_| !clean) };
        host.dirty = None;
        host.row = Some(self.row.clone());
        self.acknowledged = self.acknowledged.max(value);
        Some(true)
    }

    fn crash_server(&mut self) {
        self.server = None;
        self.hosts.iter_mut().flatten().for_each(|host| host.connection = None);
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
            let _ = other.call(session, Call::Resume { held: held.map(grant).collect() }, now);
        }
    }
    other
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
            all.push(Event::Tick);
        }
        if world.server.is_none() {
            all.push(Event::StartServer);
        } else if world.left.server_crashes > 0 {
            all.push(Event::CrashServer);
        }
        all.extend(world.late.iter().cloned().map(Event::Land));
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
            if host.work.is_some() {
                all.push(Event::Go(at));
            }
            if matches!(host.work, Some(Work::Written(_))) {
                all.push(Event::Return(at));
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

    #[allow(clippy::too_many_lines, reason = "an arm for each event")]
    fn next_state(&self, last: &World, event: Event) -> Option<World> {
        let mut world = last.clone();
        let now = world.now;
        match event {
            Event::Tick => {
                world.left.ticks -= 1;
                world.now = world.now + Millis(1);
                world.serve(self, |server, now| server.tick(now));
            }
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
            Event::Up(at) => {
                let host = world.hosts[at].as_mut()?;
                let session = host.client.session();
                let connection = host.connection.as_mut()?;
                let call = connection.up.pop_front()?;
                connection.is_known |= matches!(call, Call::Resume { .. });
                world.serve(self, |server, now| server.call(session, call, now));
            }
            Event::Down(at) => {
                let host = world.hosts[at].as_mut()?;
                let reply = host.connection.as_mut()?.down.pop_front()?;
                let (was_good, is_granted) = (host.client.is_good(now), matches!(reply, Reply::Granted { .. }));
                let all = host.client.reply(reply, now);
                world.seen.good_again |= !was_good && host.client.is_good(now);
                if is_granted {
                    host.row = None; // whatever it was before
                }
                world.act(self, at, all);
            }
            Event::Break(at) => {
                world.left.breaks -= 1;
                world.hosts[at].as_mut()?.connection = None;
            }
            Event::Connect(at) => {
                let host = world.hosts[at].as_mut()?;
                host.connection = Some(Connection::default());
                let all = host.client.connected();
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
            Event::StartServer => {
                let (server, _) = Server::start(self.terms(), world.durable.clone(), now);
                world.seen.restarted_with_lease |= !world.durable.exclusive.is_empty();
                world.server = Some(server);
                world.serve(self, |_, _| Step::default());
            }
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
            Property::sometimes("a session that is good again", |_, world: &World| world.seen.good_again),
        ]
    }
}

impl World {
    fn join(&mut self, model: &Sharing, at: usize) {
        let Some(server) = &mut self.server else { return };
        let (session, step) = server.join(self.now);
        let client = Client::new(model.terms(), session, self.now);
        let connection = Some(Connection { is_known: true, ..Connection::default() });
        self.hosts[at] = Some(Host {
            client,
            connection,
            asked: None,
            work: None,
            dirty: None,
            wrote: 0,
            next_beat: self.now + Millis(1),
            row: None,
        });
        self.serve(model, |_, _| step);
    }

    fn begin(&mut self, model: &Sharing, at: usize, mode: Mode) -> Option<()> {
        let host = self.hosts[at].as_mut()?;
        host.asked = Some(mode);
        let all = host.client.begin(Op(0), FILE, mode, self.now);
        self.act(model, at, all);
        Some(())
    }
}

/// The most of each, in the order of [`Left`].
const fn left([ticks, beats, reads, writes, breaks, host_crashes, server_crashes]: [u8; 7]) -> Left {
    Left { ticks, beats, reads, writes, breaks, host_crashes, server_crashes }
}

/// A session lasts two ticks without a heartbeat.
const RUNS: [Left; 4] = [
    left([3, 1, 1, 1, 0, 0, 1]),
    left([2, 0, 1, 2, 0, 1, 0]),
    left([2, 0, 1, 2, 1, 0, 0]),
    left([2, 1, 1, 1, 1, 0, 0]),
];
/// In `make torture`.
const LONG_RUNS: [Left; 4] = [
    left([3, 0, 1, 2, 0, 1, 0]),
    left([3, 0, 1, 2, 0, 0, 1]),
    left([3, 1, 1, 2, 0, 0, 0]),
    left([3, 0, 1, 2, 1, 0, 0]),
];

#[test]
fn every_order_of_events_keeps_the_promises() {
    let (mut states, mut seen) = (0, BTreeSet::new());
    let more = std::env::var_os("LAMASSU_MODEL_SCALE").map(|_| LONG_RUNS).into_iter().flatten();
    for left in RUNS.into_iter().chain(more) {
        let model = Sharing { without: Without::Nothing, left };
        let checker = model.checker().threads(2).spawn_bfs().join();
        for property in checker.model().properties() {
            match property.expectation {
                Expectation::Always => checker.assert_no_discovery(property.name),
                Expectation::Sometimes | Expectation::Eventually => {
                    seen.extend(checker.discovery(property.name).map(|_| property.name));
                }
            }
        }
        states += checker.unique_state_count();
    }
    println!("{states} states of leases");
    assert_eq!(seen.len(), 4, "not everything happens that can: {seen:?}");
    assert!(states > 1_000_000);
}

/// Each rule that is left out breaks a promise.
#[test]
fn every_rule_is_needed() {
    let rules = [
        Without::Stop,
        Without::Fence,
        Without::NewInode,
        Without::TakeOver,
        Without::Grace,
        Without::Durable,
        Without::Flush,
        Without::Finish,
        Without::Open,
        Without::Resume,
    ];
    for without in rules {
        let breaks = |left: &Left| {
            let model = Sharing { without, left: *left };
            let checker = model.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
            let broken: Vec<_> = checker
                .model()
                .properties()
                .into_iter()
                .filter(|property| {
                    property.expectation == Expectation::Always && checker.discovery(property.name).is_some()
                })
                .map(|property| property.name)
                .collect();
            println!("without {without:?}: {broken:?} in {left:?}");
            !broken.is_empty()
        };
        assert!(RUNS.iter().rev().any(breaks), "{without:?}");
    }
}
