//! Anchored vaults: where their anchors lie, what is refused without or against them, and how they travel.

use crate::support::{Bench, Ran, flip, noise};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

fn bench() -> Bench {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.dir("disk");
    b
}

fn anchor(b: &Bench, vault: &str) -> PathBuf {
    b.run(&format!("info --json {vault}")).ok().json()["anchor"].as_str().unwrap().into()
}

fn status(b: &Bench, vault: &str) -> Value {
    b.run(&format!("anchor status --json {vault}")).ok().json()
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o7777
}

fn on_another_machine(b: &Bench, line: &str) -> Ran {
    b.run_in("XDG_STATE_HOME", &b.path("other"), line)
}

#[test]
fn a_vault_has_its_anchor_in_the_usual_place() {
    let b = Bench::new();
    let made = b.run("init --json v").ok().says("same file system").json();
    let usual = b.path(&format!("state/lamassu/anchors/{}.anchor", made["id"].as_str().unwrap()));
    assert_eq!((made["anchored"].as_bool(), made["anchor"].as_str()), (Some(true), usual.to_str()));
    assert_eq!((mode(&usual), mode(usual.parent().unwrap())), (0o600, 0o700));
    assert!(b.run("info v").ok().text().contains(usual.to_str().unwrap()));
    let told = status(&b, "v");
    assert_eq!((&told["objects"], &told["history"], &told["tree_degree"]), (&1.into(), &1.into(), &16.into()));
    assert_eq!((told["file"].as_str(), &told["vault"]), (usual.to_str(), &made["id"]));
    assert!(b.run("anchor status v").ok().text().contains("revision"));
    b.run("init --tree-degree 3 w").code(2).says("power of two");
    b.run("init --tree-degree 64 w").ok();
    assert_eq!(status(&b, "w")["tree_degree"], 64);
}

#[test]
fn it_lies_elsewhere_where_a_person_says_so() {
    let b = bench();
    b.run("init --anchor disk/a w").ok();
    assert!(b.path("disk/a").exists() && anchor(&b, "w").ends_with("disk/a"));
    // It is remembered.
    b.run_with("cp w - vault:f", b"content").ok();
    assert_eq!(b.run("cat w f").ok().text(), "content");
    // Not on another machine, where it can be named.
    on_another_machine(&b, "ls w").code(60).says("no anchor at").says("--anchor FILE");
    on_another_machine(&b, "ls --anchor disk/a w").ok();
    b.run("anchor move w disk/b").ok().says("moved");
    assert!(!b.path("disk/a").exists() && anchor(&b, "w").ends_with("disk/b"));
    b.run("ls w").ok();
    b.run("ls --anchor disk/a w").code(60);
    b.run(&format!("anchor move w {}", b.path("w/inside").display())).code(28).says("would lie in");
}

#[test]
fn what_the_store_owns_is_refused_and_leaves_nothing_behind() {
    let b = bench();
    b.run("init --anchor w/anchor w").code(28).says("would lie in");
    b.run("ls --anchor v/lamassu.vault v").code(28).says("would lie in");
    b.run("init --anchor disk/a x").ok();
    b.run("init --anchor disk/a w").code(28).says("already");
    b.run("mount v m").ok();
    b.run("init --anchor m/anchor w").code(28).says("would lie in");
    b.unmount("m");
    b.run("init --anchor nowhere/at/all/../../a w").code(1);
    assert!(!b.path("w").exists());
    let left = fs::read_dir(b.path("state/lamassu/anchors")).unwrap().count();
    assert_eq!(left, 2, "the anchor of v, and where that of x lies");
    assert_eq!(b.run("ls x").ok().text(), "");
}

#[test]
fn without_its_anchor_a_vault_is_read_only_where_that_is_said() {
    let b = bench();
    b.run_with("cp v - vault:f", b"content").ok();
    let (file, away) = (anchor(&b, "v"), b.path("away"));
    fs::rename(&file, &away).unwrap();
    let lines = ["ls v", "cat v f", "check v", "mount v m", "mount --read-only v m", "clone v w", "rekey --full v"];
    for line in lines {
        b.run(line).code(60).says("no anchor at").says("anchor import");
    }
    b.run_with("cp v - vault:g", b"x").code(60);
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).code(60);
    assert!(!b.path("w").exists());
    assert_eq!(b.run("cat --anchor none v f").ok().text(), "content");
    b.run("mount --anchor none --read-only v m").ok();
    assert_eq!(fs::read(b.path("m/f")).unwrap(), b"content");
    b.unmount("m");
    b.run("mount --anchor none v m").code(28).says("not changed");
    b.run(&format!("key add --anchor none -n {second} v")).code(28).says("not changed");
    b.run_with("cp --anchor none v - vault:g", b"x").code(28);
    assert!(b.run("info v").ok().text().contains("which is missing"));
    fs::rename(&away, &file).unwrap();
    b.run("check v").ok();
}

