//! `lamassu clone|snapshot`: a vault's directory copied in the store, blocks shared where the store can, under a header
//! of its own.
//!
//! Nothing is decrypted: files carry their block keys. The header comes last, so a copy that was cut off is no vault;
//! one that failed is taken away again.

mod anchors;

use crate::fault::{Context, Fault, Result};
use crate::keys::{self, CostArg, KeyArg};
use crate::mounts;
use crate::open::{self, WriterLock};
use crate::output::{self, Ui};
use crate::progress::Meter;
use crate::tree::held::{is_empty, is_ours};
use crate::{signals, text};
use lamassu_format::header::VaultHeader;
use lamassu_format::name;
use lamassu_fuse::control::Root;
use lamassu_host::anchors::Made;
use lamassu_host::lock;
use lamassu_host::slots::check_label;
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, Material, NewClone, NewSlot, Unlocked, Update, clone_vault, unix_now};
use lamassu_store::Backend;
use lamassu_store::backend::{Copied, LocalBackend, Privileges, Watch};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::Serialize;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::{fs, io};

const EXAMPLES: &str = "\
Examples:
  lamassu clone /srv/store/vault /srv/store/try
  lamassu clone --new-key /srv/store/vault /srv/store/branch         what is written there is under keys the original never has
  lamassu clone --new-key --snapshot /srv/store/monday /srv/store/vault /srv/store/branch
      first a snapshot, then the clone from it: the vault is frozen only for the first
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
    /// Start an epoch of K_in and K_out in the copy: what is written there is under keys that the original never has
    #[arg(long)]
    new_key: bool,
    /// First make a snapshot here, and the copy from it
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
    /// Take set-id bits, device nodes, and owner and mode of the vault's directory as the store has them; whoever can
    /// write to the store chooses them
    #[arg(long)]
    trust_store: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault, mounted or not
    source: PathBuf,
    /// Where; must not exist
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
    let original = Original::open(ui, common, &[args.snapshot.as_deref(), Some(&common.dir)])?;
    let mut copies = Vec::new();
    let mut of_snapshot = None;
    if let Some(place) = &args.snapshot {
        let new = NewClone { new_keys: false, snapshot: true, created: unix_now() };
        let (snapshot, done) = original.copy(ui, common, place, new)?;
        copies.push(done);
        of_snapshot = Some(snapshot);
    }
    let new = NewClone { new_keys: args.new_key, snapshot: false, created: unix_now() };
    let (_, done) = of_snapshot.as_ref().unwrap_or(&original).copy(ui, common, &common.dir, new)?;
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
    let original = Original::open(ui, common, &[Some(&common.dir)])?;
    let new = NewClone { new_keys: false, snapshot: true, created: unix_now() };
    let (_, done) = original.copy(ui, common, &common.dir, new)?;
    report(common, &original, vec![done])
}

fn report(common: &Common, original: &Original, copies: Vec<DoneCopy>) -> Result<()> {
    match common.json {
        true => output::print_json(&Done { source: text::hex(&original.header.id()), copies }),
        false => Ok(()),
    }
}

/// The vault that is copied, and what opens it.
struct Original {
    dir: PathBuf,
    header: VaultHeader,
    keys: Unlocked,
    material: Rc<Material>,
}

impl Original {
    /// Refuses bad places before a key is asked for.
    fn open(ui: &Ui, common: &Common, places: &[Option<&Path>]) -> Result<Original> {
        check_label(&common.label)?;
        let source = common.key.source()?;
        let found = open::found(ui, &common.source)?;
        let dir =
            common.source.canonicalize().map_err(|source| Fault::NotADirectory { dir: found.dir.clone(), source })?;
        for place in places.iter().flatten() {
            check_place(place, &dir)?;
        }
        let (keys, material) = keys::unlock_and_keep(ui, &found.header, common.key.with(&source), &common.source)?;
        // From here on the first signal ends in good order: what was made is taken away, and the vault thawed.
        signals::flag_only();
        Ok(Original { dir, header: found.header, keys, material: Rc::new(material) })
    }

