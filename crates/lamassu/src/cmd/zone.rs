//! `lamassu zone create|show`: isolation zones.

use super::info::{DescribedCompression, DescribedSlot, slot_table, slots};
use super::key::rotate::TierArg;
use crate::fault::Result;
use crate::keys::{self, CostArg, SourceText};
use crate::output::{self, Ui};
use crate::text;
use lamassu_format::Suite;
use lamassu_format::header::{Header, ZoneFile};
use lamassu_host::compression::{self, Chosen};
use lamassu_host::slots::check_label;
use lamassu_keys::keychain::check_oblivious;
use lamassu_keys::{
    NewSlot, NewZone, ObliviousKey, Purpose, Update, copy_zone, create_oblivious_zone, create_zone, header_file,
    unix_now,
};
use serde::Serialize;
use std::path::PathBuf;

const CREATE_EXAMPLES: &str = "\
Examples:
  lamassu zone create office.zone          asks for a passphrase
  lamassu zone create -k raw:file:/root/zone.key -s blake3 office.zone
  lamassu zone create -k raw:file:zone.key --oblivious server://keeper.example/office office.zone
Give every host a copy of the file, and the key by another channel. `lamassu init --zone
office.zone` then makes vaults that deduplicate with one another.";

const SHOW_EXAMPLES: &str = "\
Examples:
  lamassu zone show office.zone
  lamassu zone show --key raw:file:/root/zone.key --json office.zone";

const ROTATE_EXAMPLES: &str = "\
Example:
  lamassu zone rotate --inner -k raw:file:/root/zone.key office.zone
  lamassu key rotate --inner --zone office.zone --zone-key raw:file:zone.key /srv/store/vault";

/// Zone commands.
#[derive(clap::Subcommand, Debug)]
pub enum Zone {
    /// Create a zone file with fresh keys
    Create(Create),
    /// Describe a zone file; with a key, verify it too
    Show(Show),
    /// Start a new epoch of a key of the zone; its vaults adopt it with `key rotate --zone`
    Rotate(Rotate),
}

/// Options of `zone create`.
#[derive(clap::Args, Debug)]
#[command(after_help = CREATE_EXAMPLES, after_long_help = create_help())]
pub struct Create {
    /// Key source of the zone file [default: passphrase:prompt]
    #[arg(short, long, value_name = "SOURCE", env = "LAMASSU_ZONE_KEY", hide_env_values = true)]
    key: Option<SourceText>,
    /// Suite of every vault of the zone
    #[arg(short, long, value_parser = text::suites(), default_value = "aes")]
    suite: Suite,
    /// Default block size of the zone's vaults
    #[arg(short, long, value_name = "N", value_parser = text::parse_block_size, default_value = "4K")]
    block_size: u32,
    /// Default compression of the zone's vaults: `none`, `lz4`, `zstd` or `zstd:LEVEL`. Vaults that compress
    /// differently do not deduplicate with one another
    #[arg(long, value_name = "CODEC", value_parser = text::parse_compression)]
    compress: Option<Chosen>,
    /// Round the lengths of compressed blocks up to a multiple of this [default: 4K; 512 for blocks of 4K]
    #[arg(long, value_name = "N", value_parser = text::parse_round)]
    compress_round: Option<u32>,
    /// Hold only the inner key: the zone's vaults deduplicate, but cannot share an outer key
    #[arg(long)]
    inner_only: bool,
    #[command(flatten)]
    cost: CostArg,
    /// Import the keys of this isolation zone of a KMIP server, kmip://HOST/?zone=ZONE, for hosts that cannot reach the
    /// server
    #[arg(long, value_name = "SOURCE")]
    from: Option<SourceText>,
    /// Make block keys depend on this key at a Lamassu server, server://HOST/ID. The server creates the key and gives
    /// it to no host, so a user who has left cannot confirm guesses. Writing new content needs the server; reading does
    /// not
    #[arg(long, value_name = "SERVER", conflicts_with = "from")]
    oblivious: Option<String>,
    /// Label of the first key slot
    #[arg(short, long, default_value = "zone create")]
    label: String,
    /// Describe the new zone as JSON
    #[arg(long)]
    json: bool,
    /// File to create; must not exist
    file: PathBuf,
}

/// Options of `zone show`.
#[derive(clap::Args, Debug)]
#[command(after_help = SHOW_EXAMPLES)]
pub struct Show {
    #[command(flatten)]
    _opening: crate::opening::ZoneArg,
    /// Verify the file with this key, and show which keys it holds
    #[arg(short, long, value_name = "SOURCE")]
    key: Option<SourceText>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The zone file
    file: PathBuf,
}

