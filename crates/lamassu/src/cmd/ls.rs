//! `lamassu ls`.

use crate::fault::{Context, Fault, Result};
use crate::keys::{self, KeyArg};
use crate::open;
use crate::output::{self, Ui, shown};
use crate::signals;
use crate::text;
use crate::tree::copy::{DEPTH_MAX, too_deep};
use lamassu_host::Error as HostError;
use lamassu_vault::{Attr, EntryRef, FileSystem, Forest, Kind, VaultError};
use serde::Serialize;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  lamassu ls /srv/store/vault
  lamassu ls -lR /srv/store/vault photos
  lamassu ls -R --json /srv/store/vault | jq -r '.entries[] | select(.size > 1e9) | .path'";

/// Options of `ls`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    /// Show modes, links, owners, sizes and times (UTC)
    #[arg(short, long)]
    long: bool,
    /// List everything below directories, too
    #[arg(short = 'R', long)]
    recursive: bool,
    /// List directories themselves, not their content
    #[arg(short, long, conflicts_with = "recursive")]
    directory: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault
    dir: PathBuf,
    /// Plain paths in it [default: its root]
    paths: Vec<PathBuf>,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

#[derive(Serialize)]
struct Listing {
    entries: Vec<Item>,
}

#[derive(Serialize)]
struct Item {
    path: String,
    /// The bytes of a path that is not UTF-8, in hex: `path` then only resembles it.
    #[serde(skip_serializing_if = "Option::is_none")]
    path_bytes: Option<String>,
    kind: &'static str,
    mode: String,
    links: u64,
    uid: u32,
    gid: u32,
    size: u64,
    stored_bytes: u64,
    mtime: i64,
    mtime_nanos: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    #[serde(skip)]
    plain: PathBuf,
    #[serde(skip)]
    attr: Attr,
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    let vault = open::forest(ui, &args.dir, &args.key, true)?;
    let root = [PathBuf::new()];
    let paths = if args.paths.is_empty() { &root[..] } else { &args.paths };
    let mut walk = Walk {
        ui,
        vault: &vault,
        recursive: args.recursive,
        items: Vec::new(),
        long: args.long,
        json: args.json,
        failed: 0,
    };
    for path in paths {
        walk.start(path, args.directory)?;
    }
    let (failed, all) = (walk.failed, walk.items.len());
    if args.json {
        output::print_json(&Listing { entries: walk.items })?;
    } else {
        walk.print()?;
    }
    if failed == 0 { Ok(()) } else { Err(Fault::SomeFailed { failed, all }.into()) }
}

struct Walk<'a> {
    ui: &'a Ui,
    vault: &'a Forest,
    recursive: bool,
    long: bool,
    json: bool,
    items: Vec<Item>,
    /// Directories that were named as too deep; the rest was listed.
    failed: usize,
}

/// A directory under way.
struct Level<'a> {
    entry: EntryRef<&'a Forest>,
    path: PathBuf,
    /// Names still to be looked up; `None` until the directory was read.
    left: Option<std::vec::IntoIter<OsString>>,
}

/// What a directory turned out to hold next.
enum Step<'a> {
    Entry,
    Below(Level<'a>),
    End,
}

impl<'a> Walk<'a> {
    fn start(&mut self, path: &Path, directory: bool) -> Result<()> {
        let named = || format!("vault:{}", path.display());
        let entry = EntryRef::new(self.vault, self.vault.resolve(path.as_os_str()).with_context(named)?);
        let attr = *entry.attr();
        let plain = path.strip_prefix("/").unwrap_or(path);
        let level = Level { entry, path: plain.into(), left: None };
        match attr.kind {
            Kind::Dir if !directory => self.below(level),
            _ => self.add(plain.into(), attr),
        }
    }

