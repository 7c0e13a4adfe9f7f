//! `scrub` as an operator's timer runs it: stopped and gone on with, held to a rate, without a terminal, through the
//! datasets of a vault; and what becomes of what it finds.

use crate::mounts::{bench, daemon_of, is_mounted, kill, wait_for};
use crate::support::{Bench, Ran, flip, noise};
use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

const FILES: u64 = 8;
/// Blocks of each; and each has one page.
const BLOCKS: u64 = 16;

/// A vault with some files in a directory, whose blocks are under roots of the anchor. Where they lie in the store.
fn furnished() -> (Bench, PathBuf) {
    let b = Bench::new();
    b.run("init --tree-leaves blocks v").ok();
    let from = b.dir("from");
    (0..FILES).for_each(|i| fs::write(from.join(i.to_string()), noise(BLOCKS as usize * 4096, i)).unwrap());
    b.run("cp -r v from vault:d").ok();
    let stored = b.stored("v", "d");
    (b, stored)
}

fn files_in(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries.filter(|path| path.symlink_metadata().unwrap().is_file()).collect();
    files.sort();
    files
}

/// A scrub in the background.
fn start(b: &Bench, options: &str) -> Child {
    let words = format!("scrub --json --state verified {options} v");
    let mut command = b.command(words.split_whitespace());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Files below a directory that a process has open.
fn open_in(child: &Child, dir: &Path) -> HashSet<PathBuf> {
    let dir = dir.canonicalize().unwrap();
    let open = fs::read_dir(format!("/proc/{}/fd", child.id())).into_iter().flatten().flatten();
    let paths = open.filter_map(|fd| fs::read_link(fd.path()).ok());
    paths.filter(|path| path.parent() == Some(&*dir) && path.is_file()).collect()
}

fn stopped(child: Child, signal: &str) -> Ran {
    kill(child.id() as i32, signal);
    child.wait_with_output().unwrap().into()
}

fn count(told: &Value, what: &str) -> u64 {
    told[what].as_u64().unwrap_or_else(|| panic!("{what} in {told}"))
}

/// Kinds and paths.
fn findings(told: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    told["findings"].as_array().unwrap().iter().map(|f| (text(&f["kind"]), text(&f["path"]))).collect()
}

fn verified(b: &Bench) -> u64 {
    let state: Value = serde_json::from_slice(&fs::read(b.path("verified")).unwrap()).unwrap();
    state["verified"].as_object().unwrap().len() as u64
}

#[test]
fn a_scrub_that_is_stopped_goes_on_where_it_was() {
    for signal in ["-INT", "-TERM"] {
        let (b, stored) = furnished();
        // More than a second for each file.
        let child = start(&b, "--limit 40K");
        let mut seen = HashSet::new();
        wait_for("the second file", || {
            seen.extend(open_in(&child, &stored));
            seen.len() >= 2
        });
        let ran = stopped(child, signal).code(15);
        assert!(ran.out.is_empty(), "{}", ran.text());
        let before = verified(&b);
        assert!((1..FILES).contains(&before), "{before}");
        let told = b.run("scrub --json --state verified v").ok().json();
        let left = FILES - before;
        assert_eq!((count(&told, "skipped"), count(&told, "files")), (before, left), "{told}");
        assert_eq!((count(&told, "blocks"), count(&told, "pages")), (left * BLOCKS, left), "{told}");
        assert!(!b.path("verified").exists());
        // What is done is done: the next begins anew.
        let told = b.run("scrub --json --state verified v").ok().json();
        assert_eq!((count(&told, "skipped"), count(&told, "files")), (0, FILES));
        assert_eq!(count(&told, "blocks"), FILES * BLOCKS);
    }
}

/// Or a timer that is stopped each time would end with success in the end.
#[test]
fn what_was_found_before_a_scrub_was_stopped_is_found_by_the_one_that_goes_on() {
    let (b, stored) = furnished();
    let damaged: Vec<_> = files_in(&stored).into_iter().step_by(2).collect();
    damaged.iter().for_each(|file| flip(file, 3 * 4096));
    let child = start(&b, "--limit 40K");
    let mut seen = HashSet::new();
    wait_for("some files", || {
        seen.extend(open_in(&child, &stored));
        seen.len() >= 4
    });
    stopped(child, "-TERM").code(15);
    let before = verified(&b);
    let told = b.run("scrub --json --state verified v").code(30).json();
    let expected: HashSet<_> = damaged.iter().map(|file| shown(&b, file)).collect();
    let found: HashSet<_> = findings(&told).into_iter().map(|(_, path)| path).collect();
    assert_eq!(found, expected, "{told}");
    assert_eq!(count(&told, "skipped") + count(&told, "files"), FILES);
    assert_eq!(count(&told, "skipped"), before);
}

fn shown(b: &Bench, stored: &Path) -> String {
    stored.strip_prefix(b.path("v")).unwrap().display().to_string()
}

/// At a byte a second the second page is an hour away.
#[test]
fn a_scrub_reads_no_faster_than_it_may_and_stops_in_the_middle_of_a_file() {
    let (b, stored) = furnished();
    let child = start(&b, "--limit 1");
    wait_for("the first file", || !open_in(&child, &stored).is_empty());
    let open = open_in(&child, &stored);
    let ran = stopped(child, "-TERM").code(15);
    assert!(ran.out.is_empty());
    assert_eq!((open.len(), verified(&b)), (1, 0));
    for limit in ["0", "fast", "-1"] {
        b.run(&format!("scrub --limit {limit} v")).code(2);
    }
    b.run("scrub --limit 100G v").ok();
}

/// cron sends mail of what stands on standard error.
#[test]
fn without_a_terminal_there_is_no_progress_but_with_verbose() {
    let (b, _) = furnished();
    let ran = b.run("scrub --limit 300K v").ok();
    assert!(ran.err.is_empty(), "{}", ran.err);
    assert!(ran.text().starts_with("clean: "), "{}", ran.text());
    assert!(b.run("scrub --quiet v").ok().out.is_empty());
    b.run("scrub --verbose --limit 300K v").ok().says("verified ").says("KiB");
}

/// What a session has open cannot be told from what is stale.
#[test]
fn what_cannot_be_verified_without_a_key_has_a_code_of_its_own() {
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: takes /dev/fuse");
        return;
    }
    let b = bench("--tree-leaves blocks");
    b.run("mount v m").ok();
    let open = fs::File::create(b.path("m/f")).unwrap();
    let write = |seed| open.write_all_at(&noise(1_200_000, seed), 0).unwrap();
    write(1);
    open.sync_all().unwrap();
    // The anchor knows of it some seconds later.
    let (mut seed, mut last) = (1, None);
    wait_for("a write that the anchor does not know of yet", || {
        seed += 1;
        write(seed);
        let ran = last.insert(b.run("scrub --json v"));
        ran.code == 31 && count(&ran.json(), "open_pages") > 0
    });
    let told = last.unwrap().code(31).says("cannot be verified without a key").json();
    assert_eq!((told["status"].as_str(), count(&told, "open_files")), (Some("unverified"), 1), "{told}");
    assert!(count(&told, "open_pages") >= 1 && findings(&told).is_empty(), "{told}");
    drop(open);
    b.unmount("m");
    assert!(!is_mounted(&b.path("m")));
    let told = b.run("scrub --json v").ok().json();
    assert_eq!((told["status"].as_str(), count(&told, "open_pages")), (Some("clean"), 0));
}

