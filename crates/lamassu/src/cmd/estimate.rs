//! `lamassu dedup-estimate`: what deduplication would save, before anything is moved: of the plain data, and of a vault
//! that holds it.
//!
//! Files are read once, in pieces; nothing is encrypted, since a block's ciphertext is equal exactly where the block
//! is, within the vault's deduplication domain. Memory is bounded.

use crate::distinct::{self, Counted, Distinct, digest};
use crate::fault::{Error, Result};
use crate::output::{self, Ui};
use crate::{open, signals, text};
use lamassu_format::profile::{KeyKind, Profile, Protection};
use lamassu_format::{BlockNo, Domain, Geometry, PageNo};
use lamassu_host::Error as HostError;
use lamassu_store::backend::{Backend, BackendDir, Kind, Listed, LocalBackend, next_data, open_regular};
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
  lamassu dedup-estimate --domain file /srv/images           what is left where only blocks of one file may be equal
  lamassu dedup-estimate --block-keys random /srv/letters    the same of files with random keys";

/// Bytes read at once: the largest block.
const PIECE: u64 = 1 << 20;
const PAGE: u32 = 4096;
const DEFAULT_SIZES: [u32; 4] = [4 << 10, 16 << 10, 64 << 10, 128 << 10];

/// Options of `dedup-estimate`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Block sizes to try, as for `init`; may be given several times [default: 4K, 16K, 64K, 128K]
    #[arg(short, long, value_name = "N", value_parser = text::parse_block_size)]
    block_size: Vec<u32>,
    /// Transient key slots in a page, as for `init`
    #[arg(short = 'R', long, value_name = "R", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=62))]
    reserved_slots: u16,
    /// Deduplication domain of the vault, as for `init`; `zone` and `family` come to the same for one vault
    #[arg(long, value_name = "DOMAIN", value_parser = text::domains(), default_value = Domain::Zone.name())]
    domain: Domain,
    /// Protection of the files, as for `profile set`: blocks that are stored plain are equal as plain ones are
    #[arg(long, value_name = "WHAT", value_parser = super::profile::protections(), default_value = Protection::Both.name())]
    protect: Protection,
    /// Kind of the blocks' keys, as for `profile set`: with random ones blocks are equal within a file alone
    #[arg(long, value_name = "KIND", value_parser = super::profile::key_kinds(), default_value = KeyKind::Convergent.name())]
    block_keys: KeyKind,
    /// Memory for counting, in MiB; what does not fit is sorted on disk
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    memory: u32,
    /// Where to sort [default: the system's directory for temporary files]
    #[arg(long, value_name = "DIR")]
    temp_dir: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// What would be stored: files and directories, with all that is in them
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
}

#[derive(Serialize)]
struct Stored {
    bytes: u64,
    deduplicated_bytes: u64,
    /// Of `bytes`, 0 to 1.
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
    plain: Distinct,
    vault: Distinct,
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
    counters: Vec<Counter>,
    seen: HashSet<(u64, u64)>,
    files: u64,
    bytes: u64,
    unreadable: u64,
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    signals::flag_only();
    let mut sizes = if args.block_size.is_empty() { DEFAULT_SIZES.to_vec() } else { args.block_size };
    sizes.sort_unstable();
    sizes.dedup();
    let profile = Profile::new(args.protect, args.block_keys).map_err(lamassu_host::Error::from)?;
    let dir = args.temp_dir.unwrap_or_else(std::env::temp_dir);
    let memory = ((args.memory as usize) << 20) / (3 * sizes.len());
    let counters = sizes.iter().map(|&size| {
        let geometry =
            Geometry::new(size, args.reserved_slots).expect("both options were checked when they were parsed");
        let distinct = || Distinct::new(memory, &dir);
        Counter {
            geometry,
            domain: profile.domain(args.domain),
            profile,
            plain: distinct(),
            vault: distinct(),
            small: distinct(),
            pages_of_large_files: 0,
            pages: 0,
            last_page: None,
            first_page_seen: false,
        }
    });
    let counters = counters.collect();
    let mut reader = Reader {
        ui,
        start: Path::new(""),
        domain: args.domain,
        profile,
        counters,
        seen: HashSet::new(),
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
            Ok(st) if st.kind == Kind::File => self.one(&path, (st.nlink, st.dev, st.ino))?,
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
            return self.one(path, (meta.nlink(), meta.dev(), meta.ino()));
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
    fn one(&mut self, path: &Path, (names, dev, ino): (u64, u64, u64)) -> Result<()> {
        if names > 1 && !self.seen.insert((dev, ino)) {
            return Ok(());
        }
        match open_regular(CWD, path) {
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
        let sizes: Result<Vec<Size>> = self.counters.into_iter().map(Counter::finish).collect();
        Ok(Estimate {
            files: self.files,
            bytes: self.bytes,
            unreadable: self.unreadable,
            domain: self.domain.name(),
            protect: self.profile.protection().name(),
            block_keys: self.profile.key().name(),
            sizes: sizes?,
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
                self.plain.add(digest(FULL, block)?, len)?;
                self.vault.add(self.sealed(file, from / size, block)?, len)?;
                continue;
            }
            self.plain.add(digest(PARTIAL, block)?, len)?;
            // Section 9 of the format: a tail that finds no room in its page is a block padded with zeros.
            let used = from / size % self.geometry.blocks_per_page();
            if used as usize + (len as usize).div_ceil(32) > lamassu_format::geometry::SLOTS {
                let mut padded = block.to_vec();
                padded.resize(size as usize, 0);
                self.vault.add(self.sealed(file, from / size, &padded)?, size as u32)?;
            }
        }
        Ok(())
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

    fn finish(self) -> Result<Size> {
        let (plain, blocks, small) = (self.plain.count()?, self.vault.count()?, self.small.count()?);
        let large = self.pages_of_large_files * u64::from(PAGE);
        let vault = Counted {
            bytes: blocks.bytes + small.bytes + large,
            distinct_bytes: blocks.distinct_bytes + small.distinct_bytes + large,
            ..blocks
        };
        Ok(Size {
            block_size: self.geometry.block_size() as u32,
            plain: Stored::of(&plain, None),
            vault: Stored::of(&vault, Some(small.bytes + large)),
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
    for s in &e.sizes {
        let row = |s: &Stored| {
            format!("{:<12} {:<12} {:>6.2}%", text::bytes(s.bytes), text::bytes(s.deduplicated_bytes), s.saved * 100.0)
        };
        out.push_str(&format!("\n{:<11} {}   {}", text::bytes(s.block_size.into()), row(&s.plain), row(&s.vault)));
    }
    output::print(out)
}
