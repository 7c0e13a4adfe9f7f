//! `lamassu leak`: what an observer of the backing store sees, computed from the store alone, without keys.
//!
//! It reads what the observer reads, and says what `docs/threat-model.md` says in general for this vault in numbers.
//! Memory is bounded, except for the names of directories still to be visited on the way to the present one.
//!
//! With `--profiles` it says by profile what the observer sees of files. Which file has which profile is sealed, so
//! that alone takes the vault's keys.

mod profiles;

use crate::distinct::{Counted, Distinct, digest};
use crate::fault::{Error, Result};
use crate::keys::KeyArg;
use crate::open;
use crate::output::{self, Ui};
use crate::{signals, text};
use lamassu_crypto::compress::stored_len;
use lamassu_format::header::NameMode;
use lamassu_format::name::{self, Stored};
use lamassu_format::{Domain, Geometry};
use lamassu_host::Error as HostError;
use lamassu_store::backend::{Backend, BackendDir, Kind, Listed, Stat, next_data, open_regular_in};
use lamassu_vault::walk::{Failed, Met, Visit, walk};
use profiles::{OfProfile, Profiles};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  lamassu leak /srv/store/vault
  lamassu leak --json /srv/store/vault | jq .equal_blocks
  lamassu leak --profiles /srv/store/vault        also by profile, which needs the key";

const PAGE: usize = 4096;

/// Options of `leak`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    /// Report each profile, too. The protection of files is sealed, so this needs the key
    #[arg(long)]
    profiles: bool,
    /// Memory for comparing blocks, in MiB; the rest is sorted on disk
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    memory: u32,
    /// Directory for sorting [default: the system's directory for temporary files]
    #[arg(long, value_name = "DIR")]
    temp_dir: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault's directory in the store
    dir: PathBuf,
}

/// What `--json` prints. Numbers of things, bytes, or seconds since 1970.
#[derive(Serialize)]
struct Leak {
    vault: super::info::Described,
    #[serde(skip)]
    domain: Domain,
    entries: Entries,
    sizes: Sizes,
    tree: Tree,
    names: Names,
    times: Times,
    /// how many entries have this mode, in octal
    modes: BTreeMap<String, u64>,
    /// how many entries belong to uid:gid
    owners: BTreeMap<String, u64>,
    xattrs: u64,
    /// length of the vault's history, which tells how many entries it has; when it was appended to shows as well
    history_bytes: u64,
    equal_blocks: Equal,
    /// data blocks that are no ciphertext: their bytes are not spread as those of a cipher are. What was compressed or
    /// encrypted before it was stored plain is not among them
    plain_blocks: u64,
    /// how many data blocks have this many bytes before the zeros at their end: those of a compressed block
    lengths: BTreeMap<u64, u64>,
    /// pages of metadata that are equal: those of equal files of one page
    equal_pages: Equal,
    unreadable: u64,
    /// by profile
    #[serde(skip_serializing_if = "Option::is_none")]
    profiles: Option<Vec<OfProfile>>,
    /// files without a page that opens, so that their profile is not known
    #[serde(skip_serializing_if = "Option::is_none")]
    profile_unknown: Option<u64>,
}

#[derive(Default, Serialize)]
struct Entries {
    files: u64,
    directories: u64,
    symbolic_links: u64,
    special: u64,
    /// files with more than one name
    hard_linked: u64,
}

#[derive(Default, Serialize)]
struct Sizes {
    bytes: u64,
    /// what the store says it has allocated
    allocated_bytes: u64,
    /// how many files have at most this many bytes, and more than the one before
    at_most: BTreeMap<u64, u64>,
    /// bytes of holes: where a file has no blocks
    hole_bytes: u64,
}

#[derive(Default, Serialize)]
struct Tree {
    depth_max: u64,
    entries_max: u64,
    /// how many directories lie at this depth
    at_depth: BTreeMap<u64, u64>,
}

#[derive(Default, Serialize)]
struct Names {
    /// plain, if names are not encrypted: then the observer reads them
    plain: bool,
    /// how many names are this long, in bytes, as far as the store shows it
    lengths: BTreeMap<u64, u64>,
    /// names that appear under a hash; their companions show the length
    long: u64,
}

