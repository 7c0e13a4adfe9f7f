//! Re-keying of links with several names, which is cut off between two of them.
use crate::common;

use common::*;
use lamassu_store::Backend;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::sync::Arc;

const NAMES: [&str; 3] = ["a/l", "b/l", "b/m"];

#[track_caller]
fn has_target(v: &Vault, target: &str, what: &str) {
    for name in NAMES {
        let seen = v.readlink(v.ino(name)).unwrap_or_else(|error| panic!("{what}: {name}: {error:?}"));
        assert_eq!(seen, target.as_bytes(), "{what}: {name}");
    }
}

/// Re-keys all of a vault, and nothing fails.
struct Whole<'a>(&'a str);

impl RekeyProgress for Whole<'_> {
    fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {}
    fn failed(&self, stored: &str, error: &VaultError) {
        panic!("{}: {stored}: {error:?}", self.0);
    }
    fn dataset(&self, _: &std::path::Path) -> Result<()> {
        Ok(())
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Each rename of the re-keying fails once, and the ones after it in the killed process. No name is called stale: not
/// by who reads it, and not by a later re-keying.
#[test]
fn a_link_that_was_replaced_under_some_names_is_stale_under_none() {
    let mut cut = 0;
    for (is_killed, len) in [(false, 10), (true, 10), (false, 2_000), (true, 2_000)] {
        let target = "t".repeat(len);
        for nth in 1.. {
            let what = format!("{nth}, killed: {is_killed}, {len}");
            let recipe = Recipe::default().anchored();
            let store = Arc::new(MemoryBackend::new());
            let fault = Arc::new(FaultBackend::new(store.clone()));
            let mut backend: Arc<dyn Backend> = fault.clone();
            let v = recipe.make(&backend);
            ["a", "b"].iter().for_each(|dir| _ = v.dir(dir));
            v.symlink(v.ino("a"), n("l"), target.as_bytes(), me()).unwrap();
            for name in ["l", "m"] {
                v.link(v.ino("a/l"), v.ino("b"), n(name)).unwrap();
            }
            v.close().unwrap();
            let mut v = recipe.open_with(&backend, &[1], &[2, 1]);
            let first = fault.faults().calls(Call::Rename) + nth;
            let fails = move |at: u64| if is_killed { at >= first } else { at == first };
            fault.faults().rule(move |c| (c.call == Call::Rename && fails(c.nth)).then_some(Fault::Errno(libc::EIO)));
            let done = v.rekey(Rekey::Outer, None, &Quiet);
            let was_reached = fault.faults().calls(Call::Rename) >= first;
            fault.faults().clear_rules();
            cut += usize::from(done.is_ok_and(|done| done.failed > 0));
            if is_killed {
                std::mem::forget(v);
                backend = Arc::new(store.snapshot());
                v = recipe.open_with(&backend, &[1], &[2, 1]);
            }
            has_target(&v, &target, &what);
            assert!(v.rekey(Rekey::Outer, None, &Whole(&what)).unwrap().complete, "{what}");
            has_target(&v, &target, &what);
            // Once more, by a third key: there is one state again.
            v.close().unwrap();
            let v = recipe.open_with(&backend, &[1], &[3, 2]);
            has_target(&v, &target, &what);
            assert!(v.rekey(Rekey::Outer, None, &Whole(&what)).unwrap().complete, "{what}");
            v.close().unwrap();
            let v = recipe.open_with(&backend, &[1], &[3]);
            has_target(&v, &target, &what);
            assert_eq!(v.find("a/l").unwrap().attr.nlink, 3);
            let left = v.check(&[], true, &Quiet).unwrap().problems;
            assert!(left.iter().all(|left| left.repaired && left.kind == check::kind::ORPHAN), "{what}: {left:#?}");
            v.clean();
            v.close().unwrap();
            if !was_reached {
                break;
            }
        }
    }
    assert!(cut >= 8, "{cut}");
}
