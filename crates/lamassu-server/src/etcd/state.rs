//! The state's rows in etcd.

use super::{Cluster, Op, behind};
use crate::state::State;
use crate::writing::RowChange;
use crate::{Result, ServerError, state};
use std::sync::Arc;

/// The state's name in `last/NAME` and `journal/NAME`.
const JOURNAL: &str = "state";
/// Prefix of the keys of all rows.
const ROWS: &str = "state/";
/// The key that names the authority of the state's servers.
const AUTHORITY: &str = "authority";
/// The key with the number of the move that put the state here.
const MOVED: &str = "moved";
/// Prefix of the keys of the audit log, the only table of which there may be very many rows.
const LOG: &str = "state/audit/";
/// Rows of a table that is read as a whole.
const WHOLE_MAX: i64 = 10_000;
/// Rows that are written at a time.
const AT_ONCE: usize = 5000;

/// The ranges in which a table of so many rows is read. With each page etcd counts all that the range has from there
/// on, so a large range takes time by the square of its rows. The entries' numbers begin with their lowest byte.
fn parts_of(table: &[u8], count: i64) -> Vec<(Vec<u8>, Vec<u8>)> {
    let to = behind(table);
    let cuts = (1..=u8::MAX).filter(|_| count > WHOLE_MAX).map(|byte| [table, &[byte]].concat());
    let mut parts = vec![(table.to_vec(), to.clone())];
    for cut in cuts {
        if let Some(last) = parts.last_mut() {
            last.1.clone_from(&cut);
        }
        parts.push((cut, to.clone()));
    }
    parts
}

impl Cluster {
    /// Checks that the state belongs to the servers of this authority.
    ///
    /// # Errors
    /// [`ServerError::NothingInEtcd`], [`ServerError::OtherInEtcd`], [`ServerError::Etcd`].
    pub fn check_authority(&self, authority: &str) -> Result<()> {
        match self.get(&self.key(AUTHORITY))? {
            None => Err(ServerError::NothingInEtcd { name: self.name.clone() }),
            Some(there) if there == authority.as_bytes() => Ok(()),
            Some(_) => Err(ServerError::OtherInEtcd { name: self.name.clone() }),
        }
    }

    /// Whether there is any server's state.
    ///
    /// # Errors
    /// [`ServerError::Etcd`].
    pub fn has_state(&self) -> Result<bool> {
        Ok(self.get(&self.key(AUTHORITY))?.is_some())
    }

    /// Whether a move of this number has put the state here.
    ///
    /// # Errors
    /// [`ServerError::Etcd`].
    pub fn was_moved_by(&self, number: &str) -> Result<bool> {
        Ok(self.get(&self.key(MOVED))?.is_some_and(|moved| moved == number.as_bytes()))
    }

    /// Declares the rows here to be the state of the servers of an authority, put by the move with this number.
    ///
    /// # Errors
    /// [`ServerError::Etcd`], [`ServerError::NotLeading`].
    pub fn put_authority(&self, authority: &str, number: &str) -> Result<()> {
        let ops = [(AUTHORITY, authority), (MOVED, number)];
        self.transact(JOURNAL, &ops.map(|(key, value)| Op::Put(self.key(key), value.as_bytes().to_vec())))
    }

    /// Opens the state; for the leader.
    ///
    /// # Errors
    /// [`ServerError::Etcd`], [`ServerError::NotLeading`], [`ServerError::Damaged`].
    pub fn open_state(self: &Arc<Cluster>) -> Result<State> {
        self.recover(JOURNAL)?;
        let (all, log) = (self.key(ROWS), self.key(LOG));
        let row = |key: &[u8], value| {
            let key = key.get(all.len()..).unwrap_or_default();
            let (table, key) = key.iter().position(|byte| *byte == b'/').map_or((key, &[][..]), |at| {
                let (table, key) = key.split_at(at);
                (table, key.get(1..).unwrap_or_default())
            });
            let table = String::from_utf8_lossy(table).into_owned();
            RowChange { table, key: key.to_vec(), value: Some(value) }
        };
        State::copy_of(self.name.clone().into(), self.clone(), &|put| {
            let put = &mut |key: &[u8], value| put(&row(key, value));
            let revision = self.visit_range((all.clone(), log.clone()), 0, put)?;
            let behind_log = behind(&log);
            let count = self.page(&log, &behind_log, revision)?.count;
            parts_of(&log, count).into_iter().try_for_each(|part| self.visit_range(part, revision, put).map(drop))?;
            self.visit_range((behind_log, behind(&all)), revision, put).map(drop)
        })
    }

    /// Writes all rows of a state. There must be no state yet.
    ///
    /// # Errors
    /// [`ServerError::Etcd`], [`ServerError::NotLeading`]; those of the state.
    pub fn put_state(&self, state: &State) -> Result<()> {
        // Removes what an interrupted move left.
        self.transact(JOURNAL, &[Op::DeleteAll(self.key(ROWS))])?;
        let mut ops = Vec::new();
        state.visit_rows(|row| {
            ops.push(self.op(&row));
            if ops.len() < AT_ONCE { Ok(()) } else { self.commit_in_pieces(JOURNAL, std::mem::take(&mut ops)) }
        })?;
        self.commit_in_pieces(JOURNAL, ops)
    }

    fn op(&self, RowChange { table, key, value }: &RowChange) -> Op {
        let key = [&self.key(ROWS)[..], table.as_bytes(), b"/", key].concat();
        match value {
            Some(value) => Op::Put(key, value.clone()),
            None => Op::Delete(key),
        }
    }
}

impl state::Upstream for Cluster {
    fn commit(&self, changes: &[RowChange]) -> Result<()> {
        let ops = changes.iter().map(|change| self.op(change)).collect();
        // The changes may have been made, and the copy in memory does not have them.
        Cluster::commit(self, JOURNAL, ops).inspect_err(|error| self.end_office(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit;
    use redb::{TableHandle, Value};

    #[test]
    fn the_audit_log_is_read_in_parts_that_leave_nothing_out() {
        assert_eq!(LOG, format!("{ROWS}{}/", audit::ENTRIES.name()));
        let table = b"p/state/audit/";
        let whole = vec![(table.to_vec(), behind(table))];
        assert_eq!(parts_of(table, WHOLE_MAX), whole);
        let parts = parts_of(table, WHOLE_MAX + 1);
        assert_eq!((parts.len(), &parts[0].0, &parts[255].1), (256, &whole[0].0, &whole[0].1));
        assert!(parts.is_sorted() && parts.windows(2).all(|two| two[0].1 == two[1].0));
        // Newest and oldest entries are spread over all of them.
        let part_of = |number: u64| {
            let key = [&table[..], u64::as_bytes(&number).as_ref()].concat();
            parts.iter().position(|(from, to)| (from..to).contains(&&key))
        };
        assert!((1000..1256).map(part_of).collect::<std::collections::BTreeSet<_>>().len() == 256);
    }
}
