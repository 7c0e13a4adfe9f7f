//! The address of a key on a web server, and its options.
//!
//! `//HOST[:PORT]/PATH[?QUERY][#ca=FILE&cert=FILE&key=FILE&timeout=SECONDS]`. Options stand in the fragment, which is never sent to a server; their values
//! are percent-encoded where they hold `%`, `&` or `#`. A user name or password in the address is refused: arguments are seen by other users.

use crate::providers::bytes::percent_decoded;
use std::path::PathBuf;
use std::time::Duration;

/// How long a server may take in all, unless told otherwise.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
const TIMEOUT_SECS_MAX: u64 = 600;

/// What is asked, and how.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// `https://…` without options
    pub url: String,
    /// `https://HOST/PATH`, for messages: a query may hold what is nobody else's business
    pub shown: String,
    /// trust this CA alone, not the system's
    pub ca: Option<PathBuf>,
    /// our certificate and its key
    pub client: Option<(PathBuf, PathBuf)>,
    /// for everything together, from looking up the name to the last byte
    pub timeout: Duration,
}

impl Address {
    /// The address after `https:`, or `None` if it is none.
    pub(super) fn parse(text: &str) -> Option<Address> {
        let (address, options) = match text.split_once('#') {
            Some((address, options)) => (address, Some(options)),
            None => (text, None),
        };
        let rest = address.strip_prefix("//")?;
        let authority = rest.split(['/', '?']).next().filter(|a| !a.is_empty() && !a.contains('@'))?;
        if address.contains(|c: char| {
            !c.is_ascii_graphic() || matches!(c, '"' | '<' | '>' | '\\' | '^' | '`' | '{' | '|' | '}')
        }) {
            return None;
        }
        let url = format!("https:{address}");
        let uri: ureq::http::Uri = url.parse().ok()?;
        let host = uri.host().filter(|h| !h.is_empty())?;
        if authority != host {
            // Whatever follows the host is a port, and one there can be.
            uri.port_u16().filter(|port| *port > 0)?;
        }
        let shown = format!("https://{authority}{}", uri.path());
        let mut found = Address { url, shown, ca: None, client: None, timeout: TIMEOUT_DEFAULT };
        found.set_options(options.unwrap_or_default())?;
        Some(found)
    }

    fn set_options(&mut self, options: &str) -> Option<()> {
        let (mut cert, mut key) = (None, None);
        for option in options.split('&').filter(|o| !o.is_empty()) {
            let (name, value) = option.split_once('=')?;
            let value = percent_decoded(value).and_then(|v| String::from_utf8(v).ok()).filter(|v| !v.is_empty())?;
            match name {
                "ca" => self.ca = Some(value.into()),
                "cert" => cert = Some(PathBuf::from(value)),
                "key" => key = Some(PathBuf::from(value)),
                "timeout" => {
                    let secs = value.parse().ok().filter(|s| (1..=TIMEOUT_SECS_MAX).contains(s))?;
                    self.timeout = Duration::from_secs(secs);
                }
                _ => return None,
            }
        }
        self.client = match (cert, key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            // One PEM file may hold both.
            (Some(both), None) => Some((both.clone(), both)),
            (None, None) => None,
            (None, Some(_)) => return None,
        };
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let plain = Address::parse("//keys.example/vault").unwrap();
        assert_eq!(
            (plain.url.as_str(), plain.shown.as_str()),
            ("https://keys.example/vault", "https://keys.example/vault")
        );
        assert_eq!((plain.ca, plain.client, plain.timeout), (None, None, Duration::from_secs(10)));
        let full = Address::parse("//[::1]:8443/a/b?c=d#ca=/etc/a%26b.pem&cert=c.pem&key=k.pem&timeout=3").unwrap();
        assert_eq!((full.url.as_str(), full.shown.as_str()), ("https://[::1]:8443/a/b?c=d", "https://[::1]:8443/a/b"));
        assert_eq!(full.ca, Some("/etc/a&b.pem".into()));
        assert_eq!(full.client, Some(("c.pem".into(), "k.pem".into())));
        assert_eq!(full.timeout, Duration::from_secs(3));
        assert_eq!(Address::parse("//h#cert=both.pem").unwrap().client, Some(("both.pem".into(), "both.pem".into())));
    }

    #[test]
    fn what_is_no_address() {
        for bad in [
            "",
            "/",
            "//",
            "h",
            "///path",
            "//user@h/x",
            "//user:pw@h/x",
            "//h/a b",
            "//h/\n",
            "//h:99999999/",
            "//h:0/",
            "//h:/",
            "//h#ca",
            "//h#ca=",
            "//h#key=k",
            "//h#timeout=0",
            "//h#timeout=601",
            "//h#timeout=x",
            "//h#ca=%2",
            "//h#ca=%zz",
            "//h#ca=%ff",
            "//h#insecure=1",
        ] {
            assert_eq!(Address::parse(bad), None, "{bad:?}");
        }
    }
}
