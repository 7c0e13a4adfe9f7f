//! What a hostile or failing store does to names, records, targets, attributes and content: an error for what it
//! concerns, named by `check`, and the rest stays as it is.
//!
//! Without an anchor, so that it is seals and hashes that find it: in an anchored vault most of this is `stale` before
//! it is opened (`matrix`, `entries` and `anchored` play that).

use crate::common;

use common::local::Lab;
use common::*;
use lamassu_format::header::NameMode;
use lamassu_format::name::{DIR_RECORD, LOST};
use lamassu_vault::*;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

impl Lab {
    /// With `a/file`, `a/link`, `b/`, `top`.
    fn filled() -> Lab {
        let lab = Lab::new();
        let v = lab.open();
        v.dir("a");
        v.dir("b");
        v.put("a/file", &(0..1_000_000u32).map(|i| (i / 4096) as u8).collect::<Vec<_>>());
        v.put("top", b"on top");
        v.symlink(v.ino("a"), n("link"), b"target", me()).unwrap();
        v.set_xattr(v.ino("a/file"), n("user.note"), b"value", SetXattr::Any).unwrap();
        v.clean();
        v.close().unwrap();
        lab
    }

    /// The problems a check finds, as (kind, path).
    fn problems(&self, repair: bool) -> Vec<check::Problem> {
        self.open().check(&[], repair, &Quiet).unwrap().problems
    }

    fn one_problem(&self, kind: &str) -> check::Problem {
        let problems = self.problems(false);
        assert_eq!(problems.len(), 1, "{problems:#?}");
        assert_eq!(problems[0].kind, kind);
        assert!(!problems[0].repaired);
        problems[0].clone()
    }

    /// Repairs; what is left is clean.
    fn mend(&self) {
        let problems = self.problems(true);
        assert!(!problems.is_empty() && problems.iter().all(|p| p.repaired), "{problems:#?}");
        self.open().clean();
    }
}

fn flip(path: &Path, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    byte[0] ^= 1;
    file.write_all_at(&byte, at).unwrap();
}

/// Replaces the target of a symbolic link of the store.
fn retarget(path: &Path, change: impl FnOnce(String) -> String) {
    let target = std::fs::read_link(path).unwrap().into_os_string().into_string().unwrap();
    std::fs::remove_file(path).unwrap();
    symlink(change(target), path).unwrap();
}

fn flipped(mut text: String) -> String {
    let other = if text.ends_with("AA") { "BA" } else { "AA" };
    text.truncate(text.len() - 4);
    text.push_str(other);
    text.push_str(other);
    text
}

#[test]
fn a_flipped_bit_costs_its_block_alone_and_is_named() {
    let lab = Lab::filled();
    flip(&lab.stored("a/file"), 4096 * 21 + 7);
    let p = lab.one_problem("block-hash");
    assert_eq!((p.segment, p.page, p.block), (Some(0), Some(0), Some(20)));
    assert_eq!(p.path.as_deref(), Some("a/file"));
    assert!(p.stored.ends_with(lab.stored("a/file").file_name().unwrap().to_str().unwrap()));
    let v = lab.open();
    let h = v.open_file(v.ino("a/file"), RO).unwrap();
    let mut buf = vec![0; 4096];
    assert!(matches!(v.read(h, 20 * 4096 + 5, &mut buf), Err(VaultError::Store(_))));
    assert_eq!(v.read(h, 19 * 4096, &mut buf).unwrap(), 4096);
    assert_eq!(v.read(h, 21 * 4096, &mut buf).unwrap(), 4096);
    v.release(h).unwrap();
    // Repair does not pretend.
    assert!(lab_is_damaged(&v));
}

fn lab_is_damaged(v: &Vault) -> bool {
    v.check(&[], true, &Quiet).unwrap().is_damaged()
}

#[test]
fn a_file_without_a_first_page_still_has_a_stat() {
    let lab = Lab::filled();
    flip(&lab.stored("a/file"), 100);
    flip(&lab.stored("top"), 100);
    let v = lab.open();
    assert!(v.find("a/file").unwrap().attr.size > 0);
    assert!(v.find("top").unwrap().attr.size > 0);
    let h = v.open_file(v.ino("top"), RO).unwrap();
    assert!(v.read(h, 0, &mut [0; 10]).is_err());
    v.release(h).unwrap();
    let kinds: Vec<_> = v.check(&[], false, &Quiet).unwrap().problems.into_iter().map(|p| p.kind).collect();
    assert_eq!(kinds, ["page-seal", "page-seal"]);
    // It can be emptied, or removed, and all is well.
    v.put("a/file", b"new");
    v.unlink(ROOT, n("top")).unwrap();
    v.clean();
}

