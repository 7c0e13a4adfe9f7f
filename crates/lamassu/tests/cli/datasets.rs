//! Datasets, as a user makes and uses them. What concerns their keys is in `dataset_keys`, what stays in memory in
//! `dataset_memory`.

use crate::support::{Bench, Ran, noise};
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

pub const ENOKEY: i32 = libc::ENOKEY;

#[track_caller]
pub fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// A vault mounted on `m`.
pub fn mounted(init: &str, mount: &str) -> Bench {
    let b = Bench::new();
    b.run(&format!("init {init} v")).ok();
    b.dir("m");
    b.run(&format!("mount {mount} v m")).ok();
    b
}

pub fn write(b: &Bench, path: &str, content: &[u8]) {
    fs::write(b.path(path), content).unwrap();
}

pub fn read(b: &Bench, path: &str) -> Vec<u8> {
    fs::read(b.path(path)).unwrap()
}

/// What `dataset list --json` says of one dataset.
pub fn listed(b: &Bench, place: &str, path: &str) -> serde_json::Value {
    let told = b.run(&format!("dataset list --json {place}")).ok().json();
    let all = told["datasets"].as_array().unwrap();
    all.iter().find(|d| d["path"] == path).unwrap_or_else(|| panic!("{path} is not in {told}")).clone()
}

/// Made is durable: what is synced in it is there after a kill, although nobody synced the directory it lies in.
#[test]
fn a_dataset_is_there_after_a_kill() {
    for path in ["m/a", "m/a/inner"] {
        let b = mounted("", "");
        b.run("dataset create m/a").ok();
        if path != "m/a" {
            fs::File::open(b.path("m")).unwrap().sync_all().unwrap();
            b.run(&format!("dataset create {path}")).ok();
        }
        write(&b, &format!("{path}/f"), b"precious");
        fs::File::open(b.path(&format!("{path}/f"))).unwrap().sync_all().unwrap();
        crate::mounts::kill(crate::mounts::daemon_of(&b), "-KILL");
        let _ = Command::new("umount").arg("-l").arg(b.path("m")).output();
        b.run("mount v m").ok();
        assert_eq!(read(&b, &format!("{path}/f")), b"precious");
        b.unmount("m");
        b.run("check v").ok();
    }
}

#[test]
fn a_dataset_inherits_its_key_and_is_entered_like_a_directory() {
    for names in ["encrypted", "plain"] {
        let b = mounted(&format!("--names {names}"), "");
        b.run("dataset create m/a").ok().says("made dataset");
        fs::create_dir(b.path("m/a/dir")).unwrap();
        b.run("dataset create m/a/dir/inner").ok();
        let (outer, inner) = (noise(300_000, 1), noise(5_000, 2));
        write(&b, "m/a/file", &outer);
        write(&b, "m/a/dir/inner/file", &inner);
        assert_eq!((read(&b, "m/a/file"), read(&b, "m/a/dir/inner/file")), (outer.clone(), inner.clone()));
        let numbers: Vec<u64> = ["m/a", "m/a/file", "m/a/dir/inner", "m/a/dir/inner/file"]
            .iter()
            .map(|path| fs::metadata(b.path(path)).unwrap().ino())
            .collect();
        assert_eq!(numbers.iter().map(|n| n >> 48).collect::<std::collections::HashSet<_>>().len(), 2, "two volumes");
        assert_eq!((numbers[0] & 0xffff_ffff_ffff, numbers[2] & 0xffff_ffff_ffff), (1, 1));
        let list = listed(&b, "m", "a/dir/inner");
        assert_eq!(
            (&list["state"], &list["keys"], &list["domain"]),
            (&"loaded".into(), &"inherited".into(), &"zone".into())
        );
        b.unmount("m");

        // Without a mount, the same tree; then mounted again, the same numbers.
        assert_eq!(b.run("cat v a/dir/inner/file").ok().out, inner);
        let tree = b.run("ls -R v").ok().text();
        assert!(tree.lines().any(|l| l == "a/dir/inner/file"), "{tree}");
        let checked = b.run("check --json v").ok().json();
        assert_eq!(
            (&checked["files"], &checked["status"], &checked["locked"]),
            (&2.into(), &"clean".into(), &serde_json::json!([]))
        );
        let stored = b.run("path v a/dir/inner").ok().text();
        assert!(b.path("v").join(stored.trim()).join("lamassu.vault").exists(), "{stored}");
        let stored = b.run("path v a/dir/inner/file").ok().text();
        assert_eq!(b.run(&format!("path --reverse v -- {}", stored.trim())).ok().text().trim(), "a/dir/inner/file");
        b.run("mount v m").ok();
        assert_eq!(listed(&b, "m", "a")["state"], "available", "not opened by being listed");
        assert_eq!(read(&b, "m/a/dir/inner/file"), inner);
        assert_eq!(fs::metadata(b.path("m/a/dir/inner/file")).unwrap().ino(), numbers[3]);
        b.unmount("m");
    }
}

