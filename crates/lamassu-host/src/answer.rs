//! The server's side of the control protocol. A request is about the vault whose root was called, or about the
//! directory.

use crate::control::counters::Operation;
use crate::control::protocol::{Answer, Caller, Channel, Failed, MESSAGE_LEN_MAX, Request};
use crate::datasets;
use crate::rotation::epochs;
use crate::serve::Served;
use crate::{Error, Result, slots, turns};
use data_encoding::HEXLOWER;
use lamassu_keys::{Role, Terms};
use lamassu_vault::forest::root_of;
use lamassu_vault::turns::Need;
use lamassu_vault::{Ino, VaultError};
use serde::Serialize;
use std::path::PathBuf;
use zeroize::Zeroizing;

impl Served {
    /// Answers a request of the control protocol. `dir` is the directory that it is about; a transport without
    /// directories resolves it from a path. This takes as long as the work, so a transport calls it on a thread of its
    /// own.
    pub fn answer(&self, caller: &Caller, dir: Ino, request: &[u8]) -> Zeroizing<Vec<u8>> {
        let parsed = serde_json::from_slice::<Request>(request);
        let operation = parsed.as_ref().map_or(Operation::Unknown, Operation::from);
        let answered = self.counters().count(operation, || {
            // The parser's message may quote the request: the caller may see it, the log must not.
            let request = parsed.map_err(|source| Error::UnknownRequest { source })?;
            self.carry_out(caller, dir, request)
        });
        answered.unwrap_or_else(|error| {
            let failed = Failed::from(&error);
            tracing::debug!(kind = ?failed.kind, uid = caller.uid, "a request failed");
            refused(failed)
        })
    }

    fn carry_out(&self, caller: &Caller, dir: Ino, request: Request) -> Result<Zeroizing<Vec<u8>>> {
        if !caller.is_owner && !is_anybodys(&request) {
            return Err(Error::NotPermitted);
        }
        if self.hosts_take_turns() && !works_by_turns(&request) {
            return Err(Error::SharedMount);
        }
        match request {
            Request::Status {} => done(&self.status(self.member(dir)?)?),
            Request::Sync {} => done(&self.sync()?),
            Request::Channel {} => {
                let (number, key) = self.channels().add(caller.uid)?;
                let mut digits = Zeroizing::new([0; 64]);
                HEXLOWER.encode_mut(key.expose(), &mut *digits);
                let key = std::str::from_utf8(&*digits).unwrap_or_default();
                done(&Channel { number: &number, key })
            }
            Request::AddSlot { secret, label, use_only, expires } => {
                let role = if use_only { Role::Use } else { Role::Administrator };
                done(&self.add_slot(caller, self.member(dir)?, &secret, &label, Terms { role, expires })?)
            }
            Request::ChangeSlot { secret, slot, label, use_only, expires } => {
                let role = use_only.then_some(Role::Use);
                done(&self.change_slot(caller, self.member(dir)?, &secret, slot, label, (role, expires))?)
            }
            Request::RemoveSlot { slot } => done(&self.change(caller, self.member(dir)?, |keys, header| {
                let (removed, event) = slots::remove(keys, header, slot)?;
                Ok((removed.to_string(), event))
            })?),
            Request::Epochs {} => {
                // The keys of a dataset are there from its first turn on.
                drop(turns::hold(self.forest(), root_of(self.member(dir)?), Need::LOOK));
                let kept = self.keeper().kept();
                let kept = kept.get(&self.member(dir)?).ok_or(VaultError::KeyNotLoaded)?;
                done(&epochs(kept.keys.keychain()))
            }
            Request::Rotate { tier, leave_zone, zone } => {
                done(&self.rotate(caller, self.member(dir)?, tier, leave_zone, zone)?)
            }
            Request::RekeyStart { full, bytes_per_second } => {
                done(&self.rekey(self.member(dir)?, (full, bytes_per_second), caller.uid)?)
            }
            Request::ProfileStart { path, choice, below } => {
                let (path, choice) = (path_from_hex(&path)?, choice.read()?);
                done(&self.set_profile(self.member(dir)?, &path, choice, below)?)
            }
            Request::Profile { path } => done(&self.profile(self.member(dir)?, &path_from_hex(&path)?)?),
            Request::JobStatus { job } => done(&self.job(job)?.progress()),
            Request::JobCancel { job } => {
                self.job(job)?.cancel();
                done(&())
            }
            Request::CreateDataset { name, spec, secret } => {
                let own = self.brought(caller, secret.as_ref())?;
                let name = datasets::name_from_hex(&name)?;
                done(&self.create_dataset(caller, dir, &name, &spec, own.as_ref())?)
            }
            Request::ListDatasets { after } => done(&self.list_datasets(caller, dir, after.as_deref())?),
            Request::SetDataset { properties, inherit } => {
                done(&self.set_dataset(caller, dir, &properties, inherit)?)
            }
            Request::DestroyDataset { force } => done(&self.destroy_dataset(caller, dir, force)?),
            Request::Unload {} => done(&self.unload(caller, dir)?),
            Request::Load { secret, slot } => {
                let own = self.brought(caller, secret.as_ref())?;
                done(&self.load(caller, dir, own.as_ref().map(|(material, _)| (material, slot)))?)
            }
        }
    }
}

/// Whether a delegate may make a request.
fn is_anybodys(request: &Request) -> bool {
    matches!(
        request,
        Request::Status {}
            | Request::CreateDataset { .. }
            | Request::ListDatasets { .. }
            | Request::Unload {}
            | Request::Load { .. }
    )
}

