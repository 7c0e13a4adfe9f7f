//! What `check`, `scrub` and a refused mount find is told: to a command, to the log of the system, and at a terminal.

use crate::alerts::{SECRET, can_mount, collector, events, has_no_secret};
use crate::mounts::{bench, wait_for};
use crate::support::{Bench, flip, noise};
use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;

/// What `check` and `scrub` find, as a timer runs them: no terminal, and a command that is told.
const CHECKS: [(&str, &str, i32); 2] = [("check", "block-hash", 26), ("scrub", "stale", 30)];

/// A vault with some files that have a damaged block each, which takes no key to see.
fn damaged_vault(files: usize) -> Bench {
    let b = Bench::new();
    b.run("init --tree-leaves blocks v").ok();
    let from = b.dir("from");
    (0..files).for_each(|i| fs::write(from.join(format!("{SECRET}{i}")), noise(9000, i as u64)).unwrap());
    b.run("cp -r v from vault:d").ok();
    for entry in fs::read_dir(b.stored("v", "d")).unwrap().map(|entry| entry.unwrap()) {
        if entry.file_type().unwrap().is_file() {
            flip(&entry.path(), 2 * 4096);
        }
    }
    b
}

/// Runs a command that tells another, which notes what it is told.
fn run_telling(b: &Bench, word: &str, options: &[&str], env: &[(&str, &Path)]) -> crate::support::Ran {
    let seen = b.path("told");
    let _ = fs::remove_file(&seen);
    let command = format!(
        r#"{{ printf '%s\t%s\t' "$LAMASSU_EVENT_KIND" "$LAMASSU_VAULT$LAMASSU_MOUNTPOINT"; cat; echo; }} >> {}"#,
        seen.display()
    );
    let mut run = b.command([&[word, "--on-integrity-failure", &command], options, &["v"]].concat());
    run.envs(env.iter().copied()).output().unwrap().into()
}

/// What it was told: the words of each start, and all events.
fn told(b: &Bench) -> (Vec<String>, Vec<Value>) {
    let text = fs::read_to_string(b.path("told")).unwrap_or_default();
    let (mut words, mut events) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let mut parts = line.splitn(3, '\t');
        words.push(parts.next().unwrap().to_owned());
        assert_eq!(Path::new(parts.next().unwrap()), b.path("v"));
        match serde_json::from_str(parts.next().unwrap()).unwrap() {
            Value::Array(more) => events.extend(more),
            event => events.push(event),
        }
    }
    (words, events)
}

fn heard(socket: &UnixDatagram) -> Vec<String> {
    socket.set_nonblocking(true).unwrap();
    let (mut lines, mut buf) = (Vec::new(), [0; 8192]);
    while let Ok(n) = socket.recv(&mut buf) {
        lines.push(String::from_utf8_lossy(&buf[..n]).into_owned());
    }
    lines
}

#[test]
fn what_check_and_scrub_find_is_told_to_a_command_and_to_the_systems_log() {
    let b = damaged_vault(1);
    let stored = b.stored("v", &format!("d/{SECRET}0")).strip_prefix(b.path("v")).unwrap().display().to_string();
    let [syslog, journal] = ["syslog", "journal"].map(|name| UnixDatagram::bind(b.path(name)).unwrap());
    for (word, kind, code) in CHECKS {
        let ran = run_telling(&b, word, &[], &[("LAMASSU_SYSLOG", &b.path("syslog"))]).code(code);
        assert!(ran.text().contains(kind) && !ran.err.contains("found_by"), "printed once: {}", ran.err);
        // The end of the program has waited for it.
        let (words, events) = told(&b);
        assert_eq!(words, [kind]);
        let [event] = &events[..] else { panic!("{events:?}") };
        assert_eq!(
            (&event["kind"], &event["path"], &event["found_by"]),
            (&kind.into(), &stored[..].into(), &word.into())
        );
        assert_eq!((&event["range"]["block"], &event["range"]["blocks"]), (&1.into(), &1.into()), "{event}");
        assert!(event["is_damage"] == true && event["vault"].as_str().unwrap().len() == 32, "{event}");
        has_no_secret(&event.to_string());
        let lines = heard(&syslog);
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert!(line.starts_with("<27>lamassu[") && line.contains(&stored), "{line}");
        assert!(line.contains(&format!("kind=\"{kind}\"")) && line.contains(&format!("found_by=\"{word}\"")), "{line}");
        // The journal instead, with fields; a file instead of both.
        run_telling(&b, word, &["--json"], &[("LAMASSU_JOURNAL", &b.path("journal"))]).code(code);
        let messages = heard(&journal);
        let [message] = &messages[..] else { panic!("{messages:?}") };
        for field in [format!("LAMASSU_KIND={kind}"), format!("LAMASSU_FOUND_BY={word}"), "LAMASSU_BLOCK=1".into()] {
            assert!(message.lines().any(|line| line == field), "{field}: {message}");
        }
        let log = b.path(word);
        let options = ["--log-file", log.to_str().unwrap()];
        run_telling(&b, word, &options, &[("LAMASSU_SYSLOG", &b.path("syslog"))]).code(code);
        assert!(heard(&syslog).is_empty());
        let text = fs::read_to_string(&log).unwrap();
        assert!(text.contains(kind) && text.contains(&stored), "{text}");
    }
}

