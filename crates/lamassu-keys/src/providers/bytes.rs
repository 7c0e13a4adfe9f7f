//! Reading a key's bytes: bounded, without a copy left behind, and without the line end a text file ends in.

use crate::source::PASSPHRASE_MAX;
use lamassu_crypto::SecretBytes;
use lamassu_format::header::SlotKind;
use std::io::{self, Read};
use zeroize::Zeroize;

/// Most bytes a key can have: the longest passphrase and a line end.
pub(super) const KEY_MAX: usize = PASSPHRASE_MAX + 2;

/// Reads all of `reader` as a key of `kind`; `None`: it is longer than any key.
pub(super) fn read_key(reader: &mut impl Read, kind: SlotKind) -> io::Result<Option<SecretBytes>> {
    // Fifteen shares on their sheets.
    const SHARES_LEN_MAX: usize = 16 << 10;
    let max = if kind == SlotKind::RecoveryShares { SHARES_LEN_MAX } else { KEY_MAX };
    let Some(mut bytes) = read_bounded(reader, max)? else { return Ok(None) };
    if kind != SlotKind::Raw {
        drop_line_end(&mut bytes);
    }
    Ok(Some(SecretBytes::new(bytes)))
}

/// Reads all of `reader`; `None`: it has more than `max` bytes. The buffer never grows, so no reallocation leaves a
/// copy of the secret behind.
pub(super) fn read_bounded(reader: &mut impl Read, max: usize) -> io::Result<Option<Vec<u8>>> {
    let mut buf = vec![0u8; max + 1];
    let mut len = 0;
    let result = loop {
        if len > max {
            break Ok(());
        }
        match reader.read(&mut buf[len..]) {
            Ok(0) => break Ok(()),
            Ok(n) => len += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => break Err(e),
        }
    };
    if result.is_err() || len > max {
        buf.zeroize();
        return result.map(|()| None);
    }
    buf.truncate(len);
    Ok(Some(buf))
}

/// Drops one trailing `\n` or `\r\n`.
fn drop_line_end(bytes: &mut Vec<u8>) {
    if bytes.pop_if(|b| *b == b'\n').is_some() {
        bytes.pop_if(|b| *b == b'\r');
    }
}

/// Decodes percent-encoded text (RFC 3986 §2.1); `None`: a `%` begins no encoding.
#[cfg(any(feature = "https", feature = "pkcs11", feature = "kmip"))]
pub(super) fn percent_decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, tail) = tail.split_first_chunk::<2>()?;
        bytes.extend(data_encoding::HEXLOWER_PERMISSIVE.decode(digits).ok()?);
        rest = tail;
    }
    Some(bytes)
}

/// What a provider fetched, for tests.
#[cfg(test)]
pub(super) fn exposed(fetched: crate::source::Fetched) -> Vec<u8> {
    match fetched {
        crate::source::Fetched::Bytes { bytes, warnings: _ } => bytes.expose().to_vec(),
        crate::source::Fetched::Token(_) => panic!("a token"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_end_is_dropped() {
        let dropped = |text: &str| {
            let mut bytes = text.as_bytes().to_vec();
            drop_line_end(&mut bytes);
            String::from_utf8(bytes).unwrap()
        };
        for (text, expected) in
            [("", ""), ("a", "a"), ("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a\r", "a\r"), ("\r\n", "")]
        {
            assert_eq!(dropped(text), expected, "{text:?}");
        }
    }

    #[test]
    fn reading_is_bounded() {
        assert_eq!(read_bounded(&mut &b"12345"[..], 5).unwrap().as_deref(), Some(&b"12345"[..]));
        assert_eq!(read_bounded(&mut &b"123456"[..], 5).unwrap(), None);
        assert_eq!(read_bounded(&mut io::repeat(7), 5).unwrap(), None);
    }
}
