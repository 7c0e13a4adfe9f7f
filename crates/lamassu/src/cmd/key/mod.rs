//! `lamassu key list|add|remove|change|admin|generate|backup|restore|unload|load|destroy`: the key slots of a vault, or
//! of a zone where a file is given.
//!
//! No data is touched. The header's update lock is held from before it is read until it is replaced.

pub mod admin;
mod backup;
pub mod destroy;
pub mod generate;
mod load;
mod mounted;
mod recovery;
pub mod rotate;

use super::info::{DescribedSlot, slot_table, slots};
use crate::fault::Result;
use crate::keys::{self, CostArg, KeyArg, SourceText};
use crate::open;
use crate::output::{self, Ui};
use crate::served;
use backup::backup as back_up;
use lamassu_format::header::{Header, VaultHeader, ZoneFile};
use lamassu_format::name;
use lamassu_host::slots::{Replacement, SlotChange, check_label};
use lamassu_keys::shares::Scheme;
use lamassu_keys::{NewSlot, Purpose, Role, Terms, header_file, unix_now};
use serde::Serialize;
use std::path::{Path, PathBuf};

const LIST_EXAMPLES: &str = "\
Examples:
  lamassu key list /srv/store/vault
  lamassu key list --json office.zone";

const ADD_EXAMPLES: &str = "\
Examples:
  lamassu key add --new-key raw:file:/root/backup.key --label backup /srv/store/vault
  lamassu key add /srv/store/vault                   asks for an old passphrase, then a new one
  lamassu key add --use-only --expires 90 -n raw:file:/root/job.key /srv/store/vault
  lamassu key add --recovery /srv/store/vault        prints 24 words to write down, once
  lamassu key add --recovery --shares 3-of-5 /srv/store/vault
      prints five shares; any three are the key";

const REMOVE_EXAMPLES: &str = "\
Examples:
  lamassu key remove /srv/store/vault 2    asks for a passphrase that opens any slot
The removed key still opens older copies of the header (backups, snapshots of the store).";

const CHANGE_EXAMPLES: &str = "\
Examples:
  lamassu key change /srv/store/vault      a new passphrase for the slot that the old one opens
  lamassu key change -k raw:file:/root/k --slot 1 -n hex:file:/root/new.hex /srv/store/vault";

/// Key commands.
#[derive(clap::Subcommand, Debug)]
pub enum Key {
    /// List the key slots; needs no key
    List(List),
    /// Add a slot: one more key that opens the vault
    Add(Add),
    /// Remove a slot; the last one cannot be removed
    Remove(Remove),
    /// Replace a slot by one with a new key
    Change(Change),
    /// Manage the administrator, whose signature over the header no use-only slot can make
    #[command(subcommand)]
    Admin(admin::Admin),
    /// Generate a key, in a file or at a server
    Generate(generate::Generate),
    /// Back up the header: without a header, no key opens the vault
    Backup(backup::Backup),
    /// Replace the file key, so that an old slot's key with a copy of the header no longer opens the vault; only the
    /// slot of --key stays
    Renew(rotate::Renew),
    /// Start a new epoch of the inner or the outer key; new writes use it
    Rotate(rotate::Rotate),
    /// Remove an old epoch from the keychain, after verifying that nothing needs it
    Retire(rotate::Retire),
    /// List the epochs of the inner and the outer key
    Epochs(rotate::ShowEpochs),
    /// Unload the keys of a mounted vault or dataset; the mount stays
    Unload(load::Unload),
    /// Load the key of a mounted vault or dataset again
    Load(load::Load),
    /// Restore the header from a copy, after verifying that it opens the vault
    Restore(backup::Restore),
    /// Make a vault's keys unrecoverable: erase every slot, leave the ciphertext, and sign a receipt
    Destroy(destroy::Destroy),
}

/// Options of `key list`.
#[derive(clap::Args, Debug)]
#[command(after_help = LIST_EXAMPLES)]
pub struct List {
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault, or where it is mounted, or a zone file
    dir: PathBuf,
}

/// Options of `key add`.
#[derive(clap::Args, Debug)]
#[command(after_help = ADD_EXAMPLES, after_long_help = help(ADD_EXAMPLES))]
pub struct Add {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    new: NewKeyArg,
    /// Make a recovery key and print its 24 words once: for paper, in case every other key is lost
    #[arg(long, conflicts_with = "new_key")]
    recovery: bool,
    /// Print the recovery key as N shares; any M of them together are the key
    #[arg(long, value_name = "M-of-N", requires = "recovery", conflicts_with = "new_key")]
    shares: Option<Scheme>,
    #[command(flatten)]
    terms: TermsArg,
    /// Label of the new slot
    #[arg(short, long, default_value = "")]
    label: String,
    /// The vault, its mountpoint, or a zone file (for a zone file, the environment's key is LAMASSU_ZONE_KEY)
    dir: PathBuf,
}

