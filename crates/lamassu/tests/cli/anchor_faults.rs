//! What is wrong with an anchor, an export, or a store beside it, and what each command says of that.

use crate::mounts::is_mounted;
use crate::support::{Bench, Ran, noise};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;

fn bench() -> Bench {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.dir("disk");
    b.run_with("cp v - vault:f", b"content").ok();
    b
}

fn anchor(b: &Bench) -> PathBuf {
    b.run("info --json v").ok().json()["anchor"].as_str().unwrap().into()
}

fn copy(b: &Bench, from: &str, to: &str) {
    let _ = fs::remove_dir_all(b.path(to));
    assert!(Command::new("cp").arg("-a").arg(b.path(from)).arg(b.path(to)).status().unwrap().success());
}

fn findings(b: &Bench, code: i32) -> Vec<(String, String)> {
    let told = b.run("scrub --json v").code(code).json();
    let all = told["findings"].as_array().unwrap().iter();
    all.map(|f| (f["kind"].as_str().unwrap().into(), f["path"].as_str().unwrap().into())).collect()
}

#[test]
fn a_scrub_compares_the_history_and_the_record_of_sessions() {
    let b = bench();
    assert_eq!(findings(&b, 0), []);
    let log = b.path("v/lamassu.history");
    let old = fs::read(&log).unwrap();
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).ok();
    let whole = fs::read(&log).unwrap();
    let is = |kind: &str, path: &str| vec![(kind.to_string(), path.to_string())];
    fs::write(&log, &old).unwrap();
    assert_eq!(findings(&b, 30), is("stale", "lamassu.history"));
    let mut other = whole.clone();
    *other.last_mut().unwrap() ^= 1;
    fs::write(&log, &other).unwrap();
    assert_eq!(findings(&b, 30), is("stale", "lamassu.history"));
    fs::remove_file(&log).unwrap();
    assert_eq!(findings(&b, 30), is("missing", "lamassu.history"));
    fs::write(&log, &whole).unwrap();
    fs::rename(b.path("v/lamassu.sessions"), b.path("away")).unwrap();
    assert_eq!(findings(&b, 30), is("missing", "lamassu.sessions"));
    fs::rename(b.path("away"), b.path("v/lamassu.sessions")).unwrap();
    // A header that says that the vault is not anchored is from before, or was edited.
    let header = fs::read_to_string(b.path("v/lamassu.vault")).unwrap();
    let mut edited: serde_json::Value = serde_json::from_str(&header).unwrap();
    edited.as_object_mut().unwrap().remove("anchored").unwrap();
    fs::write(b.path("v/lamassu.vault"), edited.to_string()).unwrap();
    for line in ["scrub v", "anchor status v", "anchor verify v"] {
        b.run(line).code(30).says("stale vault header");
    }
    fs::write(b.path("v/lamassu.vault"), header).unwrap();
    assert_eq!(findings(&b, 0), []);
}

#[test]
fn a_scrub_compares_the_headers_of_datasets() {
    let b = bench();
    b.run("mount v m").ok();
    let own = b.key("own");
    b.run(&format!("dataset create -n {own} m/d")).ok();
    b.unmount("m");
    let dir = b.stored("v", "d");
    let files = ["lamassu.vault", "lamassu.history"].map(|name| dir.join(name));
    let old = files.clone().map(|file| fs::read(file).unwrap());
    let third = b.key("third");
    b.run(&format!("key add -k {own} -n {third} {}", dir.display())).ok();
    assert_eq!(findings(&b, 0), []);
    files.iter().zip(&old).for_each(|(file, bytes)| fs::write(file, bytes).unwrap());
    let stored = dir.strip_prefix(b.path("v")).unwrap().display().to_string();
    let expected = ["lamassu.vault", "lamassu.history"].map(|name| ("stale".to_string(), format!("{stored}/{name}")));
    assert_eq!(findings(&b, 30), expected);
}

