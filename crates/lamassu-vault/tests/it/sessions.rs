//! Sessions against a store that keeps what pages were like before they settled: what an interruption leaves is
//! believed of interrupted sessions alone, and what it took is told.

use crate::common;

mod failed;
use lamassu_format::header::VaultId;

use common::local::Lab;
use common::*;
use lamassu_format::name::{SESSIONS, SESSIONS_NEW, SESSIONS_RECORD};
use lamassu_vault::*;
use std::os::unix::fs::{FileExt, symlink};
use std::sync::Arc;

const BLOCK: usize = 4096;
/// Blocks of one page, and the bytes of its segment, with eight reserved slots.
const PAGE_BLOCKS: usize = 116;
const SEGMENT: u64 = (1 + PAGE_BLOCKS as u64) * BLOCK as u64;

impl Lab {
    /// What the store holds of a file.
    fn bytes(&self, path: &str) -> Vec<u8> {
        std::fs::read(self.stored(path)).unwrap()
    }

    fn zero(&self, path: &str, from: u64, len: usize) {
        self.put_back(path, from, &vec![0; len]);
    }

    fn put_back(&self, path: &str, from: u64, bytes: &[u8]) {
        let file = std::fs::File::options().write(true).open(self.stored(path)).unwrap();
        file.write_all_at(bytes, from).unwrap();
    }

    fn kinds(&self, repair: bool) -> Vec<(String, Option<u64>, bool)> {
        let report = match repair {
            true => self.open().check(&[], true, &Quiet),
            false => self.recipe.open_read_only(&self.backend).unwrap().check(&[], false, &Quiet),
        };
        let problems = report.unwrap().problems;
        problems.into_iter().map(|p| (p.kind, p.block.or(p.page), p.undone)).collect()
    }
}

fn content(blocks: usize, salt: u8) -> Vec<u8> {
    (0..blocks * BLOCK).map(|i| (i / BLOCK) as u8 ^ salt | 1).collect()
}

/// Writes a file whole, and has it synced, but not settled.
fn put_synced(v: &Vault, path: &str, data: &[u8]) {
    let handle = match v.find(path) {
        Ok(e) => v.open_file(e.attr.ino, RW).unwrap(),
        Err(_) => v.new_file(path).1,
    };
    v.write(handle, 0, data).unwrap();
    v.fsync(handle, false).unwrap();
    v.release(handle).unwrap();
}

/// Ends as a killed process does: nothing is settled, no session is closed.
fn kill(v: Vault) {
    std::mem::forget(v);
}

/// As [`kill`], for a vault that is opened again: the writer's lock is given back.
fn interrupt(lab: Lab, v: Vault) -> Lab {
    kill(v);
    // A copy of the directory holds the same, and no lock.
    let dir = tempfile::tempdir().unwrap();
    let copied = std::process::Command::new("cp").arg("-a").arg(lab.dir.path().join(".")).arg(dir.path()).status();
    assert!(copied.unwrap().success());
    let backend = Arc::new(lamassu_store::backend::LocalBackend::open(dir.path()).unwrap());
    Lab { dir, backend, recipe: lab.recipe }
}

fn read_blocks(v: &Vault, path: &str) -> Vec<Option<Vec<u8>>> {
    let e = v.find(path).unwrap();
    let handle = v.open_file(e.attr.ino, RO).unwrap();
    let blocks = (e.attr.size as usize).div_ceil(BLOCK);
    let found = (0..blocks).map(|b| {
        let mut block = vec![0; BLOCK];
        v.read(handle, (b * BLOCK) as u64, &mut block).ok().map(|_| block)
    });
    let found = found.collect();
    v.release(handle).unwrap();
    found
}

