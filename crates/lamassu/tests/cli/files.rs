//! ls, cat, cp, path, inspect, check: without a mount.

use crate::support::{Bench, Ran, flip, noise};
use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A vault of a suite with a tree copied in.
fn filled(suite: &str) -> Bench {
    let b = Bench::new();
    b.run(&format!("init --suite {suite} v")).ok();
    b.dir("tree/sub/deep");
    b.file("tree/small", b"hello\n");
    b.file("tree/empty", b"");
    b.file("tree/large", &noise(1_234_567, 1));
    b.file("tree/sub/exact", &noise(4096 * 7, 2));
    let long = "n".repeat(255);
    b.file(&format!("tree/sub/deep/{long}"), b"long name");
    std::os::unix::fs::symlink("../small", b.path("tree/sub/link")).unwrap();
    let sparse = std::fs::File::create(b.path("tree/sparse")).unwrap();
    sparse.set_len(50 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"end", (50 << 20) - 3).unwrap();
    std::fs::set_permissions(b.path("tree/small"), std::fs::Permissions::from_mode(0o4751)).unwrap();
    std::fs::set_permissions(b.path("tree/sub"), std::fs::Permissions::from_mode(0o500)).unwrap();
    let status = std::process::Command::new("touch")
        .args(["-h", "-d", "2001-02-03T04:05:06.789012345Z"])
        .args(["tree/small", "tree/large", "tree/sub/link", "tree/sub"].map(|p| b.path(p)))
        .status()
        .unwrap();
    assert!(status.success());
    b.run("cp -r v tree vault:").ok();
    b
}

fn same(a: &Path, b: &Path) {
    let (x, y) = (a.symlink_metadata().unwrap(), b.symlink_metadata().unwrap());
    assert_eq!(x.mode(), y.mode(), "{a:?}");
    assert_eq!((x.mtime(), x.mtime_nsec()), (y.mtime(), y.mtime_nsec()), "{a:?}");
    if x.is_symlink() {
        assert_eq!(std::fs::read_link(a).unwrap(), std::fs::read_link(b).unwrap());
    } else if x.is_file() {
        assert!(std::fs::read(a).unwrap() == std::fs::read(b).unwrap(), "{a:?}");
    } else {
        let names = |p: &Path| {
            let mut n: Vec<_> = std::fs::read_dir(p).unwrap().map(|e| e.unwrap().file_name()).collect();
            n.sort();
            n
        };
        assert_eq!(names(a), names(b), "{a:?}");
        names(a).iter().for_each(|n| same(&a.join(n), &b.join(n)));
    }
}

#[test]
fn a_tree_comes_back_as_it_went_in_with_every_suite() {
    for suite in ["aes", "paper", "blake3", "chacha"] {
        let b = filled(suite);
        b.run("cp -r --trust-store v vault:tree out").ok();
        same(&b.path("tree"), &b.path("out"));
        let sparse = b.path("out/sparse").metadata().unwrap();
        assert!(sparse.blocks() * 512 < 1 << 20, "holes stay holes");
        let stored = b.stored("v", "tree/sparse").metadata().unwrap();
        assert!(stored.blocks() * 512 < 1 << 20);
        b.run("check v").ok();
    }
}