/// Whether a request works in a shared mount. If it needs a turn, it takes one.
fn works_by_turns(request: &Request) -> bool {
    matches!(
        request,
        Request::Status {}
            | Request::Sync {}
            | Request::Channel {}
            | Request::AddSlot { .. }
            | Request::ChangeSlot { .. }
            | Request::RemoveSlot { .. }
            | Request::Epochs {}
            | Request::Rotate { .. }
            | Request::RekeyStart { .. }
            | Request::Profile { .. }
            | Request::ProfileStart { .. }
            | Request::JobStatus { .. }
            | Request::JobCancel { .. }
            | Request::CreateDataset { .. }
            | Request::ListDatasets { .. }
            | Request::SetDataset { .. }
            | Request::DestroyDataset { .. }
            | Request::Unload {}
            | Request::Load { .. }
    )
}

fn path_from_hex(hex: &str) -> Result<PathBuf> {
    Ok(datasets::name_from_hex(hex)?.into())
}

/// An answer, in memory that does not move while it grows: it may hold a channel's key.
fn done(value: &impl Serialize) -> Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(MESSAGE_LEN_MAX));
    serde_json::to_writer(&mut *bytes, &Answer::Done(value)).map_err(|source| Error::Unanswerable { source })?;
    Ok(bytes)
}

fn refused(failed: Failed) -> Zeroizing<Vec<u8>> {
    Zeroizing::new(serde_json::to_vec(&Answer::<()>::Failed(failed)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FaultKind as Fault;
    use crate::control::counters::{Counted, FrontEnd};
    use crate::control::protocol::{Parcel, Status};
    use crate::control::{AskError, Transport, client};
    use crate::testing::{key, served, vault};
    use lamassu_keys::cost;
    use lamassu_vault::forest::ROOT_MEMBER;
    use lamassu_vault::{FileSystem, ROOT};
    use std::convert::Infallible;
    use std::sync::Arc;

    /// No system between asker and server.
    struct Direct {
        served: Arc<Served>,
        caller: Caller,
    }

    impl Direct {
        fn to(served: &Arc<Served>, is_owner: bool) -> Direct {
            let caller = Caller { uid: 12_345, gid: 12_345, groups: vec![12_345], is_owner };
            Direct { served: served.clone(), caller }
        }

        fn refused(&self, request: &Request) -> Fault {
            match client::ask::<serde_json::Value, _>(self, request) {
                Err(AskError::Told(failed)) => failed.kind,
                other => panic!("{other:?}"),
            }
        }
    }

    impl Transport for Direct {
        type Error = Infallible;

        fn call(&self, request: &[u8]) -> Result<Zeroizing<Vec<u8>>, Infallible> {
            let answer = self.served.answer(&self.caller, ROOT, request);
            assert!(request.len() <= MESSAGE_LEN_MAX && answer.len() <= MESSAGE_LEN_MAX);
            Ok(answer)
        }
    }

    struct Requests;

    impl FrontEnd for Requests {
        fn counted(&self) -> Vec<Counted> {
            vec![Counted { operation: "fuse-read".into(), count: 7, failed: 0, total_us: 9 }]
        }
    }

    #[test]
    fn the_protocol_works_over_any_transport() {
        let dir = tempfile::tempdir().unwrap();
        vault(dir.path());
        let served = served(dir.path());
        let owner = Direct::to(&served, true);
        let status: Status = client::ask(&owner, &Request::Status {}).unwrap();
        assert_eq!(status.vault, served.forest().header(ROOT_MEMBER).unwrap().described().id().to_string());
        let secret = client::pack(&owner, &key(), cost::FALLBACK).unwrap();
        let add = |secret| Request::AddSlot { secret, label: "by a test".into(), use_only: false, expires: None };
        let slot: u32 = client::ask(&owner, &add(secret)).unwrap();
        let told: String = client::ask(&owner, &Request::RemoveSlot { slot }).unwrap();
        assert!(told.contains(&slot.to_string()), "{told}");
        // Errors have a kind.
        assert_eq!(owner.refused(&Request::RemoveSlot { slot }), Fault::Usage);
        assert_eq!(owner.refused(&Request::JobStatus { job: 1 }), Fault::Other);
        let again = client::pack(&owner, &key(), cost::FALLBACK).unwrap();
        assert_eq!(owner.refused(&add(Parcel { channel: "0".repeat(32), ..again })), Fault::Other);
        assert_eq!(Direct::to(&served, false).refused(&Request::Epochs {}), Fault::Refused);
        served.forest().close().unwrap();
    }

    #[test]
    fn a_status_counts_requests_and_what_a_front_end_counts() {
        let dir = tempfile::tempdir().unwrap();
        vault(dir.path());
        let served = served(dir.path());
        served.counts_of(Arc::new(Requests));
        let owner = Direct::to(&served, true);
        let answer = owner.call(br#"{"request":"fly"}"#).unwrap();
        assert!(matches!(
            serde_json::from_slice(&answer).unwrap(),
            Answer::<()>::Failed(Failed { kind: Fault::UnknownRequest, .. })
        ));
        let _: () = client::ask(&owner, &Request::Sync {}).unwrap();
        let status: Status = client::ask(&owner, &Request::Status {}).unwrap();
        let of = |c: &Counted| (c.operation.clone(), c.count, c.failed);
        let expected = [("unknown-request", 1, 1), ("sync", 1, 0), ("fuse-read", 7, 0)];
        assert_eq!(status.operations.iter().map(of).collect::<Vec<_>>(), expected.map(|(n, c, f)| (n.into(), c, f)));
        served.forest().close().unwrap();
    }
}
