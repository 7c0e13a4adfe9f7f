//! Anchored vaults whose outer key changes, made by rebuilding their anchor; their attributes, records and link targets
//! as they lie in the store.

use super::anchored::anchor;
use super::*;
use lamassu_anchor::table::{MemoryTable, Table};
use lamassu_format::root::RootRecord;
use lamassu_store::{Backend, BackendDir};
use lamassu_vault::anchor::{Accepted, NewTrees, RebuildProgress, Rebuilt, rebuild};
use lamassu_vault::*;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;

pub const ACCESS: &str = "system.posix_acl_access";
pub const DEFAULT: &str = "system.posix_acl_default";

/// What is left out of an anchor that is made.
#[derive(Default)]
pub struct LeftOut(pub Mutex<Vec<String>>);

impl RebuildProgress for LeftOut {
    fn advance(&self, _: u64, _: u64) {}
    fn damaged(&self, stored: &Path, error: &VaultError) {
        self.0.lock().push(format!("{}: {error}", stored.display()));
    }
}

/// An anchored vault, its store, its anchor, and the epochs of its outer key, newest first.
pub struct Lab {
    pub recipe: Recipe,
    pub backend: Arc<dyn Backend>,
    pub table: Arc<dyn Table>,
    pub outer: Vec<u8>,
}

pub fn rebuilt(recipe: &Recipe, backend: &Arc<dyn Backend>, table: &Arc<dyn Table>) -> (Rebuilt, Vec<String>) {
    let v = recipe.open_with(backend, &[1], &[1]);
    let left_out = LeftOut::default();
    let (_, done) = rebuild(&v, &recipe.header(), table.clone(), NewTrees::default(), &left_out).unwrap();
    v.close().unwrap();
    (done, left_out.0.into_inner())
}

impl Lab {
    pub fn over(recipe: Recipe, backend: Arc<dyn Backend>, table: Arc<dyn Table>) -> Lab {
        let ring = recipe.ring_of_epochs(&[1], &[1]);
        Vault::make_tree(&*backend, &recipe.header(), &ring).unwrap();
        let me = me();
        create_root_record(&*backend.root(), &ring, RootRecord { mode: 0o755, uid: me.uid, gid: me.gid }).unwrap();
        let (done, left_out) = rebuilt(&recipe, &backend, &table);
        assert_eq!((done.objects, done.damaged, left_out.len()), (1, 0, 0));
        Lab { recipe, backend, table, outer: vec![1] }
    }

    pub fn new(recipe: Recipe) -> Lab {
        Lab::over(recipe, memory(), Arc::new(MemoryTable::default()))
    }

    pub fn try_open(&self, read_only: bool) -> Result<Vault> {
        let options = Options { anchor: Some(anchor(&self.recipe, &self.table)), ..options(read_only) };
        let ring = self.recipe.ring_of_epochs(&[1], &self.outer);
        Vault::open(self.backend.clone(), &self.recipe.header(), ring, options)
    }

    pub fn open(&self) -> Vault {
        self.try_open(false).unwrap()
    }

    /// The store's directory and the stored name of a path.
    pub fn stored(&self, path: &str) -> (Arc<dyn BackendDir>, OsString) {
        let v = self.open();
        let stored = v.stored_path(n(path)).unwrap();
        v.close().unwrap();
        let mut dir = self.backend.root();
        for part in stored.parent().unwrap() {
            dir = dir.open_dir(part).unwrap();
        }
        (dir, stored.file_name().unwrap().to_owned())
    }

    pub fn stored_dir(&self, path: &str) -> Arc<dyn BackendDir> {
        let (dir, name) = self.stored(path);
        dir.open_dir(&name).unwrap()
    }

    /// Everything under the newest of another key.
    pub fn rekey(&mut self) {
        self.outer.insert(0, self.outer[0] + 1);
        let v = self.open();
        let done = v.rekey(Rekey::Outer, None, &Quiet).unwrap();
        assert!(done.complete && done.failed == 0, "{done:?}");
        v.close().unwrap();
    }

    /// What a check finds, as kinds.
    pub fn kinds(&self) -> BTreeSet<String> {
        let v = self.open();
        let report = v.check(&[], false, &Quiet).unwrap();
        // A repair accepts nothing.
        v.check(&[], true, &Quiet).unwrap();
        let again = v.check(&[], false, &Quiet).unwrap();
        v.close().unwrap();
        let of = |report: &check::Report| report.problems.iter().map(|p| p.kind.clone()).collect::<BTreeSet<_>>();
        assert_eq!(of(&again), of(&report), "after a repair");
        of(&report)
    }

    pub fn accept(&self, path: &str, recursive: bool) -> Accepted {
        let v = self.open();
        let done = v.accept(n(path), recursive).unwrap();
        v.close().unwrap();
        done
    }
}

impl RekeyProgress for Quiet {
    fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {}
    fn failed(&self, _: &str, _: &VaultError) {}
    fn dataset(&self, _: &Path) -> Result<()> {
        Ok(())
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}

pub fn kinds(all: &[&str]) -> BTreeSet<String> {
    all.iter().map(|kind| (*kind).to_owned()).collect()
}

pub fn set(v: &Vault, path: &str, name: &str, value: &[u8]) {
    v.set_xattr(v.ino(path), n(name), value, SetXattr::Any).unwrap();
}

pub fn get(v: &Vault, path: &str, name: &str) -> Result<Vec<u8>> {
    v.get_xattr(v.find(path)?.attr.ino, n(name))
}

pub fn link_to(v: &Vault, path: &str, target: &[u8]) {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    v.symlink(v.ino(parent), n(name), target, me()).unwrap();
}

/// An access list: for a user, besides what a mode says.
pub fn acl(user: u32, perm: u16) -> Vec<u8> {
    let entries = [(1, 7, u32::MAX), (2, perm, user), (4, 5, u32::MAX), (0x10, 7, u32::MAX), (0x20, 5, u32::MAX)];
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        bytes.extend(u16::to_le_bytes(tag));
        bytes.extend(u16::to_le_bytes(perm));
        bytes.extend(u32::to_le_bytes(id));
    }
    bytes
}

pub type Attrs = BTreeMap<OsString, Vec<u8>>;

pub fn attrs_of(dir: &Arc<dyn BackendDir>, name: &OsStr) -> Attrs {
    let held = dir.hold(name).unwrap();
    held.list_xattr().unwrap().into_iter().map(|attr| (attr.clone(), held.get_xattr(&attr).unwrap())).collect()
}

pub fn put_attrs(dir: &Arc<dyn BackendDir>, name: &OsStr, attrs: &Attrs) {
    let held = dir.hold(name).unwrap();
    held.list_xattr().unwrap().iter().for_each(|attr| held.remove_xattr(attr).unwrap());
    attrs.iter().for_each(|(attr, value)| held.set_xattr(attr, value, 0).unwrap());
}

pub fn text_of(dir: &Arc<dyn BackendDir>, name: &OsStr) -> OsString {
    dir.read_link(name).unwrap()
}

pub fn put_text(dir: &Arc<dyn BackendDir>, name: &OsStr, text: &OsStr) {
    dir.unlink(name).unwrap();
    dir.make_symlink(name, text).unwrap();
}
