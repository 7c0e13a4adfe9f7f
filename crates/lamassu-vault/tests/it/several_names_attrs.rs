//! Attributes, sizes and owners of a file where another user has put an inode under one of its names, where its first
//! page is damaged, or where a crash has left another owner.
use crate::common;
use crate::several_names::{
    THEIRS, content_of, is_damaged, is_refused, is_root, moved_there, put_in_its_place, stored, with_two_names,
};

use common::keyed::{ACCESS, acl};
use common::turns::{Host, Lab};
use common::*;
use lamassu_format::profile::Choice;
use lamassu_format::{Method, Profile};
use lamassu_store::StoreError;
use lamassu_vault::event::Events;
use lamassu_vault::*;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, fchown, lchown};
use std::sync::atomic::Ordering;

const BY_ROOT: SetAttr =
    SetAttr { mode: None, uid: None, gid: None, size: None, atime: None, mtime: None, by: Some(0) };

/// Another file of root's is where the other user has moved it: under a name of `f`, which is asked for by the other.
#[test]
fn attributes_of_a_file_of_roots_under_another_name_stay() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let mut a = Host::default();
    let v = lab.turn(&mut a, 1, true);
    let (_, at) = with_two_names(&lab, &v);
    lab.end(&mut a, v);
    let v = moved_there(&lab, &at[1], 0o600);
    let f = v.ino("f");
    for name in ["user.note", ACCESS] {
        is_refused(v.remove_xattr(f, n(name)));
    }
    is_refused(v.set_xattr(f, n("user.note"), b"of f", SetXattr::Any));
    is_refused(v.set_xattr(f, n(ACCESS), &acl(1000, 7), SetXattr::Any));
    let mut names = [0_u8; 1000];
    assert_eq!(rustix::fs::listxattr(&at[1], &mut names[..]).unwrap_or_default(), 0);
    v.close().unwrap();
    // The file has none that it has not got.
    fs::remove_file(&at[1]).unwrap();
    fs::hard_link(&at[0], &at[1]).unwrap();
    let v = lab.turn(&mut Host::default(), 1, true);
    assert!(v.list_xattr(v.ino("f")).unwrap().is_empty());
    lab.opened(&[1]).clean();
}

/// A user shortens a program, which clears its set-id bits: both, or neither.
#[test]
fn what_keeps_its_set_id_bits_keeps_its_content() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let v = lab.turn(&mut a, 1, true);
    let (f, at) = with_two_names(&lab, &v);
    v.setattr(f, None, &SetAttr { mode: Some(0o4755), ..BY_ROOT }).unwrap();
    let handle = v.open_file(f, RW).unwrap();
    put_in_its_place(&at[1]);
    assert_eq!(v.ino("d/g"), f);
    let shorter = SetAttr { size: Some(3), mode: Some(0o755), ..SetAttr::default() };
    is_refused(v.setattr(f, Some(handle), &shorter));
    assert_eq!((v.getattr(f, None).unwrap().mode & 0o7777, content_of(&v, handle)), (0o4755, b"content".to_vec()));
    v.release(handle).unwrap();
    fs::remove_file(&at[1]).unwrap();
    fs::hard_link(&at[0], &at[1]).unwrap();
    lab.end(&mut a, v);
    // Where nothing is in the way; the other name is looked up for a set-id bit.
    for mode in [0o2755, 0o755] {
        let v = lab.turn(&mut b, 1, true);
        v.put("f", b"content");
        v.setattr(v.ino("f"), None, &SetAttr { mode: Some(mode), size: Some(3), ..BY_ROOT }).unwrap();
        let attr = v.find("f").unwrap().attr;
        assert_eq!((attr.mode & 0o7777, v.get("f")), (mode, b"con".to_vec()));
        lab.end(&mut b, v);
        b = Host::default();
    }
    lab.opened(&[1]).clean();
}

/// Damage of the right owner's file is reported as such. Of what has another owner nothing is known.
#[test]
fn a_file_whose_first_page_is_damaged_is_not_given_away() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let mut a = Host::default();
    let v = lab.turn(&mut a, 1, true);
    let (_, at) = with_two_names(&lab, &v);
    lab.end(&mut a, v);
    let file = fs::File::options().write(true).open(&at[0]).unwrap();
    file.write_all_at(&[0xaa; 64], 500).unwrap();
    let to_another = SetAttr { uid: Some(7), ..BY_ROOT };
    let events = Events::default();
    let v = lab.opened_with(&[1], Options { events: events.clone(), ..options(false) });
    let f = v.ino("d/g");
    is_damaged(v.setattr(f, None, &to_another));
    assert_eq!(events.counts().found.iter().map(|found| found.count).sum::<u64>(), 1, "{:?}", events.counts());
    // It is not emptied, either: it may be another user's, who has names of it.
    is_damaged(v.setattr(f, None, &SetAttr { size: Some(0), ..BY_ROOT }));
    assert_eq!((file.metadata().unwrap().uid(), file.metadata().unwrap().len() > 0), (0, true));
    v.close().unwrap();
    fchown(&file, Some(THEIRS), None).unwrap();
    let v = lab.opened_with(&[1], options(false));
    is_refused(v.setattr(v.ino("f"), None, &to_another));
}

