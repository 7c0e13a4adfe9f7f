//! Crowds of sessions at one server: sessions that do nothing, and sessions that ask for a lease without end. Beside
//! them two hosts go on: one in a vault of its own, one in turns with the crowd.
//!
//! `make torture` runs the whole: 10,000 sessions, and 1,000 that storm. The tests of every day are the same in small.

use crate::common::raw::*;
use crate::common::*;
use lamassu_anchor::{Anchor, AnchorError};
use lamassu_format::header::VaultId;
use lamassu_lease::Mode;
use lamassu_rpc::host::{Connection, Turns, join};
use lamassu_rpc::proto::hosts_client::HostsClient;
use lamassu_rpc::proto::sessions_client::SessionsClient;
use lamassu_rpc::proto::{self, down, up::Said};
use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

/// Sessions of one host in one vault, at most, as the server has it.
const SESSIONS_MAX: usize = 16;
/// Streams of one connection, of which some are left for other calls.
const STREAMS: usize = 60;

/// How large a crowd is.
#[derive(Clone, Copy)]
struct Size {
    hosts: usize,
    vaults: usize,
    /// of each host in each vault
    sessions: usize,
    /// seconds
    term: u64,
    heartbeat: u64,
    /// how long it goes on
    lasts: Duration,
}

impl Size {
    fn all(self) -> u64 {
        (self.hosts * self.vaults * self.sessions) as u64
    }
}

/// A server, its vaults, and the hosts of a crowd.
struct Crowd {
    lab: Lab,
    size: Size,
    /// The first is of the host `a` alone.
    vaults: Vec<String>,
    counts: Arc<Counts>,
    /// True when the crowd is to send nothing more.
    silent: watch::Sender<bool>,
}

#[derive(Default)]
struct Counts {
    begun: AtomicU64,
    ended: AtomicU64,
    granted: AtomicU64,
}

fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::SeqCst)
}

impl Crowd {
    fn new(size: Size) -> Crowd {
        let mut lab = Lab::with_term(size.term);
        lab.stop("-TERM");
        let config = lab.path("server/server.toml");
        let with = fs::read_to_string(&config).unwrap();
        let heartbeat = format!("heartbeat_seconds = {}", size.heartbeat);
        fs::write(&config, with.replace("heartbeat_seconds = 1", &heartbeat)).unwrap();
        // What a shell gives a program, whatever this machine does.
        let mut command = Command::new("prlimit");
        command.arg("--nofile=1024:").arg(server_program());
        lab.start_by(command);
        let a = lab.joined("a");
        let made = (0..=size.vaults).map(|number| {
            a.run(&format!("init store/w{number}")).ok();
            let id = a.id(&format!("store/w{number}"));
            lab.grant(a, &id);
            a.run(&format!("anchor move store/w{number} {}", lab.url())).ok();
            id
        });
        let vaults: Vec<_> = made.collect();
        for number in 0..size.hosts {
            let name = format!("@c{number}");
            let mut args = vec!["enrol"];
            args.extend(vaults[1..].iter().flat_map(|id| ["--vault", id]));
            args.push(&name);
            let token = lab.serve(&args).ok().out.parse().unwrap();
            join(&servers(&lab, &name[1..]), &token).unwrap();
        }
        Crowd { lab, size, vaults, counts: Arc::default(), silent: watch::Sender::new(false) }
    }

    fn pid(&self) -> u32 {
        self.lab.server.as_ref().unwrap().id()
    }

    /// Begins all sessions, and lets them go on by themselves.
    async fn comes(&self, storms: bool) {
        let mut beginning = tokio::task::JoinSet::new();
        let ids: Vec<_> = self.vaults[1..].iter().map(|id| id_of(id)).collect();
        for host in 0..self.size.hosts {
            let of_host = ids.iter().flat_map(|id| std::iter::repeat_n(id.clone(), self.size.sessions));
            let of_host: Vec<_> = of_host.collect();
            for of_connection in of_host.chunks(STREAMS) {
                let calls = channel(&self.lab, &format!("c{host}"));
                let (vaults, counts, silent) = (of_connection.to_vec(), self.counts.clone(), self.silent.subscribe());
                let every = Duration::from_secs(self.size.heartbeat);
                beginning.spawn(async move {
                    for vault in vaults {
                        one_of_many(&calls, vault, (storms, every), counts.clone(), silent.clone()).await;
                    }
                });
            }
        }
        while let Some(begun) = beginning.join_next().await {
            begun.unwrap();
        }
    }
}

fn servers(lab: &Lab, name: &str) -> std::path::PathBuf {
    lab.path(&format!("state-{name}/lamassu/servers"))
}

