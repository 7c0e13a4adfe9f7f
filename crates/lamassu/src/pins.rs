//! Whose signature a vault's header must carry: what this user has pinned, by `--admin-key`, in the zone file of `--admin-zone`, or in `known-vaults`.
//!
//! `$XDG_CONFIG_HOME/lamassu/known-vaults`, or `~/.config/lamassu/known-vaults`, has a line for each vault: its id and the administrator's public key, in hex,
//! and anything behind them for people. Where a vault has several lines, one of them has to fit. A file that cannot be read or understood fails: a pin that is
//! not looked at pins nothing.
//!
//! A line follows where the administrator's key is exchanged for another that it has signed. A zone file is believed as it lies there, like known-vaults: it takes
//! no key to read its pins, and `zone show --key` verifies them.

use crate::fault::Fault;
use crate::output::Ui;
use crate::text;
use anyhow::Result;
use data_encoding::HEXLOWER_PERMISSIVE;
use lamassu_format::header::ZoneFile;
use lamassu_keys::admin::Public;
use lamassu_keys::header_file;
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// What options say.
#[derive(Clone, Debug)]
pub enum Given {
    /// `--admin-key`: for every vault.
    Key(Public),
    /// `--admin-zone`: for the vaults that this zone file pins; there must be a pin.
    Zone(PathBuf),
}

static GIVEN: OnceLock<Given> = OnceLock::new();

/// Holds for the whole run.
pub fn given(pin: Option<Given>) {
    if let Some(pin) = pin {
        // Only the first call counts, and there is only one.
        let _ = GIVEN.set(pin);
    }
}

/// An administrator's public key in hex.
pub fn parse_key(hex: &str) -> Result<Public, String> {
    bytes(hex).ok_or_else(|| "an administrator's key is 64 hex digits".into())
}

/// The keys that may have signed the header of a vault; none: nothing is pinned.
pub fn of(id: &[u8; 16]) -> Result<Vec<Public>> {
    match GIVEN.get() {
        Some(Given::Key(key)) => Ok(vec![*key]),
        Some(Given::Zone(file)) => of_zone(file, id).map(|key| vec![key]),
        None => known(id),
    }
}

/// The same of a dataset, which has an administrator of its own: what the command line gives speaks of the vault it lies in.
pub fn known(id: &[u8; 16]) -> Result<Vec<Public>> {
    match place() {
        None => Ok(Vec::new()),
        Some(path) => match std::fs::read_to_string(&path) {
            Ok(lines) => listed(&path, &lines, id),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(source) => Err(Fault::Local { op: "read", path, source }.into()),
        },
    }
}

fn of_zone(file: &Path, id: &[u8; 16]) -> Result<Public> {
    let zone: ZoneFile = header_file::read(file)?;
    let pin = zone.pins().iter().find(|pin| pin.vault == *id);
    Ok(pin.map(|pin| pin.admin).ok_or_else(|| Fault::NoZonePin { file: file.into(), vault: text::hex(id) })?)
}

/// The key `old` that is pinned for a vault has signed `new`, which signs the vault's header now: the pin follows, where it is this user's to change, and is told
/// to be changed where it is not.
pub fn follow(ui: &Ui, id: &[u8; 16], old: &Public, new: &Public) {
    let change = format!(
        "the administrator of vault {} has another key: {} has signed {}",
        text::hex(id),
        text::hex(old),
        text::hex(new)
    );
    match (GIVEN.get(), place()) {
        (Some(Given::Key(_)), _) => ui.warn(format_args!("{change}; give that one to --admin-key from now on")),
        (Some(Given::Zone(file)), _) => {
            let file = file.display();
            ui.warn(format_args!("{change}; pin it in {file}: `lamassu key admin pin --zone {file} DIR`"));
        }
        (None, None) => {}
        (None, Some(path)) => match replace(&path, id, old, new) {
            Ok(()) => ui.note(format_args!("{change}; the pin in {} follows", path.display())),
            Err(error) => ui.warn(format_args!("{change}; the pin does not follow: {error}")),
        },
    }
}

/// Writes the file anew, whole or not at all, with `new` in the place of `old`.
fn replace(path: &Path, id: &[u8; 16], old: &Public, new: &Public) -> Result<()> {
    let failed = |op| move |source| Fault::Local { op, path: path.to_path_buf(), source };
    let lines = std::fs::read_to_string(path).map_err(failed("read"))?;
    let mut kept = String::with_capacity(lines.len());
    for line in lines.lines() {
        let mut words = line.split_whitespace();
        let names_old =
            words.next().and_then(bytes::<16>) == Some(*id) && words.next().and_then(bytes::<32>) == Some(*old);
        match names_old {
            true => {
                kept += &format!("{} {}", text::hex(id), text::hex(new));
                words.for_each(|word| kept += &format!(" {word}"));
            }
            false => kept += line,
        }
        kept.push('\n');
    }
    let new = path.with_file_name(format!("known-vaults.{}", std::process::id()));
    let written = || {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(kept.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, path)
    };
    written().map_err(|source| {
        let _ = std::fs::remove_file(&new);
        failed("write")(source).into()
    })
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
