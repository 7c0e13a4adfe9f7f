//! A table that outlives its vault. Between two turns of its host nothing is open through it, and other hosts make,
//! move and remove entries that it names.

use super::{Link, NOWHERE, NodeTable, StoreId};
use crate::{Ino, Kind, ROOT};
use lamassu_anchor::ObjectId;
use lamassu_store::backend::Stat;
use std::collections::HashSet;
use std::ffi::OsStr;

/// Why an entry is not the expected node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Met {
    /// Its number belongs to another inode, which has this node.
    OtherInode(Ino),
    /// The anchor has it as another object than before, or another inode, which is open, is that object.
    OtherObject,
    /// The node of its object has another inode: it matters whether it may go to this one.
    MayGo(Ino),
}

/// Where a name of a node led when the store last showed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leads {
    /// To the inode that the node has.
    Here,
    /// To another one: see [`Go::Stay`].
    Elsewhere,
    /// The node has gone to its inode since.
    Untold,
}

/// What is known of the names of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Names {
    /// By which programs have reached it, all that still are.
    Known,
    /// A program may have reached it by one that it has lost, or its inode by one that it has not.
    Lost,
    /// It has lost one that led to another inode.
    Split,
}

/// Whether a node may go to another inode, which the store shows under a name of its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Go {
    To,
    /// The name is the node's, and the node keeps its inode.
    Stay,
    /// What is under the name is not the object.
    No,
}

/// What the inode is that the store shows under a name of a node in place of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Elsewhere {
    /// The node's now.
    Follows,
    /// The object's by its name, but not by its owner: another user may have put it there, or a crash have left it.
    MayBeAnothers,
    No,
}

/// A name that a node had.
pub struct Named {
    pub ino: Ino,
    pub object: ObjectId,
    pub link: Link,
    /// That of the directory.
    pub dir: ObjectId,
}

impl NodeTable {
    /// Takes the table for the next vault. Files and directories are closed, so only references, and nodes below, keep
    /// a node. `open`: the files that programs have open nevertheless.
    pub fn take(&mut self, open: &HashSet<Ino>) -> NodeTable {
        let root = self.nodes.get(&ROOT).map_or(StoreId { dev: self.root_dev, ino: ROOT, born: 0 }, |root| root.id);
        let mut table = std::mem::replace(self, NodeTable::of_root(root, self.by_hosts));
        for (ino, node) in &mut table.nodes {
            node.is_left_open = open.contains(ino);
            node.pins = 0;
        }
        let parents: Vec<Ino> = table.nodes.values().flat_map(|node| &node.links).map(|link| link.parent).collect();
        for parent in parents {
            table.pin(parent);
        }
        let all: Vec<Ino> = table.nodes.keys().copied().collect();
        all.into_iter().for_each(|ino| table.drop_if_unused(ino));
        // Their rows went with the vault that was closed.
        table.unused.clear();
        table
    }

    /// Forgets which objects nodes are whose numbers were not recorded before the turn was lost.
    pub fn bury_from(&mut self, first: ObjectId) {
        let loose = self.nodes.iter().filter(|(ino, node)| **ino != ROOT && node.object >= first);
        let loose: Vec<Ino> = loose.map(|(ino, _)| *ino).collect();
        for ino in loose {
            self.bury(ino);
            if let Some(node) = self.nodes.get_mut(&ino) {
                node.object = ObjectId::default();
            }
        }
    }

    /// The names in directories for whose objects `is_wanted` is true.
    pub fn named_in(&self, is_wanted: impl Fn(ObjectId) -> bool) -> Vec<Named> {
        let mut found = Vec::new();
        for (ino, node) in self.nodes.iter().filter(|(_, node)| node.live) {
            for link in &node.links {
                let dir = self.object(link.parent);
                if is_wanted(dir) {
                    found.push(Named { ino: *ino, object: node.object, link: link.clone(), dir });
                }
            }
        }
        found
    }

    /// Marks the nodes of which the kernel may have an outdated state.
    pub fn changed_elsewhere(&mut self, is_changed: impl Fn(ObjectId) -> bool) {
        for node in self.nodes.values_mut() {
            node.is_changed_elsewhere |= is_changed(node.object);
        }
    }

    /// Whether another host has changed it since the kernel learnt of it.
    pub fn is_changed_elsewhere(&self, ino: Ino) -> bool {
        self.nodes.get(&ino).is_none_or(|node| node.is_changed_elsewhere)
    }

    /// Objects of nodes that have lost their known names, and may have others.
    pub fn nameless(&self) -> Vec<ObjectId> {
        let nodes = self.nodes.iter().filter(|(ino, node)| **ino != ROOT && node.live && node.links.is_empty());
        nodes.map(|(_, node)| node.object).collect()
    }

    /// The living node of an object.
    pub fn of_object(&self, object: ObjectId) -> Option<Ino> {
        self.by_object.get(&object).copied()
    }

    /// Whether a node has a name, or needs none.
    pub fn is_named(&self, ino: Ino) -> bool {
        ino == ROOT || self.nodes.get(&ino).is_some_and(|node| !node.links.is_empty())
    }

