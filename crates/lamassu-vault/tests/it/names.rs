//! Names: entries, listings, links and renames, over memory and over a directory of this host.

use crate::common;

use common::*;
use lamassu_vault::*;
use std::ffi::OsStr;
use std::path::Path;

#[test]
fn entries_are_found_listed_and_removed() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        let d = v.dir("d");
        v.put("d/x", b"1");
        v.dir("d/y");
        assert!(matches!(v.rmdir(ROOT, n("d")), Err(VaultError::NotEmpty)));
        assert!(matches!(v.unlink(ROOT, n("d")), Err(VaultError::IsDirectory)));
        assert!(matches!(v.rmdir(d, n("x")), Err(VaultError::NotDirectory)));
        assert!(matches!(v.lookup(d, n("nothing")), Err(VaultError::NotFound)));
        assert!(matches!(v.lookup(v.ino("d/x"), n("z")), Err(VaultError::NotDirectory)));
        assert!(matches!(v.mkdir(d, n("x"), 0o755, me()), Err(VaultError::Exists)));
        assert!(matches!(v.create(d, n("y"), 0o644, RW, me()), Err(VaultError::Exists)));
        v.unlink(d, n("x")).unwrap();
        v.rmdir(d, n("y")).unwrap();
        assert!(v.list("d").is_empty());
        v.rmdir(ROOT, n("d")).unwrap();
        assert!(v.list("").is_empty());
        assert!(v.dir("d") > 1);
        v.clean();
    });
}

#[test]
fn a_listing_has_dots_numbers_and_cookies_that_go_on() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        let d = v.dir("d");
        for i in 0..50 {
            v.put(&format!("d/{i}"), b"");
        }
        let handle = v.open_dir(d).unwrap();
        let (mut cookie, mut seen) = (0, Vec::new());
        loop {
            let mut taken = 0;
            let before = cookie;
            v.read_dir(handle, cookie, &mut |e, next| {
                if taken == 3 {
                    return false;
                }
                taken += 1;
                seen.push((e.name.to_str().unwrap().to_owned(), e.ino, e.kind));
                cookie = next;
                true
            })
            .unwrap();
            if cookie == before {
                break;
            }
        }
        assert_eq!(seen[0], (".".to_owned(), d, Kind::Dir));
        assert_eq!(seen[1], ("..".to_owned(), ROOT, Kind::Dir));
        assert_eq!(seen.len(), 52);
        for (name, ino, kind) in &seen[2..] {
            let e = v.lookup(d, n(name)).unwrap();
            assert_eq!((e.attr.ino, e.attr.kind), (*ino, *kind));
        }
        // So does a listing that starts long after opendir.
        let early = v.open_dir(d).unwrap();
        v.put("d/late", b"");
        let mut names = Vec::new();
        v.read_dir(early, 0, &mut |e, _| {
            names.push(e.name.clone());
            true
        })
        .unwrap();
        assert!(names.len() == 53 && names.iter().any(|name| name == "late"));
        v.release_dir(early).unwrap();
        v.unlink(d, n("late")).unwrap();
        // A rewind shows what is there now.
        v.unlink(d, n("7")).unwrap();
        let mut count = 0;
        v.read_dir(handle, 0, &mut |_, _| {
            count += 1;
            true
        })
        .unwrap();
        assert_eq!(count, 51);
        v.release_dir(handle).unwrap();
        assert!(matches!(v.release_dir(handle), Err(VaultError::BadHandle)));
    });
}

