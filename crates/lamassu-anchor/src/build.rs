//! The anchor of a vault that is there already, made in an empty table while its tree is gone through.
//!
//! Rows are committed in batches; the row of the vault comes last, so that a table in which this was broken off is no
//! anchor.

use crate::queue::{Layer, object_key};
use crate::row::{Announced, Content, Entry, EntryPlace, Row, VaultRow};
use crate::table::{Space, Table};
use crate::{Anchor, AnchorError, ObjectId};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Keys that are committed at once.
const BATCH_LEN: usize = 10_000;

type Result<T> = std::result::Result<T, AnchorError>;

/// See the module's head.
pub struct Builder {
    table: Arc<dyn Table>,
    vault: VaultRow,
    layer: Layer,
}

impl Builder {
    /// Of a vault in an empty table. `vault.next_object` is the number that the next object gets.
    ///
    /// # Errors
    /// [`AnchorError::Foreign`] where something is in it; those of the table.
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

    /// A new object, under its first name.
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
        self.layer.make_entry(place, Entry { kind: row.kind(), object }, 0);
        self.layer.objects.insert(object, Some(row));
        self.bound().map(|()| object)
    }

    /// Another name of an object.
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
        self.layer.make_entry(place, Entry { kind: row.kind(), object }, 0);
        self.layer.objects.insert(object, Some(row));
        self.bound()
    }

    fn bound(&mut self) -> Result<()> {
        if self.layer.len() < BATCH_LEN {
            return Ok(());
        }
        self.table.commit(&std::mem::take(&mut self.layer).changes())
    }

    /// The rest, with the root and the vault, of which `session` is the highest session that began.
    ///
    /// # Errors
    /// Those of the table.
    pub fn finish(mut self, root: Row, session: u32) -> Result<Anchor> {
        self.vault.sessions = Announced::up_to(session);
        self.table.commit(&std::mem::take(&mut self.layer).changes())?;
        Anchor::create(self.table, self.vault, root)
    }
}
