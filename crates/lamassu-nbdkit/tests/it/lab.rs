//! A vault, and the program that exports its volumes.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long is waited for what a busy machine may take its time for: passed only by what is broken.
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Lab {
    dir: tempfile::TempDir,
}

/// Where clients connect.
pub enum Door {
    Local(PathBuf),
    Tcp(SocketAddr),
}

impl Door {
    fn is_open(&self) -> bool {
        match self {
            Door::Local(socket) => UnixStream::connect(socket).is_ok(),
            Door::Tcp(address) => TcpStream::connect(address).is_ok(),
        }
    }
}

/// An export that is served; killed at the end of a test that failed.
pub struct Served {
    child: Child,
    door: Door,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What is built beside this test.
fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    let places = [deps.parent().unwrap().join(name), deps.join(name)];
    let found = places.iter().find(|place| place.exists());
    found.unwrap_or_else(|| panic!("{name} is not there: cargo build -p lamassu -p lamassu-nbdkit")).clone()
}

/// Whether programs are there; if not, the test that needs them says so.
pub fn has(programs: &[&str]) -> bool {
    let is_there = |program: &&str| {
        let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output().unwrap();
        if !found.status.success() {
            eprintln!("NOTE: {program} is not installed (scripts/setup installs it): NOT tested");
        }
        found.status.success()
    };
    programs.iter().all(is_there)
}

#[track_caller]
pub fn run(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).stdin(Stdio::null()).output().unwrap();
    assert!(out.status.success(), "{program} {args:?}: {}", text(&out));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Runs a script of libnbd's Python.
#[track_caller]
pub fn python(script: &str, args: &[&str]) -> String {
    let mut all = vec!["-c", script];
    all.extend(args);
    run("/usr/bin/python3", &all)
}

fn text(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

/// Bytes that do not repeat, and do not compress.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Lab {
    /// A vault `v` with a key `key`.
    pub fn new() -> Lab {
        let lab = Lab { dir: tempfile::tempdir().unwrap() };
        lab.vault("v", "key");
        lab
    }

    /// Another vault, with a key of its own.
    pub fn vault(&self, name: &str, key: &str) {
        fs::create_dir_all(self.path("state")).unwrap();
        if !self.path(key).exists() {
            let bytes = noise(32, key.bytes().map(u64::from).sum());
            fs::write(self.path(key), bytes).unwrap();
            fs::set_permissions(self.path(key), PermissionsExt::from_mode(0o600)).unwrap();
        }
        let source = self.source(key);
        self.ok(&["init", "--key", &source, name]);
    }

    pub fn program() -> PathBuf {
        built("lamassu")
    }

    pub fn plugin() -> PathBuf {
        built("liblamassu_nbdkit.so")
    }

    pub fn source(&self, key: &str) -> String {
        format!("raw:file:{}", self.path(key).display())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn text_path(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    pub fn file(&self, name: &str, bytes: &[u8]) -> String {
        fs::write(self.path(name), bytes).unwrap();
        self.text_path(name)
    }

    /// The program in this directory; its key is `key` unless an option says otherwise.
    pub fn command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        let mut command = Command::new(built("lamassu"));
        command.args(args).current_dir(self.dir.path()).env("LAMASSU_KEY", self.source("key"));
        command.env("XDG_STATE_HOME", self.path("state")).env("LAMASSU_SYSLOG", self.path("nowhere"));
        command.stdin(Stdio::null());
        command
    }

    /// Runs it; standard output.
    #[track_caller]
    pub fn ok(&self, args: &[&str]) -> String {
        self.code(0, args).0
    }

    /// Runs it, to end with this code; both outputs.
    #[track_caller]
    pub fn code(&self, code: i32, args: &[&str]) -> (String, String) {
        let out = self.command(args).output().unwrap();
        assert_eq!(out.status.code(), Some(code), "{args:?}: {}", text(&out));
        let both = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
        assert!(code == 0 || !both.1.is_empty(), "{args:?} fails silently");
        assert!(!both.1.contains("internal error"), "{}", both.1);
        both
    }

    /// The words that export with the plugin of this build.
    pub fn export_words(&self, args: &[&str]) -> Vec<String> {
        let plugin = built("liblamassu_nbdkit.so").to_str().unwrap().to_owned();
        let head = ["volume", "export", "--plugin", &plugin];
        head.iter().chain(args).map(|word| (*word).to_owned()).collect()
    }

    /// Exports `args` at the socket `s`.
    #[track_caller]
    pub fn export(&self, args: &[&str]) -> Served {
        let mut words = vec!["--socket", "s"];
        words.extend(args);
        self.started(self.command(&self.export_words(&words)), Door::Local(self.path("s")))
    }

    /// Exports `args` at a port of this machine.
    #[track_caller]
    pub fn listen(&self, args: &[&str]) -> Served {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let address = free.to_string();
        let mut words = vec!["--listen", &address];
        words.extend(args);
        self.started(self.command(&self.export_words(&words)), Door::Tcp(free))
    }

    /// An export that is served.
    #[track_caller]
    pub fn started(&self, mut command: Command, door: Door) -> Served {
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut served = Served { child, door };
        until("the export is served", || {
            if let Some(status) = served.child.try_wait().unwrap() {
                let mut said = String::new();
                served.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
                panic!("{status}: {said}");
            }
            served.door.is_open()
        });
        served
    }

    /// The files in the store, but for the vault's own.
    pub fn stored_files(&self, vault: &str) -> Vec<PathBuf> {
        fn below(dir: &Path, found: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                match path.symlink_metadata().unwrap().file_type() {
                    kind if kind.is_dir() => below(&path, found),
                    kind if kind.is_file() => found.push(path),
                    _ => {}
                }
            }
        }
        let mut found = Vec::new();
        below(&self.path(vault), &mut found);
        found.retain(|path| !path.file_name().unwrap().to_str().unwrap().starts_with("lamassu."));
        found
    }
}