/// What it brings with each entry is what a lookup finds, a reference included; a call that the reply is too small for
/// goes on where it stopped.
#[test]
fn a_listing_with_attributes_is_a_listing_and_lookups() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        let d = v.dir("d");
        let long = "n".repeat(200);
        for name in ["empty", "some", "gone", &long] {
            v.put(&format!("d/{name}"), &vec![7; name.len() * 1000]);
        }
        v.symlink(d, n("link"), b"some", me()).unwrap();
        v.dir("d/dir");
        v.close().unwrap();
        drop(v);
        // By a vault that holds no references yet.
        let v = recipe.open(backend).unwrap();
        let d = v.lookup(ROOT, n("d")).unwrap().attr.ino;
        let handle = v.open_dir(d).unwrap();
        let (mut cookie, mut seen) = (0, Vec::new());
        loop {
            let before = cookie;
            v.read_dir_plus(handle, cookie, &mut |listed, entry, next| {
                if listed.name == "some" {
                    // Removed while the listing goes on.
                    let _ = v.unlink(d, n("gone"));
                }
                if cookie != before {
                    if let Some(entry) = entry {
                        v.forget(entry.attr.ino, 1);
                    }
                    return false;
                }
                seen.push((listed.clone(), entry));
                cookie = next;
                true
            })
            .unwrap();
            if cookie == before {
                break;
            }
        }
        v.release_dir(handle).unwrap();
        for (_, entry) in seen.extract_if(.., |(listed, _)| listed.name == "gone") {
            v.forget(entry.unwrap().attr.ino, 1);
        }
        assert_eq!(seen.len(), 7, "{seen:?}");
        for (listed, entry) in seen {
            if listed.name == "." || listed.name == ".." {
                assert!(entry.is_none() && listed.kind == Kind::Dir);
                continue;
            }
            let (entry, found) = (entry.unwrap(), v.lookup(d, &listed.name).unwrap());
            assert_eq!((entry.attr, entry.generation), (found.attr, found.generation));
            assert_eq!((listed.ino, listed.kind), (found.attr.ino, found.attr.kind));
            v.forget(found.attr.ino, 1);
            assert!(v.getattr(found.attr.ino, None).is_ok(), "the listing's reference");
            v.forget(found.attr.ino, 1);
            assert!(matches!(v.getattr(found.attr.ino, None), Err(VaultError::Stale)), "no further one");
        }
        v.clean();
    });
}

#[test]
fn long_names_come_and_go_with_their_companions() {
    for name_max in [255, 143] {
        let recipe = Recipe { name_max, ..Recipe::default() };
        let (dir, backend) = local();
        let v = recipe.make(&backend);
        let stored =
            || std::fs::read_dir(dir.path()).unwrap().filter_map(|e| e.unwrap().file_name().into_string().ok());
        let companions = || stored().filter(|s| s.starts_with("lamassu.name.")).count();
        let long = "ü".repeat(127) + "x";
        assert_eq!(long.len(), 255);
        v.put(&long, b"long");
        assert_eq!(companions(), 1);
        assert!(stored().all(|s| s.len() <= name_max.into()));
        assert_eq!(v.list(""), [long.as_str()]);
        let other = "y".repeat(255);
        v.rename(ROOT, n(&long), ROOT, n(&other), RenameMode::Replace).unwrap();
        assert_eq!((companions(), v.get(&other)), (1, b"long".to_vec()));
        v.rename(ROOT, n(&other), ROOT, n("short"), RenameMode::Replace).unwrap();
        assert_eq!((companions(), v.get("short")), (0, b"long".to_vec()));
        v.dir(&long);
        v.dir(&other);
        assert_eq!(companions(), 2);
        v.rename(ROOT, n(&long), ROOT, n(&other), RenameMode::Exchange).unwrap();
        assert_eq!(companions(), 2);
        v.rename(ROOT, n(&long), ROOT, n(&other), RenameMode::Replace).unwrap();
        assert_eq!(companions(), 1);
        v.clean();
        v.rmdir(ROOT, n(&other)).unwrap();
        assert_eq!(companions(), 0);
        assert!(matches!(v.mkdir(ROOT, n(&"z".repeat(256)), 0o755, me()), Err(VaultError::NameTooLong)));
        assert_eq!(v.list(""), ["short"]);
        v.clean();
    }
}

#[test]
fn names_of_the_format_are_out_of_reach() {
    let backend = memory();
    let v = Recipe::plain().make(&backend);
    for name in ["lamassu.vault", "lamassu.staging", "lamassu.anything", "", ".", "..", "a/b", "a\0b"] {
        assert!(matches!(v.mkdir(ROOT, n(name), 0o755, me()), Err(VaultError::InvalidName)), "{name:?}");
        assert!(matches!(v.lookup(ROOT, n(name)), Err(VaultError::NotFound)), "{name:?}");
    }
    assert!(v.list("").is_empty());
    let sealed = memory();
    let v = Recipe::default().make(&sealed);
    v.put("lamassu.vault", b"an ordinary file");
    assert_eq!(v.list(""), ["lamassu.vault"]);
    v.clean();
}

