//! Servers over etcd: three members, and replicas of which one leads.

use crate::common::raw::{Attended, Calls, begin, channel, channel_by, commit, id_of, silent_channel};
use crate::common::*;
use crate::policy::{Liar, NO_PLAIN, may_be_plain, reload};
use crate::replays::one_row;
use lamassu_anchor::AnchorError;
use lamassu_anchor::table::{Change, Space, Table};
use lamassu_format::header::VaultId;
use lamassu_rpc::proto::anchors_client::AnchorsClient;
use lamassu_rpc::proto::{self, RowsRequest};
use lamassu_server::ServerError;
use lamassu_server::anchor_store::{AnchorStore, Files};
use lamassu_server::audit::Event;
use lamassu_server::etcd::anchors::EtcdAnchors;
use lamassu_server::etcd::config::EtcdConfig;
use lamassu_server::etcd::lead::Lead;
use lamassu_server::etcd::{Cluster, Op};
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::Runtime;
use tonic::Code;
use tonic::transport::Channel;

/// Whether etcd can be started here. `make setup` does not install it where a systemd would start it at once.
fn is_there() -> bool {
    let is_there = Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_ok();
    assert!(is_there || Path::new("/run/systemd/system").exists(), "no etcd: `make setup` installs it");
    if !is_there {
        eprintln!("NOTE: there is no etcd: what needs it was NOT tested");
    }
    is_there
}

/// Members of a cluster.
struct Etcd {
    dir: tempfile::TempDir,
    members: Vec<Option<Child>>,
    clients: Vec<u16>,
    peers: Vec<u16>,
    leader_seconds: u64,
}

impl Etcd {
    fn start(count: usize) -> Etcd {
        let [clients, peers] = [(); 2].map(|()| (0..count).map(|_| free_port()).collect());
        let members = (0..count).map(|_| None).collect();
        let mut etcd = Etcd { dir: tempfile::tempdir().unwrap(), members, clients, peers, leader_seconds: 2 };
        (0..count).for_each(|member| etcd.start_member(member));
        etcd
    }

    fn start_member(&mut self, member: usize) {
        let all = self.peers.iter().enumerate().map(|(at, port)| format!("m{at}=http://127.0.0.1:{port}"));
        let (client, peer) = (self.clients[member], self.peers[member]);
        let (client, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
        let data = self.dir.path().join(format!("m{member}"));
        let log = fs::File::create(self.dir.path().join(format!("log{member}"))).unwrap();
        let mut command = Command::new("etcd");
        command.args(["--name", &format!("m{member}"), "--data-dir"]).arg(data).args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
            "--initial-cluster",
            &all.collect::<Vec<_>>().join(","),
        ]);
        let started = command.stdout(Stdio::null()).stderr(log).spawn();
        self.members[member] = Some(started.unwrap());
    }

    fn kill_member(&mut self, member: usize) {
        let mut child = self.members[member].take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn table(&self) -> String {
        let seconds = self.leader_seconds;
        let urls: Vec<_> = self.clients.iter().map(|port| format!("\"http://127.0.0.1:{port}\"")).collect();
        format!("endpoints = [{}]\nprefix = \"test\"\nleader_seconds = {seconds}\n", urls.join(", "))
    }

    fn cluster(&self) -> Arc<Cluster> {
        let config: EtcdConfig = toml::from_str(&self.table()).unwrap();
        config.check(60).unwrap();
        Cluster::connect(self.dir.path(), &config).unwrap()
    }

    /// Ends the term of office of who leads, as if its lease had ended. It learns that when it looks.
    async fn depose(&self) {
        let url = format!("http://127.0.0.1:{}", self.clients[0]);
        let mut client = etcd_client::Client::connect([url], None).await.unwrap();
        assert_eq!(client.delete("test/leader", None).await.unwrap().deleted(), 1);
    }

    /// A cluster that this process leads.
    fn led(&self) -> (Arc<Cluster>, Arc<Lead>) {
        let cluster = self.cluster();
        let (lost, _) = tokio::sync::mpsc::unbounded_channel();
        let lead = Lead::take(&cluster, ("test", 2), lost, || false).unwrap().unwrap();
        (cluster, lead)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for member in self.members.iter_mut().flatten() {
            let _ = member.kill();
            let _ = member.wait();
        }
    }
}

