//! A vault in memory with known content, an older state of it, and what is seen of it afterwards.
#![allow(clippy::unwrap_used)]

use crate::common::{RO, Short, me, n, options};
use lamassu_crypto::SecretBytes;
use lamassu_format::header::{Header, NameMode, SlotKind, VaultHeader};
use lamassu_format::name::{COMPANION_PREFIX, DIR_RECORD, HEADER, LINK_PREFIX, LONG_PREFIX};
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_keys::{Argon2Params, Material, NewSlot, NewVault, Unlocked, Zone, create_vault, unlock};
use lamassu_store::backend::MemoryBackend;
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::{Access, Kind, ROOT, Vault, VaultError, check};
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
    made: &'static Made,
}

struct Made {
    older: MemoryBackend,
    now: MemoryBackend,
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

fn make() -> Made {
    let (mut header, unlocked) = new_header();
    let store = Arc::new(MemoryBackend::new());
    let backend: Arc<dyn Backend> = store.clone();
    let older_header = header.to_json().unwrap();
    put_file(&*backend.root(), OsStr::new(HEADER), &older_header);
    Vault::make_tree(&*backend, &header, &unlocked.key_ring(Suite::Aes).unwrap()).unwrap();
    let open = |header: &VaultHeader| {
        Vault::open(backend.clone(), header, unlocked.key_ring(Suite::Aes).unwrap(), options(false)).unwrap()
    };
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
    drop(v);
    Made { older, now: store.snapshot(), older_header, stored, contents }
}

fn put_file(dir: &dyn BackendDir, name: &OsStr, bytes: &[u8]) {
    let _ = dir.unlink(name);
    dir.create_file(name).unwrap().write_at(0, bytes).unwrap();
}

impl Lab {
    pub fn new() -> Lab {
        static MADE: OnceLock<Made> = OnceLock::new();
        let made = MADE.get_or_init(make);
        Lab { store: Arc::new(made.now.snapshot()), made }
    }

    /// Opens the vault as a program does: header, key, tree. A refusal is told in a word.
    pub fn open(&self) -> Result<Vault, &'static str> {
        let Ok(bytes) = text_of(&self.store, Path::new(HEADER)) else { return Err("not a vault") };
        let header = VaultHeader::parse(&bytes).map_err(|_| "unreadable")?;
        let unlocked =
            unlock(&header, &material()).map_err(|e| if e.is_wrong_key() { "wrong key" } else { "altered" })?;
        let backend: Arc<dyn Backend> = self.store.clone();
        Ok(Vault::open(backend, &header, unlocked.key_ring(header.suite()).unwrap(), options(false)).unwrap())
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

/// What an application sees.
#[derive(Debug, Default, PartialEq)]
pub struct Seen {
    /// Blocks that read as errors, by path.
    bad: BTreeMap<String, BTreeSet<usize>>,
    /// Paths that give an error, or are not there.
    lost: BTreeSet<String>,
    gone: BTreeSet<String>,
    /// Files that are as they once were; or as another one is.
    older: BTreeSet<String>,
    foreign: BTreeSet<String>,
    /// Links.
    bad_links: BTreeSet<String>,
}

impl Seen {
    pub fn of(lab: &Lab, vault: &Vault) -> Seen {
        let mut seen = Seen::default();
        for path in lab.made.contents.keys() {
            let entry = match vault.find(path) {
                Ok(entry) => entry,
                Err(VaultError::NotFound) => {
                    seen.gone.insert(path.clone());
                    continue;
                }
                Err(VaultError::Damaged { .. }) => {
                    seen.lost.insert(path.clone());
                    continue;
                }
                Err(other) => panic!("{path}: {other}"),
            };
            assert_eq!(entry.attr.kind, Kind::File);
            seen.read(lab, vault, path, entry.attr.ino, entry.attr.size);
        }
        for letter in ["l", "m"] {
            let path = format!("link-{letter}");
            match vault.readlink(vault.ino(&path)) {
                Ok(target) => assert_eq!(target, letter.repeat(3000).into_bytes()),
                Err(VaultError::Damaged { .. }) => drop(seen.bad_links.insert(path)),
                Err(other) => panic!("{path}: {other}"),
            }
        }
        seen.listed(vault);
        seen
    }

    /// What is listed is what is there, but for names that do not open.
    fn listed(&mut self, vault: &Vault) {
        let listed = vault.list("");
        for path in FILES.iter().filter(|p| !p.contains('/') && !self.gone.contains(**p)) {
            assert!(listed.iter().any(|l| l == path), "{path} is not listed");
        }
        for path in [long("l"), long("m")] {
            if !listed.contains(&path) && !self.gone.contains(&path) {
                self.lost.insert(path);
            }
        }
    }

