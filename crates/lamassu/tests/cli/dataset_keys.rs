//! The keys of datasets: inherited or their own, rotated, restored, destroyed, and who may have them.

use crate::datasets::{ENOKEY, dataset_dir, errno, listed, mounted, read, write};
use crate::support::{Bench, Ran, noise};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::Command;

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
    for (line, code, status) in [("check --json v", 51, "locked"), ("check --json --skip-locked v", 0, "clean")] {
        let checked = b.run(line).code(code).json();
        assert_eq!((&checked["locked"], &checked["status"]), (&serde_json::json!(["private"]), &status.into()));
    }
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
fn what_lies_below_an_unloaded_dataset_says_what_to_load() {
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    b.run("dataset create m/a/inner").ok();
    fs::create_dir(b.path("m/a/dir")).unwrap();
    for unloaded in ["m/a", "m"] {
        b.run(&format!("key unload {unloaded}")).ok();
        let first = format!("key load {:?}", b.path(unloaded).canonicalize().unwrap());
        for line in [
            "key load m/a/inner",
            "key load m/a/dir/any",
            "key unload m/a/inner",
            "dataset list m/a/inner",
            "dataset set m/a/inner cache=none",
            "dataset destroy m/a/dir/any",
            "info m/a/inner",
        ] {
            b.run(line).code(51).says(&first);
        }
        b.run(&format!("key load {unloaded}")).ok();
    }
    b.unmount("m");
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

/// Whoever can write to the store can put one there while the daemon, which may be root, writes down what happens to
/// the keys.
#[test]
fn a_link_in_place_of_a_dataset_s_directory_is_not_followed() {
    let b = mounted("", "");
    b.run("dataset create m/a").ok();
    write(&b, "m/a/f", b"content");
    let (stored, moved, outside) = (dataset_dir(&b), b.path("moved"), b.dir("outside"));
    fs::rename(&stored, &moved).unwrap();
    symlink(&outside, &stored).unwrap();
    b.unmount("m");
    let made: Vec<_> = fs::read_dir(&outside).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(made.is_empty(), "{made:?}");
    // The dataset is none the worse.
    fs::remove_file(&stored).unwrap();
    fs::rename(&moved, &stored).unwrap();
    assert_eq!(b.run("cat v a/f").ok().out, b"content");
    b.run("check v").ok();
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

/// Directories of others in that of a delegate, with datasets whose names are not the delegate's to know where it may
/// not read.
fn make_hidden_datasets(b: &Bench) {
    for (dir, mode) in [("shut", 0o700), ("open", 0o755), ("blind", 0o711), ("listed", 0o700), ("of-group", 0o750)] {
        let path = b.dir(&format!("m/home/{dir}"));
        b.run(&format!("dataset create m/home/{dir}/secret-{dir}")).ok();
        b.dir(&format!("m/home/{dir}/deeper"));
        b.run(&format!("dataset create m/home/{dir}/deeper/below-{dir}")).ok();
        std::os::unix::fs::chown(&path, None, Some(4242)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    b.run("dataset create m/home/inner").ok();
    b.run("dataset create m/home/inner/nested").ok();
    fs::set_permissions(b.path("m/home/inner"), fs::Permissions::from_mode(0o700)).unwrap();
    // user::rwx, user:65534:r-x, group::---, mask::r-x, other::---
    let entries: [(u16, u16, u32); 5] =
        [(1, 7, u32::MAX), (2, 5, 65534), (4, 0, u32::MAX), (16, 5, u32::MAX), (32, 0, u32::MAX)];
    let list = entries.iter().fold(2u32.to_le_bytes().to_vec(), |mut list, (tag, perm, id)| {
        list.extend([&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat());
        list
    });
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(b.path("m/home/listed"), "system.posix_acl_access", &list, flags).unwrap();
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
    // No more than mkdir(2) in a directory of its own.
    let closed = b.dir("m/home/closed");
    std::os::unix::fs::chown(&closed, Some(65534), Some(65534)).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
    ran(DELEGATE, "dataset create m/home/closed/mine").code(28).says("does not let you write");
    assert_eq!(fs::read_dir(&closed).unwrap().count(), 0);
    fs::remove_dir(&closed).unwrap();
    let made = fs::metadata(b.path("m/home/mine")).unwrap();
    assert_eq!((made.uid(), made.is_dir()), (65534, true));
    assert!(ran(DELEGATE, "dataset list m/home").ok().text().contains("mine"));
    ran(DELEGATE, "key unload m/home/mine").ok();
    assert_eq!(errno(fs::read_dir(b.path("m/home/mine")).unwrap().next().unwrap()), ENOKEY);
    ran(DELEGATE, "key load m/home/mine").ok();
    write(&b, "m/home/mine/f", b"content");
    make_hidden_datasets(&b);
    let paths = |listed: Ran| -> Vec<String> {
        let all = listed.ok().json();
        assert_eq!(all["unseen"], serde_json::json!([]), "{all}");
        all["datasets"].as_array().unwrap().iter().map(|d| d["path"].as_str().unwrap().to_string()).collect()
    };
    let seen = paths(ran(DELEGATE, "dataset list --json m/home"));
    let told = ["inner", "listed/deeper/below-listed", "listed/secret-listed", "mine"];
    let open = ["open/deeper/below-open", "open/secret-open"];
    let ends: Vec<String> = seen.iter().map(|path| path.trim_start_matches("m/home/").to_string()).collect();
    assert_eq!(ends, [&told[..], &open].concat());
    // As many as `find` shows it; and root sees them all.
    let mut find = Command::new("setpriv");
    find.args(["--reuid", DELEGATE, "--clear-groups", "find", "m/home", "-mindepth", "1"]).current_dir(b.path(""));
    let found = String::from_utf8(find.output().unwrap().stdout).unwrap();
    assert!(seen.iter().all(|path| found.lines().any(|line| line.ends_with(path.trim_start_matches("m/home/")))));
    assert!(!found.contains("secret-shut") && !found.contains("nested") && !found.contains("secret-blind"));
    assert_eq!(paths(b.run("dataset list --json m/home")).len(), 13);
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
    ran("65533", "dataset list m").code(28);
    b.unmount("m");
    assert_eq!(b.run("cat v home/mine/f").ok().out, b"content");
}

/// Copies of a header that inherits, one in the other as deep as a path can be: a store makes those for nothing.
#[test]
fn headers_in_one_another_take_no_time() {
    let b = mounted("", "");
    b.run("dataset create m/d").ok();
    b.unmount("m");
    let header = fs::read(b.stored("v", "d").join("lamassu.vault")).unwrap();
    let mut dir = b.dir("deep");
    for _ in 0..1500 {
        dir.push("d");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("lamassu.vault"), &header).unwrap();
    }
    let begun = std::time::Instant::now();
    b.run(&format!("ls {}", dir.display())).code(12);
    let took = begun.elapsed();
    // Passed only by what looks again at all headers above each.
    assert!(took.as_secs() < 60, "{took:?}");
}