#[derive(Serialize, Default)]
struct Times {
    oldest: Option<i64>,
    newest: Option<i64>,
}

#[derive(Serialize)]
struct Equal {
    count: u64,
    distinct: u64,
    /// of the distinct ones, how many occur more than once
    repeated: u64,
    /// how often the most frequent one occurs
    most: u64,
}

impl Equal {
    fn told(&self, what: &str) -> String {
        let Equal { count, distinct, repeated, most } = self;
        format!("{count} {what}, {distinct} different; {repeated} occur more than once, one of them {most} times")
    }
}

impl From<Counted> for Equal {
    fn from(c: Counted) -> Equal {
        Equal { count: c.count, distinct: c.distinct, repeated: c.repeated, most: c.most }
    }
}

struct Observer<'a> {
    ui: &'a Ui,
    dir: &'a Path,
    geometry: Geometry,
    mode: NameMode,
    leak: Leak,
    blocks: Distinct,
    pages: Distinct,
    profiles: Option<Profiles>,
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    if args.key.is_typed() && !args.profiles {
        return Err(HostError::Usage("only --profiles takes a key: all else is what the store shows").into());
    }
    let found = open::found(ui, &args.dir)?;
    let header = found.header.clone();
    let unsealed = if args.profiles { Some(open::unlock(ui, found, &args.key)?) } else { None };
    signals::flag_only();
    let dir = args.temp_dir.unwrap_or_else(std::env::temp_dir);
    let memory = ((args.memory as usize) << 20) / 2;
    let none = || Equal::from(Counted::default());
    let leak = Leak {
        vault: super::info::Described::of(ui, &header),
        domain: header.domain(),
        entries: Entries::default(),
        sizes: Sizes::default(),
        tree: Tree::default(),
        names: Names { plain: header.names() == NameMode::Plain, ..Names::default() },
        times: Times::default(),
        modes: BTreeMap::new(),
        owners: BTreeMap::new(),
        xattrs: 0,
        history_bytes: args.dir.join(name::HISTORY).symlink_metadata().map_or(0, |m| m.len()),
        equal_blocks: none(),
        plain_blocks: 0,
        lengths: BTreeMap::new(),
        equal_pages: none(),
        unreadable: 0,
        profiles: None,
        profile_unknown: None,
    };
    let mut observer = Observer {
        ui,
        dir: &args.dir,
        geometry: header.geometry(),
        mode: header.names(),
        leak,
        blocks: Distinct::new(memory, &dir),
        pages: Distinct::new(memory, &dir),
        profiles: unsealed.map(|unsealed| Profiles::new(unsealed, memory, &dir)),
    };
    open::raise_descriptor_limit();
    walk(Met::first(open::backend(&args.dir)?.root(), PathBuf::new(), 0), &mut observer)?;
    let leak = observer.finish()?;
    if args.json { output::print_json(&leak) } else { print(&leak) }
}

