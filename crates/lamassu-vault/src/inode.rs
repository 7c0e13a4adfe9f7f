//! The node table: which inode numbers are in use, and where in the store each one lies.
//!
//! A node lives while a front-end holds references to it, while a file of it is open, or while a living node lies below
//! it. It knows its names as (parent, stored name) pairs, so renames and hard links cost nothing and no file descriptor
//! is held. An inode number never names two things at once: a node whose last link went away keeps its number while it
//! is referred to (a *zombie*), and a new entry that the store gives the same number gets another one. A store reuses
//! the number of a removed inode, and other programs remove entries in the store. So a newly made entry is a new node
//! whatever its number ([`NodeTable::reference_new`]), and inodes with the same number are told apart by their birth
//! time. If the store has no birth times, a file with one link that is found under another name than the known one
//! counts as another file, unless it is open: the number of an open file is not reused. The kernel outlives the table
//! of a vault that is unloaded and loaded again, and identifies an inode by number and generation. So no generation,
//! and no number of ours, is ever used by two tables of a process. Nothing here touches the store.
//!
//! The kernel remembers as many inodes as its memory allows, possibly millions. Each is a node here, so nodes are kept
//! small.
//!
//! In an anchored vault a node has the number that its object has in the anchor, and an object has one node at a time.
//! Where hosts share a vault, the object alone says which node an entry is: hosts copy files to new inodes, and stores
//! such as sshfs number entries by their paths, so what another host moves gets another number here, and what it puts
//! in the place of another entry gets that entry's.

use crate::{Ino, Kind, ROOT};
use lamassu_anchor::ObjectId;
use lamassu_store::backend::{Stat, may_be_one};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
pub(crate) use turns::{Elsewhere, Go, Leads, Met, Names};

/// Numbers from here on are given by this module.
const ALTERNATIVE: u64 = 1 << 63;
/// The store's own numbers below this are used as they are. The bits from here to [`ALTERNATIVE`] are the member's
/// number in a `forest`.
pub(crate) const OWN_MAX: u64 = 1 << 48;
/// A path deeper than this is a loop that was made in the store.
pub(crate) const DEPTH_MAX: usize = 65_536;

/// Numbers of ours that were given out.
static ALTERNATIVES: AtomicU64 = AtomicU64::new(0);
/// Generations that were given out: 32 bits, as the kernel keeps no more.
static GENERATIONS: AtomicU32 = AtomicU32::new(0);

fn new_generation() -> u32 {
    GENERATIONS.fetch_add(1, Ordering::Relaxed)
}

fn alternative() -> Ino {
    ALTERNATIVE | (ALTERNATIVES.fetch_add(1, Ordering::Relaxed) % OWN_MAX)
}

/// What the store calls an inode: device and number; and its birth time, which an earlier inode of that number did not
/// have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StoreId {
    pub dev: u64,
    pub ino: u64,
    pub born: u64,
}

impl StoreId {
    /// Whether an entry with this stat is the inode. As [`Stat::is_same`], which decides alone if one of the two has no
    /// birth time.
    pub fn is_of(self, st: &Stat) -> bool {
        self.number() == (st.dev, st.ino) && may_be_one(self.born, st.born)
    }

    fn number(self) -> StoreNumber {
        (self.dev, self.ino)
    }
}

/// Device and number.
type StoreNumber = (u64, u64);

/// That of a node whose number belongs to another node's inode now. No inode has it.
const NOWHERE: StoreId = StoreId { dev: u64::MAX, ino: 0, born: u64::MAX };

impl From<&Stat> for StoreId {
    fn from(st: &Stat) -> Self {
        StoreId { dev: st.dev, ino: st.ino, born: st.born }
    }
}

/// One name of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub parent: Ino,
    pub name: Box<OsStr>,
    pub leads: Leads,
}

/// Nearly every node has one.
type Links = SmallVec<[Link; 1]>;

