//! What an operator meets: checks before a start, counts, prompts that are ended, servers that were killed.

use crate::lab::{Door, Lab, has, python, run, until};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

impl Lab {
    fn checked(&self, code: i32, args: &[&str]) -> String {
        let mut words = vec!["--check"];
        words.extend(args);
        let words = self.export_words(&words);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.code(code, &words).1
    }
}

#[test]
fn a_check_says_what_a_start_would_and_starts_nothing() {
    if !has(&["nbdkit"]) {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "v", "a", "1M"]);
    lab.file("other", &[7; 32]);
    let socket = ["--socket", "s"];
    let with = |more: &[&'static str]| -> Vec<&'static str> { socket.iter().chain(more).copied().collect() };
    let good = [&["v"][..], &["--volume", "a", "v"], &["--filter", "rate", "x=v"], &["--read-only", "v"]];
    let check_good = || good.iter().for_each(|words| _ = lab.checked(0, &with(words)));
    check_good();
    assert!(!lab.path("s").exists() && !lab.path("s.lock").exists());
    for (code, words) in [
        (12, &["-k", "raw:file:other", "v"][..]),
        (9, &["-k", "raw:file:none", "v"]),
        (3, &["--volume", "b", "v"]),
        (2, &["--volume", "a/b", "v"]),
        (6, &["."]),
        (20, &["--nbdkit", "no-such-program", "v"]),
        (20, &["--filter", "no-such-filter", "v"]),
    ] {
        lab.checked(code, &with(words));
    }
    lab.checked(2, &["--listen", "127.0.0.1:0", "v"]);
    let said = lab.checked(1, &["--listen", "127.0.0.1:0", "--tls-certificates", "pki", "v"]);
    assert!(said.contains("ca-cert.pem"), "{said}");
    lab.checked(1, &["--listen", "127.0.0.1:0", "--tls-psk", "none.psk", "v"]);
    lab.checked(1, &["--socket", "no/such/dir/s", "v"]);
    // Beside the export that is to be started anew.
    let served = lab.export(&["v"]);
    check_good();
    served.stop();
}

#[test]
fn counts_of_each_export_are_written() {
    if !has(&["nbdkit"]) {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "v", "a", "1M"]);
    lab.ok(&["volume", "snapshot", "v", "a", "s"]);
    let file = lab.path("volumes.prom");
    let served = lab.export(&["--metrics", "volumes.prom", "v"]);
    let text = || fs::read_to_string(&file).unwrap();
    until("it is there", || file.exists());
    assert!(text().contains("\nlamassu_volumes_written_seconds "), "{}", text());
    let script = "import nbd, sys\n\
                  h = nbd.NBD(); h.connect_uri(sys.argv[1])\n\
                  for n in range(3): h.pwrite(b'x' * 8192, n * 8192)\n\
                  h.pread(4096, 0); h.flush(); h.trim(4096, 0); h.zero(4096, 4096); h.shutdown()\n\
                  h = nbd.NBD(); h.connect_uri(sys.argv[2]); h.pread(4096, 0)\n";
    python(script, &[&served.uri("a"), &served.uri("a@s")]);
    let counted = |line: &str| text().lines().any(|found| found == format!("lamassu_volumes_{line}"));
    let expected = [
        "requests_total{export=\"a\",operation=\"write\"} 3",
        "bytes_total{export=\"a\",operation=\"write\"} 24576",
        "requests_total{export=\"a\",operation=\"read\"} 1",
        "requests_total{export=\"a\",operation=\"flush\"} 1",
        "requests_total{export=\"a\",operation=\"trim\"} 1",
        "requests_total{export=\"a\",operation=\"zero\"} 1",
        "errors_total{export=\"a\",operation=\"write\"} 0",
        "bytes_total{export=\"a@s\",operation=\"read\"} 4096",
        "connections{export=\"a\"} 0",
    ];
    until("all of it is counted", || expected.iter().all(|line| counted(line)));
    served.stop();
    assert!(!file.exists(), "a server that has ended leaves no counts");
    lab.checked(0, &["--socket", "s", "--metrics", "volumes.prom", "v"]);
}

