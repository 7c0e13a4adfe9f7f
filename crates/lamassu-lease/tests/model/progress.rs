//! Progress (L5), in every order of events of three hosts and a server, with the state machines that the program uses.
//!
//! The other model has no bound on how late a message is, so it cannot say how long a request waits. Here messages
//! arrive at once, and a host that does not hang ends what it does within a tick. One host may hang, with the vault or
//! without, and still sends heartbeats; one may keep the vault on purpose, and one may die; others may have no answer
//! to a heartbeat, since their connections break before. A holder's connection may be cut: what is said by it is lost
//! until the holder notices. One that waits may leave. The server may stand still for a term, or the vault stall
//! for one while messages wait. Where they do, whoever changes something passes its lease only while its session is
//! good: before that, it has to commit.

use crate::{as_newest, next_report};
use lamassu_lease::client::{Client, Do, Op, Ticket};
use lamassu_lease::server::{Durable, Server, Step};
use lamassu_lease::{Call, Millis, Mode, Object, Reply, RequestNo, SessionId, Terms};
use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};
use std::collections::VecDeque;

const FILE: Object = Object(7);
const HOSTS: usize = 3;
/// Operations of one host at once.
const OPS_MAX: usize = 2;
const TERM: u64 = 2;
/// A request of the model itself: the state machines of hosts count theirs from zero.
const OWN: RequestNo = RequestNo(1 << 32);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Event {
    Tick,
    Want(usize, Mode),
    Done(usize),
    Hang(usize),
    /// From now on the connection of a host breaks before a heartbeat is answered, and is made again.
    Flicker(usize),
    /// The connection of a holder is cut. It notices that by its next heartbeat, and makes another one.
    Cut(usize),
    /// A host that waits leaves.
    Leave(usize),
    /// A host that only reads what it has exclusively keeps it as shared.
    Reduce(usize),
    /// A host keeps its lease although others want it, from now on or no longer.
    Keep(usize),
    Let(usize),
    /// A host sends nothing more.
    Die(usize),
    /// The server stands still for a term, and then notices that.
    Pause,
    /// The vault stalls for a term: it is at work, and of each host a message waits meanwhile.
    Stall,
}

/// A rule that is left out, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// R1: conflicting leases are recalled.
    Recall,
    /// R1: requests are granted in the order of arrival.
    Order,
    /// R1: one that a new connection repeats has the place that it had.
    Place,
    /// R5: a weaker lease is released before a stronger one is requested.
    Release,
    /// R12: nothing is requested while the session is not good.
    Good,
    /// R13: who holds on to a recalled lease is not answered.
    Silence,
    /// R13: as long as somebody waits.
    Waiting,
    /// R15: who says that it keeps a lease is answered.
    Keeping,
    /// R15: but ends as any other when it is silent.
    Dying,
    /// R15: who keeps a lease no longer has a term from then on, and is not answered after that.
    Letting,
    /// After a pause nobody counts as silent, and whoever was asked for a lease has a term.
    Away,
    /// R13: the time in which the vault stalls does not count.
    Stall,
    /// R13: but with its end the term of who was asked for a lease does not begin anew.
    Rest,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Host {
    client: Client,
    /// Operations that wait for the lease, and since when.
    waits: Vec<(Op, Mode, Millis)>,
    works: Vec<Ticket>,
    hangs: bool,
    flickers: bool,
    is_cut: bool,
    is_over: bool,
    is_dead: bool,
    /// It says that it keeps its lease.
    is_keeping: bool,
    /// It has a lease that no operation has used.
    is_unused: bool,
    /// Leases that it released without use, one after the other.
    unused: u8,
    /// It keeps its lease until it has a stronger one.
    keeps: bool,
}

impl Host {
    /// Whether nothing is wrong with it.
    fn is_sound(&self) -> bool {
        !self.hangs && !self.flickers && !self.is_dead
    }

    fn wants_to_change(&self) -> bool {
        self.waits.iter().any(|(_, mode, _)| *mode == Mode::Exclusive)
    }

    fn only_reads(&self) -> bool {
        !self.wants_to_change() && self.works.iter().all(|ticket| ticket.mode == Mode::Shared)
    }
}

