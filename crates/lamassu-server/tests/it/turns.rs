//! Hosts that have one vault by turns: each by its own connection and its own copy, as a mount has them.

use crate::common::raw::*;
use crate::common::*;
use lamassu_anchor::table::{Change, Space, Table};
use lamassu_anchor::{Anchor, AnchorError, ServerFault};
use lamassu_format::header::VaultId;
use lamassu_lease::locks::{Asked, Lock, LockKey, LockKind, Outcome, Range};
use lamassu_lease::{Mode, Object};
use lamassu_rpc::host::{Connection, Mirrored, Told, Turn, Turns};
use lamassu_rpc::proto::anchors_client::AnchorsClient;
use lamassu_rpc::proto::sessions_client::SessionsClient;
use lamassu_rpc::proto::{self, down, up::Said};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

/// For whatever comes at all: this machine may be slow.
const LONG: Duration = Duration::from_secs(120);
/// What a process of its own is told, to be a host.
const HOST_ENV: &str = "LAMASSU_TEST_HOST";

/// The hosts of a test and their vault.
pub(crate) struct Hosts {
    pub lab: Lab,
    pub vault: VaultId,
}

impl Hosts {
    pub fn new(names: &[&'static str]) -> Hosts {
        let lab = Lab::new();
        let id = lab.vault(lab.joined(names[0]));
        for name in &names[1..] {
            lab.grant(lab.joined(name), &id);
        }
        Hosts { vault: VaultId::of_hex(&id).unwrap(), lab }
    }

    pub fn connection(&self, name: &str) -> Connection {
        connection(self.lab.dir.path(), name, self.lab.port)
    }

    pub fn copy(&self, name: &str) -> PathBuf {
        self.lab.path(&format!("copy-{name}"))
    }

    pub fn turns(&self, name: &str) -> Arc<Turns> {
        Turns::begin(&self.connection(name), self.vault, &self.copy(name)).unwrap()
    }
}

pub(crate) fn connection(lab: &Path, name: &str, port: u16) -> Connection {
    let servers = lab.join(format!("state-{name}/lamassu/servers"));
    Connection::new(&servers, &format!("127.0.0.1:{port}")).unwrap()
}

/// In a thread of its own, and not for ever.
pub(crate) fn soon<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> Soon<T> {
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(act()));
    Soon(result)
}

pub(crate) struct Soon<T>(mpsc::Receiver<T>);

impl<T> Soon<T> {
    #[track_caller]
    pub fn get(self) -> T {
        self.0.recv_timeout(LONG).expect("it has panicked, or does not come")
    }
}

pub(crate) fn take(turns: &Arc<Turns>, mode: Mode) -> Soon<Turn> {
    let turns = turns.clone();
    soon(move || turns.take(mode).unwrap())
}

/// What is counted in the vault's own row, as an anchor sees it that is opened in this turn.
fn count(turn: &Turn, vault: &VaultId) -> u64 {
    Anchor::open(turn.table.clone(), vault).unwrap().vault().next_intent
}

/// Counts one more.
pub(crate) fn commit(turn: &Turn, vault: &VaultId) -> Result<u64, AnchorError> {
    let anchor = Anchor::open(turn.table.clone(), vault)?;
    anchor.commit_vault(|vault| vault.next_intent += 1)?;
    Ok(anchor.vault().next_intent)
}

fn is_ended<T>(done: Result<T, AnchorError>) -> bool {
    matches!(done, Err(AnchorError::Server { fault: ServerFault::Ended, .. }))
}

