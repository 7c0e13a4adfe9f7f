//! Objects as files of a vault: buckets are directories in one directory of it, keys are paths below.
//!
//! Guarantees: an object exists completely or not at all, also after a crash, and is durable when the call returns. It
//! is written under a name of the gateway's own in its directory, or in the lowest one above that is there (so it gets
//! that directory's profile and access lists), synced, and renamed. Links are never followed, and only files and
//! directories are shown. Calls block; any number of threads may make them.
//!
//! This module does not decide on rights, and does not know HTTP.

pub mod attrs;
mod copy;
mod directory;
pub mod key;
pub mod list;
mod multipart;
mod names;
pub mod node;
pub mod parts;
mod put;
mod refusal;
mod sweep;
mod target;
mod under_way;
pub mod uploads;

pub use directory::Directory;
pub use multipart::{Reader, Upload};
pub use parts::{Completed, PARTS_MAX};
pub(crate) use put::random_name;
pub use put::{Guard, Staged};
pub use refusal::Refusal;
pub use sweep::Swept;

use crate::locks::{Alone, Locks};
use crate::work::{self, NoLonger};
use attrs::{Attrs, Shown};
use key::{Key, KeyFault};
use lamassu_vault::{Ino, Kind, Owner, VaultError};
use names::Listings;
pub use node::Tree;
use node::{Node, Open};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use under_way::UnderWay;
use uploads::UploadQuery;

/// Bytes of one read or write.
pub const PIECE: usize = 1 << 20;
/// Number of uploads handled together.
const AT_ONCE: usize = 1000;
/// How often an object is looked up again if it is replaced before it is opened.
const OPENS: usize = 16;
/// Directories above a key that are walked through without a turn.
const LEVELS_FREE: usize = 16;

/// Why an operation on an object failed.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// The client's fault.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The client's fault: the key is not a valid path.
    #[error(transparent)]
    Key(#[from] KeyFault),
    /// The client's fault: `a` is an object, so `a/b` cannot be one.
    #[error("a part of the key, in front of a slash, is an object: an object is no directory")]
    BelowObject,
    /// The client's fault: `a/b` is an object, so `a` cannot be one.
    #[error("there are objects below this key: a directory is no object")]
    AboveObjects,
    /// The client's fault: a directory has no content.
    #[error("a key that ends with a slash is a directory, and has no content")]
    DirectoryContent,
    /// The client's fault: the store cannot keep that many headers, metadata and tags with a file.
    #[error("the store below cannot keep so much metadata with a file")]
    MuchMetadata,
    /// The operator's fault: the directory of the buckets is no longer where it was at the start.
    #[error("the directory of the buckets: {0}")]
    NoRoot(VaultError),
    /// The client's fault: its credential was revoked or has expired meanwhile.
    #[error("the credential is no longer in force")]
    NoLonger,
    /// The vault's error.
    #[error(transparent)]
    Vault(VaultError),
}

/// The result of a call.
pub type Result<T, E = ObjectError> = std::result::Result<T, E>;

impl From<NoLonger> for ObjectError {
    fn from(_: NoLonger) -> Self {
        ObjectError::NoLonger
    }
}

impl From<VaultError> for ObjectError {
    fn from(error: VaultError) -> Self {
        ObjectError::Vault(error)
    }
}

/// Permissions of new files and directories.
#[derive(Clone, Copy, Debug)]
pub struct Modes {
    /// of files
    pub file: u32,
    /// of directories
    pub dir: u32,
}

/// The buckets in one directory of a tree.
pub struct Objects {
    fs: Arc<dyn Tree>,
    /// The directory of the buckets.
    root: OsString,
    modes: Modes,
    listings: Listings,
    /// Held while a bucket is made or removed.
    buckets: Locks<String>,
    /// Held during a change of a key.
    keys: Locks<(Ino, OsString)>,
    /// Held during a change of an upload.
    uploads: Locks<String>,
    /// Files that are being written by this process.
    under_way: UnderWay,
}

/// An object that was found.
pub struct Object {
    /// its file
    pub node: Node,
    /// its properties
    pub attrs: Attrs,
}

impl Object {
    /// The object as clients see it.
    pub fn shown(self) -> Shown {
        let size = if self.node.is_dir() { 0 } else { self.node.attr().size };
        Shown { attrs: self.attrs, size, mtime: self.node.attr().mtime }
    }
}

impl Objects {
    /// Opens the buckets in a directory of a vault.
    ///
    /// # Errors
    /// Those of a missing directory.
    pub fn open(fs: Arc<dyn Tree>, root: &str, modes: Modes, listings_max: usize) -> Result<Objects> {
        let (listings, under_way) = (Listings::new(listings_max), UnderWay::default());
        let (buckets, keys, uploads) = (Locks::default(), Locks::default(), Locks::default());
        let objects = Objects { fs, root: root.into(), modes, listings, buckets, keys, uploads, under_way };
        match objects.root()?.is_dir() {
            true => Ok(objects),
            false => Err(VaultError::NotDirectory.into()),
        }
    }

