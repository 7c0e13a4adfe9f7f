//! `lamassu speed`: what the ciphers do on this machine.

use crate::fault::Result;
use crate::output::{self, Ui};
use crate::text;
use lamassu_crypto::kernel::Kernel;
use lamassu_crypto::speed::{self, Plan, Row};
use lamassu_format::{Method, Suite};
use serde::Serialize;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  lamassu speed
  lamassu speed --suite aes --threads 1,4 --json
  lamassu speed --suite aes --block-size 128K --batch 16M
The kernel `library` composes calls of RustCrypto, one block after another.
LAMASSU_CPU masks processor features, to compare; BLAKE3 and ChaCha20 choose for themselves.";

/// Options of `speed`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Measure only this suite; repeatable [default: all]
    #[arg(short, long, value_parser = text::suites())]
    suite: Vec<Suite>,
    /// Bytes of a block, from 1K; vaults have 4K or more
    #[arg(short, long, value_name = "N", value_parser = text::parse_measured_block_size, default_value = "4K")]
    block_size: u32,
    /// Bytes of a batch, rounded down to whole blocks, at least one. A write has up to 1M, a commit seals up to 16M at
    /// once
    #[arg(long, value_name = "N", value_parser = text::parse_batch, default_value = "1M")]
    batch: u32,
    /// Numbers of threads, separated by commas [default: 1, and one per processor]
    #[arg(short, long, value_name = "N,N", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    /// Measure every kernel that this processor has [default: the library's and the best]
    #[arg(short, long)]
    all: bool,
    /// How long each row is measured, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    ms: u32,
    /// Print a JSON array of rows: suite, op, kernel, threads, gb_per_s
    #[arg(long)]
    json: bool,
}

/// A row as `--json` prints it. 10⁹ bytes a second.
#[derive(Serialize)]
struct Printed {
    suite: &'static str,
    op: &'static str,
    kernel: String,
    threads: usize,
    gb_per_s: f64,
}

impl Printed {
    fn of(row: &Row) -> Printed {
        Printed {
            suite: row.suite.name(),
            op: row.op.name(),
            kernel: row.kernel.clone(),
            threads: row.threads,
            gb_per_s: (row.gb_per_s * 1000.0).round() / 1000.0,
        }
    }
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    let suites = if args.suite.is_empty() { Suite::ALL.to_vec() } else { args.suite };
    let mut threads: Vec<usize> = args.threads.iter().map(|&n| n.into()).collect();
    if threads.is_empty() {
        threads = vec![1, std::thread::available_parallelism().map_or(1, usize::from)];
    }
    threads.sort_unstable();
    threads.dedup();
    let mut kernels = if args.all { Kernel::available() } else { vec![Kernel::library(), Kernel::best()] };
    kernels.dedup();
    let plan = Plan {
        suites: &suites,
        methods: &[Method::OF_SUITE],
        kernels: &kernels,
        threads: &threads,
        block_size: args.block_size as usize,
        batch_bytes: args.batch as usize,
        duration: Duration::from_millis(args.ms.into()),
    };
    let mut rows = Vec::new();
    let mut printed = Ok(());
    if !args.json {
        output::print(format_args!("{:<8} {:<16} {:<24} {:>7} {:>9}", "suite", "op", "kernel", "threads", "GB/s"))?;
    }
    speed::measure(&plan, |row| {
        let row = Printed::of(&row);
        if !args.json && printed.is_ok() {
            let Printed { suite, op, kernel, threads, gb_per_s } = &row;
            printed = output::print(format_args!("{suite:<8} {op:<16} {kernel:<24} {threads:>7} {gb_per_s:>9.3}"));
        }
        rows.push(row);
    })?;
    printed?;
    let [block, batch] = [args.block_size, args.batch.max(args.block_size)].map(|n| text::bytes(n.into()));
    ui.detail(format_args!("blocks of {block}, batches of {batch}"));
    if args.json { output::print_json(&rows) } else { Ok(()) }
}
