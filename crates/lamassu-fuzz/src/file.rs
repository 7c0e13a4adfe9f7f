//! Backing files (`docs/format.md` §8 to §12): honest ones, damaged as a hostile store would, or with pages forged
//! behind good seals.
//!
//! What must hold, whatever was done to the backing file:
//! * without forged pages, every block reads as an error, as its content, or, where the store put an older state back
//!   or the last writer was killed, as its earlier content; as zeros only where there was a hole or the end of the
//!   file;
//! * `check` finds damage exactly where reads do; `check --repair` changes nothing that can be read;
//! * a write that succeeds is read back, and leaves what else could be read as it was;
//! * the file can be emptied and used again.

use crate::bytes::Bytes;
use crate::model::{SURVEYED, Story, Survey, Told, backing, pattern, survey};
use crate::ring;
use lamassu_format::page::SEALED_AT;
use lamassu_format::{BlockNo, PAGE_LEN, PageNo, Suite};
use lamassu_store::backend::MemoryBackend;
use lamassu_store::file::{DamageKind, File, FileCheck, StoreError};

/// Most things done to one backing file.
const ACTS_MAX: usize = 16;
/// Longest backing file that is made up, in bytes: as much as two segments of the largest block size here hold.
const EXTENT_MAX: u64 = 3 << 20;

/// What the store did.
#[derive(Default)]
struct Done {
    /// Part of an older state was put back.
    replayed: bool,
    /// A page was made with the keys.
    forged: bool,
}

/// A file, and what is done to it.
pub fn file(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    let story = Story {
        suite: bytes.one_of(&Suite::ALL),
        block_size: bytes.one_of(&[4096, 4096, 4096, 8192]),
        convergent: bytes.u8() & 1 == 0,
        shape: bytes.u8() % Story::SHAPES,
        state: bytes.u8() % Story::STATES,
    };
    let told = story.told();
    let store = told.now.snapshot();
    let write = (bytes.u64(), bytes.u16());
    let mut done = Done::default();
    for _ in 0..ACTS_MAX {
        if bytes.is_empty() {
            break;
        }
        act(&story, &told, &store, &mut bytes, &mut done);
    }
    let (size, before) = survey(&story, &store);
    if !done.forged {
        judge(&story, &told, &before, done.replayed);
    }
    let (size, before) = repair(&story, &store, size, before);
    change(&story, &store, size, &before, write);
    renew(&story, &store);
}

/// One thing done to the backing file.
fn act(story: &Story, told: &Told, store: &MemoryBackend, bytes: &mut Bytes<'_>, done: &mut Done) {
    let raw = backing(store);
    let len = raw.stat().expect("stats").len;
    let sectors = len.div_ceil(4096).max(1);
    let kind = bytes.u8();
    let mut place = || u64::from(bytes.u16()) % (sectors + 2) * 4096;
    let (a, b) = (place(), place());
    match kind % 10 {
        0 => {
            let (at, bits) = (a + u64::from(bytes.u16() % 4096), bytes.u8().max(1));
            let mut byte = [0];
            raw.read_at(at, &mut byte).expect("reads");
            raw.write_at(at, &[byte[0] ^ bits]).expect("writes");
        }
        1 => raw.punch(a, 4096 * (1 + u64::from(bytes.u8() % 8))).expect("punches"),
        2 => raw.set_len((a + u64::from(bytes.u16() % 4096)).min(EXTENT_MAX)).expect("cuts"),
        3 => {
            let far = [4096, 1 << 20, 1 << 30, 1 << 45, 1 << 60];
            raw.set_len(len.saturating_add(bytes.one_of(&far)).min(1 << 61)).expect("extends");
        }
        4 => {
            let (x, y) = (sector(store, a), sector(store, b));
            raw.write_at(a, &y).expect("writes");
            raw.write_at(b, &x).expect("writes");
        }
        5 => {
            raw.write_at(a, &sector(&told.before, a)).expect("writes");
            done.replayed = true;
        }
        6 => raw.write_at(a, &sector(&told.before, b)).map(|()| done.replayed = true).expect("writes"),
        7 => {
            let content = bytes.take(64);
            raw.write_at(a + u64::from(kind) * 8, content).expect("writes");
        }
        _ => {
            let page = PageNo(u64::from(bytes.u8() % 6));
            forge(story, store, page, bytes);
            done.forged = true;
        }
    }
}