/// What is left to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Left {
    ticks: u8,
    wants: u8,
    hangs: u8,
    flickers: u8,
    cuts: u8,
    leaves: u8,
    reduces: u8,
    keeps: u8,
    deaths: u8,
    pauses: u8,
    stalls: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    now: Millis,
    server: Server,
    hosts: [Host; HOSTS],
    /// Requests that the server has not granted, in the order of their arrival; and whether the newest connection of
    /// their host has made them.
    arrived: Vec<(usize, Call, bool)>,
    next_op: u64,
    /// When a host last kept its lease, or the server stood still. This, and since when operations wait, is later by
    /// the time in which the vault stalled since.
    kept: Millis,
    left: Left,
    wrong: Option<&'static str>,
}

#[derive(Clone, Debug)]
struct Progress {
    without: Without,
    left: Left,
}

impl World {
    /// Carries out what the clients want, and what follows from that, until there is nothing more.
    fn settle(&mut self, without: Without, at: usize, all: Vec<Do>) {
        let mut queue: VecDeque<_> = all.into_iter().map(|one| (at, one)).collect();
        while let Some((at, one)) = queue.pop_front() {
            let host = &mut self.hosts[at];
            let more = match one {
                Do::Send(_) if host.is_cut => continue,
                Do::Send(call) => {
                    let step = self.call(without, at, call);
                    self.hear(without, step, &mut queue);
                    continue;
                }
                Do::Go(ticket) => {
                    host.go(ticket);
                    continue;
                }
                Do::Fail(op) => {
                    host.waits.retain(|(waiting, ..)| *waiting != op);
                    continue;
                }
                Do::Lost => {
                    if host.is_sound() {
                        self.wrong = Some("the session of a host that passes what it is asked for has ended");
                    }
                    host.is_over = true;
                    continue;
                }
                Do::Flush { .. } | Do::TakeOver { .. } if host.hangs => continue,
                Do::Flush { .. } if without == Without::Release && host.wants_to_change() => {
                    host.keeps = true;
                    vec![Do::Send(Call::Acquire { request: OWN, object: FILE, mode: Mode::Exclusive })]
                }
                Do::Flush { .. } => host.client.flushed(FILE, self.now),
                Do::TakeOver { by, .. } => {
                    by.into_iter().for_each(|ticket| host.go(ticket));
                    host.client.taken_over(FILE, self.now)
                }
            };
            queue.extend(more.into_iter().map(|one| (at, one)));
        }
    }

    /// A call of a host at the server.
    fn call(&mut self, without: Without, at: usize, call: Call) -> Step {
        let session = self.hosts[at].client.session();
        let mut step = Step::default();
        let now = self.now;
        let serve = |server: &mut Server, session, call, step: &mut Step| {
            let call =
                if let Without::Order | Without::Place = without { as_newest(server, session, call) } else { call };
            step.replies.extend(server.call(session, call, now).replies);
        };
        match &call {
            Call::Release { keeps: None, .. } if self.hosts[at].is_unused => {
                let host = &mut self.hosts[at];
                (host.is_unused, host.unused) = (false, host.unused + 1);
                if host.unused > 1 {
                    self.wrong = Some("a lease goes round among hosts that cannot use it");
                }
            }
            Call::Resume { .. } => {
                self.arrived.iter_mut().filter(|(other, ..)| *other == at).for_each(|(.., is_named)| *is_named = false);
            }
            Call::Keep { .. } if without == Without::Keeping => return step,
            Call::Keep { kept: false, .. } if without == Without::Letting => return step,
            Call::Heartbeat { .. } if without == Without::Silence => self.server.was_away(self.now),
            Call::Acquire { .. } => {
                let before = self.arrived.clone();
                let is_again = |(other, asked, _): &&mut (usize, Call, bool)| *other == at && *asked == call;
                match self.arrived.iter_mut().find(is_again) {
                    Some((.., is_named)) => {
                        *is_named = true;
                        if without == Without::Place {
                            forget_request(&mut self.server, session, self.now, &mut step);
                        }
                    }
                    None => {
                        self.arrived.retain(|(other, ..)| *other != at);
                        self.arrived.push((at, call.clone(), true));
                    }
                }
                if without == Without::Order {
                    // The newest is before all others.
                    for (other, ..) in &before {
                        forget_request(&mut self.server, self.hosts[*other].client.session(), self.now, &mut step);
                    }
                    serve(&mut self.server, session, call, &mut step);
                    for (other, call, _) in before {
                        serve(&mut self.server, self.hosts[other].client.session(), call, &mut step);
                    }
                    return step;
                }
            }
            _ => {}
        }
        let beat = if let Call::Heartbeat { beat } = call { Some(beat) } else { None };
        serve(&mut self.server, session, call, &mut step);
        if let Some(beat) = beat.filter(|_| without == Without::Silence && step.replies.is_empty()) {
            step.replies.push((session, Reply::Alive { beat }));
        }
        step
    }

