//! `kmip:`: a key from a KMIP server, by TLS 1.2 or 1.3 and, as a rule, a client certificate.
//!
//! The server keeps an AES key of 256 bits, which is taken as the 32 bytes of a `raw` key; it is made there on request. Only a key that the server calls active is
//! used: one that was revoked or destroyed opens nothing any more. Every question has a deadline and every answer a limit; see [`client`].

mod address;
mod client;
mod operations;
mod ttlv;

use super::Location;
use crate::fault::{KeyState, ServerFault};
use crate::source::{Ask, Fetched, Generated, KeyProvider, SourceError};
use address::{Address, Wanted};
use client::Session;
use lamassu_crypto::{Secret, SecretBytes};
use lamassu_format::header::SlotKind;
use operations::{Attribute, Usage};
use std::sync::Arc;

pub(super) const LOCATION: Location = Location {
    name: "kmip",
    is_scheme: true,
    usage: "kmip://HOST[:PORT]/ID|?name=NAME[#ca=FILE&cert=FILE&key=FILE&timeout=SECONDS]",
    kinds: &[SlotKind::Raw],
    interactive: false,
    provider: |argument| argument.and_then(Address::parse).map(|address| Arc::new(Kmip { address }) as _),
};

struct Kmip {
    address: Address,
}

impl KeyProvider for Kmip {
    fn fetch(&self, _kind: SlotKind, _ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        let mut session = Session::open(&self.address)?;
        let key = self.key(&mut session).map_err(|fault| self.failed(fault))?;
        Ok(Fetched::bytes(SecretBytes::new(key.expose().to_vec())))
    }

    fn generate(&self) -> Option<Result<Generated, SourceError>> {
        Some(self.make())
    }
}

impl Kmip {
    fn failed(&self, fault: ServerFault) -> SourceError {
        SourceError::Server { place: self.address.shown.clone(), fault }
    }

    fn key(&self, session: &mut Session) -> Result<Secret<32>, ServerFault> {
        let id = match &self.address.wanted {
            Wanted::Id(id) => id.clone(),
            Wanted::Name(name) => session.locate(&[Attribute::Name(name)])?,
            Wanted::Nameless => return Err(ServerFault::Unnamed),
        };
        match session.state(&id)? {
            KeyState::Active => session.get(&id),
            other => Err(ServerFault::KeyState(other)),
        }
    }

    fn make(&self) -> Result<Generated, SourceError> {
        let mut session = Session::open(&self.address)?;
        self.make_in(&mut session).map_err(|fault| self.failed(fault))
    }

    fn make_in(&self, session: &mut Session) -> Result<Generated, ServerFault> {
        let name = match &self.address.wanted {
            Wanted::Name(name) => Some(Attribute::Name(name)),
            Wanted::Nameless => None,
            Wanted::Id(_) => return Err(ServerFault::IdGiven),
        };
        // Names should be unique there, and not every server sees to it.
        match name.map(|name| session.locate(&[name])) {
            None | Some(Err(ServerFault::NoObject)) => {}
            Some(Ok(_) | Err(ServerFault::ManyObjects)) => return Err(ServerFault::NameTaken),
            Some(Err(e)) => return Err(e),
        }
        let id = session.create(Usage::Wrap, name.as_slice())?;
        session.activate(&id)?;
        // Whether it can be used is known before anything is sealed with it; and whether somebody else made one of that name meanwhile.
        if let Some(name) = name {
            session.locate(&[name])?;
        }
        session.get(&id)?;
        Ok(Generated { id })
    }
}