#[test]
fn an_anchor_that_is_not_good_has_its_code() {
    let b = bench();
    b.run("init w").ok();
    let (file, other) = (anchor(&b, "v"), anchor(&b, "w"));
    let good = fs::read(&file).unwrap();
    let put = |bytes: &[u8]| fs::write(&file, bytes).unwrap();
    put(&fs::read(&other).unwrap());
    b.run("ls v").code(61).says("another vault").says("anchor status");
    b.run("mount v m").code(61);
    for len in [good.len() / 2, 100, 1] {
        put(&good[..len]);
        b.run("ls v").code(62).says("damaged");
        b.run("mount v m").code(62);
        b.run("anchor status v").code(62);
    }
    put(&noise(good.len(), 1));
    b.run("ls v").code(62);
    put(b"");
    b.run("ls v").code(62);
    for at in [0, 9, 64, 4096] {
        put(&good);
        flip(&file, at);
        let ran = b.run("ls v");
        assert!([0, 62].contains(&ran.code), "{at}: {ran:?}");
        assert!(!ran.err.contains("panicked"), "{}", ran.err);
    }
    put(&good);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    b.run("ls v").code(28).says("yours alone");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    b.run("ls v").ok();
}

#[test]
fn one_process_has_it() {
    let b = bench();
    b.run("mount v m").ok();
    b.run("mount v disk").code(11).says("mounted on");
    b.run("ls v").code(63).says("--anchor none");
    b.run("ls --anchor none v").ok();
    // What only looks goes on beside a mount, and what the daemon does itself.
    assert_eq!(status(&b, "v")["objects"], status(&b, "m")["objects"]);
    b.run("anchor verify v").ok();
    b.run("anchor export v out").ok();
    b.run("path v .").ok();
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).ok();
    b.run("anchor import v out").code(11);
    b.run("anchor import m out").code(11);
    b.run("anchor move v disk/a").code(11);
    b.unmount("m");
    // Readers share it, and keep writers out.
    b.run("mount --read-only v m").ok();
    b.run("ls v").ok();
    b.run_with("cp v - vault:g", b"x").code(63);
    b.unmount("m");
    b.run_with("cp v - vault:g", b"x").ok();
}

#[test]
fn on_a_disk_that_is_read_only_nothing_is_written() {
    let b = Bench::new();
    b.dir("disk");
    b.dir("m");
    b.run("init --anchor disk/a v").ok();
    let disk = b.path("disk");
    let mount = |args: &[&str]| Command::new("mount").args(args).arg(&disk).output().unwrap().status.success();
    if !mount(&["--bind", disk.to_str().unwrap()]) || !mount(&["-o", "remount,bind,ro"]) {
        eprintln!("SKIPPED: no bind mounts here");
        return;
    }
    b.run("ls v").ok();
    b.run_with("cp v - vault:f", b"x").code(75).says("Read-only").says("disk that the anchor lies on");
    b.run("mount v m").code(75);
    b.run("init --anchor disk/b w").code(75);
    assert!(!b.path("w").exists());
    assert!(Command::new("umount").arg(&disk).status().unwrap().success());
    b.run_with("cp v - vault:f", b"x").ok();
}

#[test]
fn an_older_header_is_found() {
    let b = bench();
    let header = b.path("v/lamassu.vault");
    let old = fs::read(&header).unwrap();
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).ok();
    b.run(&format!("ls -k {second} v")).ok();
    let new = fs::read(&header).unwrap();
    fs::write(&header, &old).unwrap();
    for line in
        ["ls v", "mount v m", "mount --read-only v m", "check v", &format!("key add -n {second} v"), "clone v w"]
    {
        b.run(line).code(30).says("stale vault header").says("anchor accept");
    }
    assert_eq!(fs::read(&header).unwrap(), old, "nothing is made of it");
    fs::write(&header, &new).unwrap();
    b.run("ls v").ok();
    // Whoever meant it says so.
    fs::write(&header, &old).unwrap();
    b.run("anchor accept v").ok();
    b.run("ls v").ok();
    b.run(&format!("ls -k {second} v")).code(12);
    let kinds = |b: &Bench| -> Vec<String> {
        let read = b.run("history --json v").ok().json();
        let entries = read["entries"].as_array().unwrap().clone();
        entries.iter().map(|entry| entry["event"].as_str().unwrap().to_string()).collect()
    };
    assert_eq!(kinds(&b).last().map(String::as_str), Some("anchor-accepted"));
    fs::write(&header, &new).unwrap();
    b.run("ls v").code(30);
}