/// The plain size of a closed file, and the backing state it was read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CachedSize {
    size: u64,
    len: NonZeroU64,
    seconds: [i64; 2],
    nanos: [u32; 2],
}

impl CachedSize {
    /// `None` for an empty backing file: it needs none.
    pub fn new(st: &Stat, size: u64) -> Option<Self> {
        let times = [st.mtime, st.ctime];
        let (seconds, nanos) = (times.map(|t| t.seconds), times.map(|t| t.nanos));
        NonZeroU64::new(st.len).map(|len| CachedSize { size, len, seconds, nanos })
    }

    /// The size, if the file was not changed since.
    pub fn get(&self, st: &Stat) -> Option<u64> {
        (Self::new(st, self.size).as_ref() == Some(self)).then_some(self.size)
    }
}

/// What [`NodeTable::reference`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Referenced {
    pub ino: Ino,
    pub generation: u64,
    /// The number was not in use before: caches under this number belong to another node.
    pub is_new: bool,
    /// The node has gone to another inode: what is open of it is not the entry that was found.
    pub has_followed: bool,
}

#[derive(Debug)]
struct Node {
    id: StoreId,
    kind: Kind,
    links: Links,
    /// Saturates at the maximum; the node then stays for ever.
    lookups: u32,
    /// Nodes below, open files.
    pins: u32,
    generation: u32,
    size: Option<CachedSize>,
    /// Its number in the anchor; 0: there is none.
    object: ObjectId,
    /// False for a zombie: the store's inode is gone, or will be when its last file is closed.
    live: bool,
    /// Of a zombie: its object has lost its last name, on this host or another.
    is_removed: bool,
    /// The last stat of a zombie that was removed through the vault. Of a directory that other hosts may remove: the
    /// one that was shown last.
    last: Option<Box<Stat>>,
    /// Another host has changed it since the kernel learnt of it.
    is_changed_elsewhere: bool,
    /// A turn has ended with the file open.
    is_left_open: bool,
    names: Names,
}

impl Node {
    fn new(id: StoreId, kind: Kind, object: ObjectId, generation: u32) -> Self {
        Node {
            id,
            kind,
            links: Links::new(),
            lookups: 0,
            pins: 0,
            generation,
            size: None,
            object,
            live: true,
            is_removed: false,
            last: None,
            is_changed_elsewhere: false,
            is_left_open: false,
            names: Names::Known,
        }
    }
}

/// The table from inode numbers to nodes.
pub(crate) struct NodeTable {
    /// Boxed: a table has up to twice as many slots as entries.
    nodes: HashMap<Ino, Box<Node>>,
    /// Living nodes that have another number than the store's own.
    by_store: HashMap<StoreNumber, Ino>,
    /// Living nodes of objects of the anchor.
    by_object: HashMap<ObjectId, Ino>,
    /// Objects of zombies that nothing refers to any more.
    unused: Vec<ObjectId>,
    root_dev: u64,
    /// Other hosts use the vault, too: the store's numbers do not say which object an entry is.
    by_hosts: bool,
    /// The generation of new nodes.
    generation: u32,
}

impl NodeTable {
    /// `by_hosts`: other hosts may use the vault, too.
    pub fn new(root: &Stat, by_hosts: bool) -> Self {
        NodeTable::of_root(StoreId::from(root), by_hosts)
    }

    fn of_root(id: StoreId, by_hosts: bool) -> Self {
        let node = Node { lookups: 1, ..Node::new(id, Kind::Dir, ObjectId::ROOT, 0) };
        NodeTable {
            nodes: HashMap::from([(ROOT, Box::new(node))]),
            by_store: HashMap::from([(id.number(), ROOT)]),
            by_object: HashMap::from([(ObjectId::ROOT, ROOT)]),
            unused: Vec::new(),
            root_dev: id.dev,
            by_hosts,
            generation: new_generation(),
        }
    }

