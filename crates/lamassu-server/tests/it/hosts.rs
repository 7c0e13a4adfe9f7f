//! What hosts do, and what a server does for them.

use crate::common::*;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A host writes, another goes on; a store that puts an older state back is found by the one that never saw the newer.
#[test]
fn a_vault_goes_from_host_to_host_and_no_older_state_passes() {
    let lab = Lab::new();
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    let id = lab.vault(a);
    a.mount().ok();
    a.write("f", "one").unwrap();
    b.mount().code(68).says("keeps no anchor of this vault");
    lab.grant(b, &id);
    b.mount().code(63).says("host a");
    b.run("ls store/v").code(60);
    a.umount().ok();
    b.mount().ok();
    assert_eq!(fs::read_to_string(b.file("f")).unwrap(), "one");
    b.write("f", "two").unwrap();
    b.umount().ok();
    // Remembered from now on.
    assert_eq!(b.run("cat store/v f").ok().out, "two");
    copy(&lab.path("store/v"), &lab.path("old"));
    b.mount().ok();
    b.write("f", "three").unwrap();
    fs::create_dir(b.file("d")).unwrap();
    b.umount().ok();
    assert_eq!(a.run("cat store/v f").ok().out, "three");
    fs::remove_dir_all(lab.path("store/v")).unwrap();
    copy(&lab.path("old"), &lab.path("store/v"));
    a.run("cat store/v f").code(30);
    a.run("check store/v").code(30);
    b.run("scrub store/v").code(30);
}

/// Each of them finds no copy of the anchor on this host.
#[test]
fn processes_of_a_host_that_read_at_once_make_one_copy() {
    let lab = Lab::new();
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    let id = lab.vault(a);
    lab.grant(b, &id);
    let copy = lab.path(&format!("state-b/lamassu/anchors/{}.anchor", id.replace('-', "")));
    let line = format!("anchor status --anchor {} store/v", lab.url());
    for _ in 0..6 {
        std::thread::scope(|s| {
            let all = [(); 3].map(|()| s.spawn(|| b.run(&line)));
            all.into_iter().for_each(|one| drop(one.join().unwrap().ok()));
        });
        fs::remove_file(&copy).unwrap();
    }
}

#[test]
fn a_token_is_for_one_host_and_once_and_names_its_server() {
    let lab = Lab::new();
    let token = lab.serve(&["enrol", "@a"]).ok().out;
    let (a, b) = (lab.host("a"), lab.host("b"));
    a.run(&format!("ls --anchor {} nothing", lab.url())).code(6);
    a.with_input(&["host", "join"], "lamassu-join:nonsense").code(2).says("no token");
    let told = a.with_input(&["host", "join", token.trim()], "").code(2).says("as an argument");
    assert!(!told.err.contains(token.trim()), "{}", told.err);
    a.with_input(&["host", "join"], &token).ok().says("joined");
    b.with_input(&["host", "join"], &token).code(68).says("token was used");
    lab.serve(&["enrol", "@a"]).code(28);
    lab.serve(&["enrol", "@no/name"]).code(2);
    // Another server with the same address: its authority is not the one that the token names.
    let token = lab.serve(&["enrol", "@b"]).ok().out;
    let mut other = Lab::new();
    other.stop("-TERM");
    let config = fs::read_to_string(lab.path("server/server.toml")).unwrap();
    fs::write(other.path("server/server.toml"), config).unwrap();
    let mut lab = lab;
    lab.stop("-TERM");
    other.port = lab.port;
    other.start();
    let b = lab.host("b");
    b.with_input(&["host", "join"], &token).code(67).says("not the server");
    let a = lab.host("a");
    a.run("init store/v").ok();
    let id = a.id("store/v");
    a.run(&format!("anchor move store/v {}", lab.url())).code(67).says("not the server");
    other.stop("-TERM");
    a.run(&format!("anchor move store/v {}", lab.url())).code(66).says("does not answer");
    a.run("check store/v").ok();
    lab.start();
    let a = lab.host("a");
    a.run(&format!("anchor move store/v {}", lab.url())).code(68).says("host grant");
    a.run("check store/v").ok();
    lab.grant(a, &id);
    a.run(&format!("anchor move store/v {}", lab.url())).ok();
    // And back, where another host finds nothing any more.
    a.run("anchor move store/v anchor").ok();
    a.run("check store/v").ok();
    assert!(a.run("info store/v").ok().out.contains("/anchor"));
    a.run(&format!("ls --anchor {} store/v", lab.url())).code(68);
}

