//! Vaults for tests: over memory, or a directory of this host; with keys that are the same every time.
#![allow(dead_code, clippy::unwrap_used)]

pub mod anchored;
pub mod keyed;
pub mod local;
pub mod steps;
pub mod turns;
pub mod wood;

use lamassu_anchor::table::{MemoryTable, Table};
use lamassu_crypto::compress::version_of;
use lamassu_crypto::{KeyRing, Secret};
use lamassu_format::header::{KeyArea, NameMode, SealedKeychain, VaultHeader, VaultParams, ZoneId};
use lamassu_format::{Codec, Compression, Domain, Geometry, Suite};
use lamassu_store::Backend;
use lamassu_store::backend::{LocalBackend, MemoryBackend};
use lamassu_vault::{
    Access, Durability, Entry, Freshness, HandleId, Ino, Integrity, Kind, Options, Owner, ROOT, RenameMode, Result,
    Vault, VaultError, check,
};
use std::ffi::OsStr;
use std::sync::Arc;

/// Reading and writing.
pub const RW: Access = Access { read: true, write: true, truncate: false };
/// Reading.
pub const RO: Access = Access { read: true, write: false, truncate: false };

/// How a test vault is made.
#[derive(Clone, Copy)]
pub struct Recipe {
    pub suite: Suite,
    pub names: NameMode,
    pub name_max: u8,
    pub block_size: u32,
    pub reserved: u16,
    pub domain: Domain,
    /// What blocks are compressed by.
    pub codec: Option<Codec>,
    /// The table of its anchor, where [`Recipe::make`] and [`Recipe::open`] go by one. Kept for ever: recipes are
    /// copied.
    pub table: Option<&'static Arc<dyn Table>>,
}

impl Default for Recipe {
    fn default() -> Self {
        Recipe {
            suite: Suite::Aes,
            names: NameMode::Encrypted,
            name_max: 255,
            block_size: 4096,
            reserved: 8,
            domain: Domain::Zone,
            codec: codec_of_mode(),
            table: None,
        }
    }
}

impl Recipe {
    pub fn plain() -> Self {
        Recipe { names: NameMode::Plain, ..Self::default() }
    }

    pub fn header(&self) -> VaultHeader {
        let params = VaultParams {
            zone: ZoneId([1; 16]),
            suite: self.suite,
            geometry: Geometry::new(self.block_size, self.reserved).unwrap(),
            names: self.names,
            name_max: self.name_max,
            convergent_small_files: !self.domain.is_salted(),
            domain: self.domain,
            created: 0,
        };
        let keychain = SealedKeychain { nonce: [0; 24], sealed: Vec::new(), oblivious: false };
        let mut header = VaultHeader::new(
            params,
            KeyArea {
                id: [1; 16],
                next_slot: 2,
                slots: Vec::new(),
                keychain,
                admin: None,
                history: None,
                mac: [0; 32],
            },
        );
        header.set_compression(compression(self.codec, self.suite, self.block_size));
        header
    }

    pub fn ring(&self) -> KeyRing {
        self.ring_of(&[2])
    }

    /// K_out of the epochs given, newest first.
    pub fn ring_of(&self, outer: &[u8]) -> KeyRing {
        let keys: Vec<_> = outer.iter().map(|b| Secret::new(&mut [*b; 32])).collect();
        KeyRing::new(self.suite, &[Secret::new(&mut [1; 32])], &keys)
    }

    /// Epochs of both keys: K_in, then K_out.
    pub fn ring_of_epochs(&self, inner: &[u8], outer: &[u8]) -> KeyRing {
        KeyRing::of_epochs(self.suite, &epochs(inner, 1), &epochs(outer, 2))
    }

    /// Opens with some epochs of the keys.
    pub fn open_with(&self, backend: &Arc<dyn Backend>, inner: &[u8], outer: &[u8]) -> Vault {
        Vault::open(backend.clone(), &self.header(), self.ring_of_epochs(inner, outer), self.options(false)).unwrap()
    }

    /// The same with an anchor of its own.
    pub fn anchored(self) -> Self {
        let table: Arc<dyn Table> = Arc::new(MemoryTable::default());
        Recipe { table: Some(Box::leak(Box::new(table))), ..self }
    }

    pub fn make(&self, backend: &Arc<dyn Backend>) -> Vault {
        Vault::make_tree(&**backend, &self.header(), &self.ring()).unwrap();
        if let Some(table) = self.table {
            drop(anchored::new_anchor(&self.header(), &**backend, table));
        }
        self.open(backend).unwrap()
    }