fn sector(store: &MemoryBackend, at: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    backing(store).read_at(at, &mut bytes).expect("reads");
    bytes
}

/// Opens a page, changes some fields and seals it again.
fn forge(story: &Story, store: &MemoryBackend, g: PageNo, bytes: &mut Bytes<'_>) {
    const FIELDS: [usize; 8] = [56, 64, 80, 88, 96, 104, 112, 128];
    let (geometry, ring) = (story.geometry(), ring(story.suite));
    let aad = geometry.page_aad(story.suite, g);
    let at = geometry.page_offset(g).0;
    let mut page: [u8; PAGE_LEN] = sector(store, at).try_into().expect("a page");
    if ring.open_page(&aad, &mut page).is_err() {
        page = [0; PAGE_LEN];
    }
    for _ in 0..1 + bytes.u8() % 4 {
        let how = bytes.u8();
        let field = FIELDS[usize::from(how) % FIELDS.len()];
        match how >> 3 & 3 {
            0 => page[field..field + 8].copy_from_slice(&bytes.u64().to_le_bytes()),
            1 => page[field] ^= bytes.u8(),
            2 => {
                // A size near a border.
                let unit = if how & 0x20 == 0 { u64::from(story.block_size) } else { geometry.page_span() };
                let size = (u64::from(bytes.u16()) % 300 * unit).wrapping_add(u64::from(bytes.u8())).wrapping_sub(1);
                page[56..64].copy_from_slice(&size.to_le_bytes());
            }
            _ => {
                let at = SEALED_AT + usize::from(bytes.u16()) % (PAGE_LEN - SEALED_AT);
                let len = usize::from(bytes.u8() % 64).min(PAGE_LEN - at);
                let content = bytes.take(len);
                page[at..at + content.len()].copy_from_slice(content);
            }
        }
    }
    ring.outer().seal_page_convergent(&aad, &mut page);
    backing(store).write_at(at, &page).expect("writes");
}

/// Every block that reads is one that was written.
fn judge(story: &Story, told: &Told, found: &Survey, replayed: bool) {
    let b = story.block_size as usize;
    let is_prefix = |content: &[u8], block: usize, data: &[u8]| {
        let known = content.get(block * b..).unwrap_or_default();
        let known = &known[..known.len().min(data.len())];
        data.starts_with(known) && data[known.len()..].iter().all(|&x| x == 0)
    };
    for (&block, read) in found {
        let (Ok(data), block) = (read, block as usize) else { continue };
        let is_new = is_prefix(&told.new, block, data);
        // A killed writer leaves both states behind; what is settled is the only one there is.
        let both = !told.settled || replayed;
        let is_old = both && is_prefix(&told.old, block, data);
        let had_nothing = |content: &Vec<u8>| {
            let held = content.get(block * b..).unwrap_or_default();
            held[..held.len().min(b)].iter().all(|&x| x == 0)
        };
        let may_be_hole = story.is_sparse() || had_nothing(&told.new) || (both && had_nothing(&told.old));
        let is_hole = may_be_hole && data.iter().all(|&x| x == 0);
        // The end of a file that was read as larger than it is.
        let shown = &data[..data.len().min(16)];
        assert!(is_new || is_old || is_hole, "block {block} reads as what was never written: {shown:?}… ({story:?})");
    }
}

