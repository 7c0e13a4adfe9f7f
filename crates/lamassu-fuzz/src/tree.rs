//! Directory records, companions, symbolic links and attributes (`docs/format.md` §5 to §7): put into the store of a
//! small vault as a hostile store would, or behind a good seal; then everything a front-end and `check` do is done to
//! that vault.

use crate::bytes::Bytes;
use crate::ring;
use lamassu_crypto::name::NameKey;
use lamassu_crypto::outer::RecordKind;
use lamassu_crypto::{KeyRing, Secret};
use lamassu_format::header::{KeyArea, NameMode, SealedKeychain, VaultHeader, VaultParams, ZoneId};
use lamassu_format::name::{self, DIR_RECORD, HEADER, RESERVED_PREFIX, ROOT_RECORD, SESSIONS, SESSIONS_RECORD};
use lamassu_format::{DirRecord, Domain, Geometry, RootRecord, SessionRecord, Suite};
use lamassu_store::backend::MemoryBackend;
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::detached::Detached;
use lamassu_vault::{
    Access, Durability, Freshness, Ino, Integrity, Kind, Options, Owner, ROOT, SetXattr, Vault, VaultError, check,
};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::{Arc, OnceLock};

const SUITE: Suite = Suite::Chacha;
const KINDS: [RecordKind; 5] =
    [RecordKind::Directory, RecordKind::Symlink, RecordKind::SymlinkHead, RecordKind::SymlinkRest, RecordKind::Xattr];
const RW: Access = Access { read: true, write: true, truncate: false };

/// The record of the root or of `dir`: any text, or any content behind a good seal.
pub fn dir_record(input: &[u8]) {
    let lab = Lab::new();
    let mut bytes = Bytes::new(input);
    let mode = bytes.u8();
    let dir = if mode & 1 == 0 { lab.dir() } else { lab.backend.root() };
    let text = record_text(&mut bytes, mode >> 1);
    replace_text(&*dir, OsStr::new(DIR_RECORD), &text, mode & 0x80 != 0);
    lab.exercise();
}

/// The record of the root's permissions, or that of sessions: any text, or any content behind a good seal.
pub fn state_record(input: &[u8]) {
    let lab = Lab::new();
    let mut bytes = Bytes::new(input);
    let mode = bytes.u8();
    let content = bytes.rest();
    if let Ok(record) = RootRecord::parse(content) {
        assert_eq!(record.encode(), content, "one encoding");
    }
    if let Ok(record) = SessionRecord::parse(content) {
        assert_eq!(record.encode(), content, "one encoding");
    }
    let is_root = mode & 1 == 0;
    let (kind, context) =
        if is_root { (RecordKind::Root, Vec::new()) } else { (RecordKind::Sessions, vault_header().id().0.to_vec()) };
    let text = match mode >> 1 & 3 {
        0 => content.to_vec(),
        1 => name::encode(content).into_bytes(),
        _ => name::encode(&seal(&ring(SUITE), kind, &context, content)).into_bytes(),
    };
    let root = lab.backend.root();
    if is_root {
        replace_text(&*root, OsStr::new(ROOT_RECORD), &text, mode & 0x80 != 0);
        return lab.exercise();
    }
    let dir = root.open_dir(OsStr::new(SESSIONS)).expect("it is there");
    replace_text(&*dir, OsStr::new(SESSIONS_RECORD), &text, mode & 0x80 != 0);
    // Without a record that opens nothing is written: the vault is read, checked and mended as far as that goes.
    let vault = lab.vault();
    walk(&vault, ROOT, 0);
    for repair in [false, true, true] {
        vault.check(&[], repair, &Quiet).expect("a check runs");
    }
    let _ = vault.close();
}

/// Stored names and companions in `dir`: any text, any bytes, or any name behind a good seal.
pub fn companion(input: &[u8]) {
    let lab = Lab::new();
    let mut bytes = Bytes::new(input);
    let mode = bytes.u8();
    let dir = lab.dir();
    let key = name_key(&*dir);
    let (long, companion) = stored_long(&*dir);
    let text = match mode % 4 {
        0 => bytes.rest().to_vec(),
        1 => name::encode(bytes.rest()).into_bytes(),
        2 => {
            let sealed = key.seal(bytes.rest());
            let hash = NameKey::hash(&sealed);
            rename(&*dir, &long, OsStr::new(&name::long_name(&hash)));
            rename(&*dir, &companion, OsStr::new(&name::companion_name(&hash)));
            let text = name::encode(&sealed).into_bytes();
            replace_text(&*dir, OsStr::new(&name::companion_name(&hash)), &text, mode & 0x80 != 0);
            return lab.exercise();
        }
        _ => {
            let direct = name::encode(&key.seal(bytes.rest()));
            rename(&*dir, &long, OsStr::new(&direct));
            return lab.exercise();
        }
    };
    replace_text(&*dir, &companion, &text, mode & 0x80 != 0);
    lab.exercise();
}

