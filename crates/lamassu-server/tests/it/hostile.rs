//! A host that has joined and means ill, by calls that no program of ours makes. Beside it another goes on with its
//! work.

use crate::common::raw::*;
use crate::common::*;
use lamassu_rpc::proto::alerts_client::AlertsClient;
use lamassu_rpc::proto::anchors_client::AnchorsClient;
use lamassu_rpc::proto::hosts_client::HostsClient;
use lamassu_rpc::proto::sessions_client::SessionsClient;
use lamassu_rpc::proto::{self, up::Said};
use lamassu_rpc::protocol;
use std::fs;
use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

fn begin(vault: &[u8]) -> proto::Up {
    up(Said::Begin(crate::common::raw::begin(vault, false)))
}

/// Whether the server ends a stream that it answers, in time.
async fn ends(mut down: tonic::Streaming<proto::Down>) -> bool {
    let end = async { while let Ok(Some(_)) = down.message().await {} };
    tokio::time::timeout(PATIENCE, end).await.is_ok()
}

#[test]
fn what_is_not_granted_cannot_be_put_and_what_is_begun_and_left_is_in_nobodys_way() {
    let lab = Lab::new();
    let (a, evil) = (lab.joined("a"), lab.joined("evil"));
    a.run("init store/v").ok();
    let id = a.id("store/v");
    lab.grant(a, &id);
    Runtime::new().unwrap().block_on(async {
        let anchors = AnchorsClient::new(channel(&lab, "evil"));
        // Without a grant, at once.
        let first = proto::PutRequest { vault: id_of(&id), ..Default::default() };
        let put = anchors.clone().put(tokio_stream::iter([first.clone()])).await;
        assert_eq!(put.unwrap_err().code(), Code::PermissionDenied);
        // More than it may at once: no thread, and no file, is taken by any of them.
        let mut streams = Vec::new();
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..600 {
            let (send, rows) = mpsc::channel(1);
            streams.push(send);
            let mut anchors = anchors.clone();
            calls.spawn(async move { anchors.put(ReceiverStream::new(rows)).await.map(drop) });
        }
        let status = tokio::task::block_in_place(|| lab.serve(&["status"]));
        status.ok();
        tokio::task::block_in_place(|| a.run(&format!("anchor move store/v {}", lab.url()))).ok();
        drop(streams);
        calls.shutdown().await;
        // One that is granted and says nothing more holds the vault up for as long as that is borne, and no longer.
        tokio::task::block_in_place(|| {
            a.run("init store/w").ok();
            lab.grant(evil, &a.id("store/w"));
            lab.grant(a, &a.id("store/w"));
        });
        let (send, rows) = mpsc::channel(1);
        let vault = id_of(&tokio::task::block_in_place(|| a.id("store/w")));
        send.send(proto::PutRequest { vault, ..Default::default() }).await.unwrap();
        let mut idle = anchors.clone();
        let idle = tokio::spawn(async move { idle.put(ReceiverStream::new(rows)).await.map(drop) });
        // The server makes a file for it.
        let has_begun = || {
            let mut names = fs::read_dir(lab.path("server/anchors")).unwrap().map(|e| e.unwrap().file_name());
            names.any(|name| name.as_encoded_bytes().ends_with(b".new"))
        };
        let until = Instant::now() + PATIENCE;
        while !has_begun() {
            assert!(Instant::now() < until, "the server has not begun");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        tokio::task::block_in_place(|| {
            a.run(&format!("anchor move store/w {}", lab.url())).code(66);
            lab.serve(&["host", "revoke", "@evil"]).ok();
        });
        assert!(tokio::time::timeout(PATIENCE, idle).await.unwrap().unwrap().is_err());
        // The host hears of its end before the server has put away what it had begun.
        let until = Instant::now() + PATIENCE;
        while tokio::task::block_in_place(|| a.run(&format!("anchor move store/w {}", lab.url()))).code == 66 {
            assert!(Instant::now() < until, "what was begun and left is in the way");
        }
        tokio::task::block_in_place(|| a.run("ls store/w")).ok();
    });
}

/// The server takes the newest version of the protocol that both speak, and says with a refusal which ones it speaks.
#[test]
fn a_host_that_speaks_no_version_of_the_server_or_does_not_say_is_refused() {
    let lab = Lab::new();
    let id = lab.vault(lab.joined("a"));
    Runtime::new().unwrap().block_on(async {
        let attend = async |spoken: Option<&'static str>| {
            let speaks = move |mut call: tonic::Request<()>| {
                if let Some(spoken) = spoken {
                    call.metadata_mut().insert(protocol::KEY, spoken.parse().unwrap());
                }
                Ok(call)
            };
            let mut sessions = SessionsClient::with_interceptor(silent_channel(&lab, "a"), speaks);
            let (send, said) = mpsc::channel(1);
            send.send(begin(&id_of(&id))).await.unwrap();
            let mut down = sessions.attend(ReceiverStream::new(said)).await?.into_inner();
            match down.message().await?.unwrap().said.unwrap() {
                proto::down::Said::Begun(begun) => Ok(begun.protocol),
                other => panic!("{other:?}"),
            }
        };
        for spoken in [None, Some("2-9"), Some("0-0"), Some("new"), Some("")] {
            let refused: tonic::Status = attend(spoken).await.unwrap_err();
            assert_eq!(refused.code(), Code::Unimplemented, "{refused}");
            assert_eq!(protocol::of(refused.metadata()), Some(protocol::SPOKEN));
            assert!(refused.message().contains("the server speaks the versions 1-1"), "{refused}");
        }
        assert_eq!(attend(Some("1-9")).await.unwrap(), 1);
    });
}

