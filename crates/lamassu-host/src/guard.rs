//! What the kernel caches of a vault that another host can have while it is open here (L3 of `docs/sharing.md`): it is
//! dropped as soon as this process may not believe it any more.

use crate::{Error, Result};
use lamassu_anchor::Anchor;
use lamassu_anchor::table::Standing;
use lamassu_vault::{Forest, VaultError};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

/// How often it is looked whether what was in doubt is good again, or has ended: nothing is cached in between.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Starts a thread that does so, until the vault is closed. `forest` gives what the kernel caches, as long as it is
/// mounted.
pub(crate) fn start(forest: impl Fn() -> Option<Arc<Forest>> + Send + 'static, anchor: &Arc<Anchor>) -> Result<()> {
    anchor.has_caches();
    let guard = Guard { forest, anchor: Arc::downgrade(anchor) };
    let started = thread::Builder::new().name("guard".into()).spawn(move || guard.run());
    started.map(drop).map_err(|source| Error::Vault(VaultError::Io { op: "start a thread", source }))
}

struct Guard<F> {
    forest: F,
    anchor: Weak<Anchor>,
}

impl<F: Fn() -> Option<Arc<Forest>>> Guard<F> {
    fn run(&self) {
        let mut is_dropped = false;
        // The anchor is held for no longer than a look at it takes: who closes the vault waits for that.
        while let Some(anchor) = self.anchor.upgrade() {
            match anchor.standing() {
                Standing::Good => {
                    is_dropped = false;
                    anchor.wait_while_good();
                }
                Standing::InDoubt if !is_dropped => {
                    self.drop_cached();
                    is_dropped = true;
                    anchor.caches_are_dropped();
                }
                // How that ends is seen above.
                Standing::InDoubt => thread::sleep(LOOK_AGAIN),
                Standing::Ended => {
                    // What a call that had ended before put there behind the first time.
                    self.drop_cached();
                    tracing::error!("this host has the vault no longer: unmount it, and mount it again");
                    return;
                }
                Standing::GivenUp => return,
            }
        }
    }

    fn drop_cached(&self) {
        if let Some(forest) = (self.forest)() {
            forest.drop_all_cached();
        }
    }
}