/// A host that has no room for its identity has not used the token.
#[test]
fn a_token_is_used_by_a_host_that_can_keep_its_identity() {
    let lab = Lab::new();
    let a = lab.host("a");
    let token = lab.serve(&["enrol", "@a"]).ok().out;
    let servers = lab.path("state-a/lamassu/servers");
    fs::create_dir_all(servers.parent().unwrap()).unwrap();
    fs::write(&servers, "in the way").unwrap();
    assert_ne!(a.with_input(&["host", "join"], &token).code, 0);
    fs::remove_file(&servers).unwrap();
    let told = a.with_input(&["host", "join"], &token).ok();
    assert!(!told.err.contains("replaced"), "{told:?}");
    let identity = || fs::read(servers.join(format!("127.0.0.1:{}/key.der", lab.port))).unwrap();
    let (before, id) = (identity(), lab.vault(a));
    // What is refused leaves what there is.
    a.with_input(&["host", "join"], &token).code(68).says("host revoke");
    assert_eq!(identity(), before);
    a.run("ls store/v").ok();
    lab.serve(&["enrol", "@a"]).code(28).says("host revoke");
    let token = lab.serve(&["enrol", "@again"]).ok().out;
    a.with_input(&["host", "join"], &token).ok().says("is replaced");
    assert_ne!(identity(), before);
    lab.serve(&["host", "grant", "@again", &format!("@{id}")]).ok();
    a.run("ls store/v").ok();
}

/// A server without its port has the usual one, as in sources of keys.
#[test]
fn a_server_is_named_without_its_port_if_that_is_the_usual_one() {
    let lab = Lab::new();
    let a = lab.joined("a");
    a.run("init store/v").ok();
    let joined = format!("but 127.0.0.1:{}", lab.port);
    for line in ["anchor move store/v server://127.0.0.1", "ls --anchor server://127.0.0.1 store/v"] {
        a.run(line).code(67).says("127.0.0.1:7433: this host has not joined it").says(&joined);
    }
    a.run("ls store/v").ok();
}

/// What was acknowledged is there for the next host; the same host need not wait for its own dead session.
#[test]
fn a_killed_host_loses_nothing_acknowledged_and_is_waited_for() {
    // The other host has to come before the session ends by itself.
    const TERM: u64 = 30;
    let lab = Lab::with_term(TERM);
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    let id = lab.vault(a);
    lab.grant(b, &id);
    a.mount().ok();
    a.write("f", "synced").unwrap();
    kill(a.daemon(), "-KILL");
    let killed = Instant::now();
    b.mount().code(63).says("in use by host a");
    let _ = Command::new("umount").arg("-l").arg(a.file("")).output();
    // Nothing tells the server that the process is gone, but the same host.
    a.mount().ok().says("did not end");
    assert_eq!(fs::read_to_string(a.file("f")).unwrap(), "synced");
    assert!(killed.elapsed() < Duration::from_secs(TERM), "the host waited for itself");
    a.write("g", "synced, too").unwrap();
    kill(a.daemon(), "-KILL");
    let _ = Command::new("umount").arg("-l").arg(a.file("")).output();
    wait_for("the vault is free", || b.mount().code == 0);
    assert_eq!(fs::read_to_string(b.file("g")).unwrap(), "synced, too");
    b.umount().ok();
    b.run("check store/v").ok();
}

