//! Headers that were replaced or destroyed: what the store still holds of them.

use crate::destroy::{DESTROY, found, injected_at, killed_at, receipt, straced, vault, wrapped};
use crate::support::{Bench, Ran};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The raw image of a store: nothing that ever wrapped the keys stands in it any more, not in free blocks either.
fn scanned(mkfs: &[&str], megabytes: u64) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not run: mounting an image takes root");
        return;
    }
    let b = Bench::new();
    let image = b.path("image");
    std::fs::File::create(&image).unwrap().set_len(megabytes << 20).unwrap();
    let must = |program: &str, args: &[&str]| {
        let out = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
        assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    };
    let (image_arg, store) = (image.display().to_string(), b.dir("store").display().to_string());
    must(mkfs[0], &[&mkfs[1..], &[image_arg.as_str()]].concat());
    must("mount", &["-o", "loop", &image_arg, &store]);
    let mut strings = Vec::new();
    let note = |strings: &mut Vec<String>| {
        must("sync", &["-f", &store]);
        strings.extend(wrapped(&b.path("store/v/lamassu.vault")));
    };
    // A header that was replaced many times, with the means that leave files beside it.
    b.run("init store/v").ok();
    note(&mut strings);
    let second = b.key("second");
    b.run(&format!("key add -n {second} store/v")).ok();
    note(&mut strings);
    b.run(&format!("key change -k {second} -n {second} store/v")).ok();
    note(&mut strings);
    b.run("key backup -k raw:file:key store/v copy").ok();
    b.run("key restore copy store/v").ok();
    assert!(b.path("store/v/lamassu.vault.replaced").exists());
    b.run("key rotate --outer store/v").ok();
    note(&mut strings);
    assert!(found(&strings, &std::fs::read(&image).unwrap()) > 4, "the scan finds what is there");
    b.run("key destroy --yes store/v").ok();
    must("umount", &[&store]);
    assert_eq!(found(&strings, &std::fs::read(&image).unwrap()), 0, "{mkfs:?}");
}

#[test]
fn an_image_of_ext4_holds_no_wrapped_key_afterwards() {
    scanned(&["mkfs.ext4", "-q"], 64);
}

#[test]
fn an_image_of_xfs_holds_no_wrapped_key_afterwards() {
    scanned(&["mkfs.xfs", "-q"], 320);
}

/// What an earlier change left of the header before it: `key destroy` overwrites it, also where the store may lose
/// names, or another name leads to it.
#[test]
fn what_a_killed_change_left_is_overwritten_in_every_store() {
    let b = Bench::new();
    b.run("init below").ok();
    b.dir("m");
    b.run("mount below m").ok();
    // A FUSE file system, and an ordinary one where the leftover has another name.
    for (store, is_linked) in [("m/", false), ("", true)] {
        b.run(&format!("init {store}v")).ok();
        let (header, left) =
            (b.path(&format!("{store}v/lamassu.vault")), b.path(&format!("{store}v/lamassu.vault.replacing")));
        std::fs::copy(&header, &left).unwrap();
        let held = std::fs::File::open(&left).unwrap();
        if is_linked {
            std::fs::hard_link(&left, b.path("linked")).unwrap();
        }
        let old = wrapped(&header);
        b.run(&format!("key destroy --yes {store}v")).ok();
        let mut bytes = vec![0; 1 << 20];
        let len = std::os::unix::fs::FileExt::read_at(&held, &mut bytes, 0).unwrap();
        assert!(len > 0, "{store}");
        assert_eq!(found(&old, &bytes[..len]), 0, "{store}");
    }
    b.unmount("m");
}

