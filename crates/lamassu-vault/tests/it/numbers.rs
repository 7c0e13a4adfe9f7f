//! Stores that number entries by their paths, as sshfs does, where hosts take turns: what one host moves has another
//! number for the others.
use crate::common;

use common::anchored::{link_to, mv};
use common::turns::{Host, Lab};
use common::*;
use lamassu_store::backend::RenameMode;
use lamassu_vault::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// A store without birth times.
fn lab() -> Lab {
    let lab = Lab::new();
    lab.backend.faults().hide_births();
    lab
}

const KINDS: [&str; 4] = ["file", "dir", "link", "fifo"];

fn make(v: &Vault, kind: &str, name: &str) {
    match kind {
        "file" => v.put(name, name.as_bytes()),
        "dir" => {
            v.dir(name);
            v.put(&format!("{name}/{name}"), name.as_bytes());
        }
        "link" => link_to(v, name, name),
        _ => {
            v.mknod(ROOT, n(name), Kind::Fifo, 0o644, 0, me()).unwrap();
        }
    }
}

/// That a node is what was made under `made`.
fn is_as_made(v: &Vault, kind: &str, ino: Ino, made: &str) {
    let attr = v.getattr(ino, None).unwrap();
    let content = |ino: Ino| {
        let handle = v.open_file(ino, RO).unwrap();
        let mut data = vec![0; 100];
        let len = v.read(handle, 0, &mut data).unwrap();
        v.release(handle).unwrap();
        assert_eq!(&data[..len], made.as_bytes());
    };
    match kind {
        "file" => content(ino),
        "dir" => {
            let child = v.lookup(ino, n(made)).unwrap().attr.ino;
            content(child);
            v.forget(child, 1);
        }
        "link" => assert_eq!(v.readlink(ino).unwrap(), made.as_bytes()),
        _ => assert_eq!(attr.kind, Kind::Fifo),
    }
}

fn stored(lab: &Lab, v: &Vault, path: &str) -> PathBuf {
    lab.dir.path().join(v.stored_path(n(path)).unwrap())
}

fn number(at: &Path) -> u64 {
    at.symlink_metadata().unwrap().ino()
}

/// Gives an entry of the store another inode.
fn renumber(at: &Path) {
    let (before, m) = (number(at), at.symlink_metadata().unwrap());
    let beside = at.with_file_name("beside");
    if m.is_dir() {
        fs::create_dir(&beside).unwrap();
        move_children(at, &beside);
        fs::remove_dir(at).unwrap();
    } else if m.is_symlink() {
        symlink(fs::read_link(at).unwrap(), &beside).unwrap();
    } else if m.is_file() {
        fs::copy(at, &beside).unwrap();
    } else {
        assert!(std::process::Command::new("mkfifo").arg(&beside).status().unwrap().success());
    }
    if !m.is_symlink() {
        fs::set_permissions(&beside, m.permissions()).unwrap();
    }
    fs::rename(&beside, at).unwrap();
    assert_ne!(number(at), before);
}

