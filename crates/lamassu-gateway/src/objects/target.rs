//! What lies at a key when long work on it begins. Such work may go on without its client, which may have sent the
//! request again, and then others: it must not come after them.

use super::attrs::{Attrs, Version};
use super::key::Key;
use super::node::Node;
use super::{Objects, Result, names};
use crate::work;
use lamassu_vault::{Ino, VaultError};

/// A file, its content, and its properties as far as they can be read.
#[derive(PartialEq, Eq)]
pub(super) struct State {
    ino: Ino,
    version: Version,
    attrs: Option<Attrs>,
}

impl State {
    pub fn of(node: &Node) -> State {
        State::with(node, Attrs::of(node).ok())
    }

    /// The same, with properties that were read before.
    pub fn with(node: &Node, attrs: Option<Attrs>) -> State {
        State { ino: node.ino(), version: Version::of(node.attr()), attrs }
    }

    /// The content.
    pub fn version(&self) -> Version {
        self.version
    }
}

/// What lay at a key; `None`: nothing. The entry is held, since the number of one that nobody holds is not always the
/// same when it is found again: a vault, or a directory with other file systems mounted below it, gives some entries
/// numbers of its own.
pub(super) struct Target(Option<(Node, State)>);

impl Target {
    /// Notes what lies at a key, for a client that waits: whatever it asks for when it is gone, comes after this.
    ///
    /// # Errors
    /// [`VaultError::Stale`]: the client is gone; those of the vault.
    pub fn note(objects: &Objects, bucket: &str, key: &Key) -> Result<Target> {
        let dir = names::unless_closed(objects.parent(&objects.bucket(bucket)?, key))?.flatten();
        let there = dir.map(|dir| Objects::node_in(&dir, key)).transpose()?.flatten();
        let state = there.as_ref().map(State::of);
        let target = Target(there.zip(state));
        work::wanted(VaultError::Stale)?;
        Ok(target)
    }

    /// Whether the work is not too late for what is there now.
    pub fn may_replace(&self, there: Option<&Node>) -> bool {
        work::is_wanted() || there.map(State::of).as_ref() == self.0.as_ref().map(|(_, state)| state)
    }
}