/// A header that was replaced is overwritten, or a name still leads to it: also where the program is killed in between.
#[test]
fn no_kill_leaves_an_old_header_whole_without_a_name() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let b = Bench::new();
    b.run("init v").ok();
    b.run("key backup v copy").ok();
    b.run("key restore copy v").ok();
    let (mut seen, mut kept) = (0, 0);
    for line in ["key change -n raw:file:key v", "key restore --force copy v"] {
        for (call, n) in ["rename", "unlink", "fsync", "fallocate"].iter().flat_map(|c| (1..8).map(move |n| (*c, n))) {
            let step = format!("{line}: {call} {n}");
            let before: Vec<_> = ["v/lamassu.vault", "v/lamassu.vault.replaced", "v/lamassu.vault.replacing"]
                .into_iter()
                .filter_map(|name| Some((wrapped_in(&b.path(name))?, std::fs::File::open(b.path(name)).unwrap())))
                .collect();
            killed_at(&b, line, call, n);
            for (strings, file) in before {
                let mut bytes = vec![0; 1 << 20];
                let len = file.read_at(&mut bytes, 0).unwrap();
                let is_whole = found(&strings, &bytes[..len]) > 0;
                assert!(!is_whole || file.metadata().unwrap().nlink() > 0, "{step}");
                seen += usize::from(!is_whole);
            }
            kept += usize::from(b.path("v/lamassu.vault.replacing").exists());
            b.run("ls v").ok();
        }
        // The next change takes away what was left.
        b.run("key change -n raw:file:key v").ok();
        assert!(!b.path("v/lamassu.vault.replacing").exists(), "{line}");
    }
    assert!(seen > 10 && kept > 3, "{seen} {kept}");
    // What is overwritten on the way is no backup to restore from.
    b.run("key restore v/lamassu.vault.replaced v").code(2).says("copy it");
}

/// A restore gives the header in place a second name, and then fails, or is killed: a slot that is removed afterwards
/// is removed there too.
#[test]
fn a_restore_that_failed_keeps_no_slot_that_is_removed_later() {
    let mut failed = 0;
    for (call, n) in ["rename", "fsync"].iter().flat_map(|c| (1..8).map(move |n| (*c, n))) {
        for how in ["error=EIO", "signal=KILL"] {
            let step = format!("{how} {call} {n}");
            let b = Bench::new();
            b.run("init v").ok();
            b.run("key backup v copy").ok();
            let second = b.key("second");
            b.run(&format!("key add -n {second} v")).ok();
            let before = std::fs::read(b.path("v/lamassu.vault")).unwrap();
            let header: Value = serde_json::from_slice(&before).unwrap();
            let slot = header["slots"][1]["wrapped"].as_str().unwrap().to_string();
            let restored = injected_at(&b, "key restore copy v", call, n, how);
            if restored.code == 0 || std::fs::read(b.path("v/lamassu.vault")).unwrap() != before {
                continue;
            }
            failed += 1;
            b.run("key remove v 2").ok();
            for file in std::fs::read_dir(b.path("v")).unwrap() {
                let path = file.unwrap().path();
                if path.is_file() {
                    assert_eq!(
                        found(std::slice::from_ref(&slot), &std::fs::read(&path).unwrap()),
                        0,
                        "{step}: {path:?}"
                    );
                }
            }
            // Nor has it a name elsewhere, which would be said.
            b.run(&format!("ls -k {second} v")).code(12);
        }
    }
    assert!(failed > 5, "{failed}");
}

/// A person's own link to the header: it is not overwritten, and that is said.
#[test]
fn a_header_with_another_name_is_told_of() {
    let b = Bench::new();
    b.run("init v").ok();
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).ok();
    std::fs::hard_link(b.path("v/lamassu.vault"), b.path("mine")).unwrap();
    b.run("key remove v 2").ok().says("another name");
    let told = b.run(&format!("key add -n {second} v")).ok();
    assert!(!told.err.contains("another name"), "{}", told.err);
    b.run("key backup v copy").ok();
    let told = b.run("key restore copy v").ok();
    assert!(!told.err.contains("another name"), "{}", told.err);
}

/// Ctrl-C while the old header is overwritten: what was begun is finished.
#[test]
fn a_signal_leaves_no_old_header() {
    for line in [
        "key add -n raw:file:second v",
        "key change -n raw:file:key v",
        "key remove v 2",
        "key renew v",
        "key admin rotate v",
        "key rotate --outer v",
        "key restore --force copy v",
    ] {
        for (call, n) in [("pwrite64", 1), ("pwrite64", 2), ("fallocate", 1), ("unlink", 1), ("unlink", 2)] {
            let b = Bench::new();
            b.run("init v").ok();
            b.key("second");
            if line.contains("restore") {
                b.run("key backup v copy").ok();
                b.run("key restore copy v").ok();
            }
            b.run("key add -n raw:file:second v").ok();
            let header = b.path("v/lamassu.vault");
            let before = (wrapped(&header), std::fs::File::open(&header).unwrap());
            let text = std::fs::read(&header).unwrap();
            let ran = injected_at(&b, line, call, n, "signal=INT");
            assert!(!b.path("v/lamassu.vault.replacing").exists(), "{line}: {call} {n}");
            // Old headers alone are punched: then it is too late to stop.
            if ran.code == 15 && call != "fallocate" {
                assert_eq!(std::fs::read(&header).unwrap(), text, "{line}: {call} {n}");
                continue;
            }
            ran.ok();
            let mut bytes = vec![0; 1 << 20];
            let len = std::os::unix::fs::FileExt::read_at(&before.1, &mut bytes, 0).unwrap();
            // A restore keeps it.
            assert!(line.contains("restore") || found(&before.0, &bytes[..len]) == 0, "{line}: {call} {n}");
        }
    }
}

