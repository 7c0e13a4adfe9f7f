//! Rotation, re-keying, retirement, and slots of a mounted vault, as a user does them.

use crate::clones::Image;
use crate::mounts::{daemon_of, kill, wait_for};
use crate::support::{Bench, noise};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Contents of all files below a directory, by path, and targets of links.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let (mut found, mut todo) = (BTreeMap::new(), vec![dir.to_path_buf()]);
    while let Some(at) = todo.pop() {
        for entry in fs::read_dir(&at).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let content = match (meta.is_dir(), meta.is_symlink()) {
                (true, _) => {
                    todo.push(path.clone());
                    continue;
                }
                (_, true) => fs::read_link(&path).unwrap().to_str().unwrap().into(),
                _ => fs::read(&path).unwrap(),
            };
            found.insert(path.strip_prefix(dir).unwrap().display().to_string(), content);
        }
    }
    found
}

fn furnish(m: &Path) {
    fs::create_dir_all(m.join("dir/below")).unwrap();
    for (name, len) in [("big", 3_000_000), ("dir/middle", 70_000), ("dir/below/small", 100)] {
        fs::write(m.join(name), noise(len, len as u64)).unwrap();
    }
    std::os::unix::fs::symlink("dir/middle", m.join("link")).unwrap();
    rustix::fs::setxattr(m.join("big"), "user.note", b"kept", rustix::fs::XattrFlags::empty()).unwrap();
}

fn epochs(b: &Bench, dir: &str, key: &str) -> Vec<u64> {
    let told = b.run(&format!("key epochs --json {dir}")).ok().json();
    told[key].as_array().unwrap().iter().map(|e| e["epoch"].as_u64().unwrap()).collect()
}

#[test]
fn rotate_rekey_retire() {
    for names in ["encrypted", "plain"] {
        let b = Bench::new();
        b.run(&format!("init --names {names} v")).ok();
        b.dir("m");
        b.run("mount v m").ok();
        furnish(&b.path("m"));
        let before = contents(&b.path("m"));
        b.unmount("m");

        b.run("key rotate v").code(2);
        b.run("key rotate --outer v").ok().says("epoch 2 of the outer key");
        // Nothing may go that is needed.
        let needed = b.run("key retire --outer 1 v").code(28).says("without it").says("`lamassu rekey --outer`");
        assert!(!needed.text().contains("damaged:"), "{}", needed.text());
        b.run("key retire --outer 2 v").code(28).says("newest");
        b.run("key retire --outer 7 v").code(2).says("no epoch 7");
        b.run("rekey --outer v").ok().says("sealed again");
        b.run("rekey --outer v").ok().says("already");
        b.run("key retire --outer 1 v").ok().says("nothing in the vault needs it");
        assert_eq!((epochs(&b, "v", "outer"), epochs(&b, "v", "inner")), (vec![2], vec![1]));
        b.run("check v").ok();

        b.run("key rotate --inner v").ok().says("does not deduplicate with it");
        b.run("rekey --outer v").ok();
        let needed = b.run("key retire --inner 1 v").code(28).says(" blocks").says("`lamassu rekey --full`");
        assert!(needed.out.is_empty(), "{}", needed.text());
        let done = b.run("rekey --full --json v").ok().json();
        assert!(done["blocks"].as_u64().unwrap() > 700 && done["complete"] == true, "{done}");
        b.run("key retire --inner 1 v").ok();
        assert_eq!(epochs(&b, "v", "inner"), [2]);
        b.run("check v").ok();
        b.run("mount v m").ok();
        assert!(contents(&b.path("m")) == before);
        assert_eq!(epochs(&b, "m", "outer"), [2]);
        b.unmount("m");
        let events = b.run("history --json v").ok().text();
        for event in ["rotated", "rekey-begun", "rekey-ended", "retired"] {
            assert!(events.contains(event), "{event} is not in {events}");
        }
    }
}

