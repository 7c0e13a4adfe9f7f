//! What a store can do to the parts of an anchored vault that are not its tree: header, history, the root's
//! permissions, sessions, tree records, datasets; and to all of it at once. A table of `docs/damage.md`; it must equal
//! what is found here. `LAMASSU_WRITE_DOCS=1 cargo test -p lamassu --test cli records` writes it.
//!
//! In every case what a mount shows is the newest, or an error.

use crate::support::{Bench, Ran, flip};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What each file holds in the end: three pages of blocks, so that the tree over them has two levels.
const FILES: [(&str, u8); 3] = [("f", 3), ("g", 4), ("set/in", 5)];
const LEN: usize = 1_200_000;
/// The mode of the root in the end.
const MODE: u32 = 0o751;

struct Row {
    title: &'static str,
    act: fn(&Lab),
}

const fn row(title: &'static str, act: fn(&Lab)) -> Row {
    Row { title, act }
}

const HEADER: &str = "lamassu.vault";
const HISTORY: &str = "lamassu.history";
const ROOT: &str = "lamassu.root";
const SESSIONS: &str = "lamassu.sessions/record";

const ROWS: &[Row] = &[
    row("vault header: a bit flipped", |lab| flip_text(&lab.at(HEADER), "\"one\"")),
    row("…, an older one put back", |lab| lab.older(HEADER)),
    row("…, with the history of then", |lab| [HEADER, HISTORY].iter().for_each(|name| lab.older(name))),
    row("…, another vault's", |lab| copy(&lab.b.path("other").join(HEADER), &lab.at(HEADER))),
    row("…, deleted", |lab| remove(&lab.at(HEADER))),
    row("history: a bit flipped", |lab| flip(&lab.at(HISTORY), 100)),
    row("…, its last entry cut", |lab| cut(&lab.at(HISTORY), 10)),
    row("…, an older one put back", |lab| lab.older(HISTORY)),
    row("…, deleted", |lab| remove(&lab.at(HISTORY))),
    row("record of the root's permissions: a bit flipped", |lab| flip_link(&lab.at(ROOT))),
    row("…, an older one put back", |lab| lab.older(ROOT)),
    row("…, deleted", |lab| remove(&lab.at(ROOT))),
    row("record of sessions: a bit flipped", |lab| flip_link(&lab.at(SESSIONS))),
    row("…, an older one put back", |lab| lab.older(SESSIONS)),
    row("…, deleted", |lab| remove(&lab.at(SESSIONS))),
    row("tree records: a bit flipped in each", |lab| {
        lab.trees().iter().for_each(|file| change(file, |bytes| bytes.iter_mut().step_by(32).for_each(|b| *b ^= 1)));
    }),
    row("…, zeros written", |lab| lab.trees().iter().for_each(|file| change(file, |bytes| bytes.fill(0)))),
    row("…, older ones put back", |lab| lab.older("lamassu.tree")),
    row("…, of two files exchanged", |lab| {
        let [one, other] = &lab.trees()[..] else { panic!("{:?}", lab.trees()) };
        exchange(one, other);
    }),
    row("…, deleted", |lab| remove(&lab.at("lamassu.tree"))),
    row("every metadata page of a file zeroed", |lab| {
        change(&lab.at(&lab.f), |bytes| {
            bytes.chunks_mut(4096).step_by(117).for_each(|page| page.fill(0));
        })
    }),
    row("the file emptied", |lab| change(&lab.at(&lab.f), |bytes| bytes.truncate(0))),
    row("a dataset's header: an older one put back", |lab| lab.older(&format!("{}/{HEADER}", lab.set))),
    row("…, that of the vault around it", |lab| copy(&lab.at(HEADER), &lab.at(&lab.set).join(HEADER))),
    row("…, deleted", |lab| remove(&lab.at(&lab.set).join(HEADER))),
    row("a dataset's history: an older one put back", |lab| lab.older(&format!("{}/{HISTORY}", lab.set))),
    row("a dataset's record of sessions: an older one put back", |lab| lab.older(&format!("{}/{SESSIONS}", lab.set))),
    row("everything in a dataset put back to an earlier moment", |lab| lab.older(&lab.set)),
    row("a dataset deleted", |lab| remove(&lab.at(&lab.set))),
    row("everything put back to an earlier moment", |lab| lab.older("")),
    row("…, but for header and history", |lab| {
        lab.older("");
        [HEADER, HISTORY].iter().for_each(|name| copy(&lab.newest.join(name), &lab.at(name)));
    }),
    row("…, and these of the datasets", |lab| {
        lab.older("");
        for name in [HEADER, HISTORY].iter().flat_map(|name| [(*name).to_owned(), format!("{}/{name}", lab.set)]) {
            copy(&lab.newest.join(&name), &lab.at(&name));
        }
    }),
];

