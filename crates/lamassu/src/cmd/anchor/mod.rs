//! `lamassu anchor status|export|import|verify|rebuild|accept|move`: the record of a vault's newest state, outside the
//! store.

mod accept;
mod carry;
mod rebuild;
mod status;

use crate::fault::{Fault, Result};
use crate::keys::KeyArg;
use crate::open;
use crate::output::Ui;
use crate::served;
use lamassu_format::header::VaultHeader;
use std::path::{Path, PathBuf};

const STATUS_EXAMPLES: &str = "\
Examples:
  lamassu anchor status /srv/store/vault
  lamassu anchor status --json /srv/store/vault | jq .revision";

const EXPORT_EXAMPLES: &str = "\
Examples:
  lamassu anchor export /srv/store/vault /media/stick/vault.anchor
The export is of one moment, even if the vault is mounted. It is authenticated under the vault's
key, but not encrypted: anyone who reads it sees sizes, modes and the shape of the tree.";

const IMPORT_EXAMPLES: &str = "\
Examples:
  lamassu anchor import /mnt/nas/vault /media/stick/vault.anchor
      on the machine that is to write the vault from now on
  lamassu anchor import --older /srv/store/vault /backup/vault.anchor
      the anchor forgets everything that is newer than the export";

const VERIFY_EXAMPLES: &str = "\
Examples:
  lamassu anchor verify /srv/store/vault                 prints the digest, to be noted elsewhere
  lamassu anchor verify --expect HEX /srv/store/vault    compares with a noted digest";

const REBUILD_EXAMPLES: &str = "\
Examples:
  lamassu anchor rebuild /srv/store/vault
      after its anchor was lost
  lamassu anchor rebuild --anchor /media/disk/a /srv/store/vault
      for a vault that never had an anchor
If there is an export, prefer `lamassu anchor import`: an export has what a new anchor cannot know.";

const ACCEPT_EXAMPLES: &str = "\
Examples:
  lamassu anchor accept /srv/store/vault notes/today.txt    a file restored from a backup
  lamassu anchor accept -r /srv/store/vault photos
  lamassu anchor accept /srv/store/vault                    an old header, restored on purpose
The store's state at this moment is accepted; the history records who did it.";

const MOVE_EXAMPLES: &str = "\
Examples:
  lamassu anchor move /srv/store/vault /var/lib/anchors/vault.anchor
  lamassu anchor move /srv/store/vault server://keeper.example:7433
      hosts that joined the server can then use the vault
The new place is remembered: other commands find the anchor there.";

/// Anchor commands.
#[derive(clap::Subcommand, Debug)]
pub enum AnchorCommand {
    /// Show where a vault's anchor lies, and what it knows; needs no key
    Status(Status),
    /// Export a vault's anchor to a file, which is authenticated under the vault's key
    Export(Export),
    /// Import an export as a vault's anchor, replacing an existing one
    Import(Import),
    /// Print a digest of everything that a vault's anchor knows, or compare it with a given one; needs no key
    Verify(Verify),
    /// Make a new anchor from the present state of the store. What the old anchor knew is lost
    Rebuild(Rebuild),
    /// Accept the store's present state of these paths as the newest; without paths, that of the header and history
    Accept(Accept),
    /// Move a vault's anchor to another file or to a server; needs no key
    Move(Move),
}

/// Options of `anchor status`.
#[derive(clap::Args, Debug)]
#[command(after_help = STATUS_EXAMPLES)]
pub struct Status {
    #[command(flatten)]
    _opening: crate::opening::AnchorArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault, or where it is mounted
    dir: PathBuf,
}

/// Options of `anchor export`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXPORT_EXAMPLES, after_long_help = help(EXPORT_EXAMPLES))]
pub struct Export {
    #[command(flatten)]
    key: KeyArg,
    /// The vault, or where it is mounted
    dir: PathBuf,
    /// File to create; must not exist
    file: PathBuf,
}

