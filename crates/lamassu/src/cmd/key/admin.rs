//! `lamassu key admin init|rotate|show|pin`: who may change a vault's slots and keys.

use crate::fault::{Fault, Result};
use crate::keys::{self, KeyArg, SourceText};
use crate::open;
use crate::output::{self, Ui};
use crate::{served, text};
use lamassu_format::header::{AdminPin, Header, Role, VaultHeader, ZoneFile};
use lamassu_format::name;
use lamassu_host::Error as HostError;
use lamassu_host::slots::SlotChange;
use lamassu_keys::{KeyError, Purpose, SlotKind, Update, admin, nobody};
use serde::Serialize;
use std::path::{Path, PathBuf};

const INIT_EXAMPLES: &str = "\
Examples:
  lamassu key admin init /srv/store/vault
      the slot that opens the vault becomes the administrator's
`lamassu init` gives each new vault an administrator; this is for a vault without one. All other
slots are use-only until `lamassu key change --slot N` makes them again.";

const ROTATE_EXAMPLES: &str = "\
Examples:
  lamassu key admin rotate /srv/store/vault
Then `lamassu key add` adds the other administrators again. The old key signs the new one, so pins
in known-vaults follow when the vault is opened next. --admin-key and zone files need the new key.";

const SHOW_EXAMPLES: &str = "\
Examples:
  lamassu key admin show /srv/store/vault
  lamassu mount --admin-key HEX /srv/store/vault /mnt
      refuses a header that another administrator has signed, or none";

const PIN_EXAMPLES: &str = "\
Examples:
  lamassu key admin pin /srv/store/vault
  lamassu key admin pin --admin-key HEX /srv/store/vault
      compares with the key that the administrator has told you
  lamassu key admin pin --zone office.zone --zone-key raw:file:/root/zone.key /srv/store/vault
      for all users of the zone file, who give --admin-zone office.zone";

/// Administrator commands.
#[derive(clap::Subcommand, Debug)]
pub enum Admin {
    /// Make the slot that opens a vault its administrator's slot, and all others use-only
    Init(Init),
    /// Replace the administrator's key; the old key signs the new one, and other administrators' slots are removed
    Rotate(Rotate),
    /// Print the administrator's public key, and verify the signature over the header; needs no key
    Show(Show),
    /// Pin a vault's administrator in known-vaults: headers signed by anyone else are refused from then on
    Pin(Pin),
}

/// Options of `key admin init`.
#[derive(clap::Args, Debug)]
#[command(after_help = INIT_EXAMPLES, after_long_help = super::help(INIT_EXAMPLES))]
pub struct Init {
    #[command(flatten)]
    key: KeyArg,
    /// The vault
    dir: PathBuf,
}

/// Options of `key admin rotate`.
#[derive(clap::Args, Debug)]
#[command(after_help = ROTATE_EXAMPLES, after_long_help = super::help(ROTATE_EXAMPLES))]
pub struct Rotate {
    #[command(flatten)]
    key: KeyArg,
    /// The vault; must not be mounted for writing
    dir: PathBuf,
}

/// Options of `key admin show`.
#[derive(clap::Args, Debug)]
#[command(after_help = SHOW_EXAMPLES)]
pub struct Show {
    #[command(flatten)]
    _opening: crate::opening::AdminArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault
    dir: PathBuf,
}

/// Options of `key admin pin`.
#[derive(clap::Args, Debug)]
#[command(after_help = PIN_EXAMPLES)]
pub struct Pin {
    #[command(flatten)]
    _opening: crate::opening::AdminOrZoneArg,
    /// Pin the administrator in this zone file instead, for all users who pass it to --admin-zone
    #[arg(long, value_name = "FILE")]
    zone: Option<PathBuf>,
    /// Key source that opens the zone file [default: passphrase:prompt]
    #[arg(long, value_name = "SOURCE", env = "LAMASSU_ZONE_KEY", hide_env_values = true)]
    zone_key: Option<SourceText>,
    /// The vault
    dir: PathBuf,
}

pub fn run(ui: &Ui, command: &Admin) -> Result<()> {
    match command {
        Admin::Init(args) => init(ui, args),
        Admin::Rotate(args) => rotate(ui, args),
        Admin::Show(args) => show(ui, args),
        Admin::Pin(args) => pin(ui, args),
    }
}

fn init(ui: &Ui, args: &Init) -> Result<()> {
    open::found(ui, &args.dir)?;
    let source = args.key.source()?;
    let change = SlotChange::<VaultHeader>::begin(&ui.policy, &args.dir.join(name::HEADER))?;
    if change.header().keys().admin.is_some() {
        return Err(KeyError::HasAdministrator.into());
    }
    // The material itself is needed: the slot is made anew of it.
    let material = keys::load(ui, &source, &args.dir.display().to_string(), Purpose::Unlock)?;
    let mut unlocked = keys::try_slots(ui, change.header(), &material, args.key.slot())?;
    // Where a key is pinned there was an administrator: this header is an older or a forged one.
    keys::check_pinned(ui, change.header())?;
    let header = change.make_administrator(&mut unlocked, &material)?;
    ui.note(format_args!("slot {} is the administrator's now", unlocked.slot()));
    let others = header.keys().slots.iter().filter(|s| s.role == Role::Use).count();
    if others > 0 {
        ui.note(format_args!(
            "{others} other slots are use-only: they open the vault; `lamassu key change --slot N` rebuilds one"
        ));
    }
    tell(ui, &header, &args.dir);
    Ok(())
}

