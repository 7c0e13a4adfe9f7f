//! The table alone.

use super::*;
use crate::Time;

/// Of nodes of an unanchored vault.
const NONE: ObjectId = ObjectId(0);

fn stat(ino: u64, kind: Kind) -> Stat {
    Stat {
        dev: 5,
        ino,
        kind,
        mode: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        len: 0,
        blocks: 0,
        atime: Time::default(),
        mtime: Time::default(),
        ctime: Time::default(),
        born: 1,
    }
}

/// A million of them is what the kernel may remember without being short of memory.
#[test]
fn nodes_are_small() {
    assert!(size_of::<Node>() <= 128, "{} bytes", size_of::<Node>());
}

fn table() -> NodeTable {
    NodeTable::new(&stat(900, Kind::Dir), false)
}

fn name(s: &str) -> &OsStr {
    OsStr::new(s)
}

/// A lookup, and what a second look does where the number is known as another inode's.
fn met(t: &mut NodeTable, parent: Ino, name: &OsStr, st: &Stat) -> Referenced {
    t.reference(parent, name, st, NONE, None)
        .or_else(|met| match met {
            Met::OtherInode(other) => t.reference(parent, name, st, NONE, Some(other)),
            Met::OtherObject => Err(met),
        })
        .unwrap()
}

#[test]
fn numbers_are_the_stores_own_where_they_can_be() {
    let mut t = table();
    assert_eq!(met(&mut t, ROOT, name("a"), &stat(40, Kind::File)).ino, 40);
    // The root is 1, whatever the store calls it; what the store calls 1 is something else.
    assert_eq!(t.find(StoreId { dev: 5, ino: 900, born: 1 }), Some(ROOT));
    assert_eq!(met(&mut t, ROOT, name("b"), &stat(900, Kind::Dir)).ino, ROOT);
    assert!(met(&mut t, ROOT, name("c"), &stat(1, Kind::File)).ino >= ALTERNATIVE);
    // What another vault's numbers begin with is not the store's to choose.
    let wide = met(&mut t, ROOT, name("w"), &stat(OWN_MAX, Kind::File)).ino;
    assert!(wide >= ALTERNATIVE && t.shown(5, OWN_MAX + 7) == ALTERNATIVE + 7);
    let elsewhere = Stat { dev: 6, ..stat(40, Kind::File) };
    let found = met(&mut t, ROOT, name("d"), &elsewhere);
    let other = found.ino;
    assert!(other >= ALTERNATIVE);
    assert_eq!(met(&mut t, ROOT, name("d"), &elsewhere), Referenced { is_new: false, ..found });
    assert_eq!((t.shown(6, 40), t.shown(5, 40), t.shown(5, 41)), (other, 40, 41));
}

#[test]
fn a_zombie_keeps_its_number_until_it_is_forgotten() {
    let mut t = table();
    let st = stat(40, Kind::File);
    let old = met(&mut t, ROOT, name("a"), &st);
    t.unlinked(&st, ROOT, name("a"), true);
    assert_eq!(t.last_stat(old.ino).map(|st| (st.ino, st.nlink)), Some((40, 0)));
    assert!(!t.is_live(old.ino));
    assert_eq!(t.stored_path(old.ino), None);
    let new = met(&mut t, ROOT, name("b"), &st);
    assert_ne!(new.ino, old.ino);
    t.forget(old.ino, 1);
    t.forget(new.ino, 1);
    let again = met(&mut t, ROOT, name("c"), &st);
    assert_eq!(again.ino, 40);
    assert_ne!(again.generation, old.generation, "another user of the same number");
}

#[test]
fn another_table_names_other_inodes() {
    let here = |t: &mut NodeTable| met(t, ROOT, name("a"), &stat(40, Kind::File));
    let there = |t: &mut NodeTable| met(t, ROOT, name("b"), &Stat { dev: 6, ..stat(40, Kind::File) });
    let (mut one, mut two) = (table(), table());
    for t in [&mut one, &mut two] {
        t.unlinked(&stat(40, Kind::File), ROOT, name("a"), true);
    }
    let ((a, b), (c, d)) = ((here(&mut one), there(&mut one)), (here(&mut two), there(&mut two)));
    assert_eq!(a.ino, c.ino, "the store's own");
    assert_ne!(a.generation, c.generation);
    assert_ne!(b.ino, d.ino);
}

#[test]
fn a_number_that_changed_its_kind_is_another_inode() {
    let mut t = table();
    let old = met(&mut t, ROOT, name("a"), &stat(40, Kind::File)).ino;
    let new = met(&mut t, ROOT, name("a"), &stat(40, Kind::Dir)).ino;
    assert_ne!(old, new);
    assert_eq!((t.is_live(old), t.kind(new)), (false, Some(Kind::Dir)));
}

