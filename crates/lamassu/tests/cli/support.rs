//! A directory with a key and what a test makes of it, and ways to run the program.

use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

/// A temporary directory; mounts below it are taken down at the end, also of a failed test.
pub struct Bench {
    dir: tempfile::TempDir,
}

impl Drop for Bench {
    fn drop(&mut self) {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let ours = |line: &str| line.split(' ').nth(4).map(PathBuf::from).filter(|p| p.starts_with(self.dir.path()));
        for mountpoint in table.lines().filter_map(ours) {
            let _ = Command::new("umount").arg("-l").arg(mountpoint).output();
        }
    }
}

/// What a run gave.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub out: Vec<u8>,
    pub err: String,
}

impl Ran {
    #[track_caller]
    pub fn ok(self) -> Ran {
        self.code(0)
    }

    #[track_caller]
    pub fn code(self, code: i32) -> Ran {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", String::from_utf8_lossy(&self.out), self.err);
        // Nothing that fails is silent, and nothing panics.
        assert!(code == 0 || !self.err.is_empty());
        assert!(!self.err.contains("internal error"), "{}", self.err);
        self
    }

    #[track_caller]
    pub fn says(self, words: &str) -> Ran {
        assert!(self.err.contains(words), "{words:?} is not in: {}", self.err);
        self
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.out.clone()).unwrap()
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.out)))
    }
}

impl From<Output> for Ran {
    fn from(o: Output) -> Ran {
        let err = String::from_utf8_lossy(&o.stderr).into_owned();
        Ran { code: o.status.code().unwrap_or(-1), out: o.stdout, err }
    }
}

impl Bench {
    pub fn new() -> Bench {
        let bench = Bench { dir: tempfile::tempdir().unwrap() };
        bench.key("key");
        bench
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A fresh raw key file.
    pub fn key(&self, name: &str) -> String {
        static COUNT: AtomicU64 = AtomicU64::new(1);
        let mut key = [0x5a; 32];
        key[..8].copy_from_slice(&COUNT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        self.secret(name, &key);
        format!("raw:file:{}", self.path(name).display())
    }

    /// A file that only we may read.
    pub fn secret(&self, name: &str, bytes: &[u8]) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(self.path(name), bytes).unwrap();
        std::fs::set_permissions(self.path(name), std::fs::Permissions::from_mode(0o600)).unwrap();
    }

    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        std::fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    pub fn dir(&self, name: &str) -> PathBuf {
        std::fs::create_dir_all(self.path(name)).unwrap();
        self.path(name)
    }

    /// The program in this directory, its key `key` unless an option says otherwise.
    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let args: Vec<_> = args.into_iter().map(|arg| arg.as_ref().to_owned()).collect();
        let mode = compress_mode(&args);
        let mut command = Command::new(env!("CARGO_BIN_EXE_lamassu"));
        command
            .args(args)
            .args(mode.iter().flat_map(|codec| ["--compress", codec]))
            .current_dir(self.dir.path())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("LAMASSU_KEY", format!("raw:file:{}", self.path("key").display()))
            // Anchors of this test alone; else root's would be the machine's.
            .env("XDG_STATE_HOME", self.path("state"))
            // Nor is what is damaged here to be told to who administers the machine.
            .env("LAMASSU_SYSLOG", self.path("no-syslog"))
            .stdin(Stdio::null());
        command
    }

    /// Runs a line of words.
    pub fn run(&self, line: &str) -> Ran {
        self.command(line.split_whitespace()).output().unwrap().into()
    }

    /// Unmounts. A test beside this one that is just starting a program holds our open files for a moment, so busy is
    /// tried again.
    #[track_caller]
    pub fn unmount(&self, mountpoint: &str) {
        for _ in 0..1200 {
            let ran = self.run(&format!("umount {mountpoint}"));
            if !(ran.code == 10 && ran.err.contains("busy")) {
                ran.ok();
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        self.run(&format!("umount {mountpoint}")).ok();
    }

    /// Runs a line of words with one more variable in the environment.
    pub fn run_in(&self, name: &str, value: &Path, line: &str) -> Ran {
        self.command(line.split_whitespace()).env(name, value).output().unwrap().into()
    }

    /// Runs a line with standard input.
    pub fn run_with(&self, line: &str, input: &[u8]) -> Ran {
        use std::io::Write;
        let mut child = self
            .command(line.split_whitespace())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The program may end without reading all of it.
        let _ = child.stdin.take().unwrap().write_all(input);
        child.wait_with_output().unwrap().into()
    }

    /// The stored path of a plain one.
    pub fn stored(&self, vault: &str, plain: &str) -> PathBuf {
        self.path(vault).join(self.stored_path(vault, plain))
    }

    /// Below the vault, as messages have it: without the `./` that `path` prints before a name that begins with `-`.
    pub fn stored_path(&self, vault: &str, plain: &str) -> String {
        let text = self.run(&format!("path {vault} {plain}")).ok().text();
        let stored = text.trim_end();
        stored.strip_prefix("./").unwrap_or(stored).to_owned()
    }
}

/// `LAMASSU_TEST_COMPRESS`, the codec of each vault that a test makes and says nothing about.
fn compress_mode(args: &[OsString]) -> Option<String> {
    let says = |word: &str| args.iter().any(|arg| arg == word);
    let is_init = args.first().is_some_and(|command| command == "init");
    let may = is_init && !["paper", "--compress", "--zone", "--help"].iter().any(|word| says(word));
    may.then(|| std::env::var("LAMASSU_TEST_COMPRESS").ok())?
}

/// Bytes that do not repeat.
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

/// Flips one bit.
pub fn flip(path: &Path, offset: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[offset] ^= 1;
    std::fs::write(path, bytes).unwrap();
}