#[test]
fn an_accept_is_the_administrators() {
    let b = bench();
    let guest = b.key("guest");
    b.run(&format!("key add --use-only -n {guest} v")).ok();
    b.run(&format!("anchor accept -k {guest} v")).code(28).says("administrator");
    b.run("anchor accept v").ok();
}

#[test]
fn a_history_that_was_cut_off_is_found_also_behind_the_header() {
    let b = bench();
    let log = b.path("v/lamassu.history");
    b.run("mount v m").ok();
    let loaded = fs::read(&log).unwrap();
    b.unmount("m");
    let whole = fs::read(&log).unwrap();
    assert!(whole.len() > loaded.len());
    // The header knows of the first entry alone.
    fs::write(&log, &loaded).unwrap();
    b.run("ls v").code(30).says("stale history");
    b.run("mount v m").code(30);
    fs::write(&log, &whole).unwrap();
    b.run("ls v").ok();
    fs::remove_file(&log).unwrap();
    b.run("ls v").code(30).says("stale history");
    // What is left of it is accepted, and it begins anew.
    b.run("anchor accept v").ok();
    b.run("ls v").ok();
    b.run("mount v m").ok();
    b.unmount("m");
}

#[test]
fn a_header_that_a_daemon_is_to_change_is_the_newest() {
    let b = bench();
    let header = b.path("v/lamassu.vault");
    let old = fs::read(&header).unwrap();
    b.run("mount v m").ok();
    let (second, third) = (b.key("second"), b.key("third"));
    b.run(&format!("key add -n {second} m")).ok();
    let new = fs::read(&header).unwrap();
    fs::write(&header, &old).unwrap();
    let refused = b.run(&format!("key add -n {third} m"));
    assert!([23, 30].contains(&refused.code), "{refused:?}");
    assert_eq!(fs::read(&header).unwrap(), old);
    fs::write(&header, &new).unwrap();
    b.run(&format!("key add -n {third} m")).ok();
    b.unmount("m");
    b.run("check v").ok();
}

#[test]
fn an_export_opens_the_vault_on_another_machine() {
    let b = bench();
    b.run_with("cp v - vault:f", b"content").ok();
    on_another_machine(&b, "cat v f").code(60);
    b.run("anchor export v out").ok().says("revision");
    assert_eq!(mode(&b.path("out")), 0o600);
    b.run("anchor export v out").code(1).says("exists");
    on_another_machine(&b, "anchor import v out").ok();
    assert_eq!(on_another_machine(&b, "cat v f").ok().text(), "content");
    let digest = b.run("anchor verify v").ok().text();
    assert_eq!(on_another_machine(&b, "anchor verify v").ok().text(), digest);
    let hex = digest.split(' ').next().unwrap();
    b.run(&format!("anchor verify --expect {hex} v")).ok();
    b.run(&format!("anchor verify --expect {} v", "00".repeat(32))).code(61).says(hex);
    // What is written there is not known here: the first machine's is the older one now.
    let second = b.key("second");
    on_another_machine(&b, &format!("key add -n {second} v")).ok();
    b.run("ls v").code(30);
    on_another_machine(&b, "anchor export v back").ok();
    b.run("anchor import v back").ok();
    b.run("ls v").ok();
}