/// Options of `key remove`.
#[derive(clap::Args, Debug)]
#[command(after_help = REMOVE_EXAMPLES, after_long_help = help(REMOVE_EXAMPLES))]
pub struct Remove {
    #[command(flatten)]
    key: KeyArg,
    /// The vault, its mountpoint, or a zone file (for a zone file, the environment's key is LAMASSU_ZONE_KEY)
    dir: PathBuf,
    /// Number of the slot, as `key list` shows it
    slot: u32,
}

/// Options of `key change`.
#[derive(clap::Args, Debug)]
#[command(after_help = CHANGE_EXAMPLES, after_long_help = help(CHANGE_EXAMPLES))]
pub struct Change {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    new: NewKeyArg,
    /// Number of the slot to replace [default: the one that --key opens]
    #[arg(short, long, value_name = "N")]
    slot: Option<u32>,
    #[command(flatten)]
    terms: TermsArg,
    /// Label of the new slot [default: that of the old one]
    #[arg(short, long)]
    label: Option<String>,
    /// The vault, its mountpoint, or a zone file (for a zone file, the environment's key is LAMASSU_ZONE_KEY)
    dir: PathBuf,
}

#[derive(clap::Args, Debug)]
struct TermsArg {
    /// The new slot opens the vault but cannot change slots or keys; only administrators' slots can
    #[arg(long)]
    use_only: bool,
    /// Warn from 30 days before this date: 2027-01-31, a number of days, or never. The slot keeps working
    #[arg(long, value_name = "DATE|DAYS", value_parser = expiry)]
    expires: Option<Expires>,
}

/// A day, or never.
#[derive(Clone, Copy, Debug)]
struct Expires(Option<u64>);

fn expiry(text: &str) -> Result<Expires, String> {
    crate::text::parse_expiry(text, unix_now()).map(Expires)
}

impl TermsArg {
    /// The terms of a new slot.
    fn terms(&self) -> Terms {
        let (role, expires) = self.changed();
        Terms { role: role.unwrap_or(Role::Administrator), expires }
    }

    /// The terms of a slot that replaces another. `None` as role: the new slot keeps the role of the old one.
    fn changed(&self) -> (Option<Role>, Option<u64>) {
        (self.use_only.then_some(Role::Use), self.expires.and_then(|Expires(at)| at))
    }
}

#[derive(clap::Args, Debug)]
struct NewKeyArg {
    /// Key source of the new slot [default: passphrase:prompt]
    #[arg(short = 'n', long, value_name = "SOURCE")]
    new_key: Option<SourceText>,
    #[command(flatten)]
    cost: CostArg,
}

fn help(examples: &str) -> String {
    format!("{examples}\n\n{}", keys::HELP)
}

/// Where the slots are.
enum Target {
    Vault(PathBuf),
    Zone(PathBuf),
}

impl Target {
    fn of(ui: &Ui, path: &Path) -> Result<Target> {
        if path.is_file() {
            return Ok(Target::Zone(path.into()));
        }
        open::found(ui, path)?;
        Ok(Target::Vault(path.join(name::HEADER)))
    }
}

/// Calls a function that is generic over the kind of header, for the kind that lies at the path.
macro_rules! on_target {
    ($path:expr, $function:ident($ui:expr, $($arg:expr),*)) => {
        match Target::of($ui, $path)? {
            Target::Vault(file) => $function::<VaultHeader>(&file, $ui, $($arg),*),
            Target::Zone(file) => $function::<ZoneFile>(&file, $ui, $($arg),*),
        }
    };
}