fn put(space: Space, key: &[u8], value: &[u8]) -> Change {
    Change { space, key: key.to_vec(), value: Some(value.to_vec()) }
}

fn all_rows(table: &dyn Table) -> Vec<(Space, Vec<u8>, Vec<u8>)> {
    let mut rows = Vec::new();
    let visited = table.visit_whole(|space, key, value| {
        rows.push((space, key.to_vec(), value.to_vec()));
        Ok::<(), AnchorError>(())
    });
    visited.unwrap();
    rows
}

/// What every place of anchors has to do, wherever it is.
fn conformance(anchors: &dyn AnchorStore) {
    let [id, other] = [[1; 16], [2; 16]].map(VaultId);
    assert!(matches!(anchors.open(&id), Err(AnchorError::Missing { .. })));
    assert!(!anchors.has(&id).unwrap() && !anchors.put_away(&id).unwrap());
    // What is dropped was never there.
    anchors.begin(&id).unwrap().table().commit(&[put(Space::Objects, b"x", b"y")]).unwrap();
    assert!(!anchors.has(&id).unwrap() && anchors.all().unwrap().is_empty());
    let new = anchors.begin(&id).unwrap();
    new.table().commit(&[put(Space::Vault, b"vault", b"1"), put(Space::Objects, &[0xff; 8], b"last")]).unwrap();
    new.install().unwrap();
    assert_eq!(
        (anchors.all().unwrap(), anchors.has(&id).unwrap(), anchors.has(&other).unwrap()),
        (vec![id], true, false)
    );
    {
        let table = anchors.open(&id).unwrap();
        assert_eq!(table.get(Space::Vault, b"vault").unwrap().as_deref(), Some(&b"1"[..]));
        assert_eq!(table.get(Space::Head, b"vault").unwrap(), None);
        // More than a transaction of etcd takes, more than a page of it, and keys of all bytes.
        let many: Vec<_> = (0u32..1200).map(|n| put(Space::Entries, &n.to_be_bytes(), &[n as u8; 40])).collect();
        table.commit(&many).unwrap();
        table
            .commit(&[put(Space::Entries, b"", b"empty"), put(Space::Held, &[0, 0xff, b'/'], &vec![7; 300_000])])
            .unwrap();
        let large: Vec<_> = (0u8..8).map(|n| put(Space::Held, &[n], &vec![n; 400_000])).collect();
        table.commit(&large).unwrap();
        let twice = [put(Space::Open, b"k", b"1"), put(Space::Open, b"k", b"2")];
        table.commit(&twice).unwrap();
        assert_eq!(table.get(Space::Open, b"k").unwrap().as_deref(), Some(&b"2"[..]));
        table.commit(&[Change { space: Space::Open, key: b"k".to_vec(), value: None }]).unwrap();
        assert_eq!(table.get(Space::Open, b"k").unwrap(), None);
        let scanned = |prefix: &[u8], most: usize| {
            let mut keys = Vec::new();
            let mut visit = |key: &[u8], _: &[u8]| {
                keys.push(key.to_vec());
                if keys.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            };
            table.scan(Space::Entries, prefix, &mut visit).unwrap();
            keys
        };
        assert_eq!(scanned(&[0, 0, 1], 10_000).len(), 256);
        assert_eq!(scanned(&[], 10_000).len(), 1201);
        assert_eq!(scanned(&[], 3), [vec![], vec![0, 0, 0, 0], vec![0, 0, 0, 1]]);
        let rows = all_rows(&*table);
        assert_eq!(rows.len(), 2 + 1201 + 9);
        assert!(rows.is_sorted_by_key(|(space, key, _)| (Space::ALL.iter().position(|one| one == space), key.clone())));
    }
    // Another in its place.
    let new = anchors.begin(&id).unwrap();
    new.table().commit(&[put(Space::Vault, b"vault", b"2")]).unwrap();
    new.install().unwrap();
    assert_eq!(all_rows(&*anchors.open(&id).unwrap()), [(Space::Vault, b"vault".to_vec(), b"2".to_vec())]);
    assert!(anchors.put_away(&id).unwrap());
    assert!(!anchors.has(&id).unwrap() && !anchors.put_away(&id).unwrap() && anchors.all().unwrap().is_empty());
    let new = anchors.begin(&id).unwrap();
    new.table().commit(&[put(Space::Vault, b"vault", b"3")]).unwrap();
    new.install().unwrap();
    assert!(anchors.put_away(&id).unwrap());
}