    /// Makes a copy at `place`, which becomes an original in its turn.
    fn copy(&self, ui: &Ui, common: &Common, place: &Path, new: NewClone) -> Result<(Original, DoneCopy)> {
        let quiet = Quiet::make(ui, &self.dir)?;
        // A rotation may have come between the key and the quiet: its epoch is needed, too.
        let header = open::found(ui, &self.dir)?.header;
        let newer = match header == self.header {
            true => None,
            false => {
                keys::check_pinned(ui, &header)?;
                let again = keys::try_slots(ui, &header, &self.material, None);
                Some(again.with_context(|| format!("{}", self.dir.display()))?)
            }
        };
        let keys = newer.as_ref().unwrap_or(&self.keys);
        if new.snapshot {
            self.refuse_interrupted(keys)?;
        }
        let cost = common.cost.measure(ui, &self.material);
        let slot = NewSlot { material: &self.material, cost, label: &common.label, created: new.created };
        let mut history = keys.history(&self.dir, &header)?;
        let of = self.anchor(ui, &header, keys)?;
        let (mut header, unlocked) = clone_vault(&header, keys, new, &slot)?;
        let top = Top::make(place).map_err(|source| Fault::Backing { op: "create", path: place.into(), source })?;
        let privileges = if common.trust_store { Privileges::Kept } else { Privileges::Dropped };
        let made = self.fill(ui, &top, privileges).and_then(|copied| {
            self.copy_sessions(keys, &top, (&header, &unlocked))?;
            let anchor = of.map(|table| self.copy_anchor(ui, &table, &header, &top, privileges)).transpose()?;
            let below = self.copy_anchors_below(ui, &header)?;
            drop(quiet);
            let begun = Event::new(EventKind::Created)
                .slot(unlocked.slot())
                .detail("kind", self.material.kind().name())
                .detail(if new.snapshot { "snapshot-of" } else { "clone-of" }, text::hex(&self.header.id()));
            let update = Update::begin(&top.path().join(name::HEADER), &ui.policy.witness())?;
            update.create_recorded(&mut header, &unlocked, &[begun])?;
            anchor.map(Made::keep);
            below.keep();
            Ok(copied)
        });
        let copied = made.inspect_err(|_| take_back(ui, place, &top)).with_context(|| place.display().to_string())?;
        let word = if new.snapshot { "snapshot" } else { "clone" };
        let noted = Event::new(EventKind::Cloned).detail(word, text::hex(&header.id()));
        if let Err(error) = history.note(noted) {
            ui.warn(format_args!("the history of {} does not say so: {error}", self.dir.display()));
        }
        tell(ui, place, &header, &copied);
        super::key::admin::tell(ui, &header, place);
        let dir = place.canonicalize().map_err(|source| Fault::NotADirectory { dir: place.into(), source })?;
        let done = DoneCopy::of(place, &header, &unlocked, &copied);
        let material = self.material.clone();
        Ok((Original { dir, header, keys: unlocked, material }, done))
    }

    /// A snapshot is never written, so what an interruption left could not be completed in it: the store would keep the
    /// choices of the crash for ever.
    fn refuse_interrupted(&self, keys: &Unlocked) -> Result<()> {
        let (root, ring) = (open::backend(&self.dir)?.root(), keys.key_ring(self.header.suite())?);
        let interrupted = lamassu_vault::has_interrupted_sessions(&*root, &ring, &self.header.id());
        match interrupted.with_context(|| self.dir.display().to_string())? {
            true => Err(Fault::SnapshotOfInterrupted { dir: self.dir.clone() }.into()),
            false => Ok(()),
        }
    }

    /// What an interruption left in the original is in the copy, too, and its own record of sessions says so.
    fn copy_sessions(&self, keys: &Unlocked, top: &Top, copy: (&VaultHeader, &Unlocked)) -> Result<()> {
        let suite = self.header.suite();
        let (from, to) = (open::backend(&self.dir)?.root(), open::backend(&top.path())?.root());
        let (from_ring, to_ring) = (keys.key_ring(suite)?, copy.1.key_ring(suite)?);
        let copied =
            lamassu_vault::copy_sessions((&*from, &from_ring, &self.header.id()), (&*to, &to_ring, &copy.0.id()));
        copied.with_context(|| format!("cannot copy the record of sessions of {}", self.dir.display()))
    }

    /// Everything but the header and the record of sessions, durable.
    fn fill(&self, ui: &Ui, top: &Top, privileges: Privileges) -> Result<Copied> {
        let (from, to) = (open::backend(&self.dir)?, open::backend(&top.path())?);
        let mut watch = Shown { meter: Meter::bytes(ui, "copied") };
        let copied = LocalBackend::copy_to(&from, &to, privileges, &mut watch)?;
        to.sync().map_err(|source| Fault::Backing { op: "sync", path: top.path(), source })?;
        Ok(copied)
    }
}

