//! Objects as files of a vault: buckets are directories in one directory of it, keys are paths below.
//!
//! Guarantees: an object is there whole or not at all, also after a crash, and durable when the call returns: it is
//! written under a name of the gateway's own in the directory it goes to (so it has that directory's profile and access
//! lists), synced, and renamed. What lies there is never followed where it is a link, and never shown where it is no
//! file or directory. Calls block; any number of threads may make them.
//!
//! Never: decides who may do what, knows HTTP.

pub mod attrs;
mod copy;
pub mod key;
pub mod list;
mod multipart;
pub mod node;
mod put;
mod sweep;

pub use multipart::{Completed, PARTS_MAX, Part, Reader, Upload};
pub use put::{Guard, Staged};

use attrs::Attrs;
use key::{Key, KeyFault};
use lamassu_vault::{Forest, Kind, Owner, VaultError};
use list::Listings;
use node::{Node, Open};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Bytes that are read or written at once.
pub const PIECE: usize = 1 << 20;
/// Locks that keys share.
const STRIPES: usize = 256;

/// Why something could not be done with an object.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// The client's: no such bucket.
    #[error("there is no such bucket")]
    NoBucket,
    /// The client's: there is one already.
    #[error("the bucket is there already")]
    BucketExists,
    /// The client's: it is to be empty.
    #[error("the bucket is not empty")]
    BucketNotEmpty,
    /// The client's: no such object.
    #[error("there is no such key")]
    NoKey,
    /// The client's: no such upload.
    #[error("there is no such upload: it may be completed or aborted")]
    NoUpload,
    /// The client's: a key that no path can be.
    #[error(transparent)]
    Key(#[from] KeyFault),
    /// The client's: `a` is an object, and `a/b` was to be one.
    #[error("a part of the key, in front of a slash, is an object: an object is no directory")]
    BelowObject,
    /// The client's: `a/b` is an object, and `a` was to be one.
    #[error("there are objects below this key: a directory is no object")]
    AboveObjects,
    /// The client's: what a condition asks for does not hold.
    #[error("a condition of the request does not hold")]
    Precondition,
    /// The client's: a part that was not uploaded, or another one.
    #[error("part {0} was not uploaded, or is another one")]
    NoPart(u32),
    /// The client's: parts in another order.
    #[error("parts are listed by ascending numbers")]
    PartOrder,
    /// The client's: only the last part may be so small.
    #[error("part {0} has less than 5 MiB, and is not the last one")]
    SmallPart(u32),
    /// The client's: a directory has no content.
    #[error("a key that ends with a slash is a directory, and has no content")]
    DirectoryContent,
    /// The client's: more headers, metadata and tags than the store keeps with a file.
    #[error("the store below cannot keep so much metadata with a file")]
    MuchMetadata,
    /// The vault's.
    #[error(transparent)]
    Vault(VaultError),
}

/// What a call ends with.
pub type Result<T, E = ObjectError> = std::result::Result<T, E>;

impl From<VaultError> for ObjectError {
    fn from(error: VaultError) -> Self {
        ObjectError::Vault(error)
    }
}

/// With which permissions files and directories are made.
#[derive(Clone, Copy, Debug)]
pub struct Modes {
    /// of files
    pub file: u32,
    /// of directories
    pub dir: u32,
}

/// See the module's head.
pub struct Objects {
    fs: Arc<Forest>,
    /// Where the buckets lie.
    root: OsString,
    modes: Modes,
    listings: Listings,
    /// Changes of one key, one after another.
    keys: Vec<Mutex<()>>,
    /// The same of uploads.
    uploads: Vec<Mutex<()>>,
    /// Names of files that are being written by this process.
    staged: Mutex<HashSet<OsString>>,
}

/// An object that was found.
pub struct Object {
    /// its file
    pub node: Node,
    /// and what belongs to it
    pub attrs: Attrs,
}

impl Objects {
    /// The buckets in a directory of a vault.
    ///
    /// # Errors
    /// Those of a directory that is not there.
    pub fn open(fs: Arc<Forest>, root: &str, modes: Modes, listings_max: usize) -> Result<Objects> {
        let locks = || (0..STRIPES).map(|_| Mutex::new(())).collect();
        let (keys, uploads) = (locks(), locks());
        let (listings, staged) = (Listings::new(listings_max), Mutex::default());
        let objects = Objects { fs, root: root.into(), modes, listings, keys, uploads, staged };
        match objects.root()?.is_dir() {
            true => Ok(objects),
            false => Err(VaultError::NotDirectory.into()),
        }
    }

    fn root(&self) -> Result<Node> {
        Ok(Node::at(&self.fs, &self.root)?)
    }

