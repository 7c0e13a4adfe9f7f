//! What a store can do to entries: to what a name leads to, link targets, attributes, types, modes and owners, of a
//! vault without an anchor and of one with. A table of `docs/damage.md`; it must equal what is found here.
//! `LAMASSU_WRITE_DOCS=1 cargo test -p lamassu-vault --test it entries` writes it (as root: devices and owners are
//! changed, too).
//!
//! In every case: no panic; nothing shows that was not written somewhere in the vault, unless the table says what;
//! nothing else changes; `check` finds what a read finds. With an anchor everything shows as before, or is an error.

use crate::common;

use common::wood::{Wood, wood_with};
use common::{Quiet, me, n, words};
use lamassu_format::header::NameMode;
use lamassu_vault::forest::ROOT_MEMBER;
use lamassu_vault::forest::member_of;
use lamassu_vault::{FileSystem, Forest, Ino, Kind, ROOT, SetXattr, VaultError};
use rustix::fs::{CWD, RenameFlags, XattrFlags, getxattr, renameat_with, setxattr};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};

const LISTS: [&str; 2] = ["system.posix_acl_access", "system.posix_acl_default"];
const ATTRIBUTES: [&str; 4] = ["user.note", "security.capability", LISTS[0], LISTS[1]];
const LONG: usize = 3000;

/// Of one path: its kind, mode, owner, target, attributes, what a directory lists, a file's content. `None`: it is
/// there and does not open.
type Facts = BTreeMap<&'static str, Option<String>>;
/// In place of all facts: the path itself is an error.
const ALL: &str = "all";
/// By path.
type Seen = BTreeMap<&'static str, Facts>;

/// `here` in the row is what the table tells of; `there` is what it is exchanged with, if anything.
struct Row {
    title: &'static str,
    act: fn(&Lab),
    here: &'static str,
    there: &'static str,
    root: bool,
}

const fn row(title: &'static str, here: &'static str, there: &'static str, act: fn(&Lab)) -> Row {
    Row { title, act, here, there, root: false }
}

const fn of_root(title: &'static str, here: &'static str, act: fn(&Lab)) -> Row {
    Row { title, act, here, there: "", root: true }
}

