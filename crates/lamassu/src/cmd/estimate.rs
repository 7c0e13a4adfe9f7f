//! `lamassu dedup-estimate`: what deduplication would save, before anything is moved: of the plain data, and of a vault
//! that holds it.
//!
//! Files are read once, in pieces; nothing is encrypted, since a block's ciphertext is equal exactly where the block
//! is, within the vault's deduplication domain. Memory is bounded.

mod compressed;

use crate::distinct::{self, Counted, Distinct, digest};
use crate::fault::{Error, Result};
use crate::output::{self, Ui};
use crate::{open, signals, text};
use compressed::{Compressed, OfCodec};
use lamassu_format::profile::{KeyKind, Profile, Protection};
use lamassu_format::{BlockNo, Domain, Geometry, PageNo};
use lamassu_host::Error as HostError;
use lamassu_host::compression::Chosen;
use lamassu_store::backend::{
    Backend, BackendDir, Kind, Listed, LocalBackend, next_data, open_regular, open_regular_in,
};
use lamassu_vault::walk::{Failed, Met, Visit, walk};
use rustix::fs::CWD;
use serde::Serialize;
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  lamassu dedup-estimate /srv/images
  lamassu dedup-estimate -b 4K -b 128K --json /home /srv/images | jq '.sizes[].vault'
  lamassu dedup-estimate --domain file /srv/images           only blocks of one file may be equal
  lamassu dedup-estimate --block-keys random /srv/letters    files with random block keys
  lamassu dedup-estimate --profiles /srv/images              every profile
  lamassu dedup-estimate --compress lz4 --compress zstd /srv/images
      the additional savings of compression";

/// Bytes read at once: the largest block.
const PIECE: u64 = 1 << 20;
const PAGE: u32 = 4096;
const DEFAULT_SIZES: [u32; 4] = [4 << 10, 16 << 10, 64 << 10, 128 << 10];

/// Options of `dedup-estimate`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Block size to try, as for `init`; repeatable [default: 4K, 16K, 64K, 128K]
    #[arg(short, long, value_name = "N", value_parser = text::parse_block_size)]
    block_size: Vec<u32>,
    /// Transient key slots in a page, as for `init`
    #[arg(short = 'R', long, value_name = "R", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=62))]
    reserved_slots: u16,
    /// Deduplication domain of the vault, as for `init`; for one vault, `zone` and `family` give the same result
    #[arg(long, value_name = "DOMAIN", value_parser = text::domains(), default_value = Domain::Zone.name())]
    domain: Domain,
    /// Protection of the files, as for `profile set`; plain blocks deduplicate as plain data does
    #[arg(long, value_name = "WHAT", value_parser = super::profile::protections(), default_value = Protection::Both.name())]
    protect: Protection,
    /// Kind of the block keys, as for `profile set`; with random keys, blocks are equal only within a file
    #[arg(long, value_name = "KIND", value_parser = super::profile::key_kinds(), default_value = KeyKind::Convergent.name())]
    block_keys: KeyKind,
    /// Estimate every profile: encrypted with convergent keys, with random ones, and stored plain
    #[arg(long, conflicts_with_all = ["protect", "block_keys"])]
    profiles: bool,
    /// Codec whose additional savings are estimated, as for `init`; repeatable
    #[arg(long, value_name = "CODEC", value_parser = text::parse_compression, conflicts_with = "profiles")]
    compress: Vec<Chosen>,
    /// Memory for counting, in MiB; the rest is sorted on disk
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    memory: u32,
    /// Directory for sorting [default: the system's directory for temporary files]
    #[arg(long, value_name = "DIR")]
    temp_dir: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// Files and directories that would be stored
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Estimate {
    files: u64,
    /// of the files' contents, holes included
    bytes: u64,
    unreadable: u64,
    /// of the vault
    domain: &'static str,
    /// of the files
    protect: &'static str,
    block_keys: &'static str,
    sizes: Vec<Size>,
}

#[derive(Serialize)]
struct Size {
    block_size: u32,
    plain: Stored,
    vault: Stored,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    compressed: Vec<OfCodec>,
    #[serde(skip_serializing_if = "Option::is_none")]
    profiles: Option<Vec<OfProfiles>>,
}