fn content(of: u8) -> Vec<u8> {
    crate::support::noise(LEN, of.into())
}

fn run(command: &str, args: &[&Path]) {
    assert!(Command::new(command).args(args).status().unwrap().success(), "{command} {args:?}");
}

fn remove(path: &Path) {
    run("rm", &[Path::new("-rf"), path]);
}

/// With all that is below it, as it is.
fn copy(from: &Path, to: &Path) {
    remove(to);
    run("cp", &[Path::new("-a"), from, to]);
}

fn exchange(one: &Path, other: &Path) {
    let flags = rustix::fs::RenameFlags::EXCHANGE;
    rustix::fs::renameat_with(rustix::fs::CWD, one, rustix::fs::CWD, other, flags).unwrap();
}

/// In its place: it stays the same inode.
fn change(path: &Path, how: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    how(&mut bytes);
    fs::write(path, bytes).unwrap();
}

fn cut(path: &Path, bytes: usize) {
    change(path, |all| all.truncate(all.len() - bytes));
}

/// Behind some text.
fn flip_text(path: &Path, text: &str) {
    change(path, |bytes| {
        let at = bytes.windows(text.len()).position(|window| window == text.as_bytes()).unwrap();
        bytes[at + 1] ^= 1;
    });
}

fn flip_link(path: &Path) {
    let mut text = fs::read_link(path).unwrap().into_os_string().into_string().unwrap().into_bytes();
    let half = text.len() / 2;
    text[half] = if text[half] == b'A' { b'B' } else { b'A' };
    fs::remove_file(path).unwrap();
    symlink(String::from_utf8(text).unwrap(), path).unwrap();
}

/// A vault with a dataset, as it is and as it was.
struct Lab {
    b: Bench,
    older: PathBuf,
    newest: PathBuf,
    /// Where these lie in the store.
    f: String,
    set: String,
}

impl Lab {
    fn new() -> Lab {
        let b = Bench::new();
        b.run("init other").ok();
        b.run("init -q -l one --tree-degree 2 v").ok();
        b.dir("m");
        b.run("mount v m").ok();
        b.run("dataset create m/set").ok();
        FILES.iter().for_each(|(path, of)| fs::write(b.path("m").join(path), content(of + 10)).unwrap());
        b.unmount("m");
        let set = b.stored("v", "set");
        let (older, newest) = (b.path("older"), b.path("newest"));
        copy(&b.path("v"), &older);
        let (second, third) = (b.key("second"), b.key("third"));
        b.run(&format!("key add -n {second} v")).ok();
        b.run("mount v m").ok();
        b.run(&format!("key add -n {third} m/set")).ok();
        FILES.iter().for_each(|(path, of)| fs::write(b.path("m").join(path), content(*of)).unwrap());
        fs::set_permissions(b.path("m"), fs::Permissions::from_mode(MODE)).unwrap();
        b.unmount("m");
        b.run("check v").ok();
        b.run("scrub v").ok();
        copy(&b.path("v"), &newest);
        copy(&b.path("state"), &b.path("state.newest"));
        let f = b.stored("v", "f").strip_prefix(b.path("v")).unwrap().to_str().unwrap().to_owned();
        let set = set.strip_prefix(b.path("v")).unwrap().to_str().unwrap().to_owned();
        Lab { b, older, newest, f, set }
    }