#[test]
fn blocks_zeroed_under_a_page_from_before_it_settled_are_errors() {
    let lab = Lab::new();
    let v = lab.open();
    let data = content(8, 0);
    put_synced(&v, "f", &data);
    let pending = lab.bytes("f")[..BLOCK].to_vec();
    v.close().unwrap();
    assert_ne!(lab.bytes("f")[..BLOCK], pending, "it has settled");
    lab.open().clean();
    lab.put_back("f", 0, &pending);
    lab.zero("f", 3 * BLOCK as u64, 2 * BLOCK);
    let v = lab.open();
    let read = read_blocks(&v, "f");
    for (b, block) in read.iter().enumerate() {
        let expected = (b != 2 && b != 3).then(|| data[b * BLOCK..(b + 1) * BLOCK].to_vec());
        assert_eq!(*block, expected, "block {b}: an older page is as good as the newest, zeros are not");
    }
    // Nor does a writer that comes by make holes of them.
    put_synced(&v, "other", b"x");
    v.close().unwrap();
    assert_eq!(lab.kinds(true), [("block-hash".into(), Some(2), false)], "a run of two");
    assert_eq!(read_blocks(&lab.open(), "f")[2], None);
}

#[test]
fn overwritten_blocks_cannot_be_put_back_under_a_page_from_before_it_settled() {
    let lab = Lab::new();
    let v = lab.open();
    put_synced(&v, "f", &content(8, 0));
    v.close().unwrap();
    let old = lab.bytes("f");
    let v = lab.open();
    put_synced(&v, "f", &content(4, 0x40));
    let replacing = lab.bytes("f")[..BLOCK].to_vec();
    v.close().unwrap();
    lab.put_back("f", 0, &replacing);
    lab.put_back("f", 2 * BLOCK as u64, &old[2 * BLOCK..3 * BLOCK]);
    let read = read_blocks(&lab.open(), "f");
    assert_eq!(read[1], None, "no choice between old and new, block by block");
    assert_eq!(read[0].as_deref(), Some(&content(4, 0x40)[..BLOCK]));
}

#[test]
fn an_older_first_page_makes_no_holes_of_pages_that_are_gone() {
    let lab = Lab::new();
    let v = lab.open();
    // Page 0 as it is when a second page exists, and nothing of that is known durable.
    let data = content(3 * PAGE_BLOCKS, 0);
    put_synced(&v, "f", &data);
    let early = lab.bytes("f")[..BLOCK].to_vec();
    v.close().unwrap();
    lab.put_back("f", 0, &early);
    lab.zero("f", SEGMENT, BLOCK);
    let read = read_blocks(&lab.open(), "f");
    assert!(read[PAGE_BLOCKS..2 * PAGE_BLOCKS].iter().all(Option::is_none), "464 KiB of zeros were never there");
    assert_eq!(read[0].as_deref(), Some(&data[..BLOCK]));
    assert!(lab.kinds(false).contains(&("page-missing".into(), Some(1), false)));
}

/// Pages from when the file ended in them know nothing of the blocks that came later.
#[test]
fn an_older_page_makes_no_holes_of_what_came_later() {
    let lab = Lab::new();
    let v = lab.open();
    let data = content(5 * PAGE_BLOCKS + 3, 0);
    put_synced(&v, "f", &data[..5 * BLOCK]);
    let (mut kept, mut from) = (Vec::new(), 0);
    for (blocks, pages) in
        [(5, &[0][..]), (PAGE_BLOCKS + 7, &[1]), (3 * PAGE_BLOCKS + 2, &[3]), (data.len() / BLOCK, &[])]
    {
        let handle = v.open_file(v.ino("f"), RW).unwrap();
        v.write(handle, from as u64, &data[from..blocks * BLOCK]).unwrap();
        v.fsync(handle, false).unwrap();
        v.release(handle).unwrap();
        from = blocks * BLOCK;
        let bytes = lab.bytes("f");
        kept.extend(pages.iter().map(|g| (*g, bytes[*g * SEGMENT as usize..][..BLOCK].to_vec())));
    }
    v.close().unwrap();
    lab.open().clean();
    for (g, page) in kept {
        let newest = lab.bytes("f")[g * SEGMENT as usize..][..BLOCK].to_vec();
        lab.put_back("f", g as u64 * SEGMENT, &page);
        for (b, block) in read_blocks(&lab.open(), "f").iter().enumerate() {
            let expected = (b / PAGE_BLOCKS != g).then(|| data[b * BLOCK..(b + 1) * BLOCK].to_vec());
            assert_eq!(*block, expected, "page {g}, block {b}");
        }
        assert!(lab.kinds(false).contains(&("page-stale".into(), Some(g as u64), false)), "page {g}");
        lab.put_back("f", g as u64 * SEGMENT, &newest);
        assert_eq!(lab.kinds(false), []);
    }
}

