//! `lamassu init`: makes a vault.
//!
//! The header is written last: without it there is no vault, and a failed init takes back what it made.

use super::info::Described;
use crate::fault::{Context, Result};
use crate::keys::{self, CostArg, KeyArg, SourceText};
use crate::output::{self, Ui};
use crate::store_kind::{advice, remark};
use crate::text;
use clap::ValueEnum;
use lamassu_format::header::{NameMode, VaultHeader, ZoneFile};
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_host::Error as HostError;
use lamassu_host::anchors::{Choice, NewTrees, disk};
use lamassu_host::compression::{self, Chosen};
use lamassu_host::create::{VaultPlace, refuse_full};
use lamassu_host::slots::check_label;
use lamassu_host::store_kind::{self, StoreKind};
use lamassu_keys::{
    KeySource, Material, NewSlot, NewVault, Outer, Purpose, Unlocked, Zone, ZoneKeys, header_file, unix_now,
};
use serde::Serialize;
use std::path::PathBuf;

const BLOCK_SIZE_DEFAULT: u32 = 4096;
const LABEL_DEFAULT: &str = "init";

const EXAMPLES: &str = "\
Examples:
  lamassu init /srv/store/vault                              asks for a passphrase
  lamassu init -k raw:file:/root/vault.key -b 128K /tank/v   a key file; ZFS records of 128 KiB
  lamassu init --zone office.zone --zone-key hex:file:zone.hex --outer shared /srv/store/v2
      deduplicates with other vaults of the zone; those that share its outer key can read it
  lamassu init --domain file /srv/store/v4
      equal blocks of different files are not equal in the store
  lamassu init -k kmip://kms/?zone=7 --zone kmip://kms/?zone=7 --outer shared /srv/store/v3
      a KMIP server keeps the zone's keys; the vault opens as long as the server gives them";

/// Options of `init`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    /// Generate the key that --key names first, at its KMIP server or Lamassu server
    #[arg(long)]
    generate_key: bool,
    /// Ciphers and hashes; files of different suites do not deduplicate with one another [default: aes, or the zone's]
    #[arg(short, long, value_parser = text::suites())]
    suite: Option<Suite>,
    /// Bytes of a block, the unit that the store below deduplicates, e.g. 4K, 128K (a ZFS record) [default: 4K, or the
    /// zone's]
    #[arg(short, long, value_name = "N", value_parser = text::parse_block_size)]
    block_size: Option<u32>,
    /// Compress blocks before they are encrypted: `none`, `lz4`, `zstd` or `zstd:LEVEL`. The lengths of blocks become
    /// visible in steps: do not compress secrets together with data that others can choose [default: none, or the
    /// zone's]
    #[arg(long, value_name = "CODEC", value_parser = text::parse_compression)]
    compress: Option<Chosen>,
    /// Round the lengths of compressed blocks up to a multiple of this, e.g. 16K: a larger one reveals less, and saves
    /// less [default: 4K; 512 for blocks of 4K]
    #[arg(long, value_name = "N", value_parser = text::parse_round)]
    compress_round: Option<u32>,
    /// Transient key slots in a page, 1 to 62: the number of overwritten blocks that share one commit
    #[arg(short = 'R', long, value_name = "R", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=62))]
    reserved_slots: u16,
    /// Whether file names are encrypted
    #[arg(short, long, value_enum, default_value_t = Names::Encrypted)]
    names: Names,
    /// Whether equal small files (of one page) are equal in the store; `random` hides equality, so they do not
    /// deduplicate [default: convergent; always random in the domains file and none]
    #[arg(long, value_enum)]
    small_files: Option<SmallFiles>,
    /// The scope in which equal blocks are equal in the store: the `zone`; the `family` of this vault and its clones;
    /// each `file`, or nothing (`none`). It decides what deduplicates, and what an observer of the store sees. It can
    /// never be changed
    #[arg(long, value_name = "DOMAIN", value_parser = text::domains(), default_value = Domain::Zone.name())]
    domain: Domain,
    /// Zone file whose inner key the vault uses, to deduplicate with the zone's other vaults; or kmip://HOST/?zone=ZONE
    /// for a zone whose keys a KMIP server keeps
    #[arg(short, long, value_name = "FILE")]
    zone: Option<PathBuf>,
    /// Key source that opens the zone file [default: passphrase:prompt]
    #[arg(long, value_name = "SOURCE", env = "LAMASSU_ZONE_KEY", hide_env_values = true)]
    zone_key: Option<SourceText>,
    /// Outer key: `own` keeps this vault's files private; with `shared`, vaults that share the zone's outer key can
    /// read one another, and small files deduplicate across them [default: own]
    #[arg(long, value_enum, requires = "zone")]
    outer: Option<OuterArg>,
    /// Digests in a record of an anchored vault's verification trees: a power of two, 2 to 256
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(2..=256))]
    tree_degree: u16,
    /// Leaves of an anchored vault's verification trees: `pages` costs least; with `blocks`, `lamassu scrub` verifies
    /// the whole store without a key, and each block is read once more after it was written
    #[arg(long, value_enum, value_name = "LEAVES", default_value_t = LeavesArg::Pages)]
    tree_leaves: LeavesArg,
    #[command(flatten)]
    cost: CostArg,
    /// Label of the first key slot
    #[arg(short, long, default_value = LABEL_DEFAULT)]
    label: String,
    /// Describe the new vault as JSON
    #[arg(long)]
    json: bool,
    /// Directory of the vault: created if it does not exist, otherwise it must be empty
    dir: PathBuf,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Names {
    Encrypted,
    Plain,
}

