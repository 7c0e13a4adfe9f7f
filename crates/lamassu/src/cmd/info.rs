//! `lamassu info`: what the header says, and what the daemon of a mount has done. No key, so nothing of the header is
//! authenticated here.

use crate::fault::Result;
use crate::open;
use crate::output::{self, Ui};
use crate::{served, text};
use lamassu_crypto::compress::version_of;
use lamassu_format::Compression;
use lamassu_format::header::{Caching, Header, Role, Slot, VaultHeader, Verified};
use lamassu_host::control::Counted;
use lamassu_host::control::protocol::{IntegrityCounts, Request, Status};
use lamassu_vault::event::KindCount;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  lamassu info /srv/store/vault
  lamassu info --json /srv/store/vault | jq .slots";

/// Options of `info`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    _opening: crate::opening::AnchorArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault, or where it is mounted
    dir: PathBuf,
}

/// A vault header, without its secrets.
#[derive(Serialize)]
pub struct Described {
    format: &'static str,
    version: u16,
    id: String,
    zone: String,
    private_zone: bool,
    suite: &'static str,
    block_size: u64,
    reserved_slots: usize,
    blocks_per_page: u64,
    names: &'static str,
    name_max: usize,
    small_files: &'static str,
    /// how new blocks are compressed; null: they are not
    compression: Option<DescribedCompression>,
    /// within what equal blocks are equal
    domain: &'static str,
    /// whether directories in it may be vaults of their own
    datasets: bool,
    /// what is verified on reads; null: what the vault it lies in or the mount says
    integrity: Option<&'static str>,
    /// what may stay in the page cache; null: likewise
    cache: Option<&'static str>,
    /// whether something outside the store knows its newest state
    anchored: bool,
    /// where that is looked for on this host; null: nowhere
    anchor: Option<PathBuf>,
    /// the server that keeps it, of which this host has a copy there; null: none
    anchor_server: Option<String>,
    /// a snapshot
    read_only: bool,
    created: u64,
    /// public key of the administrator who signs the header; null: there is none
    administrator: Option<String>,
    /// entries of the history that the header has seen
    history: u64,
    slots: Vec<DescribedSlot>,
    /// of a mount; left out where it is asked of a directory
    #[serde(skip_serializing_if = "Option::is_none")]
    mount: Option<DescribedMount>,
}

/// How blocks are compressed.
#[derive(Serialize)]
pub struct DescribedCompression {
    codec: &'static str,
    level: Option<u8>,
    /// of the codec's library that the vault or zone was made with
    version: String,
    /// of the one that this program has
    version_here: String,
    /// what lengths are rounded up to, bytes
    round: u32,
}

impl DescribedCompression {
    pub fn of(compression: Compression) -> DescribedCompression {
        DescribedCompression {
            codec: compression.codec().name(),
            level: compression.codec().level(),
            version: compression.version().to_string(),
            version_here: version_of(compression.codec()).to_string(),
            round: compression.round(),
        }
    }

    /// The codec with its level, as it is given.
    pub fn codec(&self) -> String {
        self.level.map_or_else(|| self.codec.into(), |level| format!("{}:{level}", self.codec))
    }

    /// For people.
    pub fn line(&self) -> String {
        let DescribedCompression { codec, level, version, version_here, round } = self;
        let level = level.map_or_else(String::new, |level| format!(", level {level}"));
        let other = if version == version_here { String::new() } else { format!("; this program has {version_here}") };
        format!("{codec} {version}{level}, lengths in steps of {}{other}", text::bytes((*round).into()))
    }
}

/// What the daemon of a mount tells.
#[derive(Serialize)]
struct DescribedMount {
    version: String,
    pid: u32,
    read_only: bool,
    open_files: usize,
    /// since it was mounted, of all vaults in it
    operations: Vec<Counted>,
    /// what was found not to be as it was written, since it was mounted, in all vaults in it
    integrity: IntegrityCounts,
}

/// A key slot, without its secrets.
#[derive(Serialize)]
pub struct DescribedSlot {
    pub id: u32,
    pub kind: &'static str,
    pub label: String,
    pub created: u64,
    /// `administrator` or `use`
    pub role: &'static str,
    /// seconds since 1970; null: never
    pub expires: Option<u64>,
    pub argon2: Option<DescribedCost>,
    /// by this user on this host, in seconds since 1970; null: not known
    pub last_used_here: Option<u64>,
}