#[test]
fn a_mounted_vault_is_rekeyed_while_it_is_used() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    furnish(&b.path("m"));
    let before = contents(&b.path("m"));
    let stop = AtomicBool::new(false);
    let m = b.path("m");
    std::thread::scope(|s| {
        let busy = s.spawn(|| {
            let mut round = 0u32;
            while !stop.load(Ordering::Relaxed) {
                let path = m.join(format!("busy{}", round % 5));
                let data = noise(200_000, round.into());
                fs::write(&path, &data).unwrap();
                assert!(fs::read(&path).unwrap() == data);
                fs::rename(&path, m.join("dir").join(format!("moved{}", round % 3))).unwrap();
                round += 1;
            }
        });
        b.run("key rotate --outer m").ok();
        b.run("key rotate --inner v").ok().says("epoch 2 of the inner key");
        let ran = b.run("rekey --full m");
        stop.store(true, Ordering::Relaxed);
        busy.join().unwrap();
        // Renamed all the while, it may have to be run again.
        assert!(ran.code == 0 || ran.err.contains("run it again"), "{ran:?}");
    });
    b.run("rekey --full m").ok();
    b.run("key retire --inner 1 m").code(11).says("unmount");
    b.run("key retire --inner 1 v").code(11).says("mounted on");
    for (path, content) in &before {
        assert!(contents(&b.path("m"))[path] == *content, "{path}");
    }
    b.unmount("m");
    b.run("key retire --inner 1 v").ok();
    b.run("key retire --outer 1 v").ok();
    b.run("check v").ok();
}

/// It stays under the old keys: shown again when they are retired, it would be lost.
#[test]
fn what_the_store_withholds_is_named_and_is_no_success() {
    for is_mounted in [false, true] {
        let b = Bench::new();
        b.run("init v").ok();
        b.dir("m");
        b.run("mount v m").ok();
        furnish(&b.path("m"));
        let before = contents(&b.path("m"));
        b.unmount("m");
        let stored = b.stored("v", "dir/middle");
        fs::rename(&stored, b.path("away")).unwrap();
        assert!(b.run("check v").code(30).text().contains("missing"));
        b.run("key rotate --outer v").ok();
        if is_mounted {
            b.run("mount v m").ok();
        }
        let dir = if is_mounted { "m" } else { "v" };
        let above = stored.parent().unwrap().file_name().unwrap().to_str().unwrap();
        b.run(&format!("rekey --outer {dir}")).code(26).says("not re-keyed").says(above).says("of the anchor");
        // All else is done.
        let again = b.run(&format!("rekey --outer --json {dir}")).code(26).json();
        assert_eq!((&again["failed"], &again["pages"], &again["complete"]), (&1.into(), &0.into(), &true.into()));
        if is_mounted {
            b.unmount("m");
        }
        fs::rename(b.path("away"), &stored).unwrap();
        b.run("rekey --outer v").ok().says("sealed again: ");
        b.run("key retire --outer 1 v").ok();
        b.run("check v").ok();
        b.run("mount v m").ok();
        assert!(contents(&b.path("m")) == before);
        b.unmount("m");
    }
}

#[test]
fn killed_again_and_again_it_goes_on_with_what_is_left() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    furnish(&b.path("m"));
    // What was made and never synced may go with the daemon.
    b.run("freeze m").ok();
    b.run("thaw m").ok();
    let before = contents(&b.path("m"));
    b.run("key rotate --outer m").ok();
    b.run("key rotate --inner m").ok();
    for round in 0..4u64 {
        let mut child = b.command(["rekey", "--full", "--limit", "2M", "m"]).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(300 + 150 * round));
        kill(daemon_of(&b), "-KILL");
        let _ = child.wait();
        let _ = std::process::Command::new("umount").arg("-l").arg(b.path("m")).status();
        wait_for("the lock is free", || b.run("check v").code != 11);
        // Blocks that have their former keys still hold what was written last.
        b.run("check v").ok();
        b.run("mount v m").ok();
        assert!(contents(&b.path("m")) == before, "round {round}");
    }
    b.unmount("m");
    b.run("rekey --full v").ok();
    b.run("check v").ok();
    b.run("key retire --inner 1 v").ok();
    b.run("key retire --outer 1 v").ok();
    b.run("mount v m").ok();
    assert!(contents(&b.path("m")) == before);
    b.unmount("m");
}

#[test]
fn interrupting_the_command_ends_the_work_of_the_daemon() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    furnish(&b.path("m"));
    b.run("key rotate --inner m").ok();
    let child = b.command(["rekey", "--full", "--limit", "100K", "m"]).spawn().unwrap();
    wait_for("it has begun", || b.run("history v").text().contains("rekey-begun"));
    kill(child.id() as i32, "-INT");
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(15));
    // Not under way any more: another one begins at once, without the limit.
    b.run("rekey --outer m").ok();
    b.run("rekey --full m").ok();
    b.unmount("m");
}