fn rotate(ui: &Ui, args: &Rotate) -> Result<()> {
    if let Some(at) = served::at(&args.dir)? {
        return Err(Fault::RetireMounted { mountpoint: at.path().into() }.into());
    }
    let source = args.key.source()?;
    // A daemon keeps the old seed, and could not change the header any more.
    let alone = super::rotate::alone(ui, &args.dir)?;
    let (mut unlocked, material) = keys::unlock_and_keep(ui, alone.header(), args.key.with(&source), &args.dir)?;
    let (done, header) = alone.exchange_administrator(&mut unlocked, &material)?;
    ui.note(format_args!("the administrator's key is new; the old one, {}, has signed it", text::hex(&done.before.0)));
    let (parent, gone): (Vec<_>, Vec<_>) = done.gone.iter().partition(|s| s.kind == SlotKind::Parent);
    if !parent.is_empty() {
        ui.warn("the vault it lies in opens it no more; `lamassu dataset set PATH inherit=yes` lets it do so again");
    }
    let gone: Vec<String> = gone.iter().map(|s| format!("{} ({:?})", s.id, text::printable(&s.label))).collect();
    if !gone.is_empty() {
        ui.warn(format_args!("these administrators' slots are gone, add them again: {}", gone.join(", ")));
    }
    keys::check_pinned(ui, &header)?;
    tell(ui, &header, &args.dir);
    Ok(())
}

#[derive(Serialize)]
struct Shown {
    vault: String,
    administrator: Option<String>,
    /// whether the signature over the header verifies under that key
    signature_good: bool,
    /// whether that key is pinned here, or an earlier one that leads to it; null: nothing is
    pinned: Option<bool>,
    /// the earlier key that is pinned, if it is one; null otherwise
    follows: Option<String>,
    /// earlier keys of the administrator, the oldest first
    before: Vec<String>,
}

fn show(ui: &Ui, args: &Show) -> Result<()> {
    let header = open::found(ui, &args.dir)?.header;
    let pinned = ui.policy.pins.of(&header.id())?;
    let checked = admin::verify_signature(&header).and_then(|()| admin::check_pinned(&header, &pinned));
    let followed = checked.as_ref().ok().copied().flatten();
    let public = header.keys().admin.as_ref().map(|a| a.public);
    let before = header.keys().admin.as_ref().map_or(&[][..], |a| &a.before);
    let shown = Shown {
        vault: header.id().to_string(),
        administrator: public.map(|key| text::hex(&key.0)),
        signature_good: public.is_some() && !matches!(checked, Err(KeyError::SignatureInvalid)),
        pinned: (!pinned.is_empty()).then(|| followed.is_some() || public.is_some_and(|key| pinned.contains(&key))),
        follows: followed.map(|key| text::hex(&key.0)),
        before: before.iter().map(|b| text::hex(&b.public.0)).collect(),
    };
    if args.json {
        output::print_json(&shown)?;
    } else {
        let pinned = match shown.pinned {
            None => "nothing is pinned here",
            Some(true) if followed.is_some() => "follows the one that is pinned here",
            Some(true) => "pinned here",
            Some(false) => "NOT the one that is pinned here",
        };
        match &shown.administrator {
            Some(key) => output::print(format_args!("{key}  {pinned}"))?,
            None => output::print("this vault has no administrator; `lamassu key admin init` makes one")?,
        }
    }
    checked?;
    Ok(())
}

fn pin(ui: &Ui, args: &Pin) -> Result<()> {
    let header = open::found(ui, &args.dir)?.header;
    admin::verify_signature(&header)?;
    keys::check_pinned(ui, &header)?;
    let Some(found) = &header.keys().admin else { return Err(KeyError::NoAdministrator.into()) };
    if let Some(file) = &args.zone {
        return pin_in_zone(ui, args, file, AdminPin { vault: header.id(), admin: found.public });
    }
    match ui.policy.pins.add(&header.id(), &found.public, &comment(&args.dir))? {
        Some(path) => ui.note(format_args!(
            "pinned {} in {}; compare it with what the administrator says",
            text::hex(&found.public.0),
            path.display()
        )),
        None => return Err(HostError::Usage("there is no place for known-vaults: set HOME or XDG_CONFIG_HOME").into()),
    }
    Ok(())
}

fn pin_in_zone(ui: &Ui, args: &Pin, file: &Path, pin: AdminPin) -> Result<()> {
    let source = keys::source_or_prompt(args.zone_key.as_ref(), "--zone-key")?;
    let update = Update::begin(file, &nobody())?;
    let mut zone: ZoneFile = update.read()?;
    let keys = keys::unlock(ui, &zone, &source, file)?;
    let key = text::hex(&pin.admin.0);
    keys.pin(&mut zone, pin)?;
    update.replace(&zone)?;
    ui.note(format_args!(
        "pinned {key} in {}; give the new file to everybody who uses it by --admin-zone",
        file.display()
    ));
    Ok(())
}

/// Says whose signature a new header carries, and pins it: its maker knows it. A place that cannot be
/// written to is no reason to fail.
pub fn tell(ui: &Ui, header: &VaultHeader, dir: &Path) {
    let Some(found) = &header.keys().admin else { return };
    let key = text::hex(&found.public.0);
    match ui.policy.pins.add(&header.id(), &found.public, &comment(dir)) {
        Ok(Some(path)) => ui.note(format_args!("its administrator's key is {key}, pinned in {}", path.display())),
        Ok(None) => ui.note(format_args!("its administrator's key is {key}; give it to `--admin-key` on other hosts")),
        Err(error) => ui.warn(format_args!("its administrator's key {key} is not pinned: {error}")),
    }
}

/// What stands behind a pin, on its line.
fn comment(dir: &Path) -> String {
    text::printable(&dir.display().to_string())
}
