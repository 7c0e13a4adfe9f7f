//! `lamassu completions`.

use crate::fault::Result;
use crate::output;
use clap::CommandFactory;
use clap_complete::Shell;

const EXAMPLES: &str = "\
Example:
  lamassu completions bash > ~/.local/share/bash-completion/completions/lamassu";

/// Options of `completions`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

pub fn run(args: Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::args::Cli::command(), "lamassu", &mut script);
    output::print_bytes(&script)
}