/// What a header's slots wrap, where it is one.
fn wrapped_in(header: &Path) -> Option<Vec<String>> {
    let bytes = std::fs::read(header).ok()?;
    serde_json::from_slice::<Value>(&bytes).ok()?;
    Some(wrapped(header))
}

/// What a killed change has left is not removed before it is overwritten: another change does that.
#[test]
fn an_old_header_that_cannot_be_opened_keeps_its_name() {
    use std::os::unix::fs::FileExt;
    let b = Bench::new();
    b.run("init v").ok();
    let (header, left) = (b.path("v/lamassu.vault"), b.path("v/lamassu.vault.replacing"));
    std::fs::copy(&header, &left).unwrap();
    let (old, held) = (wrapped(&header), std::fs::File::open(&header).unwrap());
    let second = b.key("second");
    let at = left.display().to_string();
    let options =
        ["-o", "/dev/null", "-P", &at, "-P", "v/lamassu.vault.replacing", "-e", "inject=open,openat:error=EIO"];
    straced(&b, &format!("key add -n {second} v"), &options).ok();
    assert!(found(&old, &std::fs::read(&left).unwrap()) > 0);
    let mut bytes = vec![0; 1 << 20];
    let len = held.read_at(&mut bytes, 0).unwrap();
    assert_eq!(found(&old, &bytes[..len]), 0, "the one that was replaced");
    let held = std::fs::File::open(&left).unwrap();
    b.run("key remove v 2").ok();
    assert!(!left.exists());
    let len = held.read_at(&mut bytes, 0).unwrap();
    assert_eq!(found(&old, &bytes[..len]), 0);
}

/// A restore that fails when its history is in use has not touched what an earlier one has kept.
#[test]
fn a_restore_that_is_refused_loses_no_kept_header() {
    let b = Bench::new();
    b.run("init v").ok();
    b.run("key backup v copy").ok();
    b.run("key restore copy v").ok();
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).ok();
    let files = ["v/lamassu.vault", "v/lamassu.vault.replaced"];
    let now = || files.map(|file| std::fs::read(b.path(file)).unwrap());
    let before = now();
    let history = std::fs::File::open(b.path("v/lamassu.history")).unwrap();
    history.lock().unwrap();
    assert_ne!(b.run("key restore copy v").code, 0);
    assert_eq!(now(), before);
    drop(history);
    b.run("key restore copy v").ok();
    assert_eq!(now()[1], before[0]);
}

/// Where there are no hard links, a destruction that is killed leaves the header its second name alone. A restore
/// compares it with the copy.
#[test]
fn a_header_that_has_its_second_name_alone_is_not_lost() {
    let b = Bench::new();
    vault(&b);
    b.run("key backup v copy").ok();
    b.run("key rotate --outer v").ok();
    let newest = std::fs::read(b.path("v/lamassu.vault")).unwrap();
    let is_left = |n| {
        let kill = format!("inject=rename:signal=KILL:when={n}");
        let trace = ["-e", "trace=link,linkat,rename", "-e", "inject=link,linkat:error=EPERM", "-e", &kill];
        straced(&b, "key destroy --yes v", &[&["-o", "/dev/null"], &trace[..]].concat());
        !b.path("v/lamassu.vault").exists()
    };
    assert!((1..20).any(is_left));
    b.run("ls v").code(6).says("lamassu.vault.replacing");
    b.run("key restore copy v").code(28);
    assert_eq!(std::fs::read(b.path("v/lamassu.vault")).unwrap(), newest);
    b.run("cat v x").ok();
}