/// Reports make sense, are of vaults that the host may use, and have an end.
#[test]
fn reports_that_make_no_sense_or_are_of_others_are_refused_whole() {
    let lab = Lab::new();
    let (a, _) = (lab.joined("a"), lab.joined("evil"));
    let id = lab.vault(a);
    let good = r#"{"time":1,"kind":"stale","path":"p","found_by":"read","is_damage":true,"text":"t"}"#;
    let events = |events: Vec<String>| proto::Findings { vault: id_of(&id), events, lost: 0 };
    Runtime::new().unwrap().block_on(async {
        let report = async |name: &str, findings: proto::Findings| {
            let done = AlertsClient::new(channel(&lab, name)).report(findings).await;
            done.map(drop).map_err(|status| status.code())
        };
        assert_eq!(report("evil", events(vec![good.into()])).await, Err(Code::PermissionDenied));
        for bad in [
            "",
            "{}",
            "[]",
            &good.replace("stale", "\\u001b[2J"),
            &good.replace("\"p\"", &format!("{:?}", "p".repeat(9000))),
        ] {
            assert_eq!(report("a", events(vec![good.into(), bad.into()])).await, Err(Code::InvalidArgument), "{bad}");
        }
        let vault = proto::Findings { vault: vec![1; 15], ..events(vec![good.into()]) };
        assert_eq!(report("a", vault).await, Err(Code::InvalidArgument));
        assert_eq!(report("a", events(vec![good.into(); 201])).await, Err(Code::InvalidArgument));
        assert!(report("a", events(vec!["x".repeat(2 << 20)])).await.is_err());
        assert_eq!(tokio::task::block_in_place(|| lab.serve(&["alerts", "list"])).ok().out, "");
        // Numbers have no end that ends the server.
        let lost = proto::Findings { lost: u64::MAX, ..events(vec![good.into(); 200]) };
        assert_eq!(report("a", lost.clone()).await, Ok(()));
        assert_eq!(report("a", lost).await, Ok(()));
        let shown = tokio::task::block_in_place(|| lab.serve(&["alerts", "list"])).ok().out;
        assert!(shown.contains("not-kept") && shown.contains("400 times"), "{shown}");
    });
}

/// A small disk: unmounted when the test ends.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    /// Moves the directory of a server that is stopped to a disk of `mib`. `None`: the test cannot mount.
    fn of_server(lab: &Lab, mib: u32) -> Option<SmallDisk> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("NOTE: a small disk is mounted, which needs root: not run");
            return None;
        }
        let (dir, was) = (lab.path("server"), lab.path("was"));
        fs::rename(&dir, &was).unwrap();
        fs::create_dir(&dir).unwrap();
        let options = format!("size={mib}m,mode=700");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(&dir).status();
        assert!(mounted.unwrap().success());
        let disk = SmallDisk(dir.clone());
        assert!(Command::new("cp").arg("-aT").args([&was, &dir]).status().unwrap().success());
        Some(disk)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Reports fill a disk up to the room that is kept for the state: the server goes on, and an administrator clears up.
