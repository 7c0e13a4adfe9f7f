//! `lamassu rekey`: brings what is stored to the newest keys, in a mounted vault by its daemon, otherwise here.

use crate::fault::Result;
use crate::job::{Words, Worker};
use crate::keys::{self, KeyArg};
use crate::output::{self, Ui};
use crate::{served, text};
use lamassu_host::control::protocol::Request;
use lamassu_vault::Rekeyed;
use lamassu_vault::forest::ROOT_MEMBER;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  lamassu key rotate --outer /srv/store/vault && lamassu rekey --outer /srv/store/vault
  lamassu rekey --full --limit 50M ~/private        in a mount, while it is in use
The command can be stopped at any time; run it again to continue.";

/// Options of `rekey`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    work: Work,
    /// Read and write at most this many bytes of files per second, e.g. 50M [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = text::parse_rate)]
    limit: Option<u64>,
    /// Print the result as one JSON document
    #[arg(long)]
    json: bool,
    /// The vault, or where it is mounted
    dir: PathBuf,
}

#[derive(clap::Args, Clone, Copy, Debug)]
#[group(required = true, multiple = false)]
struct Work {
    /// Re-encrypt only metadata, to the newest outer key: pages, directories, links, attributes; under 2 % of the bytes
    #[arg(long)]
    outer: bool,
    /// Re-encrypt data, too: all blocks, under the newest inner key
    #[arg(long)]
    full: bool,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

const WORDS: Words = Words { done: "re-keyed", failed: "not re-keyed" };

pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let worker = Worker::of(ui, &args.dir, &args.key, false)?;
    let (full, bytes_per_second) = (args.work.full, args.limit);
    let job = match &worker {
        Worker::Daemon(mountpoint) => served::ask(mountpoint, &Request::RekeyStart { full, bytes_per_second })?,
        Worker::Here(here) => here.rekey(ROOT_MEMBER, (full, bytes_per_second), rustix::process::getuid().as_raw())?,
    };
    let watched = worker.watch(ui, job, WORDS);
    worker.close()?;
    let (done, ended) = watched?;
    if args.json {
        output::print_json(&done)?;
    } else {
        ui.note(summary(&done));
    }
    ended?;
    let what =
        if full { "`lamassu key retire --inner` and `--outer` end" } else { "`lamassu key retire --outer` ends" };
    ui.note(format_args!("earlier epochs have nothing left to do; {what} them"));
    Ok(())
}

fn summary(done: &Rekeyed) -> String {
    let Rekeyed { records, links, attributes, pages, blocks, read, written, .. } = *done;
    if records + links + attributes + pages + blocks == 0 {
        return "everything is under the newest keys already".into();
    }
    format!(
        "sealed again: {pages} pages, {records} directories, {links} links, {attributes} attributes; encrypted again: {blocks} blocks \
         ({} read and {} written of files)",
        text::bytes(read),
        text::bytes(written)
    )
}