#[test]
fn what_is_no_good_export_is_not_imported() {
    let b = bench();
    b.run("init w").ok();
    b.run("anchor export v out").ok();
    b.run("anchor export w foreign").ok();
    let whole = fs::read(b.path("out")).unwrap();
    let before = b.run("anchor verify v").ok().text();
    for at in [20, 36, 41, 60, whole.len() / 2, whole.len() - 40, whole.len() - 1] {
        fs::write(b.path("bad"), &whole).unwrap();
        flip(&b.path("bad"), at);
        let ran = b.run("anchor import v bad");
        assert!([61, 62].contains(&ran.code), "{at}: {ran:?}");
    }
    for len in [0, 10, 40, whole.len() - 1] {
        b.file("bad", &whole[..len]);
        b.run("anchor import v bad").code(62);
    }
    b.run("anchor import v foreign").code(61).says("another vault");
    b.run("anchor import v nothing").code(1);
    assert_eq!(b.run("anchor verify v").ok().text(), before);
    assert!(!anchor(&b, "v").with_extension("redb.new").exists());
    // One that is older, only where that is said; and what it does not know is found.
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).ok();
    b.run("anchor import v out").code(28).says("--older");
    b.run("anchor import --older v out").code(30).says("forgotten").says("stale vault header");
    b.run("anchor accept v").ok();
    b.run("ls v").ok();
    // In the place of one that is damaged, too.
    b.run("anchor export v newer").ok();
    fs::write(anchor(&b, "v"), b"rubbish").unwrap();
    b.run("anchor import v newer").ok();
    b.run("ls v").ok();
}

#[test]
fn a_vault_can_be_made_without() {
    let b = Bench::new();
    b.run("init --anchor none v").ok().says("no anchor");
    assert!(b.run("info v").ok().text().contains("none"));
    let described = b.run("info --json v").ok().json();
    assert_eq!((&described["anchored"], &described["anchor"]), (&false.into(), &Value::Null));
    assert!(!b.path("state/lamassu/anchors").exists());
    let header = b.path("v/lamassu.vault");
    let old = fs::read(&header).unwrap();
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).ok();
    fs::write(&header, old).unwrap();
    b.run("ls v").ok();
    b.run("anchor status v").code(2).says("not anchored");
    b.file("a", b"");
    b.run("ls --anchor a v").code(2).says("not anchored");
}

#[test]
fn a_header_from_before_the_anchor_is_found() {
    let b = Bench::new();
    b.run("init --anchor none v").ok();
    let header = b.path("v/lamassu.vault");
    let old = fs::read(&header).unwrap();
    b.run("init w").ok();
    // As if v had got one later.
    let id = b.run("info --json v").ok().json()["id"].as_str().unwrap().to_string();
    fs::copy(anchor(&b, "w"), b.path(&format!("state/lamassu/anchors/{id}.anchor"))).unwrap();
    b.run("ls v").code(30).says("stale vault header");
    assert_eq!(fs::read(&header).unwrap(), old);
}

#[test]
fn clones_and_snapshots_have_their_own() {
    let b = bench();
    b.run_with("cp v - vault:f", b"content").ok();
    b.run("clone v w").ok();
    b.run("snapshot v s").ok();
    let files = ["v", "w", "s"].map(|vault| anchor(&b, vault));
    assert!(files.iter().all(|file| file.exists()) && files[0] != files[1] && files[1] != files[2]);
    assert_eq!(status(&b, "v")["objects"], status(&b, "w")["objects"]);
    b.run_with("cp w - vault:g", b"more").ok();
    b.run_with("cp v - vault:h", b"other").ok();
    for vault in ["v", "w", "s"] {
        assert_eq!(b.run(&format!("cat {vault} f")).ok().text(), "content");
        b.run(&format!("check {vault}")).ok();
    }
    // From a mount, which goes on.
    b.run("mount v m").ok();
    b.run("clone v x").ok();
    b.run("cat x h").ok();
    b.unmount("m");
    fs::remove_file(&files[1]).unwrap();
    b.run("ls w").code(60);
}

#[test]
fn datasets_have_their_own() {
    let b = bench();
    b.run("mount v m").ok();
    let own = b.key("own");
    b.run("dataset create m/a").ok();
    b.run(&format!("dataset create -n {own} m/b")).ok();
    // The mode of its root is that of its entry, which the anchor of the vault it lies in knows.
    fs::set_permissions(b.path("m/a"), fs::Permissions::from_mode(0o700)).unwrap();
    let names = fs::read_dir(b.path("m")).unwrap().count();
    assert_eq!((names, mode(&b.path("m/a"))), (2, 0o700));
    fs::write(b.path("m/a/f"), b"content").unwrap();
    fs::write(b.path("m/b/f"), b"content").unwrap();
    let anchors = || fs::read_dir(b.path("state/lamassu/anchors")).unwrap().count();
    assert_eq!(anchors(), 3);
    b.unmount("m");
    b.run("mount v m").ok();
    assert_eq!(mode(&b.path("m/a")), 0o700);
    b.unmount("m");
    let dir = b.stored("v", "b");
    assert_eq!(b.run(&format!("cat -k {own} {} f", dir.display())).ok().text(), "content");
    b.run("clone v w").ok();
    assert_eq!(anchors(), 6);
    b.run_with("cp v - vault:a/g", b"here").ok();
    b.run_with("cp w - vault:a/g", b"there").ok();
    let read = |vault: &str| b.run(&format!("cat {vault} a/g")).ok().text();
    assert_eq!((read("v"), read("w")), ("here".into(), "there".into()));
    b.run("dataset destroy v a").ok();
    assert_eq!(anchors(), 5);
}