fn move_children(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::rename(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Two entries exchange their inodes, and stay what they are.
fn exchange_numbers(a: &Path, b: &Path) {
    let before = (number(a), number(b));
    rustix::fs::renameat_with(rustix::fs::CWD, a, rustix::fs::CWD, b, rustix::fs::RenameFlags::EXCHANGE).unwrap();
    let m = a.symlink_metadata().unwrap();
    if m.is_dir() {
        let between = a.with_file_name("between");
        fs::create_dir(&between).unwrap();
        for (from, to) in [(a, &*between), (b, a), (&*between, b)] {
            move_children(from, to);
        }
        fs::remove_dir(&between).unwrap();
    } else if m.is_file() {
        let [of_a, of_b] = [a, b].map(|at| fs::read(at).unwrap());
        fs::write(a, of_b).unwrap();
        fs::write(b, of_a).unwrap();
    }
    let modes = [a, b].map(|at| at.symlink_metadata().unwrap().permissions().mode());
    assert_eq!(modes[0], modes[1]);
    assert_eq!((number(b), number(a)), before);
}

#[test]
fn what_another_host_has_moved_is_found_under_another_number() {
    for kind in KINDS {
        let lab = lab();
        let (mut a, mut b) = (Host::default(), Host::default());
        let v = lab.turn(&mut a, 1, true);
        make(&v, kind, "old");
        v.dir("d");
        let ino = v.lookup(ROOT, n("old")).unwrap().attr.ino;
        lab.end(&mut a, v);
        let v = lab.turn(&mut b, 1, true);
        mv(&v, "old", "d/new", RenameMode::NoReplace).unwrap();
        renumber(&stored(&lab, &v, "d/new"));
        lab.end(&mut b, v);
        for is_told in [true, false] {
            let v = lab.turn(&mut a, 1, is_told);
            is_as_made(&v, kind, ino, "old");
            assert_eq!(v.ino("d/new"), ino, "{kind}");
            v.getattr(ino, None).unwrap();
            lab.end(&mut a, v);
        }
        lab.opened(&[1]).clean();
    }
}

#[test]
fn what_the_store_numbers_anew_stays_the_same() {
    for kind in KINDS {
        for is_looked_up in [true, false] {
            let lab = lab();
            let mut a = Host::default();
            let v = lab.turn(&mut a, 1, true);
            make(&v, kind, "x");
            let ino = v.lookup(ROOT, n("x")).unwrap().attr.ino;
            lab.end(&mut a, v);
            let v = lab.turn(&mut a, 1, true);
            v.getattr(ino, None).unwrap();
            renumber(&stored(&lab, &v, "x"));
            if is_looked_up {
                assert_eq!(v.ino("x"), ino, "{kind}");
            }
            is_as_made(&v, kind, ino, "x");
            // Changes of names go by numbers, too.
            renumber(&stored(&lab, &v, "x"));
            mv(&v, "x", "y", RenameMode::NoReplace).unwrap();
            is_as_made(&v, kind, ino, "x");
            lab.end(&mut a, v);
            lab.opened(&[1]).clean();
        }
    }
}

#[test]
fn entries_that_exchange_their_numbers_are_told_apart() {
    for kind in ["file", "dir", "fifo"] {
        for first in 0..2 {
            let lab = lab();
            let (mut a, mut b) = (Host::default(), Host::default());
            let v = lab.turn(&mut a, 1, true);
            ["p", "q"].iter().for_each(|name| make(&v, kind, name));
            let inos = ["p", "q"].map(|name| v.lookup(ROOT, n(name)).unwrap().attr.ino);
            lab.end(&mut a, v);
            let v = lab.turn(&mut b, 1, true);
            mv(&v, "p", "q", RenameMode::Exchange).unwrap();
            lab.end(&mut b, v);
            let v = lab.opened(&[1]);
            // A path has the number that it had.
            exchange_numbers(&stored(&lab, &v, "p"), &stored(&lab, &v, "q"));
            v.close().unwrap();
            let v = lab.turn(&mut a, 1, true);
            for which in [first, 1 - first] {
                is_as_made(&v, kind, inos[which], ["p", "q"][which]);
                assert_eq!(v.ino(["q", "p"][which]), inos[which], "{kind}");
            }
            lab.end(&mut a, v);
            lab.opened(&[1]).clean();
        }
    }
}

/// The store shows one entry under two names: a rename of one over the other does not count as made.
#[test]
fn one_inode_under_the_names_of_two_entries_is_not_renamed_in_vain() {
    for kind in ["file", "fifo"] {
        for hides_births in [true, false] {
            let lab = Lab::new();
            if hides_births {
                lab.backend.faults().hide_births();
            }
            let v = lab.opened(&[1]);
            ["p", "q"].iter().for_each(|name| make(&v, kind, name));
            let [p, q] = ["p", "q"].map(|name| stored(&lab, &v, name));
            fs::rename(&p, lab.dir.path().join("aside")).unwrap();
            fs::hard_link(&q, &p).unwrap();
            for mode in [RenameMode::Replace, RenameMode::Exchange] {
                let done = mv(&v, "q", "p", mode);
                assert!(matches!(done, Err(VaultError::Outdated { .. })), "{kind}: {done:?}");
            }
            fs::rename(lab.dir.path().join("aside"), &p).unwrap();
            mv(&v, "q", "p", RenameMode::Replace).unwrap();
            v.close().unwrap();
            lab.opened(&[1]).clean();
        }
    }
}
