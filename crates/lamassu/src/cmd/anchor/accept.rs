//! What the store shows is taken for the newest: an administrator's decision, which the history records.

use super::{Accept, refuse_mounted};
use crate::fault::{Context, Fault, Result};
use crate::keys;
use crate::open;
use crate::output::Ui;
use crate::text;
use lamassu_format::header::VaultHeader;
use lamassu_format::name;
use lamassu_host::Error as HostError;
use lamassu_host::anchors::Access;
use lamassu_host::{Error, Unsealed};
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, Update};
use lamassu_store::Backend as _;
use lamassu_vault::VaultError;
use lamassu_vault::anchor::Accepted;
use std::path::Path;

pub fn accept(ui: &Ui, args: &Accept) -> Result<()> {
    refuse_mounted(&args.dir)?;
    match args.paths.is_empty() {
        true if args.recursive => Err(HostError::Usage("--recursive is for paths").into()),
        true => header_and_history(ui, args),
        false => paths(ui, args),
    }
}

/// The header and the history as they are: they are written anew with the entry that says so. The record of sessions
/// goes on behind the sessions that the anchor knows.
fn header_and_history(ui: &Ui, args: &Accept) -> Result<()> {
    let source = args.key.source()?;
    open::found(ui, &args.dir)?;
    let _lock = open::lock_out_writers(ui, &args.dir)?;
    let update = Update::begin(&args.dir.join(name::HEADER), &ui.policy.witness())?.decided();
    let mut header: VaultHeader = update.read()?;
    let unlocked = keys::unlock(ui, &header, args.key.with(&source), &args.dir)?;
    unlocked.may_change(&header)?;
    // Where there is none to remember it, nothing is accepted; and one from before the vault was anchored says that it
    // is from now on.
    let anchor = ui.policy.anchors.open(&header.id(), Access::Write)?;
    unlocked.set_anchored(&mut header)?;
    let event = Event::new(EventKind::AnchorAccepted).slot(unlocked.slot()).detail("what", "header and history");
    update.record(&mut header, &unlocked, &[event])?;
    ui.note("the header and the history are taken for the newest, as they are");
    // A store that was restored whole has the record of sessions of that time, which gives numbers that were given.
    let (root, ring) = (open::backend(&args.dir)?.root(), unlocked.key_ring(header.suite())?);
    match lamassu_vault::accept_sessions(&*root, &ring, &header.id(), anchor.vault().sessions) {
        Ok(false) => {
            let last = lamassu_vault::last_session(&*root, &ring, &header.id())?;
            anchor.sessions_go_to(last).map_err(Error::from)?;
        }
        Ok(true) => ui.note(format_args!(
            "so is the record of sessions, an older one: what the vault holds may be older, too; `lamassu check {0}` names \
             what is, and `lamassu anchor accept -r {0} /` takes all of it",
            text::printable(&args.dir.display().to_string())
        )),
        // Nothing is accepted of what is not there; `check --repair` makes a new one.
        Err(error @ VaultError::Damaged { .. }) => ui.warn(error),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// Paths, each with its entry in the history, which comes first: what was accepted and is not told would be worse than
/// what is told and was not accepted.
fn paths(ui: &Ui, args: &Accept) -> Result<()> {
    let unsealed = open::unlocked(ui, &args.dir, &args.key)?;
    unsealed.keys.may_change(&unsealed.found.header)?;
    let opened = unsealed.open_to_serve(open::options(false), false)?;
    if opened.anchor.is_none() {
        return Err(Error::Unanchored.into());
    }
    let done = args.paths.iter().try_for_each(|path| {
        let plain = path.strip_prefix("/").unwrap_or(path);
        let context = || format!("vault:{}", path.display());
        opened.vault.may_accept(plain.as_os_str()).with_context(context)?;
        note(ui, &unsealed, &args.dir, path, args.recursive)?;
        let accepted = opened.vault.accept(plain.as_os_str(), args.recursive).with_context(context)?;
        tell(ui, path, &accepted);
        match accepted.damaged {
            0 => Ok(()),
            problems => Err(Fault::DamageLeft { problems }.into()),
        }
    });
    let closed = opened.vault.close();
    done.and_then(|()| Ok(closed?))
}

fn note(ui: &Ui, unsealed: &Unsealed, dir: &Path, path: &Path, recursive: bool) -> Result<()> {
    let event = Event::new(EventKind::AnchorAccepted).slot(unsealed.keys.slot()).detail("what", path.display());
    let event = if recursive { event.detail("below", "all") } else { event };
    super::carry::note(ui, unsealed, dir, event)
}

fn tell(ui: &Ui, path: &Path, accepted: &Accepted) {
    let Accepted { changed, added, removed, kept, damaged } = accepted;
    ui.note(format_args!(
        "vault:{}: {changed} changed, {added} new, {removed} gone, {kept} as they were, {damaged} do not open and stay stale",
        text::printable(&path.display().to_string())
    ));
}
