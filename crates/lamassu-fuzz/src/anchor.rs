//! Rows of an anchor, and exports of one. Its disk is trusted, but disks fail: what a row says is damage or has one
//! encoding.

use lamassu_anchor::export::{self, ExportError, Exported};
use lamassu_anchor::table::{Change, Space, fuzz_log};
use lamassu_anchor::{AnchorError, EntryRow, Intent, Row, VaultRow};
use lamassu_crypto::Secret;

/// The first byte says as what the rest is read.
pub fn anchor_row(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else { return };
    let again = match kind % 4 {
        0 => Row::decode(bytes).map(|row| row.encode()),
        1 => EntryRow::decode(bytes).map(|entry| entry.encode()),
        2 => Intent::decode(bytes).map(|intent| intent.encode()),
        _ => VaultRow::decode(bytes).map(|vault| vault.encode()),
    };
    match again {
        Ok(again) => assert_eq!(again, bytes, "one encoding"),
        Err(AnchorError::Damaged { .. } | AnchorError::Version { .. }) => {}
        Err(error) => panic!("a decoder knows nothing else: {error}"),
    }
}

/// A record of the log in front of an anchor's database.
pub fn anchor_log(input: &[u8]) {
    fuzz_log(input);
}

/// Bytes of an export's head, and of its end.
const HEAD_LEN: usize = 40;

/// An export as it comes from elsewhere. A fuzzer cannot forge its code, so the form is read without; what has it is
/// written again, and is the same.
pub fn anchor_export(input: &[u8]) {
    if let Ok((exported, rows)) = parsed(input) {
        again(&exported, &rows);
    }
    // A head and an end that fit, around frames that the fuzzer makes up.
    let vault = VaultRow::decode(input.get(HEAD_LEN..).unwrap_or_default());
    if let Ok(vault) = vault {
        let mut out = Vec::new();
        let mut writer = export::Writer::begin(&mut out, &vault).expect("memory takes everything");
        writer.row(Space::Vault, b"vault", &vault.encode()).expect("a row of the vault is short");
        writer.end(&key()).expect("memory takes everything");
        let (exported, rows) = parsed(&out).expect("what was written reads");
        assert_eq!((exported.vault, exported.rows, rows.len()), (vault.vault, 1, 1));
    }
}

fn key() -> Secret<32> {
    Secret::new(&mut [3; 32])
}

fn parsed(bytes: &[u8]) -> Result<(Exported, Vec<Change>), ExportError> {
    let mut rows = Vec::new();
    let (exported, _) = export::parse(&mut &bytes[..], None, &mut |row| {
        rows.push(row);
        Ok(())
    })?;
    Ok((exported, rows))
}

/// Rows that were read are rows that can be written, and come back.
fn again(exported: &Exported, rows: &[Change]) {
    let value = |row: &Change| row.value.clone().expect("an export removes nothing");
    let vault = VaultRow::decode(&value(&rows[0])).expect("the vault's row is the first");
    let mut out = Vec::new();
    let mut writer = export::Writer::begin(&mut out, &vault).expect("memory takes everything");
    for row in rows {
        writer.row(row.space, &row.key, &value(row)).expect("it was in a frame");
    }
    let written = writer.end(&key()).expect("memory takes everything");
    let (read, same) = parsed(&out).expect("what was written reads");
    assert_eq!((read, &same[..]), (written, rows));
    assert_eq!((written.vault, written.revision, written.rows), (exported.vault, exported.revision, exported.rows));
}
