//! Power cuts: of what was written behind the last flush any part has arrived, blocks of a disk in any order. What is
//! opened then is what the last commit that returned left, or the one that was under way.
#![allow(clippy::unwrap_used)] // a panic is a failed test

use super::backend::Traced;
use super::log::BLOCK_LEN;
use super::*;
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// What a disk writes as a whole.
const SECTOR_LEN: usize = 512;

fn below(rng: &mut TestRng, end: usize) -> usize {
    (rng.next_u64() % end as u64) as usize
}

type Rows = BTreeMap<(Space, Vec<u8>), Vec<u8>>;

/// A file, and what was done to it.
struct Run {
    made: Vec<u8>,
    traced: Vec<Traced>,
    /// What the tables have after each commit, and how much was traced by its return.
    states: Vec<(Rows, usize)>,
}

/// Commits of few and of many changes: some fill the log, some go past it.
fn run(rng: &mut TestRng, commits: usize) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let table = DiskTable::create(&path).unwrap();
    let made = std::fs::read(&path).unwrap();
    *table.backend.traced.lock() = Some(Vec::new());
    let traced = |table: &DiskTable| table.backend.traced.lock().as_ref().map_or(0, Vec::len);
    let (mut rows, mut states) = (Rows::new(), vec![(Rows::new(), 0)]);
    for n in 0..commits {
        // A value of a few blocks of the log at times, so that it is soon full.
        let (many, longest) = [(1, 20), (3, 4000), (6, 8000), (400, 400)][below(rng, 4)];
        let changes = (0..=below(rng, many)).map(|_| Change {
            space: Space::OF_VAULT[below(rng, Space::OF_VAULT.len())],
            key: vec![below(rng, 40) as u8],
            value: (below(rng, 4) > 0).then(|| vec![n as u8; below(rng, longest)]),
        });
        let changes: Vec<_> = changes.collect();
        table.commit(&changes).unwrap();
        for Change { space, key, value } in changes {
            match value {
                Some(value) => rows.insert((space, key), value),
                None => rows.remove(&(space, key)),
            };
        }
        assert!(all(&table) == rows);
        states.push((rows.clone(), traced(&table)));
    }
    // Without its end: the process is killed.
    let traced = table.backend.traced.lock().take().unwrap();
    Run { made, traced, states }
}

fn all(table: &DiskTable) -> Rows {
    let mut rows = Rows::new();
    let visited = table.visit_all(|space, key, value| {
        rows.insert((space, key.to_vec()), value.to_vec());
        Ok::<_, AnchorError>(())
    });
    visited.unwrap();
    rows
}