#[test]
fn cp_goes_where_cp_would() {
    let b = filled("aes");
    b.file("a", b"A");
    b.file("b", b"B");
    b.run("cp v a vault:").ok();
    b.run("cp v a vault:/tree/a2").ok();
    b.run("cp v a b vault:tree").ok();
    b.run("cp v b vault:a").ok();
    assert_eq!(b.run("cat v a tree/a2 /tree/a tree/b").ok().text(), "BAAB");
    b.run("cp v vault:a vault:tree/small vault:tree/sub").ok();
    assert_eq!(b.run("cat v tree/sub/a tree/sub/small").ok().text(), "Bhello\n");
    b.run_with("cp v - vault:piped", b"from a pipe").ok();
    assert_eq!(b.run("cat v piped").ok().text(), "from a pipe");
    b.run("cp v vault:piped .").ok();
    assert_eq!(std::fs::read(b.path("piped")).unwrap(), b"from a pipe");
    b.run("cp -r v vault: whole").ok();
    same(&b.path("tree/large"), &b.path("whole/tree/large"));

    b.run("cp v tree vault:").code(2).says("-r");
    b.run("cp v nosuch vault:").code(3);
    b.run("cp v vault:nosuch .").code(3);
    b.run("cp v a b vault:nodir").code(2);
    b.run("cp v a vault:a/").code(2);
    b.run("cp v a vault:no/such/dir").code(3);
    // A file is not copied onto itself: that would empty it.
    b.run("cp v vault:a vault:a").code(2).says("same file");
    assert_eq!(b.run("cat v a").ok().text(), "B");
    // One that fails does not keep the others back.
    b.run("cp v nosuch b vault:tree").code(3).says("nosuch");
    assert_eq!(b.run("cat v tree/b").ok().text(), "B");
}

#[test]
fn extended_attributes_are_copied_and_not_readable_in_the_store() {
    let b = Bench::new();
    b.run("init v").ok();
    let file = b.file("f", b"x");
    if rustix::fs::setxattr(&file, "user.colour", b"octarine", rustix::fs::XattrFlags::empty()).is_err() {
        eprintln!("no extended attributes in {:?}: nothing to test", file);
        return;
    }
    b.run("cp v f vault:").ok();
    b.run("cp v vault:f g").ok();
    let mut value = [0; 64];
    let len = rustix::fs::getxattr(b.path("g"), "user.colour", &mut value[..]).unwrap();
    assert_eq!(&value[..len], b"octarine");
    let mut names = [0; 512];
    let len = rustix::fs::listxattr(b.stored("v", "f"), &mut names[..]).unwrap();
    assert!(!String::from_utf8_lossy(&names[..len]).contains("colour"));
}

#[test]
fn listings() {
    let b = filled("aes");
    assert_eq!(b.run("ls v").ok().text(), "tree\n");
    assert_eq!(b.run("ls v tree/sub").ok().text(), "tree/sub/deep\ntree/sub/exact\ntree/sub/link\n");
    assert_eq!(b.run("ls -d v tree").ok().text(), "tree\n");
    let long = b.run("ls -l v tree/small tree/sub").ok().text();
    assert!(
        long.contains("-rwsr-x--x") && long.contains("2001-02-03T04:05:06Z") && long.contains("link -> ../small"),
        "{long}"
    );
    let listed = b.run("ls -R --json v").ok().json();
    let entries = listed["entries"].as_array().unwrap();
    assert_eq!(entries.len(), 10);
    let of = |path: &str| entries.iter().find(|e| e["path"] == path).unwrap();
    assert_eq!((&of("tree/large")["size"], &of("tree/large")["kind"]), (&1_234_567.into(), &"file".into()));
    assert_eq!(of("tree/small")["mode"], "4751");
    assert_eq!(of("tree/sub/link")["target"], "../small");
    assert_eq!(of("tree/sparse")["size"], 50 << 20);
    b.run("ls v nosuch").code(3);
    b.run("ls v tree/small/x").code(3);
    b.run("ls v ../x").code(2);
}

#[test]
fn paths_there_and_back() {
    let b = filled("aes");
    for plain in ["tree", "tree/small", "tree/sub/deep", "tree/sub/link"] {
        let stored = b.run(&format!("path v {plain}")).ok().text();
        let stored = stored.trim_end();
        assert!(b.path("v").join(stored).symlink_metadata().is_ok());
        assert!(!stored.contains("small") && !stored.contains("deep") && !stored.starts_with('-'));
        for given in [stored.to_string(), format!("v/{stored}"), b.path("v").join(stored).display().to_string()] {
            assert_eq!(b.run(&format!("path --reverse v {given}")).ok().text().trim_end(), plain);
        }
        // Below the vault it needs no `./`.
        let below = format!("v/{}", stored.strip_prefix("./").unwrap_or(stored));
        assert_eq!(b.run(&format!("path -a v {plain}")).ok().text().trim_end(), below);
    }
    let json = b.run("path --json v tree /tree/small").ok().json();
    assert_eq!(json["paths"][1]["plain"], "tree/small");
    assert!(b.run("path -0 v tree").ok().out.ends_with(b"\0"));
    b.run("path v nosuch").code(3);
    b.run("path --reverse v /etc/passwd").code(2);
    b.run("path --reverse v nosuch").code(3);
}

