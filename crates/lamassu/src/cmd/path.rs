//! `lamassu path`: from plain paths to paths in the store, and back.

use crate::fault::{Context, Fault, Result};
use crate::keys::{self, KeyArg};
use crate::open;
use crate::output::{self, Ui};
use lamassu_vault::Forest;
use serde::Serialize;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  lamassu path /srv/store/vault notes/today.txt                     prints e.g. Zk3…/9aQ…
  lamassu path --reverse /srv/store/vault /srv/store/vault/Zk3…     prints e.g. notes
  rsync -a backup:\"$(lamassu path -a /srv/store/vault notes/today.txt)\" …";

/// Options of `path`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, after_long_help = help())]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    /// Translate from paths in the store (relative to DIR, or beginning with it) to plain paths
    #[arg(short, long)]
    reverse: bool,
    /// Prefix paths in the store with DIR
    #[arg(short, long, conflicts_with = "reverse")]
    absolute: bool,
    /// End each path with a zero byte instead of a line end
    #[arg(short = '0', long, conflicts_with = "json")]
    null: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault
    dir: PathBuf,
    /// Paths to translate; `--` precedes one that begins with `-`
    #[arg(required = true, value_name = "NAME")]
    names: Vec<PathBuf>,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

#[derive(Serialize)]
struct Translated {
    paths: Vec<Pair>,
}

#[derive(Serialize)]
struct Pair {
    plain: String,
    stored: String,
    #[serde(skip)]
    answer: PathBuf,
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    let vault = open::forest(&ui.without_anchor(), &args.dir, &args.key, true)?;
    let pairs: Result<Vec<Pair>> = args.names.iter().map(|name| translate(&vault, &args, name)).collect();
    let paths = pairs?;
    if args.json {
        return output::print_json(&Translated { paths });
    }
    let end = if args.null { b"\0" } else { b"\n" };
    for pair in &paths {
        output::print_bytes(&[pair.answer.as_os_str().as_bytes(), end].concat())?;
    }
    Ok(())
}

fn translate(vault: &Forest, args: &Args, name: &Path) -> Result<Pair> {
    let lossy = |p: &Path| p.to_string_lossy().into_owned();
    if args.reverse {
        let stored = inside(&args.dir, name)?;
        let plain = vault.plain_path(&stored).with_context(|| name.display().to_string())?;
        return Ok(Pair { plain: lossy(&plain), stored: lossy(&stored), answer: plain });
    }
    let stored = vault.stored_path(name.as_os_str()).with_context(|| format!("vault:{}", name.display()))?;
    let answer = if args.absolute { args.dir.join(&stored) } else { no_option(&stored) };
    Ok(Pair { plain: lossy(name.strip_prefix("/").unwrap_or(name)), stored: lossy(&stored), answer })
}

/// The path so that no program takes it for an option: one in 64 encrypted names begins with `-`.
fn no_option(stored: &Path) -> PathBuf {
    match stored.as_os_str().as_bytes() {
        [b'-', ..] => Path::new(".").join(stored),
        _ => stored.into(),
    }
}

/// A path in the store, relative to the vault's directory.
fn inside(dir: &Path, stored: &Path) -> Result<PathBuf, Fault> {
    if let Ok(rest) = stored.strip_prefix(dir) {
        return Ok(rest.into());
    }
    if stored.is_relative() {
        return Ok(stored.strip_prefix(".").unwrap_or(stored).into());
    }
    let outside = || Fault::PathOutside { path: stored.into(), dir: dir.into() };
    // The last component may be a link of the store: only what is above it is resolved.
    let (parent, name) = (stored.parent().ok_or_else(outside)?, stored.file_name().ok_or_else(outside)?);
    let parent = parent.canonicalize().map_err(|_| outside())?;
    let dir = dir.canonicalize().map_err(|_| outside())?;
    parent.strip_prefix(&dir).map(|rest| rest.join(name)).map_err(|_| outside())
}
