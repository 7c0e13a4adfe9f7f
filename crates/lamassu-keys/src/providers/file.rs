//! `file:PATH`: a key from a file, or from anything else that can be read by path, e.g. `/dev/fd/3`.

use super::Location;
use crate::source::{Ask, Fetched, KeyProvider, PASSPHRASE_MAX, SourceError, Warning};
use lamassu_crypto::SecretBytes;
use lamassu_format::header::SlotKind;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zeroize::Zeroize;

pub(super) const LOCATION: Location = Location {
    name: "file",
    usage: "file:PATH",
    kinds: &[SlotKind::Passphrase, SlotKind::Raw, SlotKind::Hex],
    interactive: false,
    provider: |argument| {
        argument.filter(|path| !path.is_empty()).map(|path| Arc::new(KeyFile { path: path.into() }) as _)
    },
};

/// Most bytes of a key file: the longest passphrase and a line end.
const FILE_MAX: usize = PASSPHRASE_MAX + 2;

struct KeyFile {
    path: PathBuf,
}

impl KeyProvider for KeyFile {
    fn fetch(&self, kind: SlotKind, _ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        let path = &self.path;
        let fail = |source| SourceError::File { path: path.clone(), source };
        let mut file = File::open(path).map_err(fail)?;
        let warnings = warnings(path, &file).map_err(fail)?;
        let mut bytes = match read_bounded(&mut file, FILE_MAX).map_err(fail)? {
            Some(bytes) => bytes,
            None => return Err(SourceError::FileTooLong { path: path.clone(), max: FILE_MAX }),
        };
        if kind != SlotKind::Raw {
            drop_line_end(&mut bytes);
        }
        Ok(Fetched { bytes: SecretBytes::new(bytes), warnings })
    }
}

fn warnings(path: &Path, file: &File) -> io::Result<Vec<Warning>> {
    const OTHERS_RW: u32 = 0o006;
    let meta = file.metadata()?;
    let mode = meta.mode() & 0o7777;
    let open = meta.is_file() && mode & OTHERS_RW != 0;
    Ok(if open { vec![Warning::OpenToOthers { path: path.into(), mode }] } else { Vec::new() })
}

/// All of `reader` if that is at most `max` bytes. The buffer never grows, so no copy of the secret is left behind by reallocation.
fn read_bounded(reader: &mut impl Read, max: usize) -> io::Result<Option<Vec<u8>>> {
    let mut buf = vec![0u8; max + 1];
    let mut len = 0;
    let result = loop {
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
