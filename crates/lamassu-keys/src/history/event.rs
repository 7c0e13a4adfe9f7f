//! What is written down: events, before they become entries of the chain.

use crate::Tier;
use crate::header_file::shown;
use std::collections::BTreeMap;
use std::path::Path;

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// the vault was made
    Created,
    /// a slot more
    SlotAdded,
    /// a slot less
    SlotRemoved,
    /// one slot in the place of another
    SlotChanged,
    /// an administrator's key was made, or a new one
    AdminSet,
    /// an epoch was begun
    Rotated,
    /// an epoch was taken out of the keychain
    Retired,
    /// re-keying was begun
    RekeyBegun,
    /// re-keying came to its end
    RekeyEnded,
    /// the header was copied
    BackedUp,
    /// the header was put back from a copy
    Restored,
    /// the vault was mounted
    Loaded,
    /// the vault was unmounted
    Unloaded,
    /// a dataset was made
    DatasetCreated,
    /// a property of a dataset was set
    DatasetChanged,
    /// a dataset was destroyed
    DatasetDestroyed,
    /// a clone or snapshot was made
    Cloned,
    /// the vault got an anchor, later than it was made
    Anchored,
    /// its anchor was made anew of what the store showed
    AnchorRebuilt,
    /// what the store showed was taken for the newest
    AnchorAccepted,
    /// an older anchor was put in the place of a newer one
    AnchorReplaced,
    /// every slot was erased
    KeyDestroyed,
    /// a history that did not verify was set aside, and this one begun
    Restarted,
}

impl EventKind {
    /// Its name in entries.
    pub const fn name(self) -> &'static str {
        match self {
            EventKind::Created => "created",
            EventKind::SlotAdded => "slot-added",
            EventKind::SlotRemoved => "slot-removed",
            EventKind::SlotChanged => "slot-changed",
            EventKind::AdminSet => "admin-set",
            EventKind::Rotated => "rotated",
            EventKind::Retired => "retired",
            EventKind::RekeyBegun => "rekey-begun",
            EventKind::RekeyEnded => "rekey-ended",
            EventKind::BackedUp => "backed-up",
            EventKind::Restored => "restored",
            EventKind::Loaded => "loaded",
            EventKind::Unloaded => "unloaded",
            EventKind::DatasetCreated => "dataset-created",
            EventKind::DatasetChanged => "dataset-changed",
            EventKind::DatasetDestroyed => "dataset-destroyed",
            EventKind::Cloned => "cloned",
            EventKind::Anchored => "anchored",
            EventKind::AnchorRebuilt => "anchor-rebuilt",
            EventKind::AnchorAccepted => "anchor-accepted",
            EventKind::AnchorReplaced => "anchor-replaced",
            EventKind::KeyDestroyed => "key-destroyed",
            EventKind::Restarted => "restarted",
        }
    }
}

/// Something done to a vault's keys, to be written down. Holds no secret.
#[derive(Clone, Debug)]
pub struct Event {
    pub(super) kind: EventKind,
    pub(super) slot: Option<u32>,
    pub(super) epoch: Option<(Tier, u32)>,
    pub(super) uid: u32,
    pub(super) details: BTreeMap<&'static str, String>,
}

impl Event {
    /// An event that this process's user caused.
    pub fn new(kind: EventKind) -> Event {
        let uid = rustix::process::getuid().as_raw();
        Event { kind, slot: None, epoch: None, uid, details: BTreeMap::new() }
    }

    /// The slot it is about.
    #[must_use]
    pub fn slot(mut self, id: u32) -> Event {
        self.slot = Some(id);
        self
    }

    /// The epoch it is about.
    #[must_use]
    pub fn epoch(mut self, tier: Tier, number: u32) -> Event {
        self.epoch = Some((tier, number));
        self
    }

    /// Another user asked for it, e.g. of a mounted vault.
    #[must_use]
    pub fn by(mut self, uid: u32) -> Event {
        self.uid = uid;
        self
    }

    /// Something more to know; cut to 1000 characters.
    #[must_use]
    pub fn detail(mut self, name: &'static str, value: impl std::fmt::Display) -> Event {
        const CHARS_MAX: usize = 1000;
        self.details.insert(name, value.to_string().chars().take(CHARS_MAX).collect());
        self
    }

    /// To the log, under a target of its own, which goes to syslog whatever else is logged.
    pub(crate) fn announce(&self, path: &Path) {
        let Event { kind, slot, epoch, uid, details } = self;
        let epoch = epoch.map(|(tier, number)| format!("{} {number}", tier.name()));
        tracing::info!(
            target: "lamassu::key", event = kind.name(), path = %shown(path).display(), slot, epoch, uid, details = ?details, "key event"
        );
    }
}

/// The name of a user, where /etc/passwd has it.
pub(crate) fn user_name(uid: u32) -> Option<String> {
    let passwd = std::fs::read_to_string("/etc/passwd").ok()?;
    let of = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_string())
    };
    passwd.lines().find_map(of)
}

/// The name of this machine.
pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
