//! Creation of an object: written under one of the gateway's own names, synced, renamed to its key.

use super::attrs::Attrs;
use super::key::{Key, RESERVED};
use super::node::{Node, Open};
use super::{ObjectError, Objects, PIECE, Refusal, Result, much_metadata, none_there};
use crate::limits::Turn;
use crate::work;
use lamassu_vault::{Kind, Owner, RenameMode, VaultError};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

/// Prefix of the names of files that are being written.
pub(super) const STAGED: &str = ".lamassu-put-";
/// How often a directory is made again after another request has removed it.
const ATTEMPTS: usize = 8;

const _: () = assert!(matches!(STAGED.as_bytes(), [b'.', b'l', ..]) && STAGED.len() > RESERVED.len());

/// A condition on the present object before another replaces it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Guard {
    /// No condition.
    #[default]
    None,
    /// There is no object.
    Absent,
    /// There is an object.
    Present,
    /// The object has this entity tag.
    Tag(String),
    /// There is no object with this entity tag.
    OtherTag(String),
}

impl Guard {
    /// Checks the condition.
    ///
    /// # Errors
    /// [`Refusal::Precondition`]; [`Refusal::NoKey`] if an object is required and missing.
    pub fn check(&self, there: Option<&Attrs>) -> Result<(), Refusal> {
        match (self, there) {
            (Guard::None, _) | (Guard::Absent | Guard::OtherTag(_), None) | (Guard::Present, Some(_)) => Ok(()),
            (Guard::Present | Guard::Tag(_), None) => Err(Refusal::NoKey),
            (Guard::Tag(tag), Some(there)) if there.etag == *tag => Ok(()),
            (Guard::OtherTag(tag), Some(there)) if there.etag != *tag => Ok(()),
            (Guard::Absent | Guard::Tag(_) | Guard::OtherTag(_), Some(_)) => Err(Refusal::Precondition),
        }
    }
}

/// A file that is being written, and is renamed to a key when it is complete. If it is dropped before, nothing remains.
pub struct Staged {
    objects: Arc<Objects>,
    dir: Node,
    name: OsString,
    open: Open,
    /// The bucket and the key for which it was begun, if directories may have been made for it.
    place: Option<(Node, Key)>,
    is_placed: bool,
    turn: Option<Arc<Turn>>,
}

impl Drop for Staged {
    fn drop(&mut self) {
        let (objects, name) = (self.objects.clone(), std::mem::take(&mut self.name));
        if self.is_placed {
            objects.staged.lock().remove(&name);
            return;
        }
        let (dir, place) = (self.dir.clone(), self.place.take());
        work::beside_async(self.turn.take(), move || {
            if let Err(error) = dir.unlink(&name).or_else(none_there) {
                tracing::warn!(%error, "what was written of an object could not be removed; the next start does it");
            }
            if let Some((bucket, key)) = place
                && let Err(error) = objects.prune(&bucket, &key)
            {
                tracing::debug!(%error, "directories that may be empty stay");
            }
            objects.staged.lock().remove(&name);
        });
    }
}

impl Staged {
    /// The file.
    pub fn open(&self) -> &Open {
        &self.open
    }

    /// Puts the object in its place, durably: content, attributes, name.
    ///
    /// # Errors
    /// [`Refusal::Precondition`], [`ObjectError::BelowObject`], [`ObjectError::AboveObjects`],
    /// [`ObjectError::MuchMetadata`]; those of the vault. Then nothing is changed.
    pub fn place(self, guard: &Guard, attrs: &Attrs) -> Result<lamassu_vault::Attr> {
        let attr = self.complete(attrs)?;
        self.place_complete(guard, |_| true)?;
        Ok(attr)
    }

    /// Gives the complete file the name of its key, durably, unless `is_meant` refuses what is there now.
    ///
    /// # Errors
    /// As [`Staged::place`]; [`VaultError::Stale`] if `is_meant` refuses.
    pub(super) fn place_complete(mut self, guard: &Guard, is_meant: impl FnOnce(Option<&Node>) -> bool) -> Result<()> {
        let Some((bucket, key)) = self.place.clone() else { return Err(VaultError::Invalid.into()) };
        let objects = self.objects.clone();
        {
            let _alone = objects.alone_with(&bucket, &key);
            let there = Objects::node_in(&self.dir, &key)?;
            Objects::require(guard, there.as_ref())?;
            if !is_meant(there.as_ref()) {
                return Err(VaultError::Stale.into());
            }
            let mode = if *guard == Guard::Absent { RenameMode::NoReplace } else { RenameMode::Replace };
            self.rename_to(key.name(), mode)?;
        }
        Ok(self.dir.sync_names()?)
    }

    /// Renames the complete file to a name in the directory where it was begun. An existing file is replaced.
    pub(super) fn place_as(mut self, name: &OsStr) -> Result<()> {
        self.rename_to(name, RenameMode::Replace)?;
        Ok(self.dir.sync_names()?)
    }

    /// Makes content and attributes durable.
    pub(super) fn complete(&self, attrs: &Attrs) -> Result<lamassu_vault::Attr> {
        self.open.flush()?;
        let attr = self.open.attr()?;
        attrs.store(self.open.node(), &attr).map_err(much_metadata)?;
        self.open.sync()?;
        Ok(attr)
    }