impl Served {
    pub fn uri(&self, export: &str) -> String {
        match &self.door {
            Door::Local(socket) => format!("nbd+unix:///{export}?socket={}", socket.display()),
            Door::Tcp(address) => format!("nbd://{address}/{export}"),
        }
    }

    /// The same with TLS, for a user, with the parameter that says which key or certificate.
    pub fn tls_uri(&self, export: &str, user: &str, how: &str) -> String {
        match &self.door {
            Door::Local(socket) => format!("nbds+unix://{user}@localhost/{export}?socket={}&{how}", socket.display()),
            Door::Tcp(address) => format!("nbds://{user}@localhost:{}/{export}?{how}", address.port()),
        }
    }

    /// Ends it as an administrator does.
    #[track_caller]
    pub fn stop(mut self) {
        run("kill", &["-TERM", &self.child.id().to_string()]);
        let status = self.child.wait().unwrap();
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(status.success(), "{status}: {said}");
    }

    /// The process that started it, and waits for its end.
    pub fn parent(&self) -> u32 {
        self.child.id()
    }

    /// Kills both processes at once, as the end of a machine does.
    pub fn kill_all(mut self) {
        let nbdkit = self.nbdkit();
        run("kill", &["-KILL", &self.child.id().to_string(), &nbdkit.to_string()]);
        self.child.wait().unwrap();
        until("nbdkit has ended", || !Path::new(&format!("/proc/{nbdkit}/fd/0")).exists());
    }

    /// The process of nbdkit.
    pub fn nbdkit(&self) -> u32 {
        let children = format!("/proc/{0}/task/{0}/children", self.child.id());
        fs::read_to_string(children).unwrap().trim().parse().unwrap()
    }

    /// Kills nbdkit: nothing is committed any more.
    pub fn kill(mut self) {
        run("kill", &["-KILL", &self.nbdkit().to_string()]);
        assert_eq!(self.child.wait().unwrap().code(), Some(20));
    }
}
