//! Transactions of the leader, and journals of commits that are too large for one transaction. See [`super`].

use super::{Cluster, lead};
use crate::{Result, ServerError};
use etcd_client::{Compare, CompareOp, DeleteOptions, PutOptions, Txn, TxnOp, TxnOpResponse};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Operations of a transaction; etcd accepts 128.
const OPS_MAX: usize = 100;
/// Bytes of a transaction, and of a part of a journal; etcd accepts 1.5 MiB.
const BYTES_MAX: usize = 1 << 20;
/// Attempts that may still be under way when an anchor is opened.
const TRIES_MAX: usize = 8;

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Sets a value.
    Put(Vec<u8>, Vec<u8>),
    /// Removes a key.
    Delete(Vec<u8>),
    /// Removes all keys with this prefix.
    DeleteAll(Vec<u8>),
}

/// The result of an attempt.
enum Tried {
    /// Done, at this revision.
    Done(i64),
    NotLeading,
    /// A later transaction has been made.
    Overtaken,
}

impl Cluster {
    /// Makes one transaction of the leader, on what `name` says. Transactions on the same name are made one after the
    /// other.
    pub(super) fn transact(&self, name: &str, ops: &[Op]) -> Result<()> {
        let last = self.lasts.lock().entry(name.to_owned()).or_default().clone();
        let last = &mut *last.lock();
        let key = self.key(&format!("last/{name}"));
        // After a failure the revision is unknown: the attempt may still be carried out.
        let known = last.0.take();
        let before = known.map_or_else(|| self.revision_of(&key), Ok)?;
        match self.try_to(&key, before, ops)? {
            Tried::Done(revision) => {
                last.0 = Some(revision);
                Ok(())
            }
            Tried::NotLeading => Err(ServerError::NotLeading { name: self.name.clone() }),
            Tried::Overtaken => Err(self.failed("an earlier attempt was carried out after all: try again")),
        }
    }

    /// Forgets what is known of the transactions on `name`, unless one is under way: the next one asks etcd.
    pub(super) fn forget_last(&self, name: &str) {
        let mut lasts = self.lasts.lock();
        if lasts.get(name).is_some_and(|last| Arc::strong_count(last) == 1) {
            lasts.remove(name);
        }
    }

    fn try_to(&self, key: &[u8], before: i64, ops: &[Op]) -> Result<Tried> {
        let (leader, office) = (self.key(lead::LEADER), self.office.load(Ordering::Acquire));
        if office == 0 {
            return Ok(Tried::NotLeading);
        }
        // The value is unique: two processes with the same number have different terms of office.
        let number = self.transactions.fetch_add(1, Ordering::Relaxed);
        let own = [office.to_le_bytes(), number.to_le_bytes()].concat();
        let seen = self.seen.load(Ordering::Acquire);
        let answer = self.ask(|mut client| {
            let leads = Compare::create_revision(leader.clone(), CompareOp::Equal, office);
            let is_next = Compare::mod_revision(key, CompareOp::Equal, before);
            let mut all: Vec<_> = ops.iter().map(Op::to_etcd).collect();
            all.push(TxnOp::put(key, own.clone(), None));
            let look = [TxnOp::get(leader.clone(), None), TxnOp::get(key, None)];
            let txn = Txn::new().when([leads, is_next]).and_then(all).or_else(look);
            async move { client.txn(txn).await }
        })?;
        self.heard(answer.header(), seen)?;
        if answer.succeeded() {
            return Ok(Tried::Done(answer.header().map_or(0, |header| header.revision())));
        }
        let (mut leads, mut done) = (false, None);
        for found in answer.op_responses() {
            let TxnOpResponse::Get(found) = found else { continue };
            for pair in found.kvs() {
                leads |= pair.key() == leader && pair.create_revision() == office;
                // The attempt before was carried out, and its answer was lost.
                done = done.or((pair.key() == key && pair.value() == own).then(|| pair.mod_revision()));
            }
        }
        Ok(match done {
            Some(revision) => Tried::Done(revision),
            None if leads => Tried::Overtaken,
            None => Tried::NotLeading,
        })
    }

    /// 0: the key does not exist.
    fn revision_of(&self, key: &[u8]) -> Result<i64> {
        let seen = self.seen.load(Ordering::Acquire);
        let answer = self.ask(|mut client| {
            let key = key.to_vec();
            async move { client.get(key, None).await }
        })?;
        self.heard(answer.header(), seen)?;
        Ok(answer.kvs().first().map_or(0, |pair| pair.mod_revision()))
    }