#[test]
fn a_directory_without_its_record_is_an_error_and_can_be_put_away() {
    for change in 0..5 {
        let lab = Lab::filled();
        let record = lab.stored("a").join(DIR_RECORD);
        let other = lab.stored("b").join(DIR_RECORD);
        match change {
            0 => std::fs::remove_file(&record).unwrap(),
            1 => retarget(&record, flipped),
            2 => retarget(&record, |_| "not base64!".to_owned()),
            // In the nonce: as if it were sealed under a key that is not loaded. The root's record opens, so that is
            // not why.
            4 => retarget(&record, |text| format!("{}{}", if text.starts_with('A') { 'B' } else { 'A' }, &text[1..])),
            _ => {
                // The record of another directory opens, but no name does.
                let target = std::fs::read_link(other).unwrap().into_os_string().into_string().unwrap();
                retarget(&record, |_| target);
            }
        }
        let v = lab.open();
        assert_eq!(v.find("a").unwrap().attr.kind, Kind::Dir);
        if change != 3 {
            assert!(matches!(v.find("a/file"), Err(VaultError::Damaged { what: "directory record", .. })));
            assert!(matches!(v.open_dir(v.ino("a")), Err(VaultError::Damaged { .. })));
        } else {
            assert!(matches!(v.find("a/file"), Err(VaultError::NotFound)));
            assert!(v.list("a").is_empty());
            assert!(matches!(v.rmdir(ROOT, n("a")), Err(VaultError::NotEmpty)));
        }
        assert_eq!(v.get("top"), b"on top");
        drop(v);
        if change != 3 {
            assert_eq!(lab.one_problem("directory-record").path.as_deref(), Some("a"));
        } else {
            assert!(lab.problems(false).iter().all(|p| p.kind == "name"));
        }
        lab.mend();
        let lost = std::fs::read_dir(lab.dir.path().join(LOST)).unwrap().count();
        assert_eq!(lost, if change != 3 { 1 } else { 2 });
    }
}

#[test]
fn the_roots_record_is_needed_and_never_moved() {
    let lab = Lab::filled();
    retarget(&lab.dir.path().join(DIR_RECORD), flipped);
    let v = lab.open();
    assert!(matches!(v.lookup(ROOT, n("top")), Err(VaultError::Damaged { .. })));
    assert_eq!(v.getattr(ROOT, None).unwrap().kind, Kind::Dir);
    let report = v.check(&[], true, &Quiet).unwrap();
    assert!(report.is_damaged());
    assert_eq!(report.files, 2, "content is verified without names");
}

#[test]
fn whoever_serves_a_vault_can_ask_for_the_roots_record() {
    for change in 0..3 {
        let lab = Lab::filled();
        let record = lab.dir.path().join(DIR_RECORD);
        lab.open().verify_root().unwrap();
        match change {
            0 => std::fs::remove_file(&record).unwrap(),
            1 => retarget(&record, flipped),
            _ => retarget(&record, |_| "not base64!".to_owned()),
        }
        for v in [lab.open(), lab.recipe.open_read_only(&lab.backend).unwrap()] {
            let refused = v.verify_root();
            let named = |e: &VaultError| match e {
                VaultError::Damaged { what, stored } => (*what, stored.as_str()) == ("directory record", DIR_RECORD),
                _ => false,
            };
            assert!(refused.as_ref().is_err_and(named), "{refused:?}");
        }
    }
    // Plain names have no records.
    let backend = memory();
    Recipe::plain().make(&backend).verify_root().unwrap();
}

