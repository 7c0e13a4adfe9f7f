//! Access control lists of the vault API: modes in step, inheritance, and a store that fails in between. That the
//! kernel enforces them is tested in mounts.

use crate::common;

use common::*;
use lamassu_store::Backend;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::sync::Arc;

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

/// A list for owner, user 1000, owning group, mask and others; without a mask, owner, owning group and others alone.
fn list(owner: u16, named: u16, group: u16, mask: Option<u16>, other: u16) -> Vec<u8> {
    let mut entries = vec![(1, owner, u32::MAX)];
    if mask.is_some() {
        entries.push((2, named, 1000));
    }
    entries.push((4, group, u32::MAX));
    entries.extend(mask.map(|m| (16, m, u32::MAX)));
    entries.push((32, other, u32::MAX));
    let mut out = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        out.extend(u16::to_le_bytes(tag));
        out.extend(u16::to_le_bytes(perm));
        out.extend(u32::to_le_bytes(id));
    }
    out
}

fn set(v: &Vault, path: &str, name: &str, value: &[u8]) -> Result<()> {
    v.set_xattr(v.ino(path), n(name), value, SetXattr::Any)
}

fn acl(v: &Vault, path: &str, name: &str) -> Option<Vec<u8>> {
    match v.get_xattr(v.ino(path), n(name)) {
        Ok(value) => Some(value),
        Err(VaultError::NoAttribute) => None,
        Err(e) => panic!("{path}: {e}"),
    }
}

fn mode(v: &Vault, path: &str) -> u32 {
    v.find(path).unwrap().attr.mode
}

/// What user 1000 and the owning group may do to `path`, by mode and list.
fn rights(v: &Vault, path: &str) -> (u32, u32) {
    let (mode, group_class) = (mode(v, path), mode(v, path) >> 3 & 7);
    match acl(v, path, ACCESS) {
        None => (mode & 7, group_class),
        Some(list) => {
            let perm = |entry: usize| u32::from(list[4 + 8 * entry + 2]);
            (perm(1) & group_class, perm(2) & group_class)
        }
    }
}

#[test]
fn modes_and_lists_are_in_step() {
    let backend = memory();
    let v = Recipe::default().make(&backend);
    v.put("f", b"x");
    set(&v, "f", ACCESS, &list(6, 7, 4, Some(6), 0)).unwrap();
    assert_eq!(mode(&v, "f"), 0o660);
    let chmod = SetAttr { mode: Some(0o754), ..SetAttr::default() };
    v.setattr(v.ino("f"), None, &chmod).unwrap();
    assert_eq!(acl(&v, "f", ACCESS), Some(list(7, 7, 4, Some(5), 4)));
    // A list that says no more than a mode is none.
    set(&v, "f", ACCESS, &list(6, 0, 4, None, 4)).unwrap();
    assert_eq!((mode(&v, "f"), acl(&v, "f", ACCESS)), (0o644, None));
    assert!(v.list_xattr(v.ino("f")).unwrap().is_empty());
    v.remove_xattr(v.ino("f"), n(ACCESS)).unwrap();
    assert!(matches!(set(&v, "f", ACCESS, b"no list"), Err(VaultError::Invalid)));
    assert!(matches!(set(&v, "f", DEFAULT, &list(7, 7, 7, Some(7), 7)), Err(VaultError::Io { .. })));
    set(&v, "f", ACCESS, &list(7, 1, 2, Some(3), 4)).unwrap();
    v.close().unwrap();
    let v = Recipe::default().open(&backend).unwrap();
    assert_eq!(acl(&v, "f", ACCESS), Some(list(7, 1, 2, Some(3), 4)));
    v.clean();
}

#[test]
fn a_default_list_takes_the_place_of_the_umask() {
    let backend = memory();
    let v = Recipe::default().make(&backend);
    let masked = Owner { umask: 0o077, ..me() };
    let make = |v: &Vault, parent: &str, name: &str| {
        let (_, h) = v.create(v.ino(parent), n(name), 0o666, RW, masked).unwrap();
        v.release(h).unwrap();
        v.mkdir(v.ino(parent), n(&format!("{name}-dir")), 0o777, masked).unwrap();
        v.mknod(v.ino(parent), n(&format!("{name}-fifo")), Kind::Fifo, 0o666, 0, masked).unwrap();
    };
    v.dir("d");
    make(&v, "d", "before");
    assert_eq!([mode(&v, "d/before"), mode(&v, "d/before-dir"), mode(&v, "d/before-fifo")], [0o600, 0o700, 0o600]);
    let default = list(7, 7, 5, Some(7), 1);
    set(&v, "d", DEFAULT, &default).unwrap();
    make(&v, "d", "f");
    assert_eq!([mode(&v, "d/f"), mode(&v, "d/f-dir")], [0o660, 0o771]);
    assert_eq!(acl(&v, "d/f", ACCESS), Some(list(6, 7, 5, Some(6), 0)));
    assert_eq!(acl(&v, "d/f-dir", ACCESS), Some(default.clone()));
    assert_eq!((acl(&v, "d/f", DEFAULT), acl(&v, "d/f-dir", DEFAULT)), (None, Some(default)));
    v.clean();
}

#[test]
fn without_attributes_a_new_entry_is_no_wider_than_its_list() {
    let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
    let backend: Arc<dyn Backend> = fault.clone();
    let v = Recipe::default().make(&backend);
    v.dir("d");
    set(&v, "d", DEFAULT, &list(7, 7, 4, Some(7), 0)).unwrap();
    fault.faults().fail_always(Call::SetXattr, libc::EPERM);
    v.mknod(v.ino("d"), n("fifo"), Kind::Fifo, 0o666, 0, me()).unwrap();
    assert_eq!(mode(&v, "d/fifo"), 0o640);
}

#[test]
fn a_store_that_fails_in_between_gives_nobody_more() {
    let lists = [
        list(6, 0, 4, None, 4),
        list(6, 7, 0, Some(7), 0),
        list(7, 1, 7, Some(1), 0),
        list(6, 6, 6, Some(4), 6),
        list(0, 0, 0, None, 0),
    ];
    for (old, new) in lists.iter().flat_map(|a| lists.iter().map(move |b| (a, b))) {
        for (nth, dies) in (1..=6).flat_map(|nth| [(nth, false), (nth, true)]) {
            let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
            let backend: Arc<dyn Backend> = fault.clone();
            let v = Recipe::default().make(&backend);
            v.put("f", b"x");
            set(&v, "f", ACCESS, new).unwrap();
            let allowed = rights(&v, "f");
            set(&v, "f", ACCESS, old).unwrap();
            let (before, old_mode) = (rights(&v, "f"), mode(&v, "f"));
            let start = fault.faults().changes();
            fault.faults().rule(move |c| {
                let hit = c.changes == start + nth || (dies && c.changes > start + nth);
                (c.call.is_change() && hit).then_some(Fault::Errno(libc::EIO))
            });
            let done = set(&v, "f", ACCESS, new);
            fault.faults().clear_rules();
            let now = rights(&v, "f");
            let what = format!("{old:?} to {new:?}, change {nth}, dies: {dies}: {before:?} {allowed:?} {now:?}");
            match done {
                Ok(()) => assert_eq!(now, allowed, "{what}"),
                Err(_) if !dies => assert_eq!((now, mode(&v, "f")), (before, old_mode), "undone: {what}"),
                Err(_) => {
                    assert_eq!(now.0 & !(before.0 | allowed.0), 0, "{what}");
                    assert_eq!(now.1 & !(before.1 | allowed.1), 0, "{what}");
                }
            }
        }
    }
}
