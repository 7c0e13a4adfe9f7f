//! The node table: which inode numbers are in use, and where in the store each one lies.
//!
//! A node lives while a front-end holds references to it, while a file of it is open, or while a living node lies below it. It knows its places as
//! (parent, stored name) pairs, so renames and hard links cost nothing and no file descriptor is held. An inode number never names two things at
//! once: a node whose last link went away keeps its number while anybody refers to it (a *zombie*), and a new entry that the store gives the same
//! number gets another one. The kernel outlives the table of a vault that is unloaded and loaded again, and tells inodes apart by number and generation:
//! so neither a generation nor a number of ours is ever used by two tables of a process. Nothing here touches the store.
//!
//! The kernel remembers as many inodes as its memory allows, millions of them, and each is a node here: they are kept small.

use crate::{Ino, Kind, ROOT};
use lamassu_store::backend::Stat;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Numbers from here on are ours.
const ALTERNATIVE: u64 = 1 << 63;
/// The store's own numbers below this are used as they are. The bits from here to [`ALTERNATIVE`] are the volume's, where vaults lie in one another (`forest`).
pub(crate) const OWN_MAX: u64 = 1 << 48;
/// A path deeper than this is a loop that somebody made below us.
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

/// What the store calls an inode: device and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StoreId {
    pub dev: u64,
    pub ino: u64,
}

impl From<&Stat> for StoreId {
    fn from(st: &Stat) -> Self {
        StoreId { dev: st.dev, ino: st.ino }
    }
}

/// One name of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub parent: Ino,
    pub name: Box<OsStr>,
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
    /// The number was not in use before: what is cached by it is not of this node.
    pub is_new: bool,
}

#[derive(Debug)]
struct Node {
    id: StoreId,
    kind: Kind,
    links: Links,
    lookups: u64,
    /// Nodes below, open files.
    pins: u64,
    generation: u32,
    size: Option<CachedSize>,
    /// False for a zombie: the store's inode is gone, or will be when its last file is closed.
    live: bool,
    /// Of a zombie whose removal we saw: what stat said last, without links.
    last: Option<Box<Stat>>,
}

/// See the module's head.
pub(crate) struct NodeTable {
    /// Boxed: a table has up to twice as many places as it has entries.
    nodes: HashMap<Ino, Box<Node>>,
    /// Living nodes that have another number than the store's own.
    by_store: HashMap<StoreId, Ino>,
    root_dev: u64,
    /// That of nodes made now.
    generation: u32,
}

impl NodeTable {
    pub fn new(root: &Stat) -> Self {
        let id = StoreId::from(root);
        let node = Node {
            id,
            kind: Kind::Dir,
            links: Links::new(),
            lookups: 1,
            pins: 0,
            generation: 0,
            size: None,
            live: true,
            last: None,
        };
        NodeTable {
            nodes: HashMap::from([(ROOT, Box::new(node))]),
            by_store: HashMap::from([(id, ROOT)]),
            root_dev: root.dev,
            generation: new_generation(),
        }
    }

    /// The node of a backing inode, if it is in the table.
    pub fn find(&self, id: StoreId) -> Option<Ino> {
        let has_it = |ino: &Ino| self.nodes.get(ino).is_some_and(|n| n.live && n.id == id);
        Some(id.ino).filter(has_it).or_else(|| self.by_store.get(&id).copied())
    }

    /// The number a listing shows for a backing inode on the root's device.
    pub fn shown(&self, dev: u64, ino: u64) -> Ino {
        let unknown = if ino < OWN_MAX { ino } else { ALTERNATIVE | (ino % OWN_MAX) };
        self.find(StoreId { dev, ino }).unwrap_or(unknown)
    }

    pub fn kind(&self, ino: Ino) -> Option<Kind> {
        self.nodes.get(&ino).map(|n| n.kind)
    }

    pub fn id(&self, ino: Ino) -> Option<StoreId> {
        self.nodes.get(&ino).map(|n| n.id)
    }

    pub fn is_live(&self, ino: Ino) -> bool {
        self.nodes.get(&ino).is_some_and(|n| n.live)
    }

    /// What is left to say of a zombie.
    pub fn last_stat(&self, ino: Ino) -> Option<Stat> {
        self.nodes.get(&ino)?.last.as_deref().copied()
    }