#[test]
fn anchors_are_kept_alike_in_files_and_in_etcd() {
    let dir = tempfile::tempdir().unwrap();
    conformance(&Files::open(dir.path()).unwrap());
    // The second one has not replaced the first.
    let id = VaultId([1; 16]);
    let of_files = ["", "-2"].map(|number| dir.path().join(format!("anchors/{id}{number}.given-up")));
    assert!(of_files.iter().all(|path| path.exists()));
    if !is_there() {
        return;
    }
    let etcd = Etcd::start(1);
    let (cluster, lead) = etcd.led();
    conformance(&EtcdAnchors::open(&cluster).unwrap());
    for (number, revision) in [("", b"2"), ("-2", b"3")] {
        let generation = cluster.get(format!("test/away/{id}{number}").as_bytes()).unwrap().unwrap();
        let row = [b"test/rows/", &generation[..], b"/0vault"].concat();
        assert_eq!(cluster.get(&row).unwrap().as_deref(), Some(&revision[..]));
    }
    lead.give_up();
}

/// One who led changes nothing any more, and what it had begun is carried out or gone.
#[test]
fn who_led_before_changes_nothing_and_a_journal_is_carried_out_by_who_leads_next() {
    if !is_there() {
        return;
    }
    let etcd = Etcd::start(1);
    let (first, lead) = etcd.led();
    let many = |value: &[u8]| (0..250u8).map(|n| Op::Put(vec![b't', n], value.to_vec())).collect::<Vec<_>>();
    first.commit("j", many(b"1")).unwrap();
    // A commit that is durable in its journal, and not carried out.
    first.write_journal("j", &many(b"2")).unwrap();
    assert_eq!(first.get(&[b't', 7]).unwrap().as_deref(), Some(&b"1"[..]));
    lead.give_up();
    let (second, _lead) = etcd.led();
    second.recover("j").unwrap();
    assert_eq!(second.get(&[b't', 7]).unwrap().as_deref(), Some(&b"2"[..]));
    second.recover("j").unwrap();
    for ops in [many(b"3"), vec![Op::Put(b"u".to_vec(), b"4".to_vec())]] {
        assert_eq!(first.commit("j", ops).unwrap_err().code(), 5);
    }
    assert_eq!(second.get(&[b't', 7]).unwrap().as_deref(), Some(&b"2"[..]));
    assert_eq!(second.get(b"u").unwrap(), None);
    // A journal that was cut off is nothing.
    second.write_part_of_journal("j", 0, b"cut off").unwrap();
    second.recover("j").unwrap();
    assert_eq!(second.get(&[b't', 7]).unwrap().as_deref(), Some(&b"2"[..]));
    // Nor does what it left become part of a shorter one.
    second.write_part_of_journal("j", 1, b"cut off").unwrap();
    second.write_journal("j", &many(b"5")).unwrap();
    second.recover("j").unwrap();
    assert_eq!(second.get(&[b't', 7]).unwrap().as_deref(), Some(&b"5"[..]));
}

/// Who has dropped the right to lead asks etcd nothing any more, whether that answers or not.
#[test]
fn nothing_goes_on_for_a_leader_that_is_no_more() {
    if !is_there() {
        return;
    }
    for is_killed in [false, true] {
        let mut etcd = Etcd::start(1);
        let (cluster, lead) = etcd.led();
        if is_killed {
            etcd.kill_member(0);
        }
        let left = Arc::downgrade(&cluster);
        drop((cluster, lead));
        wait_for("its tasks have not ended", || left.strong_count() == 0);
    }
}

