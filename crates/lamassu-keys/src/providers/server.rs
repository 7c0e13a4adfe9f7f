//! `server:`: a key that a Lamassu server keeps (`docs/server.md`), 32 bytes, used like those of a `raw` key.
//!
//! This crate does not talk to such servers. A program registers an implementation once: see [`ask_servers_by`].
//! Without one, a source of this kind is refused, and nothing is sent.

use super::Location;
use crate::source::{Ask, Fetched, Generated, KeyProvider, SourceError};
use lamassu_crypto::oblivious::{Evaluate, KeyServerFault, Oblivious};
use lamassu_crypto::oprf::{Element, Evaluation, PublicKey};
use lamassu_crypto::{Secret, SecretBytes};
use lamassu_format::header::SlotKind;
use parking_lot::Mutex;
use std::net::Ipv6Addr;
use std::sync::{Arc, OnceLock, Weak};

/// The scheme of such a source.
pub const SCHEME: &str = "server";
/// A server's default port.
const PORT: u16 = 7433;
/// Longest name of a key.
const NAME_MAX: usize = 63;

pub(super) const LOCATION: Location = Location {
    name: SCHEME,
    is_scheme: true,
    usage: "server://HOST[:PORT]/ID",
    kinds: &[SlotKind::Raw],
    interactive: false,
    provider: |argument| argument.and_then(Address::parse).map(|address| Arc::new(address) as _),
};

/// Talks to the servers that this host has joined. `server` is HOST:PORT.
pub trait Servers: Send + Sync {
    /// A key that this host was granted.
    ///
    /// # Errors
    /// [`KeyServerFault`].
    fn key(&self, server: &str, name: &str) -> Result<Secret<32>, KeyServerFault>;

    /// Lets the server make a key under a name that this host was granted.
    ///
    /// # Errors
    /// [`KeyServerFault`].
    fn make(&self, server: &str, name: &str) -> Result<(), KeyServerFault>;

    /// The public key of an evaluating key. It is made if there is none, and this host was granted the name.
    ///
    /// # Errors
    /// [`KeyServerFault`].
    fn oblivious(&self, server: &str, name: &str) -> Result<[u8; 32], KeyServerFault>;

    /// An evaluator that uses that key. Nothing is sent yet.
    fn evaluator(&self, server: &str, name: &str) -> Arc<dyn Evaluate>;
}

/// A key at a server that evaluates for an oblivious epoch (§4, §10).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObliviousKey {
    /// `HOST:PORT`, as hosts have joined it
    pub server: String,
    /// the key's name there
    pub name: String,
    /// its public key
    pub public: [u8; 32],
}

impl ObliviousKey {
    /// Opens the key at `server://HOST[:PORT]/NAME`, which is made if it does not exist.
    ///
    /// # Errors
    /// [`SourceError`].
    pub fn open(place: &str) -> Result<ObliviousKey, SourceError> {
        let argument = place.strip_prefix(SCHEME).and_then(|rest| rest.strip_prefix(':'));
        let address = argument.and_then(Address::parse).ok_or(SourceError::NotAServer)?;
        // Before a zone relies on it: nothing could be written with a key that is none.
        let public = address.ask(|servers| {
            let public = servers.oblivious(&address.server, &address.name)?;
            match PublicKey::parse(&public) {
                Ok(_) => Ok(public),
                Err(error) => Err(KeyServerFault::Failing { detail: format!("its public key: {error}") }),
            }
        })?;
        Ok(ObliviousKey { server: address.server, name: address.name, public })
    }

    /// Its URI: `server://HOST:PORT/NAME`.
    pub fn place(&self) -> String {
        format!("{SCHEME}://{}/{}", self.server, self.name)
    }

    /// Whether server and name have the canonical form.
    pub(crate) fn is_valid(&self) -> bool {
        let address = Address::parse(&format!("//{}/{}", self.server, self.name));
        address.is_some_and(|address| address.server == self.server && address.name == self.name)
    }
}

/// The keys that are in use in this process: rings with the same key share its cached results. A cache by value.
static IN_USE: Mutex<Vec<(ObliviousKey, Weak<Oblivious>)>> = Mutex::new(Vec::new());

/// The shared object through which block keys use a server's key.
pub(crate) fn oblivious(key: &ObliviousKey) -> Arc<Oblivious> {
    let mut in_use = IN_USE.lock();
    in_use.retain(|(_, oblivious)| oblivious.strong_count() > 0);
    if let Some(known) = in_use.iter().find(|(known, _)| known == key).and_then(|(_, known)| known.upgrade()) {
        return known;
    }
    let evaluator = match SERVERS.get() {
        Some(servers) => servers.evaluator(&key.server, &key.name),
        None => Arc::new(Nobody { place: key.place() }),
    };
    let oblivious = Arc::new(Oblivious::new(key.public, evaluator));
    in_use.push((key.clone(), Arc::downgrade(&oblivious)));
    oblivious
}

