//! `env:NAME`: a passphrase from an environment variable.
//!
//! The variable stays in this process's environment until [`KeyProvider::forget`] overwrites its value: root and the
//! same user can read it in `/proc`, and children inherit it. The copy in the shell that started the process stays.
//! Prefer a file.

use super::Location;
use crate::source::{Ask, Fetched, KeyProvider, SourceError};
use lamassu_crypto::SecretBytes;
use lamassu_format::header::SlotKind;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use zeroize::Zeroize;

pub(super) const LOCATION: Location = Location {
    name: "env",
    is_scheme: false,
    usage: "env:NAME",
    kinds: &[SlotKind::Passphrase],
    interactive: false,
    provider: |argument| argument.filter(|name| is_name(name)).map(|name| Arc::new(Env { name: name.into() }) as _),
};

/// A name that shells accept. Others are refused without being shown: it may be the passphrase itself, given by
/// mistake.
fn is_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

struct Env {
    name: String,
}

impl KeyProvider for Env {
    fn fetch(&self, _kind: SlotKind, _ask: &Ask<'_>) -> Result<Fetched, SourceError> {
        let value = std::env::var_os(&self.name).ok_or_else(|| SourceError::NoVariable { name: self.name.clone() })?;
        Ok(Fetched::bytes(SecretBytes::new(value.into_vec())))
    }

    fn forget(&self) {
        if let Ok(name) = CString::new(self.name.as_str()) {
            wipe(&name);
        }
    }
}

/// Overwrites the value of a variable with zeros: then it is empty.
#[allow(unsafe_code)]
fn wipe(name: &CStr) {
    // SAFETY: what getenv(3) returns is in the environment that this process began with, and ends with a zero: nothing
    // in this program sets or removes variables, so it is neither moved nor freed. No other thread reads the value
    // meanwhile, as `KeySource::forget` asks for; looking up other variables compares names alone.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        if !value.is_null() {
            std::slice::from_raw_parts_mut(value.cast::<u8>(), libc::strlen(value)).zeroize();
        }
    }
}