    /// The node of a backing inode, if it is in the table.
    pub fn find(&self, id: StoreId) -> Option<Ino> {
        let is_it = |ino: &Ino| self.nodes.get(ino).is_some_and(|n| may_be_one(n.id.born, id.born));
        self.at(id.number()).filter(is_it)
    }

    /// The living node of a backing number, whichever inode of it that is.
    fn at(&self, number: StoreNumber) -> Option<Ino> {
        let has_it = |ino: &Ino| self.nodes.get(ino).is_some_and(|n| n.live && n.id.number() == number);
        Some(number.1).filter(has_it).or_else(|| self.by_store.get(&number).copied())
    }

    /// Whether there is a living node of a backing number.
    pub fn is_known(&self, dev: u64, ino: u64) -> bool {
        self.at((dev, ino)).is_some()
    }

    /// The number a listing shows for a backing inode on the root's device.
    pub fn shown(&self, dev: u64, ino: u64) -> Ino {
        let unknown = if ino < OWN_MAX { ino } else { ALTERNATIVE | (ino % OWN_MAX) };
        self.at((dev, ino)).unwrap_or(unknown)
    }

    pub fn kind(&self, ino: Ino) -> Option<Kind> {
        self.nodes.get(&ino).map(|n| n.kind)
    }

    pub fn id(&self, ino: Ino) -> Option<StoreId> {
        self.nodes.get(&ino).map(|n| n.id)
    }

    /// Its number in the anchor; 0: there is none, or the node is not known.
    pub fn object(&self, ino: Ino) -> ObjectId {
        self.nodes.get(&ino).map(|n| n.object).unwrap_or_default()
    }

    /// Objects that have lost their last name and that nothing refers to any more, since the last call.
    pub fn take_unused(&mut self) -> Vec<ObjectId> {
        std::mem::take(&mut self.unused)
    }

    pub fn is_live(&self, ino: Ino) -> bool {
        self.nodes.get(&ino).is_some_and(|n| n.live)
    }

    /// Whether the kernel refers to a node.
    pub fn is_referred_to(&self, ino: Ino) -> bool {
        self.nodes.get(&ino).is_some_and(|n| n.lookups > 0)
    }

    /// The last stat of a zombie that was removed, with no links.
    pub fn last_stat(&self, ino: Ino) -> Option<Stat> {
        let last = self.nodes.get(&ino).filter(|node| node.is_removed)?.last.as_deref()?;
        Some(Stat { nlink: 0, ..*last })
    }

    /// Whether it is a directory that was removed, and to which a front-end refers. No name is in it: it was empty.
    pub fn is_removed_dir(&self, ino: Ino) -> bool {
        self.nodes.get(&ino).is_some_and(|node| node.is_removed && node.kind == Kind::Dir)
    }

    pub fn links(&self, ino: Ino) -> Vec<Link> {
        self.nodes.get(&ino).map(|n| n.links.to_vec()).unwrap_or_default()
    }

    /// Whether a node has this name.
    pub fn has_name(&self, ino: Ino, parent: Ino, name: &OsStr) -> bool {
        let is_it = |link: &Link| link.parent == parent && &*link.name == name;
        self.nodes.get(&ino).is_some_and(|node| node.links.iter().any(is_it))
    }

    pub fn first_link(&self, ino: Ino) -> Option<(Link, StoreId)> {
        let node = self.nodes.get(&ino)?;
        node.links.first().map(|l| (l.clone(), node.id))
    }

    pub fn parent(&self, ino: Ino) -> Option<Ino> {
        self.nodes.get(&ino)?.links.first().map(|l| l.parent)
    }

    pub fn cached_size(&self, ino: Ino, st: &Stat) -> Option<u64> {
        self.nodes.get(&ino)?.size?.get(st)
    }

    pub fn set_cached_size(&mut self, ino: Ino, size: Option<CachedSize>) {
        if let Some(n) = self.nodes.get_mut(&ino) {
            n.size = size;
        }
    }

