//! Hosts and a server, all of them real programs: two hosts are two states of `lamassu` over one store.
#![allow(clippy::unwrap_used)] // a helper of a test may panic, too

use serde_json::Value;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Of the server under test, s: the shortest there is.
const TERM: u64 = 5;

struct Lab {
    dir: tempfile::TempDir,
    server: Option<Child>,
    port: u16,
}

/// One of the hosts.
#[derive(Clone, Copy)]
struct Host<'a> {
    lab: &'a Lab,
    name: &'static str,
}

#[derive(Debug)]
struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Ran {
    #[track_caller]
    fn code(self, code: i32) -> Ran {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    #[track_caller]
    fn ok(self) -> Ran {
        self.code(0)
    }

    #[track_caller]
    fn says(self, words: &str) -> Ran {
        assert!(self.err.contains(words), "{words:?} is not in {self:?}");
        self
    }
}

impl From<Output> for Ran {
    fn from(out: Output) -> Ran {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ran { code: out.status.code().unwrap_or(-1), out: text(out.stdout), err: text(out.stderr) }
    }
}

fn server_program() -> PathBuf {
    env!("CARGO_BIN_EXE_lamassu-server").into()
}

/// The program of hosts, which lies beside the server's.
fn host_program() -> PathBuf {
    let program = server_program().with_file_name("lamassu");
    assert!(program.exists(), "{} is not there: cargo build --package lamassu", program.display());
    program
}

impl Lab {
    fn new() -> Lab {
        let dir = tempfile::tempdir().unwrap();
        // Free at this moment; nobody else on this machine takes ports by number.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut lab = Lab { dir, server: None, port };
        fs::write(lab.path("key"), [7; 32]).unwrap();
        fs::set_permissions(lab.path("key"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        fs::create_dir(lab.path("store")).unwrap();
        lab.serve(&["init"]).ok();
        let config = format!(
            "listen = \"127.0.0.1:{port}\"\naddress = \"127.0.0.1:{port}\"\nterm_seconds = {TERM}\nheartbeat_seconds = 1\n"
        );
        fs::write(lab.path("server/server.toml"), config).unwrap();
        lab.start();
        lab
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs the server's program on the server's directory.
    fn serve(&self, args: &[&str]) -> Ran {
        let mut command = Command::new(server_program());
        let (words, rest) = args.split_at(args.iter().take_while(|arg| !arg.starts_with('@')).count());
        command.args(words).arg(self.path("server")).args(rest.iter().map(|arg| arg.trim_start_matches('@')));
        command.output().unwrap().into()
    }

    fn start(&mut self) {
        let log = fs::File::options().create(true).append(true).open(self.path("server.log")).unwrap();
        let mut command = Command::new(server_program());
        self.server = Some(command.arg("run").arg(self.path("server")).stderr(log).spawn().unwrap());
        let until = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(Instant::now() < until, "the server does not start: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("server.log")).unwrap_or_default()
    }

    fn stop(&mut self, signal: &str) {
        let mut server = self.server.take().unwrap();
        kill(server.id(), signal);
        server.wait().unwrap();
    }

    fn host(&self, name: &'static str) -> Host<'_> {
        fs::create_dir_all(self.path(&format!("m-{name}"))).unwrap();
        Host { lab: self, name }
    }

    /// A host that has joined.
    fn joined(&self, name: &'static str) -> Host<'_> {
        let token = self.serve(&["enrol", &format!("@{name}")]).ok().out;
        let host = self.host(name);
        host.with_input(&["host", "join"], &token).ok();
        host
    }

    /// A vault of a host, whose anchor the server keeps, and its id.
    fn vault(&self, host: Host<'_>) -> String {
        host.run("init store/v").ok();
        host.run(&format!("anchor move store/v {}", self.url())).ok();
        let info: Value = serde_json::from_str(&host.run("info --json store/v").ok().out).unwrap();
        info["id"].as_str().unwrap().to_owned()
    }

    fn grant(&self, host: Host<'_>, vault: &str) {
        self.serve(&["host", "grant", &format!("@{}", host.name), &format!("@{vault}")]).ok();
    }

    /// A mount ends its session right behind itself.
    fn wait_until_free(&self) {
        let until = Instant::now() + Duration::from_secs(TERM);
        while !self.serve(&["status"]).ok().out.contains("not in use") {
            assert!(Instant::now() < until, "a mount that was taken down keeps its session");
        }
    }

    fn url(&self) -> String {
        format!("server://127.0.0.1:{}", self.port)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
        for name in ["a", "b"] {
            let _ = Command::new("umount").arg("-l").arg(self.path(&format!("m-{name}"))).output();
        }
        if std::thread::panicking() {
            eprintln!("the server's log: {}", self.log());
        }
    }
}

impl Host<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(host_program());
        let state = self.lab.path(&format!("state-{}", self.name));
        command.current_dir(self.lab.dir.path()).env("HOME", &state).env("XDG_STATE_HOME", state);
        command.env("LAMASSU_KEY", "raw:file:key").env_remove("STATE_DIRECTORY").env_remove("XDG_CONFIG_HOME");
        command
    }

    fn run(&self, line: &str) -> Ran {
        self.command().args(line.split(' ')).stdin(Stdio::null()).output().unwrap().into()
    }

    fn with_input(&self, args: &[&str], input: &str) -> Ran {
        let mut command = self.command();
        let piped = command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap().into()
    }

    fn mount(&self) -> Ran {
        self.run(&format!("mount --anchor {} store/v m-{}", self.lab.url(), self.name))
    }

    fn umount(&self) -> Ran {
        self.run(&format!("umount m-{}", self.name))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.lab.path(&format!("m-{}", self.name)).join(name)
    }

    /// Writes a file and has it durable.
    fn write(&self, name: &str, content: &str) -> std::io::Result<()> {
        let mut file = fs::File::create(self.file(name))?;
        file.write_all(content.as_bytes())?;
        file.sync_all()
    }

    /// The process that serves its mount.
    fn daemon(&self) -> u32 {
        let mountpoint = format!("m-{}", self.name);
        let is_it = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let cwd = fs::read_link(format!("/proc/{pid}/environ").replace("environ", "exe"));
            let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let state = self.lab.path(&format!("state-{}", self.name));
            let has = |bytes: &[u8], part: &str| bytes.windows(part.len()).any(|window| window == part.as_bytes());
            cwd.is_ok() && has(&line, "mount") && has(&line, &mountpoint) && has(&environ, state.to_str().unwrap())
        };
        let pids = fs::read_dir("/proc").unwrap().flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse().ok()));
        pids.into_iter().find(is_it).expect("the mount's process")
    }
}

fn kill(pid: u32, signal: &str) {
    let done = Command::new("kill").arg(signal).arg(pid.to_string()).status().unwrap();
    assert!(done.success());
}

fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(done.success());
}

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

#[test]
fn a_token_is_for_one_host_and_once_and_names_its_server() {
    let lab = Lab::new();
    let token = lab.serve(&["enrol", "@a"]).ok().out;
    let (a, b) = (lab.host("a"), lab.host("b"));
    a.run(&format!("ls --anchor {} nothing", lab.url())).code(6);
    a.with_input(&["host", "join"], "lamassu-join:nonsense").code(2).says("no token");
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
    a.run(&format!("anchor move store/v {}", lab.url())).code(67).says("not the server");
    other.stop("-TERM");
    a.run(&format!("anchor move store/v {}", lab.url())).code(66).says("does not answer");
    a.run("check store/v").ok();
    lab.start();
    let a = lab.host("a");
    a.run(&format!("anchor move store/v {}", lab.url())).ok();
    // And back, where another host finds nothing any more.
    a.run("anchor move store/v anchor").ok();
    a.run("check store/v").ok();
    assert!(a.run("info store/v").ok().out.contains("/anchor"));
    a.run(&format!("ls --anchor {} store/v", lab.url())).code(68);
}

/// What was acknowledged is there for the next host; the same host need not wait for its own dead session.
#[test]
fn a_killed_host_loses_nothing_acknowledged_and_is_waited_for() {
    let lab = Lab::new();
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
    let until = Instant::now() + Duration::from_secs(4 * TERM);
    while b.mount().code != 0 {
        assert!(Instant::now() < until, "the vault is not free");
    }
    assert_eq!(fs::read_to_string(b.file("g")).unwrap(), "synced, too");
    b.umount().ok();
    b.run("check store/v").ok();
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
    let until = Instant::now() + Duration::from_secs(4 * TERM);
    while b.mount().code != 0 {
        assert!(Instant::now() < until, "the vault is not free");
    }
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
    let mut lab = Lab::new();
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
    // A server that is gone for good: errors, and no hang.
    b.mount().ok();
    lab.stop("-KILL");
    let b = lab.host("b");
    let begun = Instant::now();
    assert!(b.write("h", "lost").is_err());
    assert!(begun.elapsed() < Duration::from_secs(6 * TERM), "{:?}", begun.elapsed());
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
    let until = Instant::now() + Duration::from_secs(20);
    while a.run("ls store/v").code != 0 {
        assert!(Instant::now() < until, "the server answers nobody any more");
    }
}
