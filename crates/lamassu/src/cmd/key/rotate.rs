//! `lamassu key rotate|retire|epochs`: new keys for new writes, and the end of old ones.

use super::help;
use crate::fault::{Context, Fault, Result};
use crate::keys::{self, KeyArg, SourceText};
use crate::open;
use crate::output::{self, Ui};
use crate::progress::Meter;
use crate::served;
use crate::text;
use lamassu_format::header::{VaultHeader, ZoneFile};
use lamassu_fuse::control::Asked;
use lamassu_host::control::protocol::{Epoch, Epochs, Request, ZoneParcel};
use lamassu_host::rotation::{self, Alone, Proof, Renewed};
use lamassu_keys::history::Copy;
use lamassu_keys::{FileError, Purpose, Tier, Unlocked, header_file};
use lamassu_vault::check::{Problem, Progress};
use std::path::{Path, PathBuf};

const ROTATE_EXAMPLES: &str = "\
Examples:
  lamassu key rotate --outer /srv/store/vault      then: lamassu rekey --outer /srv/store/vault
  lamassu key rotate --inner ~/private             where it is mounted: no key is asked for
  lamassu key rotate --inner --zone office.zone --zone-key raw:file:zone.key /srv/store/vault
Existing content stays readable, under the old key until `lamassu rekey`. `lamassu key retire` then
removes the old key.";

const RETIRE_EXAMPLES: &str = "\
Examples:
  lamassu key epochs /srv/store/vault
  lamassu key retire --outer 1 /srv/store/vault
The command reads the whole vault. Earlier copies of the header still hold the epoch.";

const RENEW_EXAMPLES: &str = "\
Example:
  lamassu key renew /srv/store/vault
Then `lamassu key add` adds all other users again, and a new recovery key. This is a part of the
rotation after someone has left: see docs/keys.md.";

const EPOCHS_EXAMPLES: &str = "\
Examples:
  lamassu key epochs /srv/store/vault
  lamassu key epochs --json ~/private | jq .inner";

/// Which of the two keys.
#[derive(clap::Args, Clone, Copy, Debug)]
#[group(required = true, multiple = false)]
pub struct TierArg {
    /// The outer key K_out: it seals metadata, attribute names and directories
    #[arg(long)]
    outer: bool,
    /// The inner key K_in: it makes equal blocks equal
    #[arg(long)]
    inner: bool,
}

impl TierArg {
    /// The tier whose option is set.
    pub fn tier(self) -> Tier {
        if self.inner { Tier::Inner } else { Tier::Outer }
    }
}

/// Options of `key renew`.
#[derive(clap::Args, Debug)]
#[command(after_help = RENEW_EXAMPLES, after_long_help = help(RENEW_EXAMPLES))]
pub struct Renew {
    #[command(flatten)]
    key: KeyArg,
    /// The vault; must not be mounted for writing
    dir: PathBuf,
}

/// Options of `key rotate`.
#[derive(clap::Args, Debug)]
#[command(after_help = ROTATE_EXAMPLES, after_long_help = help(ROTATE_EXAMPLES))]
pub struct Rotate {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    tier: TierArg,
    /// Adopt the newer keys of the zone that this vault belongs to
    #[arg(long, value_name = "FILE", requires = "zone_key", conflicts_with = "leave_zone")]
    zone: Option<PathBuf>,
    /// Key source that opens the zone file
    #[arg(long, value_name = "SOURCE", env = "LAMASSU_ZONE_KEY", hide_env_values = true)]
    zone_key: Option<SourceText>,
    /// Replace the key shared with a zone by one of the vault's own
    #[arg(long)]
    leave_zone: bool,
    /// The vault, or where it is mounted
    dir: PathBuf,
}

/// Options of `key retire`.
#[derive(clap::Args, Debug)]
#[command(after_help = RETIRE_EXAMPLES, after_long_help = help(RETIRE_EXAMPLES))]
pub struct Retire {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    tier: TierArg,
    /// Number of the epoch, as `key epochs` shows it
    epoch: u32,
    /// The vault; must not be mounted for writing
    dir: PathBuf,
}

/// Options of `key epochs`.
#[derive(clap::Args, Debug)]
#[command(after_help = EPOCHS_EXAMPLES, after_long_help = help(EPOCHS_EXAMPLES))]
pub struct ShowEpochs {
    #[command(flatten)]
    key: KeyArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault, or where it is mounted
    dir: PathBuf,
}

