//! A vault in memory with known content, with an anchor or without, an older state of it, and what is seen of it
//! afterwards.
#![allow(clippy::unwrap_used)]

mod seen;

pub use seen::Seen;

use crate::common::anchored::{Findings, Nobody};
use crate::common::{Short, me, n, options};
use lamassu_anchor::Anchor;
use lamassu_anchor::table::MemoryTable;
use lamassu_crypto::SecretBytes;
use lamassu_format::header::{Header, NameMode, SlotKind, VaultHeader};
use lamassu_format::name::{COMPANION_PREFIX, DIR_RECORD, HEADER, LINK_PREFIX, LONG_PREFIX};
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_keys::{Argon2Params, Material, NewSlot, NewVault, Unlocked, Zone, create_vault, unlock};
use lamassu_store::backend::MemoryBackend;
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::anchor::{NewTrees, rebuild};
use lamassu_vault::event::Events;
use lamassu_vault::{Access, Kind, Options, ROOT, Vault, scrub};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

const B: usize = 4096;
const FILES: [&str; 7] = ["big", "twin", "small", "little", "dir/inner", "other/inner", "top"];

/// A vault whose store can be changed, and the states it is made from.
pub struct Lab {
    store: Arc<MemoryBackend>,
    /// That of its anchor, if it has one.
    table: Option<Arc<MemoryTable>>,
    made: &'static Made,
}

struct Made {
    older: MemoryBackend,
    now: MemoryBackend,
    table: Option<MemoryTable>,
    older_header: Vec<u8>,
    /// Where everything lies.
    stored: BTreeMap<String, PathBuf>,
    contents: BTreeMap<String, [Vec<u8>; 2]>,
}

fn material() -> Material {
    Material::new(SlotKind::Raw, SecretBytes::new(vec![5; 32])).unwrap()
}

fn new_header() -> (VaultHeader, Unlocked) {
    let new = NewVault {
        suite: Suite::Aes,
        geometry: Geometry::new(4096, 62).unwrap(),
        names: NameMode::Encrypted,
        name_max: 255,
        convergent_small_files: true,
        // What a cut within a block damages would depend on its length.
        compression: None,
        domain: Domain::Zone,
        zone: Zone::Private,
        created: 1,
    };
    let cost = Argon2Params::new(64, 1, 1).unwrap();
    create_vault(&new, &NewSlot { material: &material(), cost, label: "one", created: 1 }).unwrap()
}

/// Bytes that tell which file, which block and which state they belong to.
fn content(len: usize, salt: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i / B) as u8 ^ salt.wrapping_mul(37) | 1)
        .enumerate()
        .map(|(i, b)| if i % B < 4 { salt } else { b })
        .collect()
}

fn long(letter: &str) -> String {
    letter.repeat(250)
}

/// Opens the vault, by its anchor if there is one.
fn open(
    backend: &Arc<dyn Backend>,
    header: &VaultHeader,
    unlocked: &Unlocked,
    table: Option<&Arc<MemoryTable>>,
) -> Vault {
    let anchor = table.map(|table| Arc::new(Anchor::open(table.clone(), &header.id()).unwrap()));
    let ring = unlocked.key_ring(header.suite()).unwrap();
    Vault::open(backend.clone(), header, ring, Options { anchor, ..options(false) }).unwrap()
}

fn make(is_anchored: bool) -> Made {
    let (mut header, unlocked) = new_header();
    let store = Arc::new(MemoryBackend::new());
    let backend: Arc<dyn Backend> = store.clone();
    let older_header = header.to_json().unwrap();
    put_file(&*backend.root(), OsStr::new(HEADER), &older_header);
    Vault::make_tree(&*backend, &header, &unlocked.key_ring(Suite::Aes).unwrap()).unwrap();
    let table = is_anchored.then(|| {
        let (v, table) = (open(&backend, &header, &unlocked, None), Arc::new(MemoryTable::default()));
        let (_, done) = rebuild(&v, &header, table.clone(), NewTrees::default(), &Nobody).unwrap();
        assert_eq!((done.objects, done.damaged), (1, 0));
        v.close().unwrap();
        table
    });
    let open = |header: &VaultHeader| open(&backend, header, &unlocked, table.as_ref());
    let v = open(&header);
    let mut contents = BTreeMap::new();
    for dir in ["dir", "other"] {
        v.dir(dir);
    }
    let size = (2 * 62 + 5) * B + 700;
    let sizes = [size, size, 100, 90, 20, 30, 5000];
    for (i, (path, size)) in FILES.iter().zip(sizes).enumerate() {
        let old = content(size, 2 * i as u8 + 10);
        v.put(path, &old);
        contents.insert((*path).to_owned(), [old.clone(), old]);
    }
    for letter in ["l", "m"] {
        v.put(&long(letter), b"long");
        contents.insert(long(letter), [b"long".to_vec(), b"long".to_vec()]);
        v.symlink(ROOT, n(&format!("link-{letter}")), letter.repeat(3000).as_bytes(), me()).unwrap();
    }
    v.close().unwrap();
    drop(v);
    let older = store.snapshot();
    // A block of the second page, the tail, a small file; another key slot.
    let v = open(&header);
    for (path, at, len) in [("big", 67 * B, B), ("big", size - 300, 300), ("small", 0, 100)] {
        let data = content(len, 99);
        let handle = v.open_file(v.ino(path), Access { read: true, write: true, truncate: false }).unwrap();
        assert_eq!(v.write(handle, at as u64, &data).unwrap(), len);
        v.release(handle).unwrap();
        contents.get_mut(path).unwrap()[1][at..at + len].copy_from_slice(&data);
    }
    v.close().unwrap();
    let cost = Argon2Params::new(64, 1, 1).unwrap();
    unlocked.add_slot(&mut header, &NewSlot { material: &material(), cost, label: "two", created: 2 }).unwrap();
    put_file(&*backend.root(), OsStr::new(HEADER), &header.to_json().unwrap());
    drop(v);
    let v = open(&header);
    let paths = contents.keys().cloned().chain(["dir", "other", "link-l", "link-m"].map(String::from));
    let stored = paths.map(|p| (p.clone(), v.stored_path(n(&p)).unwrap())).collect();
    v.clean();
    v.close().unwrap();
    drop(v);
    let table = table.map(|table| MemoryTable::clone(&table));
    Made { older, now: store.snapshot(), table, older_header, stored, contents }
}