    /// Depth first. Without recursion: the depth of a tree is its maker's choice.
    fn below(&mut self, start: Level<'a>) -> Result<()> {
        let mut levels = vec![start];
        loop {
            let depth = levels.len();
            let Some(level) = levels.last_mut() else { return Ok(()) };
            match self.step(level, depth) {
                Ok(Step::Entry) => {}
                Ok(Step::Below(child)) => levels.push(child),
                Ok(Step::End) => drop(levels.pop()),
                // A dataset without its key is listed as what it is, a directory.
                Err(e) if depth > 1 && matches!(e.fault(), Fault::Host(HostError::Vault(VaultError::KeyNotLoaded))) => {
                    self.ui.warn(format_args!(
                        "{}: the key of this dataset is not loaded",
                        text::printable(&level.path.to_string_lossy())
                    ));
                    levels.pop();
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Lists the next entry of a directory, which lies at `depth`, the first one at 1.
    fn step(&mut self, level: &mut Level<'a>, depth: usize) -> Result<Step<'a>> {
        let left = match level.left.take() {
            Some(left) => left,
            None => {
                signals::check()?;
                let mut names = Vec::new();
                let listed = level.entry.each_name(&mut |name, _| names.push(name.to_os_string()));
                listed.with_context(|| format!("vault:{}", level.path.display()))?;
                names.sort();
                names.into_iter()
            }
        };
        let left = level.left.insert(left);
        let Some(name) = left.next() else { return Ok(Step::End) };
        let plain = level.path.join(&name);
        let entry = level.entry.child(&name).with_context(|| format!("vault:{}", plain.display()))?;
        let attr = *entry.attr();
        let child = Level { entry, path: plain.clone(), left: None };
        self.add(plain, attr)?;
        if attr.kind != Kind::Dir || !self.recursive {
            return Ok(Step::Entry);
        }
        // The paths of one chain of directories need memory with the square of its length.
        if depth > DEPTH_MAX {
            self.failed += 1;
            output::say_error(&too_deep(&format!("vault:{}", child.path.display())));
            return Ok(Step::Entry);
        }
        Ok(Step::Below(child))
    }

    fn add(&mut self, plain: PathBuf, attr: Attr) -> Result<()> {
        let wanted = attr.kind == Kind::Symlink && (self.json || self.long);
        let target = match wanted {
            true => {
                let target = self.vault.readlink(attr.ino).with_context(|| format!("vault:{}", plain.display()))?;
                Some(shown(&OsString::from_vec(target)))
            }
            false => None,
        };
        let is_utf8 = plain.to_str().is_some();
        self.items.push(Item {
            path: plain.to_string_lossy().into_owned(),
            path_bytes: (!is_utf8).then(|| text::hex(plain.as_os_str().as_bytes())),
            kind: kind_name(attr.kind),
            mode: format!("{:04o}", attr.mode),
            links: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            size: attr.size,
            stored_bytes: attr.blocks * 512,
            mtime: attr.mtime.seconds,
            mtime_nanos: attr.mtime.nanos,
            target,
            plain,
            attr,
        });
        Ok(())
    }

    fn print(&self) -> Result<()> {
        let size_width = self.items.iter().map(|i| i.size.to_string().len()).max().unwrap_or(1);
        let mut out = String::new();
        for item in &self.items {
            if self.long {
                let _ = write!(
                    out,
                    "{} {:>3} {:>5} {:>5} {:>size_width$} {} ",
                    text::mode(kind_letter(item.attr.kind), item.attr.mode),
                    item.links,
                    item.uid,
                    item.gid,
                    item.size,
                    text::time(item.mtime)
                );
            }
            out.push_str(&shown(item.plain.as_os_str()));
            if let Some(target) = &item.target {
                let _ = write!(out, " -> {target}");
            }
            out.push('\n');
        }
        output::print_bytes(out.as_bytes())
    }
}

/// A stable word.
pub fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::File => "file",
        Kind::Dir => "directory",
        Kind::Symlink => "symlink",
        Kind::Fifo => "fifo",
        Kind::Socket => "socket",
        Kind::CharDevice => "char-device",
        Kind::BlockDevice => "block-device",
    }
}

fn kind_letter(kind: Kind) -> char {
    match kind {
        Kind::File => '-',
        Kind::Dir => 'd',
        Kind::Symlink => 'l',
        Kind::Fifo => 'p',
        Kind::Socket => 's',
        Kind::CharDevice => 'c',
        Kind::BlockDevice => 'b',
    }
}
