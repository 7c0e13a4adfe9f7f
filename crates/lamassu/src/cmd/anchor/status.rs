//! What an anchor knows: counted, and as a digest.

use super::{Status, Verify, anchored};
use crate::fault::{Fault, Result};
use crate::output::{self, Ui};
use crate::text;
use lamassu_anchor::AnchorError;
use lamassu_anchor::export;
use lamassu_anchor::table::{DiskTable, Space};
use lamassu_anchor::{Row, VaultRow};
use lamassu_format::header::VaultId;
use lamassu_host::Error as HostError;
use lamassu_host::Error;
use lamassu_host::anchors::ImportError;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

/// What `--json` prints.
#[derive(Serialize, Default)]
struct Told {
    /// where a server keeps it, this host's copy
    file: PathBuf,
    server: Option<String>,
    vault: String,
    revision: u64,
    objects: u64,
    files: u64,
    /// files whose newest state is not acknowledged, or was not when a process ended
    open_files: u64,
    entries: u64,
    /// changes of names that the store may lack
    intents: u64,
    /// tree records kept for files that are open
    records: u64,
    tree_degree: u32,
    session: u32,
    history: u64,
    bytes: u64,
    bytes_per_file: Option<u64>,
    /// seconds since 1970
    last_commit: Option<u64>,
    /// whether the checksums of all of it were compared, which is not done while a writer has it open
    checked: bool,
}

pub fn status(ui: &Ui, args: &Status) -> Result<()> {
    let (_, header) = anchored(ui, &args.dir)?;
    let (file, table, checked) = ui.policy.anchors.look_closely(&header.id())?;
    let meta = file.metadata().map_err(|source| HostError::Local { op: "stat", path: file.clone(), source })?;
    let modified = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let last_commit = modified.map(|since| since.as_secs());
    let server = ui.policy.anchors.server_of(&header.id())?;
    let mut told = Told { file, server, bytes: meta.len(), last_commit, checked, ..Told::default() };
    count(&table, &header.id(), &mut told).map_err(Error::from)?;
    // What an empty one takes is no file's.
    told.bytes_per_file = told.bytes.checked_div(told.files);
    if args.json { output::print_json(&told) } else { output::print(shown(&told)) }
}

fn count(table: &DiskTable, vault: &VaultId, told: &mut Told) -> Result<(), AnchorError> {
    table.visit_all(|space, _, value| {
        match space {
            Space::Vault => {
                let row = VaultRow::decode(value)?;
                if row.vault != *vault {
                    return Err(AnchorError::Foreign);
                }
                told.vault = row.vault.to_string();
                (told.revision, told.session, told.history) = (row.revision.0, row.sessions.last, row.history.0);
                told.tree_degree = 1 << row.degree_log2;
            }
            Space::Objects => {
                told.objects += 1;
                told.files += u64::from(Row::decode(value)?.file().is_some());
            }
            Space::Open => told.open_files += 1,
            Space::Entries => told.entries += 1,
            Space::Held => told.records += 1,
            Space::Intents => told.intents += 1,
            Space::Head => {}
        }
        Ok(())
    })?;
    // The row of the vault is the last that a making writes.
    if told.vault.is_empty() { Err(AnchorError::Empty) } else { Ok(()) }
}

fn shown(told: &Told) -> String {
    let time = |seconds: u64| text::time(i64::try_from(seconds).unwrap_or(i64::MAX / 2));
    let size = match told.bytes_per_file {
        Some(each) => format!("{}, {each} bytes a file", text::bytes(told.bytes)),
        None => text::bytes(told.bytes),
    };
    let file = text::printable(&told.file.display().to_string());
    let anchor = match &told.server {
        Some(server) => format!("server://{}, copied to {file}", text::printable(server)),
        None => file,
    };
    let rows = [
        ("anchor", anchor),
        ("vault", told.vault.clone()),
        ("revision", told.revision.to_string()),
        ("last commit", told.last_commit.map_or_else(|| "-".into(), time)),
        ("objects", format!("{}, {} of them files", told.objects, told.files)),
        ("entries", told.entries.to_string()),
        ("open files", format!("{}, {} tree records kept for them", told.open_files, told.records)),
        ("intents", told.intents.to_string()),
        ("tree degree", told.tree_degree.to_string()),
        ("history", format!("at least {} entries", told.history)),
        ("size", size),
        ("checksums", if told.checked { "right" } else { "not compared: another process writes it" }.to_string()),
    ];
    let mut out = String::new();
    for (name, value) in rows {
        let _ = writeln!(out, "{name:<13} {value}");
    }
    out.truncate(out.trim_end().len());
    out
}

/// What `verify --json` prints.
#[derive(Serialize)]
struct Verified {
    file: PathBuf,
    revision: u64,
    rows: u64,
    digest: String,
}

pub fn verify(ui: &Ui, args: &Verify) -> Result<()> {
    let (_, header) = anchored(ui, &args.dir)?;
    let (file, table, checked) = ui.policy.anchors.look_closely(&header.id())?;
    if !checked {
        ui.note("another process writes the anchor: the checksums of its file were not compared");
    }
    let exported = export::digest(&table).map_err(|error| Error::from(ImportError::from(error)))?;
    if exported.vault != header.id() {
        return Err(Error::from(AnchorError::Foreign).into());
    }
    if let Some(expected) = args.expect.filter(|expected| *expected != exported.digest) {
        let (expected, found) = (text::hex(&expected), text::hex(&exported.digest));
        return Err(Fault::OtherDigest { expected, found, revision: exported.revision.0 }.into());
    }
    let verified =
        Verified { file, revision: exported.revision.0, rows: exported.rows, digest: text::hex(&exported.digest) };
    match args.json {
        true => output::print_json(&verified),
        false => output::print(format_args!("{}  revision {}", verified.digest, verified.revision)),
    }
}
