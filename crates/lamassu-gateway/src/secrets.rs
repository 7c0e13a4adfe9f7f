//! Files that hold secrets, and error texts about them that show none.

use crate::{GatewayError, Result};
use serde::Deserialize;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use zeroize::Zeroizing;

/// Longest file that is read, in bytes.
const FILE_MAX: u64 = 16 << 20;

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

/// Reads the file, if no other user can read or change it. The open file is checked.
pub fn read_private(path: &Path) -> Result<Zeroizing<String>> {
    let file = std::fs::File::open(path).map_err(GatewayError::file("open", path))?;
    let st = file.metadata().map_err(GatewayError::file("look at", path))?;
    let own_uid = rustix::process::geteuid().as_raw();
    if !st.is_file() || st.mode() & 0o077 != 0 || (st.uid() != own_uid && st.uid() != 0) {
        return Err(GatewayError::NotPrivate(path.into()));
    }
    let mut text = Zeroizing::new(String::new());
    file.take(FILE_MAX).read_to_string(&mut text).map_err(GatewayError::file("read", path))?;
    Ok(text)
}

/// What is wrong, and in which line. The line itself is not shown: it may contain a secret.
pub fn in_line(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    match before {
        Some(before) => format!("line {}: {}", before.matches('\n').count() + 1, error.message()),
        None => error.message().into(),
    }
}