/// A table that was opened again is used by the newest opening alone: the other one may be based on what is no more.
#[test]
fn an_anchor_that_is_opened_again_is_left_by_who_had_it_open() {
    if !is_there() {
        return;
    }
    let etcd = Etcd::start(1);
    let (cluster, _lead) = etcd.led();
    let anchors = EtcdAnchors::open(&cluster).unwrap();
    let new = anchors.begin(&VaultId([1; 16])).unwrap();
    new.table().commit(&[put(Space::Vault, b"vault", b"1")]).unwrap();
    new.install().unwrap();
    let first = anchors.open(&VaultId([1; 16])).unwrap();
    first.commit(&[put(Space::Open, b"k", b"1")]).unwrap();
    let second = anchors.open(&VaultId([1; 16])).unwrap();
    assert_eq!(anchors.held(), 1);
    assert!(first.commit(&[put(Space::Open, b"k", b"2")]).is_err());
    assert!(first.get(Space::Open, b"k").is_err());
    assert_eq!(second.get(Space::Open, b"k").unwrap().as_deref(), Some(&b"1"[..]));
    second.commit(&[put(Space::Open, b"k", b"3")]).unwrap();
    // Neither commits to what was put away.
    assert!(anchors.put_away(&VaultId([1; 16])).unwrap());
    assert!(second.commit(&[put(Space::Open, b"k", b"4")]).is_err());
    drop((first, second));
    assert_eq!(anchors.held(), 0);
    // Nor is anything left of one that was not open when it was put away.
    anchors.begin(&VaultId([1; 16])).unwrap().install().unwrap();
    assert!(anchors.put_away(&VaultId([1; 16])).unwrap());
    assert_eq!(anchors.held(), 0);
}

/// Who puts an anchor has gone, and its rows are removed. What it has sent first is carried out only then, and leaves
/// nothing: it compares the number of the transaction before, which the rows have from their beginning on.
#[test]
fn what_comes_late_puts_no_rows_in_place_of_those_that_were_removed() {
    if !is_there() {
        return;
    }
    let etcd = Etcd::start(1);
    let (cluster, _lead) = etcd.led();
    let anchors = EtcdAnchors::open(&cluster).unwrap();
    let below = |prefix: &str| below(&cluster, prefix);
    let new = anchors.begin(&VaultId([1; 16])).unwrap();
    let generation = below("new/").remove(0);
    assert!(below("last/").contains(&generation), "the first transaction would compare that there is none");
    new.table().commit(&[put(Space::Objects, b"x", b"y")]).unwrap();
    drop(new);
    assert!(below("new/").is_empty() && below("rows/").is_empty());
    assert!(!below("last/").contains(&generation));
}

/// The keys below a prefix.
fn below(cluster: &Cluster, prefix: &str) -> Vec<String> {
    let mut keys = Vec::new();
    let visited = cluster.visit(format!("test/{prefix}").as_bytes(), |key, _| {
        keys.push(String::from_utf8_lossy(key).into_owned());
        Ok(())
    });
    visited.unwrap();
    keys
}

/// Rows that are being put, and whose server ends. Returns their generation.
fn leave_rows(etcd: &Etcd, count: u32) -> String {
    let (cluster, lead) = etcd.led();
    let new = EtcdAnchors::open(&cluster).unwrap().begin(&VaultId([1; 16])).unwrap();
    let rows: Vec<_> = (0..count).map(|n| put(Space::Objects, &n.to_be_bytes(), b"left")).collect();
    new.table().commit(&rows).unwrap();
    std::mem::forget(new);
    lead.give_up();
    below(&cluster, "new/").remove(0)
}