    /// Finds or makes the node of the entry at (parent, name), which is this object of the anchor, and counts one
    /// lookup of it.
    ///
    /// # Errors
    /// [`Met::OtherInode`]: the stat may be older than that node. A caller that repeats the lookup, and finds the
    /// same, knows that the other is `gone`. [`Met::OtherObject`]; [`Met::MayGo`].
    pub fn reference(
        &mut self,
        parent: Ino,
        name: &OsStr,
        st: &Stat,
        object: ObjectId,
        (gone, go): (Option<Ino>, Option<Go>),
    ) -> std::result::Result<Referenced, Met> {
        if self.by_hosts && object != ObjectId::default() {
            let (known, has_followed) = self.identify_anew(st, object, go)?;
            return Ok(Referenced { has_followed, ..self.count(known, parent, name, st, object) });
        }
        let known = self.at((st.dev, st.ino));
        let known = match known.filter(|&ino| !self.is_met_again(ino, parent, name, st)) {
            Some(other) if gone == Some(other) => {
                self.bury(other);
                None
            }
            Some(other) => return Err(Met::OtherInode(other)),
            None => known,
        };
        match known {
            Some(ino) if object != ObjectId::default() && self.object(ino) != object => return Err(Met::OtherObject),
            Some(_) => {}
            None => self.make_way_for(object)?,
        }
        Ok(self.count(known, parent, name, st, object))
    }

    /// An object has one node. Another inode that had this object before loses it, unless it is open.
    fn make_way_for(&mut self, object: ObjectId) -> std::result::Result<(), Met> {
        let Some(before) = self.by_object.get(&object).copied() else { return Ok(()) };
        if self.is_open_file(before) || before == ROOT {
            return Err(Met::OtherObject);
        }
        self.bury(before);
        Ok(())
    }

    /// Gives a node another inode. No other living node has its number.
    fn renumber(&mut self, ino: Ino, id: StoreId) {
        let Some(node) = self.nodes.get_mut(&ino) else { return };
        let before = std::mem::replace(&mut node.id, id);
        node.size = None;
        node.links.iter_mut().for_each(|link| link.leads = Leads::Untold);
        self.by_store.remove(&before.number());
        if ino != id.ino && id != NOWHERE {
            self.by_store.insert(id.number(), ino);
        }
    }

    /// As [`NodeTable::reference`], for an entry that was just made. A known node with its number was removed by
    /// another program; where hosts share the vault, it may be elsewhere.
    pub fn reference_new(&mut self, parent: Ino, name: &OsStr, st: &Stat, object: ObjectId) -> Referenced {
        if !self.by_hosts || !self.take_number(None, StoreId::from(st)) {
            self.at((st.dev, st.ino)).filter(|ino| *ino != ROOT).into_iter().for_each(|ino| self.bury(ino));
        }
        let known = self.at((st.dev, st.ino));
        self.count(known, parent, name, st, object)
    }

    /// Whether the entry at (parent, name) is the inode of the node that has its number.
    fn is_met_again(&self, ino: Ino, parent: Ino, name: &OsStr, st: &Stat) -> bool {
        // The root is held open.
        let Some(node) = self.nodes.get(&ino).filter(|_| ino != ROOT) else { return true };
        if node.kind != st.kind || !may_be_one(node.id.born, st.born) {
            return false;
        }
        let is_told = node.id.born != 0 && st.born != 0;
        let is_open = node.kind == Kind::File && node.pins > 0;
        let has_one_name = st.nlink <= 1 || node.kind == Kind::Dir;
        let is_named_so = node.links.is_empty() || node.links.iter().any(|l| l.parent == parent && *l.name == *name);
        is_told || is_open || !has_one_name || is_named_so
    }