/// One in 64 encrypted names begins with `-`, like an option.
#[test]
fn a_path_in_the_store_is_never_taken_for_an_option() {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("names");
    let names: Vec<String> = (0..1500).map(|n| n.to_string()).collect();
    let plain: Vec<PathBuf> = names.iter().map(|name| b.file(&format!("names/{name}"), b"")).collect();
    let copied = b.command([OsStr::new("cp"), OsStr::new("v")].into_iter().chain(plain.iter().map(|p| p.as_os_str())));
    Ran::from({ copied }.arg("vault:/").output().unwrap()).ok();
    let stored = Ran::from(b.command(["path", "v"]).args(&names).output().unwrap()).ok().text();
    let (line, name) = stored.lines().zip(&names).find(|(line, _)| line.starts_with("./-")).expect("one of 1500");
    assert!(stored.lines().all(|line| !line.starts_with('-')));
    for given in [line, &format!("-- {}", &line[2..])] {
        let args = ["path", "--reverse", "v"].into_iter().chain(given.split(' '));
        let ran = Ran::from(b.command(args).output().unwrap()).ok();
        assert_eq!(ran.text().trim_end(), name);
    }
}

#[test]
fn one_file_out_of_a_backup() {
    let b = filled("blake3");
    let stored = b.stored("v", "tree/large");
    let backup = b.dir("backup").join("some-file");
    std::fs::copy(&stored, &backup).unwrap();
    std::fs::copy(b.path("v/lamassu.vault"), b.path("backup/header")).unwrap();
    std::fs::remove_dir_all(b.path("v/lamassu.staging")).unwrap();
    let plain = std::fs::read(b.path("tree/large")).unwrap();
    assert!(b.run("cat --header backup/header backup/some-file").ok().out == plain);
    assert!(b.run("cat --orphan v backup/some-file").ok().out == plain);
    b.run("cp --header backup/header backup/some-file found").ok();
    assert!(std::fs::read(b.path("found")).unwrap() == plain);
    assert_eq!(b.path("found").metadata().unwrap().mtime(), backup.metadata().unwrap().mtime());
    let shown = b.run("inspect --json --header backup/header backup/some-file").ok().json();
    assert_eq!(shown["size"], 1_234_567);
    b.run("cat --header backup/header nosuch").code(3);
    b.run("cat --header backup/header backup").code(3);
}

