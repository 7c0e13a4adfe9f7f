//! lamassu history: what commands and mounts write down, what is found when it is changed, and what goes to syslog.

use crate::destroy::{DESTROY, receipt, vault};
use crate::support::{Bench, flip};
use serde_json::Value;
use std::os::unix::net::UnixDatagram;

fn entries(b: &Bench, vault: &str) -> Vec<Value> {
    b.run(&format!("history --json {vault}")).ok().json()["entries"].as_array().unwrap().clone()
}

fn events(b: &Bench, vault: &str) -> Vec<String> {
    entries(b, vault).iter().map(|e| e["event"].as_str().unwrap().to_string()).collect()
}

#[test]
fn what_is_done_to_keys_is_written_down() {
    let b = Bench::new();
    b.run("init v").ok();
    let second = b.key("second");
    b.run(&format!("key add -n {second} --label two v")).ok();
    b.run(&format!("key change -k {second} -n {second} v")).ok();
    b.run("key remove v 3").ok();
    b.run("key backup -k raw:file:key v copy").ok();
    b.run("key backup v unrecorded").ok().says("not on record");
    b.run("key restore copy v").ok();
    let all = entries(&b, "v");
    let told: Vec<_> = all.iter().map(|e| (e["event"].as_str().unwrap(), e["slot"].as_u64())).collect();
    let expected = [
        ("created", Some(1)),
        ("slot-added", Some(2)),
        ("slot-changed", Some(3)),
        ("slot-removed", Some(3)),
        ("backed-up", Some(1)),
        ("restored", None),
    ];
    assert_eq!(told, expected);
    assert_eq!((&all[1]["details"]["label"], &all[2]["details"]["instead_of"]), (&"two".into(), &"2".into()));
    let sha = String::from_utf8(std::process::Command::new("sha256sum").arg(b.path("copy")).output().unwrap().stdout)
        .unwrap();
    assert!(sha.starts_with(all[4]["details"]["sha256"].as_str().unwrap()));
    assert!(all[4]["details"]["file"].as_str().unwrap().ends_with("/copy"));
    assert!(
        all.iter()
            .enumerate()
            .all(|(i, e)| e["sequence"] == i as u64 + 1 && e["time"].as_u64().unwrap() > 1_700_000_000)
    );
    let shown = b.run("history v").ok().text();
    assert!(shown.lines().count() == 7 && shown.contains("slot 2, kind: raw, label: two"), "{shown}");
    // Needs a key, as everything that is sealed.
    let other = b.key("other");
    b.run(&format!("history -k {other} v")).code(12);
    assert!(b.run("leak --json v").ok().json()["history_bytes"].as_u64().unwrap() > 6 * 256);
    b.run("check v").ok();
}

#[test]
fn a_mount_point_stands_for_its_vault() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    assert_eq!(events(&b, "m"), ["created", "loaded"]);
    assert_eq!(entries(&b, "m"), entries(&b, "v"));
    b.unmount("m");
    b.run("history m").code(6);
}

#[test]
fn a_renewed_header_begins_a_history_that_its_administrator_signs() {
    let b = Bench::new();
    b.run("init v").ok();
    let job = b.key("job");
    b.run(&format!("key add --use-only -n {job} --label job v")).ok();
    let admin = |b: &Bench| b.run("key admin show --json v").ok().json();
    let before = admin(&b);
    b.run(&format!("key renew -k {job} v")).code(28).says("use-only");
    assert_eq!(events(&b, "v"), ["created", "slot-added"]);
    b.run("key renew v").ok().says("2 (\"job\")");
    assert_eq!(admin(&b), before, "the same administrator has signed it");
    assert_eq!(before["signature_good"], true);
    let all = entries(&b, "v");
    let renewed = all.last().unwrap();
    assert_eq!((&renewed["event"], &renewed["slot"]), (&"slot-changed".into(), &3.into()));
    assert!(renewed["details"]["what"].as_str().unwrap().contains("fresh file key"), "{renewed}");
    assert_eq!(all[0]["event"], "restarted", "the old history is sealed under the old file key");
    assert!(b.path("v/lamassu.history.broken").exists());
    b.run(&format!("history -k {job} v")).code(12);
    b.run("check v").ok();
}

