//! The calls of hosts about keys. A host cannot distinguish a key that it was not granted from one that does not exist.

use super::{Done, Service, caller, garbled, place};
use crate::Result as ServerResult;
use crate::caller::Caller;
use crate::keys::Master;
use crate::state::{Key, KeyRefusal, Use};
use lamassu_crypto::Secret;
use lamassu_crypto::oprf::{EvaluateError, ServerKey};
use lamassu_keys::providers::server::is_name;
use lamassu_keys::receipt::served::digest;
use lamassu_keys::unix_now;
use lamassu_rpc::convert::{self, Garbled};
use lamassu_rpc::proto::{self, keys_server::Keys, keys_server::KeysServer};
use lamassu_rpc::{AGAIN, KEYS_MESSAGE_MAX};
use std::sync::Arc;
use std::time::Instant;
use tonic::{Request, Response, Status};

type Asked<T> = Result<T, KeyRefusal>;

/// Info for deriving the keys of RFC 9497 from stored seeds.
const OBLIVIOUS: &[u8] = b"lamassu v1 oblivious zone";

impl Service {
    /// The service, for tonic.
    pub fn keys(&self) -> KeysServer<Service> {
        KeysServer::new(self.clone()).max_decoding_message_size(KEYS_MESSAGE_MAX)
    }

    fn master(&self) -> Result<Arc<Master>, Status> {
        self.master.clone().ok_or_else(|| Status::unimplemented("no keys are kept here"))
    }

    /// Checks without a transaction whether a host may have a key: most refusals need none.
    fn look(&self, host: &Caller, name: &str) -> ServerResult<Asked<Option<Key>>> {
        if !self.state.may_have_key(host, name) {
            return Ok(Err(KeyRefusal::Unknown));
        }
        Ok(match self.state.key(name)? {
            Some(Key::Deleted(_)) => Err(KeyRefusal::Deleted),
            key => Ok(key),
        })
    }