/// Blocks behind a page are no pages, however large they are.
#[test]
fn an_open_file_of_large_blocks_whose_pages_are_recorded_is_clean() {
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: takes /dev/fuse");
        return;
    }
    let b = bench("-b 64K");
    b.run("mount v m").ok();
    let open = fs::File::create(b.path("m/f")).unwrap();
    open.write_all_at(&noise(300_000, 1), 0).unwrap();
    open.sync_all().unwrap();
    wait_for("it is open", || count(&b.run("scrub --json v").json(), "open_files") == 1);
    let told = b.run("scrub --json v").ok().json();
    assert_eq!((count(&told, "open_files"), count(&told, "open_pages")), (1, 0), "{told}");
    drop(open);
    b.unmount("m");
}

/// What a directory of others has may be older than it says.
#[test]
fn a_state_in_a_directory_of_others_is_not_believed() {
    let (b, _) = furnished();
    let dir = b.dir("others");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    b.run("scrub --state others/verified v").code(28).says("others");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();
    fs::write(dir.join("verified"), "").unwrap();
    fs::set_permissions(dir.join("verified"), fs::Permissions::from_mode(0o600)).unwrap();
    b.run("scrub --state others/verified v").ok();
    assert!(!dir.join("verified").exists());
}

/// The anchor has no root over the blocks of a file that is open: only its pages can be compared.
#[test]
fn the_blocks_of_what_a_killed_mount_has_left_are_not_called_clean() {
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: takes /dev/fuse");
        return;
    }
    let b = bench("--tree-leaves blocks");
    b.run("mount v m").ok();
    let open = fs::File::create(b.path("m/f")).unwrap();
    open.write_all_at(&noise(BLOCKS as usize * 4096, 1), 0).unwrap();
    open.sync_all().unwrap();
    kill(daemon_of(&b), "-KILL");
    drop(open);
    wait_for("the dead mount is taken down", || b.run("umount --lazy m").code == 0 || !is_mounted(&b.path("m")));
    for _ in 0..2 {
        let told = b.run("scrub --json --state verified v").code(31).says("check --repair").json();
        let counts = ["blocks", "files_with_unverified_blocks", "skipped"].map(|what| count(&told, what));
        assert_eq!((told["status"].as_str(), counts), (Some("unverified"), [0, 1, 0]), "{told}");
        assert!(findings(&told).is_empty(), "{told}");
    }
    b.run("check --repair v").ok();
    let told = b.run("scrub --json v").ok().json();
    assert_eq!((count(&told, "blocks"), count(&told, "files_with_unverified_blocks")), (BLOCKS, 0), "{told}");
}

