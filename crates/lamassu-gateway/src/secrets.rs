//! The operator's files: those that hold secrets, error texts about them that show none, and others. Whatever is in the
//! place of a file, its reading ends.

use crate::{GatewayError, Result};
use serde::Deserialize;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use zeroize::Zeroizing;

/// Longest file that is read, in bytes.
const FILE_MAX: u64 = 16 << 20;
const TOO_LONG: &str = "it is longer than 16 MiB";

/// A text that is never shown.
#[derive(Clone, Deserialize)]
#[serde(transparent)]
pub struct Secret(#[serde(deserialize_with = "wiped")] pub Zeroizing<String>);

fn wiped<'de, D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Zeroizing<String>, D::Error> {
    String::deserialize(from).map(Zeroizing::new)
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// Opens a file for reading. A pipe is not waited for.
pub fn open_at_once(path: &Path) -> std::io::Result<File> {
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Opens a file, and whether it is this user's or root's, and has none of these bits of a mode. The open file is
/// checked.
fn open(path: &Path, bits: u32) -> std::io::Result<(File, bool)> {
    let file = open_at_once(path)?;
    let st = file.metadata()?;
    let is_own = st.uid() == rustix::process::geteuid().as_raw() || st.uid() == 0;
    Ok((file, st.is_file() && is_own && st.mode() & bits == 0))
}

/// Reads a configuration, if no other user can change it. `absent` says what to do if there is none.
///
/// # Errors
/// [`GatewayError::Config`], [`GatewayError::File`].
pub fn read_config(path: &Path, absent: &str) -> Result<String> {
    let wrong = |detail: &str| GatewayError::Config { path: path.into(), detail: detail.into() };
    let failed = |source: std::io::Error| match source.kind() {
        ErrorKind::NotFound => wrong(&format!("there is no such file; {absent}")),
        ErrorKind::InvalidData => wrong("it is no text (UTF-8)"),
        _ => GatewayError::file("read", path)(source),
    };
    let (file, is_own) = open(path, 0o022).map_err(failed)?;
    if !is_own {
        return Err(wrong("it must be a file of this user or root that no other user may write: `chmod go-w` it"));
    }
    let mut text = String::new();
    file.take(FILE_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > FILE_MAX { Err(wrong(TOO_LONG)) } else { Ok(text) }
}

/// Reads the file, if no other user can read or change it.
///
/// # Errors
/// [`GatewayError::NotPrivate`], [`GatewayError::File`].
pub fn read_private(path: &Path) -> Result<Zeroizing<String>> {
    let (file, is_private) = open(path, 0o077).map_err(GatewayError::file("open", path))?;
    if !is_private {
        return Err(GatewayError::NotPrivate(path.into()));
    }
    let mut text = Zeroizing::new(String::new());
    file.take(FILE_MAX + 1).read_to_string(&mut text).map_err(GatewayError::file("read", path))?;
    match text.len() as u64 > FILE_MAX {
        true => Err(GatewayError::Config { path: path.into(), detail: TOO_LONG.into() }),
        false => Ok(text),
    }
}

/// Reads a file without secrets, such as a certificate, whoever may change it.
///
/// # Errors
/// [`GatewayError::Config`], [`GatewayError::File`].
pub fn read_public(path: &Path) -> Result<Vec<u8>> {
    let wrong = |detail: &str| GatewayError::Config { path: path.into(), detail: detail.into() };
    let file = open_at_once(path).map_err(GatewayError::file("open", path))?;
    if !file.metadata().map_err(GatewayError::file("look at", path))?.is_file() {
        return Err(wrong("it is no file"));
    }
    let mut bytes = Vec::new();
    file.take(FILE_MAX + 1).read_to_end(&mut bytes).map_err(GatewayError::file("read", path))?;
    if bytes.len() as u64 > FILE_MAX { Err(wrong(TOO_LONG)) } else { Ok(bytes) }
}

/// What is wrong, and in which line. The line itself is not shown: it may contain a secret.
pub fn in_line(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    match before {
        Some(before) => format!("line {}: {}", before.matches('\n').count() + 1, error.message()),
        None => error.message().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_that_is_too_long_is_refused_and_not_cut() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("gateway.toml");
        for (len, is_good) in [(FILE_MAX, true), (FILE_MAX + 1, false)] {
            std::fs::write(&path, vec![b'#'; len as usize]).expect("writes");
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("chmod");
            assert_eq!(read_config(&path, "").is_ok(), is_good, "{len}");
            assert_eq!(read_private(&path).is_ok(), is_good, "{len}");
            assert_eq!(read_public(&path).is_ok(), is_good, "{len}");
        }
    }
}
