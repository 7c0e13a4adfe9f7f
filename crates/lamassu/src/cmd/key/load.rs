//! `lamassu key unload` and `key load`: the keys of what is mounted, while it stays mounted.

use crate::fault::{Fault, Result};
use crate::keys::{self, KeyArg};
use crate::output::Ui;
use crate::served;
use lamassu_host::FaultKind;
use lamassu_host::control::protocol::{Failed, Request};
use lamassu_keys::{Purpose, cost};
use std::path::PathBuf;

const UNLOAD_EXAMPLES: &str = "\
Examples:
  lamassu key unload /mnt/projects     a dataset: its files cannot be read until its key is loaded
  lamassu key unload /mnt              the whole vault
Open files can no longer be read or written; everything written before is in the store.";

const LOAD_EXAMPLES: &str = "\
Examples:
  lamassu key load /mnt/projects                             a dataset that inherits its key
  lamassu key load -k raw:file:/root/p.key /mnt/projects     a dataset with a key of its own
  lamassu key load /mnt                                      the vault: asks for its passphrase";

/// Options of `key unload`.
#[derive(clap::Args, Debug)]
#[command(after_help = UNLOAD_EXAMPLES)]
pub struct Unload {
    /// The mountpoint of the vault, or a dataset in it
    path: PathBuf,
}

/// Options of `key load`.
#[derive(clap::Args, Debug)]
#[command(after_help = LOAD_EXAMPLES, after_long_help = help())]
pub struct Load {
    #[command(flatten)]
    key: KeyArg,
    /// The mountpoint of the vault, or a dataset in it
    path: PathBuf,
}

fn help() -> String {
    format!("{LOAD_EXAMPLES}\n\n{}", keys::HELP)
}

pub fn unload(ui: &Ui, args: &Unload) -> Result<()> {
    let was_open: bool = served::ask(&served::must_be_within(&args.path)?, &Request::Unload {})?;
    let what = if was_open { "unloaded" } else { "was not loaded" };
    ui.note(format_args!("{} {what}", args.path.display()));
    Ok(())
}

pub fn load(ui: &Ui, args: &Load) -> Result<()> {
    let dir = served::must_be_within(&args.path)?;
    if !args.key.is_typed() {
        match served::ask::<()>(&dir, &Request::Load { secret: None, slot: None }) {
            // It has no key here: one is asked for.
            Err(error) if is_not_loaded(&error) => {}
            done => return done,
        }
    }
    let material = keys::load(ui, &args.key.source()?, &args.path.display().to_string(), Purpose::Unlock)?;
    let secret = served::pack(&dir, &material, cost::FALLBACK)?;
    served::ask(&dir, &Request::Load { secret: Some(secret), slot: args.key.slot() })
}

fn is_not_loaded(error: &crate::fault::Error) -> bool {
    matches!(error.fault(), Fault::Told(Failed { kind: FaultKind::KeyNotLoaded, .. }))
}