#[test]
fn reports_do_not_take_the_room_that_the_state_needs() {
    let mut lab = Lab::new();
    let id = lab.vault(lab.joined("a"));
    lab.stop("-TERM");
    let Some(_disk) = SmallDisk::of_server(&lab, 110) else { return };
    let dir = lab.path("server");
    lab.start();
    let st = rustix::fs::statvfs(&dir).unwrap();
    let spare = (st.f_bavail * st.f_frsize).saturating_sub(67 << 20);
    fs::write(dir.join("other"), vec![1; usize::try_from(spare).unwrap()]).unwrap();
    let refused = Runtime::new().unwrap().block_on(async {
        let mut alerts = AlertsClient::new(channel(&lab, "a"));
        for number in 0..200_u32 {
            let event = |n: u32| {
                let path = format!("{}-{n}", "p".repeat(900));
                format!(r#"{{"time":1,"kind":"stale","path":"{path}","found_by":"read","is_damage":true,"text":"t"}}"#)
            };
            let events = (0..200).map(|n| event(number * 200 + n)).collect();
            let report = proto::Findings { vault: id_of(&id), events, lost: 0 };
            if let Err(status) = alerts.report(report).await {
                return Some(status.code());
            }
        }
        None
    });
    assert_eq!(refused, Some(Code::ResourceExhausted));
    // Nor does a session begin: each adds to the audit log.
    Runtime::new().unwrap().block_on(async {
        let (send, said) = mpsc::channel(4);
        send.send(begin(&id_of(&id))).await.unwrap();
        let refused = SessionsClient::new(channel(&lab, "a")).attend(ReceiverStream::new(said)).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    });
    lab.serve(&["enrol", "@b"]).ok();
    assert!(lab.serve(&["alerts", "close", "--all"]).ok().out.contains("closed: "));
    fs::remove_file(dir.join("other")).unwrap();
    lab.host("a").run("ls store/v").ok();
    lab.serve(&["check"]).ok();
    lab.stop("-TERM");
}

/// Another program fills the server's disk to its last byte. What cannot be refused is written all the same: sessions
/// end, an administrator revokes a host. The server stays, and hosts go on when there is space.
#[test]
fn a_disk_that_another_program_fills_does_not_end_the_server() {
    let mut lab = Lab::new();
    lab.vault(lab.joined("a"));
    lab.stop("-TERM");
    let Some(_disk) = SmallDisk::of_server(&lab, 120) else { return };
    let dir = lab.path("server");
    lab.start();
    wait_for("the space is kept", || dir.join("reserve").exists());
    {
        let a = lab.host("a");
        a.mount().ok();
        a.write("f", "synced").unwrap();
    }
    // All that there is, and no block is left.
    let mut filler = fs::File::create(dir.join("filler")).unwrap();
    while filler.write_all(&[1; 4096]).is_ok() {}
    let free = || rustix::fs::statvfs(&dir).unwrap().f_bavail;
    assert_eq!(free(), 0);
    // Entries of the audit log, until the state has to grow.
    let mut grown = 0;
    while dir.join("reserve").exists() {
        lab.serve(&["enrol", &format!("@h{grown}")]).ok();
        grown += 1;
        assert!(grown < 5000, "the state never grew");
    }
    kill(lab.host("a").daemon(), "-KILL");
    wait_for("the killed host's session ends", || lab.metric("sessions") == 0.0);
    let _ = Command::new("umount").arg("-l").arg(lab.path("m-a")).output();
    // No session begins: it takes space.
    lab.host("a").mount().code(66).says("nearly full");
    drop(filler);
    fs::remove_file(dir.join("filler")).unwrap();
    wait_for("the space is kept again", || dir.join("reserve").exists());
    assert_eq!(lab.host("a").run("cat store/v f").ok().out, "synced");
    lab.serve(&["check"]).ok();
    lab.stop("-TERM");
}

/// An anchor that is gone from the server is replaced by no host's copy, which may be older, before an administrator
/// says so. One that is there, and not known of, is found.
#[test]
fn an_anchor_that_is_lost_is_not_replaced_by_a_copy_of_it() {
    let mut lab = Lab::new();
    let id = lab.vault(lab.joined("a"));
    let anchor = lab.path(&format!("server/anchors/{}.anchor", id.replace('-', "")));
    lab.stop("-TERM");
    fs::rename(&anchor, lab.path("was")).unwrap();
    lab.start();
    let runtime = Runtime::new().unwrap();
    let put = |lab: &Lab| {
        runtime.block_on(async {
            let first = proto::PutRequest { vault: id_of(&id), ..Default::default() };
            let put = AnchorsClient::new(channel(lab, "a")).put(tokio_stream::iter([first])).await;
            put.unwrap_err()
        })
    };
    let refused = put(&lab);
    assert!(refused.code() == Code::PermissionDenied && refused.message().contains("forget"), "{refused}");
    lab.serve(&["check"]).code(26).says("is gone");
    lab.serve(&["forget", &format!("@{id}")]).ok();
    lab.serve(&["forget", &format!("@{id}")]).code(3);
    lab.serve(&["check"]).ok();
    assert_eq!(put(&lab).code(), Code::InvalidArgument, "no rows are no anchor");
    lab.stop("-TERM");
    fs::rename(lab.path("was"), &anchor).unwrap();
    lab.start();
    assert!(lab.serve(&["audit"]).ok().out.contains("anchor-found"));
    lab.host("a").run("ls store/v").ok();
    lab.stop("-TERM");
    fs::rename(&anchor, lab.path("was")).unwrap();
    lab.serve(&["check"]).code(26).says("is gone");
}

#[test]
fn a_host_that_is_revoked_has_no_connection_left_and_begins_nothing() {
    let lab = Lab::new();
    let (a, evil) = (lab.joined("a"), lab.joined("evil"));
    let id = lab.vault(a);
    lab.grant(evil, &id);
    Runtime::new().unwrap().block_on(async {
        let channel = channel(&lab, "evil");
        let mut sessions = SessionsClient::new(channel.clone());
        // The stream is there before the revocation, its first word comes behind it.
        let (send, said) = mpsc::channel(4);
        let attends = tokio::spawn(async move { sessions.attend(ReceiverStream::new(said)).await });
        tokio::time::sleep(Duration::from_millis(300)).await;
        tokio::task::block_in_place(|| lab.serve(&["host", "revoke", "@evil"])).ok();
        let _ = send.send(begin(&id_of(&id))).await;
        assert!(attends.await.unwrap().is_err());
        // Its connection is closed, and by the next one it is told why: what it sends is not read.
        let commit = proto::CommitRequest { of: None, changes: vec![0; 12 << 20], ..Default::default() };
        let until = Instant::now() + PATIENCE;
        loop {
            let refused = AnchorsClient::new(channel.clone()).commit(commit.clone()).await.unwrap_err();
            if refused.code() == Code::PermissionDenied && refused.message().contains("revoked") {
                break;
            }
            assert!(Instant::now() < until, "{refused}");
        }
        let refused = HostsClient::new(channel.clone()).join(proto::PublicKey { spki: vec![1; 44] }).await;
        assert!(refused.is_err());
    });
    a.mount().ok();
    a.write("f", "one").unwrap();
    a.umount().ok();
    // A grant that is taken back ends what goes by it.
    let b = lab.joined("b");
    lab.grant(b, &id);
    lab.wait_until_free();
    b.mount().ok();
    lab.serve(&["host", "grant", "--not", "@b", &format!("@{id}")]).ok();
    wait_for("a host that may no longer use the vault lets it go", || a.mount().code == 0);
    a.umount().ok();
}

#[test]
fn a_session_gets_nothing_without_bound() {
    let lab = Lab::new();
    let (a, evil) = (lab.joined("a"), lab.joined("evil"));
    let (id, other) = (lab.vault(a), {
        a.run("init store/w").ok();
        a.id("store/w")
    });
    lab.grant(evil, &id);
    Runtime::new().unwrap().block_on(async {
        let channel = channel(&lab, "evil");
        let attend = async |first: proto::Up| {
            let (send, said) = mpsc::channel(1000);
            send.send(first).await.unwrap();
            let down = SessionsClient::new(channel.clone()).attend(ReceiverStream::new(said)).await?;
            Ok::<_, tonic::Status>((send, down.into_inner()))
        };
        assert_eq!(attend(begin(&id_of(&other))).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(attend(begin(b"../../etc/passwd")).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(attend(begin(b"x")).await.unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(attend(up(Said::Leave(proto::Nothing {}))).await.unwrap_err().code(), Code::InvalidArgument);
        // Leases of anything but the vault.
        let (send, down) = attend(begin(&id_of(&id))).await.unwrap();
        let acquire = proto::Acquire { request: 1, object: 7, mode: 1 };
        send.send(up(Said::Acquire(acquire))).await.unwrap();
        assert!(ends(down).await, "an object that is none was granted, or waited for");
        // A commit of more changes than there may be: refused before they take memory.
        let of = proto::Of { vault: id_of(&id), session: 1 };
        let changes = [0, 1, b'x'].repeat(4_000_000);
        let many = proto::CommitRequest { of: Some(of), base: vec![0; 32], changes, grant: 1 };
        let refused = AnchorsClient::new(channel.clone()).commit(many).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    });
    lab.serve(&["host", "revoke", "@evil"]).ok();
    a.mount().ok();
    a.write("f", "one").unwrap();
    a.umount().ok();
}

/// Whoever reaches the address of monitoring could else keep it from answering.
#[test]
fn connections_that_ask_nothing_are_not_in_the_way_of_monitoring() {
    let lab = Lab::new();
    let connect = || std::net::TcpStream::connect(("127.0.0.1", lab.metrics)).unwrap();
    let mut idle: Vec<_> = (0..100).map(|_| connect()).collect();
    for stream in &mut idle[50..] {
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: ").unwrap_or_default();
    }
    for path in ["/health", "/metrics"] {
        assert_eq!(lab.asked(path).0, 200);
    }
    drop(idle);
}
