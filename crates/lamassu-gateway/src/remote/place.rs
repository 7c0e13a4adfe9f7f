//! The place of an object: its bucket and each component of its key, sealed, with slashes between. The keys that seal
//! names are derived from the path, so no request to the provider is needed.
//!
//! A component may be any text, also empty, `.` or `..`. So keys that are no paths are ordinary keys, and no two keys
//! have the same name.

use super::Remote;
use super::error::{RemoteError, Result};
use crate::objects::key::is_in_xml;
use lamassu_vault::detached::{Detached, Directory};
use std::collections::HashMap;
use std::sync::Arc;

/// Longest name that providers accept, in bytes.
const NAME_MAX: usize = 1024;
/// Directories that are kept open during a listing.
const OPEN_MAX: usize = 4096;

/// Opens the names of objects in one bucket.
pub struct Opener {
    /// the provider's name of the bucket, with a slash
    root: String,
    bucket: Arc<Directory>,
    /// by sealed path with its slash: the directory, and its plain path
    open: HashMap<String, (Arc<Directory>, String)>,
}

/// A key in its sealed form.
pub(super) fn sealed(files: &Detached, bucket: &str, key: &str) -> String {
    let mut place = files.top().seal(bucket.as_bytes());
    let mut dir = files.top().child(bucket.as_bytes());
    let mut components = key.split('/').peekable();
    while let Some(component) = components.next() {
        place.push('/');
        place.push_str(&dir.seal(component.as_bytes()));
        if components.peek().is_some() {
            dir = dir.child(component.as_bytes());
        }
    }
    place
}

impl Remote {
    /// The place of a key.
    ///
    /// # Errors
    /// [`RemoteError::KeyNotInXml`], [`RemoteError::LongKey`].
    pub(super) fn place(&self, bucket: &str, key: &str) -> Result<String> {
        if !is_in_xml(key) {
            return Err(RemoteError::KeyNotInXml);
        }
        let place = sealed(&self.files, bucket, key);
        match self.prefix.len() + place.len() > NAME_MAX {
            true => Err(RemoteError::LongKey),
            false => Ok(place),
        }
    }

    pub(super) fn opener(&self, bucket: &str) -> Opener {
        Opener::new(&self.files, &self.prefix, bucket)
    }
}

impl Opener {
    pub fn new(files: &Detached, prefix: &str, bucket: &str) -> Opener {
        let root = format!("{prefix}{}/", files.top().seal(bucket.as_bytes()));
        Opener { root, bucket: Arc::new(files.top().child(bucket.as_bytes())), open: HashMap::new() }
    }

    /// The prefix of the names of all keys in the directories that a prefix of keys names completely.
    pub fn sealed_prefix(&self, prefix: &str) -> String {
        let (mut sealed, mut dir) = (self.root.clone(), self.bucket.clone());
        let mut components = prefix.split('/').peekable();
        while let Some(component) = components.next() {
            if components.peek().is_none() {
                break;
            }
            sealed = sealed + &dir.seal(component.as_bytes()) + "/";
            dir = Arc::new(dir.child(component.as_bytes()));
        }
        sealed
    }

    /// The key of a provider's name, also of one that ends with a slash; `None`: the name does not belong to this
    /// bucket.
    pub fn key(&mut self, name: &str) -> Option<String> {
        // The provider can list anything: this bounds the depth of the recursion below.
        if name.len() > NAME_MAX {
            return None;
        }
        let path = name.strip_prefix(&self.root)?.to_owned();
        if let Some(dir) = path.strip_suffix('/') {
            return Some(self.directory(dir)?.1);
        }
        let (above, last) = path.rsplit_once('/').unwrap_or(("", &path));
        let (dir, plain) = self.directory(above)?;
        Some(plain + &String::from_utf8(dir.open(last)?).ok()?)
    }

    /// The directory of a sealed path without a trailing slash, and its plain path with one; the bucket's path is
    /// empty.
    fn directory(&mut self, path: &str) -> Option<(Arc<Directory>, String)> {
        if path.is_empty() {
            return Some((self.bucket.clone(), String::new()));
        }
        if let Some((dir, plain)) = self.open.get(path) {
            return Some((dir.clone(), plain.clone()));
        }
        let (above, last) = path.rsplit_once('/').unwrap_or(("", path));
        let (dir, plain) = self.directory(above)?;
        let name = dir.open(last)?;
        let plain = plain + std::str::from_utf8(&name).ok()? + "/";
        let opened = (Arc::new(dir.child(&name)), plain);
        if self.open.len() >= OPEN_MAX {
            self.open.clear();
        }
        self.open.insert(path.into(), opened.clone());
        Some(opened)
    }
}
