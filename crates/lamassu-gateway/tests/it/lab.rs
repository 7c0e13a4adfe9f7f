//! A vault, and the program `lamassu` that serves it.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long is waited for what a busy machine may take its time for: passed only by what is broken.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Of the users that there are; `alice` and `bob` are two tenants.
const CREDENTIALS: &str = r#"
[[user]]
name = "alice"
access_key = "ALICE"
secret_key = "alice-secret-alice-secret"
write = ["alice-*", "a"]
read = ["shared"]
make_buckets = true

[[user]]
name = "bob"
access_key = "BOB"
secret_key = "bob-secret-bob-secret"
write = ["bob-*"]
make_buckets = true

[[user]]
name = "reader"
tenant = "alice"
access_key = "READER"
secret_key = "reader-secret-reader"
read = ["alice-*"]
"#;

pub struct Lab {
    pub dir: tempfile::TempDir,
    pub port: u16,
    /// where the objects are, in place of the vault
    pub provider: Option<crate::providers::Provider>,
    gateway: Option<Child>,
}

/// The program, which is built beside this test.
pub fn program() -> PathBuf {
    beside("lamassu")
}

/// A program in the build's directory.
pub fn beside(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this program");
    let program = test.parent().and_then(Path::parent).expect("target/debug").join(name);
    assert!(program.exists(), "{} is not there: `cargo test --workspace --no-run` builds it", program.display());
    program
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port()
}

/// Whether a program is there; if not, the test that needs it says so.
pub fn has(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output().expect("sh runs");
    if !found.status.success() {
        eprintln!("NOTE: {program} is not installed (scripts/setup installs it): NOT tested");
    }
    found.status.success()
}