#[test]
fn mounts_and_their_ends_are_written_down() {
    let b = Bench::new();
    b.run("init --anchor none v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    assert_eq!(events(&b, "v"), ["created", "loaded"]);
    b.unmount("m");
    assert_eq!(events(&b, "v"), ["created", "loaded", "unloaded"]);
    assert!(entries(&b, "v")[1]["details"]["mountpoint"].as_str().unwrap().ends_with("/m"));
    // A read-only mount changes nothing in the store.
    b.run("mount --read-only v m").ok();
    b.unmount("m");
    assert_eq!(events(&b, "v").len(), 3);
    // A history that does not verify is no reason not to mount, and gets no entry.
    flip(&b.path("v/lamassu.history"), 100);
    b.run("mount v m").ok().says("does not record");
    b.unmount("m");
    b.run("history v").code(26);
}

/// The entries of a history lie one behind the other; where each ends.
fn ends(history: &[u8]) -> Vec<usize> {
    let mut ends = Vec::new();
    while let Some(len) = history.get(ends.last().copied().unwrap_or(0)..).and_then(|rest| rest.first_chunk()) {
        ends.push(ends.last().copied().unwrap_or(0) + 44 + u32::from_le_bytes(*len) as usize);
    }
    ends
}

/// The store cuts the history off while the vault is mounted, and edits the header so that it counts no more than what
/// is left. What is noted next must not be chained to the rest, as if nothing had been there.
#[test]
fn a_history_that_the_store_cuts_off_under_a_mount_is_not_gone_on_with() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("--log-file log mount v m").ok();
    b.run("dataset create m/d").ok();
    b.run("dataset create m/e").ok();
    // The header counts what was there when it was changed last.
    b.run(&format!("key add -n {} m", b.key("second"))).ok();
    let (place, log) = (b.path("v/lamassu.vault"), b.path("v/lamassu.history"));
    let (header, history) = (std::fs::read(&place).unwrap(), std::fs::read(&log).unwrap());
    let kept = &history[..ends(&history)[0]];
    let mut edited: Value = serde_json::from_slice(&header).unwrap();
    let head: String = lamassu_crypto::wrap::sha256(kept).iter().map(|b| format!("{b:02x}")).collect();
    edited["history"] = serde_json::json!({ "count": 1, "head": head });
    std::fs::write(&place, serde_json::to_vec(&edited).unwrap()).unwrap();
    std::fs::write(&log, kept).unwrap();
    b.run("dataset destroy m/e").ok();
    assert!(std::fs::read(&log).unwrap() == kept, "nothing is chained to what is left");
    assert!(std::fs::read_to_string(b.path("log")).unwrap().contains("header was altered"));
    // The header as it was: the end of the mount is not chained to what is left either.
    std::fs::write(&place, &header).unwrap();
    b.unmount("m");
    assert!(std::fs::read(&log).unwrap() == kept);
    b.run("history v").code(26).says("cut off");
    // Behind the header's mark a cut is noticed by who has appended there, the mount itself.
    std::fs::write(&log, &history).unwrap();
    b.run("--log-file log mount v m").ok();
    std::fs::write(&log, &history).unwrap();
    b.unmount("m");
    assert!(std::fs::read(&log).unwrap() == history);
    assert!(
        std::fs::read_to_string(b.path("log")).unwrap().contains("the history does not record the end of the mount")
    );
}

#[test]
fn a_mount_that_is_refused_is_not_written_down() {
    let b = Bench::new();
    b.run("init v").ok();
    for dir in ["m", "n", "full/x"] {
        b.dir(dir);
    }
    b.run("mount v full").code(10).says("not empty");
    b.run("mount v nosuch").code(10);
    assert_eq!(events(&b, "v"), ["created"]);
    b.run("mount v m").ok();
    b.run("mount v n").code(11);
    b.unmount("m");
    assert_eq!(events(&b, "v"), ["created", "loaded", "unloaded"]);
}