    pub fn open(&self, backend: &Arc<dyn Backend>) -> Result<Vault> {
        Vault::open(backend.clone(), &self.header(), self.ring(), self.options(false))
    }

    pub fn open_read_only(&self, backend: &Arc<dyn Backend>) -> Result<Vault> {
        Vault::open(backend.clone(), &self.header(), self.ring(), self.options(true))
    }

    pub fn options(&self, read_only: bool) -> Options {
        let anchor = self.table.map(|table| anchored::anchor(self, table));
        Options { anchor, ..options(read_only) }
    }
}

/// `LAMASSU_TEST_COMPRESS`, `lz4` or `zstd`: every vault compresses that a test does not want otherwise.
pub fn codec_of_mode() -> Option<Codec> {
    match std::env::var("LAMASSU_TEST_COMPRESS").as_deref() {
        Ok("lz4") => Some(Codec::Lz4),
        Ok("zstd") => Some(Codec::Zstd(1)),
        Ok(other) => panic!("LAMASSU_TEST_COMPRESS is {other:?}, not lz4 or zstd"),
        Err(_) => None,
    }
}

/// Compression by the codec that is linked, with the default rounding, where the suite has it.
pub fn compression(codec: Option<Codec>, suite: Suite, block_size: u32) -> Option<Compression> {
    let codec = codec.filter(|_| suite.marks_compressed())?;
    let round = Compression::default_round(block_size);
    Some(Compression::new(codec, version_of(codec), round, (suite, block_size)).unwrap())
}

/// Keys of epochs; `salt` tells K_in from K_out. Epoch 1 is that of [`Recipe::ring`].
pub fn epochs(numbers: &[u8], salt: u8) -> Vec<(u32, Secret<32>)> {
    let key = |n: u8| Secret::new(&mut [salt.wrapping_add((n - 1).wrapping_mul(16)); 32]);
    numbers.iter().map(|n| (u32::from(*n), key(*n))).collect()
}

pub fn options(read_only: bool) -> Options {
    Options {
        integrity: Integrity::Full,
        durability: Durability::Ordered,
        read_only,
        approved_only: false,
        threads: 1,
        device: None,
        anchor: None,
        freshness: Freshness::default(),
        events: Default::default(),
        upkeep: Default::default(),
        by_turns: false,
    }
}

pub fn memory() -> Arc<dyn Backend> {
    Arc::new(MemoryBackend::new())
}

/// A directory of this host, and the guard that removes it.
pub fn local() -> (tempfile::TempDir, Arc<dyn Backend>) {
    let dir = tempfile::tempdir().unwrap();
    let backend = Arc::new(LocalBackend::open(dir.path()).unwrap());
    (dir, backend)
}

/// The same in memory where this host has a file system there: a sync of a busy disk takes as long as it likes. (It may
/// lack attributes.)
pub fn local_fast() -> (tempfile::TempDir, Arc<dyn Backend>) {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let backend = Arc::new(LocalBackend::open(dir.path()).unwrap());
    (dir, backend)
}

/// Runs a test over each backend and both name modes, with an anchor, and in memory also without one.
pub fn everywhere(test: impl Fn(&Recipe, &Arc<dyn Backend>)) {
    for recipe in [Recipe::default(), Recipe::plain()] {
        test(&recipe, &memory());
        test(&recipe.anchored(), &memory());
        let (_dir, backend) = local();
        test(&recipe.anchored(), &backend);
    }
}

/// Us.
pub fn me() -> Owner {
    Owner { uid: rustix::process::getuid().as_raw(), gid: rustix::process::getgid().as_raw(), umask: 0 }
}

pub fn n(name: &str) -> &OsStr {
    OsStr::new(name)
}

/// Short forms for tests: paths, everything unwrapped.
pub trait Short {
    fn ino(&self, path: &str) -> Ino;
    fn find(&self, path: &str) -> Result<Entry>;
    fn put(&self, path: &str, data: &[u8]);
    fn get(&self, path: &str) -> Vec<u8>;
    fn dir(&self, path: &str) -> Ino;
    fn list(&self, path: &str) -> Vec<String>;
    fn new_file(&self, path: &str) -> (Entry, HandleId);
    fn clean(&self) -> check::Report;
}

/// The directory and the last name of a path.
pub fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

impl Short for Vault {
    fn find(&self, path: &str) -> Result<Entry> {
        let entry = self.resolve(n(path))?;
        Ok(entry)
    }

    fn ino(&self, path: &str) -> Ino {
        self.find(path).unwrap_or_else(|e| panic!("{path}: {e}")).attr.ino
    }