#[test]
fn what_was_just_made_is_new_whatever_its_number() {
    for born in [0, 1] {
        let mut t = table();
        let st = Stat { born, ..stat(40, Kind::File) };
        let old = met(&mut t, ROOT, name("a"), &st);
        // Also under the old name, and of an open file, whose number no sane store gives again.
        t.pin(old.ino);
        let new = t.reference_new(ROOT, name("a"), &st, NONE);
        assert!(new.is_new && new.ino != old.ino);
        assert_eq!((t.is_live(old.ino), t.stored_path(old.ino)), (false, None));
        assert_eq!(met(&mut t, ROOT, name("a"), &st), Referenced { is_new: false, ..new });
        // The old one is not referred to: the number is free again, with another generation.
        t.unpin(old.ino);
        t.forget(old.ino, 1);
        let third = t.reference_new(ROOT, name("b"), &st, NONE);
        assert!(third.ino == 40 && third.generation != old.generation);
    }
}

#[test]
fn a_number_with_another_birth_is_another_inode() {
    let mut t = table();
    let (first, second) = (stat(40, Kind::File), Stat { born: 2, ..stat(40, Kind::File) });
    let old = met(&mut t, ROOT, name("a"), &first);
    assert_eq!(t.find(StoreId::from(&second)), None);
    // The stat may be the older one: the node stays until a second look.
    assert_eq!(t.reference(ROOT, name("a"), &second, NONE, None), Err(Met::OtherInode(old.ino)));
    assert!(t.is_live(old.ino));
    let new = t.reference(ROOT, name("a"), &second, NONE, Some(old.ino)).unwrap();
    assert!(new.is_new && new.ino != old.ino && !t.is_live(old.ino));
    // Another is gone than the one that is known by now.
    assert_eq!(t.reference(ROOT, name("a"), &first, NONE, Some(old.ino)), Err(Met::OtherInode(new.ino)));
    // What does not say is not another.
    assert!(!met(&mut t, ROOT, name("a"), &Stat { born: 0, ..second }).is_new);
}

#[test]
fn without_birth_times_another_name_is_another_inode() {
    let mut t = table();
    let st = Stat { born: 0, ..stat(40, Kind::File) };
    let linked = Stat { nlink: 2, ..st };
    let old = met(&mut t, ROOT, name("a"), &st).ino;
    assert!(!met(&mut t, ROOT, name("a"), &st).is_new);
    assert!(!met(&mut t, ROOT, name("b"), &linked).is_new, "another link");
    assert!(!met(&mut t, ROOT, name("b"), &st).is_new, "the name is known");
    t.moved(StoreId::from(&st), (ROOT, name("b")), (ROOT, name("c")));
    assert!(!met(&mut t, ROOT, name("c"), &st).is_new, "it was moved there");
    t.pin(old);
    assert!(!met(&mut t, ROOT, name("d"), &st).is_new, "its number is taken while it is open");
    t.unpin(old);
    assert!(met(&mut t, ROOT, name("e"), &st).is_new);
    assert!(!t.is_live(old));
    let dir = Stat { born: 0, nlink: 5, ..stat(50, Kind::Dir) };
    assert!(met(&mut t, ROOT, name("f"), &dir).is_new);
    assert!(met(&mut t, ROOT, name("g"), &dir).is_new);
}

#[test]
fn parents_stay_while_children_do() {
    let mut t = table();
    let d = met(&mut t, ROOT, name("d"), &stat(10, Kind::Dir)).ino;
    let e = met(&mut t, d, name("e"), &stat(11, Kind::Dir)).ino;
    let f = met(&mut t, e, name("f"), &stat(12, Kind::File)).ino;
    t.forget(d, 1);
    t.forget(e, 1);
    assert_eq!(t.stored_path(f), Some("d/e/f".into()));
    assert_eq!(t.ancestry(f), Some(vec![f, e, d, ROOT]));
    t.forget(f, 1);
    assert_eq!(t.nodes.len(), 1, "only the root is left");
    assert_eq!(t.by_store.len(), 1);
}

#[test]
fn links_and_moves_leave_the_right_names() {
    let mut t = table();
    let d = met(&mut t, ROOT, name("d"), &stat(10, Kind::Dir)).ino;
    let st = stat(12, Kind::File);
    let id = StoreId::from(&st);
    let f = met(&mut t, ROOT, name("f"), &st).ino;
    assert_eq!(met(&mut t, d, name("g"), &st).ino, f);
    t.moved(id, (ROOT, name("f")), (d, name("h")));
    let names: Vec<_> = t.links(f).into_iter().map(|l| l.name.into_os_string()).collect();
    assert_eq!(names, ["g", "h"]);
    t.unlinked(&st, d, name("g"), false);
    assert_eq!(t.stored_path(f), Some("d/h".into()));
    t.forget(f, 2);
    t.forget(d, 1);
    assert_eq!(t.nodes.len(), 1);
}