#[derive(Clone, Copy, Debug, ValueEnum, PartialEq)]
enum SmallFiles {
    Convergent,
    Random,
}

/// What the trees of an anchored vault are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum LeavesArg {
    Pages,
    Blocks,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OuterArg {
    Own,
    Shared,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Made {
    #[serde(flatten)]
    vault: Described,
    /// the anchor's file; null: there is none
    anchor: Option<PathBuf>,
    store: Option<StoreKind>,
    warnings: Vec<String>,
}

/// A zone's keys, and the file they lay in.
enum LoadedZone {
    File { file: Box<ZoneFile>, keys: Unlocked },
    Server(ZoneKeys),
}

impl LoadedZone {
    fn file(&self) -> Option<&ZoneFile> {
        match self {
            LoadedZone::File { file, keys: _ } => Some(file),
            LoadedZone::Server(_) => None,
        }
    }
}

impl Args {
    fn has_convergent_small_files(&self) -> bool {
        self.small_files != Some(SmallFiles::Random) && !self.domain.is_salted()
    }
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    if matches!(ui.policy.anchors.choice(), Choice::Server(_)) {
        return Err(HostError::Usage(
            "a new vault's anchor is made on this host: leave out --anchor server://…, and then move it with `lamassu anchor move DIR server://HOST:PORT`",
        )
        .into());
    }
    check_label(&args.label)?;
    check_domain(&args)?;
    if !args.tree_degree.is_power_of_two() {
        return Err(HostError::Member { option: "--tree-degree", rule: "a power of two from 2 to 256" }.into());
    }
    let source = args.key.source()?;
    ui.policy.check_small_files(args.has_convergent_small_files())?;
    args.suite.map_or(Ok(()), |suite| ui.policy.check_suite(suite))?;
    // Before anything is asked for or made.
    refuse_full(&args.dir)?;
    if args.generate_key {
        super::key::generate::at_server(ui, &source)?;
    }
    let zone = load_zone(ui, &args)?;
    let material = keys::load(ui, &source, &args.dir.display().to_string(), Purpose::Create)?;
    let (place, not_private) = VaultPlace::prepare(&args.dir, 0o777 & !umask())?;
    if let Some(error) = not_private {
        ui.warn(format_args!(
            "{} could not be made private (mode 0700): {error}; other users may reach what is stored in it, and --allow-other will be refused",
            args.dir.display()
        ));
    }
    let (header, anchor) = fill(ui, &args, &place, &material, zone.as_ref()).inspect_err(|_| place.take_back())?;
    report(ui, &args, header, anchor)
}

fn fill(
    ui: &Ui,
    args: &Args,
    place: &VaultPlace,
    material: &Material,
    zone: Option<&LoadedZone>,
) -> Result<(VaultHeader, Option<PathBuf>)> {
    let created = unix_now();
    let new = new_vault(args, zone, place.name_max()?, created)?;
    let slot = NewSlot { cost: args.cost.measure(ui, material), material, label: &args.label, created };
    let degree_log2 = args.tree_degree.trailing_zeros() as u8;
    let trees = NewTrees { degree_log2, blocks: args.tree_leaves == LeavesArg::Blocks };
    Ok(place.fill(&ui.policy, &new, &slot, trees)?)
}

fn load_zone(ui: &Ui, args: &Args) -> Result<Option<LoadedZone>> {
    let Some(path) = &args.zone else {
        // LAMASSU_ZONE_KEY alone is no request; on the command line the option would be.
        return match &args.zone_key {
            Some(_) if std::env::var_os("LAMASSU_ZONE_KEY").is_none() => {
                Err(HostError::Usage("--zone-key needs --zone FILE").into())
            }
            _ => Ok(None),
        };
    };
    if let Some(server) = path.to_str().filter(|text| text.starts_with("kmip:")) {
        let keys = server.parse::<KeySource>().context("--zone")?.zone_keys()?;
        return Ok(Some(LoadedZone::Server(keys)));
    }
    let source = keys::source_or_prompt(args.zone_key.as_ref(), "--zone-key")?;
    let file: ZoneFile = header_file::read(path)?;
    let keys = keys::unlock(ui, &file, &source, path)?;
    Ok(Some(LoadedZone::File { file: Box::new(file), keys }))
}

/// What does not fit the deduplication domain. Before anything is asked for.
fn check_domain(args: &Args) -> Result<(), HostError> {
    if args.domain != Domain::Zone && args.zone.is_some() {
        return Err(HostError::Usage(
            "--zone is for the domain zone alone: in the domains family, file and none a vault has an inner key of its own",
        ));
    }
    if args.domain.is_salted() && args.suite.is_some_and(|suite| !args.domain.is_for(suite)) {
        return Err(HostError::Usage(
            "the domains file and none need another suite than paper, whose keys, as published, depend on a block's content alone",
        ));
    }
    if args.domain.is_salted() && args.small_files == Some(SmallFiles::Convergent) {
        return Err(HostError::Usage(
            "the domains file and none keep equal small files apart: leave out --small-files convergent",
        ));
    }
    Ok(())
}

/// The mask of new files of this process. It can only be read by setting it; no other thread makes files yet.
fn umask() -> u32 {
    let mask = rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    rustix::process::umask(mask);
    mask.as_raw_mode()
}

fn new_vault<'a>(args: &Args, zone: Option<&'a LoadedZone>, name_max: u8, created: u64) -> Result<NewVault<'a>> {
    let file = zone.and_then(LoadedZone::file);
    let suite = args.suite.or(file.map(ZoneFile::suite)).unwrap_or(Suite::Aes);
    let block_size = args.block_size.or(file.map(ZoneFile::block_size)).unwrap_or(BLOCK_SIZE_DEFAULT);
    let geometry = Geometry::new(block_size, args.reserved_slots)
        .ok_or(HostError::Member { option: "--block-size", rule: "a power of two from 4K to 1M" })?;
    let inherited = file.and_then(ZoneFile::compression);
    let compression = compression::of_new(args.compress, args.compress_round, inherited, (suite, block_size))?;
    let outer = match args.outer {
        Some(OuterArg::Shared) => Outer::Shared,
        Some(OuterArg::Own) | None => Outer::Own,
    };
    let zone = match zone {
        None => Zone::Private,
        Some(LoadedZone::File { file, keys }) => Zone::Member { file, keys, outer },
        Some(LoadedZone::Server(keys)) => Zone::Server { keys, outer },
    };
    Ok(NewVault {
        suite,
        geometry,
        names: match args.names {
            Names::Encrypted => NameMode::Encrypted,
            Names::Plain => NameMode::Plain,
        },
        name_max,
        convergent_small_files: args.has_convergent_small_files(),
        compression,
        domain: args.domain,
        zone,
        created,
    })
}

