//! `lamassu profile`: how the blocks of files are protected, by file and directory.

use crate::fault::{Context, Result};
use crate::job::{Words, Worker};
use crate::keys::{self, KeyArg};
use crate::output::{self, Ui, shown};
use crate::{served, text};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use lamassu_format::profile::{Choice, KeyKind, Protection};
use lamassu_format::{Cipher, Hash};
use lamassu_host::control::protocol::{ChosenProfile, ProfileStarted, Request, ShownProfile};
use lamassu_vault::forest::ROOT_MEMBER;
use serde::Serialize;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const SET_EXAMPLES: &str = "\
Examples:
  lamassu profile set --block-keys random /srv/store/vault letters
      blocks of new files in letters are equal to no other file's
  lamassu profile set -R --protect integrity /srv/store/vault mirror
      existing files, too: stored plain, verified on each read
  lamassu profile set --cipher aes-128 --hash blake3 /srv/store/vault video
      new files in video use another cipher and hash than the suite's
  lamassu profile set --protect both ~/private mirror/notes.txt
      in a mount, while it is in use
The command can be stopped at any time; run it again to continue. docs/profiles.md helps to choose.";

const SHOW_EXAMPLES: &str = "\
Examples:
  lamassu profile show /srv/store/vault letters mirror/notes.txt
  lamassu profile show --json /srv/store/vault mirror | jq -r '.profiles[].protect'";

/// What to do with profiles.
#[derive(clap::Subcommand, Debug)]
pub enum ProfileCommand {
    /// Choose how files are protected: new files of a directory, or an existing file
    Set(SetArgs),
    /// Show how files are protected, or new files of directories
    Show(ShowArgs),
}

