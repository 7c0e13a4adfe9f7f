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
use lamassu_vault::anchor::Accepted;
use lamassu_vault::{Vault, VaultError};
use std::path::{Path, PathBuf};

pub fn accept(ui: &Ui, args: &Accept) -> Result<()> {
    refuse_mounted(&args.dir)?;
    match args.paths.is_empty() {
        true if args.recursive => Err(HostError::Usage("--recursive is for paths").into()),
        true => header_and_history(ui, args),
        false => paths(ui, args),
    }
}

/// Accepts the present header and history: both are written again, with an entry that says so. The record of sessions
/// continues after the sessions that the anchor knows.
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

/// Accepts paths. The history gets an entry for each path first: an accepted path without an entry would be worse than
/// an entry for a path that was not accepted.
fn paths(ui: &Ui, args: &Accept) -> Result<()> {
    let mut unsealed = open::unlocked(ui, &args.dir, &args.key)?;
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
        let stale = stale_datasets(ui, args, &opened.vault, plain)?;
        match (accepted.damaged, stale) {
            (0, 0) => Ok(()),
            (0, datasets) => Err(Fault::DatasetsStale { datasets }.into()),
            (problems, _) => Err(Fault::DamageLeft { problems }.into()),
        }
    });
    let closed = opened.vault.close();
    done.and_then(|()| Ok(closed?))
}

/// Names the datasets at a path (with `--recursive` also below it) whose header or history is not the newest, and how
/// to accept each: a dataset has an anchor of its own, so nothing of it was accepted.
fn stale_datasets(ui: &Ui, args: &Accept, vault: &Vault, plain: &Path) -> Result<usize> {
    let mut stale = 0;
    for stored in datasets_at(vault, args, plain)? {
        let dir = args.dir.join(&stored);
        let shown = text::printable(&dir.display().to_string());
        match ui.policy.anchors.compare_records_of_dataset(&dir)? {
            Some(compared) if !compared.findings.is_empty() => {
                stale += 1;
                let found: Vec<&str> = compared.findings.iter().map(|found| found.what).collect();
                ui.warn(format_args!(
                    "the dataset {shown} has an anchor of its own: {}; `lamassu anchor accept {shown}` takes them for the newest",
                    found.join(", ")
                ));
            }
            Some(_) | None => ui.note(format_args!(
                "the dataset {shown} has an anchor of its own: `lamassu anchor accept {shown} PATH…` takes what is in it for the newest"
            )),
        }
    }
    Ok(stale)
}

/// Paths in the store of the dataset at a path, and with `--recursive` of those below it.
fn datasets_at(vault: &Vault, args: &Accept, plain: &Path) -> Result<Vec<PathBuf>> {
    let itself = vault.dataset_on(plain.as_os_str())?.map(|(dataset, _)| dataset.stored);
    if !args.recursive {
        return Ok(itself.into_iter().collect());
    }
    let at = match vault.stored_path(plain.as_os_str()) {
        // The store has nothing there, which was accepted.
        Err(VaultError::NotFound) => return Ok(Vec::new()),
        at => at?,
    };
    let dir = args.dir.join(&at);
    let below = match dir.is_dir() {
        true => lamassu_vault::datasets_below(&dir).map_err(|source| Error::CannotList { dir, source })?,
        false => Vec::new(),
    };
    Ok(itself.into_iter().chain(below.into_iter().map(|below| at.join(below))).collect())
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
