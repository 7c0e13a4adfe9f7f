//! Every seed, everything that a fuzzer ever found, and mutations of both, without a fuzzer: the same ones each time.
//!
//! `LAMASSU_FUZZ_TIMES=100 LAMASSU_FUZZ_SEED=7` makes a hundred times as many, and others.

use lamassu_fuzz::{TARGETS, Target};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Mutations of each input: of every target some thousand in all, of slow ones fewer.
const MUTATIONS: u64 = 1000;
const MUTATIONS_OF_FILES: u64 = 250;

fn folder(kind: &str, target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz").join(kind).join(target.name)
}

fn inputs(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let mut paths = Vec::new();
    for kind in ["seeds", "findings"] {
        for entry in std::fs::read_dir(folder(kind, target)).into_iter().flatten() {
            paths.push(entry.expect("lists").path());
        }
    }
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), std::fs::read(path).expect("reads"))).collect()
}

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

fn mutate(input: &mut Vec<u8>, other: &[u8], rng: &mut Rng) {
    for _ in 0..1 + rng.below(4) {
        let at = rng.below(input.len() + 1);
        let len = rng.below(17).min(input.len() - at);
        match rng.below(6) {
            0 => drop(input.drain(at..at + len)),
            1 => drop(input.splice(at..at, (0..1 + rng.below(16)).map(|_| rng.below(256) as u8).collect::<Vec<_>>())),
            2 => input.truncate(at),
            3 if !other.is_empty() => {
                let from = rng.below(other.len());
                let until = (from + rng.below(64)).min(other.len());
                input.splice(at..at + len, other[from..until].iter().copied());
            }
            _ if at < input.len() => {
                input[at] = [0, 0xff, input[at] ^ 1, input[at] ^ 0x80, rng.below(256) as u8][rng.below(5)]
            }
            _ => input.push(rng.below(256) as u8),
        }
    }
}

fn replay(name: &str) {
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target");
    let inputs = inputs(target);
    assert!(!inputs.is_empty(), "no seeds for {name}: fuzz/make-seeds");
    for (path, input) in &inputs {
        let done = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
        assert!(done.is_ok(), "{} fails: see above", path.display());
    }
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let mut rng = Rng(number("LAMASSU_FUZZ_SEED").unwrap_or(0) << 8 | name.len() as u64);
    let count = if matches!(name, "file" | "keychain" | "object") { MUTATIONS_OF_FILES } else { MUTATIONS };
    let count = count * number("LAMASSU_FUZZ_TIMES").unwrap_or(1);
    for i in 0..count {
        let mut input = inputs[rng.below(inputs.len())].1.clone();
        let other = &inputs[rng.below(inputs.len())].1;
        mutate(&mut input, other, &mut rng);
        if catch_unwind(AssertUnwindSafe(|| (target.run)(&input))).is_err() {
            let kept = std::env::temp_dir().join(format!("lamassu-fuzz-{name}-{i}"));
            std::fs::write(&kept, &input).expect("writes");
            panic!("mutation {i} fails: see above; it is in {}", kept.display());
        }
    }
}

macro_rules! replays {
    ($($name:ident)*) => {
        $(#[test] fn $name() { replay(stringify!($name)); })*

        #[test]
        fn every_target_is_replayed_and_built_for_the_fuzzer() {
            assert_eq!(TARGETS.iter().map(|t| t.name).collect::<Vec<_>>(), [$(stringify!($name)),*]);
            let manifest = std::fs::read_to_string(folder("Cargo.toml", &TARGETS[0]).parent().expect("a folder"));
            let manifest = manifest.expect("fuzz/Cargo.toml");
            for target in TARGETS {
                assert!(manifest.contains(&format!("name = \"{}\"", target.name)), "{} in fuzz/Cargo.toml", target.name);
            }
        }
    };
}

replays! { header keychain page payload names dir_record state_record companion symlink xattr source options file share answer history request anchor_row anchor_log anchor_export tree_records join_token leases lock_answers alert_finding served_keys policy evaluations host_rows judged_rows access listing properties object }
