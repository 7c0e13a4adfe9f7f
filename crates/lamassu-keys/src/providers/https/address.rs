//! The address of a key on a web server, and its options.
//!
//! `//HOST[:PORT]/PATH[?QUERY][#ca=FILE&cert=FILE&key=FILE&timeout=SECONDS]`. The options are in the fragment, which is
//! never sent to a server; `%`, `&` and `#` in their values are percent-encoded. A user name or password in the address
//! is refused: other users can see process arguments.

use crate::providers::tls::Options;

/// A request's address and options.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// `https://…` without options
    pub url: String,
    /// `https://HOST/PATH`, for messages: a query may hold a secret
    pub shown: String,
    /// trust, identity and time limit
    pub options: Options,
}

impl Address {
    /// Parses what follows `https:`; `None`: it is not valid.
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
            // What follows the host must be a valid port.
            uri.port_u16().filter(|port| *port > 0)?;
        }
        let shown = format!("https://{authority}{}", uri.path());
        let options = Options::parse(options.unwrap_or_default())?;
        Some(Address { url, shown, options })
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
        assert_eq!(plain.options, Options::parse("").unwrap());
        let full = Address::parse("//[::1]:8443/a/b?c=d#ca=/etc/a%26b.pem&cert=c.pem&key=k.pem&timeout=3").unwrap();
        assert_eq!((full.url.as_str(), full.shown.as_str()), ("https://[::1]:8443/a/b?c=d", "https://[::1]:8443/a/b"));
        assert_eq!(full.options.ca, Some("/etc/a&b.pem".into()));
        assert_eq!(full.options.timeout.as_secs(), 3);
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
            "//h#insecure=1",
        ] {
            assert_eq!(Address::parse(bad), None, "{bad:?}");
        }
    }
}