#[test]
fn an_older_floor_makes_no_holes_of_settled_pages_after_a_later_crash() {
    // A session that appends within the last page, and one that goes past it.
    for blocks in [6 * PAGE_BLOCKS + 2, 7 * PAGE_BLOCKS + 9] {
        let lab = Lab::new();
        let v = lab.open();
        let data = content(blocks, 0);
        put_synced(&v, "f", &data[..2 * PAGE_BLOCKS * BLOCK]);
        v.close().unwrap();
        let early = lab.bytes("f")[..BLOCK].to_vec();
        let v = lab.open();
        put_synced(&v, "f", &data[..(6 * PAGE_BLOCKS + 1) * BLOCK]);
        v.close().unwrap();
        let v = lab.open();
        let handle = v.open_file(v.ino("f"), RW).unwrap();
        let from = (6 * PAGE_BLOCKS + 1) * BLOCK;
        v.write(handle, from as u64, &data[from..]).unwrap();
        v.fsync(handle, false).unwrap();
        let lab = interrupt(lab, v);
        assert_eq!(lab.kinds(false), [], "{blocks} blocks");
        lab.put_back("f", 0, &early);
        lab.zero("f", 4 * SEGMENT, BLOCK);
        assert_eq!(lab.kinds(false), [("page-missing".into(), Some(4), false)], "{blocks} blocks");
        assert_eq!(read_blocks(&lab.open(), "f")[4 * PAGE_BLOCKS], None);
    }
}

/// Once every page of it is there, none may go.
#[test]
fn a_file_that_was_sparse_once_does_not_stay_so() {
    let data = content(4 * PAGE_BLOCKS, 0);
    for ways in ["grown first", "backwards", "a hole stays", "again"] {
        let lab = Lab::new();
        let v = lab.open();
        let handle = v.new_file("f").1;
        let write = |v: &Vault, pages: std::ops::Range<usize>| {
            let bytes = pages.start * PAGE_BLOCKS * BLOCK..pages.end * PAGE_BLOCKS * BLOCK;
            v.write(handle, bytes.start as u64, &data[bytes]).unwrap();
            v.fsync(handle, false).unwrap();
        };
        if ways == "grown first" {
            let attr = SetAttr { size: Some(data.len() as u64), ..SetAttr::default() };
            v.setattr(v.ino("f"), Some(handle), &attr).unwrap();
            v.fsync(handle, false).unwrap();
        }
        write(&v, 3..4);
        v.sync_all().unwrap();
        write(&v, 0..if ways == "a hole stays" { 1 } else { 3 });
        if ways == "again" {
            v.sync_all().unwrap();
            let attr = SetAttr { size: Some((PAGE_BLOCKS * BLOCK) as u64), ..SetAttr::default() };
            v.setattr(v.ino("f"), Some(handle), &attr).unwrap();
            v.write(handle, data.len() as u64, b"behind a hole").unwrap();
        }
        v.release(handle).unwrap();
        v.close().unwrap();
        lab.open().clean();
        lab.zero("f", SEGMENT, BLOCK);
        let is_found = lab.kinds(false) == [("page-missing".into(), Some(1), false)];
        assert_eq!(is_found, ["grown first", "backwards"].contains(&ways), "{ways}");
    }
}