/// nbdkit itself would write it before the plugin has opened the vaults.
#[test]
fn a_pidfile_is_there_while_clients_can_connect() {
    if !has(&["nbdkit"]) {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "v", "a", "1M"]);
    let file = lab.path("pid");
    let words = lab.export_words(&["--socket", "s", "--pidfile", "pid", "--volume", "b", "v"]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    lab.code(3, &words);
    assert!(!file.exists(), "the start has failed");
    let served = lab.export(&["--pidfile", "pid", "v"]);
    until("it is there", || file.exists());
    assert_eq!(fs::read_to_string(&file).unwrap(), format!("{}\n", served.nbdkit()));
    served.stop();
    assert!(!file.exists());
}

/// A passphrase in the environment: neither the process that serves goes on with it, nor the one that waits.
#[test]
fn what_gave_a_key_is_forgotten() {
    if !has(&["nbdkit"]) {
        return;
    }
    let lab = Lab::new();
    let words = lab.file("words", b"open every door");
    fs::set_permissions(&words, PermissionsExt::from_mode(0o600)).unwrap();
    lab.ok(&["init", "--key", &format!("passphrase:file:{words}"), "w"]);
    let mut export = lab.command(&lab.export_words(&["--socket", "s", "-k", "passphrase:env:WORDS", "w"]));
    export.env("WORDS", "open every door");
    let served = lab.started(export, Door::Local(lab.path("s")));
    for process in [served.nbdkit(), served.parent()] {
        // Neither can be read by its own user.
        let Ok(environment) = fs::read(format!("/proc/{process}/environ")) else {
            eprintln!("NOTE: only root sees what is left: NOT tested");
            continue;
        };
        let has = |text: &[u8]| environment.windows(text.len()).any(|found| found == text);
        assert!(has(b"WORDS=") && !has(b"every door"), "{process}");
    }
    served.stop();
}