#[test]
fn changes_of_it_are_found_and_survived() {
    let b = Bench::new();
    // Without an anchor, which would see more.
    b.run("init --anchor none v").ok();
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).ok();
    let log = b.path("v/lamassu.history");
    let good = std::fs::read(&log).unwrap();

    flip(&log, good.len() - 1);
    let found = b.run("history --json v").code(26).says("entry 2").json();
    assert_eq!((&found["verified"], found["entries"].as_array().unwrap().len()), (&false.into(), 1));
    let checked = b.run("check --json v").code(26).json();
    assert_eq!(
        (&checked["problems"][0]["kind"], &checked["problems"][0]["stored"]),
        (&"history".into(), &"lamassu.history".into())
    );
    std::fs::write(&log, &good[..good.len() / 2]).unwrap();
    b.run("history v").code(26).says("cut off");
    std::fs::remove_file(&log).unwrap();
    b.run("history v").code(26).says("cut off");
    // Nobody keeps a key in the vault by that.
    b.run("key remove v 2").ok();
    b.run(&format!("ls -k {second} v")).code(12);
    assert_eq!(events(&b, "v"), ["restarted", "slot-removed"]);
    b.run("check v").ok();
    // What an append that was interrupted leaves is no damage.
    let more = [&std::fs::read(&log).unwrap()[..], &good[..70]].concat();
    std::fs::write(&log, more).unwrap();
    b.run("history v").ok().says("interrupted");
    b.run(&format!("key add -n {second} v")).ok();
    assert_eq!(events(&b, "v"), ["restarted", "slot-removed", "slot-added"]);
}

#[test]
fn key_events_go_to_syslog_from_every_command() {
    let b = Bench::new();
    let place = b.path("syslog");
    let socket = UnixDatagram::bind(&place).unwrap();
    socket.set_nonblocking(true).unwrap();
    let heard = || {
        let (mut lines, mut buf) = (Vec::new(), [0u8; 8192]);
        while let Ok(n) = socket.recv(&mut buf) {
            lines.push(String::from_utf8_lossy(&buf[..n]).into_owned());
        }
        lines
    };
    let run = |line: &str| b.run_in("LAMASSU_SYSLOG", &place, line).ok();
    let made = run("init v");
    assert!(!made.err.contains("key event"), "not on the terminal: {}", made.err);
    run(&format!("key add -n {} --label two -q v", b.key("second")));
    let lines = heard();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].starts_with("<30>lamassu[") && lines[0].contains("event=\"created\""), "{}", lines[0]);
    assert!(lines[1].contains("event=\"slot-added\"") && lines[1].contains("slot=2"), "{}", lines[1]);
    // Once, also from the daemon of a mount whose log goes to syslog.
    b.dir("m");
    b.run_in("LAMASSU_SYSLOG", &place, "mount -v v m").ok();
    b.unmount("m");
    let lines = heard();
    for event in ["\"loaded\"", "\"unloaded\""] {
        assert_eq!(lines.iter().filter(|l| l.contains(event)).count(), 1, "{lines:?}");
    }
    // Nothing is said where nothing was done.
    b.run_in("LAMASSU_SYSLOG", &place, "key remove v 77").code(2);
    assert!(heard().is_empty());
}

/// With one entry alone, too, which might be taken for one that was torn.
#[test]
fn a_renewed_header_keeps_the_history_from_before() {
    let b = Bench::new();
    b.run("init v").ok();
    let before = std::fs::read(b.path("v/lamassu.history")).unwrap();
    b.run("key renew v").ok();
    assert!(std::fs::read(b.path("v/lamassu.history.broken")).unwrap() == before);
    assert_eq!(events(&b, "v"), ["restarted", "slot-changed"]);
}