    fn at(&self, stored: &str) -> PathBuf {
        self.b.path("v").join(stored)
    }

    /// Puts something back as it was.
    fn older(&self, stored: &str) {
        copy(
            &self.older.join(stored).components().collect::<PathBuf>(),
            &self.at(stored).components().collect::<PathBuf>(),
        );
    }

    /// Files of tree records of the vault itself.
    fn trees(&self) -> Vec<PathBuf> {
        let mut dirs = vec![self.at("lamassu.tree")];
        let mut files = Vec::new();
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { dirs.push(path) } else { files.push(path) }
            }
        }
        files.sort();
        files
    }
}

/// The kinds that a report names, or the code of a refusal.
fn found(ran: &Ran, list: &str) -> String {
    let report: Option<Value> = serde_json::from_slice(&ran.out).ok();
    let Some(report) = report else { return format!("refused ({})", ran.code) };
    let of = report[list].as_array().unwrap().iter().filter(|one| one["harmless"] != true);
    let kinds: BTreeSet<_> = of.map(|one| format!("`{}`", one["kind"].as_str().unwrap())).collect();
    match (kinds.is_empty(), ran.code) {
        (true, 0) => "–".to_owned(),
        (true, code) => format!("code {code}"),
        (false, _) => kinds.into_iter().collect::<Vec<_>>().join(", "),
    }
}

/// What a mount shows that is not as it was left. Nothing but errors.
fn shown(lab: &Lab) -> String {
    let b = &lab.b;
    let mounted = b.run("mount v m");
    if mounted.code != 0 {
        return format!("refused ({})", mounted.code);
    }
    let mut told = Vec::new();
    for (path, of) in FILES {
        match fs::read(b.path("m").join(path)) {
            Ok(bytes) => assert!(bytes == content(of), "{path} reads as what it is not"),
            Err(error) => told.push(format!("`{path}`: {}", named(&error))),
        }
    }
    let mode = b.path("m").metadata().unwrap().permissions().mode() & 0o7777;
    if mode != MODE {
        assert_eq!(mode, 0o700, "the strictest");
        told.push("mode of the root: 700".to_owned());
    }
    if let Err(error) = fs::write(b.path("m/new"), b"x") {
        told.push(format!("making a file: {}", named(&error)));
    }
    b.unmount("m");
    if told.is_empty() { "as before".to_owned() } else { told.join(", ") }
}

fn named(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EIO) => "error",
        Some(libc::ENOKEY) => "no key",
        _ => panic!("{error}"),
    }
}

#[test]
fn what_a_store_does_to_records_is_found() {
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: takes /dev/fuse");
        return;
    }
    let lab = Lab::new();
    let mut table = String::from("| what the store does | scrub | `check` | what a mount shows |\n|---|---|---|---|\n");
    for Row { title, act } in ROWS {
        eprintln!("{title}"); // what fails is the last of these
        copy(&lab.newest, &lab.b.path("v"));
        copy(&lab.b.path("state.newest"), &lab.b.path("state"));
        act(&lab);
        let scrubbed = found(&lab.b.run("scrub --json v"), "findings");
        let checked = found(&lab.b.run("check --json v"), "problems");
        writeln!(table, "| {title} | {scrubbed} | {checked} | {} |", shown(&lab)).unwrap();
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/damage.md");
    let text = fs::read_to_string(&page).unwrap();
    let (before, rest) = text.split_once("<!-- records -->\n").unwrap();
    let (documented, after) = rest.split_once("<!-- end of records -->\n").unwrap();
    if std::env::var_os("LAMASSU_WRITE_DOCS").is_some() {
        fs::write(&page, format!("{before}<!-- records -->\n{table}<!-- end of records -->\n{after}")).unwrap();
        return;
    }
    assert_eq!(documented, table, "LAMASSU_WRITE_DOCS=1 writes it anew");
}