#[test]
fn an_anchor_that_was_lost_is_made_anew() {
    let b = bench();
    b.run_with("cp v - vault:f", b"content").ok();
    let file = anchor(&b, "v");
    fs::remove_file(&file).unwrap();
    b.run("ls v").code(60).says("anchor rebuild");
    let guest = b.key("guest");
    let made = b.run("anchor rebuild --json v").ok().says("nothing before this moment is known").json();
    assert_eq!((&made["objects"], &made["files"], &made["left_out"]), (&2.into(), &1.into(), &0.into()));
    assert_eq!(b.run("cat v f").ok().text(), "content");
    b.run("check v").ok();
    let history = b.run("history --json v").ok().json();
    assert_eq!(history["entries"].as_array().unwrap().last().unwrap()["event"], "anchor-rebuilt");
    b.run(&format!("key add --use-only -n {guest} v")).ok();
    b.run(&format!("anchor rebuild -k {guest} v")).code(28).says("administrator");
    // In the place of one that is damaged, and beside nobody.
    fs::write(&file, b"rubbish").unwrap();
    b.run("anchor rebuild v").ok();
    b.run("mount v m").ok();
    b.run("anchor rebuild v").code(11);
    b.run("anchor rebuild m").code(11);
    b.unmount("m");
    b.run("ls v").ok();
}

/// An export from before is older than what was rebuilt, although that begins with nothing known.
#[test]
fn what_is_rebuilt_has_a_higher_revision() {
    let b = bench();
    b.run_with("cp v - vault:f", b"content").ok();
    b.run("anchor export v out").ok();
    b.run("anchor rebuild v").ok();
    b.run("anchor import v out").code(28).says("--older");
    assert_eq!(b.run("cat v f").ok().text(), "content");
}

/// A disk that is not mounted yet makes no anchored vault an unanchored one.
#[test]
fn an_anchor_whose_disk_is_away_is_remembered() {
    let b = bench();
    b.run("init --anchor none w").ok();
    let header = b.path("w/lamassu.vault");
    let old = fs::read(&header).unwrap();
    b.dir("disk/deep");
    b.run("anchor rebuild --anchor disk/deep/w w").ok();
    let new = fs::read(&header).unwrap();
    fs::rename(b.path("disk/deep"), b.path("disk/away")).unwrap();
    b.run("ls w").code(60);
    fs::write(&header, old).unwrap();
    b.run("ls w").code(30);
    fs::write(&header, new).unwrap();
    b.run("anchor rebuild w").code(60).says("disk/deep/w").says("--anchor FILE");
    fs::rename(b.path("disk/away"), b.path("disk/deep")).unwrap();
    b.run("ls w").ok();
    fs::remove_dir_all(b.path("disk/deep")).unwrap();
    b.run("anchor rebuild --anchor disk/w w").ok();
    b.run("ls w").ok();
}

/// A file that was named by mistake, or that a newer program made, is not replaced.
#[test]
fn a_file_that_may_be_a_good_anchor_is_not_replaced() {
    let b = bench();
    b.run("init --anchor disk/w w").ok();
    b.run("anchor export v out").ok();
    let before = b.run("anchor verify w").ok().text();
    for line in ["anchor import --anchor disk/w v out", "anchor rebuild --anchor disk/w v"] {
        b.run(line).code(61).says("another vault");
        assert_eq!(b.run("anchor verify w").ok().text(), before, "{line}");
    }
    // One that others may read was perhaps put there by them; it is no reason to lose it.
    let usual = anchor(&b, "v");
    fs::set_permissions(&usual, fs::Permissions::from_mode(0o644)).unwrap();
    for line in ["anchor import v out", "anchor rebuild v"] {
        assert_ne!(b.run(line).code, 0, "{line}");
    }
    fs::set_permissions(&usual, fs::Permissions::from_mode(0o600)).unwrap();
    b.run("anchor import v out").ok();
    b.run("ls v").ok();
    b.run("ls w").ok();
}