    fn made(&self, host: &Caller, name: &str, master: &Master, r#use: Use) -> ServerResult<Asked<()>> {
        match self.look(host, name)? {
            Ok(None) => {}
            Ok(Some(_)) => return Ok(Err(KeyRefusal::Exists)),
            Err(refusal) => return Ok(Err(refusal)),
        }
        let key = Secret::random().map_err(|_| crate::ServerError::NoRandom)?;
        let wrapped = master.wrap(name, &key)?;
        self.state.make_key(host, name, unix_now(), (&wrapped, digest(&key), r#use))
    }

    fn given(&self, host: &Caller, name: &str, master: &Master) -> ServerResult<Asked<Secret<32>>> {
        match self.look(host, name)? {
            Ok(Some(Key::Active(kept))) if kept.r#use == Use::Evaluates => Ok(Err(KeyRefusal::Unknown)),
            Ok(Some(Key::Active(_))) => self.state.give_key(host, name, |wrapped| master.unwrap(name, wrapped)),
            Ok(Some(_)) => Ok(Err(KeyRefusal::Retired)),
            Ok(None) => Ok(Err(KeyRefusal::Unknown)),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// The evaluating key that a host was granted.
    fn evaluator(&self, host: &Caller, name: &str, master: &Master) -> ServerResult<Asked<ServerKey>> {
        let kept = match self.look(host, name)? {
            Ok(Some(Key::Active(kept))) if kept.r#use == Use::Evaluates => kept,
            Ok(Some(Key::Retired(kept))) if kept.r#use == Use::Evaluates => return Ok(Err(KeyRefusal::Retired)),
            Ok(Some(_)) => return Ok(Err(KeyRefusal::Exists)),
            Ok(None) => return Ok(Err(KeyRefusal::Unknown)),
            Err(refusal) => return Ok(Err(refusal)),
        };
        let seed = master.unwrap(name, kept.wrapped()).ok_or(KeyRefusal::Damaged);
        Ok(seed.map(|seed| ServerKey::derive(&seed, OBLIVIOUS)))
    }

    /// The same; the key is made if it does not exist.
    fn opened(&self, host: &Caller, name: &str, master: &Master) -> ServerResult<Asked<ServerKey>> {
        match self.evaluator(host, name, master)? {
            // Another call may have made it meanwhile.
            Err(KeyRefusal::Unknown) => match self.made(host, name, master, Use::Evaluates)? {
                Ok(()) | Err(KeyRefusal::Exists) => self.evaluator(host, name, master),
                Err(refusal) => Ok(Err(refusal)),
            },
            opened => Ok(opened),
        }
    }

    /// Evaluates a batch, within the host's limit.
    fn evaluated(&self, host: &Caller, of: &proto::Blinded, master: &Master) -> Result<proto::Evaluated, Status> {
        let name = &of.name;
        let elements = convert::elements(&of.elements).map_err(garbled)?;
        let internal = |error: crate::ServerError| self.internal(&error);
        let key =
            self.evaluator(host, name, master).map_err(internal)?.map_err(|refusal| self.no_key(name, refusal))?;
        let now = Instant::now();
        if let Err(again) = self.evaluations.take(&host.name, elements.len(), now) {
            self.metrics.put_off();
            if self.evaluations.is_limit_to_note(&host.name, name, now) {
                self.state.note_evaluations(&host.name, name, 0, true).map_err(internal)?;
            }
            let mut status =
                Status::resource_exhausted("this host has reached its limit of evaluations (`evaluations_per_second`)");
            let millis = u64::try_from(again.as_millis()).unwrap_or(u64::MAX);
            status.metadata_mut().insert(AGAIN, millis.into());
            return Err(status);
        }
        if let Some(elements) = self.evaluations.to_note(&host.name, name, elements.len(), now) {
            let noted = self.state.note_evaluations(&host.name, name, elements, false);
            noted.inspect_err(|_| self.evaluations.not_noted(&host.name, name, elements)).map_err(internal)?;
        }
        let evaluation = key.evaluate(elements).map_err(|error| match error {
            EvaluateError::Oprf(_) => garbled(Garbled("no elements of the group")),
            EvaluateError::NoRandom(_) => self.internal(&error),
        })?;
        self.metrics.evaluated(elements.len());
        let (elements, proof) = (evaluation.elements.as_flattened().to_vec(), evaluation.proof.to_vec());
        Ok(proto::Evaluated { elements, proof })
    }

    fn no_key(&self, name: &str, refusal: KeyRefusal) -> Status {
        match refusal {
            KeyRefusal::Unknown => Status::not_found(
                "there is no key of this name, or this host was not granted it: `lamassu-server keys grant` does",
            ),
            KeyRefusal::Exists => Status::already_exists("the key was made already"),
            KeyRefusal::Retired => Status::failed_precondition("the key was retired"),
            KeyRefusal::Deleted => Status::data_loss("the key was deleted"),
            KeyRefusal::Damaged => {
                self.internal(&format!("key {name} does not open: `lamassu-server check` tells more"))
            }
        }
    }
}

fn name_in(request: Request<proto::KeyName>) -> Result<String, Status> {
    let name = request.into_inner().name;
    if is_name(&name) { Ok(name) } else { Err(garbled(Garbled("a name of a key"))) }
}

#[tonic::async_trait]
impl Keys for Service {
    async fn make_key(&self, request: Request<proto::KeyName>) -> Done<proto::Nothing> {
        let (caller, place) = (caller(&request)?, place(&request)?);
        let (name, master) = (name_in(request)?, self.master()?);
        let service = self.clone();
        self.blocking(place, move || {
            service.vaults.check_room().map_err(|refused| service.refused(refused))?;
            let made = service.made(&caller, &name, &master, Use::Given).map_err(|error| service.internal(&error))?;
            made.map(|()| Response::new(proto::Nothing {})).map_err(|refusal| service.no_key(&name, refusal))
        })
        .await?
    }

    async fn give_key(&self, request: Request<proto::KeyName>) -> Done<proto::Key> {
        let asked = async {
            let (caller, place) = (caller(&request)?, place(&request)?);
            let (name, master) = (name_in(request)?, self.master()?);
            let service = self.clone();
            self.blocking(place, move || {
                service.vaults.check_room().map_err(|refused| service.refused(refused))?;
                let given = service.given(&caller, &name, &master).map_err(|error| service.internal(&error))?;
                given.map_err(|refusal| service.no_key(&name, refusal))
            })
            .await?
        };
        let given: Result<Secret<32>, Status> = asked.await;
        self.metrics.asked_for_key(given.is_ok());
        given.map(|key| Response::new(proto::Key { key: key.expose().to_vec() }))
    }

    async fn open_oblivious(&self, request: Request<proto::KeyName>) -> Done<proto::Evaluator> {
        let (caller, place) = (caller(&request)?, place(&request)?);
        let (name, master) = (name_in(request)?, self.master()?);
        let service = self.clone();
        self.blocking(place, move || {
            service.vaults.check_room().map_err(|refused| service.refused(refused))?;
            let opened = service.opened(&caller, &name, &master).map_err(|error| service.internal(&error))?;
            let key = opened.map_err(|refusal| service.no_key(&name, refusal))?;
            Ok(Response::new(proto::Evaluator { public: key.public().to_vec() }))
        })
        .await?
    }

    async fn evaluate(&self, request: Request<proto::Blinded>) -> Done<proto::Evaluated> {
        let (caller, place, master) = (caller(&request)?, place(&request)?, self.master()?);
        let of = request.into_inner();
        if !is_name(&of.name) {
            return Err(garbled(Garbled("a name of a key")));
        }
        let service = self.clone();
        self.blocking(place, move || service.evaluated(&caller, &of, &master).map(Response::new)).await?
    }
}