#[test]
fn three_hosts_hand_a_vault_over_and_each_sees_what_was_committed_last() {
    const TURNS: u64 = 70;
    let hosts = Hosts::new(&["a", "b", "c"]);
    let before = hosts.lab.metric("turns_total");
    let newest = Arc::new(AtomicU64::new(0));
    let begun = Instant::now();
    let all = ["a", "b", "c"].map(|name| {
        let (turns, newest, vault) = (hosts.turns(name), newest.clone(), hosts.vault);
        soon(move || {
            for _ in 0..TURNS {
                let turn = turns.take(Mode::Exclusive).unwrap();
                let found = count(&turn, &vault);
                let expected = newest.load(Ordering::SeqCst);
                assert!(found == expected || expected == 0, "{found} and not {expected}");
                newest.store(commit(&turn, &vault).unwrap(), Ordering::SeqCst);
                assert!(!turn.takes_over && turn.is_good());
                turn.pass();
            }
        })
    });
    all.into_iter().for_each(Soon::get);
    let took = begun.elapsed();
    println!("{} turns with a commit each: {:?} each", 3 * TURNS, took / (3 * TURNS as u32));
    assert_eq!(hosts.lab.metric("turns_total") - before, (3 * TURNS) as f64);
    // A turn leaves nothing in the audit log: sessions do.
    let audit = hosts.lab.serve(&["audit"]).ok().out;
    assert!(audit.lines().filter(|line| line.contains("session-")).count() < 20, "{audit}");
    let turn = take(&hosts.turns("b"), Mode::Shared).get();
    assert_eq!(count(&turn, &hosts.vault), newest.load(Ordering::SeqCst));
}

#[test]
fn turns_come_in_order_and_those_who_read_have_them_together() {
    let hosts = Hosts::new(&["a", "b", "c"]);
    let before = hosts.lab.metric("turns_total");
    let [a, b, c] = ["a", "b", "c"].map(|name| hosts.turns(name));
    let turn = take(&a, Mode::Exclusive).get();
    let next = take(&b, Mode::Exclusive);
    assert_eq!(turn.wait(LONG), Some(Told::Recalled));
    let last = take(&c, Mode::Exclusive);
    let table = turn.table.clone();
    turn.pass();
    assert!(is_ended(table.get(Space::Vault, b"x")) && is_ended(table.commit(&[])));
    let turn = next.get();
    assert_eq!(turn.wait(LONG), Some(Told::Recalled));
    turn.pass();
    last.get().pass();
    // Two that read, at once; each has what was written before.
    let turn = take(&a, Mode::Exclusive).get();
    let counted = commit(&turn, &hosts.vault).unwrap();
    turn.pass();
    let both = Arc::new(Barrier::new(2));
    let readers = [b, c].map(|turns| {
        let (both, vault) = (both.clone(), hosts.vault);
        soon(move || {
            let turn = turns.take(Mode::Shared).unwrap();
            both.wait();
            let refused = commit(&turn, &vault);
            assert!(
                matches!(refused, Err(AnchorError::Server { fault: ServerFault::Refused { .. }, .. })),
                "{refused:?}"
            );
            assert_eq!((turn.mode(), count(&turn, &vault)), (Mode::Shared, counted));
            assert_eq!(turn.wait(LONG), Some(Told::Recalled));
            turn.pass();
        })
    });
    let until = Instant::now() + LONG;
    while hosts.lab.metric("turns_total") < before + 6.0 {
        assert!(Instant::now() < until, "they wait for one another");
        std::thread::sleep(Duration::from_millis(20));
    }
    let turn = take(&a, Mode::Exclusive).get();
    readers.into_iter().for_each(Soon::get);
    assert_eq!(turn.told(), None);
}

/// A turn that is asked for while its holder commits is passed behind the last commit.
#[test]
fn what_is_committed_while_the_vault_is_asked_for_is_there_for_the_next() {
    let hosts = Hosts::new(&["a", "b"]);
    let [a, b] = ["a", "b"].map(|name| hosts.turns(name));
    for _ in 0..10 {
        let turn = take(&a, Mode::Exclusive).get();
        let next = take(&b, Mode::Exclusive);
        let vault = hosts.vault;
        let committed = soon(move || {
            let until = Instant::now() + LONG;
            while turn.told().is_none() {
                assert!(Instant::now() < until, "it is not recalled");
                commit(&turn, &vault).unwrap();
            }
            let last = commit(&turn, &vault).unwrap();
            turn.pass();
            last
        });
        assert_eq!(count(&next.get(), &hosts.vault), committed.get());
    }
}