    /// Replies of the server at their hosts.
    fn hear(&mut self, without: Without, step: Step, queue: &mut VecDeque<(usize, Do)>) {
        for (session, reply) in step.replies {
            let Some(at) = self.hosts.iter().position(|host| host.client.session() == session) else { continue };
            let host = &mut self.hosts[at];
            if host.is_cut || host.is_over {
                continue;
            }
            match &reply {
                Reply::Recall { .. } if without == Without::Recall => continue,
                Reply::Recall { .. } if without == Without::Waiting && self.arrived.is_empty() => continue,
                Reply::Alive { .. } if host.flickers => continue,
                Reply::Ended => self.arrived.retain(|(other, ..)| *other != at),
                Reply::Granted { request, .. } => {
                    host.is_unused = true;
                    let first = self.arrived.iter().find(|(.., is_named)| *is_named).map(|(first, ..)| *first);
                    if first != Some(at) {
                        self.wrong = Some("a request was granted before one that came earlier");
                    }
                    self.arrived.retain(|(other, ..)| *other != at);
                    if *request == OWN {
                        host.keeps = false;
                        queue.extend(host.client.flushed(FILE, self.now).into_iter().map(|one| (at, one)));
                        continue;
                    }
                }
                _ => {}
            }
            queue.extend(host.client.reply(reply, self.now).into_iter().map(|one| (at, one)));
        }
    }

    fn tick(&mut self, without: Without) {
        self.now = self.now + Millis(1);
        self.beats(without);
    }

    /// What hosts have sent meanwhile arrives afterwards.
    fn pause(&mut self, without: Without) {
        self.now = self.now + Millis(TERM);
        self.kept = self.now;
        if without != Without::Away {
            self.server.was_away(self.now);
        }
        self.beats(without);
    }

    /// What hosts have sent meanwhile is handled afterwards. Of each a message came as soon as that began.
    fn stall(&mut self, without: Without) {
        let since = self.now;
        let later = |moment: Millis| moment + Millis(TERM);
        (self.now, self.kept) = (later(self.now), later(self.kept));
        let waits = self.hosts.iter_mut().flat_map(|host| &mut host.waits);
        waits.for_each(|(_, _, asked)| *asked = later(*asked));
        for host in self.hosts.iter().filter(|host| !host.is_dead && !host.is_over) {
            let session = host.client.session();
            if self.server.overdue(self.now).any(|overdue| overdue == session) {
                self.server.has_arrived(session, since, self.now);
            }
        }
        match without {
            Without::Stall => {}
            Without::Rest => self.server.was_away(self.now),
            _ => self.server.was_at_work(since, self.now),
        }
        self.beats(without);
    }

