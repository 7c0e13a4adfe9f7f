//! Re-keying where another user has put an inode of their own under a name of a file, or under one of several.
use crate::common;
use crate::several_names::{THEIRS, is_root, put_in_its_place, set_id, stored};

use common::keyed::{get, set};
use common::turns::{Host, Lab};
use common::*;
use lamassu_store::Backend;
use lamassu_store::backend::FaultBackend;
use lamassu_store::backend::fault::Call;
use lamassu_vault::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::Path;
use std::sync::Arc;

/// Re-keying gives set-id bits back that a write has cleared: to the inode that it has written.
#[test]
fn rekeying_gives_no_inode_the_set_id_bits_of_another() {
    if !is_root() {
        return;
    }
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let v = lab.turn(&mut a, 1, true);
    v.dir("d");
    v.put("d/g", b"content");
    let at = stored(&lab, &v, "d/g");
    lab.end(&mut a, v);
    // A program of the other user's under the name; then a file of root's, which that user can move.
    let roots = lab.dir.path().join("roots");
    fs::copy(&at, &roots).unwrap();
    fs::set_permissions(&roots, fs::Permissions::from_mode(0o755)).unwrap();
    put_in_its_place(&at);
    fs::set_permissions(&at, fs::Permissions::from_mode(0o4755)).unwrap();
    let (from, to) = (roots.clone(), at.clone());
    lab.backend.faults().rule(move |c| {
        // The walk has seen the file, and has not opened it.
        if c.call == Call::ListXattr && c.name == to.file_name() {
            let _ = fs::rename(&from, &to);
        }
        None
    });
    let v = lab.turn(&mut b, 2, true);
    let done = v.rekey(Rekey::Outer, None, &Quiet).unwrap();
    lab.backend.faults().clear_rules();
    assert!(done.complete && !roots.exists(), "{done:?}");
    let m = at.metadata().unwrap();
    assert_eq!((m.uid(), m.mode() & 0o7777), (0, 0o755));
    lab.end(&mut b, v);
}

/// Nor those that somebody clears meanwhile.
#[test]
fn rekeying_gives_no_set_id_bits_back_that_root_takes() {
    if !is_root() {
        return;
    }
    let (dir, local) = local_fast();
    let fault = Arc::new(FaultBackend::new(local));
    let backend: Arc<dyn Backend> = fault.clone();
    let recipe = Recipe::default();
    let v = recipe.make(&backend);
    v.put("f", b"content");
    v.setattr(v.ino("f"), None, &SetAttr { mode: Some(0o4755), ..SetAttr::default() }).unwrap();
    let at = dir.path().join(v.stored_path(n("f")).unwrap());
    v.close().unwrap();
    let v = recipe.open_with(&backend, &[1], &[2, 1]);
    let taken = at.clone();
    fault.faults().rule(move |c| {
        if c.call == Call::Write {
            fs::set_permissions(&taken, fs::Permissions::from_mode(0o755)).unwrap();
        }
        None
    });
    assert!(v.rekey(Rekey::Outer, None, &Quiet).unwrap().complete);
    fault.faults().clear_rules();
    assert_eq!(set_id(&at), 0);
    v.close().unwrap();
}

/// Re-keying leaves the other user's copy alone. Changed there, attributes and content would be stale under the other
/// name.
#[test]
fn rekeying_does_not_change_a_copy_under_one_of_the_names() {
    if !is_root() {
        return;
    }
    // The walk meets the copy first, or last.
    for names in [["f", "d/g"], ["d/g", "f"]] {
        let (dir, local) = local_fast();
        let backend: Arc<dyn Backend> = Arc::new(FaultBackend::new(local));
        let recipe = Recipe::default().anchored();
        let v = recipe.make(&backend);
        let d = v.dir("d");
        v.put(names[0], b"content");
        set(&v, names[0], "user.a", b"value");
        let (parent, name) = if names[1] == "f" { (ROOT, "f") } else { (d, "g") };
        v.link(v.ino(names[0]), parent, n(name)).unwrap();
        let at = dir.path().join(v.stored_path(n(names[1])).unwrap());
        v.close().unwrap();
        copied_with_attributes(&at);
        fs::set_permissions(&at, fs::Permissions::from_mode(0o444)).unwrap();
        let before = at.metadata().unwrap();
        let v = recipe.open_with(&backend, &[1], &[2, 1]);
        let done = v.rekey(Rekey::Outer, None, &Quiet).unwrap();
        assert!(done.failed > 0, "{done:?}");
        let after = at.metadata().unwrap();
        assert_eq!((before.ctime_nsec(), before.mode()), (after.ctime_nsec(), after.mode()));
        assert_eq!((v.get(names[0]), get(&v, names[0], "user.a").unwrap()), (b"content".to_vec(), b"value".to_vec()));
        v.close().unwrap();
        // The file itself was re-keyed.
        let v = recipe.open_with(&backend, &[1], &[2]);
        assert_eq!((v.get(names[0]), get(&v, names[0], "user.a").unwrap()), (b"content".to_vec(), b"value".to_vec()));
        v.close().unwrap();
    }
}

/// The same of a link, whose names would all get the other user's.
#[test]
fn rekeying_gives_no_name_a_link_of_another_user() {
    if !is_root() {
        return;
    }
    for names in [["l", "d/m"], ["d/m", "l"]] {
        let lab = Lab::new();
        let mut a = Host::default();
        let v = lab.turn(&mut a, 1, true);
        let d = v.dir("d");
        let place = |name: &str| if name == "l" { (ROOT, n("l")) } else { (d, n("m")) };
        let (parent, name) = place(names[0]);
        v.symlink(parent, name, b"target", me()).unwrap();
        let (parent, name) = place(names[1]);
        v.link(v.ino(names[0]), parent, name).unwrap();
        let at = names.map(|name| stored(&lab, &v, name));
        lab.end(&mut a, v);
        copied_with_attributes(&at[1]);
        let v = lab.turn(&mut Host::default(), 2, true);
        assert!(v.rekey(Rekey::Outer, None, &Quiet).unwrap().failed > 0);
        v.close().unwrap();
        assert_eq!(at[0].symlink_metadata().unwrap().uid(), 0);
        let v = lab.turn(&mut Host::default(), 2, true);
        assert_eq!(v.readlink(v.ino(names[0])).unwrap(), b"target");
        v.close().unwrap();
    }
}

/// [`put_in_its_place`], with the attributes.
fn copied_with_attributes(theirs: &Path) {
    let beside = theirs.with_file_name("beside");
    let copied = std::process::Command::new("cp").arg("-a").args([theirs, &beside]).status().unwrap();
    assert!(copied.success());
    lchown(&beside, Some(THEIRS), Some(THEIRS)).unwrap();
    fs::rename(&beside, theirs).unwrap();
}
