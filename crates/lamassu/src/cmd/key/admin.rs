//! `lamassu key admin init|show|pin`: who may change a vault's slots and keys.

use crate::fault::Fault;
use crate::keys::{self, KeyArg};
use crate::open::Found;
use crate::output::{self, Ui};
use crate::{pins, text};
use anyhow::Result;
use lamassu_format::header::{Header, Role, VaultHeader};
use lamassu_format::name;
use lamassu_keys::history::Kind;
use lamassu_keys::{Event, KeyError, Purpose, Update, admin};
use serde::Serialize;
use std::path::{Path, PathBuf};

const INIT_EXAMPLES: &str = "\
Examples:
  lamassu key admin init /srv/store/vault      the slot that is asked for becomes the administrator's
Vaults have an administrator from `lamassu init` on; this is for those made before. All other slots are use-only until
`lamassu key change --slot N` makes them anew.";

const SHOW_EXAMPLES: &str = "\
Examples:
  lamassu key admin show /srv/store/vault
  lamassu mount --admin-key HEX /srv/store/vault /mnt      refuses what another administrator has signed, or nobody";

const PIN_EXAMPLES: &str = "\
Examples:
  lamassu key admin pin /srv/store/vault
  lamassu --admin-key HEX key admin pin /srv/store/vault   compares with what the administrator told you";

/// Administrator commands.
#[derive(clap::Subcommand, Debug)]
pub enum Admin {
    /// Make the slot that opens a vault the administrator's, and all others use-only
    Init(Init),
    /// Print the administrator's public key, and verify the signature over the header; needs no key
    Show(Show),
    /// Note the administrator's key of a vault in known-vaults: a header that somebody else has signed is refused from then on
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

/// Options of `key admin show`.
#[derive(clap::Args, Debug)]
#[command(after_help = SHOW_EXAMPLES)]
pub struct Show {
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
    /// The vault
    dir: PathBuf,
}

pub fn run(ui: &Ui, command: &Admin) -> Result<()> {
    match command {
        Admin::Init(args) => init(ui, args),
        Admin::Show(args) => show(args),
        Admin::Pin(args) => pin(ui, args),
    }
}

fn init(ui: &Ui, args: &Init) -> Result<()> {
    Found::at(&args.dir)?;
    let source = args.key.source()?;
    let update = Update::begin(&args.dir.join(name::HEADER))?;
    let mut header: VaultHeader = update.read()?;
    if header.keys().admin.is_some() {
        return Err(KeyError::HasAdministrator.into());
    }
    // The material itself is needed: the slot is made anew of it.
    let material = keys::load(ui, &source, &args.dir.display().to_string(), Purpose::Unlock)?;
    let mut unlocked = lamassu_keys::unlock(&header, &material)?;
    // Where a key is pinned there was an administrator: this header is an older or a forged one.
    keys::check_pinned(&header)?;
    let public = unlocked.make_administrator(&mut header, &material)?;
    let event = Event::new(Kind::AdminSet).slot(unlocked.slot()).detail("key", text::hex(&public));
    update.record(&mut header, &unlocked, &[event])?;
    ui.note(format_args!("slot {} is the administrator's now", unlocked.slot()));
    let others = header.keys().slots.iter().filter(|s| s.role == Role::Use).count();
    if others > 0 {
        ui.note(format_args!(
            "{others} other slots are use-only: they open the vault; `lamassu key change --slot N` makes one anew"
        ));
    }
    tell(ui, &header, &args.dir);
    Ok(())
}

#[derive(Serialize)]
struct Shown {
    vault: String,
    administrator: Option<String>,
    /// whether the signature over the header verifies under that key
    signature_good: bool,
    /// whether that key is pinned here; null: nothing is
    pinned: Option<bool>,
}

fn show(args: &Show) -> Result<()> {
    let header = Found::at(&args.dir)?.header;
    let pinned = pins::of(&header.id())?;
    let checked = admin::verify_signature(&header).and_then(|()| admin::check_pinned(&header, &pinned));
    let public = header.keys().admin.as_ref().map(|a| a.public);
    let shown = Shown {
        vault: text::hex(&header.id()),
        administrator: public.map(|key| text::hex(&key)),
        signature_good: public.is_some() && !matches!(checked, Err(KeyError::SignatureInvalid)),
        pinned: (!pinned.is_empty()).then(|| public.is_some_and(|key| pinned.contains(&key))),
    };
    if args.json {
        output::print_json(&shown)?;
    } else {
        let pinned = match shown.pinned {
            None => "nothing is pinned here",
            Some(true) => "pinned here",
            Some(false) => "NOT the one that is pinned here",
        };
        match &shown.administrator {
            Some(key) => output::print(format_args!("{key}  {pinned}"))?,
            None => output::print("this vault has no administrator; `lamassu key admin init` makes one")?,
        }
    }
    Ok(checked?)
}

fn pin(ui: &Ui, args: &Pin) -> Result<()> {
    let header = Found::at(&args.dir)?.header;
    admin::verify_signature(&header)?;
    admin::check_pinned(&header, &pins::of(&header.id())?)?;
    let Some(found) = &header.keys().admin else { return Err(KeyError::NoAdministrator.into()) };
    match pins::add(&header.id(), &found.public, &args.dir.display().to_string())? {
        Some(path) => ui.note(format_args!(
            "pinned {} in {}; compare it with what the administrator says",
            text::hex(&found.public),
            path.display()
        )),
        None => return Err(Fault::Usage("there is no place for known-vaults: set HOME or XDG_CONFIG_HOME").into()),
    }
    Ok(())
}

/// Says whose signature a new header carries, and pins it: who made it needs nobody to tell. A place that cannot be written to is no reason to fail.
pub fn tell(ui: &Ui, header: &VaultHeader, dir: &Path) {
    let Some(found) = &header.keys().admin else { return };
    let key = text::hex(&found.public);
    match pins::add(&header.id(), &found.public, &dir.display().to_string()) {
        Ok(Some(path)) => ui.note(format_args!("its administrator's key is {key}, pinned in {}", path.display())),
        Ok(None) => ui.note(format_args!("its administrator's key is {key}; `--admin-key` elsewhere makes sure of it")),
        Err(error) => ui.warn(format_args!("its administrator's key {key} is not pinned: {error}")),
    }
}
