//! `kmip:`: a key from a KMIP server, by TLS 1.2 or 1.3 and usually with a client certificate.
//!
//! The server keeps an AES key of 256 bits, which is used as the 32 bytes of a `raw` key. It can be made and destroyed
//! there on request. Only a key in the state active is used: a revoked or destroyed key opens nothing. Every request
//! has a deadline and every answer a size limit; see [`client`].

mod address;
mod client;
mod operations;
mod ttlv;
mod zone;

use super::Location;
use crate::fault::{KeyState, ServerFault};
use crate::source::{Ask, Fetched, Generated, KeyProvider, SourceError, ZoneKeys};
use address::{Address, Wanted};
use client::Session;
use lamassu_crypto::{Secret, SecretBytes};
use lamassu_format::header::SlotKind;
#[cfg(feature = "testing")]
pub(crate) use operations::take_answers;
use operations::{Attribute, Usage};
use std::sync::Arc;

pub(super) const LOCATION: Location = Location {
    name: "kmip",
    is_scheme: true,
    usage: "kmip://HOST[:PORT]/ID|?name=NAME|?zone=ZONE[#ca=FILE&cert=FILE&key=FILE&timeout=SECONDS]",
    kinds: &[SlotKind::Raw],
    interactive: false,
    provider: |argument| argument.and_then(Address::parse).map(|address| Arc::new(Kmip { address }) as _),
};

struct Kmip {
    address: Address,
}

impl KeyProvider for Kmip {
    fn fetch(&self, _kind: SlotKind, _ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        let key = self.session(|session| match &self.address.wanted {
            Wanted::Id(id) => usable(session, id),
            Wanted::Name(name) => named(session, &[Attribute::Name(name)]),
            Wanted::Zone(zone) => zone::keys(session, zone).map(|keys| keys.secret()),
            Wanted::Nameless => Err(ServerFault::Unnamed),
        })?;
        Ok(Fetched::bytes(SecretBytes::new(key.expose().to_vec())))
    }

    fn generate(&self) -> Option<Result<Generated, SourceError>> {
        Some(
            self.session(|session| match &self.address.wanted {
                Wanted::Name(name) => make(session, Usage::Wrap, &[Attribute::Name(name)]).map(|id| vec![id]),
                Wanted::Nameless => make(session, Usage::Wrap, &[]).map(|id| vec![id]),
                Wanted::Zone(zone) => zone::make_missing(session, zone),
                Wanted::Id(_) => Err(ServerFault::IdGiven),
            })
            .map(|ids| Generated { ids }),
        )
    }

    fn can_destroy(&self) -> Result<(), SourceError> {
        match &self.address.wanted {
            Wanted::Id(_) | Wanted::Name(_) => Ok(()),
            Wanted::Zone(_) => Err(SourceError::ZoneShared),
            Wanted::Nameless => Err(SourceError::NotDestroyed),
        }
    }

    fn destroy(&self, _ask: &Ask<'_>) -> Result<Vec<String>, SourceError> {
        self.can_destroy()?;
        self.session(|session| match &self.address.wanted {
            Wanted::Id(id) => destroy(session, id),
            Wanted::Name(name) => {
                let id = session.locate(&[Attribute::Name(name)])?;
                destroy(session, &id)
            }
            Wanted::Zone(_) | Wanted::Nameless => Err(ServerFault::Unnamed),
        })
    }

    fn zone(&self) -> Option<Result<ZoneKeys, SourceError>> {
        match &self.address.wanted {
            Wanted::Zone(zone) => Some(self.session(|session| zone::keys(session, zone))),
            Wanted::Id(_) | Wanted::Name(_) | Wanted::Nameless => None,
        }
    }
}

impl Kmip {
    /// Runs `work` in a session with the server, and attributes its errors to the server.
    fn session<T>(&self, work: impl FnOnce(&mut Session) -> Result<T, ServerFault>) -> Result<T, SourceError> {
        let mut session = Session::open(&self.address)?;
        work(&mut session).map_err(|fault| SourceError::Server { place: self.address.shown.clone(), fault })
    }
}

