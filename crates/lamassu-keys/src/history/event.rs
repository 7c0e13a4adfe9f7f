//! Events, before they become entries of the chain.

use crate::Tier;
use crate::header_file::shown;
use std::collections::BTreeMap;
use std::path::Path;

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// the vault was made
    Created,
    /// a slot was added
    SlotAdded,
    /// a slot was removed
    SlotRemoved,
    /// a slot was replaced
    SlotChanged,
    /// an administrator's key was set or exchanged
    AdminSet,
    /// an epoch was started
    Rotated,
    /// an epoch was removed from the keychain
    Retired,
    /// re-keying was begun
    RekeyBegun,
    /// re-keying has finished
    RekeyEnded,
    /// the header was copied
    BackedUp,
    /// the header was restored from a copy
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
    /// the vault got an anchor after its creation
    Anchored,
    /// its anchor was rebuilt from what the store showed
    AnchorRebuilt,
    /// the store's state was accepted as the newest
    AnchorAccepted,
    /// a newer anchor was replaced by an older one
    AnchorReplaced,
    /// every slot was erased
    KeyDestroyed,
    /// a history that did not verify was set aside, and this one started
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

/// An event about a vault's keys, for the history. Holds no secret.
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

    /// Sets the slot concerned.
    #[must_use]
    pub fn slot(mut self, id: u32) -> Event {
        self.slot = Some(id);
        self
    }

    /// Sets the epoch concerned.
    #[must_use]
    pub fn epoch(mut self, tier: Tier, number: u32) -> Event {
        self.epoch = Some((tier, number));
        self
    }

    /// Sets the user who asked for it, for example in a mounted vault.
    #[must_use]
    pub fn by(mut self, uid: u32) -> Event {
        self.uid = uid;
        self
    }

    /// Adds a detail, cut to 1000 characters.
    #[must_use]
    pub fn detail(mut self, name: &'static str, value: impl std::fmt::Display) -> Event {
        const CHARS_MAX: usize = 1000;
        self.details.insert(name, value.to_string().chars().take(CHARS_MAX).collect());
        self
    }

    /// Logs it under a target of its own, which goes to syslog at any log level.
    pub(crate) fn announce(&self, path: &Path) {
        let Event { kind, slot, epoch, uid, details } = self;
        let epoch = epoch.map(|(tier, number)| format!("{} {number}", tier.name()));
        tracing::info!(
            target: "lamassu::key", event = kind.name(), path = %shown(path).display(), slot, epoch, uid, details = ?details, "key event"
        );
    }
}

/// A user's name, if /etc/passwd has it.
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
