//! `lamassu clone|snapshot`: a vault's directory copied in the store, under a header of its own
//! ([`lamassu_host::clone`]).
//!
//! A mount of the original is frozen while it is copied.

use crate::fault::{Context, Result};
use crate::keys::{self, CostArg, KeyArg};
use crate::mounts;
use crate::open::{self, WriterLock};
use crate::output::{self, Ui};
use crate::progress::Meter;
use crate::{policy, signals, text};
use lamassu_format::header::VaultHeader;
use lamassu_fuse::control::{ControlError, Root};
use lamassu_host::Error as HostError;
use lamassu_host::clone::{self as copying, NewCopy, Original, Watch, lock_out_all_writers, refuse_place};
use lamassu_host::slots::check_label;
use lamassu_keys::{NewClone, Unlocked, unix_now};
use lamassu_store::backend::{Copied, Privileges};
use lamassu_vault::VaultError;
use serde::Serialize;
use std::io;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  lamassu clone /srv/store/vault /srv/store/try
  lamassu clone --new-key /srv/store/vault /srv/store/branch
      new content of the copy is under keys that the original never has
  lamassu clone --new-key --snapshot /srv/store/monday /srv/store/vault /srv/store/branch
      a snapshot, then the clone of it: the vault is frozen only while the snapshot is made
The copy has one slot, which --key opens; `lamassu key add` makes more.";

const SNAPSHOT_EXAMPLES: &str = "\
Examples:
  lamassu snapshot /srv/store/vault /srv/store/monday
  lamassu mount /srv/store/monday /mnt                  read-only
  lamassu clone /srv/store/monday /srv/store/work       a copy of it to work in
The copy has one slot, which --key opens; `lamassu key add` makes more.";

const LABEL_DEFAULT: &str = "clone";

/// Options of `clone`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help(EXAMPLES))]
pub struct Args {
    /// Start new epochs of K_in and K_out in the copy, so its new content is under keys that the original never has
    #[arg(long)]
    new_key: bool,
    /// Make a snapshot in DIR first, and the copy from that
    #[arg(long, value_name = "DIR")]
    snapshot: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
}

/// Options of `snapshot`.
#[derive(clap::Args, Debug)]
#[command(after_help = SNAPSHOT_EXAMPLES, after_long_help = help(SNAPSHOT_EXAMPLES))]
pub struct SnapshotArgs {
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args, Debug)]
struct Common {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    cost: CostArg,
    /// Label of the copy's key slot, for people
    #[arg(short, long, default_value = LABEL_DEFAULT)]
    label: String,
    /// Copy set-id bits, device nodes, and owner and mode of the vault's directory as the store has them. Anyone who
    /// can write to the store can choose them
    #[arg(long)]
    trust_store: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault, mounted or not
    source: PathBuf,
    /// Directory to create; must not exist
    dir: PathBuf,
}

fn help(examples: &str) -> String {
    format!("{examples}\n\n{}", keys::HELP)
}

/// What `--json` prints.
#[derive(Serialize)]
struct Done {
    source: String,
    copies: Vec<DoneCopy>,
}

#[derive(Serialize)]
struct DoneCopy {
    dir: PathBuf,
    id: String,
    zone: String,
    read_only: bool,
    inner_epoch: u32,
    outer_epoch: u32,
    /// files that share their blocks with the source (reflink)
    shared_files: u64,
    copied_files: u64,
    copied_bytes: u64,
    links: u64,
    directories: u64,
    others: u64,
    owners_lost: u64,
    attributes_lost: u64,
    set_id_dropped: u64,
    devices_left_out: u64,
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    let common = &args.common;
    let original = original(ui, common, &[args.snapshot.as_deref(), Some(&common.dir)])?;
    let mut copies = Vec::new();
    let mut of_snapshot = None;
    if let Some(place) = &args.snapshot {
        let new = NewClone { new_keys: false, snapshot: true, created: unix_now() };
        let (snapshot, done) = copy(ui, common, &original, place, new)?;
        copies.push(done);
        of_snapshot = Some(snapshot);
    }
    let new = NewClone { new_keys: args.new_key, snapshot: false, created: unix_now() };
    let (_, done) = copy(ui, common, of_snapshot.as_ref().unwrap_or(&original), &common.dir, new)?;
    copies.push(done);
    if args.new_key {
        ui.note(
            "what is written there from now on is under keys the original never has; what was copied stays under the keys of both until `lamassu rekey`",
        );
    }
    report(common, &original, copies)
}

