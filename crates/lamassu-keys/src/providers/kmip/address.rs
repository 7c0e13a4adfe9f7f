//! The address of a key on a KMIP server, and its options.
//!
//! `//HOST[:PORT]/ID`, `//HOST[:PORT]/?name=NAME` or `//HOST[:PORT]/?zone=ZONE`, each with options after a `#` as for
//! `https:`. `%`, `&`, `#` and `?` in the parts are percent-encoded. A user name or password in the address is refused:
//! other users can see process arguments.

use crate::providers::bytes::percent_decoded;
use crate::providers::tls::Options;
use rustls::pki_types::ServerName;

/// KMIP's port, assigned by IANA.
const PORT: u16 = 5696;
/// Longest identifier, name or zone, in bytes.
const TEXT_MAX: usize = 255;
/// Longest zone, in bytes: names of keys contain it.
const ZONE_MAX: usize = 128;

/// A request's address and options.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// name or number, without brackets
    pub host: String,
    /// in the form for TLS
    pub server_name: ServerName<'static>,
    /// its port
    pub port: u16,
    /// the key
    pub wanted: Wanted,
    /// `kmip://HOST[:PORT]/…` without options, for messages
    pub shown: String,
    /// trust, identity and time limit
    pub options: Options,
}

/// The key that is meant.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// By the identifier that the server gave it.
    Id(String),
    /// By its Name attribute.
    Name(String),
    /// K_in and K_out of an isolation zone.
    Zone(String),
    /// None of these: for a key that is to be made.
    Nameless,
}

impl Address {
    /// Parses what follows `kmip:`; `None`: it is not valid.
    pub(super) fn parse(text: &str) -> Option<Address> {
        let (address, options) = text.split_once('#').unwrap_or((text, ""));
        let (authority, path) = address.strip_prefix("//")?.split_once('/')?;
        let (host, port) = host_and_port(authority)?;
        let server_name = ServerName::try_from(host.to_owned()).ok()?;
        let wanted = match path.split_once('?') {
            None if path.is_empty() => Wanted::Nameless,
            None => Wanted::Id(decoded(path)?),
            Some(("", query)) => match query.split_once('=')? {
                ("name", name) => Wanted::Name(decoded(name)?),
                ("zone", zone) => Wanted::Zone(decoded(zone).filter(|zone| zone.len() <= ZONE_MAX)?),
                _ => return None,
            },
            Some(_) => return None,
        };
        let options = Options::parse(options)?;
        Some(Address { host: host.into(), server_name, port, wanted, shown: format!("kmip:{address}"), options })
    }
}

fn host_and_port(authority: &str) -> Option<(&str, u16)> {
    let (host, port) = match authority.strip_prefix('[') {
        // An IPv6 address contains colons.
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            host.parse::<std::net::Ipv6Addr>().ok()?;
            (host, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
        }
        None => authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port))),
    };
    let digits = |port: &str| port.bytes().all(|b| b.is_ascii_digit()).then(|| port.parse().ok()).flatten();
    let port = port.map_or(Some(PORT), digits).filter(|port| *port > 0)?;
    Some((host, port))
}

/// Decodes a text that can be sent and shown.
fn decoded(text: &str) -> Option<String> {
    if text.contains(['&', '?']) {
        return None;
    }
    let text = String::from_utf8(percent_decoded(text)?).ok()?;
    ((1..=TEXT_MAX).contains(&text.len()) && !text.contains(char::is_control)).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let by_id = Address::parse("//kms.example/17").unwrap();
        assert_eq!((by_id.host.as_str(), by_id.port), ("kms.example", 5696));
        assert_eq!((by_id.wanted, by_id.shown.as_str()), (Wanted::Id("17".into()), "kmip://kms.example/17"));
        let by_name = Address::parse("//[::1]:5697/?name=a%26b%20%C3%A4#ca=x.pem&timeout=3").unwrap();
        assert_eq!((by_name.host.as_str(), by_name.port), ("::1", 5697));
        assert_eq!(by_name.wanted, Wanted::Name("a&b ä".into()));
        assert_eq!(by_name.shown, "kmip://[::1]:5697/?name=a%26b%20%C3%A4");
        assert_eq!(by_name.options.ca, Some("x.pem".into()));
        assert_eq!(Address::parse("//10.0.0.1/").unwrap().wanted, Wanted::Nameless);
        assert_eq!(Address::parse("//h/?zone=7").unwrap().wanted, Wanted::Zone("7".into()));
        assert_eq!(Address::parse(&format!("//h/?zone={}", "7".repeat(129))), None);
        assert_eq!(Address::parse("//h/a/b").unwrap().wanted, Wanted::Id("a/b".into()));
    }

    #[test]
    fn what_is_no_address() {
        let long = format!("//h/{}", "x".repeat(256));
        for bad in [
            "",
            "h",
            "/",
            "//",
            "//h",
            "//h?name=x",
            "///1",
            "//h/?",
            "//h/?name",
            "//h/?name=",
            "//h/?color=red",
            "//h/?name=a&name=b",
            "//h/1?name=a",
            "//joe@h/1",
            "//joe:pw@h/1",
            "//h:0/1",
            "//h:/1",
            "//h:+1/1",
            "//h:99999/1",
            "//h h/1",
            "//[::1/1",
            "//[h]/1",
            "//[::1]5/1",
            "//h/%0a",
            "//h/%ff",
            "//h/%2",
            "//h/1#timeout=0",
            "//h/1#insecure=1",
            &long,
        ] {
            assert_eq!(Address::parse(bad), None, "{bad:?}");
        }
    }
}