/// The cost of a passphrase slot.
#[derive(Serialize)]
pub struct DescribedCost {
    memory_kib: u32,
    passes: u32,
    lanes: u32,
}

impl Described {
    pub fn of(ui: &Ui, header: &VaultHeader) -> Described {
        Described {
            format: VaultHeader::FORMAT,
            version: lamassu_format::VERSION,
            id: header.id().to_string(),
            zone: header.zone().to_string(),
            private_zone: header.has_private_zone(),
            suite: header.suite().name(),
            block_size: header.geometry().block_size(),
            reserved_slots: header.geometry().reserved(),
            blocks_per_page: header.geometry().blocks_per_page(),
            names: header.names().name(),
            name_max: header.name_max(),
            small_files: if header.convergent_small_files() { "convergent" } else { "random" },
            compression: header.compression().map(DescribedCompression::of),
            domain: header.domain().name(),
            datasets: header.has_datasets(),
            integrity: header.integrity().map(Verified::name),
            cache: header.cache().map(Caching::name),
            anchored: header.is_anchored(),
            anchor: anchor_of(ui, header),
            anchor_server: anchor_server_of(ui, header),
            read_only: header.is_snapshot(),
            created: header.created(),
            administrator: header.keys().admin.as_ref().map(|a| text::hex(&a.public.0)),
            history: header.keys().history.map_or(0, |h| h.count),
            slots: slots(ui, header),
            mount: None,
        }
    }
}

impl From<Status> for DescribedMount {
    fn from(status: Status) -> DescribedMount {
        let Status { version, pid, read_only, open_files, operations, integrity, vault: _, dir: _, pid_namespace: _ } =
            status;
        DescribedMount { version, pid, read_only, open_files, operations, integrity }
    }
}

/// The table of what a daemon has done, for people.
fn operation_table(mount: &DescribedMount) -> String {
    let mut out = format!(
        "mounted by process {}, {} open files\n\noperation              count      failed    mean time",
        mount.pid, mount.open_files
    );
    for Counted { operation, count, failed, total_us } in &mount.operations {
        let mean = format!("{} us", total_us / (*count).max(1));
        let _ = write!(out, "\n{:<20}  {count:>10}  {failed:>8}  {mean:>9}", text::printable(operation));
    }
    out
}

/// Where the anchor of an anchored vault is looked for. A note of its place that cannot be read tells nothing.
fn anchor_of(ui: &Ui, header: &VaultHeader) -> Option<PathBuf> {
    let looked_for = || ui.policy.anchors.file_of(&header.id()).ok().flatten();
    if header.is_anchored() { looked_for() } else { None }
}

/// The server that keeps it, as far as this host knows.
fn anchor_server_of(ui: &Ui, header: &VaultHeader) -> Option<String> {
    let known = || ui.policy.anchors.server_of(&header.id()).ok().flatten();
    if header.is_anchored() { known() } else { None }
}

/// The anchor, for people.
fn anchor_line(described: &Described) -> String {
    if let Some(server) = &described.anchor_server {
        return format!("server://{}", text::printable(server));
    }
    match (&described.anchor, described.anchored) {
        (_, false) => "none".into(),
        (None, true) => "no place for it here".into(),
        (Some(file), true) => {
            let missing = if file.symlink_metadata().is_ok() { "" } else { ", which is missing" };
            format!("{}{missing}", text::printable(&file.display().to_string()))
        }
    }
}

/// What a daemon has found damaged, for people.
fn integrity_table(counts: &IntegrityCounts) -> String {
    if *counts == IntegrityCounts::default() {
        return "integrity events: none".into();
    }
    let mut out = String::from("integrity event            count    repeated");
    for KindCount { kind, count, repeated } in &counts.found {
        let _ = write!(out, "\n{:<20}  {count:>10}  {repeated:>10}", text::printable(kind));
    }
    let IntegrityCounts { found: _, not_logged, not_delivered, failed_alerts } = counts;
    let _ = write!(out, "\nleft out of the log: {not_logged}; not told to the command: {not_delivered}; ");
    let _ = write!(out, "failures of the command: {failed_alerts}");
    out
}