/// The first reader after a writer that was killed takes over what that one left, and then reads as the others do.
#[test]
fn readers_share_a_vault_whose_writer_was_killed() {
    let lab = Lab::with_term(5);
    let hosts = ["a", "b", "c"].map(|name| lab.joined(name));
    let [a, b, c] = hosts;
    let id = lab.vault(a);
    [b, c].iter().for_each(|host| lab.grant(*host, &id));
    a.mount().ok();
    a.write("f", "synced").unwrap();
    kill(a.daemon(), "-KILL");
    let _ = Command::new("umount").arg("-l").arg(a.file("")).output();
    let mount = |host: Host<'_>| {
        let line = format!("mount --read-only --anchor {} store/v m-{}", lab.url(), host.name);
        wait_for("a reader gets the vault", || host.run(&line).code == 0);
    };
    [b, c].into_iter().for_each(mount);
    for host in [b, c, b] {
        assert_eq!(fs::read_to_string(host.file("f")).unwrap(), "synced", "on {}", host.name);
    }
    [b, c].iter().for_each(|host| drop(host.umount().ok()));
    a.mount().ok();
    a.write("f", "and more").unwrap();
    a.umount().ok();
    a.run("check store/v").ok();
}

#[test]
fn monitoring_is_told_counts_and_no_names() {
    let lab = Lab::new();
    let (a, b) = (lab.joined("a-host"), lab.joined("b-host"));
    let id = lab.vault(a);
    assert_eq!(lab.asked("/health"), (200, "ok\n".into()));
    assert_eq!(lab.asked("/hosts").0, 404);
    let all = || ["hosts", "hosts_revoked", "vaults_open", "sessions"].map(|name| lab.metric(name));
    assert_eq!(all(), [2.0, 0.0, 0.0, 0.0]);
    let before = lab.metric("commits_total");
    a.mount().ok();
    a.write("f", "one").unwrap();
    assert_eq!(all(), [2.0, 0.0, 1.0, 1.0]);
    assert!(lab.metric("commits_total") > before && lab.metric("rows_total") > 0.0);
    let (_, text) = lab.asked("/metrics"); // both at one time: the mount commits by itself, too
    assert_eq!(value_in(&text, "commit_seconds_count"), value_in(&text, "commits_total"));
    b.run(&format!("ls --anchor {} store/v", lab.url())).code(68); // it has no grant
    lab.serve(&["host", "revoke", "@b-host"]).ok();
    assert_eq!(all(), [1.0, 1.0, 1.0, 1.0]);
    b.run(&format!("ls --anchor {} store/v", lab.url())).code(68);
    assert!(lab.metric("calls_total{call=\"Attend\",admitted=\"no\"}") >= 1.0);
    let refused = lab.metric("connections_refused_total");
    drop(TcpStream::connect(("127.0.0.1", lab.port)).unwrap());
    wait_for("a connection without a handshake is counted", || lab.metric("connections_refused_total") != refused);
    let (_, text) = lab.asked("/metrics");
    assert!(text.ends_with("# EOF\n"));
    for name in ["a-host", "b-host", &id] {
        assert!(!text.contains(name), "{text}");
    }
    // Those who say nothing are let go of.
    let idle: Vec<_> = (0..40).map(|_| TcpStream::connect(("127.0.0.1", lab.metrics)).unwrap()).collect();
    assert_eq!(lab.asked("/health").0, 200);
    drop(idle);
    a.umount().ok();
}

