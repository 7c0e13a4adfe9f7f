//! What a plain file system in memory does: the side of `model.rs` that the vault is compared with.

use super::name;
use lamassu_vault::{RenameMode, VaultError};
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Body {
    File(Vec<u8>),
    Link(Vec<u8>),
    Dir(BTreeMap<String, usize>),
}

#[derive(Clone, Debug)]
pub(super) struct Inode {
    pub(super) body: Body,
    pub(super) xattrs: BTreeMap<String, Vec<u8>>,
    pub(super) mode: Option<u32>,
    /// What a file held since everything was last synced, but for what it holds now.
    pub(super) earlier: Vec<Vec<u8>>,
}

/// What a file system is: inodes, and names in directories. Inode 0 is the root.
pub(super) struct Model {
    pub(super) inodes: Vec<Inode>,
}

/// Why an operation fails.
#[derive(Debug, PartialEq)]
pub(super) enum No {
    Found,
    Exists,
    Dir,
    IsDir,
    Empty,
    Invalid,
    Attribute,
    Permission,
}

pub(super) fn why(e: &VaultError) -> No {
    match e {
        VaultError::NotFound => No::Found,
        VaultError::Exists => No::Exists,
        VaultError::NotDirectory => No::Dir,
        VaultError::IsDirectory => No::IsDir,
        VaultError::NotEmpty => No::Empty,
        VaultError::Invalid => No::Invalid,
        VaultError::NoAttribute => No::Attribute,
        VaultError::Io { source, .. } if source.raw_os_error() == Some(libc::EPERM) => No::Permission,
        other => panic!("not expected: {other:?}"),
    }
}

impl Model {
    pub(super) fn new() -> Self {
        let mut model = Model { inodes: vec![] };
        model.add(Body::Dir(BTreeMap::new()));
        model
    }

    pub(super) fn add(&mut self, body: Body) -> usize {
        self.inodes.push(Inode { body, xattrs: BTreeMap::new(), mode: None, earlier: Vec::new() });
        self.inodes.len() - 1
    }

    /// Changes the content of a file, and remembers what it was.
    pub(super) fn change(&mut self, ino: usize, change: impl FnOnce(&mut Vec<u8>)) {
        let Body::File(data) = &mut self.inodes[ino].body else { panic!("a file") };
        let before = data.clone();
        change(data);
        self.inodes[ino].earlier.push(before);
    }

    /// From now on nothing older may come back.
    pub(super) fn synced(&mut self) {
        self.inodes.iter_mut().for_each(|inode| inode.earlier.clear());
    }

    pub(super) fn entries(&self, dir: usize) -> Result<&BTreeMap<String, usize>, No> {
        match &self.inodes[dir].body {
            Body::Dir(entries) => Ok(entries),
            _ => Err(No::Dir),
        }
    }

    pub(super) fn entries_mut(&mut self, dir: usize) -> &mut BTreeMap<String, usize> {
        match &mut self.inodes[dir].body {
            Body::Dir(entries) => entries,
            _ => panic!("a directory"),
        }
    }

    pub(super) fn walk(&self, p: &[usize]) -> Result<usize, No> {
        p.iter().try_fold(0, |at, i| self.entries(at)?.get(&name(*i)).copied().ok_or(No::Found))
    }

    /// The directory of a path, and its last name.
    pub(super) fn parent(&self, p: &[usize]) -> Result<(usize, String), No> {
        let (last, dirs) = p.split_last().expect("not empty");
        let dir = self.walk(dirs)?;
        self.entries(dir)?;
        Ok((dir, name(*last)))
    }

    pub(super) fn create(&mut self, p: &[usize], body: Body) -> Result<usize, No> {
        let (dir, name) = self.parent(p)?;
        if self.entries(dir)?.contains_key(&name) {
            return Err(No::Exists);
        }
        let ino = self.add(body);
        self.entries_mut(dir).insert(name, ino);
        Ok(ino)
    }

    pub(super) fn is_dir(&self, ino: usize) -> bool {
        matches!(self.inodes[ino].body, Body::Dir(_))
    }

    /// Whether `below` is `dir` or lies below it.
    pub(super) fn is_below(&self, dir: usize, below: usize) -> bool {
        dir == below || self.entries(dir).is_ok_and(|e| e.values().any(|i| self.is_dir(*i) && self.is_below(*i, below)))
    }

    pub(super) fn remove(&mut self, p: &[usize], want_dir: bool) -> Result<(), No> {
        let (dir, name) = self.parent(p)?;
        let ino = *self.entries(dir)?.get(&name).ok_or(No::Found)?;
        match (want_dir, self.is_dir(ino)) {
            (true, false) => return Err(No::Dir),
            (false, true) => return Err(No::IsDir),
            (true, true) if !self.entries(ino)?.is_empty() => return Err(No::Empty),
            _ => {}
        }
        self.entries_mut(dir).remove(&name);
        Ok(())
    }

    pub(super) fn rename(&mut self, a: &[usize], b: &[usize], mode: RenameMode) -> Result<(), No> {
        let ((from, name), (to, to_name)) = (self.parent(a)?, self.parent(b)?);
        let ino = *self.entries(from)?.get(&name).ok_or(No::Found)?;
        let target = self.entries(to)?.get(&to_name).copied();
        match (mode, target) {
            (RenameMode::Exchange, None) => return Err(No::Found),
            (RenameMode::NoReplace, Some(_)) => return Err(No::Exists),
            _ => {}
        }
        if self.is_dir(ino) && self.is_below(ino, to) {
            return Err(No::Invalid);
        }
        if target.is_some_and(|t| self.is_dir(t) && self.is_below(t, from)) {
            return Err(if mode == RenameMode::Exchange { No::Invalid } else { No::Empty });
        }
        let Some(t) = target else {
            self.entries_mut(from).remove(&name);
            self.entries_mut(to).insert(to_name, ino);
            return Ok(());
        };
        if t == ino {
            return Ok(());
        }
        if mode == RenameMode::Exchange {
            self.entries_mut(from).insert(name, t);
            self.entries_mut(to).insert(to_name, ino);
            return Ok(());
        }
        match (self.is_dir(ino), self.is_dir(t)) {
            (true, false) => return Err(No::Dir),
            (false, true) => return Err(No::IsDir),
            (true, true) if !self.entries(t)?.is_empty() => return Err(No::Empty),
            _ => {}
        }
        self.entries_mut(from).remove(&name);
        self.entries_mut(to).insert(to_name, ino);
        Ok(())
    }
}