/// Where the file grew by a hole, too; and a crash of a later session is no excuse for a page that was settled before.
#[test]
fn an_older_page_stays_stale_after_a_later_crash() {
    let lab = Lab::new();
    let v = lab.open();
    put_synced(&v, "f", &content(PAGE_BLOCKS + 7, 0));
    let early = lab.bytes("f")[SEGMENT as usize..][..BLOCK].to_vec();
    let handle = v.open_file(v.ino("f"), RW).unwrap();
    let size = (3 * PAGE_BLOCKS * BLOCK) as u64;
    v.setattr(v.ino("f"), Some(handle), &SetAttr { size: Some(size), ..SetAttr::default() }).unwrap();
    v.release(handle).unwrap();
    v.close().unwrap();
    lab.open().clean();
    let v = lab.open();
    let handle = v.open_file(v.ino("f"), RW).unwrap();
    v.write(handle, size, &[7; BLOCK]).unwrap();
    v.fsync(handle, false).unwrap();
    let lab = interrupt(lab, v);
    assert_eq!(lab.kinds(false), []);
    let newest = lab.bytes("f")[SEGMENT as usize..][..BLOCK].to_vec();
    lab.put_back("f", SEGMENT, &early);
    assert_eq!(lab.kinds(false), [("page-stale".into(), Some(1), false)]);
    // Of the interrupted session itself the last page that the floor does not cover may be from before it grew: that is
    // told.
    lab.put_back("f", SEGMENT, &newest);
    let v = lab.open();
    put_synced(&v, "g", &content(PAGE_BLOCKS + 7, 0));
    let early = lab.bytes("g")[SEGMENT as usize..][..BLOCK].to_vec();
    put_synced(&v, "g", &content(3 * PAGE_BLOCKS, 0));
    let lab = interrupt(lab, v);
    lab.put_back("g", SEGMENT, &early);
    let first = PAGE_BLOCKS as u64 + PAGE_BLOCKS as u64 + 7 - PAGE_BLOCKS as u64;
    assert_eq!(lab.kinds(false), [("unwritten".into(), Some(first), true)]);
    assert_eq!(lab.kinds(true), [("unwritten".into(), Some(first), true)]);
    assert_eq!(lab.kinds(false), []);
}

#[test]
fn a_shrink_of_a_closed_session_is_not_shown_again() {
    let lab = Lab::new();
    let v = lab.open();
    put_synced(&v, "f", &content(3 * PAGE_BLOCKS, 0));
    v.close().unwrap();
    let v = lab.open();
    let ino = v.ino("f");
    let handle = v.open_file(ino, RW).unwrap();
    v.setattr(ino, Some(handle), &SetAttr { size: Some(10 * BLOCK as u64), ..SetAttr::default() }).unwrap();
    let cut = lab.bytes("f")[..BLOCK].to_vec();
    v.write(handle, 0, &content(3 * PAGE_BLOCKS, 0x40)).unwrap();
    v.release(handle).unwrap();
    v.close().unwrap();
    lab.open().clean();
    lab.put_back("f", 0, &cut);
    assert_eq!(lab.kinds(false)[0], ("page-stale".into(), Some(0), false));
    assert_eq!(read_blocks(&lab.open(), "f")[0], None);
}

/// Cuts a file of three pages in the middle of a session, and returns its page 0 as it was then.
fn shorten(lab: &Lab, v: &Vault, path: &str, blocks: usize) -> Vec<u8> {
    let handle = v.open_file(v.ino(path), RW).unwrap();
    v.setattr(v.ino(path), Some(handle), &SetAttr { size: Some((blocks * BLOCK) as u64), ..SetAttr::default() })
        .unwrap();
    v.release(handle).unwrap();
    lab.bytes(path)[..BLOCK].to_vec()
}

#[test]
fn a_shrink_that_was_completed_is_not_shown_again_after_a_crash() {
    for blocks in [10, PAGE_BLOCKS + 10] {
        let lab = Lab::new();
        let v = lab.open();
        let data = content(3 * PAGE_BLOCKS, 0);
        put_synced(&v, "f", &data);
        v.close().unwrap();
        let v = lab.open();
        let cut = shorten(&lab, &v, "f", blocks);
        put_synced(&v, "f", &data);
        let lab = interrupt(lab, v);
        assert_eq!(lab.kinds(false), [], "everything synced is there");
        lab.put_back("f", 0, &cut);
        let before = lab.bytes("f");
        for repair in [false, true] {
            assert!(lab.kinds(repair).contains(&("page-stale".into(), Some(0), false)), "{blocks} blocks");
        }
        assert_eq!(lab.bytes("f").len(), before.len(), "a repair cuts nothing off");
        let read = read_blocks(&lab.open(), "f");
        assert_eq!(read.len(), 3 * PAGE_BLOCKS);
        assert_eq!(read[2 * PAGE_BLOCKS].as_deref(), Some(&data[2 * PAGE_BLOCKS * BLOCK..][..BLOCK]));
    }
}

