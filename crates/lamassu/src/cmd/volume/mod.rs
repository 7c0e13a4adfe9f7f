//! `lamassu volume`: a block device's worth of data in a vault.

mod export;

use crate::exit::Code;
use crate::fault::{Context, Result};
use crate::keys::{self, KeyArg};
use crate::open;
use crate::output::{self, Ui, print};
use crate::signals;
use crate::text;
use lamassu_vault::FileSystem;
use lamassu_volume::{BlockSize, Info, Name, VolumeError, Volumes};
use serde::Serialize;
use std::fmt::Write as _;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  lamassu volume create /srv/store/vault vm1 20G
  lamassu volume export --socket /run/vm1.sock /srv/store/vault
  lamassu volume snapshot /srv/store/vault vm1 before-upgrade
  lamassu volume clone /srv/store/vault vm1@before-upgrade vm2
  lamassu volume resize /srv/store/vault vm1 40G
  lamassu volume list /srv/store/vault
  lamassu volume destroy /srv/store/vault vm1@before-upgrade
A vault has one writer: these commands do not work while it is mounted or exported. docs/volumes.md
says more.";

/// What is done with volumes.
#[derive(clap::Subcommand, Debug)]
pub enum VolumeCommand {
    /// Create a volume: it reads as zeros, and takes space as it is written
    Create(CreateArgs),
    /// List volumes and snapshots
    List(ListArgs),
    /// Grow or shrink a volume
    Resize(ResizeArgs),
    /// Make a snapshot of a volume, VOLUME@SNAPSHOT, which is never written
    Snapshot(SnapshotArgs),
    /// Make a volume with the content of another, or of a snapshot
    Clone(CloneArgs),
    /// Remove a volume or a snapshot
    Destroy(DestroyArgs),
    /// Serve volumes as network block devices, by nbdkit, until SIGTERM
    Export(Box<export::Args>),
}

/// What all of them are given.
#[derive(clap::Args, Debug)]
pub struct VaultArg {
    #[command(flatten)]
    key: KeyArg,
    /// The vault
    dir: PathBuf,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

/// Options of `volume create`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct CreateArgs {
    #[command(flatten)]
    vault: VaultArg,
    /// Name of the volume: letters, digits, `.`, `_` and `-`
    volume: String,
    /// Size in bytes, or 20G, 1T
    #[arg(value_parser = text::parse_volume_size)]
    size: u64,
    /// Sector size: the smallest unit that clients read and write. 512, from which every guest boots, or 4096
    #[arg(short, long, value_name = "BYTES", default_value = "512", value_parser = parse_block_size)]
    block_size: BlockSize,
}

/// Options of `volume list`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct ListArgs {
    #[command(flatten)]
    vault: VaultArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Options of `volume resize`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct ResizeArgs {
    #[command(flatten)]
    vault: VaultArg,
    /// Name of the volume
    volume: String,
    /// New size in bytes, or 20G, 1T
    #[arg(value_parser = text::parse_volume_size)]
    size: u64,
    /// Allow the volume to shrink: data past the new end is lost
    #[arg(long)]
    shrink: bool,
}

/// Options of `volume snapshot`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct SnapshotArgs {
    #[command(flatten)]
    vault: VaultArg,
    /// Name of the volume
    volume: String,
    /// Name of the snapshot, without the volume's: it becomes VOLUME@SNAPSHOT
    snapshot: String,
}

/// Options of `volume clone`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct CloneArgs {
    #[command(flatten)]
    vault: VaultArg,
    /// The source: VOLUME, or VOLUME@SNAPSHOT
    from: String,
    /// Name of the new volume
    volume: String,
}

/// Options of `volume destroy`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct DestroyArgs {
    #[command(flatten)]
    vault: VaultArg,
    /// The volume to remove, or VOLUME@SNAPSHOT
    volume: String,
    /// Remove the volume's snapshots, too
    #[arg(long)]
    snapshots: bool,
}

#[derive(Serialize)]
struct Listing {
    volumes: Vec<Item>,
}

#[derive(Serialize)]
struct Item {
    name: String,
    snapshot: bool,
    size: u64,
    stored_bytes: u64,
    block_size: u32,
    mtime: i64,
    mtime_nanos: u32,
}

impl From<&Info> for Item {
    fn from(info: &Info) -> Item {
        Item {
            name: info.name.to_string(),
            snapshot: info.name.is_snapshot(),
            size: info.size,
            stored_bytes: info.stored,
            block_size: info.block_size.bytes(),
            mtime: info.written.seconds,
            mtime_nanos: info.written.nanos,
        }
    }
}