/// Begins a session by turns, and starts what it does then: heartbeats, and if it storms a request after each grant.
async fn one_of_many(
    calls: &Calls,
    vault: Vec<u8>,
    (storms, every): (bool, Duration),
    counts: Arc<Counts>,
    mut silent: watch::Receiver<bool>,
) {
    let until = Instant::now() + PATIENCE;
    let (says, mut hears) = loop {
        let (says, said) = mpsc::channel(8);
        says.send(up(Said::Begin(begin(&vault, true)))).await.unwrap();
        match SessionsClient::new(calls.clone()).attend(ReceiverStream::new(said)).await {
            Ok(attended) => break (says, attended.into_inner()),
            // So many handshakes of one address at once are too many for the server.
            Err(status) if status.source().is_some() && Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(status) => panic!("{status}"),
        }
    };
    let first = hears.message().await.unwrap().unwrap().said;
    assert!(matches!(first, Some(down::Said::Begun(_))), "{first:?}");
    counts.begun.fetch_add(1, Ordering::SeqCst);
    tokio::spawn(async move {
        let ask = |request| up(Said::Acquire(proto::Acquire { request, object: 0, mode: 1 }));
        let mut beats = tokio::time::interval(every);
        let (mut request, mut beat) = (0, 0);
        if storms {
            let _ = says.send(ask(request)).await;
        }
        loop {
            let is_silent = *silent.borrow();
            let up = tokio::select! {
                heard = hears.message() => match heard.ok().flatten().and_then(|down| down.said) {
                    Some(down::Said::Granted(granted)) => {
                        counts.granted.fetch_add(1, Ordering::SeqCst);
                        let release = proto::Release { grant: granted.grant, keeps: None };
                        let _ = says.send(up(Said::Release(release))).await;
                        request += 1;
                        ask(request)
                    }
                    Some(down::Said::Ended(_)) | None => break,
                    Some(_) => continue,
                },
                _ = beats.tick(), if !is_silent => {
                    beat += 1;
                    up(Said::Heartbeat(proto::Heartbeat { beat }))
                }
                _ = silent.changed(), if !is_silent => continue,
            };
            if says.send(up).await.is_err() {
                break;
            }
        }
        counts.ended.fetch_add(1, Ordering::SeqCst);
    });
}

/// A host that commits again and again, in turns of its own session, and remembers how long each turn took.
struct Honest {
    is_over: Arc<AtomicBool>,
    works: JoinHandle<Result<Vec<Duration>, AnchorError>>,
}

impl Honest {
    fn begin(lab: &Lab, name: &str, id: &str) -> Honest {
        let vault = VaultId::of_hex(id).unwrap();
        let connection = Connection::new(&servers(lab, name), &format!("127.0.0.1:{}", lab.port)).unwrap();
        let turns = Turns::begin(&connection, vault, &lab.path(&format!("copy-{id}"))).unwrap();
        let is_over = Arc::<AtomicBool>::default();
        let over = is_over.clone();
        let works = std::thread::spawn(move || {
            let mut took = Vec::new();
            while !over.load(Ordering::SeqCst) {
                let begun = Instant::now();
                let turn = turns.take(Mode::Exclusive)?;
                let anchor = Anchor::open(turn.table.clone(), &vault)?;
                anchor.commit_vault(|vault| vault.next_intent += 1)?;
                drop(anchor);
                turn.pass();
                took.push(begun.elapsed());
                std::thread::sleep(Duration::from_millis(20));
            }
            Ok(took)
        });
        Honest { is_over, works }
    }

    /// How long its turns took, shortest first. None has failed.
    fn end(self) -> Vec<Duration> {
        self.is_over.store(true, Ordering::SeqCst);
        let mut took = self.works.join().unwrap().unwrap();
        took.sort_unstable();
        assert!(!took.is_empty());
        took
    }
}

fn say(who: &str, took: &[Duration]) {
    println!(
        "{who}: {} turns, half of them below {:?}, the longest {:?}",
        took.len(),
        took[took.len() / 2],
        took[took.len() - 1]
    );
}

/// The memory of a process, KiB.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(Path::new(&format!("/proc/{pid}/fd"))).unwrap().count()
}

