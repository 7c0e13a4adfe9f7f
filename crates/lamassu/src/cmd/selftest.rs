//! `lamassu selftest`: known answers for every primitive, on every kernel that this processor has.

use crate::fault::Result;
use crate::output;
use lamassu_crypto::Provider;
use lamassu_crypto::kernel::Kernel;
use lamassu_crypto::selftest::{self, SelfTestFailure};
use serde::Serialize;

const EXAMPLES: &str = "\
Examples:
  lamassu selftest
  LAMASSU_CPU=portable lamassu selftest      without the processor's cipher instructions";

/// Options of `selftest`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print a JSON array of rows: primitive, kernel, passed
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    primitive: String,
    kernel: String,
    passed: bool,
}

pub fn run(args: Args) -> Result<()> {
    let mut rows = Vec::new();
    let mut failed: Option<SelfTestFailure> = None;
    for kernel in Kernel::available() {
        selftest::each_on(kernel, |primitive, passed| {
            rows.push(Row { primitive: primitive.to_string(), kernel: kernel.to_string(), passed });
            if !passed {
                failed.get_or_insert(SelfTestFailure { primitive, kernel });
            }
        });
    }
    if args.json {
        output::print_json(&rows)?;
    } else {
        for row in &rows {
            let result = if row.passed { "passed" } else { "FAILED" };
            output::print(format_args!("{result}  {:<20} {}", row.primitive, row.kernel))?;
        }
        output::print(format_args!("{}", module()))?;
    }
    failed.map_or(Ok(()), |failure| Err(failure.into()))
}

/// What this build has of a FIPS module.
pub fn module() -> &'static str {
    match Provider::is_module_built_in() {
        true => "FIPS module: AWS-LC, used with --fips",
        false => "FIPS module: none in this build (feature `fips`); --fips uses the program's own code",
    }
}
