//! The teeth of the simulator: with the barriers of one kind left out, or a single one of them, some honest crash
//! leaves what is called stale, or lacks what was acknowledged (N4, N5, S2 and A4 of `docs/freshness.md`).

use super::*;
use lamassu_store::backend::crash::Op;
use lamassu_store::backend::memory::Barrier;

/// Kinds of barriers.
const KINDS: [&str; 3] = ["of the store", "of a directory", "of a file"];

fn kind(barrier: Barrier) -> &'static str {
    match barrier {
        Barrier::Store => KINDS[0],
        Barrier::Dir(_) => KINDS[1],
        Barrier::Data(_) | Barrier::All(_) => KINDS[2],
    }
}

/// Covers nothing: no inode has this number.
const NOTHING: Op = Op::Barrier(Barrier::Data(u64::MAX));

/// The log of a store that takes some barriers for nothing, and how many.
fn without(log: &CrashLog, left_out: impl Fn(usize, Barrier) -> bool) -> (CrashLog, usize) {
    let mut count = 0;
    let log = log.edited(|records| {
        for (at, record) in records.iter_mut().enumerate() {
            if matches!(record.op, Op::Barrier(barrier) if left_out(at, barrier)) {
                record.op = NOTHING;
                count += 1;
            }
        }
    });
    (log, count)
}

/// Files that are written and synced, and renamed over others: the careful save.
fn content_steps() -> Vec<Step<'static>> {
    vec![
        ("new", &|v| write(v, v.new_file("f").1, 1)),
        ("fsync f", &|v| fsync(v, "f")),
        ("write", &|v| write(v, v.open_file(v.ino("f"), RW).unwrap(), 2)),
        ("fsync f", &|v| fsync(v, "f")),
        ("dir", &|v| _ = v.dir("d")),
        ("new", &|v| write(v, v.new_file("d/new").1, 3)),
        ("fsync d/new", &|v| fsync(v, "d/new")),
        ("rename over", &|v| mv(v, "d/new", "f", RenameMode::Replace).unwrap()),
        ("ack f", &|v| fsync_dir(v, "")),
        ("write", &|v| write(v, v.open_file(v.ino("f"), RW).unwrap(), 4)),
        ("attribute", &|v| v.set_xattr(v.ino("f"), n("user.n"), b"1", SetXattr::Any).unwrap()),
        ("attribute", &|v| v.set_xattr(v.ino("f"), n("user.n"), b"2", SetXattr::Any).unwrap()),
        ("fsync f", &|v| fsync(v, "f")),
        ("sync!", &sync),
    ]
}

/// Steps, and of each kind of barrier that they have how many are found missing by themselves at least. Others cover
/// what a later one covers, too: names are durable in their order, and an fsync has several.
type Plan = (&'static str, Vec<Step<'static>>, &'static [(&'static str, usize)]);

#[test]
fn without_a_barrier_a_crash_is_no_honest_one() {
    let plans: [Plan; 3] = [
        ("names", names_steps(), &[(KINDS[0], 5)]),
        ("fsync", fsync_steps(), &[(KINDS[0], 1), (KINDS[1], 2), (KINDS[2], 2)]),
        ("content", content_steps(), &[(KINDS[0], 2), (KINDS[1], 0), (KINDS[2], 2)]),
    ];
    for (plan, steps, kinds) in plans {
        let run = run(Recipe::default(), &steps);
        let (log, begin) = (run.crash.log(), run.states[0].0);
        run.survive_as(log.clone(), begin, true).unwrap();
        for (left_out, least) in kinds {
            let is_of_kind = |at: usize, barrier| at >= begin && kind(barrier) == *left_out;
            let (edited, count) = without(&log, is_of_kind);
            let found = run.survive_as(edited, begin, true).expect_err("some crash shows that they are missing");
            let of_kind =
                |at: &usize| matches!(log.records()[*at].op, Op::Barrier(barrier) if is_of_kind(*at, barrier));
            let is_missed = |at: &usize| run.survive_as(without(&log, |other, _| other == *at).0, *at, true).is_err();
            let alone = (begin..log.records().len()).filter(of_kind).filter(is_missed).count();
            println!("{plan}: {alone} of {count} barriers {left_out} are missed alone; all: {:.120}", found);
            assert!(alone >= *least, "{plan}: {alone} of {count} barriers {left_out} are missed alone");
        }
    }
}
