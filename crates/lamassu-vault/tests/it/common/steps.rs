//! Operations on names for crash and fault tests, and the tree they leave.

use super::*;
use lamassu_store::StoreError;
use lamassu_store::file::DamageKind;
use lamassu_vault::{ROOT, RenameMode, VaultError};
use std::collections::BTreeMap;

/// The tree as paths and contents; directories end in a slash, links hold their targets.
pub fn tree(v: &Vault) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut todo = vec![String::new()];
    while let Some(dir) = todo.pop() {
        for name in v.list(&dir) {
            let path = if dir.is_empty() { name } else { format!("{dir}/{name}") };
            let e = v.find(&path).unwrap();
            match e.attr.kind {
                Kind::Dir => {
                    todo.push(path.clone());
                    found.insert(path + "/", Vec::new());
                }
                Kind::Symlink => drop(found.insert(path, v.readlink(e.attr.ino).unwrap())),
                Kind::File => drop(found.insert(path.clone(), content(v, &path))),
                other => panic!("{path}: {other:?}"),
            }
        }
    }
    found
}

/// A file that was created or emptied and never synced since may have lost its first page, and says nothing then:
/// docs/format.md §9.
pub const VOID: &[u8] = b"(void)";

fn content(v: &Vault, path: &str) -> Vec<u8> {
    let e = v.find(path).unwrap();
    let h = v.open_file(e.attr.ino, RO).unwrap();
    let mut data = vec![0; e.attr.size as usize + 1];
    let read = v.read(h, 0, &mut data);
    v.release(h).unwrap();
    match read {
        Ok(n) => data[..n].to_vec(),
        Err(VaultError::Store(StoreError::Damaged(d))) if d.kind == DamageKind::PageMissing && d.page.0 == 0 => {
            VOID.to_vec()
        }
        Err(e) => panic!("{path}: {e}"),
    }
}

/// Steps on names, each of which must be whole after a crash. Content is written and synced before.
pub type Step = Box<dyn Fn(&Vault)>;

pub fn steps() -> Vec<(&'static str, Step)> {
    let long_a = "a".repeat(255);
    let long_b = "b".repeat(254);
    let target = "t".repeat(4000);
    let (la, lb) = (long_a.clone(), long_b.clone());
    let mut steps: Vec<(&'static str, Step)> = Vec::new();
    let mut step = |name, f: Step| steps.push((name, f));
    step(
        "mkdir",
        Box::new(|v| {
            v.dir("d");
        }),
    );
    step(
        "mkdir below",
        Box::new(|v| {
            v.dir("d/e");
        }),
    );
    let name = la.clone();
    step(
        "mkdir long",
        Box::new(move |v| {
            v.dir(&name);
        }),
    );
    step(
        "symlink",
        Box::new(|v| {
            v.symlink(ROOT, n("l"), b"target", me()).unwrap();
        }),
    );
    let (t, name) = (target.clone(), lb.clone());
    step(
        "long symlink",
        Box::new(move |v| {
            v.symlink(ROOT, n(&name), t.as_bytes(), me()).unwrap();
        }),
    );
    let name = lb.clone();
    step(
        "move long symlink",
        Box::new(move |v| v.rename(ROOT, n(&name), v.ino("d"), n("ll"), RenameMode::Replace).unwrap()),
    );
    step(
        "link",
        Box::new(|v| {
            v.link(v.ino("d/ll"), v.ino("d/e"), n("hard")).unwrap();
        }),
    );
    step("unlink", Box::new(|v| v.unlink(v.ino("d"), n("ll")).unwrap()));
    step("rename over", Box::new(|v| v.rename(ROOT, n("l"), v.ino("d/e"), n("hard"), RenameMode::Replace).unwrap()));
    step(
        "mkdir other",
        Box::new(|v| {
            v.dir("other");
        }),
    );
    step("rename file", Box::new(|v| v.rename(ROOT, n("file"), v.ino("d"), n("f"), RenameMode::NoReplace).unwrap()));
    let name = la.clone();
    step("exchange", Box::new(move |v| v.rename(ROOT, n("d"), ROOT, n(&name), RenameMode::Exchange).unwrap()));
    step("rmdir", Box::new(|v| v.rmdir(ROOT, n("other")).unwrap()));
    let name = la.clone();
    step(
        "rename long directory",
        Box::new(move |v| v.rename(ROOT, n(&name), ROOT, n("x"), RenameMode::Replace).unwrap()),
    );
    step("rmdir last", Box::new(|v| v.rmdir(ROOT, n("d")).unwrap()));
    let name = lb.clone();
    step(
        "symlink long name",
        Box::new(move |v| {
            v.symlink(ROOT, n(&name), b"t", me()).unwrap();
        }),
    );
    let (name, other) = (lb.clone(), la.clone());
    step(
        "rename long to long",
        Box::new(move |v| v.rename(ROOT, n(&name), ROOT, n(&other), RenameMode::Replace).unwrap()),
    );
    let name = la.clone();
    step("unlink long name", Box::new(move |v| v.unlink(ROOT, n(&name)).unwrap()));
    let name = lb.clone();
    step(
        "mkdir long name",
        Box::new(move |v| {
            v.dir(&name);
        }),
    );
    let name = lb.clone();
    step("rmdir long name", Box::new(move |v| v.rmdir(ROOT, n(&name)).unwrap()));
    steps
}
