//! An anchor made anew of what the store shows: after its loss, on a machine that never saw the vault, and for a vault
//! that never had one. What was before is not known then; the command says so, and so does the history.

use super::{Rebuild, refuse_mounted};
use crate::fault::Result;
use crate::keys;
use crate::open;
use crate::output::{self, Ui};
use crate::progress::Meter;
use crate::{signals, text};
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_format::name;
use lamassu_host::Error as HostError;
use lamassu_host::Unsealed;
use lamassu_host::anchors::{Rebuilt, disk};
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, Update, header_file};
use lamassu_vault::VaultError;
use lamassu_vault::anchor::RebuildProgress;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What was taken so far, and what was left out.
struct Shown<'a> {
    ui: &'a Ui,
    meter: Mutex<Meter>,
}

impl RebuildProgress for Shown<'_> {
    fn advance(&self, _objects: u64, bytes: u64) {
        self.meter.lock().unwrap_or_else(PoisonError::into_inner).advance(bytes);
    }

    fn damaged(&self, stored: &Path, error: &VaultError) {
        self.ui.warn(format_args!("left out: {}: {error}", text::printable(&stored.display().to_string())));
    }

    fn is_cancelled(&self) -> bool {
        signals::interrupted()
    }
}

pub fn rebuild(ui: &Ui, args: &Rebuild) -> Result<()> {
    refuse_mounted(&args.dir)?;
    let found = open::found(ui, &args.dir)?;
    let anchors = &ui.policy.anchors;
    anchors.are_used()?;
    let id = found.header.id();
    // Before the key: opening the vault for writing would remove what other hosts are making.
    anchors.refuse_server(&id)?;
    for around in vaults_around(&args.dir) {
        anchors.refuse_if_kept(&id, &around)?;
    }
    disk::check(&anchors.file_for_new(&id, None)?, &args.dir)?;
    let source = args.key.source()?;
    let unlocked = keys::unlock(ui, &found.header, args.key.with(&source), &args.dir)?;
    unlocked.may_change(&found.header)?;
    let mut unsealed = Unsealed::new(found, unlocked, ui.policy.clone());
    let vault = unsealed.open_unanchored()?;
    let shown = Shown { ui, meter: Mutex::new(Meter::bytes(ui, "taken")) };
    let made = anchors.rebuild(&vault, &unsealed.found.header, &args.dir, &shown);
    drop(shown);
    let closed = vault.close();
    let (file, rebuilt) = match made {
        Err(_) if signals::interrupted() => return Err(HostError::Interrupted.into()),
        made => made?,
    };
    closed?;
    record(ui, &unsealed, &args.dir, &rebuilt)?;
    report(ui, args, file, &rebuilt)
}

/// The vaults in whose directories a directory lies, as far as the store shows.
fn vaults_around(dir: &Path) -> Vec<VaultId> {
    let dir = dir.canonicalize().unwrap_or_default();
    let header = |dir: &Path| header_file::read::<VaultHeader>(&dir.join(name::HEADER)).ok();
    dir.ancestors().skip(1).filter_map(header).map(|header| header.id()).collect()
}

/// Records the present header in the anchor, and in the history from when on the anchor knows the vault.
fn record(ui: &Ui, unsealed: &Unsealed, dir: &Path, rebuilt: &Rebuilt) -> Result<()> {
    let update = Update::begin(&dir.join(name::HEADER), &ui.policy.witness())?.decided();
    let mut header: VaultHeader = update.read()?;
    let keys = unsealed.keys.reopen(&header)?;
    let kind = if header.is_anchored() { EventKind::AnchorRebuilt } else { EventKind::Anchored };
    keys.set_anchored(&mut header)?;
    let event = Event::new(kind)
        .slot(keys.slot())
        .detail("objects", rebuilt.objects)
        .detail("files", rebuilt.files)
        .detail("left_out", rebuilt.damaged);
    Ok(update.record(&mut header, &keys, &[event])?)
}

/// What `--json` prints.
#[derive(serde::Serialize)]
struct Told {
    anchor: PathBuf,
    objects: u64,
    entries: u64,
    files: u64,
    bytes: u64,
    datasets: u64,
    left_out: u64,
}

fn report(ui: &Ui, args: &Rebuild, file: PathBuf, rebuilt: &Rebuilt) -> Result<()> {
    let Rebuilt { objects, entries, files, bytes, datasets, damaged } = *rebuilt;
    ui.note(format_args!(
        "the anchor {} knows {objects} objects, {files} of them files of {}; nothing before this moment is known: an older state that the store showed now passes for the newest from now on",
        file.display(),
        text::bytes(bytes)
    ));
    if datasets > 0 {
        ui.note(format_args!("{datasets} datasets have anchors of their own: `lamassu anchor rebuild` of their directories in the store rebuilds those"));
    }
    if damaged > 0 {
        ui.warn(format_args!("what does not open is left out, and stays unreadable: {damaged} entries; `lamassu anchor accept DIR PATH` takes one in when it is restored"));
    }
    if let Some(warning) = disk::warning(&file, &args.dir) {
        ui.warn(warning);
    }
    match args.json {
        true => output::print_json(&Told { anchor: file, objects, entries, files, bytes, datasets, left_out: damaged }),
        false => Ok(()),
    }
}
