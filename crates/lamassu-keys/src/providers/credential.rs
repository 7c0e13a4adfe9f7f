//! `credential:NAME`: a key that systemd passes to a service (`LoadCredential=`, `LoadCredentialEncrypted=`,
//! `SetCredential=`): the file NAME in `$CREDENTIALS_DIRECTORY`, which only the service can read and which is never on
//! a disk.

use super::Location;
use super::bytes::{KEY_MAX, read_key};
use crate::source::{Ask, Fetched, KeyProvider, SourceError};
use lamassu_format::header::SlotKind;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const VARIABLE: &str = "CREDENTIALS_DIRECTORY";

pub(super) const LOCATION: Location = Location {
    name: "credential",
    is_scheme: false,
    usage: "credential:NAME",
    kinds: super::READABLE,
    interactive: false,
    provider: |argument| {
        argument.filter(|name| is_name(name)).map(|name| Arc::new(Credential { name: name.into() }) as _)
    },
};

/// Whether systemd accepts this name: a file name, not a path.
fn is_name(name: &str) -> bool {
    const NAME_MAX: usize = 255;
    !matches!(name, "" | "." | "..") && name.len() <= NAME_MAX && !name.contains(['/', '\0'])
}

struct Credential {
    name: String,
}

impl KeyProvider for Credential {
    fn fetch(&self, kind: SlotKind, _ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        let dir = std::env::var_os(VARIABLE).ok_or(SourceError::NoCredentials)?;
        fetch_in(Path::new(&dir), &self.name, kind)
    }
}

fn fetch_in(dir: &Path, name: &str, kind: SlotKind) -> Result<Fetched, SourceError> {
    let path: PathBuf = dir.join(name);
    let fail = |source| SourceError::File { path: path.clone(), source };
    let mut file = File::open(&path).map_err(fail)?;
    match read_key(&mut file, kind).map_err(fail)? {
        Some(bytes) => Ok(Fetched::bytes(bytes)),
        None => Err(SourceError::FileTooLong { path, max: KEY_MAX }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::bytes::exposed;
    use super::*;

    #[test]
    fn names_are_no_paths() {
        assert!(is_name("vault") && is_name("vault.key") && is_name("a b"));
        for bad in ["", ".", "..", "a/b", "/etc/passwd", "../x", "a\0b", &"x".repeat(256)] {
            assert!(!is_name(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_credential_is_a_file_of_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("vault"), b"words\n").unwrap();
        let fetched = fetch_in(dir.path(), "vault", SlotKind::Passphrase).unwrap();
        assert_eq!(exposed(fetched), b"words");
        assert!(matches!(fetch_in(dir.path(), "other", SlotKind::Raw), Err(SourceError::File { .. })));
    }
}