pub fn run(ui: &Ui, command: Key) -> Result<()> {
    if on_mount(ui, &command)? {
        return Ok(());
    }
    match command {
        Key::List(args) => on_target!(&served::dir_of(&args.dir)?, list(ui, &args)),
        Key::Add(args) => on_target!(&args.dir, add(ui, &args)),
        Key::Remove(args) => on_target!(&args.dir, remove(ui, &args)),
        Key::Change(args) => on_target!(&args.dir, change(ui, &args)),
        Key::Renew(args) => rotate::renew(ui, &args),
        Key::Rotate(args) => rotate::rotate(ui, &args),
        Key::Retire(args) => rotate::retire(ui, &args),
        Key::Epochs(args) => rotate::show_epochs(ui, &args),
        Key::Unload(args) => load::unload(ui, &args),
        Key::Load(args) => load::load(ui, &args),
        Key::Admin(command) => admin::run(ui, &command),
        Key::Generate(args) => generate::run(ui, &args),
        Key::Backup(args) => on_target!(&args.dir, back_up(ui, &args)),
        Key::Restore(args) => backup::restore(ui, &args),
        Key::Destroy(args) => destroy::run(ui, &args),
    }
}

/// Changes slots where a vault is mounted: its daemon does. False: it is not mounted, or the command is another one.
fn on_mount(ui: &Ui, command: &Key) -> Result<bool> {
    let (Key::Add(Add { dir, .. }) | Key::Remove(Remove { dir, .. }) | Key::Change(Change { dir, .. })) = command
    else {
        return Ok(false);
    };
    let Some(at) = served::of(dir)? else { return Ok(false) };
    match command {
        Key::Add(args) => mounted::add(ui, &at, args)?,
        Key::Remove(args) => mounted::remove(ui, &at, args)?,
        Key::Change(args) => mounted::change(ui, &at, args)?,
        _ => return Ok(false),
    }
    Ok(true)
}

#[derive(Serialize)]
struct Listed {
    slots: Vec<DescribedSlot>,
}

fn list<H: Header>(file: &Path, ui: &Ui, args: &List) -> Result<()> {
    let header: H = header_file::read(file)?;
    let slots = slots(ui, &header);
    let now = unix_now();
    header.keys().slots.iter().filter_map(|s| crate::text::expiry_warning(s, now)).for_each(|w| ui.warn(w));
    if args.json { output::print_json(&Listed { slots }) } else { output::print(slot_table(&slots)) }
}

fn add<H: Header + Clone>(file: &Path, ui: &Ui, args: &Add) -> Result<()> {
    check_label(&args.label)?;
    let old = args.key.source_for::<H>()?;
    if args.recovery {
        return recovery::add::<H>(file, ui, args, &old);
    }
    let new = keys::source_or_prompt(args.new.new_key.as_ref(), "--new-key")?;
    let change = SlotChange::<H>::begin(&ui.policy, file)?;
    let unlocked = keys::unlock(ui, change.header(), args.key.with(&old), &args.dir)?;
    // Before a new key is asked for, or anything is said to have been done.
    unlocked.may_change(change.header())?;
    let material = keys::load(ui, &new, &args.dir.display().to_string(), Purpose::Create)?;
    let cost = args.new.cost.measure(ui, &material);
    let slot = NewSlot { material: &material, cost, label: &args.label, created: unix_now() };
    let id = change.add(&unlocked, &slot, args.terms.terms())?;
    ui.note(format_args!("added slot {id}"));
    Ok(())
}

fn remove<H: Header + Clone>(file: &Path, ui: &Ui, args: &Remove) -> Result<()> {
    let source = args.key.source_for::<H>()?;
    let change = SlotChange::<H>::begin(&ui.policy, file)?;
    let unlocked = keys::unlock(ui, change.header(), args.key.with(&source), &args.dir)?;
    ui.note(change.remove(&unlocked, args.slot)?);
    Ok(())
}

fn change<H: Header + Clone>(file: &Path, ui: &Ui, args: &Change) -> Result<()> {
    args.label.as_deref().map_or(Ok(()), check_label)?;
    let (old, new) = (args.key.source_for::<H>()?, keys::source_or_prompt(args.new.new_key.as_ref(), "--new-key")?);
    let change = SlotChange::<H>::begin(&ui.policy, file)?;
    let unlocked = keys::unlock(ui, change.header(), args.key.with(&old), &args.dir)?;
    // Before a new key is asked for, or anything is said to have been done.
    unlocked.may_change(change.header())?;
    let id = args.slot.unwrap_or_else(|| unlocked.slot());
    change.has(id)?;
    let material = keys::load(ui, &new, &args.dir.display().to_string(), Purpose::Create)?;
    let (role, expires) = args.terms.changed();
    let cost = args.new.cost.measure(ui, &material);
    let slot = Replacement { material: &material, cost, label: args.label.as_deref(), role, expires };
    let (new_id, removed) = change.replace(&unlocked, id, &slot)?;
    ui.note(format_args!("slot {new_id} takes the place of slot {id}"));
    ui.note(removed);
    Ok(())
}