const ROWS: &[Row] = &[
    row("two files exchanged", "a", "b", |lab| lab.swap("a", "b")),
    row("two directories exchanged, with all in them", "one", "two", |lab| lab.swap("one", "two")),
    row("two directories of different directories exchanged", "one/deep", "two/deep", |lab| {
        lab.swap("one/deep", "two/deep")
    }),
    row("a dataset that inherits, put over a directory", "one", "set", |lab| {
        lab.remove("one");
        lab.rename("set", "one");
    }),
    row("two datasets exchanged that inherit from one parent", "set", "set2", |lab| lab.swap("set", "set2")),
    row("a file moved to another directory under its stored name", "one/in", "two", |lab| {
        std::fs::rename(lab.at("one/in"), lab.at("two").join(lab.at("one/in").file_name().unwrap())).unwrap();
    }),
    row("the target of a short link: a bit flipped", "short", "", |lab| {
        lab.put_link("short", &flipped(lab.link("short")))
    }),
    row("the targets of two short links exchanged", "short", "short2", |lab| lab.swap("short", "short2")),
    row("the head of a long link: a bit flipped", "long", "", |lab| lab.put_link("long", &flipped(lab.link("long")))),
    row("an older target of a link put back", "short", "", |lab| lab.put_link("short", &lab.older_link)),
    row("the targets of two long links of one directory exchanged", "long", "long2", |lab| lab.swap("long", "long2")),
    row("the targets of long links of different directories exchanged", "long", "one/long", |lab| {
        lab.swap("long", "one/long")
    }),
    row("an attribute of a file: a bit of its value flipped", "a", "", |lab| lab.change("a", "user.note", flipped)),
    row("…, its name changed", "a", "", |lab| lab.rename_attribute("a", "user.note")),
    row("…, removed", "a", "", |lab| lab.drop_attribute("a", "user.note")),
    row("…, an older value put back", "a", "", |lab| lab.set("a", "user.note", &lab.older_note)),
    row("…, exchanged with another of the same file", "a", "", |lab| {
        lab.set("a", "user.note", &lab.get("a", "security.capability"));
    }),
    row("…, exchanged with the same one of another file", "a", "b", |lab| lab.swap_attribute("a", "b", "user.note")),
    row("`security.capability` of two files exchanged", "a", "b", |lab| {
        lab.swap_attribute("a", "b", "security.capability")
    }),
    row("access lists of two files exchanged", "a", "b", |lab| lab.swap_attribute("a", "b", LISTS[0])),
    row("an attribute of a directory: a bit of its value flipped", "one", "", |lab| {
        lab.change("one", "user.note", flipped)
    }),
    row("…, its name changed", "one", "", |lab| lab.rename_attribute("one", "user.note")),
    row("…, removed", "one", "", |lab| lab.drop_attribute("one", "user.note")),
    row("…, an older value put back", "one", "", |lab| lab.set("one", "user.note", &lab.older_note_of_dir)),
    row("…, exchanged with the same one of another directory", "one", "two", |lab| {
        lab.swap_attribute("one", "two", "user.note")
    }),
    row("default lists of two directories exchanged", "one", "two", |lab| lab.swap_attribute("one", "two", LISTS[1])),
    row("an attribute of a file put on a directory", "one", "", |lab| {
        lab.set("one", "user.note", &lab.get("a", "user.note"))
    }),
    row("an attribute of a directory put on a file", "a", "", |lab| {
        lab.set("a", "user.note", &lab.get("one", "user.note"))
    }),
    row("an access list removed", "a", "", |lab| lab.drop_attribute("a", LISTS[0])),
    row("the set-uid bit set", "a", "", |lab| lab.mode("a", 0o4670)),
    row("other permissions", "a", "", |lab| lab.mode("a", 0o646)),
    of_root("another owner", "a", |lab| chown(lab.at("a"), Some(1234), Some(4321)).unwrap()),
    row("a file turned into a fifo", "a", "", |lab| lab.node("a", libc::S_IFIFO | 0o644)),
    of_root("a file turned into a device", "a", |lab| lab.node("a", libc::S_IFBLK | 0o666)),
    row("a file turned into a link, with the target of another", "a", "short", |lab| {
        let target = lab.link("short");
        lab.remove("a");
        symlink(std::ffi::OsStr::from_bytes(&target), lab.at("a")).unwrap();
        let _ = lchown(lab.at("a"), None, None);
    }),
    row("a file turned into another name of another", "a", "b", |lab| {
        lab.remove("a");
        std::fs::hard_link(lab.at("b"), lab.at("a")).unwrap();
    }),
    row("a link turned into a file, by another's content", "short", "b", |lab| {
        lab.remove("short");
        std::fs::copy(lab.at("b"), lab.at("short")).unwrap();
    }),
    row("a directory turned into a link", "one", "short", |lab| {
        let target = lab.link("short");
        lab.remove("one");
        symlink(std::ffi::OsStr::from_bytes(&target), lab.at("one")).unwrap();
    }),
    row("an entry deleted", "a", "", |lab| lab.remove("a")),
];

fn flipped(mut bytes: Vec<u8>) -> Vec<u8> {
    let half = bytes.len() / 2;
    bytes[half] ^= 1;
    bytes
}

/// A vault, what lies where, and some of what lay there before.
struct Lab {
    wood: Wood,
    stored: BTreeMap<&'static str, PathBuf>,
    attributes: BTreeMap<&'static str, String>,
    older_link: Vec<u8>,
    older_note: Vec<u8>,
    older_note_of_dir: Vec<u8>,
}

const PATHS: [&str; 15] = [
    "a", "b", "one", "two", "one/in", "two/in", "one/deep", "two/deep", "one/long", "short", "short2", "long", "long2",
    "set", "set2",
];

/// A list by which the owning group may do `group`.
fn list(group: u8) -> Vec<u8> {
    let entry = |tag: u8, perm: u8| [tag, 0, perm, 0, 255, 255, 255, 255];
    let named = [2, 0, group, 0, 57, 48, 0, 0];
    [&[2, 0, 0, 0][..], &entry(1, 6), &named, &entry(4, 4), &entry(16, 7), &entry(32, 0)].concat()
}

