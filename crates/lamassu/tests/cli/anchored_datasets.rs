//! Datasets in an anchored vault: what the store may not choose of them.

use crate::support::Bench;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

fn bench() -> Bench {
    let b = Bench::new();
    b.run("init v").ok();
    b.dir("m");
    b
}

/// What is accepted of the vault around it is not accepted of a dataset, which says so.
#[test]
fn a_dataset_whose_header_is_older_names_the_command_that_accepts_it() {
    let b = bench();
    b.run("mount v m").ok();
    b.run("dataset create m/a").ok();
    b.unmount("m");
    let dir = b.stored("v", "a");
    let header = dir.join("lamassu.vault");
    let old = fs::read(&header).unwrap();
    b.run("mount v m").ok();
    b.run("dataset set m/a cache=none").ok();
    b.unmount("m");
    fs::write(&header, old).unwrap();
    let remedy = format!("`lamassu anchor accept v/{}`", dir.file_name().unwrap().display());
    let checked = b.run("check --json v").code(30).json();
    let problem = &checked["problems"][0];
    assert_eq!((&problem["kind"], &problem["path"]), (&"stale".into(), &"a".into()));
    assert!(problem["text"].as_str().unwrap().contains("`lamassu anchor accept /"), "{problem}");
    for line in ["anchor accept v a", "anchor accept v /a", "anchor accept -r v /", "anchor accept -r v a"] {
        b.run(line).code(30).says(&remedy).says("an anchor of its own");
        b.run("check v").code(30);
    }
    b.run(&format!("anchor accept {}", dir.display())).ok();
    b.run("check v").ok();
    for line in ["anchor accept v a", "anchor accept -r v /"] {
        b.run(line).ok().says("an anchor of its own");
    }
}

/// A dataset's root is an entry of the vault around it, and that knows its mode and owner. Mounted by itself it is for
/// who mounts it alone.
#[test]
fn the_store_chooses_neither_mode_nor_owner_of_a_datasets_root() {
    let b = bench();
    b.run("mount v m").ok();
    b.run("dataset create m/a").ok();
    let shown = b.path("m/a");
    fs::set_permissions(&shown, fs::Permissions::from_mode(0o700)).unwrap();
    let owner = fs::metadata(&shown).unwrap().uid();
    b.unmount("m");
    let dir = b.stored("v", "a");
    let lie = || fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    let found = |path: &Path| fs::metadata(path).map(|found| (found.mode() & 0o7777, found.uid())).unwrap();
    for options in ["", "--read-only"] {
        lie();
        b.run(&format!("mount --cache none {options} v m")).ok();
        assert_eq!(found(&shown), (0o700, owner), "{options}");
        fs::read_dir(&shown).unwrap().for_each(drop);
        lie();
        assert_eq!(found(&shown), (0o700, owner), "open, {options}");
        b.unmount("m");
    }
    b.run("mount --cache none v m").ok();
    fs::read_dir(&shown).unwrap().for_each(drop);
    lie();
    // What is changed is what was asked for, and not what the store says.
    std::os::unix::fs::chown(&shown, Some(owner), None).unwrap();
    assert_eq!(found(&shown), (0o700, owner));
    fs::set_permissions(&shown, fs::Permissions::from_mode(0o750)).unwrap();
    lie();
    b.unmount("m");
    b.run("mount --cache none v m").ok();
    assert_eq!(found(&shown), (0o750, owner));
    b.unmount("m");
    lie();
    b.run(&format!("mount {} m", dir.display())).ok();
    assert_eq!(found(&b.path("m")), (0o700, owner));
    fs::set_permissions(b.path("m"), fs::Permissions::from_mode(0o755)).unwrap();
    b.unmount("m");
    b.run(&format!("mount {} m", dir.display())).ok();
    assert_eq!(found(&b.path("m")), (0o755, owner));
    b.unmount("m");
}

/// A directory whose dataset cannot be looked at is listed, whatever the store has put there.
#[test]
fn no_directory_vanishes_behind_a_header_that_does_not_open() {
    let b = bench();
    b.run("mount v m").ok();
    b.run("dataset create m/a").ok();
    fs::create_dir(b.path("m/plain")).unwrap();
    b.unmount("m");
    for name in ["a", "plain"] {
        fs::write(b.stored("v", name).join("lamassu.vault"), "junk").unwrap();
    }
    b.run("mount v m").ok();
    let listed = || {
        let mut names: Vec<_> = fs::read_dir(b.path("m")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(listed(), ["a", "plain"]);
    for name in ["a", "plain"] {
        assert!(fs::metadata(b.path("m").join(name)).is_err(), "{name}");
    }
    assert_eq!(listed(), ["a", "plain"]);
    b.unmount("m");
    b.run("check v").code(26);
}