#[test]
fn what_is_between_datasets_is_another_device() {
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    b.run("dataset create m/b").ok();
    write(&b, "m/a/f", b"content");
    assert_eq!(errno(fs::hard_link(b.path("m/a/f"), b.path("m/f"))), libc::EXDEV);
    assert_eq!(errno(fs::rename(b.path("m/a/f"), b.path("m/b/f"))), libc::EXDEV);
    // mv(1) and cp(1) copy then.
    assert!(Command::new("mv").arg(b.path("m/a/f")).arg(b.path("m/b/f")).status().unwrap().success());
    assert_eq!((read(&b, "m/b/f"), b.path("m/a/f").exists()), (b"content".to_vec(), false));
    assert!(Command::new("cp").arg(b.path("m/b/f")).arg(b.path("m/f")).status().unwrap().success());
    assert_eq!(read(&b, "m/f"), b"content");

    // The root of a dataset: not removed, not replaced, but moved within the vault it lies in.
    assert_eq!(errno(fs::remove_dir(b.path("m/a"))), libc::EBUSY);
    fs::create_dir(b.path("m/empty")).unwrap();
    assert_eq!(errno(fs::rename(b.path("m/empty"), b.path("m/a"))), libc::EBUSY);
    fs::rename(b.path("m/b"), b.path("m/empty/b")).unwrap();
    assert_eq!(read(&b, "m/empty/b/f"), b"content");
    assert_eq!(errno(fs::rename(b.path("m/empty/b"), b.path("m/a/b"))), libc::EXDEV);
    b.run("dataset create m/a").code(1).says("exists");
    b.run("dataset create m/f").code(1).says("exists");
    b.unmount("m");
    assert_eq!(b.run("cat v empty/b/f").ok().out, b"content");
    b.run("check v").ok();
}

#[test]
fn unloading_takes_the_keys_and_the_mount_stays() {
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    b.run("dataset create m/a/inner").ok();
    write(&b, "m/outside", b"outside");
    let content = noise(500_000, 3);
    for path in ["m/a/f", "m/a/inner/f"] {
        write(&b, path, &content);
    }
    // Files that are open: what was written arrives, and nothing is read or written afterwards.
    let mut open = fs::File::options().read(true).write(true).open(b.path("m/a/f")).unwrap();
    open.write_all(b"changed").unwrap();
    b.run("key unload m/a").ok().says("unloaded");
    assert_eq!(errno(open.seek(SeekFrom::Start(0)).and_then(|_| open.read(&mut [0; 10]))), ENOKEY);
    assert!(open.write_all(b"late").and_then(|()| open.sync_all()).is_err(), "cannot be kept");
    assert_eq!(errno(fs::read(b.path("m/a/f"))), ENOKEY);
    assert_eq!(errno(fs::metadata(b.path("m/a/inner"))), ENOKEY, "no name of it is left in memory");
    assert_eq!(read(&b, "m/outside"), b"outside");
    assert_eq!(listed(&b, "m", "a")["state"], "unloaded");
    b.run("key unload m/a").ok().says("was not loaded");
    b.run("key load m/a").ok();
    assert_eq!(read(&b, "m/a/inner/f"), content);
    let changed = read(&b, "m/a/f");
    assert_eq!((&changed[..7], &changed[7..]), (&b"changed"[..], &content[7..]));
    drop(open);

    // The whole mount, with what lies in it; another process works on the store meanwhile.
    assert_eq!(errno(fs::metadata(b.path("m/absent"))), libc::ENOENT);
    b.run("key unload m").ok();
    assert_eq!(errno(fs::metadata(b.path("m/outside"))), ENOKEY);
    assert_eq!(errno(fs::read(b.path("m/a/f"))), ENOKEY);
    b.file("local", b"new");
    b.run("cp v local vault:absent").ok();
    b.run("key load m").ok();
    assert_eq!(read(&b, "m/absent"), b"new", "the kernel does not go on believing that it is not there");
    assert_eq!(read(&b, "m/a/inner/f"), content);
    let told = b.run("history --json v").ok().json();
    let events: Vec<&str> = told["entries"].as_array().unwrap().iter().filter_map(|e| e["event"].as_str()).collect();
    let count = |kind: &str| events.iter().filter(|e| **e == kind).count();
    assert_eq!((count("loaded"), count("unloaded")), (2, 1), "{events:?}");
    b.unmount("m");
    b.run("check v").ok();
}

