mod locks;

use super::*;
use crate::audit::Event;
use crate::bounds::{Bounds, LOCKS_OF_HOST};
use crate::state::Pending;
use lamassu_anchor::row::{Content, Sealed};
use lamassu_anchor::table::{MemoryTable, Space, Visit};
use lamassu_anchor::{Digest, ObjectId, Revision, Row, Token, TokenKey, VaultRow};
use lamassu_keys::unix_now;
use lamassu_lease::locks::{Lock, LockAnswer, LockKey, LockKind, Range};
use lamassu_lease::{Grant, RequestNo};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::mpsc::{Receiver, channel};

pub(crate) const ID: VaultId = VaultId([7; 16]);

/// The table of a vault's anchor.
pub(crate) fn table() -> Arc<dyn Table> {
    let table = Arc::new(MemoryTable::default());
    let of_root = Sealed::Is(Digest([1; 32]));
    let content = Content::Dir { record: of_root, parent: ObjectId::ROOT, name: Token([0; 16]) };
    let root = Row { mode: 0o700, uid: 0, gid: 0, links: 1, content, attributes: of_root };
    drop(Anchor::create(table.clone(), VaultRow::new(ID, TokenKey::new([1; 32])), root).unwrap());
    table.commit(&[Head([3; 32]).change()]).unwrap();
    table
}

/// A host that may use the vault.
fn admitted(state: &State) -> Caller {
    admitted_as("one", state)
}

fn admitted_as(name: &str, state: &State) -> Caller {
    joined_as(name, &[b"key of ", name.as_bytes()].concat(), state)
}

pub(crate) fn joined_as(name: &str, key: &[u8], state: &State) -> Caller {
    let caller = Caller { name: name.into(), key: key.into() };
    let (vaults, token) = (BTreeSet::from([ID.to_string()]), [b"token of ", name.as_bytes()].concat());
    state.put_token(&token, &Pending { host: name.into(), until: unix_now() + 100, vaults }, 0).unwrap();
    assert!(state.use_token(&token, unix_now(), &caller.key).unwrap().is_ok());
    caller
}

/// What vaults use, and a host that may use the vault.
pub(crate) fn common(dir: &std::path::Path) -> (Common, Caller) {
    let state = Arc::new(State::make(dir).unwrap());
    let caller = admitted(&state);
    let (terms, metrics) = (Terms::DEFAULT, Metrics::default());
    std::fs::write(dir.join("policy.toml"), "").unwrap();
    let policies = Arc::new(Policies::start(dir, terms, (state.clone(), metrics.clone())).unwrap());
    (
        Common {
            state,
            metrics,
            policies,
            pauses: Arc::default(),
            bounds: Bounds::new(9),
            numbers: Numbers::default(),
            arrivals: Arrivals::default(),
        },
        caller,
    )
}

pub(crate) fn open(table: Arc<dyn Table>, common: &Common) -> Vault {
    Vault::open(ID, table, Terms::DEFAULT, common.clone()).unwrap_or_else(|_| panic!("the vault opens"))
}

/// A vault that one host may use.
fn vault(dir: &std::path::Path) -> (Vault, Caller) {
    let (common, caller) = common(dir);
    (open(table(), &common), caller)
}

pub(crate) fn begin(vault: &Vault, caller: &Caller) -> (Line, Receiver<Told>) {
    let (replies, told) = channel(REPLIES_MAX);
    let begun = vault.begin(caller, Use::ByTurns, SessionId(u64::MAX), replies);
    (begun.unwrap_or_else(|_| panic!("a session begins")).line, told)
}

