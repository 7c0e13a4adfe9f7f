//! An anchor on its way elsewhere: exported, imported, moved.

use super::{Export, Import, Move, anchored, refuse_mounted};
use crate::fault::Result;
use crate::open;
use crate::output::Ui;
use crate::text;
use lamassu_anchor::{Anchor, AnchorError, Digest, export};
use lamassu_format::header::VaultId;
use lamassu_host::Error as HostError;
use lamassu_host::anchors::{Access, ImportError, SERVER, Stayed, disk, refuse_within, server_named};
use lamassu_host::lock::lock_out_writers_below;
use lamassu_host::{Error, Unsealed};
use lamassu_keys::Event;
use lamassu_keys::history::EventKind;
use lamassu_store::Backend as _;
use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

pub fn export(ui: &Ui, args: &Export) -> Result<()> {
    let (dir, _) = anchored(ui, &args.dir)?;
    let Unsealed { found, keys, .. } = open::unlocked(ui, &dir, &args.key)?;
    let id = found.header.id();
    refuse_within(&args.file, &dir)?;
    // An export that is damaged would be noticed when it is needed.
    let (_, table, is_verified) = ui.policy.anchors.look_closely(&id)?;
    if !is_verified {
        ui.warn("a process has the vault open: the anchor's checksums were not verified");
    }
    let local = |op| move |source| HostError::Local { op, path: args.file.clone(), source };
    let made = File::options().write(true).create_new(true).mode(0o600).open(&args.file);
    let file = made.map_err(local("create"))?;
    let written = (|| {
        let mut out = BufWriter::new(&file);
        let exported = export::write(&table, &keys.anchor_export_key(), &mut out)
            .map_err(|error| Error::from(ImportError::from(error)))?;
        if exported.vault != id {
            return Err(Error::from(AnchorError::Foreign).into());
        }
        out.flush().and_then(|()| file.sync_all()).map_err(local("write"))?;
        Ok(exported)
    })();
    let exported = written.inspect_err(|_: &crate::fault::Error| {
        let _ = std::fs::remove_file(&args.file);
    })?;
    ui.note(format_args!(
        "exported revision {} ({} rows), digest {}",
        exported.revision,
        exported.rows,
        text::hex(&exported.digest)
    ));
    tell_of_datasets(ui, &dir, "export");
    Ok(())
}

/// Datasets are vaults with anchors of their own.
fn tell_of_datasets(ui: &Ui, dir: &Path, command: &str) {
    let below = lamassu_vault::datasets_below(dir).unwrap_or_default();
    for stored in below {
        ui.warn(format_args!(
            "the dataset in {:?} has an anchor of its own: `lamassu anchor {command}` it by that directory, too",
            dir.join(stored)
        ));
    }
}

pub fn import(ui: &Ui, args: &Import) -> Result<()> {
    refuse_mounted(&args.dir)?;
    let (dir, _) = anchored(ui, &args.dir)?;
    let unsealed = open::unlocked(ui, &dir, &args.key)?;
    let id = unsealed.found.header.id();
    let anchors = &ui.policy.anchors;
    // Where a new one will lie; one that is there was let in before.
    disk::check(&anchors.file_for_new(&id, None)?, &dir)?;
    let _lock = open::lock_out_writers(ui, &dir)?;
    let local = |source| HostError::Local { op: "open", path: args.file.clone(), source };
    let mut from = BufReader::new(File::open(&args.file).map_err(local)?);
    let key = unsealed.keys.anchor_export_key();
    let imported = anchors.import(&id, &dir, &mut from, &key, args.older)?;
    let revision = imported.exported.revision;
    ui.note(format_args!("the anchor {} is of revision {revision} now", imported.path.display()));
    tell_of_datasets(ui, &dir, "import");
    if let Some(before) = imported.replaced.filter(|before| *before > revision) {
        ui.warn(format_args!(
            "what the anchor learned from revision {revision} to {before} is forgotten: the store can show older states of that, and what changed since is stale"
        ));
        let event = Event::new(EventKind::AnchorReplaced).detail("revision", revision).detail("instead_of", before);
        if let Err(error) = note(ui, &unsealed, &dir, event) {
            ui.warn(format_args!("the history does not record the import: {}", crate::output::message(&error)));
        }
    }
    // Now, and not at the next mount, is the time to learn that it does not fit.
    let fits = unsealed.anchor(Access::Read).map_err(Into::into).and_then(|anchor| match anchor {
        Some(anchor) => fits_sessions(&unsealed, &dir, &anchor),
        None => Ok(()),
    });
    fits.inspect_err(|_| ui.warn("the anchor is imported, and the vault is not in the state that it knows"))
}