    fn count(&mut self, known: Option<Ino>, parent: Ino, name: &OsStr, st: &Stat, object: ObjectId) -> Referenced {
        let ino = known.unwrap_or_else(|| self.insert(StoreId::from(st), st.kind, object));
        let leads = if self.id(ino).is_some_and(|id| id.is_of(st)) { Leads::Here } else { Leads::Elsewhere };
        self.add_link(ino, parent, name, leads);
        let node = self.nodes.get_mut(&ino);
        let generation = node.map(|n| {
            // The kernel knows nothing of an inode to which it holds no reference.
            n.is_changed_elsewhere &= n.lookups > 0;
            n.lookups = n.lookups.saturating_add(1);
            n.generation
        });
        let generation = generation.unwrap_or_default().into();
        Referenced { ino, generation, is_new: known.is_none(), has_followed: false }
    }

    fn insert(&mut self, id: StoreId, kind: Kind, object: ObjectId) -> Ino {
        let own = id.dev == self.root_dev && id.ino > ROOT && id.ino < OWN_MAX && !self.nodes.contains_key(&id.ino);
        let ino = if own { id.ino } else { alternative() };
        self.nodes.insert(ino, Box::new(Node::new(id, kind, object, self.generation)));
        if ino != id.ino {
            self.by_store.insert(id.number(), ino);
        }
        if object != ObjectId::default() {
            self.by_object.insert(object, ino);
        }
        ino
    }

    /// Adds a name to a node. A directory has one name at a time: the new one replaces the old.
    pub fn add_link(&mut self, ino: Ino, parent: Ino, name: &OsStr, leads: Leads) {
        if ino == ROOT {
            return;
        }
        let Some(node) = self.nodes.get_mut(&ino) else { return };
        if let Some(known) = node.links.iter_mut().find(|l| l.parent == parent && *l.name == *name) {
            known.leads = leads;
            return;
        }
        let gone = if node.kind == Kind::Dir { std::mem::take(&mut node.links) } else { Links::new() };
        node.links.push(Link { parent, name: name.into(), leads });
        if let Some(p) = self.nodes.get_mut(&parent) {
            p.pins += 1;
        }
        for l in gone {
            self.unpin(l.parent);
        }
    }

    /// Takes a name from a node, if it had it.
    pub fn remove_link(&mut self, ino: Ino, parent: Ino, name: &OsStr) {
        let Some(node) = self.nodes.get_mut(&ino) else { return };
        let Some(at) = node.links.iter().position(|l| l.parent == parent && *l.name == *name) else { return };
        if node.links.remove(at).leads == Leads::Elsewhere {
            node.names = Names::Split;
        }
        self.unpin(parent);
    }

    /// The entry at (parent, name), whose stat was `st`, lost that name; `last`: its object's last one.
    pub fn unlinked(&mut self, object: ObjectId, st: &Stat, (parent, name): (Ino, &OsStr), last: bool) -> Option<Ino> {
        let ino = self.node_of(object, StoreId::from(st))?;
        if last {
            if let Some(node) = self.nodes.get_mut(&ino) {
                (node.is_removed, node.last) = (true, Some(Box::new(*st)));
            }
            self.bury(ino);
        } else {
            self.remove_link(ino, parent, name);
            self.drop_split(ino);
        }
        Some(ino)
    }

    /// Makes a zombie: the number stays taken while referred to, the backing inode is forgotten.
    fn bury(&mut self, ino: Ino) {
        let Some(node) = self.nodes.get_mut(&ino) else { return };
        node.live = false;
        node.size = None;
        let (id, object, links) = (node.id, node.object, std::mem::take(&mut node.links));
        self.generation = new_generation();
        self.by_store.remove(&id.number());
        self.forget_object(object, ino);
        for l in links {
            self.unpin(l.parent);
        }
        self.drop_if_unused(ino);
    }

    fn forget_object(&mut self, object: ObjectId, ino: Ino) {
        if self.by_object.get(&object) == Some(&ino) {
            self.by_object.remove(&object);
        }
    }

