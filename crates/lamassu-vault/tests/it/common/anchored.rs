//! Anchored vaults for tests.

use super::*;
use lamassu_anchor::row::{Content, Sealed};
use lamassu_anchor::table::{Change, MemoryTable, Space, Table, Visit};
use lamassu_anchor::{Anchor, AnchorError, Digest, ObjectId, Row, Token, TokenKey, VaultRow};
use lamassu_format::header::VaultId;
use lamassu_store::BackendDir;
use lamassu_store::backend::CrashBackend;
use lamassu_vault::anchor::RebuildProgress;
use lamassu_vault::event::Events;
use lamassu_vault::{RenameMode, VaultError, check, scrub};
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::Path;

/// The anchor of a vault.
pub fn anchor(recipe: &Recipe, table: &Arc<dyn Table>) -> Arc<Anchor> {
    Arc::new(Anchor::open(table.clone(), &recipe.header().id()).unwrap())
}

/// Makes the anchor of a vault that is empty.
pub fn new_anchor(header: &VaultHeader, backend: &dyn Backend, table: &Arc<dyn Table>) -> Anchor {
    let record = match header.names() {
        NameMode::Encrypted => {
            let text = backend.root().read_link(n("lamassu.dir")).unwrap();
            Sealed::Is(Digest(lamassu_crypto::wrap::sha256(&[b"\x02", text.as_encoded_bytes()].concat())))
        }
        NameMode::Plain => Sealed::Nothing,
    };
    let VaultParams { suite, domain, .. } = *header.params();
    let row = VaultRow { suite, domain, ..VaultRow::new(header.id(), TokenKey::new([2; 32])) };
    let content = Content::Dir { record, parent: ObjectId::ROOT, name: Token([0; 16]) };
    let root = Row { mode: 0o700, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing };
    Anchor::create(table.clone(), row, root).unwrap()
}

/// Opens an anchored vault, and makes the anchor of one that is empty.
pub fn open_anchored(
    recipe: &Recipe,
    backend: &Arc<dyn Backend>,
    table: &Arc<dyn Table>,
    read_only: bool,
) -> Result<Vault> {
    if table.get(Space::Vault, b"vault").unwrap().is_none() {
        drop(new_anchor(&recipe.header(), &**backend, table));
    }
    let options = Options { anchor: Some(anchor(recipe, table)), ..options(read_only) };
    Vault::open(backend.clone(), &recipe.header(), recipe.ring(), options)
}

/// An anchored vault, its store and its anchor.
pub struct Lab {
    pub recipe: Recipe,
    pub backend: Arc<dyn Backend>,
    pub table: Arc<dyn Table>,
}

impl Lab {
    pub fn over(recipe: Recipe, backend: Arc<dyn Backend>, table: Arc<dyn Table>) -> (Lab, Vault) {
        Vault::make_tree(&*backend, &recipe.header(), &recipe.ring()).unwrap();
        let lab = Lab { recipe, backend, table };
        let vault = lab.open();
        (lab, vault)
    }

    pub fn new(recipe: Recipe) -> (Lab, Vault) {
        Lab::over(recipe, memory(), Arc::new(MemoryTable::default()))
    }

    /// With a second tree of each file, over its blocks.
    pub fn new_with_blocks() -> (Lab, Vault) {
        let (lab, vault) = Lab::new(Recipe::default());
        vault.close().unwrap();
        let mut row = VaultRow::decode(&lab.table.get(Space::Vault, b"vault").unwrap().unwrap()).unwrap();
        row.blocks = true;
        let change = Change { space: Space::Vault, key: b"vault".to_vec(), value: Some(row.encode()) };
        lab.table.commit(&[change]).unwrap();
        let vault = lab.open();
        (lab, vault)
    }

    pub fn open(&self) -> Vault {
        open_anchored(&self.recipe, &self.backend, &self.table, false).unwrap()
    }

    pub fn read_only(&self) -> Vault {
        open_anchored(&self.recipe, &self.backend, &self.table, true).unwrap()
    }

