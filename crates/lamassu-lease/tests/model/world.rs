//! The world of the model: the file, the messages, the hosts, and what each of them does next.

use super::{Sharing, Without, as_newest, without_exclusion, without_grace};
use lamassu_lease::client::{Client, Do, Op, Ticket};
use lamassu_lease::server::{Durable, Server, Step};
use lamassu_lease::{Call, Millis, Mode, Object, Reply, SessionId};
use std::collections::{BTreeSet, VecDeque};

pub const FILE: Object = Object(7);
pub const HOSTS: usize = 2;
/// Messages in flight in one direction.
pub const IN_FLIGHT_MAX: usize = 3;

/// Content of the file; each write has a new one, larger than all before.
pub type Value = u8;

/// What the server durably knows of the file: its row in the anchor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    pub inode: usize,
    pub committed: Value,
    /// A session that may have changed it since.
    pub open: Option<SessionId>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Inode {
    pub value: Value,
    /// Who wrote it, as its stamp says.
    pub by: Option<SessionId>,
}

/// A write that the store has not carried out yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Late {
    pub inode: usize,
    pub value: Value,
    pub by: SessionId,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Connection {
    pub up: VecDeque<Call>,
    pub down: VecDeque<Reply>,
    /// The server answers by it: the session has resumed on it.
    pub is_known: bool,
}