/// The kernel keeps an inode for as long as a file of it is open: it must not take what it meets after `key load` for
/// that one.
#[test]
fn files_from_before_an_unload_are_not_those_of_after() {
    use std::os::unix::fs::FileExt;
    for cache in ["writeback", "through"] {
        let b = mounted("", &format!("--cache {cache}"));
        b.run("dataset create m/a").ok();
        let opened = |path: &str| {
            let mut options = fs::File::options();
            options.read(true).write(true).create(true).truncate(false).open(b.path(path)).unwrap()
        };
        write(&b, "m/a/f", b"content");
        write(&b, "m/a/removed", b"removed");
        let (before, removed) = (opened("m/a/f"), opened("m/a/removed"));
        fs::remove_file(b.path("m/a/removed")).unwrap();
        b.run("key unload m/a").ok();
        b.run("key load m/a").ok();
        // The store gives the number of what was removed to what is made next, if it is one that does.
        let after = opened("m/a/f");
        let made: Vec<fs::File> = (0..8).map(|n| opened(&format!("m/a/made-{n}"))).collect();
        made.iter().for_each(|file| file.write_all_at(b"content", 0).unwrap());
        for old in [before, removed] {
            // Through the page cache a write is refused at once or when it is handed over.
            let late = old.write_all_at(b"late", 0).and_then(|()| old.sync_all());
            assert!(late.is_err(), "{cache}: cannot be kept");
            assert!(old.read_at(&mut [0; 7], 0).is_err(), "{cache}: another file's content");
        }
        for file in made.iter().chain([&after]) {
            let mut bytes = [0; 7];
            file.read_exact_at(&mut bytes, 0).unwrap();
            file.sync_all().unwrap();
            assert_eq!(&bytes, b"content", "{cache}");
        }
        drop((made, after));
        b.unmount("m");
        for path in ["a/f", "a/made-0", "a/made-1", "a/made-7"] {
            assert_eq!(b.run(&format!("cat v {path}")).ok().out, b"content", "{cache}: {path}");
        }
        b.run("check v").ok();
    }
}

#[test]
fn copies_of_a_vault_have_its_datasets() {
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    write(&b, "m/a/f", b"content");
    b.unmount("m");
    b.run("clone --new-key v w").ok();
    b.run("snapshot v s").ok();
    for copy in ["w", "s"] {
        assert_eq!(b.run(&format!("cat {copy} a/f")).ok().out, b"content", "{copy}");
        b.run(&format!("check {copy}")).ok();
    }
    b.run("mount w m").ok();
    write(&b, "m/a/f", b"changed");
    b.unmount("m");
    assert_eq!(b.run("cat v a/f").ok().out, b"content");
    // Nothing of a snapshot is written, at any depth.
    b.run("mount s m").ok();
    assert_eq!(errno(fs::write(b.path("m/a/f"), b"x")), libc::EROFS);
    assert_eq!(read(&b, "m/a/f"), b"content");
    b.run("dataset create m/a/b").code(28);
    b.unmount("m");
}