pub fn rotate(ui: &Ui, args: &Rotate) -> Result<()> {
    let tier = args.tier.tier();
    let epochs = match served::of(&args.dir)? {
        Some(mountpoint) => {
            let zone = match &args.zone {
                Some(file) => Some(zone_parcel(ui, args, &mountpoint, file)?),
                None => None,
            };
            served::ask(&mountpoint, &Request::Rotate { tier, leave_zone: args.leave_zone, zone })?
        }
        None => rotate_offline(ui, args, tier)?,
    };
    let newest = of(&epochs, tier).last().map_or(0, |e| e.epoch);
    ui.note(format_args!("new writes use epoch {newest} of the {} key", tier.name()));
    match tier {
        Tier::Outer => ui.note("what is there stays under earlier epochs until `lamassu rekey --outer`"),
        Tier::Inner => {
            ui.note(
                "what is there stays under earlier epochs, and new data does not deduplicate with it: writing all of it again would take \
                 up to as much space once more. `lamassu rekey --full` ends that, and writes all data anew",
            );
            say_how_much(ui, &args.dir);
        }
    }
    Ok(())
}

/// How much the data amounts to that deduplicates with earlier epochs alone.
fn say_how_much(ui: &Ui, dir: &Path) {
    let Ok(dir) = served::dir_of(dir) else { return };
    if let Ok(bytes) = lamassu_vault::stored_bytes(&dir) {
        ui.note(format_args!("under earlier epochs: up to {}", text::bytes(bytes)));
    }
}

/// The vault in `dir`, which no process has open for writing.
pub(super) fn alone(ui: &Ui, dir: &Path) -> Result<Alone> {
    Alone::with(&ui.policy, dir).map_err(|error| open::explained(dir, error))
}

fn rotate_offline(ui: &Ui, args: &Rotate, tier: Tier) -> Result<Epochs> {
    let source = args.key.source()?;
    let alone = alone(ui, &args.dir)?;
    alone.refuse_snapshot()?;
    let mut unlocked = keys::unlock(ui, alone.header(), args.key.with(&source), &args.dir)?;
    let zone = match &args.zone {
        Some(file) => Some(open_zone(ui, args, file)?),
        None => None,
    };
    Ok(alone.rotate(&mut unlocked, tier, args.leave_zone, zone.as_ref())?)
}

fn open_zone(ui: &Ui, args: &Rotate, file: &Path) -> Result<(ZoneFile, Unlocked)> {
    let zone: ZoneFile = header_file::read(file)?;
    let keys = keys::unlock(ui, &zone, &keys::source_or_prompt(args.zone_key.as_ref(), "--zone-key")?, file)?;
    Ok((zone, keys))
}

fn zone_parcel(ui: &Ui, args: &Rotate, at: &Asked, file: &Path) -> Result<ZoneParcel> {
    let bytes = header_file::read_bytes(file)?;
    let text = String::from_utf8(bytes).map_err(|_| FileError::NotAFile { path: file.into() })?;
    let source = keys::source_or_prompt(args.zone_key.as_ref(), "--zone-key")?;
    let material = keys::load(ui, &source, &file.display().to_string(), Purpose::Unlock)?;
    Ok(ZoneParcel { file: text, secret: served::pack(at, &material, lamassu_keys::cost::FALLBACK)? })
}

pub fn renew(ui: &Ui, args: &Renew) -> Result<()> {
    if let Some(at) = served::at(&args.dir)? {
        return Err(Fault::RetireMounted { mountpoint: at.path().into() }.into());
    }
    let source = args.key.source()?;
    // A daemon keeps the old file key, and could not change the header any more.
    let alone = alone(ui, &args.dir)?;
    let material = keys::load(ui, &source, &args.dir.display().to_string(), Purpose::Unlock)?;
    let unlocked = keys::try_slots(ui, alone.header(), &material, args.key.slot());
    let mut unlocked = unlocked.with_context(|| args.dir.display().to_string())?;
    keys::check_pinned(ui, alone.header()).with_context(|| args.dir.display().to_string())?;
    let Renewed { slot, gone, lacks } = alone.renew(&mut unlocked, &material)?;
    ui.note(format_args!("the file key is new; slot {slot} is the only one, opened as before"));
    let gone: Vec<String> = gone.iter().map(|s| format!("{} ({:?})", s.id, s.label)).collect();
    if !gone.is_empty() {
        ui.warn(format_args!("these slots are gone, add them again: {}", gone.join(", ")));
    }
    if let Some(why) = lacks {
        ui.warn(format_args!(
            "the new history may lack copies of the header, clones and snapshots that were once on record: {why}"
        ));
    }
    Ok(())
}