/// A session that uses the vault in this way; one that writes or reads asks for its lease at once.
pub(crate) fn begin_to(
    vault: &Vault,
    caller: &Caller,
    used: Use,
    replaces: SessionId,
) -> (Line, Grant, Receiver<Told>) {
    let (replies, mut told) = channel(REPLIES_MAX);
    let line = vault.begin(caller, used, replaces, replies).unwrap_or_else(|_| panic!("a session begins")).line;
    let mode = if used == Use::Reads { Mode::Shared } else { Mode::Exclusive };
    assert!(vault.call(line, Call::Acquire { request: RequestNo(1), object: VAULT, mode }).is_ok());
    match told.try_recv() {
        Ok((Reply::Granted { grant, .. }, _)) => (line, grant, told),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn row(number: u8) -> Change {
    Change { space: Space::Open, key: vec![number; 8], value: Some(Vec::new()) }
}

/// A policy may forbid its host to write. An honest one keeps the vault to read at once (R8 of `docs/sharing.md`).
#[test]
fn a_session_that_reads_changes_nothing_although_it_gets_an_abandoned_vault_exclusively() {
    let dir = tempfile::tempdir().unwrap();
    let (vault, caller) = vault(dir.path());
    let none = SessionId(u64::MAX);
    let (writer, its, _told) = begin_to(&vault, &caller, Use::Writes, none);
    let head = vault.commit(&caller, (writer.session, its.number), Head([3; 32]), &[row(1)]).unwrap();
    let (reader, grant, _told) = begin_to(&vault, &caller, Use::Reads, writer.session);
    assert_eq!(grant.mode, Mode::Exclusive, "it takes over");
    let commits = || vault.commit(&caller, (reader.session, grant.number), head, &[row(2)]);
    let gives_up = || {
        let may_be = |inner: &Inner| inner.may_change(reader.session, &caller.name);
        vault.give_up(may_be, || panic!("it is put away"))
    };
    assert!(matches!(commits(), Err(Refused::Ended)) && matches!(gives_up(), Err(Refused::Ended)));
    assert!(vault.rows(&caller, reader.session, None).is_ok_and(|rows| rows.head == head));
    for call in [Call::TakenOver { grant }, Call::Release { grant, keeps: Some(Mode::Shared) }] {
        assert!(vault.call(reader, call).is_ok());
    }
    assert!(matches!(commits(), Err(Refused::Ended)));
    let (_, grant, _told) = begin_to(&vault, &caller, Use::Reads, none);
    assert_eq!(grant.mode, Mode::Shared, "both read");
    assert!(vault.rows(&caller, reader.session, None).is_ok());
}

/// A server with many vaults may open this one more than a term before it answers.
#[test]
fn a_session_is_not_silent_before_its_host_can_reach_the_server() {
    for begins in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (common, caller) = common(dir.path());
        let (session, _, _told) = begin_to(&open(table(), &common), &caller, Use::Writes, SessionId(u64::MAX));
        let vault = open(table(), &common);
        let (durable, long_ago) = (common.state.leases(&ID).unwrap().0, Millis(now().0.saturating_sub(3_600_000)));
        vault.inner.lock().leases = Server::start(Terms::DEFAULT, durable, long_ago).0;
        if begins {
            common.pauses.begin();
        }
        assert!(vault.tick().is_ok());
        assert_eq!(vault.inner.lock().leases.is_alive(session.session), begins);
    }
}

/// A table whose commits fail, and are found when it is opened again, or not.
struct Failing(Arc<dyn Table>, bool);

impl Table for Failing {
    fn get(&self, space: Space, key: &[u8]) -> Result<Option<Vec<u8>>, AnchorError> {
        self.0.get(space, key)
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> Result<(), AnchorError> {
        self.0.scan(space, prefix, visit)
    }

    fn commit(&self, changes: &[Change]) -> Result<(), AnchorError> {
        if self.1 {
            self.0.commit(changes)?;
        }
        Err(AnchorError::Broken)
    }
}

/// Each keeps the table open, and it could not be opened again.
#[test]
fn a_vault_whose_commit_fails_ends_connections_and_rows_under_way() {
    let dir = tempfile::tempdir().unwrap();
    let (common, caller) = common(dir.path());
    let vault = open(Arc::new(Failing(table(), false)), &common);
    let (writer, grant, mut told) = begin_to(&vault, &caller, Use::Writes, SessionId(u64::MAX));
    let rows = vault.rows(&caller, writer.session, None).unwrap_or_else(|_| panic!("it has a lease"));
    assert_eq!(*rows.standing.borrow(), Standing::Good);
    assert!(vault.commit(&caller, (writer.session, grant.number), rows.head, &[row(1)]).is_err());
    assert_eq!((*rows.standing.borrow(), vault.standing()), (Standing::InDoubt, Standing::InDoubt));
    assert_eq!(told.try_recv(), Err(TryRecvError::Disconnected));
    assert!(matches!(vault.call(writer, Call::Heartbeat { beat: 1 }), Err(Refused::NotNow)));
}

/// A record of the log may be durable although its flush has failed, and the table says that it was not made. The host
/// would else take back what the vault that is opened next has.
#[test]
fn a_commit_that_fails_at_the_disk_is_in_doubt_until_it_is_repeated() {
    for is_made in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (common, caller) = common(dir.path());
        let (table, none) = (table(), SessionId(u64::MAX));
        let failing = open(Arc::new(Failing(table.clone(), is_made)), &common);
        let (line, grant, _told) = begin_to(&failing, &caller, Use::Writes, none);
        let by = (line.session, grant.number);
        let commit = |vault: &Vault| vault.commit(&caller, by, Head([3; 32]), &[row(1)]);
        // Of the other errors the host takes all but a few for a refusal.
        assert!(matches!(commit(&failing), Err(Refused::InDoubt(_))));
        assert_eq!(failing.standing(), Standing::InDoubt);
        let vault = open(table, &common);
        assert_eq!(vault.head() != Head([3; 32]), is_made);
        assert!(vault.resumes(&caller, line.session, report(1, &[grant]), channel(REPLIES_MAX).0).is_ok());
        let head = commit(&vault).unwrap();
        assert_eq!((vault.head(), commit(&vault).unwrap()), (head, head));
    }
}

/// Whoever opens a vault again and again could else come to the numbers that a restored server gives.
#[test]
fn however_often_a_vault_is_opened_a_start_of_the_server_has_one_run_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let (common, caller) = common(dir.path());
    let backup = common.state.copied().unwrap();
    let runs = || common.state.vaults().unwrap().into_iter().map(|(_, runs)| runs).collect::<Vec<_>>();
    let mut last = SessionId(0);
    let mut uses_it_once = |common: &Common| {
        let vault = open(table(), common);
        let (line, grant, _told) = begin_to(&vault, &caller, Use::Writes, SessionId(u64::MAX));
        assert!(line.session > last && grant.number.0 > line.session.0);
        last = SessionId(grant.number.0);
        assert!(vault.call(line, Call::Leave).is_ok() && vault.close_if_unused(0));
        last
    };
    for _ in 0..20 {
        uses_it_once(&common);
        assert_eq!(runs(), [1]);
    }
    let last = uses_it_once(&Common { numbers: Numbers::default(), ..common.clone() });
    assert_eq!(runs(), [2], "the server has started again");
    let restored = tempfile::tempdir().unwrap();
    let restored = State::make(restored.path()).unwrap();
    restored.fill(&backup, &[ID]).unwrap();
    let (mut leases, _) = Server::start(Terms::DEFAULT, restored.leases(&ID).unwrap().0, now());
    assert!(leases.join(now()).0 > last);
}