    /// The directories in which a node has names.
    pub fn dirs_of(&self, ino: Ino) -> Vec<ObjectId> {
        let links = self.nodes.get(&ino).into_iter().flat_map(|node| &node.links);
        links.map(|link| self.object(link.parent)).collect()
    }

    /// Notes that the entry at (parent, name) is this object. If the object has a node already, the name is added to
    /// it, and the node goes to this inode.
    pub fn met(&mut self, parent: Ino, name: &OsStr, st: &Stat, object: ObjectId) -> Option<Ino> {
        if let Some(ino) = self.of_object(object) {
            let leads = if self.follows(ino, st) { Leads::Here } else { Leads::Elsewhere };
            self.add_link(ino, parent, name, leads);
            return Some(ino);
        }
        let found = self.reference(parent, name, st, object, (None, Some(Go::To))).ok()?;
        if let Some(node) = self.nodes.get_mut(&found.ino) {
            // The entries in it hold it.
            node.lookups -= 1;
        }
        Some(found.ino)
    }

    /// The node of an entry, which is this object of the anchor, if there is one; and whether it has just gone to this
    /// inode. Where hosts share the vault, the object alone says which node it is. But a file that is open stays what
    /// it is: a crash may have left two copies of it (rule R9 of `docs/sharing.md`) under different names.
    ///
    /// `go`: whether the node may go to this inode, if that was asked.
    ///
    /// # Errors
    /// [`Met::OtherObject`]; [`Met::MayGo`]: it has to be asked.
    pub fn identify(
        &mut self,
        st: &Stat,
        object: ObjectId,
        go: Option<Go>,
    ) -> std::result::Result<(Option<Ino>, bool), Met> {
        if !self.by_hosts || object == ObjectId::default() {
            let known = self.find(StoreId::from(st));
            let is_another = known.is_some_and(|ino| self.object(ino) != object);
            return if is_another { Err(Met::OtherObject) } else { Ok((known, false)) };
        }
        let Some(ino) = self.of_object(object) else {
            return if self.take_number(None, StoreId::from(st)) { Ok((None, false)) } else { Err(Met::OtherObject) };
        };
        if self.id(ino).is_some_and(|id| id.is_of(st)) && self.kind(ino) == Some(st.kind) {
            return Ok((Some(ino), false));
        }
        let go = go.ok_or(Met::MayGo(ino))?;
        let is_of_its_kind = self.kind(ino) == Some(st.kind);
        let stays = is_of_its_kind && (go == Go::Stay || (go == Go::To && self.is_open_file(ino)));
        let is_known = match stays {
            // The entry is no other node's, whatever number that has.
            true => self.take_number(Some(ino), StoreId::from(st)),
            false => go == Go::To && self.follows(ino, st),
        };
        if is_known { Ok((Some(ino), !stays)) } else { Err(Met::OtherObject) }
    }

    /// The node of an entry. Where hosts share the vault, its object says which it is: see [`NodeTable::identify`].
    pub fn node_of(&self, object: ObjectId, id: StoreId) -> Option<Ino> {
        match self.by_hosts && object != ObjectId::default() {
            true => self.of_object(object),
            false => self.find(id),
        }
    }