fn of(epochs: &Epochs, tier: Tier) -> &[Epoch] {
    match tier {
        Tier::Inner => &epochs.inner,
        Tier::Outer => &epochs.outer,
    }
}

pub fn show_epochs(ui: &Ui, args: &ShowEpochs) -> Result<()> {
    let epochs: Epochs = match served::at(&args.dir)? {
        Some(mountpoint) => served::ask(&mountpoint, &Request::Epochs {})?,
        None => rotation::epochs(open::unlocked(ui, &args.dir, &args.key)?.keys.keychain()),
    };
    if args.json {
        return output::print_json(&epochs);
    }
    let mut out = String::from("key    epoch  created");
    for (name, list) in [("outer", &epochs.outer), ("inner", &epochs.inner)] {
        for e in list {
            let created = text::time(i64::try_from(e.created).unwrap_or(i64::MAX / 2));
            out.push_str(&format!("\n{name}  {:<5}  {created}", e.epoch));
        }
    }
    output::print(out)
}

pub fn retire(ui: &Ui, args: &Retire) -> Result<()> {
    let (tier, epoch) = (args.tier.tier(), args.epoch);
    if let Some(at) = served::at(&args.dir)? {
        return Err(Fault::RetireMounted { mountpoint: at.path().into() }.into());
    }
    let source = args.key.source()?;
    // From before the proof until the epoch is gone.
    let alone = alone(ui, &args.dir)?;
    let mut unlocked = keys::unlock(ui, alone.header(), args.key.with(&source), &args.dir)?;
    let shown = Shown { meter: Meter::bytes(ui, "verified without it"), ui };
    let header = alone.retire(&mut unlocked, tier, epoch, &shown);
    drop(shown);
    let header = header?;
    ui.note(format_args!(
        "retired epoch {epoch} of the {} key: nothing in the vault needs it, and this header holds it no more",
        tier.name()
    ));
    ui.note("copies of the header made before, and older copies of the store, still do");
    say_copies(ui, args, &header, &unlocked);
    Ok(())
}

/// Copies on record that may hold the retired epoch.
fn say_copies(ui: &Ui, args: &Retire, header: &VaultHeader, unlocked: &Unlocked) {
    let report = match unlocked.history(&args.dir, header).and_then(|history| Ok(history.read()?)) {
        Ok(report) => report,
        Err(error) => return ui.warn(format_args!("which copies are on record is not known: {error}")),
    };
    for entry in &report.entries {
        let made = text::time(i64::try_from(entry.time).unwrap_or(i64::MAX / 2));
        match entry.copy() {
            Some(Copy::Header(file)) => {
                let place = if file.is_empty() { "somewhere".into() } else { text::printable(file) };
                ui.warn(format_args!("a copy of the header made at {made} holds it: {place}"));
            }
            Some(Copy::Vault { kind, id }) => {
                ui.warn(format_args!("a {kind} made at {made} holds it: {}", text::printable(id)));
            }
            None => {}
        }
    }
    if report.lacks_copies() {
        ui.warn("the history was damaged, or began anew after it was: it may lack copies that were once on record");
    }
}

/// Shows the progress of a proof. Objects that need the epoch are counted: they are whole as long as the epoch stays.
struct Shown<'a> {
    meter: Meter,
    ui: &'a Ui,
}

impl Progress for Shown<'_> {
    fn total(&self, _files: u64, bytes: u64) {
        self.meter.set_total(bytes);
    }

    fn advance(&self, _files: u64, bytes: u64) {
        self.meter.advance(bytes);
    }

    fn problem(&self, problem: &Problem) {
        let path = text::printable(problem.path.as_ref().unwrap_or(&problem.stored));
        self.meter.suspend(|| self.ui.detail(format_args!("does not verify without it: {path}: {}", problem.kind)));
    }
}

impl Proof for Shown<'_> {
    fn dataset(&self, path: &Path) {
        self.meter.suspend(|| {
            self.ui.warn(format_args!(
                "the parent slot of the dataset {} needs it: `lamassu rekey --outer` seals it again",
                path.display()
            ));
        });
    }
}