#[test]
fn slots_of_a_mounted_vault_change_without_the_old_key() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    let second = b.key("second");
    b.secret("pass", b"correct horse battery staple");
    fs::remove_file(b.path("key")).unwrap();
    let no_key = |line: &str| b.run(line);
    no_key(&format!("key add --new-key {second} --label second m")).ok().says("added slot 2");
    let pass = format!("passphrase:file:{}", b.path("pass").display());
    no_key(&format!("key add --new-key {pass} --argon2-ms 1 m")).ok().says("added slot 3");
    no_key(&format!("key change --new-key {pass} m")).code(2).says("--slot");
    no_key(&format!("key change --slot 1 --new-key {second} --argon2-ms 1 m")).ok().says("slot 4 takes the place");
    no_key("key remove m 2").ok();
    no_key("key remove m 9").code(2).says("no slot 9");
    let listed = b.run("key list --json m").ok().json();
    let ids: Vec<u64> = listed["slots"].as_array().unwrap().iter().map(|s| s["id"].as_u64().unwrap()).collect();
    assert_eq!(ids, [3, 4]);
    let words = no_key("key add --recovery m").ok();
    b.secret("words", &words.out);
    b.unmount("m");
    for source in [second.as_str(), &pass, &format!("recovery:file:{}", b.path("words").display())] {
        b.run(&format!("ls --key {source} v")).ok();
    }
    let events = b.run(&format!("history --json --key {second} v")).ok().json();
    let count = |event: &str| events["entries"].as_array().unwrap().iter().filter(|e| e["event"] == event).count();
    assert_eq!((count("slot-added"), count("slot-changed"), count("slot-removed")), (3, 1, 1), "{events}");

    b.run(&format!("mount --read-only --key {second} v m")).ok();
    no_key(&format!("key add --new-key {second} m")).code(28).says("read-only");
    no_key("rekey --outer m").code(28).says("read-only");
    b.unmount("m");
}

#[test]
fn the_keys_of_a_zone_are_rotated_for_all_its_vaults() {
    let b = Bench::new();
    let zone = b.key("zone");
    let with = format!("--zone office --zone-key {zone}");
    b.run(&format!("zone create --key {zone} office")).ok();
    b.run(&format!("init {with} one")).ok();
    b.run(&format!("init {with} two")).ok();
    b.run("key rotate --inner one").code(28).says("zone rotate");
    b.run(&format!("key rotate --inner {with} one")).code(28).says("no newer key");
    b.run(&format!("zone rotate --inner --key {zone} office")).ok();
    for vault in ["one", "two"] {
        b.run(&format!("key rotate --inner {with} {vault}")).ok().says("epoch 2");
        assert_eq!(epochs(&b, vault, "inner"), [1, 2]);
        b.run_with(&format!("cp {vault} - vault:f"), &[5; 40_000]).ok();
    }
    let stored = |vault: &str| fs::read(b.stored(vault, "f")).unwrap();
    assert!(stored("one")[4096..8192] == stored("two")[4096..8192], "they deduplicate again");
    // On a mount point too; and a vault may leave.
    b.run(&format!("zone rotate --inner --key {zone} office")).ok();
    b.dir("m");
    b.run("mount one m").ok();
    b.run(&format!("key rotate --inner {with} m")).ok().says("epoch 3");
    b.unmount("m");
    b.run("key rotate --inner --leave-zone two").ok().says("epoch 3");
    let info = b.run("info --json two").ok().json();
    assert_eq!(info["zone"], info["id"]);
    b.run(&format!("key rotate --inner {with} two")).code(28).says("another zone");
    b.run("rekey --full one").ok();
    b.run("key retire --inner 1 one").ok();
    b.run("check one").ok();
}

/// What is frozen is copied: nothing is written there, not even that somebody asked.
#[test]
fn a_frozen_vault_is_not_begun_to_be_rekeyed() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount v m").ok();
    b.run("key rotate --outer m").ok();
    b.run("freeze m").ok();
    let before = std::fs::read(b.path("v/lamassu.history")).unwrap();
    b.run("rekey --outer m").code(28).says("frozen");
    assert_eq!(std::fs::read(b.path("v/lamassu.history")).unwrap(), before);
    b.run("thaw m").ok();
    b.run("rekey --outer m").ok();
    b.unmount("m");
}

