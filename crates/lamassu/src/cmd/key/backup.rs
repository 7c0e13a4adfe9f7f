//! `lamassu key backup|restore`: copies of a header, which a vault cannot be read without.

use crate::fault::Result;
use crate::keys::{self, KeyArg, SourceText};
use crate::output::Ui;
use crate::policy;
use lamassu_format::header::{Header, VaultHeader, ZoneFile};
use lamassu_host::restore::{self, Copy, Notice, record_copy};
use lamassu_keys::{FileError, Purpose, header_file};
use std::path::{Path, PathBuf};

const BACKUP_EXAMPLES: &str = "\
Examples:
  lamassu key backup /srv/store/vault /mnt/usb/vault.header
  lamassu key backup -k raw:file:/root/k /srv/store/vault vault.header      verifies it first
Anyone with the copy and a key of one of its slots can open the vault, even after the slot was
removed.";

const RESTORE_EXAMPLES: &str = "\
Examples:
  lamassu key restore /mnt/usb/vault.header /srv/store/vault
Slots removed since the backup return, and slots added since are gone.";

/// Options of `key backup`.
#[derive(clap::Args, Debug)]
#[command(after_help = BACKUP_EXAMPLES)]
pub struct Backup {
    #[command(flatten)]
    _opening: crate::opening::OpeningArg,
    /// Verify the header with this key before it is copied
    #[arg(short, long, value_name = "SOURCE")]
    key: Option<SourceText>,
    /// The vault, or a zone file
    pub(super) dir: PathBuf,
    /// File to create, readable only by its owner; must not exist
    file: PathBuf,
}

/// Options of `key restore`.
#[derive(clap::Args, Debug)]
#[command(after_help = RESTORE_EXAMPLES, after_long_help = help())]
pub struct Restore {
    #[command(flatten)]
    key: KeyArg,
    /// Replace the header even if it is another vault's, or has newer keys
    #[arg(long)]
    force: bool,
    /// A copy of the header, as made by `key backup`
    file: PathBuf,
    /// The vault or the zone file to restore (for a zone file, the environment's key is LAMASSU_ZONE_KEY)
    dir: PathBuf,
}

fn help() -> String {
    super::help(RESTORE_EXAMPLES)
}

/// Copies a header that parses and, where a key is given, is authentic.
pub fn backup<H: Header>(file: &Path, ui: &Ui, args: &Backup) -> Result<()> {
    let bytes = header_file::read_bytes(file)?;
    let header = H::parse(&bytes).map_err(|source| FileError::Header { path: file.into(), source })?;
    let unlocked = match &args.key {
        Some(source) => Some(keys::unlock(ui, &header, &source.parse("--key")?, &args.dir)?),
        None => {
            ui.detail("the header was parsed, not verified: give --key for that");
            None
        }
    };
    header_file::write_new(&args.file, &bytes)?;
    match unlocked {
        Some(keys) if H::IS_VAULT => {
            // A store that cannot be written to, or a vault that another host has, makes the copy no worse.
            if let Err(error) = record_copy(&ui.policy, &args.dir, (&header, &keys), &args.file, &bytes) {
                ui.warn(format_args!("the copy is not on record: {}", error.message()));
            }
        }
        Some(_) => {}
        None if H::IS_VAULT => ui.note("without --key the copy is not on record in the vault's history"),
        None => {}
    }
    ui.note(format_args!(
        "copied the header with {} key slots to {}; keep it apart from the vault, and make a new one after every change of slots",
        header.keys().slots.len(),
        args.file.display()
    ));
    Ok(())
}

/// Which kind of header the backup is decides what DIR is.
pub fn restore(ui: &Ui, args: &Restore) -> Result<()> {
    let copy = Copy::read(&args.file)?;
    let source = match &copy {
        Copy::Vault(_) => args.key.source_for::<VaultHeader>()?,
        Copy::Zone(_) => args.key.source_for::<ZoneFile>()?,
    };
    let material = keys::load(ui, &source, &args.file.display().to_string(), Purpose::Unlock)?;
    let tell = |notice: &Notice| match notice {
        Notice::Succession(succession) => policy::tell(ui, succession),
        Notice::HasDatasets => ui.note(notice),
        _ => ui.warn(notice),
    };
    let (file, dir, slot) = (&args.file, &args.dir, args.key.slot());
    let restore = restore::Restore { policy: &ui.policy, file, dir, slot, force: args.force, tell: &tell };
    let replaced = restore.put_back(&copy, &material)?;
    ui.note(format_args!("restored the header of {}", args.dir.display()));
    if let Some(kept) = replaced {
        ui.note(format_args!("what was there is kept as {}; remove it when all is well", kept.display()));
    }
    Ok(())
}