pub fn snapshot(ui: &Ui, args: SnapshotArgs) -> Result<()> {
    let common = &args.common;
    let original = original(ui, common, &[Some(&common.dir)])?;
    let new = NewClone { new_keys: false, snapshot: true, created: unix_now() };
    let (_, done) = copy(ui, common, &original, &common.dir, new)?;
    report(common, &original, vec![done])
}

fn report(common: &Common, original: &Original, copies: Vec<DoneCopy>) -> Result<()> {
    match common.json {
        true => output::print_json(&Done { source: original.header().id().to_string(), copies }),
        false => Ok(()),
    }
}

/// The vault that is to be copied. Refuses bad places before a key is asked for.
fn original(ui: &Ui, common: &Common, places: &[Option<&Path>]) -> Result<Original> {
    check_label(&common.label)?;
    let source = common.key.source()?;
    let found = open::found(ui, &common.source)?;
    let dir =
        common.source.canonicalize().map_err(|source| HostError::NotADirectory { dir: found.dir.clone(), source })?;
    for place in places.iter().flatten() {
        let mounted = mounts::all().into_iter().filter(|m| m.fs_type == mounts::TYPE && m.source == dir);
        refuse_place(place, std::iter::once(dir.clone()).chain(mounted.map(|m| m.mountpoint.clone())))?;
    }
    let (keys, material) = keys::unlock_and_keep(ui, &found.header, common.key.with(&source), &common.source)?;
    // From here on the first signal ends in good order: what was made is taken away, and the vault thawed.
    signals::flag_only();
    Ok(Original::new(dir, found.header, keys, material))
}

/// Makes a copy at `place`, which becomes an original in its turn.
fn copy(ui: &Ui, common: &Common, original: &Original, place: &Path, keys: NewClone) -> Result<(Original, DoneCopy)> {
    let new = NewCopy {
        keys,
        label: &common.label,
        cost: common.cost.measure(ui, original.material()),
        privileges: if common.trust_store { Privileges::Kept } else { Privileges::Dropped },
    };
    let quiet = Quiet::make(ui, original.dir())?;
    let mut shown = Shown { ui, meter: Meter::bytes(ui, "copied") };
    let done = original.copy(&ui.policy, quiet, place, &new, &mut shown);
    drop(shown);
    let done = done?;
    done.succession.iter().for_each(|succession| policy::tell(ui, succession));
    for id in &done.without_anchor {
        ui.warn(format_args!("the dataset {id} has no anchor on this host, and its copy gets none"));
    }
    for id in &done.not_looked_at {
        ui.warn(format_args!(
            "no key at hand opens the dataset {id} with the work of one attempt, or its record of sessions does not open: \
             if it has interrupted sessions, they can never be completed in the snapshot"
        ));
    }
    if let Some(error) = &done.unrecorded {
        ui.warn(format_args!("the history of {} does not say so: {error}", original.dir().display()));
    }
    tell(ui, place, done.copy.header(), &done.copied);
    super::key::admin::tell(ui, done.copy.header(), place);
    let shown = DoneCopy::of(place, done.copy.header(), done.copy.keys(), &done.copied);
    Ok((done.copy, shown))
}

