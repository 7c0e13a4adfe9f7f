//! Which runs of a volume are holes.

use crate::lab::Lab;
use lamassu_volume::{Extent, Run, Volume, VolumeError};

const MIB: u64 = 1 << 20;
/// Less than what one page covers, so that each page of a file gets a block.
const STEP: u64 = 384 << 10;

fn runs(volume: &Volume, offset: u64, len: u64) -> Vec<Run> {
    let mut found: Vec<Run> = Vec::new();
    let add = &mut |run: Run| {
        assert_eq!(run.offset, found.last().map_or(offset, |last| last.offset + last.len), "without gaps");
        assert!(run.len > 0 && run.offset + run.len <= offset + len);
        found.push(run);
        Ok::<_, VolumeError>(true)
    };
    volume.runs(offset, len, add).unwrap();
    assert!(!found.is_empty(), "at least the first byte");
    found
}

/// All runs of a range, by as many calls as it takes; neighbours of one kind are one.
fn all_runs(volume: &Volume, size: u64) -> Vec<(u64, Extent)> {
    let (mut at, mut all) = (0, Vec::<(u64, Extent)>::new());
    while at < size {
        for run in runs(volume, at, size - at) {
            match all.last_mut() {
                Some((len, extent)) if *extent == run.extent => *len += run.len,
                _ => all.push((run.len, run.extent)),
            }
            at = run.offset + run.len;
        }
    }
    all
}

#[test]
fn a_request_about_a_trimmed_volume_looks_at_no_more_than_its_range_and_a_limit() {
    let lab = Lab::new(false);
    let size = 640 * MIB;
    let volume = lab.volume("a", size);
    (0..size / STEP).for_each(|n| volume.write(n * STEP, &[1; 4096], false).unwrap());
    volume.trim(0, size - MIB, true).unwrap();
    assert_eq!(runs(&volume, 0, 4096), [Run { offset: 0, len: 4096, extent: Extent::Hole }]);
    let first: u64 = runs(&volume, 0, size).iter().map(|run| run.len).sum();
    assert!((256 * MIB..258 * MIB).contains(&first), "{first}");
    let all = all_runs(&volume, size);
    assert_eq!(all[0].1, Extent::Hole);
    assert!((size - MIB..size).contains(&all[0].0), "{all:?}");
    assert_eq!(all[1], (4096, Extent::Data));
}

#[test]
fn a_volume_that_was_never_written_is_one_hole() {
    let lab = Lab::new(false);
    let size = 1 << 40;
    let volume = lab.volume("a", size);
    assert_eq!(runs(&volume, 0, size), [Run { offset: 0, len: size, extent: Extent::Hole }]);
    volume.write(size / 2, &[1; 4096], true).unwrap();
    assert_eq!(
        all_runs(&volume, size),
        [(size / 2, Extent::Hole), (4096, Extent::Data), (size / 2 - 4096, Extent::Hole)]
    );
}

#[test]
fn small_runs_are_told_together() {
    let lab = Lab::new(false);
    let (size, step) = (8 * MIB, 8192);
    let volume = lab.volume("a", size);
    (0..size / step).for_each(|n| volume.write(n * step, &[1; 4096], false).unwrap());
    volume.flush().unwrap();
    let found = runs(&volume, 0, size);
    assert_eq!(found.len() as u64, 2 * size / step);
    assert!(found.iter().enumerate().all(|(n, run)| run.len == 4096 && (run.extent == Extent::Data) == (n % 2 == 0)));
}
