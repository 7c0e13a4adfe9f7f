//! Whose signature a vault's header must carry: what this user has pinned, in `--admin-key` or in `known-vaults`.
//!
//! `$XDG_CONFIG_HOME/lamassu/known-vaults`, or `~/.config/lamassu/known-vaults`, has a line for each vault: its id and the administrator's public key, in hex,
//! and anything behind them for people. Where a vault has several lines, one of them has to fit. A file that cannot be read or understood fails: a pin that is
//! not looked at pins nothing.

use crate::fault::Fault;
use crate::text;
use anyhow::Result;
use data_encoding::HEXLOWER_PERMISSIVE;
use lamassu_keys::admin::Public;
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

static GIVEN: OnceLock<Public> = OnceLock::new();

/// `--admin-key` holds for the whole run.
pub fn given(key: Option<Public>) {
    if let Some(key) = key {
        // Only the first call counts, and there is only one.
        let _ = GIVEN.set(key);
    }
}

/// An administrator's public key in hex.
pub fn parse_key(hex: &str) -> Result<Public, String> {
    bytes(hex).ok_or_else(|| "an administrator's key is 64 hex digits".into())
}

/// The keys that may have signed the header of a vault; none: nothing is pinned.
pub fn of(id: &[u8; 16]) -> Result<Vec<Public>> {
    match (GIVEN.get(), place()) {
        (Some(key), _) => Ok(vec![*key]),
        (None, None) => Ok(Vec::new()),
        (None, Some(path)) => match std::fs::read_to_string(&path) {
            Ok(lines) => listed(&path, &lines, id),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(source) => Err(Fault::Local { op: "read", path, source }.into()),
        },
    }
}

/// Adds a line, unless there is one already; where, or `None` where this user has no place for it.
pub fn add(id: &[u8; 16], key: &Public, comment: &str) -> Result<Option<PathBuf>> {
    let Some(path) = place() else { return Ok(None) };
    let lines = match std::fs::read_to_string(&path) {
        Ok(lines) => lines,
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        Err(source) => return Err(Fault::Local { op: "read", path, source }.into()),
    };
    if listed(&path, &lines, id)?.contains(key) {
        return Ok(Some(path));
    }
    // One write, at the end: two programs that add at once both get in.
    let start = if lines.is_empty() || lines.ends_with('\n') { "" } else { "\n" };
    let line = format!("{start}{} {} {}\n", text::hex(id), text::hex(key), text::printable(comment));
    let written = || {
        let dir = path.parent().unwrap_or(Path::new("."));
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let mut file = File::options().append(true).create(true).mode(0o600).open(&path)?;
        file.write_all(line.as_bytes())?;
        file.sync_all()
    };
    match written() {
        Ok(()) => Ok(Some(path)),
        Err(source) => Err(Fault::Local { op: "write", path, source }.into()),
    }
}

fn listed(path: &Path, lines: &str, id: &[u8; 16]) -> Result<Vec<Public>> {
    let mut keys = Vec::new();
    for (i, line) in lines.lines().enumerate() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next().filter(|word| !word.starts_with('#')) else { continue };
        let parsed = bytes::<16>(first).zip(words.next().and_then(bytes::<32>));
        let (of, key) = parsed.ok_or_else(|| Fault::Pins { path: path.into(), line: i + 1 })?;
        if of == *id {
            keys.push(key);
        }
    }
    Ok(keys)
}

fn bytes<const N: usize>(hex: &str) -> Option<[u8; N]> {
    HEXLOWER_PERMISSIVE.decode(hex.as_bytes()).ok()?.try_into().ok()
}

fn place() -> Option<PathBuf> {
    let var = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let config = var("XDG_CONFIG_HOME").or_else(|| var("HOME").map(|p| p.join(".config")))?;
    Some(config.join("lamassu/known-vaults"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_a_vault_and_a_key() {
        let (id, key) = ("0a".repeat(16), "0B".repeat(32));
        let of = |lines: &str| listed(Path::new("x"), lines, &[10; 16]);
        assert_eq!(of(&format!("# comment\n\n{id} {key} the office\n")).unwrap(), [[11; 32]]);
        assert_eq!(of(&format!("{} {key}", "0c".repeat(16))).unwrap(), Vec::<Public>::new());
        assert_eq!(of(&format!("{id} {key}\n{id} {}", "0d".repeat(32))).unwrap(), [[11; 32], [13; 32]]);
        for bad in [format!("{id} {key}\n{id}"), format!("{id} 0b"), "no hex at all".into(), format!("{key} {id}")] {
            assert!(of(&bad).is_err(), "{bad}");
        }
    }
}