impl Lab {
    fn new(names: NameMode, is_anchored: bool) -> Lab {
        let wood = wood_with(names, is_anchored);
        let forest = wood.forest.clone();
        for dir in ["one", "two", "one/deep", "two/deep"] {
            let (parent, name) = dir.rsplit_once('/').unwrap_or(("", dir));
            forest.mkdir(wood.ino(parent), n(name), 0o755, me()).unwrap();
        }
        for file in ["a", "b", "one/in", "two/in", "one/deep/x", "two/deep/y"] {
            wood.put(file, format!("content of {file}").as_bytes());
        }
        for dataset in ["set", "set2"] {
            wood.plant(dataset, true);
            wood.put(&format!("{dataset}/in"), format!("content of {dataset}").as_bytes());
        }
        let mut lab = Lab {
            stored: BTreeMap::new(),
            attributes: BTreeMap::new(),
            older_link: vec![],
            older_note: vec![],
            older_note_of_dir: vec![],
            wood,
        };
        lab.links(&["short"], "older target");
        lab.note_stored(&["a", "one", "short"]);
        for path in ["a", "one"] {
            lab.set_plain(path, "user.note", b"older");
        }
        lab.attributes.insert("user.note", lab.only_attribute("a"));
        (lab.older_link, lab.older_note, lab.older_note_of_dir) =
            (lab.link("short"), lab.get("a", "user.note"), lab.get("one", "user.note"));
        forest.unlink(lab.wood.ino(""), n("short")).unwrap();
        lab.links(&["short", "short2"], "target");
        lab.links(&["long", "long2", "one/long"], &"t".repeat(LONG));
        for (path, group) in [("a", 6), ("b", 7), ("one", 5), ("two", 1)] {
            lab.set_plain(path, "user.note", format!("note of {path}").as_bytes());
            if path.len() == 1 {
                lab.set_plain(path, "security.capability", format!("rights of {path}").as_bytes());
                lab.set_plain(path, LISTS[0], &list(group));
            } else {
                lab.set_plain(path, LISTS[1], &list(group));
            }
        }
        lab.note_stored(&PATHS);
        for name in ATTRIBUTES {
            let ring = lab.wood.forest.at(lab.wood.ino("")).unwrap();
            let stored = lamassu_format::name::xattr_name(&ring.ring().seal_xattr_names(name.as_bytes())[0]);
            lab.attributes.insert(name, stored);
        }
        lab
    }

    fn links(&self, paths: &[&str], target: &str) {
        for path in paths {
            let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
            let target = format!("{target} of {path}");
            self.wood.forest.symlink(self.wood.ino(parent), n(name), target.as_bytes(), me()).unwrap();
        }
    }

