//! The head of a table: a digest over every commit since it was made. A server stores it with each commit. By the head,
//! a copy knows whether it is up to date, and a commit names the state that it is based on.

use crate::AnchorError;
use crate::table::{Change, Space, Table};
use lamassu_crypto::wrap::sha256;

const KEY: &[u8] = b"head";

/// A head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Head(pub [u8; 32]);

impl Head {
    /// The head of a table with this head after one more commit.
    pub fn after(self, changes: &[Change]) -> Head {
        let mut bytes = b"lamassu commit".to_vec();
        bytes.extend(self.0);
        for Change { space, key, value } in changes {
            bytes.push(Space::ALL.iter().position(|one| one == space).map_or(0, |at| at as u8));
            bytes.push(value.is_some().into());
            for part in [key, value.as_ref().unwrap_or(&Vec::new())] {
                bytes.extend((part.len() as u64).to_le_bytes());
                bytes.extend(part);
            }
        }
        Head(sha256(&bytes))
    }

    /// The change that stores the head.
    pub fn change(self) -> Change {
        Change { space: Space::Head, key: KEY.to_vec(), value: Some(self.0.to_vec()) }
    }

    /// The head of a table; `None`: it was never a server's.
    ///
    /// # Errors
    /// Those of the table.
    pub fn of(table: &dyn Table) -> Result<Option<Head>, AnchorError> {
        let noted = table.get(Space::Head, KEY)?;
        Ok(noted.and_then(|bytes| bytes.try_into().ok()).map(Head))
    }

    /// The change that removes the head, so that the table counts as no server's.
    pub fn none() -> Change {
        Change { space: Space::Head, key: KEY.to_vec(), value: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::MemoryTable;

    #[test]
    fn every_part_of_a_commit_counts() {
        let change = |space, key: &[u8], value: Option<&[u8]>| Change {
            space,
            key: key.to_vec(),
            value: value.map(<[u8]>::to_vec),
        };
        let commits = [
            vec![],
            vec![change(Space::Objects, b"a", Some(b"b"))],
            vec![change(Space::Open, b"a", Some(b"b"))],
            vec![change(Space::Objects, b"ab", Some(b""))],
            vec![change(Space::Objects, b"ab", None)],
            vec![change(Space::Objects, b"a", Some(b"b")), change(Space::Objects, b"a", Some(b"b"))],
        ];
        let heads: std::collections::HashSet<_> = commits.iter().map(|commit| Head([7; 32]).after(commit)).collect();
        assert_eq!(heads.len(), commits.len());
        assert!(!heads.contains(&Head([8; 32]).after(&commits[1])));
    }

    #[test]
    fn a_table_keeps_its_head() -> Result<(), AnchorError> {
        let table = MemoryTable::default();
        assert_eq!(Head::of(&table)?, None);
        table.commit(&[Head([1; 32]).change()])?;
        assert_eq!(Head::of(&table)?, Some(Head([1; 32])));
        table.commit(&[Head::none()])?;
        assert_eq!(Head::of(&table)?, None);
        Ok(())
    }
}