fn report(ui: &Ui, args: &Args, header: VaultHeader, anchor: Option<PathBuf>) -> Result<()> {
    let store = store_kind::of(&args.dir);
    let block_size = header.geometry().block_size() as u32;
    let on_disk_of_store = anchor.as_ref().and_then(|file| disk::warning(file, &args.dir));
    let open_to_others = anchor.as_deref().and_then(disk::open_to_others);
    let advice = store.iter().filter_map(|s| advice(s, block_size));
    let warnings: Vec<String> = advice.chain(on_disk_of_store).chain(open_to_others).collect();
    warnings.iter().for_each(|warning| ui.warn(warning));
    if let Some(remark) = store.as_ref().and_then(remark) {
        ui.detail(remark);
    }
    let vault = Described::of(ui, &header);
    if args.json {
        super::key::admin::tell(&Ui { quiet: true, ..ui.clone() }, &header, &args.dir);
        return output::print_json(&Made { vault, anchor, store, warnings });
    }
    ui.note(format_args!(
        "made vault {} in {}: suite {}, blocks of {}, compression {}, names {}, domain {}",
        header.id(),
        args.dir.display(),
        header.suite().name(),
        text::bytes(u64::from(block_size)),
        header.compression().map_or_else(|| "none".into(), |c| c.codec().to_string()),
        header.names().name(),
        header.domain().name()
    ));
    super::key::admin::tell(ui, &header, &args.dir);
    match &anchor {
        Some(file) => ui.note(format_args!(
            "its anchor is {}: without it nothing says what is newest; `lamassu anchor export` copies it",
            file.display()
        )),
        None => ui.note("it has no anchor: an older state of the store passes for the newest"),
    }
    ui.note(
        "keep a copy of its lamassu.vault elsewhere: without it, or without the key, the vault cannot be read again",
    );
    Ok(())
}