/// A vault whose files all have one of these profiles: reads that verify and reads that do not come to the same.
#[derive(Serialize)]
struct OfProfiles {
    protect: [&'static str; 2],
    /// null: blocks that are stored plain have no keys
    block_keys: Option<&'static str>,
    vault: Stored,
    /// of its deduplicated bytes, those that a store has already which keeps the plain data, too
    equal_to_plain_bytes: u64,
    /// bytes of metadata, deduplicated
    #[serde(skip)]
    pages: u64,
}

/// Profiles that deduplicate differently, one of each.
const PROFILES: [(Protection, KeyKind); 3] = [
    (Protection::Both, KeyKind::Convergent),
    (Protection::Both, KeyKind::Random),
    (Protection::Integrity, KeyKind::Convergent),
];

#[derive(Clone, Serialize)]
struct Stored {
    bytes: u64,
    deduplicated_bytes: u64,
    /// saved part of `bytes`, 0 to 1
    saved: f64,
    /// Those of metadata pages among the vault's bytes. Not for plain data.
    #[serde(skip_serializing_if = "Option::is_none")]
    page_bytes: Option<u64>,
    blocks: u64,
    distinct_blocks: u64,
}

/// One block size.
struct Counter {
    geometry: Geometry,
    /// Within which encrypted blocks are equal.
    domain: Domain,
    profile: Profile,
    /// Counted once for each block size.
    plain: Option<Distinct>,
    vault: Distinct,
    /// Counted once for each block size, of encrypted blocks.
    compressed: Vec<Compressed>,
    /// Blocks of the plain data and of the vault together, where they may be equal.
    both: Option<Distinct>,
    /// Pages of files of one page, which are equal where the files are.
    small: Distinct,
    pages_of_large_files: u64,
    /// Pages of the present file that have a block, and the last of them.
    pages: u64,
    last_page: Option<PageNo>,
    first_page_seen: bool,
}

/// Domains of digests.
const FULL: u8 = 0;
const PARTIAL: u8 = 1;
const FILE: u8 = 2;

struct Reader<'a> {
    ui: &'a Ui,
    /// The directory that is walked through.
    start: &'a Path,
    domain: Domain,
    profile: Profile,
    /// How many counters each block size has, where every profile is estimated.
    profiles: Option<usize>,
    counters: Vec<Counter>,
    /// Files that could be met once more: by another name, or below another path.
    seen: HashSet<(u64, u64)>,
    several_paths: bool,
    files: u64,
    bytes: u64,
    unreadable: u64,
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    signals::flag_only();
    let mut sizes = if args.block_size.is_empty() { DEFAULT_SIZES.to_vec() } else { args.block_size };
    sizes.sort_unstable();
    sizes.dedup();
    let chosen = [(args.protect, args.block_keys)];
    let profiles = if args.profiles { &PROFILES[..] } else { &chosen[..] };
    let profiles: Vec<Profile> = profiles
        .iter()
        .map(|(protection, key)| Profile::new(*protection, *key))
        .collect::<std::result::Result<_, _>>()
        .map_err(HostError::from)?;
    let first = profiles[0];
    if first.protection().is_plain() && !args.compress.is_empty() {
        return Err(HostError::Usage(
            "blocks that are stored plain are not compressed: leave out --compress, or --protect",
        )
        .into());
    }
    let dir = args.temp_dir.unwrap_or_else(std::env::temp_dir);
    // For each size: plain data, and for each profile its blocks, pages, and perhaps blocks together with plain ones.
    let counts = if args.profiles { 2 + 2 * profiles.len() } else { 3 };
    let counts = counts + 2 * args.compress.len();
    let memory = ((args.memory as usize) << 20) / (counts * sizes.len());
    let of_each = sizes.iter().flat_map(|&size| profiles.iter().map(move |&profile| (size, profile)));
    let counters = of_each.map(|(size, profile)| {
        let geometry =
            Geometry::new(size, args.reserved_slots).expect("both options were checked when they were parsed");
        let distinct = || Distinct::new(memory, &dir);
        Ok(Counter {
            geometry,
            domain: profile.domain(args.domain),
            profile,
            plain: (profile == first).then(distinct),
            vault: distinct(),
            compressed: if profile == first { Compressed::all(&args.compress, size, &distinct)? } else { Vec::new() },
            both: (args.profiles && profile.protection().is_plain()).then(distinct),
            small: distinct(),
            pages_of_large_files: 0,
            pages: 0,
            last_page: None,
            first_page_seen: false,
        })
    });
    let counters = counters.collect::<Result<_>>()?;
    let mut reader = Reader {
        ui,
        start: Path::new(""),
        domain: args.domain,
        profile: first,
        profiles: args.profiles.then_some(profiles.len()),
        counters,
        seen: HashSet::new(),
        several_paths: args.paths.len() > 1,
        files: 0,
        bytes: 0,
        unreadable: 0,
    };
    open::raise_descriptor_limit();
    for path in &args.paths {
        std::fs::symlink_metadata(path).map_err(|source| HostError::Local {
            op: "read",
            path: path.clone(),
            source,
        })?;
        reader.all(path)?;
    }
    let estimate = reader.finish()?;
    if args.json { output::print_json(&estimate) } else { print(&estimate) }
}