#[test]
fn inspection() {
    let b = filled("aes");
    let large = b.run("inspect --json --slots v tree/large").ok().json();
    assert_eq!((&large["size"], &large["kind"]), (&1_234_567.into(), &"file".into()));
    let pages = large["pages"].as_array().unwrap();
    assert_eq!(pages.len(), 3);
    for (g, page) in pages.iter().enumerate() {
        assert_eq!((&page["page"], &page["state"]), (&g.into(), &"good".into()));
        assert_eq!(page["pending"], serde_json::json!([]), "a closed vault is settled");
        assert_eq!(page["epoch"], 1);
    }
    assert_eq!(pages[0]["used"], 116);
    assert_eq!(pages[0]["slots"][1]["offset"], 8192);
    assert_eq!(pages[0]["slots"][1]["state"], "data");
    // 301 blocks and 1671 bytes.
    assert_eq!((&pages[2]["used"], &pages[2]["tail_bytes"]), (&69.into(), &1671.into()));
    let small = b.run("inspect --json v tree/small").ok().json();
    assert_eq!((&small["convergent"], &small["size"]), (&true.into(), &6.into()));
    let dir = b.run("inspect --json v tree/sub/deep").ok().json();
    assert_eq!((&dir["record"]["state"], &dir["entries"]), (&"good".into(), &1.into()));
    assert_eq!((&dir["long_names"], &dir["companions"]), (&1.into(), &1.into()));
    assert_eq!(dir["record"]["id"].as_str().unwrap().len(), 32);
    let link = b.run("inspect --json v tree/sub/link").ok().json();
    assert_eq!((&link["kind"], &link["target_bytes"]), (&"symlink".into(), &8.into()));
    for path in ["tree/large", "tree/sub", "tree/sub/link", "."] {
        assert!(b.run(&format!("inspect v {path}")).ok().text().contains("kind"), "{path}");
    }
    flip(&b.stored("v", "tree/large"), 100);
    let broken = b.run("inspect --json v tree/large").ok().json();
    assert_eq!(broken["pages"][0]["state"], "broken");
    assert_eq!(broken["pages"][1]["state"], "good");
    // A hole of a terabyte is one line, and takes no longer.
    let stored = std::fs::File::options().write(true).open(b.stored("v", "tree/large")).unwrap();
    stored.set_len(1 << 40).unwrap();
    let sparse = b.run("inspect --json v tree/large").ok().json();
    let pages = sparse["pages"].as_array().unwrap();
    let segments = (1u64 << 40).div_ceil(pages[1]["offset"].as_u64().unwrap());
    assert_eq!((pages.len(), &pages[3]["state"], &pages[3]["pages"]), (4, &"absent".into(), &(segments - 3).into()));
    b.run("inspect v nosuch").code(3);
}

/// Whoever can write the store can put anything in the place of a record.
#[test]
fn a_record_that_is_none_is_neither_waited_for_nor_read_whole() {
    let b = filled("aes");
    let record = b.stored("v", "tree/sub/deep").join("lamassu.dir");
    std::fs::remove_file(&record).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &record, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let state = || {
        let shown = b.run("inspect --json v tree/sub/deep").ok().json();
        shown["record"]["state"].as_str().unwrap().to_string()
    };
    assert!(state().starts_with("unreadable"), "a fifo: {}", state());
    std::fs::remove_file(&record).unwrap();
    std::fs::File::create(&record).unwrap().set_len(1 << 40).unwrap();
    assert!(state().starts_with("unreadable"), "a terabyte: {}", state());
    std::fs::remove_file(&record).unwrap();
    std::fs::create_dir(&record).unwrap();
    assert!(state().starts_with("unreadable"), "a directory: {}", state());
}