    /// The store's directory and the stored name of a path.
    pub fn stored(&self, vault: &Vault, path: &str) -> (Arc<dyn BackendDir>, OsString) {
        let stored = vault.stored_path(n(path)).unwrap();
        let mut dir = self.backend.root();
        for part in stored.parent().unwrap() {
            dir = dir.open_dir(part).unwrap();
        }
        (dir, stored.file_name().unwrap().to_owned())
    }

    /// What a scrub of the store says: findings, and how much is unfinished.
    pub fn scrubbed(&self) -> (Vec<String>, u64) {
        let mut found = Findings::default();
        let anchor = anchor(&self.recipe, &self.table);
        let done =
            scrub::scrub(self.backend.root(), &self.recipe.header(), &anchor, &Events::default(), &mut found).unwrap();
        (found.0.into_iter().map(|finding| finding.what).collect(), done.unfinished)
    }

    /// What a scrub finds, and how often it fails, where something is done after so many directories and files. `None`:
    /// it had ended before.
    pub fn scrubbed_while(&self, at: usize, meanwhile: impl FnMut()) -> Option<(Vec<String>, u64)> {
        let anchor = anchor(&self.recipe, &self.table);
        let mut watch = Meanwhile { found: Vec::new(), left: Cell::new(at), meanwhile: RefCell::new(meanwhile) };
        let done =
            scrub::scrub(self.backend.root(), &self.recipe.header(), &anchor, &Events::default(), &mut watch).unwrap();
        (watch.left.get() == 0).then_some((watch.found, done.failures))
    }

    /// The kinds of what a check finds, of what is harmless in brackets.
    pub fn checked(&self) -> Vec<String> {
        let problems = self.read_only().check(&[], false, &Quiet).unwrap().problems.into_iter();
        let shown = |problem: check::Problem| match problem.harmless {
            true => format!("({})", problem.kind),
            false => problem.kind,
        };
        problems.map(shown).collect()
    }