/// What the store put back is not the newest, and so is nothing to seal again: it is named, and no key goes that the
/// newest needs, wherever that is kept.
#[test]
fn a_file_that_was_put_back_is_not_rekeyed_and_no_key_that_it_needs_is_retired() {
    let b = Bench::new();
    b.run("init v").ok();
    b.run_with("cp v - vault:good", &noise(30_000, 1)).ok();
    b.run_with("cp v - vault:stale", &noise(30_000, 2)).ok();
    let stored = b.stored("v", "stale");
    let old = fs::read(&stored).unwrap();
    b.run_with("cp v - vault:stale", &noise(30_000, 3)).ok();
    let stored = b.stored("v", "stale");
    let newest = fs::read(&stored).unwrap();
    fs::write(&stored, &old).unwrap();
    b.run("key rotate --outer v").ok();
    b.run("key rotate --inner v").ok();
    let name = stored.file_name().unwrap().to_str().unwrap();
    for line in ["rekey --outer v", "rekey --full v"] {
        b.run(line).code(26).says("stale in segment 0").says(name).says("could not be rewritten: 1");
    }
    for line in ["key retire --outer 1 v", "key retire --inner 1 v"] {
        b.run(line).code(28).says("stays").says("1 pages").says("`lamassu check` names it");
    }
    assert_eq!((epochs(&b, "v", "outer"), epochs(&b, "v", "inner")), (vec![1, 2], vec![1, 2]));
    // Nor is it where the store shows nothing at all.
    fs::rename(&stored, b.path("hidden")).unwrap();
    for line in ["key retire --outer 1 v", "key retire --inner 1 v"] {
        b.run(line).code(28).says("stays");
    }
    fs::rename(b.path("hidden"), &stored).unwrap();
    // Nothing was changed there: the newest, which needs the keys from before, opens when it is back.
    assert!(fs::read(&stored).unwrap() == old);
    assert!(b.run("cat v good").ok().out == noise(30_000, 1));
    fs::write(&stored, newest).unwrap();
    b.run("check v").ok();
    assert!(b.run("cat v stale").ok().out == noise(30_000, 3));
    for line in ["rekey --full v", "rekey --outer v", "key retire --outer 1 v", "key retire --inner 1 v"] {
        b.run(line).ok();
    }
    assert!(b.run("cat v stale").ok().out == noise(30_000, 3));
    b.run("scrub v").ok();
}

/// btrfs copies on write: a block of several pages that finds no space in its middle would be neither old nor new.
#[test]
fn a_full_btrfs_loses_no_block() {
    let b = Bench::new();
    let Some(_btrfs) = Image::made(&b, "btrfs", &["-q"]) else { return };
    b.run("init -b 64K btrfs/v").ok();
    let contents: Vec<_> = (0..4).map(|seed| noise(4 << 20, seed)).collect();
    for (i, content) in contents.iter().enumerate() {
        b.file(&format!("f{i}"), content);
        b.run(&format!("cp btrfs/v f{i} vault:f{i}")).ok();
    }
    b.run("key rotate --inner btrfs/v").ok();
    let fill = |name: &str, piece: usize| {
        let mut file = fs::File::create(b.path(name)).unwrap();
        while file.write_all(&vec![0; piece]).is_ok() {}
        rustix::fs::syncfs(&file).unwrap();
        file
    };
    let (large, small) = (fill("btrfs/large", 1 << 20), fill("btrfs/small", 4096));
    large.set_len(large.metadata().unwrap().len().saturating_sub(1 << 20)).unwrap();
    rustix::fs::syncfs(&large).unwrap();
    b.run("rekey --full btrfs/v").code(5).says("No space left");
    fs::remove_file(b.path("btrfs/large")).unwrap();
    fs::remove_file(b.path("btrfs/small")).unwrap();
    rustix::fs::syncfs(&large).unwrap();
    drop((large, small));
    b.run("check btrfs/v").ok();
    for (i, content) in contents.iter().enumerate() {
        assert!(b.run(&format!("cat btrfs/v f{i}")).ok().out == *content, "f{i}");
    }
}