/// Streams keep a vault that was given up. Its durable leases have the id of the vault, as those of the next one do.
#[test]
fn a_vault_that_was_given_up_changes_nothing_of_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let (common, caller) = common(dir.path());
    let (state, none) = (&common.state, SessionId(u64::MAX));
    let old = open(table(), &common);
    let (writer, grant, mut told) = begin_to(&old, &caller, Use::Writes, none);
    let may_be = |inner: &Inner| inner.may_change(writer.session, &caller.name);
    let taken = Event::AnchorTaken { host: caller.name.clone(), vault: ID.to_string() };
    assert!(old.give_up(may_be, || Ok(state.note_not_kept(&ID, taken)?)).is_ok());
    assert_eq!(told.try_recv(), Err(TryRecvError::Disconnected), "its connection has ended");
    let (durable, sessions) = state.leases(&ID).unwrap();
    assert!(durable.exclusive.is_empty() && sessions.is_empty());
    let entries = state.audit(0, 100).unwrap().entries;
    assert_eq!(
        entries.iter().filter(|one| one.entry.contains("session-ended") && one.entry.contains("left")).count(),
        1
    );
    let new = open(table(), &common);
    let (other, ..) = begin_to(&new, &caller, Use::Writes, none);
    for call in [Call::Heartbeat { beat: 1 }, Call::Release { grant, keeps: None }, Call::Leave] {
        assert!(matches!(old.call(writer, call), Err(Refused::Ended)));
    }
    let (replies, _told) = channel(1);
    assert!(matches!(old.begin(&caller, Use::ByTurns, none, replies), Err(Refused::Unknown)));
    assert!(old.tick().is_ok());
    let (durable, sessions) = state.leases(&ID).unwrap();
    assert!(sessions.iter().map(|one| one.session).eq([other.session]));
    assert!(durable.exclusive.values().map(|(session, _)| *session).eq([other.session]));
}