/// A directory's record copied into each directory below it makes a valid tree, as deep as one likes.
#[test]
fn a_tree_too_deep_is_listed_as_far_as_it_goes() {
    use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat, symlinkat};
    const DEPTH: usize = 2100;
    let b = Bench::new();
    b.run("init --anchor none v").ok();
    b.dir("a/a");
    b.file("z", b"after it");
    b.run("cp -r v a z vault:").ok();
    let (above, below) = (b.stored("v", "a"), b.stored("v", "a/a"));
    let Ok(record) = std::fs::read_link(above.join("lamassu.dir")) else {
        eprintln!("no symbolic links in {above:?}: nothing to test");
        return;
    };
    let name = below.file_name().unwrap();
    std::fs::remove_dir_all(&below).unwrap();
    let mut at = openat(CWD, &above, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
    for _ in 1..DEPTH {
        mkdirat(&at, name, Mode::RWXU).unwrap();
        at = openat(&at, name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        symlinkat(&record, &at, "lamassu.dir").unwrap();
    }
    let listed = b.run("ls -R v").code(1).says("2000 directories deep");
    let text = listed.text();
    let lines: Vec<&str> = text.lines().collect();
    // The vault's root is the first directory: the one 2001 below it is named, but not gone into; what comes after it
    // is listed.
    assert_eq!(lines.len(), 2002);
    assert_eq!((lines[0], lines[1], lines[2001]), ("a", "a/a", "z"));
    // tempfile would hold a descriptor for every level.
    assert!(std::process::Command::new("rm").arg("-rf").arg(&above).status().unwrap().success());
}

#[test]
fn damage_is_named_and_what_precedes_it_is_written() {
    let b = filled("aes");
    let plain = std::fs::read(b.path("tree/large")).unwrap();
    // Block 5 lies at 6 · 4096: one page before it.
    let stored = b.stored("v", "tree/large");
    flip(&stored, 6 * 4096 + 17);
    let ran = b.run("cat v tree/large").code(26);
    assert!(ran.out == plain[..5 * 4096]);
    b.dir("out");
    b.run("cp v vault:tree/small vault:tree/large vault:tree/empty out").code(26).says("tree/large");
    assert_eq!(names(&b.path("out")), ["empty", "small"], "no half of a damaged file");

    let ran = b.run("check v").code(26);
    assert!(ran.text().contains("/tree/large") && ran.text().contains("block 5"), "{}", ran.text());
    let json = b.run("check --json v").code(26).json();
    assert_eq!(json["status"], "damaged");
    let problems = json["problems"].as_array().unwrap();
    assert_eq!(problems.len(), 1);
    assert_eq!((&problems[0]["block"], &problems[0]["kind"]), (&5.into(), &"block-hash".into()));
    assert_eq!((&problems[0]["offset"], &problems[0]["length"]), (&20_480.into(), &4096.into()));
    assert!(ran.text().contains("bytes 20480 to 24575: "), "{}", ran.text());
    flip(&stored, 7 * 4096 + 17);
    flip(&stored, 9 * 4096 + 17);
    let ran = b.run("check v").code(26);
    assert!(ran.text().contains("bytes 20480 to 28671: block-hash in 2 blocks in a row"), "{}", ran.text());
    assert!(ran.text().contains("bytes 32768 to 36863: ") && ran.text().contains("3 damaged"), "{}", ran.text());
    // A file has as many blocks as its store says: those in a row are one problem.
    let runs = b.run("check --json v").code(26).json();
    let blocks = |n: usize| (&runs["problems"][n]["block"], &runs["problems"][n]["blocks"]);
    assert_eq!(runs["problems"].as_array().unwrap().len(), 2, "{runs}");
    assert_eq!((blocks(0), blocks(1)), ((&5.into(), &2.into()), (&8.into(), &serde_json::Value::Null)));
    assert_eq!(runs["problems"][0]["length"], 8192);
    flip(&stored, 7 * 4096 + 17);
    flip(&stored, 9 * 4096 + 17);
    assert!(stored.ends_with(problems[0]["stored"].as_str().unwrap()));
    // Only the parts asked for.
    b.run("check v tree/small tree/sub").ok();
    b.run("check v tree/large").code(26);
    b.run("check --repair v").code(26);
    flip(&stored, 6 * 4096 + 17);
    let json = b.run("check --json v").ok().json();
    assert_eq!((&json["status"], &json["files"]), (&"clean".into(), &6.into()));
    b.run("check v nosuch").code(3);
}

/// The names in a local directory.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_there_stays_where_a_copy_fails() {
    let b = Bench::new();
    b.run("init v").ok();
    let (plain, long) = (noise(100_000, 1), "n".repeat(255));
    b.file("f1", &plain);
    b.file("f2", b"good");
    b.file(&long, b"good too");
    b.run(&format!("cp v f1 f2 {long} vault:")).ok();
    b.run("cp -r v vault:/ o").ok();
    // Block 5, after one page.
    let stored = b.stored("v", "f1");
    flip(&stored, 6 * 4096 + 17);
    b.run("cp -r v vault:/ o").code(26).says("o/f1 stays as it was").says("vault:/f1");
    assert!(std::fs::read(b.path("o/f1")).unwrap() == plain);
    assert_eq!(names(&b.path("o")), ["f1", "f2", &long], "nothing is left over");
    for target in ["f2", &long] {
        b.run(&format!("cp v vault:f1 vault:{target}")).code(26).says("stays as it was");
    }
    b.run("cp v vault:f1 vault:f3").code(26);
    assert_eq!(b.run("ls v").ok().text(), format!("f1\nf2\n{long}\n"));
    assert_eq!(b.run(&format!("cat v f2 {long}")).ok().text(), "goodgood too");

    // What succeeds replaces: other names of the file keep the old content.
    flip(&stored, 6 * 4096 + 17);
    std::fs::hard_link(b.path("o/f2"), b.path("o/link")).unwrap();
    std::fs::set_permissions(b.path("f1"), std::fs::Permissions::from_mode(0o640)).unwrap();
    b.run(&format!("cp v f1 vault:{long}")).ok();
    b.run(&format!("cp v vault:{long} o/f2")).ok();
    same(&b.path("f1"), &b.path("o/f2"));
    assert_eq!(std::fs::read(b.path("o/link")).unwrap(), b"good");
    assert_eq!(names(&b.path("o")), ["f1", "f2", "link", &long]);
    b.run("check v").ok();
}

