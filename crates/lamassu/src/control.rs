//! The control protocol over a mount: requests and answers are carried by ioctl(2), between this process and the one
//! that serves the mount.
//!
//! Never: sends a secret to the daemon of a mount that neither root nor this user has made, believes what such a daemon
//! says.

use lamassu_fuse::RequestCount;
use lamassu_fuse::control::{self, Asked, CALL_LEN_MAX, Calls, ControlError, Root};
use lamassu_host::Served;
use lamassu_host::control::counters::FrontEnd;
use lamassu_host::control::protocol::{Caller, MESSAGE_LEN_MAX, Parcel, Request, Status};
use lamassu_host::control::{AskError, Counted, Transport, client};
use lamassu_keys::{Argon2Params, Material};
use serde::de::DeserializeOwned;
use std::path::Path;
use std::sync::Arc;
use zeroize::Zeroizing;

// An ioctl carries every message.
const _: () = assert!(MESSAGE_LEN_MAX <= CALL_LEN_MAX);

/// A directory in a mount of root's or of this user: its daemon is asked, about this directory.
struct Mounted<'a>(&'a Asked);

impl Transport for Mounted<'_> {
    type Error = ControlError;

    fn call(&self, request: &[u8]) -> Result<Zeroizing<Vec<u8>>, ControlError> {
        control::call(self.0, request)
    }
}

/// A mount of whomever.
struct Strangers<'a>(&'a Path);

impl Transport for Strangers<'_> {
    type Error = ControlError;

    fn call(&self, request: &[u8]) -> Result<Zeroizing<Vec<u8>>, ControlError> {
        Root::open(self.0)?.call(request)
    }
}

/// Asks the daemon of a mount.
///
/// # Errors
/// See [`AskError`].
pub fn ask<T: DeserializeOwned>(dir: &Asked, request: &Request) -> Result<T, AskError<ControlError>> {
    client::ask(&Mounted(dir), request)
}

/// Packs what opens or shall open a slot for the daemon of a mount.
///
/// # Errors
/// See [`AskError`].
pub fn pack(dir: &Asked, material: &Material, cost: Argon2Params) -> Result<Parcel, AskError<ControlError>> {
    client::pack(&Mounted(dir), material, cost)
}

/// What the daemon of any user's mount serves: it may say what it likes.
///
/// # Errors
/// See [`AskError`].
pub fn claimed_status(mountpoint: &Path) -> Result<Status, AskError<ControlError>> {
    client::ask(&Strangers(mountpoint), &Request::Status {})
}

/// Has the daemon of any user's mount write everything into the store.
///
/// # Errors
/// See [`AskError`].
pub fn sync(mountpoint: &Path) -> Result<(), AskError<ControlError>> {
    client::ask(&Strangers(mountpoint), &Request::Sync {})
}

/// What answers the calls of a mount.
pub fn answering(served: &Arc<Served>) -> Calls {
    let served = served.clone();
    Arc::new(move |caller, dir, request| {
        // The groups of a process that this one cannot see, beside its own, count as none. Owners are not asked for
        // theirs.
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