#[test]
fn a_dataset_is_destroyed_whole() {
    let b = mounted("", "");
    for path in ["a", "a/inner", "kept"] {
        b.run(&format!("dataset create m/{path}")).ok();
        write(&b, &format!("m/{path}/f"), b"content");
    }
    let open = fs::File::open(b.path("m/a/inner/f")).unwrap();
    b.run("dataset destroy m/a").code(28).says("open");
    b.run("dataset destroy m").code(2);
    b.run("dataset destroy m/kept/f").code(2).says("not the root of a dataset");
    drop(open);
    b.run("dataset destroy m/a").ok();
    assert!(!b.path("m/a").exists());
    fs::create_dir(b.path("m/a")).unwrap();
    assert_eq!(fs::read_dir(b.path("m/a")).unwrap().count(), 0);
    let open = fs::File::open(b.path("m/kept/f")).unwrap();
    b.run("dataset destroy --force m/kept").ok();
    drop(open);
    assert_eq!(fs::read_dir(b.path("v/lamassu.staging")).unwrap().count(), 0);
    b.unmount("m");
    // Without a mount, and without its key.
    let own = b.key("own");
    b.run(&format!("dataset create -n {own} v locked")).ok();
    b.run("dataset create v a/deep").ok();
    assert_eq!(listed(&b, "v", "locked")["state"], "locked");
    assert_eq!(listed(&b, "v", "a/deep")["state"], "available");
    b.run("dataset destroy v locked").ok();
    b.run("dataset set v a/deep integrity=metadata cache=none").ok();
    let set = listed(&b, "v", "a/deep");
    assert_eq!((&set["integrity"], &set["cache"]), (&"metadata".into(), &"none".into()));
    b.run("dataset create v missing/deep").code(3);
    let told = b.run("history --json v").ok().json().to_string();
    assert!(told.contains("dataset-created") && told.contains("dataset-destroyed"), "{told}");
    b.run("check v").ok();
}

#[test]
fn properties_are_the_parents_unless_they_are_set() {
    let b = mounted("--suite aes --block-size 8K", "--integrity metadata");
    b.run("dataset create m/a").ok();
    b.run("dataset create --suite chacha --domain zone m/b").code(28).says("suite");
    b.run("dataset create --suite chacha --domain family --integrity metadata m/b").code(28).says("malleable");
    b.run("dataset create --suite chacha --domain family --block-size 64K --names plain --cache none m/b").ok();
    let (a, other) = (listed(&b, "m", "a"), listed(&b, "m", "b"));
    assert_eq!(
        (&a["suite"], &a["block_size"], &a["integrity"]),
        (&"aes".into(), &8192.into(), &serde_json::Value::Null)
    );
    assert_eq!(
        (&other["suite"], &other["block_size"], &other["names"]),
        (&"chacha".into(), &65536.into(), &"plain".into())
    );
    b.run("dataset set m/b integrity=metadata").code(28).says("malleable");
    b.run("dataset set m/a integrity=full").ok();
    let info = |dir: &str| {
        let told = b.run(&format!("info --json {dir}")).ok().json();
        ["datasets", "integrity", "cache"].map(|member| told[member].to_string())
    };
    assert_eq!(info("m"), ["true", "null", "null"]);
    assert_eq!(info("m/a"), ["false", "\"full\"", "null"]);
    assert_eq!(info("m/b"), ["false", "null", "\"none\""]);
    let shown = b.run("info m/b").ok().text();
    assert!(
        shown.lines().any(|l| l == "cache         none") && shown.lines().any(|l| l == "integrity     inherit"),
        "{shown}"
    );
    // Each block by itself: what is equal here is not equal in the store.
    b.run("dataset create --suite paper --domain none m/c").code(2);
    b.run("dataset create --domain none m/c").ok();
    write(&b, "m/c/f", &[7; 100_000]);
    assert_eq!((listed(&b, "m", "c")["domain"].clone(), read(&b, "m/c/f")), ("none".into(), vec![7; 100_000]));
    // No plaintext stays in memory: a file of it is read and written directly.
    let content = noise(1_000_000, 5);
    write(&b, "m/b/f", &content);
    assert_eq!(read(&b, "m/b/f"), content);
    b.run("dataset set m/b cache=mount").ok();
    assert_eq!(read(&b, "m/b/f"), content);
    b.unmount("m");
    assert_eq!(b.run("cat v b/f").ok().out, content);
    let leak = b.run(&format!("leak --json v/{}", b.run("path v c").ok().text().trim())).ok().json();
    assert_eq!(leak["equal_blocks"]["repeated"], 0, "{leak}");
}