/// Runs a command, which has to succeed; what it prints.
#[track_caller]
pub fn run(command: &mut Command) -> String {
    let out = command.stdin(Stdio::null()).output().expect("it runs");
    assert!(out.status.success(), "{command:?}: {}", text(&out));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

pub fn text(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

/// Waits until something is so.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Lab {
    /// A vault and a gateway with these lines in its configuration.
    pub fn new(lines: &str) -> Lab {
        let lab = Lab::without_gateway(lines);
        lab.started()
    }

    pub fn without_gateway(lines: &str) -> Lab {
        Lab::with_store(lines, |_| {})
    }

    /// The same; `prepare` may mount something where the vault will lie.
    pub fn with_store(lines: &str, prepare: impl FnOnce(&Path)) -> Lab {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        for name in ["state", "store"] {
            fs::create_dir(path(name)).expect("a directory");
        }
        prepare(&path("store"));
        let port = free_port();
        let lab = Lab { dir, port, provider: None, gateway: None };
        let key = lab.dir.path().join("vault.key");
        run(lab.lamassu().args(["key", "generate"]).arg(&key));
        let source = format!("raw:file:{}", key.display());
        let store = lab.dir.path().join("store");
        run(lab.lamassu().args(["init", "--key", &source]).arg(&store));
        lab.configure(lines);
        lab.write("credentials.toml", CREDENTIALS);
        lab
    }

    pub fn started(mut self) -> Lab {
        self.start();
        self
    }

    pub fn configure(&self, lines: &str) {
        let dir = self.dir.path().display();
        let head = format!(
            "vault = \"{dir}/store\"\nkey = \"raw:file:{dir}/vault.key\"\nlisten = \"127.0.0.1:{}\"\n",
            self.port
        );
        self.write("gateway.toml", &(head + lines));
    }

    /// A file that is nobody else's.
    pub fn write(&self, name: &str, text: &str) {
        let path = self.dir.path().join(name);
        fs::write(&path, text).expect("writes");
        fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("chmod");
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn lamassu(&self) -> Command {
        let mut command = Command::new(program());
        command.env("XDG_STATE_HOME", self.dir.path().join("state")).env("HOME", self.dir.path());
        command.env("LAMASSU_SYSLOG", self.dir.path().join("nowhere"));
        command
    }

    /// The gateway, not run yet.
    pub fn gateway(&self) -> Command {
        let mut command = self.lamassu();
        command.args(["-v", "gateway", "s3", "--config"]).arg(self.path("gateway.toml"));
        command
    }

    pub fn start(&mut self) {
        self.start_as(self.gateway());
    }

    /// Starts the gateway by this command.
    pub fn start_as(&mut self, mut command: Command) {
        let log = fs::File::options().create(true).append(true).open(self.path("log")).expect("a log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.gateway = Some(command.spawn().expect("it starts"));
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let ended = self.gateway.as_mut().and_then(|child| child.try_wait().expect("a child"));
            assert!(ended.is_none() && begun.elapsed() < PATIENCE, "{ended:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub fn pid(&self) -> i32 {
        self.gateway.as_ref().expect("it runs").id() as i32
    }

    pub fn signal(&self, signal: &str) {
        run(Command::new("kill").arg(format!("-{signal}")).arg(self.pid().to_string()));
    }

    /// Ends it by a signal; the status it ends with.
    pub fn stop(&mut self, signal: &str) -> Option<i32> {
        self.signal(signal);
        self.gateway.take().expect("it runs").wait().expect("a child").code()
    }

    /// Waits until it ends; the status it ends with.
    pub fn ended(&mut self) -> Option<i32> {
        self.gateway.take().expect("it runs").wait().expect("a child").code()
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// A client's environment, as alice.
    pub fn client(&self, program: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "300", program]);
        command.env("HOME", self.dir.path()).env("AWS_ACCESS_KEY_ID", "ALICE");
        command.env("AWS_SECRET_ACCESS_KEY", "alice-secret-alice-secret").env("AWS_DEFAULT_REGION", "us-east-1");
        // What this machine has for others.
        for name in [
            "AWS_CA_BUNDLE",
            "AWS_PROFILE",
            "AWS_ENDPOINT_URL",
            "HTTP_PROXY",
            "http_proxy",
            "HTTPS_PROXY",
            "https_proxy",
        ] {
            command.env_remove(name);
        }
        command.env("AWS_EC2_METADATA_DISABLED", "true").env("GATEWAY_URL", self.url());
        command
    }

    /// Runs lines of Python that have `s3`, a client of alice's, and `URL`; what they print.
    #[track_caller]
    pub fn python(&self, lines: &str) -> String {
        const HEAD: &str = "import boto3, os, sys, time, urllib.request\nfrom botocore.client import Config\n\
            URL = os.environ['GATEWAY_URL']\ndef client(url=URL, **more):\n    style = more.pop('style', 'path')\n    \
            config = Config(signature_version='s3v4', retries={'max_attempts': 0}, s3={'addressing_style': style})\n    \
            return boto3.client('s3', endpoint_url=url, config=config, **more)\ns3 = client()\n";
        run(self.client("/usr/bin/python3").arg("-c").arg(HEAD.to_owned() + lines))
    }

    /// An address that is signed for one method and path, from the slash on.
    #[track_caller]
    pub fn presigned(&self, method: &str, path: &str) -> String {
        let lines = format!(
            "from botocore.auth import S3SigV4QueryAuth\nfrom botocore.awsrequest import AWSRequest\n\
             from botocore.credentials import Credentials\nrequest = AWSRequest('{method}', URL + '{path}')\n\
             secret = os.environ['AWS_SECRET_ACCESS_KEY']\n\
             S3SigV4QueryAuth(Credentials('ALICE', secret), 's3', 'us-east-1', expires=600).add_auth(request)\n\
             print(request.url)"
        );
        self.python(&lines).trim().trim_start_matches(&self.url()).to_owned()
    }

    /// What a raw request is answered with, until the gateway ends the connection.
    pub fn ask(&self, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("connects");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        // The gateway may have answered and closed before it has read all.
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// A file of bytes that no compression makes small, and that are the same each time.
    pub fn data(&self, name: &str, len: usize) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, noise(len)).expect("writes");
        path
    }
}

pub fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take(len).collect()
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Some(mut child) = self.gateway.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}