/// Options of `profile set`.
#[derive(clap::Args, Debug)]
#[command(after_help = SET_EXAMPLES, after_long_help = help(SET_EXAMPLES))]
pub struct SetArgs {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    wanted: Wanted,
    /// Change all existing files and directories below directories, too
    #[arg(short = 'R', long)]
    recursive: bool,
    /// The vault, or where it is mounted
    dir: PathBuf,
    /// Plain paths in the vault
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

/// The parts of the profile to change; the others stay.
#[derive(clap::Args, Debug)]
#[group(required = true, multiple = true)]
struct Wanted {
    /// both: encrypted, and verified on each read; encrypt: encrypted, not verified; integrity: stored plain, verified;
    /// none: stored plain, not verified
    #[arg(long, value_name = "WHAT", value_parser = protections())]
    protect: Option<Protection>,
    /// convergent: equal blocks are equal within the vault's domain; random: only within the file
    #[arg(long, value_name = "KIND", value_parser = key_kinds())]
    block_keys: Option<KeyKind>,
    /// Cipher of blocks: aes-256 or aes-128 in the suites aes and blake3, chacha20 in the suite chacha
    #[arg(long, value_name = "CIPHER", value_parser = ciphers())]
    cipher: Option<Cipher>,
    /// Hash of blocks; the suite paper allows only sha-256
    #[arg(long, value_name = "HASH", value_parser = hashes())]
    hash: Option<Hash>,
}

/// Options of `profile show`.
#[derive(clap::Args, Debug)]
#[command(after_help = SHOW_EXAMPLES, after_long_help = help(SHOW_EXAMPLES))]
pub struct ShowArgs {
    #[command(flatten)]
    key: KeyArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault, or where it is mounted
    dir: PathBuf,
    /// Plain paths in the vault [default: its root]
    paths: Vec<PathBuf>,
}

fn help(examples: &str) -> String {
    format!("{examples}\n\n{}", keys::HELP)
}

/// A protection by name, for clap.
pub fn protections() -> impl TypedValueParser<Value = Protection> {
    PossibleValuesParser::new(Protection::ALL.map(Protection::name))
        .map(|name| Protection::from_name(&name).expect("clap lets only these names through"))
}

/// A kind of key by name, for clap.
pub fn key_kinds() -> impl TypedValueParser<Value = KeyKind> {
    PossibleValuesParser::new(KeyKind::ALL.map(KeyKind::name))
        .map(|name| KeyKind::from_name(&name).expect("clap lets only these names through"))
}

fn ciphers() -> impl TypedValueParser<Value = Cipher> {
    PossibleValuesParser::new(Cipher::ALL.map(Cipher::name))
        .map(|name| Cipher::from_name(&name).expect("clap lets only these names through"))
}

fn hashes() -> impl TypedValueParser<Value = Hash> {
    PossibleValuesParser::new(Hash::ALL.map(Hash::name))
        .map(|name| Hash::from_name(&name).expect("clap lets only these names through"))
}

pub fn run(ui: &Ui, command: ProfileCommand) -> Result<()> {
    match command {
        ProfileCommand::Set(args) => set(ui, &args),
        ProfileCommand::Show(args) => show(ui, &args),
    }
}

impl Wanted {
    fn choice(&self) -> Choice {
        Choice { protection: self.protect, key: self.block_keys, cipher: self.cipher, hash: self.hash }
    }
}

fn named(path: &Path) -> String {
    format!("vault:{}", text::printable(&path.to_string_lossy()))
}

fn hex(path: &Path) -> String {
    text::hex(path.as_os_str().as_bytes())
}

const WORDS: Words = Words { done: "rewritten", failed: "its profile is not changed" };

fn set(ui: &Ui, args: &SetArgs) -> Result<()> {
    let worker = Worker::of(ui, &args.dir, &args.key, false)?;
    let done = args.paths.iter().try_for_each(|path| set_one(ui, &worker, args, path).with_context(|| named(path)));
    let closed = worker.close();
    done.and(closed)
}

fn set_one(ui: &Ui, worker: &Worker, args: &SetArgs, path: &Path) -> Result<()> {
    let (choice, below) = (args.wanted.choice(), args.recursive);
    let ProfileStarted { job, profile } = match worker {
        Worker::Daemon(mountpoint) => {
            let choice = ChosenProfile::of(choice);
            served::ask(mountpoint, &Request::ProfileStart { path: hex(path), choice, below })?
        }
        Worker::Here(here) => here.set_profile(ROOT_MEMBER, path, choice, below)?,
    };
    let (done, ended) = worker.watch(ui, job, WORDS)?;
    ended?;
    ui.note(format_args!("{}: {profile}", named(path)));
    ui.detail(format_args!(
        "{} directories, {} pages and {} blocks were written",
        done.records, done.pages, done.blocks
    ));
    Ok(())
}

#[derive(Serialize)]
struct Profiles {
    profiles: Vec<Row>,
}

/// The profile of a file, or of a directory and of new files in it.
#[derive(Serialize)]
struct Row {
    path: String,
    /// hex; where the path is not UTF-8
    #[serde(skip_serializing_if = "Option::is_none")]
    path_bytes: Option<String>,
    #[serde(flatten)]
    profile: ShownProfile,
}

fn profile_at(worker: &Worker, path: &Path) -> Result<ShownProfile> {
    match worker {
        Worker::Daemon(mountpoint) => served::ask(mountpoint, &Request::Profile { path: hex(path) }),
        Worker::Here(here) => Ok(here.profile(ROOT_MEMBER, path)?),
    }
}

fn show(ui: &Ui, args: &ShowArgs) -> Result<()> {
    let worker = Worker::of(ui, &args.dir, &args.key, true)?;
    let root = [PathBuf::new()];
    let paths = if args.paths.is_empty() { &root[..] } else { &args.paths };
    let mut profiles = Vec::new();
    for path in paths {
        let profile = profile_at(&worker, path).with_context(|| named(path))?;
        let path_bytes = path.to_str().is_none().then(|| hex(path));
        profiles.push(Row { path: path.to_string_lossy().into_owned(), path_bytes, profile });
    }
    if args.json {
        return output::print_json(&Profiles { profiles });
    }
    let lines = profiles.iter().zip(paths).map(|(Row { profile, .. }, path)| {
        format!(
            "{:<10} {:<11} {:<9} {:<8} /{}{}",
            profile.protect,
            profile.block_keys.as_deref().unwrap_or("-"),
            profile.cipher.as_deref().unwrap_or("-"),
            profile.hash,
            shown(path.strip_prefix("/").unwrap_or(path).as_os_str()),
            if profile.changing { "  (being changed)" } else { "" }
        )
    });
    let head = "protect    block keys  cipher    hash     path".to_owned();
    output::print(std::iter::once(head).chain(lines).collect::<Vec<_>>().join("\n"))
}