/// Symbolic links are not followed.
impl Visit for Reader<'_> {
    type Passed = ();
    type Here = ();
    type Error = Error;

    fn enter(&mut self, _: &Met<()>, _: &Arc<dyn BackendDir>) -> Result<Option<()>> {
        Ok(Some(()))
    }

    fn entry(&mut self, at: &Met<()>, dir: &Arc<dyn BackendDir>, _: &mut (), entry: &Listed) -> Result<Option<()>> {
        signals::check()?;
        let path = self.start.join(&at.stored).join(&entry.name);
        match dir.stat_entry(&entry.name) {
            Ok(st) if st.kind == Kind::Dir => return Ok(Some(())),
            Ok(st) if st.kind == Kind::File => {
                self.one(&path, (st.nlink, st.dev, st.ino), || open_regular_in(&**dir, &entry.name))?;
            }
            Ok(_) => {}
            Err(e) => self.miss(&path, &e),
        }
        Ok(None)
    }

    fn failed(&mut self, at: &Met<()>, _: Failed, error: io::Error) -> Result<()> {
        self.miss(&self.start.join(&at.stored), &error);
        Ok(())
    }
}

impl<'a> Reader<'a> {
    /// A file, or all that is in a directory.
    fn all(&mut self, path: &'a Path) -> Result<()> {
        let meta = std::fs::symlink_metadata(path);
        let meta = meta.map_err(|source| HostError::Local { op: "read", path: path.into(), source })?;
        if meta.is_file() {
            return self.one(path, (meta.nlink(), meta.dev(), meta.ino()), || open_regular(CWD, path));
        }
        if !meta.is_dir() {
            return Ok(());
        }
        match LocalBackend::open(path) {
            Ok(opened) => {
                self.start = path;
                walk(Met::first(opened.root(), PathBuf::new(), ()), self)
            }
            Err(e) => {
                self.miss(path, &e);
                Ok(())
            }
        }
    }

    /// A file of so many names, by its device and number: it is stored once.
    fn one(
        &mut self,
        path: &Path,
        (names, dev, ino): (u64, u64, u64),
        open: impl FnOnce() -> io::Result<File>,
    ) -> Result<()> {
        if (names > 1 || self.several_paths) && !self.seen.insert((dev, ino)) {
            return Ok(());
        }
        match open() {
            Ok(file) => self.file(path, &file),
            Err(e) => {
                self.miss(path, &e);
                Ok(())
            }
        }
    }

    fn miss(&mut self, path: &Path, e: &io::Error) {
        self.unreadable += 1;
        self.ui.warn(format_args!("{}: {e}", text::printable(&path.to_string_lossy())));
    }

    fn file(&mut self, path: &Path, file: &File) -> Result<()> {
        let mut piece = vec![0; PIECE as usize];
        let mut whole = distinct::hasher(FILE)?;
        let (mut at, mut data) = (0, Extent::default());
        self.files += 1;
        loop {
            signals::check()?;
            if let Some(next) = data.behind_hole(file, at) {
                // The digest is of use for files of one page alone, which are shorter than a piece.
                whole.update(&next.to_le_bytes());
                self.bytes += next - at;
                at = next;
            }
            let len = match fill(file, &mut piece, at) {
                Ok(len) => len,
                Err(e) => {
                    self.miss(path, &e);
                    return Ok(());
                }
            };
            whole.update(&piece[..len]);
            for counter in &mut self.counters {
                let mut data = data;
                counter.piece(self.files, &piece[..len], at, |from, to| data.has(file, from, to))?;
            }
            data.has(file, at, at + len as u64);
            self.bytes += len as u64;
            at += len as u64;
            if len < piece.len() {
                break;
            }
        }
        let digest = distinct::finish(&whole);
        for counter in &mut self.counters {
            counter.end_of_file(self.files, at, digest)?;
        }
        Ok(())
    }

    fn finish(self) -> Result<Estimate> {
        let (mut counters, mut sizes) = (self.counters.into_iter(), Vec::new());
        while let Some(first) = counters.next() {
            let rest = counters.by_ref().take(self.profiles.map_or(0, |count| count - 1));
            sizes.push(first.finish(rest, self.profiles.is_some())?);
        }
        Ok(Estimate {
            files: self.files,
            bytes: self.bytes,
            unreadable: self.unreadable,
            domain: self.domain.name(),
            protect: self.profile.protection().name(),
            block_keys: self.profile.key().name(),
            sizes,
        })
    }
}