#[test]
fn names_that_do_not_open_are_listed_and_their_content_stays() {
    let lab = Lab::filled();
    let file = lab.stored("a/file");
    let strange = file.with_file_name(flipped(file.file_name().unwrap().to_str().unwrap().to_owned()));
    std::fs::rename(&file, &strange).unwrap();
    let v = lab.open();
    assert!(matches!(v.find("a/file"), Err(VaultError::NotFound)));
    assert_eq!(v.list("a"), ["link"]);
    let relative = strange.strip_prefix(lab.dir.path()).unwrap();
    assert!(matches!(v.plain_path(relative), Err(VaultError::Damaged { what: "name", .. })));
    drop(v);
    let p = lab.one_problem("name");
    assert_eq!((p.path, Path::new(&p.stored)), (None, relative));
    lab.mend();
    let lost = lab.dir.path().join(LOST).join(strange.file_name().unwrap());
    let backing = lab.backend.root().open_dir(n(LOST)).unwrap().open_file(lost.file_name().unwrap(), false).unwrap();
    let file = open_orphan(backing, &lab.recipe.header(), lab.recipe.ring(), &options(true), "lost").unwrap();
    let mut buf = vec![0; 1_000_000];
    assert_eq!(file.read_at(0, &mut buf).unwrap(), 1_000_000);
    assert_eq!(buf[4096 * 9], 9);
}

#[test]
fn a_file_moved_by_hand_to_another_directory_has_no_name_there() {
    let lab = Lab::filled();
    let file = lab.stored("a/file");
    std::fs::rename(&file, lab.stored("b").join(file.file_name().unwrap())).unwrap();
    assert!(lab.open().list("b").is_empty());
    assert_eq!(lab.one_problem("name").path, None);
}