    /// Whether the vault answers.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn check(&self) -> Result<()> {
        self.root().map(drop)
    }

    /// Names of the buckets, in order, each with when it was made or changed.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn buckets(&self) -> Result<Vec<(String, Node)>> {
        let root = self.root()?;
        let mut names = Vec::new();
        root.list(&mut |name, kind| {
            if let (Some(name), Kind::Dir) = (key::shown(name), kind) {
                names.push(name.to_owned());
            }
        })?;
        names.sort_unstable();
        let found = names.into_iter().map(|name| {
            let node = root.child_if_there(OsStr::new(&name))?;
            Ok(node.map(|node| (name, node)))
        });
        found.filter_map(Result::transpose).collect()
    }

    /// A bucket.
    ///
    /// # Errors
    /// [`ObjectError::NoBucket`]; those of the vault.
    pub fn bucket(&self, name: &str) -> Result<Node> {
        match self.root()?.child_if_there(OsStr::new(name))? {
            Some(node) if node.is_dir() && key::shown(OsStr::new(name)).is_some() => Ok(node),
            _ => Err(ObjectError::NoBucket),
        }
    }

    /// Makes a bucket: a directory.
    ///
    /// # Errors
    /// [`ObjectError::BucketExists`]; those of the vault.
    pub fn make_bucket(&self, name: &str, owner: Owner) -> Result<()> {
        let root = self.root()?;
        match root.make_dir(OsStr::new(name), self.modes.dir, owner) {
            Err(VaultError::Exists | VaultError::DatasetRoot) => Err(ObjectError::BucketExists),
            made => Ok(made.and_then(|_| root.sync_names())?),
        }
    }

    /// Removes a bucket in which no object is. Uploads under way are aborted, as in S3.
    ///
    /// # Errors
    /// [`ObjectError::BucketNotEmpty`], [`ObjectError::NoBucket`]; those of the vault, also for the root of a dataset,
    /// which is the administrator's to destroy.
    pub fn remove_bucket(&self, name: &str) -> Result<()> {
        let bucket = self.bucket(name)?;
        let query = list::Query { max: 1, ..list::Query::default() };
        if !self.list(name, &query)?.items.is_empty() {
            return Err(ObjectError::BucketNotEmpty);
        }
        for (id, upload) in self.uploads(name, "")? {
            match self.abort_upload(name, &Key::parse(&upload.key)?, &id) {
                // Another request has ended it.
                Ok(()) | Err(ObjectError::NoUpload) => {}
                Err(error) => return Err(error),
            }
        }
        multipart::remove_index(&bucket)?;
        let root = self.root()?;
        match root.remove_dir(OsStr::new(name)) {
            Err(VaultError::NotEmpty) => Err(ObjectError::BucketNotEmpty),
            removed => Ok(removed.and_then(|()| root.sync_names())?),
        }
    }

    /// One change of a key at a time.
    fn alone_with(&self, bucket: &Node, key: &Key) -> MutexGuard<'_, ()> {
        self.alone_with_path(bucket, OsStr::new(key.path()))
    }

    fn alone_with_path(&self, bucket: &Node, path: &OsStr) -> MutexGuard<'_, ()> {
        stripe(&self.keys, &(bucket.ino(), path))
    }

    /// The directory that a key lies in; `None` where it is not, or is none.
    fn parent(&self, bucket: &Node, key: &Key) -> Result<Option<Node>> {
        let mut dir = bucket.clone();
        for name in key.parents() {
            match dir.child_if_there(name)? {
                Some(next) if next.is_dir() => dir = next,
                _ => return Ok(None),
            }
        }
        Ok(Some(dir))
    }

    fn found_in(dir: &Node, key: &Key) -> Result<Option<Object>> {
        let Some(node) = dir.child_if_there(key.name())? else { return Ok(None) };
        let is_object = match node.attr().kind {
            Kind::File => !key.is_dir(),
            Kind::Dir => key.is_dir() && Attrs::are_of(&node)?,
            Kind::Symlink | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => false,
        };
        if !is_object {
            return Ok(None);
        }
        let attrs = Attrs::of(&node)?;
        Ok(Some(Object { node, attrs }))
    }

    /// An object, with its attributes.
    ///
    /// # Errors
    /// [`ObjectError::NoBucket`], [`ObjectError::NoKey`]; those of the vault.
    pub fn find(&self, bucket: &str, key: &Key) -> Result<Object> {
        let bucket = self.bucket(bucket)?;
        let dir = self.parent(&bucket, key)?.ok_or(ObjectError::NoKey)?;
        Self::found_in(&dir, key)?.ok_or(ObjectError::NoKey)
    }

    /// Opens an object for reading. Its attributes are those of the content that is read.
    ///
    /// # Errors
    /// As [`Objects::find`].
    pub fn open_object(&self, bucket: &str, key: &Key) -> Result<(Option<Open>, Attrs, lamassu_vault::Attr)> {
        let Object { node, attrs } = self.find(bucket, key)?;
        let attr = *node.attr();
        if node.is_dir() {
            return Ok((None, attrs, attr));
        }
        match node.open() {
            Ok(open) => Ok((Some(open), attrs, attr)),
            Err(VaultError::NotFound | VaultError::Stale) => Err(ObjectError::NoKey),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes an object. One that is not there is removed already. Directories that are empty then are removed too,
    /// but for those that were made as objects.
    ///
    /// # Errors
    /// [`ObjectError::NoBucket`], [`ObjectError::Precondition`]; those of the vault.
    pub fn remove(&self, bucket: &str, key: &Key, guard: &Guard) -> Result<()> {
        let bucket = self.bucket(bucket)?;
        let Some(dir) = self.parent(&bucket, key)? else { return guard.check(None) };
        {
            let _alone = self.alone_with(&bucket, key);
            let object = Self::found_in(&dir, key)?;
            guard.check(object.as_ref())?;
            let Some(Object { node, .. }) = object else { return Ok(()) };
            match node.is_dir() {
                true => node.remove_xattr(attrs::NAME)?,
                false => dir.unlink(key.name()).or_else(none_there)?,
            }
            if node.is_dir() {
                remove_if_empty(&dir, key.name())?;
            }
        }
        dir.sync_names().or_else(none_there)?;
        self.prune(&bucket, key)
    }

    /// Removes the directories above a key that are empty, from below.
    fn prune(&self, bucket: &Node, key: &Key) -> Result<()> {
        self.prune_path(bucket, &key.parents().collect::<Vec<_>>())
    }

    /// Removes the directories on a path in a bucket that are empty, from below.
    fn prune_path(&self, bucket: &Node, path: &[&OsStr]) -> Result<()> {
        let mut dirs = vec![bucket.clone()];
        for name in path {
            match dirs.last().map(|dir| dir.child_if_there(name)).transpose()?.flatten() {
                Some(next) if next.is_dir() => dirs.push(next),
                _ => break,
            }
        }
        let mut changed = None;
        for (at, name) in path.iter().enumerate().take(dirs.len() - 1).rev() {
            // Another request may make an object of it.
            let _alone = self.alone_with_path(bucket, &path[..=at].join(OsStr::new("/")));
            let is_object = match dirs[at].child_if_there(name) {
                Ok(Some(dir)) => Attrs::are_of(&dir).unwrap_or(true),
                Ok(None) | Err(_) => true,
            };
            if is_object || !remove_if_empty(&dirs[at], name)? {
                break;
            }
            changed = Some(&dirs[at]);
        }
        // Else they would come back, empty, after a crash.
        changed.map_or(Ok(()), |dir| Ok(dir.sync_names().or_else(none_there)?))
    }

    /// Changes the tags of an object.
    ///
    /// # Errors
    /// As [`Objects::find`]; [`ObjectError::MuchMetadata`].
    pub fn set_tags(&self, bucket: &str, key: &Key, tags: std::collections::BTreeMap<String, String>) -> Result<()> {
        let dir = self.bucket(bucket)?;
        let _alone = self.alone_with(&dir, key);
        let Object { node, mut attrs } = self.find(bucket, key)?;
        attrs.given.tags = tags;
        attrs.store(&node).map_err(much_metadata)
    }
}

fn stripe<'a>(locks: &'a [Mutex<()>], of: &impl Hash) -> MutexGuard<'a, ()> {
    let mut hash = DefaultHasher::new();
    of.hash(&mut hash);
    locks[(hash.finish() % STRIPES as u64) as usize].lock()
}

/// Whether it was empty, and is gone.
fn remove_if_empty(dir: &Node, name: &OsStr) -> Result<bool> {
    match dir.remove_dir(name) {
        Ok(()) => Ok(true),
        Err(VaultError::NotEmpty | VaultError::NotFound | VaultError::Stale | VaultError::DatasetRoot) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Gone already is gone.
fn none_there(error: VaultError) -> Result<(), VaultError> {
    match error {
        VaultError::NotFound | VaultError::Stale => Ok(()),
        error => Err(error),
    }
}

/// The store's limit of what a file has beside its content.
fn much_metadata(error: VaultError) -> ObjectError {
    /// ENOSPC is ext4's word for it: its attributes have one block. A store that is full fails elsewhere, too.
    const E2BIG: i32 = 7;
    const ENOSPC: i32 = 28;
    match &error {
        VaultError::Io { source, .. } if matches!(source.raw_os_error(), Some(E2BIG | ENOSPC)) => {
            ObjectError::MuchMetadata
        }
        _ => error.into(),
    }
}