    pub fn links(&self, ino: Ino) -> Vec<Link> {
        self.nodes.get(&ino).map(|n| n.links.to_vec()).unwrap_or_default()
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

    /// Finds or makes the node of what lies at (parent, name) and counts one lookup of it.
    pub fn reference(&mut self, parent: Ino, name: &OsStr, st: &Stat) -> Referenced {
        let id = StoreId::from(st);
        let known = self.find(id).filter(|&ino| {
            let same = self.kind(ino) == Some(st.kind);
            if !same {
                // The store reuses the number: somebody else removed what we knew by it.
                self.bury(ino);
            }
            same
        });
        let ino = known.unwrap_or_else(|| self.insert(id, st.kind));
        self.add_link(ino, parent, name);
        let node = self.nodes.get_mut(&ino);
        let generation = node.map(|n| {
            n.lookups += 1;
            n.generation
        });
        Referenced { ino, generation: generation.unwrap_or_default().into(), is_new: known.is_none() }
    }

    fn insert(&mut self, id: StoreId, kind: Kind) -> Ino {
        let own = id.dev == self.root_dev && id.ino > ROOT && id.ino < OWN_MAX && !self.nodes.contains_key(&id.ino);
        let ino = if own { id.ino } else { alternative() };
        let generation = self.generation;
        let links = Links::new();
        let node = Node { id, kind, links, lookups: 0, pins: 0, generation, size: None, live: true, last: None };
        self.nodes.insert(ino, Box::new(node));
        if ino != id.ino {
            self.by_store.insert(id, ino);
        }
        ino
    }

    /// Adds a name to a node. A directory has one name at a time: the new one replaces the old.
    pub fn add_link(&mut self, ino: Ino, parent: Ino, name: &OsStr) {
        if ino == ROOT {
            return;
        }
        let Some(node) = self.nodes.get_mut(&ino) else { return };
        if node.links.iter().any(|l| l.parent == parent && *l.name == *name) {
            return;
        }
        let gone = if node.kind == Kind::Dir { std::mem::take(&mut node.links) } else { Links::new() };
        node.links.push(Link { parent, name: name.into() });
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
        let before = node.links.len();
        node.links.retain(|l| !(l.parent == parent && *l.name == *name));
        if node.links.len() != before {
            self.unpin(parent);
        }
    }

    /// The backing inode at (parent, name), whose stat was `st`, lost that name; `last`: it was the last one.
    pub fn unlinked(&mut self, st: &Stat, parent: Ino, name: &OsStr, last: bool) -> Option<Ino> {
        let ino = self.find(StoreId::from(st))?;
        if last {
            if let Some(node) = self.nodes.get_mut(&ino) {
                node.last = Some(Box::new(Stat { nlink: 0, ..*st }));
            }
            self.bury(ino);
        } else {
            self.remove_link(ino, parent, name);
        }
        Some(ino)
    }

    /// Makes a zombie: the number stays taken while referred to, the backing inode is forgotten.
    fn bury(&mut self, ino: Ino) {
        let Some(node) = self.nodes.get_mut(&ino) else { return };
        node.live = false;
        node.size = None;
        let (id, links) = (node.id, std::mem::take(&mut node.links));
        self.generation = new_generation();
        self.by_store.remove(&id);
        for l in links {
            self.unpin(l.parent);
        }
        self.drop_if_unused(ino);
    }

    /// Moves the name of a backing inode.
    pub fn moved(&mut self, id: StoreId, from: (Ino, &OsStr), to: (Ino, &OsStr)) -> Option<Ino> {
        let ino = self.find(id)?;
        // Added first: a node must not be dropped between its two names.
        self.add_link(ino, to.0, to.1);
        self.remove_link(ino, from.0, from.1);
        Some(ino)
    }

    /// The entries of a backing inode are those of another one from now on, made in its place.
    pub fn exchanged(&mut self, old: StoreId, new: StoreId) {
        if let Some(stale) = self.find(new) {
            // The store reuses the number: somebody else removed what we knew by it.
            self.bury(stale);
        }
        let Some(ino) = self.find(old) else { return };
        self.by_store.remove(&old);
        if let Some(node) = self.nodes.get_mut(&ino) {
            (node.id, node.size) = (new, None);
            if ino != new.ino {
                self.by_store.insert(new, ino);
            }
        }
    }

    /// Every number in use, with the references to it.
    pub fn references(&self) -> Vec<(Ino, u64)> {
        self.nodes.iter().map(|(ino, node)| (*ino, node.lookups)).collect()
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
            n.lookups += 1;
        }
    }