/// A block of zeros that is stored plain looks like a hole.
#[test]
fn a_scrub_takes_zeros_that_are_stored_plain_for_what_they_are() {
    let b = bench();
    b.run("init --tree-leaves blocks w").ok();
    b.run("mount w m").ok();
    for protect in ["integrity", "none"] {
        fs::create_dir(b.path("m").join(protect)).unwrap();
        b.run(&format!("profile set --protect {protect} w {protect}")).ok();
        b.file(&format!("m/{protect}/zeros"), &[0; 8192]);
        let mixed = [noise(4096, 1), vec![0; 4096], noise(5000, 2)].concat();
        b.file(&format!("m/{protect}/mixed"), &mixed);
    }
    b.unmount("m");
    b.run("scrub w").ok();
    b.run("check w").ok();
}

/// Of a directory that it removed, the system says that there is none, which ends a listing (readdir(3)).
#[test]
fn a_directory_that_the_store_drops_while_it_is_in_use_is_no_empty_one() {
    let b = bench();
    b.run("mount v m").ok();
    for (dir, touched) in [("d", "d/a"), ("e", "e"), ("gone", "gone")] {
        fs::create_dir(b.path("m").join(dir)).unwrap();
        b.file(&format!("m/{dir}/a"), b"one");
        b.file(&format!("m/{dir}/b"), b"two");
        fs::metadata(b.path("m").join(touched)).unwrap();
        fs::File::open(b.path("m").join(dir)).unwrap().sync_all().unwrap();
    }
    for dir in ["d", "e"] {
        let stored = b.stored("v", dir);
        fs::remove_dir_all(&stored).unwrap();
        if dir == "e" {
            fs::create_dir(&stored).unwrap();
        }
        let listed = fs::read_dir(b.path("m").join(dir)).and_then(|all| all.collect::<Result<Vec<_>, _>>());
        let error = listed.expect_err("a listing of what the store dropped");
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{dir}");
        assert!(fs::File::create(b.path("m").join(dir).join("new")).is_err());
    }
    // One that was removed here is empty, as for any file system.
    let open = fs::File::open(b.path("m/gone")).unwrap();
    fs::remove_dir_all(b.path("m/gone")).unwrap();
    let through = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open));
    assert!(fs::read_dir(through).map_or(true, |all| all.flatten().count() == 0));
    drop(open);
    b.unmount("m");
    b.run("check v").code(30);
}

/// Wherever it is: a page of the file that is in use has a checksum.
#[test]
fn a_flipped_bit_in_the_anchor_is_found() {
    let b = bench();
    let (file, id) = (anchor(&b), b.run("info --json v").ok().json()["id"].as_str().unwrap().to_string());
    b.run("anchor status v").ok().text().find("checksums").expect("a line");
    assert_eq!(b.run("anchor status --json v").ok().json()["checked"], true);
    let whole = fs::read(&file).unwrap();
    let id = data_encoding::HEXLOWER.decode(id.as_bytes()).unwrap();
    // Behind the id of the vault, in its row, and in every older copy of that.
    let rows: Vec<_> = (0..whole.len() - id.len()).filter(|at| whole[*at..].starts_with(&id)).collect();
    assert!(!rows.is_empty());
    let mut bytes = whole.clone();
    rows.iter().for_each(|at| bytes[at + id.len() + 40] ^= 4);
    fs::write(&file, bytes).unwrap();
    for line in ["ls v", "mount v m", "mount --read-only v m", "anchor status v", "anchor verify v", "check v"] {
        b.run(line).code(62).says("anchor import");
    }
    b.run_with("cp v - vault:g", b"x").code(62);
    fs::write(&file, whole).unwrap();
    b.run("mount v m").ok();
    assert_eq!(b.run("anchor status --json v").ok().json()["checked"], false, "beside a writer");
    b.run("anchor verify v").ok().says("not compared");
    b.unmount("m");
}