    pub fn intents(&self) -> usize {
        let mut count = 0;
        self.table
            .scan(Space::Intents, &[], &mut |_, _| {
                count += 1;
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
        count
    }
}

/// A table that remembers what it was at each position of the store.
pub struct Watched {
    pub table: MemoryTable,
    pub store: Arc<CrashBackend>,
    pub states: Mutex<Vec<(usize, MemoryTable)>>,
    /// As if from a server: another host may have written.
    is_served: bool,
}

impl Watched {
    pub fn over(store: &Arc<CrashBackend>) -> Arc<Watched> {
        Watched::of(MemoryTable::default(), store)
    }

    pub fn of(table: MemoryTable, store: &Arc<CrashBackend>) -> Arc<Watched> {
        Arc::new(Watched { table, store: store.clone(), states: Mutex::default(), is_served: false })
    }

    pub fn served(table: MemoryTable, store: &Arc<CrashBackend>) -> Arc<Watched> {
        Arc::new(Watched { table, store: store.clone(), states: Mutex::default(), is_served: true })
    }
}

impl Table for Watched {
    fn get(&self, space: Space, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, AnchorError> {
        self.table.get(space, key)
    }
    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> std::result::Result<(), AnchorError> {
        self.table.scan(space, prefix, visit)
    }
    fn commit(&self, changes: &[Change]) -> std::result::Result<(), AnchorError> {
        self.table.commit(changes)?;
        self.states.lock().push((self.store.position(), self.table.clone()));
        Ok(())
    }
    fn may_end(&self) -> bool {
        self.is_served
    }
}

/// A table at a server. The answer to a commit is lost, which was made; reads do not show that before it was repeated.
#[derive(Default)]
pub struct Doubtful {
    pub durable: MemoryTable,
    read: MemoryTable,
    state: Mutex<Doubt>,
}

#[derive(Default)]
struct Doubt {
    /// The first commit with such a change.
    of: Option<fn(&Change) -> bool>,
    is_pending: bool,
}

impl Doubtful {
    pub fn doubt(&self, of: fn(&Change) -> bool) {
        self.state.lock().of = Some(of);
    }
}

impl Table for Doubtful {
    fn get(&self, space: Space, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, AnchorError> {
        self.read.get(space, key)
    }
    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> std::result::Result<(), AnchorError> {
        self.read.scan(space, prefix, visit)
    }
    fn commit(&self, changes: &[Change]) -> std::result::Result<(), AnchorError> {
        let state = &mut *self.state.lock();
        self.durable.commit(changes)?;
        state.is_pending = state.of.is_some_and(|of| changes.iter().any(of));
        if state.is_pending {
            state.of = None;
            return Err(AnchorError::Broken);
        }
        self.read.commit(changes)
    }
    fn may_be_in_doubt(&self) -> bool {
        self.state.lock().is_pending
    }
}

/// A scrub beside which something happens.
struct Meanwhile<F> {
    found: Vec<String>,
    /// Directories and files until then.
    left: Cell<usize>,
    meanwhile: RefCell<F>,
}

impl<F: FnMut()> Meanwhile<F> {
    fn step(&self) {
        if let Some(left) = self.left.get().checked_sub(1) {
            self.left.set(left);
            if left == 0 {
                (self.meanwhile.borrow_mut())();
            }
        }
    }
}

impl<F: FnMut()> scrub::ScrubWatch for Meanwhile<F> {
    fn read(&mut self, _: u64) {}
    fn found(&mut self, finding: &scrub::ScrubFinding) {
        self.found.push(format!("{}: {}", finding.path.display(), finding.what));
    }
    fn dataset(&mut self, _: &std::path::Path, _: VaultId) {}
    fn verified(&mut self, _: ObjectId, _: scrub::RowDigest) {
        self.step();
    }
    fn is_verified(&self, _: ObjectId, _: scrub::RowDigest) -> bool {
        false
    }
    fn is_stopped(&self) -> bool {
        self.step();
        false
    }
}

/// Keeps what a scrub finds.
#[derive(Default)]
pub struct Findings(pub Vec<scrub::ScrubFinding>);

impl Findings {
    /// As kinds: the words of a check.
    pub fn kinds(&self) -> BTreeSet<String> {
        self.0.iter().map(|finding| finding.kind.map_or("io", |kind| kind.word()).to_owned()).collect()
    }
}

impl scrub::ScrubWatch for Findings {
    fn read(&mut self, _: u64) {}
    fn found(&mut self, finding: &scrub::ScrubFinding) {
        self.0.push(finding.clone());
    }
    fn dataset(&mut self, _: &std::path::Path, _: VaultId) {}
    fn verified(&mut self, _: ObjectId, _: scrub::RowDigest) {}
    fn is_verified(&self, _: ObjectId, _: scrub::RowDigest) -> bool {
        false
    }
    fn is_stopped(&self) -> bool {
        false
    }
}

/// Watches an anchor being made, and is told of nothing that is left out.
pub struct Nobody;

impl RebuildProgress for Nobody {
    fn advance(&self, _: u64, _: u64) {}
    fn damaged(&self, stored: &Path, error: &VaultError) {
        panic!("{}: {error}", stored.display());
    }
}

pub fn assert_outdated<T: std::fmt::Debug>(seen: Result<T>) {
    assert!(matches!(seen, Err(VaultError::Outdated { .. })), "{seen:?}");
}

pub fn link_to(vault: &Vault, path: &str, target: &str) {
    let (parent, name) = split(path);
    vault.symlink(vault.ino(parent), n(name), target.as_bytes(), me()).unwrap();
}

pub fn mv(vault: &Vault, from: &str, to: &str, mode: RenameMode) -> Result<()> {
    let ((a, b), (c, d)) = (split(from), split(to));
    vault.rename(vault.ino(a), n(b), vault.ino(c), n(d), mode)
}

pub fn rm(vault: &Vault, path: &str) -> Result<()> {
    let (parent, name) = split(path);
    vault.unlink(vault.ino(parent), n(name))
}

pub fn rmdir(vault: &Vault, path: &str) -> Result<()> {
    let (parent, name) = split(path);
    vault.rmdir(vault.ino(parent), n(name))
}

pub fn fsync(v: &Vault, path: &str) {
    let handle = v.open_file(v.ino(path), RW).unwrap();
    v.fsync(handle, false).unwrap();
    v.release(handle).unwrap();
}

pub fn fsync_dir(v: &Vault, path: &str) {
    let handle = v.open_dir(v.ino(path)).unwrap();
    v.fsync_dir(handle).unwrap();
    v.release_dir(handle).unwrap();
}

/// What cannot be done is not; but nothing is ever stale.
pub fn tried(done: Result<()>) {
    if let Err(e @ (VaultError::Outdated { .. } | VaultError::Anchor(_) | VaultError::Io { .. } | VaultError::Stale)) =
        done
        && !matches!(&e, VaultError::Io { source, .. } if source.raw_os_error() == Some(libc::EPERM))
    {
        panic!("{e:?}");
    }
}

/// A directory and a name in it, if the directory is there.
pub fn in_dir<'a>(v: &Vault, path: &'a str) -> Option<(Ino, &'a str)> {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    let parent = v.find(parent).ok().filter(|entry| entry.attr.kind == Kind::Dir)?;
    Some((parent.attr.ino, name))
}

/// The names in a directory, and whether the store lacks some.
pub fn listed(vault: &Vault, path: &str) -> (Vec<String>, bool) {
    let handle = vault.open_dir(vault.ino(path)).unwrap();
    let mut names = Vec::new();
    let done = vault.read_dir(handle, 0, &mut |e, _| {
        names.push(e.name.to_str().unwrap().to_owned());
        true
    });
    vault.release_dir(handle).unwrap();
    names.retain(|name| name != "." && name != "..");
    names.sort();
    assert!(matches!(done, Ok(()) | Err(VaultError::Outdated { .. })), "{done:?}");
    (names, done.is_err())
}

/// What is seen below a directory: every path with what it is.
pub fn seen(vault: &Vault) -> BTreeMap<String, String> {
    try_seen(vault).unwrap_or_else(|error| panic!("{error}"))
}

/// The same where something may be an error, or be missing.
pub fn try_seen(vault: &Vault) -> std::result::Result<BTreeMap<String, String>, String> {
    let mut all = BTreeMap::new();
    let mut left = vec![String::new()];
    while let Some(dir) = left.pop() {
        let ino = vault.find(&dir).map_err(|e| format!("{dir}: {e}"))?.attr.ino;
        let mut names = Vec::new();
        let handle = vault.open_dir(ino).map_err(|e| format!("{dir}: {e}"))?;
        let done = vault.read_dir(handle, 0, &mut |e, _| {
            names.push(e.name.to_str().unwrap().to_owned());
            true
        });
        vault.release_dir(handle).unwrap();
        done.map_err(|e| format!("{dir}: {e}"))?;
        names.retain(|name| name != "." && name != "..");
        names.sort();
        for name in names {
            let path = if dir.is_empty() { name } else { format!("{dir}/{name}") };
            let attr = vault.find(&path).map_err(|e| format!("{path}: {e}"))?.attr;
            let what = match attr.kind {
                Kind::Symlink => vault.readlink(attr.ino).map_err(|e| format!("{path}: {e}"))?,
                kind => format!("{kind:?} {:o}", attr.mode).into_bytes(),
            };
            if attr.kind == Kind::Dir {
                left.push(path.clone());
            }
            vault.forget(attr.ino, 1);
            all.insert(path, String::from_utf8(what).unwrap());
        }
    }
    Ok(all)
}

/// A name with a companion.
pub const LONG: &str = "a name that is so long that its sealed form is longer than what a store takes, and so has a companion beside \
                    it, which has to be where the entry is, whatever becomes of the entry: 0123456789012345678901234567890123";