    /// A new backing inode, made in the place of the old one, takes over its node.
    pub fn exchanged(&mut self, old: StoreId, new: StoreId) {
        let node = self.find(old);
        let is_free = match self.at(new.number()) {
            // Without a node it may have been found by its name already, as what it is now.
            _ if self.by_hosts => node.is_some_and(|ino| self.take_number(Some(ino), new)),
            // The store reuses the number: the known node was removed by another program.
            Some(stale) if Some(stale) != node => {
                self.bury(stale);
                true
            }
            Some(_) | None => true,
        };
        if let Some(ino) = node.filter(|_| is_free) {
            self.renumber(ino, new);
        }
    }

    /// Every number in use, with the references to it.
    pub fn references(&self) -> Vec<(Ino, u64)> {
        self.nodes.iter().map(|(ino, node)| (*ino, node.lookups.into())).collect()
    }

    /// Stored names of what lies in a directory, as far as it is in the table.
    pub fn names_in(&self, parent: Ino) -> Vec<OsString> {
        let links = self.nodes.values().flat_map(|n| &n.links);
        links.filter(|l| l.parent == parent).map(|l| l.name.to_os_string()).collect()
    }

    pub fn pin(&mut self, ino: Ino) {
        if let Some(n) = self.nodes.get_mut(&ino) {
            n.pins += 1;
        }
    }

    pub fn unpin(&mut self, ino: Ino) {
        if let Some(n) = self.nodes.get_mut(&ino) {
            n.pins = n.pins.saturating_sub(1);
        }
        self.drop_if_unused(ino);
    }

    /// Counts one more reference to a known node.
    pub fn add_reference(&mut self, ino: Ino) {
        if let Some(n) = self.nodes.get_mut(&ino) {
            n.lookups = n.lookups.saturating_add(1);
        }
    }

    /// Gives back lookup references.
    pub fn forget(&mut self, ino: Ino, count: u64) {
        if let Some(n) = self.nodes.get_mut(&ino).filter(|n| n.lookups < u32::MAX) {
            n.lookups = n.lookups.saturating_sub(u32::try_from(count).unwrap_or(u32::MAX));
        }
        self.drop_if_unused(ino);
    }

    fn drop_if_unused(&mut self, ino: Ino) {
        let mut todo = vec![ino];
        while let Some(ino) = todo.pop() {
            let unused = self.nodes.get(&ino).is_some_and(|n| n.lookups == 0 && n.pins == 0);
            if !unused || ino == ROOT {
                continue;
            }
            let Some(node) = self.nodes.remove(&ino) else { continue };
            if node.live {
                self.by_store.remove(&node.id.number());
                self.forget_object(node.object, ino);
            } else if node.object != ObjectId::default() {
                self.unused.push(node.object);
            }
            for l in node.links {
                if let Some(p) = self.nodes.get_mut(&l.parent) {
                    p.pins = p.pins.saturating_sub(1);
                    todo.push(l.parent);
                }
            }
        }
    }

    /// Path in the store, relative to the vault's root; `None` if the node has no name any more.
    pub fn stored_path(&self, ino: Ino) -> Option<PathBuf> {
        let mut names = Vec::new();
        let mut cur = ino;
        while cur != ROOT {
            let link = self.nodes.get(&cur)?.links.first()?;
            names.push(&*link.name);
            cur = link.parent;
            if names.len() > DEPTH_MAX {
                return None;
            }
        }
        Some(names.into_iter().rev().collect())
    }

    /// Numbers from `ino` up to the root, both included; `None` if the chain is broken.
    pub fn ancestry(&self, ino: Ino) -> Option<Vec<Ino>> {
        let mut chain = vec![ino];
        let mut cur = ino;
        while cur != ROOT {
            cur = self.parent(cur)?;
            chain.push(cur);
            if chain.len() > DEPTH_MAX {
                return None;
            }
        }
        Some(chain)
    }
}

#[cfg(test)]
mod tests;
mod turns;