#[test]
fn a_vault_gets_an_anchor_later() {
    let b = Bench::new();
    b.dir("m");
    b.run("init --anchor none v").ok();
    b.run_with("cp v - vault:f", b"content").ok();
    let header = b.path("v/lamassu.vault");
    let old = fs::read(&header).unwrap();
    b.run("anchor rebuild v").ok();
    assert_eq!(b.run("info --json v").ok().json()["anchored"], true);
    assert_eq!(b.run("cat v f").ok().text(), "content");
    b.run_with("cp v - vault:g", b"more").ok();
    b.run("check v").ok();
    // A header from before would take the anchor away.
    fs::write(&header, old).unwrap();
    b.run("ls v").code(30);
    b.run_with("cp v - vault:h", b"x").code(30);
    b.run("anchor accept v").ok();
    assert_eq!(b.run("info --json v").ok().json()["anchored"], true);
    assert_eq!(b.run("cat v g").ok().text(), "more");
}

#[test]
fn what_was_restored_is_accepted_by_its_path() {
    let b = bench();
    b.file("one", b"first");
    b.file("two", b"second");
    b.run("cp v one vault:f").ok();
    let stored = b.stored("v", "f");
    let old = fs::read(&stored).unwrap();
    b.run("cp v two vault:f").ok();
    let stored = b.stored("v", "f");
    fs::write(&stored, &old).unwrap();
    b.run("cat v f").code(30);
    b.run("anchor accept v f").ok().says("1 changed");
    assert_eq!(b.run("cat v f").ok().text(), "first");
    let history = b.run("history --json v").ok().json();
    let last = history["entries"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&last["event"], &last["details"]["what"]), (&"anchor-accepted".into(), &"f".into()));
    let guest = b.key("guest");
    b.run(&format!("key add --use-only -n {guest} v")).ok();
    b.run(&format!("anchor accept -k {guest} v f")).code(28);
    b.run("anchor accept v nothing").code(3);
    b.run("anchor accept -r v").code(2);
}

/// Where a listing gives the kernel a node, the kernel reads and writes by it: the name must lead to no file but its
/// own.
#[test]
fn a_link_of_the_store_to_another_file_is_never_followed() {
    for cache in ["none", "through", "writeback"] {
        let b = Bench::new();
        b.run("init --names plain v").ok();
        b.dir("m");
        let mount = || b.run(&format!("mount --cache {cache} v m")).ok();
        mount();
        fs::create_dir(b.path("m/d")).unwrap();
        fs::create_dir_all(b.path("m/one/in-one")).unwrap();
        fs::create_dir(b.path("m/two")).unwrap();
        fs::write(b.path("m/d/victim"), "salary: 100").unwrap();
        fs::write(b.path("m/log"), "a healthy line").unwrap();
        b.unmount("m");
        fs::remove_file(b.path("v/d/victim")).unwrap();
        fs::hard_link(b.path("v/log"), b.path("v/d/victim")).unwrap();
        mount();
        assert_eq!(fs::read(b.path("m/log")).unwrap(), b"a healthy line");
        let look = |dir: &str| Command::new("ls").arg("-lR").arg(b.path(dir)).output().unwrap();
        assert!(!look("m/d").status.success());
        let is_io = |e: std::io::Error| assert_eq!(e.raw_os_error(), Some(libc::EIO), "{cache}");
        is_io(fs::metadata(b.path("m/d/victim")).unwrap_err());
        is_io(fs::read(b.path("m/d/victim")).unwrap_err());
        is_io(fs::write(b.path("m/d/victim"), "overwritten").unwrap_err());
        assert_eq!(fs::read(b.path("m/log")).unwrap(), b"a healthy line", "{cache}");

        // Directories that the store exchanges under the mount.
        look("m");
        fs::rename(b.path("v/one"), b.path("v/three")).unwrap();
        fs::rename(b.path("v/two"), b.path("v/one")).unwrap();
        fs::rename(b.path("v/three"), b.path("v/two")).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1200)); // the kernel's entries time out
        look("m");
        for (dir, own) in [("m/one", &["in-one"][..]), ("m/two", &[])] {
            // What is not its own ends with an error, at the latest behind what is there.
            let listed = fs::read_dir(b.path(dir)).and_then(|listed| listed.collect::<Result<Vec<_>, _>>());
            if let Ok(listed) = listed {
                let names: Vec<_> = listed.iter().map(|entry| entry.file_name()).collect();
                assert_eq!(names, own, "{cache} {dir}");
            }
        }
        b.run("umount m").ok();
    }
}