#[test]
fn an_exchanged_inode_keeps_its_number_and_names() {
    let mut t = table();
    let (old, new) = (stat(12, Kind::Symlink), stat(13, Kind::Symlink));
    let found = met(&mut t, ROOT, name("l"), &old);
    let l = found.ino;
    t.exchanged(StoreId::from(&old), StoreId::from(&new));
    assert_eq!(met(&mut t, ROOT, name("l"), &new), Referenced { is_new: false, ..found });
    // Both numbers can be met again, as others.
    assert_ne!(met(&mut t, ROOT, name("m"), &old).ino, l);
    t.forget(l, 2);
    assert_eq!(t.find(StoreId::from(&new)), None);
    t.exchanged(StoreId { dev: 1, ino: 1, born: 1 }, StoreId { dev: 1, ino: 2, born: 1 });
}

#[test]
fn a_pinned_node_outlives_its_references() {
    let mut t = table();
    let st = stat(12, Kind::File);
    let f = met(&mut t, ROOT, name("f"), &st).ino;
    t.pin(f);
    t.forget(f, 99);
    assert!(t.is_live(f));
    t.unlinked(&st, ROOT, name("f"), true);
    assert_eq!(t.kind(f), Some(Kind::File));
    t.unpin(f);
    assert_eq!(t.kind(f), None);
    // Nonsense is harmless.
    t.unpin(f);
    t.forget(ROOT, 1000);
    t.forget(12345, 1);
    assert!(t.is_live(ROOT));
}

#[test]
fn a_cached_size_is_that_of_an_unchanged_file() {
    let mut t = table();
    let st = Stat { len: 4096, ..stat(12, Kind::File) };
    let f = met(&mut t, ROOT, name("f"), &st).ino;
    t.set_cached_size(f, CachedSize::new(&st, 77));
    assert_eq!(t.cached_size(f, &st), Some(77));
    let later = Time { seconds: 1, nanos: 0 };
    for changed in [Stat { len: 8192, ..st }, Stat { mtime: later, ..st }, Stat { ctime: later, ..st }] {
        assert_eq!(t.cached_size(f, &changed), None);
    }
}

#[test]
fn a_loop_made_below_us_ends() {
    let mut t = table();
    let a = met(&mut t, ROOT, name("a"), &stat(10, Kind::Dir)).ino;
    let b = met(&mut t, a, name("b"), &stat(11, Kind::Dir)).ino;
    met(&mut t, b, name("a"), &stat(10, Kind::Dir));
    assert_eq!(t.ancestry(a), None);
    assert_eq!(t.stored_path(b), None);
}

/// A host has copied a file to a new inode, which has its names since.
#[test]
fn the_node_of_an_object_follows_it_to_another_inode() {
    let mut t = NodeTable::new(&stat(900, Kind::Dir), true);
    let (old, new) = (stat(40, Kind::File), stat(41, Kind::File));
    let met = t.reference(ROOT, name("a"), &old, ObjectId(7), None).unwrap();
    let again = t.reference(ROOT, name("a"), &new, ObjectId(7), None).unwrap();
    assert_eq!((again.ino, again.is_new), (met.ino, false));
    assert!(t.is_live(met.ino) && t.id(met.ino) == Some(StoreId::from(&new)));
    assert_eq!(t.find(StoreId::from(&old)), None);
    // Another entry gets the number of the old inode.
    let other = t.reference(ROOT, name("b"), &old, ObjectId(8), None).unwrap();
    assert_ne!(other.ino, met.ino);
    assert!(!t.follows(ROOT, &new) && !t.follows(met.ino, &stat(42, Kind::Dir)), "only files are copied");
    // An open file stays what it is. A crash has left another inode under another name.
    t.pin(met.ino);
    let third = stat(43, Kind::File);
    assert_eq!(t.reference(ROOT, name("c"), &third, ObjectId(7), None).unwrap().ino, met.ino);
    assert_eq!(t.id(met.ino), Some(StoreId::from(&new)));
    let dir = stat(44, Kind::Dir);
    assert_eq!(t.reference(ROOT, name("a"), &dir, ObjectId(7), None), Err(Met::OtherObject));
}

#[test]
fn an_object_has_one_node_and_a_node_one_object() {
    let mut t = table();
    let first = stat(40, Kind::File);
    let met = t.reference(ROOT, name("a"), &first, ObjectId(7), None).unwrap();
    assert_eq!(t.object(met.ino), ObjectId(7));
    let seen = t.reference(ROOT, name("a"), &first, ObjectId(8), None);
    assert_eq!(seen, Err(Met::OtherObject), "another file was put in its place");
    t.pin(met.ino);
    let other = stat(41, Kind::File);
    assert_eq!(t.reference(ROOT, name("a"), &other, ObjectId(7), None), Err(Met::OtherObject), "the object is open");
    t.unpin(met.ino);
    let new = t.reference(ROOT, name("a"), &other, ObjectId(7), None).unwrap();
    assert!(!t.is_live(met.ino) && t.object(new.ino) == ObjectId(7));
    t.unlinked(&other, ROOT, name("a"), true);
    assert_eq!(t.take_unused(), []);
    t.forget(new.ino, 1);
    assert_eq!(t.take_unused(), [ObjectId(7)]);
}