/// At a terminal a person reads what is printed, and the system's log is not written to.
#[test]
fn what_is_printed_at_a_terminal_is_not_in_the_systems_log() {
    let b = damaged_vault(1);
    let socket = UnixDatagram::bind(b.path("syslog")).unwrap();
    for (word, kind, code) in CHECKS {
        let line = format!("{} {word} v", env!("CARGO_BIN_EXE_lamassu"));
        let mut script = Command::new("script");
        script.args(["-qec", &line, "/dev/null"]).current_dir(b.path("")).env("LAMASSU_SYSLOG", b.path("syslog"));
        script.env("LAMASSU_KEY", format!("raw:file:{}", b.path("key").display()));
        let Ok(ran) = script.env("XDG_STATE_HOME", b.path("state")).output() else {
            eprintln!("SKIPPED: takes script(1)");
            return;
        };
        let shown = String::from_utf8_lossy(&ran.stdout).into_owned();
        assert_eq!(ran.status.code(), Some(code), "{shown}");
        assert!(shown.contains(kind) && !shown.contains("found_by"), "{shown}");
        assert!(heard(&socket).is_empty(), "{word}");
    }
}

#[test]
fn of_what_check_and_scrub_find_all_is_told_and_little_is_logged() {
    const FILES: usize = 300;
    let b = damaged_vault(FILES);
    let dir = b.stored("v", "d").file_name().unwrap().to_str().unwrap().to_owned();
    let socket = UnixDatagram::bind(b.path("syslog")).unwrap();
    for (word, kind, code) in CHECKS {
        let ran = run_telling(&b, word, &[], &[("LAMASSU_SYSLOG", &b.path("syslog"))]).code(code);
        let text = ran.text();
        let of_a_file = |line: &&str| line.contains(kind) && (line.contains(&*dir) || line.contains(SECRET));
        assert_eq!(text.lines().filter(of_a_file).count(), FILES);
        assert!(!ran.err.contains("more was found"), "{}", ran.err);
        let (_, events) = told(&b);
        let paths: HashSet<_> = events.iter().map(|event| event["path"].as_str().unwrap()).collect();
        assert_eq!((events.len(), paths.len()), (FILES, FILES));
        // The socket holds some lines only, and nobody has listened.
        assert!(heard(&socket).len() < FILES);
    }
}

#[test]
fn a_command_of_check_or_scrub_that_fails_is_told_and_changes_no_exit_code() {
    let b = damaged_vault(1);
    for (word, _, code) in CHECKS {
        let ran: crate::support::Ran =
            b.command([word, "--on-integrity-failure", "exit 3", "v"]).output().unwrap().into();
        ran.code(code).says("the command of --on-integrity-failure failed").says("exit status: 3");
        // Nothing was found, and so nothing is run.
        b.run("init w").ok();
        let log = b.path("none");
        let touch = format!("touch {}", log.display());
        let ran: crate::support::Ran =
            b.command([word, "--on-integrity-failure", &touch, "w"]).output().unwrap().into();
        ran.ok();
        assert!(!log.exists());
        fs::remove_dir_all(b.path("w")).unwrap();
    }
}

/// The greatest rollback of all is found before anything is read.
#[test]
fn a_vault_that_is_refused_as_not_the_newest_is_an_event() {
    let b = Bench::new();
    b.run("init v").ok();
    let old = fs::read(b.path("v/lamassu.vault")).unwrap();
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).ok();
    fs::write(b.path("v/lamassu.vault"), old).unwrap();
    let ran = run_telling(&b, "check", &[], &[]).code(30);
    let (_, events) = told(&b);
    let [event] = &events[..] else { panic!("{events:?}: {}", ran.err) };
    assert_eq!((&event["kind"], &event["path"], &event["found_by"]), (&"stale".into(), &"".into(), &"check".into()));
    assert!(event["text"].as_str().unwrap().contains("vault header") && !event["vault"].is_null(), "{event}");
    // A scrub goes on, and names it.
    run_telling(&b, "scrub", &[], &[]).code(30);
    let (_, events) = told(&b);
    assert!(events.iter().any(|event| event["path"] == "lamassu.vault" && event["found_by"] == "scrub"), "{events:?}");
    if !can_mount() {
        return;
    }
    b.dir("m");
    mount_refused(&b);
}

fn mount_refused(b: &Bench) {
    let command = collector(b);
    let ran = b.command(["mount", "--on-integrity-failure", &command, "v", "m"]).output().unwrap();
    crate::support::Ran::from(ran).code(30);
    // The command goes on while the mount has ended.
    wait_for("the event", || !events(b).is_empty());
    let [event] = &events(b)[..] else { panic!("one event") };
    assert_eq!((&event["kind"], &event["found_by"]), (&"stale".into(), &"read".into()));
}

/// What lies outside of the tree, and what is seen of a dataset without its key.
#[test]
fn what_a_check_finds_beside_the_tree_is_told_too() {
    if !can_mount() {
        return;
    }
    let b = bench("--anchor none");
    b.run("mount v m").ok();
    let own = b.key("own");
    b.run(&format!("dataset create -n {own} m/set")).ok();
    fs::write(b.path("m/set/f"), noise(9000, 1)).unwrap();
    b.unmount("m");
    let set = b.stored("v", "set");
    fs::write(set.join("of nobody"), b"foreign").unwrap();
    flip(&b.path("v/lamassu.history"), 100);
    let ran = run_telling(&b, "check", &[], &[]).code(26);
    let (_, events) = told(&b);
    let has = |kind: &str, path: &str| events.iter().any(|event| event["kind"] == kind && event["path"] == path);
    assert!(has("history", "lamassu.history") && has("foreign", "of nobody"), "{events:?} {}", ran.text());
    let vault_of = |kind| events.iter().find(|event| event["kind"] == kind).unwrap()["vault"].clone();
    assert_ne!(vault_of("history"), vault_of("foreign"), "the dataset's is an event of that");
}