/// Who may use only approved primitives gives files of other hashes away, which they cannot read.
#[test]
fn owners_of_files_that_do_not_open_are_changed() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let mut a = Host::default();
    let v = lab.turn(&mut a, 1, true);
    v.dir("d");
    let profile = Profile::DEFAULT.by(Method::new(true, true)).unwrap();
    v.set_profile(v.ino("d"), Choice::of_all(profile, v.ring().suite()), false, &Quiet).unwrap();
    v.put("d/f", b"content");
    lab.end(&mut a, v);
    let v = lab.opened_with(&[1], Options { approved_only: true, ..options(false) });
    let f = v.ino("d/f");
    let opened = v.open_file(f, RO);
    assert!(matches!(&opened, Err(VaultError::Store(StoreError::NotApproved(_)))), "{opened:?}");
    v.setattr(f, None, &SetAttr { uid: Some(7), ..BY_ROOT }).unwrap();
    assert_eq!(stored(&lab, &v, "d/f").metadata().unwrap().uid(), 7);
    v.close().unwrap();
    lab.opened(&[1]).clean();
}

/// All names of a file are looked for, also those that no commit has yet.
#[test]
fn set_id_bits_are_given_beside_a_name_that_was_just_made_and_forgotten() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let mut a = Host::default();
    let v = lab.turn(&mut a, 1, true);
    v.put("f", b"content");
    v.sync_all().unwrap();
    let before = lab.table.commits.lock().len();
    let f = v.ino("f");
    // In a directory that is new itself.
    v.link(f, v.dir("d"), n("g")).unwrap();
    v.forget(f, u64::MAX);
    v.setattr(v.ino("f"), None, &SetAttr { mode: Some(0o4755), ..BY_ROOT }).unwrap();
    assert_eq!(lab.table.commits.lock().len(), before, "no commit was made meanwhile");
    assert_eq!(v.find("d/g").unwrap().attr.mode & 0o7777, 0o4755);
    lab.end(&mut a, v);
    lab.opened(&[1]).clean();
}

/// A file without a name has none to be looked for among all that the vault has.
#[test]
fn a_refused_set_id_bit_of_a_removed_file_costs_no_search() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let mut a = Host::default();
    let v = lab.turn(&mut a, 1, true);
    let (f, _) = with_two_names(&lab, &v);
    let handle = v.open_file(f, RW).unwrap();
    let set_id = SetAttr { mode: Some(0o4755), ..SetAttr::default() };
    v.unlink(ROOT, n("f")).unwrap();
    v.setattr(f, Some(handle), &set_id).unwrap();
    v.unlink(v.ino("d"), n("g")).unwrap();
    let searches = lab.table.searches.load(Ordering::SeqCst);
    is_refused(v.setattr(f, Some(handle), &set_id));
    assert_eq!(lab.table.searches.load(Ordering::SeqCst), searches);
    v.release(handle).unwrap();
    lab.end(&mut a, v);
}

/// A host changed the owner of a file, and stopped before that was durable. The one that took the file over gave its
/// copy the owner that it saw.
#[test]
fn root_mends_an_owner_that_a_crash_has_left_also_where_the_file_is_known() {
    if !is_root() {
        return;
    }
    for is_dir in [false, true] {
        let lab = Lab::new();
        let (mut a, mut b) = (Host::default(), Host::default());
        let v = lab.turn(&mut a, 1, true);
        if is_dir {
            _ = v.dir("f")
        } else {
            v.put("f", b"content")
        }
        let at = stored(&lab, &v, "f");
        lab.end(&mut a, v);
        match is_dir {
            true => lchown(&at, Some(THEIRS), Some(THEIRS)).unwrap(),
            false => put_in_its_place(&at),
        }
        let root = SetAttr { uid: Some(0), gid: Some(0), ..BY_ROOT };
        for host in [&mut a, &mut b] {
            let v = lab.turn(host, 1, true);
            is_refused(v.setattr(v.ino("f"), None, &SetAttr { mode: Some(0o700), ..SetAttr::default() }));
            assert_eq!(v.find("f").unwrap().attr.uid, 0);
            lab.end(host, v);
        }
        let v = lab.turn(&mut a, 1, true);
        v.setattr(v.ino("f"), None, &root).unwrap();
        lab.end(&mut a, v);
        assert_eq!(at.metadata().unwrap().uid(), 0);
        lab.opened(&[1]).clean();
    }
}
