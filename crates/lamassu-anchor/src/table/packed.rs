//! Encoding of changes: in the log of a table's file, and between hosts and a server.
//!
//! ```text
//! table << 1 | whether there is a value   varint
//! length of the key, key                  varint, bytes
//! length of the value, value              varint, bytes; absent: the row is removed
//! ```

use super::{Change, Space};
use crate::codec::{Reader, put};

/// Longest key or value that is read.
const PART_MAX: usize = 32 << 10;

fn put_change(out: &mut Vec<u8>, change: &Change) {
    let space = Space::ALL.iter().position(|space| *space == change.space).unwrap_or_default();
    put(out, (space as u64) << 1 | u64::from(change.value.is_some()));
    for part in std::iter::once(&change.key).chain(&change.value) {
        put(out, part.len() as u64);
        out.extend(part);
    }
}

fn change(reader: &mut Reader<'_>) -> Option<Change> {
    let number = reader.number()?;
    let space = *Space::ALL.get(usize::try_from(number >> 1).ok()?)?;
    let key = reader.text(PART_MAX)?.into_vec();
    let value = if number & 1 == 1 { Some(reader.text(PART_MAX)?.into_vec()) } else { None };
    Some(Change { space, key, value })
}

/// Encodes changes.
pub fn pack<'a>(changes: impl IntoIterator<Item = &'a Change>) -> Vec<u8> {
    let mut out = Vec::new();
    changes.into_iter().for_each(|change| put_change(&mut out, change));
    out
}

/// Decodes changes, at most `count_max`. `None`: the bytes are invalid, or have more changes. Allocates memory only for
/// what was read.
pub fn unpack(bytes: &[u8], count_max: usize) -> Option<Vec<Change>> {
    let (mut reader, mut changes) = (Reader(bytes), Vec::new());
    while !reader.0.is_empty() {
        if changes.len() == count_max {
            return None;
        }
        changes.push(change(&mut reader)?);
    }
    Some(changes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_change() -> impl Strategy<Value = Change> {
        let part = || prop::collection::vec(any::<u8>(), 0..200);
        let space = (0..Space::ALL.len()).prop_map(|at| Space::ALL[at]);
        (space, part(), prop::option::of(part())).prop_map(|(space, key, value)| Change { space, key, value })
    }

    proptest! {
        #[test]
        fn changes_come_back(changes in prop::collection::vec(any_change(), 0..20), cut in any::<prop::sample::Index>()) {
            let packed = pack(&changes);
            prop_assert_eq!(unpack(&packed, changes.len()), Some(changes.clone()));
            if let Some(fewer) = changes.len().checked_sub(1) {
                prop_assert_eq!(unpack(&packed, fewer), None);
                // What is cut off is a prefix of the changes, or nothing.
                let cut = unpack(&packed[..cut.index(packed.len())], changes.len());
                prop_assert!(cut.is_none_or(|some| changes.starts_with(&some)));
            }
        }

        #[test]
        fn there_is_one_form(bytes: Vec<u8>) {
            if let Some(changes) = unpack(&bytes, usize::MAX) {
                prop_assert_eq!(pack(&changes), bytes);
            }
        }
    }
}
