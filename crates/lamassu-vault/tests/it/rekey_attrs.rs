//! Attributes under the names of several epochs: a change that was cut off leaves the value of before under an older
//! name. It is never shown again.
use crate::common;

use common::keyed::{DEFAULT, acl, get, set};
use common::*;
use lamassu_format::name::xattr_name;
use lamassu_store::Backend;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::collections::HashSet;
use std::ffi::OsString;
use std::sync::Arc;

/// How many files have an attribute: enough for the store to list the older name first of some, and last of others.
const FILES: usize = 12;

fn file(i: usize) -> (String, String) {
    (format!("f{i}"), format!("user.{i}"))
}

/// Attributes whose newer value is stored under the second epoch, and the one of before under the first.
fn half_changed(recipe: &Recipe) -> (Arc<FaultBackend>, Arc<dyn Backend>) {
    let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
    let backend: Arc<dyn Backend> = fault.clone();
    let v = recipe.make(&backend);
    for (path, name) in (0..FILES).map(file) {
        v.put(&path, b"content");
        set(&v, &path, &name, b"V1");
    }
    v.dir("d");
    set(&v, "d", DEFAULT, &acl(1000, 7));
    v.close().unwrap();
    let v = recipe.open_with(&backend, &[1], &[2, 1]);
    fault.faults().fail_always(Call::RemoveXattr, libc::EIO);
    for (path, name) in (0..FILES).map(file) {
        v.set_xattr(v.ino(&path), n(&name), b"V2", SetXattr::Any).unwrap_err();
    }
    v.set_xattr(v.ino("d"), n(DEFAULT), &acl(1000, 4), SetXattr::Any).unwrap_err();
    fault.faults().clear_rules();
    v.close().unwrap();
    (fault, backend)
}

#[track_caller]
fn is_newer(v: &Vault, what: &str) {
    for (path, name) in (0..FILES).map(file) {
        assert_eq!(get(v, &path, &name).unwrap(), b"V2", "{what}: {path}");
    }
    assert_eq!(get(v, "d", DEFAULT).unwrap(), acl(1000, 4), "{what}");
}

/// Whether the store lists the older of two names of an attribute first.
fn lists_older_first(recipe: &Recipe, backend: &Arc<dyn Backend>, v: &Vault, i: usize) -> bool {
    let (path, name) = file(i);
    let held = backend.root().hold(v.stored_path(n(&path)).unwrap().as_os_str()).unwrap();
    let listed = held.list_xattr().unwrap();
    let names = recipe.ring_of_epochs(&[1], &[2, 1]).seal_xattr_names(name.as_bytes());
    let place = |sealed: &[u8]| {
        let stored = OsString::from(xattr_name(sealed));
        listed.iter().position(|attr| *attr == stored).unwrap()
    };
    place(&names[1]) < place(&names[0])
}

#[test]
fn rekeying_takes_the_newest_of_two_older_values() {
    for recipe in [Recipe::default(), Recipe::default().anchored(), Recipe::plain().anchored()] {
        let (_, backend) = half_changed(&recipe);
        let v = recipe.open_with(&backend, &[1], &[3, 2, 1]);
        is_newer(&v, "before");
        let orders: HashSet<bool> = (0..FILES).map(|i| lists_older_first(&recipe, &backend, &v, i)).collect();
        assert_eq!(orders.len(), 2, "both orders of the listing");
        let done = v.rekey(Rekey::Outer, None, &Quiet).unwrap();
        assert!(done.complete && done.failed == 0, "{done:?}");
        is_newer(&v, "re-keyed");
        v.close().unwrap();
        let v = recipe.open_with(&backend, &[1], &[3]);
        is_newer(&v, "without the older keys");
        v.clean();
    }
}

/// A removal that is cut off shows the newer value still, or none.
#[test]
fn a_removal_never_shows_the_value_of_before() {
    for recipe in [Recipe::default(), Recipe::default().anchored()] {
        let (fault, backend) = half_changed(&recipe);
        let v = recipe.open_with(&backend, &[1], &[2, 1]);
        for (path, name) in (0..FILES).map(file) {
            let second = fault.faults().calls(Call::RemoveXattr) + 2;
            fault
                .faults()
                .rule(move |c| (c.call == Call::RemoveXattr && c.nth == second).then_some(Fault::Errno(libc::EIO)));
            v.remove_xattr(v.ino(&path), n(&name)).unwrap_err();
            fault.faults().clear_rules();
            assert_eq!(get(&v, &path, &name).unwrap(), b"V2", "{path}");
            v.remove_xattr(v.ino(&path), n(&name)).unwrap();
            assert!(matches!(get(&v, &path, &name), Err(VaultError::NoAttribute)), "{path}");
        }
        v.close().unwrap();
    }
}