/// Counts entries. A directory passes its depth to the directories in it.
impl Visit for Observer<'_> {
    type Passed = u64;
    type Here = u64;
    type Error = Error;

    fn enter(&mut self, at: &Met<u64>, _: &Arc<dyn BackendDir>) -> Result<Option<u64>> {
        let tree = &mut self.leak.tree;
        tree.depth_max = tree.depth_max.max(at.passed);
        *tree.at_depth.entry(at.passed).or_default() += 1;
        Ok(Some(0))
    }

    fn entry(
        &mut self,
        at: &Met<u64>,
        dir: &Arc<dyn BackendDir>,
        entries: &mut u64,
        entry: &Listed,
    ) -> Result<Option<u64>> {
        signals::check()?;
        let path = self.dir.join(&at.stored).join(&entry.name);
        let st = match dir.stat_entry(&entry.name) {
            Ok(st) => st,
            Err(e) => {
                self.miss(&path, &e);
                return Ok(None);
            }
        };
        if !self.name(entry.name.as_bytes()) {
            return Ok(None);
        }
        *entries += 1;
        self.describe(&st);
        // A store without attributes shows none.
        if let Ok(names) = dir.hold(&entry.name).and_then(|held| held.list_xattr()) {
            let ours = |n: &&OsString| n.as_bytes().starts_with(name::XATTR_PREFIX.as_bytes());
            self.leak.xattrs += names.iter().filter(ours).count() as u64;
        }
        match st.kind {
            Kind::Dir => return Ok(Some(at.passed + 1)),
            Kind::File => {
                if let Some(profiles) = &mut self.profiles {
                    profiles.begin(&**dir, &entry.name, &st)?;
                }
                self.file(&path, (&**dir, &entry.name), &st)?;
            }
            Kind::Symlink | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {}
        }
        Ok(None)
    }

    fn leave(&mut self, _: &Met<u64>, _: &Arc<dyn BackendDir>, entries: u64) {
        let tree = &mut self.leak.tree;
        tree.entries_max = tree.entries_max.max(entries);
    }

    fn failed(&mut self, at: &Met<u64>, _: Failed, error: io::Error) -> Result<()> {
        self.miss(&self.dir.join(&at.stored), &error);
        Ok(())
    }
}

impl Observer<'_> {
    fn miss(&mut self, path: &Path, e: &io::Error) {
        self.leak.unreadable += 1;
        self.ui.warn(format_args!("{}: {e}", text::printable(&path.to_string_lossy())));
    }

    /// Whether a name is that of an entry of the tree.
    fn name(&mut self, name: &[u8]) -> bool {
        let names = &mut self.leak.names;
        match name::classify(self.mode, name) {
            Stored::Root | Stored::DirRecord | Stored::Companion(_) | Stored::LinkRest(_) => return false,
            Stored::Long(_) => names.long += 1,
            Stored::Sealed(_) | Stored::Plain | Stored::Foreign => {
                *names.lengths.entry(name.len() as u64).or_default() += 1;
            }
        }
        true
    }

    fn describe(&mut self, st: &Stat) {
        let leak = &mut self.leak;
        let count = match st.kind {
            Kind::Dir => &mut leak.entries.directories,
            Kind::Symlink => &mut leak.entries.symbolic_links,
            Kind::File => &mut leak.entries.files,
            Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => &mut leak.entries.special,
        };
        *count += 1;
        leak.entries.hard_linked += u64::from(st.kind != Kind::Dir && st.nlink > 1);
        let mtime = st.mtime.seconds;
        leak.times.oldest = Some(leak.times.oldest.map_or(mtime, |t| t.min(mtime)));
        leak.times.newest = Some(leak.times.newest.map_or(mtime, |t| t.max(mtime)));
        *leak.modes.entry(format!("{:o}", st.mode)).or_default() += 1;
        *leak.owners.entry(format!("{}:{}", st.uid, st.gid)).or_default() += 1;
    }

    fn file(&mut self, path: &Path, (dir, name): (&dyn BackendDir, &OsStr), st: &Stat) -> Result<()> {
        let sizes = &mut self.leak.sizes;
        // Saturating: what a store says of its files need not be so.
        sizes.bytes = sizes.bytes.saturating_add(st.len);
        sizes.allocated_bytes = sizes.allocated_bytes.saturating_add(st.blocks.saturating_mul(512));
        let at_most = st.len.max(1).checked_next_power_of_two().unwrap_or(u64::MAX);
        *sizes.at_most.entry(at_most).or_default() += 1;
        let file = match open_regular_in(dir, name) {
            Ok(file) => file,
            Err(e) => {
                self.miss(path, &e);
                return Ok(());
            }
        };
        self.content(path, &file, st.len)
    }

    fn content(&mut self, path: &Path, file: &File, len: u64) -> Result<()> {
        let size = self.geometry.block_size();
        let mut buf = vec![0; size as usize];
        let mut at: u64 = 0;
        // Up to here the store has told where it has data.
        let mut known: u64 = 0;
        while at < len {
            signals::check()?;
            if at >= known {
                let (start, end) = match next_data(file, at, len) {
                    Ok(found) => found,
                    Err(e) => {
                        self.miss(path, &e);
                        return Ok(());
                    }
                };
                known = end;
                // A block that begins in a hole and ends in data is read.
                let first = if start < len { start / size * size } else { len };
                if first > at {
                    let sizes = &mut self.leak.sizes;
                    sizes.hole_bytes = sizes.hole_bytes.saturating_add(hole_bytes(&self.geometry, at, first));
                    at = first;
                    continue;
                }
            }
            let block = &mut buf[..size.min(len - at) as usize];
            if let Err(e) = file.read_exact_at(block, at) {
                self.miss(path, &e);
                return Ok(());
            }
            // The first block of a segment holds its pages.
            if at.is_multiple_of(self.geometry.segment_len()) {
                for page in block.chunks(PAGE).filter(|p| p.iter().any(|b| *b != 0)) {
                    self.pages.add(digest(0, page)?, page.len() as u32)?;
                }
            } else if block.iter().all(|b| *b == 0) {
                let sizes = &mut self.leak.sizes;
                sizes.hole_bytes = sizes.hole_bytes.saturating_add(block.len() as u64);
            } else {
                let stored = stored_len(block);
                let (is_plain, digest, len) = (is_plain(&block[..stored]), digest(0, block)?, block.len() as u32);
                self.leak.plain_blocks += u64::from(is_plain);
                *self.leak.lengths.entry(stored as u64).or_default() += 1;
                self.blocks.add(digest, len)?;
                if let Some(profiles) = &mut self.profiles {
                    profiles.block(is_plain, digest, len)?;
                }
            }
            at += size;
        }
        Ok(())
    }

    fn finish(self) -> Result<Leak> {
        let (equal_blocks, equal_pages) = (self.blocks.count()?.into(), self.pages.count()?.into());
        let (profiles, profile_unknown) = match self.profiles {
            Some(profiles) => profiles.finish().map(|(rows, unknown)| (Some(rows), Some(unknown)))?,
            None => (None, None),
        };
        Ok(Leak { equal_blocks, equal_pages, profiles, profile_unknown, ..self.leak })
    }
}

