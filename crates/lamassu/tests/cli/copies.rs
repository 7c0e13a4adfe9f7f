//! cp: what it replaces, what it refuses to, and what a failure leaves behind.

use crate::files::names;
use crate::support::{Bench, Ran, noise};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

/// Mounts a tmpfs of this size. False where that is not allowed.
fn mounted_tmpfs(on: &Path, size: &str) -> bool {
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).arg(on).output();
    let mounted = mount.is_ok_and(|o| o.status.success());
    if !mounted {
        eprintln!("cannot mount a tmpfs: nothing to test");
    }
    mounted
}

/// A mount takes what is written to it, and only a sync or close tells that its store is full.
#[test]
fn a_file_is_replaced_by_one_that_is_written() {
    let b = Bench::new();
    if !mounted_tmpfs(&b.dir("store"), "2m") {
        return;
    }
    b.run("init store/v").ok();
    b.run("init w").ok();
    b.file("big", &noise(5 << 20, 1));
    b.run("cp w big vault:").ok();
    let m = b.dir("m");
    b.run("mount store/v m").ok();
    fs::write(m.join("old"), b"old").unwrap();
    b.run("cp w vault:big m/old").code(1).says("m/old stays as it was").says("No space left");
    assert_eq!(names(&m), ["old"]);
    assert_eq!(fs::read(m.join("old")).unwrap(), b"old");
    b.run("cp w vault:big m/new").code(1).says("m/new").says("No space left");
    assert_eq!(names(&m), ["old"], "half of a new file is none");
    b.unmount("m");
    assert_eq!(b.run("cat store/v old").ok().text(), "old");
}

#[test]
fn a_link_stays_where_the_new_one_cannot_be_made() {
    let b = Bench::new();
    let out = b.dir("out");
    if !mounted_tmpfs(&out, "64k") {
        return;
    }
    b.run("init v").ok();
    let long = "x".repeat(3000);
    symlink(&long, b.path("link")).unwrap();
    b.run("cp v link vault:").ok();
    // In a tmpfs a short link takes no room, and a long one a page.
    symlink("old", out.join("link")).unwrap();
    assert!(fs::write(out.join("fill"), noise(1 << 20, 1)).is_err());
    b.run("cp v vault:link out").code(1).says("out/link stays as it was").says("No space left");
    assert_eq!(fs::read_link(out.join("link")).unwrap(), Path::new("old"));
    assert_eq!(names(&out), ["fill", "link"]);
    fs::remove_file(out.join("fill")).unwrap();
    b.run("cp v vault:link out").ok();
    assert_eq!(fs::read_link(out.join("link")).unwrap(), Path::new(&long));
    assert_eq!(names(&out), ["link"]);
}

#[test]
fn a_kill_leaves_no_half_of_a_file_under_its_name() {
    use std::io::Write;
    let b = Bench::new();
    // With an anchor what nobody has synced would not be shown at all.
    b.run("init --anchor none v").ok();
    let mut child = b.command(["cp", "v", "-", "vault:f"]).stdin(Stdio::piped()).spawn().unwrap();
    // More than a pipe holds and is read ahead: once it is written, the file has been made.
    child.stdin.as_mut().unwrap().write_all(&noise(1 << 20, 1)).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let left = b.run("ls v").ok().text();
    assert!(left.lines().count() == 1 && left.starts_with(".lamassu-cp-"), "{left}");
    b.run("check v").ok();
    b.run_with("cp v - vault:f", b"whole").ok();
    assert_eq!(b.run("cat v f").ok().text(), "whole");
}

#[test]
fn a_link_that_leads_to_no_file_stays() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("t");
    b.file("t/f", b"new");
    symlink("/dev/null", b.path("t/null")).unwrap();
    b.run("cp -r v t vault:").ok();
    b.file("t/f", b"kept");
    assert!(Command::new("mkfifo").arg(b.path("fifo")).status().unwrap().success());
    // Where /dev/stdout leads is a regular file here, and still not to be replaced.
    for to in ["/dev/null", "fifo", "/proc/self/fd/1"] {
        symlink(to, b.path("link")).unwrap();
        let output = fs::File::create(b.path("output")).unwrap();
        let ran = b.command(["cp", "v", "vault:t/f", "link"]).stdout(output).output().unwrap();
        Ran::from(ran).code(1).says("link is there already, and no regular file");
        assert_eq!(fs::read_link(b.path("link")).unwrap(), Path::new(to));
        fs::remove_file(b.path("link")).unwrap();
    }
    // Below a directory that is copied, one to a directory is no way into that.
    b.dir("o/t");
    symlink("..", b.path("o/t/f")).unwrap();
    b.run("cp -r v vault:t o").code(1).says("o/t/f is there already, and no regular file");
    fs::remove_file(b.path("o/t/f")).unwrap();
    // What is replaced: links to files and to nothing; and anything by a link.
    for to in ["missing", "null/missing", "../../t/f"] {
        symlink(to, b.path("o/t/f")).unwrap();
        b.run("cp -r v vault:t o").ok();
        assert!(b.path("o/t/f").symlink_metadata().unwrap().is_file());
        assert_eq!(fs::read(b.path("o/t/f")).unwrap(), b"new");
        assert_eq!(fs::read_link(b.path("o/t/null")).unwrap(), Path::new("/dev/null"));
        fs::remove_file(b.path("o/t/f")).unwrap();
    }
    assert_eq!(fs::read(b.path("t/f")).unwrap(), b"kept");
    assert_eq!(names(&b.path("o/t")), ["null"]);
}