/// Options of `zone rotate`.
#[derive(clap::Args, Debug)]
#[command(after_help = ROTATE_EXAMPLES)]
pub struct Rotate {
    #[command(flatten)]
    _opening: crate::opening::ZoneArg,
    /// Key source that opens the zone file [default: passphrase:prompt]
    #[arg(short, long, value_name = "SOURCE", env = "LAMASSU_ZONE_KEY", hide_env_values = true)]
    key: Option<SourceText>,
    #[command(flatten)]
    tier: TierArg,
    /// With --inner: block keys depend on this key at a Lamassu server, server://HOST/ID, from now on; `none`: on no
    /// such key [default: as before]
    #[arg(long, value_name = "SERVER", conflicts_with = "outer")]
    oblivious: Option<String>,
    /// The zone file
    file: PathBuf,
}

fn create_help() -> String {
    format!("{CREATE_EXAMPLES}\n\n{}", keys::HELP)
}

#[derive(Serialize)]
struct Described {
    format: &'static str,
    version: u16,
    id: String,
    suite: &'static str,
    block_size: u32,
    /// how its vaults compress blocks; null: they do not
    compression: Option<DescribedCompression>,
    created: u64,
    slots: Vec<DescribedSlot>,
    /// administrators of vaults that it pins
    pins: Vec<DescribedPin>,
    /// Only with a key.
    #[serde(skip_serializing_if = "Option::is_none")]
    keychain: Option<DescribedKeychain>,
}

#[derive(Serialize)]
struct DescribedPin {
    vault: String,
    administrator: String,
}

#[derive(Serialize)]
struct DescribedKeychain {
    inner_epochs: Vec<u32>,
    outer_epochs: Vec<u32>,
    /// epochs of K_in whose keys of blocks take a part from a server
    #[serde(skip_serializing_if = "Vec::is_empty")]
    oblivious: Vec<DescribedOblivious>,
}

#[derive(Serialize)]
struct DescribedOblivious {
    epoch: u32,
    key: String,
    public: String,
}

impl DescribedOblivious {
    fn of(epoch: &lamassu_keys::Epoch) -> Option<DescribedOblivious> {
        let key = epoch.oblivious()?;
        Some(DescribedOblivious { epoch: epoch.number(), key: key.place(), public: text::hex(&key.public) })
    }
}

impl Described {
    fn of(ui: &Ui, zone: &ZoneFile, keys: Option<&lamassu_keys::Unlocked>) -> Described {
        let numbers = |epochs: &[lamassu_keys::Epoch]| epochs.iter().map(lamassu_keys::Epoch::number).collect();
        Described {
            format: ZoneFile::FORMAT,
            version: lamassu_format::VERSION,
            id: zone.id().to_string(),
            suite: zone.suite().name(),
            block_size: zone.block_size(),
            compression: zone.compression().map(DescribedCompression::of),
            created: zone.created(),
            slots: slots(ui, zone),
            pins: zone
                .pins()
                .iter()
                .map(|pin| DescribedPin { vault: pin.vault.to_string(), administrator: text::hex(&pin.admin.0) })
                .collect(),
            keychain: keys.map(|k| DescribedKeychain {
                inner_epochs: numbers(k.keychain().inner()),
                outer_epochs: numbers(k.keychain().outer()),
                oblivious: k.keychain().inner().iter().filter_map(DescribedOblivious::of).collect(),
            }),
        }
    }
}

pub fn run(ui: &Ui, command: Zone) -> Result<()> {
    match command {
        Zone::Create(args) => create(ui, &args),
        Zone::Show(args) => show(ui, &args),
        Zone::Rotate(args) => rotate(ui, &args),
    }
}