#[test]
fn a_shrink_that_was_interrupted_is_told() {
    for blocks in [10, PAGE_BLOCKS + 10] {
        let lab = Lab::new();
        let v = lab.open();
        put_synced(&v, "f", &content(3 * PAGE_BLOCKS, 0));
        v.close().unwrap();
        let v = lab.open();
        shorten(&lab, &v, "f", blocks);
        let lab = interrupt(lab, v);
        let told = [("shortened".to_owned(), Some((blocks / PAGE_BLOCKS) as u64), true)];
        assert_eq!(lab.kinds(false), told);
        assert_eq!(lab.kinds(true), told);
        assert_eq!(lab.kinds(false), []);
        assert_eq!(lab.open().get("f"), content(3 * PAGE_BLOCKS, 0)[..blocks * BLOCK]);
    }
}

#[test]
fn what_a_crash_took_is_told_once_it_reads_as_a_hole() {
    let lab = Lab::new();
    let v = lab.open();
    let data = content(8, 0);
    put_synced(&v, "f", &data);
    put_synced(&v, "g", &content(3 * PAGE_BLOCKS, 0));
    let lab = interrupt(lab, v);
    assert_eq!(lab.kinds(false), [], "everything synced is there");
    lab.zero("f", 3 * BLOCK as u64, BLOCK);
    lab.zero("g", SEGMENT, BLOCK);
    let kinds = lab.kinds(false);
    assert!(kinds.contains(&("unwritten".into(), Some(2), true)), "{kinds:?}");
    assert!(kinds.contains(&("unwritten".into(), Some(1), true)), "{kinds:?}");
    assert_eq!(kinds.len(), 2, "{kinds:?}");
    assert_eq!(read_blocks(&lab.open(), "f")[2], Some(vec![0; BLOCK]));
}

#[test]
fn what_a_crash_left_old_is_told() {
    let lab = Lab::new();
    let v = lab.open();
    put_synced(&v, "f", &content(8, 0));
    v.close().unwrap();
    let old = lab.bytes("f");
    let v = lab.open();
    put_synced(&v, "f", &content(4, 0x40));
    let lab = interrupt(lab, v);
    lab.put_back("f", 2 * BLOCK as u64, &old[2 * BLOCK..3 * BLOCK]);
    assert_eq!(lab.kinds(false), [("reverted".into(), Some(1), true)]);
    assert_eq!(read_blocks(&lab.open(), "f")[1].as_deref(), Some(&content(8, 0)[BLOCK..2 * BLOCK]));
}

#[test]
fn a_repair_of_the_whole_vault_ends_what_was_interrupted() {
    let lab = Lab::new();
    let v = lab.open();
    put_synced(&v, "f", &content(8, 0));
    let lab = interrupt(lab, v);
    let pending = lab.bytes("f")[..BLOCK].to_vec();
    assert_eq!(lab.kinds(true), []);
    lab.put_back("f", 0, &pending);
    lab.zero("f", 3 * BLOCK as u64, BLOCK);
    assert_eq!(lab.kinds(false), [("block-hash".into(), Some(2), false)]);
}

/// Who damages the last page of a file while that is written does not keep the session open, nor the choices of one
/// that was interrupted.
#[test]
fn a_damaged_page_does_not_keep_a_session_open() {
    for freezes in [false, true] {
        let lab = Lab::new();
        let v = lab.open();
        put_synced(&v, "damaged", &content(4 * PAGE_BLOCKS + 5, 0));
        v.close().unwrap();
        let sound = lab.bytes("damaged");
        let v = lab.open();
        put_synced(&v, "f", &content(8, 0));
        let pending = lab.bytes("f")[..BLOCK].to_vec();
        lab.put_back("damaged", 4 * SEGMENT, &[1; 100]);
        let stored = std::fs::File::options().write(true).open(lab.stored("damaged")).unwrap();
        stored.set_len(sound.len() as u64 + 4096).unwrap();
        put_synced(&v, "damaged", &content(1, 0x40));
        let lab = match freezes {
            true => {
                v.freeze().unwrap();
                interrupt(lab, v)
            }
            false => {
                v.close().unwrap();
                lab
            }
        };
        lab.put_back("damaged", 4 * SEGMENT, &sound[4 * SEGMENT as usize..][..BLOCK]);
        lab.put_back("f", 0, &pending);
        lab.zero("f", 3 * BLOCK as u64, BLOCK);
        let kinds = lab.kinds(false);
        assert!(kinds.contains(&("block-hash".into(), Some(2), false)), "frozen: {freezes}, {kinds:?}");
        assert!(kinds.iter().all(|(_, _, undone)| !undone), "frozen: {freezes}, {kinds:?}");
    }
}