fn apply(image: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if image.len() < at + bytes.len() {
        image.resize(at + bytes.len(), 0);
    }
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

impl Run {
    /// What the disk may have after a cut behind `cut` steps.
    fn image(&self, cut: usize, rng: &mut TestRng) -> Vec<u8> {
        let mut image = self.made.clone();
        let flushed = self.traced[..cut].iter().rposition(|step| matches!(step, Traced::Flushed)).unwrap_or(0);
        // Nothing of it, all of it, or this part.
        let part = [0, 100, 50, 90][below(rng, 4)];
        for (n, step) in self.traced[..cut].iter().enumerate() {
            let mut arrives = || n < flushed || below(rng, 100) < part;
            match step {
                Traced::Written { at, bytes } => {
                    for (sector, bytes) in bytes.chunks(SECTOR_LEN).enumerate() {
                        if arrives() {
                            apply(&mut image, *at as usize + sector * SECTOR_LEN, bytes);
                        }
                    }
                }
                Traced::Length(len) if arrives() => image.resize(*len as usize, 0),
                Traced::Length(_) | Traced::Flushed => {}
            }
        }
        image
    }

    /// A file as a cut may leave it.
    fn left_at(&self, cut: usize, path: &std::path::Path, rng: &mut TestRng) {
        let file = File::options().create_new(true).write(true).mode(FILE_MODE).open(path).unwrap();
        file.write_all_at(&self.image(cut, rng), 0).unwrap();
    }

    /// What is wrong after a cut.
    fn cut(&self, cut: usize, rng: &mut TestRng) -> Result<(), String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("anchor");
        self.left_at(cut, &path, rng);
        let acknowledged = self.states.iter().rposition(|(_, traced)| *traced <= cut).unwrap();
        let mut admissible = self.states[acknowledged..].iter().take(2).map(|(rows, _)| rows);
        let table = DiskTable::open(&path).map_err(|error| format!("cut {cut}: {error}"))?;
        let found = all(&table);
        if !admissible.any(|rows| *rows == found) {
            return Err(format!("cut {cut}: neither commit {acknowledged} nor the next"));
        }
        table.commit(&[Change { space: Space::Held, key: vec![99], value: Some(vec![1]) }]).unwrap();
        let mut more = found;
        more.insert((Space::Held, vec![99]), vec![1]);
        // As if it were killed, too: its locks are this process's own.
        let (beside, again) = (dir.path().join("beside"), all(&table));
        std::fs::copy(&path, &beside).unwrap();
        let killed = all(&DiskTable::open(&beside).unwrap());
        drop(table);
        let closed = all(&DiskTable::open(&path).unwrap());
        assert!([again, killed, closed].iter().all(|rows| *rows == more));
        Ok(())
    }

    /// Where a cut may come: all around flushes, and some of the rest.
    fn cuts(&self) -> Vec<usize> {
        let near = |n: usize| (n.saturating_sub(3)..n + 3).any(|n| matches!(self.traced.get(n), Some(Traced::Flushed)));
        (0..=self.traced.len()).filter(|n| near(*n) || n % 7 == 0).collect()
    }
}

#[test]
fn a_power_cut_leaves_the_last_commit_or_the_next() {
    let mut rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let run = run(&mut rng, 100);
    let of_log = |step: &&Traced| matches!(step, Traced::Written { at, .. } if *at < log::DATABASE_AT);
    let logged = run.traced.iter().filter(of_log).count();
    assert!(logged > 60 && logged < 100, "{logged} of 100 commits were logged");
    let stored = run.states.windows(2).filter(|pair| {
        let steps = &run.traced[pair[0].1..pair[1].1];
        steps.iter().any(|step| matches!(step, Traced::Written { at, .. } if *at >= log::DATABASE_AT))
    });
    let stored = stored.count();
    assert!(stored > 3, "{stored} went to the database");
    for cut in run.cuts() {
        run.cut(cut, &mut rng).unwrap();
    }
}

/// A table that was filled by many commits, and its rows: a good part of the file is free.
fn filled(path: &std::path::Path) -> (DiskTable, Rows) {
    let table = DiskTable::create(path).unwrap();
    let mut rows = Rows::new();
    for n in 0..24_u64 {
        // Anywhere in the table, so that each commit changes pages all over it.
        let key = |m: u64| (n * 200 + m).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes().to_vec();
        let put = |m| Change { space: Space::Objects, key: key(m), value: Some(vec![n as u8; 180]) };
        let changes: Vec<_> = (0..200).map(put).collect();
        table.commit(&changes).unwrap();
        rows.extend(changes.into_iter().map(|change| ((change.space, change.key), change.value.unwrap())));
    }
    // And one that is in the log alone.
    table.commit(&[Change { space: Space::Held, key: vec![1], value: Some(vec![1]) }]).unwrap();
    rows.insert((Space::Held, vec![1]), vec![1]);
    (table, rows)
}

/// The close of such a table.
fn closing() -> (Run, Rows) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let (table, rows) = filled(&path);
    let made = std::fs::read(&path).unwrap();
    let backend = table.backend.clone();
    *backend.traced.lock() = Some(Vec::new());
    drop(table);
    let traced = backend.traced.lock().take().unwrap();
    let len = std::fs::metadata(&path).unwrap().len();
    assert!(len < made.len() as u64 * 4 / 5, "{} became {len}", made.len());
    (Run { made, traced, states: Vec::new() }, rows)
}

/// Whether all rows are there after a cut, when the file is opened, and when it was closed again.
fn has_all(run: &Run, cut: usize, rows: &Rows, rng: &mut TestRng) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    run.left_at(cut, &path, rng);
    (0..2).all(|_| DiskTable::open(&path).is_ok_and(|table| all(&table) == *rows))
}