    /// Each host sends a heartbeat, and then the server looks at the time.
    fn beats(&mut self, without: Without) {
        for at in 0..HOSTS {
            let host = &mut self.hosts[at];
            let goes_on_at_server = match without {
                Without::Dying => host.is_dead && host.is_keeping,
                Without::Waiting => host.is_over,
                _ => false,
            };
            if goes_on_at_server {
                let session = host.client.session();
                let _ = self.server.call(session, Call::Heartbeat { beat: 0 }, self.now);
            }
            if host.is_over || host.is_dead {
                continue;
            }
            if host.is_keeping {
                self.kept = self.now;
            }
            let connects = std::mem::take(&mut host.is_cut) || host.flickers;
            let mut all = if connects { host.client.connected(Vec::new()) } else { Vec::new() };
            if !host.flickers {
                all.push(host.client.beat(self.now));
            }
            if without == Without::Good && host.flickers && host.client.mode_of(FILE).is_none() {
                // By a clock at which the session is good.
                let none = Ticket { op: Op(u64::MAX), object: FILE, mode: Mode::Shared };
                all.extend(host.client.finish(none, Millis(0)).1);
            }
            self.settle(without, at, all);
        }
        let step = self.server.tick(self.now);
        let mut queue = VecDeque::new();
        self.hear(without, step, &mut queue);
        for (at, one) in queue {
            self.settle(without, at, vec![one]);
        }
    }
}

/// A session's request waits no longer, and the session has nothing: another one has taken its place, and was not
/// repeated.
fn forget_request(server: &mut Server, session: SessionId, now: Millis, step: &mut Step) {
    let report = next_report(server, session, Vec::new());
    for call in [report.clone(), Call::Acquire { request: OWN, object: FILE, mode: Mode::Exclusive }, report] {
        let call = as_newest(server, session, call);
        let replies = server.call(session, call, now).replies.into_iter();
        step.replies.extend(replies.filter(|(_, reply)| !matches!(reply, Reply::Granted { request: OWN, .. })));
    }
}

impl Host {
    fn go(&mut self, ticket: Ticket) {
        self.waits.retain(|(op, ..)| *op != ticket.op);
        self.works.push(ticket);
        (self.is_unused, self.unused) = (false, 0);
    }
}

impl Progress {
    /// Whether a host can end what it does now: it commits first.
    fn may_end(&self, world: &World, host: &Host) -> bool {
        self.left.pauses + self.left.stalls == 0 || host.client.is_good(world.now)
    }
}

impl Model for Progress {
    type State = World;
    type Action = Event;

    fn init_states(&self) -> Vec<World> {
        let (terms, now) = (Terms::of_model(TERM, TERM), Millis(0));
        let (mut server, _) = Server::start(terms, Durable::default(), now);
        let hosts = [(); HOSTS].map(|()| Host {
            client: Client::new(terms, server.join(now).0, now),
            waits: Vec::new(),
            works: Vec::new(),
            hangs: false,
            flickers: false,
            is_cut: false,
            is_over: false,
            is_dead: false,
            is_keeping: false,
            is_unused: false,
            unused: 0,
            keeps: false,
        });
        vec![World { now, server, hosts, arrived: Vec::new(), next_op: 0, kept: now, left: self.left, wrong: None }]
    }

    fn actions(&self, world: &World, all: &mut Vec<Event>) {
        if world.wrong.is_some() {
            return;
        }
        for (at, host) in world.hosts.iter().enumerate().filter(|(_, host)| !host.is_over && !host.hangs) {
            if host.is_dead {
                continue;
            }
            if world.left.deaths > 0 {
                all.push(Event::Die(at));
            }
            if host.is_keeping {
                all.push(Event::Let(at));
                continue;
            }
            if !host.works.is_empty() && self.may_end(world, host) {
                all.push(Event::Done(at));
                if world.left.keeps > 0 && !host.flickers {
                    all.push(Event::Keep(at));
                }
            }
            if world.left.wants > 0 && host.works.len() + host.waits.len() < OPS_MAX {
                all.extend([Mode::Shared, Mode::Exclusive].map(|mode| Event::Want(at, mode)));
            }
            if world.left.hangs > 0 && !host.flickers {
                all.push(Event::Hang(at));
            }
            if world.left.flickers > 0 && !host.flickers {
                all.push(Event::Flicker(at));
            }
            let held = host.client.mode_of(FILE);
            if world.left.cuts > 0 && !host.is_cut && !host.flickers && held.is_some() {
                all.push(Event::Cut(at));
            }
            if world.left.leaves > 0 && held.is_none() && !host.waits.is_empty() {
                all.push(Event::Leave(at));
            }
            if world.left.reduces > 0 && held == Some(Mode::Exclusive) && host.only_reads() {
                all.push(Event::Reduce(at));
            }
        }
        if world.left.pauses > 0 {
            all.push(Event::Pause);
        }
        if world.left.stalls > 0 {
            all.push(Event::Stall);
        }
        let is_done = |host: &Host| {
            let is_held_up = host.hangs || host.is_over || host.is_dead || host.is_keeping;
            host.works.is_empty() || is_held_up || !self.may_end(world, host)
        };
        if world.left.ticks > 0 && world.hosts.iter().all(is_done) {
            all.push(Event::Tick);
        }
    }