#[test]
fn a_session_ends_with_a_freeze_too() {
    let lab = Lab::new();
    let v = lab.open();
    put_synced(&v, "f", &content(8, 0));
    let pending = lab.bytes("f")[..BLOCK].to_vec();
    v.freeze().unwrap();
    let record = std::fs::read_link(lab.dir.path().join(SESSIONS).join(SESSIONS_RECORD)).unwrap();
    v.thaw().unwrap();
    put_synced(&v, "g", &content(8, 0));
    let lab = interrupt(lab, v);
    assert_ne!(
        record,
        std::fs::read_link(lab.dir.path().join(SESSIONS).join(SESSIONS_RECORD)).unwrap(),
        "another began"
    );
    lab.put_back("f", 0, &pending);
    lab.zero("f", 3 * BLOCK as u64, BLOCK);
    lab.zero("g", 3 * BLOCK as u64, BLOCK);
    let kinds = lab.kinds(false);
    assert!(kinds.contains(&("block-hash".into(), Some(2), false)), "{kinds:?}");
    assert!(kinds.contains(&("unwritten".into(), Some(2), true)), "{kinds:?}");
}

#[test]
fn a_mount_that_changes_nothing_begins_no_session() {
    let lab = Lab::new();
    let v = lab.open();
    v.put("f", b"content");
    v.close().unwrap();
    let record = || std::fs::read_link(lab.dir.path().join(SESSIONS).join(SESSIONS_RECORD)).unwrap();
    let before = record();
    let v = lab.open();
    assert_eq!(v.get("f"), b"content");
    v.close().unwrap();
    assert_eq!(record(), before);
}

#[test]
fn an_older_record_of_sessions_is_told() {
    let lab = Lab::new();
    let place = lab.dir.path().join(SESSIONS).join(SESSIONS_RECORD);
    let older = std::fs::read_link(&place).unwrap();
    let v = lab.open();
    v.put("f", &content(3 * PAGE_BLOCKS, 0));
    v.close().unwrap();
    std::fs::remove_file(&place).unwrap();
    symlink(older, &place).unwrap();
    let kinds = lab.kinds(false);
    assert_eq!(kinds.iter().map(|k| (k.0.as_str(), k.2)).collect::<Vec<_>>(), [("unknown-session", true)]);
    assert_eq!(lab.open().get("f"), content(3 * PAGE_BLOCKS, 0), "and readable all the same");
}

/// With the numbers of a counter the next session had the number of one that was closed, and its pages were believed.
#[test]
fn an_older_record_brings_no_closed_session_back_to_life() {
    let lab = Lab::new();
    let place = lab.dir.path().join(SESSIONS).join(SESSIONS_RECORD);
    let older = std::fs::read_link(&place).unwrap();
    let v = lab.open();
    put_synced(&v, "f", &content(8, 0));
    let pending = lab.bytes("f")[..BLOCK].to_vec();
    v.close().unwrap();
    std::fs::remove_file(&place).unwrap();
    symlink(older, &place).unwrap();
    // Numbers are seconds: the next session begins in a later one.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let v = lab.open();
    put_synced(&v, "g", &content(8, 0));
    let lab = interrupt(lab, v);
    lab.put_back("f", 0, &pending);
    lab.zero("f", 3 * BLOCK as u64, BLOCK);
    assert_eq!(lab.kinds(false), [("block-hash".into(), Some(2), false)]);
    assert_eq!(read_blocks(&lab.open(), "f")[2], None);
}

