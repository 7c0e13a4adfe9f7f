//! A store that gives the number of a removed inode to the next one, and somebody who removes entries of their own
//! directory behind the mount: what comes by the number is never taken for what had it before.

use crate::common;

use common::{Quiet, RO, RW, Recipe, Short, me, n};
use lamassu_store::Backend;
use lamassu_store::backend::MemoryBackend;
use lamassu_store::backend::memory::Numbers;
use lamassu_vault::{Entry, Kind, SetAttr, Vault, VaultError, check};
use std::sync::Arc;

/// How the store gives numbers, and whether the vault has an anchor.
const EACH: [(Numbers, bool); 4] =
    [(Numbers::Again, true), (Numbers::AgainUnseen, true), (Numbers::Again, false), (Numbers::AgainUnseen, false)];

struct Lab {
    backend: Arc<dyn Backend>,
    v: Vault,
    is_anchored: bool,
}

impl Lab {
    /// A vault with the directories `theirs` and `ours`.
    fn new(numbers: Numbers, is_anchored: bool) -> Lab {
        let backend: Arc<dyn Backend> = Arc::new(MemoryBackend::with_numbers(numbers));
        let recipe = if is_anchored { Recipe::plain().anchored() } else { Recipe::plain() };
        let v = recipe.make(&backend);
        v.dir("theirs");
        v.dir("ours");
        // What nodes and links are made in is there before numbers become free.
        v.mknod(v.ino(""), n("fifo"), Kind::Fifo, 0o600, 0, me()).unwrap();
        Lab { backend, v, is_anchored }
    }

    fn number(&self, dir: &str, name: &str) -> u64 {
        self.backend.root().open_dir(n(dir)).unwrap().stat_entry(n(name)).unwrap().ino
    }

    /// The attacker's file, which the kernel refers to and which is gone from the store; its backing number.
    fn removed_behind(&self) -> (Entry, u64) {
        self.v.put("theirs/k", b"the attacker's content");
        let known = self.v.lookup(self.v.ino("theirs"), n("k")).unwrap();
        self.v.sync_all().unwrap();
        let number = self.number("theirs", "k");
        self.backend.root().open_dir(n("theirs")).unwrap().unlink(n("k")).unwrap();
        (known, number)
    }

    fn is_gone(&self, known: &Entry) {
        let ino = known.attr.ino;
        // With an anchor it is missed, as long as nothing else has come by its number.
        let stale = |what: Result<(), VaultError>| match what {
            Err(VaultError::Stale) => {}
            Err(VaultError::Outdated { .. }) if self.is_anchored => {}
            other => panic!("{other:?}"),
        };
        stale(self.v.open_file(ino, RO).map(drop));
        stale(self.v.open_file(ino, RW).map(drop));
        stale(self.v.getattr(ino, None).map(drop));
        stale(self.v.setattr(ino, None, &SetAttr { mode: Some(0o777), ..SetAttr::default() }).map(drop));
    }
}

impl Lab {
    /// What was removed behind the vault is all that a check finds, and it needs an anchor for that.
    fn is_otherwise_clean(&self) {
        if !self.is_anchored {
            self.v.clean();
            return;
        }
        let problems = self.v.check(&[], false, &Quiet).unwrap().problems;
        assert!(problems.len() == 1 && problems[0].kind == check::kind::MISSING, "{problems:#?}");
    }
}

fn is_another(new: &Entry, old: &Entry) {
    assert_ne!((new.attr.ino, new.generation), (old.attr.ino, old.generation));
}

#[test]
fn what_is_made_gets_no_number_that_the_kernel_knows_as_anothers() {
    type Make = fn(&Vault, u64) -> Entry;
    let makes: [(Kind, Make); 4] = [
        (Kind::File, |v, dir| {
            let (entry, handle) = v.create(dir, n("new"), 0o600, RW, me()).unwrap();
            v.write(handle, 0, b"the victim's content").unwrap();
            v.release(handle).unwrap();
            entry
        }),
        (Kind::Dir, |v, dir| v.mkdir(dir, n("new"), 0o700, me()).unwrap()),
        (Kind::Fifo, |v, dir| v.mknod(dir, n("new"), Kind::Fifo, 0o600, 0, me()).unwrap()),
        (Kind::Symlink, |v, dir| v.symlink(dir, n("new"), b"target", me()).unwrap()),
    ];
    for (numbers, is_anchored) in EACH {
        for (kind, make) in makes {
            let lab = Lab::new(numbers, is_anchored);
            let (known, number) = lab.removed_behind();
            let made = make(&lab.v, lab.v.ino("ours"));
            assert_eq!((lab.number("ours", "new"), made.attr.kind), (number, kind), "the store has given it again");
            is_another(&made, &known);
            lab.is_gone(&known);
            assert_eq!(lab.v.getattr(made.attr.ino, None).unwrap().mode, made.attr.mode);
            if kind == Kind::File {
                assert_eq!(lab.v.get("ours/new"), b"the victim's content");
            }
            lab.is_otherwise_clean();
        }
    }
}

#[test]
fn of_one_kind_too() {
    for (numbers, is_anchored) in EACH {
        let lab = Lab::new(numbers, is_anchored);
        let known = lab.v.mkdir(lab.v.ino("theirs"), n("d"), 0o777, me()).unwrap();
        let number = lab.number("theirs", "d");
        lab.backend.root().open_dir(n("theirs")).unwrap().remove_dir(n("d")).unwrap();
        let made = lab.v.mkdir(lab.v.ino("ours"), n("new"), 0o700, me()).unwrap();
        assert_eq!(lab.number("ours", "new"), number);
        is_another(&made, &known);
        lab.v.put("ours/new/f", b"within");
        lab.is_gone(&known);
        lab.is_otherwise_clean();
    }
}

/// Without an anchor: with one it is not shown at all.
#[test]
fn what_somebody_else_made_is_another_too() {
    // Without birth times only what has another name is told.
    for (numbers, name) in [(Numbers::Again, "k"), (Numbers::AgainUnseen, "other")] {
        let lab = Lab::new(numbers, false);
        let (known, number) = lab.removed_behind();
        lab.backend.root().open_dir(n("theirs")).unwrap().create_file(n(name)).unwrap();
        assert_eq!(lab.number("theirs", name), number);
        let met = lab.v.lookup(lab.v.ino("theirs"), n(name)).unwrap();
        is_another(&met, &known);
        lab.is_gone(&known);
        assert_eq!(lab.v.get(&format!("theirs/{name}")), b"");
    }
}

#[test]
fn an_entry_that_is_held_is_the_one_that_was_seen() {
    let backend = MemoryBackend::with_numbers(Numbers::Again);
    let root = backend.root();
    drop(root.create_file(n("a")).unwrap());
    let seen = root.stat_entry(n("a")).unwrap();
    assert!(root.hold_same(n("a"), &seen).unwrap().is_some());
    root.unlink(n("a")).unwrap();
    drop(root.create_file(n("a")).unwrap());
    assert_eq!(root.stat_entry(n("a")).unwrap().ino, seen.ino);
    assert!(root.hold_same(n("a"), &seen).unwrap().is_none());
    assert!(root.open_same(n("a"), &seen, true).unwrap().is_none());
}
