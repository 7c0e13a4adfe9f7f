//! `lamassu dataset create|list|set|destroy`: vaults that lie in a directory of another, with keys of their own.
//!
//! In a mount the daemon does it; without one, this process opens the vault and does the same.

use crate::cmd::key::{self, destroy::How};
use crate::cmd::mount::IntegrityArg;
use crate::fault::{Fault, Result};
use crate::keys::{self, CostArg, KeyArg, SourceText};
use crate::mounts;
use crate::open;
use crate::output::{self, Ui};
use crate::served;
use crate::text;
use clap::ValueEnum;
use lamassu_format::{Domain, Suite};
use lamassu_fuse::control::Asked;
use lamassu_host::Error as HostError;
use lamassu_host::Served;
use lamassu_host::compression::Chosen;
use lamassu_host::control::protocol::{Caller, DatasetSpec, Datasets, Listed, Properties, Request, Status, Unseen};
use lamassu_host::datasets::name_to_hex;
use lamassu_host::slots::check_label;
use lamassu_keys::Purpose;
use lamassu_vault::{FileSystem, Ino, VaultError};
use serde::Serialize;
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

const CREATE_EXAMPLES: &str = "\
Examples:
  lamassu dataset create /mnt/projects                           inherits the vault's key
  lamassu dataset create -n raw:file:/root/p.key /mnt/private    has a key of its own
  lamassu dataset create --domain family /srv/store/vault projects
      without a mount: the vault, then the path in it";

const LIST_EXAMPLES: &str = "\
Examples:
  lamassu dataset list /mnt
  lamassu dataset list --json /srv/store/vault";

const SET_EXAMPLES: &str = "\
Examples:
  lamassu dataset set /mnt/projects cache=none           keeps no plaintext in the page cache
  lamassu dataset set /mnt/projects integrity=metadata   takes effect when it is loaded next
  lamassu dataset set /mnt/projects inherit=no
      removes the slot of the parent's key; add a key of its own first
  lamassu dataset set /srv/store/vault . compress=zstd && lamassu rekey --full /srv/store/vault
      the vault itself: new blocks are compressed once it is opened again; `rekey` converts old ones
Properties: integrity=full|metadata|inherit, cache=mount|none|inherit, inherit=yes|no,
  compress=none|lz4|zstd|zstd:LEVEL, compress-round=BYTES";

const DESTROY_EXAMPLES: &str = "\
Examples:
  lamassu dataset destroy /mnt/projects
  lamassu dataset destroy --shred-key --receipt r.json --audit-key raw:file:audit.key /mnt/seven
Everything in the dataset is removed. Without --shred-key, its keys still open copies of the store
and of its header.";

/// Dataset commands.
#[derive(clap::Subcommand, Debug)]
pub enum DatasetCommand {
    /// Create a dataset
    Create(Create),
    /// List datasets, their keys and properties
    List(List),
    /// Change properties of a dataset
    Set(Set),
    /// Remove a dataset and everything in it
    Destroy(Destroy),
}