#[test]
fn symbolic_links_keep_targets_of_every_length() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        v.dir("d");
        for len in [1, 2, 3, 59, 100, 697, 698, 699, 711, 712, 4094, 4095] {
            let target: Vec<u8> = (0..len).map(|i| b'a' + (i % 26) as u8).collect();
            let e = v.symlink(ROOT, n("l"), &target, me()).unwrap();
            assert_eq!((e.attr.kind, e.attr.size), (Kind::Symlink, len));
            assert_eq!(v.readlink(e.attr.ino).unwrap(), target);
            let d = v.ino("d");
            v.link(e.attr.ino, d, n("hard")).unwrap();
            v.rename(ROOT, n("l"), d, n("moved"), RenameMode::Replace).unwrap();
            assert_eq!(v.readlink(v.ino("d/moved")).unwrap(), target, "{len}");
            v.unlink(d, n("moved")).unwrap();
            assert_eq!(v.readlink(v.ino("d/hard")).unwrap(), target, "{len}");
            v.rename(d, n("hard"), ROOT, n("m"), RenameMode::NoReplace).unwrap();
            assert_eq!(v.readlink(v.ino("m")).unwrap(), target, "{len}");
            v.unlink(ROOT, n("m")).unwrap();
        }
        assert!(matches!(v.symlink(ROOT, n("l"), &[b'x'; 4096], me()), Err(VaultError::NameTooLong)));
        assert!(v.symlink(ROOT, n("l"), b"", me()).is_err());
        v.rmdir(ROOT, n("d")).unwrap();
        v.clean();
        // Two names in one directory share what else a long target takes.
        let target = [b't'; 4000];
        let l = v.symlink(ROOT, n("one"), &target, me()).unwrap().attr.ino;
        v.link(l, ROOT, n("two")).unwrap();
        v.dir("d");
        v.rename(ROOT, n("one"), v.ino("d"), n("one"), RenameMode::Replace).unwrap();
        assert_eq!(v.readlink(v.ino("two")).unwrap(), target);
        v.rename(v.ino("d"), n("one"), ROOT, n("three"), RenameMode::Replace).unwrap();
        v.unlink(ROOT, n("two")).unwrap();
        assert_eq!(v.readlink(v.ino("three")).unwrap(), target);
        v.clean();
    });
}

#[test]
fn hard_links_are_one_file() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        let d = v.dir("d");
        v.put("a", b"one");
        let a = v.ino("a");
        let b = v.link(a, d, n("b")).unwrap();
        assert_eq!((b.attr.ino, b.attr.nlink), (a, 2));
        v.put("d/b", b"two, longer");
        assert_eq!(v.get("a"), b"two, longer");
        assert_eq!(v.find("a").unwrap().attr.size, 11);
        // Both names of one file: nothing happens.
        v.rename(ROOT, n("a"), d, n("b"), RenameMode::Replace).unwrap();
        assert_eq!((v.list(""), v.list("d")), (vec!["a".to_owned(), "d".to_owned()], vec!["b".to_owned()]));
        v.unlink(ROOT, n("a")).unwrap();
        assert_eq!(v.getattr(a, None).unwrap().nlink, 1);
        assert_eq!(v.get("d/b"), b"two, longer");
        assert!(v.link(d, ROOT, n("dir")).is_err());
        assert_eq!(v.clean().files, 1);
    });
}