/// Hosts wait for who takes over, and a host may have put any number of rows.
#[test]
fn who_takes_over_serves_before_what_was_left_is_removed() {
    const COUNT: u32 = 3000;
    if !is_there() {
        return;
    }
    let etcd = Etcd::start(1);
    let left = leave_rows(&etcd, COUNT);
    let (cluster, _lead) = etcd.led();
    let anchors = EtcdAnchors::open(&cluster).unwrap();
    let rows = || below(&cluster, &format!("rows/{left}")).len();
    assert_eq!(rows(), COUNT as usize);
    // What comes meanwhile stays, whether it is finished or not.
    let new = anchors.begin(&VaultId([1; 16])).unwrap();
    new.table().commit(&[put(Space::Vault, b"vault", b"1")]).unwrap();
    let other = anchors.begin(&VaultId([2; 16])).unwrap();
    new.install().unwrap();
    anchors.remove_left().unwrap();
    assert_eq!((rows(), below(&cluster, "new/").len(), below(&cluster, "rows/").len()), (0, 1, 1));
    let table = anchors.open(&VaultId([1; 16])).unwrap();
    assert_eq!(table.get(Space::Vault, b"vault").unwrap().as_deref(), Some(&b"1"[..]));
    assert!(!below(&cluster, "last/").contains(&left));
    anchors.remove_left().unwrap();
    drop(other);
    assert!(below(&cluster, "new/").is_empty());
}

/// A change of the state whose answer is lost may have been made: who leads ends, and changes nothing more.
#[test]
fn a_change_of_the_state_in_doubt_ends_the_leader() {
    if !is_there() {
        return;
    }
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let (lost, mut ends) = tokio::sync::mpsc::unbounded_channel();
    let _lead = Lead::take(&cluster, ("nowhere", 60), lost, || false).unwrap().unwrap();
    let state = cluster.open_state().unwrap();
    state.note(Event::BackupBegun).unwrap();
    let member = etcd.members[0].as_ref().unwrap().id();
    kill(member, "-STOP");
    let failed = state.note(Event::BackupBegun);
    kill(member, "-CONT");
    assert!(failed.is_err());
    ends.try_recv().expect("the reason to end");
    for _ in 0..3 {
        assert!(matches!(state.note(Event::BackupBegun), Err(ServerError::NotLeading { .. })));
    }
}

/// Has the lab's server keep its state in etcd, and makes a second replica of it beside: they listen at the same place,
/// of which only who leads makes use.
fn into_etcd(lab: &mut Lab, etcd: &Etcd) {
    lab.stop("-TERM");
    let config = fs::read_to_string(lab.path("server/server.toml")).unwrap();
    fs::write(lab.path("server/server.toml"), format!("{config}[etcd]\n{}", etcd.table())).unwrap();
    lab.serve(&["run"]).code(6).says("to-etcd");
    lab.serve(&["to-etcd"]).ok();
    lab.serve(&["to-etcd"]).code(26).says("moved into etcd");
    copy(&lab.path("server"), &lab.path("replica"));
    lab.start();
}

/// A replica, which ends with its test.
struct Replica(Child);

impl Replica {
    fn end(mut self) {
        kill(self.0.id(), "-TERM");
        assert!(self.0.wait().unwrap().success());
    }

