//! PKCS #11 URIs (RFC 7512): the token, the key, the module, and the source of the PIN.
//!
//! `pin-value`, a PIN in the URI itself, is refused: other users can see process arguments. So is a `pin-source` that
//! would run a program.

use crate::providers::bytes::percent_decoded;
use std::path::PathBuf;

/// A parsed URI. What it does not name matches everything.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Uri {
    pub token: Option<String>,
    pub manufacturer: Option<String>,
    pub model: Option<String>,
    pub serial: Option<String>,
    pub slot_id: Option<u64>,
    /// CKA_LABEL
    pub object: Option<Vec<u8>>,
    /// CKA_ID
    pub id: Option<Vec<u8>>,
    /// `private` or `secret-key`
    pub class: Option<Class>,
    pub module: Option<PathBuf>,
    pub pin_source: Option<PathBuf>,
}

/// The class of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Private,
    Secret,
}

impl Uri {
    /// Parses what follows `pkcs11:`; `None`: it is not such a URI, or contains a PIN.
    pub(super) fn parse(text: &str) -> Option<Uri> {
        let (path, query) = text.split_once('?').unwrap_or((text, ""));
        let mut uri = Uri::default();
        for attribute in path.split(';').filter(|a| !a.is_empty()) {
            let (name, value) = attribute.split_once('=')?;
            let bytes = percent_decoded(value)?;
            let text = || String::from_utf8(bytes.clone()).ok();
            match name {
                "token" => set(&mut uri.token, text()?)?,
                "manufacturer" => set(&mut uri.manufacturer, text()?)?,
                "model" => set(&mut uri.model, text()?)?,
                "serial" => set(&mut uri.serial, text()?)?,
                "slot-id" => set(&mut uri.slot_id, text()?.parse().ok()?)?,
                "object" => set(&mut uri.object, bytes)?,
                "id" => set(&mut uri.id, bytes)?,
                "type" => match bytes.as_slice() {
                    b"private" => set(&mut uri.class, Class::Private)?,
                    b"secret-key" => set(&mut uri.class, Class::Secret)?,
                    _ => return None,
                },
                _ => return None,
            }
        }
        for attribute in query.split('&').filter(|a| !a.is_empty()) {
            let (name, value) = attribute.split_once('=')?;
            let value = String::from_utf8(percent_decoded(value)?).ok().filter(|v| !v.is_empty())?;
            match name {
                "module-path" => set(&mut uri.module, value.into())?,
                "pin-source" if value.starts_with('|') => return None,
                "pin-source" => {
                    let path = value.strip_prefix("file:").unwrap_or(&value);
                    // file:///path and file:/path are the same file.
                    set(&mut uri.pin_source, path.strip_prefix("//").unwrap_or(path).into())?;
                }
                _ => return None,
            }
        }
        let names_something = uri.token.is_some() || uri.serial.is_some() || uri.object.is_some() || uri.id.is_some();
        names_something.then_some(uri)
    }
}

/// An attribute may occur once.
fn set<T>(place: &mut Option<T>, value: T) -> Option<()> {
    place.replace(value).is_none().then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rfc_7512_writes_is_read() {
        let uri =
            Uri::parse("token=My%20token;id=%01%ff;object=k;type=private?module-path=/m.so&pin-source=file:/etc/pin");
        let expected = Uri {
            token: Some("My token".into()),
            id: Some(vec![1, 255]),
            object: Some(b"k".to_vec()),
            class: Some(Class::Private),
            module: Some("/m.so".into()),
            pin_source: Some("/etc/pin".into()),
            ..Uri::default()
        };
        assert_eq!(uri, Some(expected));
        assert_eq!(Uri::parse("serial=7?pin-source=/etc/pin").unwrap().pin_source, Some("/etc/pin".into()));
        assert_eq!(Uri::parse("serial=7?pin-source=file:///etc/pin").unwrap().pin_source, Some("/etc/pin".into()));
        assert_eq!(Uri::parse("token=a;slot-id=3;type=secret-key").unwrap().slot_id, Some(3));
    }

    #[test]
    fn what_is_refused() {
        for bad in [
            "",
            "x",
            "token",
            "model=x",
            "token=a;token=b",
            "token=%f",
            "token=%ff",
            "object=a?pin-value=1234",
            "object=a?pin-source=|/bin/echo",
            "object=a?module-path=",
            "object=a;type=cert",
            "object=a;color=red",
            "object=a;slot-id=x",
            "object=a?module-name=x",
        ] {
            assert_eq!(Uri::parse(bad), None, "{bad:?}");
        }
    }
}