/// What was verified under another row of the anchor was not verified.
#[test]
fn a_file_that_was_changed_since_is_verified_again() {
    let (b, stored) = furnished();
    let child = start(&b, "--limit 40K");
    wait_for("a file was verified", || b.path("verified").exists() && verified(&b) > 2);
    stopped(child, "-INT").code(15);
    let files = files_in(&stored);
    let before: Vec<_> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let from = b.dir("other");
    (0..FILES).for_each(|i| fs::write(from.join(i.to_string()), noise(BLOCKS as usize * 4096, 50 + i)).unwrap());
    for i in 0..FILES {
        b.run(&format!("cp v other/{i} vault:d/{i}")).ok();
    }
    for (file, bytes) in files.iter().zip(before) {
        fs::write(file, bytes).unwrap();
    }
    let told = b.run("scrub --json --state verified v").code(30).json();
    assert_eq!(count(&told, "skipped"), 0, "{told}");
}

#[test]
fn a_state_that_others_may_write_is_not_believed() {
    let (b, _) = furnished();
    let child = start(&b, "--limit 40K");
    wait_for("a file was verified", || b.path("verified").exists() && verified(&b) > 0);
    stopped(child, "-INT").code(15);
    let mode = |mode| fs::set_permissions(b.path("verified"), fs::Permissions::from_mode(mode)).unwrap();
    assert_eq!(fs::metadata(b.path("verified")).unwrap().permissions().mode() & 0o777, 0o600);
    mode(0o620);
    b.run("scrub --state verified v").code(28).says("cannot be trusted");
    mode(0o600);
    let me = fs::metadata(b.path("verified")).unwrap();
    if std::os::unix::fs::MetadataExt::uid(&me) == 0 {
        std::os::unix::fs::chown(b.path("verified"), Some(65534), None).unwrap();
        b.run("scrub --state verified v").code(28).says("cannot be trusted");
        std::os::unix::fs::chown(b.path("verified"), Some(0), None).unwrap();
    }
    b.run("scrub --state verified v").ok();
}

/// A vault with a dataset, and one in that. Where they lie in the store, and the ids of both.
fn with_datasets() -> Option<(Bench, [PathBuf; 2], [String; 2])> {
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: takes /dev/fuse");
        return None;
    }
    let b = bench("--tree-leaves blocks");
    b.run("mount v m").ok();
    fs::write(b.path("m/f"), noise(20_000, 1)).unwrap();
    for (i, set) in ["set", "set/in"].into_iter().enumerate() {
        b.run(&format!("dataset create m/{set}")).ok();
        fs::write(b.path("m").join(set).join("f"), noise(20_000, 2 + i as u64)).unwrap();
    }
    b.unmount("m");
    let stored = ["set", "set/in"].map(|set| b.stored("v", set));
    let ids = stored.clone().map(|dir| {
        let header = fs::read_to_string(dir.join("lamassu.vault")).unwrap();
        let header: Value = serde_json::from_str(&header).unwrap();
        header["id"].as_str().unwrap().replace('-', "")
    });
    Some((b, stored, ids))
}

fn anchor_of(b: &Bench, id: &str) -> PathBuf {
    let own = b.run("info --json v").ok().json()["anchor"].as_str().unwrap().to_owned();
    Path::new(&own).with_file_name(format!("{id}.anchor"))
}