    /// Makes sure that no earlier attempt without an answer is carried out after this.
    pub(super) fn end_tries(&self, name: &str) -> Result<()> {
        let mut tried = self.transact(name, &[]);
        // Only one of the unanswered attempts can overtake this one, and there are few.
        for _ in 0..TRIES_MAX {
            match tried {
                Err(ServerError::Etcd { .. }) => tried = self.transact(name, &[]),
                done => return done,
            }
        }
        tried
    }

    /// Makes changes durable and atomic; for the leader only. `journal`: what they belong to; one commit of it at a
    /// time.
    ///
    /// # Errors
    /// [`ServerError::Etcd`]: they may have been made; [`ServerError::NotLeading`]: they were not.
    pub fn commit(&self, journal: &str, ops: Vec<Op>) -> Result<()> {
        let ops = last_of_each(ops);
        if fits(&ops) {
            return if ops.is_empty() { Ok(()) } else { self.transact(journal, &ops) };
        }
        self.write_journal(journal, &ops)?;
        self.commit_in_pieces(journal, ops)?;
        self.transact(journal, &[Op::DeleteAll(self.journal(journal))])
    }

    /// Writes changes to a journal, from which they can be carried out. They are durable when this returns.
    ///
    /// # Errors
    /// As [`Cluster::commit`].
    pub fn write_journal(&self, journal: &str, ops: &[Op]) -> Result<()> {
        let (at, packed) = (self.journal(journal), pack(ops));
        // A journal that was begun and never became whole would mix with a shorter one. A whole one is not here: after
        // a commit in doubt, nothing is committed before [`Cluster::recover`].
        self.transact(journal, &[Op::DeleteAll(at.clone())])?;
        let parts = packed.chunks(BYTES_MAX);
        let whole = Op::Put([&at[..], WHOLE].concat(), (parts.len() as u64).to_le_bytes().to_vec());
        for (number, part) in parts.enumerate() {
            self.transact(journal, &[Op::Put(self.part_of(journal, number), part.to_vec())])?;
        }
        self.transact(journal, &[whole])
    }

    /// For tests: an unfinished journal.
    ///
    /// # Errors
    /// As [`Cluster::commit`].
    #[doc(hidden)]
    pub fn write_part_of_journal(&self, journal: &str, number: usize, part: &[u8]) -> Result<()> {
        self.transact(journal, &[Op::Put(self.part_of(journal, number), part.to_vec())])
    }

    /// Makes changes that no reader sees yet. Some of them may be made if this fails.
    ///
    /// # Errors
    /// As [`Cluster::commit`].
    pub fn commit_in_pieces(&self, name: &str, ops: Vec<Op>) -> Result<()> {
        let mut piece: Vec<Op> = Vec::new();
        for op in last_of_each(ops) {
            piece.push(op);
            if !fits(&piece) {
                let last = piece.pop();
                self.transact(name, &piece)?;
                piece.clear();
                piece.extend(last);
            }
        }
        if piece.is_empty() { Ok(()) } else { self.transact(name, &piece) }
    }

    /// Carries out a complete journal that an earlier leader left, if there is one.
    ///
    /// # Errors
    /// As [`Cluster::commit`]; [`ServerError::Etcd`] also if the journal is invalid.
    pub fn recover(&self, journal: &str) -> Result<()> {
        self.end_tries(journal)?;
        let at = self.journal(journal);
        let (mut packed, mut parts, mut whole) = (Vec::new(), 0u64, None);
        self.visit(&at, |key, value| {
            match key {
                WHOLE => whole = Some(value),
                _ => {
                    packed.extend(value);
                    parts += 1;
                }
            }
            Ok(())
        })?;
        if parts == 0 && whole.is_none() {
            return Ok(());
        }
        if let Some(whole) = whole {
            let ops = (whole == parts.to_le_bytes()).then(|| unpack(&packed)).flatten();
            let ops = ops.ok_or_else(|| self.failed(format!("the journal {journal} is invalid")))?;
            self.commit_in_pieces(journal, ops)?;
        }
        self.transact(journal, &[Op::DeleteAll(at)])
    }

    fn part_of(&self, journal: &str, number: usize) -> Vec<u8> {
        [&self.journal(journal)[..], format!("{number:08}").as_bytes()].concat()
    }