/// What is in `lamassu.lost`, sorted.
fn lost(lab: &Lab) -> Vec<String> {
    let entries = std::fs::read_dir(lab.dir.path().join(LOST)).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_put_away_takes_its_companions_along() {
    // A directory's record is exchanged for another's: no name in it opens any more.
    let lab = Lab::filled();
    let v = lab.open();
    v.symlink(v.ino("a"), n("far"), &[b't'; 3000], me()).unwrap();
    v.put(&format!("a/{}", "x".repeat(250)), b"long");
    drop(v);
    let before = std::fs::read_dir(lab.stored("a")).unwrap().count();
    let theirs = std::fs::read_link(lab.stored("b").join(DIR_RECORD)).unwrap().into_os_string().into_string().unwrap();
    retarget(&lab.stored("a").join(DIR_RECORD), |_| theirs);
    // One repair is enough, and nothing is cleared away that the entries need.
    lab.mend();
    let lost = lost(&lab);
    for prefix in ["lamassu.long.", "lamassu.name.", "lamassu.link."] {
        assert_eq!(lost.iter().filter(|name| name.starts_with(prefix)).count(), 1, "{prefix}: {lost:?}");
    }
    assert_eq!(lost.len(), before - 1, "everything but the record");
    assert!(lab.open().list("a").is_empty());
}

#[test]
fn companions_missing_wrong_or_left_over() {
    let long = "x".repeat(255);
    for change in 0..4 {
        let lab = Lab::filled();
        let v = lab.open();
        v.put(&long, b"long");
        drop(v);
        let entry = lab.stored(&long);
        let name = entry.file_name().unwrap().to_str().unwrap();
        let companion = entry.with_file_name(name.replace("lamassu.long.", "lamassu.name."));
        match change {
            0 => std::fs::remove_file(&companion).unwrap(),
            1 => retarget(&companion, flipped),
            2 => {
                std::fs::remove_file(&companion).unwrap();
                std::fs::write(&companion, b"!").unwrap();
            }
            _ => std::fs::remove_file(&entry).unwrap(),
        }
        if change == 3 {
            let p = lab.one_problem("orphan-companion");
            assert!(p.harmless);
            lab.mend();
            assert!(!companion.is_symlink());
            continue;
        }
        let v = lab.open();
        assert_eq!(v.list(""), ["a", "b", "top"], "the name is not known");
        assert_eq!(v.get(&long), b"long", "but it can be asked for");
        let problems = v.check(&[], false, &Quiet).unwrap().problems;
        assert_eq!(problems[0].kind, "companion");
        // Creating the name again mends the companion.
        assert!(matches!(v.create(ROOT, n(&long), 0o644, RW, me()), Err(VaultError::Exists)));
        assert_eq!(v.list("").len(), 4);
        v.clean();
    }
}

#[test]
fn link_targets_are_authenticated() {
    for change in 0..3 {
        let lab = Lab::filled();
        let v = lab.open();
        v.symlink(ROOT, n("long"), &[b't'; 4000], me()).unwrap();
        drop(v);
        let (link, path) = match change {
            0 => (lab.stored("a/link"), "a/link"),
            1 => (lab.stored("long"), "long"),
            _ => {
                let rest = std::fs::read_dir(lab.dir.path()).unwrap().map(|e| e.unwrap().path());
                (rest.into_iter().find(|p| p.to_string_lossy().contains("lamassu.link.")).unwrap(), "long")
            }
        };
        if change < 2 {
            retarget(&link, flipped);
        } else {
            std::fs::write(&link, flipped(std::fs::read_to_string(&link).unwrap())).unwrap();
        }
        let v = lab.open();
        let ino = v.ino(path);
        assert!(matches!(v.readlink(ino), Err(VaultError::Damaged { what: "link target", .. })));
        drop(v);
        assert_eq!(lab.one_problem("symlink").path.as_deref(), Some(path));
        // It can be removed like any other.
        let v = lab.open();
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        v.unlink(v.ino(parent), n(name)).unwrap();
        v.check(&[], true, &Quiet).unwrap();
        v.clean();
    }
}

#[test]
fn attributes_are_authenticated_and_bound_to_their_names() {
    let lab = Lab::filled();
    let v = lab.open();
    v.set_xattr(v.ino("a/file"), n("user.other"), b"other", SetXattr::Any).unwrap();
    let stored = v.stored_path(n("a/file")).unwrap();
    let dir = lab.backend.root().open_dir(stored.parent().unwrap().as_os_str()).unwrap();
    let dir = dir.hold(stored.file_name().unwrap()).unwrap();
    let attrs: Vec<_> =
        dir.list_xattr().unwrap().into_iter().filter(|a| a.as_bytes().starts_with(b"user.lamassu.")).collect();
    let values: Vec<_> = attrs.iter().map(|a| dir.get_xattr(a).unwrap()).collect();
    // Exchanged between names: neither opens.
    dir.set_xattr(&attrs[0], &values[1], 0).unwrap();
    dir.set_xattr(&attrs[1], &values[0], 0).unwrap();
    dir.set_xattr(n("user.lamassu.AAAA"), b"", 0).unwrap();
    dir.set_xattr(n("user.native"), b"not ours", 0).unwrap();
    for key in ["user.note", "user.other"] {
        assert!(matches!(v.get_xattr(v.ino("a/file"), n(key)), Err(VaultError::Damaged { what: "attribute", .. })));
    }
    assert_eq!(v.list_xattr(v.ino("a/file")).unwrap().len(), 2);
    let problems = v.check(&[], false, &Quiet).unwrap().problems;
    assert_eq!(problems.len(), 3);
    assert!(problems.iter().all(|p| p.kind == "xattr"));
}

/// The value of one attribute, and the list that new entries inherit, exchanged by the store between entries: refused
/// wherever a directory takes part.
#[test]
fn attributes_of_directories_open_there_alone() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let (_dir, backend) = local();
        let v = recipe.make(&backend);
        let default = n("system.posix_acl_default");
        // Everybody may do everything; nobody but the owner anything.
        let lists = [0o777u32, 0o700].map(|mode| {
            let entry =
                |tag: u16, perm: u32| [tag.to_le_bytes(), (perm as u16).to_le_bytes(), [255; 2], [255; 2]].concat();
            [&[2, 0, 0, 0][..], &entry(1, mode >> 6 & 7), &entry(4, mode >> 3 & 7), &entry(32, mode & 7)].concat()
        });
        for (path, list) in [("open", &lists[0]), ("shut", &lists[1])] {
            v.dir(path);
            v.set_xattr(v.ino(path), default, list, SetXattr::Any).unwrap();
            v.set_xattr(v.ino(path), n("user.of"), path.as_bytes(), SetXattr::Any).unwrap();
        }
        v.put("file", b"x");
        v.set_xattr(v.ino("file"), n("user.of"), b"file", SetXattr::Any).unwrap();
        // Entries made inside go by their directory's id as well.
        v.dir("shut/below");
        assert_eq!(v.get_xattr(v.ino("shut/below"), default).unwrap(), lists[1]);
        v.clean();
        let root = backend.root();
        let stored = |path| v.stored_path(n(path)).unwrap().into_os_string();
        let values = |path| -> Vec<_> {
            let ours = |attr: &std::ffi::OsString| attr.as_bytes().starts_with(b"user.lamassu.");
            let attrs = root.hold(&stored(path)).unwrap().list_xattr().unwrap().into_iter().filter(ours);
            attrs.map(|attr| (attr.clone(), root.hold(&stored(path)).unwrap().get_xattr(&attr).unwrap())).collect()
        };
        let bound = recipe.names == NameMode::Encrypted;
        for (to, from, opens) in [("shut", "open", !bound), ("shut", "file", false), ("file", "shut", false)] {
            let (before, others) = (values(to), values(from));
            for (attr, value) in others.iter().filter(|(attr, _)| before.iter().any(|(ours, _)| ours == attr)) {
                root.hold(&stored(to)).unwrap().set_xattr(attr, value, 0).unwrap();
            }
            let got = v.get_xattr(v.ino(to), n("user.of"));
            match opens {
                true => assert_eq!(got.unwrap(), from.as_bytes()),
                false => assert!(matches!(got, Err(VaultError::Damaged { what: "attribute", .. })), "{to}, {from}"),
            }
            if (to, opens) == ("shut", false) && from == "open" {
                assert!(v.mkdir(v.ino(to), n("new"), 0o777, me()).is_err(), "nothing inherits another's list");
            }
            let problems = v.check(&[], false, &Quiet).unwrap().problems;
            assert_eq!(problems.iter().any(|p| p.kind == "xattr"), !opens);
            before.iter().for_each(|(attr, value)| root.hold(&stored(to)).unwrap().set_xattr(attr, value, 0).unwrap());
        }
        v.clean();
    }
}