/// Options of `anchor import`.
#[derive(clap::Args, Debug)]
#[command(after_help = IMPORT_EXAMPLES, after_long_help = help(IMPORT_EXAMPLES))]
pub struct Import {
    #[command(flatten)]
    key: KeyArg,
    /// Import an export that is older than the present anchor, too. Changes since the export are forgotten: the anchor
    /// then accepts the older states as the newest
    #[arg(long)]
    older: bool,
    /// The vault; must not be mounted for writing
    dir: PathBuf,
    /// An export made by `anchor export`
    file: PathBuf,
}

/// Options of `anchor verify`.
#[derive(clap::Args, Debug)]
#[command(after_help = VERIFY_EXAMPLES)]
pub struct Verify {
    #[command(flatten)]
    _opening: crate::opening::AnchorArg,
    /// Fail (code 61) unless the digest is this one
    #[arg(long, value_name = "HEX", value_parser = parse_digest)]
    expect: Option<[u8; 32]>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault, or where it is mounted
    dir: PathBuf,
}

/// Options of `anchor rebuild`.
#[derive(clap::Args, Debug)]
#[command(after_help = REBUILD_EXAMPLES, after_long_help = help(REBUILD_EXAMPLES))]
pub struct Rebuild {
    #[command(flatten)]
    key: KeyArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault; must not be mounted for writing
    dir: PathBuf,
}

/// Options of `anchor accept`.
#[derive(clap::Args, Debug)]
#[command(after_help = ACCEPT_EXAMPLES, after_long_help = help(ACCEPT_EXAMPLES))]
pub struct Accept {
    #[command(flatten)]
    key: KeyArg,
    /// Accept everything below directories, too
    #[arg(short, long)]
    recursive: bool,
    /// The vault; must not be mounted for writing
    dir: PathBuf,
    /// Plain paths in the vault [default: header and history]
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,
}

/// Options of `anchor move`.
#[derive(clap::Args, Debug)]
#[command(after_help = MOVE_EXAMPLES)]
pub struct Move {
    #[command(flatten)]
    _opening: crate::opening::AnchorArg,
    /// The vault; must not be mounted
    dir: PathBuf,
    /// File to create, on a disk that the store does not own; or server://HOST:PORT
    file: PathBuf,
}

fn help(examples: &str) -> String {
    format!("{examples}\n\n{}", crate::keys::HELP)
}

fn parse_digest(hex: &str) -> Result<[u8; 32], &'static str> {
    let bytes = data_encoding::HEXLOWER_PERMISSIVE.decode(hex.as_bytes()).ok();
    bytes.and_then(|bytes| bytes.try_into().ok()).ok_or("a digest is 64 hex digits")
}

pub fn run(ui: &Ui, command: AnchorCommand) -> Result<()> {
    match command {
        AnchorCommand::Status(args) => status::status(ui, &args),
        AnchorCommand::Export(args) => carry::export(ui, &args),
        AnchorCommand::Import(args) => carry::import(ui, &args),
        AnchorCommand::Verify(args) => status::verify(ui, &args),
        AnchorCommand::Rebuild(args) => rebuild::rebuild(ui, &args),
        AnchorCommand::Accept(args) => accept::accept(ui, &args),
        AnchorCommand::Move(args) => carry::move_to(ui, &args),
    }
}

/// The vault that a path names, itself or by its mount, and its header.
fn anchored(ui: &Ui, path: &Path) -> Result<(PathBuf, VaultHeader)> {
    let dir = served::dir_of(path)?;
    let header = open::found(ui, &dir)?.header;
    ui.policy.anchors.require(&header)?;
    Ok((dir, header))
}

/// Refuses, for a mounted vault, a command that needs the vault for itself.
fn refuse_mounted(dir: &Path) -> Result<()> {
    match served::at(dir)? {
        Some(at) => Err(Fault::RetireMounted { mountpoint: at.path().into() }.into()),
        None => Ok(()),
    }
}