/// A host that is told that its session has ended begins another one, and has lost its locks.
#[test]
fn who_asks_for_rows_before_it_has_reported_its_lease_is_to_ask_again() {
    let dir = tempfile::tempdir().unwrap();
    let (common, caller) = common(dir.path());
    let before = open(table(), &common);
    let (line, mut told) = begin(&before, &caller);
    let acquire = Call::Acquire { request: RequestNo(1), object: VAULT, mode: Mode::Shared };
    assert!(before.call(line, acquire).is_ok());
    let Ok((Reply::Granted { grant, .. }, _)) = told.try_recv() else { panic!("nobody else has it") };
    let vault = open(table(), &common);
    let rows = || vault.rows(&caller, line.session, None);
    assert!(matches!(rows(), Err(Refused::NotNow)));
    let resumes = |report| vault.resumes(&caller, line.session, report, channel(REPLIES_MAX).0);
    assert!(resumes(report(1, &[grant])).is_ok() && rows().is_ok_and(|rows| rows.head == Head([3; 32])));
    assert!(resumes(report(2, &[])).is_ok() && matches!(rows(), Err(Refused::Ended)), "it has none");
}

pub(crate) fn report(number: u64, held: &[Grant]) -> Call {
    Call::Resume { number, held: held.to_vec(), kept: Vec::new(), taken_over: Vec::new(), locks: Vec::new() }
}

const KEY: LockKey = LockKey { file: Object(9), kind: LockKind::Range, owner: 1 };

fn lock(number: u64) -> Call {
    let lock = Lock { key: KEY, range: Range::ALL, mode: Mode::Exclusive, pid: 1 };
    Call::Lock { request: RequestNo(number), lock, waits: true }
}