fn rotate(ui: &Ui, args: &Rotate) -> Result<()> {
    let tier = args.tier.tier();
    let source = keys::source_or_prompt(args.key.as_ref(), "--key")?;
    let update = Update::begin(&args.file, &lamassu_keys::nobody())?;
    let mut zone: ZoneFile = update.read()?;
    let mut unlocked = keys::unlock(ui, &zone, &source, &args.file)?;
    if unlocked.keychain().epochs(tier).is_empty() {
        return Err(lamassu_keys::KeyError::NoOuterKey.into());
    }
    let epoch = match args.oblivious.as_deref() {
        None => unlocked.rotate(&mut zone, tier, unix_now())?,
        Some("none") => unlocked.rotate_zone(&mut zone, None, unix_now())?,
        Some(place) => {
            let key = oblivious(ui, zone.suite(), place)?;
            unlocked.rotate_zone(&mut zone, Some(key), unix_now())?
        }
    };
    update.replace(&zone)?;
    ui.note(format_args!(
        "the zone has epoch {epoch} of its {} key. Give the new file to all; each vault takes it over by `lamassu key rotate --{} --zone FILE`, \
         and only vaults that have deduplicate with one another",
        tier.name(),
        tier.name()
    ));
    Ok(())
}

/// The oblivious key at a server on which the keys of blocks will depend. The server makes it if it does not exist.
fn oblivious(ui: &Ui, suite: Suite, place: &str) -> Result<ObliviousKey> {
    check_oblivious(suite)?;
    ui.policy.check_oblivious(true)?;
    Ok(ObliviousKey::open(place)?)
}

fn create(ui: &Ui, args: &Create) -> Result<()> {
    check_label(&args.label)?;
    let source = keys::source_or_prompt(args.key.as_ref(), "--key")?;
    let server =
        args.from.as_ref().map(|from| Ok::<_, crate::fault::Error>(from.parse("--from")?.zone_keys()?)).transpose()?;
    let update = Update::begin(&args.file, &lamassu_keys::nobody())?;
    if args.file.symlink_metadata().is_ok() {
        // Before the passphrase is asked for; `Update::create` looks again.
        return Err(header_file::FileError::Exists { path: args.file.clone() }.into());
    }
    ui.policy.check_suite(args.suite)?;
    let (suite, block_size) = (args.suite, args.block_size);
    let compression = compression::of_new(args.compress, args.compress_round, None, (suite, block_size))?;
    let key = args.oblivious.as_ref().map(|place| oblivious(ui, args.suite, place)).transpose()?;
    let material = keys::load(ui, &source, &args.file.display().to_string(), Purpose::Create)?;
    let created = unix_now();
    let cost = args.cost.measure(ui, &material);
    let slot = NewSlot { material: &material, cost, label: &args.label, created };
    let new = NewZone { suite, block_size, compression, outer: !args.inner_only, created };
    let (zone, keys) = match (&server, key) {
        (Some(server), _) => copy_zone(&new, server, &slot)?,
        (None, Some(key)) => create_oblivious_zone(&new, key, &slot)?,
        (None, None) => create_zone(&new, &slot)?,
    };
    update.create(&zone)?;
    if args.json {
        return output::print_json(&Described::of(ui, &zone, Some(&keys)));
    }
    ui.note(format_args!("made zone {} in {}", zone.id(), args.file.display()));
    Ok(())
}

fn show(ui: &Ui, args: &Show) -> Result<()> {
    let zone: ZoneFile = header_file::read(&args.file)?;
    let keys = match &args.key {
        Some(source) => Some(keys::unlock(ui, &zone, &source.parse("--key")?, &args.file)?),
        None => None,
    };
    let d = Described::of(ui, &zone, keys.as_ref());
    if args.json {
        return output::print_json(&d);
    }
    let created = text::time(i64::try_from(d.created).unwrap_or(i64::MAX / 2));
    let mut out = format!(
        "zone         {}\nformat       version {}\nsuite        {}\nblock size   {}\ncompression  {}\ncreated      {created}\n",
        d.id,
        d.version,
        d.suite,
        text::bytes(d.block_size.into()),
        d.compression.as_ref().map_or_else(|| "none".into(), DescribedCompression::line),
    );
    if let Some(k) = &d.keychain {
        let outer = if k.outer_epochs.is_empty() {
            "none: it shares the inner key alone".into()
        } else {
            list(&k.outer_epochs)
        };
        out.push_str(&format!("inner key    {}\nouter key    {outer}\n", list(&k.inner_epochs)));
        for o in &k.oblivious {
            out.push_str(&format!("oblivious    epoch {}, by {}, public key {}\n", o.epoch, o.key, o.public));
        }
    }
    for pin in &d.pins {
        out.push_str(&format!("pin          vault {}: administrator {}\n", pin.vault, pin.administrator));
    }
    output::print(format_args!("{out}\n{}", slot_table(&d.slots)))
}

fn list(epochs: &[u32]) -> String {
    format!("epoch {}", epochs.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))
}
