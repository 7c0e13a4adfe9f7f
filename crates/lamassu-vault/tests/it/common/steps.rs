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
pub type Step = fn(&Vault);

fn long_a() -> String {
    "a".repeat(255)
}

fn long_b() -> String {
    "b".repeat(254)
}

fn rename(v: &Vault, from: &str, to: &str, mode: RenameMode) {
    v.rename(ROOT, n(from), ROOT, n(to), mode).unwrap();
}

fn symlink(v: &Vault, name: &str, target: &[u8]) {
    v.symlink(ROOT, n(name), target, me()).unwrap();
}

pub fn steps() -> Vec<(&'static str, Step)> {
    use RenameMode::{Exchange, NoReplace, Replace};
    let steps: [(&'static str, Step); 20] = [
        ("mkdir", |v| _ = v.dir("d")),
        ("mkdir below", |v| _ = v.dir("d/e")),
        ("mkdir long", |v| _ = v.dir(&long_a())),
        ("symlink", |v| symlink(v, "l", b"target")),
        ("long symlink", |v| symlink(v, &long_b(), "t".repeat(4000).as_bytes())),
        ("move long symlink", |v| v.rename(ROOT, n(&long_b()), v.ino("d"), n("ll"), Replace).unwrap()),
        ("link", |v| _ = v.link(v.ino("d/ll"), v.ino("d/e"), n("hard")).unwrap()),
        ("unlink", |v| v.unlink(v.ino("d"), n("ll")).unwrap()),
        ("rename over", |v| v.rename(ROOT, n("l"), v.ino("d/e"), n("hard"), Replace).unwrap()),
        ("mkdir other", |v| _ = v.dir("other")),
        ("rename file", |v| v.rename(ROOT, n("file"), v.ino("d"), n("f"), NoReplace).unwrap()),
        ("exchange", |v| rename(v, "d", &long_a(), Exchange)),
        ("rmdir", |v| v.rmdir(ROOT, n("other")).unwrap()),
        ("rename long directory", |v| rename(v, &long_a(), "x", Replace)),
        ("rmdir last", |v| v.rmdir(ROOT, n("d")).unwrap()),
        ("symlink long name", |v| symlink(v, &long_b(), b"t")),
        ("rename long to long", |v| rename(v, &long_b(), &long_a(), Replace)),
        ("unlink long name", |v| v.unlink(ROOT, n(&long_a())).unwrap()),
        ("mkdir long name", |v| _ = v.dir(&long_b())),
        ("rmdir long name", |v| v.rmdir(ROOT, n(&long_b())).unwrap()),
    ];
    steps.into()
}
