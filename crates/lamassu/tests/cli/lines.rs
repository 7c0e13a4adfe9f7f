//! Names that hold escapes of terminals and ends of lines: whatever quotes one says it in one line, and moves no
//! cursor.

use crate::support::{Bench, flip};
use std::fs;
use std::os::unix::net::UnixDatagram;

/// Would end a line, begin one that looks like ours, clear the screen, and turn around what follows.
const EVIL: &str = "a\nlamassu: nothing is wrong\u{1b}[2J\u{202e}b";

#[track_caller]
fn is_harmless(text: &str) {
    let unsafe_in = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
    assert!(!text.contains(unsafe_in), "{text:?}");
    assert!(!text.lines().any(|line| line.starts_with("lamassu: nothing is wrong")), "{text:?}");
}

#[test]
fn a_name_in_a_vault_forges_no_line_of_a_command() {
    let b = Bench::new();
    b.run("init --names plain v").ok();
    b.file(EVIL, &[7; 10_000]);
    let run = |args: &[&str]| crate::support::Ran::from(b.command(args).output().unwrap());
    run(&["cp", "v", EVIL, "vault:"]).ok();
    flip(&b.path("v").join(EVIL), 5000);
    for args in [&["cat", "v", EVIL][..], &["check", "v"], &["cp", "v", &format!("vault:{EVIL}"), "out"]] {
        let ran = run(args).code(26);
        is_harmless(&ran.err);
        if args[0] == "check" {
            is_harmless(&ran.text());
        }
    }
    is_harmless(&run(&["cat", "v", &format!("no{EVIL}")]).code(3).err);
    is_harmless(&run(&["inspect", "v", EVIL]).text());
}

#[test]
fn the_name_of_a_vault_forges_no_line_where_a_person_is_asked() {
    let b = Bench::new();
    crate::support::Ran::from(b.command(["init", EVIL]).output().unwrap()).ok();
    for source in ["passphrase:prompt", "recovery:prompt", "recovery-shares:prompt"] {
        // script(1) has a terminal for it.
        let plain = b.command([""; 0]);
        let mut script = std::process::Command::new("script");
        script.args(["-qec", "\"$L\" ls -k \"$SOURCE\" \"$VAULT\"", "/dev/null"]).current_dir(b.path(""));
        script.envs(plain.get_envs().filter_map(|(k, v)| Some((k, v?))));
        script
            .env("L", plain.get_program())
            .env("SOURCE", source)
            .env("VAULT", EVIL)
            .stdin(std::process::Stdio::null());
        let said = crate::support::Ran::from(script.output().expect("script")).text().replace('\r', "");
        assert!(said.contains(" for a\\nlamassu"), "{said:?}");
        is_harmless(said.split("for a").nth(1).unwrap().split("b: ").next().unwrap());
    }
}

#[test]
fn a_name_in_a_store_forges_no_line_of_a_log() {
    let b = Bench::new();
    b.run("init --names plain v").ok();
    b.file(EVIL, &[7; 10_000]);
    crate::support::Ran::from(b.command(["cp", "v", EVIL, "vault:"]).output().unwrap()).ok();
    flip(&b.path("v").join(EVIL), 5000);
    b.dir("v/lamassu.staging");
    fs::write(b.path("v/lamassu.staging").join(EVIL), b"planted").unwrap();
    let m = b.dir("m");
    b.run("mount --log-file log v m").ok();
    assert!(fs::read(m.join(EVIL)).is_err());
    b.unmount("m");
    let log = fs::read_to_string(b.path("log")).unwrap();
    is_harmless(&log);
    assert!(log.contains("block") && log.contains("lamassu.staging"), "{log}");
    assert!(log.lines().all(|line| line.starts_with("20")), "each line begins with its time: {log}");
}

#[test]
fn a_name_forges_no_line_of_syslog() {
    let b = Bench::new();
    let syslog = UnixDatagram::bind(b.path("syslog")).unwrap();
    let init = b.command(["init", EVIL]).env("LAMASSU_SYSLOG", b.path("syslog")).output().unwrap();
    crate::support::Ran::from(init).ok();
    syslog.set_nonblocking(true).unwrap();
    let mut buf = [0; 4096];
    let len = syslog.recv(&mut buf).unwrap();
    let line = std::str::from_utf8(&buf[..len]).unwrap();
    assert!(line.contains("key event") && !line.contains('\n'), "{line:?}");
    is_harmless(line);
}