/// The slots of a header.
pub fn slots(ui: &Ui, header: &impl Header) -> Vec<DescribedSlot> {
    let used = ui.policy.notes.of(&header.keys().id).times;
    let described = |slot: &Slot| DescribedSlot::of(slot, used.get(&slot.id).copied());
    header.keys().slots.iter().map(described).collect()
}

impl DescribedSlot {
    fn of(slot: &Slot, last_used_here: Option<u64>) -> DescribedSlot {
        DescribedSlot {
            id: slot.id,
            kind: slot.kind.name(),
            label: slot.label.clone(),
            created: slot.created,
            role: match slot.role {
                Role::Administrator => "administrator",
                Role::Use => "use",
            },
            expires: slot.expires,
            argon2: slot.argon2.map(|c| DescribedCost {
                memory_kib: c.memory_kib(),
                passes: c.passes(),
                lanes: c.lanes(),
            }),
            last_used_here,
        }
    }
}

/// The table of slots, for people.
pub fn slot_table(slots: &[DescribedSlot]) -> String {
    let time = |seconds: u64| text::time(i64::try_from(seconds).unwrap_or(i64::MAX / 2));
    let mut out = String::from(
        "slot  kind             role           created               expires     last used here        cost                        label",
    );
    for slot in slots {
        let cost = slot.argon2.as_ref().map_or_else(String::new, |c| {
            format!("{}, {} passes, {} lanes", text::bytes(u64::from(c.memory_kib) * 1024), c.passes, c.lanes)
        });
        let (created, used) = (time(slot.created), slot.last_used_here.map_or_else(|| "-".into(), time));
        // What is refused in a new label may be in an old one, or in that of another program.
        let (id, kind, label) = (slot.id, slot.kind, text::printable(&slot.label));
        let (role, expires) = (slot.role, slot.expires.map_or_else(|| "-".into(), text::date));
        let _ = write!(
            out,
            "\n{id:<4}  {kind:<15}  {role:<13}  {created:<20}  {expires:<10}  {used:<20}  {cost:<26}  {label}"
        );
    }
    out
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    let status = served::at(&args.dir)?.map(|mount| served::ask::<Status>(&mount, &Request::Status {})).transpose()?;
    let dir = status.as_ref().map_or_else(|| args.dir.clone(), |status| status.dir.clone().into());
    let header = open::found(ui, &dir)?.header;
    let d = Described { mount: status.map(Into::into), ..Described::of(ui, &header) };
    if args.json {
        return output::print_json(&d);
    }
    let zone = if d.private_zone { "private".into() } else { d.zone.clone() };
    let created = text::time(i64::try_from(d.created).unwrap_or(i64::MAX / 2));
    let rows = [
        ("vault", d.id.clone()),
        ("zone", zone),
        ("format", format!("version {}", d.version)),
        ("suite", d.suite.into()),
        ("block size", text::bytes(d.block_size)),
        ("page", format!("{} blocks, {} transient slots", d.blocks_per_page, d.reserved_slots)),
        ("names", format!("{}, at most {} bytes in the store", d.names, d.name_max)),
        ("small files", d.small_files.into()),
        ("compression", d.compression.as_ref().map_or_else(|| "none".into(), DescribedCompression::line)),
        ("domain", d.domain.into()),
        ("datasets", if d.datasets { "yes" } else { "none" }.into()),
        ("integrity", d.integrity.unwrap_or("inherit").into()),
        ("cache", d.cache.unwrap_or("inherit").into()),
        ("created", created),
        ("kind", if d.read_only { "snapshot, read-only" } else { "vault" }.into()),
        ("anchor", anchor_line(&d)),
        ("administrator", d.administrator.clone().unwrap_or_else(|| "none".into())),
    ];
    let mut out = String::new();
    for (name, value) in rows {
        let _ = writeln!(out, "{name:<13} {value}");
    }
    let mount = d
        .mount
        .as_ref()
        .map(|mount| format!("\n\n{}\n\n{}", operation_table(mount), integrity_table(&mount.integrity)))
        .unwrap_or_default();
    output::print(format_args!("{out}\n{}{mount}", slot_table(&d.slots)))
}
