//! Database rows: a name and a JSON value.

use super::Texts;
use redb::{Database, ReadableDatabase, ReadableTable, WriteTransaction};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// Writes a row.
pub fn put(write: &WriteTransaction, table: Texts, name: &str, value: &impl Serialize) -> Result<(), redb::Error> {
    let text = serde_json::to_vec(value).map_err(|_| redb::Error::Corrupted("a row that is no JSON".into()))?;
    write.open_table(table)?.insert(name, &text[..])?;
    Ok(())
}

/// Removes a row, if it exists.
pub fn remove(write: &WriteTransaction, table: Texts, name: &str) -> Result<(), redb::Error> {
    write.open_table(table)?.remove(name)?;
    Ok(())
}

fn damaged() -> redb::Error {
    redb::Error::Corrupted("a row".into())
}

/// Reads a row.
pub fn get<T: DeserializeOwned>(database: &Database, table: Texts, name: &str) -> Result<Option<T>, redb::Error> {
    let table = database.begin_read()?.open_table(table)?;
    let row = table.get(name)?;
    row.map(|row| serde_json::from_slice(row.value()).map_err(|_| damaged())).transpose()
}

/// Reads all rows.
pub fn all<T: DeserializeOwned>(database: &Database, table: Texts) -> Result<BTreeMap<String, T>, redb::Error> {
    let table = database.begin_read()?.open_table(table)?;
    let mut all = BTreeMap::new();
    for row in table.iter()? {
        let (name, row) = row?;
        all.insert(name.value().to_owned(), serde_json::from_slice(row.value()).map_err(|_| damaged())?);
    }
    Ok(all)
}
