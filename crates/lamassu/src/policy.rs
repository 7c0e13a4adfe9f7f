//! The policy of this program, from its options and its environment; and messages about pins.

use crate::output::Ui;
use crate::{confine, mounts, signals, text};
use lamassu_host::anchors::Choice;
use lamassu_host::notes::Notes;
use lamassu_host::pins::{Given, Pin, Succession};
use lamassu_host::{Anchors, Pins, Policy, Surroundings, places};
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

    fn has_network(&self) -> bool {
        confine::has_network()
    }

    fn go_through(&self) {
        signals::go_through();
    }
}

/// `given`: whose signature headers must carry, if an option says so. `anchor`: where the vault's anchor lies, if an
/// option says so.
pub fn of_this_process(given: Option<Given>, any_memory: bool, anchor: Option<Choice>) -> Policy {
    let pins = Pins::new(given, places::known_vaults());
    let anchors = Anchors::within(places::anchors()).chosen(anchor.unwrap_or_default());
    let policy = Policy::default().with(pins, Notes::within(places::state())).with_any_memory(any_memory);
    policy.anchored_by(anchors).within(Arc::new(Here))
}

/// An administrator's public key, for clap.
pub fn parse_key(hex: &str) -> Result<[u8; 32], String> {
    lamassu_host::pins::parse_key(hex).map(|key| key.0).map_err(Into::into)
}

/// A public key that is no administrator's, for clap.
pub fn parse_other_key(hex: &str) -> Result<[u8; 32], String> {
    parse_key(hex).map_err(|_| "a public key is 64 hex digits".into())
}

/// Prints that an administrator's key has a successor, and whether the pin follows it.
pub fn tell(ui: &Ui, succession: &Succession) {
    let Succession { vault, old, new, pin } = succession;
    let change = format!(
        "the administrator of vault {} has another key: {} has signed {}",
        vault,
        text::hex(&old.0),
        text::hex(&new.0)
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
