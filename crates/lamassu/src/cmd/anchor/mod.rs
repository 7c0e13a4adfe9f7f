//! `lamassu anchor status|export|import|verify|rebuild|accept|move`: what knows a vault's newest state, outside the
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
The copy is of one moment, also beside a mount. It is sealed against changes under the vault's key, and shows sizes,
modes and the shape of the tree to whoever reads it.";

const IMPORT_EXAMPLES: &str = "\
Examples:
  lamassu anchor import /mnt/nas/vault /media/stick/vault.anchor             on the machine that is to write the vault now
  lamassu anchor import --older /srv/store/vault /backup/vault.anchor        what it knows less is forgotten";

const VERIFY_EXAMPLES: &str = "\
Examples:
  lamassu anchor verify /srv/store/vault                                     to be written down elsewhere
  lamassu anchor verify --expect HEX /srv/store/vault                        the same rows, and no others";

const REBUILD_EXAMPLES: &str = "\
Examples:
  lamassu anchor rebuild /srv/store/vault                                    after its anchor was lost
  lamassu --anchor /media/disk/a anchor rebuild /srv/store/vault             for a vault that never had one
An export keeps what this cannot: `lamassu anchor import`.";

const ACCEPT_EXAMPLES: &str = "\
Examples:
  lamassu anchor accept /srv/store/vault notes/today.txt                     restored from a backup
  lamassu anchor accept -r /srv/store/vault photos
  lamassu anchor accept /srv/store/vault                                     after an old header was put back on purpose
What is accepted is what lies in the store at this moment; the history says who did it.";

const MOVE_EXAMPLES: &str = "\
Examples:
  lamassu anchor move /srv/store/vault /var/lib/anchors/vault.anchor
  lamassu anchor move /srv/store/vault server://keeper.example:7433          other hosts that joined it can use the vault
Where it lies is remembered; other commands find it there.";

/// Anchor commands.
#[derive(clap::Subcommand, Debug)]
pub enum AnchorCommand {
    /// Tell where a vault's anchor lies, and what it knows; needs no key
    Status(Status),
    /// Write all that a vault's anchor knows into a file, which a tampered copy of does not pass for
    Export(Export),
    /// Put an export in the place of a vault's anchor, or where there is none
    Import(Import),
    /// Print a digest of all that a vault's anchor knows, or compare it with one; needs no key
    Verify(Verify),
    /// Make a vault's anchor anew, of what the store shows now: nothing that was before is known then
    Rebuild(Rebuild),
    /// Take what the store shows at paths for the newest; without paths, the header and the history
    Accept(Accept),
    /// Put a vault's anchor into another file, or give it to a server; needs no key
    Move(Move),
}

/// Options of `anchor status`.
#[derive(clap::Args, Debug)]
#[command(after_help = STATUS_EXAMPLES)]
pub struct Status {
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
    /// A file that does not exist yet
    file: PathBuf,
}

/// Options of `anchor import`.
#[derive(clap::Args, Debug)]
#[command(after_help = IMPORT_EXAMPLES, after_long_help = help(IMPORT_EXAMPLES))]
pub struct Import {
    #[command(flatten)]
    key: KeyArg,
    /// Also an export that is older than the anchor here: what changed since is forgotten, and older states of it pass
    /// for the newest
    #[arg(long)]
    older: bool,
    /// The vault; must not be mounted for writing
    dir: PathBuf,
    /// The export
    file: PathBuf,
}

/// Options of `anchor verify`.
#[derive(clap::Args, Debug)]
#[command(after_help = VERIFY_EXAMPLES)]
pub struct Verify {
    /// Fail (code 61) unless this is the digest
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
    /// Of directories also all that is below
    #[arg(short, long)]
    recursive: bool,
    /// The vault; must not be mounted for writing
    dir: PathBuf,
    /// Paths in the vault
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,
}

/// Options of `anchor move`.
#[derive(clap::Args, Debug)]
#[command(after_help = MOVE_EXAMPLES)]
pub struct Move {
    /// The vault; must not be mounted
    dir: PathBuf,
    /// A file that does not exist yet, on a disk that the store does not own; or server://HOST:PORT
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

/// Refuses what takes the vault alone where it is mounted.
fn refuse_mounted(dir: &Path) -> Result<()> {
    match served::at(dir) {
        Some(at) => Err(Fault::RetireMounted { mountpoint: at.path().into() }.into()),
        None => Ok(()),
    }
}