/// Whether the bytes of a block, without zeros at its end, are spread as no cipher spreads them (a chi-squared test).
/// For ciphertext the sum has the mean 255 and the standard deviation 23: at most one block in 10⁹ exceeds this limit.
fn is_plain(block: &[u8]) -> bool {
    const SUM_MAX: f64 = 420.0;
    // The shortest ciphertext of a compressed block. With fewer bytes the test is unreliable.
    const LEN_MIN: usize = 512;
    let mut counts = [0_u32; 256];
    block.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    let mean = block.len() as f64 / 256.0;
    let sum: f64 = counts.iter().map(|count| (f64::from(*count) - mean).powi(2) / mean).sum();
    block.len() >= LEN_MIN && sum > SUM_MAX
}

/// Bytes of the blocks from `from`, where a block begins, to `to`, where one begins or the file ends, but for the
/// blocks that hold a segment's pages.
fn hole_bytes(geometry: &Geometry, from: u64, to: u64) -> u64 {
    let (size, segment) = (geometry.block_size(), geometry.segment_len());
    let (first, end) = (from.div_ceil(segment), to.div_ceil(segment));
    let pages = match end.checked_sub(1) {
        // Only the last of the blocks of pages may be cut off by the end of the file.
        Some(last) if last >= first => (last - first) * size + size.min(to - last * segment),
        Some(_) | None => 0,
    };
    to - from - pages
}

/// What equality an observer sees of blocks, once at the most: the header tells.
fn what_is_equal(domain: Domain) -> &'static str {
    match domain {
        Domain::Zone => "equal blocks are equal in all vaults of the zone",
        Domain::Family => "equal blocks are equal in this vault and its clones, and nowhere else",
        Domain::File => "equal blocks are equal within a file, and nowhere else",
        Domain::None => "no equal blocks, but for versions of one place of a file, and copies of its backing file",
    }
}