/// Options of `dataset create`.
#[derive(clap::Args, Debug)]
#[command(after_help = CREATE_EXAMPLES, after_long_help = help(CREATE_EXAMPLES))]
pub struct Create {
    #[command(flatten)]
    key: KeyArg,
    /// Give the dataset a key of its own, opened by SOURCE. Without this, it inherits the key of its parent vault
    #[arg(short = 'n', long, value_name = "SOURCE")]
    new_key: Option<SourceText>,
    /// With --new-key: inherit the parent's key, too
    #[arg(long)]
    inherit: bool,
    /// The scope in which equal blocks are equal in the store: the parent vault's own (`zone`); the `family` of the
    /// dataset and its clones; each `file`, or nothing (`none`) [default: that of the parent vault]
    #[arg(long, value_name = "DOMAIN", value_parser = text::domains())]
    domain: Option<Domain>,
    /// Ciphers and hashes [default: those of the parent vault]
    #[arg(short, long, value_parser = text::suites())]
    suite: Option<Suite>,
    /// Bytes of a block [default: that of the parent vault]
    #[arg(short, long, value_name = "N", value_parser = text::parse_block_size)]
    block_size: Option<u32>,
    /// Compress blocks before they are encrypted: `none`, `lz4`, `zstd` or `zstd:LEVEL` [default: as in the parent
    /// vault]
    #[arg(long, value_name = "CODEC", value_parser = text::parse_compression)]
    compress: Option<Chosen>,
    /// What lengths of compressed blocks are rounded up to [default: as in the vault it lies in, if that fits]
    #[arg(long, value_name = "N", value_parser = text::parse_round)]
    compress_round: Option<u32>,
    /// Whether file names are encrypted [default: as in the parent vault]
    #[arg(long, value_enum)]
    names: Option<Names>,
    /// What is verified on every read [default: as in the parent vault]
    #[arg(short, long, value_enum)]
    integrity: Option<IntegrityArg>,
    /// Whether the mount may keep plaintext in the page cache [default: as in the parent vault]
    #[arg(short, long, value_enum)]
    cache: Option<CacheArg>,
    #[command(flatten)]
    cost: CostArg,
    /// Label of the slot that --new-key makes
    #[arg(short, long, default_value = "")]
    label: String,
    /// The new directory: a path in a mount, or the vault and a path in it
    #[arg(required = true, num_args = 1..=2, value_name = "PATH")]
    places: Vec<PathBuf>,
}

/// Options of `dataset list`.
#[derive(clap::Args, Debug)]
#[command(after_help = LIST_EXAMPLES, after_long_help = help(LIST_EXAMPLES))]
pub struct List {
    #[command(flatten)]
    key: KeyArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// A directory in a mount, or the vault and optionally a path in it
    #[arg(required = true, num_args = 1..=2, value_name = "PATH")]
    places: Vec<PathBuf>,
}

/// Options of `dataset set`.
#[derive(clap::Args, Debug)]
#[command(after_help = SET_EXAMPLES, after_long_help = help(SET_EXAMPLES))]
pub struct Set {
    #[command(flatten)]
    key: KeyArg,
    /// The dataset (a path in a mount, or the vault and a path in it), then the properties
    #[arg(required = true, num_args = 2.., value_name = "PATH|NAME=VALUE")]
    words: Vec<OsString>,
}

/// Options of `dataset destroy`.
#[derive(clap::Args, Debug)]
#[command(after_help = DESTROY_EXAMPLES, after_long_help = help(DESTROY_EXAMPLES))]
pub struct Destroy {
    #[command(flatten)]
    key: KeyArg,
    /// Destroy it even while files in it are open
    #[arg(short, long)]
    force: bool,
    /// Destroy its keys first, as `lamassu key destroy` does, so that copies of the store cannot be read either. This
    /// asks for the key of the dataset or of its parent vault again
    #[arg(long)]
    shred_key: bool,
    #[command(flatten)]
    how: How,
    /// The dataset: a path in a mount, or the vault and a path in it
    #[arg(required = true, num_args = 1..=2, value_name = "PATH")]
    places: Vec<PathBuf>,
}