    fn next_state(&self, last: &World, event: Event) -> Option<World> {
        let mut world = last.clone();
        match event {
            Event::Tick => {
                world.left.ticks -= 1;
                world.tick(self.without);
            }
            Event::Want(at, mode) => {
                world.left.wants -= 1;
                let (op, now) = (Op(world.next_op), world.now);
                world.next_op += 1;
                let host = &mut world.hosts[at];
                host.waits.push((op, mode, now));
                let all = host.client.begin(op, FILE, mode, now);
                world.settle(self.without, at, all);
            }
            Event::Done(at) => {
                let ticket = world.hosts[at].works.remove(0);
                let (_, all) = world.hosts[at].client.finish(ticket, world.now);
                world.settle(self.without, at, all);
            }
            Event::Hang(at) => {
                world.left.hangs -= 1;
                world.hosts[at].hangs = true;
            }
            Event::Flicker(at) => {
                world.left.flickers -= 1;
                world.hosts[at].flickers = true;
            }
            Event::Cut(at) => {
                world.left.cuts -= 1;
                world.hosts[at].is_cut = true;
            }
            Event::Leave(at) => {
                world.left.leaves -= 1;
                world.arrived.retain(|(other, ..)| *other != at);
                world.hosts[at].waits.clear();
                if self.without != Without::Waiting {
                    world.settle(self.without, at, vec![Do::Send(Call::Leave)]);
                }
                world.hosts[at].is_over = true;
            }
            Event::Reduce(at) => {
                world.left.reduces -= 1;
                let all = world.hosts[at].client.reduce(FILE);
                world.settle(self.without, at, all);
            }
            Event::Keep(at) | Event::Let(at) => {
                let host = &mut world.hosts[at];
                host.is_keeping = !host.is_keeping;
                world.left.keeps -= u8::from(host.is_keeping);
                world.kept = world.now;
                let all = host.client.keep(FILE, host.is_keeping);
                world.settle(self.without, at, all);
            }
            Event::Die(at) => {
                world.left.deaths -= 1;
                world.hosts[at].is_dead = true;
            }
            Event::Pause => {
                world.left.pauses -= 1;
                world.pause(self.without);
            }
            Event::Stall => {
                world.left.stalls -= 1;
                world.stall(self.without);
            }
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("L5 nothing goes wrong", |_, world: &World| world.wrong.is_none()),
            Property::always("L5 no request waits for longer than two terms", |_, world: &World| {
                let sound = world.hosts.iter().filter(|host| host.is_sound());
                let mut since = sound.flat_map(|host| host.waits.iter().map(|(_, _, since)| since.0));
                since.all(|since| world.now.0 <= since.max(world.kept.0) + 2 * TERM)
            }),
            Property::sometimes("a lease that is kept for longer than two terms", |_, world: &World| {
                let is_kept = world.hosts.iter().any(|host| host.is_sound() && host.is_keeping);
                let mut since = world.hosts.iter().flat_map(|host| host.waits.iter().map(|(_, _, since)| since.0));
                is_kept && since.any(|since| world.now.0 > since + 2 * TERM)
            }),
            Property::sometimes(
                "a request that waits until a host has died that kept its lease",
                |_, world: &World| {
                    let died = world.hosts.iter().any(|host| host.is_dead && host.is_keeping && host.is_over);
                    died && world.hosts.iter().any(|host| host.is_sound() && !host.works.is_empty())
                },
            ),
            Property::sometimes("a request that waits until a host that hangs has ended", |_, world: &World| {
                let hung = world.hosts.iter().any(|host| host.hangs && host.is_over);
                hung && world.hosts.iter().any(|host| host.is_sound() && !host.works.is_empty())
            }),
            Property::sometimes("a lease that cannot be used", |_, world: &World| {
                world.hosts.iter().any(|host| host.unused > 0)
            }),
            Property::sometimes("a lease that is reduced, and the server does not hear of it", |_, world: &World| {
                world.hosts.iter().any(|host| {
                    let at_server = world.server.mode_of(host.client.session(), FILE);
                    (host.client.mode_of(FILE), at_server) == (Some(Mode::Shared), Some(Mode::Exclusive))
                })
            }),
        ]
    }
}