/// Keeps all processes from writing the vault and its datasets, until this is dropped.
enum Quiet {
    /// The daemon of the mount has frozen the vault and its datasets. It thaws them when this process ends in any way.
    Frozen(Option<Root>, PathBuf),
    Locked(#[allow(dead_code, reason = "held, not read")] Vec<WriterLock>),
}

impl Quiet {
    fn make(ui: &Ui, dir: &Path) -> Result<Quiet> {
        if let Some(mount) = mounts::of_dataset_in(dir) {
            return Err(ui.policy.locked(&mount.source).into());
        }
        open::once_closed(ui, dir, || match mounts::of_vault(dir).filter(|mount| mount.is_trusted()) {
            Some(mount) => {
                let root = mounts::root_at(&mount.mountpoint)?;
                let context = || format!("cannot freeze {} to copy it", mount.mountpoint.display());
                root.freeze_while_open().with_context(context)?;
                Ok(Quiet::Frozen(Some(root), mount.mountpoint.clone()))
            }
            None => Ok(Quiet::Locked(lock_out_all_writers(&ui.policy, dir)?)),
        })
    }
}

impl Quiet {
    /// Thaws. After any error others may have written meanwhile.
    fn thaw(&mut self) -> std::result::Result<(), ControlError> {
        let Quiet::Frozen(root, _) = self else { return Ok(()) };
        root.take().map_or(Ok(()), |root| root.thaw_own())
    }
}

impl copying::Quiet for Quiet {
    fn is_frozen(&self) -> bool {
        matches!(self, Quiet::Frozen(..))
    }

    fn end(mut self) -> lamassu_host::Result<()> {
        self.thaw().map_err(|_| VaultError::FreezeLost.into())
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let thawed = self.thaw();
        if let Quiet::Frozen(_, mountpoint) = self
            && let Err(error @ (ControlError::Io { .. } | ControlError::NotPermitted)) = thawed
        {
            output::say(format_args!("lamassu: warning: {} could not be thawed: {error}", mountpoint.display()));
        }
    }
}

/// Shows how far a copy is.
struct Shown<'a> {
    ui: &'a Ui,
    meter: Meter,
}

impl Watch for Shown<'_> {
    fn advance(&mut self, bytes: u64) -> bool {
        self.meter.advance(bytes);
        !signals::interrupted()
    }

    fn left(&mut self, place: &Path, error: &io::Error) {
        self.ui.warn(format_args!("{} is no vault and could not be removed: {error}", place.display()));
    }
}

const STORE_CHOOSES: &str = "nothing vouches for what the store says there; --trust-store takes it";

fn tell(ui: &Ui, place: &Path, header: &VaultHeader, copied: &Copied) {
    let kind = if header.is_snapshot() { "snapshot" } else { "clone" };
    let how = match (copied.shared, copied.copied) {
        (shared, 0) => format!("{shared} files share their blocks with the original"),
        (0, files) => {
            format!("{files} files copied ({}), since the store cannot share blocks", text::bytes(copied.copied_bytes))
        }
        (shared, files) => format!(
            "{shared} files share their blocks with the original, {files} were copied ({})",
            text::bytes(copied.copied_bytes)
        ),
    };
    ui.note(format_args!("made {kind} {} in {}: {how}", header.id(), place.display()));
    if copied.owners_lost > 0 {
        ui.warn(format_args!("{} entries belong to you now: only root can give files away", copied.owners_lost));
    }
    if copied.attributes_lost > 0 {
        ui.warn(format_args!("{} attributes of the store's own could not be set", copied.attributes_lost));
    }
    if copied.set_id_dropped > 0 {
        let dropped = copied.set_id_dropped;
        ui.warn(format_args!("set-id bits of {dropped} entries are left out: {STORE_CHOOSES}"));
    }
    if copied.devices_left_out > 0 {
        let left_out = copied.devices_left_out;
        ui.warn(format_args!("{left_out} device nodes are left out: {STORE_CHOOSES}"));
    }
}

impl DoneCopy {
    fn of(dir: &Path, header: &VaultHeader, keys: &Unlocked, copied: &Copied) -> DoneCopy {
        let last = |epochs: &[lamassu_keys::Epoch]| epochs.last().map_or(0, lamassu_keys::Epoch::number);
        DoneCopy {
            dir: dir.into(),
            id: header.id().to_string(),
            zone: header.zone().to_string(),
            read_only: header.is_snapshot(),
            inner_epoch: last(keys.keychain().inner()),
            outer_epoch: last(keys.keychain().outer()),
            shared_files: copied.shared,
            copied_files: copied.copied,
            copied_bytes: copied.copied_bytes,
            links: copied.links,
            directories: copied.directories,
            others: copied.others,
            owners_lost: copied.owners_lost,
            attributes_lost: copied.attributes_lost,
            set_id_dropped: copied.set_id_dropped,
            devices_left_out: copied.devices_left_out,
        }
    }
}