#[test]
fn a_power_cut_while_a_file_is_compacted_loses_nothing() {
    let mut rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let (mut run, rows) = closing();
    for cut in 0..=run.traced.len() {
        assert!(has_all(&run, cut, &rows, &mut rng), "cut {cut} of {}", run.traced.len());
    }
    // Without flushes this finds what is lost.
    run.traced.retain(|step| !matches!(step, Traced::Flushed));
    let lost = (0..20).filter(|_| !has_all(&run, run.traced.len(), &rows, &mut rng)).count();
    assert!(lost > 5, "{lost} of 20");
}

/// The log is begun anew when it is full, and each time its old records are void.
#[test]
fn a_full_log_goes_to_the_database() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let table = DiskTable::create(&path).unwrap();
    let reader = DiskTable::open_read_only(&path, Readers::BesideWriter).unwrap();
    let mut rows = Rows::new();
    let mut generations = std::collections::BTreeSet::new();
    for n in 0..1000_u32 {
        let key = (n % 300).to_be_bytes().to_vec();
        table.commit(&[Change { space: Space::Objects, key: key.clone(), value: Some(vec![7; 10]) }]).unwrap();
        rows.insert((Space::Objects, key), vec![7; 10]);
        generations.insert(table.position.lock().generation);
        if n % 37 == 0 {
            assert!(all(&reader) == rows, "a reader beside it sees what was logged");
        }
    }
    assert!(all(&table) == rows);
    assert_eq!(generations.len(), 4);
    drop(table);
    let table = DiskTable::open(&path).unwrap();
    assert!(table.logged.lock().is_empty(), "closed, the database has all of it");
    assert!(all(&table) == rows);
}

/// Without the flush of a record the test above fails.
#[test]
fn a_flush_that_is_left_out_shows() {
    let mut rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut run = run(&mut rng, 40);
    let mut kept = Vec::new();
    let mut left_out = vec![0; run.traced.len() + 1];
    for (n, step) in run.traced.iter().enumerate() {
        let follows_log = n > 0 && matches!(&run.traced[n - 1], Traced::Written { at, .. } if *at < log::DATABASE_AT);
        let is_left_out = matches!(step, Traced::Flushed) && follows_log;
        left_out[n + 1] = left_out[n] + usize::from(is_left_out);
        kept.extend(Some(step.clone()).filter(|_| !is_left_out));
    }
    run.traced = kept;
    run.states.iter_mut().for_each(|(_, traced)| *traced -= left_out[*traced]);
    let wrong = (0..=run.traced.len()).filter(|cut| run.cut(*cut, &mut rng).is_err()).count();
    assert!(wrong > 20, "{wrong}");
}

/// A record that its disk has changed is damage where others follow it, and the end of the log where none does.
#[test]
fn a_damaged_record_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("anchor");
    let table = DiskTable::create(&path).unwrap();
    for n in 0..5 {
        table.commit(&[Change { space: Space::Objects, key: vec![n], value: Some(vec![n; 100]) }]).unwrap();
    }
    let whole = std::fs::read(&path).unwrap();
    let bad = dir.path().join("bad");
    for record in 0..5 {
        for at in [0, 9, 17, 25, 40, 70] {
            let mut bytes = whole.clone();
            bytes[(1 + record) * BLOCK_LEN + at] ^= 1;
            std::fs::write(&bad, &bytes).unwrap();
            std::fs::set_permissions(&bad, std::os::unix::fs::PermissionsExt::from_mode(FILE_MODE)).unwrap();
            match DiskTable::open(&bad) {
                Ok(table) => assert_eq!((all(&table).len(), record), (4, 4)),
                Err(AnchorError::Unreadable { .. }) => {
                    assert!(record < 4);
                    // That has mended the database: it is no less damaged for whoever reads beside a writer.
                    let beside = DiskTable::open_read_only(&bad, Readers::BesideWriter);
                    assert!(matches!(beside, Err(AnchorError::Unreadable { .. })));
                }
                Err(other) => panic!("{other:?}"),
            }
        }
    }
}