    fn rename_to(&mut self, name: &OsStr, mode: RenameMode) -> Result<()> {
        match self.dir.rename(&self.name, name, mode) {
            Ok(()) => self.is_placed = true,
            Err(VaultError::Exists) => return Err(Refusal::Precondition.into()),
            Err(VaultError::IsDirectory | VaultError::NotEmpty | VaultError::DatasetRoot) => {
                return Err(ObjectError::AboveObjects);
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

impl Objects {
    /// Begins the object of a key: makes the directories above it, and a file in the lowest one.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`], [`ObjectError::BelowObject`], [`ObjectError::AboveObjects`]; those of the vault.
    pub fn stage(self: &Arc<Self>, bucket: &str, key: &Key, owner: Owner) -> Result<Staged> {
        let bucket = self.bucket(bucket)?;
        let (dir, (name, open)) = self.in_parent(&bucket, key, owner, |dir| {
            if dir.child_if_there(key.name())?.is_some_and(|there| there.is_dir()) {
                return Err(ObjectError::AboveObjects);
            }
            self.new_file(dir, owner)
        })?;
        let place = Some((bucket, key.clone()));
        Ok(Staged { objects: self.clone(), dir, name, open, place, is_placed: false, turn: work::current() })
    }

    /// Makes a file in one of the gateway's own directories.
    pub(super) fn stage_in(self: &Arc<Self>, dir: &Node, owner: Owner) -> Result<Staged> {
        let (name, open) = self.new_file(dir, owner)?;
        Ok(Staged {
            objects: self.clone(),
            dir: dir.clone(),
            name,
            open,
            place: None,
            is_placed: false,
            turn: work::current(),
        })
    }

    fn new_file(&self, dir: &Node, owner: Owner) -> Result<(OsString, Open)> {
        let name = OsString::from(format!("{STAGED}{}", random_name()?));
        // Registered before it exists, so that the sweep leaves it alone.
        self.staged.lock().insert(name.clone());
        let created = dir.create(&name, self.modes.file, owner);
        let open = created.inspect_err(|_| _ = self.staged.lock().remove(&name))?;
        Ok((name, open))
    }

    /// Runs `work` in the directory of a key, which is made with those above it if necessary. Another request may
    /// remove empty directories in between.
    pub(super) fn in_parent<T>(
        &self,
        bucket: &Node,
        key: &Key,
        owner: Owner,
        mut body: impl FnMut(&Node) -> Result<T>,
    ) -> Result<(Node, T)> {
        for _ in 1..ATTEMPTS {
            let done = self.make_parents(bucket, key, owner).and_then(|dir| Ok((dir.clone(), body(&dir)?)));
            match done {
                Err(ObjectError::Vault(VaultError::NotFound | VaultError::Stale)) => {}
                done => return done,
            }
        }
        let dir = self.make_parents(bucket, key, owner)?;
        Ok((dir.clone(), body(&dir)?))
    }

    fn make_parents(&self, bucket: &Node, key: &Key, owner: Owner) -> Result<Node> {
        let mut dir = bucket.clone();
        for name in key.parents() {
            let next = match dir.child_if_there(name)? {
                Some(next) => next,
                None => match dir.make_dir(name, self.modes.dir, owner) {
                    Err(VaultError::Exists) => dir.child(name)?,
                    made => {
                        let made = made?;
                        dir.sync_names()?;
                        made
                    }
                },
            };
            if !next.is_dir() {
                return Err(ObjectError::BelowObject);
            }
            dir = next;
        }
        Ok(dir)
    }

    /// Makes a directory object, with the directories above it.
    ///
    /// # Errors
    /// As [`Objects::stage`] and [`Staged::place`].
    pub fn make_directory(&self, bucket: &str, key: &Key, owner: Owner, guard: &Guard, attrs: &Attrs) -> Result<Node> {
        let bucket = self.bucket(bucket)?;
        let _alone = self.alone_with(&bucket, key);
        let (dir, made) = self.in_parent(&bucket, key, owner, |dir| {
            Self::require(guard, Self::node_in(dir, key)?.as_ref())?;
            let made = match dir.make_dir(key.name(), self.modes.dir, owner) {
                Err(VaultError::Exists) => dir.child(key.name())?,
                made => made?,
            };
            if made.attr().kind != Kind::Dir {
                return Err(ObjectError::BelowObject);
            }
            attrs.store(&made, made.attr()).map_err(much_metadata)?;
            Ok(made)
        })?;
        dir.sync_names()?;
        made.sync_names()?;
        Ok(made)
    }

    /// Copies a range of an open object to offset `at`, the end of the staged file, in the tenant's turns.
    pub(super) fn append(staged: &Staged, from: &Open, at: u64, range: std::ops::Range<u64>) -> Result<()> {
        staged.open().copy_from(from, (range.start, at), range.end.saturating_sub(range.start))
    }

    /// Calls `each` with the content of an open file, piece by piece, each in the tenant's turn.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn read_through(open: &Open, size: u64, each: &mut dyn FnMut(&[u8])) -> Result<()> {
        let mut at = 0;
        while at < size {
            at += work::in_turn(|| {
                let piece = open.read(at, PIECE)?;
                if piece.is_empty() {
                    return Err(ObjectError::from(VaultError::NoData));
                }
                each(&piece);
                Ok(piece.len() as u64)
            })?;
        }
        Ok(())
    }
}

/// 128 random bits, for a name.
pub(crate) fn random_name() -> Result<String> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        let got = rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty());
        filled += got.map_err(|error| VaultError::Io { op: "get random bytes", source: error.into() })?;
    }
    Ok(data_encoding::HEXLOWER.encode(&bytes))
}