/// Who may not write a header may still be its owner: then it is overwritten all the same, and a destruction comes to
/// its end.
#[test]
fn a_header_that_is_read_only_is_overwritten_too() {
    use std::os::unix::fs::{FileExt, PermissionsExt};
    let b = Bench::new();
    vault(&b);
    let old =
        |b: &Bench| (wrapped(&b.path("v/lamassu.vault")), std::fs::File::open(b.path("v/lamassu.vault")).unwrap());
    let overwritten = |(strings, file): (Vec<String>, std::fs::File)| {
        let mut bytes = vec![0; 1 << 20];
        let len = file.read_at(&mut bytes, 0).unwrap();
        assert_eq!(found(&strings, &bytes[..len]), 0);
    };
    let second = b.key("second");
    for line in [format!("key add -n {second} v"), "key destroy --yes v".into()] {
        std::fs::set_permissions(b.path("v/lamassu.vault"), std::fs::Permissions::from_mode(0o400)).unwrap();
        let before = old(&b);
        as_a_user(&b, &line).ok();
        overwritten(before);
        assert!(!b.path("v/lamassu.vault.replacing").exists());
    }
    b.run("ls v").code(52);
}

/// Runs a line as somebody whom modes bind: root's capabilities are dropped.
fn as_a_user(b: &Bench, line: &str) -> Ran {
    let plain = b.command(line.split_whitespace());
    let mut bound = Command::new("setpriv");
    bound.args(["--bounding-set=-all", "--inh-caps=-all"]).arg(plain.get_program()).args(plain.get_args());
    bound.current_dir(plain.get_current_dir().unwrap()).envs(plain.get_envs().filter_map(|(k, v)| Some((k, v?))));
    bound.output().expect("setpriv").into()
}

/// Whoever can write the store links a file of the host where old headers are kept.
#[test]
fn a_file_that_is_linked_where_old_headers_are_kept_is_not_wiped() {
    let b = Bench::new();
    let public = vault(&b);
    let host = b.file("host", &[b'A'; 5000]);
    for name in ["replaced", "replacing"] {
        std::fs::hard_link(&host, b.path(&format!("v/lamassu.vault.{name}"))).unwrap();
    }
    b.run(&format!("{DESTROY} v")).ok().says("\"lamassu.vault.replaced\" in the vault's directory is no header");
    assert_eq!(std::fs::read(&host).unwrap(), [b'A'; 5000]);
    // One with the name in place of the old header, of a run that was cut off.
    b.run("ls v").code(52);
    assert!(receipt(&b, &public)["complete"] == true);
    let left = b.path("v/lamassu.vault.replacing");
    if !left.exists() {
        std::fs::hard_link(&host, left).unwrap();
    }
    b.run("key destroy --yes v").code(52);
    assert_eq!(std::fs::read(&host).unwrap(), [b'A'; 5000]);
}

/// An old header that a restore has kept cannot be read any more, and has another name: that does not keep the one that
/// was destroyed.
#[test]
fn an_old_header_with_a_bad_block_does_not_stop_a_destruction() {
    use std::os::unix::fs::FileExt;
    for is_linked in [true, false] {
        let b = Bench::new();
        vault(&b);
        b.run("key backup v copy").ok();
        b.run("key restore copy v").ok();
        let kept = b.path("v/lamassu.vault.replaced");
        if is_linked {
            std::fs::hard_link(&kept, b.path("linked")).unwrap();
        }
        let (old, held) =
            (wrapped(&b.path("v/lamassu.vault")), std::fs::File::open(b.path("v/lamassu.vault")).unwrap());
        let at = kept.display().to_string();
        let options = ["-o", "/dev/null", "-P", &at, "-e", "trace=pread64", "-e", "inject=pread64:error=EIO"];
        let done = straced(&b, "key destroy --yes v", &options).ok();
        assert_eq!(done.err.contains("cannot be read"), is_linked, "{}", done.err);
        assert_eq!(kept.exists(), is_linked);
        assert!(!b.path("v/lamassu.vault.replacing").exists());
        let mut bytes = vec![0; 1 << 20];
        let len = held.read_at(&mut bytes, 0).unwrap();
        assert!(len > 0 && found(&old, &bytes[..len]) == 0);
        b.run("key destroy --yes v").code(52);
    }
}

/// It cannot be found out whether the old header may be overwritten: that it stays is said.
#[test]
fn an_old_header_that_is_not_overwritten_is_told_of() {
    let b = Bench::new();
    b.run("init v").ok();
    let second = b.key("second");
    b.run(&format!("key add -n {second} v")).ok();
    let options = ["-o", "/dev/null", "-e", "trace=statfs", "-e", "inject=statfs:error=EIO"];
    straced(&b, "key remove v 2", &options).ok().says("could not be overwritten");
    b.run(&format!("ls -k {second} v")).code(12);
    let told = b.run(&format!("key add -n {second} v")).ok();
    assert!(!told.err.contains("could not be overwritten"), "{}", told.err);
}