    /// Moves the name of an entry.
    pub fn moved(&mut self, object: ObjectId, id: StoreId, from: (Ino, &OsStr), to: (Ino, &OsStr)) -> Option<Ino> {
        let ino = self.node_of(object, id)?;
        let names = self.nodes.get(&ino)?.names;
        let leads = if self.find(id) == Some(ino) { Leads::Here } else { Leads::Elsewhere };
        // Added first: a node must not be dropped between its two names.
        self.add_link(ino, to.0, to.1, leads);
        self.remove_link(ino, from.0, from.1);
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.names = names;
        }
        Some(ino)
    }

    /// As [`NodeTable::identify`], where an entry was looked up: if the node of its object cannot go to it, although it
    /// may be its own, a new node takes its place.
    pub(super) fn identify_anew(
        &mut self,
        st: &Stat,
        object: ObjectId,
        go: Option<Go>,
    ) -> std::result::Result<(Option<Ino>, bool), Met> {
        if let Some(known) = self.of_object(object).filter(|known| *known != ROOT) {
            self.drop_split(known);
        }
        let identified = self.identify(st, object, go);
        let replaced = self.of_object(object).filter(|ino| *ino != ROOT && !self.is_open_file(*ino));
        match (identified, replaced) {
            // Also of another owner, as if the node had not been known: whatever changes it asks for the owner.
            (Err(Met::OtherObject), Some(before)) if matches!(go, Some(Go::To | Go::No)) => {
                if !self.take_number(Some(before), StoreId::from(st)) {
                    return Err(Met::OtherObject);
                }
                self.bury(before);
                Ok((None, false))
            }
            (identified, _) => identified,
        }
    }

    /// Another inode is that of a node from now on: of a file that a host has copied, of a link that was re-keyed; and
    /// of any entry in a store without birth times, which may number entries by their paths. The caller has asked
    /// whether it may be the node's own. False: it is of another kind, or the root's, or certainly another node's, or
    /// that of a file that is open as another object.
    pub fn follows(&mut self, ino: Ino, st: &Stat) -> bool {
        let Some(node) = self.nodes.get(&ino).filter(|node| ino != ROOT && node.live && node.kind == st.kind) else {
            return false;
        };
        if node.id.is_of(st) {
            return true;
        }
        let is_replaced = matches!(st.kind, Kind::File | Kind::Symlink);
        let may_be_renumbered = node.id.born == 0 || st.born == 0 || node.id == NOWHERE;
        if !(is_replaced || may_be_renumbered) || !self.take_number(Some(ino), StoreId::from(st)) {
            return false;
        }
        let is_split = self.nodes.get(&ino).is_some_and(|n| n.links.iter().any(|link| link.leads == Leads::Elsewhere));
        self.renumber(ino, StoreId::from(st));
        self.lose_names(ino);
        if let Some(node) = self.nodes.get_mut(&ino).filter(|_| is_split) {
            node.names = Names::Split;
        }
        true
    }

    /// What is known of the names of a node.
    pub fn names(&self, ino: Ino) -> Names {
        self.nodes.get(&ino).map_or(Names::Lost, |node| node.names)
    }

    /// Notes that all names of a node are known, and lead to its inode.
    pub fn has_all_names(&mut self, ino: Ino) {
        if let Some(node) = self.nodes.get_mut(&ino).filter(|node| node.names == Names::Lost) {
            node.names = Names::Known;
        }
    }

    fn lose_names(&mut self, ino: Ino) {
        if let Some(node) = self.nodes.get_mut(&ino).filter(|node| node.names == Names::Known) {
            node.names = Names::Lost;
        }
    }

    /// Removes a name that another host has removed, or given to another entry.
    pub fn lose_link(&mut self, ino: Ino, parent: Ino, name: &OsStr) {
        self.lose_names(ino);
        self.remove_link(ino, parent, name);
        self.drop_split(ino);
    }

    /// A lookup makes a new node in place of one that has lost a name which led elsewhere, and knows which inode it is.
    pub(super) fn drop_split(&mut self, ino: Ino) {
        let is_in_use = self.is_open_file(ino) || self.nodes.get(&ino).is_some_and(|node| node.is_left_open);
        if self.names(ino) == Names::Split && !is_in_use {
            self.bury(ino);
        }
    }

    /// Notes that a name leads to what has this stat.
    pub fn note_leads(&mut self, ino: Ino, link: &Link, st: &Stat) {
        let Some(node) = self.nodes.get_mut(&ino).filter(|node| node.id.is_of(st)) else { return };
        for known in node.links.iter_mut().filter(|known| known.parent == link.parent && known.name == link.name) {
            known.leads = Leads::Here;
        }
    }

    pub(super) fn is_open_file(&self, ino: Ino) -> bool {
        self.nodes.get(&ino).is_some_and(|n| n.kind == Kind::File && n.pins > 0)
    }

    /// Takes the store's number from another node than `of`, which is found again by its name. False: it must keep it,
    /// and by its birth time it is that very inode, or it is open, or the root.
    pub(super) fn take_number(&mut self, of: Option<Ino>, id: StoreId) -> bool {
        let Some(other) = self.at(id.number()).filter(|other| Some(*other) != of) else { return true };
        let is_it = id.born != 0 && self.id(other).is_some_and(|known| known.born == id.born);
        if other == ROOT || is_it || self.is_open_file(other) {
            return false;
        }
        self.renumber(other, NOWHERE);
        true
    }

    /// Where the replacement of a link was cut off, `other` is under one of its names, which leads to `kept` from now
    /// on.
    pub fn united(&mut self, object: ObjectId, (kept, other): (&Stat, &Stat), parent: Ino, name: &OsStr) {
        let id = StoreId::from(kept);
        let node = match self.by_hosts {
            true => self.of_object(object).filter(|ino| self.follows(*ino, kept)),
            false => {
                match self.find(id) {
                    Some(_) => _ = self.unlinked(object, other, (parent, name), true),
                    None => self.exchanged(StoreId::from(other), id),
                }
                self.find(id)
            }
        };
        if let Some(ino) = node {
            self.add_link(ino, parent, name, Leads::Here);
        }
    }

    /// Notes that another host has removed it: its object has no row.
    pub fn is_gone(&mut self, ino: Ino) {
        if let Some(node) = self.nodes.get_mut(&ino).filter(|_| ino != ROOT) {
            node.is_removed = true;
            self.bury(ino);
        }
    }

    /// Remembers what was shown of a directory last: if another host removes it, programs may still ask for that, and
    /// the kernel does before each use of the directory.
    pub fn note_shown(&mut self, ino: Ino, st: Stat) {
        let Some(node) = self.nodes.get_mut(&ino).filter(|node| node.live && node.kind == Kind::Dir) else { return };
        if self.by_hosts {
            node.last = Some(Box::new(st));
        }
    }
}
