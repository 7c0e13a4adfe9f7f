//! The table alone.

use super::*;
use crate::Time;

/// Of nodes of an unanchored vault.
const NONE: ObjectId = ObjectId(0);
/// Nothing is known to be gone, and a node may go to the inode.
const OWN: (Option<Ino>, Option<Go>) = (None, Some(Go::To));

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
    assert!(size_of::<Node>() <= 144, "{} bytes", size_of::<Node>());
}

/// In a store that has no birth times.
fn unborn(ino: u64, kind: Kind) -> Stat {
    Stat { born: 0, ..stat(ino, kind) }
}

fn table() -> NodeTable {
    NodeTable::new(&stat(900, Kind::Dir), false)
}

fn name(s: &str) -> &OsStr {
    OsStr::new(s)
}

/// A lookup, and what a second look does where the number is known as another inode's.
fn met(t: &mut NodeTable, parent: Ino, name: &OsStr, st: &Stat) -> Referenced {
    t.reference(parent, name, st, NONE, OWN)
        .or_else(|met| match met {
            Met::OtherInode(other) => t.reference(parent, name, st, NONE, (Some(other), Some(Go::To))),
            Met::OtherObject | Met::MayGo(_) => Err(met),
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
    t.unlinked(NONE, &st, (ROOT, name("a")), true);
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
        t.unlinked(NONE, &stat(40, Kind::File), (ROOT, name("a")), true);
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
    assert_eq!(t.reference(ROOT, name("a"), &second, NONE, OWN), Err(Met::OtherInode(old.ino)));
    assert!(t.is_live(old.ino));
    let new = t.reference(ROOT, name("a"), &second, NONE, (Some(old.ino), Some(Go::To))).unwrap();
    assert!(new.is_new && new.ino != old.ino && !t.is_live(old.ino));
    // Another is gone than the one that is known by now.
    assert_eq!(
        t.reference(ROOT, name("a"), &first, NONE, (Some(old.ino), Some(Go::To))),
        Err(Met::OtherInode(new.ino))
    );
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
    t.moved(NONE, StoreId::from(&st), (ROOT, name("b")), (ROOT, name("c")));
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
    t.moved(NONE, id, (ROOT, name("f")), (d, name("h")));
    let names: Vec<_> = t.links(f).into_iter().map(|l| l.name.into_os_string()).collect();
    assert_eq!(names, ["g", "h"]);
    t.unlinked(NONE, &st, (d, name("g")), false);
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
    t.unlinked(NONE, &st, (ROOT, name("f")), true);
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
    let met = t.reference(ROOT, name("a"), &old, ObjectId(7), OWN).unwrap();
    let again = t.reference(ROOT, name("a"), &new, ObjectId(7), OWN).unwrap();
    assert_eq!((again.ino, again.is_new), (met.ino, false));
    assert!(t.is_live(met.ino) && t.id(met.ino) == Some(StoreId::from(&new)));
    assert_eq!(t.find(StoreId::from(&old)), None);
    // Another entry gets the number of the old inode.
    let other = t.reference(ROOT, name("b"), &old, ObjectId(8), OWN).unwrap();
    assert_ne!(other.ino, met.ino);
    assert!(!t.follows(ROOT, &new) && !t.follows(met.ino, &stat(42, Kind::Dir)), "of another kind");
    // An open file stays what it is. A crash has left another inode under another name.
    t.pin(met.ino);
    let third = stat(43, Kind::File);
    assert_eq!(t.reference(ROOT, name("c"), &third, ObjectId(7), OWN).unwrap().ino, met.ino);
    assert_eq!(t.id(met.ino), Some(StoreId::from(&new)));
    let dir = stat(44, Kind::Dir);
    assert_eq!(t.reference(ROOT, name("a"), &dir, ObjectId(7), OWN), Err(Met::OtherObject));
}

/// A store that numbers entries by their paths, of which another host has exchanged two.
#[test]
fn where_hosts_share_a_vault_an_object_is_told_by_its_name_alone() {
    let mut t = NodeTable::new(&stat(900, Kind::Dir), true);
    let [p, q] = [unborn(40, Kind::Symlink), unborn(41, Kind::Symlink)];
    let a = t.reference(ROOT, name("p"), &p, ObjectId(7), OWN).unwrap().ino;
    let b = t.reference(ROOT, name("q"), &q, ObjectId(8), OWN).unwrap().ino;
    let met = t.reference(ROOT, name("q"), &q, ObjectId(7), OWN).unwrap();
    assert_eq!((met.ino, met.is_new, met.has_followed), (a, false, true));
    // The other lives, has no number, and gets the one that is free now.
    assert!(t.is_live(b) && t.find(StoreId::from(&q)) == Some(a) && t.find(StoreId::from(&p)).is_none());
    assert_eq!(t.identify(&p, ObjectId(8), Some(Go::To)), Ok((Some(b), true)));
    assert_eq!(t.identify(&p, ObjectId(8), Some(Go::To)), Ok((Some(b), false)));
    // A new object in the place of one that has moved on.
    let c = t.reference(ROOT, name("p"), &p, ObjectId(9), OWN).unwrap();
    assert!(c.is_new && t.is_live(b) && c.ino != b && c.ino != a);
    let made = t.reference_new(ROOT, name("r"), &q, ObjectId(10));
    assert!(made.is_new && t.is_live(a) && t.find(StoreId::from(&q)) == Some(made.ino));
    // A file that is open as another object keeps its number; and so does the root.
    let file = stat(50, Kind::File);
    let open = t.reference(ROOT, name("f"), &file, ObjectId(11), OWN).unwrap().ino;
    t.pin(open);
    assert_eq!(t.identify(&file, ObjectId(12), Some(Go::To)), Err(Met::OtherObject));
    assert_eq!(t.identify(&stat(900, Kind::Dir), ObjectId(12), Some(Go::To)), Err(Met::OtherObject));
    for (ino, references) in [(a, 2), (b, 1)] {
        t.forget(ino, references);
        assert!(t.kind(ino).is_none());
    }
    assert_eq!(t.find(StoreId::from(&p)), Some(c.ino));
}

/// Another host has copied `w` to another inode, whose old number this host's copy of `x` gets.
#[test]
fn what_takes_the_place_of_an_entry_ends_no_node_that_has_an_old_number() {
    let mut t = NodeTable::new(&stat(900, Kind::Dir), true);
    let [w, x] = [stat(41, Kind::File), stat(42, Kind::File)];
    let of_w = t.reference(ROOT, name("w"), &w, ObjectId(7), OWN).unwrap().ino;
    let of_x = t.reference(ROOT, name("x"), &x, ObjectId(8), OWN).unwrap().ino;
    let copy_of_x = Stat { born: 2, ..w };
    t.exchanged(StoreId::from(&x), StoreId::from(&copy_of_x));
    assert!(t.is_live(of_w) && t.of_object(ObjectId(7)) == Some(of_w));
    assert_eq!((t.find(StoreId::from(&copy_of_x)), t.find(StoreId::from(&x))), (Some(of_x), None));
    // By its birth time it is that very inode, under another object's name.
    assert_eq!(t.identify(&copy_of_x, ObjectId(7), Some(Go::To)), Err(Met::OtherObject));
    assert_eq!(t.identify(&copy_of_x, ObjectId(70), Some(Go::To)), Err(Met::OtherObject));
    // Another one: whether it may be the node's own is asked. A directory keeps its inode.
    let other = stat(60, Kind::File);
    assert_eq!(t.identify(&other, ObjectId(7), None), Err(Met::MayGo(of_w)));
    assert_eq!(t.identify(&other, ObjectId(7), Some(Go::No)), Err(Met::OtherObject));
    assert_eq!(t.identify(&other, ObjectId(7), Some(Go::To)), Ok((Some(of_w), true)));
    let dir = t.reference(ROOT, name("dir"), &stat(61, Kind::Dir), ObjectId(12), OWN).unwrap().ino;
    assert_eq!(t.identify(&stat(62, Kind::Dir), ObjectId(12), Some(Go::To)), Err(Met::OtherObject));
    assert!(t.is_live(dir));
    let anew = t.reference(ROOT, name("dir"), &stat(62, Kind::Dir), ObjectId(12), OWN).unwrap();
    assert!(anew.is_new && !t.is_live(dir), "a new node takes its place where it is looked up");
    // An open file stays what it is. A name of it on another inode is no other node's.
    t.pin(of_x);
    let y = t.reference(ROOT, name("y"), &stat(43, Kind::File), ObjectId(9), OWN).unwrap().ino;
    assert_eq!(t.identify(&stat(43, Kind::File), ObjectId(8), Some(Go::To)), Err(Met::OtherObject));
    let copy = Stat { born: 2, ..stat(43, Kind::File) };
    assert_eq!(t.identify(&copy, ObjectId(8), Some(Go::To)), Ok((Some(of_x), false)));
    assert_eq!(t.moved(ObjectId(8), StoreId::from(&copy), (ROOT, name("x")), (ROOT, name("z"))), Some(of_x));
    assert!(t.is_live(y) && t.has_name(y, ROOT, name("y")) && !t.has_name(y, ROOT, name("z")));
    // Nor does a file that keeps its inode for another reason. An inode of another kind is not its own.
    let stays = (None, Some(Go::Stay));
    let met = t.reference(ROOT, name("w2"), &stat(63, Kind::File), ObjectId(7), stays).unwrap();
    assert!((met.ino, met.has_followed) == (of_w, false) && t.id(of_w) == Some(StoreId::from(&other)));
    assert_eq!(t.identify(&stat(64, Kind::Dir), ObjectId(7), Some(Go::Stay)), Err(Met::OtherObject));
    assert!(t.has_name(of_w, ROOT, name("w")) && t.has_name(of_w, ROOT, name("w2")));
    // Once that name is gone it is not known any more which inode a program has reached: it looks again.
    assert_eq!(t.unlinked(ObjectId(7), &stat(63, Kind::File), (ROOT, name("w2")), false), Some(of_w));
    assert!(!t.is_live(of_w) && t.of_object(ObjectId(7)).is_none());
    // The replacement of a link that was cut off, between two names.
    let [kept, other] = [stat(50, Kind::Symlink), stat(51, Kind::Symlink)];
    let link = t.reference(ROOT, name("a"), &other, ObjectId(10), OWN).unwrap().ino;
    t.united(ObjectId(10), (&kept, &other), ROOT, name("b"));
    assert!(t.has_name(link, ROOT, name("b")) && t.id(link) == Some(StoreId::from(&kept)) && t.is_live(link));
}

#[test]
fn an_object_has_one_node_and_a_node_one_object() {
    let mut t = table();
    let first = stat(40, Kind::File);
    let met = t.reference(ROOT, name("a"), &first, ObjectId(7), OWN).unwrap();
    assert_eq!(t.object(met.ino), ObjectId(7));
    let seen = t.reference(ROOT, name("a"), &first, ObjectId(8), OWN);
    assert_eq!(seen, Err(Met::OtherObject), "another file was put in its place");
    t.pin(met.ino);
    let other = stat(41, Kind::File);
    assert_eq!(t.reference(ROOT, name("a"), &other, ObjectId(7), OWN), Err(Met::OtherObject), "the object is open");
    t.unpin(met.ino);
    let new = t.reference(ROOT, name("a"), &other, ObjectId(7), OWN).unwrap();
    assert!(!t.is_live(met.ino) && t.object(new.ino) == ObjectId(7));
    t.unlinked(ObjectId(7), &other, (ROOT, name("a")), true);
    assert_eq!(t.take_unused(), []);
    t.forget(new.ino, 1);
    assert_eq!(t.take_unused(), [ObjectId(7)]);
}
