//! Barriers that fail, of files that are open, closed, or opened again; and what an fsync covers.

use crate::common;

use common::*;
use lamassu_store::backend::{CrashBackend, CrashSim, MemoryBackend, SetTime, Time};
use lamassu_store::Backend;
use lamassu_vault::*;
use std::sync::Arc;

const BLOCK: usize = 4096;

fn content(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i / BLOCK) as u8 ^ salt | 1).collect()
}

/// What is left if the machine stops now and everything is lost that may be.
fn least(crash: &CrashBackend) -> MemoryBackend {
    CrashSim::new(crash.log()).at(crash.position()).least_state()
}

/// A vault with plain names over a store that forgets what no barrier has covered.
fn over_crash(recipe: &Recipe) -> (Arc<CrashBackend>, Vault) {
    let crash = Arc::new(CrashBackend::new());
    let backend: Arc<dyn Backend> = crash.clone();
    let v = recipe.make(&backend);
    (crash, v)
}

/// Also of a file that nobody may write, and that was opened for reading.
#[test]
fn an_fsync_covers_mode_times_and_attributes() {
    for mode in [0o640, 0o440] {
        let recipe = Recipe::plain();
        let (crash, v) = over_crash(&recipe);
        v.put("f", &content(9000, 0));
        (0..2).for_each(|_| v.sync_all().unwrap());
        let ino = v.ino("f");
        let at = |seconds| SetTime::At(Time { seconds, nanos: 7 });
        let set = SetAttr { mode: Some(mode), atime: Some(at(1000)), mtime: Some(at(2000)), ..SetAttr::default() };
        v.setattr(ino, None, &set).unwrap();
        v.set_xattr(ino, n("user.note"), b"kept", SetXattr::Any).unwrap();
        let handle = v.open_file(ino, RO).unwrap();
        v.fsync(handle, false).unwrap();
        std::mem::forget(v);
        let left: Arc<dyn Backend> = Arc::new(least(&crash));
        let v = recipe.open(&left).unwrap();
        let attr = v.find("f").unwrap().attr;
        assert_eq!((attr.mode, attr.atime.seconds, attr.mtime.seconds), (mode, 1000, 2000));
        assert_eq!(v.get_xattr(attr.ino, n("user.note")).unwrap(), b"kept");
    }
}
