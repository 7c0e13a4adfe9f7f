//! `lamassu cat`: contents to standard output. What verifies is written up to the first damaged block.

use crate::fault::Result;
use crate::keys::{self, KeyArg};
use crate::open::{self, OrphanArg};
use crate::output::{self, Ui};
use crate::signals;
use crate::tree::stored::Stored;
use crate::tree::vault::VaultTree;
use crate::tree::{Input, Tree, read_data};
use lamassu_host::Error as HostError;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  lamassu cat /srv/store/vault notes/today.txt
  lamassu cat -k raw:file:k --header backup/lamassu.vault backup/Zk3…/9aQ…
      one file out of a backup, by its path in the store
  lamassu cat --orphan /srv/store/vault /tmp/9aQ…
      a stored file that lies elsewhere, with the vault's header";

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Options of `cat`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = EXAMPLES,
    after_long_help = help(),
    override_usage = "lamassu cat [OPTIONS] <DIR> <PATH>...\n       lamassu cat [OPTIONS] --header <FILE> <STORED>...\n       lamassu cat [OPTIONS] --orphan <DIR> <STORED>..."
)]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    orphan: OrphanArg,
    /// The vault, then plain paths in it (or stored files: see --header and --orphan)
    #[arg(required = true, value_name = "PATH")]
    places: Vec<PathBuf>,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    if let Some((found, files)) = args.orphan.found(ui, &args.places)? {
        let unsealed = open::unlock(ui, found, &args.key)?;
        return cat(&Stored::new(&unsealed), files);
    }
    let (dir, files) = match args.places.split_first() {
        Some((dir, files)) if !files.is_empty() => (dir, files),
        Some(_) | None => return Err(HostError::Usage("which file? give the vault, then paths in it").into()),
    };
    let vault = open::forest(ui, dir, &args.key, true)?;
    cat(&VaultTree(vault), files)
}

fn cat(tree: &dyn Tree, files: &[PathBuf]) -> Result<()> {
    for path in files {
        let input = tree.open(path)?;
        let size = tree.stat(path)?.map_or(0, |m| m.size);
        write_out(&*input, size)?;
    }
    Ok(())
}

fn write_out(input: &dyn Input, size: u64) -> Result<()> {
    let mut written = 0;
    read_data(input, |offset, data| {
        signals::check()?;
        zeros(offset.saturating_sub(written))?;
        written = offset + data.len() as u64;
        output::print_bytes(data)
    })?;
    zeros(size.saturating_sub(written))
}

/// A hole.
fn zeros(mut len: u64) -> Result<()> {
    while len > 0 {
        signals::check()?;
        let n = len.min(ZEROS.len() as u64);
        output::print_bytes(&ZEROS[..n as usize])?;
        len -= n;
    }
    Ok(())
}
