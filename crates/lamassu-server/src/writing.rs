//! A transaction that records the rows it changes, so that they can first be made durable elsewhere.

use redb::{
    AccessGuard, Key, ReadTransaction, ReadableTable, StorageError, Table, TableDefinition, TableError, TableHandle,
    Value, WriteTransaction,
};
use std::borrow::Borrow;
use std::cell::RefCell;
use std::ops::Deref;

/// A changed row, or its removal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowChange {
    /// the table's name
    pub table: String,
    /// the key
    pub key: Vec<u8>,
    /// the new value; `None`: the row is removed
    pub value: Option<Vec<u8>>,
}

/// Passes each row of a new copy to the function that puts it there.
pub type Fill<'a> = &'a dyn Fn(&mut dyn FnMut(&RowChange) -> crate::Result<()>) -> crate::Result<()>;

/// A write transaction that records changes, in place of redb's.
pub struct Writing<'t> {
    transaction: &'t WriteTransaction,
    changes: RefCell<Vec<RowChange>>,
}

impl<'t> Writing<'t> {
    /// A transaction without changes so far.
    pub fn of(transaction: &'t WriteTransaction) -> Writing<'t> {
        Writing { transaction, changes: RefCell::default() }
    }

    /// As redb's method.
    pub fn open_table<'w, K: Key + 'static, V: Value + 'static>(
        &'w self,
        table: TableDefinition<'_, K, V>,
    ) -> Result<WriteTable<'w, K, V>, TableError> {
        Ok(WriteTable { table: self.transaction.open_table(table)?, changes: &self.changes })
    }

    /// The changes, in order.
    pub fn into_changes(self) -> Vec<RowChange> {
        self.changes.into_inner()
    }
}

/// A table of such a transaction. It is read as redb's own, and changed only by these methods.
pub struct WriteTable<'w, K: Key + 'static, V: Value + 'static> {
    table: Table<'w, K, V>,
    changes: &'w RefCell<Vec<RowChange>>,
}

impl<'w, K: Key + 'static, V: Value + 'static> Deref for WriteTable<'w, K, V> {
    type Target = Table<'w, K, V>;

    fn deref(&self) -> &Table<'w, K, V> {
        &self.table
    }
}

impl<K: Key + 'static, V: Value + 'static> WriteTable<'_, K, V> {
    fn note(&self, key: &K::SelfType<'_>, value: Option<&V::SelfType<'_>>) {
        self.changes.borrow_mut().push(RowChange {
            table: self.table.name().to_owned(),
            key: K::as_bytes(key).as_ref().to_vec(),
            value: value.map(|value| V::as_bytes(value).as_ref().to_vec()),
        });
    }

    /// As redb's method, without the previous value.
    pub fn insert<'k, 'v>(
        &mut self,
        key: impl Borrow<K::SelfType<'k>>,
        value: impl Borrow<V::SelfType<'v>>,
    ) -> Result<(), StorageError> {
        self.note(key.borrow(), Some(value.borrow()));
        self.table.insert(key, value).map(drop)
    }

    /// As redb's method.
    pub fn remove<'k>(
        &mut self,
        key: impl Borrow<K::SelfType<'k>>,
    ) -> Result<Option<AccessGuard<'_, V>>, StorageError> {
        self.note(key.borrow(), None);
        self.table.remove(key)
    }

    /// As redb's method.
    pub fn retain(
        &mut self,
        mut is_kept: impl for<'f> FnMut(K::SelfType<'f>, V::SelfType<'f>) -> bool,
    ) -> Result<(), StorageError> {
        let (name, changes) = (self.table.name().to_owned(), self.changes);
        self.table.retain(|key, value| {
            let bytes = K::as_bytes(&key).as_ref().to_vec();
            let keeps = is_kept(key, value);
            if !keeps {
                changes.borrow_mut().push(RowChange { table: name.clone(), key: bytes, value: None });
            }
            keeps
        })
    }
}

/// A table whose types are erased: keys and values are bytes.
pub trait AnyTable: Sync {
    /// Its name.
    fn name(&self) -> &str;

    /// Creates the table if it is missing.
    fn make(&self, transaction: &WriteTransaction) -> Result<(), TableError>;

    /// Appends all its rows to `rows`.
    fn visit(&self, read: &ReadTransaction, rows: &mut Vec<RowChange>) -> Result<(), redb::Error>;

    /// Opens the table, to put rows into it.
    fn open<'t>(&self, transaction: &'t WriteTransaction) -> Result<PutRow<'t>, TableError>;
}

/// Puts a row into a table, by its key and value. False: the bytes are not of this table.
type PutRow<'t> = Box<dyn FnMut(&[u8], &[u8]) -> Result<bool, redb::Error> + 't>;

/// Puts rows into tables. Each stays open while its rows come: opening it takes longer than putting one.
pub struct Filling<'t> {
    transaction: &'t WriteTransaction,
    open: Option<(&'static str, PutRow<'t>)>,
}

impl<'t> Filling<'t> {
    /// No table is open yet.
    pub fn of(transaction: &'t WriteTransaction) -> Filling<'t> {
        Filling { transaction, open: None }
    }

    /// False: the bytes are not a key and value of this table.
    ///
    /// # Errors
    /// Those of redb.
    pub fn put(&mut self, to: &'static dyn AnyTable, key: &[u8], value: &[u8]) -> Result<bool, redb::Error> {
        if let Some((name, put)) = &mut self.open
            && *name == to.name()
        {
            return put(key, value);
        }
        // redb opens a table once at a time.
        self.open = None;
        let (_, put) = self.open.insert((to.name(), to.open(self.transaction)?));
        put(key, value)
    }
}

impl<K: Key + Sync + 'static, V: Value + Sync + 'static> AnyTable for TableDefinition<'static, K, V> {
    fn name(&self) -> &str {
        TableHandle::name(self)
    }

    fn make(&self, transaction: &WriteTransaction) -> Result<(), TableError> {
        transaction.open_table(*self).map(drop)
    }

    fn visit(&self, read: &ReadTransaction, rows: &mut Vec<RowChange>) -> Result<(), redb::Error> {
        for row in read.open_table(*self)?.iter()? {
            let (key, value) = row?;
            let key = K::as_bytes(&key.value()).as_ref().to_vec();
            let value = Some(V::as_bytes(&value.value()).as_ref().to_vec());
            rows.push(RowChange { table: TableHandle::name(self).to_owned(), key, value });
        }
        Ok(())
    }

    fn open<'t>(&self, transaction: &'t WriteTransaction) -> Result<PutRow<'t>, TableError> {
        let mut table = transaction.open_table(*self)?;
        Ok(Box::new(move |key, value| {
            let is_its = is_of::<K>(key) && is_of::<V>(value);
            if is_its {
                table.insert(K::from_bytes(key), V::from_bytes(value))?;
            }
            Ok(is_its)
        }))
    }
}

/// Whether bytes are a value of this type: redb panics if they are not.
fn is_of<T: Value>(bytes: &[u8]) -> bool {
    let is_text = T::type_name() != <&str>::type_name() || std::str::from_utf8(bytes).is_ok();
    is_text && T::fixed_width().is_none_or(|width| width == bytes.len())
}