#[test]
fn a_dataset_that_is_open_by_itself_is_noticed() {
    let b = mounted("", "");
    let own = b.key("own");
    b.run("dataset create m/a").ok();
    b.run(&format!("dataset create -n {own} m/a/private")).ok();
    write(&b, "m/a/f", b"content");
    b.unmount("m");
    let dirs = [b.stored("v", "a"), b.stored("v", "a/private")];
    for (dir, key) in dirs.iter().zip(["raw:file:key", &own]) {
        b.run(&format!("mount -k {key} {} m", dir.display())).ok();
        for refused in ["check v", "check --repair v", "snapshot v s", "clone v w"] {
            b.run(refused).code(11).says("mounted on");
        }
        b.dir("n");
        b.run("mount v n").ok();
        b.run("snapshot v s").code(11).says("mounted on");
        b.unmount("n");
        b.unmount("m");
    }
    assert!(!b.path("s").exists() && !b.path("w").exists());
    b.run("check --skip-locked v").ok();
    b.run("snapshot v s").ok();
    b.run("check --skip-locked s").ok();
}

/// The program with few descriptors.
fn limited(b: &Bench, line: &str) -> Ran {
    let line = format!("ulimit -n 128; exec {} {line}", env!("CARGO_BIN_EXE_lamassu"));
    let mut command = Command::new("sh");
    command.args(["-c", &line]).current_dir(b.path(""));
    command.env("LAMASSU_KEY", format!("raw:file:{}", b.path("key").display()));
    command.env("XDG_STATE_HOME", b.path("state")).output().unwrap().into()
}

#[test]
fn many_directories_take_few_descriptors() {
    let b = mounted("", "");
    let own = b.key("own");
    b.run(&format!("dataset create -n {own} m/private")).ok();
    for dir in ["m/many", "m/private/many"] {
        for i in 0..200 {
            fs::create_dir_all(b.path(&format!("{dir}/{i}"))).unwrap();
        }
    }
    for i in [0, 100, 199] {
        b.run(&format!("dataset create m/many/{i}/inner")).ok();
    }
    b.unmount("m");
    let checked = limited(&b, "check --json v").code(51).json();
    assert_eq!((&checked["status"], &checked["locked"]), (&"locked".into(), &serde_json::json!(["private"])));
    let told = limited(&b, "dataset list --json v").ok().json();
    assert_eq!((told["datasets"].as_array().unwrap().len(), &told["unseen"]), (4, &serde_json::json!([])));
}

#[test]
fn a_list_says_where_it_could_not_look() {
    let b = mounted("", "");
    fs::create_dir(b.path("m/broken")).unwrap();
    for path in ["m/broken/lost", "m/a"] {
        b.run(&format!("dataset create {path}")).ok();
    }
    b.unmount("m");
    let record = b.stored("v", "broken").join("lamassu.dir");
    for damage in ["it is gone", "it is something else"] {
        match damage {
            "it is gone" => fs::remove_file(&record).unwrap(),
            _ => std::os::unix::fs::symlink("AAAA", &record).unwrap(),
        }
        let told = b.run("dataset list --json v").code(1).says("not looked into: broken");
        let told = told.json();
        assert_eq!(told["datasets"].as_array().unwrap().len(), 1, "{damage}: {told}");
        assert_eq!(told["unseen"][0]["path"], "broken", "{damage}: {told}");
        b.run("mount v m").ok();
        b.run("dataset list m").code(1).says("not looked into: broken");
        b.unmount("m");
    }
}

#[test]
fn a_frozen_mount_opens_and_makes_no_datasets() {
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    write(&b, "m/a/f", b"content");
    b.unmount("m");
    b.run("mount v m").ok();
    b.run("freeze m").ok();
    assert_eq!(errno(fs::read(b.path("m/a/f"))), libc::EBUSY, "opening it would write");
    for refused in ["key unload m", "key load m/a", "dataset set m/a cache=none"] {
        b.run(refused).code(28).says("thaw");
    }
    b.run("thaw m").ok();
    assert_eq!(read(&b, "m/a/f"), b"content");
    b.run("freeze m").ok();
    assert_eq!(read(&b, "m/a/f"), b"content", "reads go on");
    b.run("thaw m").ok();
    b.run("key unload m/a").ok();
    b.run("freeze m").ok();
    b.run("key load m/a").code(28).says("thaw");
    b.run("thaw m").ok();
    b.run("key load m/a").ok();
    b.unmount("m");
}