const NONE: Left = Left {
    ticks: 0,
    wants: 0,
    hangs: 0,
    flickers: 0,
    cuts: 0,
    leaves: 0,
    reduces: 0,
    keeps: 0,
    deaths: 0,
    pauses: 0,
    stalls: 0,
};
const HOSTS_HANG: Left = Left { ticks: 5, wants: 4, hangs: 1, ..NONE };
const SESSIONS_FLICKER: Left = Left { ticks: 5, wants: 3, flickers: 2, ..NONE };
const WAITERS_FLICKER: Left = Left { ticks: 4, wants: 3, hangs: 1, flickers: 1, ..NONE };
const KEEPERS_DIE: Left = Left { ticks: 6, wants: 2, keeps: 1, deaths: 1, ..NONE };
const KEEPERS_HANG: Left = Left { ticks: 6, wants: 2, keeps: 1, hangs: 1, ..NONE };
const SERVER_PAUSES: Left = Left { ticks: 5, wants: 3, hangs: 1, pauses: 1, ..NONE };
const VAULT_STALLS: Left = Left { ticks: 5, wants: 3, hangs: 1, stalls: 3, ..NONE };
const WAITERS_LEAVE: Left = Left { ticks: 5, wants: 3, hangs: 1, cuts: 1, leaves: 2, ..NONE };
const READERS_REDUCE: Left = Left { ticks: 4, wants: 3, cuts: 1, reduces: 1, ..NONE };
const RUNS: [Left; 9] = [
    HOSTS_HANG,
    SESSIONS_FLICKER,
    WAITERS_FLICKER,
    KEEPERS_DIE,
    KEEPERS_HANG,
    SERVER_PAUSES,
    VAULT_STALLS,
    WAITERS_LEAVE,
    READERS_REDUCE,
];

#[test]
fn requests_are_granted_in_time_and_in_order() {
    let (mut states, mut seen) = (0_usize, std::collections::BTreeSet::new());
    for left in RUNS {
        let before = states;
        states += crate::explored(Progress { without: Without::Nothing, left }, &mut seen);
        println!("{} states with {left:?}", states - before);
    }
    println!("{states} states of progress");
    assert_eq!(seen.len(), 5, "not everything happens that can: {seen:?}");
    assert!(states > 10_000);
}

/// Each rule that is left out breaks the promise.
#[test]
fn every_rule_of_progress_is_needed() {
    let rules = [
        (Without::Recall, HOSTS_HANG),
        (Without::Order, HOSTS_HANG),
        (Without::Place, WAITERS_FLICKER),
        (Without::Release, HOSTS_HANG),
        (Without::Good, SESSIONS_FLICKER),
        (Without::Silence, HOSTS_HANG),
        (Without::Waiting, WAITERS_LEAVE),
        (Without::Keeping, KEEPERS_DIE),
        (Without::Dying, KEEPERS_DIE),
        (Without::Letting, KEEPERS_HANG),
        (Without::Away, SERVER_PAUSES),
        (Without::Stall, VAULT_STALLS),
        (Without::Rest, VAULT_STALLS),
    ];
    for (without, left) in rules {
        let model = Progress { without, left };
        let checker = model.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
        let properties = checker.model().properties().into_iter();
        let mut broken = properties.filter(|property| property.expectation == Expectation::Always);
        let broken = broken.find_map(|property| Some((property.name, checker.discovery(property.name)?)));
        let Some((name, path)) = broken else { panic!("without {without:?} nothing is broken in {left:?}") };
        println!("without {without:?}: {name}: {:?}", path.last_state().wrong);
    }
}