    fn root(&self) -> Result<Node> {
        Node::at(&self.fs, &self.root).map_err(|error| match error {
            VaultError::NotFound | VaultError::NotDirectory | VaultError::Stale => ObjectError::NoRoot(error),
            error => error.into(),
        })
    }

    /// Whether the vault answers.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn check(&self) -> Result<()> {
        self.root().map(drop)
    }

    /// The buckets in the order of their names, each with its directory.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn buckets(&self, is_shown: &dyn Fn(&str) -> bool, most: usize) -> Result<Vec<(String, Node)>> {
        let root = self.root()?;
        let mut names = Vec::new();
        root.list(&mut |name, kind| {
            if let (Some(name), Kind::Dir) = (key::shown(name).filter(|name| is_shown(name)), kind) {
                names.push(name.to_owned());
            }
        })?;
        names.sort_unstable();
        let found = names.into_iter().map(|name| {
            work::wanted(ObjectError::NoLonger)?;
            work::pause()?;
            let node = root.child_if_there(OsStr::new(&name))?;
            Ok(node.map(|node| (name, node)))
        });
        found.filter_map(Result::transpose).take(most).collect()
    }

    /// A bucket.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`]; those of the vault.
    pub fn bucket(&self, name: &str) -> Result<Node> {
        match self.root()?.child_if_there(OsStr::new(name))? {
            Some(node) if node.is_dir() && key::shown(OsStr::new(name)).is_some() => Ok(node),
            _ => Err(Refusal::NoBucket.into()),
        }
    }

    /// Makes a bucket: a directory.
    ///
    /// # Errors
    /// [`Refusal::BucketExists`]; [`VaultError::Stale`]: the client is gone; those of the vault.
    pub fn make_bucket(&self, name: &str, owner: Owner) -> Result<()> {
        self.change_bucket(name, |root| match root.make_dir(OsStr::new(name), self.modes.dir, owner) {
            Err(VaultError::Exists | VaultError::DatasetRoot) => Err(Refusal::BucketExists.into()),
            made => Ok(made.map(drop)?),
        })
    }

    /// Makes or removes a bucket in the directory of the buckets, durably.
    fn change_bucket(&self, name: &str, change: impl FnOnce(&Node) -> Result<()>) -> Result<()> {
        let root = self.root()?;
        {
            let _alone = self.buckets.alone(name.into());
            // A client that is gone may have sent the request again, and then others: this must not come after them.
            work::wanted(VaultError::Stale)?;
            change(&root)?;
        }
        Ok(root.sync_names()?)
    }

    /// Removes a bucket without objects. Uploads under way are aborted, as in S3.
    ///
    /// # Errors
    /// [`Refusal::BucketNotEmpty`], [`Refusal::NoBucket`]; [`VaultError::Stale`]: the client is gone; those of the
    /// vault, also for the root of a dataset, which only the administrator can destroy.
    pub fn remove_bucket(&self, name: &str) -> Result<()> {
        let bucket = self.bucket(name)?;
        let query = list::Query { max: 1, ..list::Query::default() };
        if !self.list(name, &query, &|_| true)?.items.is_empty() {
            return Err(Refusal::BucketNotEmpty.into());
        }
        // Otherwise the uploads would have ended for nothing.
        if multipart::has_more_than_uploads(&bucket)? {
            return Err(Refusal::BucketNotEmpty.into());
        }
        let mut query = UploadQuery { max: AT_ONCE, ..UploadQuery::default() };
        loop {
            let page = self.uploads(name, &query, &|_| true)?;
            for uploads::Listed { key, id, .. } in page.uploads {
                work::wanted(ObjectError::NoLonger)?;
                work::pause()?;
                match self.abort_upload(name, &Key::parse(&key)?, &id) {
                    // Another request has ended it.
                    Ok(()) | Err(ObjectError::Refused(Refusal::NoUpload)) => {}
                    Err(error) => return Err(error),
                }
            }
            let Some((key, id)) = page.next else { break };
            (query.after, query.after_id) = (Some(key), id);
        }
        multipart::remove_index(&bucket)?;
        self.change_bucket(name, |root| match root.remove_dir(OsStr::new(name)) {
            Err(VaultError::NotEmpty) => Err(Refusal::BucketNotEmpty.into()),
            removed => Ok(removed?),
        })
    }

    /// Locks a key for a change.
    fn alone_with(&self, bucket: &Node, key: &Key) -> Alone<'_, (Ino, OsString)> {
        self.alone_with_path(bucket, OsStr::new(key.path()))
    }

    fn alone_with_path(&self, bucket: &Node, path: &OsStr) -> Alone<'_, (Ino, OsString)> {
        self.keys.alone((bucket.ino(), path.into()))
    }

    /// Walks through the directories of a key, in the tenant's turn if they are many. While the thread holds a lock it
    /// waits for nothing.
    fn by_levels<T>(key: &Key, walk: impl FnOnce() -> Result<T>) -> Result<T> {
        let is_deep = key.parents().nth(LEVELS_FREE).is_some();
        if is_deep && work::may_pause() { work::in_turn(walk) } else { walk() }
    }

    /// The directory of a key; `None`: it does not exist, or is not a directory.
    fn parent(&self, bucket: &Node, key: &Key) -> Result<Option<Node>> {
        Self::by_levels(key, || Self::walk_to_parent(bucket, key))
    }

    fn walk_to_parent(bucket: &Node, key: &Key) -> Result<Option<Node>> {
        let mut dir = bucket.clone();
        for name in key.parents() {
            work::pause()?;
            match dir.child_if_there(name)? {
                Some(next) if next.is_dir() => dir = next,
                _ => return Ok(None),
            }
        }
        Ok(Some(dir))
    }

    /// The file or the directory of an object.
    fn node_in(dir: &Node, key: &Key) -> Result<Option<Node>> {
        let found = names::unless_closed(dir.child_if_there(key.name()).map_err(Into::into))?;
        let Some(node) = found.flatten() else { return Ok(None) };
        let is_object = match node.attr().kind {
            Kind::File => !key.is_dir(),
            Kind::Dir => key.is_dir() && names::unless_gone(Attrs::are_of(&node).map_err(Into::into))?.unwrap_or(false),
            Kind::Symlink | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => false,
        };
        Ok(is_object.then_some(node))
    }

    fn found_in(dir: &Node, key: &Key) -> Result<Option<Object>> {
        let Some(node) = Self::node_in(dir, key)? else { return Ok(None) };
        let attrs = Attrs::of(&node)?;
        Ok(Some(Object { node, attrs }))
    }

    /// Checks a condition on what is there. Only conditions on the entity tag read its properties: an object whose
    /// properties are damaged can be replaced and removed.
    fn require(guard: &Guard, there: Option<&Node>) -> Result<()> {
        let attrs = match (guard, there) {
            (Guard::Tag(_) | Guard::OtherTag(_), Some(node)) => Some(Attrs::of(node)?),
            (_, there) => there.map(|_| Attrs::default()),
        };
        Ok(guard.check(attrs.as_ref())?)
    }

    /// An object, with its properties.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`], [`Refusal::NoKey`]; those of the vault.
    pub fn find(&self, bucket: &str, key: &Key) -> Result<Object> {
        let bucket = self.bucket(bucket)?;
        let found = self.parent(&bucket, key).and_then(|dir| match dir {
            Some(dir) => Self::found_in(&dir, key),
            None => Ok(None),
        });
        Ok(names::unless_closed(found)?.flatten().ok_or(Refusal::NoKey)?)
    }

    /// Opens an object for reading. The properties belong to the content that is read.
    ///
    /// # Errors
    /// As [`Objects::find`].
    pub fn open_object(&self, bucket: &str, key: &Key) -> Result<(Option<Open>, Object)> {
        for _ in 0..OPENS {
            let object = self.find(bucket, key)?;
            if object.node.is_dir() {
                return Ok((None, object));
            }
            match object.node.clone().open() {
                Ok(open) => return Ok((Some(open), object)),
                // The object was replaced or removed meanwhile; the next lookup tells which.
                Err(VaultError::NotFound | VaultError::Stale) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(VaultError::Stale.into())
    }

    /// Removes an object; a missing one counts as removed. Directories that become empty are removed too, unless they
    /// were made as objects.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`], [`Refusal::Precondition`]; [`VaultError::Stale`]: the client is gone; those of the vault.
    pub fn remove(&self, bucket: &str, key: &Key, guard: &Guard) -> Result<()> {
        let bucket = self.bucket(bucket)?;
        let dir = names::unless_closed(self.parent(&bucket, key))?.flatten();
        let Some(dir) = dir else { return Ok(guard.check(None)?) };
        match work::without_place(|| self.remove_in(&dir, &bucket, key, guard))? {
            true => self.prune(&bucket, key, 0),
            false => Ok(()),
        }
    }

    /// Removes an object from its directory. Returns whether it was there.
    fn remove_in(&self, dir: &Node, bucket: &Node, key: &Key, guard: &Guard) -> Result<bool> {
        {
            let _alone = self.alone_with(bucket, key);
            let there = Self::node_in(dir, key)?;
            Self::require(guard, there.as_ref())?;
            let Some(node) = there else { return Ok(false) };
            // A client that is gone may have sent the request again, and then others: this must not come after them.
            work::wanted(VaultError::Stale)?;
            match node.is_dir() {
                true => node.remove_xattr(attrs::NAME)?,
                false => dir.unlink(key.name()).or_else(none_there)?,
            }
            if node.is_dir() && !remove_if_empty(dir, key.name())? {
                // It stays as a directory, and must not be an object again after a crash.
                node.sync().or_else(none_there)?;
            }
        }
        dir.sync_names().or_else(none_there)?;
        Ok(true)
    }

    /// Removes the empty directories above a key, starting with the lowest. Those of the first `levels` stay.
    fn prune(&self, bucket: &Node, key: &Key, levels: usize) -> Result<()> {
        self.prune_path(bucket, &key.parents().collect::<Vec<_>>(), levels)
    }

    /// Removes the empty directories on a path in a bucket, starting with the lowest. Those of the first `levels` stay.
    fn prune_path(&self, bucket: &Node, path: &[&OsStr], levels: usize) -> Result<()> {
        if path.len() <= levels {
            return Ok(());
        }
        let mut dirs = vec![bucket.clone()];
        for name in path {
            work::give_way();
            match dirs.last().map(|dir| dir.child_if_there(name)).transpose()?.flatten() {
                Some(next) if next.is_dir() => dirs.push(next),
                _ => break,
            }
        }
        let mut changed = None;
        for (at, name) in path.iter().enumerate().take(dirs.len() - 1).skip(levels).rev() {
            let remove = || {
                // Another request may be making an object in it.
                let _alone = self.alone_with_path(bucket, &path[..=at].join(OsStr::new("/")));
                match dirs[at].child_if_there(name) {
                    Ok(Some(dir)) if !Attrs::are_of(&dir).unwrap_or(true) => {
                        Ok::<_, ObjectError>((remove_if_empty(&dirs[at], name)?, Some(dir)))
                    }
                    Ok(_) | Err(_) => Ok((false, None)),
                }
            };
            // Many removals at once wait for the store, and for one another.
            let (mut is_removed, dir) = work::without_place(remove)?;
            if !is_removed && dir.is_some_and(|dir| self.is_used_no_longer(&dir, levels)) {
                (is_removed, _) = work::without_place(remove)?;
            }
            if !is_removed {
                break;
            }
            changed = Some(&dirs[at]);
        }
        // Without this they would exist again, empty, after a crash.
        changed.map_or(Ok(()), |dir| Ok(work::without_place(|| dir.sync_names().or_else(none_there))?))
    }

    /// Whether the last file under way in a directory that could not be removed has ended in between. Otherwise, if it
    /// has nothing else, the directory is left to those files.
    fn is_used_no_longer(&self, dir: &Node, levels: usize) -> bool {
        match self.under_way.is_in(dir.ino()) {
            true if self.under_way.has_others(dir).unwrap_or(true) => false,
            true => !self.under_way.leave(dir.ino(), levels),
            false => true,
        }
    }

    /// Changes the tags of an object, durably.
    ///
    /// # Errors
    /// As [`Objects::find`]; [`ObjectError::MuchMetadata`]; [`VaultError::Stale`]: the client is gone.
    pub fn set_tags(&self, bucket: &str, key: &Key, tags: std::collections::BTreeMap<String, String>) -> Result<()> {
        let dir = self.bucket(bucket)?;
        let _alone = self.alone_with(&dir, key);
        // By now it may be a later object.
        work::wanted(VaultError::Stale)?;
        let Object { node, mut attrs } = self.find(bucket, key)?;
        attrs.given.tags = tags;
        attrs.store(&node, node.attr())?;
        Ok(node.sync()?)
    }
}

/// Removes a directory if it is empty. Returns whether it is gone.
fn remove_if_empty(dir: &Node, name: &OsStr) -> Result<bool> {
    match dir.remove_dir(name) {
        Ok(()) => Ok(true),
        Err(VaultError::NotEmpty | VaultError::NotFound | VaultError::Stale | VaultError::DatasetRoot) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A missing entry counts as removed.
fn none_there(error: VaultError) -> Result<(), VaultError> {
    match error {
        VaultError::NotFound | VaultError::Stale => Ok(()),
        error => Err(error),
    }
}

/// The error for the store's limit on attributes of a file. ext4 returns ENOSPC for it, since its attributes have one
/// block, as for a store that is full.
fn much_metadata(node: &Node, error: VaultError) -> ObjectError {
    of_attributes(error, || node.fs().has_space(node.ino()))
}

fn of_attributes(error: VaultError, has_space: impl FnOnce() -> bool) -> ObjectError {
    match &error {
        VaultError::Io { source, .. } => match source.raw_os_error() {
            Some(libc::E2BIG) => ObjectError::MuchMetadata,
            Some(libc::ENOSPC) if has_space() => ObjectError::MuchMetadata,
            _ => error.into(),
        },
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests;