/// The directory of a copy, held: the owner of the one that it lies in can give its name to another.
struct Top(OwnedFd);

impl Top {
    /// Makes it, for its owner alone. `EAGAIN` where something else has its name by then.
    fn make(place: &Path) -> io::Result<Top> {
        fs::DirBuilder::new().mode(0o700).create(place)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::open(place, flags, Mode::empty())?;
        let st = rustix::fs::fstat(&dir)?;
        let is_new = st.st_mode & 0o077 == 0 && is_empty(dir.as_fd())? && is_ours(dir.as_fd(), st.st_uid)?;
        match is_new {
            true => Ok(Top(dir)),
            false => Err(Errno::AGAIN.into()),
        }
    }

    /// A path to it that needs no name.
    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

/// Only what this program made: what is in the directory that it holds, and the name where nothing is left below it.
fn take_back(ui: &Ui, place: &Path, top: &Top) {
    let emptied = fs::read_dir(top.path()).and_then(|mut entries| {
        entries.try_for_each(|entry| {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => fs::remove_dir_all(entry.path()),
                false => fs::remove_file(entry.path()),
            }
        })
    });
    if let Err(error) = emptied.and_then(|()| fs::remove_dir(place)) {
        ui.warn(format_args!("{} is no vault and could not be removed: {error}", place.display()));
    }
}

fn check_place(place: &Path, original: &Path) -> Result<(), Fault> {
    if place.symlink_metadata().is_ok() {
        return Err(Fault::CloneExists { path: place.into() });
    }
    let parent = match place.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) | None => Path::new("."),
    };
    let parent = parent.canonicalize().map_err(|source| Fault::NotADirectory { dir: parent.into(), source })?;
    let mounted = mounts::all().into_iter().filter(|m| m.fs_type == mounts::TYPE && m.source == original);
    let belongs = std::iter::once(original.to_path_buf()).chain(mounted.map(|m| m.mountpoint.clone()));
    match belongs.into_iter().find(|within| parent.starts_with(within)) {
        Some(within) => Err(Fault::CloneWithin { path: place.into(), within }),
        None => Ok(()),
    }
}

/// That no process writes the vault or a dataset in it, for as long as this lives.
enum Quiet {
    /// By the daemon, which has the datasets too.
    Frozen(Root, PathBuf),
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
                root.freeze().with_context(context)?;
                Ok(Quiet::Frozen(root, mount.mountpoint.clone()))
            }
            None => {
                let mut held: Vec<WriterLock> = lock::lock_out_writers(&ui.policy, dir)?.into_iter().collect();
                if open::found(ui, dir)?.header.has_datasets() {
                    held.extend(lock::lock_out_writers_below(&ui.policy, dir)?);
                }
                Ok(Quiet::Locked(held))
            }
        })
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        if let Quiet::Frozen(root, mountpoint) = self
            && let Err(error) = root.thaw()
        {
            output::say(format_args!(
                "lamassu: warning: {0} could not be thawed: {error}; run `lamassu thaw {0}`",
                mountpoint.display()
            ));
        }
    }
}

/// Chooses what belongs to the copy, and shows how far it is.
struct Shown {
    meter: Meter,
}

/// Names in the root that are the original's alone. The copy has its own.
const NOT_COPIED: [&str; 7] = [
    name::HEADER,
    name::HEADER_NEW,
    name::HEADER_REPLACED,
    name::HEADER_REPLACING,
    name::HISTORY,
    name::LOCK,
    name::SESSIONS,
];

impl Watch for Shown {
    fn wants(&mut self, dir: &Path, entry: &OsStr) -> bool {
        match dir.as_os_str().is_empty() {
            true => {
                !NOT_COPIED.iter().any(|own| entry == *own)
                    && !entry.as_encoded_bytes().starts_with(name::HISTORY_BROKEN.as_bytes())
            }
            false => dir != Path::new(name::STAGING),
        }
    }

    fn advance(&mut self, _files: u64, bytes: u64) -> bool {
        self.meter.advance(bytes);
        !signals::interrupted()
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
    ui.note(format_args!("made {kind} {} in {}: {how}", text::hex(&header.id()), place.display()));
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
            id: text::hex(&header.id()),
            zone: text::hex(&header.zone()),
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