/// Checks, repairs, checks again: nothing that could be read is lost, and damage is found exactly where reads find it.
fn repair(story: &Story, store: &MemoryBackend, size: u64, before: Survey) -> (u64, Survey) {
    let open = |read_only| File::open(story.context(read_only), backing(store), "repair").expect("opens");
    let only_checked = open(true).check(false, &mut |_| {}).expect("checks");
    assert_check(story, &only_checked, &before);
    open(false).check(true, &mut |_| {}).unwrap_or_else(|e| panic!("repairs: {e}, of {story:?}: {before:?}"));
    let (size_after, after) = survey(story, store);
    assert_eq!(size_after, size, "a repair changes the size");
    for (block, read) in &before {
        if read.is_ok() {
            assert_eq!(after.get(block), Some(read), "block {block} before and after a repair");
        }
    }
    let checked = open(true).check(false, &mut |_| {}).expect("checks");
    assert_check(story, &checked, &after);
    (size_after, after)
}

fn assert_check(story: &Story, checked: &FileCheck, survey: &Survey) {
    let geometry = story.geometry();
    for (&block, read) in survey {
        let block = BlockNo(block);
        let page = geometry.page_of(block);
        let named = checked.damage.iter().any(|d| {
            let whole_page = d.block.is_none() && (d.page..d.page + d.pages).contains(&page);
            d.block == Some(block) || whole_page || (d.kind == DamageKind::Truncated && d.page <= page)
        });
        match read {
            Err(kind) => assert!(named, "block {block} is {kind:?}, and a check does not say so: {:?}", checked.damage),
            Ok(_) => {
                let whole_page = |d: &&lamassu_store::file::Damage| {
                    let covers = (d.page..d.page + d.pages).contains(&page);
                    covers && (d.block == Some(block) || d.block.is_none() && d.kind != DamageKind::Truncated)
                };
                let wrongly = checked.damage.iter().find(whole_page);
                assert!(wrongly.is_none(), "block {block} reads, and a check says {wrongly:?}");
            }
        }
    }
}

/// Writes somewhere: what is written is read back, the rest stays.
fn change(story: &Story, store: &MemoryBackend, size: u64, before: &Survey, (at, len): (u64, u16)) {
    let b = u64::from(story.block_size);
    let at = at % size.min(200 * b).saturating_add(2 * b);
    let data: Vec<u8> = (0..u64::from(len % 9000)).map(|i| pattern(at + i, 9)).collect();
    let file = File::open(story.context(false), backing(store), "change").expect("opens");
    let written = file.write_at(at, &data).and_then(|()| file.settle_now());
    drop(file);
    assert!(!matches!(written, Err(StoreError::Io { .. })), "a store in memory does not fail: {written:?}");
    let (size_after, after) = survey(story, store);
    let end = at + data.len() as u64;
    if written.is_ok() {
        assert_eq!(size_after, if data.is_empty() { size } else { size.max(end) });
    }
    for (&block, read) in before {
        let Ok(old) = read else { continue };
        let start = block * b;
        let mut want = old.clone();
        let now = match after.get(&block) {
            Some(Ok(now)) => now,
            // It was looked at as the last block, which another one is now.
            None if block >= SURVEYED && size_after > size => continue,
            other => panic!("block {block} was readable before a write to {at}..{end}, and is {other:?} ({story:?})"),
        };
        if start >= end || start + b <= at {
            want.resize(now.len(), 0);
            assert!(*now == want, "block {block} was changed by a write to {at}..{end}");
        } else if written.is_ok() {
            want.resize(now.len(), 0);
            for i in at.max(start)..end.min(start + b) {
                want[(i - start) as usize] = data[(i - at) as usize];
            }
            assert!(*now == want, "block {block} does not hold what was written to {at}..{end}");
        }
    }
}

/// However damaged, it can be emptied and used again.
fn renew(story: &Story, store: &MemoryBackend) {
    let file = File::open(story.context(false), backing(store), "renew").expect("opens");
    file.truncate(0).expect("a damaged file can be emptied");
    file.write_at(5000, b"new life").expect("and written");
    file.settle_now().expect("and settled");
    drop(file);
    let file = File::open(story.context(true), backing(store), "renewed").expect("opens");
    let mut content = [1; 6000];
    assert_eq!(file.read_at(0, &mut content).expect("reads"), 5008);
    assert!(content[..5000].iter().all(|&x| x == 0) && &content[5000..5008] == b"new life");
    assert_eq!(file.check(false, &mut |_| {}).expect("checks").damage, []);
}
