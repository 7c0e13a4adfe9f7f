//! Prints what `lamassu speed` measures and more, for `scripts/bench`: the parts of the engine by themselves, and a
//! loop-back device. `speed [BLOCK_SIZE [MS_A_ROW [METHODS]]]`; a JSON array of rows. METHODS 1: also by the ciphers
//! and hashes that files may have in place of the suite's.

use lamassu_crypto::kernel::Kernel;
use lamassu_crypto::speed::{self, Plan, Row};
use lamassu_crypto::{NoRandom, Suite};
use lamassu_format::Method;
use std::time::Duration;

fn main() -> Result<(), NoRandom> {
    let mut numbers = std::env::args().skip(1).map(|a| a.parse::<u32>().expect("a number"));
    let block_size = numbers.next().unwrap_or(4096) as usize;
    let duration = Duration::from_millis(numbers.next().unwrap_or(300).into());
    let methods = if numbers.next() == Some(1) { &Method::ALL[..] } else { &[Method::OF_SUITE] };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let plan = Plan {
        suites: &Suite::ALL,
        methods,
        kernels: &Kernel::available(),
        threads: if processors > 1 { &[1, processors] } else { &[1] },
        block_size,
        batch_bytes: 1 << 20,
        duration,
    };
    let mut rows = Vec::new();
    let mut row = |Row { suite, method, op, kernel, threads, gb_per_s }: Row| {
        rows.push(serde_json::json!({
            "suite": suite.name(), "cipher": method.cipher(suite).name(), "hash": method.hash(suite).name(), "op": op.name(), "kernel": kernel, "threads": threads, "gb_per_s": gb_per_s,
        }));
    };
    speed::measure(&plan, &mut row)?;
    speed::beyond::parts(&plan, &mut row)?;
    speed::beyond::device(&plan, &mut row)?;
    println!("{}", serde_json::Value::from(rows));
    Ok(())
}