#[test]
fn strangers_in_the_store_are_reported_and_left_alone() {
    let lab = Lab::filled();
    std::fs::write(lab.dir.path().join("README.txt"), b"hello").unwrap();
    assert_eq!(lab.one_problem("foreign").stored, "README.txt");
    let v = lab.open();
    assert_eq!(v.list(""), ["a", "b", "top"]);
    assert!(v.check(&[], true, &Quiet).unwrap().is_damaged());
    assert!(lab.dir.path().join("README.txt").exists());
}

#[test]
fn staging_is_cleared_of_what_is_ours_alone() {
    let lab = Lab::filled();
    let staging = lab.dir.path().join("lamassu.staging");
    std::fs::rename(lab.stored("b"), staging.join("0123456789abcdef0123456789abcdef")).unwrap();
    std::fs::create_dir(staging.join("fedcba9876543210fedcba9876543210")).unwrap();
    // Somebody's: directories under other names, empty or not.
    std::fs::create_dir(staging.join("empty")).unwrap();
    std::fs::create_dir_all(staging.join("precious")).unwrap();
    std::fs::write(staging.join("precious/data"), b"data").unwrap();
    let reader = lab.recipe.open_read_only(&lab.backend).unwrap();
    let problems = reader.check(&[], false, &Quiet).unwrap().problems;
    assert!(problems.len() == 4 && problems.iter().all(|p| p.kind == "staging"));
    assert_eq!(problems.iter().filter(|p| p.harmless).count(), 2);
    drop(reader);
    let v = lab.open();
    let mut left: Vec<_> = std::fs::read_dir(&staging).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["empty", "precious"]);
    assert_eq!(v.check(&[], true, &Quiet).unwrap().problems.len(), 2);
    assert!(staging.join("precious/data").exists());
}

#[test]
fn keys_of_another_vault_open_nothing() {
    let lab = Lab::filled();
    let v = Vault::open(lab.backend.clone(), &lab.recipe.header(), lab.recipe.ring_of(&[77]), options(false)).unwrap();
    assert!(matches!(v.lookup(ROOT, n("top")), Err(VaultError::Damaged { .. })));
    let report = v.check(&[], true, &Quiet).unwrap();
    assert!(report.is_damaged());
    assert!(report.problems.iter().all(|p| !p.repaired), "nothing moves for want of a key");
    drop(v);
    lab.open().clean();
}

#[test]
fn a_file_too_damaged_to_be_written_does_not_hold_up_the_rest() {
    let lab = Lab::filled();
    flip(&lab.stored("a/file"), 100);
    let v = lab.open();
    let h = v.open_file(v.ino("a/file"), RW).unwrap();
    let written = v.write(h, 4096 * 30 + 5, b"into the dark").and_then(|_| v.flush(h));
    assert!(matches!(written, Err(VaultError::Store(_))));
    let _ = v.release(h);
    v.put("top", b"still works");
    let _ = v.sync_all();
    v.freeze().unwrap();
    v.thaw().unwrap();
    v.close().unwrap();
    assert_eq!(lab.open().get("top"), b"still works");
}
