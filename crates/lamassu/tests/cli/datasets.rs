//! Datasets, as a user makes and uses them.

use crate::support::{Bench, Ran, noise};
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

const ENOKEY: i32 = libc::ENOKEY;

#[track_caller]
fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// A vault mounted on `m`.
fn mounted(init: &str, mount: &str) -> Bench {
    let b = Bench::new();
    b.run(&format!("init {init} v")).ok();
    b.dir("m");
    b.run(&format!("mount {mount} v m")).ok();
    b
}

fn write(b: &Bench, path: &str, content: &[u8]) {
    fs::write(b.path(path), content).unwrap();
}

fn read(b: &Bench, path: &str) -> Vec<u8> {
    fs::read(b.path(path)).unwrap()
}

/// What `dataset list --json` says of one dataset.
fn listed(b: &Bench, place: &str, path: &str) -> serde_json::Value {
    let told = b.run(&format!("dataset list --json {place}")).ok().json();
    let all = told["datasets"].as_array().unwrap();
    all.iter().find(|d| d["path"] == path).unwrap_or_else(|| panic!("{path} is not in {told}")).clone()
}

/// A copy of the header from before the first dataset would have them taken for damaged directories of the vault's own.
#[test]
fn an_older_header_that_is_restored_knows_of_datasets() {
    for is_damaged in [false, true] {
        let b = Bench::new();
        b.run("init v").ok();
        let job = b.key("job");
        b.run(&format!("key add --use-only -n {job} v")).ok();
        b.run("key backup v copy").ok();
        b.run("dataset create v p").ok();
        b.file("x", b"content");
        b.run("cp v x vault:/p/").ok();
        if is_damaged {
            b.file("v/lamassu.vault", b"");
            b.run(&format!("key restore -k {job} copy v")).code(28).says("from before the first dataset");
        }
        b.run("key restore copy v").ok().says("from before the first dataset");
        assert_eq!(b.run("cat v p/x").ok().out, b"content");
        assert_eq!(b.run("check --json v").ok().json()["status"], "clean");
        if is_damaged {
            b.file("v/lamassu.vault", b"");
            b.run(&format!("key restore --force -k {job} copy v")).ok().says("lamassu.lost");
            // That header opens, and does not say so.
            b.run("key restore --force copy v").ok().says("from before the first dataset");
            assert_eq!(b.run("cat v p/x").ok().out, b"content");
        }
    }
}

/// A header in place that opens is asked, and not the whole store.
#[test]
fn a_restore_takes_the_word_of_the_header_in_place() {
    let b = Bench::new();
    b.run("init v").ok();
    b.run("key backup v copy").ok();
    b.dir("v/odd");
    fs::copy(b.path("v/lamassu.vault"), b.path("v/odd/lamassu.vault")).unwrap();
    let told = b.run("key restore copy v").ok();
    assert!(!told.err.contains("first dataset"), "{}", told.err);
    b.file("v/lamassu.vault", b"");
    b.run("key restore copy v").ok().says("from before the first dataset");
}

