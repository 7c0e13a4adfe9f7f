//! Prints the table that `lamassu speed` prints: `cargo run --release -p lamassu-crypto --example speed [block size] [ms a row]`.

use lamassu_crypto::kernel::Kernel;
use lamassu_crypto::{Suite, speed};
use std::time::Duration;

fn main() -> Result<(), lamassu_crypto::NoRandom> {
    let mut numbers = std::env::args().skip(1).map(|a| a.parse::<usize>().expect("a number"));
    let block_size = numbers.next().unwrap_or(4096);
    let duration = Duration::from_millis(numbers.next().unwrap_or(300) as u64);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let plan = speed::Plan {
        suites: &Suite::ALL,
        kernels: &Kernel::available(),
        threads: if threads > 1 { &[1, threads] } else { &[1] },
        block_size,
        batch_bytes: 1 << 20,
        duration,
        device: true,
        parts: true,
    };
    speed::measure(&plan, |r| {
        println!(
            "{:7} {:16} {:20} {} thread(s) {:7.3} GB/s",
            r.suite.name(),
            r.op.name(),
            r.kernel,
            r.threads,
            r.gb_per_s
        );
    })
}
