//! Makes the anchor of an existing vault in an empty table, during a walk of its tree.
//!
//! Rows are committed in batches. The vault's row comes last, so that the table of an interrupted build is not an
//! anchor.

use crate::queue::{Layer, object_key};
use crate::row::{Announced, Content, EntryPlace, EntryRow, Row, VaultRow};
use crate::table::{Space, Table};
use crate::{Anchor, AnchorError, ObjectId};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Keys in one commit.
const BATCH_LEN: usize = 10_000;

type Result<T> = std::result::Result<T, AnchorError>;

/// Builds an anchor from the walk of a vault's tree.
pub struct Builder {
    table: Arc<dyn Table>,
    vault: VaultRow,
    layer: Layer,
}

impl Builder {
    /// For a vault, in an empty table. `vault.next_object` is the number of the next object.
    ///
    /// # Errors
    /// [`AnchorError::Foreign`] if the table is not empty; those of the table.
    pub fn new(table: Arc<dyn Table>, vault: VaultRow) -> Result<Builder> {
        for space in Space::OF_VAULT {
            let mut is_empty = true;
            table.scan(space, &[], &mut |_, _| {
                is_empty = false;
                ControlFlow::Break(())
            })?;
            if !is_empty {
                return Err(AnchorError::Foreign);
            }
        }
        Ok(Builder { table, vault, layer: Layer::default() })
    }

    /// The place of an entry.
    pub fn place(&self, dir: ObjectId, stored: &[u8]) -> EntryPlace {
        EntryPlace { dir, name: self.vault.tokens.token(dir, stored) }
    }

    /// Adds an object under its first name.
    ///
    /// # Errors
    /// Those of the table.
    pub fn add(&mut self, place: EntryPlace, mut row: Row) -> Result<ObjectId> {
        let object = self.vault.next_object;
        self.vault.next_object.0 += 1;
        if let Content::Dir { parent, name, .. } = &mut row.content {
            (*parent, *name) = (place.dir, place.name);
        }
        row.links = 1;
        self.layer.make_entry(place, EntryRow { kind: row.kind(), object }, 0);
        self.layer.objects.insert(object, Some(row));
        self.bound().map(|()| object)
    }

    /// Adds another name of an object.
    ///
    /// # Errors
    /// [`AnchorError::Unknown`], [`AnchorError::Damaged`]; those of the table.
    pub fn link(&mut self, place: EntryPlace, object: ObjectId) -> Result<()> {
        let mut row = match self.layer.objects.get(&object) {
            Some(row) => row.clone(),
            None => self.table.get(Space::Objects, &object_key(object))?.map(|row| Row::decode(&row)).transpose()?,
        }
        .ok_or(AnchorError::Unknown { object })?;
        row.links += 1;
        self.layer.make_entry(place, EntryRow { kind: row.kind(), object }, 0);
        self.layer.objects.insert(object, Some(row));
        self.bound()
    }

    fn bound(&mut self) -> Result<()> {
        if self.layer.len() < BATCH_LEN {
            return Ok(());
        }
        self.table.commit(&std::mem::take(&mut self.layer).changes())
    }

    /// Commits the remaining rows, with the root and the vault's row. `session`: the highest session that has begun.
    ///
    /// # Errors
    /// Those of the table.
    pub fn finish(mut self, root: Row, session: u32) -> Result<Anchor> {
        self.vault.sessions = Announced::up_to(session);
        self.table.commit(&std::mem::take(&mut self.layer).changes())?;
        Anchor::create(self.table, self.vault, root)
    }
}