/// A symbolic link in `dir`: any target, or any content behind a good seal, with any rest.
pub fn symlink(input: &[u8]) {
    let lab = Lab::new();
    let mut bytes = Bytes::new(input);
    let mode = bytes.u8();
    let dir = lab.dir();
    let link = lab.stored_link();
    let ring = ring(SUITE);
    let text = match mode % 3 {
        0 => bytes.rest().to_vec(),
        1 => name::encode(&seal(&ring, RecordKind::Symlink, &[], bytes.rest())).into_bytes(),
        _ => {
            let id: [u8; 16] = std::array::from_fn(|_| bytes.u8());
            let rest_len = usize::from(bytes.u16() % 4096);
            let rest = bytes.take(rest_len);
            let rest_text = match mode & 0x40 {
                0 => name::encode(&seal(&ring, RecordKind::SymlinkRest, &id, rest)).into_bytes(),
                _ => rest.to_vec(),
            };
            replace_text(&*dir, OsStr::new(&name::link_rest_name(&id)), &rest_text, true);
            // The total length says the truth, or what the fuzzer wants; the first part is filled up to its length, or
            // not.
            let mut first = bytes.rest().to_vec();
            if mode & 0x20 == 0 {
                first.resize(680, b'x');
            }
            let total = if mode & 0x10 == 0 { (first.len() + rest_len) as u16 } else { u16::from(mode) * 37 };
            let head = [&id[..], &total.to_le_bytes(), &first].concat();
            [b".", name::encode(&seal(&ring, RecordKind::SymlinkHead, &[], &head)).as_bytes()].concat()
        }
    };
    replace_text(&*dir, &link, &text, mode & 0x80 != 0);
    lab.exercise();
}

/// An attribute of the file `top` or of `dir`: any name and value, or both behind good seals.
pub fn xattr(input: &[u8]) {
    let lab = Lab::new();
    let mut bytes = Bytes::new(input);
    let mode = bytes.u8();
    let len = usize::from(bytes.u8());
    let plain = bytes.take(len);
    let ring = ring(SUITE);
    let attr = match mode & 1 {
        0 => name::xattr_name(&ring.outer().seal_xattr_name(plain)).into_bytes(),
        _ => [b"user.lamassu.", plain].concat(),
    };
    let context = match mode & 4 {
        0 => attr.clone(),
        _ => [&attr[..], b"/", name_key(&*lab.dir()).id()].concat(),
    };
    let value = match mode & 2 {
        0 => seal(&ring, RecordKind::Xattr, &context, bytes.rest()),
        _ => bytes.rest().to_vec(),
    };
    // A name that no store takes is no attack.
    let stored = lab.stored(if mode & 4 == 0 { "top" } else { "dir" });
    let _ = lab.backend.root().hold(&stored).and_then(|held| held.set_xattr(OsStr::from_bytes(&attr), &value, 0));
    lab.exercise();
}

/// A vault with `dir/file`, `dir/link`, `dir/` and a long name, `top`.
pub struct Lab {
    backend: Arc<dyn Backend>,
}

impl Lab {
    /// A fresh copy of one vault.
    pub fn new() -> Lab {
        static MADE: OnceLock<MemoryBackend> = OnceLock::new();
        let made = MADE.get_or_init(|| make().expect("a vault in memory"));
        Lab { backend: Arc::new(made.snapshot()) }
    }

    pub fn vault(&self) -> Vault {
        open(self.backend.clone()).expect("the header is good")
    }

    /// Its keys for files that lie elsewhere. Those read the header's file, which a vault in memory does without.
    pub fn detached(&self) -> Detached {
        replace_text(&*self.backend.root(), OsStr::new(HEADER), b"{}", true);
        Detached::of(Arc::new(self.vault())).expect("its names are encrypted, and its blocks small")
    }

    fn stored(&self, path: &str) -> OsString {
        let path = self.vault().stored_path(OsStr::new(path)).expect("it is there");
        path.file_name().expect("no root").to_owned()
    }

    fn stored_link(&self) -> OsString {
        static NAME: OnceLock<OsString> = OnceLock::new();
        NAME.get_or_init(|| self.stored("dir/link")).clone()
    }