/// The disk of a host's copy is full for a while: errors meanwhile, and nothing that was acknowledged is lost.
#[test]
fn a_copy_that_could_not_be_written_follows_when_there_is_room() {
    let lab = Lab::new();
    let state = lab.path("state-a");
    fs::create_dir(&state).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=3m", "none"]).arg(&state).status().unwrap();
    if !mounted.success() {
        eprintln!("SKIPPED: no file system can be mounted here");
        return;
    }
    let a = lab.joined("a");
    let id = lab.vault(a);
    a.mount().ok();
    a.write("before", "synced").unwrap();
    let filler = state.join("filler");
    let mut fill = fs::File::create(&filler).unwrap();
    while fill.write_all(&[1; 4096]).is_ok() {}
    drop(fill);
    let written = (0..4000).take_while(|n| a.write(&format!("f{n}"), "synced").is_ok()).count();
    assert!(written < 4000, "the disk is not full");
    fs::remove_file(&filler).unwrap();
    a.write("after", "synced, too").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    let b = lab.joined("b");
    lab.grant(b, &id);
    b.mount().ok();
    for name in (0..written).map(|n| format!("f{n}")).chain(["before".into()]) {
        assert_eq!(fs::read_to_string(b.file(&name)).unwrap(), "synced", "{name}");
    }
    assert_eq!(fs::read_to_string(b.file("after")).unwrap(), "synced, too");
    b.umount().ok();
    a.run("check store/v").ok();
    assert!(Command::new("umount").arg("-l").arg(&state).status().unwrap().success());
}

/// The classic test of fencing: a host is stopped, another takes over, the first goes on.
#[test]
fn a_host_that_was_stopped_for_longer_than_a_term_changes_nothing_any_more() {
    let lab = Lab::new();
    let (a, b) = (lab.joined("a"), lab.joined("b"));
    let id = lab.vault(a);
    lab.grant(b, &id);
    a.mount().ok();
    a.write("f", "one").unwrap();
    // By a process of its own: a program that this one starts would wait for the file to be closed in it.
    let script = "exec 3>>\"$1\"; printf buffered >&3; echo written; read go; exec 3>&-; sync \"$1\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(a.file("f")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut writer = command.stderr(Stdio::null()).spawn().unwrap();
    writer.stdout.take().unwrap().read_exact(&mut [0; 8]).unwrap();
    let daemon = a.daemon();
    kill(daemon, "-STOP");
    wait_for("the vault is free", || b.mount().code == 0);
    b.write("f", "of b").unwrap();
    kill(daemon, "-CONT");
    writer.stdin.take().unwrap().write_all(b"go\n").unwrap();
    assert!(!writer.wait().unwrap().success(), "an fsync was acknowledged behind the end of the session");
    assert!(a.write("new", "content").is_err());
    std::thread::sleep(Duration::from_secs(2)); // whatever was on its way has arrived
    assert_eq!(fs::read_to_string(b.file("f")).unwrap(), "of b");
    b.write("g", "more").unwrap();
    b.umount().ok();
    kill(daemon, "-KILL");
    b.run("check store/v").ok();
    assert_eq!(b.run("cat store/v f").ok().out, "of b");
}

#[test]
fn a_server_that_starts_anew_goes_on_with_its_sessions() {
    // It has to be back before the session of a host ends.
    const TERM: u64 = 12;
    let mut lab = Lab::with_term(TERM);
    let id = {
        let a = lab.joined("a");
        let id = lab.vault(a);
        a.mount().ok();
        a.write("f", "one").unwrap();
        id
    };
    for signal in ["-TERM", "-KILL"] {
        lab.stop(signal);
        let writing = {
            let a = lab.host("a");
            let path = a.file("while-away");
            std::thread::spawn(move || {
                let mut file = fs::File::create(path)?;
                file.write_all(b"waited")?;
                file.sync_all()
            })
        };
        std::thread::sleep(Duration::from_millis(700));
        lab.start();
        writing.join().unwrap().unwrap();
    }
    let a = lab.host("a");
    assert!(lab.serve(&["status"]).ok().out.contains(&format!("{id}  a")));
    a.write("g", "two").unwrap();
    a.umount().ok();
    lab.wait_until_free();
    let b = lab.joined("b");
    lab.grant(b, &id);
    b.run(&format!("ls --anchor {} store/v", lab.url())).ok();
    assert_eq!(b.run("cat store/v while-away").ok().out, "waited");
    // A server that is gone for a while: what the kernel has cached is not believed, and is again when it is back.
    b.mount().ok();
    let (file, dir) = (b.file("while-away"), b.file(""));
    let seen = || Ok::<_, std::io::Error>((fs::read(&file)?, file.metadata()?.len(), fs::read_dir(&dir)?.count()));
    let before = seen().unwrap();
    lab.stop("-KILL");
    std::thread::sleep(Duration::from_secs(TERM));
    let waiting = {
        let file = file.clone();
        std::thread::spawn(move || fs::read(file))
    };
    let found = file.metadata().map(|found| found.len()).map_err(|error| error.raw_os_error());
    assert_eq!(found, Err(Some(5)), "an attribute is believed without the server");
    assert_eq!(waiting.join().unwrap().unwrap_err().raw_os_error(), Some(5), "a cached page is believed");
    lab.start();
    let until = Instant::now() + PATIENCE;
    while seen().ok().as_ref() != Some(&before) {
        assert!(Instant::now() < until, "{:?}", seen());
    }
    // For good: errors, and no hang.
    lab.stop("-KILL");
    let b = lab.host("b");
    let begun = Instant::now();
    assert!(b.write("h", "lost").is_err());
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
}