    /// The same for one that etcd may have left without an answer for too long: then it ended, and another one leads.
    fn end_if_it_leads(mut self, log: impl Fn() -> String) {
        kill(self.0.id(), "-TERM");
        let ended = self.0.wait().unwrap();
        let has_lost = ["has not answered for", "etcd has ended the lease", "another replica leads"];
        let log = log();
        assert!(ended.success() || has_lost.iter().any(|why| log.contains(why)), "{ended}: {log}");
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

fn run_replica(lab: &Lab, dir: &str) -> Replica {
    let log = fs::File::options().create(true).append(true).open(lab.path("replica.log")).unwrap();
    Replica(Command::new(server_program()).arg("run").arg(lab.path(dir)).stderr(log).spawn().unwrap())
}

fn replica_log(lab: &Lab) -> String {
    fs::read_to_string(lab.path("replica.log")).unwrap_or_default()
}

/// Replicas and a member of etcd are killed while a host writes: what was acknowledged is there, and another host sees
/// it. An fsync fails after nine tenths of a term without a server, and none does.
#[test]
fn killed_replicas_and_members_lose_nothing_acknowledged_and_stall_for_less_than_a_term() {
    if !is_there() {
        return;
    }
    let mut etcd = Etcd::start(3);
    etcd.leader_seconds = 5;
    let mut lab = Lab::with_term(30);
    {
        let (a, b) = (lab.joined("a"), lab.joined("b"));
        let id = lab.vault(a);
        lab.grant(b, &id);
    }
    into_etcd(&mut lab, &etcd);
    let replica = run_replica(&lab, "replica");
    wait_for("the replica stands by", || replica_log(&lab).contains("standing by"));
    let stands_by = Command::new(server_program()).arg("status").arg(lab.path("replica")).output().unwrap();
    let said = String::from_utf8_lossy(&stands_by.stderr).into_owned();
    assert!(stands_by.status.code() == Some(11) && said.contains("does, ask there"), "{said}");
    let (a, b) = (lab.host("a"), lab.host("b"));
    a.mount().ok();
    let stop = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        let writes = scope.spawn(|| {
            let mut written = Vec::new();
            for number in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let name = format!("f{number}");
                a.write(&name, &name.repeat(100)).expect("a term has not passed");
                written.push(name);
            }
            written
        });
        // Also where something fails here: who writes would never end.
        let over = Over(&stop);
        let pause = || std::thread::sleep(Duration::from_secs(2));
        pause();
        kill(lab.server.as_ref().unwrap().id(), "-KILL");
        wait_for("the replica leads", || replica_log(&lab).contains("leading"));
        pause();
        etcd.kill_member(0);
        pause();
        // The one that was killed stands by from now on.
        let first = run_replica(&lab, "server");
        etcd.start_member(0);
        pause();
        replica.end_if_it_leads(|| replica_log(&lab));
        pause();
        drop(over);
        let written = writes.join().unwrap();
        a.umount().ok();
        b.mount().ok();
        for name in &written {
            assert_eq!(fs::read_to_string(b.file(name)).unwrap(), name.repeat(100));
        }
        b.umount().ok();
        lab.serve(&["check"]).ok();
        first.end();
        written
    });
    assert!(written.len() > 20, "{} files", written.len());
    lab.server.take().unwrap().wait().unwrap();
    // Nobody leads: a command does for as long as it takes.
    lab.serve(&["check"]).ok();
    lab.serve(&["host", "list"]).ok().says("a");
    // A backup is of files, and runs without etcd.
    let backup = lab.path("backup");
    lab.serve(&["backup", &format!("@{}", backup.display())]).ok();
    let config = fs::read_to_string(backup.join("server.toml")).unwrap();
    fs::write(backup.join("server.toml"), config.split("[etcd]").next().unwrap()).unwrap();
    let checked = Command::new(server_program()).arg("check").arg(&backup).output().unwrap();
    assert!(checked.status.success(), "{checked:?}");
}

/// A member that stands still has what it was asked carried out when it goes on, and somebody else was asked meanwhile:
/// nothing goes back by that.
#[test]
fn what_is_carried_out_late_takes_nothing_back() {
    if !is_there() {
        return;
    }
    let mut etcd = Etcd::start(3);
    // The server and its sessions are to outlive a member that stands still.
    etcd.leader_seconds = 15;
    let mut lab = Lab::with_term(40);
    {
        let (a, b) = (lab.joined("a"), lab.joined("b"));
        let id = lab.vault(a);
        lab.grant(b, &id);
    }
    into_etcd(&mut lab, &etcd);
    let (a, b) = (lab.host("a"), lab.host("b"));
    a.mount().ok();
    let stop = AtomicBool::new(false);
    let kept = std::thread::scope(|scope| {
        let works = scope.spawn(|| {
            let mut kept = Vec::new();
            for number in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let (name, gone) = (format!("f{number}"), format!("gone{number}"));
                a.write(&gone, "soon gone").unwrap();
                fs::remove_file(a.file(&gone)).unwrap();
                a.write(&name, &name).unwrap();
                kept.push(name);
            }
            kept
        });
        let over = Over(&stop);
        for round in 0..6 {
            let member = etcd.members[round % 3].as_ref().unwrap().id();
            kill(member, "-STOP");
            std::thread::sleep(Duration::from_millis(3_400 + 100 * round as u64));
            kill(member, "-CONT");
            std::thread::sleep(Duration::from_millis(300));
        }
        drop(over);
        works.join().unwrap()
    });
    a.umount().ok();
    b.mount().ok();
    let mut there: Vec<_> =
        fs::read_dir(b.file("")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let mut expected = kept.clone();
    there.sort();
    expected.sort();
    assert_eq!(there, expected);
    for name in &kept {
        assert_eq!(fs::read_to_string(b.file(name)).unwrap(), *name);
    }
    b.umount().ok();
    b.run("check store/v").ok();
}