/// The directory in the store of the one dataset there is.
pub fn dataset_dir(b: &Bench) -> std::path::PathBuf {
    let dirs = fs::read_dir(b.path("v")).unwrap().map(|e| e.unwrap().path());
    dirs.into_iter().find(|d| d.join("lamassu.vault").exists()).unwrap()
}

/// A daemon that dies leaves datasets whole, and half-made ones are cleared away.
#[test]
fn what_a_crash_leaves_is_cleared() {
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    write(&b, "m/a/f", b"content");
    b.unmount("m");
    let stored = b.path("v").join(b.run("path v a").ok().text().trim());
    let half = b.path("v/lamassu.staging/dataset-00112233445566778899aabbccddeeff");
    assert!(Command::new("cp").arg("-a").arg(&stored).arg(&half).status().unwrap().success());
    b.run("mount v m").ok();
    assert_eq!(read(&b, "m/a/f"), b"content");
    assert!(!Path::new(&half).exists());
    b.unmount("m");
    // A header that does not parse is damage, and the rest of the tree is none the worse.
    fs::write(stored.join("lamassu.vault"), b"{}").unwrap();
    let checked = b.run("check --json v").code(26).json();
    assert_eq!(checked["problems"][0]["kind"], "dataset", "{checked}");
}

/// Whoever can write to the store puts the header of a vault of their own into a plain directory: all in it is out of
/// reach of a check then, and an anchor knows better.
#[test]
fn a_directory_that_is_made_to_look_like_a_dataset_is_not_passed_over() {
    for is_anchored in [true, false] {
        is_not_passed_over(is_anchored);
    }
}

fn is_not_passed_over(is_anchored: bool) {
    let b = mounted(if is_anchored { "" } else { "--anchor none" }, "");
    b.run("dataset create m/a").ok();
    fs::create_dir(b.path("m/d")).unwrap();
    write(&b, "m/d/f", &[7; 10_000]);
    b.unmount("m");
    b.run("check v").ok();
    let stored = b.stored("v", "d");
    let own = b.key("own");
    b.run(&format!("init -k {own} other")).ok();
    fs::copy(b.path("other/lamassu.vault"), stored.join("lamassu.vault")).unwrap();
    if is_anchored {
        let checked = b.run("check --json v").code(30).json();
        assert_eq!((&checked["problems"][0]["kind"], &checked["problems"][0]["path"]), (&"stale".into(), &"d".into()));
        b.run("check --repair v").code(30);
    } else {
        b.run("check v").code(51).says("were not verified").says("--skip-locked");
        b.run("check --repair v").code(51);
        assert_eq!(b.run("check --json v").code(51).json()["locked"], serde_json::json!(["d"]));
        b.run("check --skip-locked v").ok();
    }
    fs::remove_file(stored.join("lamassu.vault")).unwrap();
    b.run("check v").ok();
}

#[test]
fn freezing_and_unloading_do_not_wait_for_each_other() {
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Someone who writes, as far as the key is there.
        scope.spawn(|| {
            let mut n = 0u32;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                n += 1;
                let _ = fs::write(b.path(&format!("m/a/{}", n % 7)), vec![n as u8; 100_000]);
                let _ = fs::write(b.path(&format!("m/{}", n % 7)), vec![n as u8; 100_000]);
            }
        });
        let unloading = scope.spawn(|| {
            for _ in 0..15 {
                // Refused while frozen.
                b.run("key unload m/a");
                b.run("key load m/a");
            }
        });
        for _ in 0..15 {
            // Refused while something is unloaded.
            b.run("freeze m");
            b.run("thaw m");
        }
        unloading.join().unwrap();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    b.run("key load m/a");
    fs::write(b.path("m/a/last"), b"written").unwrap();
    assert_eq!(fs::read(b.path("m/a/last")).unwrap(), b"written");
    b.unmount("m");
    b.run("check v").ok();
}
