//! A server and hosts, all of them real programs: two hosts are two states of `lamassu` over one store.

pub mod raw;

use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Of the server under test, s: the shortest there is.
pub const TERM: u64 = 5;

/// How long is waited for what a busy machine may take its time for: passed only by what is broken.
pub const PATIENCE: Duration = Duration::from_secs(120);

#[track_caller]
pub fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    loop {
        let asked = Instant::now();
        if is_so() {
            return;
        }
        assert!(Instant::now() < until, "{what}");
        // A program that is started again and again takes the processor from what it asks about.
        std::thread::sleep(Duration::from_millis(50).max(4 * asked.elapsed()));
    }
}

/// Says so when it is dropped.
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub struct Lab {
    pub dir: tempfile::TempDir,
    pub server: Option<Child>,
    pub port: u16,
    /// Where monitoring asks.
    pub metrics: u16,
}

/// One of the hosts.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    pub lab: &'a Lab,
    pub name: &'static str,
}

#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ran {
    #[track_caller]
    pub fn code(self, code: i32) -> Ran {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    #[track_caller]
    pub fn ok(self) -> Ran {
        self.code(0)
    }

    #[track_caller]
    pub fn says(self, words: &str) -> Ran {
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

pub fn server_program() -> PathBuf {
    env!("CARGO_BIN_EXE_lamassu-server").into()
}

/// The program of hosts, which lies beside the server's.
pub fn host_program() -> PathBuf {
    let program = server_program().with_file_name("lamassu");
    assert!(program.exists(), "{} is not there: cargo build --package lamassu", program.display());
    program
}

/// A port that is free, below those which the system gives out: a server that starts anew finds its own free, and no
/// connection of anybody has taken it meanwhile.
pub fn free_port() -> u16 {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 20_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Programs of tests that run at once begin in different places.
    let begin = std::process::id().wrapping_mul(101);
    let ports = std::iter::repeat_with(|| FIRST + begin.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT);
    let mut ports = ports.map(|port| u16::try_from(port).unwrap()).take(COUNT as usize);
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a free port")
}

impl Lab {
    pub fn new() -> Lab {
        Lab::with_term(TERM)
    }

    /// With a longer one, for what has to come within it.
    pub fn with_term(term: u64) -> Lab {
        let dir = tempfile::tempdir().unwrap();
        let [port, metrics] = [(); 2].map(|()| free_port());
        let mut lab = Lab { dir, server: None, port, metrics };
        fs::write(lab.path("key"), [7; 32]).unwrap();
        fs::set_permissions(lab.path("key"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        fs::create_dir(lab.path("store")).unwrap();
        lab.serve(&["init"]).ok();
        let config = format!(
            "listen = \"127.0.0.1:{port}\"\naddress = \"127.0.0.1:{port}\"\nterm_seconds = {term}\nheartbeat_seconds = 1\nmetrics = \"127.0.0.1:{metrics}\"\n"
        );
        fs::write(lab.path("server/server.toml"), config).unwrap();
        lab.start();
        lab
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs the server's program on the server's directory.
    pub fn serve(&self, args: &[&str]) -> Ran {
        let mut command = Command::new(server_program());
        let (words, rest) = args.split_at(args.iter().take_while(|arg| !arg.starts_with('@')).count());
        command.args(words).arg(self.path("server")).args(rest.iter().map(|arg| arg.trim_start_matches('@')));
        command.output().unwrap().into()
    }

    pub fn start(&mut self) {
        self.start_by(Command::new(server_program()));
    }

    /// By a command that becomes the server with further arguments.
    pub fn start_by(&mut self, mut command: Command) {
        let log = fs::File::options().create(true).append(true).open(self.path("server.log")).unwrap();
        self.server = Some(command.arg("run").arg(self.path("server")).stderr(log).spawn().unwrap());
        let until = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(Instant::now() < until, "the server does not start: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("server.log")).unwrap_or_default()
    }

    pub fn stop(&mut self, signal: &str) {
        let mut server = self.server.take().unwrap();
        kill(server.id(), signal);
        server.wait().unwrap();
    }

    pub fn host(&self, name: &'static str) -> Host<'_> {
        fs::create_dir_all(self.path(&format!("m-{name}"))).unwrap();
        Host { lab: self, name }
    }

    /// A host that has joined.
    pub fn joined(&self, name: &'static str) -> Host<'_> {
        let token = self.serve(&["enrol", &format!("@{name}")]).ok().out;
        let host = self.host(name);
        host.with_input(&["host", "join"], &token).ok();
        host
    }

    /// A vault of a host, whose anchor the server keeps, and its id.
    pub fn vault(&self, host: Host<'_>) -> String {
        host.run("init store/v").ok();
        let id = host.id("store/v");
        self.grant(host, &id);
        host.run(&format!("anchor move store/v {}", self.url())).ok();
        id
    }

    pub fn grant(&self, host: Host<'_>, vault: &str) {
        self.serve(&["host", "grant", &format!("@{}", host.name), &format!("@{vault}")]).ok();
    }

    /// The lines about vaults that the server shows.
    pub fn vaults(&self) -> Vec<String> {
        self.serve(&["status"]).ok().out.lines().skip(2).map(str::to_owned).collect()
    }

    /// A mount ends its sessions right behind itself.
    pub fn wait_until_free(&self) {
        let is_free = || self.vaults().iter().all(|vault| vault.contains("not in use"));
        // No program is started as long as monitoring says otherwise.
        let is_free = || self.metric("sessions") == 0.0 && is_free();
        wait_for("a mount that was taken down ends its session", is_free);
    }

    /// What monitoring is told: a status, and the text.
    pub fn asked(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.metrics)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, text) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), text.to_owned())
    }

    /// A value of those.
    pub fn metric(&self, name: &str) -> f64 {
        value_in(&self.asked("/metrics").1, name)
    }
}

/// A value in what monitoring is told.
pub fn value_in(text: &str, name: &str) -> f64 {
    let value = text.lines().find_map(|line| line.strip_prefix(&format!("lamassu_server_{name} ")));
    value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

impl Lab {
    pub fn url(&self) -> String {
        format!("server://127.0.0.1:{}", self.port)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
        for name in ["a", "b", "c", "a-host"] {
            let _ = Command::new("umount").arg("-l").arg(self.path(&format!("m-{name}"))).output();
        }
        if std::thread::panicking() {
            eprintln!("the server's log: {}", self.log());
        }
    }
}

impl Host<'_> {
    pub fn command(&self) -> Command {
        let mut command = Command::new(host_program());
        let state = self.lab.path(&format!("state-{}", self.name));
        command.current_dir(self.lab.dir.path()).env("HOME", &state).env("XDG_STATE_HOME", state);
        command.env("LAMASSU_KEY", "raw:file:key").env_remove("STATE_DIRECTORY").env_remove("XDG_CONFIG_HOME");
        command
    }

    pub fn run(&self, line: &str) -> Ran {
        self.command().args(line.split(' ')).stdin(Stdio::null()).output().unwrap().into()
    }

    pub fn with_input(&self, args: &[&str], input: &str) -> Ran {
        let mut command = self.command();
        let piped = command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap().into()
    }

    /// The id of a vault.
    pub fn id(&self, vault: &str) -> String {
        let info: Value = serde_json::from_str(&self.run(&format!("info --json {vault}")).ok().out).unwrap();
        info["id"].as_str().unwrap().to_owned()
    }

    pub fn mount(&self) -> Ran {
        self.run(&format!("mount --anchor {} store/v m-{}", self.lab.url(), self.name))
    }

    /// A process that another test has just forked may have this one's files for a moment.
    pub fn umount(&self) -> Ran {
        let (line, until) = (format!("umount m-{}", self.name), Instant::now() + Duration::from_secs(10));
        loop {
            let ran = self.run(&line);
            if ran.code != 10 || Instant::now() > until {
                return ran;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.lab.path(&format!("m-{}", self.name)).join(name)
    }

    /// Writes a file and has it durable.
    pub fn write(&self, name: &str, content: &str) -> std::io::Result<()> {
        let mut file = fs::File::create(self.file(name))?;
        file.write_all(content.as_bytes())?;
        file.sync_all()
    }

    /// The process that serves its mount.
    pub fn daemon(&self) -> u32 {
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

pub fn kill(pid: u32, signal: &str) {
    let done = Command::new("kill").arg(signal).arg(pid.to_string()).status().unwrap();
    assert!(done.success());
}

pub fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(done.success());
}