/// A leader that is stopped for longer than it may be silent has nobody believe it afterwards, and ends.
#[test]
fn a_leader_that_was_stopped_is_believed_no_more() {
    if !is_there() {
        return;
    }
    let etcd = Etcd::start(1);
    let mut lab = Lab::new();
    {
        let (a, b) = (lab.joined("a"), lab.joined("b"));
        let id = lab.vault(a);
        lab.grant(b, &id);
    }
    into_etcd(&mut lab, &etcd);
    let replica = run_replica(&lab, "replica");
    wait_for("the replica stands by", || replica_log(&lab).contains("standing by"));
    lab.host("a").mount().ok();
    lab.host("a").write("f", "one").unwrap();
    let first = lab.server.as_ref().unwrap().id();
    kill(first, "-STOP");
    // The place to listen at is the first one's yet: the replica leads, and cannot serve.
    wait_for("the replica leads", || replica_log(&lab).contains("leading"));
    kill(first, "-CONT");
    let ended = lab.server.take().unwrap().wait().unwrap();
    assert_eq!(ended.code(), Some(5), "{}", lab.log());
    assert!(lab.log().contains("another replica leads") || lab.log().contains("ended the lease"), "{}", lab.log());
    // It may have come to serve, or found the place taken.
    drop(replica);
    lab.start();
    wait_for("it goes on", || lab.host("a").write("g", "two").is_ok());
    lab.host("a").umount().ok();
    assert!(Path::new(&lab.path("server/state.redb.moved")).exists());
}

/// Has the replica listen at a place of its own. Returns its port.
fn move_replica(lab: &Lab) -> u16 {
    let (port, metrics) = (free_port(), free_port());
    let config = fs::read_to_string(lab.path("replica/server.toml")).unwrap();
    let config = config.replace(&format!("listen = \"127.0.0.1:{}", lab.port), &format!("listen = \"127.0.0.1:{port}"));
    let config = config.replace(&lab.metrics.to_string(), &metrics.to_string());
    fs::write(lab.path("replica/server.toml"), config).unwrap();
    port
}

/// What a server refuses of a host's: whatever a connection asks that does not say which versions of the protocol it
/// speaks, a commit that another server has made, and whatever a session says of which it has not heard.
async fn refusals((silent, calls): (&Channel, &Calls), made: &proto::CommitRequest, unheard: &proto::Of) -> [Code; 6] {
    let of_unheard = proto::CommitRequest { of: Some(unheard.clone()), ..made.clone() };
    let rows = RowsRequest { vault: unheard.vault.clone(), session: unheard.session, since: Vec::new() };
    let [mut reads, mut gives_up] = [(); 2].map(|()| AnchorsClient::new(calls.clone()));
    let mut says_nothing = AnchorsClient::new(silent.clone());
    let (unspoken, repeated, committed, read, given_up, resumed) = tokio::join!(
        says_nothing.commit(made.clone()),
        commit(calls, made),
        commit(calls, &of_unheard),
        reads.rows(rows),
        gives_up.give_up(unheard.clone()),
        Attended::resume(calls, unheard, Vec::new()),
    );
    let [repeated, committed] = [repeated, committed].map(|done| done.unwrap_err());
    let (read, given_up) = (read.unwrap_err().code(), given_up.unwrap_err().code());
    [unspoken.unwrap_err().code(), repeated, committed, read, given_up, resumed.map(drop).unwrap_err().code()]
}