#[test]
fn files_are_read_to_their_end() {
    let b = Bench::new();
    b.run("init v").ok();
    // stat says 0 bytes of the first and a page of the second.
    for path in ["/proc/version", "/sys/devices/system/cpu/online"] {
        let Ok(content) = std::fs::read(path) else {
            eprintln!("no {path}: nothing to test");
            continue;
        };
        b.run(&format!("cp v {path} vault:f")).ok();
        assert!(!content.is_empty() && b.run("cat v f").ok().out == content, "{path}");
    }
    let hole = std::fs::File::create(b.path("hole")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&hole, b"begin", 0).unwrap();
    hole.set_len(50 << 20).unwrap();
    b.run("cp v hole vault:").ok();
    b.run("cp v vault:hole out").ok();
    same(&b.path("hole"), &b.path("out"));
    assert!(b.path("out").metadata().unwrap().blocks() * 512 < 1 << 20);
}

#[test]
fn the_vaults_own_directory_is_neither_copied_nor_written() {
    let b = Bench::new();
    b.dir("w/v");
    b.run("init w/v").ok();
    b.dir("t/v");
    b.file("t/v/f", b"plain");
    b.file("w/f", b"plain");
    b.run("cp -r w/v t vault:").ok();
    let stored = b.stored("w/v", "t").canonicalize().unwrap();
    let (before, inside) = (names(&b.path("w/v")), names(&stored));
    // Below what is copied it is left out, by whatever name it is met.
    for (source, target) in [("w", "b"), ("w/.", "c")] {
        b.run(&format!("cp -r w/v {source} vault:{target}")).ok().says("left out");
        assert_eq!(b.run(&format!("ls -R w/v {target}")).ok().text(), format!("{target}/f\n"));
    }
    // Named, it is refused; what is named beside it is copied.
    std::os::unix::fs::symlink("w/v", b.path("link")).unwrap();
    for source in ["w/v", "w/v/.", "link/", "w/v/lamassu.vault", &stored.display().to_string()] {
        b.run(&format!("cp -r w/v {source} vault:no")).code(2).says("own directory");
    }
    b.run("cp -r w/v w/v w/f vault:t").code(2).says("own directory");
    assert_eq!(b.run("cat w/v t/f").ok().text(), "plain");
    b.run("cp w/v link vault:link").ok();
    assert_eq!(b.run("ls w/v").ok().text(), "b\nc\nlink\nt\n");
    // Nothing goes into it; a directory of its name, on the way, is no way in either.
    for target in ["w/v", "w/v/", "w/v/x", "link", "link/x", &stored.join("x").display().to_string()] {
        b.run(&format!("cp w/v vault:t/f {target}")).code(2).says("own directory");
    }
    b.run("cp -r w/v vault:t w").ok();
    b.run("cp -r w/v vault:t/v w").code(2).says("own directory");
    b.run(&format!("cp --orphan w/v {} w/v/x", b.stored("w/v", "t/f").display())).code(2).says("own directory");
    let file = b.stored("w/v", "t/f");
    b.run(&format!("cp --header w/v/lamassu.vault {0} {0}", file.display())).code(2).says("same file");
    assert_eq!(names(&stored).len(), inside.len() + 1, "t/f alone");
    assert_eq!(names(&b.path("w/v")).len(), before.len() + 3, "b, c and link");
    b.run("check w/v").ok();
}

