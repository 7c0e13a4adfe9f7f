//! Where this host keeps files about vaults, outside of every vault, for the user of this process.
//! Anchors are in `$STATE_DIRECTORY/anchors`, `$XDG_STATE_HOME/lamassu/anchors`, for root `/var/lib/lamassu/anchors`,
//! or `~/.local/state/lamassu/anchors`.
//!
//! Pins are in `$XDG_CONFIG_HOME/lamassu/known-vaults` or `~/.config/lamassu/known-vaults`; notes of the slots that
//! opened last below `$STATE_DIRECTORY` (systemd), `$XDG_STATE_HOME/lamassu` or `~/.local/state/lamassu`.
//!
//! A variable with a relative path is ignored, as the XDG Base Directory Specification says.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// The file of pins.
pub fn known_vaults() -> Option<PathBuf> {
    let config = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")))?;
    Some(config.join("lamassu/known-vaults"))
}

/// The directory of notes.
pub fn state() -> Option<PathBuf> {
    given_state().or_else(|| absolute("HOME").map(|home| home.join(".local/state/lamassu")))
}

/// The directory of anchors. Root's are the machine's: they do not depend on who became root, and how.
pub fn anchors() -> Option<PathBuf> {
    const OF_ROOT: &str = "/var/lib/lamassu";
    let of_user = || match rustix::process::geteuid().is_root() {
        true => Some(PathBuf::from(OF_ROOT)),
        false => state(),
    };
    given_state().or_else(of_user).map(|state| state.join("anchors"))
}

fn given_state() -> Option<PathBuf> {
    absolute("STATE_DIRECTORY").or_else(|| absolute("XDG_STATE_HOME").map(|state| state.join("lamassu")))
}

/// A variable with an absolute path.
fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Makes the name of a file durable.
pub(crate) fn sync_dir_of(file: &Path) -> io::Result<()> {
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
}