    fn read(&mut self, lab: &Lab, vault: &Vault, path: &str, ino: u64, size: u64) {
        let [old, now] = &lab.made.contents[path];
        let block = |content: &[u8], b: usize| -> Vec<u8> {
            content.get(b * B..content.len().min((b + 1) * B)).unwrap_or_default().to_vec()
        };
        let handle = vault.open_file(ino, RO).unwrap();
        let mut blocks = Vec::new();
        for b in 0..now.len().max(size as usize).div_ceil(B) {
            let mut buf = vec![0; B];
            match vault.read(handle, (b * B) as u64, &mut buf) {
                Ok(got) => {
                    buf.truncate(got);
                    blocks.push(Some(buf));
                }
                Err(VaultError::Store(lamassu_store::StoreError::Damaged(_))) => {
                    self.bad.entry(path.to_owned()).or_default().insert(b);
                    blocks.push(None);
                }
                Err(other) => panic!("{path}, block {b}: {other}"),
            }
        }
        vault.release(handle).unwrap();
        // With its last page the exact size is lost: what lies past the one shown counts as unreadable with the block
        // before it.
        for (b, got) in blocks.iter_mut().enumerate().skip((size as usize).div_ceil(B)) {
            if self.bad.get(path).is_some_and(|bad| bad.contains(&(b - 1))) {
                *got = None;
                self.bad.get_mut(path).unwrap().insert(b);
            }
        }
        let is = |content: &[u8]| {
            content.len().div_ceil(B) <= blocks.len()
                && blocks.iter().enumerate().all(|(b, got)| got.as_ref().is_none_or(|got| *got == block(content, b)))
        };
        if is(now) {
            return;
        }
        if is(old) {
            self.older.insert(path.to_owned());
            return;
        }
        let theirs = |(other, contents): (&String, &[Vec<u8>; 2])| other != path && is(&contents[1]);
        if lab.made.contents.iter().any(theirs) {
            self.foreign.insert(path.to_owned());
            return;
        }
        let strange = |(b, got): &(usize, &Option<Vec<u8>>)| got.as_ref().is_some_and(|got| *got != block(now, *b));
        let strange: Vec<_> =
            blocks.iter().enumerate().filter(strange).map(|(b, got)| (b, got.as_ref().map(Vec::len))).collect();
        assert!(size == 0, "{path} of {size} bytes reads as what was never written there: (block, bytes) {strange:?}");
        self.gone.insert(path.to_owned());
    }

    /// A check finds damage where reads do, and only there.
    pub fn agrees_with(&self, found: &check::Report) {
        let errors = !(self.bad.is_empty() && self.lost.is_empty() && self.bad_links.is_empty());
        if errors {
            assert!(found.is_damaged(), "{self:?}, and a check finds nothing");
        }
        for path in self.bad.keys() {
            assert!(found.problems.iter().any(|p| p.path.as_deref() == Some(path)), "{path}: {:#?}", found.problems);
        }
        for p in found.problems.iter().filter(|p| p.block.is_some()) {
            let (path, first) = (p.path.as_ref().unwrap(), p.block.unwrap() as usize);
            let run = first..first + p.blocks.unwrap_or(1) as usize;
            assert!(self.bad.get(path).is_some_and(|bad| run.clone().all(|b| bad.contains(&b))), "{p:?} reads well");
        }
    }

    /// A repair takes nothing away that could be read, but for what has no name.
    pub fn is_kept(&self, after: &Seen) {
        assert!(after.bad.iter().all(|(path, blocks)| self.bad.get(path).is_some_and(|b| blocks.is_subset(b))));
        assert_eq!(after.older, self.older);
        assert_eq!(after.foreign, self.foreign);
        assert!(after.bad_links.is_subset(&self.bad_links));
        let named = |seen: &Seen| seen.lost.union(&seen.gone).cloned().collect::<BTreeSet<_>>();
        assert!(named(after).is_subset(&named(self)));
    }

    /// In the words of the table.
    pub fn told(&self, found: &check::Report) -> String {
        let kinds: BTreeSet<_> =
            found.problems.iter().filter(|p| !p.harmless).map(|p| format!("`{}`", p.kind)).collect();
        let mut parts = Vec::new();
        for blocks in self.bad.values() {
            parts.push(match blocks.len() {
                1 => "1 block".to_owned(),
                many => format!("{many} blocks"),
            });
        }
        parts.dedup();
        let named = [("names below it", &self.lost), ("names not found", &self.gone), ("target", &self.bad_links)];
        for (what, set) in named {
            if !set.is_empty() && !kinds.is_empty() {
                parts.push(match (what, set.iter().all(|p| !p.contains('/'))) {
                    ("names below it" | "names not found", true) => "its name".to_owned(),
                    _ => what.to_owned(),
                });
            }
        }
        let mut text = kinds.iter().cloned().collect::<Vec<_>>().join(", ");
        if !parts.is_empty() {
            text.push_str(&format!(": {}", parts.join(", ")));
        }
        let silent = [("**older content**", &self.older), ("**the other's content**", &self.foreign)];
        for (what, set) in silent {
            if !set.is_empty() {
                text.push_str(if text.is_empty() { "" } else { "; " });
                text.push_str(what);
            }
        }
        match (text.is_empty(), self.gone.is_empty()) {
            (true, false) => "**gone**".into(),
            (true, true) => "no effect".into(),
            (false, _) => text,
        }
    }
}