fn idle_sessions(size: Size) {
    let crowd = Crowd::new(size);
    let (lab, all) = (&crowd.lab, size.all());
    let [alone, among] = [0, 1].map(|vault| Honest::begin(lab, "a", &crowd.vaults[vault]));
    let runtime = Runtime::new().unwrap();
    let (before, begun) = (resident(crowd.pid()), Instant::now());
    runtime.block_on(crowd.comes(false));
    println!("{all} sessions have begun in {:?}", begun.elapsed());
    std::thread::sleep(size.lasts);
    let grown = resident(crowd.pid()).saturating_sub(before);
    println!(
        "memory of the server: {before} KiB before, {} B a session; {} descriptors",
        (grown << 10) / all,
        descriptors(crowd.pid())
    );
    assert_eq!((count(&crowd.counts.begun), count(&crowd.counts.ended)), (all, 0));
    assert_eq!(lab.metric("sessions"), (all + 2) as f64);
    // A session too many of one host in one vault.
    if size.sessions == SESSIONS_MAX {
        let vault = id_of(&crowd.vaults[1]);
        let more = runtime.block_on(async { Attended::begin(&channel(lab, "c0"), begin(&vault, true)).await });
        assert_eq!(more.map(drop).unwrap_err().code(), Code::ResourceExhausted);
    }
    // They say nothing more, and end.
    let begun = Instant::now();
    crowd.silent.send_replace(true);
    wait_for("sessions that say nothing do not end", || lab.metric("sessions") == 2.0);
    println!("all of them have ended {:?} after they fell silent", begun.elapsed());
    wait_for("sessions are not told of their end", || count(&crowd.counts.ended) == all);
    assert!(begun.elapsed() >= Duration::from_secs(size.term - size.heartbeat));
    say("a host in a vault of its own", &alone.end());
    say("a host in a vault of the crowd", &among.end());
    lab.serve(&["check"]).ok();
}

fn storms(size: Size) {
    let crowd = Crowd::new(size);
    let (lab, all) = (&crowd.lab, size.all());
    let [alone, among] = [0, 1].map(|vault| Honest::begin(lab, "a", &crowd.vaults[vault]));
    let runtime = Runtime::new().unwrap();
    runtime.block_on(crowd.comes(true));
    let (begun, before) = (Instant::now(), count(&crowd.counts.granted));
    std::thread::sleep(size.lasts);
    let granted = count(&crowd.counts.granted) - before;
    println!("{all} sessions that storm: {:.0} grants a second", granted as f64 / begun.elapsed().as_secs_f64());
    assert_eq!((count(&crowd.counts.begun), count(&crowd.counts.ended)), (all, 0));
    assert!(granted > 0);
    let (alone, among) = (alone.end(), among.end());
    say("a host in a vault of its own", &alone);
    say("a host in turns with them", &among);
    // Its request is granted behind those that came before: one of each session.
    let of_each = count(&crowd.counts.granted) / all;
    assert!(among.len() as u64 + 2 >= of_each / 2, "{} turns, and each of the others had {of_each}", among.len());
    drop(runtime);
    wait_for("sessions without a connection do not end", || lab.metric("sessions") == 0.0);
    lab.serve(&["check"]).ok();
}

const SMALL: Size =
    Size { hosts: 5, vaults: 4, sessions: SESSIONS_MAX, term: TERM, heartbeat: 1, lasts: Duration::from_secs(2) };

#[test]
fn idle_sessions_are_in_nobodys_way_and_end_by_themselves() {
    idle_sessions(SMALL);
}

#[test]
fn storms_of_requests_leave_others_their_turns() {
    storms(Size { vaults: 1, ..SMALL });
}

#[test]
#[ignore = "a minute and more: make torture runs it"]
fn ten_thousand_idle_sessions() {
    idle_sessions(Size { hosts: 79, vaults: 8, term: 30, heartbeat: 5, lasts: Duration::from_secs(40), ..SMALL });
}

#[test]
#[ignore = "a minute and more: make torture runs it"]
fn a_thousand_storms() {
    storms(Size { hosts: 63, vaults: 1, term: 30, heartbeat: 5, lasts: Duration::from_secs(40), ..SMALL });
}

/// A shell lets a program open 1,024 files, and a server may have four times as many connections.
#[test]
fn a_server_has_as_many_connections_as_it_is_told_whatever_the_shell_says() {
    let mut lab = Lab::new();
    lab.vault(lab.joined("a"));
    lab.stop("-TERM");
    let mut command = Command::new("prlimit");
    command.arg("--nofile=64:").arg(server_program());
    lab.start_by(command);
    let names = ["c0", "c1", "c2", "c3", "c4"];
    for name in names {
        lab.joined(name);
    }
    let runtime = Runtime::new().unwrap();
    let mut open = Vec::new();
    let _entered = runtime.enter();
    for name in names.iter().cycle().take(5 * 15) {
        let calls = channel(&lab, name);
        // Refused, by a connection that stays.
        let mut hosts = HostsClient::new(calls.clone());
        let asked = hosts.join(proto::PublicKey { spki: vec![1; 44] });
        let refused = runtime.block_on(async { tokio::time::timeout(PATIENCE, asked).await });
        assert_eq!(refused.expect("no answer").unwrap_err().code(), Code::PermissionDenied, "after {}", open.len());
        open.push(calls);
    }
    lab.host("a").run("ls store/v").ok();
    lab.serve(&["status"]).ok();
    assert!(descriptors(lab.server.as_ref().unwrap().id()) > 64 + 5);
}
