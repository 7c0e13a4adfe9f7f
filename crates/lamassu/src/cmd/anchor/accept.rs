//! What the store shows is taken for the newest: an administrator's decision, which the history records.

use super::{Accept, refuse_mounted};
use crate::fault::Result;
use crate::keys;
use crate::open;
use crate::output::Ui;
use lamassu_format::header::VaultHeader;
use lamassu_format::name;
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, Update};

/// The header and the history as they are: they are written anew with the entry that says so.
pub fn accept(ui: &Ui, args: &Accept) -> Result<()> {
    refuse_mounted(&args.dir)?;
    let source = args.key.source()?;
    open::found(ui, &args.dir)?;
    let _lock = open::lock_out_writers(ui, &args.dir)?;
    let update = Update::begin(&args.dir.join(name::HEADER), &ui.policy.witness())?.decided();
    let mut header: VaultHeader = update.read()?;
    let unlocked = keys::unlock(ui, &header, args.key.with(&source), &args.dir)?;
    unlocked.may_change(&header)?;
    // One from before the vault was anchored says so from now on.
    unlocked.set_anchored(&mut header)?;
    let event = Event::new(EventKind::AnchorAccepted).slot(unlocked.slot()).detail("what", "header and history");
    update.record(&mut header, &unlocked, &[event])?;
    ui.note("the header and the history are taken for the newest, as they are");
    Ok(())
}
