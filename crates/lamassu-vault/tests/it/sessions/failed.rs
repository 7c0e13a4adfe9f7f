//! A store that fails while the record of sessions is written.

use super::*;
use lamassu_store::Backend;
use lamassu_store::backend::FaultBackend;
use lamassu_store::backend::fault::{Call, Fault};
use std::sync::atomic::{AtomicBool, Ordering};

/// A call that puts a record in place fails, or the barrier behind it. Either way nothing is written under the number
/// of the session that was to be closed: it may be closed.
#[test]
fn a_session_that_may_be_closed_writes_no_more_pages() {
    for is_in_place in [false, true] {
        let lab = Lab::new();
        let fault = Arc::new(FaultBackend::new(lab.backend.clone()));
        let backend: Arc<dyn Backend> = fault.clone();
        let v = lab.recipe.open(&backend).unwrap();
        put_synced(&v, "f", &content(8, 0));
        let (was_renamed, has_failed) = (AtomicBool::new(false), Arc::new(AtomicBool::new(false)));
        let failed = has_failed.clone();
        fault.faults().rule(move |call| {
            let is_new = call.name.is_some_and(|name| name.to_string_lossy().starts_with(SESSIONS_NEW));
            let is_rename = call.call == Call::Rename && is_new;
            was_renamed.fetch_or(is_rename, Ordering::Relaxed);
            let fails = match is_in_place {
                true => call.call == Call::SyncDir && was_renamed.load(Ordering::Relaxed),
                false => is_rename,
            };
            (fails && !failed.swap(fails, Ordering::Relaxed)).then_some(Fault::Errno(libc::EIO))
        });
        v.freeze().unwrap();
        v.thaw().unwrap();
        assert!(has_failed.load(Ordering::Relaxed));
        assert_eq!(v.check(&[], false, &Quiet).unwrap().open_sessions, [], "the first one is settled");
        put_synced(&v, "g", &content(8, 0x40));
        let lab = interrupt(lab, v);
        assert_eq!(lab.kinds(false), [], "everything synced is there");
        lab.zero("g", 3 * BLOCK as u64, BLOCK);
        assert_eq!(lab.kinds(false), [("unwritten".into(), Some(2), true)], "in place: {is_in_place}");
        assert_eq!(read_blocks(&lab.open(), "g")[2], Some(vec![0; BLOCK]));
    }
}

/// Otherwise the store would have the choices of an interruption until a check has gone over the whole vault.
#[test]
fn a_session_that_could_not_be_closed_is_closed_with_the_next() {
    let lab = Lab::new();
    let fault = Arc::new(FaultBackend::new(lab.backend.clone()));
    let backend: Arc<dyn Backend> = fault.clone();
    let v = lab.recipe.open(&backend).unwrap();
    put_synced(&v, "f", &content(8, 0));
    fault.faults().rule(|call| {
        let is_new = call.name.is_some_and(|name| name.to_string_lossy().starts_with(SESSIONS_NEW));
        (call.call == Call::Rename && is_new).then_some(Fault::Errno(libc::EIO))
    });
    v.freeze().unwrap();
    fault.faults().clear_rules();
    v.thaw().unwrap();
    put_synced(&v, "g", &content(8, 0x40));
    v.close().unwrap();
    assert_eq!(lab.open().check(&[], false, &Quiet).unwrap().open_sessions, []);
}