#[test]
fn sources_of_one_name_are_refused() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("x1/d");
    b.dir("x2/d");
    b.file("x1/f", b"1");
    b.file("x2/f", b"2");
    b.file("x1/d/g", b"1");
    b.dir("out");
    b.run("cp -r v x1 x2 vault:").ok();
    b.run("cp -r v x2/d vault:w").ok();
    for sources in ["x1/f x2/f", "x1/d x2/d", "x1/f ./x2/f", "x1/d/g x1/f x1/f"] {
        b.run(&format!("cp -r v {sources} vault:w")).code(2).says("vault:w/").says("several sources");
    }
    assert_eq!(b.run("ls v w").ok().text(), "", "refused before anything is copied");
    b.run("cp v vault:x1/f vault:x2/f out").code(2).says("out/f: several sources");
    b.run("cp v vault:f vault:x2/f out").code(2);
    assert!(names(&b.path("out")).is_empty());
    b.run("cp -r v x1/f x2/d vault:w").ok();
    assert_eq!(b.run("ls v w").ok().text(), "w/d\nw/f\n");
}

#[test]
fn the_hint_to_list_the_vault_is_for_paths_in_it() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("d");
    b.file("f", b"");
    b.run("cp -r v d vault:").ok();
    b.run("cp v vault:nosuch .").code(3).says("hint: `lamassu ls DIR`");
    b.run("cp v f vault:no/such").code(3).says("hint: `lamassu ls DIR`");
    for line in ["cp v nosuch vault:", "cp -r v vault:d f", "cp --orphan v nosuch out"] {
        let ran = b.run(line).code(3);
        assert!(!ran.err.contains("hint"), "{line}: {}", ran.err);
    }
}

#[test]
fn a_directory_without_a_name_gives_what_is_in_it() {
    let b = Bench::new();
    b.run("init v").ok();
    fs::write(b.dir("a").join("f"), b"content").unwrap();
    b.run("cp -r v a vault:").ok();
    b.run("cp -r v a/. vault:a").ok();
    assert_eq!(names(&b.path("a")), ["f"]);
    b.dir("out");
    b.run("cp -r v vault:a/. out").ok();
    assert_eq!(names(&b.path("out")), ["f"]);
    b.run("ls v a/a").code(3);
}

#[test]
fn the_failure_of_the_only_entry_is_said_once() {
    let b = Bench::new();
    b.run("init v").ok();
    let ran = b.run("cp v nosuch vault:").code(3);
    assert_eq!(ran.err.matches("nosuch").count(), 1, "{}", ran.err);
    let ran = b.run("cp v nosuch key vault:").code(3).says("1 of 2 could not be done");
    assert_eq!(ran.err.matches("lamassu: \"nosuch\"").count(), 1, "{}", ran.err);
}

fn inode(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::ino(&path.symlink_metadata().unwrap())
}

#[test]
fn a_file_with_several_names_is_copied_once() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("t/d/e");
    b.file("t/f", &noise(100_000, 3));
    fs::hard_link(b.path("t/f"), b.path("t/d/e/g")).unwrap();
    fs::hard_link(b.path("t/f"), b.path("t/z")).unwrap();
    b.file("t/own", b"own");
    b.run("cp -r v t vault:").ok();
    b.run("cp -r v vault:t vault:u").ok();
    b.run("cp -r v t/. vault:").ok();
    for dir in ["t/", "u/", ""] {
        let stored = |name: &str| inode(&b.stored("v", &format!("{dir}{name}")));
        assert_eq!((stored("d/e/g"), stored("z")), (stored("f"), stored("f")), "{dir}");
        assert_ne!(stored("own"), stored("f"));
    }
    b.run("check v").ok();
    b.dir("into");
    b.run("cp -r v vault:t out").ok();
    for _ in 0..2 {
        b.run("cp -r v vault:t/. into").ok();
    }
    for dir in ["out", "into"] {
        let copied = |name: &str| b.path(dir).join(name);
        assert_eq!(inode(&copied("d/e/g")), inode(&copied("f")));
        assert_eq!(inode(&copied("z")), inode(&copied("f")));
        assert_eq!(fs::read(copied("z")).unwrap(), noise(100_000, 3));
        assert!(names(&b.path(dir)).iter().all(|name| !name.starts_with(".lamassu")));
    }
}

/// A store gives one file as many names as it likes, in as many directories: they take no room there, and take none in
/// a copy.
#[test]
fn a_directory_that_is_put_into_itself_does_not_grow() {
    let b = Bench::new();
    // The store is written to by others: without an anchor, which would not let that pass.
    b.run("init --anchor none --names plain v").ok();
    b.dir("t");
    b.file("t/f", &noise(1 << 20, 3));
    b.run("cp -r v t vault:").ok();
    let mut dir = b.path("v/t");
    for _ in 0..30 {
        let below = dir.join("t");
        fs::create_dir(&below).unwrap();
        fs::hard_link(dir.join("f"), below.join("f")).unwrap();
        dir = below;
    }
    b.run("cp -r v vault:t out").ok();
    let mut copied = b.path("out");
    for _ in 0..30 {
        copied.push("t");
        assert_eq!(inode(&copied.join("f")), inode(&b.path("out/f")));
    }
}

#[test]
fn a_directory_that_lies_in_itself_is_left_out() {
    let b = Bench::new();
    b.run("init v").ok();
    let inner = b.dir("t/d/loop");
    b.file("t/f", b"content");
    let bound = Command::new("mount").arg("--bind").arg(b.path("t")).arg(&inner).output();
    if !bound.is_ok_and(|o| o.status.success()) {
        eprintln!("SKIPPED: cannot bind a mount");
        return;
    }
    b.run("cp -r v t vault:").code(1).says("t/d/loop: is one of the directories that it lies in").says("1 of 4");
    assert_eq!(b.run("cat v t/f").ok().text(), "content");
}