fn help(examples: &str) -> String {
    format!("{examples}\n\n{}", keys::HELP)
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Names {
    Encrypted,
    Plain,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CacheArg {
    Mount,
    None,
}

fn word(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |v| v.get_name().into())
}

pub fn run(ui: &Ui, command: DatasetCommand) -> Result<()> {
    match command {
        DatasetCommand::Create(args) => create(ui, &args),
        DatasetCommand::List(args) => list(ui, &args),
        DatasetCommand::Set(args) => set(ui, &args),
        DatasetCommand::Destroy(args) => destroy(ui, &args),
    }
}

/// The user and host that do it.
enum Site {
    /// The daemon of a mount; a directory there, which every request is about.
    Mount(Asked),
    /// This process; a path in the vault.
    Here { served: Arc<Served>, path: PathBuf },
}

impl Site {
    /// The directory that something is to be made in, and its name there.
    fn of_new(ui: &Ui, key: &KeyArg, places: &[PathBuf]) -> Result<(Site, OsString)> {
        let place = places.last().map_or(Path::new(""), |path| path);
        let name = place.file_name().ok_or(HostError::Usage("a dataset is a directory in a vault: give its path"))?;
        let parent = place.parent().unwrap_or(Path::new(""));
        let site = match places {
            [_] => match served::within(here(parent))? {
                Some(dir) => Site::Mount(dir),
                None => {
                    return Err(Site::of(ui, key, places, true).map_or_else(
                        |error| error,
                        |_| HostError::Usage("a dataset is a directory in a vault: give its path").into(),
                    ));
                }
            },
            [vault, _] => Site::of(ui, key, &[vault.clone(), parent.into()], false)?,
            _ => return Err(HostError::Usage("give a path").into()),
        };
        Ok((site, name.into()))
    }

    fn of(ui: &Ui, key: &KeyArg, places: &[PathBuf], read_only: bool) -> Result<Site> {
        let [vault, rest @ ..] = places else { return Err(HostError::Usage("give a path").into()) };
        let path = rest.first().map(PathBuf::as_path);
        let inside = |path: &Path| path.strip_prefix("/").unwrap_or(path).to_path_buf();
        let mounted = match path {
            None => served::within(vault)?,
            Some(_) => None,
        };
        if let Some(dir) = mounted {
            return Ok(Site::Mount(dir));
        }
        if let Some(root) = served::of(vault)? {
            return match path.map(inside) {
                Some(path) => Ok(Site::Mount(served::must_be_within(&root.path().join(path))?)),
                None => Ok(Site::Mount(root)),
            };
        }
        let found = open::found(ui, vault).map_err(|error| match path {
            Some(_) => error,
            None => served::not_within(vault).into(),
        })?;
        let served = open::unlock(ui, found, key)?.open_forest(open::options(read_only))?;
        Ok(Site::Here { served, path: path.map_or_else(PathBuf::new, inside) })
    }

    fn close(&self) -> Result<()> {
        match self {
            Site::Mount(_) => Ok(()),
            Site::Here { served, path: _ } => Ok(served.forest().close()?),
        }
    }

    /// Does the work, by the daemon or in this process, and closes what was opened for it.
    fn work<T>(
        &self,
        by_daemon: impl FnOnce(&Asked) -> Result<T>,
        here: impl FnOnce(&Served, &Caller, Ino) -> Result<T>,
    ) -> Result<T> {
        let done = match self {
            Site::Mount(dir) => by_daemon(dir),
            Site::Here { served, path } => at(served, path).and_then(|dir| here(served, &me(), dir)),
        };
        let closed = self.close();
        done.and_then(|done| closed.map(|()| done))
    }
}

/// A local directory by its path, where nothing stands for the current one.
fn here(dir: &Path) -> &Path {
    if dir.as_os_str().is_empty() { Path::new(".") } else { dir }
}

fn at(served: &Served, path: &Path) -> Result<Ino> {
    Ok(served.forest().resolve(path.as_os_str())?.attr.ino)
}

/// Without a mount, the caller has the keys.
fn me() -> Caller {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    Caller { uid, gid, groups: Vec::new(), is_owner: true }
}

/// Permission bits of a new directory of ours.
fn mode() -> u32 {
    let mask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(mask);
    0o777 & !mask.bits()
}

fn create(ui: &Ui, args: &Create) -> Result<()> {
    check_label(&args.label)?;
    let spec = DatasetSpec {
        inherit: args.inherit || args.new_key.is_none(),
        label: args.label.clone(),
        domain: args.domain.map(|d| d.name().into()),
        suite: args.suite.map(|s| s.name().into()),
        block_size: args.block_size,
        names: args.names.map(word),
        compress: args.compress.map(|chosen| chosen.to_string()),
        compress_round: args.compress_round,
        properties: Properties {
            integrity: args.integrity.map(word),
            cache: args.cache.map(word),
            ..Properties::default()
        },
        mode: mode(),
    };
    let (site, name) = Site::of_new(ui, &args.key, &args.places)?;
    let own = match &args.new_key {
        None => None,
        Some(source) => {
            let material =
                keys::load(ui, &source.parse("--new-key")?, &Path::new(&name).display().to_string(), Purpose::Create)?;
            let cost = args.cost.measure(ui, &material);
            Some((material, cost))
        }
    };
    let made = match &site {
        Site::Mount(parent) => {
            let secret = own.as_ref().map(|(material, cost)| served::pack(parent, material, *cost)).transpose()?;
            served::ask(parent, &Request::CreateDataset { name: name_to_hex(&name), spec: Box::new(spec), secret })
        }
        Site::Here { served, path: parent } => {
            at(served, parent).and_then(|dir| Ok(served.create_dataset(&me(), dir, &name, &spec, own.as_ref())?))
        }
    };
    let closed = site.close();
    let id: String = made?;
    closed?;
    ui.note(format_args!("made dataset {id}: {}", args.places.last().map_or(Path::new(""), |p| p).display()));
    if own.is_some() && !args.inherit && matches!(site, Site::Mount(_)) {
        ui.note("its key is loaded; once unloaded, or in another mount, it is locked until `lamassu key load -k SOURCE PATH`");
    }
    Ok(())
}

#[derive(Serialize)]
struct All {
    datasets: Vec<Listed>,
    unseen: Vec<Unseen>,
}

fn list(ui: &Ui, args: &List) -> Result<()> {
    let site = Site::of(ui, &args.key, &args.places, true)?;
    let mut datasets: Vec<Listed> = Vec::new();
    let (unseen, unseen_count) = loop {
        let after = datasets.last().map(|l| l.path.clone());
        let some: Datasets = match &site {
            Site::Mount(dir) => served::ask(dir, &Request::ListDatasets { after })?,
            Site::Here { served, path } => served.list_datasets(&me(), at(served, path)?, after.as_deref())?,
        };
        datasets.extend(some.datasets);
        if !some.more {
            break (some.unseen, some.unseen_count);
        }
    };
    site.close()?;
    for Unseen { path, text } in &unseen {
        ui.warn(format_args!("not looked into: {}: {}", text::printable(path), text::printable(text)));
    }
    if args.json {
        output::print_json(&All { datasets, unseen })?
    } else {
        output::print(table(&datasets))?
    }
    if unseen_count > 0 { Err(Fault::NotAllSeen { count: unseen_count }.into()) } else { Ok(()) }
}

fn table(datasets: &[Listed]) -> String {
    let mut out = String::from("state      keys       domain  suite   compress  integrity  cache    path");
    for l in datasets {
        let or_inherited = |value: &Option<String>| value.clone().unwrap_or_else(|| "inherit".into());
        out.push_str(&format!(
            "\n{:<9}  {:<9}  {:<6}  {:<6}  {:<8}  {:<9}  {:<7}  {}",
            l.state,
            l.keys,
            l.domain,
            l.suite,
            l.compress.as_deref().unwrap_or("none"),
            or_inherited(&l.integrity),
            or_inherited(&l.cache),
            text::printable(&l.path)
        ));
    }
    out
}

fn set(ui: &Ui, args: &Set) -> Result<()> {
    let is_property =
        |word: &&OsString| word.to_str().and_then(|w| w.split_once('=')).is_some_and(|(n, _)| NAMES.contains(&n));
    let (values, places): (Vec<_>, Vec<_>) = args.words.iter().partition(is_property);
    let places: Vec<PathBuf> = places.into_iter().map(PathBuf::from).collect();
    if values.is_empty() || places.is_empty() || places.len() > 2 {
        return Err(HostError::Usage(
            "give the dataset, then properties as name=value: integrity, cache, compress, compress-round, inherit",
        )
        .into());
    }
    let (properties, inherit) = parse(&values)?;
    let changes_integrity = properties.integrity.is_some();
    let changes_compression = properties.compress.is_some() || properties.compress_round.is_some();
    let site = Site::of(ui, &args.key, &places, false)?;
    let removed: Option<String> = match &site {
        Site::Mount(dir) => served::ask(dir, &Request::SetDataset { properties, inherit })?,
        Site::Here { .. } => {
            site.work(|_| Ok(None), |served, me, dir| Ok(served.set_dataset(me, dir, &properties, inherit)?))?
        }
    };
    if let Some(removed) = removed {
        ui.note(format_args!(
            "{removed}. A holder of the key of the vault it lies in may have opened it and kept its keys: `lamassu key renew`, \
             `key admin rotate` and `rekey` take those away"
        ));
    }
    if changes_integrity && matches!(site, Site::Mount(_)) {
        ui.note("integrity holds from the next time the dataset is loaded on: `lamassu key unload` and `key load`");
    }
    if changes_compression && matches!(site, Site::Mount(_)) {
        ui.note("compression holds from the next time the dataset is loaded on; `lamassu rekey --full` then brings old blocks to it");
    }
    Ok(())
}

const NAMES: [&str; 5] = ["integrity", "cache", "compress", "compress-round", "inherit"];

fn parse(values: &[&OsString]) -> Result<(Properties, Option<bool>)> {
    let (mut properties, mut inherit) = (Properties::default(), None);
    let mut given: Vec<&str> = Vec::new();
    for value in values {
        let Some((name, value)) = value.to_str().and_then(|v| v.split_once('=')) else { continue };
        if given.contains(&name) {
            return Err(HostError::Usage("a property is given twice: give one value").into());
        }
        given.push(name);
        match (name, value) {
            ("integrity", "full" | "metadata" | "inherit") => properties.integrity = Some(value.into()),
            ("cache", "mount" | "none" | "inherit") => properties.cache = Some(value.into()),
            ("compress", codec) if codec.parse::<Chosen>().is_ok() => properties.compress = Some(codec.into()),
            ("compress-round", bytes) if text::parse_round(bytes).is_ok() => {
                properties.compress_round = text::parse_round(bytes).ok();
            }
            ("inherit", "yes") => inherit = Some(true),
            ("inherit", "no") => inherit = Some(false),
            _ => {
                return Err(HostError::Usage(
                    "properties are integrity=full|metadata|inherit, cache=mount|none|inherit, \
                     compress=none|lz4|zstd|zstd:LEVEL (a level from 1 to 19), compress-round=BYTES (a power of two \
                     from 512 to half a block), inherit=yes|no",
                )
                .into());
            }
        }
    }
    Ok((properties, inherit))
}

fn destroy(ui: &Ui, args: &Destroy) -> Result<()> {
    if args.how.is_given() && !args.shred_key {
        return Err(HostError::Usage("--receipt, --audit-key, --with-server and --yes are for --shred-key").into());
    }
    let site = Site::of(ui, &args.key, &args.places, false)?;
    // Its vault is closed before its keys go, and is not opened again.
    let shred = |status: &Status, unload: &dyn Fn() -> Result<bool>| {
        if status.open_files > 0 && !args.force {
            return Err(VaultError::Refused("files in it are open: close them, or give --force").into());
        }
        unload()?;
        let (dir, id) = (status.dir.clone().into(), status.vault.clone());
        key::destroy::run(ui, &key::destroy::Destroy::of(&args.key, &args.how, dir, id))
    };
    let left = site.work(
        |dataset| {
            if args.shred_key {
                let status: Status = served::ask(dataset, &Request::Status {})?;
                lies_in_vault_of(dataset, Path::new(&status.dir))?;
                shred(&status, &|| served::ask(dataset, &Request::Unload {}))?;
            }
            served::ask::<Option<String>>(dataset, &Request::DestroyDataset { force: args.force })
        },
        |served, me, dir| {
            if args.shred_key {
                shred(&served.status(served.member(dir)?)?, &|| Ok(served.unload(me, dir)?))?;
            }
            Ok(served.destroy_dataset(me, dir, args.force)?)
        },
    )?;
    if let Some(left) = left {
        ui.warn(format_args!("{left}; `lamassu-server forget` removes it"));
    }
    ui.note(format_args!("destroyed {}", args.places.last().map_or(OsStr::new(""), |p| p.as_os_str()).display()));
    Ok(())
}

/// Checks that a directory that a daemon reports as a dataset is one in the vault of this mount.
///
/// # Errors
/// [`Fault::NotThatDataset`].
fn lies_in_vault_of(dataset: &Asked, dir: &Path) -> Result<(), Fault> {
    let vault = mounts::of_id(dataset.mount()).map(|mount| mount.vault());
    let is_plain = dir.components().all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    match vault {
        Some(vault) if is_plain && dir.starts_with(&vault) && dir != vault => Ok(()),
        Some(_) | None => Err(Fault::NotThatDataset { dir: dir.into() }),
    }
}