#[test]
fn a_key_of_the_vault_above_does_not_end_inheritance_by_the_way() {
    let b = Bench::new();
    b.run("init v").ok();
    b.run("dataset create v p").ok();
    let stored = b.run("path v p").ok().text().trim().to_string();
    let other = b.key("other");
    b.run(&format!("key admin rotate v/{stored}")).code(28).says("inherit=yes|no");
    b.run(&format!("key change -n {other} v/{stored}")).code(28).says("inherit=yes|no");
    b.run(&format!("key add -n {other} v/{stored}")).ok();
    b.run(&format!("key remove v/{stored} 1")).code(28).says("inherit=yes|no");
    b.run("ls v p").ok();
    b.run(&format!("key admin rotate -k {other} v/{stored}")).ok().says("opens it no more");
    b.run("dataset list v").ok();
    b.run("ls v p").code(51);
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
fn a_key_of_its_own_locks_it_for_everybody_else() {
    let b = mounted("", "");
    let own = b.key("own");
    b.run(&format!("dataset create -n {own} --domain family m/private")).ok().says("locked until");
    // Whoever made it brought the key.
    assert_eq!(listed(&b, "m", "private")["state"], "loaded");
    write(&b, "m/private/first", b"at once");
    b.unmount("m");
    b.run("mount v m").ok();
    fs::set_permissions(b.path("m/private"), fs::Permissions::from_mode(0o750)).unwrap_err();
    let locked = listed(&b, "m", "private");
    assert_eq!(
        (&locked["state"], &locked["keys"], &locked["domain"]),
        (&"locked".into(), &"own".into(), &"family".into())
    );
    // It shows, and nothing in it does.
    assert!(fs::metadata(b.path("m/private")).unwrap().is_dir());
    assert_eq!(errno(fs::read_dir(b.path("m/private")).unwrap().next().unwrap()), ENOKEY);
    assert_eq!(errno(fs::read(b.path("m/private/f"))), ENOKEY);
    assert_eq!(errno(fs::write(b.path("m/private/f"), b"")), ENOKEY);
    b.run("key load m/private").code(12);
    let other = b.key("other");
    b.run(&format!("key load -k {other} m/private")).code(12);
    b.run(&format!("key load -k {own} m/private")).ok();
    b.run(&format!("key load -k {own} m/private")).code(28).says("loaded already");
    write(&b, "m/private/f", b"mine");
    fs::set_permissions(b.path("m/private"), fs::Permissions::from_mode(0o750)).unwrap();
    b.unmount("m");

    // Who has the key of the vault alone reads nothing of it, and can check, list and copy it.
    b.run("cat v private/f").code(51).says("not loaded");
    b.run("ls -R v").ok().says("not loaded");
    let checked = b.run("check --json v").ok().json();
    assert_eq!((&checked["locked"], &checked["status"]), (&serde_json::json!(["private"]), &"clean".into()));
    let stored = b.run("path v private").ok().text();
    let dir = b.path("v").join(stored.trim());
    // Its directory in the store is a vault, for who has its key.
    let ran: Ran = b.command(["cat", "-k", &own]).arg(&dir).arg("f").output().unwrap().into();
    assert_eq!(ran.ok().out, b"mine");
    // Damage that needs no key to be seen.
    let file = fs::read_dir(&dir)
        .unwrap()
        .map(|e| e.unwrap())
        .find(|e| e.file_type().unwrap().is_file() && !e.file_name().to_str().unwrap().starts_with("lamassu."));
    fs::File::options().append(true).open(file.unwrap().path()).unwrap().write_all(b"x").unwrap();
    let checked = b.run("check --json v").code(26).json();
    assert_eq!(checked["problems"][0]["kind"], "length", "{checked}");
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

/// The kernel keeps an inode for as long as a file of it is open: it must not take what it meets after `key load` for that one.
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
fn inheritance_comes_and_goes() {
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    write(&b, "m/a/f", b"content");
    b.run("dataset set m/a inherit=no").code(28).says("last");
    let own = b.key("own");
    b.run(&format!("key add -n {own} m/a")).ok();
    assert_eq!(listed(&b, "m", "a")["keys"], "both");
    b.run("dataset set m/a inherit=no").ok().says("An older copy of the header").says("key renew");
    assert_eq!(listed(&b, "m", "a")["keys"], "own");
    b.run("key unload m/a").ok();
    b.run("key load m/a").code(12);
    b.run(&format!("key load -k {own} m/a")).ok();
    b.run("dataset set m/a inherit=yes").ok();
    b.run("dataset set m/a speed=full").code(2);
    b.run("dataset set m inherit=yes").code(2);
    let slots = b.run("key list --json m/a").ok().json();
    let kinds: Vec<&str> = slots["slots"].as_array().unwrap().iter().filter_map(|s| s["kind"].as_str()).collect();
    assert_eq!(kinds, ["raw", "parent"]);
    b.unmount("m");
    assert_eq!(b.run("cat v a/f").ok().out, b"content");
    // A parent slot is nobody's source.
    b.run("key add -n parent:file:own v").code(2);
    // Other keys of the vault it lies in change nothing, nor does a fresh file key.
    b.key("next");
    b.run("key change -n raw:file:next v").ok();
    b.run("key renew -k raw:file:next v").ok();
    assert_eq!(b.run("cat -k raw:file:next v a/f").ok().out, b"content");
}

#[test]
fn rotation_of_the_parent_seals_its_datasets_slots_anew() {
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    b.run("dataset create m/a/inner").ok();
    let content = noise(200_000, 4);
    for path in ["m/f", "m/a/f", "m/a/inner/f"] {
        write(&b, path, &content);
    }
    b.run("key rotate --outer m").ok();
    b.unmount("m");
    // Everything of the vault itself needs the old key, and so does the dataset in it.
    b.run("key retire --outer 1 v").code(28).says("parent slot");
    b.run("mount v m").ok();
    b.run("rekey --outer m").ok();
    assert_eq!(read(&b, "m/a/inner/f"), content);
    // The daemon goes on to change the header that was sealed anew.
    b.run("dataset set m/a cache=none").ok();
    b.unmount("m");
    b.run("key retire --outer 1 v").ok();
    assert_eq!(b.run("cat v a/inner/f").ok().out, content);
    // A dataset is rotated and re-keyed by its own path; the one in it is opened by its new key.
    b.run("mount v m").ok();
    b.run("key rotate --outer m/a").ok();
    b.run("key rotate --inner m/a").code(28).says("shares");
    b.run("rekey --outer m/a").ok();
    assert_eq!(b.run("key epochs --json m/a").ok().json()["outer"].as_array().unwrap().len(), 2);
    b.unmount("m");
    // Without a mount its directory in the store is named, and the key of the vault it lies in opens it.
    let stored = format!("v/{}", b.run("path v a").ok().text().trim());
    b.run(&format!("key retire --outer 1 {stored}")).ok();
    assert_eq!(b.run(&format!("key epochs --json {stored}")).ok().json()["outer"].as_array().unwrap().len(), 1);
    let inner = format!("v/{}", b.run("path v a/inner").ok().text().trim());
    assert!(b.run(&format!("history {inner}")).ok().text().contains("slot-changed"), "sealed anew");
    b.key("stranger");
    b.run(&format!("key epochs -k raw:file:stranger {inner}")).code(12);
    b.run("rekey --full v").ok();
    assert_eq!(b.run("cat v a/inner/f").ok().out, content);
    b.run("check v").ok();
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
    b.run("dataset destroy m/kept/f").code(1);
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
fn a_dataset_is_destroyed_by_its_keys() {
    let b = mounted("", "");
    for path in ["gone", "gone/inner", "stays"] {
        b.run(&format!("dataset create m/{path}")).ok();
        write(&b, &format!("m/{path}/f"), b"content");
    }
    b.key("audit");
    let public = b.run("receipt key --audit-key raw:file:audit").ok().text().trim().to_owned();
    let open = fs::File::open(b.path("m/gone/f")).unwrap();
    b.run("dataset destroy --shred-key --yes m/gone").code(28).says("open");
    drop(open);
    b.run("dataset destroy --yes m/gone").code(2).says("--shred-key");
    b.run("dataset destroy --shred-key --yes --receipt r --audit-key raw:file:audit m/gone").ok();
    assert!(!b.path("m/gone").exists());
    assert_eq!(fs::read(b.path("m/stays/f")).unwrap(), b"content");
    let receipt = b.run(&format!("receipt verify --json --audit-key {public} r")).ok().json();
    assert_eq!((&receipt["complete"], &receipt["slots"][0]["kind"]), (&true.into(), &"parent".into()), "{receipt}");
    b.unmount("m");
    b.run("check v").ok();
    // Without a mount.
    b.run("dataset destroy --shred-key --yes v stays").ok();
    assert!(!b.run("ls v").ok().text().contains("stays"));
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

/// Bytes of a file in the page cache.
fn resident(b: &Bench, path: &str) -> u64 {
    let out = Command::new("fincore").args(["-bno", "RES"]).arg(b.path(path)).output().unwrap();
    String::from_utf8(out.stdout).unwrap().trim().parse().unwrap()
}

#[test]
fn what_is_not_to_be_cached_is_not_in_datasets_that_inherit_it_either() {
    if Command::new("fincore").arg("--version").output().is_err() {
        eprintln!("SKIPPED: takes fincore(1)");
        return;
    }
    let b = mounted("", "");
    for path in ["m/a", "m/a/inner"] {
        b.run(&format!("dataset create {path}")).ok();
    }
    b.run("dataset create --cache mount m/a/asks").ok();
    let files = ["m/f", "m/a/f", "m/a/inner/f", "m/a/asks/f"];
    let cached = || {
        files.map(|path| {
            read(&b, path);
            resident(&b, path) > 0
        })
    };
    files.iter().for_each(|path| write(&b, path, &noise(50_000, 1)));
    assert_eq!(cached(), [true; 4]);
    b.run("dataset set m/a cache=none").ok();
    assert_eq!(files.map(|path| resident(&b, path) > 0), [true, false, false, true], "dropped at once");
    assert_eq!(cached(), [true, false, false, true]);
    b.run("dataset set m/a cache=inherit").ok();
    assert_eq!(cached(), [true; 4]);
    b.run("dataset set m cache=none").ok();
    assert_eq!(cached(), [false, false, false, true]);
    b.unmount("m");
}

#[test]
fn a_refused_load_leaves_the_keys_that_are_loaded() {
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    let (weak, own) = (b.key("weak"), b.key("own"));
    b.run(&format!("key add --use-only -n {weak} m/a")).ok();
    for _ in 0..2 {
        b.run(&format!("key load -k {weak} m/a")).code(28).says("loaded already");
        b.run("dataset set m/a cache=none").ok();
    }
    b.run(&format!("key add -n {own} m/a")).ok();
    b.unmount("m");
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
    b.run("check v").ok();
    b.run("snapshot v s").ok();
    b.run("check s").ok();
}

/// The program with few descriptors.
fn limited(b: &Bench, line: &str) -> Ran {
    let line = format!("ulimit -n 128; exec {} {line}", env!("CARGO_BIN_EXE_lamassu"));
    let mut command = Command::new("sh");
    command.args(["-c", &line]).current_dir(b.path(""));
    command.env("LAMASSU_KEY", format!("raw:file:{}", b.path("key").display())).output().unwrap().into()
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
    let checked = limited(&b, "check --json v").ok().json();
    assert_eq!((&checked["status"], &checked["locked"]), (&"clean".into(), &serde_json::json!(["private"])));
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

/// A file mapped for reading.
struct Map(*mut libc::c_void, usize);

impl Map {
    fn of(path: &Path) -> Map {
        use std::os::fd::AsRawFd;
        let file = fs::File::open(path).unwrap();
        let len = file.metadata().unwrap().len() as usize;
        let fd = file.as_raw_fd();
        // SAFETY: a fresh map at an address of the kernel's choice.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
        assert_ne!(map, libc::MAP_FAILED);
        // SAFETY: the map that was just made. No reading ahead by the kernel.
        assert_eq!(unsafe { libc::madvise(map, len, libc::MADV_RANDOM) }, 0);
        Map(map, len)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the map is that long, it is only read, and the file keeps its length.
        unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), self.1) }
    }

    /// How many pages of the file are in the page cache.
    fn resident(&self) -> usize {
        let mut pages = vec![0_u8; self.1.div_ceil(4096)];
        // SAFETY: `pages` has a byte for each page of the map.
        assert_eq!(unsafe { libc::mincore(self.0, self.1, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|page| **page & 1 != 0).count()
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: it was mapped, and `bytes` borrows this.
        unsafe { libc::munmap(self.0, self.1) };
    }
}

#[test]
fn nothing_of_an_uncached_file_stays_in_memory() {
    for cache in ["writeback", "through"] {
        let b = mounted("", &format!("--cache {cache}"));
        b.run("dataset create m/a").ok();
        let content = noise(1 << 20, 7);
        write(&b, "m/a/f", &content);
        let path = b.path("m/a/f");
        // Looked at where opening does not empty the cache. When a file was closed, the daemon is told some time after.
        let left = |_| {
            b.run("dataset set m/a cache=none").ok();
            let map = Map::of(&path);
            for n in [3, 99, 41, 7, 120, 64, 77, 12, 33, 50] {
                assert_eq!(map.bytes()[n * 4096], content[n * 4096]);
            }
            // What the daemon reads ahead would have come by then.
            std::thread::sleep(std::time::Duration::from_millis(500));
            assert_eq!(map.resident(), 10, "{cache}: what was touched, and no more");
            drop(map);
            std::thread::sleep(std::time::Duration::from_millis(200));
            b.run("dataset set m/a cache=mount").ok();
            Map::of(&path).resident()
        };
        assert!((0..5).map(left).any(|left| left == 0), "{cache}: pages of what is closed are left");
        assert!(read(&b, "m/a/f") == content);
        b.unmount("m");
    }
}

#[test]
fn a_delegate_makes_datasets_under_a_key_it_never_has() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can be somebody else");
        return;
    }
    const DELEGATE: &str = "65534";
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b.run("mount --delegate 65534 v m").code(2).says("--allow-other");
    b.run("mount --allow-other --delegate no-such-user v m").code(2);
    b.run(&format!("mount --allow-other --delegate {DELEGATE} v m")).ok();
    for dir in [".", "m"] {
        fs::set_permissions(b.path(dir), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let home = b.dir("m/home");
    std::os::unix::fs::chown(&home, Some(65534), Some(65534)).unwrap();
    b.dir("m/roots");
    let ran = |uid: &str, line: &str| -> Ran {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", uid, "--clear-groups", env!("CARGO_BIN_EXE_lamassu")]).args(line.split_whitespace());
        command.current_dir(b.path("")).output().unwrap().into()
    };
    ran(DELEGATE, "dataset create m/home/mine").ok();
    let made = fs::metadata(b.path("m/home/mine")).unwrap();
    assert_eq!((made.uid(), made.is_dir()), (65534, true));
    assert!(ran(DELEGATE, "dataset list m/home").ok().text().contains("mine"));
    ran(DELEGATE, "key unload m/home/mine").ok();
    assert_eq!(errno(fs::read_dir(b.path("m/home/mine")).unwrap().next().unwrap()), ENOKEY);
    ran(DELEGATE, "key load m/home/mine").ok();
    write(&b, "m/home/mine/f", b"content");
    // Not its own, not without the vault's key, and nothing that shows or changes a key.
    for refused in [
        "dataset create m/roots/not-mine",
        "dataset list m",
        "key unload m",
        "dataset set m/home/mine cache=none",
        "dataset destroy m/home/mine",
        "key remove m/home/mine 1",
        "rekey --outer m/home/mine",
    ] {
        let said = ran(DELEGATE, refused);
        assert!(said.code != 0 && said.err.contains("may"), "{refused}: {} {}", said.code, said.err);
    }
    // Who is no delegate is not heard at all.
    ran("65533", "dataset list m").code(1);
    b.unmount("m");
    assert_eq!(b.run("cat v home/mine/f").ok().out, b"content");
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
    b.run("key unload m").code(28).says("thaw");
    b.run("thaw m").ok();
    assert_eq!(read(&b, "m/a/f"), b"content");
    b.run("freeze m").ok();
    assert_eq!(read(&b, "m/a/f"), b"content", "reads go on");
    b.run("thaw m").ok();
    b.unmount("m");
}

/// Whether bytes stand anywhere in the memory of a process.
fn is_in_memory(pid: i32, wanted: &[u8]) -> bool {
    use std::os::unix::fs::FileExt;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    maps.lines().filter(|line| line.split(' ').nth(1).is_some_and(|perms| perms.starts_with('r'))).any(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let at = |hex: &str| u64::from_str_radix(hex, 16).unwrap();
        let mut bytes = vec![0; (at(end) - at(start)) as usize];
        let read = memory.read_at(&mut bytes, at(start)).unwrap_or(0);
        bytes[..read].windows(wanted.len()).any(|window| window == wanted)
    })
}

#[test]
fn no_key_of_what_is_unloaded_is_left_in_memory() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can read the daemon's memory");
        return;
    }
    let b = mounted("", "");
    let own = b.key("own");
    b.run(&format!("dataset create -n {own} --domain family m/a")).ok();
    write(&b, "m/a/f", &noise(100_000, 6));
    b.run("key rotate --outer m/a").ok();
    b.run("rekey --outer m/a").ok();
    let stored = dataset_dir(&b);
    let header: lamassu_format::header::VaultHeader =
        lamassu_keys::header_file::read(&stored.join("lamassu.vault")).unwrap();
    let key = lamassu_crypto::SecretBytes::new(fs::read(b.path("own")).unwrap());
    let material = lamassu_keys::Material::new(lamassu_keys::SlotKind::Raw, key).unwrap();
    let keys = lamassu_keys::unlock(&header, &material).unwrap();
    let epochs = || {
        [lamassu_keys::Tier::Inner, lamassu_keys::Tier::Outer].into_iter().flat_map(|tier| keys.keychain().epochs(tier))
    };
    let pid = crate::mounts::daemon_of(&b);
    assert!(epochs().any(|e| is_in_memory(pid, e.key().expose())), "the search finds what is there");
    b.run("key unload m/a").ok();
    for epoch in epochs() {
        assert!(!is_in_memory(pid, epoch.key().expose()), "a key is left");
    }
    assert!(!is_in_memory(pid, &fs::read(b.path("own")).unwrap()), "what opened it is left");
    b.unmount("m");
}

/// The directory in the store of the one dataset there is.
fn dataset_dir(b: &Bench) -> std::path::PathBuf {
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
    let half = b.path("v/lamassu.staging/dataset-00112233");
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

#[test]
fn a_property_that_changes_while_files_are_open_hangs_nobody() {
    use std::os::unix::fs::FileExt;
    for cache in ["through", "writeback"] {
        let b = mounted("", &format!("--cache {cache}"));
        b.run("dataset create m/a").ok();
        let path = b.path("m/a/f");
        let opened = || fs::File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let early = opened();
        early.write_all_at(&[1; 5000], 0).unwrap();
        b.run("dataset set m/a cache=none").ok();
        // Through the page cache still; what is opened now is not.
        early.write_all_at(&[2; 100], 10).unwrap();
        early.sync_all().unwrap();
        let late = opened();
        late.write_all_at(&[3; 100], 4000).unwrap();
        b.run("dataset set m/a cache=mount").ok();
        late.write_all_at(&[4; 10], 4096).unwrap();
        late.sync_all().unwrap();
        let mut bytes = [0; 5000];
        early.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!((bytes[9], bytes[10], bytes[4000], bytes[4096], bytes[4999]), (1, 2, 3, 4, 1), "{cache}");
        drop((early, late));
        b.unmount("m");
        b.run("check v").ok();
    }
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
