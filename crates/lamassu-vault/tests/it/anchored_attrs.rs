//! Directory records, link targets, attributes, access lists and the root's permissions of an anchored vault
//! (`docs/freshness.md`, sections 2 and 5): whatever an older or exchanged one is put back, it is told, and the rest
//! stays readable.
use crate::common;

use common::anchored::assert_outdated;
use common::keyed::*;
use common::*;
use lamassu_vault::*;
use std::collections::BTreeMap;

const RECORD: &str = "lamassu.dir";

#[test]
fn an_older_record_another_ones_and_none_are_told_at_the_first_look_into_the_directory() {
    let mut lab = Lab::new(Recipe::default());
    let v = lab.open();
    for dir in ["a", "b"] {
        v.dir(dir);
        v.put(&format!("{dir}/f"), dir.as_bytes());
    }
    v.close().unwrap();
    let (a, b) = (lab.stored_dir("a"), lab.stored_dir("b"));
    let older = text_of(&a, n(RECORD));
    lab.rekey();
    let newest = text_of(&a, n(RECORD));
    assert_ne!(older, newest);
    let others = text_of(&b, n(RECORD));
    let look = |lab: &Lab| {
        let v = lab.open();
        assert_outdated(v.find("a/f"));
        assert_outdated(v.open_dir(v.ino("a")));
        assert_outdated(v.mkdir(v.ino("a"), n("new"), 0o700, me()));
        assert_eq!(v.get("b/f"), b"b");
        v.close().unwrap();
        assert_eq!(lab.kinds(), kinds(&["stale"]));
    };
    for stale in [&older, &others] {
        put_text(&a, n(RECORD), stale);
        look(&lab);
    }
    a.unlink(n(RECORD)).unwrap();
    look(&lab);
    a.make_symlink(n(RECORD), &newest).unwrap();
    assert_eq!(lab.kinds(), kinds(&[]));
    // A person may take the older one.
    put_text(&a, n(RECORD), &older);
    let done = lab.accept("a", false);
    assert_eq!((done.changed, done.added, done.removed), (1, 0, 0));
    let v = lab.open();
    assert_eq!((v.get("a/f"), v.get("b/f")), (b"a".to_vec(), b"b".to_vec()));
    v.clean();
    v.close().unwrap();
}

#[test]
fn link_targets_are_the_newest_or_stale() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let mut lab = Lab::new(recipe);
        let long = vec![b't'; 3000];
        let v = lab.open();
        link_to(&v, "short", b"target");
        link_to(&v, "other", b"tarGet");
        link_to(&v, "long", &long);
        v.link(v.ino("short"), v.ino(""), n("twin")).unwrap();
        v.close().unwrap();
        let places: Vec<_> = ["short", "other", "long"].iter().map(|path| lab.stored(path)).collect();
        let older: Vec<_> = places.iter().map(|(dir, name)| text_of(dir, name)).collect();
        lab.rekey();
        let read = |v: &Vault, path: &str| v.readlink(v.find(path)?.attr.ino);
        let v = lab.open();
        assert_eq!((read(&v, "short").unwrap(), read(&v, "long").unwrap()), (b"target".to_vec(), long.clone()));
        assert_eq!((v.find("long").unwrap().attr.size, v.find("twin").unwrap().attr.size), (3000, 6));
        v.close().unwrap();
        for at in [0, 2] {
            let (dir, name) = &places[at];
            let newest = text_of(dir, name);
            for stale in [&older[at], &older[1]] {
                put_text(dir, name, stale);
                let v = lab.open();
                assert_outdated(read(&v, ["short", "other", "long"][at]));
                assert_eq!(read(&v, "other").unwrap(), b"tarGet");
                v.close().unwrap();
                assert!(lab.kinds().contains("stale"));
            }
            put_text(dir, name, &newest);
        }
        // An exchange by names is one of targets.
        let (dir, name) = &places[0];
        let (_, other) = &places[1];
        dir.rename(name, &**dir, other, RenameMode::Exchange).unwrap();
        let v = lab.open();
        assert_outdated(read(&v, "short"));
        assert_outdated(read(&v, "other"));
        v.close().unwrap();
        let done = lab.accept("short", false);
        assert_eq!(done.changed, 1);
        let v = lab.open();
        assert_eq!(read(&v, "short").unwrap(), b"tarGet");
        assert_outdated(read(&v, "other"));
        v.close().unwrap();
    }
}

