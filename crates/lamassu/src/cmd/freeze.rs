//! `lamassu freeze|thaw`: a quiet store, while a backup or a snapshot is taken of it.

use crate::fault::Result;
use crate::mounts;
use crate::output::Ui;
use crate::signals;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  lamassu freeze /mnt && cp -a --reflink=auto /srv/store/vault /backup/; lamassu thaw /mnt
  lamassu freeze /mnt && rsync -aHAX --modify-window=-1 --delete /srv/v/ b:/v/; lamassu thaw /mnt
While the vault is frozen, everything written is in the store, reads continue, and writers wait.";

/// Options of `freeze` and `thaw`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The mountpoint of the vault
    mountpoint: PathBuf,
}

pub fn freeze(ui: &Ui, args: Args) -> Result<()> {
    let root = mounts::root_at(&args.mountpoint)?;
    // The request cannot be interrupted, and whoever sends a signal will not thaw.
    signals::flag_only();
    root.freeze()?;
    if signals::interrupted() {
        root.thaw()?;
        signals::check()?;
    }
    ui.detail("frozen; do not forget `lamassu thaw`");
    Ok(())
}

pub fn thaw(ui: &Ui, args: Args) -> Result<()> {
    mounts::root_at(&args.mountpoint)?.thaw()?;
    ui.detail("thawed");
    Ok(())
}
