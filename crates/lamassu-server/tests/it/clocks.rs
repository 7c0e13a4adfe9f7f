//! Clocks of machines that are set: no lease, no session and no connection depends on them. libfaketime answers what
//! the programs ask of CLOCK_REALTIME; other clocks are the system's.

use crate::common::raw::shown;
use crate::common::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// The library that the package `faketime` has.
fn library() -> Option<PathBuf> {
    let dirs = fs::read_dir("/usr/lib").ok()?.flatten();
    let all = dirs.map(|dir| dir.path().join("faketime/libfaketimeMT.so.1"));
    all.into_iter().find(|path| path.exists())
}

/// The clock of one machine: how far it is off.
struct Clock {
    file: PathBuf,
    library: PathBuf,
}

impl Clock {
    fn new(lab: &Lab, name: &str, library: &Path) -> Clock {
        let clock = Clock { file: lab.path(&format!("clock-{name}")), library: library.into() };
        clock.set(0);
        clock
    }

    /// By seconds from the right time.
    fn set(&self, off: i64) {
        let new = self.file.with_extension("new");
        fs::write(&new, format!("{off:+}\n")).unwrap();
        fs::rename(&new, &self.file).unwrap();
    }

    fn of(&self, command: &mut Command) {
        command.env("LD_PRELOAD", &self.library).env("FAKETIME_TIMESTAMP_FILE", &self.file);
        command.env("FAKETIME_NO_CACHE", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1").env("NO_FAKE_STAT", "1");
    }
}

/// When the newest entry of the audit log was written, as the server has it.
fn server_time(lab: &Lab) -> i64 {
    let out = lab.serve(&["audit", "--json"]).ok().out;
    let entry: serde_json::Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    entry["time"].as_i64().unwrap()
}

fn real_time() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64
}

#[test]
fn clocks_that_are_set_end_nobodys_session() {
    let Some(library) = library() else {
        eprintln!("SKIPPED: there is no libfaketime");
        return;
    };
    let mut lab = Lab::new();
    let id = lab.vault(lab.joined("a"));
    lab.grant(lab.joined("b"), &id);
    let [of_server, of_a, of_b] = ["server", "a", "b"].map(|name| Clock::new(&lab, name, &library));
    let set = |offs: [i64; 3]| {
        for (clock, off) in [&of_server, &of_a, &of_b].into_iter().zip(offs) {
            clock.set(off);
        }
    };
    let start = |lab: &mut Lab| {
        let mut command = Command::new(server_program());
        of_server.of(&mut command);
        lab.start_by(command);
    };
    lab.stop("-TERM");
    start(&mut lab);
    for (name, clock) in [("a", &of_a), ("b", &of_b)] {
        let mut command = lab.host(name).command();
        clock.of(&mut command);
        let line = format!("mount --shared --anchor {} store/v m-{name}", lab.url());
        Ran::from(command.args(line.split(' ')).output().unwrap()).ok();
    }
    let mut written = 0;
    let mut go_on = |lab: &Lab, time: Duration| {
        let until = Instant::now() + time;
        while Instant::now() < until {
            for (one, other) in [("a", "b"), ("b", "a")] {
                written += 1;
                lab.host(one).write("f", &written.to_string()).unwrap();
                assert_eq!(fs::read_to_string(lab.host(other).file("f")).unwrap(), written.to_string());
            }
        }
    };
    let jumps = [(0, 5 * HOUR, 0), (-5 * HOUR, 5 * HOUR, -7 * HOUR), (9 * HOUR, -9 * HOUR, 9 * HOUR), (0, 0, 0)];
    for (server, a, b) in jumps {
        go_on(&lab, Duration::from_secs(1));
        set([server, a, b]);
        go_on(&lab, Duration::from_secs(3));
        // It has that time indeed.
        lab.serve(&["host", "grant", "@a", &format!("@{id}")]).ok();
        lab.serve(&["enrol", "@c"]).ok();
        let off = server_time(&lab) - real_time();
        assert!((off - server).abs() < 60, "the server is {off} s off, and not {server}");
    }
    let lasting = |lab: &Lab| {
        assert_eq!(lab.metric("sessions"), 2.0);
        let audit = lab.serve(&["audit"]).ok().out;
        assert!(!audit.contains("session-ended"), "{audit}");
    };
    lasting(&lab);
    // New connections: a server that starts while the clocks are apart by most of a day.
    set([9 * HOUR, -9 * HOUR, 0]);
    lab.stop("-TERM");
    start(&mut lab);
    go_on(&lab, Duration::from_secs(2));
    // Its certificate would have expired: it has made another, and hosts take it.
    let before = shown(&lab, "a");
    set([20 * DAY, 20 * DAY, 20 * DAY]);
    wait_for("the certificate is not renewed", || shown(&lab, "a") != before);
    go_on(&lab, Duration::from_secs(1));
    set([40 * DAY, 40 * DAY, 40 * DAY]);
    wait_for("the certificate is not renewed again", || {
        let mut command = lab.host("a").command();
        of_a.of(&mut command);
        // Refused for the mount's sake: so the server was believed.
        Ran::from(command.args(["ls", "store/v"]).output().unwrap()).code == 63
    });
    go_on(&lab, Duration::from_secs(1));
    // The clock was wrong until now.
    set([0, 0, 0]);
    let before = shown(&lab, "a");
    wait_for("the certificate is of the future", || shown(&lab, "a") != before);
    go_on(&lab, Duration::from_secs(1));
    lasting(&lab);
    for name in ["a", "b"] {
        lab.host(name).umount().ok();
    }
}