/// The one key with these attributes.
fn named(session: &mut Session, attributes: &[Attribute<'_>]) -> Result<Secret<32>, ServerFault> {
    let id = session.locate(attributes)?;
    usable(session, &id)
}

/// A key, if it is in a usable state.
fn usable(session: &mut Session, id: &str) -> Result<Secret<32>, ServerFault> {
    match session.state(id)? {
        KeyState::Active => session.get(id),
        other => Err(ServerFault::KeyState(other)),
    }
}

/// Revokes a key if necessary, destroys it, and asks for its state. A key that the server lists as destroyed is gone:
/// nothing more is requested, since servers refuse a second destruction with different errors.
fn destroy(session: &mut Session, id: &str) -> Result<Vec<String>, ServerFault> {
    let mut said = Vec::new();
    match destroy_telling(session, id, &mut said) {
        Ok(()) => Ok(said),
        Err(fault) if said.is_empty() => Err(fault),
        // What was done cannot be found out again, and is needed for the receipt.
        Err(fault) => Err(ServerFault::Partly { done: said.join("; "), fault: Box::new(fault) }),
    }
}

/// `said` collects what was done, step by step.
fn destroy_telling(session: &mut Session, id: &str, said: &mut Vec<String>) -> Result<(), ServerFault> {
    match session.state(id)? {
        KeyState::Destroyed => return Err(ServerFault::KeyState(KeyState::Destroyed)),
        KeyState::Active => {
            session.revoke(id)?;
            said.push(format!("revoked {id}"));
        }
        KeyState::PreActive | KeyState::Deactivated | KeyState::Compromised | KeyState::Unknown(_) => {}
    }
    session.destroy(id)?;
    said.push(format!("destroyed {id}"));
    said.push(match gone(session.state(id))? {
        None => format!("{id} is not there any more"),
        Some(state) => format!("asked afterwards: {state}"),
    });
    Ok(())
}

/// The state that the server reports after a successful destruction, if it means that the key is gone. A server can
/// report success and do nothing.
fn gone(state: Result<KeyState, ServerFault>) -> Result<Option<KeyState>, ServerFault> {
    match state {
        Err(ServerFault::NoObject) => Ok(None),
        Err(ServerFault::KeyState(KeyState::Destroyed)) | Ok(KeyState::Destroyed) => Ok(Some(KeyState::Destroyed)),
        Err(ServerFault::KeyState(state)) | Ok(state) => Err(ServerFault::NotDestroyed(state)),
        Err(fault) => Err(fault),
    }
}

/// Makes a key at the server whose attributes no other object has. Returns its identifier. The key is usable.
fn make(session: &mut Session, usage: Usage, attributes: &[Attribute<'_>]) -> Result<String, ServerFault> {
    let found_by = named_by(attributes);
    // Names should be unique there, but not every server enforces that.
    if !found_by.is_empty() {
        match session.locate(&found_by) {
            Err(ServerFault::NoObject) => {}
            Ok(_) | Err(ServerFault::ManyObjects) => return Err(ServerFault::NameTaken),
            Err(e) => return Err(e),
        }
    }
    let id = session.create(usage, attributes)?;
    session.activate(&id)?;
    // Before anything is sealed with it: checks that it is usable, and that no other client has made one with that name
    // meanwhile.
    if !found_by.is_empty() {
        session.locate(&found_by)?;
    }
    usable(session, &id)?;
    Ok(id)
}

/// The attributes by which a key is found.
fn named_by<'a>(attributes: &[Attribute<'a>]) -> Vec<Attribute<'a>> {
    attributes.iter().copied().filter(|a| matches!(a, Attribute::Name(_) | Attribute::Group(_))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_still_there_was_not_destroyed() {
        assert!(matches!(gone(Err(ServerFault::NoObject)), Ok(None)));
        assert!(matches!(gone(Ok(KeyState::of(5))), Ok(Some(_))));
        assert!(matches!(gone(Ok(KeyState::of(6))), Ok(Some(_))));
        assert!(matches!(gone(Err(ServerFault::KeyState(KeyState::Destroyed))), Ok(Some(_))));
        for number in [1, 2, 3, 4, 77] {
            let fault = gone(Ok(KeyState::of(number))).unwrap_err();
            assert!(fault.to_string().starts_with("it says that it has destroyed the key"), "{fault}");
        }
        assert!(gone(Err(ServerFault::NotPermitted { op: "tell a key's state" })).is_err());
    }
}