#[test]
fn without_its_record_a_vault_is_read_strictly_and_not_written_until_it_is_mended() {
    for damage in ["missing", "another vault's", "noise"] {
        let lab = Lab::new();
        let v = lab.open();
        put_synced(&v, "f", &content(8, 0));
        let lab = interrupt(lab, v);
        lab.zero("f", 3 * BLOCK as u64, BLOCK);
        let place = lab.dir.path().join(SESSIONS).join(SESSIONS_RECORD);
        std::fs::remove_file(&place).unwrap();
        match damage {
            "noise" => symlink("noise", &place).unwrap(),
            "missing" => {}
            _ => {
                let other = Lab::new();
                let ring = lab.recipe.ring_of(&[9]);
                let root = lab.backend.root();
                let from = other.backend.root();
                copy_sessions((&*from, &lab.recipe.ring(), &VaultId([1; 16])), (&*root, &ring, &VaultId([1; 16])))
                    .unwrap();
            }
        }
        let v = lab.open();
        assert!(matches!(v.verify_root(), Err(VaultError::Damaged { .. })), "{damage}");
        assert_eq!(read_blocks(&v, "f")[2], None, "{damage}: taking the record away makes no holes");
        let handle = v.open_file(v.ino("f"), RW).unwrap();
        let written = v.write(handle, 0, b"x").and_then(|_| v.flush(handle));
        assert!(written.unwrap_err().to_string().contains(SESSIONS), "{damage}");
        kill(v);
        let lab = interrupt(lab, Lab::new().open());
        assert!(lab.kinds(false).contains(&("sessions".into(), None, false)), "{damage}");
        assert!(lab.kinds(true).contains(&("block-hash".into(), Some(2), false)), "{damage}");
        let v = lab.open();
        v.verify_root().unwrap();
        v.put("g", b"written again");
        v.close().unwrap();
        assert_eq!(lab.kinds(false), [("block-hash".into(), Some(2), false)], "{damage}");
    }
}

#[test]
fn a_session_that_left_something_behind_stays_open() {
    let lab = Lab::new();
    let v = lab.open();
    v.put("f", b"settled");
    let before = lab.kinds(false);
    assert_eq!(before, []);
    v.close().unwrap();
    let v = lab.open();
    put_synced(&v, "f", &content(8, 0));
    // As a daemon that is stopped in the middle of closing.
    let lab = interrupt(lab, v);
    let v = lab.open();
    v.put("g", b"another session, closed in good order");
    v.close().unwrap();
    lab.zero("f", 3 * BLOCK as u64, BLOCK);
    assert_eq!(lab.kinds(false), [("unwritten".into(), Some(2), true)], "the interrupted one is open still");
    assert_eq!(lab.open().check(&[], false, &Quiet).unwrap().open_sessions.len(), 1, "and named");
    assert_eq!(lab.open().check(&[], true, &Quiet).unwrap().open_sessions, []);
}

/// Who can write to the store puts a directory where a new record was made once, or where the record lies.
#[test]
fn a_directory_in_the_way_of_the_record_does_not_stop_writes() {
    let lab = Lab::new();
    let place = lab.dir.path().join(SESSIONS);
    let listed = || {
        let names = std::fs::read_dir(&place).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name != SESSIONS_RECORD).collect::<Vec<_>>()
    };
    std::fs::create_dir(place.join(SESSIONS_NEW)).unwrap();
    std::fs::create_dir_all(place.join(format!("{SESSIONS_NEW}-full/inner"))).unwrap();
    std::fs::write(place.join(format!("{SESSIONS_NEW}-old")), b"left").unwrap();
    let v = lab.open();
    v.put("f", &content(3, 0));
    v.close().unwrap();
    assert_eq!(listed(), [format!("{SESSIONS_NEW}-full")], "what can go is cleared away");
    std::fs::remove_file(place.join(SESSIONS_RECORD)).unwrap();
    std::fs::create_dir_all(place.join(SESSIONS_RECORD).join("inner")).unwrap();
    assert_eq!(lab.kinds(true), [("sessions".to_owned(), None, false)]);
    lab.open().clean();
    let v = lab.open();
    v.put("f", &content(5, 1));
    v.close().unwrap();
    assert_eq!(lab.open().get("f"), content(5, 1));
}