#[test]
fn a_scrub_goes_into_the_datasets_whose_anchors_are_here() {
    let Some((b, [set, within], ids)) = with_datasets() else { return };
    let told = b.run("scrub --json v").ok().json();
    assert_eq!((count(&told, "files"), count(&told, "blocks"), count(&told, "datasets")), (3, 12, 2), "{told}");
    assert_eq!(told["datasets_without_anchor"], serde_json::json!([]));
    // Of each, what is stale is named by its place in the whole store.
    let files = [&set, &within].map(|dir| files_in(dir).into_iter().find(|path| !is_own(path)).unwrap());
    files.iter().for_each(|file| flip(file, 100));
    let log = b.path("events");
    let command = format!("cat >> {0}; echo >> {0}", log.display());
    let ran = b.command(["scrub", "--json", "--on-integrity-failure", &command, "v"]).output().unwrap();
    let told = Ran::from(ran).code(30).json();
    let mut expected = files.each_ref().map(|file| ("stale".to_owned(), shown(&b, file)));
    expected.sort();
    let mut found = findings(&told);
    found.sort();
    assert_eq!(found, expected);
    // An event is of the dataset, with the path in it.
    let events = events(&log);
    for (file, (dir, id)) in files.iter().zip([&set, &within].into_iter().zip(&ids)) {
        let path = file.strip_prefix(dir).unwrap().to_str().unwrap();
        let is_it = |event: &&Value| event["vault"] == **id && event["path"] == path;
        let event = events.iter().find(is_it).unwrap_or_else(|| panic!("{path} in {events:?}"));
        assert_eq!((event["kind"].as_str(), event["found_by"].as_str()), (Some("stale"), Some("scrub")));
        assert_eq!(event["range"]["page"], 0);
    }
    files.iter().for_each(|file| flip(file, 100));
    b.run("scrub v").ok();
    // A link in the place of one is not followed.
    let away = b.path("away");
    fs::rename(&within, &away).unwrap();
    std::os::unix::fs::symlink(&away, &within).unwrap();
    let told = b.run("scrub --json v").code(30).json();
    assert_eq!(findings(&told), [("other-kind".to_owned(), shown(&b, &within))]);
}

/// The files that a vault has for itself.
fn is_own(path: &Path) -> bool {
    path.file_name().unwrap().to_str().unwrap().starts_with("lamassu.")
}

#[test]
fn datasets_whose_anchors_are_elsewhere_are_named_and_make_no_success() {
    let Some((b, [set, within], ids)) = with_datasets() else { return };
    let [outer, inner] = ids.map(|id| anchor_of(&b, &id));
    let elsewhere = |anchor: &Path| fs::rename(anchor, anchor.with_extension("away")).unwrap();
    let back = |anchor: &Path| fs::rename(anchor.with_extension("away"), anchor).unwrap();
    elsewhere(&inner);
    let ran = b.run("scrub --json v").code(31).says("the anchor of this dataset is not on this machine");
    let told = ran.says(within.file_name().unwrap().to_str().unwrap()).json();
    assert_eq!(told["status"], "unverified");
    assert_eq!(told["datasets_without_anchor"], serde_json::json!([shown(&b, &within)]));
    assert_eq!((count(&told, "files"), count(&told, "datasets")), (2, 2), "the rest was verified: {told}");
    // An operator who knows may say so, and is not told each time.
    let ran = b.run("scrub --skip-unanchored v").ok();
    assert!(ran.err.is_empty() && ran.text().contains("1 of these were not verified"), "{} {}", ran.err, ran.text());
    // What is stale counts for more than what is not verified.
    let file = files_in(&set).into_iter().find(|path| !is_own(path)).unwrap();
    flip(&file, 100);
    b.run("scrub v").code(30);
    flip(&file, 100);
    // Behind one that is not here nothing is known, and one anchor that is damaged hinders no other.
    back(&inner);
    elsewhere(&outer);
    let told = b.run("scrub --json v").code(31).json();
    assert_eq!(
        (told["datasets_without_anchor"].clone(), count(&told, "files")),
        (serde_json::json!([shown(&b, &set)]), 1)
    );
    back(&outer);
    let whole = fs::read(&inner).unwrap();
    fs::write(&inner, b"").unwrap();
    let told = b.run("scrub --json v").code(5).json();
    assert_eq!((findings(&told), count(&told, "files")), (vec![("unreadable".to_owned(), shown(&b, &within))], 2));
    fs::write(&inner, whole).unwrap();
    fs::set_permissions(&inner, fs::Permissions::from_mode(0o600)).unwrap();
    b.run("scrub v").ok();
}

/// What a command was told, one start a line.
fn events(log: &Path) -> Vec<Value> {
    let text = fs::read_to_string(log).unwrap_or_default();
    let starts = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let all = starts.flat_map(|start| match start {
        Value::Array(events) => events,
        event => vec![event],
    });
    all.collect()
}