/// A host takes what a new connection says for the state after its report. An answer between the two would give it a
/// lock that it does not name, and that is released.
#[test]
fn a_new_connection_hears_nothing_that_was_decided_before_its_report() {
    const CONNECTIONS: u64 = 100_000;
    let dir = tempfile::tempdir().unwrap();
    let (vault, caller) = vault(dir.path());
    let ((mut line, _), (other, mut heard)) = (begin(&vault, &caller), begin(&vault, &caller));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // The other session locks and unlocks: each unlock answers a request that waits.
        scope.spawn(|| {
            for number in 0.. {
                for call in [lock(number), Call::Unlock { request: RequestNo(number), key: KEY, range: Range::ALL }] {
                    assert!(vault.call(other, call).is_ok());
                    // Without sleeping: it must be quick to come between.
                    while heard.try_recv().is_err() {
                        std::thread::yield_now();
                    }
                }
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let mut reports = 0;
        let mut resume = || {
            let (replies, mut told) = channel(REPLIES_MAX);
            reports += 1;
            let begun = vault.resumes(&caller, line.session, report(reports, &[]), replies);
            line = begun.unwrap_or_else(|_| panic!("the session lasts")).line;
            // Nothing was asked on it yet.
            (line, told.try_recv().ok())
        };
        let (mut line, _) = resume();
        let told = (0..CONNECTIONS).find_map(|number| {
            assert!(vault.call(line, lock(number)).is_ok());
            let (next, told) = resume();
            line = next;
            told
        });
        is_over.store(true, Ordering::Relaxed);
        resume();
        assert_eq!(told, None);
    });
}

/// It waits for a vault whose disk is slow, for longer than a term: the server reads nothing more of it meanwhile.
#[test]
fn a_session_whose_message_waits_for_the_vault_does_not_end() {
    for (host, lasts) in [("one", true), ("another", false)] {
        let dir = tempfile::tempdir().unwrap();
        let (common, caller) = common(dir.path());
        let (session, ..) = begin_to(&open(table(), &common), &caller, Use::Writes, SessionId(u64::MAX));
        let vault = open(table(), &common);
        let (durable, long_ago) = (common.state.leases(&ID).unwrap().0, Millis(now().0.saturating_sub(3_600_000)));
        vault.inner.lock().leases = Server::start(Terms::DEFAULT, durable, long_ago).0;
        let arrived = common.arrivals.one(ID, host, session.session);
        assert!(vault.tick().is_ok());
        assert_eq!(vault.inner.lock().leases.is_alive(session.session), lasts, "nobody speaks for others");
        drop(arrived);
        assert!(common.arrivals.first(ID, host, session.session).is_none());
    }
}

/// What the vault was at work with may be a commit of the holder, who has to commit more before it can release it.
#[test]
fn a_holder_whose_deadline_passes_while_the_vault_is_at_work_commits_and_releases_it_then() {
    let (terms, mode) = (Terms::DEFAULT, Mode::Exclusive);
    let dir = tempfile::tempdir().unwrap();
    let (common, caller) = common(dir.path());
    let vault = open(table(), &common);
    let ((holder, mut told), (other, mut heard)) = (begin(&vault, &caller), begin(&vault, &caller));
    let acquire = |number| Call::Acquire { request: RequestNo(number), object: VAULT, mode };
    assert!(vault.call(holder, acquire(1)).is_ok());
    let Ok((Reply::Granted { grant, .. }, head)) = told.try_recv() else { panic!("nobody else has it") };
    // The other one has asked for it long ago, and then the work began.
    let (durable, long_ago) = (common.state.leases(&ID).unwrap().0, Millis(now().0.saturating_sub(3_600_000)));
    let mut leases = Server::start_again(terms, durable, 100, long_ago);
    for (line, held) in [(holder, &[grant][..]), (other, &[])] {
        let _ = leases.call(line.session, report(1, held), long_ago);
    }
    let asked = long_ago + terms.min_hold();
    let recalled = leases.call(other.session, acquire(1), asked).replies;
    assert!(matches!(recalled[..], [(to, Reply::Recall { .. })] if to == holder.session), "{recalled:?}");
    {
        let inner = &mut *vault.inner.lock();
        (inner.leases, inner.looked) = (leases, asked);
    }
    let _arrived = [holder, other].map(|line| common.arrivals.one(ID, &caller.name, line.session));
    assert!(vault.call(holder, Call::Heartbeat { beat: 1 }).is_ok());
    assert_eq!(told.try_recv().map(|(reply, _)| reply), Ok(Reply::Alive { beat: 1 }));
    let head = vault.commit(&caller, (holder.session, grant.number), head, &[row(1)]).unwrap();
    assert!(vault.call(holder, Call::Release { grant, keeps: None }).is_ok());
    let granted = heard.try_recv();
    assert!(matches!(granted, Ok((Reply::Granted { takes_over: false, .. }, its)) if its == head), "{granted:?}");
}

/// What a vault counts goes up from each commit to the next, not only since the vault was opened here.
#[test]
fn a_commit_takes_nothing_back_of_what_an_earlier_one_has_counted() {
    let dir = tempfile::tempdir().unwrap();
    let (vault, caller) = vault(dir.path());
    let (line, grant, _told) = begin_to(&vault, &caller, Use::Writes, SessionId(u64::MAX));
    let first = vault.inner.lock().row.clone();
    let mut head = vault.head();
    let mut commit = |revision: u64, objects: u64| {
        let revision = Revision(first.revision.0 + revision);
        let row = VaultRow { revision, next_object: ObjectId(first.next_object.0 + objects), ..first.clone() };
        let change = Change { space: Space::Vault, key: b"vault".to_vec(), value: Some(row.encode()) };
        let made = vault.commit(&caller, (line.session, grant.number), head, &[change]);
        made.map(|after| head = after).map_err(|why| matches!(why, Refused::NoAnchor))
    };
    assert_eq!(commit(7, 9), Ok(()));
    for (revision, objects) in [(6, 9), (7, 9), (8, 8)] {
        assert_eq!(commit(revision, objects), Err(true), "{revision}, {objects}");
    }
    assert_eq!(commit(8, 9), Ok(()));
}

/// Why sessions have ended, as the audit log says.
pub(crate) fn ends(common: &Common) -> Vec<String> {
    let entries = common.state.audit(0, 100).unwrap().entries;
    let ended = entries.into_iter().filter(|one| one.entry.contains("session-ended"));
    let why = |entry: &str| entry.split_once("\"why\":\"").unwrap().1.split('"').next().unwrap().to_owned();
    ended.map(|one| why(&one.entry)).collect()
}

/// The bytes of a connection that was given up may come when a later one is used, and then they are a report.
#[test]
fn a_report_of_an_earlier_connection_that_comes_late_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let (common, caller) = common(dir.path());
    let vault = open(table(), &common);
    let (line, _told) = begin(&vault, &caller);
    let resumes = |vault: &Vault, report, replies| vault.resumes(&caller, line.session, report, replies);
    let (replies, mut told) = channel(REPLIES_MAX);
    let newest = resumes(&vault, report(2, &[]), replies).unwrap_or_else(|_| panic!("the session lasts")).line;
    assert!(vault.call(newest, Call::Acquire { request: RequestNo(1), object: VAULT, mode: Mode::Exclusive }).is_ok());
    let Ok((Reply::Granted { grant, .. }, _)) = told.try_recv() else { panic!("nobody else has it") };
    assert!(vault.call(newest, lock(2)).is_ok() && told.try_recv().is_ok());
    let before = vault.inner.lock().leases.clone();
    let claims = Grant { number: lamassu_lease::GrantNo(7), ..grant };
    for late in [report(1, &[]), report(2, &[]), report(1, &[claims]), report(0, &[])] {
        assert!(matches!(resumes(&vault, late, channel(1).0), Err(Refused::NotNow)));
    }
    assert!(vault.inner.lock().leases == before);
    assert!(vault.call(newest, Call::Heartbeat { beat: 1 }).is_ok());
    assert_eq!(told.try_recv().map(|(reply, _)| reply), Ok(Reply::Alive { beat: 1 }));
    // Nor after the vault was opened again, before and after the next report.
    let again = open(table(), &common);
    for (number, is_newer) in [(2, false), (3, true), (3, false), (1, false), (4, true)] {
        let resumed = resumes(&again, report(number, &[grant]), channel(REPLIES_MAX).0);
        assert!(if is_newer { resumed.is_ok() } else { matches!(resumed, Err(Refused::NotNow)) }, "{number}");
    }
    assert!(resumes(&again, report(5, &[claims]), channel(REPLIES_MAX).0).is_ok());
    assert_eq!(ends(&common), ["misreported"]);
}