/// The lengths of blocks, for people: of whole blocks there is nothing to tell.
fn told_lengths(lengths: &BTreeMap<u64, u64>) -> String {
    match lengths.len() {
        0 | 1 => "all blocks are of one length".into(),
        count => {
            let most = lengths.iter().max_by_key(|(_, blocks)| **blocks).map_or(0, |(len, _)| *len);
            let (least, longest) = (lengths.keys().next().copied(), lengths.keys().next_back().copied());
            let bytes = |len: Option<u64>| text::bytes(len.unwrap_or_default());
            format!(
                "{count} different lengths of blocks, {} to {}, most often {}: how well each compresses",
                bytes(least),
                bytes(longest),
                text::bytes(most)
            )
        }
    }
}

fn print(l: &Leak) -> Result<()> {
    let time = |t: Option<i64>| t.map_or_else(|| "-".into(), text::time);
    let (e, s, t, n) = (&l.entries, &l.sizes, &l.tree, &l.names);
    let lengths = match (n.lengths.first_key_value(), n.lengths.last_key_value()) {
        (Some((least, _)), Some((most, _))) => format!("of {least} to {most} bytes, {} under a hash", n.long),
        _ => format!("{} under a hash", n.long),
    };
    let mut out = String::from("An observer of this store sees, without any key:\n");
    for (name, value) in [
        (
            "entries",
            format!(
                "{} files ({} of them with several names), {} directories, {} symbolic links, {} special",
                e.files, e.hard_linked, e.directories, e.symbolic_links, e.special
            ),
        ),
        (
            "sizes",
            format!(
                "{} in files, {} allocated, {} of holes",
                text::bytes(s.bytes),
                text::bytes(s.allocated_bytes),
                text::bytes(s.hole_bytes)
            ),
        ),
        ("tree", format!("{} levels below the root, at most {} entries in a directory", t.depth_max, t.entries_max)),
        ("names", if n.plain { "in the clear".into() } else { lengths }),
        ("times", format!("{} to {}", time(l.times.oldest), time(l.times.newest))),
        ("modes", l.modes.iter().map(|(m, c)| format!("{m} ({c})")).collect::<Vec<_>>().join(", ")),
        ("owners", l.owners.iter().map(|(o, c)| format!("{o} ({c})")).collect::<Vec<_>>().join(", ")),
        ("attributes", l.xattrs.to_string()),
        ("history", format!("{} of what was done to the keys, sealed", text::bytes(l.history_bytes))),
        ("blocks", l.equal_blocks.told("data blocks")),
        (
            "plain blocks",
            format!("{} can be read as they are: of files whose profile stores them plain", l.plain_blocks),
        ),
        ("lengths", told_lengths(&l.lengths)),
        ("small files", l.equal_pages.told("pages of metadata")),
        ("domain", format!("{}: {}", l.domain.name(), what_is_equal(l.domain))),
    ] {
        out.push_str(&format!("  {name:<12} {value}\n"));
    }
    if let Some(profiles) = &l.profiles {
        out.push_str("of which by profile, which the store does not know:\n");
        profiles.iter().for_each(|of| out.push_str(&of.told()));
        out.push_str(&format!("  {} files tell no profile\n", l.profile_unknown.unwrap_or_default()));
    }
    out.push_str("docs/threat-model.md says what follows from each, and `lamassu info` what the header tells.");
    output::print(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_counts_as_its_blocks_do_one_by_one() {
        for block_size in [4096, 16384] {
            let geometry = Geometry::new(block_size, 8).unwrap();
            let (size, segment) = (geometry.block_size(), geometry.segment_len());
            let one_by_one = |from: u64, to: u64| {
                let blocks = (from..to).step_by(size as usize).filter(|at| at % segment != 0);
                blocks.map(|at| size.min(to - at)).sum::<u64>()
            };
            let starts = [0, size, 2 * size, segment - size, segment, segment + size, 2 * segment];
            for from in starts {
                for to in starts.into_iter().chain([segment + 1, 2 * segment - 1, 3 * segment + 7, 3 * segment + size])
                {
                    if from <= to {
                        assert_eq!(hole_bytes(&geometry, from, to), one_by_one(from, to), "{from} to {to}");
                    }
                }
            }
        }
    }
}
