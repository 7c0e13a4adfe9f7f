//! The calls of hosts that are about keys. Of a key that is not granted to it a host is told what it is told of one
//! that there is not.

use super::Master;
use crate::service::{Done, Service, caller, garbled, seconds};
use crate::state::{Key, KeyRefusal};
use crate::{Result as ServerResult, guard::Caller};
use lamassu_crypto::Secret;
use lamassu_keys::providers::server::is_name;
use lamassu_keys::receipt::served::digest;
use lamassu_rpc::convert::Garbled;
use lamassu_rpc::proto::{self, keys_server::Keys, keys_server::KeysServer};
use std::sync::Arc;
use tonic::{Request, Response, Status};

type Asked<T> = Result<T, KeyRefusal>;

impl Service {
    /// The services, for tonic.
    pub fn keys(&self) -> KeysServer<Service> {
        KeysServer::new(self.clone()).max_decoding_message_size(4096)
    }

    fn master(&self) -> Result<Arc<Master>, Status> {
        self.master.clone().ok_or_else(|| Status::unimplemented("no keys are kept here"))
    }

    /// What may be said to a host, before anything is changed: most of what is refused takes no transaction.
    fn look(&self, host: &Caller, name: &str) -> ServerResult<Asked<Option<Key>>> {
        if !self.state.may_have_key(host, name) {
            return Ok(Err(KeyRefusal::Unknown));
        }
        Ok(match self.state.key(name)? {
            Some(Key::Deleted(_)) => Err(KeyRefusal::Deleted),
            key => Ok(key),
        })
    }

    fn made(&self, host: &Caller, name: &str, master: &Master) -> ServerResult<Asked<()>> {
        match self.look(host, name)? {
            Ok(None) => {}
            Ok(Some(_)) => return Ok(Err(KeyRefusal::Exists)),
            Err(refusal) => return Ok(Err(refusal)),
        }
        let key = Secret::random().map_err(|_| crate::ServerError::NoRandom)?;
        let wrapped = master.wrap(name, &key)?;
        self.state.make_key(host, name, seconds(), (&wrapped, digest(&key)))
    }

    fn given(&self, host: &Caller, name: &str, master: &Master) -> ServerResult<Asked<Secret<32>>> {
        match self.look(host, name)? {
            Ok(Some(Key::Active(_))) => self.state.give_key(host, name, |wrapped| master.unwrap(name, wrapped)),
            Ok(Some(_)) => Ok(Err(KeyRefusal::Retired)),
            Ok(None) => Ok(Err(KeyRefusal::Unknown)),
            Err(refusal) => Ok(Err(refusal)),
        }
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
        let (caller, name, master) = (caller(&request)?, name_in(request)?, self.master()?);
        let service = self.clone();
        Service::blocking(move || {
            service.vaults.check_room().map_err(|refused| service.refused(refused))?;
            let made = service.made(&caller, &name, &master).map_err(|error| service.internal(&error))?;
            made.map(|()| Response::new(proto::Nothing {})).map_err(|refusal| service.no_key(&name, refusal))
        })
        .await?
    }

    async fn give_key(&self, request: Request<proto::KeyName>) -> Done<proto::Key> {
        let asked = async {
            let (caller, name, master) = (caller(&request)?, name_in(request)?, self.master()?);
            let service = self.clone();
            Service::blocking(move || {
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
}