    pub(super) fn journal(&self, name: &str) -> Vec<u8> {
        self.key(&format!("journal/{name}/"))
    }
}

/// The key in a journal that makes it durable. It sorts after the keys of the parts.
const WHOLE: &[u8] = b"whole";

impl Op {
    fn to_etcd(&self) -> TxnOp {
        match self {
            Op::Put(key, value) => TxnOp::put(key.clone(), value.clone(), None::<PutOptions>),
            Op::Delete(key) => TxnOp::delete(key.clone(), None),
            Op::DeleteAll(prefix) => TxnOp::delete(prefix.clone(), Some(DeleteOptions::new().with_prefix())),
        }
    }

    fn parts(&self) -> (u8, &[u8], &[u8]) {
        match self {
            Op::Put(key, value) => (0, key, value),
            Op::Delete(key) => (1, key, &[]),
            Op::DeleteAll(prefix) => (2, prefix, &[]),
        }
    }
}

fn fits(ops: &[Op]) -> bool {
    let bytes: usize = ops.iter().map(|op| op.parts().1.len() + op.parts().2.len() + 32).sum();
    // A single operation is tried whatever its size.
    ops.len() <= 1 || (ops.len() <= OPS_MAX && bytes <= BYTES_MAX)
}

/// The last change of each key: etcd does not accept two in one transaction.
fn last_of_each(mut ops: Vec<Op>) -> Vec<Op> {
    let mut seen = HashSet::new();
    ops.reverse();
    ops.retain(|op| seen.insert(op.parts().1.to_vec()));
    ops.reverse();
    ops
}

/// For each change: its kind, the lengths of its key and value (u32, little-endian), the key, the value.
fn pack(ops: &[Op]) -> Vec<u8> {
    let mut packed = Vec::new();
    for (kind, key, value) in ops.iter().map(Op::parts) {
        packed.push(kind);
        for part in [key, value] {
            packed.extend(u32::try_from(part.len()).unwrap_or(u32::MAX).to_le_bytes());
        }
        packed.extend(key);
        packed.extend(value);
    }
    packed
}

/// `None`: the bytes are not a packed list.
fn unpack(mut packed: &[u8]) -> Option<Vec<Op>> {
    let mut ops = Vec::new();
    while let Some((kind, rest)) = packed.split_first() {
        let (key, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_first_chunk()?;
        let [key, value] = [key, value].map(|len| u32::from_le_bytes(*len) as usize);
        let (key, rest) = rest.split_at_checked(key)?;
        let (value, rest) = rest.split_at_checked(value)?;
        ops.push(match kind {
            0 => Op::Put(key.to_vec(), value.to_vec()),
            1 if value.is_empty() => Op::Delete(key.to_vec()),
            2 if value.is_empty() => Op::DeleteAll(key.to_vec()),
            _ => return None,
        });
        packed = rest;
    }
    Some(ops)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_and_nothing_else_panics() {
        let ops = vec![
            Op::Put(b"key".to_vec(), vec![0xff; 300]),
            Op::Put(Vec::new(), Vec::new()),
            Op::Delete(b"gone".to_vec()),
            Op::DeleteAll(b"all/".to_vec()),
        ];
        let packed = pack(&ops);
        assert_eq!(unpack(&packed), Some(ops));
        assert_eq!(unpack(&[]), Some(Vec::new()));
        for cut in 1..packed.len() {
            let (begin, rest) = packed.split_at(cut);
            // At the end of an operation it is another journal, elsewhere none.
            assert!(unpack(begin).is_none_or(|some| pack(&some) == begin), "cut at {cut}");
            let _ = unpack(rest);
        }
        for at in 0..packed.len() {
            for bit in 0..8 {
                let mut changed = packed.clone();
                changed[at] ^= 1 << bit;
                assert!(unpack(&changed).is_none_or(|some| pack(&some) == changed), "bit {bit} of {at}");
            }
        }
    }

    #[test]
    fn the_last_change_of_each_key_counts() {
        let put = |key: &str, value: &str| Op::Put(key.into(), value.into());
        let ops = vec![put("a", "1"), put("b", "1"), put("a", "2"), Op::Delete(b"b".to_vec())];
        assert_eq!(last_of_each(ops), [put("a", "2"), Op::Delete(b"b".to_vec())]);
    }
}