/// Checks that the vault has had all sessions that its anchor knows. (Opening the anchor has checked that it had no
/// others.) So the export fits the state of the store, as far as that can be told without reading all of it.
fn fits_sessions(unsealed: &Unsealed, dir: &Path, anchor: &Anchor) -> Result<()> {
    let header = &unsealed.found.header;
    let (root, ring) = (open::backend(dir)?.root(), unsealed.keys.key_ring(header.suite())?);
    Ok(lamassu_vault::verify_sessions(&*root, &ring, &header.id(), anchor.vault().sessions.recorded)?)
}

/// Appends an event to the history, and records that in the anchor.
pub(super) fn note(ui: &Ui, unsealed: &Unsealed, dir: &Path, event: Event) -> Result<()> {
    let header = &unsealed.found.header;
    let mut history = unsealed.keys.history(dir, header)?;
    history.note(event)?;
    if let Some(mark) = history.mark() {
        let anchor = ui.policy.anchors.open(&header.id(), Access::Write)?;
        anchor.history_goes_to(mark.count, Digest(mark.head.0)).map_err(Error::from)?;
    }
    Ok(())
}

/// Moves the anchors of datasets after that of the vault around them.
fn move_datasets(ui: &Ui, vault: &VaultId, dir: &Path, server: &str) -> Result<()> {
    let (moved, stayed) = ui.policy.anchors.move_datasets_to_server(vault, dir, server)?;
    if moved > 0 {
        ui.note(format_args!("and those of {moved} datasets in it; who may use the vault may use them"));
    }
    for Stayed { stored, error } in &stayed {
        let (dataset, why) = (dir.join(stored), error.message());
        match error.innermost() {
            Error::PerhapsAtServer { .. } => ui.warn(format_args!("the anchor of the dataset in {dataset:?}: {why}")),
            _ => ui.warn(format_args!(
                "the dataset in {dataset:?} was skipped: its anchor, if it has one, stays where it is, and other hosts \
                 cannot use it: {why}"
            )),
        }
    }
    Ok(())
}

pub fn move_to(ui: &Ui, args: &Move) -> Result<()> {
    refuse_mounted(&args.dir)?;
    let (dir, header) = anchored(ui, &args.dir)?;
    if let Some(server) = args.file.to_str().and_then(|file| file.strip_prefix(SERVER)).map(server_named) {
        let server = &*server;
        let _lock = open::lock_out_writers(ui, &dir)?;
        let _below = lock_out_writers_below(&ui.policy, &dir)?;
        ui.policy.anchors.move_to_server(&header.id(), &dir, server)?;
        ui.note(format_args!("the server {server} keeps the anchor from now on"));
        return move_datasets(ui, &header.id(), &dir, server);
    }
    disk::check(&args.file, &dir)?;
    let _lock = open::lock_out_writers(ui, &dir)?;
    let (from, to) = ui.policy.anchors.move_to(&header.id(), &dir, &args.file)?;
    ui.note(format_args!("moved {} to {}", from.display(), to.display()));
    if from.to_str().is_some_and(|from| from.starts_with(SERVER)) {
        tell_of_datasets(ui, &dir, "move");
    }
    if let Some(warning) = disk::open_to_others(&to) {
        ui.warn(warning);
    }
    if let Some(warning) = disk::warning(&to, &dir) {
        ui.warn(warning);
    }
    Ok(())
}
