//! Rows of an anchor. Its disk is trusted, but disks fail: what a row says is damage or has one encoding.

use lamassu_anchor::{AnchorError, Entry, Intent, Row, VaultRow};

/// The first byte says as what the rest is read.
pub fn anchor_row(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else { return };
    let again = match kind % 4 {
        0 => Row::decode(bytes).map(|row| row.encode()),
        1 => Entry::decode(bytes).map(|entry| entry.encode()),
        2 => Intent::decode(bytes).map(|intent| intent.encode()),
        _ => VaultRow::decode(bytes).map(|vault| vault.encode()),
    };
    match again {
        Ok(again) => assert_eq!(again, bytes, "one encoding"),
        Err(AnchorError::Damaged { .. } | AnchorError::Version { .. }) => {}
        Err(error) => panic!("a decoder knows nothing else: {error}"),
    }
}