    /// Gives back lookup references.
    pub fn forget(&mut self, ino: Ino, count: u64) {
        if let Some(n) = self.nodes.get_mut(&ino) {
            n.lookups = n.lookups.saturating_sub(count);
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
                self.by_store.remove(&node.id);
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
mod tests {
    use super::*;
    use crate::Time;

    fn stat(ino: u64, kind: Kind) -> Stat {
        Stat {
            dev: 5,
            ino,
            kind,
            mode: 0o644,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            len: 0,
            blocks: 0,
            atime: Time::default(),
            mtime: Time::default(),
            ctime: Time::default(),
        }
    }

    /// A million of them is what the kernel may remember without being short of memory.
    #[test]
    fn nodes_are_small() {
        assert!(size_of::<Node>() <= 128, "{} bytes", size_of::<Node>());
    }

    fn table() -> NodeTable {
        NodeTable::new(&stat(900, Kind::Dir))
    }

    fn name(s: &str) -> &OsStr {
        OsStr::new(s)
    }

    #[test]
    fn numbers_are_the_stores_own_where_they_can_be() {
        let mut t = table();
        assert_eq!(t.reference(ROOT, name("a"), &stat(40, Kind::File)).ino, 40);
        // The root is 1, whatever the store calls it; what the store calls 1 is something else.
        assert_eq!(t.find(StoreId { dev: 5, ino: 900 }), Some(ROOT));
        assert_eq!(t.reference(ROOT, name("b"), &stat(900, Kind::Dir)).ino, ROOT);
        assert!(t.reference(ROOT, name("c"), &stat(1, Kind::File)).ino >= ALTERNATIVE);
        // What another vault's numbers begin with is not the store's to choose.
        let wide = t.reference(ROOT, name("w"), &stat(OWN_MAX, Kind::File)).ino;
        assert!(wide >= ALTERNATIVE && t.shown(5, OWN_MAX + 7) == ALTERNATIVE + 7);
        let elsewhere = Stat { dev: 6, ..stat(40, Kind::File) };
        let found = t.reference(ROOT, name("d"), &elsewhere);
        let other = found.ino;
        assert!(other >= ALTERNATIVE);
        assert_eq!(t.reference(ROOT, name("d"), &elsewhere), Referenced { is_new: false, ..found });
        assert_eq!((t.shown(6, 40), t.shown(5, 40), t.shown(5, 41)), (other, 40, 41));
    }

    #[test]
    fn a_zombie_keeps_its_number_until_it_is_forgotten() {
        let mut t = table();
        let st = stat(40, Kind::File);
        let old = t.reference(ROOT, name("a"), &st);
        t.unlinked(&st, ROOT, name("a"), true);
        assert_eq!(t.last_stat(old.ino).map(|st| (st.ino, st.nlink)), Some((40, 0)));
        assert!(!t.is_live(old.ino));
        assert_eq!(t.stored_path(old.ino), None);
        let new = t.reference(ROOT, name("b"), &st);
        assert_ne!(new.ino, old.ino);
        t.forget(old.ino, 1);
        t.forget(new.ino, 1);
        let again = t.reference(ROOT, name("c"), &st);
        assert_eq!(again.ino, 40);
        assert_ne!(again.generation, old.generation, "another user of the same number");
    }

    #[test]
    fn another_table_names_other_inodes() {
        let here = |t: &mut NodeTable| t.reference(ROOT, name("a"), &stat(40, Kind::File));
        let there = |t: &mut NodeTable| t.reference(ROOT, name("b"), &Stat { dev: 6, ..stat(40, Kind::File) });
        let (mut one, mut two) = (table(), table());
        for t in [&mut one, &mut two] {
            t.unlinked(&stat(40, Kind::File), ROOT, name("a"), true);
        }
        let ((a, b), (c, d)) = ((here(&mut one), there(&mut one)), (here(&mut two), there(&mut two)));
        assert_eq!(a.ino, c.ino, "the store's own");
        assert_ne!(a.generation, c.generation);
        assert_ne!(b.ino, d.ino);
    }

    #[test]
    fn a_number_that_changed_its_kind_is_another_inode() {
        let mut t = table();
        let old = t.reference(ROOT, name("a"), &stat(40, Kind::File)).ino;
        let new = t.reference(ROOT, name("a"), &stat(40, Kind::Dir)).ino;
        assert_ne!(old, new);
        assert_eq!((t.is_live(old), t.kind(new)), (false, Some(Kind::Dir)));
    }

    #[test]
    fn parents_stay_while_children_do() {
        let mut t = table();
        let d = t.reference(ROOT, name("d"), &stat(10, Kind::Dir)).ino;
        let e = t.reference(d, name("e"), &stat(11, Kind::Dir)).ino;
        let f = t.reference(e, name("f"), &stat(12, Kind::File)).ino;
        t.forget(d, 1);
        t.forget(e, 1);
        assert_eq!(t.stored_path(f), Some("d/e/f".into()));
        assert_eq!(t.ancestry(f), Some(vec![f, e, d, ROOT]));
        t.forget(f, 1);
        assert_eq!(t.nodes.len(), 1, "only the root is left");
        assert_eq!(t.by_store.len(), 1);
    }

    #[test]
    fn links_and_moves_leave_the_right_names() {
        let mut t = table();
        let d = t.reference(ROOT, name("d"), &stat(10, Kind::Dir)).ino;
        let st = stat(12, Kind::File);
        let id = StoreId::from(&st);
        let f = t.reference(ROOT, name("f"), &st).ino;
        assert_eq!(t.reference(d, name("g"), &st).ino, f);
        t.moved(id, (ROOT, name("f")), (d, name("h")));
        let names: Vec<_> = t.links(f).into_iter().map(|l| l.name.into_os_string()).collect();
        assert_eq!(names, ["g", "h"]);
        t.unlinked(&st, d, name("g"), false);
        assert_eq!(t.stored_path(f), Some("d/h".into()));
        t.forget(f, 2);
        t.forget(d, 1);
        assert_eq!(t.nodes.len(), 1);
    }

    #[test]
    fn an_exchanged_inode_keeps_its_number_and_names() {
        let mut t = table();
        let (old, new) = (stat(12, Kind::Symlink), stat(13, Kind::Symlink));
        let found = t.reference(ROOT, name("l"), &old);
        let l = found.ino;
        t.exchanged(StoreId::from(&old), StoreId::from(&new));
        assert_eq!(t.reference(ROOT, name("l"), &new), Referenced { is_new: false, ..found });
        // Both numbers can be met again, as others.
        assert_ne!(t.reference(ROOT, name("m"), &old).ino, l);
        t.forget(l, 2);
        assert_eq!(t.find(StoreId::from(&new)), None);
        t.exchanged(StoreId { dev: 1, ino: 1 }, StoreId { dev: 1, ino: 2 });
    }

    #[test]
    fn a_pinned_node_outlives_its_references() {
        let mut t = table();
        let st = stat(12, Kind::File);
        let f = t.reference(ROOT, name("f"), &st).ino;
        t.pin(f);
        t.forget(f, 99);
        assert!(t.is_live(f));
        t.unlinked(&st, ROOT, name("f"), true);
        assert_eq!(t.kind(f), Some(Kind::File));
        t.unpin(f);
        assert_eq!(t.kind(f), None);
        // Nonsense is harmless.
        t.unpin(f);
        t.forget(ROOT, 1000);
        t.forget(12345, 1);
        assert!(t.is_live(ROOT));
    }

    #[test]
    fn a_cached_size_is_that_of_an_unchanged_file() {
        let mut t = table();
        let st = Stat { len: 4096, ..stat(12, Kind::File) };
        let f = t.reference(ROOT, name("f"), &st).ino;
        t.set_cached_size(f, CachedSize::new(&st, 77));
        assert_eq!(t.cached_size(f, &st), Some(77));
        let later = Time { seconds: 1, nanos: 0 };
        for changed in [Stat { len: 8192, ..st }, Stat { mtime: later, ..st }, Stat { ctime: later, ..st }] {
            assert_eq!(t.cached_size(f, &changed), None);
        }
    }

    #[test]
    fn a_loop_made_below_us_ends() {
        let mut t = table();
        let a = t.reference(ROOT, name("a"), &stat(10, Kind::Dir)).ino;
        let b = t.reference(a, name("b"), &stat(11, Kind::Dir)).ino;
        t.reference(b, name("a"), &stat(10, Kind::Dir));
        assert_eq!(t.ancestry(a), None);
        assert_eq!(t.stored_path(b), None);
    }
}
