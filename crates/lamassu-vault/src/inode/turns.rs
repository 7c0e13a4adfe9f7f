//! A table that outlives its vault. Between two turns of its host nothing is open through it, and other hosts make,
//! move and remove entries that it names.

use super::{Link, NodeTable, StoreId};
use crate::{Ino, ROOT};
use lamassu_anchor::ObjectId;
use lamassu_store::backend::Stat;
use std::ffi::OsStr;

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
    /// a node.
    pub fn take(&mut self) -> NodeTable {
        let root = self.nodes.get(&ROOT).map_or(StoreId { dev: self.root_dev, ino: ROOT, born: 0 }, |root| root.id);
        let mut table = std::mem::replace(self, NodeTable::of_root(root, self.are_copied));
        table.nodes.values_mut().for_each(|node| node.pins = 0);
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
        let loose: Vec<Ino> = self.nodes.iter().filter(|(_, node)| node.object >= first).map(|(ino, _)| *ino).collect();
        for ino in loose {
            self.is_gone(ino);
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
    /// it.
    pub fn met(&mut self, parent: Ino, name: &OsStr, st: &Stat, object: ObjectId) -> Option<Ino> {
        if let Some(ino) = self.of_object(object) {
            self.add_link(ino, parent, name);
            return Some(ino);
        }
        let found = self.reference(parent, name, st, object, None).ok()?;
        if let Some(node) = self.nodes.get_mut(&found.ino) {
            // The entries in it hold it.
            node.lookups -= 1;
        }
        Some(found.ino)
    }

    /// Notes that another host has removed it.
    pub fn is_gone(&mut self, ino: Ino) {
        if ino != ROOT {
            self.bury(ino);
        }
    }
}