/// Reads until the buffer is full or the file at its end.
fn fill(file: &File, buf: &mut [u8], at: u64) -> io::Result<usize> {
    let mut len = 0;
    while len < buf.len() {
        match file.read_at(&mut buf[len..], at + len as u64) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(len)
}

/// Where the next data of a sparse file is.
#[derive(Clone, Copy, Default)]
struct Extent {
    start: u64,
    end: u64,
}

impl Extent {
    /// Whether there is data between two offsets; asked in ascending order.
    fn has(&mut self, file: &File, from: u64, to: u64) -> bool {
        if self.end <= from {
            // Where the store cannot tell, there is data.
            (self.start, self.end) = next_data(file, from, u64::MAX).unwrap_or((from, u64::MAX));
        }
        self.start < to && self.end > from
    }

    /// The first piece behind this offset that has data in it, or the end of the file, if whole pieces of a hole are in
    /// between.
    fn behind_hole(&mut self, file: &File, at: u64) -> Option<u64> {
        if self.has(file, at, at + PIECE) {
            return None;
        }
        let next = self.start.min(file.metadata().ok()?.len());
        Some(next - next % PIECE).filter(|next| *next > at)
    }
}

impl Counter {
    /// A piece of the `file`th file.
    fn piece(&mut self, file: u64, piece: &[u8], at: u64, mut has_data: impl FnMut(u64, u64) -> bool) -> Result<()> {
        let size = self.geometry.block_size();
        for (i, block) in piece.chunks(size as usize).enumerate() {
            let from = at + i as u64 * size;
            let len = block.len() as u32;
            if !has_data(from, from + u64::from(len)) {
                continue;
            }
            self.page_of(from / size);
            if u64::from(len) == size {
                self.add_plain(digest(FULL, block)?, len)?;
                self.add_stored(self.sealed(file, from / size, block)?, block)?;
                continue;
            }
            self.add_plain(digest(PARTIAL, block)?, len)?;
            // Section 9 of the format: a tail that finds no room in its page is a block padded with zeros.
            let used = from / size % self.geometry.blocks_per_page();
            if used as usize + (len as usize).div_ceil(32) > lamassu_format::geometry::SLOTS {
                let mut padded = block.to_vec();
                padded.resize(size as usize, 0);
                self.add_stored(self.sealed(file, from / size, &padded)?, &padded)?;
            }
        }
        Ok(())
    }

    fn add_plain(&mut self, digest: u128, len: u32) -> Result<()> {
        self.plain.iter_mut().chain(&mut self.both).try_for_each(|counted| counted.add(digest, len))
    }

    fn add_stored(&mut self, digest: u128, block: &[u8]) -> Result<()> {
        let len = block.len() as u32;
        self.vault.add(digest, len)?;
        self.compressed.iter_mut().try_for_each(|compressed| compressed.add(digest, block))?;
        self.both.iter_mut().try_for_each(|counted| counted.add(digest, len))
    }

    /// What is equal where the ciphertexts of two blocks are.
    fn sealed(&self, file: u64, number: u64, block: &[u8]) -> Result<u128> {
        let mut salted = distinct::hasher(FULL)?;
        match self.domain {
            _ if self.profile.protection().is_plain() => {}
            Domain::Zone | Domain::Family => {}
            Domain::File => drop(salted.update(&file.to_le_bytes())),
            Domain::None => drop(salted.update(&file.to_le_bytes()).update(&number.to_le_bytes())),
        }
        Ok(distinct::finish(salted.update(block)))
    }

    /// Blocks come in ascending order.
    fn page_of(&mut self, block: u64) {
        let page = self.geometry.page_of(BlockNo(block));
        if self.last_page != Some(page) {
            self.pages += 1;
            self.last_page = Some(page);
            self.first_page_seen |= page == PageNo::ZERO;
        }
    }

    /// The first page and the last are there also where they have no block.
    fn end_of_file(&mut self, file: u64, size: u64, whole: u128) -> Result<()> {
        let last = self.geometry.last_page(size);
        let pages = std::mem::take(&mut self.pages);
        let first_absent = !std::mem::take(&mut self.first_page_seen);
        let last_absent = self.last_page.take() != Some(last);
        if last == PageNo::ZERO {
            let page = if self.domain.is_salted() { digest(FILE, &file.to_le_bytes())? } else { whole };
            return self.small.add(page, PAGE);
        }
        self.pages_of_large_files += pages + u64::from(first_absent) + u64::from(last_absent);
        Ok(())
    }

    /// `rest`: those of the same block size and other profiles.
    fn finish(mut self, rest: impl Iterator<Item = Counter>, has_profiles: bool) -> Result<Size> {
        let plain = self.plain.take().map_or(Ok(Counted::default()), Distinct::count)?;
        let block_size = self.geometry.block_size() as u32;
        let (mut all, compressed) = (Vec::new(), std::mem::take(&mut self.compressed));
        for counter in std::iter::once(self).chain(rest) {
            all.push(counter.finish_profile(&plain)?);
        }
        let (vault, pages) = (all[0].vault.clone(), all[0].pages);
        let compressed = compressed.into_iter().map(|of| of.finish(&vault, pages)).collect::<Result<_>>()?;
        let plain = Stored::of(&plain, None);
        Ok(Size { block_size, plain, vault, compressed, profiles: has_profiles.then_some(all) })
    }

    fn finish_profile(self, plain: &Counted) -> Result<OfProfiles> {
        let (blocks, small) = (self.vault.count()?, self.small.count()?);
        let both = self.both.map(Distinct::count).transpose()?;
        let large = self.pages_of_large_files * u64::from(PAGE);
        let vault = Counted {
            bytes: blocks.bytes + small.bytes + large,
            distinct_bytes: blocks.distinct_bytes + small.distinct_bytes + large,
            ..blocks
        };
        let is_plain = self.profile.protection().is_plain();
        let protect =
            if is_plain { [Protection::Integrity, Protection::None] } else { [Protection::Both, Protection::Encrypt] };
        Ok(OfProfiles {
            protect: protect.map(Protection::name),
            block_keys: (!is_plain).then(|| self.profile.key().name()),
            vault: Stored::of(&vault, Some(small.bytes + large)),
            pages: small.distinct_bytes + large,
            equal_to_plain_bytes: both
                .map_or(0, |both| plain.distinct_bytes + blocks.distinct_bytes - both.distinct_bytes),
        })
    }
}

impl Stored {
    fn of(c: &Counted, page_bytes: Option<u64>) -> Stored {
        let saved = if c.bytes == 0 { 0.0 } else { 1.0 - c.distinct_bytes as f64 / c.bytes as f64 };
        Stored {
            bytes: c.bytes,
            deduplicated_bytes: c.distinct_bytes,
            saved: (saved * 1e6).round() / 1e6,
            page_bytes,
            blocks: c.count,
            distinct_blocks: c.distinct,
        }
    }
}

fn print(e: &Estimate) -> Result<()> {
    let mut out = format!("{} files, {}\n\n", e.files, text::bytes(e.bytes));
    out.push_str("block size  plain        deduplicated   saved   vault        deduplicated   saved");
    let row = |s: &Stored| {
        format!("{:<12} {:<12} {:>6.2}%", text::bytes(s.bytes), text::bytes(s.deduplicated_bytes), s.saved * 100.0)
    };
    for s in &e.sizes {
        out.push_str(&format!("\n{:<11} {}   {}", text::bytes(s.block_size.into()), row(&s.plain), row(&s.vault)));
    }
    let of_codecs = e.sizes.iter().flat_map(|s| s.compressed.iter().map(move |of| (s.block_size, of)));
    for (n, (block_size, of)) in of_codecs.enumerate() {
        if n == 0 {
            out.push_str("\n\nblock size  codec      vault        deduplicated   saved   of these without zeros");
        }
        out.push_str(&format!(
            "\n{:<11} {:<10} {}   {}",
            text::bytes(block_size.into()),
            of.compression.codec(),
            row(&of.vault),
            text::bytes(of.without_zeros_bytes)
        ));
    }
    let of_each = e.sizes.iter().flat_map(|s| s.profiles.iter().flatten().map(move |of| (s.block_size, of)));
    for (n, (block_size, of)) in of_each.enumerate() {
        if n == 0 {
            out.push_str("\n\nblock size  protect            block keys   vault        deduplicated   saved   equal to plain data");
        }
        out.push_str(&format!(
            "\n{:<11} {:<18} {:<12} {}   {}",
            text::bytes(block_size.into()),
            of.protect.join(", "),
            of.block_keys.unwrap_or("-"),
            row(&of.vault),
            text::bytes(of.equal_to_plain_bytes)
        ));
    }
    output::print(out)
}