/// A leader does not know at once that another one leads. The host whose commit that one has made, and which has not
/// heard so, hears nothing of it from the former one: it would take a refusal for final.
#[test]
fn a_leader_that_does_not_know_that_it_leads_no_more_refuses_nothing() {
    if !is_there() {
        return;
    }
    let mut etcd = Etcd::start(1);
    // It looks as rarely, if it is asked nothing, and ends only when it has looked.
    etcd.leader_seconds = 60;
    let mut lab = Lab::with_term(150);
    let id = {
        let (a, b) = (lab.joined("a"), lab.joined("b"));
        let id = lab.vault(a);
        lab.grant(b, &id);
        id
    };
    into_etcd(&mut lab, &etcd);
    let port = move_replica(&lab);
    let replica = run_replica(&lab, "replica");
    wait_for("the replica stands by", || replica_log(&lab).contains("standing by"));
    let vault = id_of(&id);
    Runtime::new().unwrap().block_on(async {
        let former = channel(&lab, "a");
        let mut of_a = Attended::begin(&former, begin(&vault, true)).await.unwrap();
        let granted = of_a.acquire().await;
        let head = commit(&former, &one_row((&of_a.of, &granted), &granted.head, 1)).await.unwrap();
        let of = of_a.of.clone();
        drop(of_a);
        // Connected before: the process ends when it has learned that it leads no more.
        let silent = silent_channel(&lab, "a");
        let refused = AnchorsClient::new(silent.clone()).give_up(of.clone()).await;
        assert_eq!(refused.unwrap_err().code(), Code::Unimplemented);
        etcd.depose().await;
        tokio::task::block_in_place(|| {
            wait_for("the replica serves", || replica_log(&lab).contains("serving"));
        });
        let [next_a, next_b] = ["a", "b"].map(|name| channel_by(&lab, name, port));
        let _again = Attended::resume(&next_a, &of, granted.grant.into_iter().collect()).await.unwrap();
        let head = commit(&next_a, &one_row((&of, &granted), &head, 2)).await.unwrap();
        let last = one_row((&of, &granted), &head, 3);
        let made = commit(&next_a, &last).await.unwrap();
        let of_b = Attended::begin(&next_b, begin(&vault, true)).await.unwrap();
        // What a host takes for an answer: see `is_about_the_commit` and `has_ended` in lamassu-rpc.
        let is_none =
            |code: &Code| matches!(code, Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal);
        let refusals = refusals((&silent, &former), &last, &of_b.of).await;
        assert!(refusals.iter().all(is_none), "{refusals:?}");
        assert_eq!(commit(&next_a, &last).await.unwrap(), made, "who leads answers");
    });
    let ended = lab.server.take().unwrap().wait().unwrap();
    assert!(ended.code() == Some(5) && lab.log().contains("another replica leads"), "{}", lab.log());
    drop(replica);
}

/// The directory of a replica that stands by says nothing of what was in force meanwhile. The session that it takes
/// over began under a policy that forbids what a host commits now.
#[test]
fn a_replica_that_takes_over_knows_the_policy_that_was_in_force() {
    if !is_there() {
        return;
    }
    let etcd = Etcd::start(1);
    let mut lab = Lab::with_term(30);
    let id = {
        let (a, evil) = (lab.joined("a"), lab.joined("evil"));
        let id = lab.vault(a);
        lab.grant(evil, &id);
        a.mount().ok();
        a.write("good", "good").unwrap();
        a.umount().ok();
        lab.wait_until_free();
        id
    };
    into_etcd(&mut lab, &etcd);
    lab.stop("-TERM");
    leave_rows(&etcd, 300);
    lab.start();
    let cluster = etcd.cluster();
    wait_for("what was left is removed", || below(&cluster, "new/").is_empty());
    let replica = run_replica(&lab, "replica");
    wait_for("the replica stands by", || replica_log(&lab).contains("standing by"));
    for name in ["first", "second"] {
        let text = format!("# the {name} one\n{NO_PLAIN}");
        reload(&lab, &text, true);
        fs::write(lab.path("replica/policy.toml"), text).unwrap();
    }
    // As a replica has it that served once, and one that has lost it.
    fs::write(lab.path("replica/policy.applied"), "").unwrap();
    let liar = Liar::new(&lab, &id);
    let turn = liar.turn();
    kill(lab.server.as_ref().unwrap().id(), "-KILL");
    wait_for("the replica serves", || replica_log(&lab).contains("serving"));
    assert!(!may_be_plain(&liar, &turn), "{}", replica_log(&lab));
    assert!(replica_log(&lab).contains("leading"));
    turn.pass();
    liar.turns.leave();
    drop(replica);
}