    fn new_file(&self, path: &str) -> (Entry, HandleId) {
        let (parent, name) = split(path);
        self.create(self.ino(parent), n(name), 0o644, RW, me()).unwrap_or_else(|e| panic!("{path}: {e}"))
    }

    fn put(&self, path: &str, data: &[u8]) {
        let handle = match self.find(path) {
            Ok(e) => self.open_file(e.attr.ino, Access { truncate: true, ..RW }).unwrap(),
            Err(_) => self.new_file(path).1,
        };
        assert_eq!(self.write(handle, 0, data).unwrap(), data.len());
        self.flush(handle).unwrap();
        self.release(handle).unwrap();
    }

    fn get(&self, path: &str) -> Vec<u8> {
        let e = self.find(path).unwrap_or_else(|e| panic!("{path}: {e}"));
        assert_eq!(e.attr.kind, Kind::File);
        let handle = self.open_file(e.attr.ino, RO).unwrap();
        let mut data = vec![0; e.attr.size as usize + 1];
        let read = self.read(handle, 0, &mut data).unwrap();
        data.truncate(read);
        self.release(handle).unwrap();
        data
    }

    fn dir(&self, path: &str) -> Ino {
        let (parent, name) = split(path);
        self.mkdir(self.ino(parent), n(name), 0o755, me()).unwrap().attr.ino
    }

    fn list(&self, path: &str) -> Vec<String> {
        let handle = self.open_dir(self.ino(path)).unwrap();
        let mut names = Vec::new();
        self.read_dir(handle, 0, &mut |e, _| {
            names.push(e.name.to_str().unwrap().to_owned());
            true
        })
        .unwrap();
        self.release_dir(handle).unwrap();
        names.retain(|name| name != "." && name != "..");
        names.sort();
        names
    }

    fn clean(&self) -> check::Report {
        let report = self.check(&[], false, &Quiet).unwrap();
        assert!(report.problems.is_empty(), "{:#?}", report.problems);
        report
    }
}

/// Progress for nobody.
pub struct Quiet;

impl check::Progress for Quiet {
    fn total(&self, _: u64, _: u64) {}
    fn advance(&self, _: u64, _: u64) {}
    fn problem(&self, _: &check::Problem) {}
}

/// Kinds, as a table of `docs/damage.md` has them.
pub fn words(kinds: impl IntoIterator<Item = String>) -> String {
    kinds.into_iter().map(|kind| format!("`{kind}`")).collect::<Vec<_>>().join(", ")
}

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/damage.md");

fn table_comments(name: &str) -> [String; 2] {
    [format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->\n")]
}

/// The table that `docs/damage.md` has between two comments: `<!-- NAME -->` and `<!-- end of NAME -->`.
pub fn documented(name: &str) -> String {
    let [begin, end] = table_comments(name);
    let text = std::fs::read_to_string(PAGE).unwrap();
    let (_, rest) = text.split_once(&begin).unwrap();
    rest.split_once(&end).unwrap().0.to_owned()
}

/// That this table is documented. With `LAMASSU_WRITE_DOCS` set it is written there.
pub fn is_documented(name: &str, found: &str) {
    let written = documented(name);
    if std::env::var_os("LAMASSU_WRITE_DOCS").is_some() {
        let [begin, end] = table_comments(name);
        let text = std::fs::read_to_string(PAGE).unwrap();
        let table = text.replacen(&format!("{begin}{written}{end}"), &format!("{begin}{found}{end}"), 1);
        std::fs::write(PAGE, table).unwrap();
        return;
    }
    assert_eq!(written, found, "LAMASSU_WRITE_DOCS=1 writes it anew");
}

/// Directories that were removed or replaced between being found and being opened.
pub fn removed_directories_open(v: &Vault) {
    ["removed", "replaced", "new"].iter().for_each(|name| _ = v.dir(name));
    let found = ["removed", "replaced"].map(|name| v.lookup(ROOT, n(name)).unwrap().attr.ino);
    v.rmdir(ROOT, n("removed")).unwrap();
    v.dir("removed");
    v.rename(ROOT, n("new"), ROOT, n("replaced"), RenameMode::Replace).unwrap();
    for ino in found {
        let handle = v.open_dir(ino).unwrap();
        assert!(matches!(v.read_dir(handle, 0, &mut |_, _| true), Err(VaultError::NotFound)));
        v.fsync_dir(handle).unwrap();
        v.forget(ino, u64::MAX);
        v.release_dir(handle).unwrap();
        assert!(matches!(v.open_dir(ino), Err(VaultError::Stale)), "nobody refers to it any more");
    }
}
