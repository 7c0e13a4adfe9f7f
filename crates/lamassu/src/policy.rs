//! The policy of this program, from its options and its environment; and what it tells people of pins.
//!
//! Anchors are in `$STATE_DIRECTORY/anchors`, `$XDG_STATE_HOME/lamassu/anchors`, for root `/var/lib/lamassu/anchors`,
//! or `~/.local/state/lamassu/anchors`.
//!
//! Pins are in `$XDG_CONFIG_HOME/lamassu/known-vaults` or `~/.config/lamassu/known-vaults`; notes of the slots that
//! opened last below `$STATE_DIRECTORY` (systemd), `$XDG_STATE_HOME/lamassu` or `~/.local/state/lamassu`.

use crate::output::Ui;
use crate::{mounts, signals, text};
use lamassu_host::anchors::Choice;
use lamassu_host::notes::Notes;
use lamassu_host::pins::{Given, Pin, Succession};
use lamassu_host::{Anchors, Pins, Policy, Surroundings};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// This machine's mounts, and this process's signals.
struct Here;

impl Surroundings for Here {
    fn writer_of(&self, dir: &Path) -> Option<PathBuf> {
        mounts::of_vault(dir).map(|mount| mount.mountpoint.clone())
    }

    fn is_interrupted(&self) -> bool {
        signals::interrupted()
    }
}

/// `given`: whose signature headers must carry, where an option says so. `anchor`: where the vault's anchor lies, where
/// one does.
pub fn of_this_process(given: Option<Given>, any_memory: bool, anchor: Option<Choice>) -> Policy {
    let pins = Pins::new(given, known_vaults());
    let anchors = Anchors::within(anchors()).chosen(anchor.unwrap_or_default());
    let policy = Policy::default().with(pins, Notes::within(state())).with_any_memory(any_memory);
    policy.anchored_by(anchors).within(Arc::new(Here))
}

fn known_vaults() -> Option<PathBuf> {
    let config = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|p| p.join(".config")))?;
    Some(config.join("lamassu/known-vaults"))
}

fn state() -> Option<PathBuf> {
    absolute("STATE_DIRECTORY")
        .or_else(|| absolute("XDG_STATE_HOME").map(|p| p.join("lamassu")))
        .or_else(|| absolute("HOME").map(|p| p.join(".local/state/lamassu")))
}

/// Root's are the machine's: whoever became root, and from where, changes nothing.
fn anchors() -> Option<PathBuf> {
    const OF_ROOT: &str = "/var/lib/lamassu";
    let own = absolute("STATE_DIRECTORY").or_else(|| absolute("XDG_STATE_HOME").map(|p| p.join("lamassu")));
    let of_user = || match rustix::process::geteuid().is_root() {
        true => Some(PathBuf::from(OF_ROOT)),
        false => state(),
    };
    own.or_else(of_user).map(|state| state.join("anchors"))
}

/// Where an anchor lies, for clap and `-o`.
pub fn anchor_choice(text: OsString) -> Choice {
    match text.to_str() {
        Some("none") => Choice::Unverified,
        // A daemon works in another directory.
        _ => Choice::File(std::path::absolute(&text).unwrap_or_else(|_| text.into())),
    }
}

/// A variable that names a place.
fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|p| p.is_absolute())
}

/// An administrator's public key, for clap.
pub fn parse_key(hex: &str) -> Result<[u8; 32], String> {
    lamassu_host::pins::parse_key(hex).map_err(Into::into)
}

/// Says that an administrator's key has a successor, and what became of the pin.
pub fn tell(ui: &Ui, succession: &Succession) {
    let Succession { vault, old, new, pin } = succession;
    let change = format!(
        "the administrator of vault {} has another key: {} has signed {}",
        text::hex(vault),
        text::hex(old),
        text::hex(new)
    );
    match pin {
        Pin::Given(Given::Key(_)) => ui.warn(format_args!("{change}; give that one to --admin-key from now on")),
        Pin::Given(Given::Zone(file)) => {
            let file = file.display();
            ui.warn(format_args!("{change}; pin it in {file}: `lamassu key admin pin --zone {file} DIR`"));
        }
        Pin::Follows(path) => ui.note(format_args!("{change}; the pin in {} follows", path.display())),
        Pin::Stays(_, error) => ui.warn(format_args!("{change}; the pin does not follow: {error}")),
    }
}