fn put_file(dir: &dyn BackendDir, name: &OsStr, bytes: &[u8]) {
    let _ = dir.unlink(name);
    dir.create_file(name).unwrap().write_at(0, bytes).unwrap();
}

impl Lab {
    pub fn new(is_anchored: bool) -> Lab {
        static MADE: [OnceLock<Made>; 2] = [const { OnceLock::new() }; 2];
        let made = MADE[usize::from(is_anchored)].get_or_init(|| make(is_anchored));
        Lab { store: Arc::new(made.now.snapshot()), table: made.table.clone().map(Arc::new), made }
    }

    /// Opens the vault as a program does: header, key, tree. A refusal is told in a word.
    pub fn open(&self) -> Result<Vault, &'static str> {
        let Ok(bytes) = text_of(&self.store, Path::new(HEADER)) else { return Err("not a vault") };
        let header = VaultHeader::parse(&bytes).map_err(|_| "unreadable")?;
        let unlocked =
            unlock(&header, &material()).map_err(|e| if e.is_wrong_key() { "wrong key" } else { "altered" })?;
        let backend: Arc<dyn Backend> = self.store.clone();
        Ok(open(&backend, &header, &unlocked, self.table.as_ref()))
    }

    /// The kinds of what a scrub finds.
    pub fn scrubbed(&self) -> BTreeSet<String> {
        let header = VaultHeader::parse(&text_of(&self.store, Path::new(HEADER)).unwrap()).unwrap();
        let anchor = Anchor::open(self.table.clone().unwrap(), &header.id()).unwrap();
        let mut found = Findings::default();
        let done = scrub::scrub(self.store.root(), &header, &anchor, &Events::default(), &mut found).unwrap();
        assert_eq!((done.unfinished, done.open_files), (0, 0));
        found.kinds()
    }

    pub fn long_path(&self) -> String {
        long("l")
    }

    pub fn other_long_path(&self) -> String {
        long("m")
    }

    pub fn stored(&self, path: &str) -> PathBuf {
        self.made.stored[path].clone()
    }

    pub fn record(&self, dir: &str) -> PathBuf {
        self.stored(dir).join(DIR_RECORD)
    }

    pub fn companion(&self, path: &str) -> PathBuf {
        self.stored(path).to_str().unwrap().replace(LONG_PREFIX, COMPANION_PREFIX).into()
    }

    /// Where the rest of a long link lies; whose it is does not matter.
    pub fn link_rest(&self, which: usize) -> PathBuf {
        let entries = self.made.now.root().read_dir().unwrap();
        let mut rests: Vec<_> =
            entries.into_iter().map(|e| e.name).filter(|n| n.as_bytes().starts_with(LINK_PREFIX.as_bytes())).collect();
        rests.sort();
        rests[which].clone().into()
    }

    pub fn older_header(&self) -> Vec<u8> {
        self.made.older_header.clone()
    }

    /// That of another vault, with another key.
    pub fn strange_header() -> Vec<u8> {
        let (mut header, unlocked) = new_header();
        let strange = Material::new(SlotKind::Raw, SecretBytes::new(vec![6; 32])).unwrap();
        let cost = Argon2Params::new(64, 1, 1).unwrap();
        unlocked.add_slot(&mut header, &NewSlot { material: &strange, cost, label: "x", created: 1 }).unwrap();
        let _removed = unlocked.remove_slot(&mut header, 1).unwrap();
        header.to_json().unwrap()
    }

    pub fn put_header(&self, bytes: Vec<u8>) {
        put_file(&*self.store.root(), OsStr::new(HEADER), &bytes);
    }

    pub fn text(&self, at: &Path) -> Vec<u8> {
        text_of(&self.store, at).unwrap()
    }

    pub fn older_text(&self, at: &Path) -> Vec<u8> {
        text_of(&self.made.older, at).unwrap()
    }

    /// As a link, where a link can hold it and there was one.
    pub fn put_text(&self, at: &Path, bytes: &[u8]) {
        let (dir, name) = place(&self.store, at);
        let was_link = dir.read_link(&name).is_ok();
        let _ = dir.unlink(&name);
        if !was_link || dir.make_symlink(&name, OsStr::from_bytes(bytes)).is_err() {
            put_file(&*dir, &name, bytes);
        }
    }

    pub fn delete(&self, at: &Path) {
        let (dir, name) = place(&self.store, at);
        dir.unlink(&name).unwrap();
    }

    fn file(&self, at: &Path) -> Arc<dyn lamassu_store::BackendFile> {
        let (dir, name) = place(&self.store, at);
        dir.open_file(&name, true).unwrap()
    }

    fn sectors(&self, at: &Path, from: u64, count: u64) -> Vec<u8> {
        read(&*self.file(at), from, count)
    }

    pub fn older_sectors(&self, at: &Path, from: u64, count: u64) -> Vec<u8> {
        let (dir, name) = place(&self.made.older, at);
        read(&*dir.open_file(&name, false).unwrap(), from, count)
    }

    pub fn flip(&self, at: &Path, offset: u64) {
        let mut byte = [0];
        self.file(at).read_at(offset, &mut byte).unwrap();
        self.file(at).write_at(offset, &[byte[0] ^ 1]).unwrap();
    }

    pub fn write(&self, at: &Path, sector: u64, bytes: &[u8]) {
        self.file(at).write_at(sector * B as u64, bytes).unwrap();
    }

    pub fn cut(&self, at: &Path, len: u64) {
        self.file(at).set_len(len).unwrap();
    }

    pub fn punch(&self, at: &Path, sector: u64) {
        self.file(at).punch(sector * B as u64, B as u64).unwrap();
    }

    /// Everything from `sector` on moves.
    pub fn insert(&self, at: &Path, sector: u64, bytes: &[u8]) {
        let len = self.file(at).stat().unwrap().len;
        let behind = self.sectors(at, sector, (len / B as u64).saturating_sub(sector));
        self.write(at, sector, &[bytes, &behind].concat());
    }

    pub fn swap(&self, (a, from): (&Path, u64), (b, to): (&Path, u64), count: u64) {
        let (x, y) = (self.sectors(a, from, count), self.sectors(b, to, count));
        self.write(a, from, &y);
        self.write(b, to, &x);
    }

    pub fn swap_whole(&self, a: &Path, b: &Path) {
        let sectors = self.file(a).stat().unwrap().len / B as u64;
        self.swap((a, 0), (b, 0), sectors);
    }

    pub fn replay_whole(&self, at: &Path) {
        let sectors = self.file(at).stat().unwrap().len / B as u64;
        self.write(at, 0, &self.older_sectors(at, 0, sectors));
    }

    /// Everything that the tree shows can be removed.
    pub fn remove_everything(&self, vault: &Vault) {
        for dir in ["dir", "other", ""] {
            if vault.find(dir).is_err() {
                continue; // moved to lamassu.lost
            }
            let ino = vault.ino(dir);
            for name in vault.list(dir) {
                let path = if dir.is_empty() { name.clone() } else { format!("{dir}/{name}") };
                match vault.find(&path).unwrap().attr.kind {
                    Kind::Dir => vault.rmdir(ino, n(&name)).unwrap(),
                    _ => vault.unlink(ino, n(&name)).unwrap(),
                }
            }
        }
        vault.put("new", b"the vault goes on");
        vault.check(&[], true, &crate::common::Quiet).unwrap();
        vault.clean();
    }
}

fn place(store: &MemoryBackend, at: &Path) -> (Arc<dyn BackendDir>, std::ffi::OsString) {
    let mut dir = store.root();
    for part in at.parent().unwrap() {
        dir = dir.open_dir(part).unwrap();
    }
    (dir, at.file_name().unwrap().to_owned())
}

fn text_of(store: &MemoryBackend, at: &Path) -> std::io::Result<Vec<u8>> {
    let (dir, name) = place(store, at);
    if let Ok(target) = dir.read_link(&name) {
        return Ok(target.into_vec());
    }
    let file = dir.open_file(&name, false)?;
    let mut bytes = vec![0; file.stat()?.len as usize];
    file.read_at(0, &mut bytes)?;
    Ok(bytes)
}

fn read(file: &dyn lamassu_store::BackendFile, from: u64, count: u64) -> Vec<u8> {
    let mut bytes = vec![0; (count as usize) * B];
    file.read_at(from * B as u64, &mut bytes).unwrap();
    bytes
}