pub fn run(ui: &Ui, command: VolumeCommand) -> Result<Code> {
    match command {
        VolumeCommand::Create(args) => {
            let name = name(&args.volume)?;
            changed(ui, &args.vault, |volumes| Ok(volumes.create(&name, args.size, args.block_size)?))?;
            ui.detail(format_args!("{name}: {}, blocks of {}", text::bytes(args.size), args.block_size.bytes()));
        }
        VolumeCommand::List(args) => return list(ui, &args),
        VolumeCommand::Resize(args) => {
            let name = name(&args.volume)?;
            changed(ui, &args.vault, |volumes| Ok(volumes.resize(&name, args.size, args.shrink)?))?;
        }
        VolumeCommand::Snapshot(args) => {
            let name = name(&args.volume)?;
            let made = changed(ui, &args.vault, |volumes| Ok(volumes.snapshot(&name, &args.snapshot, &goes_on)?))?;
            ui.detail(format_args!("{made} is there"));
        }
        VolumeCommand::Clone(args) => {
            let (from, to) = (name(&args.from)?, name(&args.volume)?);
            changed(ui, &args.vault, |volumes| Ok(volumes.clone_to(&from, &to, &goes_on)?))?;
        }
        VolumeCommand::Destroy(args) => {
            let name = name(&args.volume)?;
            let removed = changed(ui, &args.vault, |volumes| Ok(volumes.destroy(&name, args.snapshots)?))?;
            ui.detail(format_args!("removed: {removed}"));
        }
        VolumeCommand::Export(args) => export::run(ui, &args)?,
    }
    Ok(Code::Done)
}

fn name(text: &str) -> Result<Name> {
    Ok(text.parse::<Name>()?)
}

fn parse_block_size(text: &str) -> Result<BlockSize, String> {
    let bytes = if text.eq_ignore_ascii_case("4K") { Some(4096) } else { text.parse::<u32>().ok() };
    bytes.ok_or("512 or 4096").and_then(BlockSize::try_from).map_err(Into::into)
}

/// Whether no signal has come.
fn goes_on() -> bool {
    !signals::interrupted()
}

/// Opens a vault for writing, and closes it.
fn changed<T>(ui: &Ui, vault: &VaultArg, change: impl FnOnce(&Volumes) -> Result<T>) -> Result<T> {
    let forest = open::forest(ui, &vault.dir, &vault.key, false)?;
    // A copy looks at the flag between its pieces, and takes away what it has made. What is short is done.
    signals::flag_only();
    let done = change(&Volumes::of(&forest)).with_context(|| format!("vault {}", vault.dir.display()));
    let closed = forest.close();
    let done = done?;
    closed?;
    Ok(done)
}

/// Lists what can be described, and fails if something cannot.
fn list(ui: &Ui, args: &ListArgs) -> Result<Code> {
    let forest = open::forest(ui, &args.vault.dir, &args.vault.key, true)?;
    let mut failed = None;
    let found = Volumes::of(&forest).list(&mut |name, odd| match odd {
        VolumeError::NotAVolume { .. } => ui.warn(odd),
        error => {
            ui.warn(format_args!("the volume {name} cannot be described: {error}"));
            failed.get_or_insert(error);
        }
    })?;
    show(args, &found)?;
    match failed {
        Some(error) => Err(error.into()),
        None => Ok(Code::Done),
    }
}

fn show(args: &ListArgs, found: &[Info]) -> Result<()> {
    if args.json {
        return output::print_json(&Listing { volumes: found.iter().map(Item::from).collect() });
    }
    let shown = |info: &Info| {
        (info.name.to_string(), text::bytes(info.size), text::bytes(info.stored), info.block_size.bytes())
    };
    let rows: Vec<_> = found.iter().map(shown).collect();
    let width = |of: fn(&(String, String, String, u32)) -> usize, least: usize| {
        rows.iter().map(of).chain([least]).max().unwrap_or(least)
    };
    let (names, sizes, stored) = (width(|r| r.0.len(), 6), width(|r| r.1.len(), 4), width(|r| r.2.len(), 6));
    let mut out = format!("{:names$}  {:>sizes$}  {:>stored$}  block", "volume", "size", "stored");
    for (name, size, taken, block) in &rows {
        let _ = write!(out, "\n{name:names$}  {size:>sizes$}  {taken:>stored$}  {block:>5}");
    }
    print(out)
}
