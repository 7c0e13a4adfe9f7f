//! Files sealed outside the vault's directory: what they need of the vault.
use crate::common;

use common::*;
use lamassu_format::header::HEADER_MAX;
use lamassu_format::name::{HEADER, SESSIONS, SESSIONS_RECORD};
use lamassu_store::Backend;
use lamassu_vault::detached::{Detached, Sealing};
use lamassu_vault::*;
use std::sync::Arc;
use std::time::Duration;

const PART: u64 = 8 << 20;
/// More than is settled at once.
const WINDOW: usize = 5 << 20;
/// What lies in the place of a header.
const SHOWN: &[u8] = b"header";

fn made() -> (Arc<dyn Backend>, Arc<Vault>) {
    let backend = memory();
    let v = Recipe::default().make(&backend);
    backend.root().create_file(n(HEADER)).unwrap().write_at(0, SHOWN).unwrap();
    (backend, Arc::new(v))
}

fn record(backend: &dyn Backend) -> std::ffi::OsString {
    backend.root().open_dir(n(SESSIONS)).unwrap().read_link(n(SESSIONS_RECORD)).unwrap()
}

fn sealing(v: &Arc<Vault>) -> Sealing {
    let mut sealing = Detached::of(v.clone()).unwrap().seal(PART, "object").unwrap();
    sealing.write(&[7; WINDOW]).unwrap();
    sealing
}

/// While a vault is frozen its record of sessions says that nothing is under way, and a copy of it is whole.
#[test]
fn a_frozen_vault_begins_no_session_for_what_is_sealed() {
    let (backend, v) = made();
    let mut sealing = sealing(&v);
    let during = record(&*backend);
    v.freeze().unwrap();
    let frozen = record(&*backend);
    assert_ne!(during, frozen);
    std::thread::scope(|scope| {
        let sealed = scope.spawn(move || {
            sealing.write(&[8; WINDOW]).unwrap();
            sealing.finish().unwrap()
        });
        // If it does not wait, it has ended by then. Nothing is asserted of that.
        (0..300).take_while(|_| !sealed.is_finished()).for_each(|_| std::thread::sleep(Duration::from_millis(5)));
        assert_eq!(record(&*backend), frozen);
        v.thaw().unwrap();
        assert_eq!(sealed.join().unwrap().0.len(), 2);
    });
    assert_ne!(record(&*backend), frozen);
}

#[test]
fn a_closed_vault_seals_nothing() {
    let (backend, v) = made();
    let [mut writing, ending] = [sealing(&v), sealing(&v)];
    v.close().unwrap();
    let closed = record(&*backend);
    assert!(matches!(writing.write(&[8; WINDOW]), Err(VaultError::ReadOnly)));
    assert!(matches!(ending.finish(), Err(VaultError::ReadOnly)));
    assert_eq!(record(&*backend), closed);
}

/// A store may show any length.
#[test]
fn a_header_that_is_too_long_is_not_read() {
    let (backend, v) = made();
    assert_eq!(Detached::of(v.clone()).unwrap().header(), SHOWN);
    let file = backend.root().open_file(n(HEADER), true).unwrap();
    file.set_len(1 << 50).unwrap();
    assert_eq!(file.stat().unwrap().len, 1 << 50);
    assert!(matches!(Detached::of(v), Err(VaultError::Damaged { .. })), "longer than {HEADER_MAX}");
}