#[test]
fn an_attribute_that_is_not_kept_is_named_once() {
    let b = Bench::new();
    b.run("init v").ok();
    let file = b.file("f", b"x");
    let ram = b.dir("ram");
    let set = rustix::fs::setxattr(&file, "user.colour", b"octarine", rustix::fs::XattrFlags::empty());
    let mounted = std::process::Command::new("mount").args(["-t", "ramfs", "none"]).arg(&ram).output();
    if set.is_err() || !mounted.is_ok_and(|o| o.status.success()) {
        eprintln!("no extended attributes in {file:?}, or cannot mount a ramfs: nothing to test");
        return;
    }
    b.run("cp v f vault:").ok();
    let ran = b.run("cp v vault:f ram/f").ok().says("attribute \"user.colour\" of vault:f is not kept");
    assert_eq!(ran.err.matches("not supported").count(), 1, "{}", ran.err);
    assert_eq!(std::fs::read(b.path("ram/f")).unwrap(), b"x");
}

#[test]
fn a_check_changes_nothing_and_a_repair_mends() {
    let b = filled("aes --anchor none");
    // A name that does not open: moved to lamassu.lost by a repair, and then all is well.
    let stored = b.stored("v", "tree/small");
    let mut name = stored.file_name().unwrap().to_str().unwrap().to_string();
    name.replace_range(3..4, if &name[3..4] == "A" { "B" } else { "A" });
    std::fs::rename(&stored, stored.with_file_name(&name)).unwrap();
    b.run("check v").code(26);
    assert!(stored.with_file_name(&name).exists());
    let content = b.run(&format!("cat --orphan v {}", stored.with_file_name(&name).display())).ok().out;
    let repaired = b.run("check --repair --json v").code(27).json();
    assert_eq!(repaired["status"], "repaired");
    b.run("check v").ok();
    // There it can be found, and read.
    assert!(repaired["problems"][0]["text"].as_str().unwrap().contains(&format!("lamassu.lost/{name}")));
    assert!(b.run(&format!("cat --orphan v v/lamassu.lost/{name}")).ok().out == content && !content.is_empty());
}

#[test]
fn a_signal_ends_the_program_and_leaves_the_vault_whole() {
    use std::io::Write;
    let b = Bench::new();
    b.run("init v").ok();
    b.run_with("cp v - vault:f", b"before").ok();
    let mut child = b
        .command(["cp", "v", "-", "vault:f"])
        .stdin(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    // More than a pipe holds: once it is written, the copy is under way.
    input.write_all(&noise(1 << 20, 1)).unwrap();
    let killed = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    assert_eq!(child.wait().unwrap().code(), Some(15));
    drop(input);
    b.run("check v").ok();
    assert_eq!(b.run("cat v f").ok().text(), "before", "it is replaced by what is complete");
    assert_eq!(b.run("ls v").ok().text(), "f\n");
    b.run_with("cp v - vault:f", b"again").ok();
    assert_eq!(b.run("cat v f").ok().text(), "again");
}

#[test]
fn a_full_store_is_5() {
    let b = Bench::new();
    let store = b.dir("store");
    let mounted =
        std::process::Command::new("mount").args(["-t", "tmpfs", "-o", "size=2m", "none"]).arg(&store).output();
    if !mounted.is_ok_and(|o| o.status.success()) {
        eprintln!("cannot mount a tmpfs: nothing to test");
        return;
    }
    let made = b.run("init --json store/v").ok().json();
    assert_eq!(made["store"]["type"], "tmpfs");
    assert_eq!(made["warnings"].as_array().unwrap().len(), 1);
    b.file("big", &noise(5 << 20, 1));
    b.run_with("cp store/v - vault:f", b"content").ok();
    b.run("cp store/v big vault:").code(5).says("No space left");
    assert_eq!(b.run("cat store/v f").ok().text(), "content");
}