/// The plugin asks in nbdkit's process, before that has handlers of signals.
#[test]
fn a_prompt_that_is_ended_leaves_the_terminal_as_it_was() {
    if !has(&["nbdkit"]) {
        return;
    }
    let lab = Lab::new();
    let words = lab.file("words", b"some words");
    fs::set_permissions(&words, PermissionsExt::from_mode(0o600)).unwrap();
    lab.ok(&["init", "--key", &format!("passphrase:file:{words}"), "w"]);
    let mut export = lab.export_words(&["--socket", "s", "-k", "passphrase:prompt", "w"]);
    export.insert(0, Lab::program().to_str().unwrap().to_owned());
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", TERMINAL]).args(&export).current_dir(lab.path("")).env("XDG_STATE_HOME", lab.path("state"));
    let out = python.stdin(Stdio::null()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(!lab.path("s").exists());
}

/// Runs a program in a terminal, waits until that does not echo, and types Ctrl-C.
const TERMINAL: &str = "
import fcntl, os, pty, select, subprocess, sys, termios, time
ours, theirs = pty.openpty()
def start():
    os.setsid()
    fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
before = termios.tcgetattr(theirs)[3]
assert before & termios.ECHO
child = subprocess.Popen(sys.argv[1:], stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=start)
def said():
    while select.select([ours], [], [], 0)[0]:
        os.read(ours, 4096)
while termios.tcgetattr(theirs)[3] & termios.ECHO:
    assert child.poll() is None, child.returncode
    said()
    time.sleep(0.02)
os.write(ours, b'\\x03')
while child.poll() is None:
    said()
    time.sleep(0.02)
assert child.returncode == 15, child.returncode
assert termios.tcgetattr(theirs)[3] == before
";

#[test]
fn one_export_has_a_socket_also_after_a_kill() {
    if !has(&["nbdkit", "nbdinfo"]) {
        return;
    }
    let lab = Lab::new();
    let vaults = ["v", "w", "x", "y"];
    vaults[1..].iter().for_each(|vault| lab.vault(vault, "key"));
    vaults.iter().for_each(|vault| _ = lab.ok(&["volume", "create", vault, vault, "1M"]));
    let words = |vault: &str| lab.export_words(&["--socket", "s", vault]);
    let first = lab.export(&["v"]);
    let second = words("w");
    let second: Vec<&str> = second.iter().map(String::as_str).collect();
    assert!(lab.code(20, &second).1.contains("another export"));
    first.kill_all();
    assert!(lab.path("s").exists(), "what a kill leaves");
    // All at once: one of them gets the socket, and keeps it.
    let mut all: Vec<_> =
        vaults.iter().map(|v| lab.command(&words(v)).stderr(Stdio::null()).spawn().unwrap()).collect();
    until("three have ended", || {
        all.iter_mut().map(|one| one.try_wait().unwrap().is_some()).filter(|ended| *ended).count() == 3
    });
    let one = all.iter_mut().position(|one| one.try_wait().unwrap().is_none()).unwrap();
    let uri = format!("nbd+unix:///{}?socket={}", vaults[one], lab.path("s").display());
    until("it serves", || Command::new("nbdinfo").arg(&uri).output().unwrap().status.success());
    run("kill", &["-TERM", &all[one].id().to_string()]);
    for (n, child) in all.iter_mut().enumerate() {
        assert_eq!(child.wait().unwrap().code(), Some(if n == one { 0 } else { 20 }), "{}", vaults[n]);
    }
    assert!(!lab.path("s").exists() && !lab.path("s.lock").exists());
}

/// The kernel connects clients to the socket of a server that waits for its last ones to end.
#[test]
fn an_export_waits_for_the_one_that_is_ending() {
    if !has(&["nbdkit", "nbdinfo"]) {
        return;
    }
    let lab = Lab::new();
    lab.vault("w", "key");
    ["v", "w"].iter().for_each(|vault| _ = lab.ok(&["volume", "create", vault, vault, "1M"]));
    let first = lab.export(&["v"]);
    let nbdkit = first.nbdkit().to_string();
    let serves = |vault: &str| {
        let uri = format!("nbd+unix:///{vault}?socket={}", lab.path("s").display());
        Command::new("nbdinfo").arg(&uri).output().unwrap().status.success()
    };
    until("it serves", || serves("v"));
    // It takes no client, as at its end.
    run("kill", &["-STOP", &nbdkit]);
    let mut second = lab.command(&lab.export_words(&["--socket", "s", "w"])).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert!(second.try_wait().unwrap().is_none(), "it waits");
    run("kill", &["-TERM", &nbdkit]);
    run("kill", &["-CONT", &nbdkit]);
    first.stop();
    until("the second serves", || serves("w"));
    run("kill", &["-TERM", &second.id().to_string()]);
    assert!(second.wait().unwrap().success());
}

/// Keys that were loaded do not come along into a child.
#[test]
fn nbdkit_in_the_background_is_refused() {
    if !has(&["nbdkit"]) {
        return;
    }
    let lab = Lab::new();
    lab.ok(&["volume", "create", "v", "a", "1M"]);
    let start = |more: &[&str]| {
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.args(more).args([
            "--verbose",
            "--log=stderr",
            "--unix",
            &lab.text_path("s"),
            "--pidfile",
            &lab.text_path("pid"),
        ]);
        nbdkit
            .arg(Lab::plugin())
            .arg(format!("vault={}", lab.text_path("v")))
            .arg(format!("key={}", lab.source("key")));
        nbdkit.env("XDG_STATE_HOME", lab.path("state")).env("LAMASSU_SYSLOG", lab.path("nowhere"));
        nbdkit.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    // Its child has the other end of the pipe, and ends.
    let out = start(&[]).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("--foreground"), "{said}");
    assert!(std::os::unix::net::UnixStream::connect(lab.path("s")).is_err(), "nobody serves");
    for left in ["s", "pid"] {
        fs::remove_file(lab.path(left)).unwrap();
    }
    let child = start(&["--foreground"]);
    until("it serves", || std::os::unix::net::UnixStream::connect(lab.path("s")).is_ok());
    run("kill", &["-TERM", &child.id().to_string()]);
    assert!(child.wait_with_output().unwrap().status.success());
}
