//! Drops what the kernel caches of a vault that another host may use while it is open here (L3 of `docs/sharing.md`),
//! as soon as reads may no longer be valid.

use crate::{Error, Result};
use lamassu_anchor::table::Standing;
use lamassu_anchor::{Anchor, AnchorError};
use lamassu_vault::{Forest, Vault, VaultError};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

/// How often the thread checks whether the session is good again or has ended. Nothing is cached in between.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Starts the thread, which runs until the vault is closed. `forest` returns the mounted forest whose content the
/// kernel caches.
pub(crate) fn start(forest: impl Fn() -> Option<Arc<Forest>> + Send + 'static, anchor: &Arc<Anchor>) -> Result<()> {
    anchor.has_caches();
    let guard = Guard { forest, anchor: Arc::downgrade(anchor) };
    let started = thread::Builder::new().name("guard".into()).spawn(move || guard.run());
    started.map(drop).map_err(|source| Error::Vault(VaultError::Io { op: "start a thread", source }))
}

/// Starts a thread that calls `then` when the session of a vault at its anchor's server has ended; not if the vault is
/// closed before. Of another vault nothing is awaited.
///
/// # Errors
/// No thread can be started.
pub fn when_session_ends(vault: &Vault, then: impl FnOnce(AnchorError) + Send + 'static) -> Result<()> {
    let Some(anchor) = vault.options().anchor.as_ref().filter(|anchor| anchor.may_end()) else { return Ok(()) };
    let anchor = Arc::downgrade(anchor);
    let wait = move || {
        while let Some(anchor) = anchor.upgrade() {
            match anchor.standing() {
                Standing::Good => anchor.wait_while_good(),
                Standing::InDoubt => {
                    drop(anchor);
                    thread::sleep(LOOK_AGAIN);
                }
                Standing::Ended => {
                    if let Err(error) = anchor.wait_until_good() {
                        drop(anchor);
                        then(error);
                    }
                    return;
                }
                Standing::GivenUp => return,
            }
        }
    };
    let started = thread::Builder::new().name("lamassu-session".into()).spawn(wait);
    started.map(drop).map_err(|source| Error::Vault(VaultError::Io { op: "start a thread", source }))
}

struct Guard<F> {
    forest: F,
    anchor: Weak<Anchor>,
}

impl<F: Fn() -> Option<Arc<Forest>>> Guard<F> {
    fn run(&self) {
        let mut dropped_in = None;
        // The anchor is held only briefly: closing the vault waits for that.
        while let Some(anchor) = self.anchor.upgrade() {
            match anchor.standing() {
                Standing::Good => anchor.wait_while_good(),
                Standing::InDoubt => match anchor.doubt().filter(|doubt| Some(*doubt) != dropped_in) {
                    Some(doubt) => {
                        self.drop_cached();
                        anchor.caches_are_dropped(doubt);
                        dropped_in = Some(doubt);
                    }
                    // The loop sees how that ends.
                    None => thread::sleep(LOOK_AGAIN),
                },
                Standing::Ended => {
                    // A call that had ended before may have filled a cache after the first time.
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