#[test]
fn an_anchor_that_knows_no_vault_is_called_empty() {
    let b = bench();
    let file = anchor(&b);
    let whole = fs::read(&file).unwrap();
    fs::write(&file, b"").unwrap();
    for line in ["mount v m", "anchor status v", "anchor verify v", "ls v"] {
        let ran = b.run(line).code(62);
        assert!(ran.err.contains("empty") || ran.err.contains("damaged"), "{line}: {}", ran.err);
        assert!(!ran.err.contains("the vault's row"), "{line}: {}", ran.err);
    }
    b.run("mount v m").code(62).says("knows no vault").says("anchor import");
    b.run("anchor status v").code(62).says("knows no vault");
    assert!(!is_mounted(&b.path("m")));
    fs::write(&file, whole).unwrap();
    b.run("ls v").ok();
}

#[test]
fn an_export_that_does_not_fit_is_told() {
    let b = bench();
    b.run("anchor export v out").ok();
    // The same keys, other content: the header tells nothing.
    b.run_with("cp v - vault:g", b"more").ok();
    b.run("anchor import --older v out").code(65).says("older than the vault").says("anchor accept");
    b.run("anchor accept v").ok();
    b.run("check v").code(30);
    copy(&b, "v", "backup");
    b.run("anchor accept -r v /").ok();
    b.run("anchor export v fits").ok();
    b.run("anchor import v fits").ok();
    // And a store that is older than the export.
    copy(&b, "v", "older");
    b.run_with("cp v - vault:h", b"more").ok();
    b.run("anchor export v newer").ok();
    copy(&b, "older", "v");
    b.run("anchor import v newer").code(30).says("stale record of sessions");
}

#[test]
fn an_export_does_not_go_into_the_vault() {
    let b = bench();
    fs::create_dir(b.path("v/deep")).unwrap();
    for place in ["v/out", "v/deep/out", "disk/../v/out"] {
        b.run(&format!("anchor export v {place}")).code(28).says("would lie in");
        assert!(!b.path(place).exists());
    }
    b.run("anchor export v disk/out").ok();
}

#[test]
fn a_directory_that_others_may_write_to_is_no_place() {
    let b = bench();
    let mode = |bits| fs::set_permissions(b.path("disk"), fs::Permissions::from_mode(bits)).unwrap();
    mode(0o777);
    b.run("init --anchor disk/w w").ok().says("others may write to");
    b.run("anchor move v disk/v").ok().says("others may write to");
    for bits in [0o1777, 0o755] {
        mode(bits);
        let ran = b.run(&format!("anchor move v disk/{bits}")).ok();
        assert!(!ran.err.contains("others may write"), "{}", ran.err);
    }
}

#[test]
fn what_is_not_there_is_not_accepted_and_not_written_down() {
    let b = bench();
    let before = fs::read(b.path("v/lamassu.history")).unwrap();
    b.run("anchor accept v nosuch").code(3);
    b.run("anchor accept v nosuch/deeper").code(3);
    b.run("anchor accept -r v nosuch").code(3);
    assert_eq!(fs::read(b.path("v/lamassu.history")).unwrap(), before);
    b.run("anchor accept v f").ok();
    assert_ne!(fs::read(b.path("v/lamassu.history")).unwrap(), before);
}

#[test]
fn a_vault_without_an_anchor_is_not_told_to_leave_it_out() {
    let b = Bench::new();
    b.run("init --anchor none v").ok();
    for line in ["anchor status v", "anchor verify v", "anchor export v out", "scrub v"] {
        let ran = b.run(line).code(2).says("not anchored").says("anchor rebuild");
        assert!(!ran.err.contains("leave out"), "{line}: {}", ran.err);
    }
    b.file("a", b"");
    b.run("ls --anchor a v").code(2).says("leave out --anchor");
}