/// The copies have the keychain of the renewed header, too: they matter until its epochs are retired, and after.
#[test]
fn copies_stay_on_record_when_the_file_key_is_renewed() {
    let b = Bench::new();
    let public = vault(&b);
    b.run("key backup -k raw:file:key v copy").ok();
    b.run("snapshot v monday").ok();
    b.run("clone v w").ok();
    let of_copies = |all: Vec<Value>| -> Vec<Value> {
        let without_number = |mut entry: Value| {
            entry.as_object_mut().unwrap().remove("sequence");
            entry
        };
        let is_one = |entry: &Value| ["backed-up", "cloned"].contains(&entry["event"].as_str().unwrap());
        all.into_iter().filter(is_one).map(without_number).collect()
    };
    let before = of_copies(entries(&b, "v"));
    assert_eq!(before.len(), 3);
    // Entries that are made again would have another time.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    for _ in 0..2 {
        assert!(!b.run("key renew v").ok().err.contains("lack"));
        assert_eq!(events(&b, "v"), ["restarted", "backed-up", "cloned", "cloned", "slot-changed"]);
        let all = entries(&b, "v");
        assert_eq!(all[0]["details"]["copies"], "taken over");
        assert_eq!(of_copies(all), before);
    }
    let snapshot = before[1]["details"]["snapshot"].as_str().unwrap();
    b.run("key rotate --outer v").ok();
    b.run("rekey --outer v").ok();
    let retired = b.run("key retire --outer 1 v").ok().says("/copy").says(snapshot);
    assert!(!retired.err.contains("may lack"), "{}", retired.err);
    b.run(&format!("{DESTROY} v")).ok().says("/copy");
    let r = receipt(&b, &public);
    assert!(r["backups"][0]["file"].as_str().unwrap().ends_with("/copy"), "{r}");
    let kinds: Vec<_> = r["clones"].as_array().unwrap().iter().map(|clone| clone["kind"].clone()).collect();
    assert_eq!(kinds, ["snapshot", "clone"]);
    assert_eq!(r["clones"][0]["id"], snapshot);
    let unknown = r["cannot_know"].to_string();
    assert!(unknown.contains("Clones and snapshots that are not on record"), "{r}");
    assert!(!unknown.contains("began anew"), "{r}");
}

/// What the store has damaged of a history, no later one has. All of them say so.
#[test]
fn a_history_that_may_lack_copies_says_so_to_the_end() {
    let b = Bench::new();
    b.run("init --anchor none v").ok();
    b.key("audit");
    let public = b.run("receipt key --audit-key raw:file:audit").ok().text().trim().to_owned();
    let second = b.key("second");
    for copy in ["one", "two"] {
        b.run(&format!("key backup -k raw:file:key v {copy}")).ok();
    }
    b.run(&format!("key add -n {second} v")).ok();
    let log = b.path("v/lamassu.history");
    let good = std::fs::read(&log).unwrap();
    let file = |entry: &Value| entry["details"]["file"].as_str().unwrap().rsplit('/').next().unwrap().to_owned();
    flip(&log, ends(&good)[2] - 1);
    b.run("key remove v 2").ok();
    assert_eq!(events(&b, "v"), ["restarted", "backed-up", "slot-removed"]);
    let lack = "may lack copies of the header";
    b.run("key renew v").ok().says(lack).says("begun without all of an earlier one");
    b.run("key renew v").ok().says(lack);
    assert_eq!(events(&b, "v"), ["restarted", "backed-up", "slot-changed"]);
    assert_eq!(file(&entries(&b, "v")[1]), "one");
    // A renewal that finds it damaged, or gone.
    let log_now = std::fs::read(&log).unwrap();
    flip(&log, ends(&log_now)[1] - 1);
    b.run("key renew v").ok().says(lack).says("does not verify");
    assert_eq!(events(&b, "v"), ["restarted", "slot-changed"]);
    std::fs::remove_file(&log).unwrap();
    b.run("key renew v").ok().says(lack).says("cut off");
    assert_eq!(events(&b, "v"), ["restarted", "slot-changed"]);
    assert!(entries(&b, "v")[0]["details"]["kept_as"].is_null());
    b.run("key rotate --outer v").ok();
    b.run("rekey --outer v").ok();
    b.run("key retire --outer 1 v").ok().says("may lack copies");
    b.run(&format!("{DESTROY} v")).ok();
    let r = receipt(&b, &public);
    assert_eq!(r["history"]["verified"], true);
    assert!(r["cannot_know"].to_string().contains("began anew"), "{r}");
}

/// A reader that keeps the anchor locked: the vault and its history stay as they were.
#[test]
fn a_renewal_that_is_refused_changes_nothing() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount --read-only v m").ok();
    b.run("key renew v").code(63);
    b.run("key add -n raw:file:key v").code(63);
    b.unmount("m");
    assert_eq!(events(&b, "v"), ["created"]);
    b.run("ls v").ok();
    b.run("mount v m").ok();
    b.unmount("m");
    assert!(!b.path("v/lamassu.history.broken").exists());
    b.run("key renew v").ok();
    assert_eq!(events(&b, "v"), ["restarted", "slot-changed"]);
}