#[test]
fn rename_does_what_posix_says() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        let (a, b) = (v.dir("a"), v.dir("b"));
        v.put("a/f", b"f");
        v.put("b/g", b"g");
        v.dir("a/sub");
        let f = v.ino("a/f");
        let mv = |p, from: &str, q, to: &str, mode| v.rename(p, n(from), q, n(to), mode);
        use RenameMode::{Exchange, NoReplace, Replace};
        assert!(matches!(mv(a, "f", b, "g", NoReplace), Err(VaultError::Exists)));
        mv(a, "f", b, "g", Exchange).unwrap();
        assert_eq!((v.get("a/f"), v.get("b/g")), (b"g".to_vec(), b"f".to_vec()));
        assert_eq!(v.ino("b/g"), f);
        mv(b, "g", a, "f", Replace).unwrap();
        assert_eq!((v.get("a/f"), v.list("b")), (b"f".to_vec(), vec![]));
        assert!(matches!(mv(a, "missing", b, "x", Replace), Err(VaultError::NotFound)));
        assert!(matches!(mv(a, "f", b, "x", Exchange), Err(VaultError::NotFound)));
        assert!(matches!(mv(ROOT, "a", a, "x", Replace), Err(VaultError::Invalid)));
        assert!(matches!(mv(ROOT, "a", v.ino("a/sub"), "x", Replace), Err(VaultError::Invalid)));
        assert!(matches!(mv(a, "sub", ROOT, "a", Replace), Err(VaultError::NotEmpty)));
        assert!(matches!(mv(a, "f", ROOT, "b", Replace), Err(VaultError::IsDirectory)));
        assert!(matches!(mv(ROOT, "b", a, "f", Replace), Err(VaultError::NotDirectory)));
        assert!(matches!(mv(ROOT, "b", ROOT, "a", Replace), Err(VaultError::NotEmpty)));
        // Over an empty directory.
        mv(ROOT, "a", ROOT, "b", Replace).unwrap();
        assert_eq!((v.list(""), v.list("b")), (vec!["b".to_owned()], vec!["f".to_owned(), "sub".to_owned()]));
        assert_eq!(v.ino("b"), a);
        assert_eq!(v.get("b/f"), b"f");
        // Names of one directory open under another's key only after a rename through the vault.
        v.put("b/sub/deep", b"deep");
        mv(a, "sub", ROOT, "top", NoReplace).unwrap();
        assert_eq!(v.get("top/deep"), b"deep");
        mv(ROOT, "b", ROOT, "top", Exchange).unwrap();
        assert_eq!((v.get("b/deep"), v.get("top/f")), (b"deep".to_vec(), b"f".to_vec()));
        mv(ROOT, "b", ROOT, "b", Replace).unwrap();
        v.clean();
        assert_eq!(backend.root().open_dir(n("lamassu.staging")).unwrap().read_dir().unwrap().len(), 0);
    });
}

#[test]
fn paths_translate_both_ways() {
    everywhere(|recipe, backend| {
        let v = recipe.make(backend);
        v.dir("a");
        let long = "l".repeat(250);
        v.dir(&format!("a/{long}"));
        let path = format!("a/{long}/file");
        v.put(&path, b"1");
        let stored = v.stored_path(n(&format!("/a//./{long}/file"))).unwrap();
        assert_eq!(v.plain_path(&stored).unwrap(), Path::new(&path));
        assert_eq!(v.stored_path(n("")).unwrap(), Path::new(""));
        assert_eq!(v.plain_path(Path::new("")).unwrap(), Path::new(""));
        assert!(matches!(v.stored_path(n("a/none")), Err(VaultError::NotFound)));
        assert!(matches!(v.resolve(n("a/..")), Err(VaultError::Invalid)));
        assert!(matches!(v.plain_path(Path::new("../x")), Err(VaultError::Invalid)));
        let reserved = v.plain_path(Path::new("lamassu.staging"));
        assert!(matches!(reserved, Err(VaultError::InvalidName)), "{reserved:?}");
        assert!(v.plain_path(Path::new("none")).is_err());
        let backing = stored.parent().unwrap().iter().fold(backend.root(), |d, name| d.open_dir(name).unwrap());
        v.sync_all().unwrap();
        let file = backing.open_file(stored.file_name().unwrap(), false).unwrap();
        let orphan = open_orphan(file, &recipe.header(), recipe.ring(), &options(true), "orphan").unwrap();
        let mut buf = [0; 2];
        assert_eq!(orphan.read_at(0, &mut buf).unwrap(), 1);
        assert_eq!(v.check(&[OsStr::new("a")], false, &Quiet).unwrap().files, 1);
    });
}