#[test]
fn a_revoked_host_is_out_at_once_and_a_state_that_was_put_back_is_refused() {
    let mut lab = Lab::new();
    let id = {
        let (a, b) = (lab.joined("a"), lab.joined("b"));
        let id = lab.vault(a);
        lab.grant(b, &id);
        a.mount().ok();
        a.write("f", "one").unwrap();
        lab.serve(&["host", "revoke", "@a"]).ok();
        assert!(a.write("g", "two").is_err(), "a revoked host has an fsync acknowledged");
        a.run("ls store/v").code(68).says("revoked");
        // A token that nobody has used is void, too.
        let token = lab.serve(&["enrol", "@a"]).ok().out;
        lab.serve(&["host", "revoke", "@a"]).ok();
        lab.host("c").with_input(&["host", "join"], &token).code(68);
        // The host may not know it yet: what it had is another's when it has stopped by its own clock.
        lab.wait_until_free();
        b.mount().ok();
        b.write("h", "three").unwrap();
        b.umount().ok();
        lab.wait_until_free();
        id
    };
    // The server's state of yesterday.
    lab.stop("-TERM");
    copy(&lab.path("server"), &lab.path("backup"));
    lab.start();
    let b = lab.host("b");
    b.mount().ok();
    b.write("h", "four").unwrap();
    b.umount().ok();
    lab.wait_until_free();
    lab.stop("-TERM");
    fs::remove_dir_all(lab.path("server")).unwrap();
    copy(&lab.path("backup"), &lab.path("server"));
    lab.start();
    let b = lab.host("b");
    b.run("cat store/v h").code(71).says("has seen");
    assert!(lab.serve(&["host", "list"]).ok().out.contains(&id));
}