/// The head of the vault is the same in both, if nobody has committed in between.
#[test]
fn a_commit_of_an_earlier_turn_that_comes_late_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let (vault, caller) = vault(dir.path());
    let (line, mut told) = begin(&vault, &caller);
    let mut turn = |number| {
        let acquire = Call::Acquire { request: RequestNo(number), object: VAULT, mode: Mode::Exclusive };
        assert!(vault.call(line, acquire).is_ok());
        let Ok((Reply::Granted { grant, .. }, _)) = told.try_recv() else { panic!("nobody else has it") };
        grant
    };
    let commit = |grant: Grant| vault.commit(&caller, (line.session, grant.number), Head([3; 32]), &[row(1)]);
    let first = turn(1);
    assert!(vault.call(line, Call::Release { grant: first, keeps: None }).is_ok());
    let second = turn(2);
    assert!(matches!(commit(first), Err(Refused::Ended)) && vault.head() == Head([3; 32]));
    assert!(commit(second).is_ok_and(|head| head == vault.head()));
}

/// A state that is durable elsewhere, until it fails.
#[derive(Default)]
struct Upstream(AtomicBool);

impl crate::state::Upstream for Upstream {
    fn commit(&self, _: &[crate::writing::RowChange]) -> crate::Result<()> {
        match self.0.load(Ordering::Relaxed) {
            true => Err(crate::ServerError::Anchor(AnchorError::Broken)),
            false => Ok(()),
        }
    }
}

/// What its leases say then may not be durable. The server takes a moment to end.
#[test]
fn a_vault_whose_state_was_not_written_answers_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let (mut common, _) = common(dir.path());
    let upstream = Arc::new(Upstream::default());
    common.state = Arc::new(State::copy_of("elsewhere".into(), upstream.clone(), &|_| Ok(())).unwrap());
    let caller = admitted(&common.state);
    let vault = open(table(), &common);
    let (line, mut told) = begin(&vault, &caller);
    upstream.0.store(true, Ordering::Relaxed);
    let acquire = |mode| Call::Acquire { request: RequestNo(1), object: VAULT, mode };
    assert!(matches!(vault.call(line, acquire(Mode::Exclusive)), Err(Refused::Lost(_))));
    assert_eq!(told.try_recv().map(|(reply, _)| reply), Err(TryRecvError::Disconnected));
    for call in [Call::Heartbeat { beat: 1 }, acquire(Mode::Shared)] {
        assert!(matches!(vault.call(line, call), Err(Refused::NotNow)));
    }
    assert!(matches!(vault.rows(&caller, line.session, None), Err(Refused::NotNow)));
}
