//! The crash simulation can fail: commits that go wrong are found, and so is damage where there are no barriers.

use super::overwriting;
use crate::common::Setup;
use crate::common::crash::{Depth, Recording, explore, random_workload};
use lamassu_store::backend::crash::{Op, Record};
use lamassu_store::backend::memory::Barrier;
use lamassu_store::file::Durability;

/// How a commit could be wrong.
#[derive(Clone, Copy, Debug)]
enum Mistake {
    /// No barrier between the page and the data it announces.
    NoBarrier,
    /// The data goes before the page that announces it.
    DataFirst,
    /// Pending bits are cleared before a barrier has covered the data.
    ClearedEarly,
}

/// Makes the mistake wherever a recording has the place for it; how often.
fn make(mistake: Mistake, records: &mut [Record]) -> usize {
    let segment = 4096 * 63; // of the geometry with R = 62: a page and 62 blocks
    let page = |r: &Record| matches!(&r.op, Op::Write { offset, .. } if offset.is_multiple_of(segment));
    let data = |r: &Record| matches!(&r.op, Op::Write { .. }) && !page(r);
    let (mut at, mut made) = (0, 0);
    while at < records.len() {
        let run = |from: usize, is: &dyn Fn(&Record) -> bool| records[from..].iter().take_while(|r| is(r)).count();
        let attribute = |r: &Record| matches!(r.op, Op::Attribute(..));
        let pages = run(at, &page);
        let barrier = at + pages;
        let is_barrier = records.get(barrier).is_some_and(|r| matches!(r.op, Op::Barrier(_)));
        match mistake {
            Mistake::NoBarrier | Mistake::DataFirst if pages > 0 && is_barrier => {
                let blocks = run(barrier + 1, &data);
                match mistake {
                    Mistake::DataFirst => records[at..barrier + 1 + blocks].rotate_left(pages + 1),
                    _ if blocks > 0 => records[barrier].op = Op::Barrier(Barrier::Data(u64::MAX)),
                    _ => {}
                }
                made += usize::from(blocks > 0);
                at = barrier + 1 + blocks;
            }
            Mistake::ClearedEarly if pages == 0 && is_barrier => {
                let settled = run(at + 1, &|r| page(r) || attribute(r));
                // What a barrier or data follows is the first page of a commit.
                let is_commit = |r: &Record| matches!(r.op, Op::Barrier(_)) || data(r);
                if settled > 0 && !records.get(at + 1 + settled).is_some_and(is_commit) {
                    records[at..at + 1 + settled].rotate_left(1);
                    made += 1;
                }
                at += 1 + settled;
            }
            _ => at += 1,
        }
    }
    made
}

#[test]
fn mistakes_in_the_commit_are_found() {
    let setup = Setup::default();
    for mistake in [Mistake::NoBarrier, Mistake::DataFirst, Mistake::ClearedEarly] {
        let depth = Depth { losses: 24, stride: 1 };
        let mut recording = Recording::new(&setup, 1);
        overwriting(&mut recording);
        let mut trace = recording.finish();
        explore(&setup, &trace, 0, depth).expect("as it is, it is right");
        let mut made = 0;
        trace.log = trace.log.edited(|records| made = make(mistake, &mut records[trace.start..]));
        assert!(made > 0, "{mistake:?}: the workload has no place for it");
        let found =
            explore(&setup, &trace, 0, depth).expect_err(&format!("{mistake:?} was made {made} times, and missed"));
        println!("{mistake:?}, made {made} times: {found}");
        let random = |seed: &u64| {
            let mut trace = random_workload(&setup, *seed, 30, 20_000);
            trace.log = trace.log.edited(|records| made = make(mistake, &mut records[trace.start..]));
            made > 0 && explore(&setup, &trace, *seed, Depth { losses: 6, stride: 1 }).is_err()
        };
        let found = (0..30).filter(random).take(5).count();
        assert!(found == 5, "{mistake:?} was found in {found} of 30 random workloads");
    }
}

#[test]
fn without_barriers_damage_is_found() {
    let setup = Setup { reserved: 8, durability: Durability::Relaxed, ..Setup::default() };
    let damaged = |seed: &u64| {
        let trace = random_workload(&setup, 60_000 + seed, 30, 40_000);
        explore(&setup, &trace, *seed, Depth { losses: 4, stride: 1 }).is_err()
    };
    let found = (0..40).filter(damaged).take(16).count();
    assert!(found == 16, "without barriers only {found} of 40 workloads showed damage");
}
