//! What an anchor of many files costs: bytes a file, and the time to open it.
//!
//!     cargo run --release -p lamassu-anchor --example scale -- 1000000

use lamassu_anchor::row::{Content, FileRow, Sealed};
use lamassu_anchor::table::{DiskTable, Table};
use lamassu_anchor::{Anchor, Digest, EntryPlace, ObjectId, Row, Token, TokenKey, VaultRow};
use lamassu_crypto::wrap::sha256;
use lamassu_format::header::VaultId;
use std::sync::Arc;
use std::time::Instant;

/// Files of a directory.
const A_DIRECTORY: u64 = 100;
/// Files between two commits.
const A_COMMIT: u64 = 20_000;
const VAULT: VaultId = VaultId([1; 16]);

fn row(content: Content) -> Row {
    Row { mode: 0o644, uid: 1000, gid: 1000, links: 1, content, attributes: Sealed::Nothing }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files: u64 = std::env::args().nth(1).unwrap_or_else(|| "100000".into()).parse()?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("anchor");
    let vault = VaultRow::new(VAULT, TokenKey::random()?);
    let directory = |parent, name| Content::Dir { record: Sealed::Is(Digest([1; 32])), parent, name };
    let root = row(directory(ObjectId::ROOT, Token([0; 16])));
    let anchor = Anchor::create(Arc::new(DiskTable::create(&path)?), vault, root)?;
    let begun = Instant::now();
    let mut parent = ObjectId::ROOT;
    for n in 0..files {
        if n % A_DIRECTORY == 0 {
            parent = anchor.vault().next_object;
            let name = anchor.token(ObjectId::ROOT, &n.to_le_bytes());
            anchor.make(EntryPlace { dir: ObjectId::ROOT, name }, row(directory(ObjectId::ROOT, name)))?;
        }
        let root = Digest(sha256(&n.to_le_bytes()));
        let file = FileRow { root, size: n * 1000, ..FileRow::default() };
        let name = anchor.token(parent, &n.to_le_bytes());
        anchor.make(EntryPlace { dir: parent, name }, row(Content::File(file)))?;
        if n % A_COMMIT == 0 {
            anchor.commit(anchor.mark())?;
        }
    }
    anchor.commit(anchor.mark())?;
    println!("made: {files} files, {:.0} a second", files as f64 / begun.elapsed().as_secs_f64());
    drop(anchor);
    let len = std::fs::metadata(&path)?.len();
    println!("size: {:.1} MiB, {} bytes a file", len as f64 / 1048576.0, len / files);
    let begun = Instant::now();
    let table = Arc::new(DiskTable::open(&path)?);
    let anchor = Anchor::open(table.clone(), &VAULT)?;
    let open = anchor.open_objects()?.len();
    println!("open: {:.3} s, {open} files to recover", begun.elapsed().as_secs_f64());
    let begun = Instant::now();
    table.verify()?;
    println!("checksums: {:.3} s", begun.elapsed().as_secs_f64());
    let begun = Instant::now();
    let looked = 100_000.min(files);
    for n in 0..looked {
        anchor.row(ObjectId(2 + n * 7919 % files))?;
    }
    println!("rows: {:.1} us each, at random", begun.elapsed().as_secs_f64() * 1e6 / looked as f64);
    let begun = Instant::now();
    let commits = 200;
    for n in 0..commits {
        anchor.change(ObjectId(3 + n), |row| row.mode = 0o600)?;
        anchor.commit(anchor.mark())?;
    }
    println!("commit of one row: {:.2} ms", begun.elapsed().as_secs_f64() * 1e3 / commits as f64);
    Ok(())
}
