//! The control protocol over a mount: ioctl(2) carries requests and answers between this process and the one that
//! serves the mount.
//!
//! Never: sends a secret to the daemon of a mount that neither root nor this user has made, or trusts its answers.

use lamassu_fuse::RequestCount;
use lamassu_fuse::control::{self, Asked, CALL_LEN_MAX, Calls, ControlError, Root};
use lamassu_host::Served;
use lamassu_host::control::counters::FrontEnd;
use lamassu_host::control::protocol::{Caller, MESSAGE_LEN_MAX, Parcel, Request, Status};
use lamassu_host::control::{AskError, Counted, Transport, client};
use lamassu_keys::{Argon2Params, Material};
use serde::de::DeserializeOwned;
use std::sync::Arc;
use zeroize::Zeroizing;

// Every message fits an ioctl.
const _: () = assert!(MESSAGE_LEN_MAX <= CALL_LEN_MAX);

/// A directory in a mount of root or of this user: requests go to its daemon, about this directory.
struct Mounted<'a>(&'a Asked);

impl Transport for Mounted<'_> {
    type Error = ControlError;

    fn call(&self, request: &[u8]) -> Result<Zeroizing<Vec<u8>>, ControlError> {
        control::call(self.0, request)
    }
}

/// A mount of any user.
struct Strangers<'a>(&'a Root);

impl Transport for Strangers<'_> {
    type Error = ControlError;

    fn call(&self, request: &[u8]) -> Result<Zeroizing<Vec<u8>>, ControlError> {
        self.0.call(request)
    }
}

/// Asks the daemon of a mount.
///
/// # Errors
/// See [`AskError`].
pub fn ask<T: DeserializeOwned>(dir: &Asked, request: &Request) -> Result<T, AskError<ControlError>> {
    client::ask(&Mounted(dir), request)
}

/// Packs the material for a slot, existing or new, for the daemon of a mount.
///
/// # Errors
/// See [`AskError`].
pub fn pack(dir: &Asked, material: &Material, cost: Argon2Params) -> Result<Parcel, AskError<ControlError>> {
    client::pack(&Mounted(dir), material, cost)
}

/// The status by the daemon of any user's mount: it may be false.
///
/// # Errors
/// See [`AskError`].
pub fn claimed_status(root: &Root) -> Result<Status, AskError<ControlError>> {
    client::ask(&Strangers(root), &Request::Status {})
}

/// Makes the daemon of any user's mount write everything to the store.
///
/// # Errors
/// See [`AskError`].
pub fn sync(root: &Root) -> Result<(), AskError<ControlError>> {
    client::ask(&Strangers(root), &Request::Sync {})
}

/// The function that answers calls of a mount.
pub fn answering(served: &Arc<Served>) -> Calls {
    let served = served.clone();
    Arc::new(move |caller, dir, request| {
        // If this process cannot see the caller's, only the caller's own group counts. Owners need no groups.
        let groups = if caller.is_owner { Vec::new() } else { caller.groups() };
        let caller = Caller { uid: caller.uid, gid: caller.gid, groups, is_owner: caller.is_owner };
        served.answer(&caller, dir, request)
    })
}

/// The requests of a mount, as a status shows them.
pub struct Requests(pub Arc<dyn Fn() -> Vec<RequestCount> + Send + Sync>);

impl FrontEnd for Requests {
    fn counted(&self) -> Vec<Counted> {
        let of = |RequestCount { name, count, failed, total_us }| Counted {
            operation: format!("fuse-{name}"),
            count,
            failed,
            total_us,
        };
        (self.0)().into_iter().map(of).collect()
    }
}