/// R13: it beats all the time.
#[test]
fn a_holder_that_does_not_pass_the_vault_is_ended_and_may_come_back() {
    let hosts = Hosts::new(&["a", "b"]);
    let [a, b] = ["a", "b"].map(|name| hosts.turns(name));
    let hung = take(&a, Mode::Exclusive).get();
    let counted = commit(&hung, &hosts.vault).unwrap();
    let turn = take(&b, Mode::Shared).get();
    assert!(turn.takes_over && turn.mode() == Mode::Exclusive, "what was left is put right first");
    assert!(!hung.is_good(), "two hosts believe that the vault is theirs");
    assert_eq!(commit(&turn, &hosts.vault).unwrap(), counted + 1);
    turn.taken_over();
    assert_eq!(hosts.lab.metric("sessions_held_on_total"), 1.0);
    assert!(hosts.lab.serve(&["audit"]).ok().out.contains("why=held-on"));
    let until = Instant::now() + LONG;
    while hung.told() != Some(Told::Ended) {
        assert!(Instant::now() < until, "nobody tells it");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(is_ended(commit(&hung, &hosts.vault)));
    turn.pass();
    // By a session of its own again, though the turn that has ended is there yet.
    let turn = take(&a, Mode::Exclusive).get();
    assert!(!turn.takes_over && count(&turn, &hosts.vault) == counted + 1);
    drop(hung);
    assert!(turn.is_good());
    // Whoever leaves has the vault no more, and waits for nothing.
    let waiting = b.clone();
    let waiting = soon(move || waiting.take(Mode::Exclusive).map(drop));
    assert_eq!(turn.wait(LONG), Some(Told::Recalled));
    b.leave();
    assert!(is_ended(waiting.get()) && is_ended(b.take(Mode::Shared).map(drop)));
}

/// A host that is a process of its own, and does what it is told by lines.
struct Process {
    child: Child,
    says: BufReader<ChildStdout>,
    hears: ChildStdin,
}

impl Process {
    fn new(hosts: &Hosts, name: &str) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "turns::a_host_of_its_own", "--nocapture", "--test-threads=1"]);
        let vault = hosts.vault.to_string();
        let dir = hosts.lab.dir.path().display().to_string();
        command.env(HOST_ENV, [&dir, name, &hosts.lab.port.to_string(), &vault].join("\n"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (hears, says) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Process { child, says, hears }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.hears, "{line}").unwrap();
    }

    /// What it answers: the harness of its tests speaks, too.
    fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.says.read_line(&mut line).unwrap(), 0, "the host is gone");
            if let Some((_, answer)) = line.split_once("host: ") {
                return answer.trim().to_owned();
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What such a process runs.
#[test]
fn a_host_of_its_own() {
    let Ok(told) = std::env::var(HOST_ENV) else { return };
    let [dir, name, port, vault] = told.split('\n').collect::<Vec<_>>().try_into().unwrap();
    let (dir, vault) = (Path::new(dir), VaultId::of_hex(vault).unwrap());
    let turns =
        Turns::begin(&connection(dir, name, port.parse().unwrap()), vault, &dir.join(format!("copy-{name}"))).unwrap();
    let mut turn = None;
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "take" => {
                drop(turn.take());
                let taken = turns.take(Mode::Exclusive).unwrap();
                println!("host: {} {}", count(&taken, &VaultId(vault.0)), taken.takes_over);
                turn = Some(taken);
            }
            "commit" => println!("host: {}", commit(turn.as_ref().unwrap(), &VaultId(vault.0)).is_ok()),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_holder_that_was_stopped_changes_nothing_and_one_that_was_killed_is_taken_over() {
    let hosts = Hosts::new(&["a", "b"]);
    let (mut process, b) = (Process::new(&hosts, "a"), hosts.turns("b"));
    process.tell("take");
    let first: u64 = process.answer().strip_suffix(" false").unwrap().parse().unwrap();
    process.tell("commit");
    assert_eq!(process.answer(), "true");
    kill(process.child.id(), "-STOP");
    let turn = take(&b, Mode::Exclusive).get();
    assert!(turn.takes_over);
    turn.taken_over();
    assert_eq!(commit(&turn, &hosts.vault).unwrap(), first + 2);
    kill(process.child.id(), "-CONT");
    process.tell("commit");
    assert_eq!(process.answer(), "false", "a commit behind the end of the session");
    turn.pass();
    process.tell("take");
    assert_eq!(process.answer(), format!("{} false", first + 2));
    process.tell("commit");
    assert_eq!(process.answer(), "true");
    // The copy is its own as long as it lives.
    let beside = Turns::begin(&hosts.connection("a"), hosts.vault, &hosts.copy("a"));
    assert!(matches!(beside.map(drop), Err(AnchorError::Locked { .. })));
    drop(process);
    let turn = take(&b, Mode::Shared).get();
    assert!(turn.takes_over && count(&turn, &hosts.vault) == first + 3);
    // Nobody says that it is put right: the next has to.
    turn.pass();
    let turn = take(&hosts.turns("a"), Mode::Shared).get();
    assert!(turn.takes_over);
    turn.taken_over();
    turn.pass();
    assert!(!take(&b, Mode::Shared).get().takes_over);
}

/// The takeover is the first part of its turn: another host that wants the vault meanwhile waits for the turn's end.
#[test]
fn a_turn_that_is_recalled_during_its_takeover_is_kept_until_it_is_passed() {
    for mode in [Mode::Shared, Mode::Exclusive] {
        let hosts = Hosts::new(&["a", "b", "c"]);
        let (mut process, [b, c]) = (Process::new(&hosts, "a"), ["b", "c"].map(|name| hosts.turns(name)));
        process.tell("take");
        let first: u64 = process.answer().strip_suffix(" false").unwrap().parse().unwrap();
        drop(process);
        let turn = take(&b, Mode::Exclusive).get();
        assert!(turn.takes_over);
        let next = take(&c, mode);
        assert_eq!(turn.wait(LONG), Some(Told::Recalled));
        turn.taken_over();
        for committed in 1..=3 {
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(commit(&turn, &hosts.vault).unwrap(), first + committed);
        }
        assert!(turn.is_good() && next.0.try_recv().is_err(), "two hosts have the vault");
        turn.pass();
        let turn = next.get();
        assert!(!turn.takes_over && count(&turn, &hosts.vault) == first + 3);
    }
}

#[test]
fn a_server_that_starts_anew_goes_on_with_turns() {
    let mut hosts = Hosts::new(&["a", "b"]);
    let committed = Arc::new(AtomicU64::new(0));
    let all = ["a", "b"].map(|name| {
        let (turns, committed, vault) = (hosts.turns(name), committed.clone(), hosts.vault);
        soon(move || {
            for _ in 0..60 {
                let turn = turns.take(Mode::Exclusive).unwrap();
                // One whose answer did not come may be there.
                let (found, least) = (count(&turn, &vault), committed.load(Ordering::SeqCst));
                assert!(found >= least, "{found} of {least}");
                if turn.takes_over {
                    turn.taken_over();
                }
                match commit(&turn, &vault) {
                    Ok(counted) => committed.store(counted, Ordering::SeqCst),
                    Err(error) => println!("a commit while the server was away: {error}"),
                }
                turn.pass();
            }
        })
    });
    for (signal, turns) in [("-TERM", 10.0), ("-KILL", 20.0)] {
        let until = Instant::now() + LONG;
        while hosts.lab.metric("turns_total") < turns {
            assert!(Instant::now() < until, "no turns: {}", hosts.lab.log());
        }
        hosts.lab.stop(signal);
        hosts.lab.start();
    }
    all.into_iter().for_each(Soon::get);
    assert!(count(&take(&hosts.turns("a"), Mode::Shared).get(), &hosts.vault) >= committed.load(Ordering::SeqCst));
    // What is durable is what was said.
    hosts.lab.serve(&["check"]).ok();
}

#[test]
fn what_was_changed_since_is_what_all_of_it_is() {
    let mut hosts = Hosts::new(&["a", "b", "c"]);
    let [a, b] = ["a", "b"].map(|name| hosts.turns(name));
    let turn = take(&b, Mode::Shared).get();
    assert!(turn.changed.is_none(), "it had nothing");
    turn.pass();
    let write = |rows: u64| {
        let turn = take(&a, Mode::Exclusive).get();
        for n in 0..rows {
            commit(&turn, &hosts.vault).unwrap();
            // 16 digests, as rows of this table have them.
            let value = (n % 3 != 0).then(|| vec![n as u8; 512]);
            let row = |key: u64| Change {
                space: Space::Held,
                key: [7, key].map(u64::to_be_bytes).concat(),
                value: value.clone(),
            };
            turn.table.commit(&[row(n % 7), row(n)]).unwrap();
        }
    };
    write(40);
    let turn = take(&b, Mode::Shared).get();
    assert_eq!(turn.changed.as_ref().unwrap().iter().filter(|change| change.space == Space::Held).count(), 80);
    turn.pass();
    let turn = take(&b, Mode::Shared).get();
    assert_eq!(turn.changed.as_deref(), Some(&[][..]), "nobody has changed anything");
    let head = turn.head;
    turn.pass();
    take(&hosts.turns("c"), Mode::Shared).get().pass();
    drop(b);
    let (by_changes, whole) = (rows(&hosts.copy("b")), rows(&hosts.copy("c")));
    assert_eq!(by_changes.0, Some(head));
    assert!(by_changes == whole && whole.1.len() > 20, "{by_changes:?} {whole:?}");
    // A server that has started anew has no changes, but all rows.
    write(3);
    hosts.lab.stop("-TERM");
    hosts.lab.start();
    let b = hosts.turns("b");
    let turn = take(&b, Mode::Shared).get();
    assert!(turn.changed.is_none());
    drop((turn, b, a));
    let (by_rows, at_server) = (rows(&hosts.copy("b")), rows(&hosts.copy("a")));
    assert!(by_rows == at_server, "{by_rows:?} {at_server:?}");
}

#[test]
fn who_has_a_vault_for_good_and_who_has_it_by_turns_are_in_each_others_way() {
    let hosts = Hosts::new(&["a", "b"]);
    let (a, b) = (hosts.connection("a"), hosts.connection("b"));
    let in_use = |done: Result<(), AnchorError>| {
        assert!(matches!(done, Err(AnchorError::Server { fault: ServerFault::InUse { .. }, .. })), "{done:?}");
    };
    for mode in [Mode::Shared, Mode::Exclusive] {
        let whole = Mirrored::open(&a, hosts.vault, mode, &hosts.copy("a")).unwrap();
        in_use(Turns::begin(&b, hosts.vault, &hosts.copy("b")).map(drop));
        drop(whole);
        let turns = hosts.turns("b");
        in_use(Mirrored::open(&a, hosts.vault, mode, &hosts.copy("a")).map(drop));
        turns.leave();
    }
}

/// It hears nothing of that while the server is away, and is refused when it reports what it has.
#[test]
fn a_host_that_loses_its_grant_while_the_server_is_away_gives_its_session_up() {
    let mut hosts = Hosts::new(&["a", "b"]);
    let turns = hosts.turns("b");
    let lock = |owner| {
        let key = LockKey { file: Object(7), kind: LockKind::Range, owner };
        let lock = Lock { key, range: Range::ALL, mode: Mode::Exclusive, pid: 1 };
        let (done, outcome) = mpsc::channel();
        let asked = Asked::Lock { lock, handle: owner, waits: true };
        let told = move |outcome| {
            let _ = done.send(outcome);
        };
        let _ = turns.lock(asked, Box::new(told));
        outcome
    };
    assert_eq!(lock(1).recv_timeout(LONG), Ok(Outcome::Done));
    let (waits, turn) = (lock(2), take(&turns, Mode::Exclusive).get());
    hosts.lab.stop("-TERM");
    hosts.lab.serve(&["host", "grant", "--not", "@b", &format!("@{}", hosts.vault)]).ok();
    hosts.lab.start();
    assert_eq!(waits.recv_timeout(LONG), Ok(Outcome::Ended));
    assert_eq!(turn.wait(LONG), Some(Told::Ended));
    turn.pass();
    let refused = turns.take(Mode::Shared).map(drop);
    assert!(matches!(refused, Err(AnchorError::Server { fault: ServerFault::UnknownVault, .. })), "{refused:?}");
}

/// Messages that no program of ours sends, while another host has its turns.
#[test]
fn a_host_that_means_ill_gets_no_more_turns_than_others() {
    let hosts = Hosts::new(&["a", "evil"]);
    let turns = hosts.turns("a");
    let turn = take(&turns, Mode::Exclusive).get();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let channel = runtime.block_on(async { channel(&hosts.lab, "evil") });
    let vault = hosts.vault.0.to_vec();
    let acquire = |request| up(Said::Acquire(proto::Acquire { request, object: 0, mode: 1 }));
    let grant = |number| proto::Grant { object: 0, mode: 1, number };
    let (send, mut down, session) = runtime.block_on(async {
        let (send, said) = tokio::sync::mpsc::channel(100);
        let begin = proto::Begin { vault: vault.clone(), mode: 1, replaces: 0, turns: true };
        send.send(up(Said::Begin(begin))).await.unwrap();
        let mut down =
            SessionsClient::new(channel.clone()).attend(ReceiverStream::new(said)).await.unwrap().into_inner();
        let Some(down::Said::Begun(begun)) = down.message().await.unwrap().unwrap().said else { panic!("no session") };
        // It releases what it does not hold, by any number, and asks without end.
        for number in 0..400 {
            let release = proto::Release { grant: Some(grant(number)), keeps: None };
            send.send(up(Said::Release(release))).await.unwrap();
            send.send(up(Said::TakenOver(grant(number)))).await.unwrap();
            send.send(acquire(number)).await.unwrap();
            // Without heartbeats its session would end while a busy server reads the rest.
            if number % 50 == 49 {
                send.send(up(Said::Heartbeat(proto::Heartbeat { beat: number }))).await.unwrap();
                let alive = tokio::time::timeout(LONG, down.message()).await.unwrap().unwrap().unwrap();
                assert_eq!(alive.said, Some(down::Said::Alive(proto::Heartbeat { beat: number })));
            }
        }
        // Rows are for who has the vault.
        let request = proto::RowsRequest { vault: vault.clone(), session: begun.session, since: Vec::new() };
        let refused = AnchorsClient::new(channel.clone()).rows(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::Aborted);
        (send, down, begun.session)
    });
    assert_eq!(turn.wait(LONG), Some(Told::Recalled));
    commit(&turn, &hosts.vault).unwrap();
    turn.pass();
    runtime.block_on(async {
        let granted = tokio::time::timeout(LONG, down.message()).await.unwrap().unwrap().unwrap();
        let Some(down::Said::Granted(granted)) = granted.said else { panic!("{granted:?}") };
        let rows = async |since: Vec<u8>| {
            let request = proto::RowsRequest { vault: vault.clone(), session, since };
            let mut rows = AnchorsClient::new(channel.clone()).rows(request).await?.into_inner();
            rows.message().await.map(|some| some.is_some_and(|some| some.is_commit))
        };
        assert!(!rows(vec![9; 32]).await.unwrap(), "a head that nobody had");
        assert!(!rows(granted.head).await.unwrap(), "there is nothing since");
        assert_eq!(rows(vec![9; 31]).await.unwrap_err().code(), Code::InvalidArgument);
        // The anchor is not its own to take away.
        let of = proto::Of { vault: vault.clone(), session };
        let refused = AnchorsClient::new(channel.clone()).give_up(of).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        send.send(acquire(7)).await.unwrap();
    });
    // It has asked once, and holds what it was granted again: it is recalled, and ended in the end.
    assert!(take(&turns, Mode::Exclusive).get().takes_over);
    drop(down);
}