    /// The backing directory of `dir`.
    fn dir(&self) -> Arc<dyn BackendDir> {
        static NAME: OnceLock<OsString> = OnceLock::new();
        let stored = NAME.get_or_init(|| self.stored("dir"));
        self.backend.root().open_dir(stored).expect("it is there")
    }

    /// All that is done to a vault, whatever its store holds.
    fn exercise(&self) {
        let vault = self.vault();
        walk(&vault, ROOT, 0);
        let found = vault.check(&[], false, &Quiet).expect("a check runs");
        let again = vault.check(&[], false, &Quiet).expect("a check runs");
        assert_eq!(found.problems.len(), again.problems.len(), "a check changes nothing");
        let mended = vault.check(&[], true, &Quiet).expect("a repair runs");
        let twice = vault.check(&[], true, &Quiet).expect("a repair runs");
        assert!(!twice.is_repaired(), "repaired twice: {:#?}", twice.problems);
        assert!(mended.problems.len() >= twice.problems.len());
        let root_is_readable = vault.open_dir(ROOT).is_ok();
        if root_is_readable {
            // What `check --repair` could not put away is nothing that the tree shows.
            let stays =
                twice.problems.iter().any(|p| [check::kind::FOREIGN, check::kind::RECORD].contains(&p.kind.as_str()));
            let gone = remove_all(&vault, ROOT);
            assert!(gone || stays, "something cannot be removed: {:#?}", twice.problems);
            put(&vault, ROOT, "new", b"the vault goes on");
        }
        vault.close().expect("closes");
    }
}

fn make() -> lamassu_vault::Result<MemoryBackend> {
    let memory = Arc::new(MemoryBackend::new());
    let backend: Arc<dyn Backend> = memory.clone();
    Vault::make_tree(&*backend, &vault_header(), &ring(SUITE))?;
    let vault = open(backend)?;
    let dir = vault.mkdir(ROOT, OsStr::new("dir"), 0o755, me())?.attr.ino;
    put(&vault, dir, "file", &[7; 10_000]);
    put(&vault, dir, &"l".repeat(250), b"long");
    put(&vault, ROOT, "top", b"on top");
    vault.symlink(dir, OsStr::new("link"), b"target", me())?;
    let top = vault.lookup(ROOT, OsStr::new("top"))?.attr.ino;
    vault.set_xattr(top, OsStr::new("user.note"), b"value", SetXattr::Any)?;
    vault.close()?;
    drop(vault);
    Ok(memory.snapshot())
}

fn open(backend: Arc<dyn Backend>) -> lamassu_vault::Result<Vault> {
    let options = Options {
        integrity: Integrity::Full,
        durability: Durability::Ordered,
        read_only: false,
        approved_only: false,
        threads: 1,
        device: None,
        anchor: None,
        freshness: Freshness::default(),
        events: Default::default(),
        upkeep: Default::default(),
        by_turns: false,
    };
    Vault::open(backend, &vault_header(), ring(SUITE), options)
}

fn vault_header() -> VaultHeader {
    let params = VaultParams {
        zone: ZoneId([1; 16]),
        suite: SUITE,
        geometry: Geometry::new(4096, 8).expect("a geometry"),
        names: NameMode::Encrypted,
        name_max: 255,
        convergent_small_files: true,
        domain: Domain::Zone,
        created: 0,
    };
    let keychain = SealedKeychain { nonce: [0; 24], sealed: Vec::new(), oblivious: false };
    let (slots, mac) = (Vec::new(), [0; 32]);
    VaultHeader::new(params, KeyArea { id: [1; 16], next_slot: 2, slots, keychain, history: None, admin: None, mac })
}

fn me() -> Owner {
    Owner { uid: 0, gid: 0, umask: 0 }
}

fn seal(ring: &KeyRing, kind: RecordKind, context: &[u8], content: &[u8]) -> Vec<u8> {
    ring.outer().seal_record_with(&[11; 24], kind, context, content)
}

fn record_text(bytes: &mut Bytes<'_>, mode: u8) -> Vec<u8> {
    match mode % 3 {
        0 => bytes.rest().to_vec(),
        1 => name::encode(bytes.rest()).into_bytes(),
        _ => {
            let kind = KINDS[usize::from(mode >> 2) % KINDS.len()];
            name::encode(&seal(&ring(SUITE), kind, &[], bytes.rest())).into_bytes()
        }
    }
}

