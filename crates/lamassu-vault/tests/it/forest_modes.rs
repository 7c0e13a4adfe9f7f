//! Roots of datasets that the one who mounts may not look into: modes that are lent for a moment, and headers that are
//! replaced meanwhile.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use common::n;
use common::wood::wood;
use lamassu_format::header::{NameMode, VaultHeader};
use lamassu_vault::forest::{ROOT_MEMBER, local as own_number, member_of};
use lamassu_vault::{FileSystem, ROOT, SetAttr, VaultError};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

#[test]
fn a_header_is_read_whole_while_it_is_replaced() {
    let w = wood(NameMode::Encrypted);
    let a = member_of(w.plant("a", true));
    let path = w.dir.path().join(w.forest.stored_dir(a).unwrap()).join("lamassu.vault");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..500 {
                let update = lamassu_keys::Update::begin(&path, &lamassu_keys::nobody()).unwrap();
                let header: VaultHeader = update.read().unwrap();
                update.replace(&header).unwrap();
            }
            done.store(true, Relaxed);
        });
        while !done.load(Relaxed) {
            w.forest.header(a).unwrap();
        }
    });
}

/// Runs `f` as a user without privileges. Only its thread, and those made in it, change their user.
fn unprivileged(f: impl FnOnce() + Send) {
    const NOBODY: i64 = 65_534;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if rustix::process::geteuid().is_root() {
                // SAFETY: the system call, unlike the function of libc, concerns the calling thread alone, and no
                // memory.
                let rc = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
                assert_eq!(rc, 0);
            }
            f();
        });
    });
}

fn shut(dir: &Path, mode: u32) {
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Mode and change time, which moves at the latest in a tick of the store's clock.
fn state_of(dir: &Path) -> (u32, i64, i64) {
    std::thread::sleep(Duration::from_millis(20));
    let st = dir.metadata().unwrap();
    (st.mode() & 0o7777, st.ctime(), st.ctime_nsec())
}

#[test]
fn a_shut_root_is_looked_into_once() {
    unprivileged(|| {
        let w = wood(NameMode::Encrypted);
        let path = w.stored(w.plant("a", true));
        shut(&path, 0);
        let forest = w.again(false);
        let known_by_now = || {
            let root = forest.lookup(ROOT, n("a")).unwrap().attr;
            assert_eq!((own_number(root.ino), root.mode), (ROOT, 0));
            let before = state_of(&path);
            assert_eq!(before.0, 0);
            forest.lookup(ROOT, n("a")).unwrap();
            assert_eq!(state_of(&path), before, "it is known");
            root.ino
        };
        let root = known_by_now();
        assert!(forest.at(root).unwrap().lookup(ROOT, n("f")).is_err(), "open, and shut");
        known_by_now();
        forest.setattr(root, None, &SetAttr { mode: Some(0o700), ..SetAttr::default() }).unwrap();
        assert!(matches!(forest.lookup(root, n("f")), Err(VaultError::NotFound)));
        forest.close().unwrap();
    });
}

#[test]
fn nothing_is_lent_where_nothing_may_be_written() {
    unprivileged(|| {
        let w = wood(NameMode::Encrypted);
        let (a, b) = (w.stored(w.plant("a", true)), w.stored(w.plant("b", true)));
        w.put("b/f", b"unlisted");
        shut(&a, 0);
        shut(&b, 0o300);
        let forest = w.again(true);
        let before = [state_of(&a), state_of(&b)];
        let found = forest.lookup(ROOT, n("a")).unwrap().attr;
        assert_eq!((member_of(found.ino), found.mode), (ROOT_MEMBER, 0), "a directory that nobody enters");
        assert!(forest.lookup(found.ino, n("f")).is_err());
        let searched = forest.lookup(ROOT, n("b")).unwrap().attr.ino;
        assert_eq!(own_number(searched), ROOT);
        assert_eq!(forest.lookup(searched, n("f")).unwrap().attr.size, 8);
        forest.header(member_of(searched)).unwrap();
        assert_eq!([state_of(&a), state_of(&b)], before);
        forest.close().unwrap();
        let forest = w.again(false);
        forest.freeze().unwrap();
        for name in ["a", "b"] {
            let refused = forest.lookup(ROOT, n(name)).map(drop);
            assert!(matches!(refused, Err(VaultError::Frozen)), "{refused:?}");
        }
        assert_eq!([state_of(&a), state_of(&b)], before);
        forest.thaw().unwrap();
        for name in ["a", "b"] {
            assert_eq!(own_number(forest.lookup(ROOT, n(name)).unwrap().attr.ino), ROOT);
        }
        forest.close().unwrap();
    });
}

#[test]
fn a_lent_mode_of_a_root_never_shows_and_undoes_no_chmod() {
    unprivileged(|| {
        let w = wood(NameMode::Encrypted);
        let a = w.plant("a", true);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Relaxed) {
                        assert_eq!(w.forest.lookup(ROOT, n("a")).unwrap().attr.ino, a);
                        w.forest.header(member_of(a)).unwrap();
                    }
                });
            }
            let modes = [0, 0o040, 0o300, 0o500].into_iter().cycle().take(400);
            let shown = modes.map(|mode| {
                let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
                let shown = w.forest.setattr(a, None, &set).unwrap().mode;
                let seen = (0..10).all(|_| w.forest.getattr(a, None).unwrap().mode == mode);
                shown == mode && seen
            });
            let steady = shown.filter(|right| !right).count();
            done.store(true, Relaxed);
            assert_eq!(steady, 0, "times that another mode was seen than the one that was set");
        });
        w.forest.close().unwrap();
    });
}