#[test]
fn attributes_and_access_lists_are_the_newest_or_stale() {
    for recipe in [Recipe::default(), Recipe::plain()] {
        let lab = Lab::new(recipe);
        let v = lab.open();
        v.put("f", b"1");
        v.put("g", b"2");
        v.dir("d");
        for path in ["f", "g", "d"] {
            set(&v, path, "user.a", b"one");
            set(&v, path, ACCESS, &acl(1000, 7));
        }
        set(&v, "d", DEFAULT, &acl(1001, 7));
        v.dir("d/inherits");
        v.put("d/f", b"inherits");
        v.close().unwrap();
        let paths = ["f", "g", "d", "d/inherits", "d/f"];
        let places: BTreeMap<_, _> = paths.iter().map(|path| (*path, lab.stored(path))).collect();
        let shown = |path: &str| attrs_of(&places[path].0, &places[path].1);
        let older: BTreeMap<_, _> = paths.iter().map(|path| (*path, shown(path))).collect();
        let v = lab.open();
        for path in ["f", "d"] {
            set(&v, path, "user.a", b"two");
            set(&v, path, ACCESS, &acl(1000, 4));
        }
        v.set_xattr(v.ino("d"), n(DEFAULT), &acl(1001, 4), SetXattr::Replace).unwrap();
        v.set_xattr(v.ino("d/f"), n("user.b"), b"", SetXattr::Create).unwrap();
        v.remove_xattr(v.ino("d/inherits"), n(ACCESS)).unwrap();
        v.close().unwrap();
        let newest: BTreeMap<_, _> = paths.iter().map(|path| (*path, shown(path))).collect();
        let look = |path: &str| {
            let v = lab.open();
            let ino = v.ino(path);
            assert_outdated(v.get_xattr(ino, n("user.a")));
            assert_outdated(v.get_xattr(ino, n(ACCESS)));
            assert_outdated(v.list_xattr(ino));
            assert_outdated(v.set_xattr(ino, n("user.a"), b"x", SetXattr::Any));
            assert_outdated(v.remove_xattr(ino, n(ACCESS)));
            assert_eq!(get(&v, "g", "user.a").unwrap(), b"one");
            if path == "d" {
                assert_outdated(v.create(ino, n("new"), 0o644, RW, me()));
                assert_outdated(v.may_add(ino, 1001, &|_| false));
            }
            v.close().unwrap();
            assert_eq!(lab.kinds(), kinds(&["stale"]), "{path}");
        };
        let cases = |path: &'static str| {
            let gone: Attrs = newest[path].clone().into_iter().skip(1).collect();
            [older[path].clone(), gone, Attrs::new(), older["g"].clone()]
        };
        for path in ["f", "d", "d/inherits", "d/f"] {
            let (dir, name) = &places[path];
            for stale in cases(path).into_iter().filter(|stale| *stale != newest[path]) {
                put_attrs(dir, name, &stale);
                look(path);
            }
            put_attrs(dir, name, &newest[path]);
            assert_eq!(lab.kinds(), kinds(&[]), "{path}");
        }
        let v = lab.open();
        assert_eq!(get(&v, "f", "user.a").unwrap(), b"two");
        assert_eq!(get(&v, "d/f", "user.b").unwrap(), b"");
        v.close().unwrap();
        put_attrs(&places["f"].0, &places["f"].1, &older["f"]);
        assert_eq!(lab.accept("f", false).changed, 1);
        let v = lab.open();
        assert_eq!(get(&v, "f", "user.a").unwrap(), b"one");
        v.clean();
        v.close().unwrap();
    }
}

#[test]
fn where_nothing_was_set_nothing_is_taken() {
    let lab = Lab::new(Recipe::default());
    let v = lab.open();
    v.put("f", b"1");
    v.put("g", b"2");
    set(&v, "g", "user.a", b"of another");
    v.close().unwrap();
    let ((dir, f), (_, g)) = (lab.stored("f"), lab.stored("g"));
    put_attrs(&dir, &f, &attrs_of(&dir, &g));
    let v = lab.open();
    assert_outdated(get(&v, "f", "user.a"));
    assert_eq!((v.get("f"), get(&v, "g", "user.a").unwrap()), (b"1".to_vec(), b"of another".to_vec()));
    v.close().unwrap();
    // The root's, too.
    let v = lab.open();
    set(&v, "", "user.a", b"one");
    v.close().unwrap();
    let root = lab.backend.root();
    let attr = root.list_xattr().unwrap().into_iter().next().unwrap();
    root.remove_xattr(&attr).unwrap();
    let v = lab.open();
    assert_outdated(get(&v, "", "user.a"));
    v.close().unwrap();
}

#[test]
fn the_roots_permissions_are_the_newest_or_the_stricter_ones() {
    let lab = Lab::new(Recipe::default());
    let root = lab.backend.root();
    let record = n("lamassu.root");
    let older = text_of(&root, record);
    let v = lab.open();
    v.verify_root_permissions().unwrap();
    let chmod = |v: &Vault, mode| v.setattr(ROOT, None, &SetAttr { mode: Some(mode), ..SetAttr::default() });
    assert_eq!(chmod(&v, 0o711).unwrap().mode, 0o711);
    v.close().unwrap();
    let newest = text_of(&root, record);
    let strict = 0o700;
    let look = |lab: &Lab| {
        let v = lab.open();
        assert_outdated(v.verify_root_permissions());
        assert_eq!(v.getattr(ROOT, None).unwrap().mode, strict);
        assert_outdated(chmod(&v, 0o777));
        v.close().unwrap();
        assert_eq!(lab.kinds(), kinds(&["stale"]));
    };
    put_text(&root, record, &older);
    look(&lab);
    root.unlink(record).unwrap();
    look(&lab);
    root.make_symlink(record, &older).unwrap();
    assert_eq!(lab.accept("", false).changed, 1);
    let v = lab.open();
    assert_eq!(v.getattr(ROOT, None).unwrap().mode, 0o755);
    v.close().unwrap();
    put_text(&root, record, &newest);
    look(&lab);
}