/// No byte of anybody who is not known gets further than the handshake, and nothing that they send ends the server.
#[test]
fn strangers_get_no_further_than_the_handshake() {
    let lab = Lab::new();
    let a = lab.joined("a");
    lab.vault(a);
    let noise: Vec<u8> = (0..70_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let hellos: [&[u8]; 5] =
        [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &noise, &[0x16, 3, 1, 0xff, 0xff]];
    for hello in hellos {
        let mut stream = TcpStream::connect(("127.0.0.1", lab.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let _ = stream.write_all(hello);
        let mut answer = Vec::new();
        if let Err(error) = stream.read_to_end(&mut answer) {
            let is_quiet = [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::ConnectionReset];
            assert!(is_quiet.contains(&error.kind()), "{error}");
        }
        // A TLS alert at most: seven bytes.
        assert!(answer.len() <= 7, "{answer:?}");
    }
    let idle: Vec<_> = (0..200).map(|_| TcpStream::connect(("127.0.0.1", lab.port)).unwrap()).collect();
    // Those of one address that have not said who they are leave room for the others of this test's own address too:
    // they are let go of, or refused.
    std::thread::sleep(Duration::from_millis(200));
    drop(idle);
    wait_for("the server answers", || a.run("ls store/v").code == 0);
}

/// Wherever a move to the server is cut off, doing it again ends it, or there is nothing left to do.
#[test]
fn a_move_that_was_cut_off_is_done_again() {
    let mut lab = Lab::new();
    let a = lab.joined("a");
    a.run("init store/v").ok();
    a.run("mount store/v m-a").ok();
    for n in 0..50 {
        a.write(&format!("f{n}"), "content").unwrap();
    }
    a.umount().ok();
    let id = a.id("store/v");
    lab.grant(a, &id);
    // What a server that was killed while the anchor came has left.
    let left = lab.path(&format!("server/anchors/{}-0.new", id.replace('-', "")));
    fs::write(&left, "half").unwrap();
    lab.stop("-KILL");
    lab.start();
    assert!(!left.exists());
    let a = lab.host("a");
    // The host notes the server first, and is killed before its first word, in the middle, or before it hears the end.
    let note = format!("server://127.0.0.1:{}\n", lab.port);
    let place = lab.path(&format!("state-a/lamassu/anchors/{}.place", id.replace('-', "")));
    fs::write(&place, note).unwrap();
    a.run("ls store/v").code(68).says("keeps no anchor of this vault");
    a.run(&format!("anchor move store/v {}", lab.url())).ok();
    assert_eq!(a.run("cat store/v f7").ok().out, "content");
    a.run("anchor move store/v anchor").ok();
    for after in [2, 5, 10, 20, 40, 80] {
        let mut moving = a.command();
        moving.args(["anchor", "move", "store/v"]).arg(lab.url()).stderr(Stdio::null());
        let mut moving = moving.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(after));
        let _ = moving.kill();
        moving.wait().unwrap();
        let again = a.run(&format!("anchor move store/v {}", lab.url()));
        // 28: it was done.
        assert!([0, 28].contains(&again.code), "after {after} ms: {again:?}");
        assert_eq!(a.run("cat store/v f7").ok().out, "content");
        a.run("check store/v").ok();
        let _ = fs::remove_file(lab.path("anchor"));
        a.run("anchor move store/v anchor").ok();
    }
}

#[test]
fn an_anchor_that_is_damaged_concerns_its_vault_alone() {
    let mut lab = Lab::new();
    let a = lab.joined("a");
    let id = lab.vault(a);
    a.run("init store/w").ok();
    let other = a.id("store/w");
    lab.grant(a, &other);
    a.run(&format!("anchor move store/w {}", lab.url())).ok();
    lab.stop("-TERM");
    let file = lab.path(&format!("server/anchors/{}.anchor", other.replace('-', "")));
    fs::File::options().write(true).open(&file).unwrap().set_len(5000).unwrap();
    lab.start();
    let a = lab.host("a");
    a.run("ls store/v").ok();
    assert_ne!(a.run("ls store/w").code, 0);
    assert!(lab.log().contains("cannot be used"), "{}", lab.log());
    a.run("ls store/v").ok();
    // It is in use by nobody: an administrator puts it away.
    lab.serve(&["forget", &format!("@{id}")]).ok();
    a.run("ls store/v").code(68);
    lab.stop("-TERM");
    lab.serve(&["forget", &format!("@{id}")]).code(11);
    // A state that is gone is no new state.
    fs::remove_file(lab.path("server/state.redb")).unwrap();
    lab.serve(&["run"]).code(26).says("gone");
}

/// What hosts have said while the server's machine stood still is heard before anybody's time is over.
#[test]
fn a_server_that_stood_still_ends_nobodys_session() {
    let lab = Lab::new();
    let a = lab.joined("a");
    lab.vault(a);
    a.mount().ok();
    a.write("f", "one").unwrap();
    let server = lab.server.as_ref().unwrap().id();
    kill(server, "-STOP");
    std::thread::sleep(Duration::from_millis(TERM * 1000 + 1500));
    kill(server, "-CONT");
    let until = Instant::now() + PATIENCE;
    while a.write("g", "two").is_err() {
        assert!(Instant::now() < until, "the session has ended: {}", lab.log());
        std::thread::sleep(Duration::from_millis(300));
    }
    a.umount().ok();
}