    fn note_stored(&mut self, paths: &[&'static str]) {
        let vault = self.wood.forest.at(self.wood.ino("")).unwrap();
        for path in paths {
            self.stored.insert(path, self.wood.dir.path().join(vault.stored_path(n(path)).unwrap()));
        }
    }

    fn only_attribute(&self, path: &str) -> String {
        let mut names = [0; 4096];
        let len = rustix::fs::listxattr(self.at(path), &mut names[..]).unwrap();
        let mut names = names[..len].split(|b| *b == 0).map(|n| String::from_utf8_lossy(n).into_owned());
        names.find(|name| name.starts_with("user.lamassu.")).unwrap()
    }

    fn set_plain(&self, path: &str, name: &str, value: &[u8]) {
        self.wood.forest.set_xattr(self.wood.ino(path), n(name), value, SetXattr::Any).unwrap();
    }

    // --- what the store does

    fn at(&self, path: &str) -> &Path {
        &self.stored[path]
    }

    fn swap(&self, one: &str, other: &str) {
        renameat_with(CWD, self.at(one), CWD, self.at(other), RenameFlags::EXCHANGE).unwrap();
    }

    fn rename(&self, from: &str, to: &str) {
        std::fs::rename(self.at(from), self.at(to)).unwrap();
    }

    fn remove(&self, path: &str) {
        match self.at(path).is_dir() {
            true => std::fs::remove_dir_all(self.at(path)).unwrap(),
            false => std::fs::remove_file(self.at(path)).unwrap(),
        }
    }

    fn link(&self, path: &str) -> Vec<u8> {
        std::fs::read_link(self.at(path)).unwrap().into_os_string().as_bytes().to_vec()
    }

    fn put_link(&self, path: &str, text: &[u8]) {
        self.remove(path);
        symlink(std::ffi::OsStr::from_bytes(text), self.at(path)).unwrap();
    }

    fn get(&self, path: &str, name: &str) -> Vec<u8> {
        let mut value = vec![0; 65_536];
        let len = getxattr(self.at(path), self.attributes[name].as_str(), &mut value[..]).unwrap();
        value.truncate(len);
        value
    }

    fn set(&self, path: &str, name: &str, value: &[u8]) {
        setxattr(self.at(path), self.attributes[name].as_str(), value, XattrFlags::empty()).unwrap();
    }

    fn change(&self, path: &str, name: &str, how: fn(Vec<u8>) -> Vec<u8>) {
        self.set(path, name, &how(self.get(path, name)));
    }

    fn swap_attribute(&self, one: &str, other: &str, name: &str) {
        let values = [self.get(one, name), self.get(other, name)];
        self.set(one, name, &values[1]);
        self.set(other, name, &values[0]);
    }

    fn drop_attribute(&self, path: &str, name: &str) {
        rustix::fs::removexattr(self.at(path), self.attributes[name].as_str()).unwrap();
    }

    fn rename_attribute(&self, path: &str, name: &str) {
        let value = self.get(path, name);
        self.drop_attribute(path, name);
        let stored = &self.attributes[name];
        let at = lamassu_format::name::XATTR_PREFIX.len();
        let first = if stored[at..].starts_with('A') { 'B' } else { 'A' };
        let other = format!("{}{first}{}", &stored[..at], &stored[at + 1..]);
        setxattr(self.at(path), other.as_str(), &value, XattrFlags::empty()).unwrap();
    }

    fn mode(&self, path: &str, mode: u32) {
        std::fs::set_permissions(self.at(path), std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn node(&self, path: &str, mode: u32) {
        self.remove(path);
        let kind = rustix::fs::FileType::from_raw_mode(mode);
        let (bits, dev) = (rustix::fs::Mode::from_raw_mode(mode), rustix::fs::makedev(7, 0));
        rustix::fs::mknodat(CWD, self.at(path), kind, bits, dev).unwrap();
        self.mode(path, mode & 0o7777);
    }
}

/// All that a new mount of the store shows.
fn see(forest: &Forest) -> Seen {
    let mut seen = Seen::new();
    for path in PATHS {
        let mut facts = Facts::new();
        let resolved = forest.resolve(n(path));
        if matches!(resolved, Err(VaultError::Outdated { .. })) {
            facts.insert(ALL, None);
        }
        if let Ok(entry) = resolved {
            let (ino, attr) = (entry.attr.ino, entry.attr);
            let kind = match member_of(ino) == ROOT_MEMBER {
                true => format!("{:?}", attr.kind),
                false => "dataset".to_owned(),
            };
            facts.insert("type", Some(kind));
            if attr.kind != Kind::Symlink {
                facts.insert("mode", Some(format!("{:o}", attr.mode)));
            }
            facts.insert("owner", Some(format!("{}:{}", attr.uid, attr.gid)));
            match attr.kind {
                Kind::File => drop(facts.insert("content", content(forest, ino))),
                Kind::Symlink => {
                    let target = forest.readlink(ino).ok().map(|t| String::from_utf8(t).unwrap());
                    facts.insert("target", target);
                }
                Kind::Dir => drop(facts.insert("entries", entries(forest, ino))),
                _ => {}
            }
            for (name, what) in ATTRIBUTES.iter().zip(["note", "capability", "access list", "default list"]) {
                match forest.get_xattr(ino, n(name)) {
                    Ok(value) => drop(facts.insert(what, Some(format!("{value:?}")))),
                    Err(VaultError::Damaged { .. } | VaultError::Outdated { .. }) => drop(facts.insert(what, None)),
                    Err(_) => {}
                }
            }
        }
        seen.insert(path, facts);
    }
    seen
}

fn content(forest: &Forest, ino: Ino) -> Option<String> {
    let handle = forest.open_file(ino, common::RO).ok()?;
    let mut bytes = vec![0; 4096];
    let read = forest.read(handle, 0, &mut bytes);
    forest.release(handle).unwrap();
    bytes.truncate(read.ok()?);
    Some(String::from_utf8(bytes).unwrap())
}

/// Names, and contents of the files, so that directories with equal names differ.
fn entries(forest: &Forest, ino: Ino) -> Option<String> {
    let handle = forest.open_dir(ino).ok()?;
    let mut names = BTreeSet::new();
    let done = forest.read_dir(handle, 0, &mut |entry, _| {
        names.insert(entry.name.clone());
        true
    });
    forest.release_dir(handle).unwrap();
    done.ok()?;
    let mut text = String::new();
    for name in names.iter().filter(|name| *name != "." && *name != "..") {
        let below = forest.lookup(ino, name).ok()?;
        let inside = if below.attr.kind == Kind::File { content(forest, below.attr.ino)? } else { String::new() };
        write!(text, "{} {inside};", name.to_string_lossy()).unwrap();
    }
    Some(text)
}

/// The row's cells: what is found, and what shows.
fn cells(row: &Row, names: NameMode, is_anchored: bool) -> [String; 2] {
    let lab = Lab::new(names, is_anchored);
    let before = see(&lab.wood.again(false));
    assert!(before.iter().all(|(path, facts)| facts.contains_key("type") || path.is_empty()), "{before:#?}");
    (row.act)(&lab);
    eprintln!("{names:?} names, anchored {is_anchored}: {}", row.title); // what fails is the last of these
    let scrubbed = if is_anchored { lab.wood.scrubbed() } else { BTreeSet::new() };
    let forest = lab.wood.again(false);
    let after = see(&forest);
    let report = forest.at(ROOT).unwrap().check(&[], false, &Quiet).unwrap();
    let mut damaged = false;
    let mut shows = Vec::new();
    for (path, facts) in &after {
        let is_below = |top: &str| !top.is_empty() && (*path == top || path.starts_with(&format!("{top}/")));
        let is_above = [row.here, row.there].iter().any(|place| place.starts_with(&format!("{path}/")));
        let concerned = is_above || is_below(row.here) || is_below(row.there);
        assert!(concerned || *facts == before[path], "{path} changes as well: {facts:#?}, before {:#?}", before[path]);
        let is_error = |(what, fact): (&&str, &Option<String>)| {
            fact.is_none() && (*what == ALL || before[path].get(what).is_some_and(Option::is_some))
        };
        damaged |= facts.iter().any(is_error);
        let told = told(facts, &before[path], before.get(row.there));
        assert!(!is_anchored || told.iter().all(|what| !what.contains("**")), "{path}: {told:?}");
        if *path == row.here {
            shows = told;
        }
    }
    assert!(!damaged || report.is_damaged(), "a read finds damage and a check none: {after:#?}");
    let kinds: BTreeSet<_> = report.problems.iter().filter(|p| !p.harmless).map(|p| p.kind.clone()).collect();
    let mut says = if kinds.is_empty() { "–".to_owned() } else { words(kinds) };
    if !scrubbed.is_empty() {
        write!(says, "; scrub {}", words(scrubbed)).unwrap();
    }
    [says, if shows.is_empty() { "as before".to_owned() } else { shows.join(", ") }]
}

/// What has become of the facts of one path.
fn told(now: &Facts, before: &Facts, theirs: Option<&Facts>) -> Vec<String> {
    if now.is_empty() {
        return vec!["**gone**".into()];
    }
    if now.contains_key(ALL) {
        return vec!["error".into()];
    }
    let mut unreadable = Vec::new();
    let mut strange = Vec::new();
    let whats: BTreeSet<_> = now.keys().chain(before.keys()).copied().collect();
    for what in whats {
        let (new, old) = (now.get(what), before.get(what));
        let is = |text: &str| new.is_some_and(|fact| fact.as_ref().is_some_and(|fact| fact.contains(text)));
        let other = theirs.and_then(|theirs| theirs.get(what)).filter(|fact| fact.is_some());
        match (new, old) {
            (new, old) if new == old => {}
            (Some(None), _) => unreadable.push(format!("{what}: error")),
            // Another type has other facts.
            (None, _) if now["type"] != before["type"] => {}
            (None, _) => strange.push(format!("no {what}")),
            (Some(_), _) if other == new => strange.push(format!("the other's {what}")),
            (Some(_), _) if is("older") || is("[111, 108, 100, 101, 114]") => strange.push(format!("older {what}")),
            (Some(_), _) if what.ends_with("list") => strange.push(format!("{what} as the mode says")),
            (Some(Some(fact)), _) => strange.push(format!("{what} {fact}")),
        }
    }
    let names = ["access list", "capability", "default list", "note"].map(|name| format!("{name}: error"));
    if names.iter().all(|name| unreadable.contains(name)) {
        unreadable.retain(|what| !names.contains(what));
        unreadable.push("attributes: error".into());
    }
    let strange = strange.into_iter().map(|text| format!("**{text}**"));
    unreadable.into_iter().chain(strange).collect()
}

#[test]
fn the_documented_changes_are_what_is_found() {
    let is_root = rustix::process::geteuid().is_root();
    let documented = common::documented("entries");
    let mut found = String::from(
        "| what the store does | `check` | what shows | anchored: `check` and scrub | anchored: what shows |\n\
         |---|---|---|---|---|\n",
    );
    let mut rows = documented.lines().skip(2);
    for row in ROWS {
        let written = rows.next().unwrap_or_default();
        if row.root && !is_root {
            writeln!(found, "{written}").unwrap();
            continue;
        }
        let of = |is_anchored| cells(row, NameMode::Encrypted, is_anchored).join(" | ");
        writeln!(found, "| {} | {} | {} |", row.title, of(false), of(true)).unwrap();
    }
    common::is_documented("entries", &found);
}

/// In a vault with plain names the store knows where everything is, and there are no directory records.
#[test]
fn with_plain_names_an_anchor_tells_as_much() {
    let is_root = rustix::process::geteuid().is_root();
    for row in ROWS.iter().filter(|row| is_root || !row.root) {
        cells(row, NameMode::Plain, true);
    }
}