/// What an operation is about to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Work {
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
    pub fn of(ticket: Ticket) -> Work {
        match ticket.mode {
            Mode::Shared => Work::Read(ticket),
            Mode::Exclusive => Work::Write(ticket),
        }
    }

    /// The operation.
    pub fn ticket(&self) -> Option<Ticket> {
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
pub struct Host {
    pub client: Client,
    pub connection: Option<Connection>,
    /// Operations that wait for a lease: what they want.
    pub asked: Option<Mode>,
    pub work: Option<Work>,
    /// What this host wrote and has not committed.
    pub dirty: Option<Value>,
    /// What it wrote last: as long as its session is good others see that.
    pub wrote: Value,
    /// When it may send a heartbeat.
    pub next_beat: Millis,
    /// It says that it keeps its lease.
    pub is_keeping: bool,
    /// What is cached of the file, under its lease: the row as it was when the lease came.
    pub row: Option<Row>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub now: Millis,
    pub server: Option<Server>,
    pub durable: Durable,
    pub row: Row,
    pub inodes: Vec<Inode>,
    pub late: BTreeSet<Late>,
    /// Reports that are still on the way by connections that have broken.
    pub late_reports: Vec<(SessionId, Call)>,
    pub hosts: [Option<Host>; HOSTS],
    pub next_value: Value,
    /// The newest value whose fsync has returned.
    pub acknowledged: Value,
    /// What went wrong.
    pub wrong: Option<&'static str>,
    /// What is left to happen.
    pub left: Left,
    /// What has happened, for the properties that say that it can.
    pub seen: Seen,
}

/// How often what can happen happens at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Left {
    pub ticks: u8,
    pub beats: u8,
    pub reads: u8,
    pub writes: u8,
    pub breaks: u8,
    pub host_crashes: u8,
    pub server_crashes: u8,
    pub keeps: u8,
    pub late_reports: u8,
    pub revokes: u8,
    pub leaves: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Seen {
    pub took_over: bool,
    pub kept_late: bool,
    pub restarted_with_lease: bool,
    pub good_again: bool,
    pub kept: bool,
    pub late_report: bool,
    pub left_granted: bool,
}

impl World {
    /// Has the server do something: durable first, then told.
    pub fn serve(&mut self, model: &Sharing, act: impl FnOnce(&mut Server, Millis) -> Step) {
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
    pub fn act(&mut self, model: &Sharing, at: usize, all: Vec<Do>) {
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
    pub fn is_accepted(&self, model: &Sharing, session: SessionId) -> bool {
        let holds = |server: &Server| server.may_change(session, FILE) || model.without == Without::Fence;
        self.server.as_ref().is_some_and(holds)
    }

    pub fn is_late_of(&self, session: SessionId) -> bool {
        self.late.iter().any(|late| late.by == session)
    }

    /// The next step of what a host does.
    pub fn go(&mut self, model: &Sharing, at: usize) -> Option<()> {
        let host = self.hosts[at].as_ref()?;
        let (session, work) = (host.client.session(), host.work.clone()?);
        match work {
            Work::Read(ticket) => self.read(at, ticket)?,
            Work::HasRead(ticket, value) => self.has_read(model, at, ticket, value)?,
            // The store keeps the order of one host's writes of one page.
            Work::Write(_) if self.is_late_of(session) => return None,
            Work::Write(ticket) => self.write(model, at, session, ticket)?,
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
            Work::TakeOver(by) => self.take_over(model, at, session, by)?,
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

    /// Reads the value that the store has.
    pub fn read(&mut self, at: usize, ticket: Ticket) -> Option<()> {
        let host = self.hosts[at].as_mut()?;
        let row = host.row.clone().unwrap_or_else(|| self.row.clone());
        // A host sees its own writes, wherever they are.
        let value = host.dirty.unwrap_or(self.inodes[row.inode].value);
        host.work = Some(Work::HasRead(ticket, value));
        // What the row does not know, and this host did not write, is refused: a false alarm, if the session
        // is good.
        if host.dirty.is_none() && value != row.committed && host.client.is_good(self.now) {
            self.wrong = Some("false alarm");
        }
        Some(())
    }

    /// The operation ends, and the value counts if the lease is still good.
    pub fn has_read(&mut self, model: &Sharing, at: usize, ticket: Ticket, value: Value) -> Option<()> {
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
        Some(())
    }

    /// Sends a write to the store, which may arrive at any later time.
    pub fn write(&mut self, model: &Sharing, at: usize, session: SessionId, ticket: Ticket) -> Option<()> {
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
        Some(())
    }

    /// Copies a file that another session may still write to.
    pub fn take_over(&mut self, model: &Sharing, at: usize, session: SessionId, by: Option<Ticket>) -> Option<()> {
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
        Some(())
    }

    /// Commits what is dirty; `clean`: nothing more will change. False: not accepted.
    pub fn commit(&mut self, model: &Sharing, at: usize, clean: bool) -> Option<bool> {
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

    pub fn start_server(&mut self, model: &Sharing) {
        let (server, _) = Server::start(model.terms(), self.durable.clone(), self.now);
        self.seen.restarted_with_lease |= !self.durable.exclusive.is_empty();
        self.server = Some(server);
        self.serve(model, |_, _| Step::default());
    }

    pub fn crash_server(&mut self) {
        self.server = None;
        self.hosts.iter_mut().flatten().for_each(|host| host.connection = None);
    }

    /// A host that waits leaves, and withdraws its request by that. It may have been granted meanwhile.
    pub fn leave(&mut self, model: &Sharing, at: usize) -> Option<()> {
        let session = self.hosts[at].take()?.client.session();
        self.seen.left_granted |= self.server.as_ref()?.mode_of(session, FILE).is_some();
        self.serve(model, |server, now| server.call(session, Call::Leave, now));
        Some(())
    }

    /// A connection breaks. What was sent by it may be on the way.
    pub fn break_connection(&mut self, at: usize) -> Option<()> {
        let host = self.hosts[at].as_mut()?;
        let first = host.connection.take()?.up.pop_front();
        if let Some(report @ Call::Resume { .. }) = first.filter(|_| self.left.late_reports > 0) {
            self.left.late_reports -= 1;
            self.late_reports.push((host.client.session(), report));
        }
        Some(())
    }

    /// It arrives, whatever has come since.
    pub fn late_report(&mut self, model: &Sharing, number: usize) {
        let (session, report) = self.late_reports.remove(number);
        let number = if let Call::Resume { number, .. } = report { number } else { 0 };
        self.seen.late_report |= self.server.as_ref().is_some_and(|server| server.is_late(session, number));
        self.hear(model, session, report);
    }

    fn hear(&mut self, model: &Sharing, session: SessionId, call: Call) {
        let is_granted_anyway = model.without == Without::Exclusion && matches!(call, Call::Acquire { .. });
        self.serve(model, |server, now| {
            let call = match model.without {
                Without::Number | Without::Grace => as_newest(server, session, call),
                _ => call,
            };
            let mut step = if is_granted_anyway { without_exclusion(server, session, now) } else { Step::default() };
            let called = server.call(session, call, now);
            step.changes.extend(called.changes);
            step.replies.extend(called.replies);
            step
        });
    }

    /// A call of a host arrives.
    pub fn up(&mut self, model: &Sharing, at: usize) -> Option<()> {
        let host = self.hosts[at].as_mut()?;
        let session = host.client.session();
        let connection = host.connection.as_mut()?;
        let call = connection.up.pop_front()?;
        connection.is_known |= matches!(call, Call::Resume { .. });
        self.hear(model, session, call);
        Some(())
    }

    /// A reply of the server arrives.
    pub fn down(&mut self, model: &Sharing, at: usize) -> Option<()> {
        let host = self.hosts[at].as_mut()?;
        let reply = host.connection.as_mut()?.down.pop_front()?;
        let (was_good, is_granted) = (host.client.is_good(self.now), matches!(reply, Reply::Granted { .. }));
        let is_answered = matches!(reply, Reply::Alive { .. });
        let all = host.client.reply(reply, self.now);
        self.seen.kept |= is_answered && host.is_keeping && host.client.is_recalled(FILE);
        self.seen.good_again |= !was_good && host.client.is_good(self.now);
        if is_granted {
            host.row = None; // whatever it was before
        }
        self.act(model, at, all);
        Some(())
    }

    pub fn join(&mut self, model: &Sharing, at: usize) {
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
            is_keeping: false,
            row: None,
        });
        self.serve(model, |_, _| step);
    }

    /// Whether a host waits, and the server has heard all that it said.
    pub fn only_waits(&self, at: usize) -> bool {
        let is_heard = |connection: &Connection| connection.is_known && connection.up.is_empty();
        self.server.is_some()
            && self.hosts[at].as_ref().is_some_and(|host| {
                let waits = host.asked.is_some() && host.work.is_none() && host.client.mode_of(FILE).is_none();
                waits && host.connection.as_ref().is_some_and(is_heard)
            })
    }

    pub fn begin(&mut self, model: &Sharing, at: usize, mode: Mode) -> Option<()> {
        let host = self.hosts[at].as_mut()?;
        host.asked = Some(mode);
        let all = host.client.begin(Op(0), FILE, mode, self.now);
        self.act(model, at, all);
        Some(())
    }
}