/// One dataset that is not as it should be hides nothing of the rest of the vault.
#[test]
fn scrub_and_check_go_on_behind_a_dataset() {
    let b = bench();
    b.run("mount v m").ok();
    for set in ["a", "b"] {
        b.run(&format!("dataset create m/{set}")).ok();
        b.file(&format!("m/{set}/f"), &noise(30_000, 1));
    }
    let of_a = b.run("info --json m/a").ok().json()["anchor"].as_str().map(PathBuf::from);
    b.unmount("m");
    let stored = b.stored("v", "a");
    let of_a = of_a.unwrap_or_else(|| {
        let header: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(stored.join("lamassu.vault")).unwrap()).unwrap();
        anchor(&b).with_file_name(format!("{}.anchor", header["id"].as_str().unwrap().replace('-', "")))
    });
    b.run("check v").ok();
    b.run("scrub v").ok();
    let whole = fs::read(&of_a).unwrap();
    let name = stored.file_name().unwrap().to_str().unwrap().to_owned();
    fs::write(&of_a, b"").unwrap();
    assert_eq!(findings(&b, 5), [("unreadable".to_string(), name)]);
    let told = b.run("scrub v").code(5).text();
    assert!(told.contains("not verified"), "{told}");
    fs::remove_file(&of_a).unwrap();
    b.run("scrub v").code(31).says("the anchor of this dataset is not on this machine");
    fs::write(&of_a, whole).unwrap();
    fs::set_permissions(&of_a, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(b.run("scrub v").ok().err.is_empty());
    // Stale, and not damaged.
    let (history, away) = (stored.join("lamassu.history"), b.path("away"));
    fs::rename(&history, &away).unwrap();
    let told = b.run("check --json v").code(30).json();
    assert_eq!(told["problems"][0]["kind"], "stale", "{told}");
    fs::rename(&away, &history).unwrap();
    // Something else in the place of a lock, and damage elsewhere: both are told.
    fs::remove_file(stored.join("lamassu.lock")).unwrap();
    fs::create_dir(stored.join("lamassu.lock")).unwrap();
    fs::write(b.path("v/lamassu.lost"), b"").unwrap();
    let told = b.run("check --json v").code(26).json();
    let kinds: Vec<_> = told["problems"].as_array().unwrap().iter().map(|p| p["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["foreign", "dataset"]);
    fs::remove_dir(stored.join("lamassu.lock")).unwrap();
    fs::remove_file(b.path("v/lamassu.lost")).unwrap();
    b.run("check v").ok();
}

/// Something else lies where a writer's locks belong: the store's doing, whatever the command.
#[test]
fn what_lies_in_the_place_of_a_lock_is_the_stores_fault() {
    let b = bench();
    let refused = |said: &str| {
        for line in ["mount v m", "check v", "check --repair v", "anchor accept v", "anchor rebuild v"] {
            b.run(line).code(5).says(said);
        }
        b.run_with("cp v - vault:g", b"x").code(5).says(said);
        assert_eq!(b.run("cat v f").ok().text(), "content");
        assert!(!is_mounted(&b.path("m")));
    };
    fs::remove_file(b.path("v/lamassu.lock")).unwrap();
    assert!(Command::new("mkfifo").arg(b.path("v/lamassu.lock")).status().unwrap().success());
    refused("lamassu.lock");
    fs::remove_file(b.path("v/lamassu.lock")).unwrap();
    fs::create_dir(b.path("v/lamassu.lock")).unwrap();
    refused("lamassu.lock");
    fs::remove_dir(b.path("v/lamassu.lock")).unwrap();
    b.run("check v").ok();
    fs::remove_dir(b.path("v/lamassu.staging")).unwrap();
    symlink("/tmp", b.path("v/lamassu.staging")).unwrap();
    refused("lamassu.staging");
    fs::remove_file(b.path("v/lamassu.staging")).unwrap();
    b.run("mount v m").ok();
    b.unmount("m");
    b.run("check v").ok();
}

#[test]
fn a_store_that_was_put_back_is_not_cloned() {
    let b = bench();
    copy(&b, "v", "older");
    b.run_with("cp v - vault:g", b"more").ok();
    copy(&b, "v", "newest");
    copy(&b, "older", "v");
    for line in ["clone v w", "snapshot v s"] {
        b.run(line).code(30).says("stale record of sessions").says("lamassu.sessions");
    }
    assert!(!b.path("w").exists() && !b.path("s").exists());
    copy(&b, "newest", "v");
    b.run("clone v w").ok();
    // One file that was put back is not the newest in the copy either.
    let stored = |dir: &str| b.path(dir).join(b.stored("v", "f").strip_prefix(b.path("v")).unwrap());
    b.file("new", b"changed");
    let before = fs::read(stored("v")).unwrap();
    b.run("cp v new vault:f").ok();
    fs::write(stored("v"), before).unwrap();
    b.run("clone v x").ok();
    for vault in ["v", "x"] {
        let ran: Ran = b.run(&format!("check {vault}"));
        ran.code(30);
        b.run(&format!("cat {vault} f")).code(30);
    }
}

/// The anchor's disk was put back: nothing is read or written by it, until a person goes on with it.
#[test]
fn an_older_anchor_is_refused() {
    let b = bench();
    b.file("bytes", &noise(9000, 1));
    let older = fs::read(anchor(&b)).unwrap();
    b.run("cp v bytes vault:g").ok();
    let newest = fs::read(anchor(&b)).unwrap();
    fs::write(anchor(&b), older).unwrap();
    for line in
        ["ls v", "cat v f", "mount v m", "mount --read-only v m", "check v", "check --repair v", "anchor accept v /g"]
    {
        b.run(line).code(65).says("the anchor is older than the vault").says("anchor accept");
    }
    // What the newest would not know is not changed.
    let second = b.key("second");
    for line in ["clone v w", "snapshot v s", "key rotate --inner v", &format!("key add v --new-key {second}")] {
        b.run(line).code(65);
    }
    assert!(!b.path("w").exists() && !b.path("s").exists());
    // The newest is found: all is as it was.
    fs::write(anchor(&b), newest).unwrap();
    b.run("check v").ok();
    let older = fs::read(anchor(&b)).unwrap();
    b.run("cp v bytes vault:h").ok();
    fs::write(anchor(&b), older).unwrap();
    // It is not: what this one does not know is accepted by name.
    b.run("anchor accept v").ok();
    b.run("check v").code(30);
    b.run("cat v g").ok();
    b.run("anchor accept v /h").ok();
    b.run("check v").ok();
    assert_eq!(b.run("cat v h").ok().out, noise(9000, 1));
}

/// The anchor loses what it was told last, while a writer has the vault open.
#[test]
fn an_anchor_that_lost_its_log_is_refused() {
    use std::os::unix::fs::FileExt;
    let b = bench();
    b.run("mount v m").ok();
    let daemon = crate::mounts::daemon_of(&b);
    fs::write(b.path("m/new"), noise(9000, 2)).unwrap();
    fs::File::open(b.path("m/new")).unwrap().sync_all().unwrap();
    crate::mounts::kill(daemon, "-KILL");
    let _ = Command::new("umount").arg("-l").arg(b.path("m")).output();
    let file = fs::OpenOptions::new().write(true).open(anchor(&b)).unwrap();
    file.write_all_at(&vec![0; (1 << 20) - 4096], 4096).unwrap();
    for line in ["check v", "mount v m"] {
        b.run(line).code(65);
    }
    assert!(!b.path("v/lamassu.lost").exists(), "nothing is moved away by what an older anchor knows");
}

/// The state that a scrub keeps is removed in the end: it takes no other file's place.
#[test]
fn the_state_of_a_scrub_takes_the_place_of_no_other_file() {
    let b = bench();
    b.run("check v").ok();
    fs::write(b.path("notes"), b"notes").unwrap();
    std::os::unix::fs::symlink("notes", b.path("link")).unwrap();
    for file in ["notes", "link", "v/lamassu.vault", "v/new", "v"] {
        b.run(&format!("scrub --state {file} v")).code(28).says("not the state of a scrub of this vault");
    }
    assert_eq!(fs::read(b.path("notes")).unwrap(), b"notes");
    b.run("scrub --state state-of-scrub v").ok();
    assert!(!b.path("state-of-scrub").exists());
    b.run("check v").ok();
}

/// Who reads a vault without its anchor makes no other anchor in its place.
#[test]
fn an_anchor_is_not_rebuilt_by_who_reads_without_it() {
    let b = bench();
    let before = b.run("anchor status --json v").ok().text();
    for command in ["anchor rebuild v", "anchor status v", "anchor verify v", "scrub v"] {
        b.run(&format!("{command} --anchor none")).code(2).says("leave out --anchor none");
    }
    assert_eq!(b.run("anchor status --json v").ok().text(), before);
    b.run("check v").ok();
}

/// The vault's directory is another one under a mount: what the daemon has open it goes on with.
#[test]
fn a_vault_whose_directory_was_replaced_is_not_found_under_its_path() {
    let b = bench();
    b.run("mount v m").ok();
    let daemon = crate::mounts::daemon_of(&b);
    fs::rename(b.path("v"), b.path("away")).unwrap();
    b.run("ls v").code(6);
    b.dir("v");
    b.run("check v").code(6).says("not a vault");
    assert_eq!(fs::read(b.path("m/f")).unwrap(), b"content");
    fs::write(b.path("m/g"), b"more").unwrap();
    b.unmount("m");
    // The link is gone even while nobody has waited for the process.
    let program = format!("/proc/{daemon}/exe");
    crate::mounts::wait_for("the end of the daemon", || fs::read_link(&program).is_err());
    fs::remove_dir(b.path("v")).expect("nothing is made in a directory that is no vault");
    b.run("check away").ok();
    let history = b.run("history away").ok().text();
    assert!(history.lines().last().is_some_and(|line| line.contains("unloaded")), "{history}");
    fs::rename(b.path("away"), b.path("v")).unwrap();
    assert_eq!(b.run("cat v g").ok().text(), "more");
}

/// `check` knows what a mount refuses.
#[test]
fn an_older_record_of_sessions_is_found_by_a_check() {
    let b = bench();
    let record = b.path("v/lamassu.sessions/record");
    b.file("f", &noise(9000, 1));
    b.run("cp v f vault:one").ok();
    let old = fs::read_link(&record).unwrap();
    b.run("cp v f vault:two").ok();
    let newest = fs::read_link(&record).unwrap();
    let put = |text: &PathBuf| {
        fs::remove_file(&record).unwrap();
        symlink(text, &record).unwrap();
    };
    put(&old);
    let told = b.run("check --json v").code(30).json();
    let problems = told["problems"].as_array().unwrap();
    let is_it = |problem: &serde_json::Value| {
        problem["kind"] == "stale" && problem.to_string().contains("the record of sessions is not the newest")
    };
    assert!(problems.iter().any(is_it), "{told}");
    put(&newest);
    b.run("check v").ok();
}

/// After a kill the vault stays in use; what no writer is replacing is stale all the same.
#[test]
fn an_older_record_of_the_roots_permissions_is_found_by_a_scrub_after_a_kill() {
    let b = bench();
    b.run("mount v m").ok();
    let daemon = crate::mounts::daemon_of(&b);
    let set = |mode| {
        fs::set_permissions(b.path("m"), fs::Permissions::from_mode(mode)).unwrap();
        fs::File::open(b.path("m")).unwrap().sync_all().unwrap();
    };
    let record = b.path("v/lamassu.root");
    set(0o755);
    let older = fs::read_link(&record).unwrap();
    set(0o711);
    crate::mounts::kill(daemon, "-KILL");
    let _ = Command::new("umount").arg("-l").arg(b.path("m")).output();
    assert_eq!(findings(&b, 0), []);
    fs::remove_file(&record).unwrap();
    symlink(older, &record).unwrap();
    assert_eq!(findings(&b, 30), [("stale".into(), "lamassu.root".into())]);
}
