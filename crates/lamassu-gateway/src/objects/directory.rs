//! Creation of a directory object: a directory with the attribute of an object, and those above it.

use super::attrs::Attrs;
use super::key::Key;
use super::node::Node;
use super::put::again_if_gone;
use super::{Guard, ObjectError, Objects, Result, remove_if_empty};
use crate::limits::Turn;
use crate::work;
use lamassu_vault::{Kind, Owner, VaultError};
use parking_lot::Mutex;
use std::sync::Arc;

/// A directory object that is being made. If it is dropped before, the directories that were made for it are removed.
pub struct Directory {
    objects: Arc<Objects>,
    bucket: Node,
    key: Key,
    owner: Owner,
    /// How many of the directories above it were there. Empty ones of them may be a program's, and stay.
    levels: Mutex<usize>,
    is_made: bool,
    turn: Option<Arc<Turn>>,
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.is_made {
            return;
        }
        let (objects, bucket, key) = (self.objects.clone(), self.bucket.clone(), self.key.clone());
        let levels = *self.levels.lock();
        work::beside_async(self.turn.take(), move || {
            if let Err(error) = objects.prune(&bucket, &key, levels) {
                tracing::debug!(%error, "directories that may be empty stay");
            }
        });
    }
}

impl Directory {
    /// Whether directories above it have to be made.
    pub fn lacks_parents(&self) -> bool {
        self.key.parents().nth(*self.levels.lock()).is_some()
    }

    /// Makes the directories above it that are not there, in the tenant's turns.
    ///
    /// # Errors
    /// [`ObjectError::BelowObject`]; those of the vault.
    pub fn make_parents(&self) -> Result<()> {
        work::in_turn(|| self.parent().map(drop))
    }

    /// The directory above it; made, if it is not there.
    fn parent(&self) -> Result<Node> {
        self.objects.make_missing(&self.bucket, &self.key, self.owner, &mut self.levels.lock())
    }

    /// Makes it an object, durably.
    ///
    /// # Errors
    /// [`super::Refusal::Precondition`], [`ObjectError::BelowObject`], [`ObjectError::MuchMetadata`],
    /// [`VaultError::Stale`]: the client is gone; those of the vault. Then nothing is changed, except if a sync fails.
    pub fn place(mut self, guard: &Guard, attrs: &Attrs) -> Result<Node> {
        // Hundreds of directories, perhaps: made before the lock is taken.
        self.make_parents()?;
        let objects = self.objects.clone();
        let _alone = objects.alone_with(&self.bucket, &self.key);
        // A client that is gone may have sent the request again, and then others: this one must not come after them.
        work::wanted(VaultError::Stale)?;
        let (dir, made) = again_if_gone(|| {
            let dir = self.parent()?;
            Objects::require(guard, Objects::node_in(&dir, &self.key)?.as_ref())?;
            let (made, is_new) = match dir.make_dir(self.key.name(), objects.modes.dir, self.owner) {
                Err(VaultError::Exists) => (dir.child(self.key.name())?, false),
                made => (made?, true),
            };
            if made.attr().kind != Kind::Dir {
                return Err(ObjectError::BelowObject);
            }
            if let Err(error) = attrs.store(&made, made.attr()) {
                if is_new {
                    remove_if_empty(&dir, self.key.name())?;
                }
                return Err(error);
            }
            Ok((dir, made))
        })?;
        self.is_made = true;
        dir.sync_names()?;
        made.sync_names()?;
        Ok(made)
    }
}

impl Objects {
    /// Begins a directory object.
    ///
    /// # Errors
    /// [`super::Refusal::NoBucket`], [`ObjectError::BelowObject`]; those of the vault.
    pub fn begin_directory(self: &Arc<Self>, bucket: &str, key: &Key, owner: Owner) -> Result<Directory> {
        let bucket = self.bucket(bucket)?;
        let (_, levels) = Self::lowest(&bucket, key)?;
        Ok(Directory {
            objects: self.clone(),
            bucket,
            key: key.clone(),
            owner,
            levels: Mutex::new(levels),
            is_made: false,
            turn: work::current(),
        })
    }
}