/// Puts a text in place of an entry: as a link, or where no link can be or the fuzzer wants it, as a file.
fn replace_text(dir: &dyn BackendDir, name: &OsStr, text: &[u8], as_file: bool) {
    // There may be none.
    let _ = dir.unlink(name);
    if !as_file && dir.make_symlink(name, OsStr::from_bytes(text)).is_ok() {
        return;
    }
    let file = dir.create_file(name).expect("nothing is in the way");
    file.write_at(0, text).expect("writes");
}

fn rename(dir: &dyn BackendDir, from: &OsStr, to: &OsStr) {
    // Too long for a store: then there is nothing to attack.
    let _ = dir.rename(from, dir, to, lamassu_store::backend::RenameMode::Replace);
}

fn name_key(dir: &dyn BackendDir) -> NameKey {
    let text = dir.read_link(OsStr::new(DIR_RECORD)).expect("a record").into_vec();
    let sealed = name::decode(&text).expect("b64");
    let content = ring(SUITE).open_record(RecordKind::Directory, &[], &sealed).expect("a good seal");
    let record = DirRecord::parse(&content).expect("a good record");
    NameKey::new(&Secret::new(&mut record.secret.clone()), record.id)
}

/// The entry with a long name, and its companion.
fn stored_long(dir: &dyn BackendDir) -> (OsString, OsString) {
    let entries = dir.read_dir().expect("lists");
    let find = |prefix: &str| {
        let mut names = entries.iter().map(|e| e.name.clone());
        names.find(|n| n.as_bytes().starts_with(prefix.as_bytes())).expect("it is there")
    };
    (find(name::LONG_PREFIX), find(name::COMPANION_PREFIX))
}

fn list(vault: &Vault, dir: Ino) -> Result<Vec<OsString>, VaultError> {
    let handle = vault.open_dir(dir)?;
    let mut names = Vec::new();
    let done = vault.read_dir(handle, 0, &mut |e, _| {
        names.push(e.name.clone());
        true
    });
    vault.release_dir(handle)?;
    done?;
    names.retain(|n| n != "." && n != "..");
    let shown = |n: &OsString| {
        let b = n.as_bytes();
        !b.is_empty() && b.len() <= 255 && !b.contains(&b'/') && !b.contains(&0)
    };
    assert!(names.iter().all(shown), "names no file can have: {names:?}");
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count, "one name twice");
    Ok(names)
}

/// Looks at everything that the tree shows.
fn walk(vault: &Vault, dir: Ino, depth: u32) {
    let Ok(names) = list(vault, dir) else { return };
    for name in names {
        let Ok(entry) = vault.lookup(dir, &name) else { continue };
        let ino = entry.attr.ino;
        match entry.attr.kind {
            Kind::Dir if depth < 4 => walk(vault, ino, depth + 1),
            Kind::Symlink => {
                if let Ok(target) = vault.readlink(ino) {
                    assert!((1..4096).contains(&target.len()) && !target.contains(&0));
                }
            }
            Kind::File => {
                let handle = vault.open_file(ino, RW).expect("opens, however damaged");
                let _ = vault.read(handle, 0, &mut [0; 20_000]);
                vault.release(handle).expect("nothing was written");
            }
            _ => {}
        }
        for attr in vault.list_xattr(ino).unwrap_or_default() {
            assert!(!attr.is_empty() && !attr.contains(&0), "an attribute without a name");
            let _ = vault.get_xattr(ino, OsStr::from_bytes(&attr));
        }
    }
}

/// Removes what the tree shows. Whether all is gone then.
fn remove_all(vault: &Vault, dir: Ino) -> bool {
    let Ok(names) = list(vault, dir) else { return false };
    let mut gone = true;
    for name in names {
        let entry = vault.lookup(dir, &name).expect("it is listed");
        let done = match entry.attr.kind {
            Kind::Dir => {
                gone &= remove_all(vault, entry.attr.ino);
                vault.rmdir(dir, &name)
            }
            _ => vault.unlink(dir, &name),
        };
        gone &= done.is_ok();
    }
    gone
}

fn put(vault: &Vault, dir: Ino, name: &str, data: &[u8]) {
    let (_, handle) = vault.create(dir, OsStr::new(name), 0o644, RW, me()).expect("creates");
    assert_eq!(vault.write(handle, 0, data).expect("writes"), data.len());
    vault.release(handle).expect("closes");
}

struct Quiet;

impl check::Progress for Quiet {
    fn total(&self, _: u64, _: u64) {}
    fn advance(&self, _: u64, _: u64) {}
    fn problem(&self, p: &check::Problem) {
        assert!(!p.text.is_empty() && !p.stored.starts_with('/') && RESERVED_PREFIX.len() == 8);
    }
}