/// For a process that does not talk to servers.
struct Nobody {
    place: String,
}

impl Evaluate for Nobody {
    fn place(&self) -> String {
        self.place.clone()
    }

    fn evaluate(&self, _: &[Element]) -> Result<Evaluation, KeyServerFault> {
        Err(KeyServerFault::Unreachable { detail: "this program speaks with no servers".into() })
    }
}

/// How this process talks to servers. Set once, where a program is put together, since a host has one identity at each
/// server, whatever vault a process asks for. Key sources are parsed in many places; none of them knows of servers.
static SERVERS: OnceLock<Box<dyn Servers>> = OnceLock::new();

/// Registers how this whole process talks to servers. The first call counts.
pub fn ask_servers_by(servers: Box<dyn Servers>) {
    let _ = SERVERS.set(servers);
}

/// Whether this is a valid name for a key at a server: 1 to 63 letters, digits, dots, hyphens and underscores,
/// beginning with a letter or digit.
pub fn is_name(name: &str) -> bool {
    let is_good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.len() <= NAME_MAX && name.bytes().all(is_good)
}

/// The address `HOST:PORT` of a server that is named `HOST[:PORT]`; `None`: it has another form.
pub fn address_of(server: &str) -> Option<String> {
    let host = match server.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            host.parse::<Ipv6Addr>().ok()?;
            &server[..server.len() - port.len()]
        }
        None => server.split_once(':').map_or(server, |(host, _)| host),
    };
    // Each label of a host name has the form of a key's name.
    let is_host = |host: &str| host.split('.').all(is_name);
    if !(host.starts_with('[') || is_host(host)) {
        return None;
    }
    match &server[host.len()..] {
        "" => Some(format!("{host}:{PORT}")),
        port => {
            let port = port.strip_prefix(':')?;
            // One form only: the identity is stored under this text.
            port.parse::<u16>().ok().filter(|number| *number > 0 && number.to_string() == port)?;
            Some(server.to_owned())
        }
    }
}

/// `//HOST[:PORT]/NAME`.
#[derive(Debug, PartialEq, Eq)]
struct Address {
    /// as recorded by `lamassu host join`
    server: String,
    name: String,
}

impl Address {
    fn parse(text: &str) -> Option<Address> {
        let (server, name) = text.strip_prefix("//")?.split_once('/')?;
        let server = address_of(server).filter(|_| is_name(name))?;
        Some(Address { server, name: name.to_owned() })
    }

    fn ask<T>(&self, ask: impl FnOnce(&dyn Servers) -> Result<T, KeyServerFault>) -> Result<T, SourceError> {
        let servers = SERVERS.get().ok_or(SourceError::NoServers)?;
        let place = || format!("{SCHEME}://{}/{}", self.server, self.name);
        ask(&**servers).map_err(|fault| SourceError::Server { place: place(), fault: fault.into() })
    }
}

impl KeyProvider for Address {
    fn fetch(&self, _kind: SlotKind, _ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        let key = self.ask(|servers| servers.key(&self.server, &self.name))?;
        Ok(Fetched::bytes(SecretBytes::new(key.expose().to_vec())))
    }

    fn generate(&self) -> Option<Result<Generated, SourceError>> {
        let made = self.ask(|servers| servers.make(&self.server, &self.name));
        Some(made.map(|()| Generated { ids: vec![self.name.clone()] }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for (text, server, name) in [
            ("//h/a", "h:7433", "a"),
            ("//keeper.example:7000/vault-1_b.c", "keeper.example:7000", "vault-1_b.c"),
            ("//[::1]/a", "[::1]:7433", "a"),
            ("//[2001:db8::1]:1/a", "[2001:db8::1]:1", "a"),
            ("//10.0.0.1/5f0c", "10.0.0.1:7433", "5f0c"),
        ] {
            assert_eq!(Address::parse(text), Some(Address { server: server.into(), name: name.into() }), "{text}");
        }
        let long = format!("//h/{}", "x".repeat(64));
        for bad in [
            "",
            "h/a",
            "//h",
            "//h/",
            "///a",
            "//:1/a",
            "//h:/a",
            "//h:0/a",
            "//h:07433/a",
            "//h:+1/a",
            "//h:99999/a",
            "//h:1:2/a",
            "//joe@h/a",
            "//h h/a",
            "//../a",
            "//[::1/a",
            "//[h]/a",
            "//[::1]5/a",
            "//h/a/b",
            "//h/.a",
            "//h/a%20",
            "//h/ä",
            "//h/a#x=1",
            "//h/a?b",
            "//h/a\n",
            &long,
        ] {
            assert_eq!(Address::parse(bad), None, "{bad:?}");
        }
    }
}
